"""`write_report`: runs side by side in one HTML file, which needs no network when it is opened.

Its pictures are drawn as in the dashboard, but static: curves over steps, bars a run, and timelines."""

import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
from bokeh.document import Document
from bokeh.models import BoxZoomTool, ColumnDataSource, HoverTool, Model, Range1d, ResetTool
from bokeh.models.ui import UIElement
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from fsdp_lab.base import __version__
from fsdp_lab.base.errors import ArgumentError
from fsdp_lab.base.events import Role
from fsdp_lab.base.files import check_file, write_whole
from fsdp_lab.base.formatting import duration, size
from fsdp_lab.dashboard import theme
from fsdp_lab.dashboard.live import BOKEH_JS, SHARED_JS
from fsdp_lab.dashboard.panels import draw
from fsdp_lab.dashboard.panels.axis import FINE, SpanRange, StepAxis, ZeroRange
from fsdp_lab.dashboard.panels.base import Key, Panel
from fsdp_lab.dashboard.panels.memory import LIMIT_REACH
from fsdp_lab.dashboard.panels.timeline import TimelinePanel
from fsdp_lab.runs.blame import Blame
from fsdp_lab.runs.comparison import Comparison, Refusal, Row, finite, ratio_words, split_spread
from fsdp_lab.runs.recommendation import Recommendation, recommend
from fsdp_lab.runs.steps import Step
from fsdp_lab.runs.summary import Pairing, Ratio, counting
from fsdp_lab.runs.view import RunView, Switch, switches_in_force
from fsdp_lab.spec.describe import UNKNOWN, Trained, describe_changes, describe_value

FOLDER = Path(__file__).parent
SUFFIXES = (".html", ".htm")
MOST_TIMELINES = 12


def write_report(
    path: str | os.PathLike[str],
    runs: Sequence[RunView | Refusal],
    *,
    baseline: str | int | None = 0,
    title: str = "",
    names: Sequence[str] | None = None,
    limit_bytes: int | None = None,
) -> Path:
    """Writes the measurements of these runs, live or past, to one HTML file of about 1.5 MB; returns its path.

    It shows the table with ratios and parity, the recommendation, curves over steps, memory, communication, and of each
    run the newest traced step, the Spec, the switches and the environment. The exact figures (`Comparison.records`) are
    embedded as JSON. The file is written whole or not at all.

    Args:
        path: ends in .html or .htm.
        baseline, names: as for `Comparison.of`.
        limit_bytes: the memory of the target device, as for `recommend`.

    Raises ArgumentError: the path cannot be written, there are no runs, or there is no such baseline. It is raised first.
    """
    file = check_file(path, SUFFIXES)
    if not runs:
        raise ArgumentError("runs", "there are none", "give a report one run or more")
    compared = Comparison.of(runs, baseline=baseline, names=names)
    return write_whole(file, render(compared, runs, recommend(compared, limit_bytes), title).encode())


def render(compared: Comparison, runs: Sequence[RunView | Refusal], recommended: Recommendation, title: str) -> str:
    """The file's content; its template is page.html.jinja."""
    written_unix_s = time.time()
    models = dict.fromkeys(describe_value("model", row.flat["model"]) for row in compared.rows)
    title = title or f"fsdp_lab: {', '.join(models)}, {len(compared)} run{'s' if len(compared) != 1 else ''}"
    entries = list(zip(compared.rows, runs, strict=True))
    measured = [(i, row, run) for i, (row, run) in enumerate(entries) if not isinstance(run, Refusal)]
    charts = [*curves([Course.of(i, row, run) for i, row, run in measured]), *bars(compared)]
    timelines = [chart for i, row, run in measured if (chart := timeline(i, row, run))][:MOST_TIMELINES]

    drawn = {chart.name: chart.root for chart in (*charts, *timelines) if chart.root is not None}
    document = Document()  # one, so that the axes of steps move together
    with document.models.freeze():  # otherwise each root makes it collect all models again
        for root in drawn.values():
            document.add_root(root)
    plots = {"document": document.to_json(deferred=False), "roots": {name: root.id for name, root in drawn.items()}}

    environments: dict[str, tuple[Mapping[str, Any], list[str]]] = {}  # each once, with the labels of its runs
    for _, row, run in measured:
        if run.environment:
            same = json.dumps(run.environment, sort_keys=True, default=str)
            environments.setdefault(same, (run.environment, []))[1].append(row.label)

    records: dict[str, Any] = {"title": title, "written_unix_s": written_unix_s, "version": __version__}
    records |= {"baseline": compared.baseline, "records": compared.records(), "fastest": recommended.fastest}
    records |= {"smallest": recommended.smallest, "sentences": list(recommended.lines())}
    return filled(
        "page.html.jinja",
        title=title,
        compared=compared,
        places={row.label: i for i, row in enumerate(compared.rows)},
        entries=entries,
        unknown=UNKNOWN,
        blames={row.label: blame for _, row, run in measured if (blame := Blame.newest(run.events)).steps},
        different=[f"{label} ({compared[label].name}) is {why}" for label, why in compared.differences.items()],
        environments=list(environments.values()),
        recommended=recommended,
        charts=charts,
        timelines=timelines,
        when=time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(written_unix_s)),
        version=__version__,
        css=(FOLDER / "page.css").read_text(encoding="utf-8"),
        js=SHARED_JS + (FOLDER / "page.js").read_text(encoding="utf-8"),
        bokeh_js=BOKEH_JS.read_text(encoding="utf-8"),
        # Id of a script element -> the value embedded in it as JSON.
        data={"fsdp-lab-records": records, "fsdp-lab-theme": theme.tokens(), "fsdp-lab-plots": plots},
    )


