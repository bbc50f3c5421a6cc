"""torch's FSDP2, as its `_fsdp_param_group.py` of torch 2.13 goes.

A gather lands in one buffer and is copied out of it; the buffer stays until the next unit's copy (in the forward) or until
that copy is made (in the backward). A reduction's input stays until the next unit's. Gradients of a unit stand side by side
until its backward is over. The root stays gathered.
"""

from __future__ import annotations

from typing import Any

from fsdp_lab.core.model_shape import ModelShape
from fsdp_lab.core.schedule import Direction, Point, PointSide
from fsdp_lab.core.spec import Spec
from fsdp_lab.planner.memory_models.base import MemoryModel
from fsdp_lab.planner.memory_tracker import COMMUNICATION, GRADIENTS, UNSHARDED, MemoryTracker
from fsdp_lab.planner.unit_bytes import torch_bytes


class FSDP2Memory(MemoryModel):
    def __init__(self, spec: Spec, shape: ModelShape, book: MemoryTracker, *, on_gpu: bool) -> None:
        super().__init__(spec, shape, book, torch_bytes, on_gpu=on_gpu)
        s = spec.strategy
        self._reshards = s.reshards_after_forward
        self._asynchronous = s.forward_prefetch > 0 or s.backward_prefetch > 1
        n = len(self.units)
        self._buffer = [0.0] * n  # gathered, and not copied out yet
        self._gathered, self._few = [False] * n, [0.0] * n
        self._lent = 0.0  # the forward's last buffer
        self._gradient = [0.0] * n  # bytes of gradients that have come and were not reduced
        self._accumulated = [False] * n  # they are in the dtype of the reduction
        self._fresh = [0.0] * n  # what came since
        self._input = 0.0  # of the last reduction
        self._held = 0.0  # what replicas sum, where it is not the shard itself
        calls = shape.call_tree
        self._first = {c.unit: k for k, c in reversed(list(enumerate(calls)))}
        self._last = {c.unit: k for k, c in enumerate(calls)}
        self._order = [u for u in dict.fromkeys(c.unit for c in calls) if u]

    # -- parameters -------------------------------------------------------------------------------------------------

    def at(self, point: Point) -> None:
        unit = self.shape.call_tree[point.call].unit
        forward, before = point.direction is Direction.FORWARD, point.moment is PointSide.BEFORE
        if forward and before and point.call == self._first[unit]:
            self._unshard(unit)
            self._copy_out(unit, lend=not self._asynchronous)
            if unit:
                for other in self._next(unit, self.strategy.forward_prefetch):
                    self._unshard(other, ahead=True)
        elif forward and not before and point.call == self._last[unit]:
            if unit and self._reshards:
                self._reshard(unit, keep=True)
            if not unit:
                self.book.free(COMMUNICATION, self._lent)
                self._lent = 0.0
        elif not forward and before and point.call == self._last[unit]:
            self._unshard(unit)
            self._copy_out(unit, lend=False)
            for other in self._before(unit):
                self._unshard(other, ahead=True)
        elif not forward and not before and point.call == self._first[unit]:
            self._post_backward(unit)

    def _next(self, unit: int, depth: int) -> list[int]:
        place = self._order.index(unit)
        return self._order[place + 1 : place + 1 + depth]

    def _before(self, unit: int) -> list[int]:
        """Whom it prefetches in the backward: the last one used before it, or as many as are asked for."""
        if not unit:
            return self._order[-1:]
        place, depth = self._order.index(unit), self.strategy.backward_prefetch
        return self._order[max(0, place - depth) : place][::-1]

    def _unshard(self, unit: int, *, ahead: bool = False) -> None:
        if self._gathered[unit] or self._buffer[unit] or self.spec.world_size == 1:
            return
        u, book = self.units[unit], self.book
        copied = self.strategy.offload == "all" and self.on_gpu and not self._few[unit]
        cast = (u.cast if u.mixed and not self._few[unit] else 0.0) + (u.shard if copied else 0.0)
        book.alloc(COMMUNICATION, cast)
        self._buffer[unit] = u.gathered
        book.alloc(COMMUNICATION, u.gathered)
        self.pass_by(self.gathering(u.gathered), ahead=ahead and self._asynchronous)
        book.free(COMMUNICATION, cast)

    def _copy_out(self, unit: int, *, lend: bool) -> None:
        if self._gathered[unit]:
            return
        if lend or self._lent:
            self.book.free(COMMUNICATION, self._lent)
            self._lent = 0.0
        self.book.alloc(UNSHARDED, self.units[unit].gathered)
        self._gathered[unit] = True
        buffer, self._buffer[unit] = self._buffer[unit], 0.0
        if lend:
            self._lent = buffer
        else:
            self.book.free(COMMUNICATION, buffer)
        self.book.free(UNSHARDED, self._few[unit])
        self._few[unit] = 0.0

    def _reshard(self, unit: int, *, keep: bool = False) -> None:
        if not self._gathered[unit]:
            return
        size = self.strategy.reshard_size
        if keep and size:
            self._few[unit] = self.units[unit].gathered / size
            self.book.alloc(UNSHARDED, self._few[unit])
        self._gathered[unit] = False
        self.book.free(UNSHARDED, self.units[unit].gathered)

    # -- gradients --------------------------------------------------------------------------------------------------

    def arrived(self, unit: int, index: int, size: float) -> None:
        """It stays where autograd put it; a later micro-batch adds to what came before."""
        if self._gradient[unit] and not self._accumulated[unit]:
            self.book.free(GRADIENTS, size)
        else:
            self._fresh[unit] += size

    def _post_backward(self, unit: int) -> None:
        u, book = self.units[unit], self.book
        if self._accumulated[unit]:
            book.free(GRADIENTS, self._fresh[unit])
        else:
            self._gradient[unit] += self._fresh[unit]
        self._fresh[unit] = 0.0
        self._reshard(unit)
        if not self.loud:
            self._raise(unit)
            return
        book.free(COMMUNICATION, self._input)
        self._input = u.whole
        if not self._gradient[unit]:
            self._input = 0.0
            return
        book.alloc(COMMUNICATION, self._input)
        book.free(GRADIENTS, self._gradient[unit])
        self._gradient[unit], self._accumulated[unit] = 0.0, False
        self._reduced(unit)

    def _raise(self, unit: int) -> None:
        """What is kept for a later micro-batch is kept in the dtype of the reduction."""
        u = self.units[unit]
        if u.mixed and not u.recast and not self._accumulated[unit] and self._gradient[unit]:
            raised = self._gradient[unit] * 2
            self.book.alloc(GRADIENTS, raised)
            self.book.free(GRADIENTS, self._gradient[unit])
            self._gradient[unit], self._accumulated[unit] = raised, True

    def _reduced(self, unit: int) -> None:
        """A shard of the sum, and from it the gradient."""
        u, book = self.units[unit], self.book
        is_host_s = self.offloaded and not self.on_gpu
        if not u.recast:
            size = 0.0 if is_host_s else u.reduced
            book.alloc(GRADIENTS, size)
            self.pass_by(self.reducing(u.whole))
        else:
            book.alloc(COMMUNICATION, u.reduced)
            self.pass_by(self.reducing(u.whole))
            size = 0.0 if is_host_s else u.shard
            book.alloc(GRADIENTS, size)
            if self.replicas > 1:
                self._held += u.reduced
            else:
                book.free(COMMUNICATION, u.reduced)
        if self.offloaded or self.gradients[unit]:
            book.free(GRADIENTS, size)
        else:
            self.gradients[unit] = size

    def end_backward(self) -> None:
        for unit in range(len(self.units)):
            if self._gathered[unit] or self._fresh[unit]:
                self._post_backward(unit)
        self.book.free(COMMUNICATION, self._input + self._held + sum(self._buffer))
        self._input = self._held = 0.0
        self._buffer = [0.0] * len(self.units)

    # -- alike units ------------------------------------------------------------------------------------------------

    def key(self, unit: int) -> tuple[object, ...]:
        return bool(self._gradient[unit]), self._accumulated[unit], self._fresh[unit]

    def after(self, unit: int) -> Any:
        return self._fresh[unit]

    def restore(self, unit: int, state: Any) -> None:
        self._fresh[unit] = state
