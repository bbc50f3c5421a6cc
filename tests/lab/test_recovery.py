"""Nothing is lost: a run goes on after whatever befell its ranks, with the curve of one that nothing befell."""

import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from fsdp_lab.base.errors import ArgumentError, SpecError
from fsdp_lab.cluster import ClusterError, RankLost, StartError
from fsdp_lab.cluster.local_engines import LocalEngines
from fsdp_lab.lab import Lab
from fsdp_lab.runs import Run, RunState
from fsdp_lab.runs.parity import Verdict, parity
from fsdp_lab.runs.recovery import BEGINNING, CHECKPOINT, REPLICA, RecoveryPolicy, refitted
from fsdp_lab.runs.saving import CheckpointConfig, CheckpointSchedule
from fsdp_lab.spec.checkpoint_format import checkpoints, incomplete_checkpoints
from fsdp_lab.spec.spec import Spec
from tests.lab.events import losses
from tests.waiting import until

SMALL = {"model": "gpt2-1m", "micro_batch": 2, "seq_len": 64}
DDP = {"backend": "ddp", "sharding": "no_shard"}
STEPS = 24
lab = pytest.fixture(lambda real_lab: real_lab)


@pytest.fixture(scope="module")
def undisturbed_run(resident_real: Lab) -> Run:
    return resident_real.run(**SMALL, world_size=2, steps=STEPS).wait(90)


@pytest.fixture(scope="module")
def undisturbed(undisturbed_run: Run) -> dict[int, float]:
    """step -> loss."""
    return losses(undisturbed_run)


def kill(lab: Lab, rank: int) -> float:
    unix_s = time.time()
    os.kill(lab.rank_status()[rank].pid, signal.SIGKILL)
    return unix_s


@pytest.mark.slow
def test_a_run_is_saved_and_another_goes_on_from_it(lab: Lab, undisturbed: dict[int, float], tmp_path: Path) -> None:
    run = lab.run(**SMALL, steps=14, save=CheckpointConfig(folder=tmp_path, every=4, last=2)).wait(90)
    assert [s.step for s in run.saves] == [4, 8, 12, 14] and not any(s.error or s.pending for s in run.saves)
    assert [c.step for c in checkpoints(tmp_path)] == [12, 14], "the last two"
    assert all(s.stall_s > 0 and s.seconds and s.nbytes for s in run.saves)
    with pytest.raises(ClusterError, match="lab.save"):
        run.save()
    again = lab.resume(tmp_path, steps=STEPS - 14, backend="fsdp2")
    made = again.save(tmp_path / "other").wait(30)  # on demand, and in another folder; its last step goes there as well
    assert made.step >= 14 and made.spec == again.spec and checkpoints(tmp_path / "other")[-1].path == made.path
    again.wait(90)
    told = f"Resumes run {run.id} from step 14 ({checkpoints(tmp_path)[-1].path.name}), with backend lab → fsdp2."
    assert again.notes[0] == told and again.line.startswith(f"step {STEPS} of {STEPS}: finished, loss ")
    assert losses(run) | losses(again) == undisturbed and again.switches[0].step == 14 and min(losses(again)) == 14
    assert (again.saves[-1].kind, again.saves[-1].step) == ("last", STEPS) and lab.save(tmp_path).step == STEPS


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "changes", "source"), [(1, {}, CHECKPOINT), (0, DDP, REPLICA)])
def test_a_killed_rank_is_replaced_and_the_curve_is_that_of_an_undisturbed_run(
    lab: Lab, undisturbed_run: Run, tmp_path: Path, victim: int, changes: dict[str, str], source: str
) -> None:
    run = lab.run(**SMALL, **changes, steps=STEPS, recover=True, save=CheckpointConfig(folder=tmp_path, every=5))
    until(lambda: run.step > 6)
    others = [s.pid for s in lab.rank_status() if s.rank != victim]
    struck_unix_s = kill(lab, victim)
    run.fault_injected(struck_unix_s)
    run.wait(120)
    assert run.state is RunState.FINISHED and losses(run) == losses(undisturbed_run)
    (incident,) = run.incidents
    assert incident.source == source and isinstance(incident.error, RankLost) and incident.error.rank == victim
    times = [incident.failed_unix_s, incident.detected_unix_s, incident.freed_unix_s, incident.resumed_unix_s]
    assert times == sorted(times) and times[0] == struck_unix_s and incident.detected_unix_s - struck_unix_s < 2
    assert incident.resumed_step == (5 if source == CHECKPOINT else incident.step)
    assert incident.lost_steps == incident.step - incident.resumed_step < 5
    assert set(others) < {s.pid for s in lab.rank_status()}, "the survivors stay"
    assert not incomplete_checkpoints(tmp_path)
    if source == CHECKPOINT:
        assert {e.attempt for e in run.events.since()[0]} == {0, 1} and run.events.attempt == 1
        for told in (run, lab.runs()[run.id]):  # all other views: tests/lab/test_steps.py
            found = parity(undisturbed_run, told)
            assert (found.verdict, found.steps) == (Verdict.EQUAL, STEPS), found.sentence
            assert told.summary()["losses"] == list(losses(undisturbed_run).values())


