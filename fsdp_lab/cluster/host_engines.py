"""`HostEngines`: engines on other hosts, started from here; the controller is on this kernel's host. `SshEngines`: on hosts
that are reached by SSH, by one connection for each command and host (batch_engines.py: on those of a job of Slurm's).

Note: how engines on other hosts live and end. A host is asked what it has and which address of the controller's host it
reaches before anything is started there (`look` in host_script.py). Then one command a host starts an agent (host_agent.py)
with the controller's connection on its standard input, and the agent starts the engines. (ipyparallel's SSH launcher takes
eight connections an engine, one after the other; its Slurm launcher writes keys to a shared folder.) From then on:

- Signals, also SIGKILL, go to an engine's nanny, which answers when the engine does not.
- The nanny tells the hub when its engine ends; the agent keeps the exit code and the log.
- At the end, `end` is run on every host. If this kernel ends without it, the guardian here runs it; if the guardian cannot,
  since its host has died, the agents notice that the controller is gone.
- A host that is out of reach for less than `cut_s` loses nothing. A longer cut ends its engines: on the host by the
  agent, here by the hub, which misses their heartbeats."""

import base64
import contextlib
import io
import json
import math
import os
import shlex
import subprocess
import sys
import tarfile
import tempfile
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

import psutil

from fsdp_lab.base import __version__
from fsdp_lab.base.process import MARK, marked
from fsdp_lab.cluster import StartError, host_script
from fsdp_lab.cluster.addresses import Endpoint, Endpoints, new_token
from fsdp_lab.cluster.detached import EndCommand, package_path, write_end_commands
from fsdp_lab.cluster.engines import EngineProcess
from fsdp_lab.cluster.hosts import Hosts, SshHosts
from fsdp_lab.cluster.local_engines import ENVIRONMENT, LOOPBACK, EngineOrder, LocalEngines, controller_args

LOOK_S, START_S, STATUS_S, END_S = 30.0, 60.0, 5.0, 4.0  # how long hosts may take to answer
POST_MORTEM_S = 3.0  # for a host whose engine has ended, to say how
INSTALL_S = 1800.0
CHECK_S = 2.0  # between two looks whether engines have ended while they start
UNREACHED_S = 15.0  # how long a host that did not answer is not asked again
# What ranks import, and of which another version could give other results or not understand the kernel.
PACKAGES = ("torch", "ipyparallel", "pyzmq", "cloudpickle", "psutil", "numpy", "transformers", "safetensors")
SAME = ("torch", "ipyparallel", "cloudpickle", "transformers")
SENT_FOLDER = "~/.cache/fsdp_lab/code"
POLL_S = 0.02
Report = Callable[[str, int, int], None]  # stage, done, total
Unreached = Mapping[str, Sequence[str]]


# -- commands on hosts: input goes by pipes, never on a command line, where others could read it; nothing asks a question


@dataclass
class Command:
    """A command on one host, or on all hosts of a job."""

    process: subprocess.Popen[bytes]
    output: IO[bytes]
    error: IO[bytes]

    @property
    def text(self) -> str:
        self.output.seek(0)
        return self.output.read().decode(errors="replace")

    @property
    def error_text(self) -> str:
        self.error.seek(0)
        return self.error.read().decode(errors="replace").strip()

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


@dataclass(frozen=True, kw_only=True)
class HostAnswer:
    """What one host answered, or why it did not."""

    value: Any = None
    failure: str = ""


