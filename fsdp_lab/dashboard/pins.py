"""`Pinned`: a run as it was when it was pinned; and the curves of it that lie under those of the live one."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median
from typing import Any

import numpy as np

from fsdp_lab.core.events import StepEvent
from fsdp_lab.core.formatting import MIB
from fsdp_lab.core.spec import Spec
from fsdp_lab.dashboard import theme
from fsdp_lab.dashboard.columns import Numbers
from fsdp_lab.dashboard.panels.axis import CURVE, MOST_ROWS, SMOOTH_STEPS, STEP_LIMIT
from fsdp_lab.runs import EventStore, RunState, Step, Switch
from fsdp_lab.runs.steps import last_stretch
from fsdp_lab.runs.view import RunView


@dataclass(kw_only=True, eq=False)
class Pinned:
    """A `RunView` that nobody changes any more.

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
    def of(cls, run: RunView, *, curve: bool = True) -> Pinned:
        """As it is now. Without its curve where only figures are wanted."""
        steps, spec, state, reason = run.events.steps(), run.spec, run.state, run.reason
        store = EventStore()
        store.add(_bare(e) for step in ends(last_stretch(steps, spec), STEP_LIMIT) for e in step.events)
        return cls(
            id=run.id,
            spec=spec,
            events=store,
            curve=curve_of(ends(steps, STEP_LIMIT)) if curve else np.empty((0, len(CURVE))),
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


def ends(steps: Sequence[Step], most: int) -> list[Step]:
    """The first and the last `most` of them, or all."""
    return [*steps[:most], *steps[-most:]] if len(steps) > 2 * most else list(steps)


def curve_of(steps: Iterable[Step]) -> Numbers:
    """A row for each whole step. Rates and exposed communication are medians of nine ordinary steps, a peak is a
    rank's in MiB; of more ranks than colours the first two peaks are the fullest's and the emptiest's."""
    recent: deque[tuple[float, float, float]] = deque(maxlen=SMOOTH_STEPS)
    rows: list[list[float]] = []
    for step in steps:
        if not step.is_whole:
            continue
        if rows and step.number > rows[-1][0] + 1:
            rows.append([math.nan] * len(CURVE))
        if step.events[0].first_after_switch:
            recent.clear()
        if step.counts:
            recent.append(_rates(step))
        smooth = [median(values) for values in zip(*recent, strict=True)] if recent else [math.nan] * 3
        rows.append([step.number, step.mean_loss, *smooth, *_peaks(step)])
    return np.array(rows[-MOST_ROWS:], dtype=np.float64).reshape(-1, len(CURVE))


def _rates(step: Step) -> tuple[float, float, float]:
    tflops, exposed_s = fmean(e.tflops for e in step.events), fmean(e.exposed_comm_s for e in step.events)
    return step.tokens_per_s, tflops, 1e3 * exposed_s


def _peaks(step: Step) -> list[float]:
    peaks = [(e.memory.peak_bytes or math.nan) / MIB for e in step.events]
    if len(peaks) > theme.MOST_LINES:
        peaks = [max(peaks), min(peaks)]
    return [*peaks, *[math.nan] * (theme.MOST_LINES - len(peaks))]
