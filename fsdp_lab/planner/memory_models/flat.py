"""The lab's own engine: what engine/runtime.py, flat.py and gradients.py allocate and free, action by action.

Shared with the engine, as data without torch: the order of gathers, frees and reductions (`engine.schedule.Schedule`)
and the layout of flat buffers, shards and optimizer groups (`engine.layout.Layout`).

Note: the state of a unit's buffers (gathered, sent, reducing) is not shared. The engine's transitions act on storages: they
wait for streams, keep tensors alive, and handle exceptions and forwards that deviate from the schedule, none of which a
prediction has. A common state machine would need an interface between each line of the runtime and its tensors. Instead
tests/planner/test_memory.py compares this file with the memory of real ranks, class by class."""

import itertools
from functools import reduce

from fsdp_lab.engine.layout import Layout
from fsdp_lab.engine.schedule import Direction, Phase, Point, PointSide, Rules
from fsdp_lab.planner.costs import BYTES
from fsdp_lab.planner.memory_models import base
from fsdp_lab.planner.memory_models.base import GRADIENTS, UNSHARDED, MemoryModel, MemoryTracker, UnitBytes
from fsdp_lab.planner.model_shape import ModelShape, UnitShape
from fsdp_lab.planner.step import schedule_for
from fsdp_lab.spec.spec import Spec


