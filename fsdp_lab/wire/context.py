"""`WireContext`: the state that all process groups of one rank share: meter, reduction order, emulated link, abort.

Note: abort. A Python exception does not reach a rank that is blocked in C++, in Gloo's `wait` or in DDP's reducer. So a
wait in C++ is cut into short slices (`WireWork.wait`), and every future that C++ may wait for is our own, so that `abort`
can complete it from any thread. Its content is invalid then: the step that sees it must be discarded, which `check`
enforces at the next call to the wire.

Gloo's operation cannot be cancelled, and destroying its group waits for it: a separate thread does (`destroy_async`), and
the session continues with new groups. A rank that did not join the operation closes its end of the connections, which ends
it on the others; otherwise their timeout does (with torch 2.13, a process in which several had timed out crashed seconds
later). Until then Gloo may read and write its tensors, even if it has not begun. So their storage must not be freed by
force (`busy_addresses`), and a cancelled work is never finished afterwards (`WireWork.cancel`). Callbacks in Gloo's
threads must not hold a group: if theirs were the last reference, a thread of the group would destroy it and join itself.

Over NCCL the main thread is not blocked in a wait of ours but in the device, until NCCL is aborted: see nccl.py.

Note: a profiler and an abort. The end of a Gloo operation is written by Gloo's thread into memory of torch's profiler, which
is freed when the profiler stops. In a step that is given up the operation may end later and corrupt the heap. So a profiler
that is stopped while operations may still be running must not record them (`hide_from_profiler`)."""

import contextlib
import math
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ContextDecorator, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import distributed as dist

from fsdp_lab.base.streams import Streams
from fsdp_lab.wire.arena import Arena
from fsdp_lab.wire.channels import Channel, NotShared
from fsdp_lab.wire.gpu_memory import DeviceMemory, GpuArena
from fsdp_lab.wire.host_group import HostGroup
from fsdp_lab.wire.link import Alarm, DroppedWork, Link, LinkDirection, pause_until
from fsdp_lab.wire.meter import Collective, Meter
from fsdp_lab.wire.nccl import Nccl, NcclGroup, NcclOutcome
from fsdp_lab.wire.shared_memory import GpuGroup, SharedGroup, SharedWork, open_shared

_RECENT = 64  # collectives remembered for a diagnosis: more than ranks run ahead of each other
_DTYPE_PREFIX = len("torch.")
_MANY = 4096  # in flight: then it is time to look which have ended
SHARED_MEMORY = "shared memory"  # what carries host tensors, where it is not Gloo
GPU_MEMORY = "the GPU's memory"  # what carries tensors between ranks that share a GPU, where they are not staged


class ReductionOrder(Enum):
    """The order in which the ranks' summands are added.

    RANK_ORDERED exchanges the summands and adds them in rank order, so that the sum of an element does not depend on
    its position in a buffer: all backends then give the same bits. NATIVE leaves the order to Gloo or NCCL. AUTO is
    rank-ordered where that is not slower: for reduce-scatter over Gloo, which is an all-reduce internally."""

    AUTO = "auto"
    RANK_ORDERED = "rank_ordered"
    NATIVE = "native"


class RankAborted(RuntimeError):
    """The step in progress was given up; the message says why, and because of which rank.

    Attributes:
        others_know: every rank leaves the step for this reason, and the rank at fault announces it."""

    def __init__(self, why: str, *, others_know: bool = False) -> None:
        super().__init__(why)
        self.others_know = others_know


class WireTimeout(RuntimeError):
    """A collective did not complete in time."""


# An operation in flight, the storages that Gloo uses, and Gloo's `Work` or the `NcclOutcome` of NCCL's.
Running = tuple[Collective, Sequence[torch.UntypedStorage], Any]


class UnitScope(ContextDecorator):
    """Collectives issued inside belong to this unit. Also a decorator."""

    def __init__(self, context: "WireContext", unit: str) -> None:
        self._context, self._unit, self._before = context, unit, ""

    def _recreate_cm(self) -> "UnitScope":
        return UnitScope(self._context, self._unit)  # of each call

    def __enter__(self) -> None:
        self._before, self._context.unit = self._context.unit, self._unit

    def __exit__(self, *_: object) -> None:
        self._context.unit = self._before


@dataclass(eq=False, slots=True)
class Timed:
    """A collective over NCCL, with the events of its issue and of its end."""

    issued: Collective
    begin: Any
    end: Any = None


