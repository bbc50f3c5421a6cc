"""Throughput: tokens a second, summed over all ranks."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

import numpy as np
from bokeh.models.ui import UIElement

from ..columns import Columns
from .base import LINE_PX, SMOOTH_STEPS, Captions, Frame, Key, Patches, Step, hover, notes_of, tint, twin
from .ranges import ZeroRange
from .units import duration, rate


class ThroughputPanel:
    """Tokens a second of all ranks over steps: each step, and the median of the last nine ordinary ones."""

    name = "throughput"
    title = "Throughput"
    wide = False

    def __init__(self, frame: Frame, world_size: int) -> None:
        self._frame = frame
        self._table = Columns(
            "throughput.steps", ["step", "tokens_per_s", "median_tokens_per_s", "step_ms"], limit=frame.limit
        )
        self._recent: deque[tuple[float, float]] = deque(maxlen=SMOOTH_STEPS)  # tokens/s, step time
        self._range = ZeroRange()
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
        written = self._table.append(rows)
        self.cover()
        if self._recent:
            step_s = median(t for _, t in self._recent)
            tokens_per_s = median(r for r, _ in self._recent)
            self._captions = Captions(
                reading=f"{rate(tokens_per_s)} tokens/s, {duration(step_s)} a step",
                legend=(
                    Key(label="each step", token="ink.faint", hatch="line"),
                    Key(label="median of 9", token="ink.mean", hatch="line"),
                ),
                note=notes_of(steps),
            )
        return written

    def cover(self) -> None:
        self._range.cover(
            np.concatenate([self._table.column("median_tokens_per_s"), self._frame.others("tokens_per_s")])
        )

    def patches(self) -> Patches:
        return {"throughput.y": {"start": 0.0, "end": self._range.end}}

    def captions(self) -> Captions:
        return replace(self._captions, legend=(*self._captions.legend, *self._frame.other_keys()))
