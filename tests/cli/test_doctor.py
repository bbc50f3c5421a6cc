"""What the doctor reports for machines with other drivers, GPUs and packages than this one."""

import dataclasses
import json
from pathlib import Path

import pytest

from fsdp_lab.cli import doctor
from fsdp_lab.cli.doctor import State, TorchFacts, gpu_findings
from fsdp_lab.cli.jupyter import NEEDED, Server
from fsdp_lab.cli.main import main
from fsdp_lab.cluster.nvml import GpuProcess, GpuReport, GpuStatus

IDLE = GpuStatus(uuid="GPU-aa", name="NVIDIA H200", total_bytes=143771 * 2**20, used_bytes=0)
SOMEBODY = GpuProcess(pid=4242, name="python3", used_bytes=40000 * 2**20)
USED = dataclasses.replace(IDLE, uuid="GPU-bb", used_bytes=40960 * 2**20, processes=(SOMEBODY,))
TWO_H200 = GpuReport(gpus=(IDLE, USED), driver="580.95.05", driver_cuda="13.0")
CUDA = TorchFacts(version="2.13.0", cuda_build="13.0", devices=2)


BLIND = TorchFacts(version="2.13.0", cuda_build="13.0", cuda_error="the driver was not found")
HIDDEN = dataclasses.replace(TWO_H200, gpus=tuple(dataclasses.replace(gpu, processes=()) for gpu in TWO_H200.gpus))


@pytest.mark.parametrize(
    ("gpus", "torch", "name", "state", "said"),
    [
        (TWO_H200, CUDA, "GPU 0", State.OK, "H200"),
        (TWO_H200, CUDA, "GPU 1", State.WARN, "python3 (pid 4242, 39.1 GiB)"),
        (TWO_H200, CUDA, "driver", State.OK, "driver 580.95.05 carries CUDA 13.0; torch is built for 13.0"),
        (dataclasses.replace(TWO_H200, driver_cuda="12.4"), CUDA, "driver", State.FAIL, "580 or newer"),
        (dataclasses.replace(TWO_H200, driver_cuda="12.4"), CUDA, "driver", State.FAIL, "download.pytorch.org/whl/cu126"),
        (TWO_H200, TorchFacts(version="2.13.0+cpu"), "driver", State.WARN, "CPU build"),
        (TWO_H200, BLIND, "driver", State.FAIL, "the driver was not found"),
        (HIDDEN, CUDA, "GPU 1", State.WARN, "`devices`"),
        (GpuReport(error="NVML: Driver Not Loaded"), CUDA, "GPUs", State.WARN, "Driver Not Loaded"),
        (GpuReport(), CUDA, "GPUs", State.OK, "none; ranks run on the CPU"),
    ],
)  # fmt: skip
def test_gpus_their_users_and_their_driver(gpus: GpuReport, torch: TorchFacts, name: str, state: State, said: str):
    (found,) = (f for f in gpu_findings(gpus, torch) if f.name == name)
    assert found.state is state and said in f"{found.value} {found.advice}"


def test_shared_memory_matters_between_gpus_only_and_a_containers_limits_count(monkeypatch, tmp_path: Path):
    usage = type("Usage", (), {"total": 64 * 2**20, "free": 64 * 2**20})
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: usage)
    assert doctor.shared_memory(gpus=8).state is State.WARN and "--shm-size" in doctor.shared_memory(gpus=8).advice
    assert doctor.shared_memory(gpus=0).state is State.OK
    (tmp_path / "memory.max").write_text(str(2**30))
    (tmp_path / "memory.current").write_text(str(2**29))
    monkeypatch.setattr(doctor, "CGROUP", tmp_path)
    found = doctor.memory()
    assert found.value == "512 MiB free of 1.00 GiB" and found.state is State.WARN


def test_a_missing_package_or_one_of_another_release_is_named_and_a_newer_torch_stays(monkeypatch: pytest.MonkeyPatch):
    assert doctor.package("no-such-package-of-ours>=1").state is State.FAIL
    wrong = doctor.package("pytest<1")
    assert wrong.state is State.FAIL and wrong.advice.endswith("-m pip install 'pytest<1'")
    assert doctor.package("pytest>=7").state is State.OK
    for version, state in (("2.15.1", State.WARN), ("2.13.0", State.OK), ("2.10.0", State.FAIL)):
        monkeypatch.setattr(doctor.importlib.metadata, "version", lambda name, version=version: version)
        found = doctor.package("torch<2.15,>=2.11")
        assert found.state is state and ("pip install" in str(found)) is (state is State.FAIL)


def test_extensions_missing_here_or_where_a_server_runs_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    server = Server(pid=1, port=8890, python="/opt/jupyter/bin/python", prefix=tmp_path)
    monkeypatch.setattr(doctor, "missing", lambda prefix: list(NEEDED.values()))
    monkeypatch.setattr(doctor, "running_servers", lambda: [server])
    here, there = doctor.jupyter_servers()
    assert here.state is State.FAIL and "anywidget" in here.advice and "jupyterlab_widgets" in here.advice
    assert there.state is State.WARN and there.name == "server :8890"
    assert "/opt/jupyter/bin/python -m pip install 'anywidget>=" in there.advice


@pytest.mark.slow
def test_doctor_on_this_machine(capsys: pytest.CaptureFixture[str]):
    code = main(["doctor", "--json"])
    told = json.loads(capsys.readouterr().out)
    assert code == (1 if told["state"] == "fail" else 0)
    names = {finding["name"] for finding in told["findings"]}
    assert {"Python", "torch", "import torch", "memory", "disk", "/dev/shm", "ports"} < names
    assert {"GPUs", "GPU 0"} & names
    assert all(finding["advice"] for finding in told["findings"] if finding["state"] != "ok")
