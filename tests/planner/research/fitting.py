"""What the package keeps as constants, fitted to published rows.

`fit_rates`: the planner's free parameters. The objective is the sum over rows of the squared logarithm of predicted over
measured step time. A row's weight is 1/sqrt(rows of its source), as rows of one source err together; residuals beyond
`OUTLIER` weigh less (Huber). Gauss-Newton steps from `START` change the logarithms of the parameters in `FREE`. Nothing is
fitted to a single row or source.

`fit_errors`: the uncertainties and quantiles of `fsdp_lab.planner.bands`, from rows predicted without their own source;
`coverage`: how many rows of each source lie in a band that was made without it. Sizes are chosen from `GRID`, one kind after
the other, for the least interval score of the 80 % band (Gneiting and Raftery, 2007, section 6.2: its width, and ten times
the distance of each row outside). A source of n rows weighs as sqrt(n), since its rows err together."""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from fsdp_lab.planner import bands
from fsdp_lab.planner.bands import COVERED, LEVELS, PUBLISHED_ERRORS, Quantiles, RateKind, TimeErrors, worse
from fsdp_lab.planner.devices import Machine, Rates
from tests.planner.research.published import PublishedCase

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
# if a fold is left out: most steps from the solution of all rows; the last one's size
FOLD_ROUNDS, CONVERGED = 12, 2e-3


def fit_rates(cases: Sequence[PublishedCase]) -> Rates:
    """Cases without a measured step time are ignored. Raises ValueError if none is left."""
    measured = _measured(cases)
    x, weights = _START, _weights(measured)
    for i in range(ROUNDS):
        r = _residuals(measured, _rates(x))
        if i % CHORDS == 0:
            jacobian = _jacobian(measured, x, r)
        x = _gauss_newton(x, r, jacobian, weights)
    return _rates(x)


def leave_out(cases: Sequence[PublishedCase], fold_of: Callable[[PublishedCase], str]) -> dict[str, Rates]:
    """For each fold: `fit_rates` of the cases of all other folds, to less than 1 %. It is found from the solution of all
    cases with that one's Jacobian, in a fifth of the time; or from the start, where those steps do not converge."""
    measured = _measured(cases)
    folds = np.array([fold_of(case) for case in measured])
    whole = _logarithms(fit_rates(measured))
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
        fits[name] = _rates(x) if is_close else fit_rates(others)
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


def _residuals(cases: Sequence[PublishedCase], rates: Rates) -> np.ndarray:
    return np.array([math.log(case.predicted_s(rates) / case.measured_s) for case in cases if case.measured_s])


def _rates(x: np.ndarray) -> Rates:
    """The rates whose parameters in `FREE` have these logarithms."""
    values = dict(zip(FREE, np.exp(x).tolist(), strict=True))
    attention = {generation: values.pop(f"attention.{generation}") for generation in START.attention}
    return replace(START, attention=attention, **values)


def _logarithms(rates: Rates) -> np.ndarray:
    attention = {f"attention.{generation}": share for generation, share in rates.attention.items()}
    return np.log([{**vars(rates), **attention}[name] for name in FREE])


_START = _logarithms(START)


# -- uncertainties ---------------------------------------------------------------------------------------------------
GRID = (0.0, 0.05, 0.1, 0.2, 0.4, 0.8)
# Kinds that hardly change what the rows measure, and so are not chosen: their uncertainty is known from elsewhere.
GIVEN = (RateKind.HOST, RateKind.EAGER)
MISSED = 10.0
TURNS = 3


