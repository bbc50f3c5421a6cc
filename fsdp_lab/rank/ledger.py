"""`Ledger`: the memory of one step: every block of device memory, its lifetime, and what it was used for.

torch's profiler reports each allocation and each free, on a CPU as on a GPU. The role of a block is found by its address
while it is alive: the backend lists its storages (`Backend.persistent_tensors`, `Backend.transient_tensors`), the wire those
that collectives move, and a hook on each parameter its gradient. This happens at marks: at every begin and end of a unit, at
every collective and at every gradient. A block that nothing lists is classified by where it was allocated; only the rest is
"other", on a GPU also what the allocator holds at a mark beyond all known blocks, such as what threads allocate that the
profiler does not see. So the classes add up to the allocated memory at every mark.

Note: frees that are not reported. A thread of Gloo's may release a tensor last; and on a CPU the profiler does not see frees
of blocks that existed before. So weak references follow the storages that the wire moves, and those of the backend at the
begin of the step; their end is assigned to the next mark.

Note: what is counted. On a GPU, the blocks of the caching allocator, with its sizes. On a CPU, torch's allocator, and
tensors in the pool that ranks share (wire/arena.py reports them): what the step allocates, what the backend holds,
and what the step frees of what existed before. Other tensors, such as a dataset's, are not counted.

Note: exposed communication on a GPU. Over NCCL streams wait, not threads, and torch's wrappers order their streams
themselves, so the wire's clocks do not see it. The profiler does: it is the duration of all kernels minus that of the
computing ones, as in Holistic Trace Analysis. Copies are neither."""

import dataclasses
import math
import os
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.profiler import profile, record_function
from torch.multiprocessing.reductions import StorageWeakRef
from torch.profiler import DeviceType

from fsdp_lab.backends.base import Measured, RoleTensor, local_tensor
from fsdp_lab.base.events import ROOT, MemorySample, Role, RoleBytes
from fsdp_lab.base.tensors import tensors_in
from fsdp_lab.engine.schedule import Direction
from fsdp_lab.wire import ARENA_REPORT, WireContext

MOST_SAMPLES = 240  # of a curve, to limit the size of an event
_MARK = "fsdp_lab.ledger "
_BEGIN = "begin"  # the phase before the forward: the batch
_BY_WIRE, _BY_BACKEND, _BY_SHARD = 1, 2, 3  # which source listed a block; the higher one takes precedence
_OF_FSDP = ("FSDP::all_gather", "FSDP::pre_", "FSDP::post_", "FSDP::root_p", "FullyShardedDataParallel._")
_COMMUNICATING = ("wire", "unshard ", "reshard ", "reduce ", "host_copy ", "c10d::", "gloo:", "nccl:", *_OF_FSDP)
_Role = Role | None  # None: on the host, under offload


@dataclass(frozen=True, kw_only=True)
class LedgerResult:
    """Memory of a ledger step, in bytes of the compute device; on a CPU `end_bytes` includes offloaded tensors."""

    peak: RoleBytes
    end_bytes: int
    curve: tuple[MemorySample, ...]
    kernels: "KernelTimes | None" = None  # on a GPU


_Seen = tuple[int, int]  # the number of a mark, and the address of a block that was alive then
_Listed = tuple[int, int, _Role, int]  # address, bytes, role, source


@dataclass(slots=True)
class _Mark:
    """A moment at which blocks were listed."""

    phase: str
    unit: str
    moment: str  # "begin" or "end" of the unit; "" if it is not a point of the curve
    allocated_bytes: int = 0  # by the GPU's allocator
    listed: list[_Listed] = field(default_factory=list)
    freed: list[_Seen] = field(default_factory=list)  # followed storages that have been freed


@dataclass(slots=True)
class MemoryBlock:
    """A block of memory and its lifetime, in nanoseconds of the profiler's clock."""

    size: int
    role: _Role
    start: float = -math.inf
    end: float = math.inf
    listed_by: int = 0


