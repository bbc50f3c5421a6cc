"""`fsdp-lab doctor`: checks of the Python packages, torch, the GPUs, the host and Jupyter, with a fix for each problem.

Uses the standard library where it can, because it is run where something is missing, and bounds each check in time. torch is
imported in a subprocess, because a broken driver can make the import hang or crash. A container's limits are included.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import enum
import importlib.metadata
import json
import os
import platform
import re
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp_lab.base.formatting import GIB, size
from fsdp_lab.cli.jupyter import missing, running_servers
from fsdp_lab.cluster import nvml
from fsdp_lab.cluster.nvml import GpuReport, GpuStatus


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")


def run(args: argparse.Namespace) -> int:
    """Prints each group as it is ready. The exit code is 1 where something fails."""
    findings: list[Finding] = []
    for title, group in examine():
        findings += group
        if not args.json:
            lines = [line for finding in group for line in finding.lines(sys.stdout.isatty())]
            print("\n".join([title, *lines]), flush=True)
    state = max((f.state for f in findings), key=list(State).index)
    if args.json:
        print(json.dumps({"state": state, "findings": [dataclasses.asdict(f) for f in findings]}, indent=2))
    return 1 if state is State.FAIL else 0


def examine() -> Iterator[tuple[str, list[Finding]]]:
    """(title, findings) for each group of checks, one after the other."""
    yield "Software", [*python(), *map(package, requirements())]
    facts = ask_torch()
    yield "torch", torch(facts)
    devices = nvml.query()
    yield "GPUs", gpu_findings(devices, facts)
    yield "Machine", host_findings(gpus=len(devices.gpus))
    yield "Jupyter", jupyter_servers() + connection_security()
    yield "What works here", outlook(facts, len(devices.gpus))


def outlook(facts: TorchFacts, gpus_seen: int) -> list[Finding]:
    """The ranks that this machine can run."""
    if not facts.version:
        return [Finding("ranks", "none", State.FAIL, "torch cannot be imported; fix that first")]
    carrier = "over Gloo" if facts.not_shared else "through shared memory"
    on_cpu = f"CPU ranks {carrier}; {cores():g} cores, more ranks share them, which is slower but correct"
    findings = [Finding("CPU ranks", on_cpu, State.OK if facts.gloo else State.FAIL)]
    if facts.devices:
        over = "NCCL" if facts.nccl else "Gloo"
        value = f"{facts.devices}, one rank each, over {over}; more ranks share GPUs, through their memory"
        findings.append(Finding("GPU ranks", value))
    elif gpus_seen:
        findings.append(Finding("GPU ranks", "none: torch cannot use the GPUs", State.WARN, "see torch and GPUs above"))
    return findings


# Packages to check if fsdp-lab is not installed, so that no metadata lists the requirements.
PACKAGES = "torch transformers numpy ipyparallel ipykernel ipywidgets anywidget bokeh jupyterlab"


def python() -> list[Finding]:
    version, where = platform.python_version(), sys.executable
    if sys.version_info < (3, 11):  # noqa: UP036 (the doctor also runs where requirements are not met)
        return [Finding("Python", f"{version} at {where}", State.FAIL, "make an environment with Python 3.11 or newer")]
    isolated = sys.prefix != sys.base_prefix or "CONDA_PREFIX" in os.environ
    shared = "no virtual environment: the system's packages can get in the way; python3 -m venv .venv"
    return [Finding("Python", f"{version} at {where}", State.OK, "" if isolated else shared)]


def requirements() -> list[str]:
    """The installation's requirements, extras left out: "torch<2.15,>=2.11"."""
    try:
        listed = importlib.metadata.requires("fsdp-lab") or []
    except importlib.metadata.PackageNotFoundError:
        return PACKAGES.split()
    return [line.partition(";")[0].strip() for line in listed if "extra ==" not in line]


