"""The figures of each step: loss, throughput and compute as curves over steps; a table of texts."""

import math
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean, median
from typing import Any

import numpy as np
from bokeh.models import ColumnDataSource, LinearAxis, LinearScale, Range1d
from bokeh.plotting import figure

from fsdp_lab.base.events import StepEvent
from fsdp_lab.base.formatting import count, duration, figures, flop_rate, known_or_dash
from fsdp_lab.dashboard import theme
from fsdp_lab.dashboard.panels import base, draw
from fsdp_lab.dashboard.panels.axis import SMOOTH_STEPS, STEP_LIMIT, Apart, SpanRange, StepAxis, ZeroRange, calm
from fsdp_lab.dashboard.panels.base import APART, Captions, Cell, Columns, Key, Numbers, Panel, Patches, Prediction
from fsdp_lab.runs.evaluation import in_words
from fsdp_lab.runs.steps import Step
from fsdp_lab.runs.summary import Peaks

POINT_PX = 7
MOST_EVALUATIONS, MOST_PROMPTS = 5, 4
METRICS = {"metric_1": "communication.all_gather", "metric_2": "memory.optimizer", "metric_3": "timeline.backward"}
LONGEST = 400  # characters of a text in a cell; the rest is in its tooltip
SMALL_LOSS = 0.01
LEAST_TFLOPS = 0.1  # below it the unit is GFLOPS


class CurvePanel(Panel):
    """A time plot of one measure, over the same measure of other runs. A subclass draws its curves and tooltips, writes a
    row for each step, describes it after the last step, and says what the y range must hold. A step slowed by measuring has
    its row in a table of its own, and is drawn hollow, where `value_of` gives a value."""

    measure: str  # the column of `axis.CURVE`
    others: str = ""  # what the curves of other runs are, in the legend
    texts: Sequence[str] = ()  # columns of texts
    fitted: Sequence[str]  # columns that the y range holds
    zero = True  # whether the y range begins at zero
    timed = True  # whether it is a measure of time, which measuring changes
    scaled = ""  # the y range of the other runs' curves, if it is not that of the plot

    def __init__(self, frame: StepAxis, y_label: str, columns: Sequence[str]) -> None:
        super().__init__()
        self._frame = frame
        self._range: ZeroRange | SpanRange = ZeroRange()
        self._table = Columns(f"{self.name}.steps", ["step", *columns], texts=self.texts, limit=STEP_LIMIT)
        self._apart = Apart()
        self._slowed = Columns(f"{self.name}.apart", ["step", "value"], texts=["why"], limit=STEP_LIMIT)
        self.sources = (self._table, self._slowed) if self.timed else (self._table,)
        self.root: figure = frame.plot(self.name, y_label)
        self.root.yaxis.name = f"{self.name}.axis"
        self._draw(self.root, draw.twin(self._table))
        if self.timed:
            frame.draw_apart(self.root, self._slowed)
        frame.fit(self.root, self._table.name, self.fitted, others=self.measure, zero=self.zero, scaled=self.scaled)
        frame.label_markers(self.root)

    def _ordinary(self, steps: Sequence[Step], value: Callable[[Step], float]) -> list[Step]:
        """The steps that the lines show; of the others, writes what is drawn hollow."""
        told = [(s, self._apart.reason(s)) for s in steps]
        slowed = [(s, why) for s, why in told if why]
        self._slowed.append([[s.number, value(s)] for s, _ in slowed], {"why": [why for _, why in slowed]})
        return [s for s, why in told if not why]

    def _draw_smooth(self, fig: figure, column: str, *plain: Any) -> None:
        """Adds the line of the smoothing that a reader chose, which the page computes; `plain` is what it replaces."""
        source = ColumnDataSource({"step": [], "value": []}, name=f"{self.name}.smooth")
        source.tags = [{"smooth": {"source": self._table.name, "column": column}}]
        look: dict[str, Any] = {"line_width": draw.LINE_PX, "visible": False, "name": f"{self.name}.smoothed"}
        draw.line(fig, source, "value", "ink.mean", **look)
        for renderer in plain:
            renderer.name = f"{self.name}.plain"

    @abstractmethod
    def _draw(self, fig: figure, source: ColumnDataSource) -> None: ...
    @abstractmethod
    def _write(self, steps: Sequence[Step]) -> None: ...
    @abstractmethod
    def _describe(self, last: Step) -> Captions: ...
    @abstractmethod
    def _shown(self) -> Sequence[Numbers]: ...

    def update(self, steps: Sequence[Step]) -> None:
        if steps:
            self._write(steps)
            self.cover()
            self._captions = self._describe(steps[-1])

    def cover(self) -> None:
        self._range.cover(np.concatenate([*self._shown(), self._frame.others(self.measure)]))

    def patches(self) -> Patches:
        return {f"{self.name}.y": {"start": self._range.start, "end": self._range.end}}

    def captions(self) -> Captions:
        own = self._captions
        return replace(own, legend=(*own.legend, *self._frame.other_keys(self.others)))


