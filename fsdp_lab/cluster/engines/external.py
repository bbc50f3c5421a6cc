"""Engines that the user started, with any launcher: MPI, Slurm, SSH, ..."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ipyparallel as ipp
from IPython.paths import get_ipython_dir

from fsdp_lab.cluster.engines import Engines
from fsdp_lab.cluster.errors import ClusterError, StartError


class ExternalEngines(Engines):
    """They are used as they are and never ended.

    Args:
        source: a running ipyparallel Cluster, a Client, or a string: a profile, a cluster id, a connection file.
    """

    def __init__(self, source: Any, timeout_s: float = 60) -> None:
        self._own_client = not isinstance(source, ipp.Client)
        try:
            self.client = connect(source, timeout_s)
        except (OSError, TimeoutError, RuntimeError, ValueError, ipp.error.TimeoutError) as e:
            raise StartError(f"the given ipyparallel cluster ({source!r}) cannot be reached: {e}") from None
        deadline = time.monotonic() + min(10.0, timeout_s)
        while not self.client.ids and time.monotonic() < deadline:
            time.sleep(0.05)

    def add(self, n: int, ready: Callable[[int], None], timeout_s: float = 60) -> list[int]:
        raise StartError(
            f"{n} more engine{'s are' if n > 1 else ' is'} needed and this cluster is yours: start them with its "
            "launcher, then try again"
        )

    def close(self) -> None:
        if self._own_client:
            with contextlib.suppress(Exception):
                self.client.close(linger=0)


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


def connection_file(name: str) -> Path:
    """The client's connection file of a profile or a cluster id, or the path of one.

    Raises:
        OSError: no such cluster runs; the message says where it was looked for.
    """
    if name.endswith(".json"):
        if Path(name).is_file():
            return Path(name)
        raise OSError(f"there is no file {name}")
    ipython_dir = Path(get_ipython_dir())
    by_profile = ipython_dir / f"profile_{name}" / "security"
    found = [*sorted(by_profile.glob("ipcontroller*-client.json"), key=lambda p: p.stat().st_mtime)][-1:]
    found += ipython_dir.glob(f"profile_*/security/ipcontroller-{name}-client.json")
    if not found:
        raise OSError(
            f"{ipython_dir} has neither a running profile nor a cluster id {name!r}; ipcluster start starts one"
        )
    return Path(found[0])


def exposure_notes(client: Any, hosts: Sequence[str]) -> tuple[str, ...]:
    """What others on the network can read or reach; `hosts` are those of the engines."""
    notes = []
    encrypted = client.curve_serverkey or client._config["registration"].startswith("tcp://127.")  # by an SSH tunnel
    if set(hosts) != {socket.gethostname()} and not encrypted:
        notes.append(
            "messages between this kernel and your engines are signed and not encrypted; start ipcontroller with "
            "IPP_ENABLE_CURVE=1 in its environment"
        )
    if len(set(hosts)) > 1:
        notes.append(
            "what ranks on several machines send each other (torch's store, Gloo, NCCL) is neither encrypted nor signed; "
            "use a network where nobody else is"
        )
    return tuple(notes)
