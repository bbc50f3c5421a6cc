"""Holdings: the ranges of the parameters that every rank holds at one moment of a step, as slow motion shows them."""

from collections.abc import Sequence
from typing import Any

from bokeh.models import FixedTicker, NoOverlap, Range1d
from bokeh.plotting import figure

from fsdp_lab.base.events import PhaseSnapshot
from fsdp_lab.base.formatting import count, size
from fsdp_lab.dashboard import theme
from fsdp_lab.dashboard.panels import draw
from fsdp_lab.dashboard.panels.base import BaseCard, Captions, Columns, Key, Patches
from fsdp_lab.runs.slow_motion import EMPTY, LIGHT, MOVING, SPLIT, ParameterAxis, StepMoment, short_names

MOST_RANKS = 16  # more are not drawn, for lack of room
ROWS_PX, LEAST_ROW_PX, MOST_ROW_PX = 400, 22, 56
AXIS_PX, SIDE_PX = 48, 190

BAR = (-0.42, 0.17)  # top and bottom of a parameter's bar, in ranks from its row
STRIP = (0.24, 0.40)  # of the strip of its gradient


class HoldingsPanel(BaseCard):
    """A row for each rank, in its colour. Strong: its own shard. Light: gathered now. Hatched: being communicated. The
    strip below shows the same of gradients; beside the rank is what it holds in elements and bytes. It is made for the ranks
    and parameters of a moment; `fits` says whether another moment has the same."""

    name = "slow"
    title = "Who holds what"
    wide = True

    def __init__(self, moment: StepMoment) -> None:
        super().__init__()
        self.world_size = len(moment.frames)
        self.ranks = min(self.world_size, MOST_RANKS)
        self._parameters = _identity(moment)
        self._axis = ParameterAxis.of(moment.frames[0].parameters)
        room = self.ranks * len(self._axis.bars)
        place = ["left", "right", "top", "bottom"]
        numbers, texts = ["rank", *place, "numel", "start", "stop"], ["name", "unit", "state", "gradient"]
        self._bars = Columns("slow.bars", numbers, texts=texts, limit=room)
        self._light, self._moving, self._own = (
            Columns(f"slow.{name}", place, texts=["color"], limit=2 * room) for name in ("light", "moving", "own")
        )
        self._now = Columns("slow.now", ["left", "right"], limit=1)
        self.sources = (self._bars, self._light, self._moving, self._own, self._now)
        self.root: figure = self._draw()
        self.update(moment)

    def fits(self, moment: StepMoment) -> bool:
        return _identity(moment) == self._parameters

    def _draw(self) -> figure:
        y_range = Range1d(start=self.ranks - 0.5, end=-0.5)
        fig = draw.plain_figure(
            "slow", "rank: elements, bytes", x_range=Range1d(start=-0.006, end=1.006), y_range=y_range
        )
        fig.height = AXIS_PX + self.ranks * max(LEAST_ROW_PX, min(MOST_ROW_PX, ROWS_PX // self.ranks))
        fig.xgrid.visible = fig.ygrid.visible = False
        fig.min_border_left = SIDE_PX  # as the numbers change, the picture stands still
        fig.yaxis.name = "slow.ranks"
        fig.yaxis.ticker = FixedTicker(ticks=list(range(self.ranks)))
        short = short_names(list(self._axis.units))
        labels = {(left + right) / 2: short[unit] for unit, (left, right) in self._axis.units.items()}
        fig.xaxis.ticker = FixedTicker(ticks=list(labels))
        fig.xaxis.major_label_overrides = {x: name for x, name in labels.items()}  # noqa: C416 (dict is invariant)
        fig.xaxis.major_label_policy = NoOverlap(min_distance=4)
        fig.xaxis.axis_label = "units and their parameters, as wide as they have elements"
        look: dict[str, Any] = {"left": "left", "right": "right", "fill_alpha": 0.10, "line_width": 1.5}
        now = fig.quad(top=-0.5, bottom=self.ranks - 0.5, source=draw.twin(self._now), **look)
        draw.tint(now.glyph, fill_color="ink.band", line_color="ink.marker")
        base = draw.quads(fig, draw.twin(self._bars), fill_color=draw.NEUTRAL, fill_alpha=EMPTY, line_alpha=0)
        colored: dict[str, Any] = {"fill_color": "color", "line_alpha": 0}
        hatch: dict[str, Any] = {"hatch_pattern": "/", "hatch_color": "color", "hatch_scale": 6, "hatch_weight": 1.5}
        draw.quads(fig, draw.twin(self._light), fill_alpha=LIGHT, **colored)
        draw.quads(fig, draw.twin(self._moving), fill_alpha=MOVING, **colored, **hatch)
        draw.quads(fig, draw.twin(self._own), **colored)
        rows = [("rank", "@rank"), ("parameter", "@name"), ("unit", "@unit"), ("elements", "@numel{0,0}")]
        rows += [("its own shard", "@start{0,0} to @stop{0,0}"), ("now", "@state"), ("gradient", "@gradient")]
        draw.hover(fig, base, rows, mode="mouse")
        return fig

    def update(self, moment: StepMoment) -> None:
        self._moment = moment
        frames, units = moment.frames[: self.ranks], self._axis.units
        left, right = (0.0, 1.0) if moment.direction == "update" else units.get(moment.unit, (0.0, 0.0))
        self._now.replace([[left - 0.003, right + 0.003 - min(SPLIT, (right - left) / 4)]])
        self._captions = self._describe(moment)
        shown = [(f.rank, self._axis.bars[p.name], p) for f in frames for p in f.parameters]
        top, bottom = BAR
        rows = [[r, bar.left, bar.right, r + top, r + bottom, p.numel, p.start, p.stop] for r, bar, p in shown]
        self._bars.replace(rows, {name: [getattr(p, name) for _, _, p in shown] for name in self._bars.texts})
        self._write_states(frames)

    def _write_states(self, frames: Sequence[PhaseSnapshot]) -> None:
        """Draws parameters in the bar, gradients in the strip. A shard of a parameter is always held."""
        quads: dict[Columns, list[list[float]]] = {self._light: [], self._moving: [], self._own: []}
        colors: dict[Columns, list[str]] = {columns: [] for columns in quads}
        tables = {"unsharded": self._light, "gathering": self._moving, "reducing": self._moving}
        for rank, p in ((f.rank, p) for f in frames for p in f.parameters):
            bar = self._axis.bars[p.name]
            for state, (top, bottom), has_own in ((p.state, BAR, True), (p.gradient, STRIP, p.gradient == "sharded")):
                drawn = [(tables[state], (bar.left, bar.right))] if state in tables else []
                if has_own and p.start < p.stop:
                    drawn.append((self._own, bar.at(p.start, p.stop)))
                for columns, place in drawn:
                    quads[columns].append([*place, rank + top, rank + bottom])
                    colors[columns].append(theme.rank_color(rank))
        for columns, rows in quads.items():
            columns.replace(rows, {"color": colors[columns]})

    def patches(self) -> Patches:
        held = [f"{f.rank}: {count(self._moment.held_elements(f.rank))}, {size(self._moment.held_bytes(f.rank))}"
                for f in self._moment.frames[: self.ranks]]  # fmt: skip
        return {"slow.ranks": {"major_label_overrides": {"type": "map", "entries": [*map(list, enumerate(held))]}}}

    def _describe(self, moment: StepMoment) -> Captions:
        color = theme.rank_color(0)
        light, moving, empty = (round(255 * opacity) for opacity in (LIGHT, MOVING, EMPTY))
        legend = (
            Key(label="its own shard", color=color),
            Key(label="gathered now", color=f"{color}{light:02X}"),
            Key(label="being gathered or reduced", color=f"{color}{moving:02X}", hatch="/"),
            Key(label="not held", color=f"{draw.NEUTRAL}{empty:02X}"),
            Key(label="thin strip: the same for gradients", token="ink.mean", hatch="line"),
        )
        note = "" if self.ranks == self.world_size else f"The first {self.ranks} of {self.world_size} ranks."
        return Captions(reading=moment.caption, legend=legend, note=note)


def _identity(moment: StepMoment) -> tuple[object, ...]:
    return (len(moment.frames), tuple((p.name, p.unit, p.numel) for p in moment.frames[0].parameters))
