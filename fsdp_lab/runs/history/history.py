"""`History`: runs stored on disk as they happen, listed, read back, named, deleted.

    from fsdp_lab import History
    History().runs(backend="fsdp2")[0].table()          # in a lab: lab.runs(backend="fsdp2")

It is one SQLite file (`database`), written a few times a second by a thread of its own (`writer`), so that a kernel's death
loses at most the last half second. How much of a long run is stored is described in `writer`.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

import platformdirs

from fsdp_lab.base.errors import ArgumentError, check_whole, is_number, plain_errors
from fsdp_lab.runs.history.database import HistoryDB, HistoryError, damaged, set_aside
from fsdp_lab.runs.history.stored_run import RunList, StoredRun
from fsdp_lab.runs.history.writer import HistoryWriter, explain
from fsdp_lab.runs.view import RunState, RunView
from fsdp_lab.spec.spec import Spec

VARIABLE = "FSDP_LAB_HISTORY"
LIMIT_BYTES = 1 << 30
TARGET = 0.9  # share of the limit that is in use after the oldest runs were deleted

T = TypeVar("T")


@plain_errors
class History:
    """The runs of this user on this machine, or in a file of your own.

    Args:
        path: of the file, or of a folder for it; None: `$FSDP_LAB_HISTORY`, else `fsdp_lab/history.sqlite3` in the folder
            for data (`$XDG_DATA_HOME`, `~/.local/share`, on a Mac `~/Library/Application Support`).
        limit_bytes: when the file is larger, the oldest runs are deleted, except running and pinned ones.

    No file is opened or created before there is a run to store. Raises ArgumentError for an invalid `limit_bytes`.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None, *, limit_bytes: int = LIMIT_BYTES) -> None:
        check_whole("limit_bytes", limit_bytes, wanted="a whole number of bytes above 0")
        self.path = history_path(path)
        self.limit_bytes = limit_bytes
        self._writer = HistoryWriter(self.path, self._enforce_limit)
        self._over_limit = ""  # a sentence

    @classmethod
    def of(cls, where: History | str | os.PathLike[str] | bool) -> History | None:
        """A History as it is, one of a path, the default one for True; None for False. Raises ArgumentError."""
        if isinstance(where, bool):
            return cls() if where else None
        if isinstance(where, (str, os.PathLike)):
            return cls(where)
        if not isinstance(where, History):
            hint = "give True, False, the path of a file, or a History"
            raise ArgumentError("history", f"{where!r} is refused", hint)
        return where

    @property
    def problem(self) -> str:
        """Says why runs cannot be stored, or what happened to the file, as a sentence; "" if all is well."""
        return self._writer.problem or self._writer.moved or self._over_limit

    def record(self, run: RunView) -> None:
        """Stores a live run from now on until it is over. Returns at once and never raises: see `problem`."""
        self._writer.record(run)

    def flush(self, timeout_s: float = 2.0) -> bool:
        """Waits until everything reported so far is on disk; returns whether it is."""
        return self._writer.flush(timeout_s)

    def rename(self, run: str, name: str) -> None:
        """Names a run; "" removes the name. `run` is an id, the beginning of one, or a name. Raises ArgumentError: there is
        no such run, or more than one. HistoryError: the file cannot be written."""
        if not isinstance(name, str) or "\n" in name:
            raise ArgumentError("name", f"{name!r} is refused", "give a line of text")
        self._change(run, "name", name)

    def pin(self, run: str) -> None:
        """Protects a run: only `delete` deletes it, however full the history is. Raises as `rename`."""
        self._change(run, "pinned", 1)

    def unpin(self, run: str) -> None:
        """Undoes `pin`. Raises as `rename`."""
        self._change(run, "pinned", 0)

    def _change(self, run: str, column: str, value: str | int) -> None:
        number = self.runs()[run].number
        self._with(lambda db: db.update("runs", number, {column: value}))

    def delete(self, *runs: str) -> int:
        """Deletes runs and returns their space to the disk. Returns the number of runs. Raises ArgumentError: there is no
        such run, or more than one, or it is running. HistoryError: the file cannot be written."""
        listed = self.runs()
        chosen = [listed[run] for run in dict.fromkeys(runs)]
        for run in chosen:
            if not run.state.over:
                raise ArgumentError("run", f"run {run.id} is {run.state.value}", "stop it first, or wait for its end")
        return self._delete(chosen)

    def delete_older(self, days: float) -> int:
        """Deletes runs that ended `days` ago or earlier, except pinned ones. Returns their number. Raises as `delete`."""
        if not is_number(days) or not days >= 0:
            raise ArgumentError("days", f"{days!r} is refused", "give a number of days of 0 or more")
        before = datetime.now().timestamp() - days * 86_400
        old = [run for run in self.runs() if (run.ended_unix_s or run.started_unix_s) <= before]
        return self._delete([run for run in old if run.state.over and not run.pinned])

    def _delete(self, runs: Sequence[StoredRun]) -> int:
        def delete(db: HistoryDB) -> int:
            deleted = sum(db.delete(run.number) for run in runs)
            db.shrink()
            return deleted

        return self._with(delete) if runs else 0

    def runs(
        self,
        *,
        since: float | str | datetime | None = None,
        state: RunState | str | None = None,
        name: str | None = None,
        **fields: Any,
    ) -> RunList:
        """The stored runs, newest first, running ones included: `runs(backend="fsdp2", since="2026-11-20")`.

        Args:
            since: started then or later: a date or time in ISO format, a datetime, or seconds since 1970.
            state: a `RunState` or its name, such as "finished"; "lost" for runs whose kernel died.
            name: as given by `rename`.
            fields: flat fields of the Spec applied last; a list matches any of its values.

        Raises:
            ArgumentError: an unknown field or state.
            HistoryError: the file cannot be read.
        """
        values, since_s = _field_values(fields), _unix_s(since)
        wanted_state = None if state is None else _run_state(state)
        if self._writer.recorded:
            self.flush(1.0)
        stored = self._with(self._list) if self.path.exists() else []
        matching = [run for run in stored if run.started_unix_s >= since_s and wanted_state in (None, run.state)]
        matching = [run for run in matching if name in (None, run.name) and _matches(run, values)]
        return RunList(matching, of=len(stored), where=str(self.path), notes=(self.problem,) if self.problem else ())

    def _list(self, db: HistoryDB) -> list[StoredRun]:
        rows = db.rows("SELECT * FROM runs ORDER BY started_unix_s DESC, number DESC")
        return [StoredRun(row, self._open) for row in rows]

    @property
    def size_bytes(self) -> int:
        """Size of the file and its log on disk."""
        sizes = (Path(f"{self.path}{tail}") for tail in ("", "-wal"))
        return sum(file.stat().st_size for file in sizes if file.exists())

    def _open(self) -> HistoryDB:
        """Opens the file to read. Raises HistoryError."""
        try:
            return HistoryDB(self.path)
        except (sqlite3.Error, OSError) as e:
            raise HistoryError(explain(e, self.path, "cannot use {}")) from e

    def _with(self, use: Callable[[HistoryDB], T]) -> T:
        """Calls `use` with the open file; a damaged one is moved aside and replaced by an empty one. Raises HistoryError."""
        for _ in range(2):
            try:
                with HistoryDB(self.path) as db:
                    return use(db)
            except (sqlite3.Error, OSError) as e:
                if not damaged(e):
                    raise HistoryError(explain(e, self.path, "cannot use {}")) from e
                self._writer.moved = set_aside(self.path) or self._writer.moved
        raise HistoryError(f"{self.path} was damaged repeatedly; set {VARIABLE} to a file on another disk")

    def _enforce_limit(self, db: HistoryDB) -> None:
        """Deletes the oldest runs while the file is too large. Called on the writer's thread."""
        self._over_limit = ""
        if db.used_bytes <= self.limit_bytes:
            return
        for run in reversed(self._list(db)):
            if db.used_bytes <= TARGET * self.limit_bytes:
                break
            if run.state.over and not run.pinned and run.id not in self._writer.recorded:
                db.delete(run.number)
        db.shrink()
        if db.used_bytes > self.limit_bytes:
            limit = f"{self.limit_bytes / 2**20:.0f} MiB"
            self._over_limit = f"the history takes more than its {limit}: the rest is running or pinned"

    def __repr__(self) -> str:
        return f"<History: {self.path}{f', {self.problem}' if self.problem else ''}>"


