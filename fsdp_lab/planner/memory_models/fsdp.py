"""torch's FSDP1, after its `_runtime_utils.py`, FSDP2, after `_fsdp_param_group.py` of torch 2.13, and DDP.

FSDP1: as the lab's engine, which has flat parameters too. But gathers and reductions cast copies of their own, a reduction
is over when its hook ends, and reduced gradients stay until the next forward, since flat parameters hold them after
`zero_grad`.

FSDP2: an all-gather writes to one buffer, which is copied to the parameters. The buffer is freed at the next unit's copy (in
the forward) or after its own copy (in the backward). The input of a reduction is freed at the next unit's reduction.
Gradients of a unit stay separate until its backward is over. The root stays gathered.

DDP: a gradient is copied to its bucket when it is ready. If the reduction has a dtype of its own, a copy is sent."""

import dataclasses
import math

from fsdp_lab.engine.schedule import Direction, Point, PointSide, Rules
from fsdp_lab.planner.costs import BYTES
from fsdp_lab.planner.memory_models import base
from fsdp_lab.planner.memory_models.base import COMMUNICATION, GRADIENTS, UNSHARDED, MemoryModel, UnitBytes
from fsdp_lab.planner.memory_models.flat import FlatMemory
from fsdp_lab.planner.model_shape import ModelShape, UnitShape
from fsdp_lab.spec.spec import Spec


class FSDP1Memory(FlatMemory):
    begun = False  # the first forward of a step drops the gradients of the last one

    def unit_bytes(self, unit: UnitShape) -> UnitBytes:
        """Of a flat parameter with frozen parts the gradient is whole."""
        made, item = super().unit_bytes(unit), BYTES[self.strategy.dtypes.reduce]
        if not unit.frozen or not unit.trained_numel:
            return made
        reduced = made.shard / base.MASTER * item
        return dataclasses.replace(made, whole=self.factor * reduced, reduced=reduced, gradient=made.shard)

    @property
    def _rules(self) -> Rules:
        rules = self.strategy.schedule_rules
        reshards = rules.reshard_after_forward or self.factor == 1  # what is not sharded is cast for a unit at a time
        return dataclasses.replace(rules, keeps_first=False, reshard_after_forward=reshards)

    def alloc_state(self) -> None:
        super().alloc_state()
        if not self.offloaded:
            self.gradients = [u.gradient for u in self.units]
            self.tracker.alloc(GRADIENTS, sum(self.gradients))

    def begin_micro_batch(self, *, reduces: bool) -> None:
        if not self.begun:
            super().drop_gradients()
        self.begun = True
        super().begin_micro_batch(reduces=reduces)

    def drop_gradients(self) -> None:
        """Gradients stay until the next forward."""

    def _unshard(self, unit: int) -> None:
        u, is_cast = self.units[unit], not (self._gathered[unit] or self._gathers_nothing)
        self.tracker.alloc(COMMUNICATION, u.cast * (u.mixed and is_cast))
        super()._unshard(unit)
        self.tracker.free(COMMUNICATION, u.cast * (u.mixed and is_cast))

    def _reshard(self, unit: int, direction: Direction) -> None:
        """Autograd joins gradients before the hook that frees."""
        if direction is Direction.BACKWARD:
            self._collect(unit)
        super()._reshard(unit, direction)

    def _collect(self, unit: int) -> None:
        flat = self._unsharded_gradient(unit) if self.fresh[unit] else 0.0
        self.tracker.alloc(GRADIENTS, flat)
        self.tracker.free(GRADIENTS, self.fresh[unit])
        self.fresh[unit] = 0.0
        if self._collected[unit] or (self.factor == 1 and self.gradients[unit] and not self.reduces):
            self.tracker.free(GRADIENTS, flat)  # added to that of earlier micro-batches
        elif flat:
            self._collected[unit] = True

    def _unsharded_gradient(self, unit: int) -> float:
        """In the dtype of the parameters, until it is reduced."""
        u = self.units[unit]
        return u.whole * BYTES[self.strategy.dtypes.param] / BYTES[self.strategy.dtypes.reduce]

    def _reduce(self, unit: int) -> None:
        """Casts, scatters and casts back; the inputs are freed at the end."""
        self._collect(unit)
        if not self.reduces or not self._collected[unit]:
            return
        u, flat, self._collected[unit] = self.units[unit], self._unsharded_gradient(unit), False
        is_part, is_cast = self.factor > 1, flat != u.whole
        self.tracker.alloc(COMMUNICATION, u.whole * (is_part and is_cast))
        self._keep_reduced(unit, flat, is_part=is_part or is_cast)
        self.tracker.free(COMMUNICATION, u.whole * (is_part and is_cast))


