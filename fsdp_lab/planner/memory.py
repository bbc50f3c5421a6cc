"""`memory`: the memory of a rank during a step, by the classes of the measured ledger, and its peak.

The model's tape of one step (`fsdp_lab.planner.model_shape`) is replayed with the sizes of the Spec. At every point of the
schedule the backend's `MemoryModel` allocates and frees what it gathers, keeps and sends."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fsdp_lab.base.events import RoleBytes
from fsdp_lab.engine.schedule import Direction, PointSide
from fsdp_lab.planner.costs import arithmetic
from fsdp_lab.planner.devices import Device
from fsdp_lab.planner.memory_models import base
from fsdp_lab.planner.memory_models.base import MemoryModel, MemoryTracker, role_bytes
from fsdp_lab.planner.memory_models.flat import FlatMemory
from fsdp_lab.planner.memory_models.fsdp import DDPMemory, FSDP1Memory, FSDP2Memory
from fsdp_lab.planner.model_shape import ALLOCATED, ARRIVED, FREED, ModelShape, TapeChange, TapeSegment
from fsdp_lab.spec.spec import Spec

CONTEXT_BYTES = 1 << 30  # GPU memory of CUDA's context, NCCL's buffers and the libraries' workspaces
# Blocks of a caching allocator that fit no request, as a share of the allocated bytes at the peak: what it cannot release.
# Below all published pairs: 0.15 to 0.83 in figure 8 of arXiv 2304.11277, 0.16 where torchtitan fills its device.
GPU_SLACK = 0.06
MODELS: Mapping[str, type[MemoryModel]]
MODELS = {"lab": FlatMemory, "fsdp2": FSDP2Memory, "fsdp1": FSDP1Memory, "ddp": DDPMemory}


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Bytes of one rank on its compute device, in the classes of the ledger. `held`: between steps."""

    held: RoleBytes
    at_peak: RoleBytes
    peak_phase: str  # "forward", "backward", "update"
    peak_unit: str
    host_bytes: int  # host memory under offload
    reserved_bytes: int  # the least that the allocator needs: the peak with its slack

    @property
    def peak_bytes(self) -> int:
        return self.at_peak.total_bytes

    def margin_bytes(self, device: Device) -> int:
        """The device's memory minus the allocator's and, on a GPU, minus the context's; negative if it does not suffice."""
        return device.memory_bytes - self.reserved_bytes - (CONTEXT_BYTES if device.type == "cuda" else 0)


def memory(spec: Spec, shape: ModelShape, *, device: str, model: type[MemoryModel] | None = None) -> MemoryPlan:
    """Predicts the memory of any step but the first, of a model in the units of `spec.strategy.wrap`, on a "cpu" or "cuda".
    `model`: of the backend; None: the usual one."""
    return _Step(spec, shape, model or MODELS[spec.strategy.backend], on_gpu=device != "cpu").plan()


def loading_bytes(spec: Spec, shape: ModelShape, *, device: str) -> int:
    """The most that a rank holds until it has its values: its part of them, into which they are read. There is no optimizer
    state yet. A model without values is made first, parameter by parameter on the host; for FSDP1 torch copies each unit."""
    on_gpu, tracker, backend = device != "cpu", MemoryTracker(), spec.strategy.backend
    model: MemoryModel = MODELS[backend](spec, shape, tracker, on_gpu=on_gpu)
    model.alloc_state()
    has_copies = model.offloaded and tracker.now[base.PARAMETERS] > 0
    values = sum(u.shard * (not (model.offloaded and on_gpu)) + u.cast * has_copies for u in model.units)
    buckets = tracker.now[base.UNSHARDED] + tracker.now[base.GRADIENTS] if not spec.strategy.traits.has_units else 0.0
    skeleton = 0 if on_gpu else base.MASTER * max(n for unit in shape.units for n in unit.parameters)
    whole = base.MASTER * max(unit.numel for unit in shape.units) if backend == "fsdp1" else 0
    return round(max(skeleton, whole * (2 + 1 / spec.shard_factor), buckets + values))


def batch_bytes(spec: Spec, shape: ModelShape) -> float:
    """The batch's bytes on a CPU: ids and images are numpy's memory, which is not counted; labels are torch's copy of
    the ids. A dataset of the user's own is collated by torch."""
    if spec.workload.is_own:
        return shape.batch.bytes_of(spec.workload.micro_batch, 1)
    tokens = spec.workload.micro_batch * shape.tokens(spec.workload.seq_len)
    return 0.0 if shape.image_tokens is not None else 8.0 * tokens


