"""The machine: cores, memory, shared memory, limits, disk, names and ports; a container's limits included."""

from __future__ import annotations

import os
import shutil
import socket
import sys
import tempfile
import threading
from pathlib import Path

from fsdp_lab.cli.doctor.finding import Finding, State
from fsdp_lab.core.formatting import size

GIB = 2**30
CGROUP = Path("/sys/fs/cgroup")


def findings(gpus: int) -> list[Finding]:
    """Args: gpus: how many there are; shared memory matters between GPU ranks."""
    found = [processor(), memory(), open_files(), processes(), writable(), host_name(), loopback()]
    if sys.platform == "linux":
        found.insert(2, shared_memory(gpus))
    return found


def cores() -> float:
    """Cores that this process may use, a container's quota included."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = read(CGROUP / "cpu.max").partition(" ")
    return min(usable, int(quota) / int(period)) if quota.isdigit() and period.isdigit() else usable


def processor() -> Finding:
    n = cores()
    advice = "" if n >= 2 else "two ranks take turns on one core: everything works, slowly"
    return Finding("cores", f"{n:g}", State.OK if n >= 2 else State.WARN, advice)


def memory() -> Finding:
    total, available = host_memory()
    limit = read(CGROUP / "memory.max")
    if limit.isdigit() and int(limit) < total:
        used = int(read(CGROUP / "memory.current") or 0)
        total, available = int(limit), min(available, int(limit) - used)
    value = f"{size(available)} free of {size(total)}"
    if available < 1.5 * GIB:
        return Finding(
            "memory", value, State.WARN, "two ranks, a kernel and JupyterLab need about this much; close others"
        )
    return Finding("memory", value)


def host_memory() -> tuple[int, int]:
    """(total, available) bytes; zeros where this system cannot tell."""
    try:
        import psutil
    except ImportError:
        lines = (line.split() for line in read(Path("/proc/meminfo")).splitlines())
        values = {words[0]: int(words[1]) * 1024 for words in lines if len(words) > 1}
        return values.get("MemTotal:", 0), values.get("MemAvailable:", 0)
    seen = psutil.virtual_memory()
    return int(seen.total), int(seen.available)


def shared_memory(gpus: int) -> Finding:
    if not os.path.isdir("/dev/shm"):
        return Finding("/dev/shm", "missing", State.WARN, "NCCL needs it; mount a tmpfs there")
    total = shutil.disk_usage("/dev/shm").total
    if gpus > 1 and total < GIB:
        advice = "NCCL runs out of it between several GPUs; start the container with --shm-size=8g or --ipc=host"
        return Finding("/dev/shm", size(total), State.WARN, advice)
    return Finding("/dev/shm", size(total))


def open_files() -> Finding:
    try:
        import resource
    except ImportError:  # Windows
        return Finding("open files", "no limit here")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    value = f"{soft} (may be raised to {hard})" if hard > soft else str(soft)
    if soft != resource.RLIM_INFINITY and soft < 1024:
        return Finding("open files", value, State.WARN, "every rank and page holds sockets: ulimit -n 4096")
    return Finding("open files", value)


def processes() -> Finding:
    """Threads count too: a rank has dozens."""
    try:
        import resource

        soft = resource.getrlimit(resource.RLIMIT_NPROC)[0] if hasattr(resource, "RLIMIT_NPROC") else -1
        infinite = soft == resource.RLIM_INFINITY
    except ImportError:
        soft, infinite = -1, True
    limits = [] if infinite or soft < 0 else [soft]
    limits += [int(text) for text in [read(CGROUP / "pids.max")] if text.isdigit()]
    if not limits:
        return Finding("processes", "no limit")
    if min(limits) < 512:
        advice = "a rank has dozens of threads; raise it: ulimit -u, or the container's --pids-limit"
        return Finding("processes", str(min(limits)), State.WARN, advice)
    return Finding("processes", str(min(limits)))


def writable() -> Finding:
    """Jupyter and ipyparallel write below the home folder, the lab in the temporary one."""
    wrong = []
    for name, folder in (("home", Path.home()), ("temporary folder", Path(tempfile.gettempdir()))):
        if not os.access(folder, os.W_OK):
            wrong.append(f"the {name} {folder} cannot be written")
        elif shutil.disk_usage(folder).free < GIB / 4:
            wrong.append(f"the {name} {folder} is full ({size(shutil.disk_usage(folder).free)} free)")
    if wrong:
        return Finding(
            "disk", "; ".join(wrong), State.FAIL, "set HOME and TMPDIR to folders with room that you can write"
        )
    return Finding("disk", f"{size(shutil.disk_usage(Path.home()).free)} free at home, and it can be written")


def host_name(timeout_s: float = 3) -> Finding:
    """Gloo looks its own host name up unless told an interface; a name that does not resolve makes it fail or wait."""
    name = socket.gethostname()
    addresses: list[str] = []

    def look_up() -> None:
        try:
            addresses.extend(str(found[4][0]) for found in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM))
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
    """Ranks, kernel and JupyterLab meet on 127.0.0.1; and whether JupyterLab's usual port is free."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=3).close()
    except OSError as e:
        return Finding(
            "ports",
            f"127.0.0.1 does not work ({e.strerror or e})",
            State.FAIL,
            "bring the loopback up: ip link set lo up",
        )
    with socket.socket() as probe:
        probe.settimeout(1)
        busy = probe.connect_ex(("127.0.0.1", 8888)) == 0
    return Finding(
        "ports", "127.0.0.1 works; 8888 is " + ("in use, fsdp-lab lab takes the next free one" if busy else "free")
    )


def read(path: Path) -> str:
    """A small file's text, stripped; empty where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
