"""`fsdp-lab doctor`: checks of the Python packages, torch, the GPUs, the host and Jupyter, with a fix for each problem.

Uses the standard library where it can, because it is run where something is missing, and bounds each check in time. torch is
imported in a subprocess, because a broken driver can make the import hang or crash."""

import argparse
import contextlib
import dataclasses
import enum
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fsdp_lab.base.formatting import GIB, size
from fsdp_lab.cli.jupyter import missing, running_servers
from fsdp_lab.cluster import nvml
from fsdp_lab.cluster.nvml import GpuReport, GpuStatus

PIP = f"{sys.executable} -m pip install"
TORCH = f"{PIP} --force-reinstall 'torch>=2.11,<2.15'"


class State(enum.StrEnum):
    OK = "ok"
    WARN = "warn"  # works, with limitations
    FAIL = "fail"  # does not work until it is fixed


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    name: str
    value: str
    state: State = State.OK
    advice: str = ""  # what to do, if anything

    def lines(self) -> Iterator[str]:
        """The finding for a terminal: one line, and the advice below it."""
        mark = self.state.upper() if self.state is State.FAIL else self.state
        yield f"  {mark:<5}{self.name:<18} {self.value}"
        yield from textwrap.wrap(self.advice, 110, initial_indent=" " * 9 + "-> ", subsequent_indent=" " * 12)


def judged(name: str, value: str, problem: str, state: State = State.WARN) -> Finding:
    """A finding with this state if there is a problem, which is its advice; otherwise it is OK."""
    return Finding(name, value, state if problem else State.OK, problem)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")


def run(args: argparse.Namespace) -> int:
    """Prints each group as it is ready. The exit code is 1 where something fails."""
    findings: list[Finding] = []
    for title, group in examine():
        findings += group
        if not args.json:
            print("\n".join([title, *(line for finding in group for line in finding.lines())]), flush=True)
    state = max((f.state for f in findings), key=list(State).index)
    if args.json:
        print(json.dumps({"state": state, "findings": [dataclasses.asdict(f) for f in findings]}, indent=2))
    return 1 if state is State.FAIL else 0


def examine() -> Iterator[tuple[str, list[Finding]]]:
    """(title, findings) for each group of checks, one after the other."""
    yield "Software", [Finding("Python", f"{platform.python_version()} at {sys.executable}"), *requirements()]
    facts = ask_torch()
    yield "torch", torch_findings(facts)
    devices = nvml.query()
    yield "GPUs", gpu_findings(devices, facts)
    linux = [shared_memory(gpus=len(devices.gpus))] if sys.platform == "linux" else []
    known = [memory()] if importlib.util.find_spec("psutil") else []
    yield "Machine", [*known, disk(), *linux, loopback()]
    yield "Jupyter", jupyter_servers()


def requirements() -> list[Finding]:
    """The installation's requirements, extras left out."""
    try:
        listed = importlib.metadata.requires("fsdp-lab") or []
    except importlib.metadata.PackageNotFoundError:
        return [Finding("fsdp-lab", "not installed", State.WARN, f"{PIP} -e . in its folder installs what it needs")]
    return [package(line.partition(";")[0].strip()) for line in listed if "extra ==" not in line]


def package(requirement: str) -> Finding:
    """requirement: "torch<2.15,>=2.11"."""
    name = re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0]
    fix = f"{PIP} '{requirement}'"
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, "missing", State.FAIL, fix)
    try:
        from packaging.requirements import Requirement
    except ImportError:
        return Finding(name, version)
    unmet = [s.operator for s in Requirement(requirement).specifier if not s.contains(version, prereleases=True)]
    if not unmet:
        return Finding(name, version)
    if name == "torch" and unmet == ["<"]:  # whoever has it may need it
        way = "it may work; for a tested one without losing this one: python3 -m venv .venv"
        return Finding(name, f"{version}, newer than those tested: {requirement}", State.WARN, way)
    return Finding(name, f"{version}, but {requirement} is required", State.FAIL, fix)


