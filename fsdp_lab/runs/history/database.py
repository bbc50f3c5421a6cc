"""`HistoryDB`: the SQLite file of stored runs, its schema and transactions; and `pack`, `unpack` for the events in it.

Several kernels may write to the file at once: it uses a write-ahead log, and transactions are short and wait for each other.
A file of another version or of another program is refused, a damaged one is moved aside.

A pack of events is zlib over JSON, which writes a float with as many digits as identify it exactly, NaN and infinities by
name. Spans and memory curves, which are larger than all the rest, are stored in packs of their own."""

import contextlib
import errno
import json
import os
import sqlite3
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, Self

from fsdp_lab.base.errors import SentenceError
from fsdp_lab.base.events import StepEvent

APPLICATION = 0x4653_4450  # "FSDP" in the file's header
BUSY_S = 5.0  # for another kernel's transaction
DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
VACUUM_PAGES = 2000  # returned to the disk at once, about 8 MB

VERSION = 2
SCHEMA = (
    """CREATE TABLE runs (
        number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL, name TEXT NOT NULL DEFAULT '',
        pinned INTEGER NOT NULL DEFAULT 0, spec TEXT NOT NULL, state TEXT NOT NULL, reason TEXT NOT NULL,
        started_unix_s REAL NOT NULL, ended_unix_s REAL, step INTEGER NOT NULL, notes TEXT NOT NULL,
        environment TEXT NOT NULL, tokens_per_s REAL, loss REAL, note TEXT NOT NULL DEFAULT '',
        host TEXT NOT NULL, pid INTEGER NOT NULL, born TEXT NOT NULL, seen_unix_s REAL NOT NULL)""",
    "CREATE INDEX runs_by_start ON runs (started_unix_s)",
    """CREATE TABLE switches (
        run INTEGER NOT NULL REFERENCES runs ON DELETE CASCADE, position INTEGER NOT NULL, step INTEGER NOT NULL,
        spec TEXT NOT NULL, seconds REAL NOT NULL, carried INTEGER NOT NULL, notes TEXT NOT NULL,
        PRIMARY KEY (run, position))""",
    """CREATE TABLE batches (
        run INTEGER NOT NULL REFERENCES runs ON DELETE CASCADE, first INTEGER NOT NULL, count INTEGER NOT NULL,
        data BLOB NOT NULL, PRIMARY KEY (run, first))""",
    """CREATE TABLE traces (
        run INTEGER NOT NULL REFERENCES runs ON DELETE CASCADE, first INTEGER NOT NULL, curve INTEGER NOT NULL,
        data BLOB NOT NULL, PRIMARY KEY (run, first))""",
)


class HistoryError(SentenceError, RuntimeError):
    """The history cannot be read or written; `str()` is a sentence."""


