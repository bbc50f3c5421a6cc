"""`Supervisor`: a thread that notices ranks that are lost or hang, and ends the calls that wait for them."""

import contextlib
import math
import queue
import secrets
import threading
import time
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import psutil

from fsdp_lab.base.hang import Hang, Heartbeat, diagnose, shortest_limit
from fsdp_lab.base.process import alive, describe_exit
from fsdp_lab.cluster import RankHung, RankLost
from fsdp_lab.cluster.calls import Dispatcher, Sink
from fsdp_lab.cluster.membership import Member, ReceivedHeartbeat

CHECK_S = 0.25  # between two checks for hangs
EXIT_CODE_S = 0.5  # the exit code may arrive later than the news of the exit
STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
FRESH_S = 0.8  # beyond the limit; for a missing rank to send another heartbeat, with its stack

Processes = Mapping[int, psutil.Process | None]  # by rank; None on another machine


class Supervisor:
    """Runs from `start` to `stop`. Deaths arrive in a queue, from the launcher thread and the client's IO thread."""

    def __init__(self, dispatcher: Dispatcher, hang_s: float) -> None:
        self._dispatcher, self._membership = dispatcher, dispatcher.membership
        self.monitor = HeartbeatMonitor(hang_s)
        self.on_loop_hung: Callable[[RankHung], None] = lambda hung: None  # called on this thread
        self._ended: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()  # what handles it
        # Called on this thread for each rank that ends unexpectedly.
        self.on_lost: list[Callable[[RankLost], None]] = []

    def start(self) -> None:
        threading.Thread(target=self._run, name="fsdp_lab-supervisor", daemon=True).start()

    def stop(self) -> None:
        if self._membership.engines is not None:
            with contextlib.suppress(ValueError, AttributeError):
                self._membership.engines.client._registration_callbacks.remove(self._hub_event)
        self._ended.put(None)
        self.monitor.close_channels()

    def watch(self, client: Any) -> None:
        """Notices engines that the hub unregisters. `wait_for_engines` uses the same list; there is no public interface."""
        client._registration_callbacks.append(self._hub_event)

    def _hub_event(self, event: Mapping[str, Any]) -> None:
        """Called on the client's IO thread: the hub has registered or unregistered an engine."""
        if event.get("event") == "unregister":
            self._ended.put(partial(self._handle, engine=int(event["id"])))

    def process_ended(self, pid: int, exit_code: int | None) -> None:
        """Called on the launcher thread: a process that we started has ended."""
        self._ended.put(partial(self._handle, pid=pid, exit_code=exit_code))

    def _run(self) -> None:
        while True:
            try:
                ended = self._ended.get(timeout=CHECK_S)
            except queue.Empty:
                with contextlib.suppress(Exception):  # this thread must not end
                    self._check_hangs()
                continue
            if ended is None:
                return
            if not self._membership.closed:
                with contextlib.suppress(Exception):
                    ended()

    def _handle(self, *, pid: int | None = None, engine: int | None = None, exit_code: int | None = None) -> None:
        """A process of this host has ended, or an engine as the hub sees it."""
        engines = self._membership.engines
        if engines is not None and pid == engines.controller_pid:
            for member in self._membership.present:
                member.end_reason = f"is out of reach, because ipyparallel's controller {describe_exit(exit_code)}"
                self._mark_lost(member, None)
            return
        if (lost := self._membership.unexpectedly_ended(pid, engine)) is not None:
            self._mark_lost(lost, exit_code)

    def _check_hangs(self) -> None:
        """Ends the calls of ranks that wait for one that does not join their collective."""
        calls = [call for call in self._dispatcher.live_calls if not call.failed]
        loops = self.monitor.loops
        if not calls and not loops:
            return
        with self._membership.lock:
            processes = {m.rank: m.process for m in self._membership.members}
        since_s = -math.inf if loops else min(call.started_s for call in calls)
        hang = self.monitor.find_hang(processes, since_s)
        if hang is not None:
            self.monitor.forget()
            hung = RankHung(hang)
            for call in calls:
                call.hang(hung)
            if loops:
                self.on_loop_hung(hung)

    def _mark_lost(self, m: Member, exit_code: int | None) -> None:
        """Reports a rank that is gone: to its calls, its status and the callbacks."""
        unix_s, doing, engines = time.time(), m.doing, self._membership.engines
        reason, log = describe_exit(exit_code), ""
        with contextlib.suppress(Exception):  # it is lost, whether or not its host can be asked
            reason = self._reason(m, exit_code)
            log = engines.log(m) if engines is not None else ""
        lost = RankLost(
            rank=m.rank, engine=m.engine, pid=m.pid, host=m.host, reason=reason, doing=doing, unix_s=unix_s, log=log
        )
        with self._membership.lock:
            m.lost = lost
            m.set_doing("gone")
        self._dispatcher.lose(m.rank, lost)
        for callback in list(self.on_lost):
            with contextlib.suppress(Exception):
                callback(lost)

    def _reason(self, member: Member, exit_code: int | None) -> str:
        """Why a rank is gone. Ends it if it still runs, and is ours, but does not answer."""
        engines = self._membership.engines
        assert engines is not None
        deadline = time.monotonic() + EXIT_CODE_S
        while engines.owned and exit_code is None and not member.end_reason and time.monotonic() < deadline:
            exit_code = engines.exit_code(member)
            time.sleep(0.01)
        if exit_code is None and not member.end_reason and member.process is not None and alive(member.process):
            engines.end([member], term_s=0.1)
            return "no longer answers (stopped, or its machine hangs), so it is left out"
        unknown = engines.why_gone(member) if exit_code is None and not member.end_reason else ""
        return member.end_reason or unknown or describe_exit(exit_code)


