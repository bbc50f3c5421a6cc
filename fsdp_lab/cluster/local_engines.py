"""`LocalEngines`: engines on this machine, started by this kernel or a former one; and how ipyparallel's launchers run."""

import asyncio
import contextlib
import logging
import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import ipyparallel as ipp
import zmq
from traitlets.config import Config

from fsdp_lab.base.process import HOST_MEMORY, MARK, Identity, end, machine, marked, sweep, usable_cores
from fsdp_lab.cluster import ClusterError, StartError
from fsdp_lab.cluster.detached import Claimed, DetachedCluster, Guardian, package_path, private_folder, remove_private
from fsdp_lab.cluster.engine_server import SOCKET, ForkedEngineSetLauncher, start_server
from fsdp_lab.cluster.engines import EngineProcess, Engines

ATTACH_S = 10.0  # for the client to reach running engines
OUTPUT_S = 5.0  # for what a cell wrote to arrive, after its end
# The client remembers the signatures of its messages against replays, by default of 65,536.
SIGNATURES = 2048
BEAT_S = 0.2  # short: the hub registers an engine after two heartbeats
LOST_S = 10.0  # a native thread sends heartbeats: only a suspended machine or a stopped process misses so many
LOOPBACK = "127.0.0.1"
LOOPBACK_NAME = "lo0" if sys.platform == "darwin" else "lo"  # torch's ranks would choose one that other machines reach
ENVIRONMENT = {  # of all engines
    **HOST_MEMORY,
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # torch numbers GPUs as NVML does, on which placement relies
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUNBUFFERED": "1",
}
# Connections are encrypted, and only who can read the connection file can make one: a stranger's garbage, which stalls a
# client of ipyparallel, is dropped by ZeroMQ. Messages are signed too; without a key each client warns of that. In a file,
# because others can read a command line.
CONTROLLER_CONFIG = """\
c = get_config()
c.IPController.enable_curve = {curve}
c.Session.key = {key!r}
"""
T = TypeVar("T")
OnEnd = Callable[[int, int | None], None]  # pid, exit code; called on the launcher thread


@dataclass(frozen=True, kw_only=True)
class EngineOrder:
    """What all kinds of engines are given."""

    token: str
    environment: Mapping[str, str]  # the user's
    on_end: OnEnd
    timeout_s: float  # for the controller
    former: Claimed | None = None  # what a former kernel left; before `reach` it can only be detached or closed