class LossPanel(CurvePanel):
    """Mean loss of all ranks over steps, across changes of strategy. The mean loss of held-out samples is a point, and each
    of the first three metrics a line with an axis on the right. The learning rate is in the note and the tooltip."""

    name = measure = "loss"
    title = "Loss"
    tab = "loss"
    texts = ("evaluation", "rate")
    fitted, zero, timed = ("loss", "eval_loss"), False, False

    def __init__(self, frame: StepAxis, world_size: int) -> None:
        self._told = Columns("loss.metrics", ["step", *METRICS], limit=STEP_LIMIT)
        super().__init__(frame, "loss", ["loss", "grad_norm", "eval_loss"])
        self.sources = (*self.sources, self._told)
        self._range, self._spans = SpanRange(), [SpanRange() for _ in METRICS]
        self._evaluated = ""  # the last evaluation as a sentence
        self._newest: Mapping[str, float] = {}  # metrics

    def _draw(self, fig: figure, source: ColumnDataSource) -> None:
        self._frame.overlays.draw(fig, "loss")
        line = draw.line(fig, source, "loss", "ink.mean", line_width=draw.LINE_PX)
        self._draw_smooth(fig, "loss", line)
        rows = [("loss", "@loss{0.0000}"), ("gradient norm", "@grad_norm{0.000}"), ("learning rate", "@rate")]
        draw.hover(fig, line, [("step", "@step"), *rows])
        look: dict[str, Any] = {"marker": "circle", "size": POINT_PX, "line_width": draw.LINE_PX}
        points = fig.scatter("step", "eval_loss", source=source, **look)
        draw.tint(points.glyph, line_color="ink.peak", fill_color="ink.gap")
        draw.hover(fig, points, [("step", "@step"), ("held-out loss", "@evaluation")])
        told = draw.twin(self._told)
        fig.extra_y_ranges |= {name: Range1d(start=0, end=1, name=f"loss.{name}.y") for name in METRICS}
        fig.extra_y_scales = {name: LinearScale() for name in METRICS}  # also where that of the loss is logarithmic
        for name, ink in METRICS.items():
            draw.line(fig, told, name, ink, line_width=draw.LINE_PX, y_range_name=name)
            dots = fig.scatter("step", name, source=told, size=5, line_alpha=0, y_range_name=name)
            draw.tint(dots.glyph, fill_color=ink)
            axis = LinearAxis(y_range_name=name, axis_label=name, name=f"loss.{name}.axis", visible=False)
            draw.simplify_axis(axis, "0,0.[000000]")
            fig.add_layout(axis, "right")

    def _write(self, steps: Sequence[Step]) -> None:
        rows, evaluations = [], list[str]()
        for s in steps:
            loss = s.eval_loss
            evaluations.append(in_words(loss, s.eval_metrics, language=self._frame.language))
            rows.append([s.number, s.mean_loss, s.events[0].grad_norm, math.nan if loss is None else loss])
            if loss is not None:
                self._evaluated = f"Held-out loss {evaluations[-1]} after {s.number + 1:,} steps. "
                self._newest = s.eval_metrics
                self._told.append([[s.number, *[*self._newest.values(), *[math.nan] * len(METRICS)][: len(METRICS)]]])
        self._table.append(rows, {"evaluation": evaluations, "rate": [_rate(s.events[0]) for s in steps]})

    def _describe(self, last: Step) -> Captions:
        loss = "not finite" if math.isinf(last.mean_loss) else _loss(last.mean_loss)
        keys = [Key(label="held-out samples", token="ink.peak", hatch="ring")] if self._evaluated else []
        e = last.events[0]
        norm = "" if math.isnan(e.grad_norm) else f"Gradient norm {figures(e.grad_norm)}. "
        rate = "" if e.lr is None else f"Learning rate {_rate(e)}. "
        keys += [Key(label=n, token=ink, hatch="line") for n, ink in zip(self._newest, METRICS.values(), strict=False)]
        more = f"{n} more not drawn." if (n := len(self._newest) - len(METRICS)) > 0 else ""
        return Captions(
            reading=", ".join([f"{loss} at step {last.number:,}", *(f"{n} {v:.4g}" for n, v in self._newest.items())]),
            legend=(Key(label="mean of all ranks", token="ink.mean", hatch="line"), *keys),
            note=f"{norm}{rate}{self._evaluated}{more}".strip(),
        )

    def patches(self) -> Patches:
        unit = "loss (nats per token)" if self._frame.language else "loss"
        found = {**super().patches(), "loss.axis": {"axis_label": unit}}
        for name, label, span in zip(METRICS, self._newest, self._spans, strict=False):
            start, end = span.cover(self._told.column(name))
            found[f"loss.{name}.y"] = {"start": start, "end": end}
            found[f"loss.{name}.axis"] = {"visible": True, "axis_label": label}
        return found

    def _shown(self) -> Sequence[Numbers]:
        return calm(self._table.column("loss")), self._table.column("eval_loss")


