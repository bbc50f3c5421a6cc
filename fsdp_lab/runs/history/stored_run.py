"""`StoredRun`: a run read back from the history file, with the methods of a `Run` that is over; and lists of them."""

from __future__ import annotations

import gc
import json
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, overload

from fsdp_lab.base.errors import ArgumentError, FieldError
from fsdp_lab.base.events import StepEvent
from fsdp_lab.base.formatting import Table, count
from fsdp_lab.base.process import Identity
from fsdp_lab.runs.history.database import HistoryDB, HistoryError, unpack
from fsdp_lab.runs.steps import CAP, EventStore
from fsdp_lab.runs.view import RunQueries, RunState, Switch, describe_environment
from fsdp_lab.spec.describe import describe_strategy, describe_value
from fsdp_lab.spec.loops import KEY, Trained, WatchedLoop
from fsdp_lab.spec.spec import Spec

SILENT_S = 90.0  # a kernel on another host counts as dead after so long without an update: a live one writes every 5 s


def kernel_alive(host: str, kernel: Identity, seen_unix_s: float) -> bool:
    """Tells whether the kernel of a run is alive. `seen_unix_s`: its last update, which decides for another host."""
    return kernel.alive if host == socket.gethostname() else time.time() - seen_unix_s < SILENT_S


class StoredRun(RunQueries):
    """A run as it was in the file when it was listed. Events and switches are read when they are first used.

    Attributes:
        id, name, pinned: a pinned run is never deleted to make room.
        started_unix_s, ended_unix_s: the end is None while it runs, and for a lost run the time of its last update.
        state, reason, notes, environment: as in `Run`. `RunState.LOST` if its kernel died before the run was over.
        step: committed steps. tokens_per_s: median of the newest 100 counted steps. loss: the last one.
        spec, switches, events: as in `Run`.
    """

    def __init__(self, row: Mapping[str, Any], open_db: Callable[[], HistoryDB]) -> None:
        self._open = open_db
        self.number = int(row["number"])
        self.spec_fields: dict[str, Any] = json.loads(row["spec"])
        self.id, self.name, self.pinned = str(row["id"]), str(row["name"]), bool(row["pinned"])
        self.started_unix_s, self.ended_unix_s = float(row["started_unix_s"]), row["ended_unix_s"]
        self.step, self.tokens_per_s, self.loss = int(row["step"]), row["tokens_per_s"], row["loss"]
        self.state, self.reason = RunState(row["state"]), str(row["reason"])
        self.environment: Mapping[str, Any] = json.loads(row["environment"])
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
        names = ("id", "name", "pinned", "state", "reason", "started_unix_s", "ended_unix_s", "step")
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
    def __getitem__(self, which: slice) -> RunList: ...
    def __getitem__(self, which: int | str | slice) -> StoredRun | RunList:
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
        rows, left = tuple(map(_row, self._runs)), frozenset(COLUMNS) - {"ranks", "steps", "tokens/s", "loss"}
        return Table(columns=COLUMNS, rows=rows, caption=caption, notes=(*legend, *self._notes), left=left)

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