class LocalEngines(Engines):
    """A private controller and engines on this machine: on loopback, with a private folder, ended with this kernel. The
    constructor and `add` raise StartError, with the last lines of the log, and leave nothing behind."""

    owned = local = True
    default_ranks = 2
    _connection: Mapping[str, Any]  # with which an engine reaches the controller

    def __init__(self, order: EngineOrder, ranks: int, *, forked: bool = False, rank_module: str | None = None) -> None:
        """`ranks`: that share this host. `forked`: a server that imports `rank_module`, or the package's own code, forks the
        engines; else each imports."""
        self.token, self._on_end, former = order.token, order.on_end, order.former
        self._environment = engine_environment(order.token, ranks, order.environment)
        self._imported = rank_module, {**os.environ, **order.environment}  # what the server imports, and where
        self._exit_codes: dict[int, int | None] = {}
        self._launchers: dict[int, Any] = {}  # pid -> ipyparallel's launcher of one engine
        self._newest: list[int] = []  # pids of the engines that were started last
        self._cluster: Any = None
        self.client = self._user_client = None
        self._server: subprocess.Popen[bytes] | None = None  # that forks engines
        self._record: DetachedCluster | None = None  # while the engines may outlive this kernel
        self._guardian: Guardian | None = None
        self._closed, self.attached = False, former is not None
        if former is not None:
            self._record, self._guardian = former
            self._folder, self._loop = self._record.folder, LauncherLoop()
            return
        try:
            self._folder = private_folder()
        except OSError as e:
            why = f"the engines need a private folder for temporary files and none can be made: {e}"
            raise StartError(f"{why}; set TMPDIR to a folder that you may write to") from None
        self._loop = LauncherLoop()
        try:
            self._guardian = Guardian(order.token, self._folder)
            if forked:
                self._server = start_server(self._folder, self._environment, rank_module)
            self._before_controller()
            self.client = self._loop.run(self._open(), order.timeout_s)
        except BaseException as e:
            log = "" if self._controller is None else last_lines(self._controller.get_output())
            self.close()
            if isinstance(e, Exception):
                raise start_error("ipyparallel's controller did not start", e, log, order.timeout_s) from None
            raise

    def _before_controller(self) -> None:
        """Finds out what is to be known before the controller is started. Raises StartError."""

    @property
    def _controller_args(self) -> list[str]:
        return controller_args()

    def reach(self) -> None:
        """Reaches the engines of a former kernel. Raises StartError: they cannot be reached, or some are gone."""
        assert self._record is not None
        try:
            self.client = self._loop.run(self._reopen(), ATTACH_S)
        except Exception as e:
            raise start_error("the engines cannot be reached", e, "", ATTACH_S) from None
        if missing := set(self._record.engines) - set(self.client.ids):
            raise StartError(f"{len(missing)} of {len(self._record.engines)} engines have ended")

    async def _reopen(self) -> Any:
        self._write_config()
        (file,) = (self._folder / "security").glob("cluster-*.json")  # ipyparallel keeps it up to date
        self._cluster = ipp.Cluster.from_file(str(file), **cluster_options())
        if (self._folder / SOCKET).exists():
            self._cluster.engine_launcher_class = ForkedEngineSetLauncher
        ours = {p.pid for p in marked(self.token)}  # a pid in the file may be another process's by now
        if self.controller_pid not in ours:
            raise StartError("ipyparallel's controller has ended")
        for engine_set in self._cluster.engines.values():
            self._follow(x for x in engine_set.launchers.values() if x.pid in ours)
        self._cluster.controller.on_stop(self._process_ended)
        return await self._connect()

    def _write_config(self) -> None:
        config = self._folder / "ipcontroller_config.py"
        config.touch(mode=0o600)
        config.write_text(CONTROLLER_CONFIG.format(curve=zmq.has("curve"), key=secrets.token_hex(32).encode()))

    async def _open(self) -> Any:
        self._write_config()
        options = cluster_options() | ({} if self._server is None else {"engines": ForkedEngineSetLauncher})
        self._cluster = ipp.Cluster(profile_dir=str(self._folder), controller_args=self._controller_args, **options)
        await self._cluster.start_controller(environment=dict(self._environment))
        self._cluster.controller.on_stop(self._process_ended)
        return await self._connect()

    async def _connect(self) -> Any:
        info = await self._cluster.controller.get_connection_info()
        self._connection = info["engine"]
        client = ipp.Client(info["client"], cluster=None)
        client.session.digest_history_size = SIGNATURES
        return client

    @property
    def forked(self) -> bool:  # type: ignore[override]
        return self._server is not None

    @property
    def user_client(self) -> Any:
        """A separate client: what a notebook does with it (purge, wait for all) does not affect our calls."""
        if self._user_client is None:
            info = self._loop.run(self._cluster.controller.get_connection_info(), 10)
            self._user_client = client = ipp.Client(info["client"], cluster=None)
            # What a rank prints before the controller knows of the client's subscription is lost.
            for patience_s in (0.05, 0.1, 0.2, 0.4, 0.8) if client.ids else ():
                if client[:].apply_async(int).wait_for_output(patience_s):
                    break
        return self._user_client

    @property
    def most_ranks(self) -> int | None:
        return None

    def add(self, n: int, ready: Callable[[int], None], timeout_s: float = 60) -> list[int]:
        before, reported = set(self.client.ids), -1
        if self.forked:
            timeout_s *= 3  # the server imports first; engines that do it later have twice as long for that
        self._launch(n, timeout_s)
        deadline = time.monotonic() + timeout_s
        while True:
            new = sorted(set(self.client.ids) - before)
            if len(new) != reported:
                reported = len(new)
                ready(reported)
            if len(new) >= n:
                return new
            self._check_started()
            if time.monotonic() > deadline:
                late = f"{n - len(new)} of {n} engines did not reach this machine within {timeout_s:.0f} s"
                raise StartError(f"{late}: it is busy, or ports between hosts are closed")
            time.sleep(0.03)

    def _launch(self, n: int, timeout_s: float) -> None:
        """Starts `n` engines. Raises StartError."""
        try:
            self._loop.run(self._start(n), timeout_s)
        except Exception as e:
            raise start_error("the engines did not start", e, "", timeout_s) from None

    async def _start(self, n: int) -> None:
        # The environment reaches engines through the launcher alone, which reads it when the set starts.
        set_id = await self._cluster.start_engines(n, environment=dict(self._environment))
        self._newest = self._follow(self._cluster.engines[set_id].launchers.values())

    def _check_started(self) -> None:
        """Raises StartError if an engine that was just started has ended."""
        if pid := next((pid for pid in self._newest if pid in self._exit_codes), None):
            code, log = self._exit_codes[pid], self._log(pid)
            raise StartError(f"an engine ended while it was starting (exit code {code})", log)

    def _follow(self, launchers: Iterable[Any]) -> list[int]:
        """Returns the pids of these launchers, whose ends are noticed from now on."""
        started = {launcher.pid: launcher for launcher in launchers}
        self._launchers |= started
        for launcher in started.values():
            launcher.on_stop(self._process_ended)
        return list(started)

    def _process_ended(self, data: Mapping[str, Any]) -> None:
        """Called on the launcher thread, for an engine or the controller."""
        pid, code = int(data["pid"]), data.get("exit_code")
        self._exit_codes[pid] = code if code is None else int(code)
        self._on_end(pid, self._exit_codes[pid])

    @property
    def _controller(self) -> Any:
        return None if self._cluster is None else self._cluster.controller

    @property
    def controller_pid(self) -> int:
        return -1 if self._controller is None else int(self._controller.pid)

    @property
    def broken(self) -> bool:
        return self.controller_pid in self._exit_codes

    def exit_code(self, process: EngineProcess) -> int | None:
        return self._exit_codes.get(process.pid)

    def log(self, process: EngineProcess) -> str:
        return self._log(process.pid)

    def _log(self, pid: int) -> str:
        launcher = self._launchers.get(pid)
        return "" if launcher is None else last_lines(launcher.get_output())

    def end(self, processes: Sequence[EngineProcess], term_s: float) -> None:
        if self.local:
            self._end([process.pid for process in processes], term_s)
            return
        for name in ("SIGTERM", "SIGKILL"):  # by the engines' nannies, which answer while the engines do not
            if present := {process.engine for process in processes} & set(self.client.ids):
                with self.sending:
                    self.client.send_signal(name, targets=sorted(present), block=False)
            deadline = time.monotonic() + term_s
            while present & set(self.client.ids) and time.monotonic() < deadline:
                time.sleep(0.02)

    def _end(self, pids: Sequence[int], term_s: float) -> None:
        # A launcher's psutil.Process dates from the start of the engine, so its pid cannot be another process's by now.
        running = [pid for pid in pids if pid in self._launchers and pid not in self._exit_codes]
        end([self._launchers[pid].process for pid in running], term_s=term_s)

    def _end_all(self) -> bool:
        """Ends all engines. Returns whether it is known that they have ended, or will."""
        self._end(list(self._launchers), term_s=0.7)  # torch takes seconds to exit; its sessions are closed by now
        return True

    def keep(self) -> bool:
        """Ends the engines, and keeps the server, its imports and the controller until `take`. The guardian ends them with
        the kernel. Returns whether it could; else all is only to be closed."""
        if self._closed or self._server is None or self._record is not None or self.broken:
            return False
        self._close_clients()
        self._end_all()
        return True

    def take(self, order: EngineOrder, ranks: int, rank_module: str | None) -> bool:
        """Serves another lab with what `keep` left. Returns False, and closes, where that would import other things."""
        fits = self._imported == (rank_module, {**os.environ, **order.environment}) and not self.broken
        if fits and self._server is not None and self._server.poll() is None:
            self._on_end, self._launchers, self._exit_codes = order.on_end, {}, {}
            self._environment = engine_environment(self.token, ranks, order.environment)
            with contextlib.suppress(Exception):  # then all is started anew
                self._user_client, self.client = None, self._loop.run(self._connect(), ATTACH_S)
                self.imported = True
                return True
        self.close()
        return False

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.unpersist()
        self._close_clients()
        if self._cluster is not None:
            self._cluster.cluster_file = ""  # else an end that is reported late makes the folder again
        ended = self._end_all()
        if self._server is not None:
            self._server.terminate()
        controller = self._controller
        if controller is not None and controller.process is not None:
            end([controller.process], term_s=1.0)
        left = sweep(self.token)
        if self._server is not None:
            self._server.wait()
        # The loop stops when ipyparallel's waiting threads have reported to it, which they do at once.
        launchers = [x for x in [*self._launchers.values(), controller] if x is not None]
        deadline = time.monotonic() + 1
        while (running := any(x.state == "running" for x in launchers)) and time.monotonic() < deadline:
            time.sleep(0.01)
        if not running:
            self._loop.stop()
        if self._guardian is not None and not left:
            if ended:
                self._guardian.release()
            else:
                self._guardian.detach()  # it tries again
        remove_private(self._folder)

    def _close_clients(self) -> None:
        for client in (self.client, self._user_client):
            if client is not None:
                with contextlib.suppress(Exception):
                    client.close(linger=0)

    # -- persistence --------------------------------------------------------------------------------------------------

    def persist(self, **fields: Any) -> None:
        assert self._guardian is not None
        self._record = DetachedCluster(
            folder=self._folder,
            token=self.token,
            machine=machine(),
            guardian=self._guardian.identity,
            owner=Identity.this(),
            begun_unix_s=time.time(),
            where=self._where,
            **fields,
        )
        try:
            self._record.write()
        except OSError as e:
            hint = f"make room in {self._folder.parent}, or leave persist out"
            raise ClusterError(f"the ranks cannot be made persistent: {e}; {hint}") from None

    @property
    def _where(self) -> dict[str, Any]:
        """Returns the `where` of the `DetachedCluster` that is recorded."""
        return {}

    def unpersist(self) -> None:
        if self._record is not None:
            self._record.remove()
            self._record = None

    def detach(self) -> None:
        """See `Engines.detach`. Another kernel may have taken the engines over before this returns."""
        if self._record is None or self._guardian is None:
            raise ClusterError("these ranks are not persistent; give Lab(persist=True)")
        self._closed = True
        self._close_clients()
        if self._cluster is not None:
            self._cluster.cluster_file = ""  # from now on their owner writes it
        self._record.release()
        self._guardian.detach()