class ThroughputPanel(CurvePanel):
    """Tokens or samples a second of all ranks over steps: of each step, the median of the last ordinary ones, and the
    predicted rate where this machine is calibrated."""

    name = "throughput"
    title = "Throughput"
    measure = "tokens_per_s"
    fitted = ("tokens_per_s",)

    def __init__(self, frame: StepAxis, world_size: int) -> None:
        super().__init__(frame, "tokens/s, all ranks", ["tokens_per_s", "median_tokens_per_s", "step_ms"])
        self._recent: deque[tuple[float, float]] = deque(maxlen=SMOOTH_STEPS)  # tokens/s, step time
        self._prediction: Prediction | None = None
        self._spec_id = ""  # of the last step

    def _draw(self, fig: figure, source: ColumnDataSource) -> None:
        each = draw.line(fig, source, "tokens_per_s", "ink.faint", line_width=1)
        self._frame.overlays.draw(fig, "tokens_per_s")
        middle = draw.line(fig, source, "median_tokens_per_s", "ink.mean", line_width=draw.LINE_PX)
        self._draw_smooth(fig, "tokens_per_s", middle)
        rates = [("a second", "@tokens_per_s{0,0}"), (f"median of {SMOOTH_STEPS}", "@median_tokens_per_s{0,0}")]
        draw.hover(fig, each, [("step", "@step"), *rates, ("step time", "@step_ms{0,0.0} ms")])
        fig.add_layout(draw.limit_line("throughput.predicted", "width", dash="3 3"))

    def _write(self, steps: Sequence[Step]) -> None:
        rows = []
        ordinary = {s.number for s in self._ordinary(steps, lambda s: s.tokens_per_s)}
        for s in steps:
            if s.events[0].first_after_switch:
                self._recent.clear()  # the median must not mix two strategies
            if s.counts:
                self._recent.append((s.tokens_per_s, s.step_time_s))
            if s.number in ordinary:
                rows.append([s.number, s.tokens_per_s, self._medians[0], s.step_time_s * 1e3])
        self._spec_id = steps[-1].spec_id
        self._table.append(rows)

    @property
    def _medians(self) -> tuple[float, float]:
        """Tokens a second and step time; NaN before the first ordinary step."""
        if not self._recent:
            return math.nan, math.nan
        rates, times = zip(*self._recent, strict=True)
        return median(rates), median(times)

    def _describe(self, last: Step) -> Captions:
        if not self._recent:
            return self._captions
        tokens_per_s, step_s = self._medians
        return Captions(
            reading=f"{count(tokens_per_s)} {self._frame.counted}/s, {duration(step_s)} a step, median of {SMOOTH_STEPS}",
            legend=(
                Key(label="each step", token="ink.faint", hatch="line"),
                Key(label=f"median of {SMOOTH_STEPS}", token="ink.mean", hatch="line"),
                *((APART,) if len(self._slowed) else ()),
            ),
        )

    def predict(self, prediction: Prediction | None) -> None:
        self._prediction = prediction
        self.cover()

    @property
    def _predicted(self) -> float | None:
        """Tokens a second."""
        p = self._prediction
        return None if p is None or p.step_time_s is None else p.tokens / p.step_time_s

    def _shown(self) -> Sequence[Numbers]:
        predicted = [] if self._predicted is None else [self._predicted]
        return calm(self._table.column("tokens_per_s")), np.array(predicted)

    def patches(self) -> Patches:
        line = {"visible": self._predicted is not None, "location": self._predicted or 0.0}
        label = {"axis_label": f"{self._frame.counted}/s, all ranks"}
        return {**super().patches(), "throughput.predicted": line, "throughput.axis": label}

    def captions(self) -> Captions:
        own, p = self._captions, self._prediction
        if p is not None and p.step_time_s is not None:
            measured = duration(self._medians[1]) if self._recent and self._spec_id == p.spec_id else None
            own = base.with_prediction(own, f"{duration(p.step_time_s)} a step", measured, "dashes")
        return replace(own, legend=(*own.legend, *self._frame.other_keys()))


