"""A real step in ranks: `PhaseStepper` stops at its phases, `holdings` says what is there, a trace names them."""

import itertools
import threading
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from fsdp_lab import engine
from fsdp_lab.base.events import ROOT, ParameterHolding
from fsdp_lab.engine import ParamShard, UnitState, full_state, runtime_of, sharded_parameters, shards_of, units_of
from fsdp_lab.engine.buffer import sharded_form
from fsdp_lab.engine.schedule import Phase, PointSide, Schedule, UnitCall
from fsdp_lab.rank.slow_motion import PhaseStepper, Stop, holdings
from fsdp_lab.spec.spec import Strategy
from tests.engine.toys import Scenario, batch, by_block, everywhere, make, mean_square, update
from tests.pool import Place, Pool

Said = tuple[Phase, str, str]  # phase, unit, direction

NAMES = ("", "blocks.0", "blocks.1", "blocks.2", "blocks.3")
STRATEGIES = (Strategy(forward_prefetch=1, backward_prefetch=2),
              Strategy(backward_prefetch_point="after", limit_all_gathers=1, precision="bf16"),
              Strategy(sharding="zero1"))  # fmt: skip


class Training:
    """A sharded model and its step."""

    def __init__(self, place: Place, strategy: Strategy) -> None:
        self.model = by_block(make(depth=4), strategy=strategy)
        self.optimizer = torch.optim.AdamW(sharded_parameters(self.model), lr=0.1)
        self.rank, self.count = place.rank, 0

    def step(self) -> Tensor:
        loss = mean_square(self.model, batch(self.count, self.rank))
        loss.backward()
        update(self.optimizer)
        self.count += 1
        return loss.detach()

    def slow(self) -> PhaseStepper[Tensor]:
        return PhaseStepper(self.model, self.step)


def _equal(one: Training, other: Training) -> None:
    pairs = zip(full_state(one.model), full_state(other.model), strict=True)
    assert all(torch.equal(a, b) for (_, a), (_, b) in pairs)


def schedule_of(strategy: Strategy) -> Schedule:
    return Schedule((UnitCall(0), *(UnitCall(i, 0) for i in range(1, 5))), strategy.schedule_rules)


def scheduled(strategy: Strategy) -> list[Said]:
    return [
        (a.phase, NAMES[a.unit], a.point.direction)
        for a in schedule_of(strategy).actions
        if a.phase is not Phase.OPTIM and (a.phase is not Phase.COMPUTE or a.point.side is PointSide.BEFORE)
    ]


# -- what is held ------------------------------------------------------------------------------------------------------
def _is_true(model: Any, held: ParameterHolding, shard: ParamShard, whole: Tensor) -> None:
    """Compare with the storage itself."""
    p = model.get_parameter(shard.name)
    sharded = sharded_form(p)
    flat: engine.FlatBuffer = sharded.flat
    unit = next(unit for unit in units_of(model) if flat in unit.flats)
    assert held.unit == (unit.name or ROOT)
    assert (held.name, held.start, held.stop) == (shard.name, shard.start, shard.stop)
    assert torch.equal(shard.local, whole.reshape(-1)[shard.start : shard.stop])
    if held.state == "unsharded":
        assert torch.equal(p, whole.to(p.dtype)) and flat.gathered.is_held
    else:
        assert p is sharded
        assert flat.gathered.is_held == (held.state == "gathering" or flat.policy.shard_optimizer_only)
        assert (unit.state is UnitState.GATHERING) == (held.state == "gathering")
    reduced = shard.param is not None and shard.param.grad is not None
    assert (held.gradient == "unsharded") == flat.gradients.is_waiting
    assert (held.gradient == "sharded") == (reduced and not flat.gradients.is_waiting)
    if held.gradient == "sharded":
        assert bool(shard.param.grad.to_local().isfinite().all())


def slow_steps(place: Place) -> None:
    """The order is the schedule's, what is held at each stop is what is there, and the result is an ordinary step's."""
    for strategy in STRATEGIES:
        training, plain = Training(place, strategy), Training(place, strategy)
        assert torch.equal(training.step(), plain.step())
        model = training.model
        whole = {name: t.clone() for name, t in full_state(model)}
        seen: set[tuple[str, str]] = set()
        stops: list[Stop] = []
        motion = training.slow()
        for stop in motion:
            stops.append(stop)
            held = holdings(model)
            assert [h.name for h in held] == [name for name, _ in model.named_parameters()]
            for h, shard in zip(held, shards_of(model), strict=True):
                _is_true(model, h, shard, whole[h.name])
            seen |= {(h.state, h.gradient) for h in held}
            _is_before(stop, [h for h in held if h.unit == (stop.unit or ROOT)])
        ahead = any(action.ahead for action in schedule_of(strategy).actions)
        assert {state for state, _ in seen} == {"sharded", "unsharded"} | ({"gathering"} if ahead else set()), strategy
        assert {gradient for _, gradient in seen} == {"none", "unsharded", "reducing", "sharded"}, strategy
        assert {(h.state, h.gradient) for h in holdings(model)} == {("sharded", "none")}
        assert [stop.index for stop in stops] == list(range(len(stops)))
        assert [(s.phase, s.unit, s.direction) for s in stops] == scheduled(strategy), strategy
        assert motion.is_over and torch.equal(motion.result, plain.step())
        assert next(motion, None) is None  # it stays over
        _equal(training, plain)
        assert torch.equal(training.step(), plain.step())


