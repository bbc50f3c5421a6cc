"""Runs on disk: written while they train, listed, read back, named and deleted. One SQLite file.

The names below are imported when they are used: a rank that watches a loop (loops.py) needs them only if it stores."""

from typing import TYPE_CHECKING

from fsdp_lab.base import lazy_names

if TYPE_CHECKING:
    from fsdp_lab.runs.history.database import HistoryError as HistoryError
    from fsdp_lab.runs.history.history import History as History, RunList as RunList, StoredRun as StoredRun

_HOMES = {"History": "history", "HistoryError": "database", "RunList": "history", "StoredRun": "history"}

__all__ = sorted(_HOMES)
if not TYPE_CHECKING:  # a `__getattr__` would let any name pass
    __getattr__, __dir__ = lazy_names(__name__, _HOMES)
