"""`Cluster`: engines that are ranks. Started or taken, joined, called, watched, ended.

Threads
-------
Four kinds of thread meet here and in the floors above; each datum belongs to one of them, or has a lock.

- The *kernel's main thread*, or a subshell, runs cells and widget callbacks. It calls `Lab`, which starts and asks, and
  waits only where the user asked it to wait. Nothing here needs it: a run goes on while a long cell computes.
- The *driver*, one thread a run (`fsdp_lab.runs`), is the only one that sends work to the ranks while a run lasts, so
  that all ranks get the same calls in the same order. Stop, pause and apply are words left for it under its lock.
- The *client's IO thread* of ipyparallel receives replies and step events. It appends to the event store, wakes
  waiters, and returns: what it calls never blocks, never calls ipyparallel, never touches a widget.
- The *watcher*, one a cluster, learns of deaths from the client's IO thread and from the *launcher thread* by a queue,
  puts them in words, ends the calls that wait for the dead, and tells the callbacks given to `on_lost`. Meanwhile it looks
  for ranks that hang (doctor.py), and ends the calls that wait for these.

`Cluster._members` is read by all of them and replaced whole under `_lock`. `_sending` is held while a call is sent, so
that two calls cannot arrive in different orders on two ranks, and because a client's message ids are not made
atomically.
"""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import psutil

from fsdp_lab import __version__
from fsdp_lab.cluster import remote
from fsdp_lab.cluster.calls import Call, Outcome, Sink, read_reply
from fsdp_lab.cluster.doctor import Channel, Doctor, Heard
from fsdp_lab.cluster.engines import (
    Engines,
    GivenEngines,
    KeptEngines,
    LocalEngines,
    engine_environment,
    in_the_open,
    last_lines,
    still_there,
    take_over,
)
from fsdp_lab.cluster.errors import ClusterError, RankError, RankHung, RankLost, RankStuck, StartError
from fsdp_lab.cluster.kept import Kept, kept_clusters, waiting_s
from fsdp_lab.cluster.placement import Host, Placement, place, probe
from fsdp_lab.cluster.processes import alive, describe_exit, marked
from fsdp_lab.cluster.rendezvous import meeting_place, rank_order
from fsdp_lab.hang import limit

LOOK_S = 0.25  # between two looks for ranks that hang
SIGNAL_S = 1.0  # for the acknowledgement of a signal
# For a rank to close its session in good order. One that still waits for a lost peer takes longer, and a new engine
# beside the one that has to be started anyway takes less.
LEAVE_S = 3.0
TORN_S = 5.0  # when one rank is free, the others are, unless they wait for what a former kernel had no time to send
INSIST_S = 1.2  # later than a rank takes two interrupts for one (rank/guard.py)
NOTHING: Mapping[str, Any] = {}
HISTORY = 200  # message ids that the client may remember; it would keep all of them


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a start has come. `done` of `total` within `stage`."""

    stage: str
    done: int
    total: int
    seconds: float  # since the start began


@dataclass(frozen=True, kw_only=True)
class RankStatus:
    """One rank, as the kernel knows it without asking the rank: this never waits."""

    rank: int
    engine: int
    pid: int
    host: str
    device: str
    alive: bool
    state: str  # "idle", "gone", or what it is doing: "train", "apply", ...
    since_unix_s: float  # of the state
    step: int | None  # steps that it said it has done in its run; None before the first
    rss_bytes: int | None  # None where the process is gone, or on another machine
    reason: str = ""  # why it is gone
    heard: Heard | None = None  # its last beat: where it stands, also while it is blocked

    @property
    def waits_for(self) -> str:
        """The collective that it waits for, as in "all_gather 17 of transformer.h.3"; "" where it waits for none."""
        pending = self.heard.beat.pending if self.heard is not None and self.state != "idle" else None
        return pending.name if pending is not None else ""


@dataclass(kw_only=True)
class Member:
    """One rank's engine. Changed by the watcher and by the thread that sends; read by all."""

    rank: int
    engine: int
    pid: int
    host: str
    local: bool
    view: Any
    device: str = "cpu"
    doing: str = ""
    since_unix_s: float = field(default_factory=time.time)
    step: int | None = None
    lost: RankLost | None = None
    fate: str = ""  # why it was ended by us, in words
    process: psutil.Process | None = None
    channel: Channel | None = None  # from when it has joined

    def turn(self, doing: str) -> None:
        self.doing, self.since_unix_s = doing, time.time()