class HistoryDB:
    """An open file, to be used only by the thread that opened it. Raises HistoryError for a file of another version or of
    another program, which is not changed; sqlite3.Error, OSError where it cannot be opened, or is damaged (`damaged`)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except FileExistsError:
            raise NotADirectoryError(errno.ENOTDIR, "its folder is a file", str(path)) from None
        self._db = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None)
        try:
            self._db.row_factory = lambda cursor, row: dict(zip((c[0] for c in cursor.description), row, strict=True))
            self._db.execute("PRAGMA foreign_keys = ON")
            # A kernel's death then loses nothing, and a power failure the last moment.
            self._db.execute("PRAGMA synchronous = NORMAL")
            self._create()
            self.inode = _inode(path)
        except BaseException:
            self._db.close()
            raise

    def _create(self) -> None:
        """Creates the schema in an empty file. Raises HistoryError for a file that must not be changed."""
        if self._is_made():
            return self._add_note()
        self._db.execute("PRAGMA auto_vacuum = INCREMENTAL")  # only before the first table
        self._use_wal()
        with self.transaction():
            if not self._is_made():  # another kernel may have made it meanwhile
                marks = (f"PRAGMA user_version = {VERSION}", f"PRAGMA application_id = {APPLICATION}")
                for statement in (*SCHEMA, *marks):
                    self._db.execute(statement)

    def _add_note(self) -> None:
        """Adds the one column that files of this version lacked at first; earlier readers do not mind it."""
        if not self.value("SELECT count(*) FROM pragma_table_info('runs') WHERE name = 'note'"):
            with contextlib.suppress(sqlite3.OperationalError):  # added meanwhile, or a file that can only be read
                self.change("ALTER TABLE runs ADD COLUMN note TEXT NOT NULL DEFAULT ''")

    def _is_made(self) -> bool:
        """Raises HistoryError for a file of another program or version."""
        # Asked first: another kernel may make tables meanwhile, and marks the file in the same transaction.
        if not self.value("SELECT count(*) FROM sqlite_master"):
            return False
        if self.value("PRAGMA application_id") != APPLICATION:
            raise HistoryError(f"{self.path} is not a history of fsdp_lab; name another file")
        if (version := self.value("PRAGMA user_version")) != VERSION:
            raise HistoryError(
                f"{self.path} was written by another fsdp_lab (version {version} of its schema, and this one supports "
                f"{VERSION}); move it away, or name another file"
            )
        return True

    def _use_wal(self) -> None:
        """Turns the write-ahead log on, so that readers and a writer do not wait for each other. SQLite does not wait for
        the lock that this takes, so it is retried for a second. Some network file systems work without such a log."""
        for _ in range(50):
            with contextlib.suppress(sqlite3.OperationalError):
                self._db.execute("PRAGMA journal_mode = WAL")
                return
            time.sleep(0.02)

    @property
    def stale(self) -> bool:
        """Tells whether the file was moved or deleted since it was opened: further writes would be lost."""
        return _inode(self.path) != self.inode

    def close(self) -> None:
        with contextlib.suppress(sqlite3.Error):
            self._db.close()

    def __enter__(self) -> Self:
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
    """Tells whether the error means that the file is not an intact database."""
    return isinstance(error, sqlite3.Error) and getattr(error, "sqlite_errorcode", 0) & 0xFF in DAMAGED


def set_aside(path: Path) -> str:
    """Renames a damaged file and its log, so that a new one can be created and nothing is destroyed. Returns a sentence
    with the new path; "" if another kernel was faster, and the file in its place is intact."""
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


def _inode(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


_encode = json.JSONEncoder(separators=(",", ":")).encode
HEAVY = ("spans", "memory_curve")
LEVEL = 6  # of zlib: 9 saves 1% more and takes twice the time
FAST = 1  # of what is written again soon

Row = tuple[int, StepEvent]  # its cursor in the run's EventStore, and the event


class Pack:
    """Encodes rows for `unpack`; the fields of `HEAVY` if `heavy`. What is as in the rank's last event is left out. `first`:
    the cursor of the first row; -1: there is none."""

    def __init__(self, rows: Sequence[Row] = (), *, heavy: bool = False) -> None:
        self._names = [name for name in StepEvent.__slots__ if heavy or name not in HEAVY]
        self._values = attrgetter(*self._names)
        self._former: dict[int, Sequence[Any]] = {}  # values by rank
        self._encoded: list[str] = []  # one by one: the encoder holds the GIL, for long in a traced step of many ranks
        self.first = -1
        for row in rows:
            self.add(*row)

    def __len__(self) -> int:
        return len(self._encoded)

    def add(self, cursor: int, event: StepEvent) -> None:
        values, changed = self._values(event), self._names
        if (last := self._former.get(event.rank)) is not None:
            both = zip(self._names, last, values, strict=True)
            changed = ["rank", *(name for name, old, new in both if old is not new and not _same(old, new))]
        self._encoded.append(_encode([cursor, event.to_dict(changed)]))
        self._former[event.rank] = values
        self.first = self.first if self.first >= 0 else cursor

    def data(self, *, fast: bool = False) -> bytes:
        return zlib.compress(f"[{','.join(self._encoded)}]".encode(), FAST if fast else LEVEL)


def _same(one: Any, other: Any) -> bool:
    """Tells whether they are equal bit for bit: 0.0 is not -0.0, and 1 is not 1.0."""
    return bool(one == other) and repr(one) == repr(other)


def unpack(data: bytes) -> dict[int, StepEvent]:
    """Returns the events by cursor. Raises ValueError, zlib.error, KeyError or TypeError for other data than `pack`'s."""
    former: dict[int, dict[str, Any]] = {}
    events: dict[int, StepEvent] = {}
    for cursor, fields in json.loads(zlib.decompress(data)):
        rank = fields["rank"]
        former[rank] = {**former.get(rank, {}), **fields}
        events[cursor] = StepEvent.from_dict(former[rank])
    return events
