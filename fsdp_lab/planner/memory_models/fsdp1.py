"""torch's FSDP1, as its `_runtime_utils.py` goes.

A unit's gradients stand beside each other until autograd joins them to one flat gradient, which is cast, scattered and cast
back in the hook of that unit. Reduced gradients stay until the next forward, as flat parameters keep them when the optimizer
lets go. The root stays gathered from its forward to its backward.
"""

from __future__ import annotations

from typing import Any

from fsdp_lab.core.model_shape import ModelShape
from fsdp_lab.core.schedule import Direction, Point, PointSide
from fsdp_lab.core.spec import Spec
from fsdp_lab.planner.compute import BYTES
from fsdp_lab.planner.memory_models.base import MemoryModel
from fsdp_lab.planner.memory_tracker import COMMUNICATION, GRADIENTS, UNSHARDED, MemoryTracker
from fsdp_lab.planner.unit_bytes import flat_bytes


class FSDP1Memory(MemoryModel):
    def __init__(self, spec: Spec, shape: ModelShape, book: MemoryTracker, *, on_gpu: bool) -> None:
        super().__init__(spec, shape, book, flat_bytes, on_gpu=on_gpu)
        s = spec.strategy
        self._reshards = s.reshards_after_forward
        self._item, self._reduce_item = BYTES[s.dtypes.param], BYTES[s.dtypes.reduce]
        self._shards = self.factor > 1
        n = len(self.units)
        self._gathered = [False] * n
        self._pieces = [0.0] * n
        self._flat = [0.0] * n  # a joined gradient that was not reduced
        calls = shape.call_tree
        self._first = {c.unit: k for k, c in reversed(list(enumerate(calls)))}
        self._last = {c.unit: k for k, c in enumerate(calls)}
        self._order = [u for u in dict.fromkeys(c.unit for c in calls) if u]
        self._begun = False
        self._late: int | None = None

    def hold(self) -> None:
        super().hold()
        if not self.offloaded and not self.keeps_gradients:
            self.gradients = [u.shard for u in self.units]
            self.book.alloc(GRADIENTS, sum(self.gradients))

    def begin(self, *, loud: bool) -> None:
        if not self._begun:  # the first forward drops those of the step before
            super().forget()
        self._begun = True
        super().begin(loud=loud)

    def forget(self) -> None:
        """They stay."""

    # -- parameters -------------------------------------------------------------------------------------------------

    def at(self, point: Point) -> None:
        unit = self.shape.call_tree[point.call].unit
        forward, before = point.direction is Direction.FORWARD, point.moment is PointSide.BEFORE
        if forward and before and point.call == self._first[unit]:
            self._unshard(unit)
            self._prefetch(unit, +1, self.strategy.forward_prefetch)
        elif forward and not before and point.call == self._last[unit]:
            if (unit and self._reshards) or not self._shards:
                self._reshard(unit)
        elif not forward and before and point.call == self._last[unit]:
            self._unshard(unit)
            if self.strategy.backward_prefetch_point == "before":
                self._prefetch(unit, -1, self.strategy.backward_prefetch)
        elif not forward and not before and point.call == self._first[unit]:
            self._ended(unit)

    def _prefetch(self, unit: int, way: int, depth: int) -> None:
        place = self._order.index(unit) + way if unit else (0 if way > 0 else len(self._order) - 1)
        if depth and 0 <= place < len(self._order):
            self._unshard(self._order[place])

    def _unshard(self, unit: int) -> None:
        if self._gathered[unit]:
            return
        u = self.units[unit]
        if not self._shards:
            self.book.alloc(COMMUNICATION, u.cast if u.mixed else 0.0)
            self._gathered[unit] = True
            return
        cast = u.cast if u.mixed else 0.0
        copied = u.shard if self.offloaded and self.on_gpu else 0.0
        self.book.alloc(COMMUNICATION, cast + copied)
        self.book.alloc(UNSHARDED, u.gathered)
        self.pass_by(self.gathering(u.gathered))
        self.book.free(COMMUNICATION, cast + copied)
        self._gathered[unit] = True

    def _reshard(self, unit: int) -> None:
        if not self._gathered[unit]:
            return
        u = self.units[unit]
        self._gathered[unit] = False
        if self._shards:
            self.book.free(UNSHARDED, u.gathered)
        else:
            self.book.free(COMMUNICATION, u.cast if u.mixed else 0.0)

    # -- gradients --------------------------------------------------------------------------------------------------

    def arrived(self, unit: int, index: int, size: float) -> None:
        self._pieces[unit] += size

    def _ended(self, unit: int) -> None:
        """Prefetched in the forward, a unit's parameters were made views before the operators of the unit ahead of it; so
        autograd joins their gradients after the backward of that one."""
        if not self.strategy.forward_prefetch:
            self._post_backward(unit)
            return
        if self._late is not None:
            self._post_backward(self._late)
        self._late = unit

    def _post_backward(self, unit: int) -> None:
        u, book = self.units[unit], self.book
        if not self._pieces[unit]:
            return
        joined = u.whole / self._reduce_item * self._item
        book.alloc(GRADIENTS, joined)
        book.free(GRADIENTS, self._pieces[unit])
        self._pieces[unit] = 0.0
        if self._flat[unit]:
            book.free(GRADIENTS, joined)  # added to what came before
        self._flat[unit] = joined
        self._reshard(unit)
        if self.strategy.backward_prefetch_point == "after":
            self._prefetch(unit, -1, self.strategy.backward_prefetch)
        if self.loud:
            self._reduce(unit)

    def _reduce(self, unit: int) -> None:
        """Cast, scatter and cast back; each step's input is there until the hook is over."""
        u, book = self.units[unit], self.book
        flat, self._flat[unit] = self._flat[unit], 0.0
        seen = 0.0 if self.offloaded and not self.on_gpu else 1.0  # what ends on the host of a CPU is not counted
        stages, roles = [flat], [GRADIENTS]
        for is_made, size, is_last in (
            (self._item != self._reduce_item, u.whole, not self._shards and not u.recast),
            (self._shards, u.reduced, not u.recast),
            (u.recast, u.shard, True),
        ):
            if is_made:
                stages.append(size * (seen if is_last else 1.0))
                roles.append(GRADIENTS if is_last or size == u.reduced else COMMUNICATION)
                book.alloc(roles[-1], stages[-1])
                self.pass_by(self.reducing(u.whole) if size == u.reduced else 0.0)
        for role, stage in zip(roles[:-1], stages[:-1], strict=True):
            book.free(role, stage)
        if self.offloaded or self.gradients[unit]:
            book.free(GRADIENTS, stages[-1])
        else:
            self.gradients[unit] = stages[-1]

    def end_backward(self) -> None:
        if self._late is not None:
            self._post_backward(self._late)
        self._late = None
        for unit in range(len(self.units)):
            self._post_backward(unit)

    # -- alike units ------------------------------------------------------------------------------------------------

    def key(self, unit: int) -> tuple[object, ...]:
        return (self._pieces[unit],)

    def after(self, unit: int) -> Any:
        return self._pieces[unit]

    def restore(self, unit: int, state: Any) -> None:
        self._pieces[unit] = state
