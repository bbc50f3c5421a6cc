"""A panel of the dashboard as a still picture: its sources filled, its patches applied."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bokeh.models import ColumnDataSource, Model

from fsdp_lab.dashboard.panels.base import Panel, StepAxis
from fsdp_lab.dashboard.panels.timeline import TimelinePanel
from fsdp_lab.report.charts import Chart
from fsdp_lab.runs.comparison import Row
from fsdp_lab.runs.view import RunView


def timeline(place: int, row: Row, run: RunView, note: str) -> Chart | None:
    """What every rank did in the newest traced step; None where none is kept."""
    step = run.events.newest_traced()
    if step is None:
        return None
    panel = TimelinePanel(StepAxis(), step.world_size)
    panel.update([step])
    freeze(panel)
    said = panel.captions()
    return Chart(
        name=f"timeline{place}",
        title=f"{row.label} {row.name}",
        root=panel.root,
        described=f"Timeline of run {row.label}, a lane for each rank: {said.reading}.",
        reading=said.reading,
        legend=said.legend,
        note=said.note or note,
        wide=True,
    )


def freeze(panel: Panel) -> None:
    """Writes what the live view would send into the models themselves."""
    models: list[Model] = sorted(panel.root.references(), key=lambda m: m.id) if panel.root is not None else []
    columns, patches = {c.name: c for c in panel.sources}, panel.patches()
    for m in models:
        if isinstance(m, ColumnDataSource) and m.name in columns:
            block = columns[m.name].all()
            m.data = {**dict(zip(columns[m.name].numbers, block.numbers, strict=True)), **block.texts}
        for name, value in patches.get(m.name or "", {}).items():
            setattr(m, name, _plain(value))


def _plain(value: Any) -> Any:
    """A mapping whose keys are no strings, out of the form in which it goes to the page."""
    if isinstance(value, Mapping) and value.get("type") == "map":
        return dict(value["entries"])
    return value