class HeartbeatMonitor:
    """Keeps the last heartbeat of each rank, and finds hangs from them.

    Heartbeats arrive on a channel of their own, so they reach the kernel while a rank is busy with a cell, or idle. It
    receives on the client's IO thread, checks on the supervisor's, and answers any thread."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._received: dict[int, ReceivedHeartbeat] = {}
        self._sink = Sink(self._take)
        self.on_loop: Callable[[Mapping[str, Any]], None] = lambda message: None  # given messages of watched loops
        self._client: Any = None
        self._channels: dict[int, str] = {}  # by rank, the id under which the client receives
        self._lock = threading.Lock()

    def open_channels(self, client: Any, ranks: Collection[int]) -> dict[int, dict[str, str]]:
        """Opens a channel for the heartbeats of each rank. Returns by rank the header of that engine's messages.

        The client passes what engines publish to the entry of its `metadata` that the message names as its parent. Such an
        entry need not belong to a call; that of a call is dropped when the call ends."""
        self.forget()
        self._client, self._channels = client, {rank: f"fsdp_lab-beats-{secrets.token_hex(8)}" for rank in ranks}
        for name in self._channels.values():
            client.metadata[name]["data"] = self._sink
        header = {"session": client.session.session, "username": "", "msg_type": "apply_request"}
        return {rank: {**header, "msg_id": name} for rank, name in self._channels.items()}

    def close_channels(self) -> None:
        for name in self._channels.values():
            self._client.metadata.pop(name, None)
        self._channels = {}

    def _take(self, data: Mapping[str, Any]) -> None:
        """A heartbeat that arrives after a newer one is dropped."""
        if "loop" in data:
            self.on_loop(data["loop"])
            return
        received = ReceivedHeartbeat(beat=Heartbeat.from_dict(data["beat"]), at_s=time.monotonic())
        with self._lock:
            before = self._received.get(received.beat.rank)
            if before is None or before.beat.number < received.beat.number:
                self._received[received.beat.rank] = received

    def last(self, rank: int) -> ReceivedHeartbeat | None:
        with self._lock:
            return self._received.get(rank)

    @property
    def loops(self) -> bool:
        """Whether a rank is in a loop of the user's."""
        with self._lock:
            return any(r.beat.loops for r in self._received.values())

    def forget(self) -> None:
        """Drops all heartbeats: earlier ones are no evidence for a new hang."""
        with self._lock:
            self._received = {}

    def find_hang(self, processes: Processes, since_s: float) -> Hang | None:
        """The hang, if any, of the call that began at `since_s` on the monotonic clock."""
        with self._lock:
            received = dict(self._received)
        limit_s = shortest_limit(self._limit_s, (r.beat for r in received.values()))
        waiting = [r for r in received.values() if max(r.beat.pending_s, r.beat.user_call_s) > limit_s]
        if not any(r.at_s - max(r.beat.pending_s, r.beat.user_call_s) > since_s - 1.0 for r in waiting):
            return None
        silent = {rank: why for rank, process in processes.items() if (why := _silence(received.get(rank), process))}
        hang = diagnose({rank: r.beat for rank, r in received.items()}, limit_s, silent)
        if hang is None or hang.waited_s >= limit_s + FRESH_S:
            return hang
        # A rank that is missing has just reported where it is, with its stack, or soon will.
        reports = [received.get(rank) for rank in hang.ranks if rank not in silent]
        return hang if all(r is not None and r.beat.stack and r.age_s < r.beat.next_s for r in reports) else None


def _silence(received: ReceivedHeartbeat | None, process: psutil.Process | None) -> str:
    """Returns why a rank cannot send heartbeats; "" if it can."""
    status = _status(process)
    if status in STOPPED:
        return "its process is stopped"
    if received is None or received.age_s < received.beat.silent_s:
        return ""
    why = f": native code holds its interpreter, or it gets no time (its process is {status})" if status else ""
    return f"no heartbeat has arrived from it for {received.age_s:.0f} s{why}"


def _status(process: psutil.Process | None) -> str:
    """The system's status of a process; "" if it cannot be seen from here."""
    with contextlib.suppress(psutil.Error):
        return str(process.status()) if process is not None else ""
    return ""
