"""How sure a prediction is: a `Band` around a step time or a peak of memory, and the probability that a plan fits.

A step is predicted again with each kind of rate (`RateKind`) worse by its own uncertainty, and better. Slow collectives cost
much where communication binds and nothing where it hides behind computing, so the band is wide where the prediction depends
on what is thinly measured. Responses r of independent kinds add in squares:

    scale = sqrt(floor^2 + r_1^2 + r_2^2 + ...),    band = predicted x exp(-+ quantile x scale)

`quantile` is that of |ln(measured / predicted)| / scale over published rows, each predicted without its own source. This is
normalised split conformal prediction (Lei et al., arXiv 1604.04173, section 5.2) with a source of n rows weighing as
sqrt(n), as its rows err together. The scale gives the shape, the quantile the coverage: see tests/planner/research."""

import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Self

from fsdp_lab.planner.devices import Machine, Rates

COVERED = 0.8  # of the band that is shown
LEVELS = (0.25, 0.5, 0.65, 0.8, 0.9, 0.95)  # of `Quantiles`


@dataclass(frozen=True)
class Band:
    """An interval that holds the measurement with a stated probability."""

    low: float
    high: float

    def inverse(self, of: float) -> Self:
        """The band of `of` / x."""
        return replace(self, low=of / self.high, high=of / self.low)


class RateKind(StrEnum):
    """A kind of rate that can be wrong."""

    COMPUTING = "matrix products and attention"
    TRAFFIC = "kernels beside them"
    LINK = "links inside a host"
    NETWORK = "network between hosts"
    LATENESS = "latency and late ranks"
    OVERLAP = "slowdown by sending"
    HOST = "the host's time to issue kernels"
    EAGER = "the same where they were counted"


SENDING = (RateKind.LINK, RateKind.NETWORK, RateKind.LATENESS, RateKind.OVERLAP)


@dataclass(frozen=True)
class Quantiles:
    """An absolute normalised error: its value at each of `LEVELS`, interpolated between, 0 at level 0."""

    values: tuple[float, ...]

    def at(self, level: float) -> float:
        """Returns the error at a level; beyond the last known level, on the line through the last two."""
        points = ((0.0, 0.0), *zip(LEVELS, self.values, strict=True))
        i = min(bisect_left(LEVELS, level) + 1, len(LEVELS))
        (x0, y0), (x1, y1) = points[i - 1], points[i]
        return y0 + (y1 - y0) * (level - x0) / (x1 - x0)

    def probability_below(self, value: float) -> float:
        """The probability that a signed error, as likely above zero as below it, is below `value`."""
        points = ((0.0, 0.0), *zip(LEVELS, self.values, strict=True))
        # Beyond the last level the rest falls exponentially, for want of rows.
        size, share = abs(value), 1.0 - (1.0 - LEVELS[-1]) * math.exp(1.0 - abs(value) / self.values[-1])
        for (x0, y0), (x1, y1) in itertools.pairwise(points):
            if size <= y1:
                share = x0 + (x1 - x0) * (size - y0) / (y1 - y0)
                break
        return 0.5 + math.copysign(share / 2, value)


@dataclass(frozen=True, kw_only=True)
class TimeErrors:
    """Uncertainties of a step's rates, as standard deviations of their logarithms."""

    sizes: Mapping[RateKind, float]
    unstated: float  # of a network that is assumed, instead of that of `sizes`
    unmeasured: float  # of computing on a device without rows; assumed
    floor: float  # of any prediction
    between: float  # of the ratio of two predictions for one model on one device
    quantiles: Quantiles
    devices: frozenset[str]  # with rows
    ranks: int  # the most of a row; beyond, lateness and the network are as uncertain again for each doubling


# tests/planner/research finds floor, between, quantiles and the sizes but that of HOST; a test repeats it. On HOST
# hardly a row depends: how fast a program issues kernels differs widely. EAGER: the ends of `Rates.eager_s` are those of the
# band that is shown, where a step takes as long as its host. unstated: the spread of the networks that
# sources state, 15 to 250 Gb/s a GPU for A100s.
PUBLISHED_ERRORS = TimeErrors(
    sizes=dict(zip(RateKind, (0.0, 0.4, 0.2, 0.4, 0.4, 0.8, 0.5, 1.38), strict=True)),
    unstated=0.8,
    unmeasured=0.15,
    floor=0.1,
    between=0.0149,
    quantiles=Quantiles((0.1427, 0.3265, 0.4856, 0.8039, 0.97, 1.4153)),
    devices=frozenset({"a100-40", "a100-64", "a100-80", "h100", "h100-hbm2e", "h200", "gb200", "v100"}),
    ranks=2048,
)


