"""The pictures of an answer: figures, memory of a GPU, a step, scaling, and what a search has found."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from bokeh.models import FixedTicker, NumeralTickFormatter, Range1d
from bokeh.models.annotations import Span
from bokeh.models.ui import UIElement
from bokeh.plotting import figure

from ...events import Role
from ...planner.plan import Plan
from ...planner.search import Search
from .. import theme
from ..columns import Columns
from ..panels.base import Captions, Cell, Key, Patches, hover, paint_fill, plain_figure, tint, twin
from ..panels.classes import ON_DEVICE
from ..panels.ghost import HOLLOW
from ..panels.ranges import FINE, ZeroRange
from ..panels.units import GIB, MIB, duration, memory, rate
from . import words
from .question import Answer, Question, base, choice

BAR_PX, PLOT_PX = 118, 232
MOST = 4096
LACKS = "#D55E00"


class AnswerCard:
    """The figures that a reader wants first, and what was assumed."""

    name = "answer"
    title = "Prediction"
    wide = True
    root = None
    sources: Sequence[Columns] = ()

    def __init__(self) -> None:
        self._captions = Captions(reading="is being worked out")

    def show(self, answer: Answer) -> None:
        p = answer.plan
        heads, figures = zip(*words.cells(p), strict=True)
        fits = Cell(text="fits" if p.fits else "does not fit", tone="good" if p.fits else "bad")
        self._captions = Captions(
            reading=f"It {words.verdict(p)}. {words.binding(answer)}",
            table=(("", *heads), (fits, *figures)),
            note=words.assumed(answer),
        )

    def patches(self) -> Patches:
        return {}

    def captions(self) -> Captions:
        return self._captions


class MemoryCard:
    """A GPU's memory at its fullest moment, by class, beside what it has; below it that of the answer before."""

    name = "need"
    title = "Memory of a GPU"
    wide = False

    def __init__(self) -> None:
        columns = [*ON_DEVICE, "slack", "end"]
        self._now = Columns("need.now", ["y", *columns], texts=["label"], limit=1)
        self._before = Columns("need.before", ["y", *ON_DEVICE, "end"], texts=["label"], limit=1)
        self._range = ZeroRange(headroom=1.22, slack=0.5, steps=FINE)
        self._limit, self._unit = 1.0, GIB
        self._captions = Captions()
        self._shown: Plan | None = None
        self._fig = self._draw()

    def _draw(self) -> figure:
        fig = bar_figure("need", "GiB at the peak of a step")
        now, before = twin(self._now), twin(self._before)
        self._stack(fig, now, [*ON_DEVICE], height=0.62, alpha=1.0)
        rest = fig.hbar(
            y="y", left="end", right="slack", height=0.62, source=now, fill_alpha=0, line_width=1.2, line_dash="3 2"
        )
        tint(rest.glyph, line_color="ink.marker")
        self._stack(fig, before, [*ON_DEVICE], height=0.2, alpha=0.5)
        for source, end, ink in ((now, "slack", "ink.peak"), (before, "end", "ink.marker")):
            text = fig.text(
                x=end, y="y", text="label", x_offset=7, text_baseline="middle", text_font_size="11px", source=source
            )
            tint(text.glyph, text_color=ink)
        whole = fig.hbar(y="y", left=0, right="slack", height=0.7, source=now, fill_alpha=0, line_alpha=0)
        rows = [(theme.MEMORY[c].label, f"@{c}{{0,0.00}}") for c in ON_DEVICE]
        hover(fig, whole, [*rows, ("at the peak", "@end{0,0.00}"), ("with slack and context", "@slack{0,0.00}")],
              mode="mouse")  # fmt: skip
        limit = Span(name="need.limit", location=0, dimension="height", line_dash="6 4", line_width=2)
        tint(limit, line_color="ink.peak")
        fig.add_layout(limit)
        return fig

    @staticmethod
    def _stack(fig: figure, source: Any, names: list[str], *, height: float, alpha: float) -> None:
        for name, bar in zip(names, fig.hbar_stack(names, y="y", height=height, source=source), strict=True):
            paint_fill(bar.glyph, f"memory.{name}", theme.MEMORY[name])
            bar.glyph.fill_alpha = bar.glyph.hatch_alpha = alpha

    @property
    def sources(self) -> Sequence[Columns]:
        return (self._now, self._before)

    @property
    def root(self) -> UIElement:
        return self._fig

    def show(self, answer: Answer) -> None:
        p, before = answer.plan, self._shown
        if before is not None and before.memory != p.memory:
            self._write_before(before)
        if before is None or before.memory != p.memory or before.machine.device != p.machine.device:
            self._write_now(p)
        self._shown = p

    def _write_now(self, p: Plan) -> None:
        device, m = p.machine.device.memory_bytes, p.memory
        taken = _taken(p)
        unit = MIB if max(device, taken) < GIB else GIB
        if unit != self._unit:
            self._before.clear()
        self._unit, self._limit = unit, device / unit
        self._now.replace([[0.0, *self._scaled(p), taken / unit, m.peak_bytes / unit]], {"label": [memory(taken)]})
        ends = [self._limit, taken / unit, *self._before.column("end")]
        self._range.cover(np.array(ends))
        self._captions = Captions(
            reading=words.verdict(p), legend=_memory_keys(p, taken - m.peak_bytes), note=_where(p)
        )

    def _write_before(self, p: Plan) -> None:
        row = [0.55, *self._scaled(p), p.memory.peak_bytes / self._unit]
        self._before.replace([row], {"label": [f"before: {memory(_taken(p))}"]})

    def _scaled(self, p: Plan) -> list[float]:
        return [p.memory.at_peak.of_role(Role(c)) / self._unit for c in ON_DEVICE]

    def patches(self) -> Patches:
        unit = "GiB" if self._unit == GIB else "MiB"
        return {
            "need.x": {"start": 0.0, "end": self._range.end},
            "need.limit": {"location": self._limit},
            "need.axis": {"axis_label": f"{unit} at the peak of a step"},
        }

    def captions(self) -> Captions:
        return self._captions


class StepCard:
    """Where a step's time goes, and below it what the collectives take by themselves."""

    name = "step"
    title = "A step"
    wide = False
    PARTS = ("computing", "slowed", "exposed", "optimizer", "rest")
    FILLS: Mapping[str, tuple[str, str]] = {  # token, label
        "computing": ("timeline.backward", "computing"),
        "slowed": ("timeline.forward", "slowed by sending"),
        "exposed": ("timeline.waiting", "exposed communication"),
        "optimizer": ("timeline.optimizer", "optimizer"),
        "rest": ("timeline.compute", "the loop and launching"),
    }
    KINDS = ("all_gather", "reduce_scatter", "all_reduce")

    def __init__(self) -> None:
        self._time = Columns("step.time", ["y", *self.PARTS, "end"], texts=["label"], limit=1)
        self._sent = Columns("step.sent", ["y", *self.KINDS, "end"], texts=["label"], limit=1)
        self._range = ZeroRange(headroom=1.22, slack=0.5, steps=FINE)
        self._captions = Captions()
        self._unit_s = 1e-3
        self._fig = self._draw()

    def _draw(self) -> figure:
        fig = bar_figure("step", "ms")
        for source, names, height in ((twin(self._time), self.PARTS, 0.62), (twin(self._sent), self.KINDS, 0.2)):
            for name, bar in zip(names, fig.hbar_stack(list(names), y="y", height=height, source=source), strict=True):
                paint_fill(bar.glyph, *self._fill(name))
            text = fig.text(
                x="end", y="y", text="label", x_offset=7, text_baseline="middle", text_font_size="11px", source=source
            )
            tint(text.glyph, text_color="ink.peak" if names is self.PARTS else "ink.marker")
            whole = fig.hbar(y="y", left=0, right="end", height=height, source=source, fill_alpha=0, line_alpha=0)
            labels = [self.FILLS[n][1] if n in self.FILLS else theme.COMMUNICATION[n].label for n in names]
            hover(
                fig, whole, [(label, f"@{n}{{0,0.00}}") for label, n in zip(labels, names, strict=True)], mode="mouse"
            )
        return fig

    def _fill(self, name: str) -> tuple[str, theme.Fill]:
        if name in self.KINDS:
            return f"communication.{name}", theme.COMMUNICATION[name]
        token = self.FILLS[name][0]
        return token, theme.COMPUTE[token.partition(".")[2]]

    @property
    def sources(self) -> Sequence[Columns]:
        return (self._time, self._sent)

    @property
    def root(self) -> UIElement:
        return self._fig

    def show(self, answer: Answer) -> None:
        p = answer.plan
        step, whole = p.step, p.step_time_s
        self._unit_s = 1.0 if whole >= 1 else 1e-3
        known = (step.computing_s, step.slowed_s, step.exposed_comm_s, step.optimizer_s)
        parts = [*known, max(0.0, whole - sum(known))]
        sent = [p.comm_s.get(kind, 0.0) for kind in self.KINDS]
        row = [0.0, *(s / self._unit_s for s in (*parts, whole))]
        self._time.replace([row], {"label": [duration(whole)]})
        label = f"sent: {duration(sum(sent))}" if sum(sent) else ""
        self._sent.replace([[0.55, *(s / self._unit_s for s in (*sent, sum(sent)))]], {"label": [label]})
        self._range.cover(np.array([whole, sum(sent)]) / self._unit_s)
        said = [
            Key(
                label=f"{self.FILLS[name][1]} {duration(s)}", token=self.FILLS[name][0], hatch=self._fill(name)[1].hatch
            )
            for name, s in zip(self.PARTS, parts, strict=True)
        ]
        said += [
            Key(label=f"{theme.COMMUNICATION[k].label} {duration(s)}", token=f"communication.{k}")
            for k, s in zip(self.KINDS, sent, strict=True) if s
        ]  # fmt: skip
        hidden = sum(sent) and 1 - step.exposed_comm_s / sum(sent)
        overlap = (
            f"{words.percent(max(0.0, hidden))} of the communication is hidden" if sum(sent) else "nothing is sent"
        )
        self._captions = Captions(reading=f"{duration(whole)}; {overlap}", legend=tuple(said),
                                  note="Below: what the collectives take by themselves.")  # fmt: skip

    def patches(self) -> Patches:
        unit = "s" if self._unit_s == 1.0 else "ms"
        return {"step.x": {"start": 0.0, "end": self._range.end}, "step.axis": {"axis_label": f"{unit} of one step"}}

    def captions(self) -> Captions:
        return self._captions


class ScalingCard:
    """MFU against GPUs, each with the same work; where it does not fit, and where the question is."""

    name = "scaling"
    title = "Scaling"
    wide = True

    def __init__(self) -> None:
        figures = ["gpus", "mfu", "fitting", "step_ms", "tokens_per_s", "tflops", "gib"]
        self._points = Columns("scaling.points", figures, texts=["fits"], limit=64)
        self._lacking = Columns("scaling.lacking", ["gpus", "mfu"], limit=64)
        self._here = Columns("scaling.here", ["gpus", "mfu"], texts=["label"], limit=1)
        self._range = ZeroRange(headroom=1.2, slack=0.5)
        self._most = MOST
        self._captions = Captions()
        self._fig = self._draw()

    def _draw(self) -> figure:
        fig = plain_figure("scaling", "MFU, %", x_range=Range1d(start=0.8, end=1.3 * MOST, name="scaling.x"),
                           y_range=Range1d(start=0, end=60, name="scaling.y"), x_axis_type="log")  # fmt: skip
        fig.height = PLOT_PX
        fig.xaxis.axis_label = "GPUs, each with the same work (log scale)"
        fig.xaxis.ticker = FixedTicker(ticks=[1 << i for i in range(18)])
        fig.xaxis.formatter = NumeralTickFormatter(format="0,0")
        fig.xgrid.visible = False
        points = twin(self._points)
        dim = fig.line("gpus", "mfu", source=points, line_width=1.5, line_dash="4 3")
        tint(dim.glyph, line_color="ink.faint")
        line = fig.line("gpus", "fitting", source=points, line_width=2)
        tint(line.glyph, line_color="ink.mean")
        dots = fig.scatter("gpus", "fitting", source=points, size=7, line_alpha=0)
        tint(dots.glyph, fill_color="ink.mean")
        fig.scatter("gpus", "mfu", source=twin(self._lacking), size=9, marker="x", line_width=2, line_color=LACKS)
        here = twin(self._here)
        ring = fig.scatter("gpus", "mfu", source=here, size=16, fill_alpha=0, line_width=2.5, line_color=theme.RANKS[0])
        ring.level = "overlay"
        text = fig.text(
            x="gpus", y="mfu", text="label", y_offset=-14, text_align="center", text_baseline="bottom",
            text_font_size="11px", source=here,
        )  # fmt: skip
        tint(text.glyph, text_color="ink.peak")
        every = fig.scatter("gpus", "mfu", source=points, size=12, fill_alpha=0, line_alpha=0)
        hover(fig, every, [("GPUs", "@gpus{0,0}"), ("", "@fits"), ("MFU", "@mfu{0.0} %"), ("step", "@step_ms{0,0} ms"),
                           ("tokens/s", "@tokens_per_s{0,0}"), ("TFLOPS per GPU", "@tflops{0,0}"),
                           ("memory", "@gib{0,0.0} GiB")])  # fmt: skip
        return fig

    @property
    def sources(self) -> Sequence[Columns]:
        return (self._points, self._lacking, self._here)

    @property
    def root(self) -> UIElement:
        return self._fig

    def show(self, answer: Answer) -> None:
        """Nothing before there is a curve: the former one stays until then."""
        if not answer.along:
            return
        plans, here = answer.along, answer.plan
        rows = [_point(p) for p in plans]
        fits = ["fits" if p.fits else words.verdict(p) for p in plans]
        self._points.replace(rows, {"fits": fits})
        self._lacking.replace([[p.machine.ranks, 100 * p.mfu] for p in plans if not p.fits])
        label = f"{here.machine.ranks:,} GPUs: {words.percent(here.mfu)}, {rate(here.tokens_per_s)} tokens/s"
        self._here.replace([[here.machine.ranks, 100 * here.mfu]], {"label": [label]})
        self._range.cover(np.array([100 * p.mfu for p in (*plans, here)]))
        self._most = max(MOST, here.machine.ranks)
        self._captions = Captions(reading=words.binding(answer), legend=self._keys(plans), note=_fitting(plans))

    @staticmethod
    def _keys(plans: Sequence[Plan]) -> tuple[Key, ...]:
        keys = [Key(label="fits", token="ink.mean", hatch="line"), Key(label="asked", color=theme.RANKS[0])]
        return (*keys, *([Key(label="does not fit", color=LACKS)] if not all(p.fits for p in plans) else []))

    def patches(self) -> Patches:
        return {
            "scaling.y": {"start": 0.0, "end": self._range.end},
            "scaling.x": {"start": 0.8, "end": 1.3 * self._most},
        }

    def captions(self) -> Captions:
        return self._captions


class FoundCard:
    """What a search has found, the fastest first; a press takes one."""

    name = "found"
    title = "Best strategies"
    wide = True
    root = None
    sources: Sequence[Columns] = ()

    def __init__(self, take: Callable[[Mapping[str, Any]], None]) -> None:
        self._take = take
        self._found: tuple[Question, Search] | None = None
        self._captions = Captions(hidden=True)

    def show(self, asked: Question, found: Search) -> None:
        self._found = (asked, found)
        self.mark(asked)

    def mark(self, now: Question) -> None:
        """Says which of them is chosen now, and whether they answer another question."""
        if self._found is None:
            return
        asked, found = self._found
        rows = tuple(self._row(i, now) for i in range(len(self._plans)))
        about = f"{found.fitting:,} of {found.considered:,} that were tried fit"
        if not found.top:
            about = f"none of {found.considered:,} fits; nearest is" if found.nearest else "there is nothing to choose"
        note = "" if base(now) == base(asked) else "Found for what was asked before: press Find the best again."
        heads = ("", "strategy", "step", "MFU", "memory", "why")
        self._captions = Captions(reading=about, table=(heads, *rows), note=note)

    @property
    def found(self) -> Search | None:
        return None if self._found is None else self._found[1]

    @property
    def _plans(self) -> list[Plan]:
        assert self._found is not None
        found = self._found[1]
        return [one.plan for one in found.top] or ([found.nearest] if found.nearest is not None else [])

    def _row(self, index: int, now: Question) -> tuple[str | Cell, ...]:
        assert self._found is not None
        (asked, found), p = self._found, self._plans[index]
        why = found.top[index].why if found.top else words.verdict(p)
        chosen = base(now) == base(asked) and choice(now.planned_spec) == choice(p.spec)
        use = Cell(text="In use" if chosen else "Use", title=f"Take strategy {index + 1}", press="apply", about=f"{index}",
                   pressed=chosen)  # fmt: skip
        taken = p.machine.device.memory_bytes - p.margin_bytes
        return (
            use,
            words.strategy(asked.spec, p.spec),
            duration(p.step_time_s),
            words.percent(p.mfu),
            memory(taken),
            why,
        )

    def press(self, word: str, about: str) -> None:
        """From any thread."""
        if word == "apply" and self._found is not None and int(about) < len(self._plans):
            self._take(choice(self._plans[int(about)].spec))

    def patches(self) -> Patches:
        return {}

    def captions(self) -> Captions:
        return self._captions


# -- small parts -----------------------------------------------------------------------------------------------------


def bar_figure(name: str, x_label: str) -> figure:
    """A low picture of horizontal bars; its x range is called `<name>.x`, its axis `<name>.axis`."""
    fig = plain_figure(
        name, "", x_range=Range1d(start=0, end=1, name=f"{name}.x"), y_range=Range1d(start=0.85, end=-0.45)
    )
    fig.height = BAR_PX
    fig.yaxis.visible = fig.ygrid.visible = False
    fig.xaxis.name, fig.xaxis.axis_label = f"{name}.axis", x_label
    return fig


def _taken(p: Plan) -> int:
    """Of a GPU, with the allocator's slack and the context."""
    return p.machine.device.memory_bytes - p.margin_bytes


def _memory_keys(p: Plan, rest: int) -> tuple[Key, ...]:
    peak = p.memory.at_peak
    keys = [
        Key(label=f"{theme.MEMORY[c].label} {memory(peak.of_role(Role(c)))}", token=f"memory.{c}",
            hatch=theme.MEMORY[c].hatch)
        for c in ON_DEVICE if peak.of_role(Role(c))
    ]  # fmt: skip
    keys.append(Key(label=f"allocator's slack and CUDA context {memory(rest)}", token="ink.marker", hatch=HOLLOW))
    return (*keys, Key(label="what a GPU has", token="ink.peak", hatch="dashes"))


def _where(p: Plan) -> str:
    m = p.memory
    host = f" {memory(m.host_bytes)} on the host, of each rank." if m.host_bytes else ""
    return (
        f"The peak is in the {m.peak_phase}, at {m.peak_unit}; {memory(m.held.total_bytes)} stay between steps.{host}"
    )


def _point(p: Plan) -> list[float]:
    return [
        p.machine.ranks, 100 * p.mfu, 100 * p.mfu if p.fits else math.nan, 1e3 * p.step_time_s, p.tokens_per_s,
        p.flops_per_s / 1e12, _taken(p) / GIB,
    ]  # fmt: skip


def _fitting(plans: Sequence[Plan]) -> str:
    first = next((p for p in plans if p.fits), None)
    if first is None:
        return "It fits on no number of GPUs up to 4,096."
    if first is plans[0]:
        return ""
    return f"It fits from {first.machine.ranks:,} GPUs on."


__all__ = ["AnswerCard", "FoundCard", "MemoryCard", "ScalingCard", "StepCard"]
