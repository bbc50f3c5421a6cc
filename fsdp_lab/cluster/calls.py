"""One call on many ranks: sent at once, waited for with a limit, and over for all as soon as it is over for one.

A collective joins its ranks: when one dies or raises, the others wait in it until its timeout. So a failure frees them, in
steps: an interrupt (SIGINT, which the rank's wire turns into an abort), a second one with a ping beside it, and then, for
engines that are ours, the end of the process. The caller gets one exception, of the rank that failed first.

If a rank hangs (supervisor.py), the grace period has already elapsed: it is interrupted once with all others, then ended.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from fsdp_lab.cluster.errors import Interrupted, RankError, RankHung, RankLost, RankStuck
from fsdp_lab.core.errors import ArgumentError, SpecError

LOST_S = 0.4  # survivors of a lost rank settle by themselves; the error does not wait for all of that
HUNG_S = 0.3  # for a rank that hangs to answer an interrupt after all
GRACE_S = 0.3  # ranks that fail by themselves, with the same error, need no interrupt
RUNG_S = 2.5  # between one step of the ladder and the next
DEATH_NOTICE_S = 2.0  # its neighbors' sockets notice a lost peer before the kernel does


class Sink(dict[str, Any]):
    """Replaces ipyparallel's `metadata[msg_id]["data"]`, which keeps only the last value per key.

    `update` is called on the client's IO thread for every published message.
    """

    def __init__(self, take: Callable[[Mapping[str, Any]], None]) -> None:
        super().__init__()
        self._take = take

    def update(self, *args: Any, **kwargs: Any) -> None:
        for data in args:
            self._take(data)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How the call ended on one rank: a value, an interrupt, or an error."""

    value: Any = None
    interrupted: bool = False
    error: Mapping[str, Any] | None = None  # as `remote.described` wrote it
    lost: RankLost | None = None
    stuck: RankStuck | None = None

    @property
    def failed(self) -> bool:
        return bool(self.error or self.lost or self.stuck)


class Ladder(Protocol):
    """What a call needs of its cluster to free ranks."""

    def signal(self, ranks: Sequence[int]) -> None: ...

    def ping(self, rank: int, answered: Callable[[], None]) -> None: ...

    def end_rank(self, rank: int, fate: str) -> bool: ...

    def may_be_dying(self, ranks: Sequence[int]) -> bool: ...


