"""Runs on real engines, whose ranks need no torch: blocking and awaited, switched, paused, stopped, replaced, failed."""

import asyncio
import gc
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import ipyparallel as ipp
import psutil
import pytest
import torch

from fsdp_lab.base.errors import ArgumentError, SpecError
from fsdp_lab.base.process import marked
from fsdp_lab.cluster import ClusterError, RankError, RankLost, StartError
from fsdp_lab.lab import Lab
from fsdp_lab.rank.measure import _driver, software
from fsdp_lab.runs import Run, RunState
from fsdp_lab.runs.control import RunControl
from fsdp_lab.runs.history import History
from fsdp_lab.runs.view import Awaited, cpu_model, describe_environment, fingerprint
from fsdp_lab.spec.spec import Spec
from tests.cluster.conftest import FAKE
from tests.waiting import until


def going(lab: Lab, **changes) -> Run:
    """A run without end that has done some steps."""
    run = lab.run(**changes)
    until(lambda: run.step > 3 or run.done)
    return run


def test_a_run_ends_after_its_steps_and_a_lab_keeps_its_runs_and_lists_those_of_others(lab: Lab):
    run = lab.run(sharding="shard_grad_op", steps=25).wait(20)
    assert run.state is RunState.FINISHED and run.step == 25 and run.error is None
    assert run.spec == Spec().replace(sharding="shard_grad_op") and lab.current is run and lab.spec == run.spec
    told = sorted((e.rank, e.step) for e in run.events.since()[0])
    assert told == [(rank, step) for rank in (0, 1) for step in range(25)]
    assert len(run.table()) == 10 and "shard_grad_op" in (text := repr(run.table())) and "in flight: issue" in text
    entry = run.summary()
    assert entry["spec"] == run.spec.to_dict() and len(entry["losses"]) == 25 and json.dumps(entry)
    assert lab.history is not None and lab.history.path == Path(os.environ["FSDP_LAB_HISTORY"])
    past = lab.runs()[run.id]
    assert past.events.since()[0] == run.events.since()[0] and past.summary() == entry
    assert past.table().rows == run.table().rows and list(past.switches) == run.switches
    assert past.state is RunState.FINISHED and past.environment == run.environment
    now = going(lab)
    assert lab.runs()[0].id == now.id and lab.runs(state="running")[0].id == now.id
    now.apply(precision="bf16").wait(10)
    now.stop(10)
    assert lab.runs()[0].spec.strategy.precision == "bf16" and len(lab.runs()[0].switches) == 2
    assert run.id in [r.id for r in History().runs(sharding="shard_grad_op")], "without a lab too"
    assert lab.runs()[0].state is RunState.STOPPED


def test_a_run_that_nobody_holds_is_let_go(lab: Lab):
    first = weakref.ref(lab.run(steps=3).wait(20))
    lab.run(steps=3).wait(20)
    lab.run(steps=3).wait(20)
    until(lambda: first() is None, meanwhile=gc.collect)


def test_another_spec_is_applied_behind_the_chunk_and_the_curve_goes_on(lab: Lab):
    run = going(lab)
    ticket = run.apply(sharding="shard_grad_op")
    assert run.pending is not None and run.pending.strategy.sharding == "shard_grad_op"
    switch = ticket.wait(10)
    assert switch.carried and switch.step > 3 and switch.before == Spec() and switch.after == run.spec
    assert run.pending is None and run.switches == [run.switches[0], switch]
    until(lambda: run.step > switch.step + 2)
    events = [e for e in run.events.since()[0] if e.rank == 0]
    assert [e.step for e in events] == list(range(len(events))), "no step twice, none missing"
    assert next(e.step for e in events if e.spec_id == run.spec.id) == switch.step
    first, second = run.apply(micro_batch=8), run.apply(precision="bf16")  # the newest word counts
    assert asyncio.run(second._wait_async()).after == first.wait(10).after
    assert run.spec.workload.micro_batch == 8 and run.spec.strategy.precision == "bf16"
    anew = run.apply(seed=7).wait(10)
    assert not anew.carried and anew.step == 0
    until(lambda: [e.step for e in run.events.since()[0] if e.spec_id == run.spec.id][:1] == [0])


