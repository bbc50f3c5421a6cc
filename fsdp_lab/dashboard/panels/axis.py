"""Axes: ranges that do not jump, and the axis of steps, which time plots share with its markers and other runs' curves."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from bokeh.models import AdaptiveTicker, ColumnDataSource, HoverTool, PanTool, Range1d, WheelZoomTool
from bokeh.plotting import figure

from fsdp_lab.dashboard import theme
from fsdp_lab.dashboard.panels import draw
from fsdp_lab.dashboard.panels.base import Columns, Key, Numbers, Patches
from fsdp_lab.runs.steps import Step

SMOOTH_STEPS = 20  # ordinary steps in a card's moving median
LABEL_ROOM = 0.02  # of the axis of steps, that a marker's number needs
FEWEST_CUT, BEYOND = 20, 1.5  # from so many values on, what reaches so far above the 99th percentile is cut
SHORTEST_WINDOW = 50  # steps on the axis at the beginning of a run
STEP_LIMIT = 1000  # steps that a time plot keeps
MOST_ROWS = 2 * STEP_LIMIT + 1  # of another run's curve: its beginning, its end, and a gap between them

ROUND = (1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 7.0, 8.0, 10.0)
FINE = tuple(1.0 + 0.1 * i for i in range(40)) + tuple(5.0 + 0.25 * i for i in range(21))  # where room is scarce

# A row of a curve: rates and exposed communication smoothed, peaks in MiB by rank.
CURVE = ("step", "loss", "tokens_per_s", "tflops", "exposed_ms", *(f"peak_{i}" for i in range(theme.MOST_LINES)))


def round_up(value: float, steps: Sequence[float] = ROUND) -> float:
    """The next round number: one of `steps` (from 1 to 10) times a power of ten. `value` > 0."""
    magnitude = 10.0 ** math.floor(math.log10(value))
    return next(r * magnitude for r in steps if value <= r * magnitude * (1 + 1e-12))


def calm(values: Numbers) -> Numbers:
    """The finite values that a y range is to hold: without those far above the 99th percentile, unless the last three are.
    The page's function of this name does the same in the steps that a reader chose."""
    finite: Numbers = values[np.isfinite(values)]
    if finite.size < FEWEST_CUT:
        return finite
    low, most = finite.min(), np.quantile(finite, 0.99, method="lower")
    held: Numbers = finite[finite <= max(low + BEYOND * (most - low), finite[-3:].min())]
    return held


def step_window(step: int) -> tuple[float, float]:
    """The range of the axis of steps, (start, end), with `step` inside: from 0 in doubling lengths, then a window of
    `STEP_LIMIT` that moves in tenths of it."""
    length = SHORTEST_WINDOW
    while length < STEP_LIMIT and step + 1 > length:
        length *= 2
    length = min(length, STEP_LIMIT)
    tenth = STEP_LIMIT // 10
    end = length if step + 1 <= length else math.ceil((step + 1) / tenth) * tenth
    return float(end - length), float(end)


class ZeroRange:
    """From zero to a round number above the data. It shrinks when the data would fill less than `slack` of it."""

    start = 0.0

    def __init__(self, *, slack: float = 0.45, headroom: float = 1.12, steps: Sequence[float] = ROUND) -> None:
        self.slack, self.headroom, self.steps = slack, headroom, steps
        self.end = 1.0
        self._fresh = True

    def cover(self, values: Numbers) -> float:
        """The end of a range from zero that holds `values` (NaN and infinity are ignored)."""
        finite = values[np.isfinite(values)]
        if finite.size == 0 or finite.max() <= 0:
            return self.end
        wanted = round_up(float(finite.max()) * self.headroom, self.steps)
        if self._fresh or wanted > self.end or wanted < self.slack * self.end:
            self.end, self._fresh = wanted, False
        return self.end


class SpanRange:
    """From below the least to above the greatest value, for quantities whose zero means nothing, such as a loss. Where
    the data leaves it, it is extended well beyond the data, so that a falling curve moves it seldom."""

    margin, ahead, slack = 0.1, 0.4, 0.4

    def __init__(self) -> None:
        self.start, self.end = 0.0, 1.0
        self._fresh = True

    def cover(self, values: Numbers) -> tuple[float, float]:
        finite = values[np.isfinite(values)]
        if finite.size == 0:
            return self.start, self.end
        low, high = float(finite.min()), float(finite.max())
        span = max(high - low, 0.02 * abs(high), 1e-9)
        if self._fresh or (high - low) < self.slack * (self.end - self.start) > 0.3 * abs(high):
            self._set(low - self.margin * span, high + self.margin * span, low)
        elif low < self.start or high > self.end:  # or both, where the losses fall and an evaluation is above them
            start = low - self.ahead * span if low < self.start else self.start
            self._set(start, high + self.ahead * span if high > self.end else self.end, low)
        self._fresh = False
        return self.start, self.end

    def _set(self, start: float, end: float, low: float) -> None:
        step = round_up((end - start) / 10)
        floor = math.floor(start / step) * step
        self.start = max(0.0, floor) if low >= 0 else floor
        self.end = math.ceil(end / step) * step