class _Step:
    def __init__(self, spec: Spec, shape: ModelShape, model: type[MemoryModel], *, on_gpu: bool) -> None:
        self._spec, self._shape, self._tracker, self._on_gpu = spec, shape, MemoryTracker(), on_gpu
        self._model = model(spec, shape, self._tracker, on_gpu=on_gpu)
        self._samples, self._tokens = spec.workload.micro_batch, shape.tokens(spec.workload.seq_len)
        self._sizes: dict[int, tuple[Sequence[TapeChange], list[tuple[str, float, int | None, int]]]] = {}
        self._played: dict[tuple[object, ...], tuple[MemoryTracker, float]] = {}

    def plan(self) -> MemoryPlan:
        tracker, model = self._tracker, self._model
        tracker.alloc(base.OTHER, self._shape.buffers_bytes)
        model.alloc_state()
        held = role_bytes(tracker.now)
        on_device = self._shape.batch.bytes_of(self._samples, self._tokens)
        batch = on_device if self._on_gpu else batch_bytes(self._spec, self._shape)
        tape = tape_of(self._shape, self._spec)
        for micro in _distinct_micro_batches(self._spec):
            tracker.alloc(base.OTHER, batch)
            model.begin_micro_batch(reduces=self._spec.communicates(micro))
            self._play(tape)
            tracker.free(base.OTHER, batch)
        tracker.where = (Direction.UPDATE, 0)
        model.update()
        model.drop_gradients()
        phase, unit = tracker.peak_where
        names = self._shape.unit_names or tuple(u.name for u in self._shape.units)
        peak = role_bytes(tracker.peak)
        return MemoryPlan(
            held=held,
            at_peak=peak,
            peak_phase=phase,
            peak_unit=names[unit],
            host_bytes=round(model.host_bytes),
            reserved_bytes=round(peak.total_bytes * (1 + GPU_SLACK)),
        )

    def _play(self, tape: Sequence[TapeSegment]) -> None:
        calls, tracker, model = self._shape.call_tree, self._tracker, self._model
        for segment in tape:
            point = segment.point
            unit = calls[point.call].unit
            is_last = point.direction is Direction.BACKWARD and point.call == 0 and point.side is PointSide.AFTER
            tracker.where = (point.direction, unit)
            if not is_last:
                model.at(point)
            self._change(segment.changes, unit)
            if is_last:
                model.at(point)
                model.end_backward()

    def _change(self, changes: Sequence[TapeChange], unit: int) -> None:
        """Plays the model's own allocations; those of equal units in equal state are played once and added again."""
        if not changes:
            return
        model = self._model
        key = (id(changes), id(self._shape.units[unit]), *model.state_key(unit))
        played = self._played.get(key)
        if played is None:
            if any(c.unit is not None for c in changes if c.kind == ARRIVED):
                self._allocate(changes, unit)
                return
            total, self._tracker = self._tracker, MemoryTracker()
            model.tracker = self._tracker
            self._allocate(changes, unit)
            played = self._played[key] = (self._tracker, model.fresh[unit])
            self._tracker = model.tracker = total
        self._tracker.add(played[0])
        model.fresh[unit] = played[1]

    def _allocate(self, changes: Sequence[TapeChange], own: int) -> None:
        tracker, model = self._tracker, self._model
        if id(changes) not in self._sizes:
            sized = [(c.kind, c.size.bytes_of(self._samples, self._tokens), c.unit, c.index) for c in changes]
            self._sizes[id(changes)] = (changes, sized)  # with the changes, whose id must not be reused
        for kind, size, unit, index in self._sizes[id(changes)][1]:
            if kind == ALLOCATED:
                tracker.alloc(base.ACTIVATIONS, size)
            elif kind == FREED:
                tracker.free(base.ACTIVATIONS, size)
            elif kind == ARRIVED:
                model.gradient_ready(own if unit is None else unit, index, size)
            else:
                tracker.alloc(base.GRADIENTS, size)


def _distinct_micro_batches(spec: Spec) -> list[int]:
    """Micro-batches of a step that stand for all: up to the first communication of gradients and from there to the second
    the first, one that adds to it and the one that communicates; and the last of all."""
    interval, count = spec.sync_interval, spec.workload.accumulate
    first = {micro for micro in (0, 1, interval - 1) if micro < interval}
    return sorted(micro for micro in {*first, *(interval + m for m in first), count - 1} if micro < count)


def tape_of(shape: ModelShape, spec: Spec) -> Sequence[TapeSegment]:
    """The tape of the Spec's precision and recompute. Of a single unit "every:K" counts as "none", an upper bound."""
    s = spec.strategy
    name = arithmetic(s)
    plain = shape.tapes[name]
    whole = shape.tapes.get(f"{name}, recompute", plain)
    if s.recompute == "none":
        return plain
    if s.recompute == "full":
        return whole
    each = int(s.recompute.partition(":")[2])
    return [b if b.point.call and (b.point.call - 1) % each == 0 else a for a, b in zip(plain, whole, strict=True)]
