"""Axis ranges that do not jump: they grow at once, in round steps, and shrink late."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from fsdp_lab.dashboard.columns import Numbers

ROUND = (1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 7.0, 8.0, 10.0)
FINE = tuple(1.0 + 0.1 * i for i in range(40)) + tuple(5.0 + 0.25 * i for i in range(21))  # where room is dear


def round_up(value: float, steps: Sequence[float] = ROUND) -> float:
    """The next round number: one of `steps` (from 1 to 10) times a power of ten. `value` > 0."""
    magnitude = 10.0 ** math.floor(math.log10(value))
    return next(r * magnitude for r in steps if value <= r * magnitude * (1 + 1e-12))


class StepWindow:
    """The range of the axis of steps: from 0 in doubling lengths, then a window that moves in tenths."""

    def __init__(self, *, shortest: int = 50, longest: int = 1000) -> None:
        self.shortest = shortest
        self.longest = longest

    def around(self, step: int) -> tuple[float, float]:
        """(start, end) with `step` inside."""
        length = self.shortest
        while length < self.longest and step + 1 > length:
            length *= 2
        length = min(length, self.longest)
        moved = self.longest // 10
        end = length if step + 1 <= length else math.ceil((step + 1) / moved) * moved
        return float(end - length), float(end)


class ZeroRange:
    """From zero to a round number above the data. It shrinks when the data would fill less than `slack` of it; with
    `patience`, also when that many covers in a row would leave a tenth of it empty, to the longest of them."""

    def __init__(
        self,
        *,
        slack: float = 0.45,
        headroom: float = 1.12,
        steps: Sequence[float] = ROUND,
        patience: int = 0,
    ) -> None:
        self.slack = slack
        self.steps = steps
        self.headroom = headroom
        self.patience = patience
        self.end = 1.0
        self._fresh = True
        self._shorter: list[float] = []  # ends that would have done, since the range was last filled

    def cover(self, values: Numbers) -> float:
        """The end of a range from zero that holds `values` (NaN and infinity are passed over)."""
        finite = values[np.isfinite(values)]
        if finite.size == 0 or finite.max() <= 0:
            return self.end
        wanted = round_up(float(finite.max()) * self.headroom, self.steps)
        fits_shorter = self.patience and wanted < 0.9 * self.end
        self._shorter = [*self._shorter, wanted] if fits_shorter else []
        if self._fresh or wanted > self.end or wanted < self.slack * self.end:
            self._set(wanted)
        elif fits_shorter and len(self._shorter) >= self.patience:
            self._set(max(self._shorter))
        return self.end

    def _set(self, end: float) -> None:
        self.end = end
        self._fresh = False
        self._shorter = []


class SpanRange:
    """From below the least to above the greatest value, for quantities whose zero says nothing, such as a loss.

    Where the data leaves it, it goes a good way further in that direction, so that a falling curve moves it seldom.
    """

    def __init__(self, *, margin: float = 0.1, ahead: float = 0.4, slack: float = 0.4) -> None:
        self.margin = margin
        self.ahead = ahead
        self.slack = slack
        self.start, self.end = 0.0, 1.0
        self._fresh = True

    def cover(self, values: Numbers) -> tuple[float, float]:
        finite = values[np.isfinite(values)]
        if finite.size == 0:
            return self.start, self.end
        low, high = float(finite.min()), float(finite.max())
        span = max(high - low, 0.02 * abs(high), 1e-9)
        if self._fresh or (high - low) < self.slack * (self.end - self.start) > 0.3 * abs(high):
            self._set(low - self.margin * span, high + self.margin * span, low)
        elif low < self.start or high > self.end:  # or both, where the losses fall and an evaluation is above them
            start = low - self.ahead * span if low < self.start else self.start
            self._set(start, high + self.ahead * span if high > self.end else self.end, low)
        self._fresh = False
        return self.start, self.end

    def _set(self, start: float, end: float, low: float) -> None:
        step = round_up((end - start) / 10)
        self.start = math.floor(start / step) * step
        if low >= 0:
            self.start = max(0.0, self.start)
        self.end = math.ceil(end / step) * step
