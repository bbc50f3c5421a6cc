"""`Pinned`: a run as it was when it was pinned; and the curves of it that lie under those of the live one."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median
from typing import Any

import numpy as np

from ..events import StepEvent
from ..runs import EventStore, RunState, Switch
from ..runs.kept import Kept
from ..spec import Spec
from . import theme
from .columns import Numbers
from .panels.base import MOST_ROWS, SMOOTH_STEPS, STEP_LIMIT
from .panels.overlay import CURVE
from .panels.units import MIB


@dataclass(kw_only=True, eq=False)
class Pinned:
    """A `Kept` that nobody changes any more.

    Its figures are one strategy's: `events` are those under the Spec that was applied last, since it was applied. Its
    `curve` is of the whole run, changes included, because a loss is read from its beginning. Of a run of more than
    2,000 steps both keep the first thousand and the last.
    """

    id: str
    spec: Spec
    events: EventStore = field(repr=False)
    curve: Numbers = field(repr=False)  # a row a step, in the order of `CURVE`
    switches: tuple[Switch, ...]
    state: RunState
    reason: str
    notes: tuple[str, ...]
    started_unix_s: float
    ended_unix_s: float | None
    environment: Mapping[str, Any]

    @classmethod
    def of(cls, run: Kept, *, curve: bool = True) -> Pinned:
        """As it is now. Without its curve where only figures are wanted."""
        told, spec, state, reason = run.events.since()[0], run.spec, run.state, run.reason
        life = last_life(told)
        store = EventStore()
        store.add(_bare(e) for e in ends(stretch(life, spec.id), STEP_LIMIT * spec.world_size))
        return cls(
            id=run.id,
            spec=spec,
            events=store,
            curve=curve_of(ends(life, STEP_LIMIT * spec.world_size)) if curve else np.empty((0, len(CURVE))),
            switches=tuple(run.switches),
            state=state,
            reason=reason,
            notes=run.notes,
            started_unix_s=run.started_unix_s,
            ended_unix_s=run.ended_unix_s,
            environment=run.environment,
        )


def _bare(event: StepEvent) -> StepEvent:
    """Without what is large and no curve is made of."""
    return replace(event, spans=(), memory_curve=()) if event.spans or event.memory_curve else event


def last_life(events: Sequence[StepEvent]) -> Sequence[StepEvent]:
    """What was told since the ranks last began again at step 0."""
    newer: dict[int, int] = {}  # rank -> the step that it told next
    for at in range(len(events) - 1, -1, -1):
        e = events[at]
        if e.step >= newer.get(e.rank, e.step + 1):
            return events[at + 1 :]
        newer[e.rank] = e.step
    return events


def stretch(events: Sequence[StepEvent], spec_id: str) -> Sequence[StepEvent]:
    """The end of them that was trained under this Spec."""
    at = next((i for i in range(len(events), 0, -1) if events[i - 1].spec_id != spec_id), 0)
    return events[at:]


def ends(events: Sequence[StepEvent], most: int) -> list[StepEvent]:
    """The first and the last `most` of them, or all."""
    return [*events[:most], *events[-most:]] if len(events) > 2 * most else list(events)


def curve_of(events: Iterable[StepEvent]) -> Numbers:
    """A row a step that all ranks told. Rates and exposed communication are medians of nine ordinary steps, a peak is a
    rank's in MiB; of more ranks than colours the first two peaks are the fullest's and the emptiest's."""
    by_step: dict[int, dict[int, StepEvent]] = {}
    for e in events:
        by_step.setdefault(e.step, {})[e.rank] = e
    recent: deque[tuple[float, float, float]] = deque(maxlen=SMOOTH_STEPS)
    rows: list[list[float]] = []
    for number, by_rank in sorted(by_step.items()):
        step = list(by_rank.values())
        if len(step) != step[0].world_size:
            continue
        if rows and number > rows[-1][0] + 1:
            rows.append([math.nan] * len(CURVE))
        if step[0].first_after_switch:
            recent.clear()
        if all(e.counts for e in step):
            recent.append(_rates(step))
        smooth = [median(values) for values in zip(*recent, strict=True)] if recent else [math.nan] * 3
        rows.append([number, step[0].mean_loss, *smooth, *_peaks(by_rank)])
    return np.array(rows[-MOST_ROWS:], dtype=np.float64).reshape(-1, len(CURVE))


def _rates(step: Sequence[StepEvent]) -> tuple[float, float, float]:
    tokens_per_s = sum(e.tokens for e in step) / max(e.step_time_s for e in step)
    return tokens_per_s, fmean(e.tflops for e in step), 1e3 * fmean(e.exposed_comm_s for e in step)


def _peaks(by_rank: Mapping[int, StepEvent]) -> list[float]:
    peaks = [(by_rank[r].memory.peak_bytes or math.nan) / MIB for r in sorted(by_rank)]
    if len(peaks) > theme.MOST_LINES:
        peaks = [max(peaks), min(peaks)]
    return [*peaks, *[math.nan] * (theme.MOST_LINES - len(peaks))]
