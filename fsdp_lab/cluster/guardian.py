"""A small process that ends a cluster when its kernel is gone: by exit, restart, crash or SIGKILL.

`python -m fsdp_lab.cluster.guardian TOKEN OWNER_PID FOLDER` reads a pipe to which only the kernel can write. At end of file,
or when the owner's process is gone (a forked child of the kernel could keep the pipe open), it ends every process that has
TOKEN in its environment and removes FOLDER, the cluster's private files. The line "release" on the pipe makes it exit
without doing anything.

For ranks that may outlive their kernel (detached.py) it first waits until another kernel, with another guardian, has taken
them over, until the time limit is reached, or until a rank has died, since then nothing can be resumed.

For engines on other hosts it then runs the commands in the folder's end.json, which end what is left there.

Looking for the token, it also finds engines that were just being started, and the engines' children. Busy engines ignore
SIGTERM and are ended by SIGKILL a moment later."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from fsdp_lab.base.process import Identity, alive, end, marked, sweep
from fsdp_lab.cluster.detached import DetachedCluster, remove_private, run_end_commands

CHECK_S = 0.5  # between two checks of detached ranks
MODULE = "fsdp_lab.cluster.guardian"


class Guardian:
    """The kernel's side: starts the process, and releases it after an orderly end."""

    def __init__(self, token: str, folder: Path) -> None:
        command = [sys.executable, "-m", MODULE, token, str(os.getpid()), str(folder)]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        environment = {**os.environ, "PYTHONPATH": package_path()}
        # In a session of its own: signals to the kernel's process group do not reach it.
        self._process = subprocess.Popen(command, **pipes, env=environment, start_new_session=True)

    @property
    def identity(self) -> Identity:
        return Identity.of(self._process.pid)

    def detach(self) -> None:
        """The kernel no longer uses the ranks: the guardian acts as if it had ended."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def release(self) -> None:
        """All processes have ended: the guardian has nothing left to do."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            self._process.stdin.write(b"release\n")
            self._process.stdin.close()
        try:
            self._process.wait(2)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(2)


def package_path() -> str:
    """PYTHONPATH, starting with the folder that this package was imported from: it need not be installed."""
    root = str(Path(__file__).resolve().parents[2])
    others = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p and p != root]
    return os.pathsep.join([root, *others])


def watch(owner_pid: int) -> bool:
    """Waits until the owner ends. Returns whether it released the guardian."""
    try:
        owner = psutil.Process(owner_pid)
    except psutil.Error:
        return False
    while not select.select([sys.stdin], [], [], 1.0)[0]:
        if not alive(owner):
            return False
    return sys.stdin.readline().strip() == "release"


def handed_over(token: str, folder: Path) -> bool:
    """Waits for another kernel if the ranks may outlive theirs. Returns False if they must be ended."""
    cluster = DetachedCluster.read(folder)
    if cluster is None or cluster.guardian.pid != os.getpid():
        return cluster is not None or is_guarded(token)
    began_s, cluster = time.monotonic(), cluster.release()  # monotonic: a laptop's sleep does not count
    while cluster is not None and time.monotonic() - began_s < cluster.limit_s:
        # Nothing can be resumed without the ranks, or the controller here of those on other hosts.
        if not all(map(alive, [cluster.where["controller"]] if cluster.where else cluster.pids)):
            break
        time.sleep(CHECK_S)
        now = DetachedCluster.read(folder)
        if now is None or now.guardian != cluster.guardian:
            return now is not None or is_guarded(token)
    return cluster is None or not cluster.remove()


def is_guarded(token: str) -> bool:
    """Whether another guardian has these ranks. Its kernel may have removed the file already, as for a change of ranks."""
    others = (p for p in psutil.process_iter(["cmdline"]) if p.pid != os.getpid())
    return any({MODULE, token} <= {*(p.info["cmdline"] or ())} for p in others)


def main(token: str, owner_pid: int, folder: Path) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it outlives the signals that end its owner
    if watch(owner_pid) or handed_over(token, folder):
        return
    end(marked(token), term_s=1.0)
    deadline = time.monotonic() + 10
    while sweep(token) and time.monotonic() < deadline:
        time.sleep(0.2)
    run_end_commands(folder)
    remove_private(folder)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
