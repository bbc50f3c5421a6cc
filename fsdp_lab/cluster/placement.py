"""Which rank computes on which device, with notes on how representative the times are.

`place` decides, `probe` collects facts; they are separate so that every case can be tested without a GPU. The kernel uses
NVML and torch's version file: it neither imports torch nor creates a CUDA context, so only the ranks use the GPUs."""

import dataclasses
import os
import re
import socket
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

from fsdp_lab.base.errors import SpecError
from fsdp_lab.base.process import usable_cores
from fsdp_lab.cluster import nvml
from fsdp_lab.cluster.nvml import GpuReport, GpuStatus

SHARED_GPU_BYTES_FRACTION = 0.92  # of a shared GPU, over all its ranks; the rest is for CUDA contexts


@dataclass(frozen=True, kw_only=True)
class Host:
    """The cores and GPUs of one machine."""

    name: str
    cores: int
    gpus: tuple[GpuStatus, ...] = ()  # that torch can see, with the processes that are not ours
    torch_cuda: str | None = None  # the CUDA version that torch was built for; None: a CPU build
    note: str = ""  # why GPUs could not be listed


@dataclass(frozen=True, kw_only=True)
class Seat:
    """Where one rank computes."""

    rank: int
    host: str
    device: str
    threads: int
    memory_cap: float | None = None  # fraction of the GPU's memory; None: all of it
    shared_gpu_ranks: int = 1  # ranks on the fullest GPU of all: above 1, none uses NCCL

    @property
    def arguments(self) -> dict[str, Any]:
        """Those of the rank's `Session`."""
        return {name: value for name, value in asdict(self).items() if name != "host"}


@dataclass(frozen=True, kw_only=True)
class Placement:
    seats: tuple[Seat, ...]
    notes: tuple[str, ...] = ()  # how representative the times are; shown on every panel

    @property
    def devices(self) -> tuple[str, ...]:
        return tuple(seat.device for seat in self.seats)

    @classmethod
    def from_dict(cls, d: Mapping[str, Any]) -> Self:
        return cls(seats=tuple(Seat(**seat) for seat in d["seats"]), notes=tuple(d["notes"]))


def probe(
    query: Callable[[], GpuReport] = nvml.query,
    *,
    env: Mapping[str, str] = os.environ,
    ours: frozenset[int] = frozenset(),
) -> Host:
    """Returns the cores and GPUs of this machine. `ours`: pids of our own processes, which do not make a GPU busy."""
    name, cores, report = socket.gethostname(), usable_cores(), query()
    try:
        if report.error:
            raise OSError(report.error)
        gpus = _visible([_device(i, gpu, ours) for i, gpu in enumerate(report.gpus)], env.get("CUDA_VISIBLE_DEVICES"))
    except (OSError, ValueError) as e:
        return Host(name=name, cores=cores, note=f"the GPUs of {name} could not be listed: {e}")
    return Host(name=name, cores=cores, gpus=gpus, torch_cuda=torch_cuda_version() if report.gpus else None)


def _device(index: int, gpu: GpuStatus, ours: frozenset[int]) -> GpuStatus:
    """The GPU, named as if all were visible."""
    used_bytes = max(0, gpu.used_bytes - sum(process.used_bytes for process in gpu.processes if process.pid in ours))
    others = tuple(process for process in gpu.processes if process.pid not in ours)
    return dataclasses.replace(gpu, device=f"cuda:{index}", used_bytes=used_bytes, processes=others)


def _visible(gpus: Sequence[GpuStatus], visible: str | None) -> tuple[GpuStatus, ...]:
    """Returns the GPUs that CUDA_VISIBLE_DEVICES leaves, renamed as torch counts them: to the first bad entry."""
    if visible is None:
        return tuple(gpus)
    chosen: list[GpuStatus] = []
    for entry in (e.strip() for e in visible.split(",")):
        if entry.isdigit() and int(entry) < len(gpus):
            chosen.append(gpus[int(entry)])
        elif entry.startswith("GPU-") and (match := [g for g in gpus if g.uuid.startswith(entry)]):
            chosen.append(match[0])
        elif entry.startswith("MIG-"):
            named = f"CUDA_VISIBLE_DEVICES names a MIG slice ({entry})"
            raise ValueError(f"{named}, whose use cannot be looked up; name the device")
        else:
            break
    return tuple(dataclasses.replace(gpu, device=f"cuda:{i}") for i, gpu in enumerate(chosen))


def torch_cuda_version() -> str | None:
    """The CUDA version of the installed torch, or None for a CPU build; torch is not imported for it."""
    spec = find_spec("torch")
    if spec is None or not spec.origin:
        return None
    try:
        text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    match = re.search(r"^cuda\b[^=\n]*=\s*['\"]([\d.]+)['\"]", text, re.MULTILINE)
    return match.group(1) if match else None