# -- ipyparallel's launchers -----------------------------------------------------------------------------------------


class LauncherLoop:
    """An asyncio loop on a separate thread, where ipyparallel's launchers run. Their own `_sync` methods would run in the
    caller's loop or in a temporary one, with no time limit."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fsdp_lab-launcher", daemon=True)
        self._thread.start()

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


def shown_execute(execute: Callable[..., Any], *code: Any, **options: Any) -> Any:
    """A view's `execute` of which each rank's output is shown. ipyparallel gives one id to all that comes before it streams,
    so that the last rank's is seen alone, and does not wait for what comes 2 s after the cell began."""
    result = execute(*code, **options)
    stream, wait = result._iopub_streaming_output_callback, result.wait_for_output
    result._iopub_streaming_output_callback = lambda of, sent, m: stream(of, sent, {**m, "parent_header": sent.header})
    result.wait_for_output = lambda timeout=-1: wait(OUTPUT_S if result.done() else timeout)
    return result


def cluster_options() -> dict[str, Any]:
    """Options of every `ipyparallel.Cluster` of ours: nothing is read from or written to the user's profile."""
    config = Config()
    config.EngineLauncher.engine_args = ["--log-level=WARN"]  # else an engine logs every request: megabytes a day
    log = logging.getLogger("fsdp_lab.cluster.ipyparallel")  # without one ipyparallel writes to the notebook
    if not log.handlers:
        log.addHandler(logging.NullHandler())
    log.propagate = False
    # Engines are started when the controller's files exist, so there is nothing to wait for.
    return {"config": config, "load_profile": False, "delay": 0, "shutdown_atexit": False, "log": log}


