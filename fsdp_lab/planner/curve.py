"""`Curve`: seconds by size, as measured at some sizes: where one rate would not do, as on a CPU."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Curve:
    """Points (size, seconds), sizes rising. Straight between neighbours in a log-log picture; below the first as long as the
    first, above the last in proportion to it."""

    points: tuple[tuple[float, float], ...]

    @classmethod
    def of(cls, rows: Iterable[Sequence[float]]) -> Curve:
        """Rows [size, seconds] in any order; of equal sizes the mean. Raises ValueError where there are none."""
        found: dict[float, list[float]] = {}
        for size, seconds in rows:
            found.setdefault(size, []).append(max(seconds, 1e-9))
        if not found:
            raise ValueError("a curve takes one point or more")
        return cls(tuple((size, sum(found[size]) / len(found[size])) for size in sorted(found)))

    def __call__(self, size: float) -> float:
        """Seconds; 0 for nothing."""
        if size <= 0:
            return 0.0
        i = bisect.bisect_left(self.points, (size, 0.0))
        if i == 0:
            return self.points[0][1]
        (x0, y0) = self.points[i - 1]
        if i == len(self.points):
            return y0 * size / x0
        x1, y1 = self.points[i]
        along = math.log(size / x0) / math.log(x1 / x0)
        return y0 * math.exp(along * math.log(y1 / y0))

    @property
    def best(self) -> float:
        """The highest rate of any point: size a second."""
        return max(size / seconds for size, seconds in self.points)