def filled(template: str, **values: Any) -> str:
    """A template of this folder with its values; their texts are escaped."""
    blocks: dict[str, Any] = {"trim_blocks": True, "lstrip_blocks": True}
    jinja = Environment(loader=FileSystemLoader(FOLDER), undefined=StrictUndefined, autoescape=True, **blocks)
    jinja.filters.update(spread=split_spread, color=theme.rank_color, duration=duration, embedded=embedded)
    jinja.filters.update(field=_field, change=_change, spec_json=_spec_json, leaves=_leaves)
    return jinja.get_template(template).render(**values)


def embedded(value: Any) -> str:
    """JSON that cannot end the script element around it, whatever text it contains."""
    text = json.dumps(finite(value), separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _field(value: Any) -> str:
    if isinstance(value, Mapping) and "param" not in value:
        return json.dumps(value)
    return "–" if value is None else describe_value("", value)


def _spec_json(spec: Trained | Mapping[str, Any]) -> str:
    return json.dumps(dict(spec) if isinstance(spec, Mapping) else spec.to_dict(), indent=2, default=str)


def _change(switch: Switch) -> str:
    if not switch.before:
        return "began"
    return describe_changes(switch.before.difference(switch.after)) or "resumed after a failure"


def _leaves(value: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yields the dotted name and the text of each value of a nested dict."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(inner, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(value, list | tuple) and any(isinstance(v, Mapping) for v in value):
        for i, inner in enumerate(value):
            yield from _leaves(inner, f"{prefix} {i}")
    elif isinstance(value, list | tuple):
        yield prefix, ", ".join(map(str, value)) or "–"
    else:
        yield prefix, "–" if value is None else str(value)


# Of equal curves each is seen in the gaps of the next; the fifth to eighth are bands below the first four.
DASHES = ("solid", "8 4", "2 3", "10 3 2 3")
HATCHES = ("line", "dashes", "dots", "dashes")
MOST_POINTS = 1500  # of a curve; of a longer one a point is the median of several steps
CURVE_PX = 230


@dataclass(frozen=True, kw_only=True)
class Bar:
    """The bar of a run. `parts`: lengths, and how they are filled. `whisker`: the ends of its spread. `thin`: below it."""

    row: Row
    text: str
    parts: Sequence[tuple[float, Key]]
    whisker: tuple[float, float] | None = None
    thin: float = 0.0

    @property
    def end(self) -> float:
        return max(sum(length for length, _ in self.parts), self.thin, self.whisker[1] if self.whisker else 0.0)


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A picture with its texts. `described` is the text for readers who cannot see it."""

    name: str
    title: str
    described: str
    root: UIElement | None = None  # a Bokeh figure; None: of `bars`
    bars: tuple[Bar, ...] = ()
    most: float = 1.0  # the length that is as wide as the picture
    rule: float = 0.0  # the length at which a line crosses the bars; 0: none
    reading: str = ""
    legend: Sequence[Key] = ()
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
    def of(cls, place: int, row: Row, run: RunView) -> Self:
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


def curves(courses: Sequence[Course]) -> list[Chart]:
    """Loss, step time, throughput and TFLOPS over steps, each if it is known; empty without a step."""
    courses = [c for c in courses if c.steps]
    if not courses:
        return []
    end = max(c.steps[-1].number for c in courses)
    x_range = Range1d(start=min(c.steps[0].number for c in courses), end=max(end, 1))
    kinds: tuple[Kind, ...] = (
        ("loss", "Loss", "loss, mean of all ranks", lambda s: s.mean_loss, False),
        ("time", "Step time", "ms, slowest rank", lambda s: 1e3 * s.step_time_s, True),
        ("throughput", "Throughput", "tokens/s, all ranks", lambda s: s.tokens_per_s, True),
        ("tflops", "TFLOPS", "TFLOPS a rank, mean", lambda s: statistics.fmean(e.tflops for e in s.events), True),
    )
    told = [kind for kind in kinds if any(math.isfinite(kind[3](s)) for c in courses for s in c.steps)]
    return [_curve(kind, courses, x_range) for kind in told]


# The name and the title of a picture, the label of its y axis, and the value of a step. A timed measure leaves out the steps
# that medians leave out, and its axis begins at zero.
Kind = tuple[str, str, str, Callable[[Step], float], bool]


def _curve(kind: Kind, courses: Sequence[Course], x_range: Range1d) -> Chart:
    name, title, y_label, value, timed = kind
    series = [_points(c, value, timed) for c in courses]
    every = np.array([y for _, ys, _ in series for y in ys] or [math.nan])
    start, end = (0.0, ZeroRange(steps=FINE, headroom=1.06).cover(every)) if timed else SpanRange().cover(every)
    fig = draw.plain_figure(name, y_label, x_range=x_range, y_range=Range1d(start=start, end=end))
    fig.height = CURVE_PX
    fig.xaxis.axis_label = "optimizer step"
    fig.xgrid.visible = False
    fig.add_tools(BoxZoomTool(), ResetTool())  # visible while the pointer is over the figure
    fig.toolbar_location, fig.toolbar_inner = "above", True
    fig.toolbar.autohide, fig.toolbar.logo = True, None
    lines = []
    for c, (xs, ys, _) in sorted(zip(courses, series, strict=True), key=lambda drawn: not drawn[0].band):
        named = f"{c.row.label} {c.row.name}"
        source = ColumnDataSource({"step": xs, "value": ys}, name=named)
        look: dict[str, Any] = {"line_width": 2, "line_dash": DASHES[c.dash]}
        if c.band:
            look = {"line_width": 6, "line_alpha": 0.55}
        lines.append(fig.line("step", "value", source=source, name=named, line_color=c.color, **look))
    draw.hover(fig, lines, [("run", "$name"), ("step", "@step"), (title, "@value{0,0.0000}")])
    switches = [(step, f"{c.row.label} from step {step} on: {what}") for c in courses for step, what in c.switches]
    if switches:
        steps, words = zip(*switches, strict=True)
        changes = ColumnDataSource({"step": steps, "what": words}, name="changes")
        fig.add_tools(HoverTool(renderers=[draw.changes(fig, changes, "step")], tooltips="@what"))
    hatches = ["band" if c.band else HATCHES[c.dash] for c in courses]
    looks = zip(courses, hatches, strict=True)
    keys = [Key(label=f"{c.row.label} {c.row.name}", color=c.color, hatch=hatch) for c, hatch in looks]
    strides = sorted({stride for _, _, stride in series if stride > 1})
    left_out = "Without first steps after a change and ledger steps." if timed else ""
    thinned = f"Of long runs a point is the median of {' or '.join(map(str, strides))} steps." if strides else ""
    last = ", ".join(f"{c.row.label} {ys[-1]:.4g}" for c, (_, ys, _) in zip(courses, series, strict=True) if ys)
    return Chart(
        name=name,
        title=title,
        root=fig,
        described=f"{title} ({y_label}) over optimizer steps, a curve for each run. Last values: {last}.",
        legend=keys,
        note=" ".join(filter(None, [left_out, thinned])),
    )


def _points(c: Course, value: Callable[[Step], float], timed: bool) -> tuple[list[int], list[float], int]:
    """Steps, values, and the number of steps that each value is the median of."""
    steps = counting(c.steps) if timed else c.steps
    stride = -(-len(steps) // MOST_POINTS)
    groups = [steps[i : i + stride] for i in range(0, len(steps), stride)] if steps else []
    return [g[-1].number for g in groups], [statistics.median(map(value, g)) for g in groups], stride


def bars(compared: Comparison) -> list[Chart]:
    """Ratios to the baseline, memory by class and communication, each if it was measured."""
    rows = [row for row in compared.rows if row.figures.steps]
    times = {row.label: row.time_ratio for row in rows if row.time_ratio}
    exact = {row.label: row.memory_ratio for row in rows if row.memory_ratio is not None}
    memories = {n: Ratio(median=r, p10=None, p90=None, n=1, pairing=Pairing.MEDIANS) for n, r in exact.items()}
    charts = [
        _ratios("time_ratio", "Step time", compared, times),
        _ratios("memory_ratio", "Peak memory", compared, memories),
        _memory(rows),
        _communication(rows),
    ]
    return [chart for chart in charts if chart.bars]


def _bars(name: str, title: str, shown: Sequence[Bar], *, headroom: float, reading: str = "", **more: Any) -> Chart:
    """`headroom`: the width over the longest bar, so that there is room for its label."""
    words = "; ".join(f"{bar.row.label} {bar.text}" for bar in shown)
    most = headroom * max([more.get("rule", 0.0), *(bar.end for bar in shown)]) or 1.0
    described = f"{f'{title} {reading}'.strip()}: {words}."
    return Chart(name=name, title=title, bars=tuple(shown), most=most, reading=reading, described=described, **more)


def _ratios(name: str, title: str, compared: Comparison, ratios: Mapping[str, Ratio]) -> Chart:
    shown = []
    for i, row in enumerate(compared.rows):
        if r := ratios.get(row.label):
            part = (r.median, Key(label=row.name, color=theme.rank_color(i)))
            whisker = (r.p10, r.p90) if r.p10 is not None and r.p90 is not None else None
            shown.append(Bar(row=row, text=ratio_words(r), parts=[part], whisker=whisker))
    legend = [Key(label=f"{compared.baseline}", token="ink.marker", hatch="dashes")]
    legend += [Key(label="p10 to p90", token="ink.peak", hatch="line")] if any(bar.whisker for bar in shown) else []
    title = f"{title} relative to {compared.baseline}"
    return _bars(name, title, shown, headroom=1.6, rule=1.0, legend=legend)


def _memory(rows: Sequence[Row]) -> Chart:
    shown = []
    for row in rows:
        if peak := row.figures.peak_memory_bytes:
            host = f" + {size(row.figures.host_bytes)} on the host" if row.figures.host_bytes else ""
            classes = {name: row.figures.at_peak.of_role(Role(name)) for name in draw.ON_DEVICE}
            parts = _parts({f"memory.{name}": number for name, number in classes.items()}, size)
            shown.append(Bar(row=row, text=f"{size(peak)}{host}", parts=parts))
    limit = min((row.figures.limit_bytes for row in rows if row.figures.limit_bytes), default=0)
    rule = limit if shown and limit <= LIMIT_REACH * max(bar.end for bar in shown) else 0
    of_rule = [Key(label=f"limit {size(rule)}", token="ink.marker", hatch="dashes")] if rule else []
    headroom = 1.6 if any(row.figures.host_bytes for row in rows) else 1.25
    legend, reading = [*draw.class_keys(draw.ON_DEVICE), *of_rule], "of the fullest rank, at its peak"
    return _bars("memory", "Memory", shown, headroom=headroom, rule=rule, legend=legend, reading=reading)


def _communication(rows: Sequence[Row]) -> Chart:
    shown = []
    for row in rows:
        if by_kind := {kind: s for kind in theme.COMMUNICATION if (s := row.figures.comm_s_by_kind.get(kind))}:
            whole, exposed = duration(sum(by_kind.values())), row.figures.exposed_comm_s
            parts = _parts({f"communication.{kind}": s for kind, s in by_kind.items()}, duration)
            text = f"{whole}, {duration(exposed.median)} exposed" if exposed else whole
            shown.append(Bar(row=row, text=text, parts=parts, thin=exposed.median if exposed else 0.0))
    used = {key.token for bar in shown for _, key in bar.parts}
    kinds = [token for kind in theme.COMMUNICATION if (token := f"communication.{kind}") in used]
    keys = [*map(draw.fill_key, kinds), Key(label="exposed: computing waited", token="timeline.waiting")]
    note = "Issue to completion, by kind; collectives that overlap count each."
    reading = "a step, mean over ranks"
    return _bars("communication", "Communication", shown, headroom=1.65, legend=keys, note=note, reading=reading)


def _parts(lengths: Mapping[str, float], text: Callable[[float], str]) -> list[tuple[float, Key]]:
    """Token -> length as the parts of a bar."""
    whole = [(token, length) for token, length in lengths.items() if length]
    return [(length, draw.fill_key(token, f"{draw.FILLS[token].label} {text(length)}")) for token, length in whole]


def timeline(place: int, row: Row, run: RunView) -> Chart | None:
    """Draws what every rank did in the newest traced step; None if there is none."""
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
        note=captions.note,
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
