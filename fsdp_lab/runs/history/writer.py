"""`HistoryWriter`, the thread that writes live runs to disk; and `RunWriter`, which writes one of them.

A few times a second the thread writes what is new in the runs' event stores. So neither a run's driver nor the thread that
receives events is involved, and any failure here (a full disk, another kernel's lock, a damaged file) is reported in
`problem` and retried, while the runs continue. The thread ends when no run is left to write.

An event takes about 160 bytes. Spans are stored of one traced step every 5 s and of the run's last ones, up to 20 steps;
memory curves of the newest 8 ledger steps."""

import dataclasses
import json
import socket
import sqlite3
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fsdp_lab.base.events import StepEvent
from fsdp_lab.base.process import Identity
from fsdp_lab.runs.history.database import HistoryDB, HistoryError, Pack, Row, damaged, set_aside
from fsdp_lab.runs.steps import CAP, last_stretch
from fsdp_lab.runs.summary import counting, median
from fsdp_lab.runs.view import RunView

FLUSH_S = 0.4
RETRY_S = 2.0  # after an error
LIMIT_S = 10.0  # between two checks of the sizes
MOST_WAITING = 4  # runs that are over and cannot be written; older ones are dropped

BATCH = 128  # events in a pack; the last one is rewritten until it is full
SPANS_S = 5.0  # between two traced steps that are stored
SPANS_KEPT, CURVES_KEPT = 20, 8  # steps
WAITING = 8  # traced steps, and ledger steps, held in memory; at the end of the run all of them are stored
SEEN_S = 5.0  # between two updates of the time that shows the kernel is alive
RECENT = 100  # newest steps, of which the figures in lists are
_DELETE_OLD_TRACES = """DELETE FROM traces WHERE run = ? AND curve = ? AND first NOT IN
    (SELECT first FROM traces WHERE run = ? AND curve = ? ORDER BY first DESC LIMIT ?)"""


class HistoryWriter:
    """`enforce_limit(db)` deletes runs from a file that is too large; it is called every `LIMIT_S`, and after each run."""

    def __init__(self, path: Path, enforce_limit: Callable[[HistoryDB], None]) -> None:
        self._path, self._enforce_limit = path, enforce_limit
        self.problem = ""  # why nothing can be written at present, as a sentence
        self.moved = ""  # where a damaged file went, as a sentence
        self._writers: list[RunWriter] = []
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()  # guards the two above, and the next two
        self._flushes_wanted = self._flushes_done = 0
        self._inode: tuple[int, int] | None = None  # of the file that was written to last
        self._checked_s = float("-inf")  # when the sizes were checked last

    def record(self, run: RunView) -> None:
        """Writes the run until it is over. Returns at once."""
        with self._changed:
            self._writers.append(RunWriter(run))
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="fsdp_lab-history", daemon=True)
                self._thread.start()

    @property
    def recorded(self) -> list[str]:
        """The ids of runs that are being written."""
        with self._changed:
            return [writer.run.id for writer in self._writers]

    def flush(self, timeout_s: float) -> bool:
        """Writes everything that the runs have reported until now; returns whether that succeeded in time."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            if self._thread is None:
                return not self._writers
            self._flushes_wanted += 1
            wanted = self._flushes_wanted
            self._changed.notify_all()
            while self._flushes_done < wanted and self._thread is not None:
                if not self._changed.wait(max(0.0, deadline - time.monotonic())) and time.monotonic() >= deadline:
                    return False
            return not self.problem

    # -- on its thread --------------------------------------------------------------------------------------------

    def _work(self) -> None:
        db: HistoryDB | None = None
        while True:
            with self._changed:
                wanted, writers = self._flushes_wanted, list(self._writers)
            db = self._round(db, writers)
            with self._changed:
                self._flushes_done = wanted
                self._writers = [writer for writer in self._writers if not writer.over]
                for writer in [writer for writer in self._writers if writer.run.state.over][:-MOST_WAITING]:
                    self._writers.remove(writer)
                if not self._writers:
                    self._thread = None  # `record` starts another one, with a connection of its own
                self._changed.notify_all()
                if self._thread is None:
                    break
                if self._flushes_wanted == wanted:
                    self._changed.wait(RETRY_S if self.problem else FLUSH_S)
        if db is not None:
            db.close()

    def _round(self, db: HistoryDB | None, writers: "list[RunWriter]") -> HistoryDB | None:
        """Writes what is new and returns the open file; None after an error."""
        try:
            db = self._opened(db, writers)
            for writer in writers:
                try:
                    writer.write(db)
                except LookupError:  # a user deleted the run while it trained
                    writer.over = True
            if any(writer.over for writer in writers) or time.monotonic() - self._checked_s > LIMIT_S:
                self._enforce_limit(db)
                self._checked_s = time.monotonic()
            self.problem = ""
            return db
        except Exception as e:  # the thread survives any error, because later runs are to be stored
            if db is not None:
                db.close()
            self.problem = explain(e, self._path)
            if damaged(e):
                try:
                    self.moved = set_aside(self._path) or self.moved
                except (OSError, sqlite3.Error) as later:
                    self.problem = explain(later, self._path)
            return None

    def _opened(self, db: HistoryDB | None, writers: "list[RunWriter]") -> HistoryDB:
        """The open file; into another file than the former one, the runs are written again from the beginning."""
        if db is not None and not db.stale:
            return db
        if db is not None:
            db.close()
            self._inode = None  # a new file may get the inode of the one that is gone
        opened = HistoryDB(self._path)
        if opened.inode != self._inode:
            for writer in writers:
                writer.restart()
        self._inode = opened.inode
        return opened


def explain(error: BaseException, path: Path, what: str = "runs continue but are not stored in {} at present") -> str:
    """An error of the file as a sentence with a hint."""
    if isinstance(error, HistoryError):
        return f"runs are not stored: {error}"
    reason = (getattr(error, "strerror", None) or str(error) or type(error).__name__).strip()
    hints = {
        sqlite3.SQLITE_FULL: "make room, or set FSDP_LAB_HISTORY to a file on another disk",
        sqlite3.SQLITE_BUSY: "another program holds it",
        sqlite3.SQLITE_LOCKED: "another program holds it",
    }
    hint = hints.get(getattr(error, "sqlite_errorcode", 0) & 0xFF, "set FSDP_LAB_HISTORY to a file that can be written")
    return f"{what.format(path)}: {reason}; {hint}"


class RunWriter:
    """Writes one run. Used on the thread of `HistoryWriter` alone."""

    def __init__(self, run: RunView) -> None:
        self.run = run
        self.restart()

    def restart(self) -> None:
        """Begins anew, in a file that has nothing of the run."""
        self.over = False  # whether the run is over, and all of it is written
        self.number: int | None = None  # of the run in the file
        self._cursor = self._stored = 0  # of what was packed, and of what is in the file
        self._packs: list[Pack] = []  # that are not full, or not in the file
        self._written: tuple[Any, ...] = ()  # the run's state, as in the file
        self._named: dict[str, str] = {}  # name and note, as it wrote them; others may write them, too
        self._switches = 0
        self._seen_s = self._figures_s = self._spans_s = float("-inf")
        self._figures: dict[str, Any] = {"tokens_per_s": None, "loss": None}
        self._heavy: dict[tuple[int, int], dict[int, StepEvent]] = {}  # (attempt, step) -> cursor -> event

    def write(self, db: HistoryDB) -> None:
        """Writes what is new in one transaction. May be called again after an exception of SQLite."""
        over = self.run.state.over  # read before the events, so that none is missed
        new, cursor = self.run.events.since(self._cursor)
        rows = list(enumerate(new, cursor - len(new)))
        now_s = time.monotonic()
        named = {"name": self.run.name, "note": self.run.note}
        told = (len(self.run.switches), self.run.notes, self.run.environment, len(self.run.audit()), named)
        state = (self.run.state, self.run.reason, *told, over)
        if cursor == self._stored and state == self._written and now_s - self._seen_s < SEEN_S:
            return
        self._hold(rows)
        # All is packed before the transaction, which is to be short.
        for cursor_of, event in rows:
            if not self._packs or len(self._packs[-1]) == BATCH:
                self._packs = [*self._packs[-CAP // BATCH :], Pack()]
            self._packs[-1].add(cursor_of, event)
        self._cursor = cursor
        parts = self._packs if cursor != self._stored else ()
        batches = [{"first": p.first, "count": len(p), "data": p.data(fast=not over and len(p) < BATCH)} for p in parts]
        due = self._due(over, now_s)
        traces: list[dict[str, Any]] = [
            {"first": min(step), "curve": int(_has_curve(step)), "data": Pack(sorted(step.items()), heavy=True).data()}
            for step in due.values()
        ]
        if over or now_s - self._figures_s >= SEEN_S or self._figures["loss"] is None:
            self._figures, self._figures_s = recent_figures(self.run), now_s
        with db.transaction():
            number, switches = self._write_row(db, state, dict(named.items() - self._named.items()))
            for table, packed in (("batches", batches), ("traces", traces)):
                for row in packed:
                    db.insert(table, {"run": number, **row}, replace=True)
            if traces:
                for curve, newest in ((0, SPANS_KEPT), (1, CURVES_KEPT)):
                    db.change(_DELETE_OLD_TRACES, number, curve, number, curve, newest)
        self.number, self._stored, self._written, self._switches = number, cursor, state, switches
        self._named = named
        self._seen_s = now_s
        self._packs = [one for one in self._packs if len(one) < BATCH]
        if due:
            self._spans_s = now_s
            self._heavy = {key: step for key, step in self._heavy.items() if key not in due}
        self.over = over

    def _write_row(self, db: HistoryDB, state: tuple[Any, ...], named: Mapping[str, str]) -> tuple[int, int]:
        """Writes the run's row and new switches, and `named`, a new name and note. Returns its number in the file, and the
        count of switches."""
        number = self.number
        step = max((e.step + 1 for e in self.run.events.latest().values()), default=0)
        latest: dict[str, Any] = {"step": step, "seen_unix_s": time.time(), **self._figures, **named}
        if number is None:
            kernel = {"host": socket.gethostname(), **dataclasses.asdict(Identity.this())}
            number = db.insert("runs", {**_row(self.run), **kernel, **latest})
        else:
            row = {**_row(self.run), **latest} if state != self._written else latest
            if not db.update("runs", number, row):
                raise LookupError(f"run {self.run.id} was deleted")
        switches = self.run.switches[self._switches :]
        for position, switch in enumerate(switches, self._switches):
            row = {
                "run": number,
                "position": position,
                "step": switch.step,
                "spec": json.dumps(switch.after.to_dict()),
                "seconds": switch.seconds,
                "carried": int(switch.carried),
                "notes": json.dumps(list(switch.notes)),
            }
            db.insert("switches", row, replace=True)
        return number, self._switches + len(switches)

    def _hold(self, rows: Sequence[Row]) -> None:
        """Adds events that have spans or a memory curve, and drops all but the newest steps of either kind."""
        for cursor, event in rows:
            if event.spans or event.memory_curve:
                self._heavy.setdefault((event.attempt, event.step), {})[cursor] = event
        for curve in (False, True):
            for key in [key for key, step in self._heavy.items() if _has_curve(step) is curve][:-WAITING]:
                del self._heavy[key]

    def _due(self, over: bool, now_s: float) -> dict[tuple[int, int], dict[int, StepEvent]]:
        """Steps whose spans and memory curves are to be stored now. Every 5 s the newest traced step and the newest ledger
        step that all ranks have reported; when the run is over, all that are held."""
        if over:
            return dict(self._heavy)
        if now_s - self._spans_s < SPANS_S:
            return {}
        whole = {key: step for key, step in self._heavy.items() if len(step) == next(iter(step.values())).world_size}
        ledgers = [key for key, step in whole.items() if _has_curve(step)]
        traced = [key for key in whole if key not in ledgers]
        newest = [*traced[-1:], *ledgers[-1:]]
        return {key: whole[key] for key in newest}


def _has_curve(step: Mapping[int, StepEvent]) -> bool:
    return any(e.memory_curve for e in step.values())


def _row(run: RunView) -> dict[str, Any]:
    return {
        "id": run.id,
        "spec": json.dumps(run.spec.to_dict()),
        "state": run.state.value,
        "reason": run.reason,
        "started_unix_s": run.started_unix_s,
        "ended_unix_s": run.ended_unix_s,
        "notes": json.dumps(list(run.notes)),
        "environment": json.dumps({**run.environment, "cause": run.cause, "audit": run.audit().to_dict()}),
    }


def recent_figures(run: RunView) -> dict[str, Any]:
    """Median tokens/s and last loss of the newest steps with the Spec applied last."""
    steps = last_stretch(run.events.last_steps(RECENT), run.spec)
    rates = [step.tokens_per_s for step in counting(steps) if step.step_time_s > 0]
    return {"tokens_per_s": median(rates), "loss": steps[-1].mean_loss if steps else None}
