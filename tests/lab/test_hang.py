"""A rank that hangs, on real engines: named with the collective, its unit and its stack; ended; and the lab goes on."""

from __future__ import annotations

import time
from collections.abc import Iterator

import psutil
import pytest

from fsdp_lab import RankHung
from fsdp_lab.base.errors import ArgumentError
from fsdp_lab.base.process import marked
from fsdp_lab.cluster import RankError
from fsdp_lab.lab import Lab
from fsdp_lab.runs import Run, RunState
from tests.lab.conftest import HANG_S
from tests.lab.test_lab import until

SMALL = {"model": "gpt2-1m", "micro_batch": 1, "seq_len": 64}


@pytest.fixture
def run(impatient_lab: Lab) -> Iterator[Run]:
    """One that goes on, on two healthy ranks."""
    run = impatient_lab.run(**SMALL)
    until(lambda: run.step > 1 or run.done, 90)
    assert not run.done, run
    yield run
    run.stop(10)


def on_rank(rank: int, lab: Lab, code: str) -> None:
    """A cell on a rank, between two chunks of steps."""
    lab.client[[lab.cluster.engine_ids[rank]]].execute(code).get(20)


def in_a_block(body: str) -> str:
    return f"def hung(*_):\n{body}\nhook = model.transformer.h[1].register_forward_pre_hook(hung)"


def hung(run: Run) -> RankHung:
    """What the run fails with, no later than it should."""
    with pytest.raises(RankHung) as caught:
        run.wait(30)
    assert run.ended_unix_s is not None
    e = caught.value
    assert HANG_S < e.after_s < HANG_S + 2, "found within 2 s of the limit"
    assert run.ended_unix_s - e.unix_s < 2 and run.state is RunState.FAILED
    assert run.reason == e.sentence and run.details == e.stack and "\n" not in run.reason
    return e


def works(lab: Lab) -> None:
    assert lab.run(**SMALL, steps=2).wait(120).step == 2 and lab.lost == {}


@pytest.mark.slow
def test_a_rank_that_comes_before_the_limit_is_left_in_peace_and_what_the_others_wait_for_is_known(
    impatient_lab: Lab, run: Run
):
    late = "import time\ndef late(*_):\n    hook.remove()\n    time.sleep(1.6)\n"
    on_rank(1, impatient_lab, late + "hook = model.transformer.h[1].register_forward_pre_hook(late)")
    until(lambda: bool(impatient_lab.rank_status()[0].waits_for))
    zero = impatient_lab.rank_status()[0]
    assert zero.heartbeat is not None and zero.heartbeat.beat.working and zero.heartbeat.beat.peers == (0, 1)
    assert zero.waits_for.startswith("all_gather of unit transformer.h.")
    assert f"train, in {zero.waits_for} for " in repr(impatient_lab.status())
    step = run.step
    until(lambda: run.step > step + 3 or run.done, 20)
    assert not run.done and not impatient_lab.lost
    until(lambda: not impatient_lab.rank_status()[0].waits_for)


@pytest.mark.slow
def test_ranks_that_disagree_are_told_apart_and_none_is_ended(impatient_lab: Lab, run: Run):
    """Rank 1 leaves the vote of one step out and goes on at once, also where that was the last step of a chunk. (How ranks
    that disagree over Gloo are told apart is in tests/spec/test_hang.py.)"""
    pids = impatient_lab.cluster.pids
    arm = "def arm(world, trainer):\n    def skip(values):\n        del world.control\n"
    goes_on = "        trainer.backend.loss(trainer.batches.batch(trainer.progress.samples, 0))\n"
    on_rank(1, impatient_lab, arm + goes_on + "    world.control = skip\narm(session.world, session.trainer)")
    with pytest.raises(RankError) as caught:  # shared memory has what each rank issued in it, so that none waits
        run.wait(30)
    first, second = "all_gather where this rank issued all_reduce", "all_reduce where this rank issued all_gather"
    assert f"rank 1 of the group issued {first}" in str(caught.value) or f"rank 0 of the group issued {second}" in str(
        caught.value
    )
    works(impatient_lab)
    assert impatient_lab.cluster.pids == pids


SLEEPS = "    import time\n    time.sleep(1000)"
LOOPS = "    while True:\n        pass"


@pytest.mark.slow
@pytest.mark.parametrize("body", [SLEEPS, LOOPS], ids=["sleeps", "loops"])
def test_a_rank_that_does_not_come_is_named_shown_and_replaced(impatient_lab: Lab, run: Run, body: str):
    culprit = impatient_lab.cluster.pids[1]
    on_rank(1, impatient_lab, in_a_block(body))
    until(lambda: "has waited" in impatient_lab.waiting, 20)
    assert impatient_lab.waiting.startswith("rank 0 has waited 2 s in all_gather ")
    e = hung(run)
    assert e.rank == 1 and e.waiting == (0,) and e.unit.startswith("transformer.h.")
    assert e.sentence.startswith(
        f"rank 1 did not join {e.collective} (group {e.group}: ranks 0 and 1), for which rank 0"
    )
    assert e.collective == f"all_gather of unit {e.unit}"
    assert "rank 1 is here:" in e.stack and ", in hung\n" in e.stack and "remote.py" in e.stack
    assert any(line.strip() in e.stack for line in body.splitlines()) and "modeling_gpt2.py" in e.stack
    works(impatient_lab)
    assert culprit not in impatient_lab.cluster.pids and not psutil.pid_exists(culprit)


@pytest.mark.slow
def test_a_stopped_rank_is_named_also_where_the_store_stops_with_it(impatient_lab: Lab, run: Run):
    """Rank 0 hosts the store: a side channel through it would be stopped as well. It stops inside a step: between two chunks
    no rank would wait for it, and it would count as lost. Not in the first one: it shall answer the cell."""
    culprit = impatient_lab.cluster.pids[0]
    stop = "    import os, signal\n    if next(calls):\n        os.kill(os.getpid(), signal.SIGSTOP)"
    on_rank(0, impatient_lab, "import itertools\ncalls = itertools.count()\n" + in_a_block(stop))
    e = hung(run)
    assert e.ranks == (0,) and e.waiting == (1,) and not e.stack
    assert "its process is stopped, so its stack cannot be read" in e.sentence
    works(impatient_lab)
    assert not psutil.pid_exists(culprit)
    ours = {p.pid for p in marked(impatient_lab.cluster.token)}
    assert set(impatient_lab.cluster.pids) <= ours and culprit not in ours


@pytest.mark.slow
def test_a_busy_cell_that_keeps_a_rank_from_its_step_is_shown(impatient_lab: Lab, run: Run):
    impatient_lab.client[[impatient_lab.cluster.engine_ids[1]]].execute("import time; time.sleep(1000)  # in a cell")
    e = hung(run)
    assert e.ranks == (1,) and "it is not in the step" in e.sentence and "# in a cell" in e.stack


@pytest.mark.parametrize("hang_s", [0, -3, 60])
def test_a_limit_that_cannot_be_is_refused_before_anything_starts(hang_s: float):
    began, children = time.monotonic(), psutil.Process().children(recursive=True)
    with pytest.raises(ArgumentError, match="hang_s: "):
        Lab(2, hang_s=hang_s)
    assert time.monotonic() - began < 2 and psutil.Process().children(recursive=True) == children