@pytest.mark.slow
def test_a_run_that_a_comparison_suspends_goes_on_bit_for_bit(lab: Lab, undisturbed: dict[int, float], tmp_path: Path):
    """Though a rank is lost meanwhile, and with it the state of the run: it was saved before."""
    run = lab.run(**SMALL, steps=STEPS, recover=True, save=tmp_path)
    until(lambda: run.step > 3)
    sweep = lab.compare(run.spec, backend=["fsdp2", "lab"], steps=2000, rounds=1)
    until(lambda: bool(sweep.runs) and sweep.runs[0].step > 1)
    kill(lab, 1)
    until(lambda: len(sweep.runs) == 2 and sweep.runs[1].step > 1)
    sweep.stop(20)
    run.wait(120)
    assert losses(run) == undisturbed and lab.current is run
    found = [(i.source, i.resumed_step, "was lost with them" in i.sentence) for i in run.incidents]
    assert found == [(CHECKPOINT, run.saves[0].step, True)]


@pytest.mark.slow
def test_it_waits_for_a_word_goes_on_with_fewer_and_their_number_changes_while_it_trains(
    lab: Lab, undisturbed: dict[int, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From two to one to two to one, which are carried the same way as larger numbers (tests/gpu) and cost less."""

    def refuse(*arguments: object, **options: object) -> None:
        raise StartError("the machine has no memory for another process")

    run = lab.run(**SMALL, steps=STEPS, recover="ask", save=CheckpointConfig(folder=tmp_path, every=5))
    until(lambda: run.step > 6)
    kill(lab, 1)
    until(lambda: run.state is RunState.BROKEN)
    assert "rank 1 is gone" in run.reason and not run.done and lab.recover("fewer") is run
    until(lambda: bool(run.incidents) and run.state is RunState.RUNNING, 120)
    (incident,) = run.incidents
    assert (incident.ranks, incident.resumed_ranks) == (2, 1) and lab.ranks == 1
    assert "2 ranks became 1: a step is still 4 samples" in incident.notes[0]
    pids = lab.cluster.pids
    with monkeypatch.context() as patch:
        patch.setattr(LocalEngines, "add", refuse)
        with pytest.raises(SpecError, match=r"world_size: the machine has no memory .*; the run goes on with 1 ranks"):
            run.apply(world_size=2, accumulate=1).wait(60)
    assert lab.cluster.pids == pids
    grows_and_shrinks(lab, run, undisturbed, most=2)
    assert [e.world_size for e in run.events.latest().values()] == [1]


def grows_and_shrinks(lab: Lab, run: Run, undisturbed: dict[int, float], most: int = 4) -> None:
    """To `most` ranks and to one: the state is carried, and the global batch is the same."""
    before = len(run.incidents)
    until(lambda: run.step > 2)
    run.pause()
    grown = run.apply(world_size=most, micro_batch=4 // most, accumulate=1).wait(60)
    assert grown.carried and lab.ranks == most and run.spec.world_size == most
    run.resume()
    until(lambda: run.step > grown.step)
    run.pause()
    with pytest.raises(SpecError, match="no module of class"):
        run.apply(world_size=most - 1, wrap="class:Nowhere").wait(60)
    assert run.spec.world_size == lab.ranks == most and run.refused is not None
    shrunk = run.apply(world_size=1, micro_batch=4, sharding="no_shard").wait(60)
    run.resume()
    run.wait(120)
    told = losses(run)  # the same but for the order of sums
    assert run.state is RunState.FINISHED and told.keys() == undisturbed.keys(), run.reason
    assert all(told[step] == pytest.approx(loss, rel=1e-4) for step, loss in undisturbed.items())
    assert lab.ranks == 1 and len(run.incidents) == before
    assert [s.after.world_size for s in run.switches][-3:] == [most, most, 1] and shrunk.step > grown.step


@pytest.mark.slow
def test_a_failure_that_comes_again_at_once_ends_the_run_and_another_recovers_it(
    lab: Lab, undisturbed: dict[int, float], tmp_path: Path
) -> None:
    lab.client[:].execute("from fsdp_lab.rank import trainer as t; usual = t.Trainer._accumulate").get(20)
    raising = "def raising(self):\n    return usual(self) if self.progress.step < 7 else 1 / 0\n"
    lab.client[1:].execute(f"{raising}t.Trainer._accumulate = raising").get(20)
    save = CheckpointConfig(folder=tmp_path, every=5)
    try:
        run = lab.run(**SMALL, steps=STEPS, save=save, recover=RecoveryPolicy(how="auto", times=2))
        with pytest.raises(ClusterError, match="rank 1 failed in train at .*: ZeroDivisionError"):
            run.wait(60)
        assert len(run.incidents) == 2 and {i.source for i in run.incidents} == {"the ranks"}
    finally:
        lab.client[:].execute("t.Trainer._accumulate = usual").get(20)
    again = lab.recover()
    assert again is not run and lab.current is again
    again.wait(120)
    assert losses(run) | losses(again) == undisturbed


@pytest.mark.nightly
def test_a_controller_that_is_killed_is_replaced_with_all_ranks(lab: Lab, undisturbed: dict[int, float]) -> None:
    """Without a checkpoint the run begins again."""
    run = lab.run(**SMALL, steps=STEPS, recover=True)
    until(lambda: run.step > 3)
    former = {s.pid for s in lab.rank_status()}
    os.kill(lab.cluster.membership.engines.controller_pid, signal.SIGKILL)
    run.wait(150)
    assert losses(run) == undisturbed
    assert run.incidents[0].source == BEGINNING and "controller" in run.incidents[0].sentence
    assert not former & {s.pid for s in lab.rank_status()}
    until(lambda: not any(psutil.pid_exists(pid) for pid in former))


def test_nothing_to_recover_and_bad_words_are_refused(lab: Lab, tmp_path: Path) -> None:
    run = lab.run(**SMALL, steps=1).wait(60)
    with pytest.raises(ClusterError, match="no run to recover"):
        lab.recover()
    with pytest.raises(ClusterError, match="not broken"):
        run.recover()
    for options, field in (({"save": CheckpointConfig}, "save"), ({"save": "/proc/nothing"}, "save"),
                           ({"recover": "perhaps"}, "recover.how")):  # fmt: skip
        with pytest.raises(ArgumentError, match=field):
            lab.run(**SMALL, **options)
    with pytest.raises(ArgumentError, match="every"):
        CheckpointConfig(folder=tmp_path, every=0)
    with pytest.raises(ArgumentError, match="times"):
        RecoveryPolicy(times=0)
    with pytest.raises(ArgumentError, match="no checkpoint in"):
        lab.resume(tmp_path)
    with pytest.raises(ArgumentError, match="no folder for checkpoints"):
        run.save()
    assert lab.current is run


def test_what_is_saved_and_when_is_noted(tmp_path: Path) -> None:
    often, spec = CheckpointConfig(folder=tmp_path, every=5), Spec()
    assert often.notes(spec, 1 << 20) == () and "only at the end" in CheckpointConfig(folder=tmp_path).notes(spec, 1)[0]
    assert "the frozen model, too, 4.00 MiB" in often.notes(spec.replace(lora={"r": 2}), 1 << 20)[0]


def test_a_checkpoint_that_was_given_up_and_is_written_after_all_holds_up_no_later_one(tmp_path: Path) -> None:
    """As where a step fails meanwhile, and the ranks go on."""
    schedule = CheckpointSchedule(CheckpointConfig(folder=tmp_path), "run")
    for step in (5, 10):
        schedule.take("step", step, lambda step=step: [{"step": step, "seconds": 0.1, "waited_s": 0.0}])
        if step == 5:
            schedule.give_up("meanwhile a step failed")
    end = {"path": "", "bytes": 0, "seconds": 0.1, "error": "no room"}
    schedule.written([{**end, "step": 5}, {**end, "step": 10}])
    assert not schedule.pending and [s.error for s in schedule.taken] == ["meanwhile a step failed", "no room"]


def test_another_number_of_ranks_keeps_the_global_batch_where_it_can() -> None:
    spec = Spec(world_size=4).replace(micro_batch=3, accumulate=2)
    assert refitted(spec, 4) == (spec, ())
    for ranks, kept in ((2, True), (3, True), (1, True), (6, True), (5, False)):
        fitted, notes = refitted(spec, ranks)
        assert (fitted.global_batch == spec.global_batch) is kept and fitted.world_size == ranks
        assert ("still 24" in notes[0]) is kept
    with pytest.raises(SpecError, match="3 ranks have none"):
        refitted(spec.replace(sharding="hybrid_shard", shard_size=2), 3)
