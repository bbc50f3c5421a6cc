"""Memory of every rank by what it was for at its peak; what offload moved to the host apart; the peak, and the limit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from bokeh.layouts import row
from bokeh.models.annotations import Span
from bokeh.models.ui import UIElement
from bokeh.plotting import figure

from ...events import Memory, Role
from .. import theme
from ..columns import Columns
from .base import LINE_PX, Captions, Frame, Key, Patches, Step, hover, notes_of, rank_bars, sign_bars, tint, twin
from .ranges import ZeroRange
from .units import GIB, MIB, memory

ON_DEVICE = tuple(name for name in theme.MEMORY if name in tuple(Role))
REACH = 3.0  # a limit within so many times the peak is drawn; one further off is said in words alone
BAR, HOST_BAR = 0.5, 0.14  # heights, in ranks


class MemoryPanel:
    """On the left a bar a rank, stacked by class, at the last step; on the right the fullest rank over steps."""

    name = "memory"
    title = "Memory"
    wide = True

    def __init__(self, frame: Frame, world_size: int) -> None:
        self.world_size = world_size
        classes = [*ON_DEVICE, "host", "peak"]
        self._now = Columns(
            "memory.now",
            ["rank", "bar", "host_bar", "top", "bottom", *classes, "allocated", "reserved", "outside"],
            texts=["label", "color"],
            limit=world_size,
        )
        self._over = Columns("memory.steps", ["step", "rank", *classes], limit=frame.limit)
        self._now_range, self._over_range = ZeroRange(headroom=1.5, slack=0.5), ZeroRange()
        self._unit = MIB
        self._bytes = np.empty((0, len(classes) + 2))  # the history in bytes, for when the unit changes
        self._captions = Captions()
        self._limit: int | None = None
        self._drawn: object = None
        bars, history = self._draw_now(), self._draw_over(frame)
        self._root = row(bars, history, sizing_mode="stretch_width", spacing=16)

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

    def _draw_over(self, frame: Frame) -> figure:
        fig = frame.plot("memory.over", "MiB, fullest rank")
        fig.yaxis.name = "memory.over.axis"
        source = twin(self._over)
        for name, area in zip(ON_DEVICE, fig.varea_stack(list(ON_DEVICE), x="step", source=source), strict=True):
            paint_fill(area.glyph, f"memory.{name}", theme.MEMORY[name], line=False)
        host = fig.line("step", "host", source=source, line_width=LINE_PX, line_dash="2 2")
        tint(host.glyph, line_color="memory.gradients")
        peak = fig.line("step", "peak", source=source, line_width=LINE_PX)
        tint(peak.glyph, line_color="ink.peak")
        rows = [(theme.MEMORY[c].label, f"@{c}{{0,0.0}}") for c in (*ON_DEVICE, "host")]
        fig.add_layout(limit_line("memory.over.limit", "width"))
        frame.label_markers(fig)
        hover(fig, peak, [("step", "@step"), ("fullest rank", "@rank"), *rows, ("peak", "@peak{0,0.0}")])
        return fig

    @property
    def sources(self) -> Sequence[Columns]:
        return (self._now, self._over)

    @property
    def root(self) -> UIElement:
        return self._root

    def update(self, steps: Sequence[Step]) -> int:
        steps = [s for s in steps if any(e.memory.peak_bytes for e in s.events)]  # none before the first ledger step
        if not steps:
            return 0
        last = steps[-1]
        new = np.array([_fullest(s) for s in steps], dtype=np.float64)
        self._bytes = np.vstack([self._bytes, new])[-self._over.limit :]
        unit = unit_for(self._bytes[:, -1].max(), self._unit)
        if unit != self._unit:
            self._unit = unit
            written = self._over.replace(self._scaled(self._bytes))
        else:
            written = self._over.append(self._scaled(new))
        written += self._write_now(last)
        self._limit = _drawn_limit(last)
        line = [] if self._limit is None else [self._limit / self._unit]
        self._now_range.cover(np.concatenate([self._now.column("peak"), self._now.column("host"), line]))
        self._over_range.cover(np.concatenate([self._over.column("peak"), self._over.column("host"), line]))
        self._captions = self._words(steps)
        return written

    def _scaled(self, history: np.ndarray[tuple[int, int], np.dtype[np.float64]]) -> list[list[float]]:
        scale = np.full(history.shape[1], 1 / self._unit)
        scale[:2] = 1.0  # step and rank are no bytes
        scaled = history * scale
        host = scaled[:, 2 + len(ON_DEVICE)]
        host[host == 0] = np.nan  # no line where nothing is offloaded
        return [list(r) for r in scaled]

    def _write_now(self, step: Step) -> int:
        hosted = any(e.memory.host_bytes for e in step.events)
        shift = 0.09 if hosted else 0.0
        rows, labels, colors = [], [], []
        for e in step.events:
            m = e.memory
            apart = (m.allocated_bytes, m.reserved_bytes or 0, m.outside_bytes)
            sizes = [b / self._unit for b in (*_classes(m), *apart)]
            bar = e.rank - shift
            rows.append([e.rank, bar, e.rank + BAR / 2 + shift, bar - BAR / 2 - 0.05, bar + BAR / 2 + 0.05, *sizes])
            labels.append(memory(m.peak_bytes))
            colors.append(theme.rank_color(e.rank))
        drawn = (self._unit, [_classes(e.memory) for e in step.events])
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
        unit = "GiB" if self._unit == GIB else "MiB"
        limit = {"visible": self._limit is not None, "location": (self._limit or 0) / self._unit}
        return {
            "memory.now.limit": limit,
            "memory.over.limit": limit,
            "memory.now.x": {"start": 0.0, "end": self._now_range.end},
            "memory.over.y": {"start": 0.0, "end": self._over_range.end},
            "memory.now.axis": {"axis_label": f"{unit} per rank, last step"},
            "memory.over.axis": {"axis_label": f"{unit}, fullest rank"},
        }

    def captions(self) -> Captions:
        return self._captions


def class_keys(names: Sequence[str]) -> list[Key]:
    """The legend of classes."""
    return [Key(label=theme.MEMORY[c].label, token=f"memory.{c}", hatch=theme.MEMORY[c].hatch) for c in names]


def limit_line(name: str, dimension: Literal["height", "width"]) -> Span:
    """A line across a plot where the device's memory ends; not visible until a patch says where."""
    line = Span(name=name, location=0, dimension=dimension, line_dash="6 4", line_width=LINE_PX, visible=False)
    tint(line, line_color="ink.marker")
    return line


