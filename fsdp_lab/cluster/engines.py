"""Where engines come from: started here (`LocalEngines`), by a former kernel of ours (`KeptEngines`), or the user's own
(`GivenEngines`).

Both hand out engine ids and a connected `ipyparallel.Client`; which engine is which rank is not their business. Corners
of ipyparallel 9 that its documentation does not name are used in this package alone, with the reason beside each.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import ipyparallel as ipp
import psutil
from traitlets.config import Config

from fsdp_lab.cluster.errors import ClusterError, StartError
from fsdp_lab.cluster.guardian import Guardian, package_path
from fsdp_lab.cluster.kept import Kept, kept_clusters
from fsdp_lab.cluster.placement import usable_cores
from fsdp_lab.cluster.private import private_folder, remove_private
from fsdp_lab.cluster.processes import MARK, alive, end, marked, sweep
from fsdp_lab.host_memory import HOST_MEMORY
from fsdp_lab.identity import Identity, machine

T = TypeVar("T")

# The hub counts an engine as registered after two heartbeats, so a short period is a short start. An engine's heart is
# a native thread that beats while Python computes; 50 misses (10 s) is a machine that stands still, or a stopped
# process. A process that ended is noticed by its nanny at once, not by its heart. Threads in place of six scheduler
# processes save about 300 MB. The hub would log a warning for every step event that it relays. Where it listens is said
# here, because a file in /etc/ipython may say otherwise.
CONTROLLER_ARGS = (
    *(f"--IPController.{whom}_ip=127.0.0.1" for whom in ("client", "engine", "monitor")),
    "--HeartMonitor.period=200",
    "--HeartMonitor.max_heartmonitor_misses=50",
    "--IPController.use_threads=True",
    "--log-level=ERROR",
)
LOG_LINES = 12
ATTACH_S = 10.0  # for the client to reach engines that are there
SIGNATURES = 2048  # of messages that a client of ours remembers

OnDeath = Callable[[int, int | None], None]  # (pid, exit code if known); called on the launcher thread


class Engines(Protocol):
    """Engines that a cluster can use."""

    owned: bool  # whether we started them, and therefore may end them

    @property
    def broken(self) -> bool:
        """Whether the controller is gone, without which no engine can be reached."""

    @property
    def controller_pid(self) -> int: ...  # -1 where it is not ours

    @property
    def client(self) -> Any: ...  # ipyparallel.Client for our calls

    @property
    def user_client(self) -> Any: ...  # ipyparallel.Client for the user's %px cells

    def add(self, n: int, ready: Callable[[int], None], timeout_s: float) -> list[int]:
        """`n` more engines; `ready(k)` while they arrive. Returns their ids. Raises StartError."""

    def exit_code(self, pid: int) -> int | None: ...

    def log(self, pid: int) -> str: ...

    def end(self, pids: list[int], term_s: float) -> None:
        """Ends engines by their process ids. Does nothing where they are not ours."""

    def keep(self, **what: Any) -> None: ...

    def forget(self) -> None: ...

    def leave(self) -> None: ...

    def close(self) -> None: ...


class LauncherLoop:
    """An asyncio loop on a thread of its own, where ipyparallel's launchers live.

    Its own `_sync` methods would run in the caller's loop or in a temporary one, with no bound in time.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._main, name="fsdp_lab-launcher", daemon=True)
        self._thread.start()

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Raises TimeoutError after `timeout_s`; the work is cancelled then."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(timeout_s)
        except BaseException:
            future.cancel()
            raise

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(2)
        if not self._thread.is_alive():
            self._loop.close()


