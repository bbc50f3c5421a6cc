"""One rank: a resident `Session`, independent of notebooks. Read session.py, trainer.py, lifecycle.py, abort.py."""

from __future__ import annotations

from typing import Any

from fsdp_lab.rank import rendezvous
from fsdp_lab.rank.session import Session


def host_store(host: str = "127.0.0.1") -> tuple[Any, int]:
    """On rank 0: the store through which ranks find each other, and its port."""
    store = rendezvous.host_store(host)
    return store, store.port


__all__ = ["Session", "host_store"]