# -- torch and the GPUs -----------------------------------------------------------------------------------------------

TIMEOUT_S = 90  # a first import from a cold network disk takes this long
IDLE_BYTES = 600 * 2**20  # memory that a driver uses on an idle GPU
OLDEST_DRIVER = {13: "580", 12: "525", 11: "450"}  # Linux drivers that run any minor release of that CUDA
OLDER_BUILD = {12: "cu126"}  # a PyTorch wheel index for drivers of that CUDA

# Creates no CUDA context, so that it takes no memory of a GPU in use.
PROBE = """
import json, torch, torch.distributed as dist
from fsdp_lab.wire.shared_memory import unavailable
facts = {"version": torch.__version__, "cuda_build": torch.version.cuda or "", "not_shared": unavailable()}
if torch.version.cuda:
    facts["devices"] = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if dist.is_available() and dist.is_nccl_available():
        facts["nccl"] = list(torch.cuda.nccl.version())
    if not facts["devices"]:
        try:
            torch.cuda.init()
        except Exception as e:
            facts["cuda_error"] = str(e).splitlines()[0]
print(json.dumps(facts))
"""


@dataclass(frozen=True)
class TorchFacts:
    """The facts that torch reports in a subprocess; if it cannot be imported, only `error` is set."""

    version: str = ""
    cuda_build: str = ""  # "13.0"; empty for a CPU build
    devices: int = 0  # GPUs that torch can use
    cuda_error: str = ""
    not_shared: str = ""  # why CPU ranks cannot share memory
    nccl: list[int] | None = None  # its version
    error: str = ""