class LocalEngines:
    """A private controller and engines on this machine: loopback, in a private folder, ended with us.

    Raises:
        StartError: from the constructor and from `add`, with the last lines of the log; nothing is left behind.
    """

    owned = True
    _cluster: Any
    _client: Any
    _guardian: Guardian | None
    _kept: Kept | None

    def __init__(self, token: str, environment: Mapping[str, str], on_death: OnDeath, timeout_s: float = 60) -> None:
        self._prepare(token, environment, on_death)
        try:
            self._folder = private_folder()
        except OSError as e:
            raise StartError(
                f"the engines need a private folder for temporary files and none can be made: {e}; "
                "set TMPDIR to a folder that you may write to"
            ) from None
        self._loop = LauncherLoop()
        try:
            self._guardian = Guardian(token, self._folder)
            self._client = self._loop.run(self._open(), timeout_s)
        except BaseException as e:
            log = self._controller_log()
            self.close()
            if isinstance(e, Exception):
                raise start_error("ipyparallel's controller did not start", e, log, timeout_s) from None
            raise

    def _prepare(self, token: str, environment: Mapping[str, str], on_death: OnDeath) -> None:
        self._token, self._environment, self._on_death = token, dict(environment), on_death
        self._exit_codes: dict[int, int | None] = {}
        self._launchers: dict[int, Any] = {}  # pid -> ipyparallel's launcher of one engine
        self._cluster = self._client = None
        self._user_client: Any = None
        self._guardian = self._kept = None
        self._closed = False

    async def _open(self) -> Any:
        self._cluster = ipp.Cluster(profile_dir=str(self._folder), controller_args=list(CONTROLLER_ARGS), **plain())
        await self._cluster.start_controller(environment=dict(self._environment))
        return await self._connect()

    async def _connect(self) -> Any:
        self._cluster.controller.on_stop(self._ended)
        info = await self._cluster.controller.get_connection_info()
        client = frugal(ipp.Client(info["client"], cluster=None))
        if not (client.session.key or client.curve_serverkey):
            client.close(linger=0)
            raise StartError(
                "a configuration of ipyparallel on this machine takes the key from its messages: remove it"
            )
        return client

    @property
    def client(self) -> Any:
        return self._client

    @property
    def user_client(self) -> Any:
        """Another client than ours: what a notebook does with it (purge, wait for all) does not meet our calls."""
        if self._user_client is None:
            info = self._loop.run(self._cluster.controller.get_connection_info(), 10)
            self._user_client = ipp.Client(info["client"], cluster=None)
        return self._user_client

    def add(self, n: int, ready: Callable[[int], None], timeout_s: float = 60) -> list[int]:
        before = set(self._client.ids)
        try:
            started = self._loop.run(self._start(n), timeout_s)
        except Exception as e:
            raise start_error("the engines did not start", e, "", timeout_s) from None
        deadline, seen = time.monotonic() + timeout_s, -1
        while True:
            new = sorted(set(self._client.ids) - before)
            if len(new) != seen:
                seen = len(new)
                ready(seen)
            if len(new) >= n:
                return new
            gone = [pid for pid in started if pid in self._exit_codes]
            if gone:
                raise StartError(
                    f"an engine ended while it was starting (exit code {self._exit_codes[gone[0]]})", self.log(gone[0])
                )
            if time.monotonic() > deadline:
                raise StartError(
                    f"{n - len(new)} of {n} engines were not ready after {timeout_s:.0f} s; a busy machine is slow",
                    self.log(started[0]),
                )
            time.sleep(0.03)

    async def _start(self, n: int) -> list[int]:
        """Starts n engine processes; returns their pids."""
        # The environment is the launcher's only door to the engines; it is read when the set starts.
        set_id = await self._cluster.start_engines(n, environment=dict(self._environment))
        pids = []
        for launcher in list(self._cluster.engines[set_id].launchers.values()):
            self._follow(launcher)
            pids.append(launcher.pid)
        return pids

    def _follow(self, launcher: Any) -> None:
        self._launchers[launcher.pid] = launcher
        launcher.on_stop(self._ended)

    def _ended(self, data: Mapping[str, Any]) -> None:
        """On the launcher thread, when an engine's process has ended."""
        pid, code = int(data["pid"]), data.get("exit_code")
        self._exit_codes[pid] = code if code is None else int(code)
        self._on_death(pid, self._exit_codes[pid])

    @property
    def controller_pid(self) -> int:
        controller = self._controller
        return -1 if controller is None else int(controller.pid)

    @property
    def broken(self) -> bool:
        return self.controller_pid in self._exit_codes

    def exit_code(self, pid: int) -> int | None:
        return self._exit_codes.get(pid)

    def log(self, pid: int) -> str:
        launcher = self._launchers.get(pid)
        return "" if launcher is None else last_lines(launcher.get_output())

    def _controller_log(self) -> str:
        controller = self._controller
        return "" if controller is None else last_lines(controller.get_output())

    @property
    def _controller(self) -> Any:
        return None if self._cluster is None else self._cluster.controller

    def end(self, pids: list[int], term_s: float) -> None:
        processes = []
        for pid in pids:
            launcher = self._launchers.get(pid)
            if launcher is not None and pid not in self._exit_codes:
                processes.append(
                    launcher.process
                )  # a psutil.Process from the start: its pid cannot be another's by now
        end(processes, term_s=term_s)

    def close(self) -> None:
        """Ends everything that we started, in about 5 s at most; idempotent."""
        if self._closed:
            return
        self._closed = True
        self.forget()
        self._hang_up()
        self.end(list(self._launchers), term_s=0.7)  # torch takes seconds to leave; its sessions are closed by now
        controller = self._controller
        if controller is not None and controller.process is not None:
            end([controller.process], term_s=1.0)
        left = sweep(self._token)
        self._settle()
        if self._guardian is not None and not left:
            self._guardian.release()
        remove_private(self._folder)

    def _hang_up(self) -> None:
        for client in (self._client, self._user_client):
            if client is not None:
                with contextlib.suppress(Exception):
                    client.close(linger=0)

    # -- kept beyond the kernel -------------------------------------------------------------------------------------

    def keep(self, **what: Any) -> None:
        """From now on they outlive this kernel; `what` are those fields of `Kept` that are not known here."""
        assert self._guardian is not None
        self._kept = Kept(
            folder=self._folder,
            token=self._token,
            machine=machine(),
            guardian=self._guardian.identity,
            owner=Identity.this(),
            begun_unix_s=time.time(),
            **what,
        )
        try:
            self._kept.write()
        except OSError as e:
            raise ClusterError(
                f"the ranks cannot be kept: {e}; make room in {self._folder.parent}, or leave keep out"
            ) from None

    def forget(self) -> None:
        """They end with this kernel again."""
        if self._kept is not None:
            self._kept.forget()
            self._kept = None

    def leave(self) -> None:
        """Leaves them running for another kernel, which may be there before this returns. Raises ClusterError: not kept."""
        if self._kept is None or self._guardian is None:
            raise ClusterError("these ranks are not kept; give Lab(keep=True)")
        self._closed = True
        self._hang_up()
        if self._cluster is not None:
            self._cluster.cluster_file = ""  # what becomes of them is written by who has them
        self._kept.release()
        self._guardian.leave()

    def _settle(self) -> None:
        """Stops the launcher thread once ipyparallel's own waiting threads have reported to it; they do so at once."""
        controller = self._controller
        launchers = [x for x in [*self._launchers.values(), controller] if x is not None]
        deadline = time.monotonic() + 1
        while any(x.state == "running" for x in launchers) and time.monotonic() < deadline:
            time.sleep(0.01)
        if not any(x.state == "running" for x in launchers):
            self._loop.stop()


