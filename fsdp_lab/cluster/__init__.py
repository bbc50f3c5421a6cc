"""The ranks as ipyparallel engines: started or taken, placed on devices, joined, called, supervised and ended.

The only package that uses ipyparallel. Read cluster.py first. Only the failures of ranks are here, because the guardian is a
module of this package too and has to start in a few milliseconds. A value that ranks refuse is no failure of theirs, but the
user's: a `fsdp_lab.base.errors.FieldError`."""

import time
from collections.abc import Mapping

from fsdp_lab.base.errors import SentenceError
from fsdp_lab.base.hang import Hang


def clock(unix_s: float) -> str:
    """Local wall time, as in a log."""
    return time.strftime("%H:%M:%S", time.localtime(unix_s))


class ClusterError(SentenceError, RuntimeError):
    """Any failure of the cluster. `details` may hold more lines, such as a rank's stack."""

    details: str = ""

    @property
    def sentence(self) -> str:
        """The message without the details."""
        return str(self).partition("\n")[0]


class StartError(ClusterError):
    """The engines could not be started. `log` holds the last lines of what failed."""

    def __init__(self, sentence: str, log: str = "") -> None:
        super().__init__(sentence + (f"\nIts last lines:\n{log}" if log else ""))
        self.log = self.details = log


class RankLost(ClusterError):
    """A rank's process is gone.

    Attributes:
        reason: how it ended, as far as known. log: the last lines that its engine wrote, if it is ours.
        doing: the call it worked on, or "nothing". unix_s: when the kernel noticed."""

    def __init__(
        self, *, rank: int, engine: int, pid: int, host: str, reason: str, doing: str = "", unix_s: float, log: str = ""
    ) -> None:
        self.rank, self.engine, self.pid, self.host = rank, engine, pid, host
        self.reason, self.doing, self.unix_s, self.log = reason, doing or "nothing", unix_s, log
        gone = f"its process {pid} on {host} {reason} at {clock(unix_s)}"
        super().__init__(f"rank {rank} is gone: {gone}" + (f", during {doing}" if doing else ""))


class RankStuck(ClusterError):
    """A rank did not answer an interrupt."""

    def __init__(self, *, rank: int, what: str, after_s: float, outcome: str) -> None:
        self.rank, self.what, self.after_s = rank, what, after_s
        super().__init__(f"rank {rank} did not answer an interrupt of {what} within {after_s:.0f} s: {outcome}")


class RankHung(ClusterError):
    """A collective did not finish within the limit (`hang_s`).

    Attributes:
        ranks: those that did not join it, or issued another collective; () if the link is stalled. rank: the first of them.
        collective, unit, group: what the others wait for; the unit whose parameters it moves; its group.
        waiting: ranks that wait in it. after_s: for how long. unix_s: when the kernel found out.
        stack: of `ranks`, as text, if it could be read."""

    def __init__(self, hang: Hang) -> None:
        self.ranks, self.absent, self.waiting, self.after_s = hang.ranks, hang.absent, hang.waiting, hang.waited_s
        self.rank = hang.ranks[0] if hang.ranks else None
        self.collective, self.unit, self.group = hang.collective.label, hang.collective.unit, hang.collective.group
        self.stack = self.details = hang.text
        self.unix_s, self.cause = time.time(), hang.cause
        super().__init__(hang.sentence + (f"\n{hang.text}" if hang.text else ""))


class RankError(ClusterError):
    """A rank raised.

    Attributes:
        rank: the first that raised. kind: the name of its exception. reason: its message. trace: its traceback, as text.
        what: the call. others: what other ranks raised, by rank."""

    def __init__(
        self,
        *,
        rank: int,
        what: str,
        kind: str,
        reason: str,
        trace: str = "",
        unix_s: float,
        others: Mapping[int, str] = {},
    ) -> None:
        self.rank, self.what, self.kind, self.reason, self.trace = rank, what, kind, reason, trace
        self.unix_s, self.others, self.details = unix_s, dict(others), trace
        super().__init__(f"rank {rank} failed in {what} at {clock(unix_s)}: {kind}: {reason}")


class Interrupted(ClusterError):
    """The call was interrupted before it had a result."""