class WireContext:
    """The wire of one rank. Groups report to it; the session reads its meter and calls `abort`."""

    def __init__(
        self,
        *,
        reduction: ReductionOrder = ReductionOrder.AUTO,
        timeout_s: float = 120.0,
        shared_memory: bool = False,
        address: str = "",
        rank: int = 0,
        hosts: Sequence[str] = (),
    ) -> None:
        """`shared_memory`: groups whose ranks share a host use it in place of Gloo. `address`: of this host, where Gloo
        listens; "": of the interfaces in GLOO_SOCKET_IFNAME, else what the host's name resolves to. `hosts`: of all
        ranks, by name, `rank` is this one; (): unknown."""
        self.meter = Meter()
        self.address, self.rank, self.hosts = address, rank, tuple(hosts)
        self.reduction = reduction
        self.timeout_s = timeout_s  # of a collective
        self.timeout = timedelta(seconds=timeout_s)  # for groups to be opened
        self.last: Collective | None = None
        self.on_issue: Callable[[Sequence[torch.Tensor]], None] | None = None  # given the tensors of each collective
        self.streams: Streams | None = None  # of the rank's GPU
        self.nccl: Nccl | None = None  # where CUDA tensors go over NCCL
        self.device_memory: DeviceMemory | None = None  # where ranks share a GPU
        self.not_shared: dict[str, str] = {}  # by group, why it does not use shared memory
        self.not_on_gpu: dict[str, str] = {}  # by group, why its ranks do not share the memory of their GPU
        self.piece_bytes: int | None = None  # what was fastest between hosts (`Wire._fastest_pieces`); None: on one
        self.shared_memory = shared_memory  # of groups that are opened from now on
        self._arena: Arena | None = None
        self._most_ranks = 0  # of any group that was opened; the world's is the first
        self._closed: list[tuple[frozenset[int], list[Channel], SharedGroup]] = []  # groups, and what others may read
        self.hide_from_profiler = False  # Gloo's operations: see the note on a profiler and an abort
        self.session: Any = None  # the `rank.Session` that opened its groups, for those who know a group alone
        self.watched = False  # whether a loop is being watched (rank/watch)
        self.unit = ""  # on whose behalf collectives are issued
        self.link: Link | None = None  # emulated; None: the real one
        self.alarm = Alarm()
        self._abort_event = threading.Event()  # set while `aborted`: wakes threads that wait for the link
        self.dropped: DroppedWork | None = None  # in place of all operations, while the link is cut
        self._reset_restores_link = False
        self._sequence = 0
        self._ordinals: Counter[str] = Counter()  # by group
        self._recent: deque[Collective] = deque(maxlen=_RECENT)
        self._cancelled_before = 0  # sequence number: nothing issued earlier is waited for
        self.aborted: str | None = None  # why
        self._lock = threading.Lock()
        self._timed: list[Timed] = []
        self._timed_from: tuple[Any, float] | None = None  # an event and its time; None: nothing is timed
        self.alive: Any = None  # of a GPU's rank, [1] in pinned memory: 1.0; nan before an abort ends any collective
        self._running: dict[int, Running] = {}  # by sequence number
        self._cancellable: weakref.WeakSet[Any] = weakref.WeakSet()  # C++ may be waiting for their futures
        self._failed: str | None = None  # what NCCL's watchdog says
        self._groups: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
        self._nccl_groups: set[NcclGroup] = set()
        self._members: dict[str, tuple[int, ...]] = {}  # ranks by group
        self._destroying: list[tuple[threading.Thread, list[Any]]] = []

    @contextmanager
    def patience(self, seconds: float) -> Iterator[None]:
        """Collectives issued inside may take so long: another rank may be at work that others have to wait for."""
        before = self.timeout_s
        self._set_timeout(max(before, seconds))
        try:
            yield
        finally:
            self._set_timeout(before)

    def _set_timeout(self, seconds: float) -> None:
        self.timeout_s = seconds
        for group in self.groups():
            group._set_timeout(timedelta(seconds=seconds))  # type: ignore[attr-defined]

    def add_group(self, group: dist.ProcessGroup, name: str, ranks: Sequence[int]) -> None:
        self._groups.add(group)
        self._members[name] = tuple(ranks)

    def open_nccl(self, store: dist.Store, rank: int, size: int) -> NcclGroup | None:
        """A group of NCCL's that `abort` aborts too, or None without NCCL."""
        if self.nccl is None:
            return None
        group = NcclGroup(self.nccl.open(store, rank, size, self.timeout))
        with self._lock:
            self._nccl_groups.add(group)
        if self.aborted is not None:  # meanwhile
            group.abort()
        return group

    def close_nccl(self, group: NcclGroup, name: str) -> None:
        """`name`: of the group whose collectives go over it."""

        def busy() -> bool:
            return any(c.group == name and isinstance(inner, NcclOutcome) for c, _, inner in self._in_flight())

        group.close(aborted=self.aborted is not None, busy=busy)
        with self._lock:
            self._nccl_groups.discard(group)

    def open_shared(self, store: dist.Store, rank: int, ranks: frozenset[int], name: str) -> HostGroup | None:
        """Shared memory for a group of this name and these ranks of the world; None where they use Gloo."""
        if not self.shared_memory:
            return None
        self._most_ranks = max(self._most_ranks, len(ranks))
        try:
            group = open_shared(store, rank, len(ranks), group=HostGroup, arena=self._own_arena, **self._sharing)
        except NotShared as e:
            self.not_shared[name] = str(e)
            return None
        # All these ranks are here, so they have left the groups that were closed before.
        left = [channels for former, channels, _ in self._closed if former <= ranks]
        self._closed = [closed for closed in self._closed if not closed[0] <= ranks]
        for channel in (channel for channels in left for channel in channels):
            channel.release_unread()
        return group

    def open_on_gpu(self, store: dist.Store, rank: int, ranks: frozenset[int], name: str) -> SharedGroup | None:
        """Shared memory of a GPU, for its tensors; None where they are staged through the host."""
        memory = self.device_memory
        if memory is None or not self.shared_memory:
            return None
        pieces = dist.PrefixStore("pieces", store)

        def wait_for_stream() -> None:
            if self.streams is not None:
                self.streams.current().synchronize()

        arena = partial(GpuArena, memory, pieces, rank, wait_for_stream)
        try:
            return open_shared(store, rank, len(ranks), group=GpuGroup, arena=arena, **self._sharing)
        except NotShared as e:
            self.not_on_gpu[name] = str(e)
            return None

    @property
    def _sharing(self) -> dict[str, Any]:
        """The arguments of `open_shared` that all groups have in common."""
        return {"check": self.check, "timeout": self.timeout, "most_ranks": self._most_ranks}

    def close_shared(self, group: SharedGroup, ranks: frozenset[int]) -> None:
        """What others may still read stays until a group of all these ranks is opened."""
        channels = group.close(aborted=self.aborted is not None)
        if channels or not group.all_parted:
            self._closed.append((ranks, channels, group))

    @property
    def host_carrier(self) -> str:
        """The carrier of host tensors, and why it is not shared memory."""
        if not self.shared_memory:
            return "Gloo"
        why = next(iter(self.not_shared.values()), "")
        return f"Gloo (no shared memory: {why})" if why else SHARED_MEMORY

    @property
    def pool_bytes(self) -> int:
        """Bytes that this rank's pool of shared memory has taken of the machine's, in use or not."""
        return 0 if self._arena is None else self._arena.used_bytes

    def trim_pool(self) -> None:
        """Give the pool's free memory back to the machine."""
        if self._arena is not None:
            self._arena.poll()
            self._arena.trim()

    def _own_arena(self) -> Arena:
        if self._arena is None:
            self._arena = Arena()
        return self._arena

    def remove_group(self, name: str) -> None:
        self.not_shared.pop(name, None)
        self.not_on_gpu.pop(name, None)
        self._members.pop(name, None)
        self._ordinals.pop(name, None)

    def groups(self) -> list[dist.ProcessGroup]:
        """The groups that are alive."""
        return list(self._groups)

    def unit_scope(self, unit: str) -> UnitScope:
        return UnitScope(self, unit)

    def set_unit(self, unit: str) -> None:
        """Like `unit_scope`, until the next call: for callers that cannot tell when all collectives are issued."""
        self.unit = unit

    def record_issue(
        self, group: str, whole: bool, kind: str, size: int, payload_bytes: int, link_bytes: int, dtype: Any
    ) -> Collective:
        """Number and meter a collective; `whole`: all ranks of the group issue it. `dtype`: torch's, or None. Raises
        RankAborted."""
        if self.aborted is not None:
            self.check()
        ordinal, name, meter = -1, "" if dtype is None else str(dtype)[_DTYPE_PREFIX:], self.meter
        if whole:
            ordinal = self._ordinals[group]
            self._ordinals[group] = ordinal + 1
        self.last = issued = Collective(
            self._sequence, kind, group, size, link_bytes, time.perf_counter(),
            ordinal, self.unit, name, payload_bytes, meter.backwards,
        )  # fmt: skip
        self._sequence += 1
        self._recent.append(issued)
        meter.issued(issued)
        return issued

    def track(self, issued: Collective, storages: Sequence[torch.UntypedStorage], inner: Any) -> None:
        """Remember an operation that has been started, and the storages that Gloo uses."""
        if len(self._running) > _MANY:
            self._in_flight()
        self._running[issued.sequence] = issued, storages, inner

    def untrack(self, issued: Collective) -> None:
        """Forget an operation that has completed or failed, or was forgotten before."""
        self._running.pop(issued.sequence, None)

    def ended(self, issued: Collective, _: object = None) -> None:
        """Called when the bytes of a collective have arrived, in any thread."""
        issued.end_s = max(time.perf_counter(), issued.link_end_s or 0.0)
        self._running.pop(issued.sequence, None)

    def _in_flight(self) -> list[Running]:
        """The operations in flight, oldest first; what has ended is forgotten."""
        in_flight = []
        for sequence, running in sorted(self._running.copy().items()):  # Gloo's threads remove entries too
            issued, _, inner = running
            if not inner.is_completed():
                in_flight.append(running)
                continue
            if isinstance(inner, NcclOutcome) and (why := inner.failure()) is not None:
                self._failed = self._failed or f"{issued.described} {why}"
            self._running.pop(sequence, None)
        return in_flight

    def busy_addresses(self) -> set[int]:
        """Addresses of the storage that Gloo operations may still read or write."""
        return {storage.data_ptr() for _, storages, _ in self._in_flight() for storage in storages}

    def add_cancellable(self, work: Any) -> None:
        """Remember a `WireWork` whose future was handed out, so that an abort can complete it."""
        with self._lock:
            self._cancellable.add(work)
        if self.aborted is not None:
            work.cancel()

    def start_timing(self, mark: tuple[Any, float] | None = None) -> None:
        """Time collectives over NCCL from here on. `mark`: an event and its time; None: the device is idle, so now."""
        self._timed = []
        self._timed_from = None if self.nccl is None else mark or (self.nccl.record(), time.perf_counter())

    def time_nccl(self, issued: Collective) -> Timed | None:
        """Called before a collective is given to NCCL, on the stream behind which it begins. The caller adds the event of
        its end, on the stream that has been ordered behind it."""
        if self.nccl is None or self._timed_from is None:
            return None
        timed = Timed(issued, self.nccl.record())
        self._timed.append(timed)
        return timed

    def end_timing(self) -> Callable[[], None]:
        """Returns what waits for the ends of NCCL's collectives since `start_timing`, and sets their times. Those of a group
        run one after the other, so one begins when its inputs are ready and the one before has ended. The end is where the
        stream that waits continues."""
        timed, begin, self._timed, self._timed_from = self._timed, self._timed_from, [], None

        def read() -> None:
            free_s: dict[str, float] = {}  # by group
            for t in timed:
                if begin is not None and t.end is not None:  # otherwise nothing waits for it
                    t.end.synchronize()
                    issued, ready_s = t.issued, begin[1] + begin[0].elapsed_time(t.begin) / 1e3
                    issued.start_s = max(ready_s, free_s.get(issued.group, ready_s))
                    issued.end_s = max(issued.start_s, begin[1] + begin[0].elapsed_time(t.end) / 1e3)
                    free_s[issued.group] = issued.end_s

        return read

    def complete(self) -> None:
        """Wait for the device's collectives, before what they wrote is relied on. Raises RankAborted: it is invalid."""
        if self.nccl is not None:
            self.nccl.synchronize()
        self.check()

    # -- the emulated link: see link.py ---------------------------------------------------------------------------

    @contextmanager
    def emulating(self, link: Link | None) -> Iterator[None]:
        """Collectives issued inside take this link, which starts empty. Not over NCCL: see rank/prepare.py."""
        if link is not None:
            link.reset()
        self.link = link
        try:
            yield
        finally:
            self.link = None

    def reserve_link(self, issued: Collective, direction: LinkDirection = LinkDirection.BOTH) -> None:
        """Queue a collective on the emulated link, except the lab's own vote, and groups of one rank. A barrier takes only
        the latency."""
        if self.link is not None and issued.size > 1 and issued.kind != "control":
            issued.link_end_s = self.link.reserve(issued.issue_s, issued.link_bytes, direction)

    def wait_link(self, issued: Collective) -> None:
        """Wait until the emulated link has carried a collective. Raises RankAborted at once after an abort."""
        if issued.link_end_s is not None:
            pause_until(issued.link_end_s, self._abort_event)
            self.check()

    # -- a link that is cut on purpose ----------------------------------------------------------------------------

    def cut_link(self, *, until_reset: bool) -> None:
        """Let no collective of this rank pass or complete from now on, except those that Gloo or NCCL already has.
        `until_reset`: `reset` restores the link. Groups can still be opened: they meet at the store."""
        self.dropped, self._reset_restores_link = DroppedWork(self._abort_event), until_reset

    def restore_link(self) -> None:
        """Let collectives pass that are issued from now on."""
        self.dropped = None

    # -- for observers in other threads: nothing here needs the thread that may be blocked ------------------------------

    def pending(self) -> Collective | None:
        """The oldest collective that has not finished; None after an abort, when no thread waits any more."""
        if self.aborted is not None:
            return None
        waiting = ((c, inner) for c, _, inner in self._in_flight() if c.sequence >= self._cancelled_before)
        return next((c for c, inner in waiting if not (isinstance(inner, SharedWork) and inner.joined())), None)

    def failure(self) -> str | None:
        """Returns what NCCL's watchdog says: a collective that failed or timed out. None without NCCL."""
        if self.nccl is not None:
            self._in_flight()
        return self._failed

    def members(self, group: str) -> tuple[int, ...]:
        """The ranks of a group."""
        return self._members.get(group, ())

    def share_across(self, group: str, kind: str) -> float:
        """Which part of what this rank sends in a group goes to other hosts; 0.0 if none does, or hosts are unknown. In
        a ring in the order of ranks, or a direct exchange with all others."""
        members = [rank for rank in self.members(group) if rank < len(self.hosts)]
        if len(members) < 2 or self.rank not in members:
            return 0.0
        if self.nccl is not None or kind in ("all_reduce", "all_gather"):
            following = members[(members.index(self.rank) + 1) % len(members)]
            return float(self.hosts[following] != self.host)
        return sum(self.hosts[rank] != self.host for rank in members) / (len(members) - 1)

    @property
    def host(self) -> str:
        """The host of this rank; "": unknown."""
        return self.hosts[self.rank] if self.rank < len(self.hosts) else ""

    def issue_counts(self) -> dict[str, int]:
        """The number of collectives issued, by group in use."""
        return {name: self._ordinals[name] for name in list(self._members)}

    def recent_issues(self) -> list[Collective]:
        """The last collectives issued, oldest first."""
        return list(self._recent)

    # -- abort and after ------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises RankAborted after an abort."""
        if self.aborted is not None:
            raise RankAborted(self.aborted)

    def abort(self, why: str) -> None:
        """Wake everything that waits in this rank, from any thread. The first reason wins."""
        with self._lock:
            if self.aborted is None:
                self.aborted = why
            if self.alive is not None:
                self.alive.fill_(math.nan)
            waiting, groups = list(self._cancellable), list(self._nccl_groups)
        for group in groups:
            group.abort()
        self._abort_event.set()
        self.alarm.clear()
        for work in waiting:
            work.cancel()

    def reset(self) -> None:
        """Allow collectives again after an abort, when its groups are shut down."""
        with self._lock:
            self.aborted = self._failed = None
            self._abort_event.clear()
            self._cancellable = weakref.WeakSet()
        for issued, _, inner in list(self._running.values()):
            if isinstance(inner, (DroppedWork, NcclOutcome, SharedWork)):
                self.untrack(issued)
        if self._reset_restores_link:
            self.restore_link()
        self.unit = ""
        self._ordinals.clear()  # ranks may have left the aborted step at different collectives
        self._recent.clear()
        self._cancelled_before = self._sequence

    def destroy_async(self, groups: list[Any]) -> None:
        """Drop the last references to groups, which may still run an operation, by emptying a list in a separate thread:
        that waits for the operation, and no thread of a group may drop it last (see the note on abort)."""
        thread = threading.Thread(target=groups.clear, name="fsdp-lab-destroy", daemon=True)
        self._destroying = [*self._still_destroying(), (thread, groups)]
        with contextlib.suppress(RuntimeError):  # Python 3.12 starts no thread at its exit: then they stay
            thread.start()

    def destroyed(self, timeout_s: float) -> bool:
        """Waits until what `destroy_async` took is destroyed. False: an operation still runs."""
        end_s = time.monotonic() + timeout_s
        for thread, _ in self._destroying:
            if thread.ident is not None:
                thread.join(max(0.0, end_s - time.monotonic()))
        return not self._still_destroying()

    def _still_destroying(self) -> list[tuple[threading.Thread, list[Any]]]:
        return [(thread, groups) for thread, groups in self._destroying if groups or thread.is_alive()]