def package(requirement: str) -> Finding:
    name = re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0]
    fix = f"{sys.executable} -m pip install '{requirement}'"
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, "missing", State.FAIL, fix)
    if satisfies(version, requirement):
        return Finding(name, version)
    if name == "torch" and satisfies(version, re.sub(r"<[\d.]+,?", "", requirement)):  # whoever has it may need it
        way = "it may work, as nothing asks for its version; for a tested one without losing this one: python3 -m venv .venv"
        return Finding(name, f"{version}, newer than those tested: {requirement}", State.WARN, way)
    return Finding(name, f"{version}, but {requirement} is required", State.FAIL, fix)


def satisfies(version: str, requirement: str) -> bool:
    """Tells whether the version is in the required range; True if that cannot be determined."""
    try:
        from packaging.requirements import Requirement
    except ImportError:
        return True
    return Requirement(requirement).specifier.contains(version, prereleases=True)


def torch(facts: TorchFacts) -> list[Finding]:
    if not facts.version:
        fix = f"{sys.executable} -m pip install --force-reinstall 'torch>=2.11,<2.15'"
        return [Finding("import torch", facts.error, State.FAIL, fix)]
    build = f"built for CUDA {facts.cuda_build}" if facts.cuda_build else "built for CPUs"
    advice = "" if facts.gloo else "CPU ranks and offload need it: take another build of torch"
    return [
        Finding("import torch", f"{facts.version}, {build}, {facts.threads} threads a process"),
        judged(
            "shared memory",
            "missing" if facts.not_shared else "there",
            f"ranks of one host communicate over Gloo, which is slower: {facts.not_shared}" if facts.not_shared else "",
        ),
        judged("Gloo", "there" if facts.gloo else "missing", advice, State.FAIL),
        *([nccl(facts)] if facts.cuda_build else []),
    ]


def nccl(facts: TorchFacts) -> Finding:
    if not facts.nccl:
        return judged("NCCL", "missing", "GPU ranks would communicate over Gloo, through host memory: slow")
    sharing = "two ranks on one GPU with NCCL_MULTI_RANK_GPU_ENABLE=1"
    if facts.nccl_version < (2, 30):
        sharing = "one rank a GPU (several go through its memory without NCCL, or need 2.30)"
    return Finding("NCCL", f"{'.'.join(map(str, facts.nccl_version))}; {sharing}")


def jupyter_servers() -> list[Finding]:
    lacking = missing(Path(sys.prefix))
    if lacking:
        needs = " ".join(f"'{extension.requirement}'" for extension in lacking)
        fix = f"{sys.executable} -m pip install {needs}"
        findings = [Finding("extensions", "missing: " + ", ".join(e.folder for e in lacking), State.FAIL, fix)]
    else:
        findings = [Finding("extensions", "the pages' two extensions are installed")]
    for server in running_servers():
        name, value = f"server :{server.port}", f"pid {server.pid}, runs from {server.prefix}"
        if server.ours:
            findings.append(Finding(name, f"{value}, this environment"))
        elif lacking := missing(server.prefix):
            fix = f"to use it: {server.install_command(lacking)}; then fsdp-lab kernel install"
            findings.append(Finding(name, f"{value}, without {', '.join(e.folder for e in lacking)}", State.WARN, fix))
        else:
            fix = "to use it: fsdp-lab kernel install"
            findings.append(Finding(name, f"{value}, and has the extensions", State.OK, fix))
    return findings


ROOT = Path("/")  # this folder, and those above it, are not examined


def connection_security() -> list[Finding]:
    """Tells whether other users can read connection files of Jupyter's servers and kernels, or of ipyparallel's profiles."""
    home = Path(os.environ.get("IPYTHONDIR") or Path.home() / ".ipython")
    files = [*home.glob("profile_*/security/*.json")]
    with contextlib.suppress(ImportError):
        from jupyter_core.paths import jupyter_runtime_dir

        for pattern in ("kernel-*.json", "jpserver-*.json", "jupyter_cookie_secret"):
            files += Path(jupyter_runtime_dir()).glob(pattern)
    readable = [file for file in files if others_read(file)]
    if not readable:
        return [Finding("connection files", f"{len(files)}, readable by their owner only")]
    names = ", ".join(map(str, readable[:3])) + (", ..." if len(readable) > 3 else "")
    fix = "anyone who reads one can run code as you: chmod go-rwx " + " ".join(f"'{file}'" for file in readable[:3])
    return [Finding("connection files", f"other users can read {names}", State.WARN, fix)]