def test_what_is_refused_leaves_the_run_as_it_was(lab: Lab):
    """By the ranks, or before anything is sent."""
    run = going(lab)
    with pytest.raises(SpecError, match="refused here"):
        run.apply(data="refuse").wait(10)
    assert isinstance(run.refused, SpecError)
    with pytest.raises(SpecError, match="strategy.sharding"):
        run.apply(backend="fsdp1", sharding="zero1")
    with pytest.raises(ArgumentError, match="steps"):
        lab.run(steps=0)
    for wrong in (0, 2.5, True):
        with pytest.raises(ArgumentError, match="ledger_every: .* is refused; give a whole number of 1 or more"):
            lab.run(ledger_every=wrong)  # type: ignore[arg-type]
    assert run.pending is None and run.spec == Spec()
    step = run.step
    until(lambda: run.step > step + 2)
    assert run.state is RunState.RUNNING


def test_what_cannot_fit_is_refused_with_its_figures_and_started_anyway(lab: Lab):
    large = {"model": "gpt2-355m", "micro_batch": 4096}
    former = lab.current
    refusal = r"a rank needs 1,\d+ GiB or more, and its share of .* is 4.00 GiB; give .*call lab.run.*anyway=True"
    with pytest.raises(SpecError, match=refusal):
        lab.run(**large)
    assert lab.current is former, "before anything starts"
    with pytest.raises(ArgumentError, match="every combination is refused, the first because of .*a rank needs") as e:
        lab.compare(model=["gpt2-355m"], micro_batch=[4096])
    assert "anyway" not in str(e.value)
    run = going(lab, model="gpt2-355m", micro_batch=1)
    with pytest.raises(SpecError, match=r"a rank needs .*; or call lab.current.apply\(..., anyway=True\)"):
        run.apply(micro_batch=4096)
    assert run.apply(micro_batch=4096, anyway=True).wait(20) is not None
    assert run.apply(lr=0.02).wait(20) is not None, "what trains is not doubted again"
    assert lab.run(**large, anyway=True, steps=1).wait(20).state is RunState.FINISHED


def test_the_status_shows_every_rank_and_where_memory_ends_one_goes_before_the_kernel(lab: Lab):
    run, table = going(lab), lab.status()
    assert len(table) == 2 and run.id in repr(table) and str(lab.cluster.pids[1]) in repr(table)
    assert "<table>" in table._repr_html_()
    with pytest.raises(ClusterError, match=r"make it with Lab\(persist=True\)"):
        lab.detach()
    assert not lab.closed and not lab.persistent and not lab.attached
    score = "/proc/{}/oom_score_adj"
    ranks = [int(Path(score.format(pid)).read_text()) for pid in lab.cluster.pids]
    assert min(ranks) == 800 > int(Path(score.format("self")).read_text())


def test_pause_holds_and_resume_goes_on(lab: Lab):
    run = going(lab)
    run.pause()
    until(lambda: run.state is RunState.PAUSED)
    step = run.step
    switch = run.apply(lr=1e-3).wait(10)
    time.sleep(0.2)
    assert run.step == step == switch.step and run.state is RunState.PAUSED, "a switch in a pause stays paused"
    run.resume()
    until(lambda: run.step > step)
    assert run.state is RunState.RUNNING