class Ledger:
    """Records one step of one rank. `offloaded`: shards, their gradients and optimizer state are on the host, which a
    tensor of a CPU does not show."""

    def __init__(self, backend: Measured, context: WireContext, device: torch.device, *, offloaded: bool) -> None:
        self._backend, self._context, self._device, self._offloaded = backend, context, device, offloaded
        self._marks: list[_Mark] = []
        self._position = (_BEGIN, ROOT)
        self._followed: list[tuple[_Seen, StorageWeakRef]] = []
        self._handles: list[Any] = []
        self._hooked: dict[int, Tensor] = {}  # by id; referenced, so that ids stay unique
        self.result: LedgerResult | None = None

    @contextmanager
    def recording(self) -> Iterator[None]:
        """The context of the step. Sets `result`, unless the step raised."""
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise it writes to stderr at each start
        self._context.on_issue = self._on_collective
        self._watch_module(ROOT, self._backend.module)
        for name, module in self._backend.unit_modules():
            self._watch_module(name or ROOT, module)
        self._context.hide_from_profiler = True  # the step may be given up
        try:
            kind = self._device.type if self._device.type != "cpu" else None
            with profile(profile_memory=True, use_kineto=True, use_device=kind) as profiler:
                self._mark(_BEGIN, ROOT, "begin", persistent=True)
                yield
                self._mark(Direction.UPDATE, ROOT, "end", persistent=True)
        finally:
            self._context.hide_from_profiler = False
            self._context.on_issue = None
            for handle in self._handles:
                handle.remove()
            self._handles = []
        tree = profiler.kineto_results.experimental_event_tree()
        blocks, marks = self._lifetimes(sorted(_read(tree, self._device.type), key=lambda moment: moment[0]))
        if self._device.type == "cuda":
            blocks += _unknown(blocks, marks)
        self.result = _follow(blocks, marks)
        if kind is not None:
            self.result = dataclasses.replace(self.result, kernels=KernelTimes.of(profiler.kineto_results.events()))
        self._hooked, self._followed = {}, []

    def before_update(self) -> None:
        """Call it while the reduced gradients exist."""
        self._mark(Direction.UPDATE, ROOT, "begin", persistent=True)

    # -- recording --------------------------------------------------------------------------------------------------

    def _watch_module(self, unit: str, module: nn.Module) -> None:
        """Its hooks run inside the backend's own: after the gather, and before the gathered parameters are freed."""

        def before(*_: Any) -> None:
            self._mark(_direction(), unit, "begin")
            for t in self._backend.leaves():  # that receive gradients now; FSDP1 creates them anew in every forward
                if t.requires_grad and id(t) not in self._hooked:
                    self._hooked[id(t)] = t
                    self._handles.append(t.register_hook(self._on_gradient))  # type: ignore[no-untyped-call]

        def backward(_: Tensor) -> None:
            self._mark(Direction.BACKWARD, unit, "begin")

        def after(_: nn.Module, __: Any, output: Any) -> None:
            self._mark(_direction(), unit, "end")
            watched = [t for t in tensors_in(output) if t.requires_grad]
            self._handles += [t.register_hook(backward) for t in watched]  # type: ignore[no-untyped-call]

        self._handles.append(module.register_forward_pre_hook(_uncompiled(before)))
        self._handles.append(module.register_forward_hook(_uncompiled(after), prepend=True))

    def _on_gradient(self, gradient: Tensor) -> None:
        self._mark(*self._position).listed += self._listed([(Role.GRADIENTS, gradient)], _BY_BACKEND)

    def _on_collective(self, tensors: Sequence[Tensor]) -> None:
        """Called when a collective is issued."""
        mark = self._mark(*self._position)
        mark.listed += self._listed(((Role.COMMUNICATION, t) for t in tensors), _BY_WIRE, follow=True)

    def _mark(self, phase: str, unit: str, moment: str = "", *, persistent: bool = False) -> _Mark:
        with record_function(f"{_MARK}{len(self._marks)}"):
            on_gpu = self._device.type == "cuda"
            mark = _Mark(str(phase), unit, moment, torch.cuda.memory_allocated(self._device) if on_gpu else 0)
            self._marks.append(mark)
        self._position = (mark.phase, unit)
        first = len(self._marks) == 1
        mark.listed += self._listed(self._backend.transient_tensors(), _BY_BACKEND, follow=first)
        if persistent:
            mark.listed += self._listed(((Role.OTHER, b) for b in self._backend.module.buffers()), _BY_WIRE)
            held = self._backend.persistent_tensors()
            mark.listed += self._listed(held, _BY_SHARD, on_host=self._offloaded, follow=first)
        followed = [(seen, ref, bool(ref.expired())) for seen, ref in self._followed]  # type: ignore[no-untyped-call]
        mark.freed = [seen for seen, _, freed in followed if freed]
        self._followed = [(seen, ref) for seen, ref, freed in followed if not freed]
        return mark

    def _listed(
        self, tensors: Iterable[RoleTensor], by: int, *, on_host: bool = False, follow: bool = False
    ) -> list[_Listed]:
        listed: list[_Listed] = []
        for role, tensor in tensors:
            t = local_tensor(tensor)
            storage = t.untyped_storage()
            if t.device.type == self._device.type and (size := storage.nbytes()):
                listed.append((storage.data_ptr(), size, None if on_host else role, by))
                if follow:
                    seen = (len(self._marks) - 1, storage.data_ptr())
                    self._followed.append((seen, StorageWeakRef(storage)))  # type: ignore[no-untyped-call]
        return listed

    # -- analysis ---------------------------------------------------------------------------------------------------

    def _lifetimes(self, moments: "Sequence[_Moment]") -> tuple[list[MemoryBlock], list[tuple[float, _Mark]]]:
        """Every block with its lifetime and role, and every mark with its time."""
        blocks: list[MemoryBlock] = []
        alive: dict[int, MemoryBlock] = {}
        listed: dict[_Seen, MemoryBlock] = {}
        marks: list[tuple[float, _Mark]] = []
        phase = _BEGIN

        def add(address: int, block: MemoryBlock) -> MemoryBlock:
            blocks.append(block)
            alive[address] = block
            return block

        for at, address, size, communicating, number in moments:
            if number is not None:
                mark = self._marks[number]
                marks.append((at, mark))
                phase = mark.phase
                for where, nbytes, role, by in mark.listed:
                    block = alive.get(where) or add(where, MemoryBlock(nbytes, role))  # it existed before the step
                    if by > block.listed_by:
                        block.role, block.listed_by = role, by
                    listed[number, where] = block
                for seen in mark.freed:  # its address may have been reused by now
                    if seen in listed and alive.get(seen[1]) is listed[seen]:
                        alive.pop(seen[1]).end = at
            elif size > 0:
                if address in alive:
                    alive.pop(address).end = at  # its free was not reported
                kind: _Role = Role.ACTIVATIONS  # unless it is listed, it is classified by where it was allocated
                if communicating:
                    kind = Role.COMMUNICATION
                elif phase == Direction.UPDATE:
                    kind = None if self._offloaded else Role.OPTIMIZER
                elif phase == _BEGIN:
                    kind = Role.OTHER
                add(address, MemoryBlock(size, kind, at))
            else:
                if address not in alive:
                    add(address, MemoryBlock(-size, Role.OTHER))  # it existed before, and nothing listed it
                alive.pop(address).end = at
        return blocks, marks


