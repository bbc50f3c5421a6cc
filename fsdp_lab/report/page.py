"""The page of a report: the template is page.html.jinja, its values and filters are here."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from fsdp_lab.core import __version__
from fsdp_lab.core.describe import describe_changes, describe_value
from fsdp_lab.core.formatting import duration
from fsdp_lab.core.loops import Trained
from fsdp_lab.dashboard import theme
from fsdp_lab.report.charts import Chart
from fsdp_lab.runs.comparison import Comparison, Refusal, finite, split_spread
from fsdp_lab.runs.recommendation import Recommendation
from fsdp_lab.runs.view import RunView, Switch

FOLDER = Path(__file__).parent


def page(
    title: str,
    compared: Comparison,
    runs: Sequence[RunView | Refusal],
    recommended: Recommendation,
    written_unix_s: float,
    *,
    charts: Sequence[Chart],
    timelines: Sequence[Chart],
    bokeh_js: str,
    data: Mapping[str, Any],
) -> str:
    """The content of the file. `data`: id of a script element -> the value embedded in it as JSON."""
    environment = Environment(loader=FileSystemLoader(FOLDER), undefined=StrictUndefined, autoescape=True,
                              trim_blocks=True, lstrip_blocks=True)  # fmt: skip
    environment.filters.update(
        spread=split_spread, color=theme.rank_color, field=_field, change=_change,
        duration=duration, spec_json=_spec_json, leaves=_leaves, embedded=embedded,
    )  # fmt: skip
    return environment.get_template("page.html.jinja").render(
        title=title,
        compared=compared,
        places={row.label: i for i, row in enumerate(compared.rows)},
        entries=list(zip(compared.rows, runs, strict=True)),
        different=[f"{label} ({compared[label].name}) is {why}" for label, why in compared.differences.items()],
        environments=_environments(compared, runs),
        recommended=recommended,
        charts=charts,
        timelines=timelines,
        when=time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(written_unix_s)),
        version=__version__,
        css=(FOLDER / "page.css").read_text(encoding="utf-8"),
        js=(FOLDER / "page.js").read_text(encoding="utf-8"),
        bokeh_js=bokeh_js,
        data=data,
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
    return (
        describe_changes(switch.before.difference(switch.after)) or "resumed after a failure"
        if switch.before
        else "began"
    )


def _environments(compared: Comparison, runs: Sequence[RunView | Refusal]) -> list[tuple[Mapping[str, Any], list[str]]]:
    """Each environment once, with the labels of its runs."""
    labels: dict[str, tuple[Mapping[str, Any], list[str]]] = {}
    for row, run in zip(compared.rows, runs, strict=True):
        if not isinstance(run, Refusal) and run.environment:
            same = json.dumps(run.environment, sort_keys=True, default=str)
            labels.setdefault(same, (run.environment, []))[1].append(row.label)
    return list(labels.values())


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
