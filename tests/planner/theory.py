"""The peak of a step's memory in closed form, to hold the planner's replay of a tape against."""

from fsdp_lab.engine.schedule import Direction, PointSide
from fsdp_lab.planner.memory import batch_bytes, tape_of
from fsdp_lab.planner.memory_models.base import MemoryTracker
from fsdp_lab.planner.memory_models.flat import FlatMemory
from fsdp_lab.planner.model_shape import ARRIVED, FREED, ModelShape
from fsdp_lab.spec.spec import Spec


def peak_in_theory(spec: Spec, shape: ModelShape) -> float:
    """By the closed form of ZeRO and FSDP, with what the plain model holds from its tape: of the lab's engine
    with AdamW and its usual prefetching, over shards on CPUs of one host, where each unit is called once."""
    units = FlatMemory(spec, shape, MemoryTracker(), on_gpu=False).units
    samples, tokens = spec.workload.micro_batch, shape.tokens(spec.workload.seq_len)
    tape = tape_of(shape, spec)
    begins = (Direction.BACKWARD, PointSide.BEFORE)
    order = [shape.call_tree[s.point.call].unit for s in tape if (s.point.direction, s.point.side) == begins][1:]
    keeps_all = not spec.strategy.reshards_after_forward
    state = 3 * sum(u.shard for u in units) + units[0].gathered

    def engine(place: int, *, is_over: bool) -> float:
        """What the engine holds beside its state while the backward of a unit is under way, or afterwards."""
        first = place + is_over
        gathered = sum(units[u].gathered for u in (order[first:] if keeps_all else order[first : place + 2]))
        sent, reduced = order[max(0, first - 1) : first], order[: max(0, first - 1)]
        return gathered + sum(units[u].whole for u in sent) + sum(units[u].shard for u in reduced)

    model, came = shape.buffers_bytes + batch_bytes(spec, shape), dict.fromkeys(range(len(units)), 0.0)
    held = sum(units[u].gathered for u in (order if keeps_all else order[:1]))
    peak = 0.0
    for segment in tape:
        unit, point = shape.call_tree[segment.point.call].unit, segment.point
        if unit and point.direction is Direction.BACKWARD:
            place, is_over = order.index(unit), point.side is PointSide.AFTER
            held = engine(place, is_over=is_over)
            if is_over:
                taken_out = sum(units[u].shard for u in order[max(0, place - 1) : place])
                landed = engine(place, is_over=False) - units[unit].gathered + taken_out
                peak = max(peak, model + landed, model + held)  # a sum is taken out; what came is made one tensor
                model -= came[unit]
        peak = max(peak, model + held)
        for change in segment.changes:
            size = change.size.bytes_of(samples, tokens)
            if change.kind == ARRIVED:
                came[unit if change.unit is None else change.unit] += size
            else:
                model += -size if change.kind == FREED else size
            peak = max(peak, model + held)
    return state + peak
