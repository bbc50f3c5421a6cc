"""Starts the engines of one host and outlives them: as the guardian does on the kernel's host (detached.py).

`python -m fsdp_lab.cluster.host_agent` reads its orders as JSON from standard input, starts the engines, says on standard
output which processes these are, and goes on by itself; with `stay` in the foreground, for a batch system that ends what
is left behind. It keeps a connection to the cluster's controller. When nothing is heard of it for `cut_s`, the cluster has
ended, or a cable is cut, and the engines here end too.

In its private folder are the engines' logs and, in exits.json, the exit codes of those that have ended."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

import zmq
from zmq.utils.monitor import recv_monitor_message

from fsdp_lab.base.process import MARK, end, host_id, marked, sweep
from fsdp_lab.cluster.detached import private_folder, remove_private
from fsdp_lab.cluster.host_script import host_mark, remove_states, reply

CHECK_S = 0.1
PING_S = 1.0  # ZeroMQ's own heartbeats on the connection to the controller
SILENT_S = 5.0  # without an answer to them the connection is given up, and made again
BEAT_S = 0.5  # at least, between two looks of an engine at its hub's heartbeats
ENDED_S = 60.0  # how long the logs of engines that have all ended stay, for the kernel to read


class HostAgent:
    """The engines of one host, and the connection to their controller."""

    def __init__(self, orders: Mapping[str, Any]) -> None:
        self._token = host_mark(orders["token"])
        self._cut_s: float = orders["cut_s"]
        self._connection: Mapping[str, Any] = orders["connection"]
        self._path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), orders["cwd"])))
        # IPython puts the working folder before PYTHONPATH, where a package that was sent must come first
        folders = (str(Path.home()),) if orders["sent"] else (orders["cwd"], str(Path.home()))
        self._cwd = next((folder for folder in folders if Path(folder).is_dir()), None)
        self.folder = private_folder()
        (self.folder / "profile").mkdir()  # of IPython, which makes the rest
        self._exits: dict[int, int] = {}
        self._logs: dict[int, str] = {}
        self.engines = [self._start(i, orders["environment"]) for i in range(orders["count"])]
        self._write()

    def _start(self, i: int, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        log = self.folder / f"engine-{i}.log"
        misses = max(50, math.ceil(self._cut_s / BEAT_S))  # an engine that is idle looks at them itself
        variables = {
            MARK: self._token,
            "IPP_CONNECTION_INFO": json.dumps(self._connection),  # with the keys: other users cannot read it
            "IPP_PROFILE_DIR": str(self.folder / "profile"),
            "PYTHONPATH": self._path,
            "IPYTHONDIR": str(self.folder / "ipython"),
        }
        options = ["--log-level=WARN", f"--IPEngine.max_heartbeat_misses={misses}"]
        with open(log, "wb") as output:
            started = subprocess.Popen(
                [sys.executable, "-P", "-m", "ipyparallel.engine", *options],
                env={**os.environ, **environment, **variables},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=self._cwd,
            )
        self._logs[started.pid] = str(log)
        return started

    def watch(self) -> None:
        """Returns when the engines are to end, or have ended."""
        all_ended_s: float | None = None
        with Contact(self._connection) as contact:
            while True:
                ended = {e.pid: e.returncode for e in self.engines if e.poll() is not None}
                if ended != self._exits:
                    self._exits = ended
                    self._write()
                if len(ended) == len(self.engines):
                    all_ended_s = all_ended_s or time.monotonic()
                    if time.monotonic() - all_ended_s > ENDED_S:
                        return
                if contact.silent_s > self._cut_s:
                    return
                time.sleep(CHECK_S)

    def _write(self) -> None:
        part = self.folder / "exits.part"
        kept = {"token": self._token, "exits": self._exits, "logs": self._logs, "agent": os.getpid()}
        part.write_text(json.dumps(kept))
        part.replace(self.folder / "exits.json")

    def close(self) -> None:
        end(marked(self._token), term_s=0.3)
        sweep(self._token)
        remove_private(self.folder)
        remove_states(self._token)


class Contact:
    """A connection to the controller that carries nothing but ZeroMQ's heartbeats."""

    def __init__(self, connection: Mapping[str, Any]) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.heartbeat_ivl = int(PING_S * 1e3)
        self._socket.heartbeat_timeout = int(SILENT_S * 1e3)
        self._socket.ipv6 = "[" in connection["interface"]
        if key := connection.get("curve_serverkey"):
            self._socket.curve_publickey, self._socket.curve_secretkey = zmq.curve_keypair()
            self._socket.curve_serverkey = key.encode()
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self._since_s: float | None = time.monotonic()  # since when there is no connection
        self._socket.connect(f"{connection['interface']}:{connection['registration']}")

    @property
    def silent_s(self) -> float:
        """How long nothing has been heard of the controller."""
        while self._monitor.poll(0):
            up = recv_monitor_message(self._monitor)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED
            self._since_s = None if up else self._since_s or time.monotonic()  # a failed attempt ends a connection too
        return 0.0 if self._since_s is None else time.monotonic() - self._since_s

    def __enter__(self) -> "Contact":
        return self

    def __exit__(self, *error: object) -> None:
        self._monitor.close(linger=0)
        self._context.destroy(linger=0)


def go_on_alone() -> TextIO:
    """Continues as a process of its own session. What is written to the file that this returns is the output of the process
    that was started, which ends when the file is closed."""
    ready, told = os.pipe()
    if os.fork():
        os.close(told)
        with open(ready) as pipe:
            sys.stdout.write(pipe.read())
        sys.stdout.flush()
        os._exit(0)
    os.close(ready)
    os.setsid()
    return open(told, "w")


def leave(number: int, frame: FrameType | None) -> None:
    """A batch system ends the job: the engines end first, and a second signal does not interrupt that."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit()


def main() -> None:
    orders = json.loads(sys.stdin.readline())
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, leave)
    told = sys.stdout if orders["stay"] else go_on_alone()
    agent = HostAgent(orders)
    try:
        reply({"pids": [e.pid for e in agent.engines], "id": host_id()}, told)
        if not orders["stay"]:
            told.close()
            null = os.open(os.devnull, os.O_RDWR)
            for descriptor in (0, 1, 2):  # the pipes to the process that waits for the first one
                os.dup2(null, descriptor)
        agent.watch()
    finally:
        agent.close()


if __name__ == "__main__":
    main()
