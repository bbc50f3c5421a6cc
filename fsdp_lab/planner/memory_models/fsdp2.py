"""torch's FSDP2, after `_fsdp_param_group.py` of torch 2.13.

An all-gather writes to one buffer, which is copied to the parameters. The buffer is freed at the next unit's copy (in the
forward) or after its own copy (in the backward). The input of a reduction is freed at the next unit's reduction. Gradients
of a unit stay apart until its backward is over. The root stays gathered.
"""

from __future__ import annotations

import math

from fsdp_lab.core.model_shape import ModelShape, UnitShape
from fsdp_lab.core.spec import Spec
from fsdp_lab.planner.costs import BYTES
from fsdp_lab.planner.memory_models.base import (
    COMMUNICATION,
    GRADIENTS,
    UNSHARDED,
    HookedMemory,
    MemoryTracker,
    UnitBytes,
    parameter_shapes,
)


class FSDP2Memory(HookedMemory):
    """`fresh`: bytes of a unit's gradients of the current backward."""

    def __init__(self, spec: Spec, shape: ModelShape, tracker: MemoryTracker, *, on_gpu: bool) -> None:
        super().__init__(spec, shape, tracker, on_gpu=on_gpu)
        s, n = spec.strategy, len(self.units)
        self._reshards = s.reshards_after_forward
        self._asynchronous = s.forward_prefetch > 0 or s.backward_prefetch > 1
        self._buffer = [0.0] * n  # gathered and not copied yet
        self._post_forward = [0.0] * n
        self._last_buffer = 0.0  # of the forward, after its copy
        self._unreduced = [0.0] * n  # gradients of finished backwards
        self._upcast = [False] * n  # they are in the dtype of the reduction
        self._reduce_input = 0.0
        self._all_reduced = 0.0  # inputs of all-reduces over replicas, where they are not the shards themselves

    def unit_bytes(self, unit: UnitShape) -> UnitBytes:
        """Each parameter is sharded by its first dimension; rank 0 has the largest part."""
        dtypes, shapes = self.strategy.dtypes, parameter_shapes(unit)
        parts = [-(-s[0] // self.factor) * (math.prod(s) // s[0]) if s and s[0] else 0 for s in shapes]
        n, decayed = sum(parts), sum(p for p, s in zip(parts, shapes, strict=True) if len(s) >= 2)
        param, reduce = BYTES[dtypes.param], BYTES[dtypes.reduce]
        return UnitBytes.of(n, decayed, n - decayed, param=param, reduce=reduce, factor=self.factor)

    # -- parameters -------------------------------------------------------------------------------------------------

    def pre_forward(self, unit: int) -> None:
        self._unshard(unit)
        self._copy_out(unit, keeps_buffer=not self._asynchronous)
        if unit:
            place = self.order.index(unit) + 1
            for other in self.order[place : place + self.strategy.forward_prefetch]:
                self._unshard(other, ahead=True)

    def post_forward(self, unit: int) -> None:
        if unit and self._reshards:
            self._reshard(unit, post_forward=True)
        if not unit:
            self.tracker.free(COMMUNICATION, self._last_buffer)
            self._last_buffer = 0.0

    def pre_backward(self, unit: int) -> None:
        self._unshard(unit)
        self._copy_out(unit, keeps_buffer=False)
        for other in self._prefetched_in_backward(unit):
            self._unshard(other, ahead=True)

    def _prefetched_in_backward(self, unit: int) -> list[int]:
        """The last unit by the root; else as many as are prefetched, nearest first."""
        if not unit:
            return self.order[-1:]
        place, depth = self.order.index(unit), self.strategy.backward_prefetch
        return self.order[max(0, place - depth) : place][::-1]

    def _unshard(self, unit: int, *, ahead: bool = False) -> None:
        if self.gathered[unit] or self._buffer[unit] or self.spec.world_size == 1:
            return
        u, tracker, is_resharded = self.units[unit], self.tracker, bool(self._post_forward[unit])
        copied = self.strategy.offload == "all" and self.on_gpu and not is_resharded
        cast = (u.cast if u.mixed and not is_resharded else 0.0) + (u.shard if copied else 0.0)
        tracker.alloc(COMMUNICATION, cast)
        self._buffer[unit] = u.gathered
        tracker.alloc(COMMUNICATION, u.gathered)
        self.alloc_scratch(self.gather_scratch(u.gathered), ahead=ahead and self._asynchronous)
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
        size = self.strategy.reshard_size
        if post_forward and size:
            self._post_forward[unit] = self.units[unit].gathered / size
            self.tracker.alloc(UNSHARDED, self._post_forward[unit])
        self.gathered[unit] = False
        self.tracker.free(UNSHARDED, self.units[unit].gathered)

    # -- gradients --------------------------------------------------------------------------------------------------

    def gradient_ready(self, unit: int, index: int, size: float) -> None:
        """Autograd adds it to that of an earlier micro-batch, if there is one."""
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
        if not self.reduces:
            self._upcast_unreduced(unit)
            return
        tracker.free(COMMUNICATION, self._reduce_input)
        self._reduce_input = u.whole if self._unreduced[unit] else 0.0
        if not self._unreduced[unit]:
            return
        tracker.alloc(COMMUNICATION, self._reduce_input)
        tracker.free(GRADIENTS, self._unreduced[unit])
        self._unreduced[unit], self._upcast[unit] = 0.0, False
        self._reduce(unit)

    def _upcast_unreduced(self, unit: int) -> None:
        """Gradients that a later micro-batch adds to are kept in the dtype of the reduction."""
        u = self.units[unit]
        if u.mixed and not u.recast and not self._upcast[unit] and self._unreduced[unit]:
            upcast = self._unreduced[unit] * 2
            self.tracker.alloc(GRADIENTS, upcast)
            self.tracker.free(GRADIENTS, self._unreduced[unit])
            self._unreduced[unit], self._upcast[unit] = upcast, True

    def _reduce(self, unit: int) -> None:
        """The shard of the sum, and the gradient made of it."""
        u, tracker = self.units[unit], self.tracker
        if not u.recast:
            size = 0.0 if self.reduces_on_host else u.reduced
            tracker.alloc(GRADIENTS, size)
            self.alloc_scratch(self.reduce_scratch(u.whole))
        else:
            tracker.alloc(COMMUNICATION, u.reduced)
            self.alloc_scratch(self.reduce_scratch(u.whole))
            size = 0.0 if self.reduces_on_host else u.shard
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
        self.tracker.free(COMMUNICATION, self._reduce_input + self._all_reduced + sum(self._buffer))
        self._reduce_input = self._all_reduced = 0.0
        self._buffer = [0.0] * len(self.units)

    def state_key(self, unit: int) -> tuple[object, ...]:
        return bool(self._unreduced[unit]), self._upcast[unit], self.fresh[unit]
