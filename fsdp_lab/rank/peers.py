"""`Peers`: the processes of the other ranks, so that nobody waits for the word of one that is gone."""

from __future__ import annotations

import json
from dataclasses import asdict

from torch import distributed as dist

from fsdp_lab.identity import Identity, machine


class Peers:
    """Each rank says at its start in the store which process it is. Of ranks on other machines nothing is known."""

    def __init__(self, store: dist.Store, rank: int) -> None:
        self._store = store
        self._found: dict[int, Identity | None] = {}  # by rank; None: on another machine
        store.set(_key(rank), json.dumps({"machine": machine(), "process": asdict(Identity.this())}))

    def meet(self, rank: int) -> None:
        """Learn which process a rank is, from the store, once."""
        if rank in self._found or not self._store.check([_key(rank)]):
            return
        said = json.loads(self._store.get(_key(rank)))
        self._found[rank] = Identity(**said["process"]) if said["machine"] == machine() else None

    def gone(self, rank: int) -> bool:
        """Whether a rank that was met has ended, by a look at the processes of this machine."""
        process = self._found.get(rank)
        return process is not None and not process.alive


def _key(rank: int) -> str:
    return f"process/{rank}"