def place(hosts: Sequence[Host], devices: Sequence[str] | None = None) -> Placement:
    """Returns the seats of ranks, whose `hosts` are given in rank order; ranks of one machine are consecutive. `devices`:
    one for each rank. None: a GPU each where enough are free, shared GPUs where there are fewer, CPUs where there are
    none; none that another process uses, unless it is named. Raises SpecError for a device that is not there."""
    chosen, notes = _choose(hosts) if devices is None else (list(devices), _check(hosts, devices))
    load = Counter((host.name, device) for host, device in zip(hosts, chosen, strict=True) if device != "cpu")
    ranks_on = Counter(host.name for host in hosts)
    fullest = max(load.values(), default=1)
    seats = []
    for rank, (host, device) in enumerate(zip(hosts, chosen, strict=True)):
        share, threads = load[(host.name, device)], max(1, host.cores // ranks_on[host.name])
        cap = round(SHARED_GPU_BYTES_FRACTION / share, 4) if share > 1 else None
        seat = Seat(rank=rank, host=host.name, device=device, threads=threads, memory_cap=cap, shared_gpu_ranks=fullest)
        seats.append(seat)
    return Placement(seats=tuple(seats), notes=(*notes, *_fidelity(hosts, seats, load)))


def free_gpus(host: Host) -> list[GpuStatus]:
    """Those that this torch can use and nobody else does."""
    return [gpu for gpu in host.gpus if host.torch_cuda is not None and not gpu.busy]


def without_ours(host: Host, devices: Collection[str]) -> Host:
    """Leaves out what is in use on our ranks' devices where NVML names no processes, as in a container."""
    ours = {gpu.device for gpu in host.gpus if gpu.device in devices and not gpu.processes}
    gpus = (dataclasses.replace(gpu, used_bytes=0) if gpu.device in ours else gpu for gpu in host.gpus)
    return dataclasses.replace(host, gpus=tuple(gpus))


def _choose(hosts: Sequence[Host]) -> tuple[list[str], list[str]]:
    """A device per rank, if the user named none: GPUs if every host has a free one, otherwise CPUs for all."""
    machines = {host.name: host for host in hosts}
    notes = [host.note for host in machines.values() if host.note]
    free: dict[str, list[GpuStatus]] = {}
    for host in machines.values():
        free[host.name] = free_gpus(host)
        if host.gpus and host.torch_cuda is None:
            has = f"{host.name} has {len(host.gpus)} GPU{'s' * (len(host.gpus) > 1)}, but its torch is built for CPUs"
            notes.append(f"{has}: ranks compute on the CPU; install a CUDA build of torch to use them")
        else:
            notes += [f"{gpu.busy}: it is not used" for gpu in host.gpus if gpu.busy]
    if not all(free.values()):
        if any(host.gpus for host in machines.values()) and any(free.values()):
            bare = ", ".join(name for name, gpus in free.items() if not gpus)
            notes.append(f"ranks compute on the CPU, because {bare} has no free GPU")
        return ["cpu"] * len(hosts), notes
    seen: Counter[str] = Counter()
    total = Counter(host.name for host in hosts)
    chosen = []
    for host in hosts:
        gpus, i = free[host.name], seen[host.name]
        chosen.append(gpus[i * len(gpus) // total[host.name] if total[host.name] > len(gpus) else i].device)
        seen[host.name] += 1
    return chosen, notes


def _check(hosts: Sequence[Host], devices: Sequence[str]) -> list[str]:
    """Notes on devices that the user named. Raises SpecError for one that cannot be used."""
    if len(devices) != len(hosts):
        reason = f"{len(devices)} are named for {len(hosts)} ranks"
        raise SpecError("devices", reason, "name one for each rank, or none")
    if len({d == "cpu" for d in devices}) > 1:
        raise SpecError("devices", "ranks on CPUs and on GPUs cannot share one model", "choose one kind")
    notes: dict[str, None] = {}
    for host, device in zip(hosts, devices, strict=True):
        if device == "cpu":
            continue
        gpu = next((g for g in host.gpus if g.device == device), None)
        if gpu is None:
            there = ", ".join(g.device for g in host.gpus) or "no GPU"
            lacks = f"{host.name} has no {device} (it has {there})"
            raise SpecError("devices", lacks, "name one that it has", {"devices": None})
        if host.torch_cuda is None:
            reason = f"torch on {host.name} is built for CPUs and cannot use {device}"
            raise SpecError("devices", reason, "install a CUDA build of torch, or use cpu", {"devices": None})
        if gpu.busy:
            notes[f"{gpu.busy}: times and free memory on it are not this run's alone"] = None
    return list(notes)


def _fidelity(hosts: Sequence[Host], seats: Sequence[Seat], load: Counter[tuple[str, str]]) -> list[str]:
    """Notes on the effects of shared GPUs and cores on times and memory."""
    notes = []
    if names := ", ".join(f"{n} ranks on {device}" for (_, device), n in load.items() if n > 1):
        cap = min(seat.memory_cap or 1.0 for seat in seats)
        notes.append(f"{names}: they take turns, and have {cap:.0%} of its memory each")
    ranks_on = Counter(seat.host for seat in seats if seat.device == "cpu")
    for host in {h.name: h for h in hosts}.values():
        ranks = ranks_on[host.name]
        if ranks > host.cores:
            crowded = f"{ranks} ranks on {host.cores} core{'s' * (host.cores > 1)}: they take turns"
            effect = "step and communication times include waiting for a core; losses and memory are not affected"
            notes.append(f"{crowded}, so {effect}")
    return notes
