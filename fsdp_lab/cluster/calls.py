"""`Dispatcher`: sends calls and signals to the ranks' engines. `Call`: one for many ranks, which fails when one does.

When a rank dies or raises, the others wait for it in a collective until its timeout. So a failed call frees them, in
steps: an interrupt (SIGINT, which the wire turns into an abort), a second interrupt, and then, for engines
that are ours, the end of the process. The caller gets one exception, of the rank that failed first.

If a rank hangs (supervisor.py), the grace period has already elapsed: it is interrupted once with all others, then ended."""

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import psutil

from fsdp_lab.base.errors import FieldError
from fsdp_lab.base.process import alive
from fsdp_lab.cluster import Interrupted, RankError, RankHung, RankLost, RankStuck, remote
from fsdp_lab.cluster.membership import Member, Membership

LOST_S = 0.4  # the error of a lost rank waits this long for the other ranks, which settle by themselves
HUNG_S = 0.3  # for a rank that hangs to answer an interrupt
GRACE_S = 0.3  # ranks that fail by themselves, with the same error, need no interrupt
ESCALATION_S = 2.5  # after an interrupt, until the second one; and after that one, until the process is ended
DEATH_NOTICE_S = 2.0  # other ranks' sockets notice a lost rank before the kernel does
GONE_NOTICE_S = 8.0  # for the supervisor to find out how an engine ended that is gone, perhaps on another host
SIGNAL_S = 1.0  # for the acknowledgement of a signal
SECOND_INTERRUPT_S = 1.2  # more than `_INSIST_S` of rank/abort.py, within which two interrupts are one
INTERRUPTED_CALL_S = 3.0  # for a rank to close its session; replacing its engine instead takes no longer
CLIENT_HISTORY = 200  # message ids that the client keeps; without a limit it keeps all
NO_ARGUMENTS: Mapping[str, Any] = {}

OnData = Callable[[Mapping[str, Any]], None]


class Sink(dict[str, Any]):
    """Replaces ipyparallel's `metadata[msg_id]["data"]`, which keeps only the last value per key. The client calls `update`
    on its IO thread for every published message."""

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


