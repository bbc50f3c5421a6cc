"""`RunWriter`: one live run on its way to disk.

What is kept of it, so that a day of training stays small: of the newest 100,000 events all; of those before one step in 16,
of the same number of these; before them one in 256; and so on. About 120 bytes an event, so some 12 MB for each of these
rows of a long run. First steps after a switch, ledger steps and evaluated ones stay longer. Spans are kept of one traced
step each 5 s and of the run's last ones, the newest 20; memory curves of the newest 8 ledger steps.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from fsdp_lab.core.events import StepEvent
from fsdp_lab.history.codec import Row, pack, unpack
from fsdp_lab.history.database import HistoryDB
from fsdp_lab.history.kernel_process import KernelProcess
from fsdp_lab.runs.steps import CAP, last_stretch
from fsdp_lab.runs.summary import counting, median
from fsdp_lab.runs.view import RunView, Switch

BATCH = 256  # events in a pack: the last one is written again until it is full
THIN = 16  # of a level's steps, one in so many goes on to the next
SPANS_S = 5.0  # between two traced steps that are kept
SPANS_KEPT, CURVES_KEPT = 20, 8  # steps
WAITING = 8  # traced steps, and ledger steps, that wait for their turn; those of the run's end are kept
SEEN_S = 5.0  # between two signs of life
RECENT = 100  # steps that the figures of the list are of


class RunWriter:
    """What of a run is on disk already, and what is next. Belongs to the recorder's thread."""

    def __init__(self, run: RunView) -> None:
        self.run = run
        self.over = False  # and all of it written
        self._begin()

    def _begin(self) -> None:
        """Nothing is on disk."""
        self._number: int | None = None
        self._cursor = 0
        self._tail: list[Row] = []  # of the pack that is not full
        self._known: tuple[Any, ...] = ()
        self._switches = 0
        self._seen_s = self._figures_s = self._spans_s = float("-inf")
        self._figures: dict[str, Any] = {"tokens_per_s": None, "loss": None}
        self._heavy: dict[tuple[int, int], dict[int, StepEvent]] = {}  # (attempt, step) -> cursor -> event

    def write(self, archive: HistoryDB) -> None:
        """What is new, in one transaction, or nothing if there is none. Raises what SQLite does, and may be called again."""
        over = self.run.state.over  # before the events: then none comes later
        new, cursor = self.run.events.since(self._cursor)
        rows = list(enumerate(new, cursor - len(new)))
        now_s = time.monotonic()
        known = (self.run.state, self.run.reason, len(self.run.switches), self.run.notes, self.run.environment, over)
        if not rows and known == self._known and now_s - self._seen_s < SEEN_S:
            return
        self._gather(rows)
        batches = [(piece, pack(piece)) for piece in _pieces([*self._tail, *rows])] if rows else []
        traces = self._due(over, now_s)
        packed = [(min(step), _has_curve(step), pack(sorted(step.items()), heavy=True))
                  for step in traces.values()]  # fmt: skip
        if over or now_s - self._figures_s >= SEEN_S or self._figures["loss"] is None:
            self._figures, self._figures_s = figures(self.run), now_s
        with archive.transaction():
            number, switches = self._write_row(archive, known)
            for piece, data in batches:
                batch = {"run": number, "first": piece[0][0], "count": len(piece), "level": 0, "data": data}
                archive.insert("batches", batch, replace=True)
            for first, curve, data in packed:
                trace = {"run": number, "first": first, "curve": int(curve), "data": data}
                archive.insert("traces", trace, replace=True)
            if packed:
                _forget_traces(archive, number)
        self._number, self._cursor, self._known, self._switches = number, cursor, known, switches
        self._seen_s = now_s
        if batches:
            last = batches[-1][0]
            self._tail = last if len(last) < BATCH else []
        if traces:
            self._spans_s = now_s
            self._heavy = {key: step for key, step in self._heavy.items() if key not in traces}
        self.over = over

    def again(self) -> None:
        """The file is another one: all that is still known is to be written anew."""
        self.over = False
        self._begin()

    def thin(self, archive: HistoryDB) -> None:
        """Old events make room; see the module."""
        if self._number is not None:
            thin(archive, self._number)

    # -- the run's row --------------------------------------------------------------------------------------------

    def _write_row(self, archive: HistoryDB, known: tuple[Any, ...]) -> tuple[int, int]:
        """The run's number on disk, and how many switches are there now."""
        number = self._number
        latest: dict[str, Any] = {"step": _step(self.run), "seen_unix_s": time.time(), **self._figures}
        if number is None:
            number = archive.insert("runs", {**_described(self.run), **_whose(), **latest})
        else:
            told = {**_described(self.run), **latest} if known != self._known else latest
            if not archive.update("runs", number, told):
                raise LookupError(f"run {self.run.id} was deleted")
        switches = list(islice(self.run.switches, self._switches, None))
        for position, switch in enumerate(switches, self._switches):
            archive.insert("switches", {"run": number, "position": position, **_switch(switch)}, replace=True)
        return number, self._switches + len(switches)

    # -- spans and memory curves ----------------------------------------------------------------------------------

    def _gather(self, rows: Sequence[Row]) -> None:
        """Remembers the newest steps that have spans or a memory curve."""
        for cursor, event in rows:
            if event.spans or event.memory_curve:
                self._heavy.setdefault((event.attempt, event.step), {})[cursor] = event
        for curve in (False, True):
            for key in [key for key, step in self._heavy.items() if _has_curve(step) is curve][:-WAITING]:
                del self._heavy[key]

    def _due(self, over: bool, now_s: float) -> dict[tuple[int, int], dict[int, StepEvent]]:
        """Steps whose turn it is: each 5 s the newest traced one and the newest ledger step that all ranks have told; at the
        end the last few, as they are."""
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