class Shell(ABC):
    """Runs `command` with `sent` on its standard input, on hosts that are known by name."""

    python: str

    @abstractmethod
    def start(self, hosts: Sequence[str], command: Sequence[str], sent: bytes) -> dict[str, Command]:
        """By host, or for several at once under the names joined by commas."""

    @abstractmethod
    def why(self, host: str, running: Command) -> str:
        """Why a command failed, as a sentence that names the host and the way out."""

    def wait(self, running: Mapping[str, Command], limit_s: float, *, stay: bool = False) -> dict[str, HostAnswer]:
        """Replies by host. Waits `limit_s` at most, and can be interrupted. What still runs then is ended, unless it is to
        `stay` after its reply."""
        kept = False
        try:
            end_s = time.monotonic() + limit_s
            while time.monotonic() < end_s and not all(
                c.process.poll() is not None or (stay and _replied(c.text)) for c in running.values()
            ):
                time.sleep(POLL_S)
            said = {name: s for names, c in running.items() for name, s in self._answers(names, c, limit_s).items()}
            kept = stay
            return said
        finally:
            for c in running.values() if not kept else ():
                c.end()

    def _answers(self, host: str, running: Command, limit_s: float) -> dict[str, HostAnswer]:
        if running.process.poll() is None:
            return {host: HostAnswer(failure=f"{host} did not answer within {limit_s:.0f} s")}
        try:
            return {host: HostAnswer(value=host_script.answer(running.text))}
        except ValueError:
            return {host: HostAnswer(failure=self.why(host, running))}

    def script(self, hosts: Sequence[str], what: str, limit_s: float, **arguments: Any) -> dict[str, HostAnswer]:
        """A function of host_script.py on each host."""
        return self.wait(self.start(hosts, [self.python, "-"], host_script.request(what, **arguments)), limit_s)


def started(command: Sequence[str], sent: bytes, environment: Mapping[str, str] | None = None) -> Command:
    """Raises StartError: there is no such program."""
    output, error = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115 (read when it has ended)
    with tempfile.TemporaryFile() as input_:
        input_.write(sent)
        input_.seek(0)
        own = {**os.environ, **(environment or {})}
        try:
            pipes: dict[str, Any] = {"stdin": input_, "stdout": output, "stderr": error}
            process = subprocess.Popen(command, start_new_session=True, env=own, **pipes)
        except FileNotFoundError:
            why = f"there is no {command[0]} on this machine: install it, or start the kernel where it is"
            raise StartError(why) from None
    return Command(process, output, error)


def _replied(output: str) -> bool:
    try:
        host_script.answer(output)
    except ValueError:
        return False
    return True


# -- engines on hosts -------------------------------------------------------------------------------------------------


@dataclass
class RankHost:
    """One host, by the name under which its shell finds it."""

    name: str
    ranks: int = 0  # how many it is to have
    code: str = ""  # the folder with fsdp_lab there
    sent: bool = False  # whether it was sent
    id: str = ""
    pids: set[int] = field(default_factory=set)  # of engines that were started


