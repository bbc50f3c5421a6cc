"""torch's FSDP1, after its `_runtime_utils.py`.

Gradients of a unit's parameters stay apart until autograd concatenates them to one flat gradient, which that unit's hook
casts, scatters and casts back. Reduced gradients stay until the next forward, since flat parameters hold them after
`zero_grad`. The root stays gathered from its forward to its backward.
"""

from __future__ import annotations

import math

from fsdp_lab.core.layout import ALIGN_BYTES
from fsdp_lab.core.model_shape import ModelShape, UnitShape
from fsdp_lab.core.spec import Spec
from fsdp_lab.planner.costs import BYTES
from fsdp_lab.planner.memory_models.base import (
    COMMUNICATION,
    GRADIENTS,
    MASTER,
    UNSHARDED,
    HookedMemory,
    MemoryTracker,
    UnitBytes,
    parameter_shapes,
)


class FSDP1Memory(HookedMemory):
    """`fresh`: bytes of a unit's gradients before they are concatenated."""

    def __init__(self, spec: Spec, shape: ModelShape, tracker: MemoryTracker, *, on_gpu: bool) -> None:
        super().__init__(spec, shape, tracker, on_gpu=on_gpu)
        s = spec.strategy
        self._reshards = s.reshards_after_forward
        self._item, self._reduce_item = BYTES[s.dtypes.param], BYTES[s.dtypes.reduce]
        self._shards = self.factor > 1
        self._flat = [0.0] * len(self.units)  # a flat gradient that is not reduced
        self._begun = False
        self._late: int | None = None

    def unit_bytes(self, unit: UnitShape) -> UnitBytes:
        """One flat parameter, padded to a multiple of the ranks, each original parameter to 16 bytes."""
        dtypes, shapes, align = self.strategy.dtypes, parameter_shapes(unit), ALIGN_BYTES // MASTER
        sizes = [-(-math.prod(s) // align) * align for s in shapes]
        n = -(-sum(sizes) // self.factor)
        end, decayed = 0, 0
        for size, shape in zip(sizes, shapes, strict=True):
            if len(shape) >= 2:
                decayed += max(0, min(n, end + math.prod(shape)) - min(n, end))
            end += size
        param, reduce = BYTES[dtypes.param], BYTES[dtypes.reduce]
        return UnitBytes.of(n, decayed, n - decayed, param=param, reduce=reduce, factor=self.factor)

    def alloc_state(self) -> None:
        super().alloc_state()
        if not self.offloaded and not self.keeps_gradients:
            self.gradients = [u.shard for u in self.units]
            self.tracker.alloc(GRADIENTS, sum(self.gradients))

    def begin_micro_batch(self, *, reduces: bool) -> None:
        if not self._begun:  # the first forward drops the gradients of the last step
            super().drop_gradients()
        self._begun = True
        super().begin_micro_batch(reduces=reduces)

    def drop_gradients(self) -> None:
        """They stay until the next forward."""

    # -- parameters -------------------------------------------------------------------------------------------------

    def pre_forward(self, unit: int) -> None:
        self._unshard(unit)
        self._prefetch(unit, +1, self.strategy.forward_prefetch)

    def post_forward(self, unit: int) -> None:
        if (unit and self._reshards) or not self._shards:
            self._reshard(unit)

    def pre_backward(self, unit: int) -> None:
        self._unshard(unit)
        if self.strategy.backward_prefetch_point == "before":
            self._prefetch(unit, -1, self.strategy.backward_prefetch)

    def post_backward(self, unit: int) -> None:
        """If parameters were prefetched in the forward, their views were made before the operators of the unit ahead, so
        autograd concatenates their gradients after the backward of that unit."""
        if not self.strategy.forward_prefetch:
            self._finish_gradients(unit)
            return
        if self._late is not None:
            self._finish_gradients(self._late)
        self._late = unit

    def _prefetch(self, unit: int, way: int, depth: int) -> None:
        place = self.order.index(unit) + way if unit else (0 if way > 0 else len(self.order) - 1)
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
        self.alloc_scratch(self.gather_scratch(u.gathered))
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

    # -- gradients --------------------------------------------------------------------------------------------------

    def gradient_ready(self, unit: int, index: int, size: float) -> None:
        self.fresh[unit] += size

    def _finish_gradients(self, unit: int) -> None:
        """Concatenate, reshard, reduce."""
        u, tracker = self.units[unit], self.tracker
        if not self.fresh[unit]:
            return
        flat = u.whole / self._reduce_item * self._item
        tracker.alloc(GRADIENTS, flat)
        tracker.free(GRADIENTS, self.fresh[unit])
        self.fresh[unit] = 0.0
        if self._flat[unit]:
            tracker.free(GRADIENTS, flat)  # added to that of earlier micro-batches
        self._flat[unit] = flat
        self._reshard(unit)
        if self.strategy.backward_prefetch_point == "after":
            self._prefetch(unit, -1, self.strategy.backward_prefetch)
        if self.reduces:
            self._reduce(unit)

    def _reduce(self, unit: int) -> None:
        """Cast, scatter and cast back; the input of each stage is freed at the end of the hook."""
        u, tracker = self.units[unit], self.tracker
        flat, self._flat[unit] = self._flat[unit], 0.0
        stages, roles = [flat], [GRADIENTS]
        for is_made, size, is_last in (
            (self._item != self._reduce_item, u.whole, not self._shards and not u.recast),
            (self._shards, u.reduced, not u.recast),
            (u.recast, u.shard, True),
        ):
            if is_made:
                stages.append(0.0 if is_last and self.reduces_on_host else size)
                roles.append(GRADIENTS if is_last or size == u.reduced else COMMUNICATION)
                tracker.alloc(roles[-1], stages[-1])
                self.alloc_scratch(self.reduce_scratch(u.whole) if size == u.reduced else 0.0)
        for role, stage in zip(roles[:-1], stages[:-1], strict=True):
            tracker.free(role, stage)
        self.keep_gradient(unit, stages[-1])

    def end_backward(self) -> None:
        if self._late is not None:
            self._finish_gradients(self._late)
        self._late = None
        for unit in range(len(self.units)):
            self._finish_gradients(unit)
