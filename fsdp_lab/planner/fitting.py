"""`fit_rates`: the planner's free parameters, fitted to published step times.

The objective is the sum over rows of the squared logarithm of predicted over measured step time. A row's weight is
1/sqrt(rows of its source), as rows of one source err together; residuals beyond `OUTLIER` weigh less (Huber).
Gauss-Newton steps from `START` change the logarithms of the parameters in `FREE`.
Nothing is fitted to a single row or source.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fsdp_lab.planner.devices import Rates
from fsdp_lab.planner.memory import under_pressure
from fsdp_lab.planner.published import PublishedCase
from fsdp_lab.planner.step import step_seconds

START = Rates(
    matrix=0.9, attention={"ampere": 0.35, "hopper": 0.2}, memory=0.9, operands=1.5, link=0.8, network=0.82,
    latency_s=3.4e-6, hop_s=38e-6, jitter_s=1.5e-4, interference=0.2, step_s=0.01, kernel_s=5e-5,
)  # fmt: skip
FREE = ("matrix", "attention.ampere", "attention.hopper", "operands", "jitter_s", "interference",
        "step_s", "kernel_s")  # fmt: skip
SHARES = ("matrix",)  # at most 1
OUTLIER = 0.1
PRIOR = 0.02  # a weak pull towards START, for parameters on which no row depends
ROUNDS, CHORDS = 9, 3  # Gauss-Newton steps; how many share a Jacobian
FOLD_ROUNDS, CONVERGED = (
    12,
    2e-3,
)  # if a fold is left out: most steps from the solution of all rows; the last one's size


@dataclass(frozen=True, kw_only=True)
class Fit:
    rates: Rates
    rows: int  # number of cases


def fit_rates(cases: Sequence[PublishedCase]) -> Fit:
    """Cases without a measured step time are ignored. Raises ValueError if none is left."""
    measured = _measured(cases)
    x, weights = _START, _weights(measured)
    for i in range(ROUNDS):
        r = _residuals(measured, _rates(x))
        if i % CHORDS == 0:
            jacobian = _jacobian(measured, x, r)
        x = _gauss_newton(x, r, jacobian, weights)
    return Fit(rates=_rates(x), rows=len(measured))


def leave_out(cases: Sequence[PublishedCase], fold_of: Callable[[PublishedCase], str]) -> dict[str, Fit]:
    """For each fold: `fit_rates` of the cases of all other folds, to less than 1 %. It is found from the solution of all
    cases with that one's Jacobian, in a fifth of the time; or from the start, where those steps do not converge."""
    measured = _measured(cases)
    folds = np.array([fold_of(case) for case in measured])
    whole = _logarithms(fit_rates(measured).rates)
    first = _residuals(measured, _rates(whole))
    jacobian = _jacobian(measured, whole, first)
    fits = {}
    for name in dict.fromkeys(folds.tolist()):
        is_other = folds != name
        others = [case for case, chosen in zip(measured, is_other, strict=True) if chosen]
        x, weights, r = whole, _weights(others), first[is_other]
        for _ in range(FOLD_ROUNDS):
            before, x = x, _gauss_newton(x, r, jacobian[is_other], weights)
            is_close = np.abs(x - before).max() < CONVERGED
            if is_close:
                break
            r = _residuals(others, _rates(x))
        fits[name] = Fit(rates=_rates(x), rows=len(others)) if is_close else fit_rates(others)
    return fits


def _measured(cases: Sequence[PublishedCase]) -> list[PublishedCase]:
    measured = [case for case in cases if case.measured_s]
    if not measured:
        raise ValueError("no case has a measured step time")
    return measured


def source_weights(sources: Sequence[str]) -> np.ndarray:
    """Of each row, 1/sqrt(rows of its source)."""
    rows = Counter(sources)
    return np.array([rows[source] ** -0.5 for source in sources])


def _weights(cases: Sequence[PublishedCase]) -> np.ndarray:
    weights = source_weights([case.source for case in cases])
    return np.asarray(weights / weights.sum())


def _jacobian(cases: Sequence[PublishedCase], x: np.ndarray, r: np.ndarray) -> np.ndarray:
    return np.stack([(_residuals(cases, _rates(x + 0.02 * e)) - r) / 0.02 for e in np.eye(len(x))], axis=1)


def _gauss_newton(x: np.ndarray, r: np.ndarray, jacobian: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The parameters after one step."""
    w = weights * np.minimum(1.0, OUTLIER / np.maximum(np.abs(r), 1e-9))
    left = jacobian.T @ (w[:, None] * jacobian) + PRIOR**2 * np.eye(len(x))
    right = -jacobian.T @ (w * r) - PRIOR**2 * (x - _START)
    x = x + np.clip(np.linalg.solve(left, right), -0.5, 0.5)
    return np.array([min(value, 0.0) if name in SHARES else value for name, value in zip(FREE, x, strict=True)])


def predicted_s(case: PublishedCase, rates: Rates) -> float:
    """Seconds of a step."""
    overlaps = not under_pressure(case.spec, case.shape, case.machine)
    return step_seconds(case.spec, case.shape, case.machine, rates, case.software, overlaps=overlaps)


def _residuals(cases: Sequence[PublishedCase], rates: Rates) -> np.ndarray:
    return np.array([math.log(predicted_s(case, rates) / case.measured_s) for case in cases if case.measured_s])


def _rates(x: np.ndarray) -> Rates:
    """The rates whose parameters in `FREE` have these logarithms."""
    values = dict(zip(FREE, np.exp(x).tolist(), strict=True))
    attention = {generation: values.pop(f"attention.{generation}") for generation in START.attention}
    return replace(START, attention=attention, **values)


def _logarithms(rates: Rates) -> np.ndarray:
    attention = {f"attention.{generation}": share for generation, share in rates.attention.items()}
    return np.log([{**vars(rates), **attention}[name] for name in FREE])


_START = _logarithms(START)
