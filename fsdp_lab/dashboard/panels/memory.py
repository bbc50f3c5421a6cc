"""Memory of every rank by what it was for at its peak; what offload moved to the host apart; the peak, and the limit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from bokeh.layouts import row
from bokeh.models.ui import UIElement
from bokeh.plotting import figure

from fsdp_lab.core.events import Role
from fsdp_lab.core.formatting import GIB, MIB, size
from fsdp_lab.dashboard import theme
from fsdp_lab.dashboard.columns import Columns
from fsdp_lab.dashboard.panels.base import (
    BAR,
    LINE_PX,
    Captions,
    Key,
    Patches,
    StepAxis,
    hover,
    paint_fill,
    rank_bars,
    sign_bars,
    tint,
    twin,
)
from fsdp_lab.dashboard.panels.classes import ON_DEVICE, class_keys, limit_line, sizes, unit_for
from fsdp_lab.dashboard.panels.ghost import GHOST_KEY, Prediction, told
from fsdp_lab.dashboard.panels.lanes import MemoryLanes
from fsdp_lab.dashboard.panels.ranges import ZeroRange
from fsdp_lab.runs.steps import Step

REACH = 3.0  # a limit within so many times the peak is drawn; one further off is said in words alone
HOST_BAR = 0.14  # its height, in ranks
GHOST_BAR = 0.15


class MemoryPanel:
    """On the left a bar a rank, stacked by class, at the last step, and below it a hollow one of what is predicted; on the
    right, in the same row, that rank over steps."""

    name = "memory"
    title = "Memory"
    wide = True

    def __init__(self, frame: StepAxis, world_size: int) -> None:
        self.world_size = world_size
        self._frame = frame
        classes = [*ON_DEVICE, "host", "peak"]
        self._now = Columns(
            "memory.now",
            ["rank", "bar", "host_bar", "top", "bottom", *classes, "allocated", "reserved", "outside"],
            texts=["label", "color"],
            limit=world_size,
        )
        self._ghosts = Columns(
            "memory.ghost", ["rank", "bar", *ON_DEVICE, "host", "peak"], texts=["label"], limit=world_size
        )
        self._ghost: Prediction | None = None
        self._known: Step | None = None  # the last whose memory is known
        self._ledger_spec, self._peak = "", 0  # the Spec of the last ledger step; the fullest rank's peak
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
        self._draw_ghosts(fig, few=few)
        whole = fig.hbar(y="rank", left=0, right="peak", height=0.9, source=source, fill_alpha=0, line_alpha=0)
        rows = [(theme.MEMORY[c].label, f"@{c}{{0,0.0}}") for c in (*ON_DEVICE, "host")]
        hover(fig, whole, [("rank", "@rank"), *rows, ("peak", "@peak{0,0.0}"), ("between steps", "@allocated{0,0.0}"),
                           ("reserved", "@reserved{0,0.0}"), ("outside the allocator", "@outside{0,0.0}")],
              mode="mouse")  # fmt: skip
        fig.add_layout(limit_line("memory.now.limit", "height"))
        return fig

    def _draw_ghosts(self, fig: figure, *, few: bool) -> None:
        """Below each bar what is predicted, in the same colours and hollow."""
        source = twin(self._ghosts)
        for name, bar in zip(
            ON_DEVICE, fig.hbar_stack(list(ON_DEVICE), y="bar", height=GHOST_BAR, source=source), strict=True
        ):
            paint_fill(bar.glyph, f"memory.{name}", theme.MEMORY[name], outline=f"memory.{name}")
            bar.glyph.fill_alpha = bar.glyph.hatch_alpha = 0.3
        if few:
            text = fig.text(
                x="peak",
                y="bar",
                text="label",
                x_offset=7,
                text_baseline="middle",
                text_font_size="10px",
                source=source,
            )
            tint(text.glyph, text_color="ink.marker")
        whole = fig.hbar(y="bar", left=0, right="peak", height=GHOST_BAR, source=source, fill_alpha=0, line_alpha=0)
        rows = [(f"predicted {theme.MEMORY[c].label}", f"@{c}{{0,0.0}}") for c in (*ON_DEVICE, "host")]
        hover(fig, whole, [("rank", "@rank"), *rows, ("predicted peak", "@peak{0,0.0}")], mode="mouse")

    @property
    def sources(self) -> Sequence[Columns]:
        return (self._now, self._over.columns, self._ghosts)

    @property
    def root(self) -> UIElement:
        return self._root

    def update(self, steps: Sequence[Step]) -> int:
        known = [s for s in steps if any(e.memory.peak_bytes for e in s.events)]  # none before the first ledger step
        if known:
            self._limit = _drawn_limit(known[-1])
        unit = self._unit
        written = self._over.write(steps, self._limit) if steps else 0
        for step in steps:
            if any(e.ledger for e in step.events):
                self._ledger_spec = step.events[0].spec_id
        if known:
            self._known = known[-1]
            self._peak = max(e.memory.peak_bytes for e in self._known.events)
            written += self._write_now(known[-1])
            if self._unit != unit:
                self._write_ghosts()
            self._cover_now()
            self._captions = self._words(known)
        return written

    def predict(self, ghost: Prediction) -> None:
        self._ghost = ghost
        self._write_ghosts()
        if self._known is not None:
            self._write_now(self._known)  # the bars make room
        self._cover_now()

    @property
    def _unit(self) -> int:
        if self._peak or self._ghost is None:
            return self._over.unit
        return unit_for(self._ghost.peak_bytes, MIB)

    def _cover_now(self) -> None:
        line = [] if self._limit is None else [self._limit / self._unit]
        shown = [table.column(name) for table in (self._now, self._ghosts) for name in ("peak", "host")]
        self._range.cover(np.concatenate([*shown, line]))

    def _write_ghosts(self) -> None:
        ghost = self._ghost
        if ghost is None:
            return
        parts = [ghost.at_peak.of_role(Role(c)) for c in ON_DEVICE]
        scaled = [b / self._unit for b in (*parts, ghost.host_bytes, ghost.peak_bytes)]
        rows = [[rank, rank + 0.25, *scaled] for rank in range(self.world_size)]
        self._ghosts.replace(rows, {"label": [size(ghost.peak_bytes)] * self.world_size})

    def _write_now(self, step: Step) -> int:
        hosted = any(e.memory.host_bytes for e in step.events)
        shift = 0.1 if hosted or self._ghost is not None else 0.0
        below = 0.08 if self._ghost is not None else 0.0  # the prediction's place
        rows, labels, colors = [], [], []
        for e in step.events:
            m = e.memory
            apart = (m.allocated_bytes, m.reserved_bytes or 0, m.outside_bytes)
            scaled = [b / self._over.unit for b in (*sizes(m), *apart)]
            bar = e.rank - shift
            on_host = e.rank + BAR / 2 + shift + below if hosted else math.nan  # no bar where nothing is there
            rows.append([e.rank, bar, on_host, bar - BAR / 2 - 0.05, bar + BAR / 2 + 0.05, *scaled])
            labels.append(size(m.peak_bytes))
            colors.append(theme.rank_color(e.rank))
        drawn = (self._over.unit, shift, below, [sizes(e.memory) for e in step.events])
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
        reading = f"peak {size(peak)} on the fullest rank" + (f", {size(host)} on the host" if host else "")
        limit = min((m.limit_bytes for m in memories if m.limit_bytes), default=None)
        reading += f"; limit {size(limit)}" if limit else ""
        if self._limit is not None:
            legend.append(Key(label="limit", token="ink.marker", hatch="dashes"))
        outside = max(m.outside_bytes for m in memories)
        note = f"At the peak of a step; outside the allocator {size(outside)} more."
        return Captions(reading=reading, legend=tuple(legend), note=note)

    def patches(self) -> Patches:
        unit = "GiB" if self._unit == GIB else "MiB"
        return {
            "memory.now.limit": {"visible": self._limit is not None, "location": (self._limit or 0) / self._unit},
            "memory.now.x": {"start": 0.0, "end": self._range.end},
            "memory.now.axis": {"axis_label": f"{unit} per rank, last step"},
            **self._over.patches(),
        }

    def cover(self) -> None:
        self._over.cover()

    def captions(self) -> Captions:
        said = self._captions
        others = tuple(replace(key, label=f"{key.label}, peak") for key in self._frame.other_keys())
        if self._ghost is None:
            return replace(said, legend=(*said.legend, *others))
        ghost = self._ghost
        measured = size(self._peak) if self._peak and self._ledger_spec == ghost.spec_id else None
        reading = "; ".join(part for part in (said.reading, told(size(ghost.peak_bytes), measured)) if part)
        return replace(said, reading=reading, legend=(*said.legend, GHOST_KEY, *others))


def _drawn_limit(step: Step) -> int | None:
    limits = [e.memory.limit_bytes for e in step.events if e.memory.limit_bytes]
    peak = max(e.memory.peak_bytes for e in step.events)
    return min(limits) if limits and min(limits) <= REACH * peak else None