class KeptEngines(LocalEngines):
    """Engines that a former kernel has left, and this one has claimed. Before `open` they can only be left or closed."""

    def __init__(self, kept: Kept, guardian: Guardian, environment: Mapping[str, str], on_death: OnDeath) -> None:
        self._prepare(kept.token, environment, on_death)
        self._folder, self._kept, self._guardian = kept.folder, kept, guardian
        self._loop = LauncherLoop()

    def open(self) -> None:
        """Raises StartError: they cannot be reached, or some are gone."""
        assert self._kept is not None
        try:
            self._client = self._loop.run(self._open(), ATTACH_S)
        except Exception as e:
            raise start_error("the engines cannot be reached", e, "", ATTACH_S) from None
        if missing := set(self._kept.engines) - set(self._client.ids):
            raise StartError(f"{len(missing)} of {len(self._kept.engines)} engines have ended")

    async def _open(self) -> Any:
        (file,) = (self._folder / "security").glob("cluster-*.json")  # ipyparallel keeps it up to date
        self._cluster = ipp.Cluster.from_file(str(file), **plain())
        ours = {p.pid for p in marked(self._token)}  # a pid in the file may be another's by now
        if self.controller_pid not in ours:
            raise StartError("ipyparallel's controller has ended")
        for engine_set in self._cluster.engines.values():
            for launcher in [x for x in engine_set.launchers.values() if x.pid in ours]:
                self._follow(launcher)
        return await self._connect()


