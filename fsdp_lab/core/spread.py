"""`Spread`: a median with its 10th and 90th percentile."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


def known(values: Sequence[float]) -> list[float]:
    """Without infinities and NaN, which stand for values that were not measured."""
    return [v for v in values if math.isfinite(v)]


def quantile(values: Sequence[float], q: float) -> float | None:
    """With linear interpolation between neighbours; None if there are no values."""
    if not values:
        return None
    ordered, place = sorted(values), q * (len(values) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


@dataclass(frozen=True, kw_only=True)
class Spread:
    """The median of `n` values, with the 10th and the 90th percentile."""

    median: float
    p10: float
    p90: float
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        """Of the finite ones; None where there is none."""
        finite = known(values)
        m, low, high = quantile(finite, 0.5), quantile(finite, 0.1), quantile(finite, 0.9)
        if m is None or low is None or high is None:
            return None
        return cls(median=m, p10=low, p90=high, n=len(finite))