class HostEngines(LocalEngines, ABC):
    """Engines on other hosts, whose `_allocate` says which they are."""

    local = False
    shell: Shell
    _started: dict[str, set[int]]  # pids of the engines that were started last, by host
    _checked_s: float

    def __init__(self, order: EngineOrder, hosts: Hosts, report: Report) -> None:
        """Of a former kernel, the controller here, the agents, a Slurm job with its steps and the tunnels have gone on."""
        self._asked, self._report_stage, self._variables = hosts, report, dict(order.environment)
        self._hosts: dict[str, RankHost] = {}
        self._unreached_s: dict[str, float] = {}  # by host, when it did not answer, on the monotonic clock
        self._exits: dict[tuple[str, int], int | None] = {}  # exit codes (None: unknown), by the host's id and the pid
        self._logs: dict[tuple[str, int], str] = {}
        self._endpoint: Endpoint | None = None  # of the controller, as the hosts reach it; None: through tunnels
        self.notes: tuple[str, ...] = ()
        super().__init__(order, 1)
        if order.former is not None:
            self._take_over(order.former[0].where)

    @property
    def _where(self) -> dict[str, Any]:
        hosts = [{**asdict(host), "pids": sorted(host.pids)} for host in self._hosts.values()]
        endpoint = self._endpoint and asdict(self._endpoint)
        return {"hosts": hosts, "endpoint": endpoint, "controller": self.controller_pid}

    def _take_over(self, where: Mapping[str, Any]) -> None:
        """The hosts that `_where` of a former kernel described."""
        self._hosts = {d["name"]: RankHost(**{**d, "pids": set(d["pids"])}) for d in where["hosts"]}
        self._endpoint = where["endpoint"] and Endpoint(**where["endpoint"])

    @abstractmethod
    def _allocate(self) -> list[str]:
        """The names of the hosts. Sets `shell`. Raises StartError."""

    def _before_controller(self) -> None:
        names = self._allocate()
        self._report_stage("looking at hosts", 0, len(names))
        root = package_path().partition(os.pathsep)[0]
        if Path(root).name in ("site-packages", "dist-packages"):
            root = ""  # the hosts have other packages there, if the folder is shared: theirs count
        token = new_token()
        with contextlib.closing(Endpoints(token)) as listening:
            endpoints = [d for d in listening.open if ":" not in d.address]
            tried = [(d.address, d.port) for d in endpoints]
            asked = {"packages": PACKAGES, "token": token, "code": root, "endpoints": tried}
            looked = self._ask_all(names, "look", LOOK_S, **asked)
        for name, facts in looked.items():
            self._hosts[name] = RankHost(name=name, ranks=self._asked.each or facts["gpus"] or 1, code=root)
        self._check_software(looked)
        self._endpoint = self._choose_endpoint(endpoints, {name: f["unreached"] for name, f in looked.items()})
        write_end_commands(self._folder, self._end_commands())

    # -- looking ----------------------------------------------------------------------------------------------------

    def _ask_all(self, names: Sequence[str], what: str, limit_s: float, **arguments: Any) -> dict[str, Any]:
        """Returns the answers of all hosts. Raises StartError for the first that does not answer."""
        said = self.shell.script(names, what, limit_s, **arguments)
        if failed := [s.failure for s in said.values() if s.failure]:
            raise StartError(failed[0])
        return {name: s.value for name, s in said.items()}

    def _choose_endpoint(self, endpoints: Sequence[Endpoint], unreached: Unreached) -> Endpoint | None:
        """The first endpoint that all hosts reach. Raises StartError."""
        for i, endpoint in enumerate(endpoints):
            if not any(why[i] for why in unreached.values()):
                return endpoint
        name = max(unreached, key=lambda name: sum(map(bool, unreached[name])))
        tried = [f"{d}: {why}" for d, why in zip(endpoints, unreached[name], strict=True) if why]
        why = ", ".join(tried) or "it has no address"
        raise StartError(f"{name} does not reach this machine: {why}; open the ports between them")

    def _check_software(self, looked: Mapping[str, Mapping[str, Any]]) -> None:
        """Raises StartError for a host whose Python or packages would not do; with `sync` they are installed first."""
        here = {name: host_script.version(name) for name in PACKAGES}
        digest = host_script.folder_digest(str(Path(__file__).resolve().parents[1]))
        different = []
        for name, facts in looked.items():
            if facts["python"][:2] != list(sys.version_info[:2]):
                theirs, ours = (".".join(map(str, version)) for version in (facts["python"], sys.version_info[:3]))
                has = f"{name} has Python {theirs} at {facts['executable']}, and this kernel has {ours}"
                raise StartError(f"{has}: code is sent between them; give python=, the path of the same version there")
            lacking = [
                f"{p}=={here[p].partition('+')[0]}"
                for p, v in facts["packages"].items()
                if not v or (p in SAME and v.partition("+")[0] != here[p].partition("+")[0])
            ]
            if lacking and self._asked.sync:
                self._report_stage(f"installing {len(lacking)} packages on {name}", 0, 1)
                done = self._ask_all([name], "install", INSTALL_S, requirements=lacking)[name]
                if done["code"]:
                    raise StartError(f"{' '.join(lacking)} cannot be installed on {name}", done["said"])
            elif lacking:
                different.append(f"{name}: {facts['executable']} -m pip install {' '.join(lacking)}")
            if facts["code"] != digest and self._asked.sync:
                self._report_stage(f"sending fsdp_lab to {name}", 0, 1)
                code = {"data": packed_code(), "folder": f"{SENT_FOLDER}/{digest}"}
                self._hosts[name].code = self._ask_all([name], "unpack", INSTALL_S, **code)[name]["folder"]
                self._hosts[name].sent = True
            elif facts["code"] != digest:
                has = "another" if facts["code"] else "no"
                different.append(f"{name} has {has} fsdp_lab: install version {__version__} of this kernel's")
        if different:
            raise StartError(f"hosts lack what this kernel has, run there, or give sync=True: {'; '.join(different)}")

    # -- starting ---------------------------------------------------------------------------------------------------

    @property
    def _controller_args(self) -> list[str]:
        """The hub gives engines up no sooner than their agents do."""
        address = LOOPBACK if self._endpoint is None else self._endpoint.address
        return controller_args(engine_ip=address, lost_s=self._asked.cut_s)

    @property
    def most_ranks(self) -> int | None:
        return None if self._asked.gpus_per_host is None else self.default_ranks

    @property
    def default_ranks(self) -> int:  # type: ignore[override]
        return sum(host.ranks for host in self._hosts.values())

    def _launch(self, n: int, timeout_s: float) -> None:
        """Starts engines on hosts that answer: first on those that lack ranks, then beyond that in turns."""
        self._started = {}
        for name, s in self._agents(self._shares(n)).items():
            if s.failure:
                raise StartError(s.failure)
            host, self._started[name] = self._hosts[name], set(s.value["pids"])
            host.id = s.value["id"]
            host.pids |= self._started[name]
        self._checked_s = time.monotonic()

    def _shares(self, n: int) -> dict[str, int]:
        """Returns how many of n engines each host is to start. Raises StartError if no host answers."""
        said = self.shell.script(list(self._hosts), "status", STATUS_S, token=self.token)
        answered = [name for name, s in said.items() if not s.failure]
        if not answered:
            raise StartError(next(s.failure for s in said.values()))
        shares: Counter[str] = Counter()
        for name in answered:
            host = self._hosts[name]
            running = len(host.pids & set(said[name].value["running"]))  # others are the engines' nannies
            shares[name] = min(max(0, host.ranks - running), n - shares.total())
        if self._asked.gpus_per_host is not None and n > shares.total():
            room = f"the hosts that answer have GPUs for {shares.total()} of {n} more ranks"
            raise StartError(f"{room}: go on with fewer")
        for i in range(n - shares.total()):
            shares[answered[i % len(answered)]] += 1
        return {name: count for name, count in shares.items() if count}

    @abstractmethod
    def _agents(self, counts: Mapping[str, int]) -> dict[str, HostAnswer]:
        """Starts an agent on each of these hosts, with so many engines."""

    def _start_agent(self, name: str, count: int, *, stay: bool) -> dict[str, Command]:
        host = self._hosts[name]
        command = ["env", f"PYTHONPATH={host.code}", self.shell.python, "-P", "-m", "fsdp_lab.cluster.host_agent"]
        where = {"token": self.token, "connection": self._connection, "cwd": os.getcwd(), "sent": host.sent}
        how = {"count": count, "cut_s": self._asked.cut_s, "stay": stay}
        orders = {**where, **how, "environment": {**ENVIRONMENT, **self._variables}}
        return self.shell.start([name], command, json.dumps(orders).encode() + b"\n")

    def _check_started(self) -> None:
        if time.monotonic() - self._checked_s < CHECK_S:
            return
        self._checked_s = time.monotonic()
        for name, s in self.shell.script(list(self._started), "status", STATUS_S, token=self.token).items():
            for pid in map(str, () if s.failure else self._started[name]):
                if (code := s.value["exits"].get(pid)) is not None:
                    log = s.value["logs"].get(pid, "")
                    raise StartError(f"an engine on {name} ended while it was starting (exit code {code})", log)

    # -- what became of them ----------------------------------------------------------------------------------------

    def place_of(self, host_id: str) -> int:
        return next((i for i, host in enumerate(self._hosts.values()) if host.id == host_id), len(self._hosts))

    def _host_of(self, process: EngineProcess) -> RankHost | None:
        return next((h for h in self._hosts.values() if h.id == process.host_id and process.pid in h.pids), None)

    def exit_code(self, process: EngineProcess) -> int | None:
        self._read_end(process)
        return self._exits.get((process.host_id, process.pid))

    def why_gone(self, process: EngineProcess) -> str:
        host = self._host_of(process)
        unreached = host is not None and self._has_not_answered(host)
        return f"is out of reach, as is its host {host.name}," if host is not None and unreached else ""

    def _has_not_answered(self, host: RankHost) -> bool:
        """Whether it has just been asked in vain."""
        return time.monotonic() - self._unreached_s.get(host.name, -math.inf) < UNREACHED_S

    def log(self, process: EngineProcess) -> str:
        self._read_end(process)
        return self._logs.get((process.host_id, process.pid), "")

    def _read_end(self, process: EngineProcess) -> None:
        """Asks its host how an engine has ended, unless that is known, or the host has just not answered."""
        host, key = self._host_of(process), (process.host_id, process.pid)
        deadline = time.monotonic() + POST_MORTEM_S
        while host is not None and key not in self._exits and not self._has_not_answered(host):
            said = self.shell.script([host.name], "status", POST_MORTEM_S, token=self.token)[host.name]
            if said.failure:
                self._unreached_s[host.name] = time.monotonic()
                return
            self._exits |= {(host.id, int(pid)): code for pid, code in said.value["exits"].items()}
            self._logs |= {(host.id, int(pid)): log for pid, log in said.value["logs"].items()}
            if process.pid in said.value["running"]:
                return
            if time.monotonic() > deadline:  # its agent has ended too; until then it may not have noticed yet
                self._exits.setdefault(key, None)

    def _end_all(self) -> bool:
        if self._hosts:  # on one that does not answer the agent ends them
            self.shell.script(list(self._hosts), "end", END_S, token=self.token)
        return True

    @abstractmethod
    def _end_commands(self) -> list[EndCommand]:
        """Returns what the guardian runs if this kernel cannot."""


