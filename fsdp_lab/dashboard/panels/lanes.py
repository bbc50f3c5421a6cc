"""`MemoryLanes`: memory over steps, a stacked area for each rank, one above the other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from bokeh.models import FixedTicker, Range1d
from bokeh.models.annotations import BoxAnnotation
from bokeh.plotting import figure

from fsdp_lab.core.events import StepEvent
from fsdp_lab.core.formatting import GIB, MIB
from fsdp_lab.dashboard import theme
from fsdp_lab.dashboard.columns import Columns, Numbers
from fsdp_lab.dashboard.panels.base import LINE_PX, StepAxis, hover, paint_fill, tint, twin
from fsdp_lab.dashboard.panels.classes import ON_DEVICE, limit_line, sizes, unit_for
from fsdp_lab.dashboard.panels.ranges import ZeroRange
from fsdp_lab.runs.steps import Step

ROWS = (*ON_DEVICE, "host", "peak")  # of one lane, in bytes
FOOT, LANE = 0.42, 0.84  # how far below its rank's middle a lane stands, and how high it is, in ranks
MOST_SCALED = 2  # lanes that have room for figures from foot to top


class MemoryLanes:
    """A lane a rank, in the rows in which bars beside it stand; of more ranks than colours, the fullest and the emptiest.

    Lanes share one scale, in `unit`. A step whose memory is not known leaves a gap: before the first ledger step on a CPU.
    """

    def __init__(self, name: str, frame: StepAxis, world_size: int) -> None:
        self.name = name
        self._frame = frame
        self.unit = MIB
        self._all = world_size <= theme.MOST_LINES
        self._lanes = world_size if self._all else 2
        self._range = ZeroRange(headroom=1.12)
        columns = [f"{c}_{lane}" for lane in range(self._lanes) for c in ("rank", *ROWS)]
        self.columns = Columns(f"{name}.steps", ["step", *columns], limit=frame.limit)
        self._bytes = np.empty((0, len(self.columns.numbers)))  # the history, for when the unit changes
        self._limit_bytes: int | None = None
        self.figure = self._draw(frame)

    # -- the picture ----------------------------------------------------------------------------------------------

    def _draw(self, frame: StepAxis) -> figure:
        fig = frame.plot(f"{self.name}.over", "MiB", y_start=self._lanes - 0.4, y_end=-0.6)
        fig.yaxis.name = f"{self.name}.over.axis"
        fig.yaxis.ticker = FixedTicker(ticks=[at for at, _ in self._ticks()])
        fig.ygrid.visible = False
        fig.extra_y_ranges = {
            **{f"lane_{i}": Range1d(start=0, end=1, name=self._range_name(i)) for i in range(self._lanes)},
            **{f"mib_{i}": Range1d(start=0, end=1, name=f"{self._range_name(i)}.mib") for i in range(self._lanes)},
        }
        source = twin(self.columns)
        peaks = [self._draw_lane(fig, source, i) for i in range(self._lanes)]
        frame.label_markers(fig)
        every = range(self._lanes)
        ranks = ("rank", " · ".join(f"@rank_{i}" for i in every))
        rows = [(theme.MEMORY[c].label, " · ".join(f"@{c}_{i}{{0,0.0}}" for i in every)) for c in ON_DEVICE]
        peak = ("peak", " · ".join(f"@peak_{i}{{0,0.0}}" for i in every))
        hover(fig, peaks[0], [("step", "@step"), ranks, *rows, peak])
        return fig

    def _draw_lane(self, fig: figure, source: Any, lane: int) -> Any:
        """Returns the line of its peak."""
        on = {"y_range_name": f"lane_{lane}", "source": source}
        ground = BoxAnnotation(
            top=lane + FOOT, bottom=lane + FOOT - LANE, line_alpha=0, fill_alpha=0.08, level="underlay"
        )
        ground.fill_color = theme.rank_color(lane) if self._all else "#808890"
        fig.add_layout(ground)
        areas = fig.varea_stack([f"{c}_{lane}" for c in ON_DEVICE], x="step", **on)
        for name, area in zip(ON_DEVICE, areas, strict=True):
            paint_fill(area.glyph, f"memory.{name}", theme.MEMORY[name], line=False)
        host = fig.line("step", f"host_{lane}", line_width=LINE_PX, line_dash="2 2", **on)
        tint(host.glyph, line_color="memory.gradients")
        self._frame.overlays.draw(fig, f"peak_{lane}", name=f"{self.name}.lane_{lane}", seam=self._lanes <= MOST_SCALED,
                                  y_range_name=f"mib_{lane}")  # fmt: skip
        peak = fig.line("step", f"peak_{lane}", line_width=1 if self._lanes > MOST_SCALED else LINE_PX, **on)
        tint(peak.glyph, line_color="ink.peak")
        limit = limit_line(f"{self.name}.over.limit_{lane}", "width")
        limit.y_range_name = f"lane_{lane}"
        fig.add_layout(limit)
        return peak

    def _ticks(self) -> list[tuple[float, str]]:
        """The axis ticks and their labels: values along each lane, or rank numbers where there are many lanes."""
        if self._lanes > MOST_SCALED:
            return [(float(i), f"{i}") for i in range(self._lanes)]
        parts = [(i, share) for i in range(self._lanes) for share in (0.0, 0.5, 1.0)]
        return [(i + FOOT - share * LANE, f"{share * self._range.end:,g}") for i, share in parts]

    def _range_name(self, lane: int) -> str:
        return f"{self.name}.over.lane_{lane}"

    # -- what changes ---------------------------------------------------------------------------------------------

    def write(self, steps: Sequence[Step], limit_bytes: int | None) -> int:
        """New steps, in order; returns the rows written. A limit that is None is not drawn."""
        new = np.array([[s.number, *(v for e in self._of_lanes(s) for v in _lane(e))] for s in steps], dtype=np.float64)
        self._bytes = np.vstack([self._bytes, new])[-self.columns.limit :]
        peaks = self._bytes[:, self._places("peak")]
        if np.isnan(peaks).all():
            return 0
        unit = unit_for(np.nanmax(peaks), self.unit)
        whole = unit != self.unit or not len(self.columns)
        self.unit = unit
        written = self.columns.replace(self._scaled(self._bytes)) if whole else self.columns.append(self._scaled(new))
        self._limit_bytes = limit_bytes
        self.cover()
        return written

    def cover(self) -> None:
        """The scale of all lanes holds what is drawn in any of them."""
        lanes, to_unit = range(self._lanes), MIB / self.unit
        mine = [self.columns.column(f"{c}_{i}") for i in lanes for c in ("peak", "host")]
        others = [to_unit * self._frame.others(f"peak_{i}") for i in lanes]
        line = [] if self._limit_bytes is None else [self._limit_bytes / self.unit]
        self._range.cover(np.concatenate([*mine, *others, line]))

    def patches(self) -> dict[str, dict[str, Any]]:
        top = self._range.end
        unit = "GiB" if self.unit == GIB else "MiB"
        label = f"{unit} per rank" if self._all else f"{unit}: fullest, emptiest"
        if self._lanes > MOST_SCALED:
            label = f"rank, each to {top:,g} {unit}"
        names = {"type": "map", "entries": [[at, text] for at, text in self._ticks()]}
        patches: dict[str, dict[str, Any]] = {
            f"{self.name}.over.axis": {"axis_label": label, "major_label_overrides": names}
        }
        for i in range(self._lanes):
            foot, one = i + FOOT, top / LANE  # the axis of ranks points down, and ends at -0.6
            start, end = -(self._lanes - 0.4 - foot) * one, (foot + 0.6) * one
            patches[self._range_name(i)] = {"start": start, "end": end}
            in_mib = self.unit / MIB  # the curves of other runs, whatever the unit of this one
            patches[f"{self._range_name(i)}.mib"] = {"start": start * in_mib, "end": end * in_mib}
            drawn = self._limit_bytes is not None
            patches[f"{self.name}.over.limit_{i}"] = {
                "visible": drawn,
                "location": (self._limit_bytes or 0) / self.unit,
            }
        return patches

    def _of_lanes(self, step: Step) -> list[StepEvent | None]:
        by_rank = {e.rank: e for e in step.events}
        if self._all:
            return [by_rank.get(rank) for rank in range(self._lanes)]
        order = sorted(step.events, key=lambda e: e.memory.peak_bytes)
        return [order[-1], order[0]]

    def _places(self, name: str) -> list[int]:
        return [self.columns.numbers.index(f"{name}_{i}") for i in range(self._lanes)]

    def _scaled(self, history: Numbers) -> list[list[float]]:
        scale = np.full(history.shape[1], 1 / self.unit)
        scale[[0, *self._places("rank")]] = 1.0
        return [list(row) for row in history * scale]


def _lane(e: StepEvent | None) -> list[float]:
    """Rank, classes, host and peak; where nothing is known areas of no height, and no lines."""
    if e is None or not e.memory.peak_bytes:
        return [e.rank if e else math.nan, *(0.0 for _ in ON_DEVICE), math.nan, math.nan]
    *classes, host, peak = sizes(e.memory)
    return [e.rank, *classes, host or math.nan, peak]  # no line where nothing is offloaded
