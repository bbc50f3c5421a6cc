"""`StoredRun`: a run read back from disk; what can be asked of a `Run` that is over can be asked of it."""

from __future__ import annotations

import json
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any

from fsdp_lab.core.events import StepEvent
from fsdp_lab.core.spec import Spec
from fsdp_lab.history.codec import unpack
from fsdp_lab.history.database import HistoryDB, HistoryError
from fsdp_lab.history.kernel_process import KernelProcess
from fsdp_lab.runs.environment import in_words
from fsdp_lab.runs.steps import CAP, EventStore
from fsdp_lab.runs.view import RunQueries, RunState, Switch

Reach = Callable[[], HistoryDB]  # opens the file


class StoredRun(RunQueries):
    """As it stood on disk when it was listed. Its events and switches are read when they are first asked for.

    Attributes:
        id, name, pinned: which one; pinned runs make no room for others.
        started_unix_s, ended_unix_s: None while it goes on; of one that was lost, when it was last heard of.
        state, reason, notes, environment: as the run had them. A run whose kernel died without a word is `RunState.LOST`.
        step: committed steps. tokens_per_s: the median of the newest 100 steps that count. loss: the last one.
        spec, switches, events: as in `Run`.
    """

    def __init__(self, row: Mapping[str, Any], reach: Reach) -> None:
        self._reach = reach
        self.number = int(row["number"])
        self.spec_fields: dict[str, Any] = json.loads(row["spec"])
        self.id, self.name, self.pinned = str(row["id"]), str(row["name"]), bool(row["pinned"])
        self.started_unix_s, self.ended_unix_s = float(row["started_unix_s"]), row["ended_unix_s"]
        self.step, self.tokens_per_s, self.loss = int(row["step"]), row["tokens_per_s"], row["loss"]
        self.state, self.reason = RunState(row["state"]), str(row["reason"])
        self.environment: Mapping[str, Any] = json.loads(row["environment"])
        self._notes = tuple(json.loads(row["notes"]))
        kernel = KernelProcess(host=row["host"], pid=row["pid"], born=row["born"])
        if not self.state.over and not kernel.alive(row["seen_unix_s"]):
            self.reason = f"its kernel, process {kernel.pid} on {kernel.host}, ended without a word"
            self.state, self.ended_unix_s = RunState.LOST, row["seen_unix_s"]

    @property
    def notes(self) -> tuple[str, ...]:
        return self._notes

    @cached_property
    def spec(self) -> Spec:
        """Raises SpecError where it is of a version whose fields are not known here; `spec_fields` has them as they were."""
        return _read_spec(self.spec_fields)

    @cached_property
    def switches(self) -> Sequence[Switch]:
        with self._reach() as archive:
            rows = archive.rows("SELECT * FROM switches WHERE run = ? ORDER BY position", self.number)
        made: list[Switch] = []
        for row in rows:
            made.append(
                Switch(
                    step=row["step"],
                    before=made[-1].after if made else None,
                    after=_read_spec(json.loads(row["spec"])),
                    seconds=row["seconds"],
                    carried=bool(row["carried"]),
                    notes=tuple(json.loads(row["notes"])),
                )
            )
        return made

    @cached_property
    def events(self) -> EventStore:
        """Raises HistoryError where it was deleted meanwhile."""
        with self._reach() as archive:
            found = archive.rows("SELECT restarts FROM runs WHERE number = ?", self.number)
            if not found:
                raise HistoryError(f"run {self.id} was deleted from {archive.path}")
            return read_events(archive, self.number, json.loads(found[0]["restarts"]))

    def to_dict(self) -> dict[str, Any]:
        """All but its events, as plain values."""
        return {
            "id": self.id, "name": self.name, "pinned": self.pinned, "state": self.state.value, "reason": self.reason,
            "started_unix_s": self.started_unix_s, "ended_unix_s": self.ended_unix_s, "step": self.step,
            "tokens_per_s": self.tokens_per_s, "loss": self.loss, "spec": self.spec_fields, "notes": list(self.notes),
            "environment": dict(self.environment),
        }  # fmt: skip

    @property
    def when(self) -> str:
        """Its start, in local time."""
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(self.started_unix_s))

    @property
    def where(self) -> str:
        """Machine and devices, in words."""
        return in_words(self.environment)

    def __repr__(self) -> str:
        called = f" {self.name!r}" if self.name else ""
        return f"<StoredRun {self.id}{called}: {self.state.value}, step {self.step}, {self.when}>"


def _read_spec(fields: Mapping[str, Any]) -> Spec:
    """Of before there was `held_out`: nothing was. Raises SpecError."""
    return Spec.from_dict({**fields, "workload": {"held_out": 0, **fields["workload"]}})


def read_events(archive: HistoryDB, number: int, restarts: Sequence[tuple[int, int]]) -> EventStore:
    """A run's events in the order in which they arrived, with the spans and memory curves that were stored."""
    found: dict[int, StepEvent] = {}
    for table in ("batches", "traces"):
        for row in archive.each(f"SELECT data FROM {table} WHERE run = ? ORDER BY first", number):
            found.update(unpack(row["data"]))
    store, cursors = EventStore(max(CAP, len(found))), sorted(found)
    places = [*(bisect_left(cursors, cursor) for cursor, _ in restarts), len(cursors)]
    store.add(found[c] for c in cursors[: places[0]])
    for (_, step), (begin, end) in zip(restarts, pairwise(places), strict=True):
        store.restart(step)  # in files older than `StepEvent.attempt` only the restarts tell the attempts apart
        store.add(found[c] for c in cursors[begin:end])
    return store
