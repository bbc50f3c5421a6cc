"""Memory within a step: the fullest rank's by class, at every unit of the last ledger step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import Any

import numpy as np
from bokeh.models import Range1d
from bokeh.plotting import figure

from fsdp_lab.base.events import MemorySample, Role
from fsdp_lab.base.formatting import MIB, duration, size
from fsdp_lab.dashboard import theme
from fsdp_lab.dashboard.columns import Columns
from fsdp_lab.dashboard.panels.axis import StepAxis, ZeroRange, round_up
from fsdp_lab.dashboard.panels.base import Captions, Key, Panel, Patches
from fsdp_lab.dashboard.panels.drawing import (
    CLASS_TOKENS,
    ON_DEVICE,
    class_keys,
    draw_changes,
    draw_line,
    hover,
    paint_stack,
    plain_figure,
    tint,
    twin,
    unit_for,
    unit_name,
    write_labels,
)
from fsdp_lab.runs.steps import Step

LABEL_ROOM = 0.1  # of the axis: a phase that is shorter has no label


class LedgerPanel(Panel):
    """Stacked by class over the time of the step, with a line where each phase begins and a mark at the peak.

    Measuring slows the step: the shape of the curve is right, its length is not.
    """

    name = "ledger"
    title = "Memory within a step"
    wide = True

    def __init__(self, frame: StepAxis, world_size: int) -> None:
        super().__init__(Captions(reading="none measured yet: the third step after a change is"))
        self._curve = Columns("ledger.curve", ["ms", *ON_DEVICE, "total"], texts=["phase", "unit"], limit=1000)
        self._phases = Columns("ledger.phases", ["ms"], texts=["label"], limit=8)
        self._peak = Columns("ledger.peak", ["ms", "total"], texts=["label"], limit=1)
        self._range = ZeroRange(headroom=1.25)
        self._unit, self._end_ms = MIB, 1.0
        self.sources = (self._curve, self._phases, self._peak)
        self.root = self._draw()

    def _draw(self) -> figure:
        x_range, y_range = (Range1d(start=0, end=1, name=f"ledger.{axis}") for axis in "xy")
        fig = plain_figure("ledger", "MiB", x_range=x_range, y_range=y_range)
        fig.xaxis.axis_label = "ms of the step, slowed by measuring"
        fig.yaxis.name = "ledger.axis"
        source = twin(self._curve)
        paint_stack(fig.varea_stack(list(ON_DEVICE), x="ms", source=source), CLASS_TOKENS, line=False)
        total = draw_line(fig, source, "total", "ink.peak", x="ms", line_width=1)
        phases, top = twin(self._phases), twin(self._peak)
        draw_changes(fig, phases, "ms")
        fig.extra_y_ranges = {"phase": Range1d(start=0, end=1)}
        write_labels(fig, phases, "ink.mean", x="ms", y=0.99, y_range_name="phase", text_baseline="top", x_offset=4)
        mark = fig.scatter("ms", "total", source=top, size=8, marker="triangle", line_alpha=0)
        tint(mark.glyph, fill_color="ink.peak")
        above: dict[str, Any] = {"text_baseline": "bottom", "text_align": "center", "y_offset": -6}
        write_labels(fig, top, "ink.peak", x="ms", y="total", **above)
        rows = [(theme.MEMORY[c].label, f"@{c}{{0,0.00}}") for c in ON_DEVICE]
        hover(fig, total, [("at", "@ms{0.0} ms"), ("in", "@phase @unit"), *rows, ("total", "@total{0,0.00}")])
        return fig

    def update(self, steps: Sequence[Step]) -> int:
        step = next((s for s in reversed(steps) if any(e.memory_curve for e in s.events)), None)
        if step is None:
            return 0
        fullest = max((e for e in step.events if e.memory_curve), key=lambda e: e.memory.peak_bytes)
        written = self._write(fullest.memory_curve)
        top = max(fullest.memory_curve, key=lambda s: s.classes.total_bytes)
        where = f"peak {size(top.classes.total_bytes)} in {top.phase}, {top.unit}"
        long = duration(fullest.step_time_s)
        self._captions = Captions(
            reading=f"rank {fullest.rank} in step {step.number}: {where}",
            legend=(*class_keys(ON_DEVICE), Key(label="total", token="ink.peak", hatch="line")),
            note=f"Measuring made this step {long} long; its allocations are those of any other step.",
        )
        return written

    def _write(self, curve: Sequence[MemorySample]) -> int:
        totals = [s.classes.total_bytes for s in curve]
        self._unit = unit_for(max(totals), self._unit)
        self._end_ms = round_up(max(1.07e3 * curve[-1].at_s, 1e-3))  # with room for the last label
        rows = [
            [1e3 * s.at_s, *(s.classes.of_role(Role(c)) / self._unit for c in ON_DEVICE), t / self._unit]
            for s, t in zip(curve, totals, strict=True)
        ]
        texts = {"phase": [s.phase for s in curve], "unit": [s.unit for s in curve]}
        firsts = [next(samples) for _, samples in groupby(curve, key=lambda s: s.phase)]
        begins = [(s.at_s, s.phase) for s in firsts][:8]  # micro-batches repeat them
        top = totals.index(max(totals))
        written = self._curve.replace(rows, texts)
        room_s = LABEL_ROOM * self._end_ms / 1e3
        labels = [phase if end - at > room_s else "" for (at, phase), (end, _) in pairwise([*begins, (math.inf, "")])]
        written += self._phases.replace([[1e3 * at] for at, _ in begins], {"label": labels})
        written += self._peak.replace([[rows[top][0], rows[top][-1]]], {"label": [size(totals[top])]})
        self._range.cover(np.array([totals[top] / self._unit]))
        return written

    def patches(self) -> Patches:
        return {
            "ledger.x": {"start": 0.0, "end": self._end_ms},
            "ledger.y": {"start": 0.0, "end": self._range.end},
            "ledger.axis": {"axis_label": unit_name(self._unit)},
        }
