"""A calibration on real ranks: what only a machine can tell."""

from __future__ import annotations

import statistics

import pytest

from fsdp_lab.base.errors import ArgumentError, SpecError
from fsdp_lab.cluster import ClusterError
from fsdp_lab.lab import Lab
from fsdp_lab.planner.plan import plan
from fsdp_lab.planner.shapes import shape_for
from fsdp_lab.spec.spec import Spec
from tests.lab.test_lab import until

SMALL = {"model": "gpt2-1m", "micro_batch": 2, "seq_len": 64}


@pytest.mark.nightly
@pytest.mark.timeout(600)  # it measures for a minute where nothing runs beside it
def test_ranks_measure_their_machine_and_keep_what_they_hold(real_lab: Lab) -> None:
    run = real_lab.run(**SMALL, steps=2)
    run.wait(120)
    with pytest.raises(ArgumentError, match="this machine is not calibrated; call lab.calibrate"):
        real_lab.plan()
    beside = [Spec(world_size=2).replace(**SMALL), Spec(world_size=2).replace(**SMALL, backend="fsdp2")]
    here = real_lab.calibrate(beside, passes=1)
    assert (here.ranks, here.machine.device.generation) == (2, "cpu")
    for spec, taken in zip(beside, here.beside_s, strict=True):
        found = real_lab.plan(spec)
        assert found.step_time_s == plan(spec, shape_for("gpt2-1m"), here.machine, rates=here.rates).step_time_s
        assert 0.1 < found.step_time_s / statistics.median(taken) < 10, spec  # noise; the bench of plans asks for more
    (first, *_), peak = run.events.since()[0], here.machine.device.flops_per_s("fp32")
    assert first.peak_flops_per_s == pytest.approx(peak), "one peak for the MFU of a run and of its plan"
    with pytest.raises(SpecError, match="2 ranks were calibrated, and the Spec has 4"):
        real_lab.plan(Spec(world_size=4))
    there = real_lab.plan(Spec(world_size=16).replace(model="llama-7b", precision="bf16"), "h100", hosts=2)
    assert there.machine.hosts == 2 and there.fits and "16 x h100 in 2 hosts" in repr(there)
    on = real_lab.run(run.spec, fresh=False, steps=1)
    on.wait(120)
    assert on.step == 3


@pytest.mark.slow
def test_a_run_that_goes_on_would_be_measured_too(real_lab: Lab) -> None:
    run = real_lab.run(**SMALL)
    until(lambda: run.step > 1 or run.done, 60)
    with pytest.raises(ClusterError, match="in progress"):
        real_lab.calibrate()
    run.stop(30)
    with pytest.raises(ArgumentError, match="passes"):
        real_lab.calibrate(passes=0)


@pytest.mark.nightly
@pytest.mark.timeout(600)  # so does this
def test_one_rank_is_planned_as_one_of_two() -> None:
    spec = Spec(world_size=2).replace(**SMALL)
    with Lab(1, history=False, progress=False) as lab:
        with pytest.raises(ArgumentError, match="anchors: they are timed in a crowd of ranks; give ranks as well"):
            lab.calibrate(anchors=[spec])
        with pytest.raises(ArgumentError, match="ranks: 1 is refused"):
            lab.calibrate(ranks=(1,))
        here = lab.calibrate(passes=1, ranks=(2,), anchors=[spec, spec.replace(accumulate=2)])
        assert (here.ranks, here.crowds[2].ranks, len(here.crowds[2].anchors)) == (1, 2, 1)
        one, two = lab.plan(spec.replace(world_size=1)), lab.plan(spec)
        assert two.machine.ranks == 2 and sum(two.comm_s.values()) > 0 == sum(one.comm_s.values())
        assert lab.plan(spec.replace(link="1 MB/s")).step_time_s > 2 * two.step_time_s
        lab.resize(2)
        run = lab.run(spec, steps=8)
        run.wait(120)
        with pytest.raises(ArgumentError, match="ranks: this lab has 2 itself"):
            lab.calibrate(ranks=(2,))
    measured_s = statistics.median(e.step_time_s for e in run.events.since()[0] if e.counts)
    assert 0.2 < two.step_time_s / measured_s < 5  # noise; `python -m tests.bench many` says how exact it is