_Moment = tuple[float, int, int, bool, int | None]  # ns, address, bytes (freed: negative), in communication, or mark


def _read(tree: Sequence[Any], kind: str) -> Iterator[_Moment]:
    """Allocations and frees on one kind of device, and our marks."""
    left = [(event, False) for event in tree]
    while left:
        event, communicating = left.pop()
        fields, name = event.extra_fields, ""
        if isinstance(fields, torch._C._profiler._ExtraFields_Allocation):
            if fields.device.type == kind:
                yield event.start_time_ns, fields.ptr, fields.alloc_size, communicating, None
        else:
            name = event.name
            if name.startswith(_MARK):
                yield event.start_time_ns, 0, 0, False, int(name.removeprefix(_MARK))
            elif name.startswith(ARENA_REPORT):  # memory that ranks share is none of torch's allocator
                address, nbytes = map(int, name.removeprefix(ARENA_REPORT).split())
                yield event.start_time_ns, address, nbytes, communicating, None
        inside = communicating or name.startswith(_COMMUNICATING)
        left += [(child, inside) for child in event.children]


def _unknown(blocks: Sequence[MemoryBlock], marks: Sequence[tuple[float, _Mark]]) -> list[MemoryBlock]:
    """What the allocator holds at each mark beyond the blocks that are known there, until the next mark."""
    ends = ((at, sign * b.size) for b in blocks if b.role for at, sign in ((b.start, 1), (b.end, -1)))
    changes, known_bytes, beyond = sorted(ends, reverse=True), 0, list[MemoryBlock]()
    for at, mark in marks:
        while changes and changes[-1][0] < at:
            known_bytes += changes.pop()[1]
        nbytes = max(0, mark.allocated_bytes - known_bytes)
        if not beyond:
            beyond.append(MemoryBlock(nbytes, Role.OTHER))
        elif nbytes != beyond[-1].size:
            beyond[-1].end = at - 1  # so that the sample of this mark has it
            beyond.append(MemoryBlock(nbytes, Role.OTHER, at - 1))
    return beyond


def _follow(blocks: Sequence[MemoryBlock], marks: Sequence[tuple[float, _Mark]]) -> LedgerResult:
    """Sums by role from the first mark to the last: the peak, and the curve."""
    begin, end = marks[0][0], marks[-1][0]
    now = dict.fromkeys(Role, 0)
    on_host = 0
    changes: list[tuple[float, int, MemoryBlock]] = []
    for block in blocks:
        if block.start < begin < block.end:
            if block.role is None:
                on_host += block.size
            else:
                now[block.role] += block.size
        changes += [(at, sign, block) for at, sign in ((block.start, 1), (block.end, -1)) if begin <= at <= end]
    changes.sort(key=lambda change: change[:2])
    curve = _Curve(begin, marks, now)
    for at, sign, block in changes:
        curve.advance(at)
        if block.role is None:
            on_host += sign * block.size
        else:
            now[block.role] += sign * block.size
            curve.changed(at)
    curve.advance(math.inf)
    end_bytes = sum(now.values()) + on_host
    return LedgerResult(peak=RoleBytes.of(curve.peak), end_bytes=end_bytes, curve=tuple(curve.samples))