class TflopsPanel(CurvePanel):
    """Model TFLOPS of every rank: a line a rank in its colour, or above `theme.MOST_LINES` ranks the mean in a band
    from least to most. Captions and tooltips have the model FLOPs utilisation (MFU) of the device's peak, and the hardware
    FLOPs utilisation (HFU), which counts recompute too."""

    name = measure = "tflops"
    title = "Compute"
    others = "mean"
    fitted: Sequence[str] = ("mean",)
    scaled = "tflops.tera"

    def __init__(self, frame: StepAxis, world_size: int) -> None:
        self.world_size = world_size
        self._per_unit: float | None = None  # the table's unit in TFLOPS: 1, or where rates are small 0.001
        self._ranks = [f"rank_{r}" for r in range(world_size)] if world_size <= theme.MOST_LINES else []
        self._recent: deque[float] = deque(maxlen=SMOOTH_STEPS)
        self._peaks = Peaks()
        self._peak: tuple[float, str] | None = None
        self._hardware = 1.0  # hardware FLOPs over model FLOPs, of the last step
        columns = ["mean", "least", "most", "mfu_percent", "hfu_percent", *self._ranks]
        super().__init__(frame, "model TFLOPS per rank", columns)

    def _draw(self, fig: figure, source: ColumnDataSource) -> None:
        fig.extra_y_ranges |= {"tera": Range1d(start=0, end=1, name=self.scaled)}
        self._frame.overlays.draw(fig, "tflops", y_range_name="tera")
        if self._ranks:
            for r, column in enumerate(self._ranks):
                look: dict[str, Any] = {"line_color": theme.rank_color(r), "line_dash": theme.RANK_DASHES[r]}
                fig.line("step", column, source=source, line_width=draw.LINE_PX, **look)
            mean = fig.line("step", "mean", source=source, line_alpha=0)
            named = {f"rank {r}": column for r, column in enumerate(self._ranks)}
        else:
            band = fig.varea(x="step", y1="least", y2="most", source=source, fill_alpha=0.5)
            draw.tint(band.glyph, fill_color="ink.band")
            mean = draw.line(fig, source, "mean", "ink.mean", line_width=draw.LINE_PX)
            named = {name: name for name in ("mean", "least", "most")}
        rows = [(label, f"@{column}{{0,0.00}}") for label, column in named.items()]
        shares = [("MFU, mean", "@mfu_percent{0.0} %"), ("HFU, mean", "@hfu_percent{0.0} %")]
        draw.hover(fig, mean, [("step", "@step"), *rows, *shares])

    def _write(self, steps: Sequence[Step]) -> None:
        for step in steps:
            self._peaks.add(step)
        # The ranks' mean peak in FLOP/s, and its source; None where that of a rank is not known.
        peaks = [peak for e in steps[-1].events if (peak := self._peaks.of(e)) is not None]
        known = len(peaks) == len(steps[-1].events)
        self._peak = (fmean(flops_per_s for flops_per_s, _ in peaks), peaks[0][1]) if known else None
        last = steps[-1].events[0]
        self._hardware = last.hardware_flops / last.flops if last.flops else 1.0
        if self._per_unit is None and math.isfinite(rate := _mean_tflops(steps[-1])):
            self._per_unit = 1.0 if rate >= LEAST_TFLOPS else 1e-3
        for s in steps:
            if s.events[0].first_after_switch:
                self._recent.clear()
            if s.counts:
                self._recent.append(_mean_tflops(s))
        ordinary = self._ordinary(steps, lambda s: _mean_tflops(s) / (self._per_unit or 1.0))
        self._table.append([self._row(s) for s in ordinary])

    def _row(self, s: Step) -> list[float]:
        by_rank = {e.rank: e.tflops / (self._per_unit or 1.0) for e in s.events}
        mean = fmean(by_rank.values())
        shares = _percent(map(self._peaks.mfu, s.events)), _percent(map(self._peaks.hfu, s.events))
        ranks = [by_rank.get(rank, math.nan) for rank in range(len(self._ranks))]
        return [s.number, mean, min(by_rank.values()), max(by_rank.values()), *shares, *ranks]

    def _shown(self) -> Sequence[Numbers]:
        return (calm(self._table.column("most" if self._ranks else "mean")[-300:]),)

    def cover(self) -> None:
        others = self._frame.others(self.measure) / (self._per_unit or 1.0)
        self._range.cover(np.concatenate([*self._shown(), others]))

    def patches(self) -> Patches:
        unit = "GFLOPS" if self._per_unit == 1e-3 else "TFLOPS"
        tera = {"start": 0.0, "end": self._range.end * (self._per_unit or 1.0)}
        label = {"axis_label": f"model {unit} per rank"}
        return {**super().patches(), self.scaled: tera, "tflops.axis": label}

    def _describe(self, last: Step) -> Captions:
        if not self._recent:
            return self._captions
        tflops = median(self._recent)
        reading, note = f"{flop_rate(tflops * 1e12)} per rank", ""
        if self._peak is not None:
            peak, source = self._peak
            mfu = 100 * tflops * 1e12 / peak
            reading += f", {mfu:.0f} % MFU"
            if self._hardware > 1:
                reading += f", {self._hardware * mfu:.0f} % HFU"
            what = "HFU counts recompute; both are" if self._hardware > 1 else "MFU is"
            note = f"{what} relative to {flop_rate(peak)} a rank{f' ({source})' if source else ''}."
        mean = Key(label="mean of ranks", token="ink.mean", hatch="line")
        legend: tuple[Key, ...] = (mean, Key(label="least to most", token="ink.band"))
        if self._ranks:
            hatches = ["line" if dash == "solid" else "dashes" for dash in theme.RANK_DASHES]
            ranks = range(self.world_size)
            legend = tuple(Key(label=f"rank {r}", color=theme.rank_color(r), hatch=hatches[r]) for r in ranks)
        slowed = (APART,) if len(self._slowed) else ()
        return Captions(reading=f"{reading}, median of {SMOOTH_STEPS}", legend=(*legend, *slowed), note=note)


