"""Where engines come from: started here or by a former kernel of ours (local.py), or by the user (external.py).

All provide engine ids and a connected `ipyparallel.Client`; which engine is which rank is decided elsewhere. Undocumented
parts of ipyparallel 9 are used in `fsdp_lab.cluster` alone, each with its reason beside it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from fsdp_lab.cluster.errors import ClusterError

OnEnd = Callable[[int, int | None], None]  # (pid, exit code if known); called on the launcher thread


class Engines(ABC):
    """Engines that a cluster can use. The defaults are for engines that somebody else started."""

    owned = False  # whether we started them, and therefore may end them
    client: Any  # the `ipyparallel.Client` for our calls

    @property
    def user_client(self) -> Any:
        """The `ipyparallel.Client` for the user's %px cells."""
        return self.client

    @property
    def controller_pid(self) -> int:
        """-1 if the controller is not ours."""
        return -1

    @property
    def broken(self) -> bool:
        """Whether the controller is gone, without which no engine can be reached."""
        return False

    @abstractmethod
    def add(self, n: int, ready: Callable[[int], None], timeout_s: float = 60) -> list[int]:
        """Starts `n` more engines and returns their ids; `ready(k)` is called as they arrive. Raises StartError."""

    def exit_code(self, pid: int) -> int | None:
        return None

    def log(self, pid: int) -> str:
        """The last lines that an engine wrote."""
        return ""

    def end(self, pids: list[int], term_s: float) -> None:
        """Ends engines by process id. Does nothing if they are not ours."""
        return

    def persist(self, **fields: Any) -> None:
        """Lets the engines outlive this kernel; `fields` are those of `DetachedCluster` not known here."""
        raise ClusterError("the engines of a given cluster are yours, and stay anyway")

    def unpersist(self) -> None:
        """The engines end with this kernel again."""
        return

    def detach(self) -> None:
        """Leaves the engines running for another kernel. Raises ClusterError: they are not persistent."""
        raise ClusterError("the engines of a given cluster are yours, and stay anyway")

    @abstractmethod
    def close(self) -> None:
        """Ends what we started, in about 5 s at most. Idempotent."""
