"""`FollowedRun`: a run in the history file that is read on while its kernel writes it. For pages without a kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fsdp_lab.core.errors import ArgumentError
from fsdp_lab.core.loops import Trained
from fsdp_lab.history.database import HistoryDB, unpack
from fsdp_lab.history.stored_run import StoredRun
from fsdp_lab.runs.steps import EventStore, Step, assemble
from fsdp_lab.runs.view import RunQueries, RunState, Switch


class FollowedRun(RunQueries):
    """As a live run is to the dashboard. `read` brings what is new in the file; about half a second after it happened.

    Attributes:
        id, name, started_unix_s: as of a `StoredRun`. events: those read so far, without spans and memory curves.
        heavy: steps with these, in the order of reading, to be taken by whoever draws them.
    """

    pending = None

    def __init__(self, path: Path, row: Mapping[str, Any]) -> None:
        self._path = path
        self.number, self.id, self.name = int(row["number"]), str(row["id"]), str(row["name"])
        self.events = EventStore()
        self.heavy: list[Step] = []
        self._packs = -1  # cursor behind the last event that was read
        self._traces = -1  # cursor of the last pack of heavy events
        self._now = StoredRun(row, lambda: HistoryDB(path))

    def read(self) -> None:
        """Raises HistoryError, sqlite3.Error, OSError; ArgumentError if the run was deleted."""
        with HistoryDB(self._path) as db:
            rows = db.rows("SELECT * FROM runs WHERE number = ?", self.number)
            if not rows:
                raise ArgumentError("run", f"{self.id} was deleted", "choose another")
            packs = "SELECT data FROM batches WHERE run = ? AND first + count > ? ORDER BY first"
            new = {c: e for row in db.rows(packs, self.number, self._packs) for c, e in unpack(row["data"]).items()}
            traces = "SELECT first, data FROM traces WHERE run = ? AND first > ? ORDER BY first"
            heavy = db.rows(traces, self.number, self._traces)
        self.events.add(
            new[c] for c in sorted(new) if c >= self._packs
        )  # events before the run's row says that it is over
        self._packs = max([self._packs, *(c + 1 for c in new)])
        self._traces = max([self._traces, *(row["first"] for row in heavy)])
        self.heavy += assemble(event for row in heavy for event in unpack(row["data"]).values())
        self._now = StoredRun(rows[0], lambda: HistoryDB(self._path))

    def take_heavy(self) -> list[Step]:
        taken, self.heavy = self.heavy, []
        return taken

    @property
    def spec(self) -> Trained:
        return self.switches[-1].after if self.switches else self._now.spec

    @property
    def switches(self) -> Sequence[Switch]:
        return self._now.switches

    @property
    def state(self) -> RunState:
        return self._now.state

    @property
    def reason(self) -> str:
        return self._now.reason

    @property
    def notes(self) -> tuple[str, ...]:
        return self._now.notes

    @property
    def environment(self) -> Mapping[str, Any]:
        return self._now.environment

    @property
    def started_unix_s(self) -> float:
        return self._now.started_unix_s

    @property
    def ended_unix_s(self) -> float | None:
        ended: float | None = self._now.ended_unix_s
        return ended


class Followed:
    """The run of a history file that is followed: one by the beginning of its id or its name, or always the newest."""

    def __init__(self, path: Path, wanted: str = "") -> None:
        self._path, self._wanted = path, wanted
        self.run: FollowedRun | None = None

    def read(self) -> FollowedRun | None:
        """The run, with what is new of it; None: there is none yet. Raises as `FollowedRun.read`."""
        if self._path.exists():
            row = self._row()
            if row is not None and (self.run is None or self.run.number != row["number"]):
                self.run = FollowedRun(self._path, row)
            if self.run is not None:
                self.run.read()
        return self.run

    def _row(self) -> Mapping[str, Any] | None:
        with HistoryDB(self._path) as db:
            if not self._wanted:
                rows = db.rows("SELECT * FROM runs ORDER BY started_unix_s DESC, number DESC LIMIT 1")
            else:
                named = (
                    "SELECT * FROM runs WHERE name = ?1 OR substr(id, 1, length(?1)) = ?1 ORDER BY number DESC LIMIT 1"
                )
                rows = db.rows(named, self._wanted)
        return rows[0] if rows else None
