"""`ScalingCard`: the same work of each GPU, on more and more of them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from bokeh.models import FixedTicker, NumeralTickFormatter, Range1d
from bokeh.plotting import figure

from fsdp_lab.core.formatting import GIB, count
from fsdp_lab.dashboard import theme
from fsdp_lab.dashboard.columns import Columns
from fsdp_lab.dashboard.panels.base import Captions, Key, Patches, hover, plain_figure, tint, twin
from fsdp_lab.dashboard.panels.ranges import ZeroRange
from fsdp_lab.dashboard.what_if import words
from fsdp_lab.dashboard.what_if.card import WhatIfCard, taken_bytes
from fsdp_lab.dashboard.what_if.question import Answer
from fsdp_lab.planner.plan import Plan

PLOT_PX = 232
MOST = 4096
LACKS = "#D55E00"


class ScalingCard(WhatIfCard):
    """MFU against GPUs, each with the same work; where it does not fit, and where the question is."""

    name = "scaling"
    title = "Scaling"
    wide = True

    def __init__(self) -> None:
        super().__init__()
        figures = ["gpus", "mfu", "fitting", "step_ms", "tokens_per_s", "tflops", "gib"]
        self._points = Columns("scaling.points", figures, texts=["fits"], limit=64)
        self._lacking = Columns("scaling.lacking", ["gpus", "mfu"], limit=64)
        self._here = Columns("scaling.here", ["gpus", "mfu"], texts=["label"], limit=1)
        self._range = ZeroRange(headroom=1.2, slack=0.5)
        self._most = MOST
        self.sources = (self._points, self._lacking, self._here)
        self.root = self._draw()

    def _draw(self) -> figure:
        fig = plain_figure("scaling", "MFU, %", x_range=Range1d(start=0.8, end=1.3 * MOST, name="scaling.x"),
                           y_range=Range1d(start=0, end=60, name="scaling.y"), x_axis_type="log")  # fmt: skip
        fig.height = PLOT_PX
        fig.xaxis.axis_label = "GPUs, each with the same work (log scale)"
        fig.xaxis.ticker = FixedTicker(ticks=[1 << i for i in range(18)])
        fig.xaxis.formatter = NumeralTickFormatter(format="0,0")
        fig.xgrid.visible = False
        points = twin(self._points)
        dim = fig.line("gpus", "mfu", source=points, line_width=1.5, line_dash="4 3")
        tint(dim.glyph, line_color="ink.faint")
        line = fig.line("gpus", "fitting", source=points, line_width=2)
        tint(line.glyph, line_color="ink.mean")
        dots = fig.scatter("gpus", "fitting", source=points, size=7, line_alpha=0)
        tint(dots.glyph, fill_color="ink.mean")
        fig.scatter("gpus", "mfu", source=twin(self._lacking), size=9, marker="x", line_width=2, line_color=LACKS)
        here = twin(self._here)
        ring = fig.scatter("gpus", "mfu", source=here, size=16, fill_alpha=0, line_width=2.5, line_color=theme.RANKS[0])
        ring.level = "overlay"
        text = fig.text(
            x="gpus", y="mfu", text="label", y_offset=-14, text_align="center", text_baseline="bottom",
            text_font_size="11px", source=here,
        )  # fmt: skip
        tint(text.glyph, text_color="ink.peak")
        every = fig.scatter("gpus", "mfu", source=points, size=12, fill_alpha=0, line_alpha=0)
        hover(fig, every, [("GPUs", "@gpus{0,0}"), ("", "@fits"), ("MFU", "@mfu{0.0} %"), ("step", "@step_ms{0,0} ms"),
                           ("tokens/s", "@tokens_per_s{0,0}"), ("TFLOPS per GPU", "@tflops{0,0}"),
                           ("memory", "@gib{0,0.0} GiB")])  # fmt: skip
        return fig

    def show(self, answer: Answer) -> None:
        """Nothing before there is a curve: the former one stays until then."""
        if not answer.along:
            return
        plans, here = answer.along, answer.plan
        rows = [_point(p) for p in plans]
        fits = ["fits" if p.fits else words.verdict(p) for p in plans]
        self._points.replace(rows, {"fits": fits})
        self._lacking.replace([[p.machine.ranks, 100 * p.mfu] for p in plans if not p.fits])
        label = f"{here.machine.ranks:,} GPUs: {words.percent(here.mfu)}, {count(here.tokens_per_s)} tokens/s"
        self._here.replace([[here.machine.ranks, 100 * here.mfu]], {"label": [label]})
        self._range.cover(np.array([100 * p.mfu for p in (*plans, here)]))
        self._most = max(MOST, here.machine.ranks)
        self._captions = Captions(reading=words.binding(answer), legend=self._keys(plans), note=_fitting(plans))

    @staticmethod
    def _keys(plans: Sequence[Plan]) -> tuple[Key, ...]:
        keys = [Key(label="fits", token="ink.mean", hatch="line"), Key(label="asked", color=theme.RANKS[0])]
        return (*keys, *([Key(label="does not fit", color=LACKS)] if not all(p.fits for p in plans) else []))

    def patches(self) -> Patches:
        return {
            "scaling.y": {"start": 0.0, "end": self._range.end},
            "scaling.x": {"start": 0.8, "end": 1.3 * self._most},
        }


def _point(p: Plan) -> list[float]:
    return [
        p.machine.ranks, 100 * p.mfu, 100 * p.mfu if p.fits else math.nan, 1e3 * p.step_time_s, p.tokens_per_s,
        p.flops_per_s / 1e12, taken_bytes(p) / GIB,
    ]  # fmt: skip


def _fitting(plans: Sequence[Plan]) -> str:
    first = next((p for p in plans if p.fits), None)
    if first is None:
        return "It fits on no number of GPUs up to 4,096."
    if first is plans[0]:
        return ""
    return f"It fits from {first.machine.ranks:,} GPUs on."
