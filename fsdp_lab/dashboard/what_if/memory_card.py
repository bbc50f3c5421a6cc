"""`MemoryCard`: what a GPU holds, and what it has."""

from __future__ import annotations

from typing import Any

import numpy as np
from bokeh.models.annotations import Span
from bokeh.plotting import figure

from fsdp_lab.core.events import Role
from fsdp_lab.core.formatting import GIB, MIB, size
from fsdp_lab.dashboard import theme
from fsdp_lab.dashboard.columns import Columns
from fsdp_lab.dashboard.panels.base import Captions, Key, Patches, hover, paint_fill, tint, twin
from fsdp_lab.dashboard.panels.classes import ON_DEVICE
from fsdp_lab.dashboard.panels.ghost import HOLLOW
from fsdp_lab.dashboard.panels.ranges import FINE, ZeroRange
from fsdp_lab.dashboard.what_if import words
from fsdp_lab.dashboard.what_if.card import WhatIfCard, bar_figure, taken_bytes
from fsdp_lab.dashboard.what_if.question import Answer
from fsdp_lab.planner.plan import Plan


class MemoryCard(WhatIfCard):
    """A GPU's memory at its fullest moment, by class, beside what it has; below it that of the answer before."""

    name = "need"
    title = "Memory of a GPU"

    def __init__(self) -> None:
        super().__init__()
        columns = [*ON_DEVICE, "slack", "end"]
        self._now = Columns("need.now", ["y", *columns], texts=["label"], limit=1)
        self._before = Columns("need.before", ["y", *ON_DEVICE, "end"], texts=["label"], limit=1)
        self._range = ZeroRange(headroom=1.22, slack=0.5, steps=FINE)
        self._limit, self._unit = 1.0, GIB
        self._shown: Plan | None = None
        self.sources = (self._now, self._before)
        self.root = self._draw()

    def _draw(self) -> figure:
        fig = bar_figure("need", "GiB at the peak of a step")
        now, before = twin(self._now), twin(self._before)
        self._stack(fig, now, [*ON_DEVICE], height=0.62, alpha=1.0)
        rest = fig.hbar(
            y="y", left="end", right="slack", height=0.62, source=now, fill_alpha=0, line_width=1.2, line_dash="3 2"
        )
        tint(rest.glyph, line_color="ink.marker")
        self._stack(fig, before, [*ON_DEVICE], height=0.2, alpha=0.5)
        for source, end, ink in ((now, "slack", "ink.peak"), (before, "end", "ink.marker")):
            text = fig.text(
                x=end, y="y", text="label", x_offset=7, text_baseline="middle", text_font_size="11px", source=source
            )
            tint(text.glyph, text_color=ink)
        whole = fig.hbar(y="y", left=0, right="slack", height=0.7, source=now, fill_alpha=0, line_alpha=0)
        rows = [(theme.MEMORY[c].label, f"@{c}{{0,0.00}}") for c in ON_DEVICE]
        hover(fig, whole, [*rows, ("at the peak", "@end{0,0.00}"), ("with slack and context", "@slack{0,0.00}")],
              mode="mouse")  # fmt: skip
        limit = Span(name="need.limit", location=0, dimension="height", line_dash="6 4", line_width=2)
        tint(limit, line_color="ink.peak")
        fig.add_layout(limit)
        return fig

    @staticmethod
    def _stack(fig: figure, source: Any, names: list[str], *, height: float, alpha: float) -> None:
        for name, bar in zip(names, fig.hbar_stack(names, y="y", height=height, source=source), strict=True):
            paint_fill(bar.glyph, f"memory.{name}", theme.MEMORY[name])
            bar.glyph.fill_alpha = bar.glyph.hatch_alpha = alpha

    def show(self, answer: Answer) -> None:
        p, before = answer.plan, self._shown
        if before is not None and before.memory != p.memory:
            self._write_before(before)
        if before is None or before.memory != p.memory or before.machine.device != p.machine.device:
            self._write_now(p)
        self._shown = p

    def _write_now(self, p: Plan) -> None:
        device, m = p.machine.device.memory_bytes, p.memory
        taken = taken_bytes(p)
        unit = MIB if max(device, taken) < GIB else GIB
        if unit != self._unit:
            self._before.clear()
        self._unit, self._limit = unit, device / unit
        self._now.replace([[0.0, *self._scaled(p), taken / unit, m.peak_bytes / unit]], {"label": [size(taken)]})
        ends = [self._limit, taken / unit, *self._before.column("end")]
        self._range.cover(np.array(ends))
        self._captions = Captions(
            reading=words.verdict(p), legend=_memory_keys(p, taken - m.peak_bytes), note=_where(p)
        )

    def _write_before(self, p: Plan) -> None:
        row = [0.55, *self._scaled(p), p.memory.peak_bytes / self._unit]
        self._before.replace([row], {"label": [f"before: {size(taken_bytes(p))}"]})

    def _scaled(self, p: Plan) -> list[float]:
        return [p.memory.at_peak.of_role(Role(c)) / self._unit for c in ON_DEVICE]

    def patches(self) -> Patches:
        unit = "GiB" if self._unit == GIB else "MiB"
        return {
            "need.x": {"start": 0.0, "end": self._range.end},
            "need.limit": {"location": self._limit},
            "need.axis": {"axis_label": f"{unit} at the peak of a step"},
        }


def _memory_keys(p: Plan, rest: int) -> tuple[Key, ...]:
    peak = p.memory.at_peak
    keys = [
        Key(label=f"{theme.MEMORY[c].label} {size(peak.of_role(Role(c)))}", token=f"memory.{c}",
            hatch=theme.MEMORY[c].hatch)
        for c in ON_DEVICE if peak.of_role(Role(c))
    ]  # fmt: skip
    keys.append(Key(label=f"allocator's slack and CUDA context {size(rest)}", token="ink.marker", hatch=HOLLOW))
    return (*keys, Key(label="what a GPU has", token="ink.peak", hatch="dashes"))


def _where(p: Plan) -> str:
    m = p.memory
    host = f" {size(m.host_bytes)} on the host, of each rank." if m.host_bytes else ""
    return f"The peak is in the {m.peak_phase}, at {m.peak_unit}; {size(m.held.total_bytes)} stay between steps.{host}"
