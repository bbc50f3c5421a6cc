"""`History`: runs stored on disk as they happen, listed, read back, named, deleted.

    from fsdp_lab import History
    History().runs(backend="fsdp2")[0].table()          # in a lab: lab.runs(backend="fsdp2")

It is one SQLite file (`database`), written a few times a second by a thread of its own (`writer`), so that a kernel's death
loses at most the last half second. How much of a long run is stored is described in `writer`."""

import gc
import json
import os
import socket
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar, overload

import platformdirs

from fsdp_lab.base.errors import ArgumentError, Cause, FieldError, check_whole, is_number
from fsdp_lab.base.events import AuditFinding, StepEvent
from fsdp_lab.base.formatting import Table, count
from fsdp_lab.base.process import Identity
from fsdp_lab.runs.history.database import HistoryDB, HistoryError, damaged, set_aside, unpack
from fsdp_lab.runs.history.writer import HistoryWriter, explain
from fsdp_lab.runs.steps import CAP, EventStore
from fsdp_lab.runs.view import RunQueries, RunState, RunView, Switch, describe_environment
from fsdp_lab.spec.describe import KEY, Trained, WatchedLoop, describe_strategy, describe_value
from fsdp_lab.spec.spec import Spec

SILENT_S = 90.0  # a kernel on another host counts as dead after so long without an update: a live one writes every 5 s


def kernel_alive(host: str, kernel: Identity, seen_unix_s: float) -> bool:
    """Tells whether the kernel of a run is alive. `seen_unix_s`: its last update, which decides for another host."""
    return kernel.alive if host == socket.gethostname() else time.time() - seen_unix_s < SILENT_S


