"""Slow motion on real ranks: a small GPT-2 on two Gloo ranks, its own engine halted at every phase."""

from __future__ import annotations

import itertools
import os
import signal

import pytest

from fsdp_lab.cluster import RankError, RankLost
from fsdp_lab.lab import Lab
from fsdp_lab.runs import Run, StepMoment
from tests.covering import tiered
from tests.lab.test_lab import until
from tests.lab.test_real_ranks import going, losses

SMALL = {"backend": "lab", "model": "gpt2-1m", "micro_batch": 1, "seq_len": 64}


@pytest.fixture
def lab(real_lab: Lab) -> Lab:
    return real_lab


def trained(lab: Lab, steps: int, **changes) -> Run:
    return lab.run(**{**SMALL, **changes}, steps=steps).wait(90)


def on_ranks(lab: Lab, code: str, name: str) -> list:
    """The value that `name` has on each rank after `code`."""
    view = lab.client[lab.cluster.engine_ids]
    view.execute(code).get(30)
    return list(view.pull(name, block=True))


def holdings(moment: StepMoment, unit: str) -> list:
    return [p for frame in moment.frames for p in frame.parameters if p.unit == unit]


# -- what is seen ----------------------------------------------------------------------------------------------------


def test_a_step_is_gone_through_and_each_phase_shows_what_every_rank_holds(lab: Lab):
    trained(lab, 3)
    slow = lab.slow_motion()
    moments = list(slow)
    assert [m.index for m in moments] == list(range(len(moments))) and {m.step for m in moments} == {3}
    for m in moments:
        assert len({(f.phase, f.unit, f.direction, f.index) for f in m.frames}) == 1, "all ranks are at one phase"
        assert [f.rank for f in m.frames] == [0, 1]
    units = list(dict.fromkeys(p.unit for p in moments[0].frames[0].parameters))
    assert "root" in units and any(u.startswith("transformer.h.") for u in units)

    assert all(p.state == "sharded" and p.gradient == "none" for u in units for p in holdings(moments[0], u))
    for unit in units:
        for direction in ("forward", "backward"):
            (compute, *_) = [m for m in moments if (m.phase, m.unit, m.direction) == ("compute", unit, direction)]
            assert all(p.state == "unsharded" for p in holdings(compute, unit)), (unit, direction)
        assert [m.direction for m in moments if m.phase == "reduce" and m.unit == unit] == ["backward"]
    last = moments[-1]
    assert (last.phase, last.direction) == ("optim", "update")
    assert all(p.state == "sharded" and p.gradient == "sharded" for u in units for p in holdings(last, u))
    assert slow.event is not None and slow.event.step == 3 and [e.rank for e in slow.events] == [0, 1]


def test_shards_tile_every_parameter(lab: Lab):
    with lab.slow_motion(**SMALL) as slow:
        moment = next(slow)
    for parts in zip(*(f.parameters for f in moment.frames), strict=True):
        assert len({(p.name, p.unit, p.numel) for p in parts}) == 1
        ranges = sorted((p.start, p.stop) for p in parts if p.start < p.stop)
        assert ranges[0][0] == 0 and ranges[-1][1] == parts[0].numel
        assert all(a[1] == b[0] for a, b in itertools.pairwise(ranges))


def test_what_is_kept_is_kept_under_shard_grad_op(lab: Lab):
    with lab.slow_motion(**SMALL, sharding="shard_grad_op") as slow:
        moments = list(slow)
    assert not [m for m in moments if m.phase == "reshard" and m.direction == "forward"]
    assert not [m for m in moments if m.phase == "unshard" and m.direction == "backward"]
    backward = next(m for m in moments if m.direction == "backward")
    assert {p.state for f in backward.frames for p in f.parameters} == {"unsharded"}
    assert backward.held_elements(1) == sum(p.numel for p in backward.frames[1].parameters)