def others_read(file: Path) -> bool:
    """Tells whether users other than the owner can reach the file and read it."""
    folders = [folder for folder in file.absolute().parents if ROOT in folder.parents]
    try:
        if not os.stat(file).st_mode & (stat.S_IRGRP | stat.S_IROTH):
            return False
        return all(os.stat(folder).st_mode & (stat.S_IXGRP | stat.S_IXOTH) for folder in folders)
    except OSError:
        return False


# -- this machine -----------------------------------------------------------------------------------------------------


IDLE_BYTES = 600 * 2**20  # memory that a driver uses on an idle GPU
OLDEST_DRIVER = {13: "580", 12: "525", 11: "450"}  # Linux drivers that run any minor release of that CUDA
OLDER_BUILD = {12: "cu126"}  # a PyTorch wheel index for drivers of that CUDA

CGROUP = Path("/sys/fs/cgroup")


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

    def lines(self, colours: bool) -> Iterator[str]:
        """The finding for a terminal: one line, and the advice below it."""
        mark = self.state.upper() if self.state is State.FAIL else self.state
        colour = {State.OK: "32", State.WARN: "33", State.FAIL: "1;31"}[self.state]
        padded = f"{mark:<5}"
        yield f"  {f'{chr(27)}[{colour}m{padded}{chr(27)}[0m' if colours else padded}{self.name:<18} {self.value}"
        yield from textwrap.wrap(self.advice, 110, initial_indent=" " * 9 + "-> ", subsequent_indent=" " * 12)


def judged(name: str, value: str, problem: str, state: State = State.WARN) -> Finding:
    """A finding with this state if there is a problem, which is its advice; otherwise it is OK."""
    return Finding(name, value, state if problem else State.OK, problem)


# -- torch -------------------------------------------------------------------------------------------------------------

TIMEOUT_S = 90  # a first import from a cold network disk takes this long

