"""What every panel is made of: the frame that time plots share, and the `Panel` protocol.

A panel is a picture. It knows events and nothing of clusters or widgets: `update(steps)` writes rows into its `sources`,
whose Bokeh twins its `root` draws. How rows reach a browser is the live view's business.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from bokeh.models import (
    AdaptiveTicker,
    ColumnDataSource,
    HoverTool,
    NumeralTickFormatter,
    PanTool,
    Range1d,
    WheelZoomTool,
)
from bokeh.models.ui import UIElement
from bokeh.plotting import figure

from fsdp_lab.dashboard import theme
from fsdp_lab.dashboard.columns import Columns, Numbers
from fsdp_lab.dashboard.panels.overlay import Overlays
from fsdp_lab.dashboard.panels.ranges import StepWindow
from fsdp_lab.runs.steps import Step

SMOOTH_STEPS = 9  # the ordinary steps that a median on a card is of

HEIGHT_PX = 204
LINE_PX = 2
BAR = 0.5  # the height of a bar, in ranks
LABEL_ROOM = 0.045  # of the axis of steps, that a marker's label needs
STEP_LIMIT = 1000  # steps that a time plot keeps
MOST_ROWS = 2 * STEP_LIMIT + 1  # of another run's curve: its beginning, its end, and a gap between them

Patches = Mapping[str, Mapping[str, Any]]  # Bokeh model name -> property -> value


@dataclass(frozen=True, kw_only=True)
class Key:
    """One entry of a card's legend: a label, and the token of its colour (see `theme.tokens`) or the colour itself."""

    label: str
    token: str = ""
    color: str = ""
    hatch: str = " "  # a Bokeh pattern; "line" and "dashes" for what is drawn as a line


@dataclass(frozen=True, kw_only=True)
class Pin:
    """Which step a card shows of those that it keeps, and whether it holds it while others come."""

    step: int
    held: bool
    oldest: int
    newest: int
    kept: int