@dataclass(frozen=True, kw_only=True, eq=False)
class Overlay:
    """The curve of another run with its label; its rows have the columns of `CURVE`."""

    label: str
    rows: Numbers


class Overlays:
    """Curves of other runs: a table for each place in the palette, empty and not drawn until it is used. All plots read
    the same tables, so that a curve is sent to the page once."""

    def __init__(self) -> None:
        self.tables = [Columns(f"overlay.{i}", CURVE, limit=MOST_ROWS) for i in range(len(theme.PINS))]
        self._sources = [draw.twin(table) for table in self.tables]
        self._shown: dict[int, Overlay] = {}
        self._lines: list[tuple[int, str]] = []  # place, name of the renderer

    @property
    def labels(self) -> dict[int, str]:
        """Place -> label of the curves shown."""
        return {place: shown.label for place, shown in sorted(self._shown.items())}

    def draw(self, fig: figure, column: str, *, name: str = "", seam: bool = False, **on: Any) -> None:
        """Adds a line for each place; with a seam below it where the background may be as dark as the line."""
        for place, source in enumerate(self._sources):
            looks: list[tuple[str, str, dict[str, Any]]] = []
            if seam:
                looks.append(("seam", "ink.gap", {"line_width": 4, "line_alpha": 0.75}))
            dashes = {"line_dash": theme.PIN_DASHES[place], "line_color": theme.PINS[str(place)].light}
            looks.append(("overlay", f"pin.{place}", {"line_width": 1.5, **dashes}))
            for kind, token, look in looks:
                named = f"{name or fig.name}.{kind}.{place}"
                draw.line(fig, source, column, token, visible=False, name=named, **look, **on)
                self._lines.append((place, named))

    def show(self, overlays: Mapping[int, Overlay]) -> bool:
        """Shows these curves and no others; returns whether that changes anything."""
        before, self._shown = self._shown, dict(overlays)
        for place, table in enumerate(self.tables):
            if (now := overlays.get(place)) is not before.get(place):
                table.replace(now.rows.tolist() if now is not None else [])
        return before != self._shown

    def within(self, column: str, start: float, end: float) -> Numbers:
        """The values of all curves at the steps from `start` to `end`."""
        at = CURVE.index(column)
        parts = [o.rows[(o.rows[:, 0] >= start) & (o.rows[:, 0] <= end), at] for o in self._shown.values()]
        return np.concatenate([*parts, np.empty(0)])

    def patches(self) -> dict[str, dict[str, Any]]:
        return {name: {"visible": place in self._shown} for place, name in self._lines}


class Apart:
    """Finds the steps that a line over steps leaves out, because something other than training took their time. Where all
    steps are traced, being traced is no reason."""

    def __init__(self) -> None:
        self._traced = False  # the step before

    def reason(self, step: Step) -> str:
        """Such as "traced"; "" for an ordinary step. Called for each step, in order."""
        e = step.events[0]
        before, self._traced = self._traced, any(event.spans for event in step.events)
        if e.first_after_switch:
            return "first after a change"
        if not step.counts:
            return "memory measured" if e.ledger else "inspected" if e.inspected else "slow motion"
        return "traced" if self._traced and not before else ""