def take_over(asked: Mapping[str, Any], limit_s: float) -> tuple[Kept, Guardian] | None:
    """Claims the newest of the kept clusters that were asked for in the same words; None where there is none."""
    for kept in kept_clusters():
        if kept.free and kept.asked == asked:
            guardian = Guardian(kept.token, kept.folder)
            if (claimed := kept.claim(guardian.identity, limit_s)) is not None:
                return claimed, guardian
            guardian.release()
    return None


class GivenEngines:
    """Engines that the user started, by any launcher (MPI, Slurm, SSH, ...). They are used and never ended.

    Args:
        source: an ipyparallel Cluster that runs, a Client, or a string: a profile, a cluster id, a connection file.
    """

    owned = False
    broken = False
    controller_pid = -1

    def __init__(self, source: Any, timeout_s: float = 60) -> None:
        self._mine = not isinstance(source, ipp.Client)
        try:
            self._client = connect(source, timeout_s)
        except (OSError, TimeoutError, RuntimeError, ValueError, ipp.error.TimeoutError) as e:
            raise StartError(f"the given ipyparallel cluster ({source!r}) cannot be reached: {e}") from None
        deadline = time.monotonic() + min(10.0, timeout_s)
        while not self._client.ids and time.monotonic() < deadline:
            time.sleep(0.05)

    @property
    def client(self) -> Any:
        return self._client

    @property
    def user_client(self) -> Any:
        return self._client

    def add(self, n: int, ready: Callable[[int], None], timeout_s: float = 60) -> list[int]:
        raise StartError(
            f"{n} more engine{'s are' if n > 1 else ' is'} needed and this cluster is yours: start them with its "
            "launcher, then try again"
        )

    def exit_code(self, pid: int) -> int | None:
        return None

    def log(self, pid: int) -> str:
        return ""

    def end(self, pids: list[int], term_s: float) -> None:
        """Not ours to end."""

    def keep(self, **what: Any) -> None:
        raise ClusterError("the engines of a given cluster are yours, and stay anyway")

    def forget(self) -> None:
        """They stay anyway."""

    leave = keep

    def close(self) -> None:
        if self._mine:
            with contextlib.suppress(Exception):
                self._client.close(linger=0)


def in_the_open(client: Any, hosts: Sequence[str]) -> tuple[str, ...]:
    """What others on the network can read or reach, in words; `hosts` are those of the engines of a given cluster."""
    told = []
    encrypted = client.curve_serverkey or client._config["registration"].startswith("tcp://127.")  # by an SSH tunnel
    if set(hosts) != {socket.gethostname()} and not encrypted:
        told.append(
            "messages between this kernel and your engines are signed and not encrypted; start ipcontroller with "
            "IPP_ENABLE_CURVE=1 in its environment"
        )
    if len(set(hosts)) > 1:
        told.append(
            "what ranks on several machines send each other (torch's store, Gloo, NCCL) is neither encrypted nor signed; "
            "use a network where nobody else is"
        )
    return tuple(told)


def frugal(client: Any) -> Any:
    """The client remembers the signature of every message against a replay, by default of 65,536."""
    client.session.digest_history_size = SIGNATURES
    return client