def history_path(path: str | os.PathLike[str] | None) -> Path:
    """The path of the file; see `History`."""
    given = os.fspath(path) if path is not None else os.environ.get(VARIABLE, "")
    if given:
        chosen = Path(given).expanduser().absolute()
        return chosen / "history.sqlite3" if chosen.is_dir() else chosen
    return platformdirs.user_data_path("fsdp_lab", appauthor=False) / "history.sqlite3"


def _field_values(fields: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Flat field name -> the values to match, as in JSON. Raises ArgumentError."""
    flat = Spec().flat()
    for name in fields:
        if name not in flat:
            options = ", ".join(["since", "state", "name", *flat])
            raise ArgumentError(name, "there is no such field to look for", f"use {options}")
    several = {name for name, v in fields.items() if isinstance(v, (list, tuple, set)) and name != "devices"}
    return {name: list(v) if name in several else [v] for name, v in fields.items()}


def _matches(run: StoredRun, wanted: Mapping[str, list[Any]]) -> bool:
    flat = run.flat_fields
    return all(name in flat and flat[name] in values for name, values in wanted.items())


def _run_state(state: RunState | str) -> RunState:
    """Raises ArgumentError."""
    for one in RunState:
        if state is one or str(state).lower() in (one.value, one.name.lower()):
            return one
    raise ArgumentError("state", f"{state!r} is refused", "give one of " + ", ".join(s.name.lower() for s in RunState))


def _unix_s(since: float | str | datetime | None) -> float:
    """Seconds since 1970. Raises ArgumentError."""
    if since is None or is_number(since):
        return float("-inf") if since is None else float(since)
    if not isinstance(since, str | datetime):
        raise ArgumentError("since", f"{since!r} is no time", "give a text, a datetime, or seconds since 1970")
    try:
        return (datetime.fromisoformat(since) if isinstance(since, str) else since).timestamp()
    except ValueError:
        hint = 'give one such as "2026-11-21" or "2026-11-21T14:30"'
        raise ArgumentError("since", f"{since!r} is no time", hint) from None
