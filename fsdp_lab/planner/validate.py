"""`validate`: how far predictions are from published steps that the calibration has not seen.

Folds leave out each source in turn; the largest, llm-foundry, in parts, a GPU and a model size each. Errors are averaged
over rows, and over sources first, so that two hundred rows of one source do not decide alone.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from fsdp_lab.core.errors import FieldError
from fsdp_lab.planner.calibrate import leave_out, predicted_s
from fsdp_lab.planner.checks import Check, checks
from fsdp_lab.planner.published import PublishedCase, Row, case
from fsdp_lab.planner.rates import PUBLISHED

# ZeRO-3 with the global batch held fixed while GPUs are added: DeepSpeed of 2021, bound by communication on a network that
# the table does not give (arXiv 2104.04473, table 2).
STRESS = ("sc21-zero3-768", "sc21-zero3-640", "sc21-zero3-1120", "sc21-zero3-2240")
# Its rows give no precision; they are the model and the cluster of figure 7(b), which give bf16.
ALSO_BF16 = "arXiv 2304.11277 / PVLDB 16(12) Fig 6(b)"
LARGEST = "llm-foundry"


@dataclass(frozen=True, kw_only=True)
class HeldOutError:
    """A row that was predicted without having been calibrated on. `error`: predicted over measured, less one."""

    case: PublishedCase
    fold: str
    predicted_s: float

    @property
    def error(self) -> float:
        return self.predicted_s / (self.case.measured_s or 1.0) - 1.0


@dataclass(frozen=True, kw_only=True)
class Errors:
    """Of rows, all left out of what predicted them."""

    held: tuple[HeldOutError, ...]

    @property
    def by_source(self) -> dict[str, list[HeldOutError]]:
        found: dict[str, list[HeldOutError]] = {}
        for one in self.held:
            found.setdefault(one.case.source, []).append(one)
        return found

    @property
    def by_row_mape(self) -> float:
        return mape(self.held)

    @property
    def by_source_mape(self) -> float:
        return sum(mape(rows) for rows in self.by_source.values()) / len(self.by_source)

    @property
    def worst(self) -> HeldOutError:
        return max(self.held, key=lambda one: abs(one.error))


@dataclass(frozen=True, kw_only=True)
class Validation:
    """`lines` and `to_dict` say it."""

    errors: Errors
    constant: Errors  # by one MFU for each GPU, the mean of the other folds' rows
    stress: tuple[HeldOutError, ...]  # predicted, and no part of any average
    checks: tuple[Check, ...]
    refused: tuple[tuple[str, str], ...]  # row, why

    def lines(self) -> list[str]:
        """Plain text."""
        of_all, constant = self.errors, self.constant
        rows = sorted(of_all.by_source.items(), key=lambda item: -mape(item[1]))
        beside = constant.by_source
        worst = of_all.worst
        return [
            f"Error of step time, {len(of_all.held)} rows of {len(rows)} sources, each left out of its own calibration:",
            f"{'':52s} {'rows':>4s} {'error':>7s} {'bias':>7s} {'constant MFU':>13s}",
            *(f"{name[:52]:52s} {len(held):4d} {mape(held):7.1%} {_bias(held):+7.1%} {mape(beside[name]):13.1%}"
              for name, held in rows),
            f"{'average by row':52s} {len(of_all.held):4d} {of_all.by_row_mape:7.1%} {_bias(of_all.held):+7.1%}"
            f" {constant.by_row_mape:13.1%}",
            f"{'average by source':52s} {'':4s} {of_all.by_source_mape:7.1%} {'':7s} {constant.by_source_mape:13.1%}",
            f"worst: {worst.case.id}, {worst.error:+.1%}; by a constant MFU {constant.worst.case.id},"
            f" {constant.worst.error:+.1%}",
            "", "Stress tests of communication, in no average:",
            *(f"{one.case.id:52s} {one.error:+12.1%}" for one in self.stress),
            "", f"{'Throughput of a GPU, as a ratio':52s} {'published':>9s} {'predicted':>9s} {'points':>7s}",
            *(f"{c.name:52s} {c.published:9.3f} {c.predicted:9.3f} {c.points:+7.1f}" for c in self.checks),
        ]  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """Errors as fractions, predicted over measured less one."""
        return {
            "rows": [_row(one) for one in self.errors.held],
            "by_row_mape": self.errors.by_row_mape, "by_source_mape": self.errors.by_source_mape,
            "worst": _row(self.errors.worst),
            "sources": {name: {"rows": len(held), "mape": mape(held), "bias": _bias(held)}
                        for name, held in self.errors.by_source.items()},
            "constant_mfu": {"by_row_mape": self.constant.by_row_mape, "by_source_mape": self.constant.by_source_mape,
                             "worst": _row(self.constant.worst)},
            "stress": [_row(one) for one in self.stress],
            "checks": [{"name": c.name, "kind": c.kind, "published": c.published, "predicted": c.predicted}
                       for c in self.checks],
            "refused": dict(self.refused),
        }  # fmt: skip


def mape(held: Sequence[HeldOutError]) -> float:
    """Mean absolute error, relative to what was measured."""
    return sum(abs(one.error) for one in held) / len(held)


def _bias(held: Sequence[HeldOutError]) -> float:
    return sum(one.error for one in held) / len(held)


def _row(one: HeldOutError) -> dict[str, Any]:
    return {"id": one.case.id, "source": one.case.source, "fold": one.fold, "measured_s": one.case.measured_s,
            "predicted_s": one.predicted_s, "error": one.error}  # fmt: skip


def published() -> list[Row]:
    """The table's rows."""
    text = resources.files("fsdp_lab.planner").joinpath("data/fsdp_measurements.csv").read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines()))


