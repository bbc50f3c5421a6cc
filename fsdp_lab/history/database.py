"""`HistoryDB`: the SQLite file of stored runs, its schema and transactions; and `pack`, `unpack` for the events in it.

Several kernels may write to the file at once: it uses a write-ahead log, and transactions are short and wait for each other.
A file of a newer version or of another program is refused, an older one is migrated, a damaged one is moved aside.

A pack of events is zlib over JSON with a list per field, which compresses well because neighbouring values are alike; a
column of equal values is stored as one. JSON writes a float with as many digits as identify it exactly, NaN and infinities
by name. Spans and memory curves, which are larger than all the rest, are stored only in packs made with `heavy=True`. Fields
added by a later version get their defaults when an old pack is read; fields that no longer exist are ignored.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import sqlite3
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

from fsdp_lab.core.errors import SentenceError
from fsdp_lab.core.events import Carrier, Memory, MemorySample, RoleBytes, Span, StepEvent, Traffic
from fsdp_lab.core.generation import Completion

APPLICATION = 0x4653_4450  # "FSDP" in the file's header
BUSY_S = 5.0  # for another kernel's transaction
DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
VACUUM_PAGES = 2000  # returned to the disk at once, about 8 MB

# Each takes the schema from one version to the next; the first makes it.
MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        """CREATE TABLE runs (
            number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL, name TEXT NOT NULL DEFAULT '',
            pinned INTEGER NOT NULL DEFAULT 0, spec TEXT NOT NULL, state TEXT NOT NULL, reason TEXT NOT NULL,
            started_unix_s REAL NOT NULL, ended_unix_s REAL, step INTEGER NOT NULL, notes TEXT NOT NULL,
            environment TEXT NOT NULL, restarts TEXT NOT NULL, tokens_per_s REAL, loss REAL,
            host TEXT NOT NULL, pid INTEGER NOT NULL, born TEXT NOT NULL, seen_unix_s REAL NOT NULL)""",
        "CREATE INDEX runs_by_start ON runs (started_unix_s)",
        """CREATE TABLE switches (
            run INTEGER NOT NULL REFERENCES runs ON DELETE CASCADE, position INTEGER NOT NULL, step INTEGER NOT NULL,
            spec TEXT NOT NULL, seconds REAL NOT NULL, carried INTEGER NOT NULL, notes TEXT NOT NULL,
            PRIMARY KEY (run, position))""",
        """CREATE TABLE batches (
            run INTEGER NOT NULL REFERENCES runs ON DELETE CASCADE, first INTEGER NOT NULL, count INTEGER NOT NULL,
            level INTEGER NOT NULL DEFAULT 0, data BLOB NOT NULL, PRIMARY KEY (run, first))""",
        """CREATE TABLE traces (
            run INTEGER NOT NULL REFERENCES runs ON DELETE CASCADE, first INTEGER NOT NULL, curve INTEGER NOT NULL,
            data BLOB NOT NULL, PRIMARY KEY (run, first))""",
    ),
)


class HistoryError(SentenceError, RuntimeError):
    """The history cannot be read or written; `str()` is a sentence."""


class HistoryDB:
    """An open file, to be used only by the thread that opened it.

    Raises:
        HistoryError: the file is of a newer version, or not a history. Nothing in it was changed.
        sqlite3.Error, OSError: it cannot be opened, or is damaged (`damaged`).
    """

    def __init__(self, path: Path, migrations: Sequence[Sequence[str]] = MIGRATIONS) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except FileExistsError:
            raise NotADirectoryError(errno.ENOTDIR, "its folder is a file", str(path)) from None
        self._db = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None)
        try:
            self._db.row_factory = _as_dict
            self._db.execute("PRAGMA foreign_keys = ON")
            # A kernel's death then loses nothing, and a power failure the last moment.
            self._db.execute("PRAGMA synchronous = NORMAL")
            self._migrate(migrations)
            self.inode = _inode(path)
        except BaseException:
            self._db.close()
            raise

    def _migrate(self, migrations: Sequence[Sequence[str]]) -> None:
        """Creates the schema, or brings an older one to this version."""
        if self._version(migrations) == len(migrations):
            return
        if not self._tables():
            self._db.execute("PRAGMA auto_vacuum = INCREMENTAL")  # only before the first table
        self._use_wal()
        with self.transaction():
            for statements in migrations[self._version(migrations) :]:  # another kernel may have migrated it meanwhile
                for statement in statements:
                    self._db.execute(statement)
            self._db.execute(f"PRAGMA user_version = {len(migrations)}")
            self._db.execute(f"PRAGMA application_id = {APPLICATION}")

    def _version(self, migrations: Sequence[Sequence[str]]) -> int:
        """The version of the schema; 0 for an empty file. Raises HistoryError for a file that must not be changed."""
        made = (
            self._tables() > 0
        )  # first: another kernel may make them meanwhile, and marks the file in the same transaction
        version, application = self.value("PRAGMA user_version"), self.value("PRAGMA application_id")
        if application != APPLICATION and made:
            raise HistoryError(f"{self.path} is not a history of fsdp_lab; name another file")
        if version > len(migrations):
            raise HistoryError(
                f"{self.path} was written by a newer fsdp_lab (version {version} of its schema, and this one supports "
                f"{len(migrations)}); update fsdp_lab, or name another file"
            )
        return int(version)

    def _tables(self) -> int:
        return int(self.value("SELECT count(*) FROM sqlite_master"))

    def _use_wal(self) -> None:
        """Turns the write-ahead log on, so that readers and a writer do not wait for each other.

        SQLite does not wait for the lock that this takes, so it is retried for a second. Where such a log is impossible
        (some network file systems), the file works without one.
        """
        for _ in range(50):
            with contextlib.suppress(sqlite3.OperationalError):
                self._db.execute("PRAGMA journal_mode = WAL")
                return
            time.sleep(0.02)

    @property
    def stale(self) -> bool:
        """Whether the file was moved or deleted since it was opened: further writes would be lost."""
        return _inode(self.path) != self.inode

    def close(self) -> None:
        with contextlib.suppress(sqlite3.Error):
            self._db.close()

    def __enter__(self) -> HistoryDB:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Commits on success, rolls back on an exception. Waits at most `BUSY_S` for another kernel's transaction."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:
                with contextlib.suppress(sqlite3.Error):
                    self._db.execute("ROLLBACK")
            raise

    def value(self, query: str, *values: Any) -> Any:
        """The first column of the first row; None where there is no row."""
        return next((next(iter(row.values())) for row in self._db.execute(query, values)), None)

    def rows(self, query: str, *values: Any) -> list[dict[str, Any]]:
        return self._db.execute(query, values).fetchall()

    def change(self, statement: str, *values: Any) -> int:
        """Returns the number of changed rows."""
        return self._db.execute(statement, values).rowcount

    def insert(self, table: str, row: Mapping[str, Any], *, replace: bool = False) -> int:
        """Returns the rowid."""
        columns, marks = ", ".join(row), ", ".join("?" * len(row))
        verb = "INSERT OR REPLACE" if replace else "INSERT"
        done = self._db.execute(f"{verb} INTO {table} ({columns}) VALUES ({marks})", tuple(row.values()))
        return int(done.lastrowid or 0)

    def update(self, table: str, number: int, row: Mapping[str, Any]) -> int:
        """Updates a run's row. Returns 0 if it no longer exists."""
        columns = ", ".join(f"{name} = ?" for name in row)
        return self.change(f"UPDATE {table} SET {columns} WHERE number = ?", *row.values(), number)

    # -- size -----------------------------------------------------------------------------------------------------

    @property
    def used_bytes(self) -> int:
        """Size without free pages that were not yet returned to the disk."""
        pages, free = self.value("PRAGMA page_count"), self.value("PRAGMA freelist_count")
        return int((pages - free) * self.value("PRAGMA page_size"))

    def delete(self, number: int) -> int:
        """Deletes a run with its events. Returns 0 if it no longer exists."""
        with self.transaction():
            return self.change("DELETE FROM runs WHERE number = ?", number)

    def shrink(self) -> None:
        """Returns free pages to the disk."""
        while free := self.value("PRAGMA freelist_count"):
            self.rows(f"PRAGMA incremental_vacuum({VACUUM_PAGES})")
            if self.value("PRAGMA freelist_count") >= free:
                break  # auto_vacuum is off in this file
        with contextlib.suppress(sqlite3.OperationalError):  # another process reads: the log shrinks another time
            self.rows("PRAGMA wal_checkpoint(TRUNCATE)")