class Cluster:
    """Ranks that live in ipyparallel engines.

    Args:
        ranks: how many. None: 2, or all engines of a given cluster.
        devices: one for each rank, or None to choose (see `placement.place`).
        given: the user's own ipyparallel Cluster or Client, a profile, a cluster id, or a connection file. Its engines
            are used as they are and never ended.
        reduction: the wire's, "auto", "rank_ordered" or "native".
        take_busy: use GPUs that somebody else is using, too.
        rank_module: where `Session` and `host_store` are found on the ranks.
        environment: for the engines that are started here.
        timeout_s: for a start, and for the ranks' collectives.
        hang_s: how long a collective may wait for a rank, until that one is said to hang; None: half of `timeout_s`.
        keep: the ranks outlive this process, for a day or so many hours, until another cluster that is asked for in the
            same words takes them over (see `attached`).
        say: told how far a start has come; called on the thread that starts.

    Nothing is started by the constructor.
    """

    def __init__(
        self,
        ranks: int | None = None,
        *,
        devices: Sequence[str] | None = None,
        given: Any = None,
        reduction: str = "auto",
        take_busy: bool = False,
        rank_module: str = "fsdp_lab.rank",
        environment: Mapping[str, str] | None = None,
        timeout_s: float = 60,
        hang_s: float | None = None,
        keep: bool | float = False,
        say: Callable[[Progress], None] | None = None,
    ) -> None:
        self._doctor = Doctor(limit(hang_s, timeout_s))
        self._keep_s = waiting_s(keep, given)
        self._wanted, self._devices, self._given = ranks, devices, given
        self._reduction, self._take_busy, self._module = reduction, take_busy, rank_module
        self._environment, self._timeout_s = dict(environment or {}), timeout_s
        self._held: tuple[Mapping[str, Any], ...] = ()
        self._remarks: tuple[str, ...] = ()  # on kept ranks
        self._open_to: tuple[str, ...] = ()
        self._say = say or (lambda progress: None)
        self._started_s = 0.0
        self._token = secrets.token_hex(8)
        self._engines: Engines | None = None
        self._members: list[Member] = []
        self._placement = Placement(seats=())
        self._calls: list[Call] = []
        self._callbacks: list[Callable[[RankLost], None]] = []
        self._lock = threading.RLock()
        self._sending = threading.Lock()
        self._turn = 0  # calls sent so far; guarded by _sending
        self._changing = threading.Lock()  # one start, resize or close at a time
        self._deaths: queue.SimpleQueue[tuple[str, int, int | None] | None] = queue.SimpleQueue()
        self._watcher: threading.Thread | None = None
        self._leaving: set[int] = set()  # engine ids and pids whose end is meant; guarded by _lock
        self._closed = False

    # -- life -----------------------------------------------------------------------------------------------------

    def start(self) -> Cluster:
        """Starts or takes the engines and joins them; about 3 s, and what torch needs to be imported.

        Raises:
            StartError, SpecError (devices), RankError: one sentence each; everything that was started is ended again.
        """
        with self._changing:
            if self._closed or self._engines is not None:
                raise ClusterError("this cluster was started before; make another one")
            try:
                self._begin()
                if self._attach():
                    return self
                self._open()
                assert self._engines is not None
                n = self._wanted or (2 if self._engines.owned else len(self._engines.client.ids))
                self._assemble(n, self._devices)
            except BaseException:
                self._close()
                raise
        return self

    def resize(self, ranks: int, devices: Sequence[str] | None = None) -> None:
        """Exactly `ranks` healthy ranks, joined anew: engines are kept where they can be, added or ended where not.

        Lost ranks are replaced, too. What the ranks had trained is gone.

        Raises: as `start`; the cluster is closed then.
        """
        with self._changing:
            self._must_run()
            self._started_s = time.monotonic()
            try:
                if self._engines is not None and self._engines.broken:
                    self._reopen()
                self._assemble(ranks, devices)
            except BaseException:
                self._close()
                raise

    def close(self) -> None:
        """Ends what we started, whatever state it is in; ten seconds at most. Idempotent."""
        engines = self._engines
        if not self._changing.acquire(timeout=1):  # a start or resize is under way in another thread
            if engines is not None:
                engines.close()  # it fails then, and cleans up after itself
            self._changing.acquire(timeout=8)
        try:
            self._close()
        finally:
            with contextlib.suppress(RuntimeError):
                self._changing.release()

    def __enter__(self) -> Cluster:
        return self.start()

    def __exit__(self, *error: object) -> None:
        self.close()

    def leave(self) -> None:
        """Lets go of ranks that are kept: they stay as they are, for another process. Raises ClusterError: they are not."""
        with self._changing:
            self._must_run()
            assert self._engines is not None
            self._engines.leave()
            self._closed = True
            self._part()

    def _begin(self) -> None:
        self._started_s = time.monotonic()
        self._watcher = threading.Thread(target=self._watch, name="fsdp_lab-watcher", daemon=True)
        self._watcher.start()
        self._tell("starting engines", 0, self._wanted or 2)

    def _open(self) -> None:
        if self._given is None:  # a refusal costs nothing yet
            place([probe()] * (self._wanted or 2), self._devices, take_busy=self._take_busy)
        self._connect()

    def _connect(self) -> None:
        if self._given is not None:
            self._engines = GivenEngines(self._given, self._timeout_s)
        else:
            self._engines = LocalEngines(self._token, self._environment_of_engines, self._ended, self._timeout_s)
        self._listen_for_changes()

    @property
    def _environment_of_engines(self) -> dict[str, str]:
        return engine_environment(self._token, self._wanted or 2, self._environment)

    def _listen_for_changes(self) -> None:
        assert self._engines is not None
        # The client calls these on its IO thread when the hub says that an engine came or went. `wait_for_engines` uses
        # the same list; there is no public way to be told.
        self._engines.client._registration_callbacks.append(self._hub_says)

    def _reopen(self) -> None:
        """The controller is gone, and the engines are of no use without it: all of it anew."""
        assert self._engines is not None
        with self._lock:
            self._members = []
        self._engines.close()
        self._token = secrets.token_hex(8)
        self._connect()

    def _close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._engines is not None:
            with self._lock:
                self._leaving |= {m.engine for m in self._members} | {m.pid for m in self._members}
            with contextlib.suppress(Exception):
                self._dismiss([m for m in self._members if m.lost is None])
        self._part()
        if self._engines is not None:
            self._engines.close()

    def _part(self) -> None:
        """What this process has of the ranks ends; whether they do is not its business."""
        self._hang_up(self._members)
        if self._engines is not None:
            with contextlib.suppress(ValueError, AttributeError):
                self._engines.client._registration_callbacks.remove(self._hub_says)
        self._deaths.put(None)
        for call in self._live_calls():
            for rank in call.pending:
                call.finish(rank, Outcome(interrupted=True, unix_s=time.time()))

    def _dismiss(self, members: Sequence[Member]) -> list[Member]:
        """Interrupts these ranks if they work, and closes their sessions; returns those that would not in time."""
        call = self._insist("leave", members)
        return [m for m in members if m.rank in call.pending or call.failed_on(m.rank)]

    def _insist(self, what: str, members: Sequence[Member]) -> Call:
        """Asks ranks for something behind what they do, which is interrupted; over, or late by now."""
        busy = [m.rank for m in members if m.doing]
        if busy:
            self.signal(busy)
        call = self._send(what, {m.rank: NOTHING for m in members})
        if not call.wait_all(INSIST_S):  # it may settle with a peer that is gone: the second interrupt ends that
            before = {rank for other in self._live_calls() if other is not call for rank in other.pending}
            self.signal([m.rank for m in members if m.rank in before])
            call.wait_all(LEAVE_S - INSIST_S)
        return call

    # -- from engines to ranks --------------------------------------------------------------------------------------

    def _assemble(self, n: int, devices: Sequence[str] | None) -> None:
        engines = self._engines
        assert engines is not None
        if n < 1:
            raise ClusterError(f"{n} ranks: one is the least")
        engines.forget()
        self._held = ()
        kept = self._keep(n)
        missing = n - len(kept)
        if missing > 0 and engines.owned:
            self._tell("starting engines", 0, missing)
            kept += engines.add(missing, lambda k: self._tell("starting engines", k, missing), self._timeout_s)
        elif not engines.owned:
            kept = list(engines.client.ids)
            if len(kept) < n:
                raise StartError(
                    f"{n} ranks were asked for and the given cluster has {len(kept)} engine{'s' * (len(kept) != 1)}; "
                    "ask for fewer, or start more engines"
                )
        reports = self._introduce(kept)
        chosen = rank_order(reports)[:n]
        hosts = self._machines([reports[engine] for engine in chosen])
        placement = place(hosts, devices, take_busy=self._take_busy)
        members = [
            self._member(rank, engine, reports[engine], placement.devices[rank]) for rank, engine in enumerate(chosen)
        ]
        with self._lock:
            self._members, self._placement = members, placement
        self._join([reports[engine] for engine in chosen])
        self._open_to = () if engines.owned else in_the_open(engines.client, [r["host"] for r in reports.values()])
        if self._keep_s is not None:
            engines.keep(
                asked=self.asked,
                engines=tuple(chosen),
                pids=tuple(m.pid for m in members),
                placement=placement.to_dict(),
                limit_s=self._keep_s,
            )

    def _keep(self, n: int) -> list[int]:
        """Engine ids that go on; the sick and the superfluous are ended."""
        assert self._engines is not None
        healthy = [m for m in self._members if m.lost is None]
        refusing = self._dismiss(healthy) if healthy else []
        kept = [m for m in healthy if m not in refusing][:n]
        gone = [m for m in self._members if m not in kept]
        with self._lock:
            self._leaving |= {m.engine for m in gone} | {m.pid for m in gone}
            self._members = []
        self._engines.end([m.pid for m in gone], term_s=0.7)
        self._hang_up([*kept, *gone])
        return [m.engine for m in kept]

    def _introduce(self, engines: Sequence[int]) -> dict[int, Mapping[str, Any]]:
        """What each engine says of itself, by engine id."""
        assert self._engines is not None
        people = [
            Member(rank=i, engine=engine, pid=-1, host="", local=False, view=self._engines.client.direct_view(engine))
            for i, engine in enumerate(engines)
        ]
        with self._lock:
            self._members = people
        told = self.call("describe", probe=not self._engines.owned, timeout_s=self._timeout_s)
        return dict(zip(engines, told, strict=True))

    def _machines(self, reports: Sequence[Mapping[str, Any]]) -> list[Host]:
        if self._engines is not None and self._engines.owned:
            return [probe(ours=frozenset(r["pid"] for r in reports))] * len(reports)
        by_name = {r["host"]: r["machine"] for r in reports}
        return [by_name[r["host"]] for r in reports]

    def _member(self, rank: int, engine: int, report: Mapping[str, Any], device: str) -> Member:
        assert self._engines is not None
        local = self._engines.owned or (report["host"] == socket.gethostname() and still_there(report["pid"]))
        process = None
        if local:
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(report["pid"])
        return Member(
            rank=rank,
            engine=engine,
            pid=report["pid"],
            host=report["host"],
            local=local,
            view=self._engines.client.direct_view(engine),
            device=device,
            process=process,
        )

    def _join(self, reports: Sequence[Mapping[str, Any]]) -> None:
        n = len(reports)
        self.call("take", owner=self._token, timeout_s=self._timeout_s)
        self._tell("importing torch", 0, n)
        self.call("load", module=self._module, timeout_s=2 * self._timeout_s)
        self._tell("joining ranks", 0, n)
        address, toward = meeting_place(reports)
        address, port = self._send("host", {0: {"module": self._module, "address": address, "toward": toward}}).results(
            self._timeout_s
        )[0]
        if address != "127.0.0.1":
            self.call("reach", address=address, port=port, timeout_s=10)
        common = {
            "module": self._module,
            "world_size": n,
            "host": address,
            "port": port,
            "reduction": self._reduction,
            "timeout_s": self._timeout_s,
        }
        self._listen_for_beats()
        each = {
            seat.rank: {
                **common,
                "beats": self._members[seat.rank].channel.header,  # type: ignore[union-attr]
                "rank": seat.rank,
                "device": seat.device,
                "threads": seat.threads,
                "memory_cap": seat.memory_cap,
                "shared_gpu_ranks": seat.shared_gpu_ranks,
            }
            for seat in self._placement.seats
        }
        self._send("join", each).results(self._timeout_s + 10)
        self._tell("ready", n, n)

    def _listen_for_beats(self) -> None:
        assert self._engines is not None
        self._doctor.forget()
        for m in self._members:
            name = f"fsdp_lab-beats-{secrets.token_hex(8)}"
            m.channel = Channel(self._engines.client, name, Sink(lambda data: self._doctor.hear(data["beat"])))
            m.channel.open()

    def _hang_up(self, members: Sequence[Member]) -> None:
        for channel in [m.channel for m in members if m.channel is not None]:
            channel.close()

    # -- ranks that a former kernel has left --------------------------------------------------------------------------

    @property
    def asked(self) -> dict[str, Any]:
        """What it was asked for, as JSON gives it back: kept ranks that were asked for in the same words are taken over."""
        return {
            "ranks": self._wanted,
            "devices": None if self._devices is None else list(self._devices),
            "reduction": self._reduction,
            "take_busy": self._take_busy,
            "rank_module": self._module,
            "environment": self._environment,
            "timeout_s": self._timeout_s,
            "notebook": os.environ.get("JPY_SESSION_NAME", ""),  # JupyterLab's: another notebook's are not taken
            "python": sys.executable,
            "version": __version__,
        }

    def _attach(self) -> bool:
        """Takes over what is kept. False where there is nothing, or it does not answer: it is ended then."""
        if self._keep_s is None:
            return False
        while (found := take_over(self.asked, self._keep_s)) is not None:
            kept, guardian = found
            self._token = kept.token
            engines = KeptEngines(kept, guardian, self._environment_of_engines, self._ended)
            try:
                engines.open()
                self._engines = engines
                self._listen_for_changes()
                self._take_up(kept)
                return True
            except BaseException as e:
                self._engines, self._members, self._token = None, [], secrets.token_hex(8)
                if not isinstance(e, ClusterError):
                    engines.leave()  # an interrupt, for one, is no reason to lose what they hold
                    raise
                engines.close()
                self._remarks = (f"ranks that a former kernel left were ended, and new ones started: {e.sentence}",)
        if others := [kept.id for kept in kept_clusters() if kept.free]:
            self._remarks += (f"other ranks are kept ({', '.join(others)}); `fsdp-lab kept` lists and ends them",)
        return False

    def _take_up(self, kept: Kept) -> None:
        """The ranks speak to this client from now on; what they are busy with comes to its end first."""
        placement = Placement.from_dict(kept.placement)
        members = [
            self._member(rank, engine, {"pid": pid, "host": socket.gethostname()}, placement.devices[rank])
            for rank, (engine, pid) in enumerate(zip(kept.engines, kept.pids, strict=True))
        ]
        with self._lock:
            self._members, self._placement = members, placement
        self._listen_for_beats()
        self._turn = time.time_ns()  # none of its calls is taken for one of the former kernel's
        call = self._send("attach", {m.rank: {"beats": m.channel.header} for m in members if m.channel is not None})
        deadline = time.monotonic() + self._timeout_s
        while not call.wait(0.05) and len(call.pending) == len(members) and time.monotonic() < deadline:
            continue
        self._held = tuple(call.results(TORN_S))
        for member, held in zip(members, self._held, strict=True):
            member.step = held["step"]
        self._tell("ready", len(members), len(members))

    @property
    def keeps(self) -> bool:
        """Whether the ranks outlive this process."""
        return self._keep_s is not None

    @property
    def attached(self) -> bool:
        """Whether the ranks were started by a former kernel."""
        return isinstance(self._engines, KeptEngines)

    @property
    def held(self) -> tuple[Mapping[str, Any], ...]:
        """What each rank said of itself when it was taken over (`Session.status`); empty where it was started here."""
        return self._held

    # -- calls ------------------------------------------------------------------------------------------------------

    def submit(self, what: str, *, take: Callable[[Mapping[str, Any]], None] | None = None, **arguments: Any) -> Call:
        """Sends one call to all ranks and returns at once.

        Args:
            what: a name in `remote.ACTIONS`.
            take: called on the client's IO thread with what the ranks publish meanwhile; it must return at once.

        Raises:
            RankLost: a rank is gone, so nothing can be done together.
        """
        self._must_run()
        with self._lock:
            ranks = [m.rank for m in self._members]
            for member in self._members:
                if member.lost is not None:
                    raise member.lost
        return self._send(what, dict.fromkeys(ranks, arguments), take)

    def call(self, what: str, *, timeout_s: float | None = None, **arguments: Any) -> list[Any]:
        """`submit`, then the results in rank order. Raises what `Call.results` does."""
        return self.submit(what, **arguments).results(timeout_s)

    def settle(self) -> dict[int, Any]:
        """After a failure: what each rank that is left says of itself (`Session.status`), when none of them works any more.
        One that does not get out of its work is ended, where it is ours; it takes some seconds then."""
        left = [m for m in self._members if m.lost is None]
        call = self._insist("status", left)
        for rank in call.pending:
            self.end_rank(rank, "did not leave a step that had failed, and was ended")
        call.wait_all(SIGNAL_S)
        return call.values

    def ask(self, what: str, ranks: Collection[int], **arguments: Any) -> dict[int, Any]:
        """One call on some ranks, by rank. Raises what `Call.results` does."""
        values = self._send(what, dict.fromkeys(ranks, arguments)).results(self._timeout_s)
        return dict(zip(ranks, values, strict=True))

    def _send(
        self,
        what: str,
        each: Mapping[int, Mapping[str, Any]],
        take: Callable[[Mapping[str, Any]], None] | None = None,
    ) -> Call:
        """One message a rank: a message to many is over only when all are."""
        assert self._engines is not None
        client = self._engines.client
        call = Call(what, list(each), self)
        with self._lock:
            members = {rank: self._members[rank] for rank in each}
            self._calls = [c for c in self._calls if c.pending] + [call]
            for member in [m for m in members.values() if not m.doing]:  # on others this waits behind what they do
                member.turn(what)
        with self._sending:
            self._turn += 1
            for rank, arguments in each.items():
                member = members[rank]
                if member.channel is not None:
                    member.channel.open()
                try:
                    future = member.view.apply_async(remote.call, what, dict(arguments), self._token, self._turn)
                except Exception as e:  # the engine is unknown by now, or the connection is closed
                    error = {"kind": type(e).__name__, "reason": str(e), "trace": "", "unix_s": time.time()}
                    call.finish(rank, Outcome(error=error, unix_s=time.time()))
                    continue
                self._listen(client, future, member, take)
                future.add_done_callback(partial(self._replied, call, member))
                del member.view.history[:]  # it would keep the id of every call
            del client.history[:-HISTORY]
        for rank, member in members.items():  # gone while it was being sent
            if member.lost is not None:
                call.lose(rank, member.lost)
        return call

    def _listen(
        self, client: Any, future: Any, member: Member, take: Callable[[Mapping[str, Any]], None] | None
    ) -> None:
        def receive(data: Mapping[str, Any]) -> None:
            for event in data.get("events", ()):
                member.step = event["step"] + 1
            if take is not None:
                take(data)

        metadata = client.metadata[future.msg_ids[0]]
        early, metadata["data"] = metadata["data"], Sink(receive)
        if early:  # what came between the sending and this line
            receive(early)

    def _replied(self, call: Call, member: Member, future: Any) -> None:
        """On the client's IO thread."""
        outcome = read_reply(future)
        if (outcome.error or NOTHING).get("kind") != "EngineError":  # else it died while doing that
            with self._lock:
                behind = (c.what for c in self._live_calls() if c is not call and member.rank in c.pending)
                member.turn(next(behind, ""))
        call.finish(member.rank, outcome)

    def _live_calls(self) -> list[Call]:
        with self._lock:
            return [c for c in self._calls if c.pending]

    # -- the ladder of calls ----------------------------------------------------------------------------------------

    def interrupt(self) -> None:
        """SIGINT to every rank that works; its session ends the step in progress and keeps its state."""
        self.signal([m.rank for m in self._members if m.doing and m.lost is None])

    def signal(self, ranks: Sequence[int]) -> None:
        """SIGINT: to the process itself on this machine, elsewhere by the engine's nanny, which a busy engine has too.

        Returns when all are delivered, or after a second. The kernel's own interrupt does not reach engines.
        """
        if self._engines is None:
            return
        client, sent = self._engines.client, []
        for member in [self._members[rank] for rank in ranks]:
            try:
                if member.process is None:
                    raise LookupError
                member.process.send_signal(signal.SIGINT)
            except (LookupError, psutil.AccessDenied):
                with self._sending, contextlib.suppress(Exception):  # gone in this moment: the watcher says so
                    sent.append(client.send_signal("SIGINT", targets=[member.engine], block=False))
            except psutil.Error:
                continue
        deadline = time.monotonic() + SIGNAL_S
        for future in sent:
            with contextlib.suppress(Exception):
                future.result(max(0.0, deadline - time.monotonic()))

    def ping(self, rank: int, answered: Callable[[], None]) -> None:
        """Asks an engine for any sign of life, behind what it is doing."""
        with self._sending, contextlib.suppress(Exception):
            future = self._members[rank].view.apply_async(remote.call, "ping", {}, self._token, 0)
            future.add_done_callback(lambda f: answered() if f.exception() is None else None)

    def end_rank(self, rank: int, fate: str) -> bool:
        """Ends one rank's process, if it is ours. The watcher says that it is gone."""
        if self._engines is None or not self._engines.owned:
            return False
        member = self._members[rank]
        member.fate = fate
        self._engines.end([member.pid], term_s=0.2)
        return True

    def strike(self, rank: int, number: int) -> None:
        """Sends a signal to one rank's process, as whoever wishes it ill. Raises ClusterError where it is not ours."""
        process = self._members[rank].process
        if not self.owned or process is None:
            raise ClusterError(f"rank {rank} is not ours to signal: its engine was started by somebody else")
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)

    def may_be_dying(self, ranks: Sequence[int]) -> bool:
        """Whether the end of one of them may explain what its peers said: it is gone from here, or out of sight."""
        return any(m.process is None or not alive(m.process) for m in self._members if m.rank in ranks)

    # -- deaths -----------------------------------------------------------------------------------------------------

    def on_lost(self, callback: Callable[[RankLost], None]) -> None:
        """`callback(lost)` on the watcher thread when a rank's process is gone that was meant to live."""
        self._callbacks.append(callback)

    @property
    def lost(self) -> dict[int, RankLost]:
        """Ranks that are gone."""
        with self._lock:
            return {m.rank: m.lost for m in self._members if m.lost is not None}

    def _ended(self, pid: int, code: int | None) -> None:
        """On the launcher thread: a process that we started has ended."""
        self._deaths.put(("pid", pid, code))

    def _hub_says(self, event: Mapping[str, Any]) -> None:
        """On the client's IO thread: the hub has seen an engine come or go."""
        if event.get("event") == "unregister":
            self._deaths.put(("engine", int(event["id"]), None))

    def _watch(self) -> None:
        while True:
            try:
                death = self._deaths.get(timeout=LOOK_S)
            except queue.Empty:
                self._look_for_hangs()
                self._look_for_stopped()
                continue
            if death is None:
                return
            by, number, code = death
            if self._engines is not None and by == "pid" and number == self._engines.controller_pid:
                self._bury_all(f"is out of reach, because ipyparallel's controller {describe_exit(code)}")
                continue
            with self._lock:
                found = [m for m in self._members if (m.pid if by == "pid" else m.engine) == number and m.lost is None]
                meant = number in self._leaving if by == "pid" else bool(found) and found[0].pid in self._leaving
            if found and not meant and not self._closed:
                self._bury(found[0], code)

    def _look_for_hangs(self) -> None:
        """Ends the calls of ranks that wait for one which does not come."""
        if not (calls := [call for call in self._live_calls() if not call.failed]):
            return
        with self._lock:
            processes = {m.rank: m.process for m in self._members}
        hang = self._doctor.look(processes, min(call.started_s for call in calls))
        if hang is not None:
            self._doctor.forget()
            hung = RankHung(hang)
            for call in calls:
                call.hang(hung)

    def _look_for_stopped(self) -> None:
        """Ends ranks that are stopped and that nobody waits for: otherwise their hearts alone would tell, later."""
        with self._lock:
            processes = {m.rank: m.process for m in self._members if m.lost is None and not m.fate}
        for rank in self._doctor.long_stopped(processes):
            self.end_rank(rank, "was stopped (SIGSTOP), did not go on, and was ended")

    def _bury_all(self, fate: str) -> None:
        """No rank can be reached any more."""
        for member in [m for m in self._members if m.lost is None and not self._closed]:
            member.fate = fate
            self._bury(member, None)

    def _bury(self, member: Member, code: int | None) -> None:
        """Says that a rank is gone: to its call, to status, to the callbacks."""
        unix_s, doing = time.time(), member.doing
        engines = self._engines
        deadline = time.monotonic() + 0.5  # the exit code comes by another way than the news
        while (
            engines is not None and engines.owned and code is None and not member.fate and time.monotonic() < deadline
        ):
            code = engines.exit_code(member.pid)
            time.sleep(0.01)
        reason = member.fate or describe_exit(code)
        if code is None and not member.fate and member.process is not None and alive(member.process):
            reason = "no longer answers (stopped, or its machine stands still), so it is left out"
            if engines is not None:
                engines.end([member.pid], term_s=0.1)
        lost = RankLost(
            rank=member.rank,
            engine=member.engine,
            pid=member.pid,
            host=member.host,
            reason=reason,
            doing=doing,
            unix_s=unix_s,
        )
        lost.log = last_lines(engines.log(member.pid)) if engines is not None else ""
        with self._lock:
            member.lost = lost
            member.turn("gone")
        for call in self._all_calls():
            call.lose(member.rank, lost)
        for callback in list(self._callbacks):
            with contextlib.suppress(Exception):
                callback(lost)

    def _all_calls(self) -> list[Call]:
        with self._lock:
            return list(self._calls)

    # -- what the kernel knows -----------------------------------------------------------------------------------------

    @property
    def ranks(self) -> int:
        return len(self._members)

    @property
    def placement(self) -> Placement:
        """Seats, and notes on what the times are worth."""
        return self._placement

    @property
    def notes(self) -> tuple[str, ...]:
        return self._placement.notes

    @property
    def remarks(self) -> tuple[str, ...]:
        """What else is to be known of these ranks, in words."""
        return (*self._remarks, *self._open_to)

    @property
    def owned(self) -> bool:
        """Whether the engines were started here."""
        return self._engines is not None and self._engines.owned

    @property
    def running(self) -> bool:
        """Started, not closed, and no rank lost."""
        return self._engines is not None and not self._closed and bool(self._members) and not self.lost

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def pids(self) -> list[int]:
        """Process ids in rank order."""
        return [m.pid for m in self._members]

    @property
    def processes(self) -> list[int]:
        """Process ids of all that was started here and is there: engines, their nannies, the controller."""
        return [p.pid for p in marked(self._token)] if self.owned else []

    @property
    def engine_ids(self) -> list[int]:
        """ipyparallel's engine ids in rank order."""
        return [m.engine for m in self._members]

    @property
    def client(self) -> Any:
        """An `ipyparallel.Client` for the user: views, `%px`. Ours is another one where the engines are ours."""
        self._must_run()
        assert self._engines is not None
        return self._engines.user_client

    def activate(self) -> None:
        """Makes `%px` and `%%px` run on the ranks, in rank order; does nothing outside IPython.

        Cells run between chunks of steps. One that communicates has to find the ranks in the same order of work: pause
        the run first.
        """
        from IPython.core.getipython import get_ipython

        if get_ipython() is not None:
            self.client.activate(targets=self.engine_ids)

    def status(self) -> list[RankStatus]:
        """Every rank, in rank order, without asking it."""
        return [self._status_of(m) for m in self._members]

    def _status_of(self, m: Member) -> RankStatus:
        rss: int | None = None
        there = m.lost is None and not self._closed
        if there and m.process is not None:
            try:
                rss = m.process.memory_info().rss
            except psutil.Error:
                there = False  # the watcher will say why in a moment
        return RankStatus(
            rank=m.rank,
            engine=m.engine,
            pid=m.pid,
            host=m.host,
            device=m.device,
            alive=there,
            state=(m.doing or "idle") if there else "gone",
            since_unix_s=m.since_unix_s,
            step=m.step,
            rss_bytes=rss,
            reason="" if m.lost is None else m.lost.reason,
            heard=self._doctor.last(m.rank) if there else None,
        )

    def waiting(self, after_s: float) -> str:
        """Who waits for what, in a sentence, where a rank that works has waited for so long; "" else."""
        heard = [(m.rank, self._doctor.last(m.rank)) for m in self._members if m.doing and m.lost is None]
        late = [
            (h.waits_s, rank, h.beat.pending) for rank, h in heard if h is not None and (h.waits_s or 0.0) > after_s
        ]
        if not late:
            return ""
        waits_s, rank, pending = max(late, key=lambda one: one[0] or 0.0)
        assert pending is not None
        return f"rank {rank} has waited {waits_s:.0f} s in {pending.name}"

    def _must_run(self) -> None:
        if self._engines is None:
            raise ClusterError("the ranks are not started")
        if self._closed:
            raise ClusterError("the ranks were closed; make a new lab")

    def _tell(self, stage: str, done: int, total: int) -> None:
        seconds = time.monotonic() - self._started_s
        self._say(Progress(stage=stage, done=done, total=total, seconds=seconds))

    def __repr__(self) -> str:
        what = (
            "closed" if self._closed else f"{self.ranks} ranks on {', '.join(self.placement.devices) or 'nothing yet'}"
        )
        return f"<Cluster: {what}{f', {len(self.lost)} lost' if self.lost else ''}>"


__all__ = ["Cluster", "Progress", "RankError", "RankLost", "RankStatus", "RankStuck"]