def usable(rows: Iterable[Row]) -> tuple[list[PublishedCase], list[tuple[str, str]]]:
    """Rows in bf16 that tell a step and can be predicted; and why the others are left out."""
    cases, refused = [], []
    for row in rows:
        reason = _unfit(row)
        if not reason:
            try:
                found = case(row)
                reason = "" if found.measured_s else "it tells no step time and no throughput"
            except FieldError as e:
                reason = str(e)
        if reason:
            refused.append((row["id"], reason))
        else:
            cases.append(found)
    return cases, refused


def _unfit(row: Row) -> str:
    if row["suggested_use"] != "calibrate" or row["quality"] not in ("A", "B"):
        return f"quality {row['quality']}, for {row['suggested_use']}"
    if row["id"] in STRESS:
        return "a stress test of communication"
    if "bf16" in row["precision"] or ALSO_BF16 in row["source"]:
        return ""
    return f"its precision is {row['precision'] or 'not given'}"


def validate(rows: Sequence[Row]) -> Validation:
    """Predicts every usable row by rates that were found without its fold. Takes a minute or two."""
    cases, refused = usable(rows)
    found = leave_out(cases, fold)
    held = tuple(HeldOutError(case=c, fold=fold(c), predicted_s=predicted_s(c, found[fold(c)].rates)) for c in cases)
    stress = [case(row) for row in rows if row["id"] in STRESS]
    return Validation(
        errors=Errors(held=held), constant=Errors(held=tuple(by_constant(cases))), checks=checks(rows),
        stress=tuple(HeldOutError(case=c, fold="stress", predicted_s=predicted_s(c, PUBLISHED)) for c in stress),
        refused=tuple(refused),
    )  # fmt: skip


def by_constant(cases: Sequence[PublishedCase]) -> list[HeldOutError]:
    """What one number for each GPU would predict: the mean MFU that other folds reached on it; on any, where none did."""
    at_peak = {c.id: _at_peak_s(c) for c in cases}
    reached = {c.id: at_peak[c.id] / (c.measured_s or 1.0) for c in cases}
    held = []
    for one in cases:
        others = [c for c in cases if fold(c) != fold(one)]
        alike = [c for c in others if c.machine.device.name == one.machine.device.name] or others
        mfu = sum(reached[c.id] for c in alike) / len(alike)
        held.append(HeldOutError(case=one, fold=fold(one), predicted_s=at_peak[one.id] / mfu))
    return held


def _at_peak_s(one: PublishedCase) -> float:
    """Of the model's FLOPs at the data sheet's peak."""
    w = one.spec.workload
    flops = 3 * w.micro_batch * w.accumulate * one.shape.forward_flops(w.seq_len)
    return flops / one.machine.device.flops_per_s(one.spec.strategy.dtypes.param)


def fold(one: PublishedCase) -> str:
    """What is left out together."""
    if LARGEST not in one.source:
        return one.source
    return f"{LARGEST}, {one.machine.device.name}, {one.shape.parameters / 1e9:.1f}B"
