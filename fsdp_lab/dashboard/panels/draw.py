"""How panels and reports draw: plain figures, fills by theme token, bars with labels, tooltips, legends."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from bokeh.models import AdaptiveTicker, ColumnDataSource, FixedTicker, HoverTool, NumeralTickFormatter, Range1d
from bokeh.models.annotations import Span
from bokeh.models.formatters import TickFormatter
from bokeh.models.labeling import NoOverlap
from bokeh.plotting import figure

from fsdp_lab.base.events import Role, StepEvent
from fsdp_lab.base.process import ranks_per_host
from fsdp_lab.dashboard import theme
from fsdp_lab.dashboard.panels.base import Columns, Key

HEIGHT_PX = 190
LINE_PX = 2
MOST_NAMED = 12  # ranks that are all named on an axis
BAR = 0.5  # the height of a bar, in ranks
NEUTRAL = "#808890"  # visible on both themes, and no rank's colour

ON_DEVICE = tuple(name for name in theme.MEMORY if name in tuple(Role))  # classes of memory, in stacking order
FILLS: Mapping[str, theme.Fill] = {
    f"{group}.{name}": fill
    for group, fills in (("memory", theme.MEMORY), ("communication", theme.COMMUNICATION), ("timeline", theme.COMPUTE))
    for name, fill in fills.items()
}  # by theme token
CLASS_TOKENS = [f"memory.{name}" for name in ON_DEVICE]

Rows = Sequence[tuple[str, str]]  # of a tooltip: label and Bokeh field expression


def twin(columns: Columns) -> ColumnDataSource:
    """The empty Bokeh source that the page fills with the rows of `columns`."""
    return ColumnDataSource({c: [] for c in (*columns.numbers, *columns.texts)}, name=columns.name)


def plain_figure(name: str, y_label: str, **kwargs: Any) -> figure:
    """A figure without toolbar and outline, with one axis label a side."""
    fig = figure(name=name, height=HEIGHT_PX, sizing_mode="stretch_width", toolbar_location=None, tools="", **kwargs)
    fig.min_border, fig.min_border_right = 4, 18
    fig.lod_threshold = None  # the page keeps no thinned copy of a glyph (`lighten` of live.js)
    fig.background_fill_alpha = fig.border_fill_alpha = fig.outline_line_alpha = 0
    fig.yaxis.axis_label = y_label
    for axis in fig.axis:
        simplify_axis(axis, "0,0.[000000]")
    fig.yaxis.ticker = AdaptiveTicker(mantissas=[1, 2, 2.5, 5], desired_num_ticks=5)
    return fig


def simplify_axis(axis: Any, numbers: str | TickFormatter) -> None:
    """Hides all of a Bokeh axis but its label and its numbers."""
    axis.axis_line_alpha = axis.major_tick_line_alpha = axis.minor_tick_line_alpha = 0
    axis.axis_label_standoff = 6
    axis.major_label_policy = NoOverlap(min_distance=6)
    axis.axis_label_text_font_style = "normal"
    axis.axis_label_text_font_size = axis.major_label_text_font_size = "11px"
    axis.formatter = NumeralTickFormatter(format=numbers) if isinstance(numbers, str) else numbers


def rank_bars(name: str, x_label: str, world_size: int) -> figure:
    """An empty picture of one horizontal bar a rank, rank 0 on top; its x range is called `<name>.x`."""
    x_range, y_range = Range1d(start=0, end=1, name=f"{name}.x"), Range1d(start=world_size - 0.4, end=-0.6)
    fig = plain_figure(name, "rank", x_range=x_range, y_range=y_range)
    fig.xaxis.name = f"{name}.axis"
    fig.xaxis.axis_label = x_label
    fig.xaxis.ticker = AdaptiveTicker(mantissas=[1, 2, 5], desired_num_ticks=5)
    fig.yaxis.name = f"{name}.rank_axis"
    every = next((n for n in (1, 2, 5, 10, 20, 50, 100, 200, 500) if world_size <= 10 * n), 1000)
    fig.yaxis.ticker = FixedTicker(name=f"{name}.ranks", ticks=list(range(0, world_size, every)))
    fig.ygrid.ticker = FixedTicker(name=f"{name}.hosts", ticks=[])
    return fig


class RanksByHost:
    """Names the ranks of a figure of `rank_bars` by their hosts, with a line between hosts, where there are several."""

    def __init__(self, name: str, world_size: int) -> None:
        self._name, self._world_size = name, world_size
        self.hosts: Mapping[int, str] = {}  # by rank

    def follow(self, events: Iterable[StepEvent]) -> None:
        if hosts := {e.rank: e.host for e in events if e.host}:
            self.hosts = hosts

    @property
    def several(self) -> bool:
        return len(set(self.hosts.values())) > 1

    @property
    def per_host(self) -> int:
        """Ranks of a host, where all have as many; else the number of all."""
        return ranks_per_host([self.hosts[rank] for rank in sorted(self.hosts)])

    def place(self, rank: int) -> str:
        """Names a rank in a tooltip: "3 on beta"."""
        host = self.hosts.get(rank, "")
        return f"{rank} on {host}" if host and self.several else str(rank)

    def patches(self) -> dict[str, dict[str, Any]]:
        if not self.several:
            return {}
        ranks = sorted(self.hosts)
        first = [r for i, r in enumerate(ranks) if i == 0 or self.hosts[ranks[i - 1]] != self.hosts[r]]
        ticks = ranks if self._world_size <= MOST_NAMED else first
        names = [[r, f"{self.hosts[r]}  {r}" if r in first else str(r)] for r in ticks]
        labels = {"type": "map", "entries": names}
        return {
            f"{self._name}.ranks": {"ticks": ticks},
            f"{self._name}.rank_axis": {"major_label_overrides": labels, "axis_label": "host and rank"},
            f"{self._name}.hosts": {"ticks": [r - 0.5 for r in first[1:]]},
        }


def tint(model: Any, **tokens: str) -> None:
    """Assigns theme tokens to colour properties: the page paints them, and again when the theme changes."""
    model.tags = [*model.tags, {"tint": tokens}]


def paint_fill(glyph: Any, token: str, *, line: bool = True, outline: str = "ink.gap") -> None:
    """Fills a glyph with the colour and the hatch of a token of `FILLS`; its outline is by default the background's."""
    colors = {"fill_color": token}
    if line:
        colors["line_color"] = outline
    if FILLS[token].hatch != " ":
        glyph.hatch_pattern = FILLS[token].hatch
        glyph.hatch_scale = 7
        glyph.hatch_weight = 1
        colors["hatch_color"] = "ink.faint"
    tint(glyph, **colors)