class _Curve:
    """Samples sums that change: at marks, and at the maximum between two marks."""

    def __init__(self, begin: float, marks: Sequence[tuple[float, _Mark]], now: dict[Role, int]) -> None:
        points = [(at, mark) for at, mark in marks if mark.moment]
        each = math.ceil(2 * len(points) / MOST_SAMPLES)
        self._left = [*points[:-1][::each], points[-1]][::-1]
        self._begin, self._now = begin, now
        self._label = (_BEGIN, ROOT)
        self._top: tuple[float, dict[Role, int]] | None = None  # since the last mark
        self.peak = dict(now)
        self.samples: list[MemorySample] = []

    def advance(self, at: float) -> None:
        """Take the samples of the marks up to `at`."""
        while self._left and self._left[-1][0] <= at:
            when, mark = self._left.pop()
            if self._top is not None and sum(self._top[1].values()) > sum(self._now.values()):
                self._take(*self._top, "highest")
            self._label, self._top = (mark.phase, mark.unit), None
            self._take(when, self._now, mark.moment)

    def changed(self, at: float) -> None:
        """The sums have changed."""
        total = sum(self._now.values())
        if total > sum(self.peak.values()):
            self.peak = dict(self._now)
        if self._left and total > (sum(self._top[1].values()) if self._top else self.samples[-1].classes.total_bytes):
            self._top = at, dict(self._now)

    def _take(self, at: float, sums: dict[Role, int], moment: str) -> None:
        phase, unit = self._label
        at_s, classes = (at - self._begin) / 1e9, RoleBytes.of(sums)
        self.samples.append(MemorySample(at_s=at_s, phase=phase, unit=unit, moment=moment, classes=classes))


def _direction() -> Direction:
    """A forward inside a backward is a recomputation."""
    return Direction.FORWARD if torch._C._current_graph_task_id() == -1 else Direction.BACKWARD


def _uncompiled(function: Callable[..., Any]) -> Any:
    return torch.compiler.disable(function)  # type: ignore[no-untyped-call]


# -- kernels of a GPU --------------------------------------------------------------------------------------------------

_NCCL = {
    "AllGather": "all_gather",
    "ReduceScatter": "reduce_scatter",
    "AllReduce_Sum_f64": "control",  # the vote; nothing else is sent in float64
    "AllReduce": "all_reduce",
    "Broadcast": "broadcast",
}
_COPIES = ("Memcpy", "Memset")


@dataclass(frozen=True, kw_only=True)
class KernelTimes:
    """The kernels of a profiled step. Copies are none. Neither are the spans that the profiler draws on a stream for each
    `record_function`: they cover the gaps between kernels too."""

    count: int
    busy_s: float  # in which at least one kernel ran
    exposed_s: Mapping[str, float] | None  # communication alone, by kind; None: no kernel of NCCL was seen

    @classmethod
    def of(cls, events: Iterable[Any]) -> "KernelTimes":
        """`events`: kineto's. Time with several collectives counts for the first of them."""
        computing: list[tuple[int, int]] = []
        sent: list[tuple[int, int, str]] = []
        for event in events:
            name = event.name()
            if event.device_type() != DeviceType.CUDA or event.is_user_annotation() or name.startswith(_COPIES):
                continue
            if "nccl" in name.lower():
                kind = next((kind for part, kind in _NCCL.items() if part in name), "other")
                sent.append((event.start_ns(), event.end_ns(), kind))
            else:
                computing.append((event.start_ns(), event.end_ns()))
        busy = _union([*computing, *(span[:2] for span in sent)])
        return cls(
            count=len(computing) + len(sent),
            busy_s=sum(end - start for start, end in busy) / 1e9,
            exposed_s=_alone(sent, _union(computing)) if sent else None,
        )


def _alone(sent: Iterable[tuple[int, int, str]], computing: Sequence[tuple[int, int]]) -> dict[str, float]:
    """Seconds by kind in which nothing computes. `computing`: in order, without overlaps."""
    alone: dict[str, float] = {}
    until = 0
    for issued, end, kind in sorted(sent):
        start, until = max(issued, until), max(end, until)
        first = max(0, bisect_left(computing, (start,)) - 1)
        beside = computing[first : bisect_left(computing, (end,), first)]
        hidden_ns = sum(max(0, min(b, end) - max(a, start)) for a, b in beside)
        alone[kind] = alone.get(kind, 0.0) + max(0, end - start - hidden_ns) / 1e9
    return alone


def _union(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """In order, without overlaps."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged
