"""`HistoryWriter`: the thread that writes live runs to disk as they happen.

It looks a few times a second at what the runs' event stores have that is not on disk. So neither a run's driver nor the
thread that receives events has anything to do with it, and whatever goes wrong here (a full disk, another kernel's lock, a
damaged file) is said in `problem` and tried again, while the runs go on. It ends when no run is left to be written.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path

from fsdp_lab.history.database import HistoryDB, HistoryError, damaged, set_aside
from fsdp_lab.history.run_writer import RunWriter
from fsdp_lab.runs.view import RunView

FLUSH_S = 0.4
RETRY_S = 2.0  # after something went wrong
TEND_S = 10.0  # between two looks at the sizes
MOST_WAITING = 4  # runs that are over and cannot be written are let go beyond so many


class HistoryWriter:
    """`tend(archive)` keeps the file within its limit; it is called now and then, and when a run is over."""

    def __init__(self, path: Path, tend: Callable[[HistoryDB], None]) -> None:
        self._path, self._tend = path, tend
        self.problem = ""  # why nothing can be kept just now, in a sentence
        self.moved = ""  # where a damaged file went, in a sentence
        self._recordings: list[RunWriter] = []
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()  # guards the two above, and the two below
        self._asked = self._answered = 0  # flushes
        self._inode: tuple[int, int] | None = None  # of the file that was written to last
        self._tended_s = float("-inf")

    def record(self, run: RunView) -> None:
        """Follows the run until it is over. Returns at once."""
        with self._changed:
            self._recordings.append(RunWriter(run))
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="fsdp_lab-history", daemon=True)
                self._thread.start()

    @property
    def recorded(self) -> list[str]:
        """The ids of runs that are being written."""
        with self._changed:
            return [recording.run.id for recording in self._recordings]

    def flush(self, timeout_s: float) -> bool:
        """Writes what the runs have told until now; returns whether that was done within the time."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            if self._thread is None:
                return not self._recordings
            self._asked += 1
            asked = self._asked
            self._changed.notify_all()
            while self._answered < asked and self._thread is not None:
                if not self._changed.wait(max(0.0, deadline - time.monotonic())) and time.monotonic() >= deadline:
                    return False
            return not self.problem

    # -- on its thread --------------------------------------------------------------------------------------------

    def _work(self) -> None:
        archive: HistoryDB | None = None
        while True:
            with self._changed:
                asked, recordings = self._asked, list(self._recordings)
            archive = self._round(archive, recordings)
            with self._changed:
                self._answered = asked
                self._let_go()
                if not self._recordings:
                    self._thread = None  # `record` starts another one, with a file of its own
                self._changed.notify_all()
                if self._thread is None:
                    break
                if self._asked == asked:
                    self._changed.wait(RETRY_S if self.problem else FLUSH_S)
        if archive is not None:
            archive.close()

    def _round(self, archive: HistoryDB | None, recordings: list[RunWriter]) -> HistoryDB | None:
        """Writes what is new, and returns the file, open; None where something is wrong with it."""
        try:
            archive = self._opened(archive, recordings)
            for recording in recordings:
                self._write(recording, archive)
            if any(r.over for r in recordings) or time.monotonic() - self._tended_s > TEND_S:
                for recording in recordings:
                    recording.thin(archive)
                self._tend(archive)
                self._tended_s = time.monotonic()
            self.problem = ""
            return archive
        except Exception as e:  # whatever it is, it is no reason to stop: the runs are of more worth than their history
            if archive is not None:
                archive.close()
            self._trouble(e)
            return None

    def _write(self, recording: RunWriter, archive: HistoryDB) -> None:
        try:
            recording.write(archive)
        except LookupError:  # it was deleted while it went on: so it is meant
            recording.over = True

    def _opened(self, archive: HistoryDB | None, recordings: list[RunWriter]) -> HistoryDB:
        """The file; where it is no more what it was, all that the runs still know is to be written again."""
        if archive is not None and not archive.stale:
            return archive
        if archive is not None:
            archive.close()
            self._inode = None  # a new file may get the number of the one that is gone
        opened = HistoryDB(self._path)
        if opened.inode != self._inode:
            for recording in recordings:
                recording.again()
        self._inode = opened.inode
        return opened

    def _trouble(self, error: Exception) -> None:
        self.problem = said(error, self._path)
        if not damaged(error):
            return
        try:
            if (aside := set_aside(self._path)) is not None:
                self.moved = f"the history was damaged: it is now {aside}, and a new one was begun"
        except (OSError, sqlite3.Error) as e:
            self.problem = said(e, self._path)

    def _let_go(self) -> None:
        """Of runs that are written, and of those that nobody can write for too long. Called with the lock held."""
        self._recordings = [r for r in self._recordings if not r.over]
        ended = [r for r in self._recordings if r.run.state.over]
        for recording in ended[:-MOST_WAITING]:
            self._recordings.remove(recording)


def said(error: BaseException, path: Path) -> str:
    """What went wrong with the file, in a sentence with the way out."""
    if isinstance(error, HistoryError):
        return f"nothing is kept: {error}"
    reason = (getattr(error, "strerror", None) or str(error) or type(error).__name__).strip()
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    ways = {
        sqlite3.SQLITE_FULL: "make room, or set FSDP_LAB_HISTORY to a file on another disk",
        sqlite3.SQLITE_BUSY: "another program holds it",
        sqlite3.SQLITE_LOCKED: "another program holds it",
    }
    hint = ways.get(code, "set FSDP_LAB_HISTORY to a file that can be written")
    return f"runs go on but are not kept in {path} just now: {reason}; {hint}"
