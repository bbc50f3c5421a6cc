"""Runs on disk: written while they train, listed, read back, named and deleted. One SQLite file."""

from fsdp_lab.history.database import HistoryError
from fsdp_lab.history.history import History
from fsdp_lab.history.stored_run import RunList, StoredRun

__all__ = ["History", "HistoryError", "RunList", "StoredRun"]
