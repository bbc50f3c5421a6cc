"""`WhatIfCard`: a panel of the what-if page. It shows the last answer that it was given."""

from __future__ import annotations

from collections.abc import Sequence

from bokeh.models import Range1d
from bokeh.models.ui import UIElement
from bokeh.plotting import figure

from fsdp_lab.dashboard.columns import Columns
from fsdp_lab.dashboard.panels.base import Captions, Patches, plain_figure
from fsdp_lab.planner.plan import Plan

BAR_PX = 118


class WhatIfCard:
    """Words and a table alone, until a card says what it draws (`root`) and from what (`sources`)."""

    name: str
    title: str
    wide = False
    sources: Sequence[Columns] = ()
    root: UIElement | None = None

    def __init__(self, captions: Captions | None = None) -> None:
        self._captions = captions or Captions()

    def patches(self) -> Patches:
        return {}

    def captions(self) -> Captions:
        return self._captions


def bar_figure(name: str, x_label: str) -> figure:
    """A low picture of horizontal bars; its x range is called `<name>.x`, its axis `<name>.axis`."""
    fig = plain_figure(
        name, "", x_range=Range1d(start=0, end=1, name=f"{name}.x"), y_range=Range1d(start=0.85, end=-0.45)
    )
    fig.height = BAR_PX
    fig.yaxis.visible = fig.ygrid.visible = False
    fig.xaxis.name, fig.xaxis.axis_label = f"{name}.axis", x_label
    return fig


def taken_bytes(p: Plan) -> int:
    """Memory taken on a GPU, with the allocator's slack and the context."""
    return p.machine.device.memory_bytes - p.margin_bytes
