"""Starts the engines of this machine by forking: what ranks import, torch above all, is imported once in place of once a
rank, and its memory is shared. A rank that is lost is replaced in a second, and not in the time of an import.

`python -m fsdp_lab.cluster.engine_server DESCRIPTOR [MODULE]` imports the ranks' code (of `MODULE`, or `fsdp_lab.rank`) and
forks an engine for each connection to a socket in the private folder of a cluster, which it inherits. The orders are a line
of JSON; the answers are the pid, and the exit code when the engine has ended. The server carries the cluster's token and is
ended with its processes.

Note: what is safe to fork. The server has one thread, has used no GPU and has opened no socket of ZeroMQ's; it computes
nothing, so OpenMP has no threads yet. CUDA cannot be used in the fork of a process that has used it, and an import may use
it: torch asks NVML what there is (`ASK_NVML`), which uses no GPU, and where an import has used one all the same
(`used_gpu`) the server forks nothing. Then engines are started one by one, as where its socket cannot be made."""

import contextlib
import json
import os
import selectors
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
from ipyparallel.cluster.launcher import LocalEngineLauncher, LocalEngineSetLauncher

MODULE = "fsdp_lab.cluster.engine_server"
SOCKET = "engines.sock"
LOG = "engine_server.log"
IMPORT_S = 120.0  # for the server to import, and to answer
ASK_NVML = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}  # of the server alone: an engine has its own environment
# A driver opens one of these when a process first uses a GPU: CUDA, CUDA on Jetson and in WSL, ROCm. NVML opens others.
GPU_FILES = ("/dev/nvidia-uvm", "/dev/nvhost", "/dev/nvmap", "/dev/dxg", "/dev/kfd")
Orders = dict[str, Any]  # args, environment, folder, log


def forks() -> bool:
    """Whether engines may be forked on this machine."""
    return sys.platform == "linux" and hasattr(os, "pidfd_open")


def used_gpu(opened: Path = Path("/proc/self/fd")) -> bool:
    """Whether this process has used a GPU, by the files that it has opened."""
    return any(os.path.realpath(descriptor).startswith(GPU_FILES) for descriptor in opened.iterdir())


def start_server(folder: Path, environment: Mapping[str, str], module: str | None) -> subprocess.Popen[bytes] | None:
    """None if it cannot be started: then engines are started one by one. It can be connected to at once, and answers when it
    has imported."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as listener:  # the folder's path may be too long
        listener.bind(str(folder / SOCKET))
        listener.listen(1024)
        command = [sys.executable, "-m", MODULE, str(listener.fileno()), *([module] if module else [])]
        with open(folder / LOG, "wb") as log:
            return subprocess.Popen(
                command,
                env={**os.environ, **environment, **ASK_NVML},
                pass_fds=[listener.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
    return None


# -- the kernel's side -------------------------------------------------------------------------------------------------


class ForkedEngineLauncher(LocalEngineLauncher):  # type: ignore[misc]
    """Launches an engine that the server forks. Where there is none, or it may not, it is started as ipyparallel does."""

    _connection: socket.socket | None = None

    def start(self) -> Any:
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(IMPORT_S)
        try:
            connection.connect(str(Path(self.profile_dir) / SOCKET))
        except OSError:
            connection.close()
            return super().start()
        orders = {
            "args": self.args,
            "environment": {**os.environ, **self.get_env()},
            "folder": os.path.abspath(self.work_dir),
            "log": self.output_file,
        }
        self._connection, self._answers = connection, connection.makefile("r", encoding="utf-8")
        try:
            connection.sendall(json.dumps(orders).encode() + b"\n")
            if (pid := json.loads(self._answers.readline())["pid"]) is None:
                connection.close()
                self._connection = None
                return super().start()
            self.pid = pid
            self.process = psutil.Process(self.pid)
        except (OSError, ValueError, KeyError, psutil.Error):
            connection.close()
            raise RuntimeError("the server of the engines has ended; try again") from None
        connection.settimeout(None)
        self.notify_start(self.pid)
        self._start_waiting()
        return None

    def _wait(self) -> None:
        """On a thread: the server knows how the engine ended. If the server has ended, only when is known."""
        exit_code = None
        if self._connection is not None:
            with contextlib.suppress(OSError, ValueError, KeyError):
                exit_code = json.loads(self._answers.readline())["exit_code"]
            self._connection.close()
        if exit_code is None:
            super()._wait()
            return
        ended = {"exit_code": exit_code, "pid": self.pid, "identifier": self.identifier}
        self.loop.add_callback(lambda: self.notify_stop(ended))


class ForkedEngineSetLauncher(LocalEngineSetLauncher):  # type: ignore[misc]
    launcher_class = ForkedEngineLauncher
    entrypoint_name = "local"  # under which a later kernel reads it from ipyparallel's file


# -- the process -------------------------------------------------------------------------------------------------------


class EngineServer:
    def __init__(self, listener: socket.socket) -> None:
        self._selector, self._listener = selectors.DefaultSelector(), listener
        self._engines: dict[int, tuple[int, socket.socket]] = {}  # by the descriptor of the process: pid, connection

    def serve(self) -> Orders:
        """Never returns, but in each engine, with its orders."""
        self._selector.register(self._listener, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is not self._listener:
                    self._report(key.fd)
                elif (orders := self._fork()) is not None:
                    return orders

    def _fork(self) -> Orders | None:
        connection, _ = self._listener.accept()
        with connection.makefile("r", encoding="utf-8") as lines:
            line = lines.readline()
        if not line:
            connection.close()
            return None
        if used_gpu():
            tell(connection, {"pid": None})
            connection.close()
            return None
        pid = os.fork()
        if not pid:
            connection.close()
            self._selector.close()  # closes what is the server's
            self._listener.close()
            for descriptor, (_, other) in self._engines.items():
                os.close(descriptor)
                other.close()
            orders: Orders = json.loads(line)
            return orders
        descriptor = os.pidfd_open(pid)
        self._engines[descriptor] = pid, connection
        self._selector.register(descriptor, selectors.EVENT_READ)
        tell(connection, {"pid": pid})
        return None

    def _report(self, descriptor: int) -> None:
        pid, connection = self._engines.pop(descriptor)
        self._selector.unregister(descriptor)
        os.close(descriptor)
        _, status = os.waitpid(pid, 0)
        tell(connection, {"exit_code": os.waitstatus_to_exitcode(status)})
        connection.close()


def tell(connection: socket.socket, answer: dict[str, int | None]) -> None:
    with contextlib.suppress(OSError):  # the kernel has ended
        connection.sendall(json.dumps(answer).encode() + b"\n")


def become_engine(orders: Orders) -> None:
    """The process as `python -m ipyparallel.engine` finds it."""
    os.setsid()
    os.chdir(orders["folder"])
    os.environ.clear()
    os.environ.update(orders["environment"])
    sys.path[0] = orders["folder"]
    sys.argv = ["ipengine", *orders["args"][3:]]  # after python -m ipyparallel.engine
    with open(orders["log"], "ab") as log:
        for descriptor in (1, 2):
            os.dup2(log.fileno(), descriptor)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()  # else all ranks would draw the same numbers


def main(descriptor: int, module: str | None) -> None:
    from ipyparallel.engine.app import main as run_engine

    from fsdp_lab.cluster.remote import import_code

    with contextlib.suppress(Exception):  # a rank imports it again, and says what is wrong
        import_code(module)
    become_engine(EngineServer(socket.socket(fileno=descriptor)).serve())
    run_engine()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None)