@dataclass(frozen=True, kw_only=True)
class Part:
    """A piece of a bar: its length as a share of the longest, and how it is filled."""

    share: float
    token: str
    hatch: str = " "


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A cell of a table that is more than text.

    `parts` is a bar below the text, stacked, and `whisker` where its spread begins and ends, as shares of the longest.
    `press` makes it a button: the card is told this word and the cell's `about`.
    """

    text: str
    title: str = ""  # said when the pointer rests on it
    tone: str = ""  # "good", "fair", "bad" or "soft"
    key: Key | None = None  # a swatch before the text
    parts: tuple[Part, ...] = ()
    whisker: tuple[float, float] | None = None
    press: str = ""
    about: str = ""
    pressed: bool | None = None  # for what is on or off


@dataclass(frozen=True, kw_only=True)
class Captions:
    """The words of a card: the reading of the moment, the legend, and what the numbers are worth."""

    reading: str = ""
    legend: tuple[Key, ...] = ()
    note: str = ""
    table: tuple[tuple[str | Cell, ...], ...] = ()  # heads, then rows: for a card of figures to read
    hidden: bool = False  # the card has nothing to show
    pin: Pin | None = None  # for a card whose step can be chosen: its class is `Pinnable`


class Panel(Protocol):
    """A picture of a run. All that it shows comes from `update`."""

    @property
    def name(self) -> str:
        """Unique among the panels shown together; names of its sources and models begin with it."""

    @property
    def title(self) -> str: ...

    @property
    def wide(self) -> bool:
        """Whether its card takes the whole width of a narrow notebook."""

    @property
    def sources(self) -> Sequence[Columns]: ...

    @property
    def root(self) -> UIElement | None:
        """Drawn in a card; its data sources carry the names of `sources`. None where words are all."""

    def update(self, steps: Sequence[Step]) -> int:
        """Takes new steps, writes them to the sources; returns the rows written."""

    def patches(self) -> Patches:
        """The present values of properties that change: ranges, axes that come and go."""

    def captions(self) -> Captions: ...


@runtime_checkable
class Overlaid(Protocol):
    """A panel whose ranges hold the curves of other runs, too."""

    def cover(self) -> None:
        """Other curves are shown than before."""


@runtime_checkable
class Pressable(Protocol):
    """A card with cells that are pressed."""

    def press(self, word: str, about: str) -> None:
        """From any thread; it leaves a word and returns."""


@runtime_checkable
class Pinnable(Protocol):
    """A panel of one step, which a reader may choose and hold."""

    def pin(self, step: int | None, by: int = 0) -> None:
        """Hold the kept step nearest to `step`, or the one `by` places after what is shown; without either, let go. From
        any thread: it only leaves a word, which the next `update`, with steps or without, sees to."""

    def update(self, steps: Sequence[Step]) -> int: ...


class StepAxis:
    """What the time plots of one dashboard share: the axis of steps, and a marker at each change."""

    def __init__(self, *, limit: int = STEP_LIMIT) -> None:
        self.limit = limit
        self.language = True  # the model is one of language: its losses have a perplexity
        self.x_range = Range1d(start=0, end=50, name="frame.x")
        self.markers = Columns("frame.markers", ["step"], texts=["label", "detail"], limit=100)
        self.marker_source = twin(self.markers)
        self.overlays = Overlays(MOST_ROWS)
        self._window = StepWindow(longest=limit)
        self._step = 0
        self._marks: list[tuple[int, str, str]] = []  # step, label, detail
        self._written: list[tuple[int, str, str]] = []

    @property
    def sources(self) -> Sequence[Columns]:
        return (self.markers, *self.overlays.tables)

    def others(self, column: str) -> Numbers:
        """What the curves of other runs have in the steps that are shown."""
        return self.overlays.within(column, *self._window.around(self._step))

    def other_keys(self) -> tuple[Key, ...]:
        """What a legend says of other runs' curves."""
        labels = self.overlays.labels
        return tuple(Key(label=label, token=f"pin.{place}", hatch="dashes") for place, label in labels.items())

    def follow(self, steps: Sequence[Step]) -> None:
        if steps:
            self._step = steps[-1].number
            self._write_markers()

    def mark(self, step: int, label: str, detail: str) -> None:
        """A line at `step` in every time plot: `label` is written along it, `detail` is for the hover."""
        self.mark_all([*self._marks, (step, label, detail)])

    def mark_all(self, marks: Sequence[tuple[int, str, str]]) -> None:
        """These markers in place of those that are drawn."""
        self._marks = list(marks)
        self._write_markers()

    def _write_markers(self) -> None:
        """Labels stand where they have room: of markers too close together only the last is labelled."""
        start, end = self._window.around(self._step)
        room = LABEL_ROOM * (end - start)
        nexts = [*(step for step, _, _ in self._marks), math.inf][1:]
        drawn = [(step, label if next_ - step > room else "", detail)
                 for (step, label, detail), next_ in zip(self._marks, nexts, strict=True)]  # fmt: skip
        if drawn != self._written:
            self._written = drawn
            texts = {"label": [label for _, label, _ in drawn], "detail": [detail for _, _, detail in drawn]}
            self.markers.replace([[step] for step, _, _ in drawn], texts)

    def patches(self) -> Patches:
        start, end = self._window.around(self._step)
        return {"frame.x": {"start": start, "end": end}, **self.overlays.patches()}

    def plot(self, name: str, y_label: str, *, y_start: float = 0.0, y_end: float = 1.0) -> figure:
        """An empty time plot whose y range is called `<name>.y`."""
        fig = plain_figure(
            name, y_label, x_range=self.x_range, y_range=Range1d(start=y_start, end=y_end, name=f"{name}.y")
        )
        fig.xaxis.axis_label = "optimizer step"
        fig.xaxis.ticker = AdaptiveTicker(mantissas=[1, 2, 5], min_interval=1, desired_num_ticks=6)
        fig.xgrid.visible = False
        # A press of Shift for the wheel: a notebook must scroll past the plots.
        fig.add_tools(PanTool(dimensions="width"), WheelZoomTool(dimensions="width", modifiers={"shift": True}))
        lines = fig.vspan(x="step", source=self.marker_source, line_width=1, line_dash="4 3", line_color="#6B7280")
        tint(lines.glyph, line_color="ink.marker")
        fig.add_tools(HoverTool(renderers=[lines], tooltips="@detail", name=f"{name}.marker_hover"))
        return fig

    def label_markers(self, fig: figure) -> None:
        """Writes the change along each marker, from the top down. Called last, so that it is drawn over the data."""
        fig.extra_y_ranges = {**fig.extra_y_ranges, "marker": Range1d(start=0, end=1)}
        labels = fig.text(
            x="step", y=0.99, text="label", y_range_name="marker", source=self.marker_source, angle=math.pi / 2,
            text_align="right", text_baseline="top", x_offset=3, text_font_size="10px",
        )  # fmt: skip
        labels.glyph.background_fill_alpha = 0.6
        tint(labels.glyph, text_color="ink.mean", background_fill_color="ink.gap")