def test_the_ranks_hold_what_the_frames_say(lab: Lab):
    """Cells on the ranks look at the real parameters while these are halted: what is not gathered yet is sharded."""
    slow = lab.slow_motion(**SMALL)
    moment = next(m for m in slow if (m.phase, m.unit) == ("compute", "transformer.h.1"))
    code = (
        "from torch.distributed.tensor import DTensor\n"
        "seen = {n: isinstance(p, DTensor) for n, p in model.named_parameters()}\n"
        "seen = {n: v for n, v in seen.items() if 'mlp.c_fc.weight' in n}"
    )
    states = {p.name: p.state for p in moment.frames[0].parameters if p.name.endswith("mlp.c_fc.weight")}
    assert set(states.values()) == {"sharded", "gathering", "unsharded"}  # the next block is gathered ahead
    for seen in on_ranks(lab, code, "seen"):
        assert seen == {name: state != "unsharded" for name, state in states.items()}
    slow.close()


# -- what is trained -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phases", tiered([None, 1, 9], lambda phases: phases == 9))
def test_a_step_in_slow_motion_trains_as_any_other(lab: Lab, phases: int | None):
    """Also one that is left after some phases: bit for bit the losses of a run that was never halted."""
    plain = losses(trained(lab, 7))
    trained(lab, 3)
    with lab.slow_motion() as slow:
        for moment in slow:
            if phases is not None and moment.index == phases:
                break
    assert slow.event is not None and slow.event.mean_loss == plain[3]
    after = lab.run(lab.spec, steps=3, fresh=False).wait(60)
    assert losses(after) == {step: plain[step] for step in (4, 5, 6)}


@pytest.mark.slow
def test_a_run_that_is_going_is_stopped_and_another_goes_on_under_another_strategy(lab: Lab):
    run = going(lab, **SMALL)
    slow = lab.slow_motion(precision="bf16")
    first = next(slow)
    assert run.done and run.reason == "slow motion was started" and first.step >= run.step - 1
    more = lab.run(**SMALL, sharding="shard_grad_op", steps=2, fresh=False).wait(60)
    assert slow.closed and slow.reason == "another run was started"
    assert slow.event is not None and more.switches[0].carried and more.step == slow.event.step + 3


def test_one_step_after_the_other(lab: Lab):
    trained(lab, 2)
    events = []
    for _ in range(3):
        slow = lab.slow_motion()
        assert sum(1 for _ in slow) > 10
        events.append(slow.event)
    assert [e.step for e in events if e is not None] == [2, 3, 4]


# -- what goes wrong -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_interrupt_in_between_ends_it_and_the_next_run_works(lab: Lab):
    slow = lab.slow_motion(**SMALL)
    for _ in range(5):
        next(slow)
    lab.interrupt()
    assert slow.closed and slow.reason == "interrupted"
    assert trained(lab, 2).step == 2


@pytest.mark.slow
def test_an_error_in_the_step_on_one_rank_is_said_and_the_next_run_works(lab: Lab):
    trained(lab, 1)
    lab.client[[lab.cluster.engine_ids[1]]].execute(
        "def broken(*a, **k): raise ValueError('broken by a cell')\noptimizer.step = broken"
    ).get(20)
    slow = lab.slow_motion()
    with pytest.raises(RankError, match="rank 1 failed in slow_next .*broken by a cell"):
        list(slow)
    assert slow.closed and trained(lab, 2).step == 2


@pytest.mark.slow
def test_a_killed_rank_is_said_and_replaced(lab: Lab):
    slow = lab.slow_motion(**SMALL)
    for _ in range(4):
        next(slow)
    os.kill(lab.cluster.pids[1], signal.SIGKILL)
    until(lambda: bool(lab.lost), 5)
    with pytest.raises(RankLost, match="rank 1 is gone"):
        next(slow)
    with lab.slow_motion() as again:
        assert next(again).step == 0 and lab.lost == {}