def _drawn_limit(step: Step) -> int | None:
    limits = [e.memory.limit_bytes for e in step.events if e.memory.limit_bytes]
    peak = max(e.memory.peak_bytes for e in step.events)
    return min(limits) if limits and min(limits) <= REACH * peak else None


def paint_fill(glyph: object, token: str, fill: theme.Fill, *, line: bool = True, outline: str = "ink.gap") -> None:
    """Fills a glyph by token, with the hatch of `fill`, and parts it from its neighbours by a line of the background."""
    colors = {"fill_color": token}
    if line:
        colors["line_color"] = outline
    if fill.hatch != " ":
        glyph.hatch_pattern = fill.hatch  # type: ignore[attr-defined]
        glyph.hatch_scale = 7  # type: ignore[attr-defined]
        glyph.hatch_weight = 1  # type: ignore[attr-defined]
        colors["hatch_color"] = "ink.faint"
    tint(glyph, **colors)


def _classes(m: Memory) -> tuple[int, ...]:
    return (*(m.at_peak.of_role(Role(c)) for c in ON_DEVICE), m.host_bytes, m.peak_bytes)


def _fullest(step: Step) -> list[float]:
    e = max(step.events, key=lambda e: e.memory.peak_bytes)
    return [step.number, e.rank, *_classes(e.memory)]


def unit_for(peak_bytes: float, unit: int) -> int:
    """MiB below 1 GiB, GiB above 4: between them what it was, so that the axis does not change back and forth."""
    if peak_bytes > 4 * GIB:
        return GIB
    return MIB if peak_bytes < GIB else unit
