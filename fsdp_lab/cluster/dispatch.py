"""`Dispatcher`: sends calls and signals to the ranks' engines."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import psutil

from fsdp_lab.cluster import remote
from fsdp_lab.cluster.calls import Call, Outcome, Sink, failure, read_reply
from fsdp_lab.cluster.membership import Member, Membership
from fsdp_lab.cluster.processes import alive

SIGNAL_S = 1.0  # for the acknowledgement of a signal
SECOND_INTERRUPT_S = 1.2  # longer than a rank takes two interrupts for one (rank/guard.py)
# For a rank to close its session. One that still waits for a lost peer takes longer; a new engine beside the one that has
# to be started anyway takes less.
INTERRUPTED_CALL_S = 3.0
CLIENT_HISTORY = 200  # message ids that the client may remember; it would keep all of them
NO_ARGUMENTS: Mapping[str, Any] = {}

OnData = Callable[[Mapping[str, Any]], None]


class Dispatcher:
    """Knows the calls that are under way, and frees ranks that a failed one leaves waiting (`calls.Ladder`).

    `_sending` is held while a call is sent, so that two calls cannot arrive in different orders on two ranks, and because a
    client's message ids are not made atomically.
    """

    def __init__(self, membership: Membership) -> None:
        self.membership = membership
        self._calls: list[Call] = []
        self._sending = threading.Lock()
        self._turn = 0  # number of the last call; guarded by _sending

    # -- calls ------------------------------------------------------------------------------------------------------

    def submit(self, what: str, arguments: Mapping[str, Any], take: OnData | None = None) -> Call:
        """One call to all ranks. Raises RankLost."""
        with self.membership.lock:
            for lost in self.membership.lost.values():
                raise lost
            ranks = range(len(self.membership.members))
        return self.send(what, dict.fromkeys(ranks, arguments), take)

    def call(self, what: str, *, timeout_s: float | None = None, **arguments: Any) -> list[Any]:
        """`submit`, then the results in rank order. Raises what `Call.results` does."""
        return self.submit(what, arguments).results(timeout_s)

    def send(self, what: str, each: Mapping[int, Mapping[str, Any]], take: OnData | None = None) -> Call:
        """One message per rank, with its arguments: a message to many engines is over only when all have replied."""
        engines = self.membership.engines
        assert engines is not None
        client, call = engines.client, Call(what, list(each), self)
        with self.membership.lock:
            members = {rank: self.membership.members[rank] for rank in each}
            self._calls = [*self.live_calls, call]
            for member in [m for m in members.values() if not m.doing]:  # others still work on an earlier call
                member.set_doing(what)
        with self._sending:
            self._turn += 1
            for rank, arguments in each.items():
                member = members[rank]
                try:
                    future = member.view.apply_async(
                        remote.call, what, dict(arguments), self.membership.token, self._turn
                    )
                except Exception as e:  # the engine is no longer known, or the connection is closed
                    call.finish(rank, failure(e))
                    continue
                self._receive_data(client, future, member, take)
                future.add_done_callback(partial(self._replied, call, member))
                del member.view.history[:]  # it would keep the id of every call
            del client.history[:-CLIENT_HISTORY]
        for rank, member in members.items():  # lost while the call was sent
            if member.lost is not None:
                call.lose(rank, member.lost)
        return call

    def continue_from_former(self) -> None:
        """Numbers calls so that none is taken for one of a former kernel."""
        with self._sending:
            self._turn = time.time_ns()

    def _receive_data(self, client: Any, future: Any, member: Member, take: OnData | None) -> None:
        def receive(data: Mapping[str, Any]) -> None:
            for event in data.get("events", ()):
                member.step = event["step"] + 1
            if take is not None:
                take(data)

        metadata = client.metadata[future.msg_ids[0]]
        early, metadata["data"] = metadata["data"], Sink(receive)
        if early:  # what arrived between the sending and this line
            receive(early)

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

    def lose(self, member: Member) -> None:
        """Tells all calls that a rank is lost, also those that have its error already: its death explains it."""
        assert member.lost is not None
        with self.membership.lock:
            calls = list(self._calls)
        for call in calls:
            call.lose(member.rank, member.lost)

    def abandon(self) -> None:
        """Ends every call for whoever waits for it."""
        for call in self.live_calls:
            for rank in call.pending:
                call.finish(rank, Outcome(interrupted=True))

    def dismiss(self, members: Sequence[Member]) -> list[Member]:
        """Interrupts these ranks if they work, and closes their sessions; returns those that did not do so in time."""
        closed = self._interrupt_and_call("leave", members).values
        return [m for m in members if m.rank not in closed]

    def settle(self) -> dict[int, Any]:
        """After a failure: waits until no rank works any more, and returns `Session.status` of those that are left."""
        call = self._interrupt_and_call("status", self.membership.present)
        for rank in call.pending:
            self.end_rank(rank, "did not leave a step that had failed, and was ended")
        call.wait_all(SIGNAL_S)
        return call.values

    def _interrupt_and_call(self, what: str, members: Sequence[Member]) -> Call:
        """Interrupts what ranks work on and sends a call; returns when they replied, or after `INTERRUPTED_CALL_S`."""
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
        """SIGINT: to the process itself on this machine, elsewhere by the engine's nanny, which serves busy engines too.

        Returns when all are delivered, or after a second. The kernel's own interrupt does not reach engines.
        """
        if self.membership.engines is None:
            return
        client, sent = self.membership.engines.client, []
        for member in [self.membership.members[rank] for rank in ranks]:
            try:
                if member.process is None:
                    raise LookupError
                member.process.send_signal(signal.SIGINT)
            except (LookupError, psutil.AccessDenied):
                with self._sending, contextlib.suppress(Exception):  # just gone: the supervisor will report it
                    sent.append(client.send_signal("SIGINT", targets=[member.engine], block=False))
            except psutil.Error:
                continue
        deadline = time.monotonic() + SIGNAL_S
        for future in sent:
            with contextlib.suppress(Exception):
                future.result(max(0.0, deadline - time.monotonic()))

    def ping(self, rank: int, answered: Callable[[], None]) -> None:
        """Asks an engine for a sign of life, behind what it works on."""
        with self._sending, contextlib.suppress(Exception):
            view = self.membership.members[rank].view
            future = view.apply_async(remote.call, "ping", {}, self.membership.token, 0)
            future.add_done_callback(lambda f: answered() if f.exception() is None else None)

    def end_rank(self, rank: int, reason: str) -> bool:
        """Ends one rank's process, if it is ours. The supervisor will report that it is gone."""
        engines = self.membership.engines
        if engines is None or not engines.owned:
            return False
        member = self.membership.members[rank]
        member.end_reason = reason
        engines.end([member.pid], term_s=0.2)
        return True

    def may_be_dying(self, ranks: Sequence[int]) -> bool:
        """Whether the end of one of them may explain what its peers report: it is gone, or on another machine."""
        return any(m.process is None or not alive(m.process) for m in self.membership.members if m.rank in ranks)
