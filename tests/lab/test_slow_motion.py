"""Slow motion on real ranks: a small GPT-2 on two Gloo ranks, its own engine halted at every phase."""

from __future__ import annotations

import pytest

from fsdp_lab.lab import Lab
from fsdp_lab.runs import Run, StepMoment
from tests.lab.test_real_ranks import losses

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


def test_a_step_that_is_left_after_some_phases_trains_as_any_other(lab: Lab):
    """Bit for bit the losses of a run that was never halted."""
    plain = losses(trained(lab, 6))
    trained(lab, 3)
    with lab.slow_motion() as slow:
        for moment in slow:
            if moment.index == 9:
                break
    assert slow.event is not None and slow.event.mean_loss == plain[3]
    after = lab.run(lab.spec, steps=2, fresh=False).wait(60)
    assert losses(after) == {step: plain[step] for step in (4, 5)}
