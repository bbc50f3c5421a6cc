"""GPUs: which there are, who uses them, whether the driver supports torch's CUDA, and how they are linked."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping

from fsdp_lab.cli.doctor.finding import Finding, State
from fsdp_lab.cli.doctor.torch_probe import TorchFacts
from fsdp_lab.core.formatting import size
from fsdp_lab.core.nvml import GpuReport, GpuStatus

IDLE_BYTES = 600 * 2**20  # a driver keeps some memory on a GPU that nobody uses
OLDEST_DRIVER = {13: "580", 12: "525", 11: "450"}  # Linux drivers that run any minor release of that CUDA
OLDER_BUILD = {12: "cu126"}  # a PyTorch wheel index for drivers of that CUDA


def findings(devices: GpuReport, torch: TorchFacts) -> list[Finding]:
    if devices.error:
        return [Finding("GPUs", f"could not be listed: {devices.error}", State.WARN, "ranks run on the CPU until then")]
    if not devices.gpus:
        return [Finding("GPUs", "none; ranks run on the CPU")]
    found = [in_use(index, gpu) for index, gpu in enumerate(devices.gpus)]
    if torch.version:
        found.append(driver(devices, torch))
        found += [f for index, gpu in enumerate(devices.gpus) if (f := architecture(index, gpu, torch))]
    if devices.links:
        found.append(linked(devices.links))
    return found


def in_use(index: int, gpu: GpuStatus) -> Finding:
    name, value = f"GPU {index}", f"{gpu.name}, {size(gpu.used_bytes)} of {size(gpu.total_bytes)} in use"
    if gpu.processes:
        who = ", ".join(f"{p.name} (pid {p.pid}, {size(p.used_bytes)})" for p in gpu.processes)
        return Finding(name, f"{value}: {who}", State.WARN, "somebody computes there; give `devices` that leave it out")
    if gpu.used_bytes > IDLE_BYTES:
        advice = (
            "used from outside this container, where its processes cannot be seen; give `devices` that leave it out"
        )
        return Finding(name, value, State.WARN, advice)
    return Finding(name, value)


def driver(devices: GpuReport, torch: TorchFacts) -> Finding:
    """The driver against the CUDA that torch was built for; within one major release any minor one runs."""
    carries = f"driver {devices.driver}" + (f" carries CUDA {devices.driver_cuda}" if devices.driver_cuda else "")
    pip = f"{sys.executable} -m pip install --force-reinstall 'torch>=2.11,<2.14'"
    if not torch.cuda_build:
        major = int(devices.driver_cuda.partition(".")[0] or 0)
        index = f" --index-url https://download.pytorch.org/whl/{OLDER_BUILD[major]}" if major in OLDER_BUILD else ""
        return Finding("driver", f"{carries}; torch is a CPU build", State.WARN, f"to use the GPUs: {pip}{index}")
    built, has = int(torch.cuda_build.partition(".")[0]), int(devices.driver_cuda.partition(".")[0] or 0)
    value = f"{carries}; torch is built for {torch.cuda_build}"
    if has and has < built:
        update = f"update the driver to {OLDEST_DRIVER.get(built, 'a newer one')} or newer"
        other = OLDER_BUILD.get(has)
        instead = (
            f", or take torch for CUDA {has}: {pip} --index-url https://download.pytorch.org/whl/{other}"
            if other
            else ""
        )
        return Finding("driver", value, State.FAIL, update + instead)
    if not torch.devices:
        why = torch.cuda_error or "CUDA_VISIBLE_DEVICES may be empty, or the container was started without its GPUs"
        return Finding("driver", f"{value}; torch sees no GPU", State.FAIL, why)
    return Finding("driver", value)


def architecture(index: int, gpu: GpuStatus, torch: TorchFacts) -> Finding | None:
    """A finding where torch was built without this GPU's architecture."""
    if not torch.arches or not re.fullmatch(r"\d+\.\d+", gpu.capability):
        return None
    major, minor = map(int, gpu.capability.split("."))
    built = [(int(n[:-1]), int(n[-1])) for arch in torch.arches if (n := re.sub(r"\D", "", arch))]
    runs = any(m == major and n <= minor for m, n in built)  # binaries run on later minors of their major
    runs = runs or any(arch.startswith("compute_") for arch in torch.arches if built and max(built) <= (major, minor))
    if runs:
        return None
    advice = f"this torch has code for {', '.join(torch.arches)} only; take a build whose list has {gpu.capability}"
    return Finding(f"GPU {index} code", f"compute capability {gpu.capability}", State.FAIL, advice)


def linked(links: Mapping[str, int]) -> Finding:
    """NV18: NVLinks; PIX, PXB: PCIe switches; PHB, NODE, SYS: through the host, which costs bandwidth."""
    value = ", ".join(f"{kind} between {n} pair{'s' if n > 1 else ''}" for kind, n in sorted(links.items()))
    if any(kind in ("SYS", "NODE", "PHB") for kind in links):
        return Finding(
            "links", value, State.WARN, "some pairs talk through the host; hybrid sharding keeps groups on near ones"
        )
    return Finding("links", value)
