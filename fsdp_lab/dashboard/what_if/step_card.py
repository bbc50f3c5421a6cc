"""`StepCard`: where the time of a step goes."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from bokeh.plotting import figure

from fsdp_lab.core.formatting import duration
from fsdp_lab.dashboard import theme
from fsdp_lab.dashboard.columns import Columns
from fsdp_lab.dashboard.panels.base import Captions, Key, Patches, hover, paint_fill, tint, twin
from fsdp_lab.dashboard.panels.ranges import FINE, ZeroRange
from fsdp_lab.dashboard.what_if import words
from fsdp_lab.dashboard.what_if.card import WhatIfCard, bar_figure
from fsdp_lab.dashboard.what_if.question import Answer


class StepCard(WhatIfCard):
    """Where a step's time goes, and below it what the collectives take by themselves."""

    name = "step"
    title = "A step"
    PARTS = ("computing", "slowed", "exposed", "optimizer", "rest")
    FILLS: Mapping[str, tuple[str, str]] = {  # token, label
        "computing": ("timeline.backward", "computing"),
        "slowed": ("timeline.forward", "slowed by sending"),
        "exposed": ("timeline.waiting", "exposed communication"),
        "optimizer": ("timeline.optimizer", "optimizer"),
        "rest": ("timeline.compute", "the loop and launching"),
    }
    KINDS = ("all_gather", "reduce_scatter", "all_reduce")

    def __init__(self) -> None:
        super().__init__()
        self._time = Columns("step.time", ["y", *self.PARTS, "end"], texts=["label"], limit=1)
        self._sent = Columns("step.sent", ["y", *self.KINDS, "end"], texts=["label"], limit=1)
        self._range = ZeroRange(headroom=1.22, slack=0.5, steps=FINE)
        self._unit_s = 1e-3
        self.sources = (self._time, self._sent)
        self.root = self._draw()

    def _draw(self) -> figure:
        fig = bar_figure("step", "ms")
        for source, names, height in ((twin(self._time), self.PARTS, 0.62), (twin(self._sent), self.KINDS, 0.2)):
            for name, bar in zip(names, fig.hbar_stack(list(names), y="y", height=height, source=source), strict=True):
                paint_fill(bar.glyph, *self._fill(name))
            text = fig.text(
                x="end", y="y", text="label", x_offset=7, text_baseline="middle", text_font_size="11px", source=source
            )
            tint(text.glyph, text_color="ink.peak" if names is self.PARTS else "ink.marker")
            whole = fig.hbar(y="y", left=0, right="end", height=height, source=source, fill_alpha=0, line_alpha=0)
            labels = [self.FILLS[n][1] if n in self.FILLS else theme.COMMUNICATION[n].label for n in names]
            hover(
                fig, whole, [(label, f"@{n}{{0,0.00}}") for label, n in zip(labels, names, strict=True)], mode="mouse"
            )
        return fig

    def _fill(self, name: str) -> tuple[str, theme.Fill]:
        if name in self.KINDS:
            return f"communication.{name}", theme.COMMUNICATION[name]
        token = self.FILLS[name][0]
        return token, theme.COMPUTE[token.partition(".")[2]]

    def show(self, answer: Answer) -> None:
        p = answer.plan
        step, whole = p.step, p.step_time_s
        self._unit_s = 1.0 if whole >= 1 else 1e-3
        known = (step.computing_s, step.slowed_s, step.exposed_comm_s, step.optimizer_s)
        parts = [*known, max(0.0, whole - sum(known))]
        sent = [p.comm_s.get(kind, 0.0) for kind in self.KINDS]
        row = [0.0, *(s / self._unit_s for s in (*parts, whole))]
        self._time.replace([row], {"label": [duration(whole)]})
        label = f"sent: {duration(sum(sent))}" if sum(sent) else ""
        self._sent.replace([[0.55, *(s / self._unit_s for s in (*sent, sum(sent)))]], {"label": [label]})
        self._range.cover(np.array([whole, sum(sent)]) / self._unit_s)
        said = [
            Key(
                label=f"{self.FILLS[name][1]} {duration(s)}", token=self.FILLS[name][0], hatch=self._fill(name)[1].hatch
            )
            for name, s in zip(self.PARTS, parts, strict=True)
        ]
        said += [
            Key(label=f"{theme.COMMUNICATION[k].label} {duration(s)}", token=f"communication.{k}")
            for k, s in zip(self.KINDS, sent, strict=True) if s
        ]  # fmt: skip
        hidden = sum(sent) and 1 - step.exposed_comm_s / sum(sent)
        overlap = (
            f"{words.percent(max(0.0, hidden))} of the communication is hidden" if sum(sent) else "nothing is sent"
        )
        self._captions = Captions(reading=f"{duration(whole)}; {overlap}", legend=tuple(said),
                                  note="Below: what the collectives take by themselves.")  # fmt: skip

    def patches(self) -> Patches:
        unit = "s" if self._unit_s == 1.0 else "ms"
        return {"step.x": {"start": 0.0, "end": self._range.end}, "step.axis": {"axis_label": f"{unit} of one step"}}
