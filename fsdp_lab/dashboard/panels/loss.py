"""Loss: the mean over all ranks, step by step. It goes on across a change of strategy; that is what to look for.

Where the run is evaluated, the mean loss of held-out samples is a point at its step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from bokeh.models.ui import UIElement

from fsdp_lab.core.formatting import figures
from fsdp_lab.dashboard.columns import Columns
from fsdp_lab.dashboard.panels.base import LINE_PX, Captions, Key, Patches, StepAxis, hover, tint, twin
from fsdp_lab.dashboard.panels.ranges import SpanRange
from fsdp_lab.runs.evaluation import in_words
from fsdp_lab.runs.steps import Step

POINT_PX = 7


class LossPanel:
    """Mean loss of all ranks over steps."""

    name = "loss"
    title = "Loss"
    wide = False

    def __init__(self, frame: StepAxis, world_size: int) -> None:
        self._frame = frame
        self._table = Columns(
            "loss.steps", ["step", "loss", "grad_norm", "eval_loss"], texts=["evaluation"], limit=frame.limit
        )
        self._evaluated = ""  # the last evaluation, in words
        self._range = SpanRange()
        self._captions = Captions()
        fig = frame.plot("loss", "loss (nats per token)")
        frame.overlays.draw(fig, "loss")
        line = fig.line("step", "loss", source=twin(self._table), line_width=LINE_PX)
        tint(line.glyph, line_color="ink.mean")
        hover(fig, line, [("step", "@step"), ("loss", "@loss{0.0000}"), ("gradient norm", "@grad_norm{0.000}")])
        points = fig.scatter(
            "step", "eval_loss", source=line.data_source, marker="circle", size=POINT_PX, line_width=LINE_PX
        )
        tint(points.glyph, line_color="ink.peak", fill_color="ink.gap")
        hover(fig, points, [("step", "@step"), ("held-out loss", "@evaluation")])
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
        losses = [s.eval_loss for s in steps]
        words = ["" if loss is None else in_words(loss, language=self._frame.language) for loss in losses]
        for s, said in zip(steps, words, strict=True):
            self._evaluated = f"Held-out loss {said} at step {s.number:,}. " if said else self._evaluated
        rows = [
            [s.number, s.mean_loss, s.events[0].grad_norm, math.nan if loss is None else loss]
            for s, loss in zip(steps, losses, strict=True)
        ]
        last = steps[-1]
        loss = last.mean_loss
        reading = (
            f"{loss:.4f} at step {last.number:,}" if math.isfinite(loss) else f"not finite at step {last.number:,}"
        )
        norm = figures(last.events[0].grad_norm)
        self._captions = Captions(
            reading=reading,
            legend=(Key(label="mean of all ranks", token="ink.mean", hatch="line"),
                    *([Key(label="held-out samples", token="ink.peak")] if self._evaluated else [])),
            note=f"Gradient norm {norm}. {self._evaluated}".strip(),
        )  # fmt: skip
        written = self._table.append(rows, {"evaluation": words})
        self.cover()
        return written

    def cover(self) -> None:
        shown = [self._table.column("loss"), self._table.column("eval_loss"), self._frame.others("loss")]
        self._range.cover(np.concatenate(shown))

    def patches(self) -> Patches:
        return {"loss.y": {"start": self._range.start, "end": self._range.end}}

    def captions(self) -> Captions:
        return replace(self._captions, legend=(*self._captions.legend, *self._frame.other_keys()))
