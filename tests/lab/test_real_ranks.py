"""The whole path on real ranks: a small GPT-2 on two Gloo ranks in ipyparallel engines, driven by a Lab."""

from __future__ import annotations

import asyncio
import json
import math
import re
import time

import pytest

from course.pains import little_memory
from fsdp_lab.cluster import ClusterError, RankError
from fsdp_lab.lab import Lab
from fsdp_lab.runs import Run, RunState
from tests.lab.test_lab import until

SMALL = {"model": "gpt2-1m", "micro_batch": 1, "seq_len": 64}


@pytest.fixture
def lab(real_lab: Lab) -> Lab:
    return real_lab


def going(lab: Lab, **changes) -> Run:
    run = lab.run(**{**SMALL, **changes})
    until(lambda: run.step > 1 or run.done, 60)
    assert not run.done, run
    return run


def losses(run: Run) -> dict[int, float]:
    return {e.step: e.mean_loss for e in run.events.since()[0] if e.rank == 0}


def test_a_run_trains_and_tells_all(lab: Lab):
    run = lab.run(**SMALL, steps=12).wait(90)
    entry = json.loads(json.dumps(run.summary()))
    assert len(entry["losses"]) == 12 and entry["losses"][-1] < entry["losses"][0]
    assert entry["step_time_s"]["median"] > 0 and len(entry["tflops_per_rank"]) == 2 and entry["tokens_per_s"] > 0
    assert entry["comm_bytes_per_step"]["all_gather"] > 0 and all(p > 0 for p in entry["peak_memory_bytes"])
    assert all("CPU" in note for e in run.events.latest().values() for note in e.notes)
    until(lambda: [s.step for s in lab.rank_status()] == [12, 12], 10)  # heartbeats come on their own


@pytest.mark.slow
def test_ledger_steps_every_n_steps_and_on_demand(lab: Lab):
    run = lab.run(**SMALL, steps=12, ledger_every=5).wait(90)
    told = run.events.since()[0]
    assert sorted({e.step for e in told if e.ledger}) == [2, 4, 9]  # the third after a switch is one anyway
    assert all(bool(e.memory_curve) == e.ledger for e in told)
    assert sum(run.summary()["memory_at_peak_bytes"]["activations"]) > 0
    with pytest.raises(ClusterError, match="finished"):
        run.ledger()
    run = going(lab)
    until(lambda: any(e.ledger for e in run.events.since()[0]), 60)
    asked_at = run.step
    run.ledger()
    until(lambda: any(e.ledger and e.step >= asked_at for e in run.events.since()[0]), 60)
    run.stop(10)
    late = {e.step for e in run.events.since()[0] if e.ledger and e.step > 2}
    assert len(late) == 1  # once, on all ranks alike


@pytest.mark.slow
def test_a_run_that_is_out_of_memory_is_a_row_with_its_reason_and_the_others_go_on(lab: Lab):
    lab.run(**SMALL, steps=1).wait(60)
    with little_memory(lab, 256 << 20):
        sweep = lab.compare(**{**SMALL, "micro_batch": [1, 1024, 1 << 16, 2]}, steps=4, rounds=2).wait(180)
    [refusal] = sweep.refused
    assert "micro_batch" in refusal.reason and "memory" in refusal.reason, "by the plan: it does not begin"
    assert [run.state for run in sweep.runs] == [RunState.FINISHED, RunState.FAILED, RunState.FINISHED]
    assert re.search(
        r"OutOfMemory: [\d,.]+ MiB more could not be allocated; give a smaller micro_batch", sweep.runs[1].reason
    )
    assert lab.run(**SMALL, steps=2).wait(60).state is RunState.FINISHED


def test_strategies_change_under_way_and_the_losses_are_those_of_a_run_that_never_changed(lab: Lab):
    plain = lab.run(**SMALL, optimizer="sgd", lr=0.05, steps=16).wait(90)

    async def cell() -> Run:
        run = lab.run(**SMALL, optimizer="sgd", lr=0.05, steps=16)
        for changes in (
            {"sharding": "shard_grad_op"},
            {"backend": "ddp", "sharding": "no_shard"},
            {"backend": "fsdp1"},
        ):
            switch = await run.apply(**changes)
            assert switch.carried
        return await run

    run = asyncio.run(cell())
    assert run.state is RunState.FINISHED and len(run.switches) == 4
    assert losses(run) == losses(plain), "bit for bit: the wire sums in rank order"


def test_stop_frees_ranks_in_any_collective_and_they_go_on(lab: Lab):
    run = going(lab)
    for wait_s in (0.05, 0.21):
        time.sleep(wait_s)
        began = time.monotonic()
        assert run.stop() and time.monotonic() - began < 2
        step = run.step
        run = lab.run(run.spec, fresh=False)
        until(lambda run=run, step=step: run.step > step + 2 or run.done, 30)
        assert run.state is RunState.RUNNING and all(math.isfinite(x) for x in losses(run).values())


def test_cells_on_the_ranks_see_the_sharded_model(lab: Lab):
    run = lab.run(**SMALL, steps=2).wait(60)
    view = lab.client[lab.cluster.engine_ids]
    code = "seen = (rank, type(mesh).__name__, sum(p.numel() for p in model.parameters()), len(optimizer.state))"
    view.execute(code).get(20)
    (r0, mesh, n, states), (r1, *_) = view.pull("seen", block=True)
    assert (r0, r1, mesh) == (0, 1, "DeviceMesh") and n > 500_000 and states > 0 and run.done


def test_an_error_in_a_step_on_one_rank_is_said_and_the_next_run_works(lab: Lab):
    run = going(lab)
    lab.client[[lab.cluster.engine_ids[1]]].execute(
        "def broken(*a, **k): raise ValueError('broken by a cell')\noptimizer.step = broken"
    ).get(20)
    with pytest.raises(RankError, match="rank 1 failed in train .*broken by a cell"):
        run.wait(30)
    assert lab.run(**SMALL, steps=2).wait(60).step == 2


def test_a_step_in_slow_motion_that_is_left_after_some_phases_trains_as_any_other(lab: Lab):
    """Bit for bit the losses of a run that was never halted."""
    plain = losses(lab.run(**SMALL, steps=6).wait(90))
    lab.run(**SMALL, steps=3).wait(90)
    with lab.slow_motion() as slow:
        for moment in slow:
            if moment.index == 9:
                break
    assert slow.event is not None and slow.event.mean_loss == plain[3]
    after = lab.run(lab.spec, steps=2, fresh=False).wait(60)
    assert losses(after) == {step: plain[step] for step in (4, 5)}
