"""A user's own loop in a real `%%px` cell, and under torchrun: its events arrive while it runs, and it ends well."""

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from fsdp_lab.lab import Lab
from fsdp_lab.runs import RunState, WatchedRun
from fsdp_lab.runs.history import History
from tests.waiting import until

BUILD = """
    import time, torch, fsdp_lab
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(3)])
    for layer in net:
        fully_shard(layer)
    fully_shard(net)
    adam = torch.optim.AdamW(net.parameters(), lr=1e-3)
"""
LOOP = """
    with fsdp_lab.watch(net, adam, tokens=4) as watch:
        for i in range({steps}):
            with watch.step():
                loss = net(torch.ones(4, 32)).square().mean()
                loss.backward()
                adam.step()
                adam.zero_grad()
                watch.loss(loss)
            {then}
"""
# The run before it may have been interrupted, which gives the process groups up.
CELL = "import fsdp_lab; fsdp_lab.init_process_group()\n" + textwrap.dedent(BUILD) + textwrap.dedent(LOOP)


def cell(lab: Lab, code: str) -> Callable[[], None]:
    """Begins a cell on all ranks; what it returns waits for it, and raises its error."""
    result = lab.client[lab.cluster.engine_ids].execute(code, block=False)
    return lambda: result.get(60)


def watched(lab: Lab, before: object = None) -> WatchedRun:
    until(lambda: isinstance(lab.current, WatchedRun) and lab.current is not before and lab.current.step > 3, 30)
    run = lab.current
    assert isinstance(run, WatchedRun)
    return run


@pytest.mark.slow
def test_a_loop_in_a_cell_has_everything_that_a_run_has(real_lab: Lab) -> None:
    cell(real_lab, CELL.format(steps=20, then=""))()
    run = watched(real_lab).wait(10)
    assert run.state is RunState.FINISHED and run.spec.name == "watched: FSDP2 Sequential"
    steps = run.events.steps()
    assert [s.number for s in steps] == list(range(20)) and all(s.is_whole for s in steps)
    assert steps[2].events[0].memory_curve and run.timeline(15).lanes
    entry = run.summary()
    assert entry["losses"][0] > entry["losses"][-1] and entry["tokens_per_s"] > 0
    assert set(entry["comm_bytes_per_step"]) >= {"all_gather", "reduce_scatter"}
    past = real_lab.runs(backend="fsdp2")[run.id]
    assert past.spec == run.spec and past.table().rows == run.table().rows
    assert repr(past.events.since()[0]) == repr(run.events.since()[0]), "what is not known is NaN"
    own = real_lab.run(model="gpt2-1m", seq_len=64, steps=2).wait(60)
    assert real_lab.current is own


@pytest.mark.slow
def test_what_ends_it_interrupts_the_cell_and_the_ranks_go_on(real_lab: Lab) -> None:
    """The cell's first line opens the process groups again, and the same cell runs."""
    run: object = real_lab.current
    for by in ("stop", "another run"):
        wait = cell(real_lab, CELL.format(steps=100_000, then=""))
        run = watched(real_lab, run)
        if by == "stop":
            assert run.stop(20, "enough")
        else:
            assert real_lab.run(model="gpt2-1m", seq_len=64, steps=3).wait(60).state is RunState.FINISHED
        assert run.state is RunState.STOPPED
        with pytest.raises(Exception, match="Interrupt|interrupted"):
            wait()


@pytest.mark.slow
def test_a_rank_that_raises_frees_the_others_and_says_why(real_lab: Lab) -> None:
    before = real_lab.current
    with pytest.raises(Exception, match="no more of this"):
        cell(real_lab, CELL.format(steps=100, then="if i == 7 and rank == 1: raise ValueError('no more of this')"))()
    run = watched(real_lab, before).wait(10)
    assert run.state is RunState.FAILED and run.reason == "ValueError: no more of this"
    with pytest.raises(Exception, match=r"call fsdp_lab.init_process_group\(\) on all ranks"):
        cell(real_lab, textwrap.dedent(LOOP).format(steps=1, then=""))()
    assert real_lab.run(model="gpt2-1m", seq_len=64, steps=2).wait(60).state is RunState.FINISHED


# -- under torchrun ---------------------------------------------------------------------------------------------------
STORED = LOOP.replace("tokens=4", "history=path").replace("watch.step()", "watch.step(tokens=4)")
SCRIPT = f"""
import os, sys, time
import torch.distributed as dist
import fsdp_lab

path, fails = sys.argv[1:]
for group in ("lab",) if fails else ("torch", "lab"):
    if group == "lab":
        fsdp_lab.init_process_group()
    else:
        dist.init_process_group("gloo")
{BUILD}
{STORED.format(steps=30, then="")}
            while i == 10 and not os.path.exists(path + ".seen"):
                time.sleep(0.01)
            if fails and i == 20 and dist.get_rank() == 0:
                raise ValueError("no more of this")
    if group == "torch":
        dist.destroy_process_group()
"""


def script(folder: Path, *, fails: bool) -> tuple[subprocess.Popen[str], Path]:
    """Starts it, and returns the file of its history as well."""
    path, file = folder / "runs.sqlite3", folder / "train.py"
    file.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", str(file)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    given = [*command, str(path), "fails" if fails else ""]
    return subprocess.Popen(given, env=env, stderr=subprocess.PIPE, text=True), path


def ended(process: subprocess.Popen[str]) -> str:
    """Waits until it ends by itself, and returns what it said."""
    try:
        return process.communicate(timeout=120)[1]
    finally:
        process.kill()
        process.wait(10)


@pytest.mark.slow
def test_under_torchrun_another_process_reads_it_while_it_runs_and_it_ends_by_itself(tmp_path: Path) -> None:
    """In groups of torch, communication is not measured; in those of the lab it is."""
    process, path = script(tmp_path, fails=False)
    try:
        until(lambda: process.poll() is not None or any(r.step > 5 for r in History(path).runs()), 90)
        (live,) = History(path).runs()
        assert process.poll() is None and live.state is RunState.RUNNING
        assert any(s.is_whole for s in live.events.steps()) and live.table().rows
    finally:
        Path(f"{path}.seen").touch()  # for which the ranks wait
        said = ended(process)
    assert process.returncode == 0, said
    ours, torchs = History(path).runs()
    for run, measured in ((torchs, False), (ours, True)):
        steps = run.events.steps()
        assert run.state is RunState.FINISHED and all(s.is_whole for s in steps)
        assert [s.number for s in steps] == list(range(30))
        assert ("Communication is not measured" in " ".join(run.notes)) != measured
        assert ("all_gather" in steps[-1].events[0].comm) == measured


@pytest.mark.nightly
def test_under_torchrun_a_rank_that_raises_ends_all_without_a_crash(tmp_path: Path) -> None:
    process, path = script(tmp_path, fails=True)
    Path(f"{path}.seen").touch()
    said = ended(process)
    assert process.returncode != 0 and "no more of this" in said and "SIGABRT" not in said
    (past,) = History(path).runs()
    assert past.step >= 20 and past.state is RunState.FAILED
