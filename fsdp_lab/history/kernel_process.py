"""`KernelProcess`: the process that drives a run, so that another one can tell whether it still lives."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass

from fsdp_lab.core.process import born

SILENT_S = 90.0  # after that, a kernel on another machine is taken for dead: a live one says something every 5 s


@dataclass(frozen=True, kw_only=True)
class KernelProcess:
    host: str
    pid: int
    born: str  # as `fsdp_lab.core.process.born` says

    @classmethod
    def this(cls) -> KernelProcess:
        return cls(host=socket.gethostname(), pid=os.getpid(), born=born(os.getpid()))

    def alive(self, seen_unix_s: float) -> bool:
        """`seen_unix_s` is when it last said something."""
        if self.host != socket.gethostname():
            return time.time() - seen_unix_s < SILENT_S
        return born(self.pid) == self.born
