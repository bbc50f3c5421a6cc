"""What befalls a rank on real engines, in a step or beside it: what the kernel says of it, and that the lab goes on."""

import os
import signal
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from fsdp_lab import RankHung, RankLost
from fsdp_lab.base.errors import ArgumentError
from fsdp_lab.base.process import marked
from fsdp_lab.cluster import RankError
from fsdp_lab.lab import Lab
from fsdp_lab.runs import Run, RunState
from tests.lab.conftest import HANG_S
from tests.waiting import until

SMALL = {"model": "gpt2-1m", "micro_batch": 1, "seq_len": 64}


@pytest.fixture
def run(impatient_lab: Lab) -> Iterator[Run]:
    """One that goes on, on two healthy ranks."""
    run = impatient_lab.run(**SMALL)
    until(lambda: run.step > 1 or run.done)
    assert not run.done, run
    yield run
    run.stop(10)


def arm(lab: Lab, **fault: Any) -> None:
    """On rank 1, while the run goes on."""
    assert lab.cluster.call("arm", fault={"ranks": [1], **fault}) == [{"armed": False}, {"armed": True}]


def on_rank(rank: int, lab: Lab, code: str) -> None:
    """A cell on a rank, between two chunks of steps."""
    lab.client[[lab.cluster.engine_ids[rank]]].execute(code).get(20)


def in_a_block(body: str) -> str:
    return f"def hung(*_):\n{body}\nhook = model.transformer.h[1].register_forward_pre_hook(hung)"


def hung(run: Run) -> RankHung:
    """What the run fails with, no sooner than it should."""
    with pytest.raises(RankHung) as caught:
        run.wait(30)
    e = caught.value
    assert e.after_s > HANG_S and run.state is RunState.FAILED
    assert run.reason == e.sentence and run.details == e.stack and "\n" not in run.reason
    return e


def goes_on(lab: Lab, pids: list[int]) -> None:
    """From the last good step, in the same processes."""
    before = lab.current
    first = lab.run(before.spec, fresh=False, steps=3).wait(60).switches[0]
    assert first.carried and first.step == before.step and lab.cluster.pids == pids


def goes_on_by_itself(run: Run) -> None:
    step = run.step
    until(lambda: run.step > step + 2 or run.done)
    assert not run.done, run


def begins_anew(lab: Lab, culprit: int) -> None:
    assert lab.run(**SMALL, steps=2).wait(120).step == 2 and lab.lost == {}
    assert culprit not in lab.cluster.pids and not psutil.pid_exists(culprit)
    assert set(lab.cluster.pids) <= {p.pid for p in marked(lab.cluster.token)}


# -- injected ----------------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_what_fails_in_a_step_is_said_and_the_run_can_go_on(impatient_lab: Lab, run: Run) -> None:
    pids = impatient_lab.cluster.pids
    arm(impatient_lab, kind="nan", phase="backward")
    with pytest.raises(RankError) as caught:
        run.wait(30)
    assert (caught.value.rank, caught.value.kind) == (1, "NotFinite")
    assert "its gradient of transformer." in caught.value.reason and "RankAborted" in caught.value.others[0]
    goes_on(impatient_lab, pids)


@pytest.mark.slow
def test_a_rank_is_killed_at_the_moment_that_was_asked_for(impatient_lab: Lab, run: Run) -> None:
    run.pause()
    until(lambda: run.state is RunState.PAUSED)
    culprit, at_step = impatient_lab.cluster.pids[1], run.step + 5
    arm(impatient_lab, kind="kill", phase="update", at_step=at_step)
    run.resume()
    with pytest.raises(RankLost, match="rank 1 is gone: .* SIGKILL .* during train"):
        run.wait(60)
    assert run.step <= at_step + 1, "the others may have applied it"
    begins_anew(impatient_lab, culprit)


@pytest.mark.slow
def test_a_cut_link_is_found_and_no_rank_is_ended(impatient_lab: Lab, run: Run) -> None:
    pids = impatient_lab.cluster.pids
    arm(impatient_lab, kind="cut", phase="backward")
    e = hung(run)
    assert e.rank is None and set(e.waiting) == {0, 1}
    assert f"all ranks joined {e.collective} (group " in e.sentence and "stalled" in e.sentence
    goes_on(impatient_lab, pids)


