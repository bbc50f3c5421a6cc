"""Memory of every rank by class at its peak, with what is offloaded to the host, the device's limit and the prediction; and
the fullest rank's within a step, at every unit of the last ledger step."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby, pairwise
from typing import Any

import numpy as np
from bokeh.layouts import row
from bokeh.models import FixedTicker, Range1d
from bokeh.models.annotations import BoxAnnotation
from bokeh.plotting import figure

from fsdp_lab.base.events import Memory, MemorySample, Role, StepEvent
from fsdp_lab.base.formatting import GIB, MIB, duration, size
from fsdp_lab.dashboard import theme
from fsdp_lab.dashboard.panels import base, draw
from fsdp_lab.dashboard.panels.axis import STEP_LIMIT, StepAxis, ZeroRange, round_up
from fsdp_lab.dashboard.panels.base import HOLLOW, Captions, Columns, Key, Numbers, Panel, Patches, Prediction
from fsdp_lab.runs.steps import Step

AMOUNTS = (*draw.ON_DEVICE, "host", "peak")  # in bytes, in the order of `sizes`
LIMIT_REACH = 3.0  # a limit within so many times the peak is drawn; one further away is in the captions alone
HOST_BAR = 0.14  # its height, in ranks
PREDICTED_BAR = 0.15
LANE_BOTTOM, LANE = 0.42, 0.84  # the lower edge of a lane below its rank's position, and its height, in ranks
LABEL_ROOM = 0.1  # of the axis of a ledger step: a phase that is shorter has no label
MOST_SCALED = 2  # lanes that have room for tick labels from bottom to top


def sizes(m: Memory) -> tuple[int, ...]:
    """Bytes at the peak by class in the order of `ON_DEVICE`, then those on the host, then the peak itself."""
    return (*(m.at_peak.of_role(Role(c)) for c in draw.ON_DEVICE), m.host_bytes, m.peak_bytes)


def unit_for(peak_bytes: float, unit: int) -> int:
    """MiB below 1 GiB, GiB above 4; between them the former unit, so that the axis does not change back and forth."""
    return GIB if peak_bytes > 4 * GIB else MIB if peak_bytes < GIB else unit


def unit_name(unit: int) -> str:
    return "GiB" if unit == GIB else "MiB"


class MemoryPanel(Panel):
    """On the left a bar a rank, stacked by class, at the last step, and below it a hollow one of what is predicted; on the
    right, in the same row, that rank over steps."""

    name = "memory"
    title = "Memory"
    wide = True

    def __init__(self, frame: StepAxis, world_size: int) -> None:
        super().__init__()
        self.world_size = world_size
        self._few = world_size <= theme.MOST_LINES
        self._frame = frame
        now = ["rank", "bar", "host_bar", "top", "bottom", *AMOUNTS, "allocated", "reserved", "outside"]
        self._now = Columns("memory.now", now, texts=["label", "color", "place"], limit=world_size)
        self._ranks = draw.RanksByHost("memory.now", world_size)
        self._predicted = Columns("memory.predicted", ["bar", "peak"], texts=["label"], limit=world_size)
        self._prediction: Prediction | None = None
        self._measured: Step | None = None  # the last step whose memory was measured
        self._ledger_spec, self._peak = "", 0  # the Spec of the last ledger step; the fullest rank's peak
        self._loading = 0  # most bytes that a rank held on the host while it read its weights
        self._over = MemoryLanes(frame, world_size)
        self._range = ZeroRange(headroom=1.5, slack=0.5)
        self._limit: int | None = None
        self._seen: set[str] = set()  # classes that have occurred
        self._drawn: object = None
        self.sources = (self._now, self._over.columns, self._predicted)
        self.root = row(self._draw_now(), self._over.figure, sizing_mode="stretch_width", spacing=16)

    def _draw_now(self) -> figure:
        fig = draw.rank_bars("memory.now", "MiB per rank, last step", self.world_size)
        source = draw.twin(self._now)
        width = 1 if self._few else 0
        bars = fig.hbar_stack(list(draw.ON_DEVICE), y="bar", height=draw.BAR, source=source, line_width=width)
        draw.paint_stack(bars, draw.CLASS_TOKENS)
        host = fig.hbar(y="host_bar", left=0, right="host", height=HOST_BAR, source=source, line_width=width)
        draw.paint_fill(host.glyph, "memory.host", outline="memory.gradients")
        peak = fig.segment(x0="peak", x1="peak", y0="top", y1="bottom", line_width=draw.LINE_PX, source=source)
        draw.tint(peak.glyph, line_color="ink.peak")
        if self._few:
            draw.sign_bars(fig, source, y="bar", end="peak")
        self._draw_predicted(fig)
        labels = {**{c: theme.MEMORY[c].label for c in (*draw.ON_DEVICE, "host")}, "peak": "peak"}
        labels |= {"allocated": "between steps", "reserved": "reserved", "outside": "outside the allocator"}
        rows = [(label, f"@{column}{{0,0.0}}") for column, label in labels.items()]
        draw.hover_bars(fig, source, [("rank", "@place"), *rows], right="peak", y="rank", height=0.9)
        fig.add_layout(draw.limit_line("memory.now.limit", "height"))
        return fig

    def _draw_predicted(self, fig: figure) -> None:
        """Adds below each bar the predicted peak as a hollow one."""
        source = draw.twin(self._predicted)
        look: dict[str, Any] = {"height": PREDICTED_BAR, "fill_alpha": 0, "line_dash": "4 2"}
        hollow = fig.hbar(y="bar", left=0, right="peak", source=source, **look)
        draw.tint(hollow.glyph, line_color="ink.marker")
        if self._few:
            draw.labels(fig, source, "ink.marker", size_px=10, x="peak", y="bar", x_offset=7, text_baseline="middle")

    def update(self, steps: Sequence[Step]) -> None:
        measured = [s for s in steps if any(e.memory.peak_bytes for e in s.events)]  # none before the first ledger step
        if measured:
            limits = [e.memory.limit_bytes for e in measured[-1].events if e.memory.limit_bytes]
            peak = max(e.memory.peak_bytes for e in measured[-1].events)
            self._limit = min(limits) if limits and min(limits) <= LIMIT_REACH * peak else None
        unit = self._unit
        if steps:
            self._over.write(steps, self._limit)
        for step in steps:
            self._loading = max(e.memory.loading_bytes or self._loading for e in step.events)
            if any(e.ledger for e in step.events):
                self._ledger_spec = step.spec_id
        if measured:
            self._measured = measured[-1]
            self._peak = max(e.memory.peak_bytes for e in self._measured.events)
            self._write_now(self._measured)
            if self._unit != unit:
                self._write_predicted()
            self._cover_now()
            self._captions = self._describe(self._measured)

    def predict(self, prediction: Prediction | None) -> None:
        self._prediction = prediction
        self._write_predicted()
        if self._measured is not None:
            self._write_now(self._measured)  # the bars make room
        self._cover_now()

    @property
    def _unit(self) -> int:
        if self._peak or self._prediction is None:
            return self._over.unit
        return unit_for(self._prediction.peak_bytes, MIB)

    def _cover_now(self) -> None:
        line = [] if self._limit is None else [self._limit / self._unit]
        shown = [self._now.column("peak"), self._now.column("host"), self._predicted.column("peak")]
        self._range.cover(np.concatenate([*shown, line]))

    def _write_predicted(self) -> None:
        p = self._prediction
        rows = [[rank + 0.25, p.peak_bytes / self._unit] for rank in range(self.world_size)] if p is not None else []
        self._predicted.replace(rows, {"label": [size(p.peak_bytes)] * self.world_size if p is not None else []})

    def _write_now(self, step: Step) -> None:
        hosted = any(e.memory.host_bytes for e in step.events)
        shift = 0.1 if hosted or self._prediction is not None else 0.0
        below = 0.08 if self._prediction is not None else 0.0  # the prediction's place
        drawn = (self._over.unit, shift, below, [sizes(e.memory) for e in step.events])
        if drawn == self._drawn:
            return  # between two measurements memory does not change: nothing to paint
        self._drawn = drawn
        rows = []
        for e in step.events:
            m = e.memory
            amounts = (*sizes(m), m.allocated_bytes, m.reserved_bytes or 0, m.outside_bytes)
            bar = e.rank - shift
            on_host = e.rank + draw.BAR / 2 + shift + below if hosted else math.nan  # NaN: no bar
            place = [e.rank, bar, on_host, bar - draw.BAR / 2 - 0.05, bar + draw.BAR / 2 + 0.05]
            rows.append([*place, *(b / self._over.unit for b in amounts)])
        self._ranks.follow(step.events)
        ranks, labels = [e.rank for e in step.events], [size(e.memory.peak_bytes) for e in step.events]
        texts = {"label": labels, "color": [*map(theme.rank_color, ranks)], "place": [*map(self._ranks.place, ranks)]}
        self._now.replace(rows, texts)

    def _describe(self, step: Step) -> Captions:
        memories = [e.memory for e in step.events]
        host = max(m.host_bytes for m in memories)
        self._seen.update(c for m in memories for c in draw.ON_DEVICE if m.at_peak.of_role(Role(c)))
        legend = draw.class_keys([c for c in (*draw.ON_DEVICE, "host") if c in self._seen or (c == "host" and host)])
        legend.append(Key(label="peak", token="ink.peak", hatch="line"))
        reading = f"peak {size(self._peak)} on the fullest rank" + (f", {size(host)} on the host" if host else "")
        outside = max(m.outside_bytes for m in memories)
        limit = min((m.limit_bytes for m in memories if m.limit_bytes), default=None)
        reading += f"; limit {size(limit)}" if limit else ""
        pool = max(m.pool_bytes for m in memories)
        pooled = f" What is gathered and sent is in a pool of {size(pool)} that ranks share." if pool else ""
        note = f"Tensors at the peak of a step; the process has {size(outside)} more.{pooled}"
        if self._loading:
            note += f" While weights were read, the host held {size(self._loading)} more."
        if self._limit is not None:
            legend.append(Key(label="limit", token="ink.marker", hatch="dashes"))
        return Captions(reading=reading, legend=tuple(legend), note=note)

    def patches(self) -> Patches:
        return {
            **self._ranks.patches(),
            "memory.now.limit": {"visible": self._limit is not None, "location": (self._limit or 0) / self._unit},
            "memory.now.x": {"start": 0.0, "end": self._range.end},
            "memory.now.axis": {"axis_label": f"{unit_name(self._unit)} per rank, last step"},
            **self._over.patches(),
        }

    def cover(self) -> None:
        self._over.cover()

    def captions(self) -> Captions:
        own, p = self._captions, self._prediction
        if p is not None:
            measured = size(self._peak) if self._peak and self._ledger_spec == p.spec_id else None
            own = base.with_prediction(own, size(p.peak_bytes), measured, HOLLOW)
        return replace(own, legend=(*own.legend, *self._frame.other_keys("peak")))


class MemoryLanes:
    """Memory over steps: a lane of stacked areas a rank, aligned with the bars beside it; of more ranks than colours, two
    lanes for the fullest and the emptiest. They share one scale, in `unit`; a step that was not measured leaves a gap."""

    def __init__(self, frame: StepAxis, world_size: int) -> None:
        self._frame = frame
        self.unit = MIB
        self._all = world_size <= theme.MOST_LINES
        self._lanes = world_size if self._all else 2
        self._range = ZeroRange(headroom=1.12)
        columns = [f"{c}_{lane}" for lane in range(self._lanes) for c in ("rank", *AMOUNTS)]
        self.columns = Columns("memory.steps", ["step", *columns], limit=STEP_LIMIT)
        self._bytes = np.empty((0, len(self.columns.numbers)))  # the history, for when the unit changes
        self._limit_bytes: int | None = None
        self.figure = self._draw()

    def _draw(self) -> figure:
        fig = self._frame.plot("memory.over", "MiB", y_start=self._lanes - 0.4, y_end=-0.6)
        fig.yaxis.name = "memory.over.axis"
        fig.yaxis.ticker = FixedTicker(ticks=[at for at, _ in self._ticks()])
        fig.ygrid.visible = False
        fig.extra_y_ranges |= {
            f"{kind}_{i}": Range1d(start=0, end=1, name=f"memory.over.lane_{i}{suffix}")
            for kind, suffix in (("lane", ""), ("mib", ".mib"))
            for i in range(self._lanes)
        }
        source = draw.twin(self.columns)
        peaks = [self._draw_lane(fig, source, i) for i in range(self._lanes)]
        self._frame.label_markers(fig)
        labels = {"rank": "rank", **{c: theme.MEMORY[c].label for c in draw.ON_DEVICE}, "peak": "peak"}
        rows = [("step", "@step")]
        for c, label in labels.items():
            form = "" if c == "rank" else "{0,0.0}"
            rows.append((label, " · ".join(f"@{c}_{i}{form}" for i in range(self._lanes))))
        draw.hover(fig, peaks[0], rows)
        return fig

    def _draw_lane(self, fig: figure, source: Any, lane: int) -> Any:
        """Draws a lane; returns the line of its peak."""
        on = f"lane_{lane}"
        color = theme.rank_color(lane) if self._all else draw.NEUTRAL
        top, bottom = lane + LANE_BOTTOM, lane + LANE_BOTTOM - LANE
        look: dict[str, Any] = {"line_alpha": 0, "fill_alpha": 0.08, "fill_color": color, "level": "underlay"}
        fig.add_layout(BoxAnnotation(top=top, bottom=bottom, **look))
        areas = fig.varea_stack([f"{c}_{lane}" for c in draw.ON_DEVICE], x="step", y_range_name=on, source=source)
        draw.paint_stack(areas, draw.CLASS_TOKENS, line=False)
        dashed: dict[str, Any] = {"line_width": draw.LINE_PX, "line_dash": "2 2", "y_range_name": on}
        draw.line(fig, source, f"host_{lane}", "memory.gradients", **dashed)
        peak, few = f"peak_{lane}", self._lanes <= MOST_SCALED
        self._frame.overlays.draw(fig, peak, name=f"memory.lane_{lane}", seam=few, y_range_name=f"mib_{lane}")
        line = draw.line(fig, source, peak, "ink.peak", line_width=draw.LINE_PX if few else 1, y_range_name=on)
        limit = draw.limit_line(f"memory.over.limit_{lane}", "width")
        limit.y_range_name = on
        fig.add_layout(limit)
        return line

    def _ticks(self) -> list[tuple[float, str]]:
        """The axis ticks and their labels: values along each lane, or rank numbers where there are many lanes."""
        if self._lanes > MOST_SCALED:
            return [(float(i), f"{i}") for i in range(self._lanes)]
        parts = [(i, share) for i in range(self._lanes) for share in (0.0, 0.5, 1.0)]
        return [(i + LANE_BOTTOM - share * LANE, f"{share * self._range.end:,g}") for i, share in parts]

    def write(self, steps: Sequence[Step], limit_bytes: int | None) -> None:
        """Adds new steps, in order. A limit that is None is not drawn."""
        new = np.array([[s.number, *self._row(s)] for s in steps], dtype=np.float64)
        self._bytes = np.vstack([self._bytes, new])[-self.columns.limit :]
        peaks = self._bytes[:, self._places("peak")]
        if np.isnan(peaks).all():
            return
        unit = unit_for(np.nanmax(peaks), self.unit)
        whole = unit != self.unit or not len(self.columns)
        self.unit = unit
        self.columns.replace(self._scaled(self._bytes)) if whole else self.columns.append(self._scaled(new))
        self._limit_bytes = limit_bytes
        self.cover()

    def cover(self) -> None:
        """Fits the common scale to what is drawn in any lane."""
        lanes, to_unit = range(self._lanes), MIB / self.unit
        own = [self.columns.column(f"{c}_{i}") for i in lanes for c in ("peak", "host")]
        others = [to_unit * self._frame.others(f"peak_{i}") for i in lanes]
        line = [] if self._limit_bytes is None else [self._limit_bytes / self.unit]
        self._range.cover(np.concatenate([*own, *others, line]))

    def patches(self) -> dict[str, dict[str, Any]]:
        top, unit = self._range.end, unit_name(self.unit)
        label = f"{unit} per rank" if self._all else f"{unit}: fullest, emptiest"
        if self._lanes > MOST_SCALED:
            label = f"rank, each to {top:,g} {unit}"
        names = {"type": "map", "entries": [[at, text] for at, text in self._ticks()]}
        patches: dict[str, dict[str, Any]] = {"memory.over.axis": {"axis_label": label, "major_label_overrides": names}}
        for i in range(self._lanes):
            bottom, one = i + LANE_BOTTOM, top / LANE  # the axis of ranks points down, and ends at -0.6
            start, end = -(self._lanes - 0.4 - bottom) * one, (bottom + 0.6) * one
            patches[f"memory.over.lane_{i}"] = {"start": start, "end": end}
            in_mib = self.unit / MIB  # for the curves of other runs, whatever the unit of this one
            patches[f"memory.over.lane_{i}.mib"] = {"start": start * in_mib, "end": end * in_mib}
            location = (self._limit_bytes or 0) / self.unit
            patches[f"memory.over.limit_{i}"] = {"visible": self._limit_bytes is not None, "location": location}
        return patches

    def _row(self, step: Step) -> list[float]:
        """Rank, classes, host and peak of each lane; where nothing was measured areas of no height, and no lines."""
        by_rank = {e.rank: e for e in step.events}
        shown: list[StepEvent | None] = [by_rank.get(rank) for rank in range(self._lanes)]
        if not self._all:
            order = sorted(step.events, key=lambda e: e.memory.peak_bytes)
            shown = [order[-1], order[0]]
        values: list[float] = []
        for e in shown:
            if e is None or not e.memory.peak_bytes:
                values += [e.rank if e else math.nan, *(0.0 for _ in draw.ON_DEVICE), math.nan, math.nan]
            else:
                *classes, host, peak = sizes(e.memory)
                values += [e.rank, *classes, host or math.nan, peak]  # NaN: no line where nothing is offloaded
        return values

    def _places(self, name: str) -> list[int]:
        return [self.columns.numbers.index(f"{name}_{i}") for i in range(self._lanes)]

    def _scaled(self, history: Numbers) -> list[list[float]]:
        scale = np.full(history.shape[1], 1 / self.unit)
        scale[[0, *self._places("rank")]] = 1.0
        return [list(row) for row in history * scale]


class LedgerPanel(Panel):
    """Stacked by class over the time of the step, with a line where each phase begins and a mark at the peak. Measuring
    slows the step: the shape of the curve is right, its length is not."""

    name = "ledger"
    title = "Memory within a step"
    tab = "ledger"
    wide = True

    def __init__(self, frame: StepAxis, world_size: int) -> None:
        super().__init__(Captions(reading="none measured yet: the third step after a change is"))
        self._curve = Columns("ledger.curve", ["ms", *draw.ON_DEVICE, "total"], texts=["phase", "unit"], limit=1000)
        self._phases = Columns("ledger.phases", ["ms"], texts=["label"], limit=8)
        self._peak = Columns("ledger.peak", ["ms", "total"], texts=["label"], limit=1)
        self._range = ZeroRange(headroom=1.25)
        self._unit, self._end_ms = MIB, 1.0
        self.sources = (self._curve, self._phases, self._peak)
        self.root = self._draw()

    def _draw(self) -> figure:
        x_range, y_range = (Range1d(start=0, end=1, name=f"ledger.{axis}") for axis in "xy")
        fig = draw.plain_figure("ledger", "MiB", x_range=x_range, y_range=y_range)
        fig.xaxis.axis_label = "ms of the step, slowed by measuring"
        fig.yaxis.name = "ledger.axis"
        source = draw.twin(self._curve)
        draw.paint_stack(fig.varea_stack(list(draw.ON_DEVICE), x="ms", source=source), draw.CLASS_TOKENS, line=False)
        total = draw.line(fig, source, "total", "ink.peak", x="ms", line_width=1)
        phases, top = draw.twin(self._phases), draw.twin(self._peak)
        draw.changes(fig, phases, "ms")
        fig.extra_y_ranges = {"phase": Range1d(start=0, end=1)}
        draw.labels(fig, phases, "ink.mean", x="ms", y=0.99, y_range_name="phase", text_baseline="top", x_offset=4)
        mark = fig.scatter("ms", "total", source=top, size=8, marker="triangle", line_alpha=0)
        draw.tint(mark.glyph, fill_color="ink.peak")
        above: dict[str, Any] = {"text_baseline": "bottom", "text_align": "center", "y_offset": -6}
        draw.labels(fig, top, "ink.peak", x="ms", y="total", **above)
        rows = [(theme.MEMORY[c].label, f"@{c}{{0,0.00}}") for c in draw.ON_DEVICE]
        draw.hover(fig, total, [("at", "@ms{0.0} ms"), ("in", "@phase @unit"), *rows, ("total", "@total{0,0.00}")])
        return fig

    def update(self, steps: Sequence[Step]) -> None:
        step = next((s for s in reversed(steps) if any(e.memory_curve for e in s.events)), None)
        if step is None:
            return
        fullest = max((e for e in step.events if e.memory_curve), key=lambda e: e.memory.peak_bytes)
        self._write(fullest.memory_curve)
        top = max(fullest.memory_curve, key=lambda s: s.classes.total_bytes)
        where = f"peak {size(top.classes.total_bytes)} in {top.phase}, {top.unit}"
        long = duration(fullest.step_time_s)
        self._captions = Captions(
            reading=f"rank {fullest.rank} in step {step.number}: {where}",
            legend=(*draw.class_keys(draw.ON_DEVICE), Key(label="total", token="ink.peak", hatch="line")),
            note=f"Measuring made this step {long} long; its allocations are those of any other step.",
        )

    def _write(self, curve: Sequence[MemorySample]) -> None:
        totals = [s.classes.total_bytes for s in curve]
        self._unit = unit_for(max(totals), self._unit)
        self._end_ms = round_up(max(1.07e3 * curve[-1].at_s, 1e-3))  # with room for the last label
        rows = [
            [1e3 * s.at_s, *(s.classes.of_role(Role(c)) / self._unit for c in draw.ON_DEVICE), t / self._unit]
            for s, t in zip(curve, totals, strict=True)
        ]
        texts = {"phase": [s.phase for s in curve], "unit": [s.unit for s in curve]}
        firsts = [next(samples) for _, samples in groupby(curve, key=lambda s: s.phase)]
        begins = [(s.at_s, s.phase) for s in firsts][:8]  # micro-batches repeat them
        top = totals.index(max(totals))
        self._curve.replace(rows, texts)
        room_s = LABEL_ROOM * self._end_ms / 1e3
        labels = [phase if end - at > room_s else "" for (at, phase), (end, _) in pairwise([*begins, (math.inf, "")])]
        self._phases.replace([[1e3 * at] for at, _ in begins], {"label": labels})
        self._peak.replace([[rows[top][0], rows[top][-1]]], {"label": [size(totals[top])]})
        self._range.cover(np.array([totals[top] / self._unit]))

    def patches(self) -> Patches:
        return {
            "ledger.x": {"start": 0.0, "end": self._end_ms},
            "ledger.y": {"start": 0.0, "end": self._range.end},
            "ledger.axis": {"axis_label": unit_name(self._unit)},
        }
