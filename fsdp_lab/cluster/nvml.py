"""NVIDIA GPUs as their driver reports them through NVML (`pynvml`, of the package nvidia-ml-py).

NVML creates no CUDA context, but a driver that hangs also hangs its caller. `query` therefore runs this file in a separate
process, with a timeout. It imports the standard library and `pynvml`, nothing of fsdp_lab."""

import contextlib
import ctypes
import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

TIMEOUT_S = 20.0
UNSEEN_USE_FRACTION = 0.05  # of a GPU's memory, used by no visible process: then it is in use outside this container


@dataclass(frozen=True, kw_only=True)
class GpuProcess:
    """A process that computes on a GPU."""

    pid: int
    name: str
    used_bytes: int  # of the GPU's memory; 0 if the driver does not report it
    owner: str = ""  # user name; "" if it is not visible from here

    def __str__(self) -> str:
        who = f", of {self.owner}" if self.owner else ""
        return f"process {self.pid} ({self.name}{who}, {self.used_bytes / 2**30:.1f} GiB)"


@dataclass(frozen=True, kw_only=True)
class GpuStatus:
    """One GPU of the machine, in CUDA_VISIBLE_DEVICES or not."""

    uuid: str
    name: str
    total_bytes: int  # 0 if the driver does not report it (unified memory)
    used_bytes: int  # without the driver's own reservation
    processes: tuple[GpuProcess, ...] = ()
    device: str = ""  # where torch can see it, "cuda:0", as torch counts: after CUDA_VISIBLE_DEVICES, in PCI order

    @property
    def busy(self) -> str:
        """Which processes use it, as a sentence; "" if none do."""
        if self.processes:
            return f"{self.device} ({self.name}) is in use by " + ", ".join(map(str, self.processes))
        if self.used_bytes > UNSEEN_USE_FRACTION * self.total_bytes:
            used = f"{self.used_bytes / 2**30:.1f} of {self.total_bytes / 2**30:.0f} GiB"
            return f"{self.device} ({self.name}) is in use: {used}, by a process that cannot be seen from here"
        return ""


@dataclass(frozen=True, kw_only=True)
class GpuReport:
    """The GPUs of a machine; empty without an NVIDIA driver."""

    gpus: tuple[GpuStatus, ...] = ()  # in PCI order
    driver: str = ""  # "580.95.05"
    driver_cuda: str = ""  # the newest CUDA that the driver supports: "13.0"
    error: str = ""  # why the GPUs could not be listed


def query(timeout_s: float = TIMEOUT_S) -> GpuReport:
    """The report of this machine. Never raises."""
    if not has_driver():
        return GpuReport()
    command, null = [sys.executable, "-P", __file__], subprocess.DEVNULL
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, stdin=null)
    except subprocess.TimeoutExpired:
        return GpuReport(error=f"the NVIDIA driver did not answer within {timeout_s:g} s")
    if done.returncode:
        return GpuReport(error=(done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1])
    fields: dict[str, Any] = json.loads(done.stdout)
    gpus = ({**gpu, "processes": tuple(GpuProcess(**p) for p in gpu["processes"])} for gpu in fields["gpus"])
    return GpuReport(**{**fields, "gpus": tuple(GpuStatus(**gpu) for gpu in gpus)})


def has_driver() -> bool:
    """Whether the driver's library is installed. Without it no GPU can be used."""
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return False
    return True


def read() -> GpuReport:
    """As `query`, but in this process, which has to have a driver, and ends then."""
    try:
        import pynvml
    except ImportError:
        return GpuReport(error=f"nvidia-ml-py is not installed: {sys.executable} -m pip install nvidia-ml-py")
    try:
        pynvml.nvmlInit()
        return _Reader(pynvml).report()
    except pynvml.NVMLError as e:
        return GpuReport(error=f"NVML: {e}")


class _Reader:
    """Reads a report through NVML. What a GPU or an old driver does not support is left empty."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml

    def report(self) -> GpuReport:
        nvml = self._nvml
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        cuda = self._optional(nvml.nvmlSystemGetCudaDriverVersion, default=0)  # 13000
        return GpuReport(
            gpus=tuple(self._gpu(handle) for handle in handles),
            driver=self._optional(nvml.nvmlSystemGetDriverVersion, default=""),
            driver_cuda=f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else "",
        )

    def _optional(self, call: Callable[..., Any], *args: Any, default: Any = None) -> Any:
        try:
            return call(*args)
        except self._nvml.NVMLError:
            return default

    def _gpu(self, handle: Any) -> GpuStatus:
        nvml = self._nvml
        memory = self._optional(nvml.nvmlDeviceGetMemoryInfo, handle, nvml.nvmlMemory_v2)
        processes = self._optional(nvml.nvmlDeviceGetComputeRunningProcesses, handle, default=())
        return GpuStatus(
            uuid=nvml.nvmlDeviceGetUUID(handle),
            name=nvml.nvmlDeviceGetName(handle),
            total_bytes=int(memory.total) if memory else 0,
            used_bytes=int(memory.used) if memory else 0,
            processes=tuple(self._process(p.pid, p.usedGpuMemory) for p in processes),
        )

    def _process(self, pid: int, used_bytes: int | None) -> GpuProcess:
        name = PurePath(self._optional(self._nvml.nvmlSystemGetProcessName, pid, default="")).name
        owner, folder = "", Path("/proc", str(pid))
        with contextlib.suppress(OSError, KeyError):  # of another container, or ended
            name = name or (folder / "comm").read_text(encoding="utf-8").strip()
            owner = folder.owner()
        return GpuProcess(pid=pid, name=name or "unknown", used_bytes=used_bytes or 0, owner=owner)


if __name__ == "__main__":
    print(json.dumps(dataclasses.asdict(read())))
