"""GPUs: which there are, who uses them, whether the driver carries torch's CUDA, and how they are linked.

All by nvidia-smi, which every driver brings, and which makes no CUDA context.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from dataclasses import dataclass, field
from itertools import combinations

from fsdp_lab.cli.doctor.finding import Finding, State, output_of, size
from fsdp_lab.cli.doctor.torch_probe import TorchFacts

MIB = 2**20
IDLE_BYTES = 600 * MIB  # a driver keeps some memory on a GPU that nobody uses
OLDEST_DRIVER = {13: "580", 12: "525", 11: "450"}  # Linux drivers that run any minor release of that CUDA
OLDER_BUILD = {12: "cu126"}  # a PyTorch wheel index for drivers of that CUDA


@dataclass(frozen=True, kw_only=True)
class Process:
    pid: int
    name: str
    used_bytes: int


@dataclass(frozen=True, kw_only=True)
class Gpu:
    index: int
    name: str
    total_bytes: int
    used_bytes: int
    capability: str  # "9.0"
    processes: tuple[Process, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Devices:
    """What nvidia-smi tells; all empty where it is missing or says nothing in time."""

    gpus: tuple[Gpu, ...] = ()
    driver: str = ""
    driver_cuda: str = ""  # the newest CUDA that the driver carries: "13.0"
    links: dict[str, int] = field(default_factory=dict)  # kind of link -> pairs of GPUs


def read() -> Devices:
    fields = "index,uuid,name,memory.total,memory.used,compute_cap,driver_version"
    rows = table(output_of(["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]))
    if not rows:
        return Devices()
    processes: dict[str, list[Process]] = {}
    apps = ["nvidia-smi", "--query-compute-apps=gpu_uuid,pid,process_name,used_memory", "--format=csv,noheader,nounits"]
    for uuid, pid, name, used in (row for row in table(output_of(apps)) if len(row) == 4):
        processes.setdefault(uuid, []).append(Process(pid=number(pid), name=name, used_bytes=number(used) * MIB))
    gpus = tuple(
        Gpu(
            index=number(index),
            name=name,
            total_bytes=number(total) * MIB,
            used_bytes=number(used) * MIB,
            capability=capability,
            processes=tuple(processes.get(uuid, ())),
        )
        for index, uuid, name, total, used, capability, _ in (row for row in rows if len(row) == 7)
    )
    banner = re.search(r"CUDA Version:\s*(\d+\.\d+)", output_of(["nvidia-smi"]) or "")
    links = matrix(output_of(["nvidia-smi", "topo", "-m"]) or "") if len(gpus) > 1 else {}
    return Devices(gpus=gpus, driver=rows[0][-1], driver_cuda=banner[1] if banner else "", links=links)


def table(text: str | None) -> list[list[str]]:
    return [[cell.strip() for cell in line.split(",")] for line in (text or "").splitlines() if line.strip()]


def number(text: str) -> int:
    """nvidia-smi writes "[N/A]" where a GPU cannot tell (unified memory, MIG)."""
    return int(text) if text.isdigit() else 0


def matrix(text: str) -> dict[str, int]:
    """Pairs of GPUs by kind of link, from `nvidia-smi topo -m`: {"NV18": 1}."""
    lines = [re.sub(r"\x1b\[\d*m", "", line).split() for line in text.splitlines()]
    rows = [line for line in lines if line and re.fullmatch(r"GPU\d+", line[0]) and "X" in line]
    return dict(Counter(rows[i][j + 1] for i, j in combinations(range(len(rows)), 2) if len(rows[i]) > j + 1))


# -- findings --------------------------------------------------------------------------------------------------------


def findings(devices: Devices, torch: TorchFacts) -> list[Finding]:
    if not devices.gpus:
        return [Finding("GPUs", "none that nvidia-smi knows; ranks run on the CPU")]
    found = [in_use(gpu) for gpu in devices.gpus]
    if torch.version:
        found.append(driver(devices, torch))
        found += [f for gpu in devices.gpus if (f := architecture(gpu, torch))]
    if devices.links:
        found.append(linked(devices.links))
    return found


def in_use(gpu: Gpu) -> Finding:
    name, value = f"GPU {gpu.index}", f"{gpu.name}, {size(gpu.used_bytes)} of {size(gpu.total_bytes)} in use"
    if gpu.processes:
        who = ", ".join(f"{p.name} (pid {p.pid}, {size(p.used_bytes)})" for p in gpu.processes)
        return Finding(name, f"{value}: {who}", State.WARN, "somebody computes there; give `devices` that leave it out")
    if gpu.used_bytes > IDLE_BYTES:
        advice = (
            "used from outside this container, where its processes cannot be seen; give `devices` that leave it out"
        )
        return Finding(name, value, State.WARN, advice)
    return Finding(name, value)


def driver(devices: Devices, torch: TorchFacts) -> Finding:
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


def architecture(gpu: Gpu, torch: TorchFacts) -> Finding | None:
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
    return Finding(f"GPU {gpu.index} code", f"compute capability {gpu.capability}", State.FAIL, advice)


def linked(links: dict[str, int]) -> Finding:
    """NV18: NVLinks; PIX, PXB: PCIe switches; PHB, NODE, SYS: through the host, which costs bandwidth."""
    value = ", ".join(f"{kind} between {n} pair{'s' if n > 1 else ''}" for kind, n in sorted(links.items()))
    if any(kind in ("SYS", "NODE", "PHB") for kind in links):
        return Finding(
            "links", value, State.WARN, "some pairs talk through the host; hybrid sharding keeps groups on near ones"
        )
    return Finding("links", value)
