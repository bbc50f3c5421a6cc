"""`Kernel`: the process that drives a run, so that another one can tell whether it still lives."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

SILENT_S = 90.0  # after that, a kernel on another machine is taken for dead: a live one says something every 5 s


@dataclass(frozen=True, kw_only=True)
class Kernel:
    host: str
    pid: int
    born: str  # when, in words that no other process with this pid can have

    @classmethod
    def this(cls) -> Kernel:
        return cls(host=socket.gethostname(), pid=os.getpid(), born=born(os.getpid()))

    def alive(self, seen_unix_s: float) -> bool:
        """`seen_unix_s` is when it last said something."""
        if self.host != socket.gethostname():
            return time.time() - seen_unix_s < SILENT_S
        return born(self.pid) == self.born


def born(pid: int) -> str:
    """When a process began; "" where there is none, or only its zombie. On Linux in ticks since the boot named beside it,
    because the start in seconds moves when somebody sets the clock."""
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