@dataclass(frozen=True, kw_only=True)
class Responses:
    """Rows with their errors, ln(measured / predicted), and what a prediction does if a kind of rate is wrong by each size
    of `GRID`: [rows, kinds, sizes], ln(changed / predicted), above the prediction and below."""

    cases: tuple[PublishedCase, ...]
    errors: np.ndarray
    above: np.ndarray
    below: np.ndarray

    @classmethod
    def of(cls, cases: Sequence[PublishedCase], rates_of: Callable[[PublishedCase], Rates]) -> "Responses":
        """rates_of: fitted without the case's fold."""
        rates = [rates_of(case) for case in cases]
        usual = np.array([case.predicted_s(own) for case, own in zip(cases, rates, strict=True)])

        def other_s(i: int, other: Rates) -> float:
            return float(usual[i]) if other == rates[i] else cases[i].predicted_s(other)

        def changed(sign: int) -> np.ndarray:
            return np.array([[[other_s(i, worse(own, kind, sign * size)) for size in GRID] for kind in RateKind]
                             for i, own in enumerate(rates)])  # fmt: skip

        above, below = changed(1), changed(-1)
        measured = np.array([case.measured_s or math.nan for case in cases])
        return cls(cases=tuple(cases), errors=np.log(measured / usual),
                   above=np.maximum(0.0, np.log(above / usual[:, None, None])),
                   below=np.maximum(0.0, -np.log(below / usual[:, None, None])))  # fmt: skip

    @cached_property
    def sources(self) -> np.ndarray:
        return np.array([case.source for case in self.cases])

    @cached_property
    def weights(self) -> np.ndarray:
        return source_weights(self.sources.tolist())

    @cached_property
    def _machines(self) -> tuple[list[Machine], list[int]]:
        """One of those that `uncertainties` does not tell apart, and which of them is a row's."""
        apart: dict[tuple[object, ...], tuple[int, Machine]] = {}
        keys = [(m.device.name, m.ranks, "network" in m.assumed) for m in (case.machine for case in self.cases)]
        rows = [apart.setdefault(key, (len(apart), c.machine))[0] for key, c in zip(keys, self.cases, strict=True)]
        return [m for _, m in apart.values()], rows

    def without(self, source: str) -> "Responses":
        kept = self.sources != source
        return Responses(cases=tuple(c for c, is_kept in zip(self.cases, kept, strict=True) if is_kept),
                         errors=self.errors[kept], above=self.above[kept], below=self.below[kept])  # fmt: skip

    def scales(self, errors: TimeErrors) -> tuple[np.ndarray, np.ndarray]:
        """[rows] below the prediction and above it: as `bands.error_scale`."""
        machines, of_row = self._machines
        # [rows, kinds]
        sizes = np.array([list(dict(bands.uncertainties(errors, m)).values()) for m in machines])[of_row]
        down, up = (_interpolated(each, sizes) for each in (self.below, self.above))
        return tuple(np.sqrt(errors.floor**2 + (each**2).sum(axis=1)) for each in (down, up))

    def normalised(self, errors: TimeErrors) -> np.ndarray:
        """[rows] of absolute errors."""
        below, above = self.scales(errors)
        return np.asarray(np.abs(self.errors) / np.where(self.errors > 0, above, below))


