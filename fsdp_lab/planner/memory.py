"""`memory`: what a rank holds in a step, by the classes of the measured ledger, and the highest moment of it.

The model's tape of one step (`fsdp_lab.core.model_shape`) is replayed with the sizes of the Spec. At every point the
backend's `MemoryModel` allocates and frees what it gathers, keeps and sends. The peak is the highest moment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fsdp_lab.core.events import RoleBytes
from fsdp_lab.core.model_shape import ALLOCATED, ARRIVED, FREED, ModelShape, TapeChange, TapeSegment
from fsdp_lab.core.schedule import Direction, PointSide
from fsdp_lab.core.spec import Spec
from fsdp_lab.planner.compute import USUAL, Software
from fsdp_lab.planner.dense import dense_tape
from fsdp_lab.planner.memory_models.base import MemoryModel
from fsdp_lab.planner.memory_models.ddp import DDPMemory
from fsdp_lab.planner.memory_models.flat import FlatMemory
from fsdp_lab.planner.memory_models.fsdp1 import FSDP1Memory
from fsdp_lab.planner.memory_models.fsdp2 import FSDP2Memory
from fsdp_lab.planner.memory_tracker import ACTIVATIONS, GRADIENTS, OTHER, MemoryTracker, classes_of
from fsdp_lab.planner.step import recomputed

GPU_SLACK = (
    0.06  # of what is allocated at the peak: what a caching allocator holds beside it, in blocks that do not fit
)


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Bytes of one rank's compute device, as the ledger counts them. `held`: between steps."""

    held: RoleBytes
    at_peak: RoleBytes
    peak_phase: str  # "forward", "backward", "update"
    peak_unit: str
    host_bytes: int  # that offload keeps there
    reserved_bytes: int  # with the allocator's slack

    @property
    def peak_bytes(self) -> int:
        return self.at_peak.total_bytes


_BEHAVIOURS: Mapping[str, type[MemoryModel]] = {
    "lab": FlatMemory, "fsdp2": FSDP2Memory, "fsdp1": FSDP1Memory, "ddp": DDPMemory,
}  # fmt: skip


def memory(spec: Spec, shape: ModelShape, *, device: str, software: Software = USUAL) -> MemoryPlan:
    """Predicts the memory of a step that follows others.

    Args:
        shape: the model, in the units of `spec.strategy.wrap`.
        device: "cpu" or "cuda".
        software: for a shape without tapes.
    """
    return _Step(spec, shape, software, on_gpu=device != "cpu").plan()