def packed_code() -> str:
    """This package's source, as a compressed archive in base64."""
    root, data = Path(__file__).resolve().parents[1], io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz") as archive:
        for path in sorted(root.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                archive.add(path, arcname=f"fsdp_lab/{path.relative_to(root)}")
    return base64.b64encode(data.getvalue()).decode()


# -- by SSH ----------------------------------------------------------------------------------------------------------

CONNECT_S = 8  # for ssh to reach a host
ALIVE_S, SILENT_S = 5, 15  # between two questions whether a host is there; how long it may not answer
TUNNEL_S = 1.0  # for ssh to refuse a forwarded port


class SshShell(Shell):
    """By ssh, one connection for each command and host. `args`: for ssh, such as ["-F", "config"]."""

    def __init__(self, python: str, args: Sequence[str] = ()) -> None:
        self.python = python
        self._args = list(args)

    def _ssh(self, silent_s: float) -> list[str]:
        """`silent_s`: after which a connection is given up."""
        most = max(1, math.ceil(silent_s / ALIVE_S))
        options = f"-o BatchMode=yes -o ConnectTimeout={CONNECT_S} -o ServerAliveInterval={ALIVE_S}"
        return ["ssh", "-T", *self._args, *options.split(), "-o", f"ServerAliveCountMax={most}"]

    def command(self, host: str, command: Sequence[str]) -> list[str]:
        return [*self._ssh(SILENT_S), host, "--", shlex.join(command)]

    def start(self, hosts: Sequence[str], command: Sequence[str], sent: bytes) -> dict[str, Command]:
        return {host: started(self.command(host, command), sent) for host in hosts}

    def tunnel(self, host: str, ports: Sequence[int], environment: Mapping[str, str], silent_s: float) -> Command:
        """Makes ports of this machine's loopback appear on a host's; runs until it is ended."""
        forwards = [word for port in ports for word in ("-R", f"127.0.0.1:{port}:127.0.0.1:{port}")]
        command = [*self._ssh(silent_s), "-N", "-o", "ExitOnForwardFailure=yes", *forwards, host]
        return started(command, b"", environment)

    def why(self, host: str, running: Command) -> str:
        code, lines = running.process.returncode, running.error_text.splitlines()
        line = next((text for text in reversed(lines) if text.strip()), f"exit code {code}").strip()
        if code == 255:
            hint = "with a key, and a known host; names and ports belong in ~/.ssh/config"
            return f"ssh to {host} failed ({line}): it must work without a question, {hint}"
        if code in (126, 127):
            hint = "give python=, the path there of a Python in whose environment fsdp_lab or at least its requirements"
            return f"{host} has no {self.python} ({line}): {hint} are installed"
        return f"{host} failed: {line}"


class SshEngines(HostEngines):
    """Where hosts cannot connect to this machine, as to a laptop behind a router, their engines come through SSH too."""

    _asked: SshHosts
    shell: SshShell
    _tunnels: Mapping[str, Command] = {}

    def _allocate(self) -> list[str]:
        self.shell = SshShell(self._asked.path, self._asked.ssh_args)
        return list(self._asked.names)

    def _take_over(self, where: Mapping[str, Any]) -> None:
        super()._take_over(where)
        self._allocate()

    def _choose_endpoint(self, endpoints: Sequence[Endpoint], unreached: Unreached) -> Endpoint | None:
        if self._asked.tunnel:
            return None
        try:
            return super()._choose_endpoint(endpoints, unreached)
        except StartError:
            if self._asked.tunnel is False:
                raise
            self.notes += ("the hosts reach this machine through SSH alone",)
            return None

    def _agents(self, counts: Mapping[str, int]) -> dict[str, HostAnswer]:
        if self._endpoint is None:
            self._open_tunnels(counts)
        running: dict[str, Command] = {}
        for name, n in counts.items():
            running |= self._start_agent(name, n, stay=False)
        return self.shell.wait(running, START_S)

    def _open_tunnels(self, names: Iterable[str]) -> None:
        """Raises StartError."""
        numbers = [v for value in self._connection.values() for v in (value if isinstance(value, list) else [value])]
        ports = sorted({v for v in numbers if isinstance(v, int) and not isinstance(v, bool)})
        running = []
        for process in marked(self.token):  # also those of a former kernel
            with contextlib.suppress(psutil.Error):  # it has just ended
                running.append(process.cmdline())
        new = [name for name in names if not any("-R" in words and words[-1] == name for words in running)]
        opened = {name: self.shell.tunnel(name, ports, {MARK: self.token}, self._asked.cut_s) for name in new}
        self._tunnels = {**self._tunnels, **opened}
        deadline = time.monotonic() + TUNNEL_S
        while new and time.monotonic() < deadline:
            time.sleep(0.02)
            for name in new:
                if self._tunnels[name].process.poll() is not None:
                    why = self._tunnels[name].error_text or "ssh ended"
                    raise StartError(f"no tunnel from {name} to this machine can be opened: {why}")

    def _end_all(self) -> bool:
        ended = super()._end_all()
        for tunnel in self._tunnels.values():
            tunnel.end()
        return ended

    def _end_commands(self) -> list[EndCommand]:
        sent = host_script.request("end", token=self.token).decode()
        return [(self.shell.command(name, [self.shell.python, "-"]), sent) for name in self._hosts]