class StoredRun(RunQueries):
    """A run as it was in the file when it was listed. Events and switches are read when they are first used.

    Attributes:
        id, name, note, pinned: a pinned run is never deleted to make room.
        started_unix_s, ended_unix_s: the end is None while it runs, and for a lost run the time of its last update.
        state, reason, notes, environment: as in `Run`. `RunState.LOST` if its kernel died before the run was over.
        step: committed steps. tokens_per_s: median of the newest 100 counted steps. loss: the last one.
        spec, switches, events: as in `Run`."""

    def __init__(self, row: Mapping[str, Any], open_db: Callable[[], HistoryDB]) -> None:
        self._open = open_db
        self.number = int(row["number"])
        self.spec_fields: dict[str, Any] = json.loads(row["spec"])
        self.id, self.name, self.pinned = str(row["id"]), str(row["name"]), bool(row["pinned"])
        self.note = str(row.get("note", ""))
        self.started_unix_s, self.ended_unix_s = float(row["started_unix_s"]), row["ended_unix_s"]
        self.step, self.tokens_per_s, self.loss = int(row["step"]), row["tokens_per_s"], row["loss"]
        self.state, self.reason = RunState(row["state"]), str(row["reason"])
        self.environment: dict[str, Any] = json.loads(row["environment"])
        cause = self.environment.pop("cause", None)  # beside it, so that files of before can be read
        self.cause = Cause(cause) if cause else None
        audit = self.environment.pop("audit", {"done": False})
        self.findings = tuple(map(AuditFinding.from_dict, audit["findings"])) if audit["done"] else None
        self.notes: tuple[str, ...] = tuple(json.loads(row["notes"]))
        kernel = Identity(pid=row["pid"], born=row["born"])
        if not self.state.over and not kernel_alive(row["host"], kernel, row["seen_unix_s"]):
            self.reason = f"its kernel, process {kernel.pid} on {row['host']}, ended before the run was over"
            self.state, self.ended_unix_s = RunState.LOST, row["seen_unix_s"]

    @cached_property
    def spec(self) -> Trained:
        """Raises SpecError for a Spec of another version with unknown fields; `spec_fields` has them as stored."""
        fields = self.spec_fields
        return WatchedLoop.from_dict(fields) if KEY in fields else Spec.from_dict(fields)

    @property
    def flat_fields(self) -> Mapping[str, Any]:
        """Flat field name -> value as stored, also of a Spec of another version; of a watched loop, what is known."""
        parts = (self.spec_fields.get(name, {}) for name in ("workload", "strategy", KEY))
        return {**{name: value for part in parts for name, value in part.items()}, **self.spec_fields}

    def _labelled(self) -> None:
        with self._open() as db:
            try:
                db.update("runs", self.number, {"name": self.name, "note": self.note})
            except sqlite3.Error as e:
                raise HistoryError(explain(e, db.path, "cannot use {}")) from e

    @cached_property
    def switches(self) -> Sequence[Switch]:
        with self._open() as db:
            rows = db.rows("SELECT * FROM switches WHERE run = ? ORDER BY position", self.number)
        made: list[Switch] = []
        for row in rows:
            before, after = made[-1].after if made else None, Spec.from_dict(json.loads(row["spec"]))
            step, seconds, carried, notes = row["step"], row["seconds"], bool(row["carried"]), json.loads(row["notes"])
            switch = Switch(step=step, before=before, after=after, seconds=seconds, carried=carried, notes=tuple(notes))
            made.append(switch)
        return made

    @cached_property
    def events(self) -> EventStore:
        """The events with their stored spans and memory curves. Raises HistoryError if the run was deleted meanwhile."""
        events: dict[int, StepEvent] = {}  # by cursor
        collects = gc.isenabled()
        gc.disable()  # its passes over all that is read would take as long as the reading
        try:
            with self._open() as db:
                if not db.rows("SELECT number FROM runs WHERE number = ?", self.number):
                    raise HistoryError(f"run {self.id} was deleted from {db.path}")
                for table in ("batches", "traces"):  # in this order: an event in a trace has spans or a curve, too
                    for row in db.rows(f"SELECT data FROM {table} WHERE run = ? ORDER BY first", self.number):
                        events.update(unpack(row["data"]))
            store = EventStore(max(CAP, len(events)))
            store.add(events[cursor] for cursor in sorted(events))
            return store
        finally:
            if collects:
                gc.enable()

    def to_dict(self) -> dict[str, Any]:
        """Everything except the events, as plain values."""
        names = ("id", "name", "note", "pinned", "state", "reason", "started_unix_s", "ended_unix_s", "step")
        row = {name: getattr(self, name) for name in (*names, "tokens_per_s", "loss")} | {"state": self.state.value}
        return row | {"spec": self.spec_fields, "notes": list(self.notes), "environment": dict(self.environment)}

    @property
    def when(self) -> str:
        """Start in local time."""
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(self.started_unix_s))

    @property
    def where(self) -> str:
        """Machine and devices as text."""
        return describe_environment(self.environment)

    def __repr__(self) -> str:
        name = f" {self.name!r}" if self.name else ""
        return f"<StoredRun {self.id}{name}: {self.state.value}, step {self.step}, {self.when}>"


COLUMNS = ("id", "name", "when", "model", "how", "ranks", "steps", "state", "tokens/s", "loss", "machine")


