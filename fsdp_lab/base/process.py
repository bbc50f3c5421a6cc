"""Processes of this machine: an `Identity` that survives reuse of the pid, and the processes of a cluster.

Every process that a cluster starts inherits a token in its environment (`MARK`). So grandchildren are found too, and
processes that were being started when their owner died. psutil signals no reused pid: it compares creation times."""

import contextlib
import math
import os
import signal
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import psutil

MARK = "FSDP_LAB_CLUSTER"  # the environment variable with the token of a cluster
# Environment of every rank process; variables that the user has set take precedence. Values do not change by it.
# THP: torch asks Linux for pages of 2 MiB under large tensors; a step allocates and frees many, with a page fault per 4 KiB
# otherwise. Arenas: with a heap per thread, glibc reuses no other thread's free memory, and every switch would leak some.
HOST_MEMORY: Mapping[str, str] = {"THP_MEM_ALLOC_ENABLE": "1", "MALLOC_ARENA_MAX": "1"}


@dataclass(frozen=True, kw_only=True)
class Identity:
    """A process of this machine; a later process with the same pid is not equal to it."""

    pid: int
    born: str  # what `born` returned

    @classmethod
    def this(cls) -> Self:
        return cls.of(os.getpid())

    @classmethod
    def of(cls, pid: int) -> Self:
        return cls(pid=pid, born=born(pid))

    @property
    def alive(self) -> bool:
        return bool(self.born) and born(self.pid) == self.born


def machine() -> str:
    """Identifies this boot and this container, whose processes can be seen from here; a host name may change."""
    with contextlib.suppress(OSError):
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    return socket.gethostname()


def host_id() -> str:
    """Identifies what counts as one host: this boot and container, and its network. A name says nothing: containers share
    one, and one machine can have several networks of its own."""
    network = ""
    with contextlib.suppress(OSError):
        network = os.readlink("/proc/self/ns/net")
    return f"{machine()} {network}"


def ranks_per_host(hosts: Sequence[str]) -> int:
    """How many ranks each host has, if all have as many and those of each follow one another; else the number of all.
    `hosts`: of each rank, in rank order."""
    n = len(hosts) // max(1, len(set(hosts)))
    alike = all(len(set(hosts[i : i + n])) == 1 for i in range(0, len(hosts), n or 1))
    return n if n * len(set(hosts)) == len(hosts) and alike else len(hosts)


def usable_cores(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Cores that this process may use: affinity and the container's quota, at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()[:2]
        cores = min(cores, math.ceil(int(quota) / int(period)))
    except (OSError, ValueError):  # no cgroup v2 here, or no limit ("max")
        pass
    return max(1, cores)


def born(pid: int) -> str:
    """When a process was created; "" if there is none, or only its zombie. On Linux the boot's id and ticks since that
    boot, because a creation time in seconds changes when the clock is set."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        try:
            state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except FileNotFoundError:
            return ""
        return "" if state == "Z" else f"{boot} {fields[18]}"
    try:
        process = psutil.Process(pid)
        return "" if process.status() == psutil.STATUS_ZOMBIE else f"{process.create_time():.1f}"
    except psutil.Error:
        return ""


def marked(token: str) -> list[psutil.Process]:
    """Running processes that carry the token, except this one."""
    running = []
    for p in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if p.pid != os.getpid() and p.environ().get(MARK) == token and p.status() != psutil.STATUS_ZOMBIE:
                running.append(p)
    return running


def end(processes: Iterable[psutil.Process], *, term_s: float) -> list[psutil.Process]:
    """SIGTERM, then SIGKILL after `term_s`, because an engine that computes ignores SIGTERM until its task returns. Returns
    the processes that still run a second after that."""
    left = [p for p in processes if alive(p)]
    for p in left:
        with contextlib.suppress(psutil.Error):
            p.terminate()
    left = still_alive(left, term_s)
    for p in left:
        with contextlib.suppress(psutil.Error):
            p.kill()
    return still_alive(left, 1.0)


def still_alive(processes: list[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """The processes that have not ended within the time. Not `psutil.wait_procs`, which counts unreaped zombies as alive."""
    deadline = time.monotonic() + timeout_s
    while (left := [p for p in processes if alive(p)]) and time.monotonic() < deadline:
        time.sleep(0.01)
    return left


def alive(process: psutil.Process | int) -> bool:
    """Returns whether a process, or the one with this pid, still runs; a zombie does not."""
    try:
        process = psutil.Process(process) if isinstance(process, int) else process
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def sweep(token: str) -> list[int]:
    """Ends all processes that carry the token, until none is left. Returns the pids that could not be ended."""
    for _ in range(3):
        left = marked(token)
        if not left:
            return []
        end(left, term_s=0.3)
    return [p.pid for p in marked(token)]


def describe_exit(code: int | None) -> str:
    """Says how a process ended, from its return code as subprocess gives it (negative: the signal)."""
    if code is None:
        return "ended for a reason that cannot be seen from here"
    if code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        hint = {
            "SIGKILL": " (the system does this when memory runs out; so does kill -9)",
            "SIGSEGV": " (a crash in native code)",
            "SIGABRT": " (native code gave up)",
            "SIGBUS": " (often a full /dev/shm)",
        }.get(name, "")
        return f"was ended by {name}{hint}"
    return f"ended with exit code {code}"
