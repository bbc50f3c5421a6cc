"""What the ranks measured, as figures: medians, and ratios of steps that were taken in the same round."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fsdp_lab.bench.forms import CONTROL, FORMS, LAB, METERING, PEERS, REFERENCE

TOLERANCES = {"fp32": 1e-4, "bf16": 2e-2}  # of losses and gradient norms, relative


@dataclass(frozen=True, kw_only=True)
class Spread:
    """The middle of some numbers, and where eight tenths of them lie."""

    median: float
    p10: float
    p90: float
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of one number or more; percentiles with linear interpolation between neighbours."""
        deciles = statistics.quantiles(values, n=10, method="inclusive") if len(values) > 1 else [values[0]] * 9
        return cls(median=statistics.median(values), p10=deciles[0], p90=deciles[8], n=len(values))


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Of every form: the seconds of each counted step, and what shows that it did the same work as the others."""

    seconds: Mapping[str, Sequence[float]]  # of the slowest rank
    losses: Mapping[str, Sequence[float]]  # of the last step, by rank
    gradient_norms: Mapping[str, float]  # of the first step, over all ranks
    peak_bytes: Mapping[str, int]  # of the rank that allocated most; 0 on CPUs

    @classmethod
    def of_ranks(cls, ranks: Sequence[Mapping[str, Any]]) -> Measured:
        """From what each rank says of each form: {"seconds": [...], "loss": x, "squared_norm": its share}."""
        forms = list(ranks[0])
        return cls(
            seconds={f: [max(step) for step in zip(*(r[f]["seconds"] for r in ranks), strict=True)] for f in forms},
            losses={f: [r[f]["loss"] for r in ranks] for f in forms},
            peak_bytes={f: max(r[f]["peak_bytes"] for r in ranks) for f in forms},
            gradient_norms={f: math.sqrt(sum(r[f]["squared_norm"] for r in ranks)) for f in forms},
        )

    def step_time(self, form: str) -> Spread:
        return Spread.of(self.seconds[form])

    def ratio(self, one: str, other: str) -> Spread:
        """Of the times of two forms, round by round: below 1, `one` is faster."""
        return Spread.of([a / b for a, b in zip(self.seconds[one], self.seconds[other], strict=True)])

    @property
    def fastest(self) -> dict[str, str]:
        """Of each peer that was measured, the form with the smallest median."""
        of_peer = {peer: [f for f in self.seconds if FORMS[f].peer == peer] for peer in PEERS}
        return {peer: min(of, key=lambda f: statistics.median(self.seconds[f])) for peer, of in of_peer.items() if of}

    @property
    def reference(self) -> str:
        """The form that others are compared with where no peer is meant."""
        return REFERENCE if REFERENCE in self.seconds else next(iter(self.seconds))

    @property
    def ratios(self) -> dict[str, Spread]:
        """Of the lab over the fastest form of each peer; none where the lab was not measured."""
        lab = LAB in self.seconds
        return {f"{LAB}/{peer}": self.ratio(LAB, form) for peer, form in self.fastest.items() if lab}

    @property
    def memory_ratios(self) -> dict[str, float]:
        """Of peak allocated memory, of the lab over the form of each peer that is fastest; none on CPUs."""
        if not self.peak_bytes.get(LAB):
            return {}
        return {f"{LAB}/{peer}": self.peak_bytes[LAB] / self.peak_bytes[form] for peer, form in self.fastest.items()}

    @property
    def control(self) -> dict[str, Spread]:
        """Of the lab over a second instance of itself: what a ratio is when nothing differs."""
        both = LAB in self.seconds and CONTROL in self.seconds
        return {f"{LAB}/{LAB}": self.ratio(LAB, CONTROL)} if both else {}

    def metering(self, peer: str) -> tuple[list[float], list[float]]:
        """What measuring costs a backend, round by round: metered over bare, the mean of the two that the round had; and
        bare over itself."""
        bare, metered, again = (self.seconds[name] for name in METERING[peer])
        cost = [2 * m / (a + b) for m, a, b in zip(metered, bare, again, strict=True)]
        return cost, [a / b for a, b in zip(bare, again, strict=True)]

    def difference(self) -> tuple[float, str]:
        """The largest relative difference to the reference, of last losses and first gradient norms, and its form."""
        apart = {form: self._apart(form) for form in self.seconds}
        worst = max(apart, key=lambda form: apart[form])
        return apart[worst], worst

    def _apart(self, form: str) -> float:
        mine = [*self.losses[form], self.gradient_norms[form]]
        theirs = [*self.losses[self.reference], self.gradient_norms[self.reference]]
        gaps = [abs(a - b) / abs(b) if b else abs(a) for a, b in zip(mine, theirs, strict=True)]
        return max(gap if math.isfinite(gap) else math.inf for gap in gaps)

    def figures(self, environment: Mapping[str, Any]) -> dict[str, Any]:
        """What stands in a bench file."""
        return {
            "ratios": {name: asdict(spread) for name, spread in self.ratios.items()},
            "control": {name: asdict(spread) for name, spread in self.control.items()},
            "environment": dict(environment),
            "step_time_s": {form: asdict(self.step_time(form)) for form in self.seconds},
            "fastest": self.fastest,
            "peak_bytes": dict(self.peak_bytes),
            "memory_ratios": self.memory_ratios,
        }


def mean_of_launches(medians: Sequence[float]) -> tuple[float, float]:
    """The mean of what two launches or more gave, and its standard error.

    Rounds of one launch share what is the launch's own, as where in memory a form came to lie: their number does not make
    it smaller, and only other launches show how large it is.
    """
    return statistics.mean(medians), statistics.stdev(medians) / math.sqrt(len(medians))
