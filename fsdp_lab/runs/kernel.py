"""`Kernel`: the process that drives a run, so that another one can tell whether it still lives."""

from __future__ import annotations

import functools
import os
import socket
import time
from dataclasses import dataclass

import psutil

BORN_S = 5.0  # by which a process's start may be told differently another time: a clock was set
SILENT_S = 90.0  # after that, a kernel on another machine is taken for dead: a live one says something every 5 s


@dataclass(frozen=True, kw_only=True)
class Kernel:
    host: str
    pid: int
    born_unix_s: float

    @classmethod
    def this(cls) -> Kernel:
        return _of(os.getpid())

    def alive(self, seen_unix_s: float) -> bool:
        """`seen_unix_s` is when it last said something."""
        if self.host != socket.gethostname():
            return time.time() - seen_unix_s < SILENT_S
        try:
            process = psutil.Process(self.pid)
            same = abs(process.create_time() - self.born_unix_s) < BORN_S
            return bool(same and process.status() != psutil.STATUS_ZOMBIE)
        except psutil.NoSuchProcess:
            return False
        except psutil.Error:
            return True  # it is there, and is not ours to look at


@functools.cache
def _of(pid: int) -> Kernel:
    return Kernel(host=socket.gethostname(), pid=pid, born_unix_s=psutil.Process(pid).create_time())