def damaged(error: BaseException) -> bool:
    """Whether the error means that the file is not an intact database."""
    return isinstance(error, sqlite3.Error) and getattr(error, "sqlite_errorcode", 0) & 0xFF in DAMAGED


def set_aside(path: Path) -> str:
    """Renames a damaged file and its log, so that a new one can be created and nothing is destroyed.

    Returns a sentence with the new path; "" if another kernel was faster, and the file in its place is intact.
    """
    if _intact(path):
        return ""
    aside = path.with_name(f"{path.name}.damaged-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}")
    for tail in ("", "-wal", "-shm"):
        with contextlib.suppress(FileNotFoundError):
            os.replace(f"{path}{tail}", f"{aside}{tail}")
    return f"the history was damaged: it is now {aside}, and a new one was begun"


def _intact(path: Path) -> bool:
    try:
        with contextlib.closing(sqlite3.connect(path, timeout=BUSY_S)) as db:
            return bool(db.execute("PRAGMA quick_check(1)").fetchone()[0] == "ok")
    except sqlite3.Error as e:
        return not damaged(e)


def _as_dict(cursor: sqlite3.Cursor, row: tuple[Any, ...]) -> dict[str, Any]:
    return dict(zip((column[0] for column in cursor.description), row, strict=True))


def _inode(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


# -- events as bytes ------------------------------------------------------------------------------------------------------

Row = tuple[int, StepEvent]  # its cursor in the run's EventStore, and the event

# Fields that are not scalars.
PARTS = ("memory", "comm", "memory_curve", "spans", "completions", "notes", "carriers", "recompiled")
LEVEL = 6  # of zlib: 9 saves 1% more and takes twice the time


def _names(kind: type, without: Sequence[str] = ()) -> tuple[str, ...]:
    return tuple(f.name for f in dataclasses.fields(kind) if f.name not in without)


EVENT, MEMORY = _names(StepEvent, PARTS), _names(Memory, ("at_peak",))
CLASSES, TRAFFIC = _names(RoleBytes), _names(Traffic)


def pack(rows: Sequence[Row], *, heavy: bool = False) -> bytes:
    """Encodes rows. `unpack(pack(rows, heavy=True))` equals `rows`; without `heavy`, spans and memory curves are dropped."""
    events = [event for _, event in rows]
    first = rows[0][0] if rows else 0
    table: dict[str, Any] = {
        "n": len(rows),
        "first": first,
        "cursor": _column([cursor - first - i for i, (cursor, _) in enumerate(rows)]),
        "event": _columns(events, EVENT),
        "memory": _columns([e.memory for e in events], MEMORY),
        "at_peak": _columns([e.memory.at_peak for e in events], CLASSES),
        "comm": {kind: _traffic(events, kind) for kind in sorted({kind for e in events for kind in e.comm})},
        "notes": _column([list(e.notes) for e in events]),
        "completions": _column([[c.to_row() for c in e.completions] for e in events]),
        "recompiled": _column([list(e.recompiled) for e in events]),
        "carriers": _column([[dataclasses.asdict(c) for c in e.carriers] for e in events]),
    }
    if heavy:
        table["spans"] = [[span.to_row() for span in e.spans] for e in events]
        table["memory_curve"] = [[sample.to_row() for sample in e.memory_curve] for e in events]
    return zlib.compress(_json(table).encode(), LEVEL)


def _json(table: Mapping[str, Any]) -> str:
    """Encodes lists item by item: the encoder holds the GIL, for some 40 ms in a traced step of 64 ranks."""
    write = json.JSONEncoder(separators=(",", ":")).encode
    parts = (f"[{','.join(map(write, v))}]" if isinstance(v, list) else write(v) for v in table.values())
    return "{" + ",".join(f"{write(name)}:{part}" for name, part in zip(table, parts, strict=True)) + "}"


def unpack(data: bytes) -> list[Row]:
    """Decodes the result of `pack`. Raises ValueError, zlib.error or KeyError for other data."""
    table = json.loads(zlib.decompress(data))
    n = table["n"]
    events: list[dict[str, Any]] = _rows(table["event"], EVENT, n)
    memories = zip(_rows(table["memory"], MEMORY, n), _rows(table["at_peak"], CLASSES, n), strict=True)
    for event, (memory, at_peak) in zip(events, memories, strict=True):
        event["memory"], event["comm"] = Memory(**memory, at_peak=RoleBytes(**at_peak)), {}
    for kind, columns in table["comm"].items():
        at = columns.pop("at", None) or range(n)
        for i, row in zip(at, _rows(columns, TRAFFIC, len(at)), strict=True):
            events[i]["comm"][kind] = Traffic(**row)
    _set(events, "notes", _values(table["notes"], n), tuple)
    if "completions" in table:  # did not exist
        _set(
            events, "completions", _values(table["completions"], n), lambda rows: tuple(map(Completion.from_row, rows))
        )
    if "recompiled" in table:  # did not exist
        _set(events, "recompiled", _values(table["recompiled"], n), tuple)
    if "carriers" in table:  # did not exist
        _set(events, "carriers", _values(table["carriers"], n), lambda rows: tuple(Carrier(**row) for row in rows))
    _set(events, "spans", table.get("spans", ()), lambda rows: tuple(map(Span.from_row, rows)))
    _set(events, "memory_curve", table.get("memory_curve", ()), lambda rows: tuple(map(MemorySample.from_row, rows)))
    cursors = [table["first"] + i + offset for i, offset in enumerate(_values(table["cursor"], n))]
    return [(cursor, StepEvent(**event)) for cursor, event in zip(cursors, events, strict=True)]


def _columns(objects: Sequence[Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: _column(list(map(attrgetter(name), objects))) for name in names}


def _column(values: list[Any]) -> Any:
    """The values, or {"all": value} where they are equal. Not for floats: 0.0 equals -0.0, and 1 equals 1.0."""
    first = values[0] if values else 0.0
    same = not isinstance(first, float) and all(v == first and type(v) is type(first) for v in values)
    return {"all": first} if same else values


def _traffic(events: Sequence[StepEvent], kind: str) -> dict[str, Any]:
    at = [i for i, e in enumerate(events) if kind in e.comm]
    columns = _columns([events[i].comm[kind] for i in at], TRAFFIC)
    return columns if len(at) == len(events) else {"at": at, **columns}


def _values(column: Any, n: int) -> list[Any]:
    return [column["all"]] * n if isinstance(column, dict) else column


def _rows(columns: Mapping[str, Any], names: Sequence[str], n: int) -> list[dict[str, Any]]:
    """The fields that still exist, as a dict for each event."""
    lists = {name: _values(column, n) for name, column in columns.items() if name in names}
    return [{name: values[i] for name, values in lists.items()} for i in range(n)]


def _set(events: Sequence[dict[str, Any]], name: str, values: Sequence[Any], make: Callable[[Any], Any]) -> None:
    """Sets a field of each event to `make(value)`; neighbours with the same value share the result."""
    former, made = object(), None
    for event, value in zip(events, values, strict=False):
        if value is not former:
            former, made = value, make(value)
        event[name] = made
