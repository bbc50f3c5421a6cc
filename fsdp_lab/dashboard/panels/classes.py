"""Classes of device memory, as panels show them: their order, their legend, the unit of their axis, the device's limit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from bokeh.models.annotations import Span

from fsdp_lab.core.events import Memory, Role
from fsdp_lab.core.formatting import GIB, MIB
from fsdp_lab.dashboard import theme
from fsdp_lab.dashboard.panels.base import LINE_PX, Key, tint

ON_DEVICE = tuple(name for name in theme.MEMORY if name in tuple(Role))  # in the order in which they are stacked


def sizes(m: Memory) -> tuple[int, ...]:
    """Bytes at the peak by class in the order of `ON_DEVICE`, then on the host, then of the peak."""
    return (*(m.at_peak.of_role(Role(c)) for c in ON_DEVICE), m.host_bytes, m.peak_bytes)


def class_keys(names: Sequence[str]) -> list[Key]:
    """The legend of classes."""
    return [Key(label=theme.MEMORY[c].label, token=f"memory.{c}", hatch=theme.MEMORY[c].hatch) for c in names]


def limit_line(name: str, dimension: Literal["height", "width"]) -> Span:
    """A line across a plot where the device's memory ends; not visible until a patch says where."""
    line = Span(name=name, location=0, dimension=dimension, line_dash="6 4", line_width=LINE_PX, visible=False)
    tint(line, line_color="ink.marker")
    return line


def unit_for(peak_bytes: float, unit: int) -> int:
    """MiB below 1 GiB, GiB above 4: between them what it was, so that the axis does not change back and forth."""
    if peak_bytes > 4 * GIB:
        return GIB
    return MIB if peak_bytes < GIB else unit