def test_a_script_is_told_the_step(lab: Lab, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    for each_s, shell, said in ((0.1, None, r"(fsdp_lab: step \d+: running, loss.*\n)+"), (0.1, 1, ""), (10, None, "")):
        monkeypatch.setattr("fsdp_lab.runs.view.LINE_S", each_s)
        monkeypatch.setattr("IPython.get_ipython", lambda shell=shell: shell)
        with pytest.raises(TimeoutError, match="was not over after 0.3 s"):
            going(lab).wait(0.3)
        assert re.fullmatch(said, capsys.readouterr().err)


def test_stop_keeps_what_was_trained_and_reaches_ranks_that_are_still_building(lab: Lab):
    run = lab.run(data="slow-apply")  # for half a minute
    until(lambda: [s.state for s in lab.rank_status()] == ["apply"] * 2)
    assert run.state is RunState.STARTING and run.stop(10) and run.state is RunState.STOPPED
    run = going(lab)
    run.stop(0)
    assert run.state is RunState.STOPPING, "from a callback it does not wait"
    assert run.stop() and run.state is RunState.STOPPED and run.wait() is run and run.stop()
    with pytest.raises(ClusterError, match="stopped"):
        run.apply(micro_batch=2)
    more = lab.run(steps=3, fresh=False).wait(10)
    assert more.step == run.step + 3 and more.switches[0].carried
    former = going(lab)
    assert lab.run(steps=3).wait(10).step == 3, "fresh by default"
    assert former.state is RunState.STOPPED and former.reason == "another run was started"


def test_what_interrupts_stops_the_run(lab: Lab):
    """Ctrl-C in a wait, which is passed on; a cell that is cancelled; the ranks' own."""

    async def cell() -> Run:
        run = lab.run()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(run, 0.5)
        return await run

    interrupted = going(lab)
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        interrupted.wait()
    assert asyncio.run(cell()).state is RunState.STOPPED
    run = going(lab)
    lab.interrupt()
    for one in (interrupted, run):
        assert one.state is RunState.STOPPED and one.reason == "interrupted"
    assert lab.run(steps=2).wait(10).step == 2


def test_a_failure_and_a_lost_rank_fail_the_run_and_the_next_one_works(lab: Lab):
    run = lab.run(data="raise:1")
    with pytest.raises(ClusterError, match="rank 1 failed in train .*told to fail"):
        run.wait(20)
    assert run.state is RunState.FAILED and "told to fail" in run.reason and "failed" in repr(run)
    run = going(lab)
    os.kill(lab.cluster.pids[0], signal.SIGKILL)
    with pytest.raises(RankLost, match="rank 0 is gone"):
        run.wait(10)
    assert run.state is RunState.FAILED and list(lab.lost) == [0] and "lost" in repr(lab)
    assert "SIGKILL" in repr(lab.status()) and lab.run(steps=2).wait(20).step == 2 and lab.lost == {}


@pytest.mark.slow
def test_a_lab_that_is_left_open_ends_with_its_process():
    code = f"""
from fsdp_lab.lab import Lab
said = []
lab = Lab(1, rank_module={FAKE!r}, progress=said.append)
run = lab.run()
while run.step < 2: pass
print([p.stage for p in said][-1], lab.cluster.token, flush=True)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    stage, token = done.stdout.split()
    assert stage == "ready" and marked(token) == []


# -- what a lab does with a calibration; what ranks measure is in tests/rank/test_calibration.py ----------------------
def test_plans_are_made_of_what_the_ranks_measured(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.planner.test_calibration import made_up  # others import this file

    expected = made_up()[0]
    asked: list[dict[str, Any]] = []

    def call(method: str, **arguments: Any) -> list[Any]:
        asked.append(arguments)
        return [expected.probes if method == "calibrate" else {"device_name": "CPU"}] * 2

    run = going(lab)
    with pytest.raises(ClusterError, match="in progress"):
        lab.calibrate()
    run.stop(10)
    with pytest.raises(ArgumentError, match="passes"):
        lab.calibrate(passes=0)
    with pytest.raises(ArgumentError, match="this machine is not calibrated; call lab.calibrate"):
        lab.plan()
    monkeypatch.setattr(lab.cluster, "call", call)
    spec = Spec(world_size=2).replace(model="gpt2-1m", seq_len=64)
    here = lab.calibrate([spec], passes=1)
    assert asked[0]["specs"][-1] == spec.to_dict() and asked[0]["passes"] == 1, "timed in turns with the calibration's"
    assert (here.ranks, here.machine, here.rates) == (2, expected.machine, expected.rates)
    assert lab.plan(spec).machine == here.machine and lab.plan(spec).step_time_s > 0
    with pytest.raises(SpecError, match="2 ranks were calibrated, and the Spec has 4"):
        lab.plan(Spec(world_size=4))
    there = lab.plan(Spec(world_size=16).replace(model="llama-7b", precision="bf16"), "h100", hosts=2)
    assert there.machine.hosts == 2 and there.fits and "16 x h100 in 2 hosts" in repr(there)


# -- the user's own ipyparallel cluster: used as it is, never ended -----------------------------------------------
@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """Two engines that somebody started in a profile of theirs, and IPython's folder with it."""
    home = tmp_path_factory.mktemp("ipython")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IPYTHONDIR", str(home))
        cluster = ipp.Cluster(
            n=2, profile_dir=str(home / "profile_theirs"), cluster_id="mine", log_level=40, delay=0, load_profile=False,
            controller_args=["--HeartMonitor.period=200"],
        )  # fmt: skip
        client = cluster.start_and_connect_sync(activate=False)
        yield cluster, client
        client.close()
        cluster.stop_cluster_sync()


@pytest.mark.parametrize("by", ["cluster", "client", "profile"])
def test_a_given_cluster_is_used_and_left_running(theirs, by: str):
    cluster, client = theirs
    given = {"cluster": cluster, "client": client, "profile": "theirs"}[by]
    with Lab(cluster=given, rank_module=FAKE, progress=False) as lab:
        assert lab.ranks == 2 and not lab.cluster.owned and lab.run(steps=3).wait(20).step == 3
        pids = lab.cluster.pids
        if by == "cluster":
            with pytest.raises(StartError, match="3 ranks were asked for|more engine"):
                lab.run(world_size=3).wait(20)
        left = lab.run()
        until(lambda: left.step > 1)
    assert left.state is RunState.STOPPED and left.reason == "the lab was closed"
    assert all(psutil.pid_exists(pid) for pid in pids)
    assert client[:].apply_sync(int) == [0, 0], "they answer their owner"


def test_a_second_lab_takes_over_and_the_first_is_told(theirs):
    first = Lab(cluster=theirs[0], rank_module=FAKE)
    with Lab(cluster=theirs[0], rank_module=FAKE) as second:
        with pytest.raises(RankError, match="another lab has taken these ranks over"):
            first.run(steps=1).wait(10)
        first.close()
        assert second.run(steps=2).wait(10).step == 2


def test_fewer_ranks_than_engines_are_taken_more_are_refused_and_closing_twice_is_closing_once(theirs):
    with Lab(1, cluster="mine", rank_module=FAKE) as lab:
        assert (lab.ranks, lab.most_ranks) == (1, 2) and lab.run(steps=2).wait(20).events.ranks == (0,)
        slow = lab.slow_motion()
        next(slow)
    lab.close()
    assert slow.closed and slow.reason == "the lab was closed" and repr(lab) == "<Lab: closed>"
    for what in (lab.run, lab.slow_motion):
        with pytest.raises(ClusterError, match="closed"):
            what()
    with pytest.raises(StartError, match="3 ranks were asked for and the given cluster has 2 engines"):
        Lab(3, cluster=theirs[0], rank_module=FAKE)
    with pytest.raises(StartError, match="neither a running profile nor a cluster id 'nowhere'"):
        Lab(cluster="nowhere")
    with pytest.raises(StartError, match="not running"):
        Lab(cluster=ipp.Cluster(n=1, log_level=40))


# -- the history of a lab's runs ----------------------------------------------------------------------------------
def test_the_environment_says_what_the_ranks_are_and_nothing_private(lab: Lab):
    found = lab.run(steps=1).wait(20).environment
    assert found["devices"] == ["cpu", "cpu"] and found["torch"] and found["python"] and found["cores"] >= 1
    assert json.loads(json.dumps(found)) == found
    told = json.dumps(found)
    private = {os.environ.get("USER", ""), str(Path.home()), os.environ["FSDP_LAB_HISTORY"]} - {"", "/", "root"}
    assert not [word for word in private if word in told]
    software = {"torch": "2.13.0+cu130", "cuda": "13.0", "nccl": "2.30.3", "driver": "580.65"}
    gpu = fingerprint([{"device_name": "NVIDIA H100", "software": software}] * 4)
    said = f"{gpu['host']}: 4 x NVIDIA H100, torch 2.13.0+cu130, cuda 13.0, nccl 2.30.3, driver 580.65"
    assert describe_environment(gpu) == said


def test_what_is_wrong_with_the_history_is_said_in_the_status_and_stops_no_run(lab: Lab, tmp_path: Path):
    assert History.of(False) is None
    with pytest.raises(ArgumentError, match="history: 7 is refused; give True, False, the path of a file"):
        Lab(1, history=7)  # type: ignore[arg-type]
    (tmp_path / "file").write_text("no folder")
    before, lab.history = lab.history, History(tmp_path / "file" / "runs.sqlite3")
    try:
        assert lab.run(steps=8).wait(20).state is RunState.FINISHED
        until(lambda: "its folder is a file" in repr(lab.status()))
    finally:
        lab.history = before


def test_a_processor_and_a_driver_are_called_as_their_makers_do(tmp_path: Path):
    told = tmp_path / "told"
    told.write_text("processor\t: 0\nmodel name\t: AMD EPYC 7B13\nprocessor\t: 1\nmodel name\t: AMD EPYC 7B13\n")
    assert cpu_model(told) == "AMD EPYC 7B13"
    told.write_text("processor\t: 0\nCPU implementer\t: 0x41\n")
    assert cpu_model(told) == cpu_model(tmp_path / "none") != ""
    for line, version in (
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023", "535.104.05"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65  Release Build  (root@box)", "580.65"),
        ("something else 1.2", ""),
    ):
        told.write_text(line + "\nGCC version:  gcc version 12.2.0\n")
        assert _driver(told) == version
    assert _driver(tmp_path / "none") == ""
    cpu = {"host": "box", "cpu": "AMD EPYC", "cores": 2, "torch": "2.13.0", "devices": ["CPU", "CPU"], "cuda": ""}
    assert describe_environment(cpu) == "box: 2 x CPU (AMD EPYC, 2 cores), torch 2.13.0"
    assert software(torch.device("cpu")) == {"torch": str(torch.__version__), "cuda": "", "nccl": "", "driver": ""}


