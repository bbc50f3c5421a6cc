"""torch's FSDP1, after its `_runtime_utils.py`, FSDP2, after `_fsdp_param_group.py` of torch 2.13, and DDP.

FSDP1: gradients of a unit's parameters stay separate until autograd concatenates them to one flat gradient, which the unit's
hook casts, scatters and casts back. Reduced gradients stay until the next forward, since flat parameters hold them after
`zero_grad`. The root stays gathered from its forward to its backward.

FSDP2: an all-gather writes to one buffer, which is copied to the parameters. The buffer is freed at the next unit's copy (in
the forward) or after its own copy (in the backward). The input of a reduction is freed at the next unit's reduction.
Gradients of a unit stay separate until its backward is over. The root stays gathered.

DDP: a gradient is copied to its bucket when it is ready. If the reduction has a dtype of its own, a bucket is sent as a
copy.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from fsdp_lab.engine.layout import ALIGN_BYTES
from fsdp_lab.engine.schedule import Direction, Point, PointSide
from fsdp_lab.planner.costs import BUCKET, BYTES, FIRST_BUCKET
from fsdp_lab.planner.memory_models.base import (
    COMMUNICATION,
    GRADIENTS,
    MASTER,
    UNSHARDED,
    MemoryModel,
    MemoryTracker,
    UnitBytes,
    decayed_numel,
    parameter_shapes,
)
from fsdp_lab.planner.model_shape import ModelShape, UnitShape
from fsdp_lab.spec.spec import Spec


class HookedMemory(MemoryModel):
    """The hooks `pre_forward`, `post_forward`, `pre_backward` and `post_backward` run before the first and after the last
    call of a unit."""

    def __init__(self, spec: Spec, shape: ModelShape, tracker: MemoryTracker, *, on_gpu: bool) -> None:
        super().__init__(spec, shape, tracker, on_gpu=on_gpu)
        calls = shape.call_tree
        self._first = {c.unit: k for k, c in reversed(list(enumerate(calls)))}
        self._last = {c.unit: k for k, c in enumerate(calls)}
        self.order = [u for u in dict.fromkeys(c.unit for c in calls) if u]  # units below the root, by first call
        self.gathered = [False] * len(self.units)

    def at(self, point: Point) -> None:
        unit = self.shape.call_tree[point.call].unit
        forward, before = point.direction is Direction.FORWARD, point.moment is PointSide.BEFORE
        if point.call == (self._first if forward is before else self._last)[unit]:
            if forward:
                (self.pre_forward if before else self.post_forward)(unit)
            else:
                (self.pre_backward if before else self.post_backward)(unit)

    def pre_forward(self, unit: int) -> None:
        raise NotImplementedError

    def post_forward(self, unit: int) -> None:
        raise NotImplementedError

    def pre_backward(self, unit: int) -> None:
        raise NotImplementedError

    def post_backward(self, unit: int) -> None:
        raise NotImplementedError


class FSDP1Memory(HookedMemory):
    """FSDP1. `fresh`: bytes of a unit's gradients before they are concatenated."""

    def __init__(self, spec: Spec, shape: ModelShape, tracker: MemoryTracker, *, on_gpu: bool) -> None:
        super().__init__(spec, shape, tracker, on_gpu=on_gpu)
        s = spec.strategy
        self._reshards = s.reshards_after_forward
        self._item, self._reduce_item = BYTES[s.dtypes.param], BYTES[s.dtypes.reduce]
        self._shards = self.factor > 1
        self._flat = [0.0] * len(self.units)  # a flat gradient that is not reduced
        self._begun = False
        self._late: int | None = None  # a unit whose gradients are not concatenated yet

    def unit_bytes(self, unit: UnitShape) -> UnitBytes:
        """One flat parameter, padded to a multiple of the ranks, each original parameter to 16 bytes."""
        dtypes, shapes, align = self.strategy.dtypes, parameter_shapes(unit), ALIGN_BYTES // MASTER
        sizes = [-(-math.prod(s) // align) * align for s in shapes]
        n = -(-sum(sizes) // self.factor)
        end, decayed, frozen = 0, 0, 0
        for i, (size, shape) in enumerate(zip(sizes, shapes, strict=True)):
            held = max(0, min(n, end + math.prod(shape)) - min(n, end))
            if i in unit.frozen:
                frozen += held
            elif len(shape) >= 2:
                decayed += held
            end += size
        widths = {"param": BYTES[dtypes.param], "reduce": BYTES[dtypes.reduce], "factor": self.factor}
        made = UnitBytes.of(n, decayed, n - frozen - decayed, reduced=n if unit.trained_numel else 0, **widths)
        return dataclasses.replace(made, state=(n - frozen if unit.trained_numel else 0) * MASTER)

    def alloc_state(self) -> None:
        super().alloc_state()
        if not self.offloaded:
            self.gradients = [u.gradient for u in self.units]
            self.tracker.alloc(GRADIENTS, sum(self.gradients))

    def begin_micro_batch(self, *, reduces: bool) -> None:
        if not self._begun:  # the first forward drops the gradients of the last step
            super().drop_gradients()
        self._begun = True
        super().begin_micro_batch(reduces=reduces)

    def drop_gradients(self) -> None:
        """Gradients stay until the next forward."""

    def pre_forward(self, unit: int) -> None:
        self._unshard(unit)
        self._prefetch(unit, +1, self.strategy.forward_depth)

    def post_forward(self, unit: int) -> None:
        if (unit and self._reshards) or not self._shards:
            self._reshard(unit)

    def pre_backward(self, unit: int) -> None:
        self._unshard(unit)
        if self.strategy.backward_prefetch_point == "before":
            self._prefetch(unit, -1, self.strategy.backward_prefetch)

    def post_backward(self, unit: int) -> None:
        """With forward prefetching, a unit's views are made before the operators of the previous unit, so autograd
        concatenates its gradients after the backward of that one."""
        if not self.strategy.forward_depth:
            self._finish_gradients(unit)
            return
        if self._late is not None:
            self._finish_gradients(self._late)
        self._late = unit

    def _prefetch(self, unit: int, step: int, depth: int) -> None:
        place = self.order.index(unit) + step if unit else (0 if step > 0 else len(self.order) - 1)
        if depth and 0 <= place < len(self.order):
            self._unshard(self.order[place])

    def _unshard(self, unit: int) -> None:
        if self.gathered[unit]:
            return
        u = self.units[unit]
        self.gathered[unit] = True
        cast = u.cast if u.mixed else 0.0
        if not self._shards:
            self.tracker.alloc(COMMUNICATION, cast)
            return
        copied = u.shard if self.offloaded and self.on_gpu else 0.0
        self.tracker.alloc(COMMUNICATION, cast + copied)
        self.tracker.alloc(UNSHARDED, u.gathered)
        self.tracker.free(COMMUNICATION, cast + copied)

    def _reshard(self, unit: int) -> None:
        if not self.gathered[unit]:
            return
        u = self.units[unit]
        self.gathered[unit] = False
        if self._shards:
            self.tracker.free(UNSHARDED, u.gathered)
        else:
            self.tracker.free(COMMUNICATION, u.cast if u.mixed else 0.0)

    def gradient_ready(self, unit: int, index: int, size: float) -> None:
        self.fresh[unit] += size

    def _finish_gradients(self, unit: int) -> None:
        """Concatenates, reshards, reduces."""
        u, tracker = self.units[unit], self.tracker
        if not self.fresh[unit]:
            return
        flat = u.whole / self._reduce_item * self._item
        tracker.alloc(GRADIENTS, flat)
        tracker.free(GRADIENTS, self.fresh[unit])
        self.fresh[unit] = 0.0
        if self._flat[unit] or (self.gradients[unit] and not (self._shards or self.reduces)):
            tracker.free(GRADIENTS, flat)  # added to that of earlier micro-batches
        else:
            self._flat[unit] = flat
        self._reshard(unit)
        if self.strategy.backward_prefetch_point == "after":
            self._prefetch(unit, -1, self.strategy.backward_prefetch)
        if self.reduces:
            self._reduce(unit)

    def _reduce(self, unit: int) -> None:
        """Casts, scatters and casts back; the inputs of the stages are freed at the end of the hook."""
        u, tracker = self.units[unit], self.tracker
        flat, self._flat[unit] = self._flat[unit], 0.0
        stages, roles = [flat], [GRADIENTS]
        for exists, size, is_last in (
            (self._item != self._reduce_item, u.whole, not self._shards and not u.recast),
            (self._shards, u.reduced, not u.recast),
            (u.recast, u.gradient, True),
        ):
            if exists:
                stages.append(0.0 if is_last and self.reduces_on_host else size)
                roles.append(GRADIENTS if is_last or size == u.reduced else COMMUNICATION)
                tracker.alloc(roles[-1], stages[-1])
        for role, stage in zip(roles[:-1], stages[:-1], strict=True):
            tracker.free(role, stage)
        self.keep_gradient(unit, stages[-1])

    def end_backward(self) -> None:
        if self._late is not None:
            self._finish_gradients(self._late)
        self._late = None
        for unit in range(len(self.units)):
            self._finish_gradients(unit)


class FSDP2Memory(HookedMemory):
    """FSDP2. `fresh`: bytes of a unit's gradients of the current backward."""

    def __init__(self, spec: Spec, shape: ModelShape, tracker: MemoryTracker, *, on_gpu: bool) -> None:
        super().__init__(spec, shape, tracker, on_gpu=on_gpu)
        s, n = spec.strategy, len(self.units)
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
        dtypes, shapes = self.strategy.dtypes, parameter_shapes(unit)
        parts = [-(-s[0] // self.factor) * (math.prod(s) // s[0]) if s and s[0] else 0 for s in shapes]
        n, trained = sum(parts), sum(p for i, p in enumerate(parts) if i not in unit.frozen)
        decayed = sum(p for i, p in enumerate(parts) if len(shapes[i]) >= 2 and i not in unit.frozen)
        sizes = {"param": BYTES[dtypes.param], "reduce": BYTES[dtypes.reduce], "factor": self.factor}
        return UnitBytes.of(n, decayed, trained - decayed, reduced=trained, **sizes)

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


# -- torch's DDP: parameters, gradients in buckets and optimizer state, unsharded on every rank ----------------------


class DDPMemory(MemoryModel):
    """DDP. `fresh`: bytes of a unit's gradients of this micro-batch that are not in buckets, as under `no_sync`."""

    def __init__(self, spec: Spec, shape: ModelShape, tracker: MemoryTracker, *, on_gpu: bool) -> None:
        super().__init__(spec, shape, tracker, on_gpu=on_gpu)
        self._filled, self._limit, self._sent = 0.0, float(FIRST_BUCKET), 0.0
        self._recast = self.units[0].recast
        self._kept = [0.0] * len(self.units)  # those of earlier micro-batches
        self._in_buckets = False  # gradients are views of buckets: from the first reduction of a step on
        self._share = BYTES[spec.strategy.dtypes.reduce] / MASTER

    def unit_bytes(self, unit: UnitShape) -> UnitBytes:
        decayed, trained = decayed_numel(unit), unit.trained_numel
        sizes = {"param": MASTER, "reduce": BYTES[self.strategy.dtypes.reduce], "factor": 1, "reduced": trained}
        whole = UnitBytes.of(unit.numel, decayed, trained - decayed, **sizes)
        return dataclasses.replace(whole, gathered=0, whole=whole.gradient)

    def alloc_state(self) -> None:
        super().alloc_state()
        self.tracker.alloc(GRADIENTS, self.gradient_shards)

    def gradient_ready(self, unit: int, index: int, size: float) -> None:
        """Under `no_sync` the first gradients stay outside of the buckets, and later ones are added to them; after a
        reduction, to the buckets."""
        if not (self.reduces or self._kept[unit] or self._in_buckets):
            self.fresh[unit] += size
            return
        numel = self.shape.units[unit].parameters[index]
        self.tracker.free(GRADIENTS, size)
        if self.reduces and self._kept[unit]:
            self.tracker.free(GRADIENTS, 4.0 * numel)
        if self._recast and self.reduces:
            self._filled += 4.0 * numel
            if self._filled >= self._limit:
                self._send()

    def _send(self) -> None:
        sent = self._filled * self._share
        self.tracker.alloc(COMMUNICATION, sent)
        self._sent += sent
        self._filled, self._limit = 0.0, float(BUCKET)

    def end_backward(self) -> None:
        self._kept = [0.0 if self.reduces else kept + new for kept, new in zip(self._kept, self.fresh, strict=True)]
        self._in_buckets = self._in_buckets or self.reduces
        self.fresh = [0.0] * len(self.units)
        if self._recast and self._filled:
            self._send()
        self.tracker.free(COMMUNICATION, self._sent)
        self._sent, self._filled, self._limit = 0.0, 0.0, float(FIRST_BUCKET)

    def drop_gradients(self) -> None:
        """The buckets stay."""

    def state_key(self, unit: int) -> tuple[object, ...]:
        sent = (self._filled, self._limit, self._sent) if self._recast and self.reduces else ()
        return (self.reduces, bool(self._kept[unit]), self._in_buckets, self.fresh[unit], *sent)

    def unit_state(self, unit: int) -> Any:
        return self._filled, self._limit, self._sent, self.fresh[unit]

    def set_unit_state(self, unit: int, state: Any) -> None:
        self._filled, self._limit, self._sent, self.fresh[unit] = state