class StepAxis:
    """The time plots of one dashboard share this: the axis of steps, markers at changes, curves of other runs."""

    def __init__(self) -> None:
        self.language = True  # whether it is a language model, whose loss is in nats per token and has a perplexity
        self.shard_factor = 1  # ranks that share one copy of the parameters
        self.counted = "tokens"  # or "samples": of images, and of a user's own data
        self.x_range = Range1d(start=0, end=50, name="frame.x")
        self.markers = Columns("frame.markers", ["step"], texts=["number", "label", "detail"], limit=100)
        self.marker_source = draw.twin(self.markers)
        self.overlays = Overlays()
        self._step = 0
        self._marks: list[tuple[int, str, str]] = []  # step, label, tooltip
        self._written: list[tuple[float, str, str, str]] = []

    @property
    def sources(self) -> Sequence[Columns]:
        return (self.markers, *self.overlays.tables)

    def others(self, column: str) -> Numbers:
        """The values of other runs' curves in the steps that are shown."""
        return self.overlays.within(column, *step_window(self._step))

    def other_keys(self, what: str = "") -> tuple[Key, ...]:
        """Legend entries of other runs' curves; `what` says of what the curves are."""
        suffix = f", {what}" if what else ""
        labels = self.overlays.labels.items()
        return tuple(Key(label=f"{label}{suffix}", token=f"pin.{i}", hatch="dashes") for i, label in labels)

    def follow(self, steps: Sequence[Step]) -> None:
        if steps:
            self._step = steps[-1].number
            self._write_markers()

    def mark_all(self, marks: Sequence[tuple[int, str, str]]) -> None:
        """Draws these lines (step, label, tooltip), numbered from 1, in every time plot, in place of the former ones."""
        self._marks = list(marks)
        self._write_markers()

    def _write_markers(self) -> None:
        """Writes the markers; of those too close together only the last has its number in the plots."""
        start, end = step_window(self._step)
        room = LABEL_ROOM * (end - start)
        pairs = pairwise([*self._marks, (math.inf, "", "")])
        drawn = [
            (step, f"{i}" if after - step > room else "", label, f"{i} · {detail}")
            for i, ((step, label, detail), (after, *_)) in enumerate(pairs, 1)
        ]
        if drawn != self._written:
            self._written = drawn
            steps, numbers, labels, details = zip(*drawn, strict=True) if drawn else ((), (), (), ())
            self.markers.replace([[step] for step in steps], {"number": numbers, "label": labels, "detail": details})

    def patches(self) -> Patches:
        start, end = step_window(self._step)
        return {"frame.x": {"start": start, "end": end}, **self.overlays.patches()}

    def plot(self, name: str, y_label: str, *, y_start: float = 0.0, y_end: float = 1.0) -> figure:
        """An empty time plot whose y range is called `<name>.y`."""
        y_range = Range1d(start=y_start, end=y_end, name=f"{name}.y")
        fig = draw.plain_figure(name, y_label, x_range=self.x_range, y_range=y_range)
        fig.xaxis.axis_label = "optimizer step"
        fig.xaxis.ticker = AdaptiveTicker(mantissas=[1, 2, 5], min_interval=1, desired_num_ticks=6)
        fig.xgrid.visible = False
        # The wheel zooms with Shift alone: a notebook must scroll past the plots.
        fig.add_tools(PanTool(dimensions="width"), WheelZoomTool(dimensions="width", modifiers={"shift": True}))
        lines = draw.changes(fig, self.marker_source, "step")
        fig.add_tools(HoverTool(renderers=[lines], tooltips="@detail", name=f"{name}.marker_hover"))
        fig.extra_y_ranges = {"edge": Range1d(start=0, end=1)}  # for what is placed from the bottom to the top
        return fig

    def fit(
        self, fig: figure, source: str, columns: Sequence[str], *, others: str, zero: bool = True, scaled: str = ""
    ) -> None:
        """Asks the page to fit the y range to `columns` of a table in the steps that a reader chose, and to mark at the top
        edge what is beyond. `others`: the column of other runs' curves; `scaled`: the name of a range in another unit."""
        tag = {"source": source, "columns": [*columns], "others": others, "zero": zero, "scaled": scaled}
        fig.y_range.tags = [{"fit": tag}]
        cut = ColumnDataSource({"step": [], "value": []}, name=f"{fig.name}.cut")
        look: dict[str, Any] = {"marker": "triangle", "size": 8, "line_alpha": 0, "y_range_name": "edge"}
        marks = fig.scatter("step", 0.985, source=cut, **look)
        draw.tint(marks.glyph, fill_color="ink.marker")
        draw.hover(fig, marks, [("step", "@step"), ("above the plot", "@value{0,0.[00]}")], mode="mouse", below=True)

    def draw_apart(self, fig: figure, table: Columns) -> None:
        """Draws steps that lines leave out, hollow: a table with columns step, value and why."""
        look: dict[str, Any] = {"size": 4, "fill_alpha": 0, "line_alpha": 0.6, "name": f"{fig.name}.slowed"}
        points = fig.scatter("step", "value", source=draw.twin(table), **look)
        draw.tint(points.glyph, line_color="ink.faint")
        draw.hover(fig, points, [("step", "@step, @why"), ("value", "@value{0,0.[00]}")], mode="mouse", below=True)

    def label_markers(self, fig: figure) -> None:
        """Writes its number at the top of each marker; the view bar lists them. Called last, to be drawn over the data."""
        place: dict[str, Any] = {"x": "step", "y": 1.0, "y_range_name": "edge", "x_offset": 2, "text_baseline": "top"}
        labels = draw.labels(fig, self.marker_source, "ink.mean", text="number", size_px=10, **place)
        labels.background_fill_alpha = 0.7
        draw.tint(labels, background_fill_color="ink.gap")
