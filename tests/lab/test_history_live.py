"""The history of a lab's runs, on two ranks."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from fsdp_lab.base.errors import ArgumentError
from fsdp_lab.lab import Lab
from fsdp_lab.rank.measure import _driver, software
from fsdp_lab.runs import RunState
from fsdp_lab.runs.history import History
from fsdp_lab.runs.view import cpu_model, describe_environment, fingerprint
from tests.lab.test_lab import going
from tests.waiting import until


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
    software = {"torch": "2.13.0+cu130", "cuda": "13.0", "nccl": "2.30.3", "driver": "580.65"}
    gpu = fingerprint([{"device_name": "NVIDIA H100", "software": software}] * 4)
    said = f"{gpu['host']}: 4 x NVIDIA H100, torch 2.13.0+cu130, cuda 13.0, nccl 2.30.3, driver 580.65"
    assert describe_environment(gpu) == said


def test_what_is_wrong_with_the_history_is_said_in_the_status_and_stops_no_run(lab: Lab, tmp_path: Path):
    assert History.of(False) is None
    with pytest.raises(
        ArgumentError, match="history: 7 is refused; give True, False, the path of a file, or a History"
    ):
        Lab(1, history=7)  # type: ignore[arg-type]
    (tmp_path / "file").write_text("no folder")
    before, lab.history = lab.history, History(tmp_path / "file" / "runs.sqlite3")
    try:
        run = lab.run(steps=8).wait(20)
        assert run.state is RunState.FINISHED
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
