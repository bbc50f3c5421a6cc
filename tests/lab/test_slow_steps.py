"""Slow motion on real engines whose ranks need no torch: begun, gone through, dropped, closed, replaced, failed."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from fsdp_lab.base.errors import SpecError
from fsdp_lab.cluster import RankError, RankLost
from fsdp_lab.lab import Lab
from fsdp_lab.runs import RunState, StepMoment
from tests.frames import Step
from tests.lab.test_lab import going
from tests.waiting import until


def under_way(lab: Lab) -> list[bool]:
    """Whether each rank is in the middle of a step."""
    return [s["slow"] for s in lab.cluster.call("status")]


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
    run = lab.run(lab.spec, steps=2, fresh=False).wait(20)
    assert run.step == 6, "a run goes on where slow motion ended"


def test_another_spec_is_applied_and_takes_the_parameters_along(lab: Lab):
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


def test_ended_early_it_lets_the_step_run_to_its_end(lab: Lab):
    lab.run(steps=3).wait(20)
    with lab.slow_motion() as slow:
        next(slow)
        assert under_way(lab) == [True, True]
    slow.close()
    assert next(slow, None) is None and under_way(lab) == [False, False]
    assert slow.closed and slow.reason == "closed" and slow.event is not None and slow.event.step == 3


def test_a_new_slow_motion_and_a_new_run_end_the_one_before(lab: Lab):
    """When their first moment is asked for: nothing is sent before."""
    run = going(lab)
    lab.slow_motion().close()
    first, second = lab.slow_motion(), lab.slow_motion()
    assert not run.done and "not begun" in repr(first)
    assert next(first).step == run.step
    assert run.state is RunState.STOPPED and run.reason == "slow motion was started"
    step = next(second).step
    assert step == run.step + 1 and lab.slow is second and first.closed and first.reason == "slow motion was started"
    run = lab.run(lab.spec, steps=2, fresh=False).wait(20)
    assert second.closed and second.reason == "another run was started" and second.event is not None
    assert run.step == step + 3 and next(second, None) is None


@pytest.mark.slow
def test_a_phase_that_lasts_is_interrupted_by_ctrl_c_and_with_the_ranks(lab: Lab):
    for ctrl_c in (False, True):
        slow = lab.slow_motion(data="slow-phase")
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
    assert "root, transformer.h.1" in moment._repr_html_()