class Call:
    """One call. Waited for by one thread; outcomes arrive from others."""

    def __init__(self, what: str, ranks: Sequence[int], dispatcher: "Dispatcher") -> None:
        self.what = what
        self.started_s = time.monotonic()
        self._ranks = tuple(ranks)
        self._dispatcher = dispatcher
        self._changed = threading.Condition()
        self._outcomes: dict[int, Outcome] = {}
        self._gone: set[int] = set()  # ranks that were lost, whatever they had answered before
        self._hung: RankHung | None = None

    # -- from other threads ---------------------------------------------------------------------------------------

    def finish(self, rank: int, outcome: Outcome) -> None:
        """The first outcome of a rank counts, except that a rank which we ended is stuck, even if its death came first."""
        with self._changed:
            if outcome.stuck is not None:
                self._outcomes[rank] = outcome
            self._outcomes.setdefault(rank, outcome)
            self._changed.notify_all()

    def lose(self, rank: int, lost: RankLost) -> None:
        """A rank is gone, which replaces an error that it has just reported, such as a closed socket."""
        with self._changed:
            self._gone.add(rank)
            if rank in self._ranks and (rank not in self._outcomes or self._outcomes[rank].error):
                self._outcomes[rank] = Outcome(lost=lost)
            self._changed.notify_all()

    def hang(self, hung: RankHung) -> None:
        """The ranks wait for one that does not join their collective, so the call is over."""
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
        """Returns whether every rank is done, or one has failed, within `timeout_s`. Can be interrupted by Ctrl-C."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            while len(self._outcomes) < len(self._ranks) and not self.failed:
                left_s = 0.5 if deadline is None else min(0.5, deadline - time.monotonic())
                if left_s <= 0:
                    return False
                self._changed.wait(left_s)
        return True

    def wait_all(self, timeout_s: float) -> bool:
        """Returns whether every rank is done, with success or not, within `timeout_s`."""
        with self._changed:
            return self._changed.wait_for(lambda: len(self._outcomes) == len(self._ranks), timeout_s)

    @property
    def values(self) -> dict[int, Any]:
        """Results by rank, of the ranks where the call succeeded."""
        with self._changed:
            return {r: o.value for r, o in self._outcomes.items() if not o.failed and not o.interrupted}

    def interrupt(self) -> None:
        """SIGINT to the ranks that have not replied."""
        if pending := self.pending:
            self._dispatcher.signal(pending)

    def results(self, timeout_s: float | None = None) -> list[Any]:
        """The values in rank order.

        Raises FieldError: the ranks refused a value. RankError, RankStuck: the others are freed by then. RankLost, RankHung:
        the others are interrupted, and may take some more seconds to settle. Interrupted: a rank had no result yet."""
        over = self.wait(timeout_s)
        if self._hung is not None:  # the absent are ended; the others settle then, and the error does not wait for them
            self.interrupt()
            self.wait_all(HUNG_S)
            reason = "did not join a collective and was ended"
            absent = set(self.pending) & set(self._hung.absent)
            ended = {rank for rank in absent if self._dispatcher.end_rank(rank, reason)}
            with self._changed:  # the next call must find them lost, also one that answered just before its end
                self._changed.wait_for(lambda: ended <= self._gone, DEATH_NOTICE_S)
            raise self._hung
        if not over or (self.pending and not self.wait_all(GRACE_S)):
            self._free()
        with self._changed:
            outcomes = dict(self._outcomes)
        errors = {rank: o.error for rank, o in outcomes.items() if o.error}
        gone = any(error["kind"] == "EngineError" for error in errors.values())
        for rank, error in errors.items():
            if error["kind"] == remote.DEVICE_LOST:  # it has no GPU any more: it is ended, and lost then
                reason = f"had an error of its GPU ({error['reason'][:200]}) and was ended"
                gone |= self._dispatcher.end_rank(rank, reason)
        if gone or (errors and self._dispatcher.may_be_dying(self._ranks)):
            with self._changed:
                self._changed.wait_for(self._lost, GONE_NOTICE_S if gone else DEATH_NOTICE_S)
                outcomes = dict(self._outcomes)
        if (problem := verdict(self.what, outcomes)) is not None:
            raise problem
        return [outcomes[rank].value for rank in self._ranks]

    # -- freeing ranks --------------------------------------------------------------------------------------------

    def _free(self) -> None:
        """Ends the call on the ranks that are still in it, unless a rank is lost: then they settle by themselves."""
        self.interrupt()
        for seconds in (LOST_S, ESCALATION_S - LOST_S):
            if self.wait_all(seconds) or self._lost():
                return
        self.interrupt()
        if self.wait_all(ESCALATION_S):
            return
        for rank in self.pending:
            ended = self._dispatcher.end_rank(rank, "did not answer an interrupt and was ended")
            outcome = "its process was ended" if ended else "it is not ours to end, and keeps running"
            stuck = RankStuck(rank=rank, what=self.what, after_s=2 * ESCALATION_S, outcome=outcome)
            self.finish(rank, Outcome(stuck=stuck))

    def _lost(self) -> bool:
        with self._changed:
            return any(o.lost for o in self._outcomes.values())


def verdict(what: str, outcomes: Mapping[int, Outcome]) -> Exception | None:
    """One exception for what happened on all ranks, or None: that of the first cause."""
    if lost := [o.lost for o in outcomes.values() if o.lost]:
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
            return FieldError.from_dict(first["refusal"])
        others = {r: f"{error['kind']}: {error['reason']}" for r, error in errors.items() if r != rank}
        described = {name: first[name] for name in ("kind", "reason", "trace", "unix_s")}
        return RankError(rank=rank, what=what, others=others, **described)
    return Interrupted(f"{what} was interrupted") if any(o.interrupted for o in outcomes.values()) else None


def _receive(member: Member, take: OnData | None, data: Mapping[str, Any]) -> None:
    """Takes what a rank publishes during a call."""
    for event in data.get("events", ()):
        member.step = event["step"] + 1
    if take is not None:
        take(data)


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


class Dispatcher:
    """Holds the calls in progress, and sends the signals with which a failed `Call` frees the ranks that wait in it."""

    def __init__(self, membership: Membership) -> None:
        self.membership = membership
        self._calls: list[Call] = []
        # held while a call is sent: all ranks get calls in the same order, and clients do not make message ids atomically
        self.sending = threading.Lock()
        self.turn = 0  # number of the last call; guarded by `sending`

    # -- calls ------------------------------------------------------------------------------------------------------

    def submit(self, what: str, *, take: OnData | None = None, **arguments: Any) -> Call:
        """Sends one call, of an action or a Session method in `remote`, to all ranks and returns at once. `take` is
        called on the client's IO thread with what the ranks publish; it must return at once. Raises RankLost."""
        self.membership.require_engines()
        with self.membership.lock:
            for lost in self.membership.lost.values():
                raise lost
            ranks = range(len(self.membership.members))
        return self.send(what, dict.fromkeys(ranks, arguments), take)

    def call(self, what: str, *, timeout_s: float | None = None, **arguments: Any) -> list[Any]:
        """`submit`, then the results in rank order. Raises what `Call.results` does."""
        return self.submit(what, **arguments).results(timeout_s)

    def ask(self, what: str, each: Mapping[int, Mapping[str, Any]], timeout_s: float) -> dict[int, Any]:
        """The results by rank of one call on some ranks, each with its arguments. Raises what `Call.results` does."""
        return dict(zip(each, self.send(what, each).results(timeout_s), strict=True)) if each else {}

    def send(self, what: str, each: Mapping[int, Mapping[str, Any]], take: OnData | None = None) -> Call:
        """One message per rank, with its arguments: ipyparallel's message to many engines ends only with the last reply."""
        engines = self.membership.engines
        assert engines is not None
        client, call = engines.client, Call(what, list(each), self)
        with self.membership.lock:
            members = {rank: self.membership.members[rank] for rank in each}
            self._calls = [*self.live_calls, call]
            for member in [m for m in members.values() if not m.doing]:  # others still work on an earlier call
                member.set_doing(what)
        with self.sending:
            self.turn += 1
            for rank, arguments in each.items():
                member = members[rank]
                try:
                    given = (what, dict(arguments), self.membership.token, self.turn)
                    future = member.view.apply_async(remote.call, *given)
                except Exception as e:  # the engine is no longer known, or the connection is closed
                    call.finish(rank, failure(e))
                    continue
                receive = partial(_receive, member, take)
                metadata = client.metadata[future.msg_ids[0]]
                early, metadata["data"] = metadata["data"], Sink(receive)
                if early:  # what arrived between the sending and this line
                    receive(early)
                future.add_done_callback(partial(self._replied, call, member))
                del member.view.history[:]  # it would keep the id of every call
            del client.history[:-CLIENT_HISTORY]
        for rank, member in members.items():  # lost while the call was sent
            if member.lost is not None:
                call.lose(rank, member.lost)
        return call

    def _replied(self, call: Call, member: Member, future: Any) -> None:
        """On the client's IO thread."""
        outcome = read_reply(future)
        if (outcome.error or NO_ARGUMENTS).get("kind") != "EngineError":  # else it died while it worked on the call
            with self.membership.lock:
                waiting = (c.what for c in self.live_calls if c is not call and member.rank in c.pending)
                member.set_doing(next(waiting, ""))
        call.finish(member.rank, outcome)

    @property
    def live_calls(self) -> list[Call]:
        with self.membership.lock:
            return [c for c in self._calls if c.pending]

    def lose(self, rank: int, lost: RankLost) -> None:
        """Ends all calls on a lost rank, also those that it has already answered with an error: its death explains it."""
        with self.membership.lock:
            calls = list(self._calls)
        for call in calls:
            call.lose(rank, lost)

    def abandon(self) -> None:
        """Ends every call in progress as interrupted."""
        for call in self.live_calls:
            for rank in call.pending:
                call.finish(rank, Outcome(interrupted=True))

    def dismiss(self, members: Sequence[Member]) -> list[Member]:
        """Interrupts these ranks if they work, and closes their sessions. Returns those that did not close in time."""
        closed = self._interrupt_and_call("leave", members).values
        return [m for m in members if m.rank not in closed]

    def settle(self) -> dict[int, Any]:
        """Interrupts the ranks that are left, and ends those that do not answer. Returns the status of the others."""
        call = self._interrupt_and_call("status", self.membership.present)
        for rank in call.pending:
            self.end_rank(rank, "did not leave a step that had failed, and was ended")
        call.wait_all(SIGNAL_S)
        return call.values

    def _interrupt_and_call(self, what: str, members: Sequence[Member]) -> Call:
        """Interrupts ranks that work, and sends a call; returns when they replied, or after `INTERRUPTED_CALL_S`."""
        if busy := [m.rank for m in members if m.doing]:
            self.signal(busy)
        call = self.send(what, {m.rank: NO_ARGUMENTS for m in members})
        if not call.wait_all(SECOND_INTERRUPT_S):  # they may wait for a peer that is gone, which a second one ends
            busy = [rank for other in self.live_calls if other is not call for rank in other.pending]
            self.signal([m.rank for m in members if m.rank in busy])
            call.wait_all(INTERRUPTED_CALL_S - SECOND_INTERRUPT_S)
        return call

    # -- signals ----------------------------------------------------------------------------------------------------

    def signal(self, ranks: Collection[int]) -> None:
        """Sends SIGINT to ranks: directly on this machine, elsewhere through the engine's nanny, which answers at any time.
        Returns when all are delivered, or after a second. The kernel's own interrupt does not reach engines."""
        if self.membership.engines is None:
            return
        client, sent = self.membership.engines.client, []
        for member in [self.membership.members[rank] for rank in ranks]:
            try:
                if member.process is None:
                    raise LookupError
                member.process.send_signal(signal.SIGINT)
            except (LookupError, psutil.AccessDenied):
                with self.sending, contextlib.suppress(Exception):  # just gone: the supervisor will report it
                    sent.append(client.send_signal("SIGINT", targets=[member.engine], block=False))
            except psutil.Error:
                continue
        deadline = time.monotonic() + SIGNAL_S
        for future in sent:
            with contextlib.suppress(Exception):
                future.result(max(0.0, deadline - time.monotonic()))

    def end_rank(self, rank: int, reason: str) -> bool:
        """Ends one rank's process, if it is ours. The supervisor will report that it is gone."""
        engines = self.membership.engines
        if engines is None or not engines.owned:
            return False
        member = self.membership.members[rank]
        member.end_reason = reason
        engines.end([member], term_s=0.2)
        return True

    def may_be_dying(self, ranks: Sequence[int]) -> bool:
        """Returns whether one is gone, or on another machine: its end may explain what its peers report."""
        return any(m.process is None or not alive(m.process) for m in self.membership.members if m.rank in ranks)
