"""Loss: the mean over all ranks, step by step. It goes on across a change of strategy; that is what to look for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from bokeh.models.ui import UIElement

from ..columns import Columns
from .base import LINE_PX, Captions, Frame, Key, Patches, Step, hover, notes_of, tint, twin
from .ranges import SpanRange
from .units import figures


class LossPanel:
    """Mean loss of all ranks over steps."""

    name = "loss"
    title = "Loss"
    wide = False

    def __init__(self, frame: Frame, world_size: int) -> None:
        self._frame = frame
        self._table = Columns("loss.steps", ["step", "loss", "grad_norm"], limit=frame.limit)
        self._range = SpanRange()
        self._captions = Captions()
        fig = frame.plot("loss", "loss (nats per token)")
        frame.overlays.draw(fig, "loss")
        line = fig.line("step", "loss", source=twin(self._table), line_width=LINE_PX)
        tint(line.glyph, line_color="ink.mean")
        hover(fig, line, [("step", "@step"), ("loss", "@loss{0.0000}"), ("gradient norm", "@grad_norm{0.000}")])
        frame.label_markers(fig)
        self._fig = fig

    @property
    def sources(self) -> Sequence[Columns]:
        return (self._table,)

    @property
    def root(self) -> UIElement:
        return self._fig

    def update(self, steps: Sequence[Step]) -> int:
        if not steps:
            return 0
        rows = [[s.number, s.events[0].mean_loss, s.events[0].grad_norm] for s in steps]
        last = steps[-1]
        loss = last.events[0].mean_loss
        reading = (
            f"{loss:.4f} at step {last.number:,}" if math.isfinite(loss) else f"not finite at step {last.number:,}"
        )
        norm = figures(last.events[0].grad_norm)
        self._captions = Captions(
            reading=reading,
            legend=(Key(label="mean of all ranks", token="ink.mean", hatch="line"),),
            note=f"Gradient norm {norm}. {notes_of(steps)}".strip(),
        )
        written = self._table.append(rows)
        self.cover()
        return written

    def cover(self) -> None:
        self._range.cover(np.concatenate([self._table.column("loss"), self._frame.others("loss")]))

    def patches(self) -> Patches:
        return {"loss.y": {"start": self._range.start, "end": self._range.end}}

    def captions(self) -> Captions:
        return replace(self._captions, legend=(*self._captions.legend, *self._frame.other_keys()))
