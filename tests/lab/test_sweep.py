"""Comparisons on ranks without torch: turns, refusals, failures, stops; what goes on when a rank is lost."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest

from fsdp_lab.base.errors import FieldError
from fsdp_lab.lab import Lab
from fsdp_lab.runs import RunState, Sweep
from fsdp_lab.spec.spec import Spec
from tests.waiting import until

SHARDINGS = ["full_shard", "shard_grad_op", "zero1"]


def order(sweep: Sweep) -> list[tuple[int, int]]:
    """(which run, its step) as rank 0 did them."""
    told = [(e.end_unix_s, i, e.step) for i, run in enumerate(sweep.runs) for e in run.events.since()[0] if e.rank == 0]
    return [(i, step) for _, i, step in sorted(told)]


def test_runs_take_turns_of_equal_steps(lab: Lab):
    async def cell() -> Sweep:
        return await lab.compare(sharding=SHARDINGS, steps=10, rounds=3)

    sweep = asyncio.run(cell())
    assert [run.state for run in sweep.runs] == [RunState.FINISHED] * 3
    assert [run.spec.strategy.sharding for run in sweep.runs] == SHARDINGS
    turns = [range(0, 4), range(4, 8), range(8, 10)]
    assert order(sweep) == [(i, step) for turn in turns for i in range(3) for step in turn]
    begins = [e.step for e in sweep.runs[1].events.since()[0] if e.rank == 1 and e.first_after_switch]
    assert begins == [0, 4, 8]  # left out of medians
    assert sweep.progress.done_steps == sweep.progress.all_steps == 30 and sweep.progress.left_s == 0
    assert "done, 30 of 30 steps" in repr(sweep) and lab.sweep is sweep
    assert lab.cluster.call("discard", runs=[run.id for run in sweep.runs]) == [{"discarded": 0}] * 2


def test_what_cannot_be_is_kept_with_its_reason_and_ends_nothing(lab: Lab):
    """Of several Specs, each changed by the lists."""
    ways = [Spec().replace(data=data) for data in ("stdlib", "refuse", "raise:1")]
    sweep = lab.compare(ways, backend=["lab", "ddp"], sharding=["full_shard", "no_shard"], steps=4, rounds=2).wait(60)
    refused = [r.spec["strategy"] for r in sweep.refused]
    assert [(s["backend"], s["sharding"]) for s in refused] == [("ddp", "full_shard")] * 3
    assert all("DDP keeps a whole replica" in r.reason for r in sweep.refused)
    ends = {
        "stdlib": (RunState.FINISHED, 4, ""),
        "refuse": (RunState.FAILED, 0, "it is refused here"),
        "raise:1": (RunState.FAILED, 2, "was told to fail"),
    }
    assert len({run.spec.id for run in sweep.runs}) == 9
    for run in sweep.runs:
        state, step, reason = ends[run.spec.workload.data]
        assert (run.state, run.step) == (state, step) and reason in run.reason


@pytest.mark.parametrize("by", ["stop", "interrupt", "another run"])
def test_what_ends_it_keeps_what_is_done(lab: Lab, by: str):
    run = lab.run()
    until(lambda: run.step > 1)
    sweep = lab.compare(sharding=SHARDINGS, steps=2000, rounds=100)
    until(lambda: len(sweep.runs) == 3 and sweep.runs[2].step > 0)
    left_s = sweep.progress.left_s
    if by == "stop":
        assert sweep.stop(10) and sweep.wait() is sweep and "stopped" in repr(sweep)
    elif by == "interrupt":
        lab.interrupt()
    else:
        assert lab.run(steps=3).wait(30).state is RunState.FINISHED
        assert {sweep.reason, run.reason} == {"another run was started"} and run.state is RunState.STOPPED
    until(lambda: sweep.done)
    assert {run.state for run in sweep.runs} == {RunState.STOPPED} and all(len(run.events) for run in sweep.runs)
    assert left_s and sweep.progress.left_s == 0 and (by != "interrupt" or sweep.reason == "interrupted")


def test_a_run_in_progress_waits_for_it_and_goes_on(lab: Lab):
    """Also while it is paused, and where one comparison replaces another."""
    run = lab.run()
    until(lambda: run.step > 1)
    run.pause()
    until(lambda: run.state is RunState.PAUSED)
    step = run.step
    first = lab.compare(sharding=SHARDINGS, steps=2000)
    until(lambda: bool(first.runs))
    assert first.suspended is run and run.reason == "waits for its turn"
    second = lab.compare(sharding=SHARDINGS[:2], steps=6)
    second.wait(30)
    assert first.done and first.reason == "a comparison was started" and len(first.runs) <= 3
    assert {one.state for one in second.runs} == {RunState.FINISHED} and lab.current is run
    until(lambda: run.state is RunState.PAUSED and not run.reason)
    assert run.step == step
    run.resume()
    until(lambda: run.step > step + 1)
    assert lab.cluster.call("status")[0]["step"] > step and run.stop(10) and run.state is RunState.STOPPED


def test_it_stops_a_run_that_needs_the_ranks_as_they_are(lab: Lab):
    run = lab.run()
    until(lambda: run.step > 1)
    sweep = lab.compare(world_size=[1, 2], steps=3, rounds=1).wait(60)
    assert sweep.suspended is None and run.state is RunState.STOPPED and run.reason == "a comparison was started"


@pytest.mark.slow
def test_a_lost_rank_costs_the_run_whose_turn_it_was_and_the_others_begin_again(lab: Lab):
    sweep = lab.compare(sharding=SHARDINGS, steps=60, rounds=3)
    until(lambda: len(sweep.runs) == 2 and sweep.runs[1].step > 1)
    os.kill(next(s.pid for s in lab.rank_status() if s.rank == 1), signal.SIGKILL)
    sweep.wait(90)
    assert [run.state for run in sweep.runs] == [RunState.FINISHED, RunState.FAILED, RunState.FINISHED]
    assert "rank 1" in sweep.runs[1].reason
    assert all(run.step == 60 for run in (sweep.runs[0], sweep.runs[2]))


def test_bad_lists_are_refused_before_anything_starts(lab: Lab):
    before = lab.sweep
    bad: list[tuple[dict[str, Any], str]] = [
        ({"shardings": ["full_shard"]}, "shardings"),
        ({"sharding": []}, "sharding"),
        ({"sharding": ["full"]}, "compare"),
        ({"steps": 0}, "steps"),
        ({"rounds": 1.5}, "rounds"),
        ({"backend": "ddp", "sharding": "full_shard"}, "compare"),
    ]
    for lists, field in bad:
        with pytest.raises(FieldError) as e:
            lab.compare(**lists)
        assert e.value.field == field and lab.sweep is before
