"""`Ledger`: one step under the allocator's eye: every block of device memory, how long it lived, and what it was for.

torch's profiler reports each allocation and each free, on a CPU as on a GPU; nothing is sampled. What a block is for is
seen from outside, by its address, while it is alive: the backend names the storages it holds (`Backend.kept`,
`Backend.passing`), the wire those that collectives move, and a hook on each parameter its gradient, at every begin and end
of a unit, at every collective and at every gradient. What nobody names goes by where it was allocated: inside the work of
communication, by a forward or a backward, by the optimizer; only what is none of these is other. So the classes of any
moment add up to what was allocated at that moment.

Note: frees that are not reported. The profiler sees the threads of the step, but Gloo's own may be the last to let go of a
tensor; and on a CPU it does not see the end of what was there before it. So what the wire moves, and what the backend holds
when the step begins, is followed by weak references, and its end is taken at the next mark after it.

Note: what is counted. On a GPU, what the caching allocator handed out, in its sizes. On a CPU, torch's allocator: what the
step allocates, what the backend keeps, and what the step frees of what was there before; tensors of nobody's, such as a
dataset's, are outside.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.profiler import profile, record_function
from torch.multiprocessing.reductions import StorageWeakRef

from fsdp_lab.backends import Backend
from fsdp_lab.backends.base import Held, local_tensor
from fsdp_lab.engine.tensors import tensors_in
from fsdp_lab.events import Classes, MemorySample, Role
from fsdp_lab.rank.profiled import exposed_on_device
from fsdp_lab.schedule import Direction
from fsdp_lab.wire import Hub

MOST_SAMPLES = 240  # of a curve, so that an event stays small
ROOT = "root"
_MARK = "fsdp_lab.ledger "
_BEGIN = "begin"  # the phase of what happens before the forward: the batch
_BY_WIRE, _BY_BACKEND, _BY_SHARD = 1, 2, 3  # who names a block: the later one knows better
_COMMUNICATING = (
    "wire", "unshard ", "reshard ", "reduce ", "host_copy ", "c10d::", "gloo:", "nccl:",
    "FSDP::all_gather", "FSDP::pre_", "FSDP::post_", "FSDP::root_p", "FullyShardedDataParallel._",
)  # fmt: skip
_Role = Role | None  # None: on the host, under offload


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a ledger step found, in bytes of the compute device; `end_bytes` with what offload keeps, on a CPU."""

    peak: Classes
    end_bytes: int
    curve: tuple[MemorySample, ...]
    exposed: dict[str, float] | None = None  # on a GPU: see profiled.py


_Seen = tuple[int, int]  # the number of a mark, and the address of what was alive then
_Name = tuple[int, int, _Role, int]  # address, bytes, role, by whom


@dataclass(slots=True)
class _Mark:
    """A moment at which blocks were named."""

    phase: str
    unit: str
    moment: str  # "begin" or "end" of the unit; "" for what is no point of the curve
    names: list[_Name] = field(default_factory=list)
    gone: list[_Seen] = field(default_factory=list)  # what was followed and is no more


@dataclass(slots=True)
class Block:
    """A block of memory and its life, in nanoseconds of the profiler's clock."""

    size: int
    role: _Role
    start: float = -math.inf
    end: float = math.inf
    named_by: int = 0


