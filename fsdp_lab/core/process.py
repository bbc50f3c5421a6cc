"""`Identity`: a process of this machine that no later one can be taken for, though its pid be used again."""

from __future__ import annotations

import contextlib
import os
import socket
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True, kw_only=True)
class Identity:
    """A process of this machine that no later one can be taken for."""

    pid: int
    born: str  # as `born` says

    @classmethod
    def this(cls) -> Identity:
        return cls.of(os.getpid())

    @classmethod
    def of(cls, pid: int) -> Identity:
        return cls(pid=pid, born=born(pid))

    @property
    def alive(self) -> bool:
        return bool(self.born) and born(self.pid) == self.born


def machine() -> str:
    """Which processes can be seen from here: those of this boot, and of this container. A laptop's name may change."""
    with contextlib.suppress(OSError):
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    return socket.gethostname()


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