# Creates no CUDA context, so that it takes no memory of a GPU in use.
PROBE = """
import json, torch, torch.distributed as dist
from fsdp_lab.wire.shared_memory import unavailable
facts = {"version": torch.__version__, "cuda_build": torch.version.cuda or "", "threads": torch.get_num_threads()}
facts["gloo"] = dist.is_available() and dist.is_gloo_available()
facts["not_shared"] = unavailable()
facts["nccl"] = dist.is_available() and dist.is_nccl_available()
if torch.version.cuda:
    facts["arches"] = (torch._C._cuda_getArchFlags() or "").split()
    facts["devices"] = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if facts["nccl"]:
        facts["nccl_version"] = list(torch.cuda.nccl.version())
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
    arches: tuple[str, ...] = ()  # "sm_90", "compute_90"
    devices: int = 0  # GPUs that torch can use
    cuda_error: str = ""
    gloo: bool = False
    not_shared: str = ""  # why CPU ranks cannot share memory
    nccl: bool = False
    nccl_version: tuple[int, ...] = ()
    threads: int = 0
    error: str = ""


def ask_torch() -> TorchFacts:
    ask = [sys.executable, "-c", PROBE]
    try:
        done = subprocess.run(ask, capture_output=True, text=True, timeout=TIMEOUT_S, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        return TorchFacts(error=f"importing torch took longer than {TIMEOUT_S} s")
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        return TorchFacts(error=lines[-1] if lines else f"importing torch ended with exit code {done.returncode}")
    facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    tuples: dict[str, Any] = {name: tuple(v) for name, v in facts.items() if isinstance(v, list)}
    return TorchFacts(**{**facts, **tuples})


# -- GPUs --------------------------------------------------------------------------------------------------------------


def gpu_findings(devices: GpuReport, torch: TorchFacts) -> list[Finding]:
    if devices.error:
        return [Finding("GPUs", f"could not be listed: {devices.error}", State.WARN, "ranks run on the CPU until then")]
    if not devices.gpus:
        return [Finding("GPUs", "none; ranks run on the CPU")]
    findings = [in_use(index, gpu) for index, gpu in enumerate(devices.gpus)]
    if torch.version:
        findings.append(driver(devices, torch))
        findings += [f for index, gpu in enumerate(devices.gpus) if (f := architecture(index, gpu, torch))]
    return findings


def in_use(index: int, gpu: GpuStatus) -> Finding:
    name, value = f"GPU {index}", f"{gpu.name}, {size(gpu.used_bytes)} of {size(gpu.total_bytes)} in use"
    if gpu.processes:
        who = ", ".join(f"{p.name} (pid {p.pid}, {size(p.used_bytes)})" for p in gpu.processes)
        return Finding(name, f"{value}: {who}", State.WARN, "in use by other processes; exclude it with `devices`")
    hidden = "used from outside this container, so its processes are not visible; exclude it with `devices`"
    return judged(name, value, hidden if gpu.used_bytes > IDLE_BYTES else "")


def driver(devices: GpuReport, torch: TorchFacts) -> Finding:
    """Tells whether the driver supports the CUDA that torch was built for; any minor release of the same major one runs."""
    carries = f"driver {devices.driver}" + (f" carries CUDA {devices.driver_cuda}" if devices.driver_cuda else "")
    pip = f"{sys.executable} -m pip install --force-reinstall 'torch>=2.11,<2.15'"
    if not torch.cuda_build:
        major = int(devices.driver_cuda.partition(".")[0] or 0)
        index = f" --index-url https://download.pytorch.org/whl/{OLDER_BUILD[major]}" if major in OLDER_BUILD else ""
        return Finding("driver", f"{carries}; torch is a CPU build", State.WARN, f"to use the GPUs: {pip}{index}")
    built, has = int(torch.cuda_build.partition(".")[0]), int(devices.driver_cuda.partition(".")[0] or 0)
    value = f"{carries}; torch is built for {torch.cuda_build}"
    if has and has < built:
        advice = f"update the driver to {OLDEST_DRIVER.get(built, 'a newer one')} or newer"
        if has in OLDER_BUILD:
            index = f"https://download.pytorch.org/whl/{OLDER_BUILD[has]}"
            advice += f", or take torch for CUDA {has}: {pip} --index-url {index}"
        return Finding("driver", value, State.FAIL, advice)
    if not torch.devices:
        why = torch.cuda_error or "CUDA_VISIBLE_DEVICES may be empty, or the container was started without its GPUs"
        return Finding("driver", f"{value}; torch sees no GPU", State.FAIL, why)
    return Finding("driver", value)


def architecture(index: int, gpu: GpuStatus, torch: TorchFacts) -> Finding | None:
    """A finding if torch was built without this GPU's architecture."""
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


# -- host --------------------------------------------------------------------------------------------------------------


def host_findings(gpus: int) -> list[Finding]:
    """Cores, memory, limits, disk, names and ports. `gpus`: their number; ranks on GPUs need shared memory."""
    linux = [shared_memory(gpus)] if sys.platform == "linux" else []
    return [processor(), memory(), *linux, open_files(), processes(), writable(), host_name(), loopback()]


