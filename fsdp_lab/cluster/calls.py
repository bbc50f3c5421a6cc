"""One call on many ranks: sent at once, waited for with a bound, and over for all as soon as it is over for one.

A collective joins its ranks: when one dies or raises, the others sit in it until its timeout. So a failure frees them,
in rungs: an interrupt (SIGINT, which the rank's wire turns into an abort), another one with a ping beside it, and then,
for engines that are ours, the end of the process. The caller gets one exception, of the rank that failed first.

Where a rank is found to hang (doctor.py), patience has been had: it is interrupted once with all others, then ended.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from fsdp_lab.cluster.errors import ClusterError, Interrupted, RankError, RankHung, RankLost, RankStuck
from fsdp_lab.spec import SpecError

LOST_S = 0.4  # survivors of a lost rank settle by themselves; the news does not wait for all of that
HUNG_S = 0.3  # for a rank that hangs to answer an interrupt after all
GRACE_S = 0.3  # ranks that fail by themselves, with the same refusal, need no interrupt
RUNG_S = 2.5  # between one rung of the ladder and the next
DEATH_NOTICE_S = 2.0  # a lost peer is noticed by its neighbours' sockets before the kernel hears of it


class Sink(dict[str, Any]):
    """Takes the place of ipyparallel's `metadata[msg_id]["data"]`, which keeps only the last value a key.

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
    unix_s: float = 0.0

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
    """One call that is under way. Waited for by one thread; outcomes arrive from others."""

    def __init__(self, what: str, ranks: Sequence[int], ladder: Ladder) -> None:
        self.what = what
        self.started_unix_s = time.time()
        self.started_s = time.monotonic()
        self._ranks = tuple(ranks)
        self._ladder = ladder
        self._changed = threading.Condition()
        self._outcomes: dict[int, Outcome] = {}
        self._answered: set[int] = set()
        self._hung: RankHung | None = None

    # -- from other threads ---------------------------------------------------------------------------------------

    def finish(self, rank: int, outcome: Outcome) -> None:
        """The first outcome of a rank counts; but one that we ended is stuck, also if its death was heard of before."""
        with self._changed:
            if outcome.stuck is not None:
                self._outcomes[rank] = outcome
            self._outcomes.setdefault(rank, outcome)
            self._changed.notify_all()

    def lose(self, rank: int, lost: RankLost) -> None:
        """A rank is gone; what its peers said about its socket a moment before is not the cause."""
        with self._changed:
            if rank in self._ranks and (rank not in self._outcomes or self._outcomes[rank].error):
                self._outcomes[rank] = Outcome(lost=lost, unix_s=lost.unix_s)
            self._changed.notify_all()

    def hang(self, hung: RankHung) -> None:
        """The ranks wait for one that does not come: the call is over."""
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
            return self._failed()

    def _failed(self) -> bool:
        return self._hung is not None or any(o.failed for o in self._outcomes.values())

    def wait(self, timeout_s: float | None = None) -> bool:
        """Whether every rank is done, or one has failed, within `timeout_s`. Ctrl-C gets through."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            while len(self._outcomes) < len(self._ranks) and not self._failed():
                left = 0.5 if deadline is None else min(0.5, deadline - time.monotonic())
                if left <= 0:
                    return False
                self._changed.wait(left)
        return True

    def wait_all(self, timeout_s: float) -> bool:
        """Whether every rank is done, well or not, within `timeout_s`."""
        return self._settle(timeout_s)

    def failed_on(self, rank: int) -> bool:
        with self._changed:
            return rank in self._outcomes and (self._outcomes[rank].failed or self._outcomes[rank].interrupted)

    @property
    def values(self) -> dict[int, Any]:
        """Of the ranks where it went well, by rank."""
        with self._changed:
            return {r: o.value for r, o in self._outcomes.items() if not o.failed and not o.interrupted}

    def interrupt(self) -> None:
        """SIGINT to the ranks that have not answered."""
        if pending := self.pending:
            self._ladder.signal(pending)

    def results(self, timeout_s: float | None = None) -> list[Any]:
        """The values in rank order.

        Raises:
            SpecError: the ranks refused a value.
            RankError, RankStuck: which rank, what and when; the others are freed by then.
            RankLost, RankHung: the same; the others are interrupted, and may take some seconds more to settle.
            Interrupted: a rank was interrupted before it had a result.
        """
        over = self.wait(timeout_s)
        if self._hung is not None:
            self._free_from(self._hung)
            raise self._hung
        if not over or (self.pending and not self._settle(GRACE_S)):
            self._free()
        with self._changed:
            outcomes = dict(self._outcomes)
        gone = any(o.error and o.error["kind"] == "EngineError" for o in outcomes.values())  # ipyparallel's word for it
        if gone or (any(o.error for o in outcomes.values()) and self._ladder.may_be_dying(self._ranks)):
            self._await_death_notice()
            with self._changed:
                outcomes = dict(self._outcomes)
        problem = verdict(self.what, outcomes)
        if problem is not None:
            raise problem
        return [outcomes[rank].value for rank in self._ranks]

    # -- the ladder -----------------------------------------------------------------------------------------------

    def _settle(self, seconds: float) -> bool:
        """Waits for all ranks; whether all are done."""
        with self._changed:
            return self._changed.wait_for(lambda: len(self._outcomes) == len(self._ranks), seconds)

    def _free(self) -> None:
        """Ends the call on the ranks that are still in it."""
        self.interrupt()
        if self._settle(LOST_S) or self._lost():
            return
        if self._settle(RUNG_S - LOST_S) or self._lost():
            return
        self.interrupt()
        for rank in self.pending:
            self._ladder.ping(rank, lambda rank=rank: self._answered.add(rank))  # type: ignore[misc]
        if self._settle(RUNG_S):
            return
        for rank in self.pending:
            if rank in self._answered:  # the interrupt fell between the work and the reply: only the reply is lost
                self.finish(rank, Outcome(interrupted=True, unix_s=time.time()))
                continue
            ended = self._ladder.end_rank(rank, "did not answer an interrupt and was ended")
            outcome = "its process was ended" if ended else "it is not ours to end, and is left as it is"
            stuck = RankStuck(rank=rank, what=self.what, after_s=2 * RUNG_S, outcome=outcome)
            self.finish(rank, Outcome(stuck=stuck, unix_s=time.time()))

    def _free_from(self, hung: RankHung) -> None:
        """The news does not wait for the others, who settle by themselves once the one that hangs has gone."""
        self.interrupt()
        self._settle(HUNG_S)
        ended = [rank for rank in set(self.pending) & set(hung.absent)
                 if self._ladder.end_rank(rank, "did not come to a collective and was ended")]  # fmt: skip
        with self._changed:  # the next call must find that they are gone
            self._changed.wait_for(lambda: all(rank in self._outcomes and self._outcomes[rank].lost for rank in ended),
                                   DEATH_NOTICE_S)  # fmt: skip

    def _lost(self) -> bool:
        with self._changed:
            return any(o.lost for o in self._outcomes.values())

    def _await_death_notice(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: any(o.lost for o in self._outcomes.values()), DEATH_NOTICE_S)


def verdict(what: str, outcomes: Mapping[int, Outcome]) -> Exception | None:
    """The one exception for what happened on all ranks, or None. The first cause wins, not what followed from it."""
    lost = [o.lost for o in outcomes.values() if o.lost]
    if lost:
        return min(lost, key=lambda e: e.unix_s)
    said = {rank: o for rank, o in outcomes.items() if o.error}
    causes = {rank: o for rank, o in said.items() if o.error and o.error["kind"] != "RankAborted"}
    stuck = [o.stuck for o in outcomes.values() if o.stuck]
    if stuck and not causes:
        return stuck[0]
    if said and not causes and any("interrupted" in o.error["reason"] for o in said.values() if o.error):
        return Interrupted(f"{what} was interrupted")
    if causes := causes or said:
        rank, first = min(causes.items(), key=lambda item: item[1].error["unix_s"])  # type: ignore[index]
        assert first.error is not None
        if "refusal" in first.error:
            field, why, way_out = first.error["refusal"]
            return SpecError(field, why, way_out, first.error["fix"])
        others = {r: f"{o.error['kind']}: {o.error['reason']}" for r, o in said.items() if o.error and r != rank}
        return RankError(
            rank=rank,
            what=what,
            kind=first.error["kind"],
            reason=first.error["reason"],
            trace=first.error["trace"],
            unix_s=first.error["unix_s"],
            others=others,
        )
    if any(o.interrupted for o in outcomes.values()):
        return Interrupted(f"{what} was interrupted")
    return None


def read_reply(future: Any) -> Outcome:
    """The outcome in an ipyparallel future that is done: what `remote.call` returned, or what kept it from running."""
    now = time.time()
    try:
        reply = future.result(0)
    except BaseException as e:  # RemoteError, EngineError, TaskAborted: all by their name
        kind = str(getattr(e, "ename", type(e).__name__))
        if kind == "KeyboardInterrupt":
            return Outcome(interrupted=True, unix_s=now)
        reason = str(getattr(e, "evalue", e))
        if kind == "ModuleNotFoundError" and "fsdp_lab" in reason:
            reason += ": install fsdp-lab in the environment of your engines"
        return Outcome(error={"kind": kind, "reason": reason, "trace": "", "unix_s": now}, unix_s=now)
    if "error" in reply:
        return Outcome(error=reply["error"], unix_s=now)
    if reply.get("interrupted"):
        return Outcome(interrupted=True, unix_s=now)
    return Outcome(value=reply["ok"], unix_s=now)


__all__ = ["Call", "ClusterError", "Outcome", "Sink", "read_reply", "verdict"]
