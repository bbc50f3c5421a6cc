"""Predicted step times beside measured ones: which Specs are compared, and what comes out."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fsdp_lab.bench.ratios import Spread
from fsdp_lab.models.preset_shapes import shape_for
from fsdp_lab.planner.here import Calibration
from fsdp_lab.planner.plan import plan
from fsdp_lab.spec import BACKENDS, HYBRIDS, SHARDINGS, Spec, SpecError

AIM = 0.15  # of the measured step


def strategies(base: Spec) -> Iterator[Spec]:
    """Every backend with every sharding that it has on so many ranks; hybrids where a shard is not all of them."""
    for backend in BACKENDS:
        for sharding in SHARDINGS:
            try:
                found = base.replace(backend=backend, sharding=sharding)
            except SpecError:
                continue
            if sharding not in HYBRIDS or 1 < found.shard_factor < found.world_size:
                yield found


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One Spec in every round: a round calibrates anew, and its steps are timed in turns with the calibration's."""

    spec: Spec
    predicted_s: Sequence[float]
    measured_s: Sequence[float]  # the median of the round's steps

    @property
    def ratio(self) -> Spread:
        """Predicted over measured, round by round."""
        return Spread.of([p / m for p, m in zip(self.predicted_s, self.measured_s, strict=True)])

    @property
    def error(self) -> float:
        """Of the median ratio."""
        return self.ratio.median - 1

    def to_dict(self) -> dict[str, Any]:
        r = self.ratio
        ratio = {"median": r.median, "p10": r.p10, "p90": r.p90, "n": r.n}
        return {"spec": self.spec.to_dict(), "predicted_s": list(self.predicted_s), "measured_s": list(self.measured_s),
                "predicted/measured": ratio}  # fmt: skip


def compared(specs: Sequence[Spec], rounds: Sequence[Calibration]) -> list[Compared]:
    """`rounds`: calibrations that had these Specs beside them."""
    found = []
    for i, spec in enumerate(specs):
        shape = shape_for(spec.workload.model, spec.strategy.wrap)
        predicted = [plan(spec, shape, here.machine, rates=here.rates).step_time_s for here in rounds]
        measured = [statistics.median(here.beside_s[i]) for here in rounds]
        found.append(Compared(spec=spec, predicted_s=predicted, measured_s=measured))
    return found


def figures(rows: Sequence[Compared]) -> Mapping[str, float]:
    """Of the errors of all Specs: their mean, the worst, and how many are within the aim."""
    errors = [abs(row.error) for row in rows]
    return {
        "mean": statistics.fmean(errors),
        "worst": max(errors),
        "within": sum(e <= AIM for e in errors) / len(errors),
    }
