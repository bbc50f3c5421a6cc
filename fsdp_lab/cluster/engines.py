"""`Engines`: those that the user started with any launcher (MPI, Slurm, SSH). Engines started here or by a former kernel
(local_engines.py and what builds on it) have the same methods, and do more.

All provide engine ids and a connected `ipyparallel.Client`; which engine is which rank is decided in assembly.py. Only
`fsdp_lab.cluster` uses undocumented parts of ipyparallel 8.8 and 9, each with a comment that gives the reason."""

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ipyparallel as ipp
from IPython.paths import get_ipython_dir

from fsdp_lab.base.process import host_id
from fsdp_lab.cluster import ClusterError, StartError


@dataclass(kw_only=True)
class EngineProcess:
    """An engine, by its id and by its process: a pid is of one host only."""

    engine: int
    pid: int = -1
    host_id: str = ""  # see `fsdp_lab.base.process.host_id`


class Engines:
    """The engines of a running ipyparallel cluster that another program has started, which are never ended."""

    owned = False  # whether we started them, and therefore may end them
    local = False  # whether all of them are on this host
    attached = False  # whether they were started by a former kernel
    forked = False  # whether they are forked from a process that imports torch
    imported = False  # whether that process has served another lab
    notes: tuple[str, ...] = ()  # on how they were started
    sending: AbstractContextManager[Any] = nullcontext()  # held while the client sends: it does not count atomically
    client: Any  # the `ipyparallel.Client` for our calls

    def __init__(self, source: Any, timeout_s: float) -> None:
        """`source`: see `connect`."""
        self._own_client = not isinstance(source, ipp.Client)
        try:
            self.client = connect(source, timeout_s)
        except (OSError, TimeoutError, RuntimeError, ValueError, ipp.error.TimeoutError) as e:
            raise StartError(f"the given ipyparallel cluster ({source!r}) cannot be reached: {e}") from None
        deadline = time.monotonic() + min(10.0, timeout_s)
        while not self.client.ids and time.monotonic() < deadline:
            time.sleep(0.05)

    @property
    def controller_pid(self) -> int:
        """-1 if the controller is not ours."""
        return -1

    @property
    def broken(self) -> bool:
        """Whether the controller is gone, without which no engine can be reached."""
        return False

    @property
    def user_client(self) -> Any:
        """The `ipyparallel.Client` for the user's %px cells."""
        return self.client

    @property
    def default_ranks(self) -> int:
        """How many ranks to make if nobody says."""
        return len(self.client.ids)

    @property
    def most_ranks(self) -> int | None:
        """How many ranks there can be; None: as many as one likes."""
        return len(self.client.ids)

    def add(self, n: int, ready: Callable[[int], None], timeout_s: float = 60) -> list[int]:
        """Starts `n` more engines and returns their ids; `ready(k)` is called as they arrive. Raises StartError."""
        needed = f"{n} more engine{'s are' if n > 1 else ' is'} needed and this cluster is yours"
        raise StartError(f"{needed}: start them with its launcher, then try again")

    def place_of(self, host_id: str) -> int:
        """Where a host is in the order in which the user named them."""
        return 0

    def exit_code(self, process: EngineProcess) -> int | None:
        return None

    def why_gone(self, process: EngineProcess) -> str:
        """Why nothing is known of an engine's end, as the end of a sentence; "" if that is not known either."""
        return ""

    def log(self, process: EngineProcess) -> str:
        """The last lines that an engine wrote."""
        return ""

    def end(self, processes: Sequence[EngineProcess], term_s: float) -> None:
        """Ends engines, if they are ours."""

    def persist(self, **fields: Any) -> None:
        """Lets the engines outlive this kernel; `fields` are those of `DetachedCluster` not known here."""
        raise ClusterError("the engines of a given cluster are yours, and stay anyway")

    def unpersist(self) -> None:
        """The engines end with this kernel again."""

    def detach(self) -> None:
        """Leaves the engines running for another kernel. Raises ClusterError: they are not persistent."""
        raise ClusterError("the engines of a given cluster are yours, and stay anyway")

    def close(self) -> None:
        """Ends what we started, in about 5 s at most. Idempotent."""
        if self._own_client:
            with contextlib.suppress(Exception):
                self.client.close(linger=0)


def connect(source: Any, timeout_s: float) -> Any:
    """Returns a Client for a running Cluster, a Client, or a string: a profile, a cluster id, a connection file."""
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
    """The client's connection file of a profile or a cluster id, or the path of one. Raises OSError if there is none."""
    folder = Path(get_ipython_dir())
    by_profile = folder.glob(f"profile_{name}/security/ipcontroller*-client.json")
    files = [*by_profile, *folder.glob(f"profile_*/security/ipcontroller-{name}-client.json")]
    files = [Path(name)] * Path(name).is_file() if name.endswith(".json") else files
    if not files:
        raise OSError(f"{folder} has neither a running profile nor a cluster id {name!r}; ipcluster start starts one")
    return max(files, key=lambda file: file.stat().st_mtime)


def exposure_notes(client: Any, hosts: Sequence[str]) -> tuple[str, ...]:
    """What others on the network can read or reach; `hosts` are the ids of the engines' hosts."""
    notes = []
    encrypted = client.curve_serverkey or client._config["registration"].startswith("tcp://127.")  # by an SSH tunnel
    if set(hosts) != {host_id()} and not encrypted:
        notes.append(
            "messages between this kernel and your engines are signed and not encrypted; start ipcontroller with "
            "IPP_ENABLE_CURVE=1 in its environment"
        )
    if len(set(hosts)) > 1:
        notes.append(
            "what ranks on several hosts send each other (torch's store, Gloo, NCCL) is neither encrypted nor signed: use a "
            "private network, such as WireGuard, and name its interface in GLOO_SOCKET_IFNAME"
        )
    return tuple(notes)
