"""How ipyparallel's launchers are run and configured, and how a failed start is described."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

import psutil
from traitlets.config import Config

from fsdp_lab.cluster.errors import StartError
from fsdp_lab.cluster.guardian import package_path
from fsdp_lab.cluster.placement import usable_cores
from fsdp_lab.cluster.processes import MARK
from fsdp_lab.core.host_memory import HOST_MEMORY

T = TypeVar("T")

# The hub counts an engine as registered after two heartbeats, so a short period gives a short start. An engine's heart is a
# native thread that beats while Python computes; 50 misses (10 s) mean a machine that stands still, or a stopped process.
# The exit of a process is noticed by its nanny at once, not by its heart. Threads instead of six scheduler processes save
# about 300 MB. The hub would log a warning for every step event that it relays. The listening addresses are explicit,
# because a file in /etc/ipython may set others.
CONTROLLER_ARGS = (
    *(f"--IPController.{whom}_ip=127.0.0.1" for whom in ("client", "engine", "monitor")),
    "--HeartMonitor.period=200",
    "--HeartMonitor.max_heartmonitor_misses=50",
    "--IPController.use_threads=True",
    "--log-level=ERROR",
)
LOG_LINES = 12


class LauncherLoop:
    """An asyncio loop on a thread of its own, where ipyparallel's launchers live.

    Their own `_sync` methods would run in the caller's loop or in a temporary one, with no time limit.
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


def cluster_options() -> dict[str, Any]:
    """For every `ipyparallel.Cluster` of ours: nothing is read from or written to the user's profile."""
    config = Config()
    config.EngineLauncher.engine_args = ["--log-level=WARN"]  # else an engine logs every request: megabytes a day
    log = logging.getLogger("fsdp_lab.cluster.ipyparallel")  # without one ipyparallel writes to the notebook
    if not log.handlers:
        log.addHandler(logging.NullHandler())
    log.propagate = False
    return {
        "config": config,
        "load_profile": False,
        "delay": 0,  # engines are started when the controller's files exist, so there is nothing to wait for
        "shutdown_atexit": False,
        "log": log,
    }


def engine_environment(token: str, ranks: int, extra: Mapping[str, str]) -> dict[str, str]:
    """The environment of every process of a cluster. Variables that the user has set win."""
    threads = str(max(1, usable_cores() // max(1, ranks)))
    defaults = {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        **HOST_MEMORY,
        **dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), loopback()),
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # torch numbers GPUs as NVML does, on which placement relies
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }
    return {
        **{name: value for name, value in defaults.items() if name not in os.environ},
        "PYTHONPATH": package_path(),
        MARK: token,
        **extra,
    }


def loopback() -> str:
    """The name of the interface that no other machine reaches; torch's ranks would choose another one."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(a.family == socket.AF_INET and a.address == "127.0.0.1" for a in addresses):
            return str(name)
    return "lo"


def start_error(what: str, error: Exception, log: str, timeout_s: float) -> StartError:
    """One sentence for any exception of a start."""
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
