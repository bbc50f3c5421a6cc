"""Injected faults on real engines: what the kernel sees of each, how soon, and that the lab goes on."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from fsdp_lab import RankHung, RankLost
from fsdp_lab.base.errors import ArgumentError
from fsdp_lab.cluster import RankError
from fsdp_lab.lab import Lab
from fsdp_lab.runs import Run
from tests.lab.conftest import HANG_S
from tests.lab.test_lab import until

pytestmark = pytest.mark.slow
SMALL = {"model": "gpt2-1m", "micro_batch": 1, "seq_len": 64}


@pytest.fixture
def run(impatient_lab: Lab) -> Iterator[Run]:
    """One that goes on, on two healthy ranks."""
    run = impatient_lab.run(**SMALL)
    until(lambda: run.step > 1 or run.done, 90)
    assert not run.done, run
    yield run
    run.stop(10)


def arm(lab: Lab, **fault: Any) -> None:
    """On rank 1, while the run goes on."""
    told = lab.cluster.call("arm", fault={"ranks": [1], **fault})
    assert told == [{"armed": False}, {"armed": True}]


def goes_on(lab: Lab, pids: list[int]) -> None:
    """From the last good step, in the same processes."""
    assert lab.current is not None
    before = lab.current
    after = lab.run(before.spec, fresh=False, steps=3).wait(60)
    first = after.switches[0]
    assert first.carried and first.step == before.step and lab.cluster.pids == pids


def begins_anew(lab: Lab, culprit: int) -> None:
    assert lab.run(**SMALL, steps=2).wait(120).step == 2 and lab.lost == {}
    assert culprit not in lab.cluster.pids and not psutil.pid_exists(culprit)


@pytest.mark.parametrize(
    ("fault", "kind", "reason"),
    [
        ({"kind": "raise", "phase": "backward"}, "InjectedFault", "injected in the backward of step …"),
        ({"kind": "nan"}, "NotFinite", "its loss in step "),
        ({"kind": "nan", "phase": "backward"}, "NotFinite", "its gradient of transformer."),
        ({"kind": "oom"}, "OutOfMemory", "MiB more could not be allocated; give a smaller micro_batch"),
    ],
    ids=["raise", "nan loss", "nan gradient", "oom"],
)
def test_what_fails_in_a_step_is_said_and_the_run_can_go_on(
    impatient_lab: Lab, run: Run, fault: dict[str, Any], kind: str, reason: str
):
    pids = impatient_lab.cluster.pids
    arm(impatient_lab, **fault)
    with pytest.raises(RankError) as caught:
        run.wait(30)
    assert (caught.value.rank, caught.value.kind) == (1, kind) and reason in caught.value.reason
    assert "RankAborted" in caught.value.others[0]
    goes_on(impatient_lab, pids)


def test_a_rank_is_killed_at_the_moment_that_was_asked_for(impatient_lab: Lab, run: Run):
    culprit, at_step = impatient_lab.cluster.pids[1], run.step + 100
    arm(impatient_lab, kind="kill", phase="update", at_step=at_step)
    with pytest.raises(RankLost, match="rank 1 is gone: .* SIGKILL .* while doing train"):
        run.wait(60)
    assert run.step <= at_step + 1, "the others may have applied it"
    begins_anew(impatient_lab, culprit)


@pytest.mark.parametrize("kind", ["stop", "stall"])
def test_a_rank_that_stands_still_is_named_and_replaced(impatient_lab: Lab, run: Run, kind: str):
    culprit = impatient_lab.cluster.pids[1]
    arm(impatient_lab, kind=kind, phase="backward")
    with pytest.raises(RankHung) as caught:
        run.wait(30)
    e = caught.value
    assert e.rank == 1 and e.waiting == (0,) and e.collective and HANG_S < e.after_s < HANG_S + 2
    assert ", in _stall\n" in e.stack if kind == "stall" else "its process is stopped" in e.sentence
    begins_anew(impatient_lab, culprit)


def test_a_stopped_rank_that_nobody_waits_for_is_found_too(impatient_lab: Lab, run: Run):
    run.stop(10)
    culprit = impatient_lab.cluster.pids[1]
    before_s = time.monotonic()
    os.kill(culprit, signal.SIGSTOP)
    until(lambda: 1 in impatient_lab.lost, 20)
    assert "was stopped (SIGSTOP), did not continue, and was ended" in str(impatient_lab.lost[1])
    assert HANG_S < time.monotonic() - before_s < HANG_S + 6, "its heart would have told after 10 s"
    begins_anew(impatient_lab, culprit)


def test_a_cut_link_is_found_and_no_rank_is_ended(impatient_lab: Lab, run: Run):
    pids, begun_s = impatient_lab.cluster.pids, time.monotonic()
    arm(impatient_lab, kind="cut", phase="backward")
    with pytest.raises(RankHung) as caught:
        run.wait(30)
    e = caught.value
    assert e.rank is None and set(e.waiting) == {0, 1} and HANG_S < e.after_s < HANG_S + 2
    assert f"all ranks joined {e.collective} (group " in e.sentence and "stalled" in e.sentence
    assert time.monotonic() - begun_s < HANG_S + 6
    goes_on(impatient_lab, pids)


def test_a_slow_link_fails_nothing(impatient_lab: Lab, run: Run):
    arm(impatient_lab, kind="slow", link="50 MB/s")
    step = run.step
    until(lambda: run.step > step + 2 or run.done, 30)
    assert not run.done
    assert impatient_lab.cluster.call("disarm") == [{"disarmed": 0}] * 2


def test_what_cannot_be_is_refused_and_the_run_goes_on(impatient_lab: Lab, run: Run):
    with pytest.raises(ArgumentError, match=r"fault\.ranks: there is no rank 7"):
        impatient_lab.cluster.call("arm", fault={"kind": "kill", "ranks": [7]})
    step = run.step
    until(lambda: run.step > step or run.done, 30)
    assert not run.done
    until(
        lambda: [s.state for s in impatient_lab.rank_status()] == ["train"] * 2, 30
    )  # idle between two chunks of steps
    assert all(os.path.exists(f"/proc/{pid}") for pid in impatient_lab.cluster.pids)
