"""Model TFLOPS of every rank; beside it the model FLOPs utilisation (MFU) of the device's peak, and the hardware FLOPs
utilisation (HFU), which counts recompute too."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import fmean, median
from typing import Any

import numpy as np
from bokeh.models import LinearAxis, NumeralTickFormatter, Range1d
from bokeh.models.ui import UIElement

from fsdp_lab.core.formatting import figures
from fsdp_lab.dashboard import theme
from fsdp_lab.dashboard.columns import Columns
from fsdp_lab.dashboard.panels.base import (
    LINE_PX,
    SMOOTH_STEPS,
    Captions,
    Key,
    Patches,
    StepAxis,
    hover,
    rank_keys,
    tint,
    twin,
)
from fsdp_lab.dashboard.panels.ranges import ZeroRange
from fsdp_lab.runs.steps import Step
from fsdp_lab.runs.summary import Peaks


class TflopsPanel:
    """One line a rank in the rank's colour; above `theme.MOST_LINES` ranks the mean in a band from least to most."""

    name = "tflops"
    title = "Compute"
    wide = False

    def __init__(self, frame: StepAxis, world_size: int) -> None:
        self.world_size = world_size
        self._frame = frame
        self._lines = world_size <= theme.MOST_LINES
        self._ranks = [f"rank_{r}" for r in range(world_size)] if self._lines else []
        self._table = Columns(
            "tflops.steps",
            ["step", "mean", "least", "most", "mfu_percent", "hfu_percent", *self._ranks],
            limit=frame.limit,
        )
        self._range = ZeroRange()
        self._recent: deque[float] = deque(maxlen=SMOOTH_STEPS)
        self._peaks = Peaks()
        self._peak: tuple[float, str] | None = None
        self._hardware = 1.0  # hardware FLOPs over model FLOPs, of the last step
        self._captions = Captions()
        fig = frame.plot("tflops", "model TFLOPS per rank")
        source = twin(self._table)
        frame.overlays.draw(fig, "tflops")
        if self._lines:
            for r, column in enumerate(self._ranks):
                fig.line("step", column, source=source, line_width=LINE_PX, line_color=theme.rank_color(r),
                         line_dash=theme.RANK_DASHES[r])  # fmt: skip
            over = fig.line("step", "mean", source=source, line_alpha=0)
            rows = [("step", "@step"), *((f"rank {r}", f"@{c}{{0.0000}}") for r, c in enumerate(self._ranks))]
        else:
            band = fig.varea(x="step", y1="least", y2="most", source=source, fill_alpha=0.5)
            tint(band.glyph, fill_color="ink.band")
            over = fig.line("step", "mean", source=source, line_width=LINE_PX)
            tint(over.glyph, line_color="ink.mean")
            rows = [
                ("step", "@step"),
                ("mean", "@mean{0.0000}"),
                ("least", "@least{0.0000}"),
                ("most", "@most{0.0000}"),
            ]
        shares = [("MFU, mean", "@mfu_percent{0.0} %"), ("HFU, mean", "@hfu_percent{0.0} %")]
        hover(fig, over, [*rows, *shares])
        fig.extra_y_ranges = {"mfu": Range1d(start=0, end=1, name="tflops.mfu")}
        fig.add_layout(self._mfu_axis(), "right")
        frame.label_markers(fig)
        self._fig = fig

    def _mfu_axis(self) -> LinearAxis:
        return LinearAxis(
            y_range_name="mfu", name="tflops.mfu_axis", axis_label="MFU (%)", visible=False, axis_line_alpha=0,
            major_tick_line_alpha=0, minor_tick_line_alpha=0, axis_label_text_font_style="normal",
            axis_label_text_font_size="11px", major_label_text_font_size="11px", axis_label_standoff=6,
            bounds=(0, 100),  # the plot has headroom above the peak, which is no utilisation
            formatter=NumeralTickFormatter(format="0,0.[0]"),  # type: ignore[arg-type]  # Bokeh's stub is too narrow
        )  # fmt: skip

    @property
    def sources(self) -> Sequence[Columns]:
        return (self._table,)

    @property
    def root(self) -> UIElement:
        return self._fig

    def update(self, steps: Sequence[Step]) -> int:
        if not steps:
            return 0
        for step in steps:
            self._peaks.add(step)
        self._peak = self._common_peak(steps[-1])
        last = steps[-1].events[0]
        self._hardware = last.hardware_flops / last.flops if last.flops else 1.0
        written = self._table.append([self._row(s) for s in steps])
        self.cover()
        if self._recent:
            self._captions = self._words(steps)
        return written

    def cover(self) -> None:
        mine = self._table.column("mean" if not self._lines else "most")[-300:]
        self._range.cover(np.concatenate([mine, self._frame.others("tflops")]))

    def _row(self, s: Step) -> list[float]:
        by_rank = {e.rank: e.tflops for e in s.events}
        mean = fmean(by_rank.values())
        if s.events[0].first_after_switch:
            self._recent.clear()
        if s.counts:
            self._recent.append(mean)
        shares = _percent(map(self._peaks.mfu, s.events)), _percent(map(self._peaks.hfu, s.events))
        ranks = s.by_rank(by_rank) if self._lines else []
        return [s.number, mean, min(by_rank.values()), max(by_rank.values()), *shares, *ranks]

    def _common_peak(self, step: Step) -> tuple[float, str] | None:
        """The peak that all ranks share, in FLOP/s, and where it comes from; None where one axis cannot serve all."""
        peaks = [peak for e in step.events if (peak := self._peaks.of(e)) is not None]
        best = [flops_per_s for flops_per_s, _ in peaks]
        if len(best) < len(step.events) or max(best) > 1.25 * min(best):
            return None
        return fmean(best), peaks[0][1]

    def _words(self, steps: Sequence[Step]) -> Captions:
        tflops = median(self._recent)
        reading = f"{figures(tflops)} TFLOPS per rank"
        note = ""
        if self._peak is not None:
            peak, source = self._peak
            mfu = 100 * tflops * 1e12 / peak
            reading += f", {mfu:.0f} % MFU"
            if self._hardware > 1:
                reading += f", {self._hardware * mfu:.0f} % HFU"
            what = "HFU counts recompute; both are" if self._hardware > 1 else "MFU is"
            said = f" ({source})" if source else ""
            note = f"{what} relative to {figures(peak / 1e12)} TFLOPS a rank{said}."
        mean = Key(label="mean of ranks", token="ink.mean", hatch="line")
        legend = rank_keys(self.world_size) if self._lines else (mean, Key(label="least to most", token="ink.band"))
        return Captions(reading=reading, legend=legend, note=note)

    def patches(self) -> Patches:
        changes: dict[str, dict[str, Any]] = {
            "tflops.y": {"start": 0.0, "end": self._range.end},
            "tflops.mfu_axis": {"visible": False},
        }
        if self._peak is not None:
            percent = 100 * self._range.end * 1e12 / self._peak[0]
            changes["tflops.mfu"] = {"start": 0.0, "end": percent}
            changes["tflops.mfu_axis"] = {"visible": True}
        return changes

    def captions(self) -> Captions:
        others = tuple(replace(key, label=f"{key.label}, mean") for key in self._frame.other_keys())
        return replace(self._captions, legend=(*self._captions.legend, *others))


def _percent(shares: Iterable[float | None]) -> float:
    """The mean of those that are known, in percent; NaN of none."""
    known = [share for share in shares if share is not None]
    return 100 * fmean(known) if known else math.nan