def cores() -> float:
    """Number of cores that this process may use, with a container's quota."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = read_text(CGROUP / "cpu.max").partition(" ")
    return min(usable, int(quota) / int(period)) if quota.isdigit() and period.isdigit() else usable


def processor() -> Finding:
    n = cores()
    return judged("cores", f"{n:g}", "" if n >= 2 else "two ranks share one core: everything works, slowly")


def memory() -> Finding:
    try:
        import psutil

        seen = psutil.virtual_memory()
        total, available = int(seen.total), int(seen.available)
    except ImportError:
        lines = (line.split() for line in read_text(Path("/proc/meminfo")).splitlines())
        values = {line[0]: int(line[1]) * 1024 for line in lines if len(line) > 1}
        total, available = values.get("MemTotal:", 0), values.get("MemAvailable:", 0)
    limit = read_text(CGROUP / "memory.max")
    if limit.isdigit() and int(limit) < total:
        used = int(read_text(CGROUP / "memory.current") or 0)
        total, available = int(limit), min(available, int(limit) - used)
    short = "two ranks, a kernel and JupyterLab need about 1.5 GiB; close other programs"
    return judged("memory", f"{size(available)} free of {size(total)}", short if available < 1.5 * GIB else "")


def shared_memory(gpus: int) -> Finding:
    if not os.path.isdir("/dev/shm"):
        return Finding("/dev/shm", "missing", State.WARN, "NCCL needs it; mount a tmpfs there")
    total = shutil.disk_usage("/dev/shm").total
    short = "NCCL runs out of it between several GPUs; start the container with --shm-size=8g or --ipc=host"
    return judged("/dev/shm", size(total), short if gpus > 1 and total < GIB else "")


def open_files() -> Finding:
    try:
        import resource
    except ImportError:  # Windows, where `plan` works all the same
        return Finding("open files", "no limit here")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    value = f"{soft} (may be raised to {hard})" if hard > soft else str(soft)
    few = soft != resource.RLIM_INFINITY and soft < 1024
    return judged("open files", value, "every rank and page holds sockets: ulimit -n 4096" if few else "")


def processes() -> Finding:
    """The limit on processes, in which threads count: a rank has dozens."""
    limits = [int(text) for text in [read_text(CGROUP / "pids.max")] if text.isdigit()]
    with contextlib.suppress(ImportError, AttributeError):  # Windows; a system without this limit
        import resource

        soft = resource.getrlimit(resource.RLIMIT_NPROC)[0]
        limits += [soft] if soft >= 0 and soft != resource.RLIM_INFINITY else []
    if not limits:
        return Finding("processes", "no limit")
    low = "a rank has dozens of threads; raise it: ulimit -u, or the container's --pids-limit"
    return judged("processes", str(min(limits)), low if min(limits) < 512 else "")


def writable() -> Finding:
    """Tells whether the home folder (Jupyter, ipyparallel) and the temporary folder (the lab) can be written."""
    wrong = []
    for name, folder in (("home", Path.home()), ("temporary folder", Path(tempfile.gettempdir()))):
        if not os.access(folder, os.W_OK):
            wrong.append(f"the {name} {folder} cannot be written")
        elif shutil.disk_usage(folder).free < GIB / 4:
            wrong.append(f"the {name} {folder} is full ({size(shutil.disk_usage(folder).free)} free)")
    if wrong:
        advice = "set HOME and TMPDIR to folders with room that you can write"
        return Finding("disk", "; ".join(wrong), State.FAIL, advice)
    return Finding("disk", f"{size(shutil.disk_usage(Path.home()).free)} free at home, and it can be written")


def host_name(timeout_s: float = 3) -> Finding:
    """Gloo resolves the host name unless it is given an interface; a name that does not resolve makes it fail or wait."""
    name = socket.gethostname()
    addresses: list[str] = []

    def look_up() -> None:
        try:
            addresses.extend(str(info[4][0]) for info in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM))
        except OSError:
            return

    thread = threading.Thread(target=look_up, daemon=True)  # a resolver can take a minute
    thread.start()
    thread.join(timeout_s)
    if addresses:
        return Finding("host name", f"{name} is {', '.join(dict.fromkeys(addresses))}")
    why = f"{name} was not found within {timeout_s:g} s" if thread.is_alive() else f"{name} has no address"
    return Finding("host name", why, State.WARN, "add it to /etc/hosts as 127.0.0.1, or set GLOO_SOCKET_IFNAME=lo")


def loopback() -> Finding:
    """Tells whether 127.0.0.1 works, over which ranks, kernel and pages connect, and JupyterLab's usual port is free."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=3).close()
    except OSError as e:
        value = f"127.0.0.1 does not work ({e.strerror or e})"
        return Finding("ports", value, State.FAIL, "bring the loopback up: ip link set lo up")
    with socket.socket() as probe:
        probe.settimeout(1)
        busy = probe.connect_ex(("127.0.0.1", 8888)) == 0
    state = "in use, fsdp-lab lab takes the next free one" if busy else "free"
    return Finding("ports", f"127.0.0.1 works; 8888 is {state}")


def read_text(path: Path) -> str:
    """The stripped text of a small file; "" if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