class RunList(Sequence[StoredRun]):
    """Stored runs, newest first: `runs[0]`, `runs[:5]`, or `runs["ab12"]` by the beginning of an id or by name."""

    def __init__(self, runs: Sequence[StoredRun], *, of: int, where: str, notes: tuple[str, ...] = ()) -> None:
        """`of`: number of all runs in `where`, which is a path or a name."""
        self._runs, self._of, self._where, self._notes = tuple(runs), of, where, notes

    @overload
    def __getitem__(self, which: int | str) -> StoredRun: ...
    @overload
    def __getitem__(self, which: slice) -> "RunList": ...
    def __getitem__(self, which: int | str | slice) -> "StoredRun | RunList":
        """Raises ArgumentError for an id or a name that no run has, or several; IndexError for a position."""
        if isinstance(which, slice):
            return RunList(self._runs[which], of=self._of, where=self._where, notes=self._notes)
        return self._find(which) if isinstance(which, str) else self._runs[which]

    def _find(self, which: str) -> StoredRun:
        matching = [run for run in self._runs if which and which == run.name]
        matching = matching or [run for run in self._runs if which and run.id.startswith(which)]
        if len(matching) == 1:
            return matching[0]
        ids = ", ".join(run.id for run in (matching or self._runs)[:5])
        if matching:
            reason = f"{len(matching)} runs are called {which!r} or begin with it"
            raise ArgumentError("run", reason, f"say more of the id: {ids}")
        reason = f"none of these runs is called {which!r} or begins with it"
        raise ArgumentError("run", reason, f"the newest are {ids}" if ids else "there are none")

    def __len__(self) -> int:
        return len(self._runs)

    def table(self) -> Table:
        legend = ("tokens/s: the median of the newest 100 steps",) if self._runs else ()
        part = f"{len(self)} of " if len(self) != self._of else ""
        caption = f"{part}{self._of} run{'s' * (self._of != 1)} in {self._where}"
        rows, columns = list(map(_row, self._runs)), list(COLUMNS)
        if any(run.note for run in self._runs):
            columns.append("note")
            rows = [(*row, run.note.partition("\n")[0]) for row, run in zip(rows, self._runs, strict=True)]
        left = frozenset(columns) - {"ranks", "steps", "tokens/s", "loss"}
        return Table(
            columns=tuple(columns), rows=tuple(rows), caption=caption, notes=(*legend, *self._notes), left=left
        )

    def __repr__(self) -> str:
        return repr(self.table())

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()


def _row(run: StoredRun) -> tuple[str, ...]:
    flat = run.flat_fields
    try:
        strategy = describe_strategy(run.spec)
    except FieldError:  # a Spec of another version
        strategy = str(flat.get("backend", ""))
    return (
        run.id,
        run.name + (" (pinned)" if run.pinned else ""),
        run.when,
        describe_value("model", flat.get("model", "")),
        strategy,
        str(flat.get("world_size", "")),
        f"{run.step:,}",
        run.state.value,
        "–" if run.tokens_per_s is None else count(run.tokens_per_s),
        "–" if run.loss is None else f"{run.loss:.4f}",
        run.where,
    )


VARIABLE = "FSDP_LAB_HISTORY"
LIMIT_BYTES = 1 << 30
TARGET = 0.9  # share of the limit that is in use after the oldest runs were deleted

T = TypeVar("T")


class History:
    """The runs of this user on this machine, or in a file of your own.

    Args:
        path: of the file, or of a folder for it; None: `$FSDP_LAB_HISTORY`, else `fsdp_lab/history.sqlite3` in the folder
            for data (`$XDG_DATA_HOME`, `~/.local/share`, on a Mac `~/Library/Application Support`).
        limit_bytes: when the file is larger, the oldest runs are deleted, except running and pinned ones.

    No file is opened or created before there is a run to store. Raises ArgumentError for an invalid `limit_bytes`."""

    def __init__(self, path: str | os.PathLike[str] | None = None, *, limit_bytes: int = LIMIT_BYTES) -> None:
        check_whole("limit_bytes", limit_bytes, wanted="a whole number of bytes above 0")
        self.path = history_path(path)
        self.limit_bytes = limit_bytes
        self._writer = HistoryWriter(self.path, self._enforce_limit)
        self._over_limit = ""  # a sentence

    @classmethod
    def of(cls, where: "History | str | os.PathLike[str] | bool") -> "History | None":
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
        self.runs()[run].rename(name)

    def annotate(self, run: str, note: str) -> None:
        """Writes a note on a run; "" removes it. Raises as `rename`."""
        self.runs()[run].annotate(note)

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

        Raises ArgumentError: an unknown field or state. HistoryError: the file cannot be read."""
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
    """Returns the state with this name. Raises ArgumentError."""
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
