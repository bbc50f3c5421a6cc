"""A Bokeh figure of your own, shown as the dashboard shows its: without the network, in a notebook that stays small."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bokeh.models import Plot

from fsdp_lab.dashboard.columns import Columns
from fsdp_lab.dashboard.live import LiveView, Scene
from fsdp_lab.dashboard.panels.base import Captions
from fsdp_lab.dashboard.panels.drawing import tint


def picture(figure: Plot, title: str = "") -> LiveView:
    """The figure as the last expression of a cell. It takes the page's theme: its background becomes transparent."""
    figure.background_fill_alpha = figure.border_fill_alpha = 0
    figure.outline_line_alpha = 0
    figure.sizing_mode = "stretch_width"
    for legend in figure.legend:
        legend.background_fill_alpha = legend.border_line_alpha = 0
        tint(legend, label_text_color="ink.mean")
    view = LiveView()
    view.show(Scene(cards=(StaticView(title=title, root=figure),)))
    return view


@dataclass(frozen=True, kw_only=True)
class StaticView:
    """A card whose picture does not change."""

    title: str
    root: Plot
    name: str = "picture"
    wide: bool = True

    @property
    def sources(self) -> Sequence[Columns]:
        return ()

    def patches(self) -> Mapping[str, Mapping[str, Any]]:
        return {}

    def captions(self) -> Captions:
        return Captions()