class Ledger:
    """Records one step of one rank.

    Args:
        offloaded: whether shards, their gradients and optimizer state are the host's. On a CPU only this tells.
    """

    def __init__(self, backend: Backend, hub: Hub, device: torch.device, *, offloaded: bool) -> None:
        self._backend, self._hub, self._device, self._offloaded = backend, hub, device, offloaded
        self._marks: list[_Mark] = []
        self._at = (_BEGIN, ROOT)
        self._followed: list[tuple[_Seen, StorageWeakRef]] = []
        self._handles: list[Any] = []
        self._hooked: dict[int, Tensor] = {}  # by id; held, so that an id stays its tensor's
        self._before_bytes = 0
        self.found: Found | None = None

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Around the step. Afterwards `found` is there, unless the step raised."""
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it writes to stderr at each start
        if self._device.type == "cuda":
            self._before_bytes = torch.cuda.memory_allocated(self._device)
        self._install()
        try:
            kind = self._device.type if self._device.type != "cpu" else None
            with profile(profile_memory=True, use_kineto=True, use_device=kind) as profiler:
                self._mark(_BEGIN, ROOT, "begin", kept=True)
                yield
                self._mark(Direction.UPDATE, ROOT, "end", kept=True)
        finally:
            self._remove()
        self.found = self._find(profiler.kineto_results.experimental_event_tree())
        if kind is not None:
            exposed = exposed_on_device(profiler.kineto_results.events())
            self.found = dataclasses.replace(self.found, exposed=exposed)
        self._hooked, self._followed = {}, []

    def before_update(self) -> None:
        """While the reduced gradients are there."""
        self._mark(Direction.UPDATE, ROOT, "begin", kept=True)

    # -- seeing -----------------------------------------------------------------------------------------------------

    def _install(self) -> None:
        """For this step alone: other steps carry no hook of ours."""
        self._hub.watch = self._see_moved
        self._watch_module(ROOT, self._backend.module)
        for name, module in self._backend.unit_modules():
            self._watch_module(name or ROOT, module)

    def _remove(self) -> None:
        self._hub.watch = None
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _watch_module(self, unit: str, module: nn.Module) -> None:
        """Its hooks run inside the backend's own: after the gather, before what was gathered is freed."""

        def before(*_: Any) -> None:
            self._mark(_direction(), unit, "begin")
            self._watch_gradients()

        def back(_: Tensor) -> None:
            self._mark(Direction.BACKWARD, unit, "begin")

        def after(_: nn.Module, __: Any, output: Any) -> None:
            self._mark(_direction(), unit, "end")
            watched = [t for t in tensors_in(output) if t.requires_grad]
            self._handles += [t.register_hook(back) for t in watched]  # type: ignore[no-untyped-call]

        self._handles += [
            module.register_forward_pre_hook(_uncompiled(before)),
            module.register_forward_hook(_uncompiled(after), prepend=True),
        ]

    def _watch_gradients(self) -> None:
        """Of what autograd gives gradients to just now; FSDP1 makes it anew in every forward."""
        for t in self._backend.leaves():
            if t.requires_grad and id(t) not in self._hooked:
                self._hooked[id(t)] = t
                self._handles.append(t.register_hook(self._see_gradient))  # type: ignore[no-untyped-call]

    def _see_gradient(self, gradient: Tensor) -> None:
        self._mark(*self._at).names += self._named([(Role.GRADIENTS, gradient)], _BY_BACKEND)

    def _see_moved(self, tensors: Sequence[Tensor]) -> None:
        """A collective is being issued."""
        mark = self._mark(*self._at)
        mark.names += self._named(((Role.COMMUNICATION, t) for t in tensors), _BY_WIRE, follow=True)

    def _mark(self, phase: str, unit: str, moment: str = "", *, kept: bool = False) -> _Mark:
        with record_function(f"{_MARK}{len(self._marks)}"):
            mark = _Mark(str(phase), unit, moment)
            self._marks.append(mark)
        self._at = (mark.phase, unit)
        first = len(self._marks) == 1
        mark.names += self._named(self._backend.passing(), _BY_BACKEND, follow=first)
        if kept:
            mark.names += self._named(((Role.OTHER, b) for b in self._backend.module.buffers()), _BY_WIRE)
            mark.names += self._named(self._backend.kept(), _BY_SHARD, on_host=self._offloaded, follow=first)
        gone = [(seen, bool(ref.expired())) for seen, ref in self._followed]  # type: ignore[no-untyped-call]
        mark.gone = [seen for seen, over in gone if over]
        self._followed = [entry for entry, (_, over) in zip(self._followed, gone, strict=True) if not over]
        return mark

    def _named(self, held: Iterable[Held], by: int, *, on_host: bool = False, follow: bool = False) -> list[_Name]:
        found: list[_Name] = []
        for role, tensor in held:
            t = local_tensor(tensor)
            storage = t.untyped_storage()
            if t.device.type == self._device.type and (size := storage.nbytes()):
                found.append((storage.data_ptr(), size, None if on_host else role, by))
                if follow:
                    seen = (len(self._marks) - 1, storage.data_ptr())
                    self._followed.append((seen, StorageWeakRef(storage)))  # type: ignore[no-untyped-call]
        return found

    # -- finding ----------------------------------------------------------------------------------------------------

    def _find(self, tree: Sequence[Any]) -> Found:
        moments = sorted(_read(tree, self._device.type), key=lambda moment: moment[0])
        blocks, marks = self._lives(moments)
        if self._device.type == "cuda":
            known = sum(b.size for b in blocks if b.start == -math.inf)
            blocks.append(Block(max(0, self._before_bytes - known), Role.OTHER))
        return _follow(blocks, marks)

    def _lives(self, moments: Sequence[_Moment]) -> tuple[list[Block], list[tuple[float, _Mark]]]:
        """Every block with its life and its role, and every mark with its time."""
        blocks: list[Block] = []
        alive: dict[int, Block] = {}
        named: dict[_Seen, Block] = {}
        marks: list[tuple[float, _Mark]] = []
        phase = _BEGIN

        def begin(address: int, block: Block) -> Block:
            blocks.append(block)
            alive[address] = block
            return block

        for at, address, size, communicating, number in moments:
            if number is not None:
                mark = self._marks[number]
                marks.append((at, mark))
                phase = mark.phase
                for where, bytes_, role, by in mark.names:
                    block = alive.get(where) or begin(where, Block(bytes_, role))  # it was there before the step
                    if by > block.named_by:
                        block.role, block.named_by = role, by
                    named[number, where] = block
                for seen in mark.gone:  # by now its address may be another's
                    if seen in named and alive.get(seen[1]) is named[seen]:
                        alive.pop(seen[1]).end = at
            elif size > 0:
                if address in alive:
                    alive.pop(address).end = at  # its free was not reported
                begin(address, Block(size, self._unnamed(phase, communicating), at))
            else:
                if address not in alive:
                    begin(address, Block(-size, Role.OTHER))  # it was there before, and nobody named it
                alive.pop(address).end = at
        return blocks, marks

    def _unnamed(self, phase: str, communicating: bool) -> _Role:
        """The role of what nobody names, by where it was allocated."""
        if communicating:
            return Role.COMMUNICATION
        if phase == Direction.UPDATE:
            return None if self._offloaded else Role.OPTIMIZER
        return Role.OTHER if phase == _BEGIN else Role.ACTIVATIONS


