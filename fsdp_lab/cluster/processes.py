"""Processes of ours: found by a mark in their environment, ended within a bound, their end put in words.

Every process that a cluster starts inherits a token in its environment, so that grandchildren, and processes that were
just being started when their owner died, are found too. Ending is safe against reused pids: psutil compares the
creation time before it signals, and who is remembered in a file is remembered with its birth (`identity.py`).
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
    """Running processes that carry the token, this one left out."""
    found = []
    for p in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if p.pid != os.getpid() and p.environ().get(MARK) == token and p.status() != psutil.STATUS_ZOMBIE:
                found.append(p)
    return found


def end(processes: Iterable[psutil.Process], *, term_s: float, kill_s: float = 1.0) -> list[psutil.Process]:
    """SIGTERM, then after `term_s` SIGKILL; returns what is still there `kill_s` after that.

    An engine that computes ignores SIGTERM until its task returns, hence the second rung.
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
    """Those that have not ended within the time. Not `psutil.wait_procs`, to which an unreaped zombie is alive."""
    deadline = time.monotonic() + timeout_s
    while (left := [p for p in processes if alive(p)]) and time.monotonic() < deadline:
        time.sleep(0.01)
    return left


def alive(process: psutil.Process) -> bool:
    """Whether it still runs; a zombie does not."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def sweep(token: str, *, rounds: int = 3) -> list[int]:
    """Ends what still carries the token, until a look finds nothing. Returns the pids that could not be ended."""
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