class Call:
    """One call. Waited for by one thread; outcomes arrive from others."""

    def __init__(self, what: str, ranks: Sequence[int], ladder: Ladder) -> None:
        self.what = what
        self.started_s = time.monotonic()
        self._ranks = tuple(ranks)
        self._ladder = ladder
        self._changed = threading.Condition()
        self._outcomes: dict[int, Outcome] = {}
        self._answered: set[int] = set()
        self._hung: RankHung | None = None

    # -- from other threads ---------------------------------------------------------------------------------------

    def finish(self, rank: int, outcome: Outcome) -> None:
        """The first outcome of a rank counts, except that one which we ended is stuck, even if its death came first."""
        with self._changed:
            if outcome.stuck is not None:
                self._outcomes[rank] = outcome
            self._outcomes.setdefault(rank, outcome)
            self._changed.notify_all()

    def lose(self, rank: int, lost: RankLost) -> None:
        """A rank is gone; its error of a moment before, such as a closed socket, is not the cause."""
        with self._changed:
            if rank in self._ranks and (rank not in self._outcomes or self._outcomes[rank].error):
                self._outcomes[rank] = Outcome(lost=lost)
            self._changed.notify_all()

    def hang(self, hung: RankHung) -> None:
        """The ranks wait for one that does not come, so the call is over."""
        with self._changed:
            if len(self._outcomes) < len(self._ranks):
                self._hung = self._hung or hung
            self._changed.notify_all()

    # -- for the caller -------------------------------------------------------------------------------------------

    @property
    def pending(self) -> list[int]:
        with self._changed:
            return [rank for rank in self._ranks if rank not in self._outcomes]

    @property
    def failed(self) -> bool:
        with self._changed:
            return self._hung is not None or any(o.failed for o in self._outcomes.values())

    def wait(self, timeout_s: float | None = None) -> bool:
        """Whether every rank is done, or one has failed, within `timeout_s`. Ctrl-C gets through."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            while len(self._outcomes) < len(self._ranks) and not self.failed:
                left = 0.5 if deadline is None else min(0.5, deadline - time.monotonic())
                if left <= 0:
                    return False
                self._changed.wait(left)
        return True

    def wait_all(self, timeout_s: float) -> bool:
        """Whether every rank is done, with success or not, within `timeout_s`."""
        with self._changed:
            return self._changed.wait_for(lambda: len(self._outcomes) == len(self._ranks), timeout_s)

    @property
    def values(self) -> dict[int, Any]:
        """Of the ranks where it succeeded, by rank."""
        with self._changed:
            return {r: o.value for r, o in self._outcomes.items() if not o.failed and not o.interrupted}

    def interrupt(self) -> None:
        """SIGINT to the ranks that have not replied."""
        if pending := self.pending:
            self._ladder.signal(pending)

    def results(self, timeout_s: float | None = None) -> list[Any]:
        """The values in rank order.

        Raises:
            FieldError: the ranks refused a value.
            RankError, RankStuck: the others are freed by then.
            RankLost, RankHung: the others are interrupted, and may take some more seconds to settle.
            Interrupted: a rank was interrupted before it had a result.
        """
        over = self.wait(timeout_s)
        if self._hung is not None:
            self._free_from(self._hung)
            raise self._hung
        if not over or (self.pending and not self.wait_all(GRACE_S)):
            self._free()
        with self._changed:
            outcomes = dict(self._outcomes)
        gone = any(o.error and o.error["kind"] == "EngineError" for o in outcomes.values())  # ipyparallel's name for it
        if gone or (any(o.error for o in outcomes.values()) and self._ladder.may_be_dying(self._ranks)):
            self._await_death_notice()
            with self._changed:
                outcomes = dict(self._outcomes)
        problem = verdict(self.what, outcomes)
        if problem is not None:
            raise problem
        return [outcomes[rank].value for rank in self._ranks]

    # -- the ladder -----------------------------------------------------------------------------------------------

    def _free(self) -> None:
        """Ends the call on the ranks that are still in it."""
        self.interrupt()
        if self.wait_all(LOST_S) or self._lost():
            return
        if self.wait_all(RUNG_S - LOST_S) or self._lost():
            return
        self.interrupt()
        for rank in self.pending:
            self._ladder.ping(rank, lambda rank=rank: self._answered.add(rank))  # type: ignore[misc]
        if self.wait_all(RUNG_S):
            return
        for rank in self.pending:
            if rank in self._answered:  # the interrupt fell between the work and the reply: only the reply is lost
                self.finish(rank, Outcome(interrupted=True))
                continue
            ended = self._ladder.end_rank(rank, "did not answer an interrupt and was ended")
            outcome = "its process was ended" if ended else "it is not ours to end, and is left as it is"
            stuck = RankStuck(rank=rank, what=self.what, after_s=2 * RUNG_S, outcome=outcome)
            self.finish(rank, Outcome(stuck=stuck))

    def _free_from(self, hung: RankHung) -> None:
        """The error does not wait for the others, which settle by themselves once the one that hangs is gone."""
        self.interrupt()
        self.wait_all(HUNG_S)
        ended = [rank for rank in set(self.pending) & set(hung.absent)
                 if self._ladder.end_rank(rank, "did not come to a collective and was ended")]  # fmt: skip
        with self._changed:  # the next call must find them lost
            self._changed.wait_for(lambda: all(rank in self._outcomes and self._outcomes[rank].lost for rank in ended),
                                   DEATH_NOTICE_S)  # fmt: skip

    def _lost(self) -> bool:
        with self._changed:
            return any(o.lost for o in self._outcomes.values())

    def _await_death_notice(self) -> None:
        with self._changed:
            self._changed.wait_for(self._lost, DEATH_NOTICE_S)


def verdict(what: str, outcomes: Mapping[int, Outcome]) -> Exception | None:
    """One exception for what happened on all ranks, or None: the first cause, not what followed from it."""
    lost = [o.lost for o in outcomes.values() if o.lost]
    if lost:
        return min(lost, key=lambda e: e.unix_s)
    errors = {rank: o.error for rank, o in outcomes.items() if o.error}
    causes = {rank: error for rank, error in errors.items() if error["kind"] != "RankAborted"}
    stuck = [o.stuck for o in outcomes.values() if o.stuck]
    if stuck and not causes:
        return stuck[0]
    if not causes and any("interrupted" in error["reason"] for error in errors.values()):
        return Interrupted(f"{what} was interrupted")
    if causes := causes or errors:
        rank, first = min(causes.items(), key=lambda item: item[1]["unix_s"])
        if "refusal" in first:
            field, reason, hint = first["refusal"]
            refused = ArgumentError if first["kind"] == "ArgumentError" else SpecError
            return refused(field, reason, hint, first["fix"])
        others = {r: f"{error['kind']}: {error['reason']}" for r, error in errors.items() if r != rank}
        described = {name: first[name] for name in ("kind", "reason", "trace", "unix_s")}
        return RankError(rank=rank, what=what, others=others, **described)
    if any(o.interrupted for o in outcomes.values()):
        return Interrupted(f"{what} was interrupted")
    return None


def read_reply(future: Any) -> Outcome:
    """The outcome of an ipyparallel future: what `remote.call` returned, or what kept it from running."""
    try:
        reply = future.result(0)
    except BaseException as e:
        return failure(e)
    if "error" in reply:
        return Outcome(error=reply["error"])
    return Outcome(interrupted=True) if reply.get("interrupted") else Outcome(value=reply["ok"])


def failure(e: BaseException) -> Outcome:
    """The outcome of a call that was not run: RemoteError, EngineError, TaskAborted, all by their name."""
    kind, reason = str(getattr(e, "ename", type(e).__name__)), str(getattr(e, "evalue", e))
    if kind == "KeyboardInterrupt":
        return Outcome(interrupted=True)
    if kind == "ModuleNotFoundError" and "fsdp_lab" in reason:
        reason += ": install fsdp-lab in the environment of your engines"
    return Outcome(error={"kind": kind, "reason": reason, "trace": "", "unix_s": time.time()})