# -- what a thread sets once, waited for from cells, tasks and loops; and the states of a run ---------------------
class Answer(Awaited[int]):
    def __init__(self) -> None:
        super().__init__()
        self.given_up: list[bool] = []

    def _outcome(self) -> int:
        return 42

    def _given_up(self, blocking: bool) -> None:
        self.given_up.append(blocking)


def test_a_cancelled_task_does_not_end_it_for_the_others():
    answer = Answer()

    async def cell() -> int:
        async def waiting() -> int:
            return await answer

        first, second = asyncio.create_task(waiting()), asyncio.create_task(waiting())
        await asyncio.sleep(0)  # both wait
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert not answer.done and answer.given_up == [False]
        threading.Thread(target=answer._end).start()
        return await second

    assert asyncio.run(cell()) == 42 and answer.done


def test_it_is_waited_for_from_any_loop_and_ended_once(caplog: pytest.LogCaptureFixture):
    """A loop that was closed meanwhile is no error."""
    answer = Answer()
    with pytest.raises(TimeoutError, match="was not over after 0 s"):
        answer.wait(0)

    async def left() -> None:
        asyncio.create_task(answer._wait_async())  # noqa: RUF006  (cancelled when the loop closes)
        await asyncio.sleep(0)

    async def cell() -> int:
        return await answer

    asyncio.run(left())
    answer._end()
    answer._end()
    assert answer.wait() == asyncio.run(cell()) == asyncio.run(cell()) == 42 and not caplog.records


def test_the_first_reason_of_a_stop_counts_and_none_after_the_end():
    control = RunControl(Spec())
    control.request_stop("enough")
    control.request_stop("again")
    assert (control.state, control.reason, control.ending) == (RunState.STOPPING, "enough", True)
    control.finish(RunState.STOPPED, "enough")
    control.request_stop("too late")
    assert (control.state, control.reason) == (RunState.STOPPED, "enough")
