"""What the doctor reports for machines with other drivers, GPUs and packages than this one."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from fsdp_lab.cli import doctor, machine
from fsdp_lab.cli.machine import Finding, State, TorchFacts, gpu_findings, worst
from fsdp_lab.cli.main import main
from fsdp_lab.cluster.nvml import GpuProcess, GpuReport, GpuStatus

TWO_H200 = GpuReport(
    gpus=(
        GpuStatus(uuid="GPU-aa", name="NVIDIA H200", total_bytes=143771 * 2**20, used_bytes=0, capability="9.0"),
        GpuStatus(
            uuid="GPU-bb",
            name="NVIDIA H200",
            total_bytes=143771 * 2**20,
            used_bytes=40960 * 2**20,
            capability="9.0",
            processes=(GpuProcess(pid=4242, name="python3", used_bytes=40000 * 2**20),),
        ),
    ),
    driver="580.95.05",
    driver_cuda="13.0",
    links={"NV18": 1},
)
CUDA = TorchFacts(
    version="2.13.0",
    cuda_build="13.0",
    arches=("sm_80", "sm_90", "compute_120"),
    devices=2,
    gloo=True,
    nccl=True,
    nccl_version=(2, 30, 1),
)


def by_name(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


def test_gpus_their_users_their_driver_and_their_links():
    found = by_name(gpu_findings(TWO_H200, CUDA))
    assert found["GPU 0"].state is State.OK
    assert found["GPU 1"].state is State.WARN
    assert "python3 (pid 4242, 39.1 GiB)" in found["GPU 1"].value
    assert found["driver"] == Finding("driver", "driver 580.95.05 carries CUDA 13.0; torch is built for 13.0")
    assert found["links"].value == "NV18 between 1 pair"


def test_a_driver_too_old_for_the_wheel_names_both_ways_out():
    found = by_name(gpu_findings(dataclasses.replace(TWO_H200, driver_cuda="12.4"), CUDA))["driver"]
    assert found.state is State.FAIL
    assert "580 or newer" in found.advice
    assert "download.pytorch.org/whl/cu126" in found.advice


def test_a_cpu_build_beside_gpus_and_gpus_that_torch_cannot_see():
    assert "CPU build" in by_name(gpu_findings(TWO_H200, TorchFacts(version="2.13.0+cpu")))["driver"].value
    blind = TorchFacts(version="2.13.0", cuda_build="13.0", cuda_error="the driver was not found")
    found = by_name(gpu_findings(TWO_H200, blind))["driver"]
    assert (found.state, found.advice) == (State.FAIL, "the driver was not found")


def test_a_wheel_without_code_for_the_gpu():
    old = TorchFacts(version="2.13.0", cuda_build="13.0", devices=2, arches=("sm_75", "sm_80", "sm_86"))
    assert by_name(gpu_findings(TWO_H200, old))["GPU 0 code"].state is State.FAIL
    with_ptx = TorchFacts(version="2.13.0", cuda_build="13.0", devices=2, arches=("sm_75", "sm_80", "compute_80"))
    assert "GPU 0 code" not in by_name(gpu_findings(TWO_H200, with_ptx))


def test_memory_in_use_by_processes_that_a_container_cannot_see():
    hidden = tuple(dataclasses.replace(gpu, processes=()) for gpu in TWO_H200.gpus)
    found = by_name(gpu_findings(dataclasses.replace(TWO_H200, gpus=hidden), CUDA))["GPU 1"]
    assert found.state is State.WARN
    assert "container" in found.advice


def test_gpus_that_cannot_be_listed_are_a_warning_with_the_reason():
    (found,) = gpu_findings(GpuReport(error="NVML: Driver Not Loaded"), CUDA)
    assert found.state is State.WARN and "Driver Not Loaded" in found.value
    assert gpu_findings(GpuReport(), CUDA) == [Finding("GPUs", "none; ranks run on the CPU")]


def test_little_shared_memory_matters_between_gpus_only(monkeypatch: pytest.MonkeyPatch):
    usage = type("Usage", (), {"total": 64 * 2**20, "free": 64 * 2**20})
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: usage)
    assert machine.shared_memory(gpus=8).state is State.WARN
    assert "--shm-size" in machine.shared_memory(gpus=8).advice
    assert machine.shared_memory(gpus=0).state is State.OK


def test_a_containers_limits_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    (tmp_path / "memory.max").write_text(str(2**30))
    (tmp_path / "memory.current").write_text(str(2**29))
    (tmp_path / "pids.max").write_text("64\n")
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    assert machine.cores() == 0.5
    assert machine.memory().value == "512 MiB free of 1.00 GiB"
    assert [f.state for f in (machine.processor(), machine.memory(), machine.processes())] == [State.WARN] * 3


def test_a_package_that_is_missing_or_of_the_wrong_release():
    assert doctor.package("no-such-package-of-ours>=1").state is State.FAIL
    wrong = doctor.package("pytest<1")
    assert wrong.state is State.FAIL
    assert wrong.advice.endswith("-m pip install 'pytest<1'")
    assert doctor.package("pytest>=7").state is State.OK


def test_torch_that_cannot_be_imported_is_said_not_raised():
    found = doctor.torch(TorchFacts(error="ImportError: libcudart.so.13: cannot open shared object file"))
    assert found[0].state is State.FAIL
    assert "libcudart" in found[0].value


def test_missing_extensions_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor, "missing", lambda prefix: list(servers_needed()))
    monkeypatch.setattr(doctor, "running_servers", list)
    found = doctor.jupyter_servers()[0]
    assert found.state is State.FAIL
    assert "anywidget" in found.advice
    assert "jupyterlab_widgets" in found.advice


def servers_needed():
    from fsdp_lab.cli.kernel import NEEDED

    return NEEDED


def test_the_worst_finding_is_the_state():
    assert worst([]) is State.OK
    assert worst([Finding("a", ""), Finding("b", "", State.FAIL), Finding("c", "", State.WARN)]) is State.FAIL


def test_doctor_on_this_machine(capsys: pytest.CaptureFixture[str]):
    code = main(["doctor", "--json"])
    told = json.loads(capsys.readouterr().out)
    assert code == (1 if told["state"] == "fail" else 0)
    names = {finding["name"] for finding in told["findings"]}
    assert {
        "Python",
        "torch",
        "import torch",
        "GPUs",
        "cores",
        "memory",
        "/dev/shm",
        "open files",
        "ports",
    } <= names | {"GPUs" if "GPU 0" in names else ""}
    assert all(finding["advice"] for finding in told["findings"] if finding["state"] != "ok")


@pytest.mark.parametrize(("version", "state"), [("2.15.1", State.WARN), ("2.13.0", State.OK), ("2.10.0", State.FAIL)])
def test_nobody_is_asked_to_give_up_a_newer_torch(version: str, state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.importlib.metadata, "version", lambda name: version)
    found = doctor.package("torch<2.15,>=2.11")
    assert found.state is state and ("pip install" in str(found)) is (state is State.FAIL)
