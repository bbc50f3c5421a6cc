"""The pictures of a report, drawn as in the dashboard, but static: curves over steps, bars a run, and timelines."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from bokeh.models import BoxZoomTool, ColumnDataSource, FixedTicker, HoverTool, Model, Range1d, ResetTool, SaveTool
from bokeh.models.annotations import Span as Ruler
from bokeh.models.ui import UIElement
from bokeh.plotting import figure

from fsdp_lab.core.describe import describe_changes
from fsdp_lab.core.events import Role
from fsdp_lab.core.formatting import GIB, MIB, duration, size
from fsdp_lab.dashboard import theme
from fsdp_lab.dashboard.panels.axis import FINE, SpanRange, StepAxis, ZeroRange
from fsdp_lab.dashboard.panels.base import Key, Panel
from fsdp_lab.dashboard.panels.drawing import (
    FILLS,
    ON_DEVICE,
    class_keys,
    class_tokens,
    fill_key,
    hover,
    hover_bars,
    label_ends,
    paint_stack,
    plain_figure,
    tint,
    unit_name,
)
from fsdp_lab.dashboard.panels.memory import LIMIT_REACH
from fsdp_lab.dashboard.panels.timeline import TimelinePanel
from fsdp_lab.runs.comparison import Comparison, Row, ratio_words
from fsdp_lab.runs.steps import Step
from fsdp_lab.runs.summary import Pairing, Ratio, counting
from fsdp_lab.runs.view import RunView, switches_in_force

# Of equal curves each is seen in the gaps of the next; the fifth to eighth are bands below the first four.
DASHES = ("solid", "8 4", "2 3", "10 3 2 3")
HATCHES = ("line", "dashes", "dots", "dashes")
MOST_POINTS = 1500  # of a curve; of a longer one a point is the median of several steps
CURVE_PX, BAR_PX, FOOT_PX = 230, 38, 56
LABEL_CHARS = 30


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A picture with its texts. `described` is the text for readers who cannot see it."""

    name: str
    title: str
    root: UIElement
    described: str
    reading: str = ""
    legend: tuple[Key, ...] = ()
    note: str = ""
    wide: bool = False


