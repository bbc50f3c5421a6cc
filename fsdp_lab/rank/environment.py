"""What a rank runs on: software versions, device, memory; and notes on how representative its timings are."""

from __future__ import annotations

import contextlib
import ctypes
import re
from pathlib import Path

import psutil
import torch

from fsdp_lab.rank.rendezvous import RankInfo

DRIVER = Path("/proc/driver/nvidia/version")


def software(device: torch.device) -> dict[str, str]:
    """Versions: {"torch", "cuda", "nccl", "driver"}; the last three are empty on a CPU, or if unknown."""
    on_gpu = device.type == "cuda"
    return {
        "torch": str(torch.__version__),
        "cuda": str(torch.version.cuda or "") if on_gpu else "",
        "nccl": _nccl() if on_gpu else "",
        "driver": _driver() if on_gpu else "",
    }


def device_name(device: torch.device) -> str:
    return str(torch.cuda.get_device_name(device)) if device.type == "cuda" else "CPU"


def fidelity_notes(info: RankInfo, shared_gpu_ranks: int) -> tuple[str, ...]:
    """In what way timings of this rank are not representative."""
    if info.device.type == "cpu":
        return ("CPU and Gloo: the shapes are right, the times are not a GPU's.",)
    if shared_gpu_ranks > 1:
        return (f"One GPU shared by {shared_gpu_ranks} ranks over Gloo: memory is right, times are not.",)
    if info.world_size > 1:
        return (
            "Over NCCL exposed communication is measured in ledger steps and repeated; the timeline shows no waits.",
        )
    return ()


def held_bytes(device: torch.device) -> int:
    """Memory of this process: reserved on its GPU, or resident on the host."""
    if device.type == "cuda":
        return int(torch.cuda.memory_reserved(device))
    return int(psutil.Process().memory_info().rss)


def return_memory(device: torch.device) -> None:
    """Make the allocators return cached memory to the system."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    with contextlib.suppress(OSError, AttributeError):  # a C library other than glibc
        ctypes.CDLL(None).malloc_trim(0)


def _nccl() -> str:
    try:
        return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    except (AttributeError, RuntimeError):  # a build without it
        return ""


def _driver(file: Path = DRIVER) -> str:
    """From the kernel module, on Linux: "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  ..."."""
    try:
        found = re.search(r"NVRM version:.*?\b(\d+\.\d+(?:\.\d+)?)\b", file.read_text())
    except OSError:
        return ""
    return found[1] if found else ""