class FlatMemory(MemoryModel):
    """The lab's engine. `fresh` of a unit: bytes of gradients as they came."""

    def __init__(self, spec: Spec, shape: ModelShape, tracker: MemoryTracker, *, on_gpu: bool) -> None:
        super().__init__(spec, shape, tracker, on_gpu=on_gpu)
        self._schedule = schedule_for(shape.call_tree, self._rules)
        self._whole_gradients = spec.strategy.shards_optimizer_only
        self._low = spec.strategy.dtypes.keep_low_precision_gradients
        n = len(self.units)
        self._gathered, self._sent, self._post_forward = [False] * n, [0.0] * n, [0.0] * n
        self._collected = [False] * n  # what came is one tensor in the dtype of the reduction
        self._reducing: list[int] = []  # whole gradients in flight, oldest first
        self._crossing: int | None = None  # its shard is on its way between the replicas

    def unit_bytes(self, unit: UnitShape) -> UnitBytes:
        """Sizes of its flat buffers, one per dtype in which parameters are gathered, and one of frozen ones."""
        dtypes, shapes, parts = self.strategy.dtypes, base.parameter_shapes(unit), []
        for kind in itertools.product((False, True), repeat=2):
            full_precision, frozen = kind
            chosen = [s for i, s in enumerate(shapes) if (i in unit.full_precision, i in unit.frozen) == kind]
            if not chosen:
                continue
            param, n = base.MASTER if full_precision else BYTES[dtypes.param], self.factor
            layout = Layout.of(chosen, [len(s) >= 2 for s in chosen], n, param, whole_pages=self._is_mapped)
            decayed, others = (0 if frozen else _group_numel(layout, group) for group in (True, False))
            numel, reduced = layout.shard_numel, 0 if frozen else layout.shard_numel
            sizes = {"param": param, "reduce": BYTES[dtypes.reduce], "factor": n, "reduced": reduced}
            parts.append(UnitBytes.of(numel, decayed, others, **sizes))
        return reduce(_joined, parts)

    @property
    def _rules(self) -> Rules:
        return self.strategy.schedule_rules

    @property
    def _is_view_of_master(self) -> bool:
        """Without sharding, in fp32 and on the same device, modules use the master itself."""
        return self.factor == 1 and not self.units[0].mixed and (self.strategy.offload == "none" or not self.on_gpu)

    @property
    def _gathers_nothing(self) -> bool:
        return self._is_view_of_master or self._is_mapped

    @property
    def _is_mapped(self) -> bool:
        """Modules use the shards of all ranks where they lie."""
        return self.factor > 1 and self.strategy.gather == "mapped"

    def alloc_state(self) -> None:
        super().alloc_state()
        if self.strategy.offload == "optimizer" and not self._is_view_of_master:
            self.tracker.alloc(base.PARAMETERS, sum(u.cast for u in self.units))
        if self._whole_gradients and not self._gathers_nothing:  # ZeRO-1 keeps gathered parameters
            self.tracker.alloc(UNSHARDED, sum(u.gathered for u in self.units))

    def at(self, point: Point) -> None:
        unit = self.shape.call_tree[point.call].unit
        reduced = False
        for action in self._schedule.at(point):
            if action.phase is Phase.UNSHARD:
                self._unshard(action.unit)
            elif action.phase is Phase.RESHARD:
                self._reshard(action.unit, point.direction)
            elif action.phase is Phase.REDUCE:
                reduced = True
                self._reduce(action.unit)
        if point.side is PointSide.BEFORE and not reduced:
            self._unshard(unit)
            self._wait_for_unshard(unit)

    def _unshard(self, unit: int) -> None:
        if self._gathered[unit] or self._gathers_nothing:
            return
        self._gathered[unit] = True
        u, tracker, offload = self.units[unit], self.tracker, self.strategy.offload
        if offload == "all" and not self._post_forward[unit]:
            tracker.alloc(base.COMMUNICATION, u.cast)
            self._sent[unit] = u.cast
        if not self._whole_gradients:
            tracker.alloc(UNSHARDED, u.gathered)
        if self.factor == 1:
            self._wait_for_unshard(unit)

    def _wait_for_unshard(self, unit: int) -> None:
        """Frees what the gather sent."""
        if self._post_forward[unit] and self._gathered[unit]:
            self.tracker.free(UNSHARDED, self._post_forward[unit])
            self._post_forward[unit] = 0.0
        self.tracker.free(base.COMMUNICATION, self._sent[unit])
        self._sent[unit] = 0.0

    def _reshard(self, unit: int, direction: Direction) -> None:
        if not self._gathered[unit]:
            return
        self._wait_for_unshard(unit)
        self._gathered[unit] = False
        if direction is Direction.FORWARD:
            self._post_forward[unit] = self.kept_after_forward(unit)
            self.tracker.alloc(UNSHARDED, self._post_forward[unit])
        if not self._whole_gradients:
            self.tracker.free(UNSHARDED, self.units[unit].gathered)

    def gradient_ready(self, unit: int, index: int, size: float) -> None:
        self.fresh[unit] += size

    def _collect(self, unit: int) -> None:
        """Copies what came into one tensor, unless an earlier micro-batch left one, to which it is added."""
        if self.fresh[unit] and not self._collected[unit]:
            self._collected[unit] = True
            self.tracker.alloc(GRADIENTS, self._unsharded_gradient(unit))
        self.tracker.free(GRADIENTS, self.fresh[unit])
        self.fresh[unit] = 0.0

    def _unsharded_gradient(self, unit: int) -> float:
        u, is_final = self.units[unit], self.factor == 1 or self._whole_gradients
        return 0.0 if self.reduces_on_host and is_final and (self._low or not u.recast) else u.whole

    def _scattered_gradient(self, unit: int) -> float:
        u, is_final = self.units[unit], not self._whole_gradients
        on_host = self.reduces_on_host and is_final and (self._low or not u.recast)
        return 0.0 if self.factor == 1 or on_host else u.reduced

    def _reduce(self, unit: int) -> None:
        if not self.reduces or not (self.fresh[unit] or self._collected[unit]):
            self._collect(unit)
            return
        self._advance_reductions(but=self.reductions - 1)
        self._collect(unit)
        self._collected[unit] = False
        self._reducing.append(unit)

    def _advance_reductions(self, *, but: int = 0) -> None:
        """Waits for what is in flight. On a CPU a copy of the shard then goes between the replicas, until the next time."""
        crossing, self._crossing = self._crossing, None
        if crossing is not None:
            self._keep_reduced(crossing, self._scattered_gradient(crossing), is_part=False)
        if len(self._reducing) <= but:
            return
        unit = self._reducing.pop(0)
        if self.factor > 1 and self.replicas > 1 and not self.on_gpu:
            self._crossing = unit
            self.tracker.alloc(GRADIENTS, self._scattered_gradient(unit))
            self.tracker.free(GRADIENTS, self._unsharded_gradient(unit))
        else:
            is_part = self.factor > 1 and not self._whole_gradients
            self._keep_reduced(unit, self._unsharded_gradient(unit), is_part=is_part)

    def _keep_reduced(self, unit: int, held: float, *, is_part: bool) -> None:
        """The gradient of the shard is all that is left of what is held, in the dtype in which the optimizer takes it."""
        u, tracker, kept = self.units[unit], self.tracker, held
        if (u.recast and not self._low) or is_part:
            kept = 0.0 if self.reduces_on_host else u.reduced if self._low else u.gradient
            tracker.alloc(GRADIENTS, kept)
            tracker.free(GRADIENTS, held)
        self.keep_gradient(unit, kept)

    def end_backward(self) -> None:
        for unit in reversed(range(len(self.units))):
            self._reduce(unit)
        while self._reducing or self._crossing is not None:
            self._advance_reductions()
        for unit in range(len(self.units)):
            self._reshard(unit, Direction.BACKWARD)


def _group_numel(layout: Layout, group: bool) -> int:
    """Elements of an optimizer group in rank 0's shard."""
    return len(range(*layout.region_in_shard(group, 0))) if group in layout.regions else 0


def _joined(a: UnitBytes, b: UnitBytes) -> UnitBytes:
    names = ("shard", "cast", "gathered", "whole", "reduced", "gradient", "state", "decayed", "others")
    sums = {name: getattr(a, name) + getattr(b, name) for name in names}
    return UnitBytes(**sums, mixed=a.mixed or b.mixed, recast=a.recast or b.recast)
