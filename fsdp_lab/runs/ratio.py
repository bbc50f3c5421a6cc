"""`Ratio`: how much longer, or larger, one run is than another, and how far to trust that.

The rule. Where the two were trained in turns, at least `ROUNDS` times each, as in a sweep, the median of each turn is
divided by that of the other's turn in the same round, which is the nearest in time: what drifts hits both alike. The
ratio is the median over rounds, with the 10th and 90th percentile of rounds. Otherwise, when one was trained after the
other, it is the ratio of the two medians; p10 and p90 are the ends of its 80 % interval, from the order statistics of
both samples. Drift of the machine between the two is then part of the ratio.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby
from operator import itemgetter

from fsdp_lab.core.formatting import quantile

ROUNDS = 3
FEWEST = 3  # steps that an interval can be told from
LEAST = 0.02  # a smaller difference is not told from noise, however narrow its interval
NORMAL_90 = 1.2816  # standard deviations below which 90 % of a normal distribution lies

Timed = Sequence[tuple[float, float]]  # (unix time in seconds, value) of each step


class Pairing(StrEnum):
    ROUNDS = "in rounds"
    MEDIANS = "one after the other"


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """`n` rounds, or steps of the run that has fewer. p10 and p90 are None where these are too few to say."""

    median: float
    p10: float | None
    p90: float | None
    n: int
    pairing: Pairing

    @property
    def clear(self) -> bool:
        """Whether it is told from 1: the interval leaves 1 out, and it is not within `LEAST` of it."""
        if self.p10 is None or self.p90 is None:
            return False
        return not self.p10 <= 1 <= self.p90 and abs(self.median - 1) >= LEAST


def ratio(of: Timed, to: Timed) -> Ratio | None:
    """By the rule of the module; None where one of them has no values, or they are zero."""
    if not of or not to or min(v for _, v in (*of, *to)) <= 0:
        return None
    rounds = in_rounds(of, to)
    if len(rounds) >= ROUNDS:
        each = [statistics.median(a) / statistics.median(b) for a, b in rounds]
        p10, p90 = quantile(each, 0.1), quantile(each, 0.9)
        return Ratio(median=statistics.median(each), p10=p10, p90=p90, n=len(each), pairing=Pairing.ROUNDS)
    mine, theirs = [v for _, v in of], [v for _, v in to]
    middle = statistics.median(mine) / statistics.median(theirs)
    low, high = _interval(middle, mine, theirs)
    n = min(len(mine), len(theirs))
    return Ratio(median=middle, p10=low, p90=high, n=n, pairing=Pairing.MEDIANS)


def in_rounds(of: Timed, to: Timed) -> list[tuple[list[float], list[float]]]:
    """The values of each turn of the one, beside those of the other's turn in the same round."""
    ordered = sorted([*((t, 0, v) for t, v in of), *((t, 1, v) for t, v in to)])
    turns: tuple[list[list[float]], list[list[float]]] = ([], [])
    for side, group in groupby(ordered, key=itemgetter(1)):
        turns[side].append([v for _, _, v in group])
    return list(zip(*turns, strict=False))  # the last turn may have no answer yet


def _interval(middle: float, mine: Sequence[float], theirs: Sequence[float]) -> tuple[float | None, float | None]:
    """Errors of the two medians, added in quadrature on the scale of logarithms."""
    if min(len(mine), len(theirs)) < FEWEST:
        return None, None
    (my_low, my_high), (their_low, their_high) = _median_errors(mine), _median_errors(theirs)
    return middle * math.exp(-math.hypot(my_low, their_high)), middle * math.exp(math.hypot(my_high, their_low))


def _median_errors(values: Sequence[float]) -> tuple[float, float]:
    """How far below and above it the true median may lie, in logarithms."""
    reach = min(0.5, NORMAL_90 / 2 / math.sqrt(len(values)))
    low, middle, high = (quantile(values, q) or 0.0 for q in (0.5 - reach, 0.5, 0.5 + reach))
    return math.log(middle / low), math.log(high / middle)