def ask_torch() -> TorchFacts:
    ask = [sys.executable, "-c", PROBE]
    try:
        done = subprocess.run(ask, capture_output=True, text=True, timeout=TIMEOUT_S, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        return TorchFacts(error=f"importing torch took longer than {TIMEOUT_S} s")
    if done.returncode:
        return TorchFacts(error=(done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1])
    return TorchFacts(**json.loads(done.stdout.splitlines()[-1]))


def torch_findings(facts: TorchFacts) -> list[Finding]:
    if not facts.version:
        return [Finding("import torch", facts.error, State.FAIL, TORCH)]
    build = f"built for CUDA {facts.cuda_build}" if facts.cuda_build else "built for CPUs"
    slower = f"ranks of one host communicate over Gloo, which is slower: {facts.not_shared}" if facts.not_shared else ""
    findings = [Finding("import torch", f"{facts.version}, {build}")]
    findings.append(judged("shared memory", "missing" if slower else "there", slower))
    if facts.cuda_build:
        without = "" if facts.nccl else "GPU ranks would communicate over Gloo, through host memory: slow"
        findings.append(judged("NCCL", ".".join(map(str, facts.nccl or ())) or "missing", without))
    return findings


def gpu_findings(devices: GpuReport, torch: TorchFacts) -> list[Finding]:
    if devices.error:
        return [Finding("GPUs", f"could not be listed: {devices.error}", State.WARN, "ranks run on the CPU until then")]
    if not devices.gpus:
        return [Finding("GPUs", "none; ranks run on the CPU")]
    findings = [in_use(index, gpu) for index, gpu in enumerate(devices.gpus)]
    return [*findings, driver(devices, torch)] if torch.version else findings


def in_use(index: int, gpu: GpuStatus) -> Finding:
    value = f"{gpu.name}, {size(gpu.used_bytes)} of {size(gpu.total_bytes)} in use"
    if gpu.processes:
        value += ": " + ", ".join(f"{p.name} (pid {p.pid}, {size(p.used_bytes)})" for p in gpu.processes)
    # Processes of another container are not visible.
    taken = gpu.processes or gpu.used_bytes > IDLE_BYTES
    return judged(f"GPU {index}", value, "others use it; leave it out with `devices`" if taken else "")


def driver(devices: GpuReport, torch: TorchFacts) -> Finding:
    """Tells whether the driver supports the CUDA that torch was built for; any minor release of the same major one runs."""
    carries = f"driver {devices.driver}" + (f" carries CUDA {devices.driver_cuda}" if devices.driver_cuda else "")
    has = int(devices.driver_cuda.partition(".")[0] or 0)
    older = f"{TORCH} --index-url https://download.pytorch.org/whl/{OLDER_BUILD[has]}" if has in OLDER_BUILD else ""
    if not torch.cuda_build:
        return Finding("driver", f"{carries}; torch is a CPU build", State.WARN, f"to use the GPUs: {older or TORCH}")
    built, value = int(torch.cuda_build.partition(".")[0]), f"{carries}; torch is built for {torch.cuda_build}"
    if 0 < has < built:
        advice = f"update the driver to {OLDEST_DRIVER.get(built, 'a newer one')} or newer"
        return Finding("driver", value, State.FAIL, f"{advice}, or take an older torch: {older}" if older else advice)
    if not torch.devices:
        why = torch.cuda_error or "CUDA_VISIBLE_DEVICES may be empty, or the container was started without its GPUs"
        return Finding("driver", f"{value}; torch sees no GPU", State.FAIL, why)
    return Finding("driver", value)


# -- the machine ------------------------------------------------------------------------------------------------------

CGROUP = Path("/sys/fs/cgroup")


def memory() -> Finding:
    """A container's limit is included."""
    import psutil

    seen = psutil.virtual_memory()
    total, available = int(seen.total), int(seen.available)
    with contextlib.suppress(OSError, ValueError):  # no cgroup of this version; no limit: "max"
        limit, used = (int((CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        total, available = min(total, limit), min(available, limit - used)
    short = "two ranks, a kernel and JupyterLab need about 1.5 GiB; close other programs"
    return judged("memory", f"{size(available)} free of {size(total)}", short if available < 1.5 * GIB else "")


def disk() -> Finding:
    """Tells whether the home folder (Jupyter, ipyparallel) and the temporary folder (the lab) can be written."""
    folders = (Path.home(), Path(tempfile.gettempdir()))
    if wrong := [str(f) for f in folders if not os.access(f, os.W_OK) or shutil.disk_usage(f).free < GIB / 4]:
        advice = "set HOME and TMPDIR to folders with room that you can write"
        return Finding("disk", f"full, or cannot be written: {', '.join(wrong)}", State.FAIL, advice)
    return Finding("disk", f"{size(shutil.disk_usage(folders[0]).free)} free at home, and it can be written")


def shared_memory(gpus: int) -> Finding:
    if not os.path.isdir("/dev/shm"):
        return Finding("/dev/shm", "missing", State.WARN, "NCCL needs it; mount a tmpfs there")
    total = shutil.disk_usage("/dev/shm").total
    short = "NCCL runs out of it between several GPUs; start the container with --shm-size=8g or --ipc=host"
    return judged("/dev/shm", size(total), short if gpus > 1 and total < GIB else "")


def loopback() -> Finding:
    """Tells whether 127.0.0.1 works, over which ranks, kernel and pages connect."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=3).close()
    except OSError as e:
        value = f"127.0.0.1 does not work ({e.strerror or e})"
        return Finding("ports", value, State.FAIL, "bring the loopback up: ip link set lo up")
    return Finding("ports", "127.0.0.1 works")


def jupyter_servers() -> list[Finding]:
    """The extensions that pages need, here and in the environments of running servers."""
    findings = [Finding("extensions", "the pages' two extensions are installed")]
    if lacking := missing(Path(sys.prefix)):
        fix = f"{PIP} {shlex.join(lacking)}"
        findings = [Finding("extensions", f"missing: {', '.join(lacking)}", State.FAIL, fix)]
    for server in running_servers():
        lacking = [] if server.ours else missing(server.prefix)
        install = f"{server.python} -m pip install {shlex.join(lacking)}"
        fix = f"to use it: {install}; then fsdp-lab kernel install" if lacking else ""
        findings.append(judged(f"server :{server.port}", f"pid {server.pid}, runs from {server.prefix}", fix))
    return findings
