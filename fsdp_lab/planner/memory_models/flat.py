"""Our own engine: what `runtime.py`, `flat.py` and `gradients.py` of the engine hold, action by action of the schedule."""

from __future__ import annotations

from typing import Any

from fsdp_lab.core.model_shape import ModelShape
from fsdp_lab.core.schedule import Direction, Phase, Point, PointSide
from fsdp_lab.core.spec import Spec
from fsdp_lab.planner.memory_models.base import MemoryModel
from fsdp_lab.planner.memory_tracker import COMMUNICATION, GRADIENTS, PARAMETERS, UNSHARDED, MemoryTracker
from fsdp_lab.planner.timeline import schedule_for
from fsdp_lab.planner.unit_bytes import UnitBytes, lab_bytes


class FlatMemory(MemoryModel):
    def __init__(self, spec: Spec, shape: ModelShape, book: MemoryTracker, *, on_gpu: bool) -> None:
        super().__init__(spec, shape, book, lab_bytes, on_gpu=on_gpu)
        self._schedule = schedule_for(shape.call_tree, spec.strategy.schedule_rules)
        self._whole_gradients = spec.strategy.shards_optimizer_only
        self._low = spec.strategy.dtypes.keep_low_precision_gradients
        n = len(self.units)
        self._gathered, self._sent, self._few = [False] * n, [0.0] * n, [0.0] * n
        self._gradient = [0.0] * n  # 1.0: something came that is not reduced yet
        self._reducing: int | None = None

    @property
    def _views(self) -> bool:
        """Without shards, in fp32 and on its own device the master is what modules see."""
        return self.factor == 1 and not self.units[0].mixed and (self.strategy.offload == "none" or not self.on_gpu)

    def hold(self) -> None:
        super().hold()
        if self.strategy.offload == "optimizer" and not self._views:
            self.book.alloc(PARAMETERS, sum(u.cast for u in self.units))
        if self._whole_gradients and not self._views:  # ZeRO-1 keeps what it gathered
            self.book.alloc(UNSHARDED, sum(u.gathered for u in self.units))

    # -- parameters -------------------------------------------------------------------------------------------------

    def at(self, point: Point) -> None:
        unit = self.shape.call_tree[point.call].unit
        acted = False
        for action in self._schedule.at(point):
            if action.phase is Phase.UNSHARD:
                self._unshard(action.unit, ahead=action.ahead)
            elif action.phase is Phase.RESHARD:
                self._reshard(action.unit, point.direction)
            elif action.phase is Phase.REDUCE:
                acted = True
                self._reduce(action.unit)
        if point.moment is PointSide.BEFORE and not acted:
            self._unshard(unit)
            self._land(unit)

    def _unshard(self, unit: int, *, ahead: bool = False) -> None:
        if self._gathered[unit] or self._views:
            return
        self._gathered[unit] = True
        u, book = self.units[unit], self.book
        near = self.strategy.offload
        if near == "all" and not self._few[unit]:
            book.alloc(COMMUNICATION, u.cast)
            self._sent[unit] = u.cast
        if not self._whole_gradients:
            book.alloc(UNSHARDED, u.gathered)
        if not self._few[unit] and near == "none" and u.mixed:
            self._sent[unit] = u.cast
            book.alloc(COMMUNICATION, u.cast)
        self.pass_by(self.gathering(u.gathered), ahead=ahead)
        if self.factor == 1:
            self._land(unit)

    def _land(self, unit: int) -> None:
        if self._few[unit] and self._gathered[unit]:
            self.book.free(UNSHARDED, self._few[unit])
            self._few[unit] = 0.0
        self.book.free(COMMUNICATION, self._sent[unit])
        self._sent[unit] = 0.0

    def _reshard(self, unit: int, direction: Direction) -> None:
        if not self._gathered[unit]:
            return
        self._land(unit)
        self._gathered[unit] = False
        size = self.strategy.reshard_size
        if size and direction is Direction.FORWARD:
            self._few[unit] = self.units[unit].gathered / size
            self.book.alloc(UNSHARDED, self._few[unit])
        if not self._whole_gradients:
            self.book.free(UNSHARDED, self.units[unit].gathered)

    # -- gradients --------------------------------------------------------------------------------------------------

    @property
    def _is_host_s(self) -> bool:
        """On a CPU, what an offloaded gradient ends in is the host's from the beginning."""
        return self.offloaded and not self.on_gpu

    def arrived(self, unit: int, index: int, size: float) -> None:
        u = self.units[unit]
        if not self._gradient[unit]:
            self._gradient[unit] = 1.0
            self.book.alloc(GRADIENTS, self._whole(u))
        self.book.free(GRADIENTS, size)

    def _whole(self, u: UnitBytes) -> float:
        stays = self.factor == 1 or self._whole_gradients
        return 0.0 if self._is_host_s and stays and (self._low or not u.recast) else u.whole

    def _part(self, u: UnitBytes) -> float:
        """What is scattered."""
        stays = not self._whole_gradients and (self._low or not u.recast)
        return 0.0 if self.factor == 1 or (self._is_host_s and stays) else u.reduced

    def _reduce(self, unit: int) -> None:
        if not self.loud or not self._gradient[unit]:
            return
        self._finish()
        self._gradient[unit] = 0.0
        self.book.alloc(GRADIENTS, self._part(self.units[unit]))
        self.book.alloc(COMMUNICATION, self.reducing(self.units[unit].whole))
        self._reducing = unit

    def _finish(self) -> None:
        """The reduction in flight comes to its shard."""
        if self._reducing is None:
            return
        unit, self._reducing = self._reducing, None
        u, book = self.units[unit], self.book
        whole, part = self._whole(u), self._part(u)
        kept = whole if self.factor == 1 or self._whole_gradients else part
        book.free(COMMUNICATION, self.reducing(u.whole))
        book.free(GRADIENTS, whole + part - kept)
        if u.recast and not self._low:
            raised = 0.0 if self._is_host_s else u.shard
            book.alloc(GRADIENTS, raised)
            book.free(GRADIENTS, kept)
            kept = raised
        if self.offloaded or self.gradients[unit]:
            book.free(GRADIENTS, kept)
        else:
            self.gradients[unit] = kept

    def end_backward(self) -> None:
        for unit in reversed(range(len(self.units))):
            self._reduce(unit)
        self._finish()
        for unit in range(len(self.units)):
            self._reshard(unit, Direction.BACKWARD)

    # -- alike units ------------------------------------------------------------------------------------------------

    def key(self, unit: int) -> tuple[object, ...]:
        return (bool(self._gradient[unit]),)

    def after(self, unit: int) -> Any:
        return self._gradient[unit]

    def restore(self, unit: int, state: Any) -> None:
        self._gradient[unit] = state
