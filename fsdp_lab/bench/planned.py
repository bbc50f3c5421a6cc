"""Predicted step times beside measured ones: which Specs are compared, and what comes out."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fsdp_lab.bench.ratios import ratios, spread
from fsdp_lab.core.errors import FieldError
from fsdp_lab.core.formatting import Spread, Table
from fsdp_lab.core.spec import BACKENDS, SHARDINGS, Spec
from fsdp_lab.planner.calibration import Calibration
from fsdp_lab.planner.plan import plan
from fsdp_lab.planner.shapes.presets import shape_for

AIM = 0.15  # of the measured step


def strategies(base: Spec) -> Iterator[Spec]:
    """Every backend with every sharding that it has on so many ranks; hybrids where a shard group is not all ranks."""
    for backend in BACKENDS:
        for sharding in SHARDINGS:
            try:
                found = base.replace(backend=backend, sharding=sharding)
            except FieldError:
                continue
            if not found.strategy.is_hybrid or 1 < found.shard_factor < found.world_size:
                yield found


@dataclass(frozen=True, kw_only=True)
class PredictedStepTime:
    """One Spec in every round: a round calibrates anew, and its steps are timed in turns with the calibration's."""

    spec: Spec
    predicted_s: Sequence[float]
    measured_s: Sequence[float]  # the median of the round's steps

    @property
    def ratio(self) -> Spread:
        """Predicted over measured, round by round."""
        return spread(ratios(self.predicted_s, self.measured_s))

    @property
    def error(self) -> float:
        """Of the median ratio."""
        return self.ratio.median - 1

    def to_dict(self) -> dict[str, Any]:
        return {"spec": self.spec.to_dict(), "predicted_s": list(self.predicted_s), "measured_s": list(self.measured_s),
                "predicted/measured": asdict(self.ratio)}  # fmt: skip


def predictions(specs: Sequence[Spec], rounds: Sequence[Calibration]) -> list[PredictedStepTime]:
    """`rounds`: calibrations during which these Specs were timed."""
    found = []
    for i, spec in enumerate(specs):
        shape = shape_for(spec.workload.model, spec.strategy.wrap)
        predicted = [plan(spec, shape, here.machine, rates=here.rates).step_time_s for here in rounds]
        measured = [statistics.median(here.beside_s[i]) for here in rounds]
        found.append(PredictedStepTime(spec=spec, predicted_s=predicted, measured_s=measured))
    return found


def errors(rows: Sequence[PredictedStepTime]) -> dict[str, float]:
    """The errors of all Specs: their mean, the worst, and the share within the aim."""
    found = [abs(row.error) for row in rows]
    return {"mean": statistics.fmean(found), "worst": max(found), "within": sum(e <= AIM for e in found) / len(found)}


def lines(rows: Sequence[PredictedStepTime]) -> Iterator[str]:
    """A table with a row for each Spec, and a line for all of them."""
    cells = []
    for row in rows:
        s, r = row.spec.strategy, row.ratio
        times = [f"{1e3 * sorted(values)[len(values) // 2]:.1f}" for values in (row.measured_s, row.predicted_s)]
        ratio = [f"{value:.3f}" for value in (r.median, r.p10, r.p90)]
        cells.append((str(row.spec.workload.model), s.backend, s.sharding, str(s.precision), *times, *ratio))
    columns = ("model", "backend", "sharding", "precision", "measured ms", "predicted ms", "ratio", "p10", "p90")
    yield repr(Table(columns=columns, rows=tuple(cells), left=frozenset(columns[:4])))
    found = errors(rows)
    yield (f"errors of the medians: mean {found['mean']:.1%}, worst {found['worst']:.1%}, "
           f"{found['within']:.0%} of {len(rows)} within {AIM:.0%}")  # fmt: skip
