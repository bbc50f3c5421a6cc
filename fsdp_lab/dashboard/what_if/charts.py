"""The pictures of an answer: the memory of a GPU, the time of a step, and scaling with the number of GPUs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np
from bokeh.models import FixedTicker, NumeralTickFormatter, Range1d
from bokeh.models.annotations import Span
from bokeh.plotting import figure

from fsdp_lab.core.events import Role
from fsdp_lab.core.formatting import GIB, MIB, count, duration, size
from fsdp_lab.dashboard import theme
from fsdp_lab.dashboard.columns import Columns
from fsdp_lab.dashboard.panels.axis import FINE, ZeroRange
from fsdp_lab.dashboard.panels.base import HOLLOW, BaseCard, Captions, Key, Patches
from fsdp_lab.dashboard.panels.drawing import (
    ON_DEVICE,
    class_tokens,
    fill_key,
    hover,
    hover_bars,
    label_ends,
    paint_stack,
    plain_figure,
    tint,
    twin,
    unit_name,
)
from fsdp_lab.dashboard.what_if.question import Answer
from fsdp_lab.dashboard.what_if.tables import limiting_factor, percent, taken_bytes, verdict
from fsdp_lab.planner.bands import Band
from fsdp_lab.planner.plan import Plan, band_text

BAR_PX, SCALING_PX = 118, 232
MOST_GPUS = 4096
NOT_FITTING = "#D55E00"
UPPER, LOWER = 0.62, 0.2  # heights of the bars in a picture of two
LOWER_Y = 0.55  # where the lower bar is

# Column -> token, label.
PARTS: Mapping[str, tuple[str, str]] = {
    "computing": ("timeline.backward", "computing"),
    "slowed": ("timeline.forward", "slowed by sending"),
    "exposed": ("timeline.waiting", "exposed communication"),
    "host": ("timeline.host_copy", "waiting for the host"),
    "optimizer": ("timeline.optimizer", "optimizer"),
    "rest": ("timeline.compute", "the loop"),
}
KINDS = {
    kind: (f"communication.{kind}", theme.COMMUNICATION[kind].label)
    for kind in ("all_gather", "reduce_scatter", "all_reduce")
}


def bar_figure(name: str, x_label: str) -> figure:
    """A low picture of horizontal bars; its x range is called `<name>.x`, its axis `<name>.axis`."""
    fig = plain_figure(
        name, "", x_range=Range1d(start=0, end=1, name=f"{name}.x"), y_range=Range1d(start=0.85, end=-0.45)
    )
    fig.height = BAR_PX
    fig.yaxis.visible = fig.ygrid.visible = False
    fig.xaxis.name, fig.xaxis.axis_label = f"{name}.axis", x_label
    return fig


class MemoryCard(BaseCard):
    """The memory of a GPU at its peak, by class, beside its capacity; below it the peak of the previous answer."""

    name = "need"
    title = "Memory of a GPU"

    def __init__(self) -> None:
        super().__init__()
        self._now = Columns("need.now", ["y", *ON_DEVICE, "slack", "end"], texts=["label"], limit=1)
        self._before = Columns("need.before", ["y", *ON_DEVICE, "end"], texts=["label"], limit=1)
        self._range = ZeroRange(headroom=1.22, slack=0.5, steps=FINE)
        self._limit, self._unit = 1.0, GIB
        self._plan: Plan | None = None
        self.sources = (self._now, self._before)
        self.root = self._draw()

    def _draw(self) -> figure:
        fig = bar_figure("need", "GiB at the peak of a step")
        now, before = twin(self._now), twin(self._before)
        classes = list(ON_DEVICE)
        paint_stack(fig.hbar_stack(classes, y="y", height=UPPER, source=now), class_tokens())
        rest = fig.hbar(
            y="y", left="end", right="slack", height=UPPER, source=now, fill_alpha=0, line_width=1.2, line_dash="3 2"
        )
        tint(rest.glyph, line_color="ink.marker")
        paint_stack(fig.hbar_stack(classes, y="y", height=LOWER, source=before), class_tokens(), alpha=0.5)
        label_ends(fig, now, x="slack")
        label_ends(fig, before, token="ink.marker")
        rows = [(theme.MEMORY[c].label, f"@{c}{{0,0.00}}") for c in ON_DEVICE]
        rows += [("at the peak", "@end{0,0.00}"), ("with slack and context", "@slack{0,0.00}")]
        hover_bars(fig, now, rows, right="slack", height=0.7)
        limit = Span(name="need.limit", location=0, dimension="height", line_dash="6 4", line_width=2)
        tint(limit, line_color="ink.peak")
        fig.add_layout(limit)
        return fig

    def show(self, answer: Answer) -> None:
        p, before = answer.plan, self._plan
        if before is not None and before.memory != p.memory:
            row = [LOWER_Y, *self._scaled(before), before.memory.peak_bytes / self._unit]
            self._before.replace([row], {"label": [f"before: {size(taken_bytes(before))}"]})
        if before is None or before.memory != p.memory or before.machine.device != p.machine.device:
            self._write_now(p)
        self._plan = p

    def _write_now(self, p: Plan) -> None:
        device, peak_bytes, taken = p.machine.device.memory_bytes, p.memory.peak_bytes, taken_bytes(p)
        unit = MIB if max(device, taken) < GIB else GIB
        if unit != self._unit:
            self._before.clear()
        self._unit, self._limit = unit, device / unit
        self._now.replace([[0.0, *self._scaled(p), taken / unit, peak_bytes / unit]], {"label": [size(taken)]})
        self._range.cover(np.array([self._limit, taken / unit, *self._before.column("end")]))
        self._captions = Captions(
            reading=verdict(p), legend=_memory_keys(p, taken - peak_bytes), note=_peak_sentence(p)
        )

    def _scaled(self, p: Plan) -> list[float]:
        return [p.memory.at_peak.of_role(Role(c)) / self._unit for c in ON_DEVICE]

    def patches(self) -> Patches:
        return {
            "need.x": {"start": 0.0, "end": self._range.end},
            "need.limit": {"location": self._limit},
            "need.axis": {"axis_label": f"{unit_name(self._unit)} at the peak of a step"},
        }


def _memory_keys(p: Plan, rest_bytes: int) -> tuple[Key, ...]:
    parts = {c: p.memory.at_peak.of_role(Role(c)) for c in ON_DEVICE}
    return (
        *(fill_key(f"memory.{c}", f"{theme.MEMORY[c].label} {size(b)}") for c, b in parts.items() if b),
        Key(label=f"allocator's slack and CUDA context {size(rest_bytes)}", token="ink.marker", hatch=HOLLOW),
        Key(label="memory of a GPU", token="ink.peak", hatch="dashes"),
    )


def _peak_sentence(p: Plan) -> str:
    m = p.memory
    host = f" {size(m.host_bytes)} on the host, of each rank." if m.host_bytes else ""
    return f"The peak is in the {m.peak_phase}, at {m.peak_unit}; {size(m.held.total_bytes)} stay between steps.{host}"


class StepCard(BaseCard):
    """Where the time of a step goes, and below it what the collectives take by themselves."""

    name = "step"
    title = "A step"

    def __init__(self) -> None:
        super().__init__()
        self._time = Columns("step.time", ["y", *PARTS, "end", "low", "high"], texts=["label"], limit=1)
        self._sent = Columns("step.sent", ["y", *KINDS, "end"], texts=["label"], limit=1)
        self._range = ZeroRange(headroom=1.22, slack=0.5, steps=FINE)
        self._unit_s = 1e-3
        self.sources = (self._time, self._sent)
        self.root = self._draw()

    def _draw(self) -> figure:
        fig = bar_figure("step", "ms")
        times, sent = twin(self._time), twin(self._sent)
        for source, parts, height, token, end in (
            (times, PARTS, UPPER, "ink.peak", "high"),
            (sent, KINDS, LOWER, "ink.marker", "end"),
        ):
            bars = fig.hbar_stack(list(parts), y="y", height=height, source=source)
            paint_stack(bars, [fill for fill, _ in parts.values()])
            label_ends(fig, source, token=token, x=end)
            hover_bars(
                fig, source, [(label, f"@{name}{{0,0.00}}") for name, (_, label) in parts.items()], height=height
            )
        band = fig.segment(x0="low", x1="high", y0="y", y1="y", source=times, line_width=2)
        tint(band.glyph, line_color="ink.peak")
        return fig

    def show(self, answer: Answer) -> None:
        p = answer.plan
        step, whole_s = p.step, p.step_time_s
        self._unit_s = 1.0 if whole_s >= 1 else 1e-3
        known = (step.computing_s, step.slowed_s, step.exposed_comm_s, step.host_s, step.optimizer_s)
        band = p.step_time_band_s()
        parts = [*known, max(0.0, whole_s - sum(known))]
        sent = [p.comm_s.get(kind, 0.0) for kind in KINDS]
        sent_s = sum(sent)
        row = [0.0, *(s / self._unit_s for s in (*parts, whole_s, band.low, band.high))]
        self._time.replace([row], {"label": [duration(whole_s)]})
        label = f"sent: {duration(sent_s)}" if sent_s else ""
        self._sent.replace([[LOWER_Y, *(s / self._unit_s for s in (*sent, sent_s))]], {"label": [label]})
        self._range.cover(np.array([band.high, sent_s]) / self._unit_s)
        keys = [
            *zip(PARTS.values(), parts, strict=True),
            *((kind, s) for kind, s in zip(KINDS.values(), sent, strict=True) if s),
        ]
        keys = [(kind, s) for kind, s in keys if s]
        overlap = "nothing is sent"
        if sent_s:
            hidden = max(0.0, 1 - step.exposed_comm_s / sent_s)
            overlap = f"{percent(hidden)} of the communication is hidden"
        self._captions = Captions(
            reading=f"{duration(whole_s)}, 8 times in 10 {band_text(p)}; {overlap}",
            legend=(
                *(fill_key(token, f"{label} {duration(s)}") for (token, label), s in keys),
                Key(label="8 times in 10", token="ink.peak", hatch="line"),
            ),
            note="Below: what the collectives take by themselves.",
        )

    def patches(self) -> Patches:
        unit = "s" if self._unit_s == 1.0 else "ms"
        return {"step.x": {"start": 0.0, "end": self._range.end}, "step.axis": {"axis_label": f"{unit} of one step"}}


class ScalingCard(BaseCard):
    """MFU over the number of GPUs, with the same work for each; where it does not fit, and where the question is."""

    name = "scaling"
    title = "Scaling"
    wide = True

    def __init__(self) -> None:
        super().__init__()
        figures = ["gpus", "mfu", "fitting", "step_ms", "tokens_per_s", "tflops", "gib", "low", "high"]
        self._points = Columns("scaling.points", figures, texts=["fits"], limit=64)
        self._not_fitting = Columns("scaling.lacking", ["gpus", "mfu"], limit=64)
        self._asked = Columns("scaling.here", ["gpus", "mfu"], texts=["label"], limit=1)
        self._range = ZeroRange(headroom=1.2, slack=0.5)
        self._most_gpus = MOST_GPUS
        self.sources = (self._points, self._not_fitting, self._asked)
        self.root = self._draw()

    def _draw(self) -> figure:
        fig = plain_figure("scaling", "MFU, %", x_range=Range1d(start=0.8, end=1.3 * MOST_GPUS, name="scaling.x"),
                           y_range=Range1d(start=0, end=60, name="scaling.y"), x_axis_type="log")  # fmt: skip
        fig.height = SCALING_PX
        fig.xaxis.axis_label = "GPUs, each with the same work (log scale)"
        fig.xaxis.ticker = FixedTicker(ticks=[1 << i for i in range(18)])
        fig.xaxis.formatter = NumeralTickFormatter(format="0,0")
        fig.xgrid.visible = False
        points = twin(self._points)
        band = fig.varea("gpus", "low", "high", source=points, fill_alpha=0.4)
        tint(band.glyph, fill_color="ink.band")
        dim = fig.line("gpus", "mfu", source=points, line_width=1.5, line_dash="4 3")
        tint(dim.glyph, line_color="ink.faint")
        line = fig.line("gpus", "fitting", source=points, line_width=2)
        tint(line.glyph, line_color="ink.mean")
        dots = fig.scatter("gpus", "fitting", source=points, size=7, line_alpha=0)
        tint(dots.glyph, fill_color="ink.mean")
        crosses = twin(self._not_fitting)
        fig.scatter("gpus", "mfu", source=crosses, size=9, marker="x", line_width=2, line_color=NOT_FITTING)
        asked = twin(self._asked)
        ring = fig.scatter(
            "gpus", "mfu", source=asked, size=16, fill_alpha=0, line_width=2.5, line_color=theme.RANKS[0]
        )
        ring.level = "overlay"
        text = fig.text(
            x="gpus", y="mfu", text="label", y_offset=-14, text_align="center", text_baseline="bottom",
            text_font_size="11px", source=asked,
        )  # fmt: skip
        tint(text.glyph, text_color="ink.peak")
        every = fig.scatter("gpus", "mfu", source=points, size=12, fill_alpha=0, line_alpha=0)
        hover(fig, every, [("GPUs", "@gpus{0,0}"), ("", "@fits"), ("MFU", "@mfu{0.0} %"),
                           ("8 times in 10", "@low{0.0} to @high{0.0} %"), ("step", "@step_ms{0,0} ms"),
                           ("tokens/s", "@tokens_per_s{0,0}"), ("TFLOPS per GPU", "@tflops{0,0}"),
                           ("memory", "@gib{0,0.0} GiB")])  # fmt: skip
        return fig

    def show(self, answer: Answer) -> None:
        """Draws an answer with a curve; until there is one, the former picture stays."""
        if not answer.along:
            return
        plans, asked = answer.along, answer.plan
        self._points.replace([_point(p) for p in plans], {"fits": ["fits" if p.fits else verdict(p) for p in plans]})
        self._not_fitting.replace([[p.machine.ranks, 100 * p.mfu] for p in plans if not p.fits])
        label = f"{asked.machine.ranks:,} GPUs: {percent(asked.mfu)}, {count(asked.tokens_per_s)} tokens/s"
        self._asked.replace([[asked.machine.ranks, 100 * asked.mfu]], {"label": [label]})
        self._range.cover(np.array([_mfu_band(p).high for p in (*plans, asked)]))
        self._most_gpus = max(MOST_GPUS, asked.machine.ranks)
        keys = [
            Key(label="fits", token="ink.mean", hatch="line"),
            Key(label="8 times in 10", token="ink.band"),
            Key(label="asked", color=theme.RANKS[0]),
        ]
        if not all(p.fits for p in plans):
            keys.append(Key(label="does not fit", color=NOT_FITTING))
        self._captions = Captions(reading=limiting_factor(answer), legend=tuple(keys), note=_fits_from(plans))

    def patches(self) -> Patches:
        return {
            "scaling.y": {"start": 0.0, "end": self._range.end},
            "scaling.x": {"start": 0.8, "end": 1.3 * self._most_gpus},
        }


def _point(p: Plan) -> list[float]:
    return [
        p.machine.ranks, 100 * p.mfu, 100 * p.mfu if p.fits else math.nan, 1e3 * p.step_time_s, p.tokens_per_s,
        p.flops_per_s / 1e12, taken_bytes(p) / GIB, *dataclasses.astuple(_mfu_band(p)),
    ]  # fmt: skip


def _mfu_band(p: Plan) -> Band:
    """In percent."""
    return p.step_time_band_s().inverse(100 * p.mfu * p.step_time_s)


def _fits_from(plans: Sequence[Plan]) -> str:
    """From how many GPUs on it fits; empty where it fits on any number."""
    first = next((p for p in plans if p.fits), None)
    if first is None:
        return f"It fits on no number of GPUs up to {MOST_GPUS:,}."
    return "" if first is plans[0] else f"It fits from {first.machine.ranks:,} GPUs on."
