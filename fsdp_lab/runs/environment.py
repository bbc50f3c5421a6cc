"""The machine that a run was trained on: `fingerprint` (hardware and versions) and `calibrate` (measured speed).

A fingerprint is shown to other people, so it has no user names, no paths and no environment variables.
"""

from __future__ import annotations

import functools
import importlib.metadata
import platform
import re
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from fsdp_lab.cluster.cluster import Cluster
from fsdp_lab.cluster.placement import usable_cores
from fsdp_lab.core.spec import Spec
from fsdp_lab.planner.calibration import Calibration, references
from fsdp_lab.planner.shapes import shape_for

PACKAGES = ("torch", "transformers", "fsdp-lab")
CPUINFO = Path("/proc/cpuinfo")
PASSES = 6  # measurements of each figure


def fingerprint(ranks: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """Hardware and software of this machine, and of its ranks where their `Session.status` is given.

    Returns: plain scalars and lists, by "host", "cpu", "cores" (usable ones), "memory_bytes", "system", "python",
    "torch", "transformers", "fsdp_lab", "devices" (a name for each rank), "cuda", "nccl", "driver" (empty on a CPU).
    """
    software = dict(ranks[0].get("software", {})) if ranks else {}
    return {
        **dict(_machine()),
        "devices": [str(r.get("device_name", r.get("device", ""))) for r in ranks],
        "cuda": "",
        "nccl": "",
        "driver": "",
        **{name: version for name, version in software.items() if version},
    }


@functools.cache
def _machine() -> tuple[tuple[str, Any], ...]:
    """The items that are constant in this process."""
    return (
        ("host", socket.gethostname()),
        ("cpu", cpu_model()),
        ("cores", usable_cores()),
        ("memory_bytes", int(psutil.virtual_memory().total)),
        ("system", platform.platform()),
        ("python", platform.python_version()),
        *((name.replace("-", "_"), _version(name)) for name in PACKAGES),
    )


def cpu_model(file: Path = CPUINFO) -> str:
    """The processor's model name; its architecture where that is unknown."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", file.read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1].strip() if found else platform.processor() or platform.machine()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def in_words(environment: Mapping[str, Any]) -> str:
    """A fingerprint in one line: "box: 2 x CPU (AMD EPYC 7B13, 2 cores), torch 2.13.0"."""
    if not environment:
        return ""
    devices = [str(name) for name in environment.get("devices", ())]
    counted = ", ".join(f"{devices.count(name)} x {name}" for name in dict.fromkeys(devices)) or "no ranks"
    if set(devices) <= {"CPU", "cpu"}:
        counted += f" ({environment.get('cpu', '')}, {environment.get('cores', '?')} cores)"
    more = "".join(f", {k} {environment[k]}" for k in ("cuda", "nccl", "driver") if environment.get(k))
    return f"{environment.get('host', '')}: {counted}, torch {environment.get('torch', '')}{more}"


def calibrate(cluster: Cluster, beside: Sequence[Spec] = (), *, passes: int = PASSES) -> Calibration:
    """Measures all ranks of an idle cluster at once; see `Lab.calibrate`."""
    begun_s, devices = time.monotonic(), cluster.placement.devices
    on_gpu = devices[0] != "cpu"
    dtypes = ("fp32", "bf16", "fp16") if on_gpu else ("fp32", "bf16")  # matrix products in fp16 are not useful on a CPU
    timed = references(len(devices), dtypes, devices)
    shapes = tuple(replace(shape_for(r.spec.workload.model, r.spec.strategy.wrap), tapes={}) for r in timed)
    specs = [spec.to_dict() for spec in (*(r.spec for r in timed), *beside)]
    by_rank = cluster.call("calibrate", specs=specs, dtypes=dtypes, passes=passes)
    name = str(cluster.call("status")[0]["device_name"])
    return Calibration.of(by_rank, unix_s=time.time(), seconds=time.monotonic() - begun_s, name=name, devices=devices,
                          shapes=shapes)  # fmt: skip