@dataclass(frozen=True, kw_only=True)
class CalibratedErrors:
    """Errors of steps on a machine that was calibrated: `quantiles` of |ln(measured / predicted)|, for any Spec."""

    quantiles: Quantiles
    between: float


# From 30 ratios of `python -m tests.bench plan`: a model that was not among those timed, two cores, other work beside it.
CALIBRATED_ERRORS = CalibratedErrors(quantiles=Quantiles((0.041, 0.06, 0.083, 0.136, 0.185, 0.199)), between=0.079)
# Of |ln(measured / predicted)| of peaks, by type of device: published rows (a test repeats it); on CPUs the 6 %
# that tests allow between plan and ledger where there are convolutions, spread evenly.
MEMORY_ERRORS: Mapping[str, Quantiles] = {
    "cuda": Quantiles((0.026, 0.0373, 0.0497, 0.1145, 0.1989, 0.2679)),
    "cpu": Quantiles(tuple(0.06 * level for level in LEVELS)),
}


@dataclass(frozen=True, kw_only=True)
class ErrorScale:
    """ln(measured / predicted) of about one standard deviation, below the prediction and above; `causes`: above, by kind."""

    below: float
    above: float
    causes: Mapping[RateKind, float]

    def band(self, predicted: float, quantile: float) -> Band:
        return Band(predicted * math.exp(-quantile * self.below), predicted * math.exp(quantile * self.above))

    def apart(self, other: Self, between: float, quantile: float) -> float:
        """ln of the ratio that two measurements may differ in, where the predictions are equal: what both predictions share
        does not count."""
        kinds = {*self.causes, *other.causes}
        return math.hypot(between, *(quantile * (self.causes.get(k, 0.0) - other.causes.get(k, 0.0)) for k in kinds))


def worse(rates: Rates, kind: RateKind, by: float) -> Rates:
    """The rates with one kind slower by a factor of exp(by)."""
    f = math.exp(by)
    attention = {generation: share / f for generation, share in rates.attention.items()}
    changes: dict[RateKind, dict[str, Any]] = {
        RateKind.COMPUTING: {"matrix": rates.matrix / f, "attention": attention, "operands": rates.operands * f},
        RateKind.TRAFFIC: {"traffic": rates.traffic * f},
        RateKind.LINK: {"link": rates.link / f},
        RateKind.NETWORK: {"network": rates.network / f},
        RateKind.LATENESS: {name: getattr(rates, name) * f for name in ("latency_s", "hop_s", "jitter_s")},
        RateKind.OVERLAP: {"interference": rates.interference * f},
        RateKind.HOST: {"kernel_s": rates.kernel_s * f, "step_s": rates.step_s * f},
        RateKind.EAGER: {"eager_s": rates.eager_s * f},
    }
    return replace(rates, **changes[kind])


def of_network(errors: TimeErrors) -> TimeErrors:
    """The errors of a network between hosts that were calibrated, beside the errors of calibrated hosts."""
    kept = (RateKind.NETWORK, RateKind.LATENESS)
    floor = CALIBRATED_ERRORS.quantiles.at(COVERED) / errors.quantiles.at(COVERED)
    sizes = {kind: size if kind in kept else 0.0 for kind, size in errors.sizes.items()}
    return replace(errors, sizes=sizes, unmeasured=0.0, floor=floor)


def uncertainties(errors: TimeErrors, machine: Machine) -> Iterator[tuple[RateKind, float]]:
    beyond = max(0.0, math.log2(machine.ranks / errors.ranks))
    for kind, size in errors.sizes.items():
        if kind is RateKind.COMPUTING and machine.device.name not in errors.devices:
            yield kind, errors.unmeasured
        elif kind is RateKind.NETWORK:
            yield kind, (errors.unstated if "network" in machine.assumed else size) * math.sqrt(1 + beyond)
        else:
            yield kind, size * (math.sqrt(1 + beyond) if kind is RateKind.LATENESS else 1.0)


def error_scale(errors: TimeErrors, machine: Machine, rates: Rates, seconds: Callable[[Rates], float]) -> ErrorScale:
    """seconds: of a step with given rates."""
    usual, above, below = seconds(rates), dict[RateKind, float](), dict[RateKind, float]()
    for kind, size in uncertainties(errors, machine):
        if size == 0 or (kind in SENDING and machine.ranks == 1) or (kind is RateKind.NETWORK and machine.hosts == 1):
            above[kind] = below[kind] = 0.0
            continue
        above[kind] = max(0.0, math.log(seconds(worse(rates, kind, size)) / usual))
        below[kind] = max(0.0, math.log(usual / seconds(worse(rates, kind, -size))))
    down, up = (math.hypot(errors.floor, *each.values()) for each in (below, above))
    return ErrorScale(below=down, above=up, causes=above)
