"""`calibrate`: the free parameters of the planner, found from measured steps.

Procedure. What is made small is the sum over rows of the squared logarithm of predicted over measured step time, each row
with the weight (1/rows + 1/(sources x rows of its source)) / 2, so that neither the largest source nor the smallest
decides; residuals beyond `OUTLIER` weigh less (Huber). The parameters of `FREE` are changed by their logarithms,
with Gauss-Newton steps from `START`, whatever the rows are. Nothing else is fitted: not a row, not a source.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fsdp_lab.planner.devices import Rates
from fsdp_lab.planner.memory import pressed
from fsdp_lab.planner.published import PublishedCase
from fsdp_lab.planner.step import StepModel

START = Rates(
    matrix=0.9, attention={"ampere": 0.35, "hopper": 0.2}, memory=0.9, operands=1.5, link=0.6, network=0.75,
    latency_s=3e-6, jitter_s=2e-6, interference=0.2, step_s=0.03,
)  # fmt: skip
FREE = ("matrix", "attention.ampere", "attention.hopper", "operands", "link", "network",
        "jitter_s", "interference", "step_s")  # fmt: skip
SHARES = ("matrix", "link", "network")  # at most 1
OUTLIER = 0.1
PRIOR = 0.02  # a weak pull towards START, so that what no row speaks of stays there
ROUNDS, CHORDS = 9, 3  # of which so many share a Jacobian
AGAIN, NEAR = (
    2,
    0.03,
)  # where a fold is left out: rounds, and the largest change of a logarithm that they are enough for
SHORT = 4  # blocks that are simulated; the others repeat them


@dataclass(frozen=True, kw_only=True)
class Fit:
    rates: Rates
    rows: int
    sources: int


def calibrate(cases: Sequence[PublishedCase]) -> Fit:
    """Cases without a measured step are passed over. Raises ValueError where none is left."""
    told = _told(cases)
    x, weights = _START, _weights(told)
    for i in range(ROUNDS):
        r = _residuals(told, _rates(x))
        if i % CHORDS == 0:
            jacobian = _jacobian(told, x, r)
        x = _better(x, r, jacobian, weights)
    return _fit(told, x)


def leave_out(cases: Sequence[PublishedCase], fold_of: Callable[[PublishedCase], str]) -> dict[str, Fit]:
    """By fold: what `calibrate` finds of the cases of all others, to less than a hundredth. Where that is near the solution
    of the whole it is reached from there, with the whole's Jacobian, in a tenth of the time."""
    told = _told(cases)
    folds = np.array([fold_of(case) for case in told])
    whole = np.log([_get(calibrate(told).rates, name) for name in FREE])
    first = _residuals(told, _rates(whole))
    jacobian = _jacobian(told, whole, first)
    found = {}
    for name in dict.fromkeys(folds.tolist()):
        keep = folds != name
        kept = [case for case, stays in zip(told, keep, strict=True) if stays]
        x, weights, r = whole, _weights(kept), first[keep]
        for _ in range(AGAIN):
            x = _better(x, r, jacobian[keep], weights)
            r = _residuals(kept, _rates(x))
        near = np.abs(x - whole).max() < NEAR
        found[name] = _fit(kept, x) if near else calibrate(kept)
    return found


def _told(cases: Sequence[PublishedCase]) -> list[PublishedCase]:
    told = [case for case in cases if case.measured_s]
    if not told:
        raise ValueError("no case tells the seconds of its step")
    return told


def _weights(told: Sequence[PublishedCase]) -> np.ndarray:
    sizes = Counter(case.source for case in told)
    return np.array([0.5 / len(told) + 0.5 / (len(sizes) * sizes[case.source]) for case in told])


def _jacobian(told: Sequence[PublishedCase], x: np.ndarray, r: np.ndarray) -> np.ndarray:
    return np.stack([(_residuals(told, _rates(x + 0.02 * e)) - r) / 0.02 for e in np.eye(len(x))], axis=1)


def _better(x: np.ndarray, r: np.ndarray, jacobian: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """One Gauss-Newton step."""
    w = weights * np.minimum(1.0, OUTLIER / np.maximum(np.abs(r), 1e-9))
    left = jacobian.T @ (w[:, None] * jacobian) + PRIOR**2 * np.eye(len(x))
    right = -jacobian.T @ (w * r) - PRIOR**2 * (x - _START)
    x = x + np.clip(np.linalg.solve(left, right), -0.5, 0.5)
    return np.array([min(value, 0.0) if name in SHARES else value for name, value in zip(FREE, x, strict=True)])


def _fit(told: Sequence[PublishedCase], x: np.ndarray) -> Fit:
    return Fit(rates=_rates(x), rows=len(told), sources=len({case.source for case in told}))


def predicted_s(case: PublishedCase, rates: Rates) -> float:
    """Seconds of a step, of which only some blocks are simulated; the others repeat them."""
    units = case.shape.units
    overlaps = not pressed(case.spec, case.shape, case.machine)

    def seconds(first: int) -> float:
        model = StepModel(case.spec, units[:first], case.tokens_per_sample, case.machine, rates, case.software,
                          overlaps=overlaps)  # fmt: skip
        return model.step().seconds

    kinds = len({id(unit) for unit in units})
    if kinds > 2 or len(units) < SHORT + 3:
        return seconds(len(units))
    period = 2 if case.spec.strategy.recompute == "every:2" else 1
    long, short = seconds(SHORT + 1 + period), seconds(SHORT + 1)
    return short + (long - short) * (len(units) - SHORT - 1) / period


def _residuals(cases: Sequence[PublishedCase], rates: Rates) -> np.ndarray:
    return np.array([math.log(predicted_s(case, rates) / case.measured_s) for case in cases if case.measured_s])


def _get(rates: Rates, name: str) -> float:
    part, _, key = name.partition(".")
    value = getattr(rates, part)
    return float(value[key] if key else value)


def _rates(x: np.ndarray) -> Rates:
    rates = START
    for name, value in zip(FREE, np.exp(x), strict=True):
        part, _, key = name.partition(".")
        change: dict[str, Any] = {part: {**getattr(rates, part), key: float(value)} if key else float(value)}
        rates = replace(rates, **change)
    return rates


_START = np.log([_get(START, name) for name in FREE])
