"""NVML, read in a process of its own: a module `pynvml` of the test stands in for NVIDIA's driver."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from fsdp_lab.cluster import nvml
from fsdp_lab.cluster.nvml import GpuProcess, GpuReport, GpuStatus

GIB = 2**30

# Two H200, the second in use by this test's process and by one that cannot be seen. The functions take and
# return what those of nvidia-ml-py 13 do.
PYNVML = """
import os
from types import SimpleNamespace

class NVMLError(Exception): pass
class NVMLError_NotSupported(NVMLError): pass

nvmlMemory_v2 = 0x02000028

def nvmlInit(): pass
def nvmlDeviceGetCount(): return 2
def nvmlDeviceGetHandleByIndex(i): return i
def nvmlSystemGetDriverVersion(): return "580.95.05"
def nvmlSystemGetCudaDriverVersion(): return 13000
def nvmlDeviceGetUUID(i): return ("GPU-aa", "GPU-bb")[i]
def nvmlDeviceGetName(i): return "NVIDIA H200"
def nvmlDeviceGetMemoryInfo(i, version=None): return SimpleNamespace(total=140 * 2**30, used=(0, 41)[i] * 2**30)
def nvmlDeviceGetComputeRunningProcesses(i):
    return [SimpleNamespace(pid=os.getppid(), usedGpuMemory=40 * 2**30), SimpleNamespace(pid=2**22, usedGpuMemory=None)] * i
def nvmlSystemGetProcessName(pid):
    if pid == 2**22:
        raise NVMLError_NotSupported("Not Found")
    return "/opt/conda/bin/python"
"""
REFUSED = "raise NVMLError_NotSupported('Not Supported')"


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    module = tmp_path / "pynvml.py"
    module.write_text(PYNVML)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]))
    monkeypatch.setattr(nvml, "has_driver", lambda: True)
    return module


def test_the_stand_in_has_the_names_and_values_of_the_real_module():
    import pynvml

    fake: dict[str, object] = {}
    exec(PYNVML, fake)
    names = [name for name in fake if name.lower().startswith("nvml")]
    assert all(hasattr(pynvml, name) for name in names) and pynvml.nvmlMemory_v2 == fake["nvmlMemory_v2"]


def test_gpus_with_their_users_and_their_driver_and_without_facts_that_they_do_not_have(fake: Path):
    me = GpuProcess(pid=os.getpid(), name="python", used_bytes=40 * GIB, owner=Path("/proc/self").owner())
    unseen = GpuProcess(pid=2**22, name="unknown", used_bytes=0)
    idle = GpuStatus(uuid="GPU-aa", name="NVIDIA H200", total_bytes=140 * GIB, used_bytes=0)
    used = replace(idle, uuid="GPU-bb", used_bytes=41 * GIB, processes=(me, unseen))
    assert nvml.query() == GpuReport(gpus=(idle, used), driver="580.95.05", driver_cuda="13.0")
    text = PYNVML.replace("return SimpleNamespace(total=140 * 2**30, used=(0, 41)[i] * 2**30)", REFUSED)
    fake.write_text(text.replace("return 13000", REFUSED))
    found = nvml.query()
    assert [gpu.total_bytes for gpu in found.gpus] == [0, 0] and (found.driver_cuda, found.error) == ("", "")


def test_a_driver_that_fails_crashes_or_hangs_and_a_missing_package_are_errors(fake: Path):
    fake.write_text(PYNVML.replace("def nvmlInit(): pass", "def nvmlInit(): raise NVMLError('Driver Not Loaded')"))
    assert nvml.query() == GpuReport(error="NVML: Driver Not Loaded")
    fake.write_text(PYNVML.replace("return i\n", "raise NVMLError('GPU is lost')\n", 1))
    assert nvml.query() == GpuReport(error="NVML: GPU is lost")
    fake.write_text("import os; os._exit(9)")
    assert nvml.query() == GpuReport(error="exit code 9")
    fake.write_text("import signal; signal.pause()")
    assert nvml.query(timeout_s=0.5) == GpuReport(error="the NVIDIA driver did not answer within 0.5 s")
    fake.write_text("raise ImportError")
    assert nvml.query().error == f"nvidia-ml-py is not installed: {sys.executable} -m pip install nvidia-ml-py"


def test_without_a_driver_nothing_is_asked(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(nvml, "has_driver", lambda: False)
    monkeypatch.setattr(subprocess, "run", None)
    assert nvml.query() == GpuReport()


@pytest.mark.gpu
def test_on_this_machine():
    """The real pynvml and the real driver."""
    if not nvml.has_driver():
        pytest.skip("no NVIDIA driver here")
    found = nvml.query()
    assert not found.error and found.driver and all(gpu.total_bytes >= gpu.used_bytes for gpu in found.gpus)