class FSDP2Memory(MemoryModel):
    """FSDP2. `fresh`: bytes of a unit's gradients of the current backward. Its hooks run before the first and after the last
    call of a unit."""

    def __init__(self, spec: Spec, shape: ModelShape, tracker: base.MemoryTracker, *, on_gpu: bool) -> None:
        super().__init__(spec, shape, tracker, on_gpu=on_gpu)
        s, n, calls = spec.strategy, len(self.units), shape.call_tree
        self._first = {c.unit: k for k, c in reversed(list(enumerate(calls)))}
        self._last = {c.unit: k for k, c in enumerate(calls)}
        self.order = [u for u in dict.fromkeys(c.unit for c in calls) if u]  # units below the root, by first call
        self.gathered = [False] * n
        self._reshards = s.reshards_after_forward
        self._asynchronous = s.forward_depth > 0 or s.backward_prefetch > 1
        self._buffer = [0.0] * n  # gathered and not copied yet
        self._post_forward = [0.0] * n
        self._last_buffer = 0.0  # of the forward, after its copy
        self._unreduced = [0.0] * n  # gradients of finished backwards
        self._upcast = [False] * n  # they are in the dtype of the reduction
        self._reduce_inputs: list[float] = []  # oldest first
        self._all_reduced = 0.0  # inputs of all-reduces over replicas, where they are not the shards themselves

    def unit_bytes(self, unit: UnitShape) -> UnitBytes:
        """Each parameter is sharded by its first dimension; rank 0 has the largest part."""
        dtypes, shapes = self.strategy.dtypes, base.parameter_shapes(unit)
        parts = [-(-s[0] // self.factor) * (math.prod(s) // s[0]) if s and s[0] else 0 for s in shapes]
        n, trained = sum(parts), sum(p for i, p in enumerate(parts) if i not in unit.frozen)
        decayed = sum(p for i, p in enumerate(parts) if len(shapes[i]) >= 2 and i not in unit.frozen)
        sizes = {"param": BYTES[dtypes.param], "reduce": BYTES[dtypes.reduce], "factor": self.factor}
        return UnitBytes.of(n, decayed, trained - decayed, reduced=trained, **sizes)

    def at(self, point: Point) -> None:
        unit = self.shape.call_tree[point.call].unit
        forward, before = point.direction is Direction.FORWARD, point.side is PointSide.BEFORE
        if point.call == (self._first if forward is before else self._last)[unit]:
            if forward:
                (self.pre_forward if before else self.post_forward)(unit)
            else:
                (self.pre_backward if before else self.post_backward)(unit)

    def pre_forward(self, unit: int) -> None:
        self._unshard(unit)
        self._copy_out(unit, keeps_buffer=not self._asynchronous)
        if unit:
            place = self.order.index(unit) + 1
            for other in self.order[place : place + self.strategy.forward_depth]:
                self._unshard(other)

    def post_forward(self, unit: int) -> None:
        if unit and self._reshards:
            self._reshard(unit, post_forward=True)
        if not unit:
            self.tracker.free(COMMUNICATION, self._last_buffer)
            self._last_buffer = 0.0

    def pre_backward(self, unit: int) -> None:
        self._unshard(unit)
        self._copy_out(unit, keeps_buffer=False)
        if unit and self.units[unit].mixed and self.shape.units[unit].full_precision:
            # Batch norms are units of their own: they are what is prefetched, and theirs is the next reduction.
            self.tracker.free(COMMUNICATION, sum(self._reduce_inputs))
            self._reduce_inputs = []
            return
        place = self.order.index(unit) if unit else len(self.order)
        depth = self.strategy.backward_prefetch if unit else 1
        for other in reversed(self.order[max(0, place - depth) : place]):  # nearest first
            self._unshard(other)

    def _unshard(self, unit: int) -> None:
        if self.gathered[unit] or self._buffer[unit] or self.spec.world_size == 1:
            return
        u, tracker, is_resharded = self.units[unit], self.tracker, bool(self._post_forward[unit])
        copied = self.strategy.offload == "all" and self.on_gpu and not is_resharded
        cast = (u.cast if u.mixed and not is_resharded else 0.0) + (u.shard if copied else 0.0)
        tracker.alloc(COMMUNICATION, cast)
        self._buffer[unit] = u.gathered
        tracker.alloc(COMMUNICATION, u.gathered)
        tracker.free(COMMUNICATION, cast)

    def _copy_out(self, unit: int, *, keeps_buffer: bool) -> None:
        if self.gathered[unit]:
            return
        if keeps_buffer or self._last_buffer:
            self.tracker.free(COMMUNICATION, self._last_buffer)
            self._last_buffer = 0.0
        self.tracker.alloc(UNSHARDED, self.units[unit].gathered)
        self.gathered[unit] = True
        buffer, self._buffer[unit] = self._buffer[unit], 0.0
        if keeps_buffer:
            self._last_buffer = buffer
        else:
            self.tracker.free(COMMUNICATION, buffer)
        self.tracker.free(UNSHARDED, self._post_forward[unit])
        self._post_forward[unit] = 0.0

    def _reshard(self, unit: int, *, post_forward: bool = False) -> None:
        if not self.gathered[unit]:
            return
        if post_forward:
            self._post_forward[unit] = self.kept_after_forward(unit)
            self.tracker.alloc(UNSHARDED, self._post_forward[unit])
        self.gathered[unit] = False
        self.tracker.free(UNSHARDED, self.units[unit].gathered)

    def gradient_ready(self, unit: int, index: int, size: float) -> None:
        """Autograd adds it to the gradient of an earlier micro-batch, if there is one."""
        if self._unreduced[unit] and not self._upcast[unit]:
            self.tracker.free(GRADIENTS, size)
        else:
            self.fresh[unit] += size

    def post_backward(self, unit: int) -> None:
        u, tracker = self.units[unit], self.tracker
        if self._upcast[unit]:
            tracker.free(GRADIENTS, self.fresh[unit])
        else:
            self._unreduced[unit] += self.fresh[unit]
        self.fresh[unit] = 0.0
        self._reshard(unit)
        if not self.reduces:  # gradients to which a later micro-batch adds are kept in the dtype of the reduction
            if u.mixed and not u.recast and not self._upcast[unit] and self._unreduced[unit]:
                upcast = self._unreduced[unit] * 2
                tracker.alloc(GRADIENTS, upcast)
                tracker.free(GRADIENTS, self._unreduced[unit])
                self._unreduced[unit], self._upcast[unit] = upcast, True
            return
        if len(self._reduce_inputs) == self.reductions:
            tracker.free(COMMUNICATION, self._reduce_inputs.pop(0))
        if not self._unreduced[unit]:
            return
        self._reduce_inputs.append(u.whole)
        tracker.alloc(COMMUNICATION, u.whole)
        tracker.free(GRADIENTS, self._unreduced[unit])
        self._unreduced[unit], self._upcast[unit] = 0.0, False
        self._reduce(unit)

    def _reduce(self, unit: int) -> None:
        """Allocates the shard of the sum, and the gradient that is made from it."""
        u, tracker = self.units[unit], self.tracker
        if not u.recast:
            size = 0.0 if self.reduces_on_host else u.reduced
            tracker.alloc(GRADIENTS, size)
        else:
            tracker.alloc(COMMUNICATION, u.reduced)
            size = 0.0 if self.reduces_on_host else u.gradient
            tracker.alloc(GRADIENTS, size)
            if self.replicas > 1:
                self._all_reduced += u.reduced
            else:
                tracker.free(COMMUNICATION, u.reduced)
        self.keep_gradient(unit, size)

    def end_backward(self) -> None:
        for unit in range(len(self.units)):
            if self.gathered[unit] or self.fresh[unit]:
                self.post_backward(unit)
        self.tracker.free(COMMUNICATION, sum(self._reduce_inputs) + self._all_reduced + sum(self._buffer))
        self._reduce_inputs, self._all_reduced = [], 0.0
        self._buffer = [0.0] * len(self.units)

    def state_key(self, unit: int) -> tuple[object, ...]:
        return bool(self._unreduced[unit]), self._upcast[unit], self.fresh[unit]


class DDPMemory(MemoryModel):
    """DDP: nothing is sharded. `fresh`: bytes of a unit's gradients of this micro-batch that are not in buckets, as under
    `no_sync` before the first reduction of a step."""

    _outside = False  # gradients of earlier micro-batches are outside of the buckets
    _in_buckets = False  # gradients are views of buckets: from the first reduction of a step on

    def unit_bytes(self, unit: UnitShape) -> UnitBytes:
        decayed, trained = base.decayed_numel(unit), unit.trained_numel
        sizes = {"param": base.MASTER, "reduce": BYTES[self.strategy.dtypes.reduce], "factor": 1, "reduced": trained}
        whole = UnitBytes.of(unit.numel, decayed, trained - decayed, **sizes)
        return dataclasses.replace(whole, gathered=0, whole=whole.gradient)

    def alloc_state(self) -> None:
        super().alloc_state()
        self.tracker.alloc(GRADIENTS, self.gradient_shards)

    def gradient_ready(self, unit: int, index: int, size: float) -> None:
        if not (self.reduces or self._outside or self._in_buckets):
            self.fresh[unit] += size
            return
        u, numel = self.units[unit], self.shape.units[unit].parameters[index]
        self.tracker.free(GRADIENTS, size)
        if self.reduces:
            self.tracker.free(GRADIENTS, base.MASTER * numel * self._outside)
            self.tracker.alloc(COMMUNICATION, numel * BYTES[self.strategy.dtypes.reduce] * u.recast)

    def end_backward(self) -> None:
        if self.reduces:
            self.tracker.free(COMMUNICATION, sum(u.reduced * u.recast for u in self.units))
        self._outside, self._in_buckets = not (self.reduces or self._in_buckets), self._in_buckets or self.reduces
        self.fresh = [0.0] * len(self.units)

    def drop_gradients(self) -> None:
        """The buckets stay."""

    def state_key(self, unit: int) -> tuple[object, ...]:
        return (self.reduces, self._outside, self._in_buckets, self.fresh[unit])