def _interpolated(responses: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """[rows, kinds] of responses [rows, kinds, len(GRID)] at other sizes; beyond the last on its line."""
    grid = np.array(GRID)
    i = np.clip(np.searchsorted(grid, sizes, "right") - 1, 0, len(GRID) - 2)
    along = (sizes - grid[i]) / (grid[i + 1] - grid[i])
    low, high = (np.take_along_axis(responses, j[..., None], axis=2)[..., 0] for j in (i, i + 1))
    return np.asarray(low + along * (high - low))


def weighted_quantile(values: np.ndarray, weights: np.ndarray, level: float) -> float:
    order = np.argsort(values)
    cumulated = np.cumsum(weights[order]) / weights.sum()
    return float(values[order][min(int(np.searchsorted(cumulated, level)), len(values) - 1)])


def fit_errors(rows: Responses, start: TimeErrors = PUBLISHED_ERRORS) -> TimeErrors:
    """The sizes of all kinds that are not `GIVEN`, the floor, and the quantiles."""
    best, least = start, _score(rows, start)
    for _ in range(TURNS):
        for kind in (*(kind for kind in RateKind if kind not in GIVEN), None):  # None: the floor
            for size in GRID:
                change = {"sizes": {**best.sizes, kind: size}} if kind else {"floor": size or best.floor}
                candidate = replace(best, **change)  # type: ignore[arg-type]
                if (score := _score(rows, candidate)) < least - 1e-9:
                    best, least = candidate, score
    return with_quantiles(rows, best)


def with_quantiles(rows: Responses, errors: TimeErrors) -> TimeErrors:
    normalised = rows.normalised(errors)
    values = tuple(weighted_quantile(normalised, rows.weights, level) for level in LEVELS)
    return replace(errors, quantiles=Quantiles(values), between=_between(rows))


def _between(rows: Responses) -> float:
    """The size that 80 % of the differences of two errors have, of rows of one source, model, device, world size and
    sequence length: the median over sources."""
    groups, sizes = defaultdict[tuple[object, ...], list[int]](list), defaultdict[str, list[float]](list)
    for i, c in enumerate(rows.cases):
        groups[c.source, c.shape.name, c.machine.device.name, c.machine.ranks, c.tokens_per_sample].append(i)
    for alike in groups.values():
        errors = rows.errors[alike]
        pairs = np.abs(errors[:, None] - errors[None, :])[np.triu_indices(len(alike), 1)]
        sizes[rows.cases[alike[0]].source] += pairs.tolist()
    return float(np.median([np.quantile(each, COVERED) for each in sizes.values() if each]))


def memory_quantiles(errors: Sequence[float], sources: Sequence[str]) -> Quantiles:
    """errors: ln(measured / predicted) of peaks. Nothing of memory is fitted, so no row is left out."""
    sizes, weights = np.abs(np.array(errors)), source_weights(sources)
    return Quantiles(tuple(weighted_quantile(sizes, weights, level) for level in LEVELS))


def _score(rows: Responses, errors: TimeErrors) -> float:
    """The mean interval score of the band that covers `COVERED`."""
    below, above = rows.scales(errors)
    scale = np.where(rows.errors > 0, above, below)
    quantile = weighted_quantile(np.abs(rows.errors) / scale, rows.weights, COVERED)
    outside = np.maximum(0.0, np.abs(rows.errors) - quantile * scale)
    return float(np.average(quantile * (below + above) + MISSED * outside, weights=rows.weights))


# -- coverage --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class SourceCoverage:
    """Rows of a source that lie in bands made without it; `width`: mean ln(high / low) of the 80 % band."""

    source: str
    rows: int
    inside_50: int
    inside_80: int
    width: float

    @property
    def expected(self) -> tuple[int, int]:
        """Rows inside that a binomial distribution with 80 % gives in nine of ten cases."""
        each = [math.comb(self.rows, k) * COVERED**k * (1 - COVERED) ** (self.rows - k) for k in range(self.rows + 1)]
        below = np.cumsum(each)
        return int(np.searchsorted(below, 0.05)), int(np.searchsorted(below, 0.95))


@dataclass(frozen=True, kw_only=True)
class Coverage:
    sources: tuple[SourceCoverage, ...]
    constant_width: float  # of the narrowest +-x % that holds 80 % of the rows, sources weighted alike

    def share(self, level: float = COVERED) -> float:
        """Of the rows inside, sources weighted alike."""
        inside = [(s.inside_80 if level == COVERED else s.inside_50) / s.rows for s in self.sources]
        return sum(inside) / len(inside)

    @property
    def width(self) -> float:
        return sum(s.width for s in self.sources) / len(self.sources)

    def to_dict(self) -> dict[str, object]:
        return {
            "inside_80": self.share(), "inside_50": self.share(0.5), "mean_width": self.width,
            "constant_width": self.constant_width,
            "sources": {s.source: {"rows": s.rows, "inside_80": s.inside_80, "inside_50": s.inside_50, "width": s.width,
                                   "expected": list(s.expected)} for s in self.sources},
        }  # fmt: skip


def coverage(rows: Responses, start: TimeErrors = PUBLISHED_ERRORS) -> Coverage:
    """Of every source, in bands whose sizes and quantiles were found without it."""
    covered = []
    for source in dict.fromkeys(rows.sources.tolist()):
        errors = fit_errors(rows.without(source), start)
        of_source = rows.sources == source
        normalised = rows.normalised(errors)[of_source]
        below, above = (each[of_source] for each in rows.scales(errors))
        half, most = errors.quantiles.at(0.5), errors.quantiles.at(COVERED)
        covered.append(SourceCoverage(
            source=source, rows=int(of_source.sum()), inside_50=int((normalised <= half).sum()),
            inside_80=int((normalised <= most).sum()), width=float((most * (below + above)).mean()),
        ))  # fmt: skip
    counts: Mapping[str, int] = Counter(rows.sources.tolist())
    alike = np.array([1.0 / counts[source] for source in rows.sources])
    constant = 2 * weighted_quantile(np.abs(rows.errors), alike, COVERED)
    return Coverage(sources=tuple(sorted(covered, key=lambda s: -s.rows)), constant_width=constant)