class _Step:
    def __init__(self, spec: Spec, shape: ModelShape, software: Software, *, on_gpu: bool) -> None:
        self._software = software
        self._spec, self._shape, self._book, self._on_gpu = spec, shape, MemoryTracker(), on_gpu
        self._backend = _BEHAVIOURS[spec.strategy.backend](spec, shape, self._book, on_gpu=on_gpu)  # type: ignore[call-arg]
        self._samples, self._tokens = spec.workload.micro_batch, shape.tokens(spec.workload.seq_len)
        self._sizes: dict[int, tuple[Sequence[TapeChange], list[tuple[str, float, int | None, int]]]] = {}
        self._folded: dict[tuple[object, ...], tuple[MemoryTracker, tuple[float, object]]] = {}

    @property
    def _batch(self) -> float:
        """On a CPU ids and images are numpy's, and a copy of the ids, the labels, is torch's."""
        if self._on_gpu:
            return self._shape.batch.bytes_of(self._samples, self._tokens)
        return 0.0 if self._shape.image_tokens is not None else 8.0 * self._samples * self._tokens

    def plan(self) -> MemoryPlan:
        book, backend = self._book, self._backend
        book.alloc(OTHER, self._shape.buffers_bytes)
        backend.keeps_gradients = self._software.keeps_gradients
        backend.hold()
        held = classes_of(book.now)
        batch = self._batch
        accumulate = self._spec.workload.accumulate
        tape = tape_of(self._shape, self._spec, self._software)
        for micro in _micros(accumulate):
            book.alloc(OTHER, batch)
            backend.begin(loud=self._spec.strategy.sync == "every" or micro == accumulate - 1)
            self._play(tape)
            book.free(OTHER, batch)
        book.where = (Direction.UPDATE, 0)
        backend.update()
        backend.forget()
        phase, unit = book.peak_where
        names = self._shape.unit_names or tuple(u.name for u in self._shape.units)
        peak = classes_of(book.peak)
        return MemoryPlan(
            held=held, at_peak=peak, peak_phase=phase, peak_unit=names[unit], host_bytes=round(backend.host_bytes),
            reserved_bytes=round(peak.total_bytes * (1 + GPU_SLACK)),
        )  # fmt: skip

    def _play(self, tape: Sequence[TapeSegment]) -> None:
        calls, book, backend = self._shape.call_tree, self._book, self._backend
        for stretch in tape:
            point = stretch.point
            own = calls[point.call].unit
            last = point.direction is Direction.BACKWARD and point.call == 0 and point.moment is PointSide.AFTER
            book.where = (point.direction, own)
            backend.landed()
            if not last:
                backend.at(point)
            self._change(stretch.changes, own)
            if last:
                backend.at(point)
                backend.end_backward()
                backend.landed()

    def _change(self, changes: Sequence[TapeChange], own: int) -> None:
        """What the model allocates and frees; of units that are alike it is reckoned once."""
        if not changes:
            return
        backend = self._backend
        key = (id(changes), id(self._shape.units[own]), backend.flying, *backend.key(own))
        found = self._folded.get(key)
        if found is None:
            if any(c.unit is not None for c in changes if c.kind == ARRIVED):
                self._write(changes, own)
                return
            whole, backend.book = self._book, MemoryTracker()
            self._book = backend.book
            self._write(changes, own)
            found = self._folded[key] = (self._book, (backend.flying, backend.after(own)))
            self._book = backend.book = whole
        self._book.add(found[0])
        backend.flying, state = found[1]
        backend.restore(own, state)

    def _write(self, changes: Sequence[TapeChange], own: int) -> None:
        book, backend = self._book, self._backend
        for kind, size, unit, index in self._numbers(changes):
            if kind == ALLOCATED:
                book.alloc(ACTIVATIONS, size)
            elif kind == FREED:
                book.free(ACTIVATIONS, size)
            elif kind == ARRIVED:
                backend.arrived(own if unit is None else unit, index, size)
                backend.landed()
            else:
                book.alloc(GRADIENTS, size)

    def _numbers(self, changes: Sequence[TapeChange]) -> list[tuple[str, float, int | None, int]]:
        found = self._sizes.get(id(changes))
        if found is None:
            sized = [(c.kind, c.size.bytes_of(self._samples, self._tokens), c.unit, c.index) for c in changes]
            found = self._sizes[id(changes)] = (changes, sized)
        return found[1]


def _micros(accumulate: int) -> list[int]:
    """The micro-batches that differ: the first, one in the middle, the last."""
    return sorted({0, min(1, accumulate - 1), accumulate - 1})


def tape_of(shape: ModelShape, spec: Spec, software: Software = USUAL) -> Sequence[TapeSegment]:
    """The tape of a precision; with some blocks computed again, block by block of the one or the other. Where a model is one
    unit, "every:K" is taken as "none": rather too much than too little."""
    s = spec.strategy
    if not shape.tapes:
        again = frozenset(recomputed(spec, len(shape.units)))
        return dense_tape(shape, s.dtypes.param, software, compiled=s.compile, recomputed=again)
    name = "fp32" if s.dtypes.param == "fp32" else "autocast" if s.backend == "ddp" else "half"
    plain = shape.tapes[name]
    whole = shape.tapes.get(f"{name}, recompute", plain)
    if s.recompute == "none":
        return plain
    if s.recompute == "full":
        return whole
    each = int(s.recompute.partition(":")[2])
    return [b if b.point.call and (b.point.call - 1) % each == 0 else a for a, b in zip(plain, whole, strict=True)]