_Moment = tuple[float, int, int, bool, int | None]  # ns, address, bytes (freed: negative), in communication, or mark


def _read(tree: Sequence[Any], kind: str) -> Iterator[_Moment]:
    """What was allocated and freed of one kind of device, and our marks."""
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
        inside = communicating or name.startswith(_COMMUNICATING)
        left += [(child, inside) for child in event.children]


def _follow(blocks: Sequence[Block], marks: Sequence[tuple[float, _Mark]]) -> Found:
    """Through the step from its first mark to its last: sums by role, the peak, and the curve."""
    begin, end = marks[0][0], marks[-1][0]
    now = dict.fromkeys(Role, 0)
    on_host = 0
    changes: list[tuple[float, int, Block]] = []
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
        curve.come_to(at)
        if block.role is None:
            on_host += sign * block.size
        else:
            now[block.role] += sign * block.size
            curve.look(at)
    curve.come_to(math.inf)
    return Found(peak=Classes.of(curve.peak), end_bytes=sum(now.values()) + on_host, curve=tuple(curve.samples))


class _Curve:
    """Takes samples of sums that change: at marks, and at the highest moment between two of them."""

    def __init__(self, begin: float, marks: Sequence[tuple[float, _Mark]], now: dict[Role, int]) -> None:
        told = [(at, mark) for at, mark in marks if mark.moment]
        each = math.ceil(2 * len(told) / MOST_SAMPLES)
        self._left = [*told[:-1][::each], told[-1]][::-1]
        self._begin, self._now = begin, now
        self._label = (_BEGIN, ROOT)
        self._top: tuple[float, dict[Role, int]] | None = None  # since the last mark
        self.peak = dict(now)
        self.samples: list[MemorySample] = []

    def come_to(self, at: float) -> None:
        """Take the samples of marks before `at`."""
        while self._left and self._left[-1][0] <= at:
            when, mark = self._left.pop()
            if self._top is not None and sum(self._top[1].values()) > sum(self._now.values()):
                self._take(*self._top, "highest")
            self._label, self._top = (mark.phase, mark.unit), None
            self._take(when, self._now, mark.moment)

    def look(self, at: float) -> None:
        """The sums have changed."""
        total = sum(self._now.values())
        if total > sum(self.peak.values()):
            self.peak = dict(self._now)
        if self._left and total > (sum(self._top[1].values()) if self._top else self.samples[-1].classes.total_bytes):
            self._top = at, dict(self._now)

    def _take(self, at: float, sums: dict[Role, int], moment: str) -> None:
        phase, unit = self._label
        at_s, classes = (at - self._begin) / 1e9, Classes.of(sums)
        self.samples.append(MemorySample(at_s=at_s, phase=phase, unit=unit, moment=moment, classes=classes))


def _direction() -> Direction:
    """A forward inside a backward is a checkpoint's."""
    return Direction.FORWARD if torch._C._current_graph_task_id() == -1 else Direction.BACKWARD


def _uncompiled(function: Callable[..., Any]) -> Any:
    return torch.compiler.disable(function)  # type: ignore[no-untyped-call]
