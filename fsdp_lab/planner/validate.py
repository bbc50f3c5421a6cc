"""`validate`: how far predictions are from published steps that the calibration has not seen.

Folds leave out each source in turn; the largest, llm-foundry, in parts, a GPU and a model size each. Errors are averaged
over rows, and over sources first, so that two hundred rows of one source do not decide alone.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib import resources
from multiprocessing import get_context

from fsdp_lab.planner.calibrate import calibrate, predicted_s
from fsdp_lab.planner.rows import Case, Row, case
from fsdp_lab.spec import SpecError

# ZeRO-3 with the global batch held fixed while GPUs are added: DeepSpeed of 2021, bound by communication on a network that
# the table does not give (arXiv 2104.04473, table 2).
STRESS = ("sc21-zero3-768", "sc21-zero3-640", "sc21-zero3-1120", "sc21-zero3-2240")
# Its rows give no precision; they are the model and the cluster of figure 7(b), which give bf16.
ALSO_BF16 = "arXiv 2304.11277 / PVLDB 16(12) Fig 6(b)"
LARGEST = "llm-foundry"


@dataclass(frozen=True, kw_only=True)
class Held:
    """A row that was predicted without having been calibrated on. `error`: predicted over measured, less one."""

    case: Case
    fold: str
    predicted_s: float

    @property
    def error(self) -> float:
        return self.predicted_s / (self.case.measured_s or 1.0) - 1.0


@dataclass(frozen=True, kw_only=True)
class Validation:
    held: tuple[Held, ...]
    refused: tuple[tuple[str, str], ...]  # row, why

    @property
    def by_source(self) -> dict[str, list[Held]]:
        found: dict[str, list[Held]] = {}
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
    def worst(self) -> Held:
        return max(self.held, key=lambda one: abs(one.error))


def mape(held: Sequence[Held]) -> float:
    """Mean absolute error, relative to what was measured."""
    return sum(abs(one.error) for one in held) / len(held)


def published() -> list[Row]:
    """The table's rows."""
    text = resources.files("fsdp_lab.planner").joinpath("data/fsdp_measurements.csv").read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines()))


def usable(rows: Iterable[Row]) -> tuple[list[Case], list[tuple[str, str]]]:
    """Rows in bf16 that tell a step and can be predicted; and why the others are left out."""
    cases, refused = [], []
    for row in rows:
        reason = _unfit(row)
        if not reason:
            try:
                found = case(row)
                reason = "" if found.measured_s else "it tells no step time and no throughput"
            except SpecError as e:
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
    """Predicts every usable row by rates that were found without its fold. Takes some seconds a fold, on all cores."""
    cases, refused = usable(rows)
    names = list(dict.fromkeys(map(fold, cases)))
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        held = [one for of_fold in pool.map(partial(left_out, cases), names) for one in of_fold]
    return Validation(held=tuple(held), refused=tuple(refused))


def left_out(cases: Sequence[Case], name: str) -> list[Held]:
    """The cases of a fold, predicted by the others."""
    rates = calibrate([one for one in cases if fold(one) != name]).rates
    return [Held(case=one, fold=name, predicted_s=predicted_s(one, rates)) for one in cases if fold(one) == name]


def fold(one: Case) -> str:
    """What is left out together."""
    if LARGEST not in one.source:
        return one.source
    return f"{LARGEST}, {one.machine.device.name}, {one.shape.parameters / 1e9:.1f}B"
