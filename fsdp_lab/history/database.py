"""`HistoryDB`: the SQLite file that runs are kept in. Its schema and its transactions; what stands in it is for others.

Several kernels may write to it at once: it keeps a write-ahead log, transactions are short and wait for each other. A file
of a newer version or of another program is refused, an older one is migrated, a damaged one moved aside.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

APPLICATION = 0x4653_4450  # "FSDP" in the file's header
BUSY_S = 5.0  # for another kernel's transaction
DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
VACUUM_PAGES = 2000  # given back to the disk in one go, about 8 MB

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


class HistoryError(RuntimeError):
    """The history cannot be read or written; `str()` is a sentence."""


class HistoryDB:
    """An open file. Belongs to the thread that opened it.

    Raises:
        HistoryError: it is of a newer version, or not ours. Nothing in it was touched.
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
            self._db.execute(
                "PRAGMA synchronous = NORMAL"
            )  # a kernel's death loses nothing, a power cut the last moment
            self._settle(migrations)
            self.inode = _inode(path)
        except BaseException:
            self._db.close()
            raise

    def _settle(self, migrations: Sequence[Sequence[str]]) -> None:
        """The schema as this version knows it."""
        if self._version(migrations) == len(migrations):
            return
        if not self._tables():
            self._db.execute("PRAGMA auto_vacuum = INCREMENTAL")  # only before the first table
        self._keep_a_log()
        with self.transaction():
            for number, steps in enumerate(migrations[self._version(migrations) :], self._version(migrations) + 1):
                for step in steps:
                    self._db.execute(step)
                self._db.execute(f"PRAGMA user_version = {number}")
            self._db.execute(f"PRAGMA application_id = {APPLICATION}")

    def _version(self, migrations: Sequence[Sequence[str]]) -> int:
        """0 where nothing is there yet. Raises HistoryError for what is not to be touched."""
        version, whose = self._pragma("user_version"), self._pragma("application_id")
        if whose != APPLICATION and self._tables():
            raise HistoryError(f"{self.path} is not a history of fsdp_lab; name another file")
        if version > len(migrations):
            raise HistoryError(
                f"{self.path} was written by a newer fsdp_lab (version {version} of its schema, and this one knows "
                f"{len(migrations)}); update fsdp_lab, or name another file"
            )
        return version

    def _tables(self) -> int:
        return int(self._first("SELECT count(*) FROM sqlite_master"))

    def _keep_a_log(self) -> None:
        """A write-ahead log, so that readers and a writer do not wait for each other. SQLite does not wait for the lock that
        this takes; where there can be none (some network file systems) the file works without."""
        for left in range(50, -1, -1):
            try:
                self._db.execute("PRAGMA journal_mode = WAL")
                return
            except sqlite3.OperationalError:
                if not left:
                    return
                time.sleep(0.02)

    def _first(self, query: str) -> Any:
        return next(iter(self._db.execute(query).fetchone().values()))

    def _pragma(self, name: str) -> int:
        return int(self._first(f"PRAGMA {name}"))

    @property
    def stale(self) -> bool:
        """Whether the file was moved or deleted since it was opened: what is written now would be lost."""
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
        """All of it or nothing. Waits for another kernel's, `BUSY_S` at most."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:
                with contextlib.suppress(sqlite3.Error):
                    self._db.execute("ROLLBACK")
            raise

    def rows(self, query: str, *values: Any) -> list[dict[str, Any]]:
        return self._db.execute(query, values).fetchall()

    def each(self, query: str, *values: Any) -> Iterator[dict[str, Any]]:
        """One by one, for what is large together."""
        return iter(self._db.execute(query, values))

    def change(self, statement: str, *values: Any) -> int:
        """Returns the number of rows that it changed."""
        return self._db.execute(statement, values).rowcount

    def insert(self, table: str, row: Mapping[str, Any], *, replace: bool = False) -> int:
        """Returns its rowid."""
        columns, marks = ", ".join(row), ", ".join("?" * len(row))
        verb = "INSERT OR REPLACE" if replace else "INSERT"
        done = self._db.execute(f"{verb} INTO {table} ({columns}) VALUES ({marks})", tuple(row.values()))
        return int(done.lastrowid or 0)

    def update(self, table: str, number: int, row: Mapping[str, Any]) -> int:
        """Returns 0 where there is no such row any more."""
        columns = ", ".join(f"{name} = ?" for name in row)
        return self.change(f"UPDATE {table} SET {columns} WHERE number = ?", *row.values(), number)

    # -- size -----------------------------------------------------------------------------------------------------

    @property
    def used_bytes(self) -> int:
        """Of what is kept; pages that are free and not yet given back do not count."""
        return (self._pragma("page_count") - self._pragma("freelist_count")) * self._pragma("page_size")

    def delete(self, numbers: Iterable[int]) -> int:
        """These runs with all they told; a transaction each, so that nobody waits long. Returns how many there were."""
        gone = 0
        for number in numbers:
            with self.transaction():
                gone += self.change("DELETE FROM runs WHERE number = ?", number)
        return gone

    def give_back(self) -> None:
        """Free pages go back to the disk."""
        while free := self._pragma("freelist_count"):
            self.rows(f"PRAGMA incremental_vacuum({VACUUM_PAGES})")
            if self._pragma("freelist_count") >= free:
                break  # a file that was not made to give any back
        with contextlib.suppress(sqlite3.OperationalError):  # somebody reads: the log shrinks another time
            self.rows("PRAGMA wal_checkpoint(TRUNCATE)")


def damaged(error: BaseException) -> bool:
    """Whether it says that the file is no sound database."""
    return isinstance(error, sqlite3.Error) and getattr(error, "sqlite_errorcode", 0) & 0xFF in DAMAGED


def set_aside(path: Path) -> Path | None:
    """Moves a damaged file away, with its log, so that a new one can be begun and nothing is destroyed. Returns where it is
    now; None where another kernel was faster, and the file that is there now is sound."""
    if _sound(path):
        return None
    aside = path.with_name(f"{path.name}.damaged-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}")
    for tail in ("", "-wal", "-shm"):
        with contextlib.suppress(FileNotFoundError):
            os.replace(f"{path}{tail}", f"{aside}{tail}")
    return aside


def _sound(path: Path) -> bool:
    try:
        with contextlib.closing(sqlite3.connect(path, timeout=BUSY_S)) as db:
            return bool(db.execute("PRAGMA quick_check(1)").fetchone()[0] == "ok")
    except sqlite3.Error as e:
        return not damaged(e)


def _as_dict(cursor: sqlite3.Cursor, row: tuple[Any, ...]) -> dict[str, Any]:
    return dict(zip((column[0] for column in cursor.description), row, strict=True))


def _inode(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino
