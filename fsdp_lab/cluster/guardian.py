"""A small process that ends a cluster when its kernel is gone, however it went: exit, restart, crash or SIGKILL.

`python -m fsdp_lab.cluster.guardian TOKEN OWNER_PID FOLDER` holds the reading end of a pipe whose writing end only the
kernel has. At end of file, or when the owner's process is gone (a forked child of the kernel could keep the pipe open),
it ends every process that carries TOKEN in its environment and removes FOLDER, the cluster's private files. The word
"release" on the pipe lets it go without doing anything.

Where the ranks are kept (kept.py) it waits instead, until another kernel has taken them over, with a guardian of its own, or
nobody has come for as long as was agreed, or one of them has died: then there is nothing to come back to.

It needs no list of pids: it looks for the token when the time has come, so that an engine that was just being started,
and an engine's own children, are found too. Busy engines ignore SIGTERM and are ended by SIGKILL a moment later.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from fsdp_lab.cluster.kept import Kept
from fsdp_lab.cluster.private import remove_private
from fsdp_lab.cluster.processes import alive, end, marked, sweep
from fsdp_lab.identity import Identity

LOOK_S = 0.5  # between two looks at what became of ranks that are kept


class Guardian:
    """The kernel's side: starts the process, and lets it go after an orderly end."""

    def __init__(self, token: str, folder: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "fsdp_lab.cluster.guardian", token, str(os.getpid()), str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": package_path()},
            start_new_session=True,  # what is sent to the kernel's group does not reach it
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def identity(self) -> Identity:
        return Identity.of(self.pid)

    def leave(self) -> None:
        """The kernel has nothing to do with the ranks any more: as if it had ended."""
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()

    def release(self) -> None:
        """Everything is ended: the guardian has nothing left to do."""
        stdin = self._process.stdin
        with contextlib.suppress(OSError, ValueError):
            if stdin is not None:
                stdin.write(b"release\n")
                stdin.close()
        try:
            self._process.wait(2)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(2)


def package_path() -> str:
    """PYTHONPATH with the folder in front that this package was imported from: it need not be installed."""
    here = str(Path(__file__).resolve().parents[2])
    rest = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p and p != here]
    return os.pathsep.join([here, *rest])


def watch(owner_pid: int) -> bool:
    """Waits for the owner's end. Returns whether it asked for nothing to be done."""
    try:
        owner = psutil.Process(owner_pid)
    except psutil.Error:
        return False
    while not select.select([sys.stdin], [], [], 1.0)[0]:
        if not owner.is_running() or owner.status() == psutil.STATUS_ZOMBIE:
            return False
    return sys.stdin.readline().strip() == "release"


def handed_over(folder: Path) -> bool:
    """Waits, where the ranks are kept. Returns whether a kernel has taken them over; else they are to be ended."""
    kept = Kept.read(folder)
    if kept is None or kept.guardian.pid != os.getpid():
        return kept is not None
    began_s, kept = time.monotonic(), kept.release()  # a laptop that sleeps does not count as waiting
    while kept is not None and time.monotonic() - began_s < kept.limit_s and all(_lives(pid) for pid in kept.pids):
        time.sleep(LOOK_S)
        now = Kept.read(folder)
        if now is None or now.guardian != kept.guardian:
            return now is not None
    return kept is None or not kept.forget()


def _lives(pid: int) -> bool:
    try:
        return alive(psutil.Process(pid))
    except psutil.Error:
        return False


def main(token: str, owner_pid: int, folder: Path) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it outlives what ends its owner
    if watch(owner_pid) or handed_over(folder):
        return
    end(marked(token), term_s=1.0)
    deadline = time.monotonic() + 10
    while sweep(token) and time.monotonic() < deadline:
        time.sleep(0.2)
    remove_private(folder)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
