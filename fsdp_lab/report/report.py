"""`write_report`: runs side by side in one HTML file, which needs no network when it is opened."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import bokeh
from bokeh.document import Document
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from fsdp_lab.base import __version__
from fsdp_lab.base.errors import ArgumentError
from fsdp_lab.base.files import check_file, write_whole
from fsdp_lab.base.formatting import duration
from fsdp_lab.dashboard import theme
from fsdp_lab.report.charts import Course, bars, curves, timeline
from fsdp_lab.runs.comparison import Comparison, Refusal, finite, split_spread
from fsdp_lab.runs.recommendation import Recommendation, recommend
from fsdp_lab.runs.view import RunView, Switch
from fsdp_lab.spec.describe import describe_changes, describe_value
from fsdp_lab.spec.loops import Trained

FOLDER = Path(__file__).parent
SUFFIXES = (".html", ".htm")
BOKEH_JS = Path(bokeh.__file__).parent / "server/static/js/bokeh.min.js"  # 1.3 MB, most of a report
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

    Raises:
        ArgumentError: the path cannot be written, there are no runs, or there is no such baseline. It is raised first.
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
    note = " ".join(compared.fidelity())
    entries = list(zip(compared.rows, runs, strict=True))
    measured = [(i, row, run) for i, (row, run) in enumerate(entries) if not isinstance(run, Refusal)]
    charts = [*curves([Course.of(i, row, run) for i, row, run in measured], note), *bars(compared, note)]
    timelines = [chart for i, row, run in measured if (chart := timeline(i, row, run, note))][:MOST_TIMELINES]

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

    records = {
        "title": title,
        "written_unix_s": written_unix_s,
        "version": __version__,
        "baseline": compared.baseline,
        "records": compared.records(),
        "fastest": recommended.fastest,
        "smallest": recommended.smallest,
        "sentences": list(recommended.lines()),
    }
    blocks: dict[str, Any] = {"trim_blocks": True, "lstrip_blocks": True}
    jinja = Environment(loader=FileSystemLoader(FOLDER), undefined=StrictUndefined, autoescape=True, **blocks)
    jinja.filters.update(spread=split_spread, color=theme.rank_color, duration=duration, embedded=embedded)
    jinja.filters.update(field=_field, change=_change, spec_json=_spec_json, leaves=_leaves)
    return jinja.get_template("page.html.jinja").render(
        title=title,
        compared=compared,
        places={row.label: i for i, row in enumerate(compared.rows)},
        entries=entries,
        different=[f"{label} ({compared[label].name}) is {why}" for label, why in compared.differences.items()],
        environments=list(environments.values()),
        recommended=recommended,
        charts=charts,
        timelines=timelines,
        when=time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(written_unix_s)),
        version=__version__,
        css=(FOLDER / "page.css").read_text(encoding="utf-8"),
        js=(FOLDER / "page.js").read_text(encoding="utf-8"),
        bokeh_js=BOKEH_JS.read_text(encoding="utf-8"),
        # Id of a script element -> the value embedded in it as JSON.
        data={"fsdp-lab-records": records, "fsdp-lab-theme": theme.tokens(), "fsdp-lab-plots": plots},
    )


def embedded(value: Any) -> str:
    """JSON that cannot end the script element around it, whatever text it contains."""
    text = json.dumps(finite(value), separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _field(value: Any) -> str:
    """The value of a field of a Spec."""
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