@dataclass(frozen=True, kw_only=True)
class Course:
    """A run over steps: its row in the comparison, its whole steps, and where it was switched."""

    place: int
    row: Row
    steps: Sequence[Step] = field(repr=False)
    switches: tuple[tuple[int, str], ...] = ()  # step, what changed

    @classmethod
    def of(cls, place: int, row: Row, run: RunView) -> Course:
        changes = [(s.step, s.before.difference(s.after)) for s in switches_in_force(run.switches) if s.before]
        switches = tuple((step, describe_changes(difference)) for step, difference in changes if difference)
        return cls(place=place, row=row, steps=[s for s in run.events.steps() if s.is_whole], switches=switches)

    @property
    def color(self) -> str:
        return theme.rank_color(self.place)

    @property
    def band(self) -> bool:
        return self.place // len(DASHES) % 2 == 1

    @property
    def dash(self) -> int:
        """Index into `DASHES`: a colour used again has another dash."""
        return (self.place + self.place // theme.MOST_LINES) % len(DASHES)


# -- curves ------------------------------------------------------------------------------------------------------------


def curves(courses: Sequence[Course], note: str) -> list[Chart]:
    """Loss, step time, throughput and TFLOPS over steps; empty without a step."""
    courses = [c for c in courses if c.steps]
    if not courses:
        return []
    end = max(c.steps[-1].number for c in courses)
    x_range = Range1d(start=min(c.steps[0].number for c in courses), end=max(end, 1))
    kinds: tuple[tuple[str, str, str, Callable[[Step], float], bool], ...] = (
        ("loss", "Loss", "loss, mean of all ranks", lambda s: s.mean_loss, False),
        ("time", "Step time", "ms, slowest rank", lambda s: 1e3 * s.step_time_s, True),
        ("throughput", "Throughput", "tokens/s, all ranks", lambda s: s.tokens_per_s, True),
        ("tflops", "TFLOPS", "TFLOPS a rank, mean", lambda s: statistics.fmean(e.tflops for e in s.events), True),
    )
    return [_curve(*kind, courses, x_range, note) for kind in kinds]


def _curve(
    name: str, title: str, y_label: str, value: Callable[[Step], float], timed: bool, courses: Sequence[Course],
    x_range: Range1d, note: str,
) -> Chart:  # fmt: skip
    """A `timed` measure leaves out the steps that medians leave out, and its axis begins at zero."""
    series = [_points(c, value, timed) for c in courses]
    every = np.array([y for _, ys, _ in series for y in ys] or [math.nan])
    start, end = (0.0, ZeroRange(steps=FINE, headroom=1.06).cover(every)) if timed else SpanRange().cover(every)
    fig = plain_figure(name, y_label, x_range=x_range, y_range=Range1d(start=start, end=end))
    fig.height = CURVE_PX
    fig.xaxis.axis_label = "optimizer step"
    fig.xgrid.visible = False
    _tools(fig)
    lines = [
        fig.line("step", "value", source=ColumnDataSource({"step": xs, "value": ys}), name=f"{c.row.label} {c.row.name}",
                 line_color=c.color, line_width=6 if c.band else 2, line_alpha=0.55 if c.band else 1.0,
                 line_dash="solid" if c.band else DASHES[c.dash])
        for c, (xs, ys, _) in sorted(zip(courses, series, strict=True), key=lambda drawn: not drawn[0].band)
    ]  # fmt: skip
    hover(fig, lines, [("run", "$name"), ("step", "@step"), (title, "@value{0,0.0000}")])
    _mark_switches(fig, courses)
    strides = sorted({stride for _, _, stride in series if stride > 1})
    notes = [
        "Without first steps after a change and ledger steps." if timed else "",
        f"Of long runs a point is the median of {' or '.join(map(str, strides))} steps." if strides else "",
        note,
    ]
    last = ", ".join(f"{c.row.label} {ys[-1]:.4g}" for c, (_, ys, _) in zip(courses, series, strict=True) if ys)
    return Chart(
        name=name,
        title=title,
        root=fig,
        described=f"{title} ({y_label}) over optimizer steps, a curve for each run. Last values: {last}.",
        legend=run_keys(courses),
        note=" ".join(filter(None, notes)),
    )


def _points(c: Course, value: Callable[[Step], float], timed: bool) -> tuple[list[int], list[float], int]:
    """Steps, values, and the number of steps that each value is the median of."""
    steps = counting(c.steps) if timed else c.steps
    stride = -(-len(steps) // MOST_POINTS)
    groups = [steps[i : i + stride] for i in range(0, len(steps), stride)] if steps else []
    return [g[-1].number for g in groups], [statistics.median(map(value, g)) for g in groups], stride


def _mark_switches(fig: figure, courses: Sequence[Course]) -> None:
    rows = [(step, f"{c.row.label} from step {step} on: {what}") for c in courses for step, what in c.switches]
    if not rows:
        return
    source = ColumnDataSource({"step": [step for step, _ in rows], "what": [what for _, what in rows]})
    lines = fig.vspan(x="step", source=source, line_width=1, line_dash="4 3")
    tint(lines.glyph, line_color="ink.marker")
    fig.add_tools(HoverTool(renderers=[lines], tooltips="@what"))


def _tools(fig: figure) -> None:
    """Adds tools to zoom, to reset and to save the picture, visible while the pointer is over the figure."""
    fig.add_tools(BoxZoomTool(), ResetTool(), SaveTool())
    fig.toolbar_location, fig.toolbar_inner = "above", True
    fig.toolbar.autohide, fig.toolbar.logo = True, None


def run_keys(courses: Sequence[Course]) -> tuple[Key, ...]:
    return tuple(
        Key(label=f"{c.row.label} {c.row.name}", color=c.color,
            hatch="band" if c.band else HATCHES[c.dash])
        for c in courses
    )  # fmt: skip


# -- bars --------------------------------------------------------------------------------------------------------------


def bars(compared: Comparison, note: str) -> list[Chart]:
    """Ratios to the baseline, memory by class and communication, each if it was measured."""
    rows = [row for row in compared.rows if row.figures.steps]
    times = {row.label: row.time_ratio for row in rows if row.time_ratio}
    memories = {row.label: _exact(row.memory_ratio) for row in rows if row.memory_ratio is not None}
    base = compared.baseline
    charts = [
        _ratios("time_ratio", f"Step time relative to {base}", compared, times, note) if times else None,
        _ratios("memory_ratio", f"Peak memory relative to {base}", compared, memories, note) if memories else None,
        _memory(compared, note) if any(row.figures.peak_memory_bytes for row in rows) else None,
        _communication(compared, note) if any(row.figures.comm_s for row in rows) else None,
    ]
    return [chart for chart in charts if chart is not None]


def _exact(value: float) -> Ratio:
    """A ratio without spread."""
    return Ratio(median=value, p10=None, p90=None, n=1, pairing=Pairing.MEDIANS)


def _ratios(name: str, title: str, compared: Comparison, by_label: Mapping[str, Ratio], note: str) -> Chart:
    places = [i for i, row in enumerate(compared.rows) if row.label in by_label]
    ratios = [by_label[compared.rows[i].label] for i in places]
    spread = any(r.p10 is not None for r in ratios)
    fig = _bar_figure(name, f"{compared.baseline} is 1", [compared.rows[i] for i in places])
    source = ColumnDataSource({
        "y": list(range(len(places))),
        "top": [i - 0.12 for i in range(len(places))],
        "bottom": [i + 0.12 for i in range(len(places))],
        "ratio": [r.median for r in ratios],
        "low": [r.p10 if r.p10 is not None else math.nan for r in ratios],
        "high": [r.p90 if r.p90 is not None else math.nan for r in ratios],
        "color": [theme.rank_color(i) for i in places],
        "end": [max(r.median, r.p90 or 0) for r in ratios],
        "label": [ratio_words(r) for r in ratios],
    })  # fmt: skip
    fig.hbar(y="y", left=0, right="ratio", height=0.5, fill_color="color", line_alpha=0, source=source)
    for x0, x1, y0, y1 in (
        ("low", "high", "y", "y"),
        ("low", "low", "top", "bottom"),
        ("high", "high", "top", "bottom"),
    ):
        whisker = fig.segment(x0=x0, x1=x1, y0=y0, y1=y1, line_width=2, source=source)
        tint(whisker.glyph, line_color="ink.peak")
    _label_ends(fig, source)
    _rule(fig, 1)
    _fit(fig, [1.0, *source.data["end"]], headroom=1.45)
    words = "; ".join(f"{compared.rows[i].label} {ratio_words(r)}" for i, r in zip(places, ratios, strict=True))
    legend = [Key(label=f"{compared.baseline}", token="ink.marker", hatch="dashes")]
    legend += [Key(label="p10 to p90", token="ink.peak", hatch="line")] if spread else []
    return Chart(name=name, title=title, root=fig, described=f"{title}: {words}.", legend=tuple(legend), note=note)


def _memory(compared: Comparison, note: str) -> Chart:
    rows = [row for row in compared.rows if row.figures.peak_memory_bytes]
    peaks = [row.figures.peak_memory_bytes or 0 for row in rows]
    unit = GIB if max(peaks) >= GIB else MIB
    fig = _bar_figure("memory", f"{unit_name(unit)} of the fullest rank, at its peak", rows)
    data = {name: [row.figures.at_peak.of_role(Role(name)) / unit for row in rows] for name in ON_DEVICE}
    host = [row.figures.host_bytes for row in rows]
    source = ColumnDataSource({
        **data,
        "y": list(range(len(rows))),
        "end": [peak / unit for peak in peaks],
        "label": [size(peak) + (f" + {size(h)} on the host" if h else "") for peak, h in zip(peaks, host, strict=True)],
    })  # fmt: skip
    _stack(fig, source, class_tokens(), unit_name(unit), height=0.6)
    limit = min((row.figures.limit_bytes for row in rows if row.figures.limit_bytes), default=None)
    legend = class_keys(ON_DEVICE)
    ends = [*source.data["end"]]
    if limit is not None and limit <= LIMIT_REACH * max(peaks):
        _rule(fig, limit / unit)
        legend.append(Key(label=f"limit {size(limit)}", token="ink.marker", hatch="dashes"))
        ends.append(limit / unit)
    _fit(fig, ends, headroom=1.65 if any(host) else 1.3)
    each = "; ".join(f"{row.label} {size(peak)}" for row, peak in zip(rows, peaks, strict=True))
    described = f"Peak memory of the fullest rank by class: {each}."
    return Chart(name="memory", title="Memory", root=fig, described=described, legend=tuple(legend), note=note)


def _communication(compared: Comparison, note: str) -> Chart:
    rows = [row for row in compared.rows if row.figures.comm_s]
    kinds = [k for k in theme.COMMUNICATION if any(row.figures.comm_s_by_kind.get(k) for row in rows)]
    fig = _bar_figure("communication", "ms a step, mean over ranks", rows)
    exposed = [1e3 * row.figures.exposed_comm_s.median if row.figures.exposed_comm_s else math.nan for row in rows]
    source = ColumnDataSource({
        **{kind: [1e3 * row.figures.comm_s_by_kind.get(kind, 0.0) for row in rows] for kind in kinds},
        "y": [i - 0.12 for i in range(len(rows))],
        "y_exposed": [i + 0.26 for i in range(len(rows))],
        "exposed": exposed,
        "end": [1e3 * sum(row.figures.comm_s_by_kind.values()) for row in rows],
        "label": [_comm_words(row) for row in rows],
    })  # fmt: skip
    waited = fig.hbar(y="y_exposed", left=0, right="exposed", height=0.2, source=source, line_alpha=0)
    tint(waited.glyph, fill_color="timeline.waiting")
    tokens = [f"communication.{kind}" for kind in kinds]
    _stack(fig, source, tokens, "ms", height=0.42, more=[("exposed", "@exposed{0,0.00} ms")])
    _fit(fig, [*source.data["end"], *exposed], headroom=1.7)
    keys = [*map(fill_key, tokens), Key(label="exposed: computing waited", token="timeline.waiting")]
    described = "; ".join(f"{row.label} {_comm_words(row)}" for row in rows)
    apart = "Issue to completion, by kind; collectives that overlap count each."
    return Chart(name="communication", title="Communication", root=fig, legend=tuple(keys), note=f"{apart} {note}".strip(),
                 described=f"Communication a step by kind, and what of it is exposed: {described}.")  # fmt: skip


def _comm_words(row: Row) -> str:
    whole, exposed = sum(row.figures.comm_s_by_kind.values()), row.figures.exposed_comm_s
    return f"{duration(whole)}, {duration(exposed.median)} exposed" if exposed else duration(whole)


def _bar_figure(name: str, x_label: str, rows: Sequence[Row]) -> figure:
    """A row for each run, the first on top, its label and name on the axis."""
    fig = plain_figure(name, "", y_range=Range1d(start=len(rows) - 0.4, end=-0.6))
    fig.height = FOOT_PX + BAR_PX * len(rows)
    fig.xaxis.axis_label = x_label
    fig.yaxis.axis_label = None
    fig.yaxis.ticker = FixedTicker(ticks=list(range(len(rows))))
    fig.yaxis.major_label_overrides = {i: _short(f"{row.label}  {row.name}") for i, row in enumerate(rows)}
    fig.ygrid.visible = False
    return fig


def _stack(
    fig: figure, source: ColumnDataSource, tokens: Sequence[str], unit: str, *, height: float,
    more: Sequence[tuple[str, str]] = (),
) -> None:  # fmt: skip
    """Stacked bars with a tooltip and the text of column `label`; a token `group.name` is of the column `name`."""
    names = [token.partition(".")[2] for token in tokens]
    paint_stack(fig.hbar_stack(names, y="y", height=height, source=source, line_width=1), tokens)
    rows = [(FILLS[token].label, f"@{name}{{0,0.00}} {unit}") for token, name in zip(tokens, names, strict=True)]
    hover_bars(fig, source, [*rows, *more], height=height)
    _label_ends(fig, source)


def _fit(fig: figure, ends: Sequence[float], *, headroom: float) -> None:
    """Makes room on the x axis for bars with these ends and their labels."""
    fig.x_range = Range1d(start=0, end=ZeroRange(steps=FINE, headroom=headroom).cover(np.array(ends)))


def _rule(fig: figure, at: float) -> None:
    """A dashed line across the bars."""
    line = Ruler(location=at, dimension="height", line_dash="6 4", line_width=1.5, level="underlay")
    tint(line, line_color="ink.marker")
    fig.add_layout(line)


def _short(text: str) -> str:
    return text if len(text) <= LABEL_CHARS else text[: LABEL_CHARS - 1] + "…"


def _label_ends(fig: figure, source: ColumnDataSource) -> None:
    """Writes the text of column `label` behind each bar, readable over a ruler."""
    text = label_ends(fig, source)
    text.background_fill_alpha = 0.7
    tint(text, background_fill_color="ink.gap")


# -- timelines ---------------------------------------------------------------------------------------------------------


def timeline(place: int, row: Row, run: RunView, note: str) -> Chart | None:
    """What every rank did in the newest traced step; None if there is none."""
    step = run.events.newest_traced()
    if step is None:
        return None
    panel = TimelinePanel(StepAxis(), step.world_size)
    panel.update([step])
    _freeze(panel)
    captions = panel.captions()
    return Chart(
        name=f"timeline{place}",
        title=f"{row.label} {row.name}",
        root=panel.root,
        described=f"Timeline of run {row.label}, a lane for each rank: {captions.reading}.",
        reading=captions.reading,
        legend=captions.legend,
        note=captions.note or note,
        wide=True,
    )


def _freeze(panel: Panel) -> None:
    """Writes the rows and patches that the live view would send into the Bokeh models themselves."""
    models: list[Model] = sorted(panel.root.references(), key=lambda m: m.id) if panel.root is not None else []
    columns, patches = {c.name: c for c in panel.sources}, panel.patches()
    for m in models:
        if isinstance(m, ColumnDataSource) and m.name in columns:
            block = columns[m.name].all()
            m.data = {**dict(zip(columns[m.name].numbers, block.numbers, strict=True)), **block.texts}
        for name, value in patches.get(m.name or "", {}).items():
            # A mapping with keys other than strings is sent as a list of entries.
            is_map = isinstance(value, Mapping) and value.get("type") == "map"
            setattr(m, name, dict(value["entries"]) if is_map else value)