def connect(source: Any, timeout_s: float) -> Any:
    """An ipyparallel Client for what the user gave."""
    if isinstance(source, ipp.Client):
        return source
    if isinstance(source, ipp.Cluster):
        if source.controller is None:
            raise OSError("it is not running; start it first, with start_cluster_sync()")
        return source.connect_client_sync()
    if not isinstance(source, (str, os.PathLike)):
        raise ClusterError(f"cluster={source!r}: give an ipyparallel Cluster or Client, a profile or cluster id")
    return ipp.Client(str(connection_file(os.fspath(source))), timeout=timeout_s)


def connection_file(name: str, ipython_dir: Path | None = None) -> Path:
    """The client's connection file of a profile, a cluster id, or the path of one.

    Raises:
        OSError: no such cluster runs; the sentence says where it was looked for.
    """
    if name.endswith(".json"):
        if Path(name).is_file():
            return Path(name)
        raise OSError(f"there is no file {name}")
    if ipython_dir is None:
        from IPython.paths import get_ipython_dir

        ipython_dir = Path(get_ipython_dir())
    by_profile = ipython_dir / f"profile_{name}" / "security"
    found = [*sorted(by_profile.glob("ipcontroller*-client.json"), key=lambda p: p.stat().st_mtime)][-1:]
    found += ipython_dir.glob(f"profile_*/security/ipcontroller-{name}-client.json")
    if not found:
        raise OSError(
            f"{ipython_dir} has neither a running profile nor a cluster id {name!r}; ipcluster start starts one"
        )
    return Path(found[0])


def start_error(what: str, error: Exception, log: str, timeout_s: float) -> StartError:
    """One sentence for whatever came out of a start."""
    if isinstance(error, StartError):
        return error
    if isinstance(error, TimeoutError):
        why = f"nothing was heard of it for {timeout_s:.0f} s"
    elif isinstance(error, PermissionError):
        why = f"{error.filename or 'a file'} may not be written or run"
    else:
        why = " ".join(str(error).split())[:300] or type(error).__name__
    if "Address already in use" in log or "Address already in use" in why:
        why = "a port that it wanted is in use; try again, other ports are taken"
    return StartError(f"{what}: {why}", log)


def last_lines(text: str) -> str:
    return "\n".join(text.strip().splitlines()[-LOG_LINES:])


def plain() -> dict[str, Any]:
    """What every cluster of ours has: nothing from the user's profile, so no surprise, and no file of theirs is touched."""
    return {
        "config": quiet_engines(),
        "load_profile": False,
        "delay": 0,  # engines are started when the controller's files are there, so nothing needs to be waited for
        "shutdown_atexit": False,
        "log": quiet_log(),
    }


def quiet_engines() -> Config:
    """An engine logs every request it handles otherwise: megabytes a day."""
    config = Config()
    config.EngineLauncher.engine_args = ["--log-level=WARN"]
    return config


def quiet_log() -> logging.Logger:
    """ipyparallel writes its launchers' news to the notebook unless it is given a log."""
    log = logging.getLogger("fsdp_lab.cluster.ipyparallel")
    if not log.handlers:
        log.addHandler(logging.NullHandler())
    log.propagate = False
    return log


def engine_environment(token: str, ranks: int, extra: Mapping[str, str]) -> dict[str, str]:
    """What every process of a cluster gets in its environment. What the user set wins."""
    threads = str(max(1, usable_cores() // max(1, ranks)))
    wanted = {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        **HOST_MEMORY,
        **dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), loopback()),
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # torch counts GPUs as nvidia-smi does: placement names the right one
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }
    return {
        **{name: value for name, value in wanted.items() if name not in os.environ},
        "PYTHONPATH": package_path(),
        MARK: token,
        **extra,
    }


def loopback() -> str:
    """The name of the interface that no other machine reaches; torch's ranks would take another one."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(a.family == socket.AF_INET and a.address == "127.0.0.1" for a in addresses):
            return str(name)
    return "lo"


def still_there(pid: int) -> bool:
    """Whether a process of this machine runs."""
    try:
        return alive(psutil.Process(pid))
    except psutil.Error:
        return False
