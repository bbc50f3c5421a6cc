"""`Overlays`: curves of other runs, under those of the live one in every time plot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from bokeh.models import ColumnDataSource
from bokeh.plotting import figure

from fsdp_lab.dashboard import theme
from fsdp_lab.dashboard.columns import Columns, Numbers

# A row of a curve: rates and exposed communication smoothed, peaks in MiB by rank.
CURVE = ("step", "loss", "tokens_per_s", "tflops", "exposed_ms", *(f"peak_{i}" for i in range(theme.MOST_LINES)))


@dataclass(frozen=True, kw_only=True, eq=False)
class Overlay:
    """A curve and what it goes by: rows in the order of `CURVE`."""

    label: str
    rows: Numbers


class Overlays:
    """A table for each of the places that the palette has; what is not taken is empty, and not drawn.

    All plots read the same tables, so that a curve crosses to the page once.
    """

    def __init__(self, limit: int) -> None:
        self.tables = [Columns(f"overlay.{i}", CURVE, limit=limit) for i in range(len(theme.PINS))]
        self._sources = [ColumnDataSource({c: [] for c in CURVE}, name=table.name) for table in self.tables]
        self._shown: dict[int, Overlay] = {}
        self._lines: list[tuple[int, str]] = []  # place, name of the renderer

    @property
    def labels(self) -> dict[int, str]:
        """Place -> label, of what is shown."""
        return {place: shown.label for place, shown in sorted(self._shown.items())}

    def draw(self, fig: figure, column: str, *, name: str = "", seam: bool = False, **on: Any) -> None:
        """A line for each place, over what is drawn already; with a seam where that may be as dark as the line."""
        for place, source in enumerate(self._sources):
            fill = list(theme.PINS.values())[place]
            if seam:
                under = f"{name or fig.name}.seam.{place}"
                gap = fig.line(
                    "step", column, source=source, line_width=4, line_alpha=0.75, visible=False, name=under, **on
                )
                gap.glyph.tags = [{"tint": {"line_color": "ink.gap"}}]
                self._lines.append((place, under))
            named = f"{name or fig.name}.overlay.{place}"
            line = fig.line("step", column, source=source, line_width=1.5, line_dash=theme.PIN_DASHES[place],
                            line_color=fill.light, visible=False, name=named, **on)  # fmt: skip
            line.glyph.tags = [{"tint": {"line_color": f"pin.{place}"}}]
            self._lines.append((place, named))

    def show(self, overlays: Mapping[int, Overlay]) -> bool:
        """These and no others; returns whether that changes anything."""
        before, self._shown = self._shown, dict(overlays)
        for place, table in enumerate(self.tables):
            now = overlays.get(place)
            if now is not before.get(place):
                table.replace(now.rows.tolist() if now is not None else [])
        return before != self._shown

    def within(self, column: str, start: float, end: float) -> Numbers:
        """Their values at the steps from `start` to `end`."""
        at = CURVE.index(column)
        parts = [o.rows[(o.rows[:, 0] >= start) & (o.rows[:, 0] <= end), at] for o in self._shown.values()]
        return np.concatenate([*parts, np.empty(0)])

    def patches(self) -> dict[str, dict[str, Any]]:
        return {name: {"visible": place in self._shown} for place, name in self._lines}