def _pieces(rows: Sequence[Row]) -> Iterator[list[Row]]:
    for at in range(0, len(rows), BATCH):
        yield list(rows[at : at + BATCH])


def _described(run: RunView) -> dict[str, Any]:
    return {
        "id": run.id,
        "spec": json.dumps(run.spec.to_dict()),
        "state": run.state.value,
        "reason": run.reason,
        "started_unix_s": run.started_unix_s,
        "ended_unix_s": run.ended_unix_s,
        "notes": json.dumps(list(run.notes)),
        "environment": json.dumps(dict(run.environment)),
        "restarts": json.dumps(run.events.restarts),
    }


def _whose() -> dict[str, Any]:
    kernel = KernelProcess.this()
    return {"host": kernel.host, "pid": kernel.pid, "born": kernel.born}


def _switch(switch: Switch) -> dict[str, Any]:
    return {"step": switch.step, "spec": json.dumps(switch.after.to_dict()), "seconds": switch.seconds,
            "carried": int(switch.carried), "notes": json.dumps(list(switch.notes))}  # fmt: skip


def _step(run: RunView) -> int:
    return max((e.step + 1 for e in run.events.latest().values()), default=0)


def figures(run: RunView) -> dict[str, Any]:
    """Of the newest steps with the Spec applied last: the median of tokens/s, and the last loss."""
    steps = last_stretch(run.events.last_steps(RECENT), run.spec)
    rates = [step.tokens_per_s for step in counting(steps) if step.step_time_s > 0]
    return {"tokens_per_s": median(rates), "loss": steps[-1].mean_loss if steps else None}


# -- bounds --------------------------------------------------------------------------------------------------------


def _forget_traces(archive: HistoryDB, number: int) -> None:
    for curve, kept in ((0, SPANS_KEPT), (1, CURVES_KEPT)):
        archive.change(
            "DELETE FROM traces WHERE run = ? AND curve = ? AND first NOT IN "
            "(SELECT first FROM traces WHERE run = ? AND curve = ? ORDER BY first DESC LIMIT ?)",
            number, curve, number, curve, kept,
        )  # fmt: skip


def thin(archive: HistoryDB, number: int, cap: int = CAP) -> None:
    """Of each level with a tenth more than `cap` events the oldest packs go on to the next, with one step in `THIN`."""
    level = 0
    while (held := _held(archive, number, level)) is not None:
        surplus = held["events"] - cap
        if surplus > cap // 10:
            query = "SELECT first, count, data FROM batches WHERE run = ? AND level = ? ORDER BY first LIMIT ?"
            _move(archive, number, level, archive.rows(query, number, level, math.ceil(surplus / BATCH)))
        level += 1


def _held(archive: HistoryDB, number: int, level: int) -> Mapping[str, Any] | None:
    """How many events a level has; None where that and all above have none."""
    query = "SELECT total(count) AS events, count(*) AS packs FROM batches WHERE run = ? AND level >= ?"
    if not archive.rows(query, number, level)[0]["packs"]:
        return None
    found: Mapping[str, Any] = archive.rows(query.replace(">=", "="), number, level)[0]
    return found


def _move(archive: HistoryDB, number: int, level: int, old: Sequence[Mapping[str, Any]]) -> None:
    """Sixteen packs become one at a time, so that a transaction is short and the packs stay full."""
    for at in range(0, len(old), THIN):
        group = old[at : at + THIN]
        rows = [row for batch in group for row in unpack(batch["data"])]
        chosen = [
            (cursor, e)
            for cursor, e in rows
            if e.step % THIN ** (level + 1) == 0
            or (level == 0 and (e.first_after_switch or e.ledger or e.eval_loss is not None))
        ]
        pieces = [(piece, pack(piece)) for piece in _pieces(chosen)]
        with archive.transaction():
            for batch in group:
                archive.change("DELETE FROM batches WHERE run = ? AND first = ?", number, batch["first"])
            for piece, data in pieces:
                row = {"run": number, "first": piece[0][0], "count": len(piece), "level": level + 1, "data": data}
                archive.insert("batches", row, replace=True)
