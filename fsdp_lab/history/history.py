"""`History`: runs kept on disk as they happen, listed, reloaded, named, deleted.

    from fsdp_lab import History
    History().runs(backend="fsdp2")[0].table()          # in a lab: lab.runs(backend="fsdp2")

One SQLite file (`archive`), written by a thread of its own (`recorder`) a few times a second, so that the death of a kernel
loses no more than the last half second. What is kept of a long run is said in `recording`.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterable
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

import platformdirs

from fsdp_lab.core.errors import ArgumentError
from fsdp_lab.core.spec import Spec
from fsdp_lab.history.database import HistoryDB, HistoryError, damaged, set_aside
from fsdp_lab.history.run_list import RunList
from fsdp_lab.history.stored_run import StoredRun
from fsdp_lab.history.writer import HistoryWriter, said
from fsdp_lab.runs.view import RunState, RunView

VARIABLE = "FSDP_LAB_HISTORY"
LIMIT_BYTES = 1 << 30
ROOM = 0.9  # of the limit is what is left when runs have made room

T = TypeVar("T")


class History:
    """The runs of this user on this machine, or in a file of your own.

    Args:
        path: of the file, or of a folder for it; None: `$FSDP_LAB_HISTORY`, else `fsdp_lab/history.sqlite3` in the folder
            for data (`$XDG_DATA_HOME`, `~/.local/share`, on a Mac `~/Library/Application Support`).
        limit_bytes: when the file is larger, the oldest runs are deleted; never one that goes on or was pinned.

    Nothing is opened or made before there is a run to keep.

    Raises:
        ArgumentError: of `limit_bytes`.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None, *, limit_bytes: int = LIMIT_BYTES) -> None:
        if not isinstance(limit_bytes, int) or isinstance(limit_bytes, bool) or limit_bytes < 1:
            raise ArgumentError("limit_bytes", f"{limit_bytes!r} is refused", "give a whole number of bytes above 0")
        self.path = place(path)
        self.limit_bytes = limit_bytes
        self._recorder = HistoryWriter(self.path, self._tend)
        self._crowded = ""

    @classmethod
    def of(cls, where: History | str | os.PathLike[str] | bool) -> History | None:
        """A History as it is, that of a path, the default one for True, None for False. Raises ArgumentError."""
        if isinstance(where, bool):
            return cls() if where else None
        if isinstance(where, (str, os.PathLike)):
            return cls(where)
        if not isinstance(where, History):
            raise ArgumentError(
                "history", f"{where!r} is refused", "give True, False, the path of a file, or a History"
            )
        return where

    @property
    def problem(self) -> str:
        """What went wrong with keeping runs, in a sentence; "" where all is well."""
        return self._recorder.problem or self._recorder.moved or self._crowded

    # -- writing --------------------------------------------------------------------------------------------------

    def record(self, run: RunView) -> None:
        """Keeps a live run from now on, until it is over. Returns at once, and never raises: see `problem`."""
        self._recorder.record(run)

    def flush(self, timeout_s: float = 2.0) -> bool:
        """Waits until what was told so far is on disk; returns whether it is."""
        return self._recorder.flush(timeout_s)

    def rename(self, run: str, name: str) -> None:
        """Gives a run a name to be found by; "" takes it away. `run` is an id, the beginning of one, or a name.

        Raises:
            ArgumentError: there is no such run, or more than one. HistoryError: the file cannot be written.
        """
        if not isinstance(name, str) or "\n" in name:
            raise ArgumentError("name", f"{name!r} is refused", "give a line of text")
        self._change(run, "name", name)

    def pin(self, run: str) -> None:
        """The run is deleted by `delete` alone, however full the history is. Raises as `rename`."""
        self._change(run, "pinned", 1)

    def unpin(self, run: str) -> None:
        """It may make room again. Raises as `rename`."""
        self._change(run, "pinned", 0)

    def _change(self, run: str, column: str, value: str | int) -> None:
        number = self.runs()[run].number

        def change(archive: HistoryDB) -> None:
            with archive.transaction():
                archive.update("runs", number, {column: value})

        self._with(change)

    def delete(self, *runs: str) -> int:
        """Deletes runs with all that is kept of them; the space goes back to the disk. Returns how many.

        Raises:
            ArgumentError: there is no such run, or more than one, or it goes on.
            HistoryError: the file cannot be written.
        """
        listed = self.runs()
        return self._delete([listed[run] for run in dict.fromkeys(runs)])

    def delete_older(self, days: float) -> int:
        """Deletes the runs that ended so many days ago, but for pinned ones. Returns how many. Raises as `delete`."""
        if isinstance(days, bool) or not isinstance(days, (int, float)) or not days >= 0:
            raise ArgumentError("days", f"{days!r} is refused", "give a number of days of 0 or more")
        before = datetime.now().timestamp() - days * 86_400
        old = [
            r for r in self.runs() if r.state.over and not r.pinned and (r.ended_unix_s or r.started_unix_s) <= before
        ]
        return self._delete(old)

    def _delete(self, runs: Iterable[StoredRun]) -> int:
        chosen = list(runs)
        for run in chosen:
            if not run.state.over:
                raise ArgumentError("run", f"run {run.id} is {run.state.value}", "stop it first, or wait for its end")

        def delete(archive: HistoryDB) -> int:
            gone = archive.delete(run.number for run in chosen)
            archive.give_back()
            return gone

        return self._with(delete) if chosen else 0

    # -- reading --------------------------------------------------------------------------------------------------

    def runs(
        self,
        *,
        since: float | str | datetime | None = None,
        state: RunState | str | None = None,
        name: str | None = None,
        **fields: Any,
    ) -> RunList:
        """The runs that are kept, newest first, those that go on included: `runs(backend="fsdp2", since="2026-11-20")`.

        Args:
            since: those that began then or later: a date or time in ISO format, a datetime, or seconds since 1970.
            state: a `RunState` or its word, such as "finished"; "lost" for runs whose kernel died.
            name: as it was given by `rename`.
            fields: fields of the Spec applied last, by their flat names; a list stands for any of its values.

        Raises:
            ArgumentError: a field or a state that there is not.
            HistoryError: the file cannot be read.
        """
        wanted, since_s = _fields(fields), _moment(since)
        states = None if state is None else _state(state)
        if self._recorder.recorded:
            self.flush(1.0)
        rows = self._with(_list) if self.path.exists() else []
        found = [StoredRun(row, self._reach) for row in rows]
        chosen = [
            run for run in found
            if run.started_unix_s >= since_s
            and (states is None or run.state is states)
            and (name is None or run.name == name)
            and _matches(run, wanted)
        ]  # fmt: skip
        return RunList(chosen, of=len(found), where=str(self.path), notes=(self.problem,) if self.problem else ())

    @property
    def size_bytes(self) -> int:
        """Of the file and its log on disk."""
        sizes = (Path(f"{self.path}{tail}") for tail in ("", "-wal"))
        return sum(file.stat().st_size for file in sizes if file.exists())

    def _reach(self) -> HistoryDB:
        """Opens the file to read. Raises HistoryError."""
        try:
            return HistoryDB(self.path)
        except (sqlite3.Error, OSError) as e:
            raise HistoryError(_cannot(e, self.path)) from e

    def _with(self, use: Callable[[HistoryDB], T]) -> T:
        """What `use` makes of the file. A damaged one is moved aside, and the next is empty. Raises HistoryError."""
        for _ in range(2):
            try:
                with HistoryDB(self.path) as archive:
                    return use(archive)
            except (sqlite3.Error, OSError) as e:
                if not damaged(e):
                    raise HistoryError(_cannot(e, self.path)) from e
                if (aside := set_aside(self.path)) is not None:
                    self._recorder.moved = f"the history was damaged: it is now {aside}, and a new one was begun"
        raise HistoryError(f"{self.path} is damaged again and again; set {VARIABLE} to a file on another disk")

    # -- limit ----------------------------------------------------------------------------------------------------

    def _tend(self, archive: HistoryDB) -> None:
        """On the recorder's thread: the oldest make room."""
        if archive.used_bytes <= self.limit_bytes:
            self._crowded = ""
            return
        for run in reversed([StoredRun(row, self._reach) for row in _list(archive)]):
            if archive.used_bytes <= ROOM * self.limit_bytes:
                break
            if run.state.over and not run.pinned and run.id not in self._recorder.recorded:
                archive.delete([run.number])
        archive.give_back()
        over = archive.used_bytes > self.limit_bytes
        self._crowded = (
            f"the history takes more than its {self.limit_bytes / 2**20:.0f} MiB: what is left goes on or is pinned"
            * over
        )

    def __repr__(self) -> str:
        return f"<History: {self.path}{f', {self.problem}' if self.problem else ''}>"


