"""Throughput: tokens a second, summed over all ranks."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

import numpy as np
from bokeh.models.annotations import Span
from bokeh.models.ui import UIElement

from fsdp_lab.core.formatting import count, duration
from fsdp_lab.dashboard.columns import Columns
from fsdp_lab.dashboard.panels.base import LINE_PX, SMOOTH_STEPS, Captions, Key, Patches, StepAxis, hover, tint, twin
from fsdp_lab.dashboard.panels.ghost import Prediction, told
from fsdp_lab.dashboard.panels.ranges import ZeroRange
from fsdp_lab.runs.steps import Step


class ThroughputPanel:
    """Tokens a second of all ranks over steps: each step, the median of the last nine ordinary ones, and what is predicted
    where this machine is calibrated."""

    name = "throughput"
    title = "Throughput"
    wide = False

    def __init__(self, frame: StepAxis, world_size: int) -> None:
        self._frame = frame
        self._table = Columns(
            "throughput.steps", ["step", "tokens_per_s", "median_tokens_per_s", "step_ms"], limit=frame.limit
        )
        self._recent: deque[tuple[float, float]] = deque(maxlen=SMOOTH_STEPS)  # tokens/s, step time
        self._range = ZeroRange()
        self._ghost: Prediction | None = None
        self._spec_id = ""  # of the last step
        self._captions = Captions()
        fig = frame.plot("throughput", "tokens/s, all ranks")
        source = twin(self._table)
        each = fig.line("step", "tokens_per_s", source=source, line_width=1)
        tint(each.glyph, line_color="ink.faint")
        frame.overlays.draw(fig, "tokens_per_s")
        smooth = fig.line("step", "median_tokens_per_s", source=source, line_width=LINE_PX)
        tint(smooth.glyph, line_color="ink.mean")
        hover(fig, each, [("step", "@step"), ("tokens/s", "@tokens_per_s{0,0}"),
                          ("median of 9", "@median_tokens_per_s{0,0}"), ("step time", "@step_ms{0,0.0} ms")])  # fmt: skip
        line = Span(
            name="throughput.ghost", location=0, dimension="width", line_dash="3 3", line_width=LINE_PX, visible=False
        )
        tint(line, line_color="ink.marker")
        fig.add_layout(line)
        frame.label_markers(fig)
        self._fig = fig

    @property
    def sources(self) -> Sequence[Columns]:
        return (self._table,)

    @property
    def root(self) -> UIElement:
        return self._fig

    def update(self, steps: Sequence[Step]) -> int:
        if not steps:
            return 0
        rows = []
        for s in steps:
            tokens_per_s = sum(e.tokens for e in s.events) / s.step_time_s
            if s.events[0].first_after_switch:
                self._recent.clear()  # the median must not mix two strategies
            if s.counts:
                self._recent.append((tokens_per_s, s.step_time_s))
            smooth = median(r for r, _ in self._recent) if self._recent else math.nan
            rows.append([s.number, tokens_per_s, smooth, s.step_time_s * 1e3])
        self._spec_id = steps[-1].events[0].spec_id
        written = self._table.append(rows)
        self.cover()
        if self._recent:
            step_s = median(t for _, t in self._recent)
            tokens_per_s = median(r for r, _ in self._recent)
            self._captions = Captions(
                reading=f"{count(tokens_per_s)} tokens/s, {duration(step_s)} a step",
                legend=(
                    Key(label="each step", token="ink.faint", hatch="line"),
                    Key(label="median of 9", token="ink.mean", hatch="line"),
                ),
            )
        return written

    def predict(self, ghost: Prediction) -> None:
        self._ghost = ghost
        self.cover()

    @property
    def _foretold(self) -> float | None:
        """Tokens a second."""
        ghost = self._ghost
        return None if ghost is None or ghost.step_time_s is None else ghost.tokens / ghost.step_time_s

    def cover(self) -> None:
        predicted = [] if self._foretold is None else [self._foretold]
        self._range.cover(
            np.concatenate([self._table.column("median_tokens_per_s"), self._frame.others("tokens_per_s"), predicted])
        )

    def patches(self) -> Patches:
        predicted = self._foretold
        return {
            "throughput.y": {"start": 0.0, "end": self._range.end},
            "throughput.ghost": {"visible": predicted is not None, "location": predicted or 0.0},
        }

    def captions(self) -> Captions:
        said, ghost = self._captions, self._ghost
        legend, reading = said.legend, said.reading
        if ghost is not None and ghost.step_time_s is not None:
            landed = self._recent and self._spec_id == ghost.spec_id
            measured = duration(median(t for _, t in self._recent)) if landed else None
            reading = "; ".join(
                part for part in (reading, told(f"{duration(ghost.step_time_s)} a step", measured)) if part
            )
            legend = (*legend, Key(label="predicted", token="ink.marker", hatch="dashes"))
        return replace(said, reading=reading, legend=(*legend, *self._frame.other_keys()))
