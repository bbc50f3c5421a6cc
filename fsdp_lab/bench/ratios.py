"""From what the ranks measured to figures: medians, and ratios of values from the same round."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fsdp_lab.bench.plan import CONTROL, FORMS, LAB, METERING, PEERS, REFERENCE
from fsdp_lab.core.formatting import Spread

TOLERANCES = {"fp32": 1e-4, "bf16": 2e-2}  # of losses and gradient norms, relative


class BenchError(RuntimeError):
    """The bench was started and failed. `str()` is a sentence."""


def spread(values: Sequence[float]) -> Spread:
    """Of one value or more."""
    found = Spread.of(values)
    assert found is not None
    return found


def ratios(ones: Sequence[float], others: Sequence[float]) -> list[float]:
    """Round by round."""
    return [one / other for one, other in zip(ones, others, strict=True)]


def slowest(ranks: Sequence[Sequence[float]]) -> list[float]:
    """Of each round the seconds of the slowest rank."""
    return [max(seconds) for seconds in zip(*ranks, strict=True)]


@dataclass(frozen=True, kw_only=True)
class BenchResult:
    """Of every form: the seconds of each counted step, and what shows that it did the same work as the others."""

    seconds: Mapping[str, Sequence[float]]  # of the slowest rank
    losses: Mapping[str, Sequence[float]]  # of the last step, by rank
    gradient_norms: Mapping[str, float]  # of the first step, over all ranks
    peak_bytes: Mapping[str, int]  # of the rank that allocated most; 0 on CPUs

    @classmethod
    def of_ranks(cls, ranks: Sequence[Mapping[str, Any]]) -> BenchResult:
        """From what each rank says of each form: {"seconds": [...], "loss": x, "squared_norm": its share}."""
        forms = list(ranks[0])
        return cls(
            seconds={f: slowest([r[f]["seconds"] for r in ranks]) for f in forms},
            losses={f: [r[f]["loss"] for r in ranks] for f in forms},
            peak_bytes={f: max(r[f]["peak_bytes"] for r in ranks) for f in forms},
            gradient_norms={f: math.sqrt(sum(r[f]["squared_norm"] for r in ranks)) for f in forms},
        )

    def step_time(self, form: str) -> Spread:
        return spread(self.seconds[form])

    def ratio(self, one: str, other: str) -> Spread:
        """Of the times of two forms, round by round: below 1, `one` is faster."""
        return spread(ratios(self.seconds[one], self.seconds[other]))

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
        return cost, ratios(bare, again)

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

    def check_same_work(self, precision: str) -> None:
        """Raises BenchError if a form trained something else than the others: its step time then means nothing."""
        difference, form = self.difference()
        if difference > TOLERANCES[precision]:
            raise BenchError(
                f"{form} did other work than {self.reference}: losses or gradient norms differ by {difference:.2g}, "
                f"and {TOLERANCES[precision]:g} is allowed in {precision}; no figure of this run counts"
            )

    def figures(self, environment: Mapping[str, Any]) -> dict[str, Any]:
        """The content of a bench file."""
        return {
            "ratios": {name: asdict(found) for name, found in self.ratios.items()},
            "control": {name: asdict(found) for name, found in self.control.items()},
            "environment": dict(environment),
            "step_time_s": {form: asdict(self.step_time(form)) for form in self.seconds},
            "fastest": self.fastest,
            "peak_bytes": dict(self.peak_bytes),
            "memory_ratios": self.memory_ratios,
        }


def of_launches(ratios: Sequence[Sequence[float]]) -> dict[str, Any]:
    """The ratios of the rounds of several launches; their error is what the medians of the launches differ by.

    Rounds of one launch share what is particular to it, such as where in memory a form was placed. More rounds do not
    reduce that part of the error; only other launches show how large it is.
    """
    medians = [statistics.median(of) for of in ratios]
    error = statistics.stdev(medians) / math.sqrt(len(medians))
    every = spread([ratio for of in ratios for ratio in of])
    return {**asdict(every), "launches": medians, "mean": statistics.mean(medians), "standard_error": error}


# -- as text ---------------------------------------------------------------------------------------------------------


def in_words(found: Spread) -> str:
    return f"{found.median:.3f}, p10 {found.p10:.3f}, p90 {found.p90:.3f}, {found.n} rounds"


def in_ms(found: Spread, digits: int = 1) -> str:
    median, p10, p90 = (f"{1e3 * value:.{digits}f}" for value in (found.median, found.p10, found.p90))
    return f"{median} ms, p10 {p10}, p90 {p90}"