def _is_before(stop: Stop, held: list[ParameterHolding]) -> None:
    """A stop is before its phase."""
    states, gradients = {h.state for h in held}, {h.gradient for h in held}
    wanted = {Phase.UNSHARD: "sharded", Phase.COMPUTE: "unsharded", Phase.RESHARD: "unsharded"}
    if stop.phase in wanted:
        assert states == {wanted[stop.phase]}, stop
    if stop.phase is Phase.REDUCE:
        assert gradients == {"unsharded"}, stop
    elif stop.direction == "forward":
        assert gradients == {"none"}, stop


# -- not to the end ----------------------------------------------------------------------------------------------------
def closed_in_the_middle(place: Place) -> None:
    for strategy in STRATEGIES[:2]:
        slow, plain = Training(place, strategy), Training(place, strategy)
        for stops in (0, 1, 7):
            motion = slow.slow()
            for _ in range(stops):
                next(motion)
            with pytest.raises(RuntimeError, match=r"the step is not over; call next\(\) until it is"):
                _ = motion.result
            motion.close()
            if stops:
                assert torch.equal(motion.result, plain.step()) and motion.is_over and next(motion, None) is None
                motion.close()  # once more does no harm
        assert slow.count == plain.count == 2  # one that never began was not run
        _equal(slow, plain)


def trouble_in_the_step(place: Place) -> None:
    training, plain = Training(place, Strategy()), Training(place, Strategy())

    def fail(*_: Any) -> None:
        raise ValueError("trouble")

    for closed in (False, True):
        handle = training.model.blocks[1].register_forward_hook(fail)
        motion = training.slow()
        if closed:
            next(motion)
        with pytest.raises(ValueError, match="trouble"):
            if closed:
                motion.close()
            else:
                list(motion)
        assert motion.is_over and next(motion, None) is None
        with pytest.raises(RuntimeError, match="the step is not over"):
            _ = motion.result
        handle.remove()
        assert torch.equal(training.step(), plain.step())
        _equal(training, plain)


def nothing_stays_behind(place: Place) -> None:
    """Between two stops nothing computes, and the thread count is the step's. In the end no thread is left."""
    training = Training(place, Strategy())
    threads: set[int] = set()
    handle = training.model.register_forward_hook(lambda *_: threads.add(torch.get_num_threads()))
    for _ in training.slow():
        before = [shard.local.clone() for shard in shards_of(training.model)]
        torch.mm(torch.ones(20, 20), torch.ones(20, 20))
        assert all(torch.equal(s.local, b) for s, b in zip(shards_of(training.model), before, strict=True))
    handle.remove()
    assert threads == {torch.get_num_threads()}
    motion = training.slow()
    next(motion)
    assert any(t.name == "phase stepper" for t in threading.enumerate())
    motion.close()
    assert not any(t.name == "phase stepper" for t in threading.enumerate())
    assert runtime_of(training.model).watch is None


@everywhere(globals())
def test_in_ranks(pool: Pool, scenario: Scenario, ranks: int) -> None:
    pool.run(scenario, ranks)


# -- a profiler's trace: one span for each phase, with its unit ---------------------------------------------------------
PHASES = {p.value for p in Phase}
Span = tuple[str, float, float]  # its name, and when it began and ended, in microseconds


def spans(of: Any) -> list[Span]:
    """In the order of their beginnings."""
    found = [(e.name, e.time_range.start, e.time_range.end) for e in of.events() if e.name.split(" ")[0] in PHASES]
    return sorted(found, key=lambda span: span[1])


def traced(place: Place, strategy: Strategy) -> list[Span]:
    model = by_block(make(depth=4), strategy=strategy)
    optimizer = torch.optim.SGD(sharded_parameters(model), lr=0.1)
    for _ in range(2):
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            mean_square(model, batch(0, place.rank)).backward()
        update(optimizer)
    return spans(seen)


def test_a_trace_holds_the_phases_of_every_unit(pool: Pool) -> None:
    """A computation has one span, though inner ones lie in it."""
    for strategy in (Strategy(forward_prefetch=1, backward_prefetch=2), Strategy(sharding="shard_grad_op")):
        wanted = Counter(f"{phase.value} {unit or 'root'}" for phase, unit, _ in scheduled(strategy))
        for found in pool.run(traced, 2, strategy):
            assert Counter(name for name, _, _ in found) == wanted
            _lies_in_its_root(found)


def _lies_in_its_root(found: list[Span]) -> None:
    """Computations of blocks lie inside the root's, forward and backward, one after the other."""
    roots = [s for s in found if s[0] == "compute root"]
    assert len(roots) == 2 and roots[0][2] <= roots[1][1]
    for root, units in zip(roots, (NAMES[1:], NAMES[:0:-1]), strict=True):
        inner = [s for s in found if s[0].startswith("compute ") and s != root and root[1] <= s[1] <= root[2]]
        assert [name for name, _, _ in inner] == [f"compute {unit}" for unit in units]
        assert all(a[2] <= b[1] for a, b in itertools.pairwise(inner)) and inner[-1][2] <= root[2]
