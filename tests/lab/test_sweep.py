"""Comparisons and slow motion on ranks without torch: turns, refusals, failures, stops; what goes on when a rank is lost."""

import asyncio
import functools
import os
import signal
import threading
import time
from typing import Any

import pytest

from fsdp_lab.base.errors import FieldError, SpecError
from fsdp_lab.cluster import RankError, RankLost
from fsdp_lab.lab import Lab
from fsdp_lab.runs import RunState, StepMoment, Sweep
from fsdp_lab.spec.spec import Spec
from tests.frames import Step
from tests.lab.test_lab import going
from tests.waiting import until

SHARDINGS = ["full_shard", "shard_grad_op", "zero1"]


def test_runs_take_turns_of_equal_steps(lab: Lab):
    async def cell() -> Sweep:
        return await lab.compare(sharding=SHARDINGS, steps=10, rounds=3)

    sweep = asyncio.run(cell())
    assert [run.state for run in sweep.runs] == [RunState.FINISHED] * 3
    assert [run.spec.strategy.sharding for run in sweep.runs] == SHARDINGS
    turns = [range(0, 4), range(4, 8), range(8, 10)]
    told = [(e.end_unix_s, i, e.step) for i, run in enumerate(sweep.runs) for e in run.events.since()[0] if e.rank == 0]
    assert [where for _, *where in sorted(told)] == [[i, step] for turn in turns for i in range(3) for step in turn]
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
    ends = {"stdlib": (RunState.FINISHED, 4, ""), "refuse": (RunState.FAILED, 0, "it is refused here"),
            "raise:1": (RunState.FAILED, 2, "was told to fail")}  # fmt: skip
    assert len({run.spec.id for run in sweep.runs}) == 9
    for run in sweep.runs:
        state, step, reason = ends[run.spec.workload.data]
        assert (run.state, run.step) == (state, step) and reason in run.reason


@pytest.mark.parametrize("by", ["stop", "interrupt", "another run"])
def test_what_ends_it_keeps_what_is_done(lab: Lab, by: str):
    run = going(lab)
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
    run = going(lab)
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
    run = going(lab)
    sweep = lab.compare(world_size=[1, 2], steps=3, rounds=1).wait(60)
    assert sweep.suspended is None and run.state is RunState.STOPPED and run.reason == "a comparison was started"


@pytest.mark.slow
def test_a_lost_rank_costs_the_run_whose_turn_it_was_and_the_others_begin_again(lab: Lab):
    sweep = lab.compare(sharding=SHARDINGS, steps=60, rounds=3)
    until(lambda: len(sweep.runs) == 2 and sweep.runs[1].step > 1)
    os.kill(next(s.pid for s in lab.rank_status() if s.rank == 1), signal.SIGKILL)
    sweep.wait(90)
    assert [run.state for run in sweep.runs] == [RunState.FINISHED, RunState.FAILED, RunState.FINISHED]
    assert "rank 1" in sweep.runs[1].reason and all(run.step == 60 for run in (sweep.runs[0], sweep.runs[2]))


def test_bad_lists_are_refused_before_anything_starts(lab: Lab):
    before = lab.sweep
    bad: list[tuple[dict[str, Any], str]] = [
        ({"shardings": ["full_shard"]}, "shardings"), ({"sharding": []}, "sharding"),
        ({"sharding": ["full"]}, "compare"), ({"steps": 0}, "steps"), ({"rounds": 1.5}, "rounds"),
        ({"backend": "ddp", "sharding": "full_shard"}, "compare"),
    ]  # fmt: skip
    for lists, field in bad:
        with pytest.raises(FieldError) as e:
            lab.compare(**lists)
        assert e.value.field == field and lab.sweep is before


# -- slow motion: begun, gone through, dropped, closed, replaced, failed --------------------------------------------------
def test_every_phase_of_a_step_with_what_all_ranks_hold(lab: Lab):
    lab.run(steps=3).wait(20)
    slow = lab.slow_motion()
    moments = list(slow)
    expected = [StepMoment(tuple(f), lab.spec) for f in Step(lab.spec, 3).frames()]
    assert moments == expected and slow.moment == moments[-1]
    assert [m.index for m in moments] == list(range(len(moments)))
    assert slow.closed and slow.reason == "the step is over" and next(slow, None) is None
    assert slow.event is not None and slow.event.step == 3 and [e.rank for e in slow.events] == [0, 1]
    first = moments[0]
    assert (first.phase, first.unit, first.direction, first.step) == ("unshard", "root", "forward", 3)
    assert lab.run(lab.spec, steps=2, fresh=False).wait(20).step == 6, "a run goes on where slow motion ended"


