"""`write_report`: runs side by side in one HTML file, which needs no network when it is opened."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import bokeh
from bokeh.document import Document

from fsdp_lab.core import __version__
from fsdp_lab.core.describe import describe_value
from fsdp_lab.core.errors import ArgumentError
from fsdp_lab.core.files import check_file, write_whole
from fsdp_lab.dashboard import theme
from fsdp_lab.report.charts import Chart, Course, bars, curves, timeline
from fsdp_lab.report.page import page
from fsdp_lab.runs.comparison import Comparison, Refusal
from fsdp_lab.runs.recommendation import Recommendation, recommend
from fsdp_lab.runs.view import RunView

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
    text = render(compared, runs, recommend(compared, limit_bytes), title or _title(compared), time.time())
    return write_whole(file, text.encode())


def render(
    compared: Comparison,
    runs: Sequence[RunView | Refusal],
    recommended: Recommendation,
    title: str,
    written_unix_s: float,
) -> str:
    """The file's content."""
    note = " ".join(compared.fidelity())
    places = enumerate(zip(compared.rows, runs, strict=True))
    measured = [(i, row, run) for i, (row, run) in places if not isinstance(run, Refusal)]
    charts = [*curves([Course.of(i, row, run) for i, row, run in measured], note), *bars(compared, note)]
    timelines = [chart for i, row, run in measured if (chart := timeline(i, row, run, note))][:MOST_TIMELINES]
    data = {
        "fsdp-lab-records": {
            "title": title,
            "written_unix_s": written_unix_s,
            "version": __version__,
            "baseline": compared.baseline,
            "records": compared.records(),
            "fastest": recommended.fastest,
            "smallest": recommended.smallest,
            "sentences": list(recommended.lines()),
        },
        "fsdp-lab-theme": theme.tokens(),
        "fsdp-lab-plots": _document([*charts, *timelines]),
    }
    return page(title, compared, runs, recommended, written_unix_s, charts=charts, timelines=timelines,
                bokeh_js=BOKEH_JS.read_text(encoding="utf-8"), data=data)  # fmt: skip


def _document(charts: Sequence[Chart]) -> dict[str, Any]:
    """The charts as one Bokeh document, so that their axes of steps move together."""
    drawn = {chart.name: chart.root for chart in charts if chart.root is not None}
    document = Document()
    with document.models.freeze():  # otherwise each root makes it collect all models again
        for root in drawn.values():
            document.add_root(root)
    return {"document": document.to_json(deferred=False), "roots": {name: root.id for name, root in drawn.items()}}


def _title(compared: Comparison) -> str:
    models = dict.fromkeys(describe_value("model", row.flat["model"]) for row in compared.rows)
    return f"fsdp_lab: {', '.join(models)}, {len(compared)} run{'s' if len(compared) != 1 else ''}"
