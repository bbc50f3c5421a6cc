"""`PastRun`: a run read back from disk; what can be asked of a `Run` that is over can be asked of it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from fsdp_lab.events import StepEvent
from fsdp_lab.runs.archive import Archive, HistoryError
from fsdp_lab.runs.environment import in_words
from fsdp_lab.runs.kernel import Kernel
from fsdp_lab.runs.packing import unpack
from fsdp_lab.runs.reading import Reading
from fsdp_lab.runs.run import RunState, Switch
from fsdp_lab.runs.store import CAP, EventStore
from fsdp_lab.spec import Spec

Reach = Callable[[], Archive]  # opens the file


class PastRun(Reading):
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
        kernel = Kernel(host=row["host"], pid=row["pid"], born=row["born"])
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
        return f"<PastRun {self.id}{called}: {self.state.value}, step {self.step}, {self.when}>"


def _read_spec(fields: Mapping[str, Any]) -> Spec:
    """Of before there was `held_out`: nothing was. Raises SpecError."""
    return Spec.from_dict({**fields, "workload": {"held_out": 0, **fields["workload"]}})


def read_events(archive: Archive, number: int, restarts: Sequence[tuple[int, int]]) -> EventStore:
    """What a run told, in the order in which it arrived, with the spans and memory curves that were kept."""
    told: dict[int, StepEvent] = {}
    for row in archive.each("SELECT data FROM batches WHERE run = ? ORDER BY first", number):
        told.update(unpack(row["data"]))
    for row in archive.each("SELECT data FROM traces WHERE run = ? ORDER BY first", number):
        told.update(unpack(row["data"]))
    store = EventStore(max(CAP, len(told)))
    order, at = sorted(told), 0
    for cursor, step in [*restarts, (float("inf"), 0)]:
        end = next((i for i in range(at, len(order)) if order[i] >= cursor), len(order))
        store.add(told[c] for c in order[at:end])
        at = end
        if cursor != float("inf"):
            store.restart(step)
    return store