def paint_stack(stack: Iterable[Any], tokens: Iterable[str], *, line: bool = True) -> None:
    """Fills each of the stacked renderers with its token."""
    for renderer, token in zip(stack, tokens, strict=True):
        paint_fill(renderer.glyph, token, line=line)


def line(fig: figure, source: ColumnDataSource, y: str, token: str, *, x: str = "step", **look: Any) -> Any:
    """Draws a line in the colour of a token; returns its renderer."""
    line = fig.line(x, y, source=source, **look)
    tint(line.glyph, line_color=token)
    return line


def changes(fig: figure, source: ColumnDataSource, x: str) -> Any:
    """Draws a dashed line from bottom to top for each row of a source; returns their renderer."""
    lines = fig.vspan(x=x, source=source, line_width=1, line_dash="4 3", line_color="#6B7280")
    tint(lines.glyph, line_color="ink.marker")
    return lines


def quads(fig: figure, source: ColumnDataSource, **look: Any) -> Any:
    """Draws a rectangle for each row of a source; returns their renderer."""
    return fig.quad(left="left", right="right", top="top", bottom="bottom", source=source, **look)


def labels(
    fig: figure, source: ColumnDataSource, token: str, *, text: str = "label", size_px: int = 11, **look: Any
) -> Any:
    """Writes the text of a column for each row of a source; returns the glyph."""
    glyphs = fig.text(text=text, source=source, text_font_size=f"{size_px}px", **look)
    tint(glyphs.glyph, text_color=token)
    return glyphs.glyph


def sign_bars(fig: figure, source: ColumnDataSource, *, y: str, end: str) -> None:
    """Draws the rank's colour at the root of each bar, and the text of column `label` at its end."""
    look: dict[str, Any] = {"width": 8, "width_units": "screen", "fill_color": "color", "line_alpha": 0}
    fig.rect(x=0, y=y, height=BAR + 0.06, source=source, **look)
    labels(fig, source, "ink.peak", x=end, y=y, x_offset=7, text_baseline="middle")


def hover(
    fig: figure, renderer: Any, rows: Rows | str, *, mode: Literal["mouse", "vline"] = "vline", below: bool = False
) -> None:
    """A tooltip over a renderer or a list of them: rows, or HTML; beside the pointer or below it."""
    renderers = renderer if isinstance(renderer, list) else [renderer]
    told: Any = rows if isinstance(rows, str) else list(rows)
    tool = HoverTool(renderers=renderers, tooltips=told, mode=mode, attachment="below" if below else "horizontal")
    fig.add_tools(tool)


def hover_bars(fig: figure, source: ColumnDataSource, rows: Rows, *, right: str, y: str, height: float) -> None:
    """A tooltip over each whole bar."""
    whole = fig.hbar(y=y, left=0, right=right, height=height, source=source, fill_alpha=0, line_alpha=0)
    hover(fig, whole, rows, mode="mouse")


def limit_line(name: str, dimension: Literal["height", "width"], *, dash: str = "6 4") -> Span:
    """A line across a plot at a limit or a prediction; it is invisible until a patch places it."""
    line = Span(name=name, location=0, dimension=dimension, line_dash=dash, line_width=LINE_PX, visible=False)
    tint(line, line_color="ink.marker")
    return line


def fill_key(token: str, label: str = "") -> Key:
    """The legend entry of a token of `FILLS`."""
    return Key(label=label or FILLS[token].label, token=token, hatch=FILLS[token].hatch)


def class_keys(names: Sequence[str]) -> list[Key]:
    """The legend of classes of memory."""
    return [fill_key(f"memory.{name}") for name in names]