def test_another_spec_takes_the_parameters_along_and_a_step_that_is_left_runs_to_its_end(lab: Lab):
    """Backends that have no slow motion are refused, with a way out."""
    lab.run(backend="fsdp2", steps=2).wait(20)
    refusal = r"strategy.backend: slow motion .* this Spec is for fsdp2; use backend lab"
    with pytest.raises(SpecError, match=refusal) as told:
        lab.slow_motion()
    assert told.value.fix == {"backend": "lab"}
    with lab.slow_motion(**told.value.fix) as slow:
        assert next(slow).step == 2
    with lab.slow_motion() as slow:
        assert next(slow).step == 3, "now the ranks hold what slow motion gave them"
        assert [s["slow"] for s in lab.cluster.call("status")] == [True, True]
    slow.close()
    assert next(slow, None) is None and [s["slow"] for s in lab.cluster.call("status")] == [False, False]
    assert slow.closed and slow.reason == "closed" and slow.event is not None and slow.event.step == 3


def test_a_new_slow_motion_and_a_new_run_end_the_one_before(lab: Lab):
    """When their first moment is asked for: nothing is sent before."""
    run = going(lab)
    lab.slow_motion().close()
    first, second = lab.slow_motion(), lab.slow_motion()
    assert not run.done and "not begun" in repr(first) and next(first).step == run.step
    assert run.state is RunState.STOPPED and run.reason == "slow motion was started"
    step = next(second).step
    assert step == run.step + 1 and lab.slow is second and first.closed and first.reason == "slow motion was started"
    run = lab.run(lab.spec, steps=2, fresh=False).wait(20)
    assert second.closed and second.reason == "another run was started" and second.event is not None
    assert run.step == step + 3 and next(second, None) is None


@pytest.mark.slow
def test_a_phase_that_lasts_is_interrupted_by_ctrl_c_and_with_the_ranks(lab: Lab, monkeypatch: pytest.MonkeyPatch):
    for ctrl_c in (False, True):
        slow = lab.slow_motion(data="slow-phase")
        if ctrl_c:  # it has 15 s to end by itself
            monkeypatch.setattr(slow, "end", functools.partial(slow.end, limit_s=0.5))
        for _ in range(3):
            next(slow)

        def interrupt(ctrl_c: bool = ctrl_c) -> None:
            until(lambda: all(s.state == "slow_next" and time.time() - s.since_unix_s > 0.5 for s in lab.rank_status()))
            os.kill(os.getpid(), signal.SIGINT) if ctrl_c else lab.interrupt()

        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt if ctrl_c else StopIteration):
            next(slow)
        thread.join(30)  # else it might end the next one
        assert slow.closed and slow.reason == "interrupted" and slow.event is None
    assert lab.run(steps=2).wait(20).step == 2


def test_an_error_of_a_rank_and_a_lost_one_are_said_and_the_lab_goes_on(lab: Lab):
    slow = lab.slow_motion(data="raise:1")
    with pytest.raises(RankError, match=r"rank 1 failed in slow_next .*told to fail"):
        list(slow)
    assert slow.closed and "told to fail" in slow.reason
    slow.close()
    slow = lab.slow_motion(data="stdlib")
    next(slow)
    os.kill(lab.cluster.pids[1], signal.SIGKILL)
    until(lambda: bool(lab.lost))
    with pytest.raises(RankLost, match="rank 1 is gone"):
        next(slow)
    with lab.slow_motion() as again:
        assert next(again).step == 0 and lab.lost == {}


def test_a_moment_in_words(lab: Lab):
    with lab.slow_motion(precision="bf16") as slow:
        moment = next(m for m in slow if m.unit == "transformer.h.1" and m.phase == "compute")
    own = sum(p.stop - p.start for p in moment.frames[1].parameters)
    gathered = sum(p.numel for p in moment.frames[1].parameters if p.state == "unsharded")
    assert moment.held_bytes(1) == 4 * own + 2 * gathered
    assert moment.holds(1)["transformer.h.1.mlp.c_proj.bias"] == (0, 128)
    assert moment.holds(0)["transformer.h.2.mlp.c_proj.bias"] == (0, 0)
    assert moment.held_elements(0) == sum(b - a for a, b in moment.holds(0).values())
    assert moment.caption.startswith("forward · compute transformer.h.1: ")
    assert f"Moment 6 of step {moment.step}: forward" in repr(moment)