@pytest.mark.slow
def test_a_slow_link_and_a_rank_that_comes_before_the_limit_fail_nothing(impatient_lab: Lab, run: Run) -> None:
    """And what the others wait for is known meanwhile."""
    with pytest.raises(ArgumentError, match=r"fault\.ranks: there is no rank 7"):
        impatient_lab.cluster.call("arm", fault={"kind": "kill", "ranks": [7]})
    arm(impatient_lab, kind="slow", link="50 MB/s")
    goes_on_by_itself(run)
    assert impatient_lab.cluster.call("disarm") == [{"disarmed": 0}] * 2
    late = "import time\ndef late(*_):\n    hook.remove()\n    time.sleep(1.2)\n"
    on_rank(1, impatient_lab, late + "hook = model.transformer.h[1].register_forward_pre_hook(late)")
    until(lambda: bool(impatient_lab.rank_status()[0].waits_for))
    zero = impatient_lab.rank_status()[0]
    assert zero.heartbeat is not None and zero.heartbeat.beat.working and zero.heartbeat.beat.peers == (0, 1)
    assert zero.waits_for.startswith("all_gather of unit transformer.h.")
    goes_on_by_itself(run)
    assert not impatient_lab.lost
    until(lambda: not impatient_lab.rank_status()[0].waits_for)


@pytest.mark.slow
def test_a_rank_that_loops_is_named_shown_and_replaced(impatient_lab: Lab, run: Run) -> None:
    culprit = impatient_lab.cluster.pids[1]
    on_rank(1, impatient_lab, in_a_block("    while True:\n        pass"))
    until(lambda: "has waited" in impatient_lab.waiting)
    assert impatient_lab.waiting.startswith("rank 0 has waited 2 s in all_gather ")
    e = hung(run)
    assert e.rank == 1 and e.waiting == (0,) and e.unit.startswith("transformer.h.")
    assert e.sentence.startswith(f"rank 1 did not join {e.collective} (group {e.group}: ranks 0 and 1), for which rank")
    assert e.collective == f"all_gather of unit {e.unit}"
    assert "rank 1 is here:" in e.stack and ", in hung\n" in e.stack and "remote.py" in e.stack
    begins_anew(impatient_lab, culprit)


@pytest.mark.slow
def test_a_stopped_rank_is_named_also_where_the_store_stops_with_it(impatient_lab: Lab, run: Run) -> None:
    """Rank 0 hosts the store: a side channel through it would be stopped as well. It stops inside a step: between two chunks
    no rank would wait for it, and it would count as lost. Not in the first one: it shall answer the cell."""
    culprit = impatient_lab.cluster.pids[0]
    stop = "    import os, signal\n    if next(calls):\n        os.kill(os.getpid(), signal.SIGSTOP)"
    on_rank(0, impatient_lab, "import itertools\ncalls = itertools.count()\n" + in_a_block(stop))
    e = hung(run)
    assert e.ranks == (0,) and e.waiting == (1,) and not e.stack
    assert "its process is stopped, so its stack cannot be read" in e.sentence
    begins_anew(impatient_lab, culprit)


@pytest.mark.slow
def test_a_stopped_rank_that_nobody_waits_for_is_found_too(impatient_lab: Lab, run: Run) -> None:
    run.stop(10)
    culprit = impatient_lab.cluster.pids[1]
    os.kill(culprit, signal.SIGSTOP)
    until(lambda: 1 in impatient_lab.lost, 20)
    assert "no longer answers" in str(impatient_lab.lost[1])
    begins_anew(impatient_lab, culprit)


@pytest.mark.slow
def test_a_busy_cell_that_keeps_a_rank_from_its_step_is_shown(impatient_lab: Lab, run: Run) -> None:
    impatient_lab.client[[impatient_lab.cluster.engine_ids[1]]].execute("import time; time.sleep(1000)  # in a cell")
    e = hung(run)
    assert e.ranks == (1,) and "it is not in the step" in e.sentence and "# in a cell" in e.stack


def test_a_limit_that_cannot_be_is_refused_before_anything_starts() -> None:
    children = psutil.Process().children(recursive=True)
    for hang_s in (0, 60):
        with pytest.raises(ArgumentError, match="hang_s: "):
            Lab(2, hang_s=hang_s)
    assert psutil.Process().children(recursive=True) == children