def _mean_tflops(step: Step) -> float:
    return fmean(e.tflops for e in step.events)


def _loss(loss: float) -> str:
    """`5.1125`, `0.000412`: a loss of the user's own may be small. "–" if it is unknown."""
    return known_or_dash(loss, ".3g" if abs(loss) < SMALL_LOSS else ".4f")


def _rate(event: StepEvent) -> str:
    """`0.0003`, `0.0003, loss scale 65,536`; "–" if it is unknown."""
    rate = "–" if event.lr is None else f"{event.lr:.3g}"
    return rate if event.loss_scale is None else f"{rate}, loss scale {event.loss_scale:,.0f}"


def _percent(shares: Iterable[float | None]) -> float:
    """The mean of the shares that are known, in percent; NaN if none is."""
    known = [share for share in shares if share is not None]
    return 100 * fmean(known) if known else math.nan


class CompletionsPanel(Panel):
    """Texts with which the model continues the prompts of its evaluations: a row for each of the newest, a column for each
    prompt. Hidden if no evaluation has prompts."""

    name = "completions"
    title = "What it writes"
    tab = "loss"
    wide = True

    def __init__(self, frame: StepAxis, world_size: int) -> None:
        super().__init__(Captions(hidden=True))
        self._frame = frame
        self._shown: deque[Step] = deque(maxlen=MOST_EVALUATIONS)

    def update(self, steps: Sequence[Step]) -> None:
        evaluated = [s for s in steps if s.completions]
        self._shown.extend(evaluated)
        if evaluated:
            newest = self._shown[-1]
            prompts = [c.prompt for c in newest.completions[:MOST_PROMPTS]]
            left = len(newest.completions) - len(prompts)
            asked = [Cell(text=_cut(p, 60), title=p) for p in prompts]
            heads: tuple[str | Cell, ...] = ("step", "held-out loss", *asked)
            self._captions = Captions(
                reading=f"after step {newest.number:,}",
                note=f"{left} more in run.completions." if left else "",
                table=(heads, *(self._row(s, prompts) for s in reversed(self._shown))),
            )

    def _row(self, step: Step, prompts: Sequence[str]) -> tuple[str | Cell, ...]:
        texts = {c.prompt: c.text for c in step.completions}
        cells = [Cell(text=_cut(texts[p], LONGEST), title=texts[p]) if p in texts else Cell(text="–") for p in prompts]
        loss = in_words(step.eval_loss, step.eval_metrics, language=self._frame.language)
        return (f"{step.number:,}", loss, *cells)


def _cut(text: str, most: int) -> str:
    words = " ".join(text.split())
    return words if len(words) <= most else words[: most - 1] + "…"
