"""What a rank computes with: its torch, and on a GPU CUDA, NCCL and the driver."""

from __future__ import annotations

import re
from pathlib import Path

import torch

DRIVER = Path("/proc/driver/nvidia/version")


def software(device: torch.device) -> dict[str, str]:
    """{"torch", "cuda", "nccl", "driver"}: versions; the last three are empty on a CPU, or where they cannot be known."""
    on_gpu = device.type == "cuda"
    return {
        "torch": str(torch.__version__),
        "cuda": str(torch.version.cuda or "") if on_gpu else "",
        "nccl": _nccl() if on_gpu else "",
        "driver": _driver() if on_gpu else "",
    }


def _nccl() -> str:
    try:
        return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    except (AttributeError, RuntimeError):  # a build without it
        return ""


def _driver(file: Path = DRIVER) -> str:
    """As the kernel module says it, on Linux: "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  ..."."""
    try:
        found = re.search(r"NVRM version:.*?\b(\d+\.\d+(?:\.\d+)?)\b", file.read_text())
    except OSError:
        return ""
    return found[1] if found else ""