def place(path: str | os.PathLike[str] | None) -> Path:
    """Where the file is; see `History`."""
    given = os.fspath(path) if path is not None else os.environ.get(VARIABLE, "")
    if given:
        chosen = Path(given).expanduser().absolute()
        return chosen / "history.sqlite3" if chosen.is_dir() else chosen
    return platformdirs.user_data_path("fsdp_lab", appauthor=False) / "history.sqlite3"


def _list(archive: HistoryDB) -> list[dict[str, Any]]:
    return archive.rows("SELECT * FROM runs ORDER BY started_unix_s DESC, number DESC")


def _cannot(error: BaseException, path: Path) -> str:
    return said(error, path).replace("runs go on but are not kept in", "cannot use", 1).replace(" just now", "", 1)


# -- filters -------------------------------------------------------------------------------------------------------


def _fields(fields: dict[str, Any]) -> dict[str, list[Any]]:
    """Flat field name -> the values that are wanted, as they stand in JSON. Raises ArgumentError."""
    known = Spec().flat()
    for name in fields:
        if name not in known:
            options = ", ".join(["since", "state", "name", *known])
            raise ArgumentError(name, "there is no such field to look for", f"use {options}")
    return {
        name: list(v) if isinstance(v, (list, tuple, set)) and name != "devices" else [v] for name, v in fields.items()
    }


def _matches(run: StoredRun, wanted: dict[str, list[Any]]) -> bool:
    fields = run.spec_fields
    flat = {**fields.get("workload", {}), **fields.get("strategy", {}), **fields}
    return all(name in flat and flat[name] in values for name, values in wanted.items())


def _state(state: RunState | str) -> RunState:
    for known in RunState:
        if state is known or str(state).lower() in (known.value, known.name.lower()):
            return known
    raise ArgumentError("state", f"{state!r} is refused", "give one of " + ", ".join(s.name.lower() for s in RunState))


def _moment(since: float | str | datetime | None) -> float:
    """Seconds since 1970. Raises ArgumentError."""
    if since is None:
        return float("-inf")
    try:
        return (datetime.fromisoformat(since) if isinstance(since, str) else since).timestamp()  # type: ignore[union-attr]
    except ValueError:
        raise ArgumentError(
            "since", f"{since!r} is no time", 'give one such as "2026-11-21" or "2026-11-21T14:30"'
        ) from None
    except AttributeError:
        if isinstance(since, (int, float)) and not isinstance(since, bool):
            return float(since)
        raise ArgumentError(
            "since", f"{since!r} is no time", "give a text, a datetime, or seconds since 1970"
        ) from None