def controller_args(engine_ip: str = LOOPBACK, lost_s: float = LOST_S) -> list[str]:
    """Returns options of ipcontroller: engines reach it at `engine_ip`, and are given up after `lost_s` of silence."""
    return [
        # explicit, because a file in /etc/ipython may set other addresses
        *(f"--IPController.{whom}_ip={LOOPBACK}" for whom in ("client", "monitor")),
        f"--IPController.engine_ip={engine_ip}",
        f"--HeartMonitor.period={round(BEAT_S * 1e3)}",
        f"--HeartMonitor.max_heartmonitor_misses={round(lost_s / BEAT_S)}",
        "--IPController.use_threads=True",  # instead of six scheduler processes; saves about 300 MB
        "--log-level=ERROR",  # otherwise the hub logs a warning for every step event that it relays
    ]


def engine_environment(token: str, ranks: int, extra: Mapping[str, str]) -> dict[str, str]:
    """The environment of every process of a cluster. Variables that the user has set take precedence."""
    threads = str(max(1, usable_cores() // max(1, ranks)))
    defaults = {
        **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), threads),
        **dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), LOOPBACK_NAME),
        **ENVIRONMENT,
    }
    unset = {name: value for name, value in defaults.items() if name not in os.environ}
    return {**unset, "PYTHONPATH": package_path(), MARK: token, **extra}


def start_error(what: str, error: Exception, log: str, timeout_s: float) -> StartError:
    """One sentence for any exception of a start."""
    if isinstance(error, StartError):
        return error
    if isinstance(error, TimeoutError):
        why = f"no answer for {timeout_s:.0f} s"
    else:
        why = " ".join(str(error).split())[:300] or type(error).__name__
    return StartError(f"{what}: {why}", log)


def last_lines(text: str) -> str:
    return "\n".join(text.strip().splitlines()[-12:])
