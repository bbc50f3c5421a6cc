"""The history of real runs: on two ranks, and after the death of the kernel that drove them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from fsdp_lab.base.errors import ArgumentError
from fsdp_lab.base.events import StepEvent
from fsdp_lab.lab import Lab
from fsdp_lab.runs import RunState
from fsdp_lab.runs.history import History
from fsdp_lab.runs.view import describe_environment, fingerprint
from tests.lab.telling import plain
from tests.lab.test_lab import going, until


def test_a_lab_keeps_its_runs_and_lists_those_of_others(lab: Lab):
    assert lab.history is not None and lab.history.path == Path(os.environ["FSDP_LAB_HISTORY"])
    run = lab.run(steps=12, sharding="shard_grad_op").wait(20)
    past = lab.runs()[run.id]
    assert past.events.since()[0] == run.events.since()[0] and past.summary() == run.summary()
    assert past.table().rows == run.table().rows and list(past.switches) == run.switches
    assert past.state is RunState.FINISHED and past.environment == run.environment
    now = going(lab)
    assert lab.runs()[0].id == now.id and lab.runs(state="running")[0].id == now.id
    now.apply(precision="bf16").wait(10)
    now.stop(10)
    assert lab.runs()[0].spec.strategy.precision == "bf16" and len(lab.runs()[0].switches) == 2
    assert run.id in [r.id for r in History().runs(sharding="shard_grad_op")], "without a lab too"
    assert lab.runs()[0].state is RunState.STOPPED


def test_the_environment_says_what_the_ranks_are_and_nothing_private(lab: Lab):
    run = lab.run(steps=1).wait(20)
    found = run.environment
    assert found["devices"] == ["cpu", "cpu"] and found["torch"] and found["python"] and found["cores"] >= 1
    assert json.loads(json.dumps(found)) == found
    told = json.dumps(found)
    private = {os.environ.get("USER", ""), str(Path.home()), os.environ["FSDP_LAB_HISTORY"]} - {"", "/", "root"}
    assert not [word for word in private if word in told]
    gpu = fingerprint([{"device_name": "NVIDIA H100", "software": {"torch": "2.13.0+cu130", "cuda": "13.0", "nccl": "2.30.3",
                                                                   "driver": "580.65"}}] * 4)  # fmt: skip
    assert gpu["torch"] == "2.13.0+cu130" and gpu["devices"] == ["NVIDIA H100"] * 4
    assert (
        describe_environment(gpu)
        == f"{gpu['host']}: 4 x NVIDIA H100, torch 2.13.0+cu130, cuda 13.0, nccl 2.30.3, driver 580.65"
    )


def test_what_is_wrong_with_the_history_is_said_in_the_status_and_stops_no_run(lab: Lab, tmp_path: Path):
    (tmp_path / "file").write_text("no folder")
    before, lab.history = lab.history, History(tmp_path / "file" / "runs.sqlite3")
    try:
        run = lab.run(steps=8).wait(20)
        assert run.state is RunState.FINISHED
        until(lambda: "its folder is a file" in repr(lab.status()))
    finally:
        lab.history = before


@pytest.mark.parametrize(("history", "kept"), [(False, "history=False"), (7, None)])
def test_a_lab_without_a_history_and_a_wrong_one(history: object, kept: str | None):
    if kept is None:
        with pytest.raises(
            ArgumentError, match="history: 7 is refused; give True, False, the path of a file, or a History"
        ):
            Lab(1, history=history)  # type: ignore[arg-type]
    else:
        assert History.of(history) is None  # type: ignore[arg-type]


# A kernel that trains on real ranks, and keeps a record of its own of what it was told, and when.
KERNEL = """
    import json, sys, time
    from fsdp_lab.lab import Lab

    if __name__ == "__main__":
        lab = Lab(2, progress=False, history=sys.argv[1])
        run = lab.run(model="gpt2-1m", micro_batch=1, seq_len=64)
        cursor = 0
        with open(sys.argv[2], "w") as record:
            while True:
                new, cursor = run.events.since(cursor)
                for event in new:
                    print(json.dumps([time.time(), event.to_dict()]), file=record)
                record.flush()
                time.sleep(0.02)
"""


@pytest.mark.slow
def test_the_death_of_a_kernel_loses_no_more_than_the_last_moment(tmp_path: Path):
    path, record = tmp_path / "runs.sqlite3", tmp_path / "record"
    kernel = subprocess.Popen([sys.executable, "-c", textwrap.dedent(KERNEL), str(path), str(record)])
    engines: list[psutil.Process] = []
    try:
        until(lambda: (record.exists() and record.read_text().count("\n") > 60) or kernel.poll() is not None, 90)
        assert kernel.poll() is None
        engines = psutil.Process(kernel.pid).children(recursive=True)
    finally:
        killed_s = time.time()
        kernel.send_signal(signal.SIGKILL)
        kernel.wait(10)
    lines = [line for line in record.read_text().splitlines(keepends=True) if line.endswith("\n")]
    told = [(at_s, StepEvent.from_dict(d)) for at_s, d in map(json.loads, lines)]
    [past] = History(path).runs()
    found = past.events.since()[0]
    assert past.state is RunState.LOST and past.spec.workload.model == "gpt2-1m"
    assert past.environment["devices"] == ["CPU"] * 2
    assert plain(found) == plain([e for _, e in told[: len(found)]]), "what is there is there bit for bit"
    lost = [killed_s - at_s for at_s, _ in told[len(found) :]]
    assert len(found) > 20 and max(lost, default=0) < 2.0, "0.4 s between two writes, and what a busy machine adds"
    assert past.summary()["losses"] and past.timeline().lanes
    until(lambda: not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in engines), 15)