def twin(columns: Columns) -> ColumnDataSource:
    """The empty Bokeh source that the page fills with the rows of `columns`."""
    return ColumnDataSource({c: [] for c in (*columns.numbers, *columns.texts)}, name=columns.name)


def tint(model: Any, **tokens: str) -> None:
    """Says which theme token colours which property: the page paints it, and again when the theme changes."""
    model.tags = [*model.tags, {"tint": tokens}]


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


def plain_figure(name: str, y_label: str, **kwargs: Any) -> figure:
    """A figure without furniture: no toolbar, no outline, one axis label a side."""
    fig = figure(
        name=name, height=HEIGHT_PX, sizing_mode="stretch_width", toolbar_location=None, tools="", min_border=4,
        min_border_right=18, background_fill_alpha=0, border_fill_alpha=0, outline_line_alpha=0, **kwargs,
    )  # fmt: skip
    fig.yaxis.axis_label = y_label
    for axis in fig.axis:
        axis.axis_line_alpha = 0
        axis.major_tick_line_alpha = 0
        axis.minor_tick_line_alpha = 0
        axis.axis_label_standoff = 6
        axis.axis_label_text_font_style = "normal"
        axis.axis_label_text_font_size = axis.major_label_text_font_size = "11px"
        axis.formatter = NumeralTickFormatter(format="0,0.[0000]")
    fig.yaxis.ticker = AdaptiveTicker(mantissas=[1, 2, 2.5, 5], desired_num_ticks=5)
    return fig


def rank_bars(name: str, x_label: str, world_size: int) -> figure:
    """An empty picture of one horizontal bar a rank, rank 0 on top; its x range is called `<name>.x`."""
    fig = plain_figure(
        name,
        "rank",
        x_range=Range1d(start=0, end=1, name=f"{name}.x"),
        y_range=Range1d(start=world_size - 0.4, end=-0.6),
    )
    fig.xaxis.name = f"{name}.axis"
    fig.xaxis.axis_label = x_label
    fig.xaxis.ticker = AdaptiveTicker(mantissas=[1, 2, 5], desired_num_ticks=5)
    fig.yaxis.ticker = AdaptiveTicker(mantissas=[1, 2, 5], min_interval=1, desired_num_ticks=8)
    fig.ygrid.visible = False
    return fig


def sign_bars(fig: figure, source: ColumnDataSource, *, y: str, end: str, height: float) -> None:
    """The rank's colour at the root of each bar, and the text of column `label` at its end."""
    fig.rect(x=0, y=y, width=8, width_units="screen", height=height, fill_color="color", line_alpha=0, source=source)
    text = fig.text(x=end, y=y, text="label", x_offset=7, text_baseline="middle", text_font_size="11px", source=source)
    tint(text.glyph, text_color="ink.peak")


def hover(
    fig: figure, renderer: Any, rows: Sequence[tuple[str, str]], *, mode: Literal["mouse", "vline"] = "vline"
) -> None:
    """A tooltip over `renderer`: label and Bokeh field expression for each line."""
    tool = HoverTool(renderers=[renderer], tooltips=list(rows), mode=mode, attachment="horizontal")
    fig.add_tools(tool)


def rank_keys(world_size: int) -> tuple[Key, ...]:
    """The legend of a plot with a line for each rank."""
    return tuple(
        Key(label=f"rank {r}", color=theme.rank_color(r), hatch="line" if theme.RANK_DASHES[r] == "solid" else "dashes")
        for r in range(world_size)
    )
