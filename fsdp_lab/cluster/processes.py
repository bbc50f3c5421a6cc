"""The processes of a cluster: found by a token in their environment, ended within a time limit, their exit described.

Every process that a cluster starts inherits the token, so grandchildren are found too, as are processes that were just
being started when their owner died. Reused pids are safe: psutil compares the creation time before it sends a signal, and
files store a process together with its creation time (`identity.py`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable

import psutil

MARK = "FSDP_LAB_CLUSTER"  # the environment variable that carries the token


def marked(token: str) -> list[psutil.Process]:
    """Running processes that carry the token, except this one."""
    found = []
    for p in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if p.pid != os.getpid() and p.environ().get(MARK) == token and p.status() != psutil.STATUS_ZOMBIE:
                found.append(p)
    return found


def end(processes: Iterable[psutil.Process], *, term_s: float, kill_s: float = 1.0) -> list[psutil.Process]:
    """SIGTERM, then SIGKILL after `term_s`; returns the processes that still run `kill_s` after that.

    An engine that computes ignores SIGTERM until its task returns, hence SIGKILL.
    """
    left = [p for p in processes if alive(p)]
    for p in left:
        with contextlib.suppress(psutil.Error):
            p.terminate()
    left = still_alive(left, term_s)
    for p in left:
        with contextlib.suppress(psutil.Error):
            p.kill()
    return still_alive(left, kill_s)


def still_alive(processes: list[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Those that have not ended within the time. Not `psutil.wait_procs`, which counts unreaped zombies as alive."""
    deadline = time.monotonic() + timeout_s
    while (left := [p for p in processes if alive(p)]) and time.monotonic() < deadline:
        time.sleep(0.01)
    return left


def alive(process: psutil.Process | int) -> bool:
    """Whether a process, or the one with this pid, still runs; a zombie does not."""
    try:
        process = psutil.Process(process) if isinstance(process, int) else process
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def sweep(token: str, *, rounds: int = 3) -> list[int]:
    """Ends all processes that carry the token, until none is found. Returns the pids that could not be ended."""
    for _ in range(rounds):
        left = marked(token)
        if not left:
            return []
        end(left, term_s=0.3)
    return [p.pid for p in marked(token)]


def describe_exit(code: int | None) -> str:
    """How a process ended, from its return code as subprocess gives it (negative: the signal)."""
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
