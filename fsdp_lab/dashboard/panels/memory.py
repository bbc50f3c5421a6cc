"""Memory of every rank by what it was for at its peak; what offload moved to the host apart; the peak, and the limit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from bokeh.layouts import row
from bokeh.models.ui import UIElement
from bokeh.plotting import figure

from .. import theme
from ..columns import Columns
from .base import (
    BAR,
    LINE_PX,
    Captions,
    Frame,
    Key,
    Patches,
    Step,
    hover,
    notes_of,
    paint_fill,
    rank_bars,
    sign_bars,
    tint,
    twin,
)
from .classes import ON_DEVICE, class_keys, limit_line, sizes
from .lanes import MemoryLanes
from .ranges import ZeroRange
from .units import GIB, memory

REACH = 3.0  # a limit within so many times the peak is drawn; one further off is said in words alone
HOST_BAR = 0.14  # its height, in ranks


class MemoryPanel:
    """On the left a bar a rank, stacked by class, at the last step; on the right, in the same row, that rank over steps."""

    name = "memory"
    title = "Memory"
    wide = True

    def __init__(self, frame: Frame, world_size: int) -> None:
        self.world_size = world_size
        self._frame = frame
        classes = [*ON_DEVICE, "host", "peak"]
        self._now = Columns(
            "memory.now",
            ["rank", "bar", "host_bar", "top", "bottom", *classes, "allocated", "reserved", "outside"],
            texts=["label", "color"],
            limit=world_size,
        )
        self._over = MemoryLanes("memory", frame, world_size)
        self._range = ZeroRange(headroom=1.5, slack=0.5)
        self._captions = Captions()
        self._limit: int | None = None
        self._drawn: object = None
        self._root = row(self._draw_now(), self._over.figure, sizing_mode="stretch_width", spacing=16)

    def _draw_now(self) -> figure:
        fig = rank_bars("memory.now", "MiB per rank, last step", self.world_size)
        source = twin(self._now)
        few = self.world_size <= theme.MOST_LINES
        bars = fig.hbar_stack(list(ON_DEVICE), y="bar", height=BAR, source=source, line_width=1 if few else 0)
        for name, bar in zip(ON_DEVICE, bars, strict=True):
            paint_fill(bar.glyph, f"memory.{name}", theme.MEMORY[name])
        host = fig.hbar(y="host_bar", left=0, right="host", height=HOST_BAR, source=source, line_width=1 if few else 0)
        paint_fill(host.glyph, "memory.host", theme.MEMORY["host"], outline="memory.gradients")
        peak = fig.segment(x0="peak", x1="peak", y0="top", y1="bottom", line_width=LINE_PX, source=source)
        tint(peak.glyph, line_color="ink.peak")
        if few:
            sign_bars(fig, source, y="bar", end="peak", height=BAR + 0.06)
        whole = fig.hbar(y="rank", left=0, right="peak", height=0.9, source=source, fill_alpha=0, line_alpha=0)
        rows = [(theme.MEMORY[c].label, f"@{c}{{0,0.0}}") for c in (*ON_DEVICE, "host")]
        hover(fig, whole, [("rank", "@rank"), *rows, ("peak", "@peak{0,0.0}"), ("between steps", "@allocated{0,0.0}"),
                           ("reserved", "@reserved{0,0.0}"), ("outside the allocator", "@outside{0,0.0}")],
              mode="mouse")  # fmt: skip
        fig.add_layout(limit_line("memory.now.limit", "height"))
        return fig

    @property
    def sources(self) -> Sequence[Columns]:
        return (self._now, self._over.columns)

    @property
    def root(self) -> UIElement:
        return self._root

    def update(self, steps: Sequence[Step]) -> int:
        known = [s for s in steps if any(e.memory.peak_bytes for e in s.events)]  # none before the first ledger step
        if known:
            self._limit = _drawn_limit(known[-1])
        written = self._over.write(steps, self._limit) if steps else 0
        if known:
            written += self._write_now(known[-1])
            line = [] if self._limit is None else [self._limit / self._over.unit]
            self._range.cover(np.concatenate([self._now.column("peak"), self._now.column("host"), line]))
            self._captions = self._words(known)
        return written

    def _write_now(self, step: Step) -> int:
        hosted = any(e.memory.host_bytes for e in step.events)
        shift = 0.09 if hosted else 0.0
        rows, labels, colors = [], [], []
        for e in step.events:
            m = e.memory
            apart = (m.allocated_bytes, m.reserved_bytes or 0, m.outside_bytes)
            scaled = [b / self._over.unit for b in (*sizes(m), *apart)]
            bar = e.rank - shift
            rows.append([e.rank, bar, e.rank + BAR / 2 + shift, bar - BAR / 2 - 0.05, bar + BAR / 2 + 0.05, *scaled])
            labels.append(memory(m.peak_bytes))
            colors.append(theme.rank_color(e.rank))
        drawn = (self._over.unit, [sizes(e.memory) for e in step.events])
        if drawn == self._drawn:
            return 0  # between two measurements memory stands still: nothing to paint
        self._drawn = drawn
        return self._now.replace(rows, {"label": labels, "color": colors})

    def _words(self, steps: Sequence[Step]) -> Captions:
        memories = [e.memory for e in steps[-1].events]
        peak = max(m.peak_bytes for m in memories)
        host = max(m.host_bytes for m in memories)
        legend = class_keys((*ON_DEVICE, "host") if host else ON_DEVICE)
        legend.append(Key(label="peak", token="ink.peak", hatch="line"))
        reading = f"peak {memory(peak)} on the fullest rank" + (f", {memory(host)} on the host" if host else "")
        limit = min((m.limit_bytes for m in memories if m.limit_bytes), default=None)
        reading += f"; limit {memory(limit)}" if limit else ""
        if self._limit is not None:
            legend.append(Key(label="limit", token="ink.marker", hatch="dashes"))
        outside = max(m.outside_bytes for m in memories)
        note = f"At the peak of a step; outside the allocator {memory(outside)} more."
        return Captions(reading=reading, legend=tuple(legend), note=f"{note} {notes_of(steps)}".strip())

    def patches(self) -> Patches:
        unit = "GiB" if self._over.unit == GIB else "MiB"
        return {
            "memory.now.limit": {"visible": self._limit is not None, "location": (self._limit or 0) / self._over.unit},
            "memory.now.x": {"start": 0.0, "end": self._range.end},
            "memory.now.axis": {"axis_label": f"{unit} per rank, last step"},
            **self._over.patches(),
        }

    def cover(self) -> None:
        self._over.cover()

    def captions(self) -> Captions:
        others = tuple(replace(key, label=f"{key.label}, peak") for key in self._frame.other_keys())
        return replace(self._captions, legend=(*self._captions.legend, *others))


def _drawn_limit(step: Step) -> int | None:
    limits = [e.memory.limit_bytes for e in step.events if e.memory.limit_bytes]
    peak = max(e.memory.peak_bytes for e in step.events)
    return min(limits) if limits and min(limits) <= REACH * peak else None
