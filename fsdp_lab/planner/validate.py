"""Predictions against published measurements: `validate` of step times, `checks` of ratios, `memory_rows` of peak memory.

`validate` is a cross-validation. Each fold leaves out one source; the largest source, llm-foundry, is split by GPU and model
size. Errors are averaged over rows, and over sources first, so that two hundred rows of one source do not decide alone.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from typing import Any

from fsdp_lab.core.errors import FieldError
from fsdp_lab.planner.bands import COVERED
from fsdp_lab.planner.coverage import Coverage, Responses, coverage, memory_quantiles
from fsdp_lab.planner.devices import PUBLISHED
from fsdp_lab.planner.fitting import leave_out, predicted_s
from fsdp_lab.planner.memory import memory
from fsdp_lab.planner.plan import Plan, plan
from fsdp_lab.planner.published import PublishedCase, Row, case, memory_kind, unit_bytes

# DeepSpeed's ZeRO-3 of 2021 with a fixed global batch on more and more GPUs, bound by communication on a network that the
# table does not give (arXiv 2104.04473, table 2).
STRESS = ("sc21-zero3-768", "sc21-zero3-640", "sc21-zero3-1120", "sc21-zero3-2240")
# Rows without a precision; model and cluster are those of figure 7(b), in bf16.
ALSO_BF16 = "arXiv 2304.11277 / PVLDB 16(12) Fig 6(b)"
LARGEST = "llm-foundry"


@dataclass(frozen=True, kw_only=True)
class HeldOutError:
    """A row and its prediction with rates that were fitted without its fold. `error`: predicted / measured - 1."""

    case: PublishedCase
    fold: str
    predicted_s: float

    @property
    def error(self) -> float:
        return self.predicted_s / (self.case.measured_s or 1.0) - 1.0

    @cached_property
    def plan(self) -> Plan:
        """With the rates of the package."""
        return plan(self.case.spec, self.case.shape, self.case.machine, software=self.case.software)

    @property
    def binding(self) -> str:
        """What binds, and for communication whether the network is stated."""
        if self.plan.binding != "communication":
            return self.plan.binding
        return "communication, network " + ("assumed" if "network" in self.plan.assumed else "stated")

    @property
    def ranks(self) -> str:
        """A class of sizes."""
        return next((f"up to {most} GPUs" for most in (8, 64, 256) if self.case.machine.ranks <= most), "more GPUs")


@dataclass(frozen=True, kw_only=True)
class Errors:
    """Errors of held-out rows."""

    held: tuple[HeldOutError, ...]

    @property
    def by_source(self) -> dict[str, list[HeldOutError]]:
        return self.by(lambda row: row.case.source)

    def by(self, key: Callable[[HeldOutError], str]) -> dict[str, list[HeldOutError]]:
        rows: dict[str, list[HeldOutError]] = {}
        for row in self.held:
            rows.setdefault(key(row), []).append(row)
        return rows

    @property
    def by_row_mape(self) -> float:
        return mape(self.held)

    @property
    def by_source_mape(self) -> float:
        return sum(mape(rows) for rows in self.by_source.values()) / len(self.by_source)

    @property
    def worst(self) -> HeldOutError:
        return max(self.held, key=lambda row: abs(row.error))


@dataclass(frozen=True, kw_only=True)
class Validation:
    """Results of `validate`, with `lines` as text and `to_dict` as JSON."""

    errors: Errors
    constant: Errors  # of predictions by a constant MFU per GPU, the mean of the other folds' rows
    coverage: Coverage  # of the bands
    stress: tuple[HeldOutError, ...]  # not in the averages
    checks: tuple[Check, ...]
    refused: tuple[tuple[str, str], ...]  # (row id, reason)

    def lines(self) -> list[str]:
        """Plain text."""
        errors, constant, constant_rows = self.errors, self.constant, self.constant.by_source
        sources = sorted(errors.by_source.items(), key=lambda item: -mape(item[1]))
        return [
            f"Error of step time, {len(errors.held)} rows of {len(sources)} sources, each predicted without its own fold:",
            f"{'':52s} {'rows':>4s} {'error':>7s} {'bias':>7s} {'constant MFU':>13s}",
            *(f"{name[:52]:52s} {len(held):4d} {mape(held):7.1%} {_bias(held):+7.1%} {mape(constant_rows[name]):13.1%}"
              for name, held in sources),
            f"{'average by row':52s} {len(errors.held):4d} {errors.by_row_mape:7.1%} {_bias(errors.held):+7.1%}"
            f" {constant.by_row_mape:13.1%}",
            f"{'average by source':52s} {'':4s} {errors.by_source_mape:7.1%} {'':7s} {constant.by_source_mape:13.1%}",
            f"worst: {errors.worst.case.id}, {errors.worst.error:+.1%}; with a constant MFU {constant.worst.case.id},"
            f" {constant.worst.error:+.1%}",
            "", *_parts(errors, "what binds", lambda row: row.binding), *_parts(errors, "size", lambda row: row.ranks),
            "", *coverage_lines(self.coverage),
            "", "Stress tests of communication, not in the averages:",
            *(f"{row.case.id:52s} {row.error:+12.1%}" for row in self.stress),
            "", f"{'Throughput of a GPU, as a ratio':52s} {'published':>9s} {'predicted':>9s} {'points':>7s}",
            *(f"{c.name:52s} {c.published:9.3f} {c.predicted:9.3f} {c.points:+7.1f}" for c in self.checks),
        ]  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """Errors are fractions: predicted / measured - 1. Widths are ln(high / low)."""
        errors = self.errors
        return {
            "rows": [_row(row) for row in errors.held],
            "by_row_mape": errors.by_row_mape, "by_source_mape": errors.by_source_mape, "worst": _row(errors.worst),
            "sources": _mapes(errors.by_source),
            "constant_mfu": {"by_row_mape": self.constant.by_row_mape, "by_source_mape": self.constant.by_source_mape,
                             "worst": _row(self.constant.worst)},
            "by_binding": _mapes(errors.by(lambda row: row.binding)), "by_ranks": _mapes(errors.by(lambda row: row.ranks)),
            "coverage": self.coverage.to_dict(), "stress": [_row(row) for row in self.stress],
            "checks": [{"name": c.name, "kind": c.kind, "published": c.published, "predicted": c.predicted}
                       for c in self.checks],
            "refused": dict(self.refused),
        }  # fmt: skip


def mape(rows: Sequence[HeldOutError | MemoryRow]) -> float:
    """Mean absolute error relative to the measurement; NaN for no rows."""
    return sum(abs(row.error) for row in rows) / len(rows) if rows else float("nan")


def _mapes(parts: Mapping[str, Sequence[HeldOutError]]) -> dict[str, dict[str, float]]:
    return {name: {"rows": len(held), "mape": mape(held), "bias": _bias(held)} for name, held in parts.items()}


def _parts(errors: Errors, title: str, key: Callable[[HeldOutError], str]) -> list[str]:
    """Lines of the errors by a key."""
    return [f"{f'by {title}: {name}':52s} {len(held):4d} {mape(held):7.1%} {_bias(held):+7.1%}"
            for name, held in sorted(errors.by(key).items())]  # fmt: skip


def coverage_lines(found: Coverage) -> list[str]:
    """How many rows the bands hold, as text."""
    ratio = found.width / found.constant_width
    return [
        f"Bands, each made without its source: the 80 % band holds {found.share():.0%} of the rows, the 50 % band"
        f" {found.share(0.5):.0%}, with sources weighted alike;",
        f"its mean width is ln(high/low) {found.width:.2f}, {ratio:.2f} of the narrowest +-x % that holds 80 %.",
        f"{'sources of 10 rows or more':52s} {'rows':>4s} {'inside':>7s} {'expected':>9s} {'width':>6s}",
        *(f"{s.source[:52]:52s} {s.rows:4d} {s.inside_80:7d} {f'{s.expected[0]}-{s.expected[1]}':>9s} {s.width:6.2f}"
          f"{'' if s.is_expected else '  !'}" for s in found.sources if s.rows >= 10),
    ]  # fmt: skip


def _bias(held: Sequence[HeldOutError]) -> float:
    return sum(row.error for row in held) / len(held)


def _row(one: HeldOutError) -> dict[str, Any]:
    return {"id": one.case.id, "source": one.case.source, "fold": one.fold, "measured_s": one.case.measured_s,
            "predicted_s": one.predicted_s, "error": one.error}  # fmt: skip


def published() -> list[Row]:
    """The table's rows."""
    text = resources.files("fsdp_lab.planner").joinpath("data/fsdp_measurements.csv").read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines()))


def usable(rows: Iterable[Row]) -> tuple[list[PublishedCase], list[tuple[str, str]]]:
    """Rows in half precision that have a step time and can be predicted; and (row id, reason) of the others."""
    cases, refused = [], []
    for row in rows:
        reason = _unfit(row)
        if not reason:
            try:
                found = case(row)
                reason = "" if found.measured_s else "it gives neither step time nor throughput"
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
    if re.search("bf16|fp16", row["precision"]) or ALSO_BF16 in row["source"]:
        return ""
    return f"its precision is {row['precision'] or 'not given'}"


def validate(rows: Sequence[Row]) -> Validation:
    """Predicts every usable row with rates fitted to the other folds. Takes a minute or two."""
    cases, refused = usable(rows)
    fits = leave_out(cases, fold)
    held = tuple(HeldOutError(case=c, fold=fold(c), predicted_s=predicted_s(c, fits[fold(c)].rates)) for c in cases)
    stress = [case(row) for row in rows if row["id"] in STRESS]
    responses = Responses.of(cases, lambda one: fits[fold(one)].rates)
    return Validation(
        coverage=coverage(responses),
        errors=Errors(held=held), constant=Errors(held=tuple(by_constant(cases))), checks=checks(rows),
        stress=tuple(HeldOutError(case=c, fold="stress", predicted_s=predicted_s(c, PUBLISHED)) for c in stress),
        refused=tuple(refused),
    )  # fmt: skip


def by_constant(cases: Sequence[PublishedCase]) -> list[HeldOutError]:
    """Predictions by a constant MFU: the mean of the other folds' rows on the same GPU, or on any GPU if there are none."""
    at_peak_s = {c.id: _at_peak_s(c) for c in cases}
    mfus = {c.id: at_peak_s[c.id] / (c.measured_s or 1.0) for c in cases}
    held = []
    for one in cases:
        others = [c for c in cases if fold(c) != fold(one)]
        same_gpu = [c for c in others if c.machine.device.name == one.machine.device.name] or others
        mfu = sum(mfus[c.id] for c in same_gpu) / len(same_gpu)
        held.append(HeldOutError(case=one, fold=fold(one), predicted_s=at_peak_s[one.id] / mfu))
    return held


def _at_peak_s(one: PublishedCase) -> float:
    """Seconds of the model's FLOPs at the data sheet's peak."""
    w = one.spec.workload
    flops = 3 * w.micro_batch * w.accumulate * one.shape.forward_flops(w.seq_len)
    return flops / one.machine.device.flops_per_s(one.spec.strategy.dtypes.param)


def fold(one: PublishedCase) -> str:
    """The name of a case's fold."""
    if LARGEST not in one.source:
        return one.source
    return f"{LARGEST}, {one.machine.device.name}, {one.shape.parameters / 1e9:.1f}B"


# -- ratios ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Check:
    """A ratio of two throughputs per GPU: of a row of the table to the same row with a column changed. The published ratio
    is that of the table if it has both rows, otherwise that of the source in the comment."""

    name: str
    kind: str  # "scaling", "ablation"
    published: float
    predicted: float

    @property
    def points(self) -> float:
        """Predicted minus published ratio, in percentage points."""
        return 100 * (self.predicted - self.published)


def checks(rows: Sequence[Row]) -> tuple[Check, ...]:
    """Scaling and ablations. rows: the whole table."""
    table = {row["id"]: row for row in rows}
    return (*_scaling(table), *_ablations(table))


# Per GPU at 512 GPUs and at 128: mosaicml/llm-foundry@8c8dd48 scripts/train/benchmarking/README.md, 'Large Scale'.
MPT_7B_TFLOPS = (417, 452)
# At 1,536 GPUs and at 384, global batch 1,536: arXiv 2104.04473, table 2.
ZERO3_175B_TFLOPS = (44, 144)


def _scaling(table: Mapping[str, Row]) -> list[Check]:
    pairs = (
        ("GPT 175B, 128 to 512 GPUs", "fsdp-6b-on-512", "fsdp-6b-on-128"),
        ("MPT 3B, 128 to 512 GPUs", "mosaic-013", "mosaic-015"),
        ("MPT 13B, 128 to 512 GPUs", "mosaic-007", "mosaic-009"),
        ("MPT 30B, 128 to 512 GPUs", "mosaic-004", "mosaic-006"),
        ("T5 11B, 8 to 512 GPUs", "fsdp-7c-B8-512", "fsdp-7c-B8-8"),
    )
    seven = table["mosaic-011"]
    many, few = MPT_7B_TFLOPS
    found = [_check(name, "scaling", table[a], table[b]) for name, a, b in pairs]
    on_many, on_few = ({**seven, "n_gpus": str(n), "global_batch": str(6 * n)} for n in (512, 128))
    return [*found, _check("MPT 7B, 128 to 512 GPUs", "scaling", on_many, on_few, published=many / few)]


def _ablations(table: Mapping[str, Row]) -> list[Check]:
    on = table["fsdp-6b-on-128"]
    off = {**on, "other_value": "off"}
    zero3 = table["sc21-zero3-768"]
    spread, packed = ({**zero3, "n_gpus": str(1536 // b), "micro_batch": str(b)} for b in (1, 4))
    many, few = ZERO3_175B_TFLOPS
    pairs = (
        ("backward prefetch, GPT 175B on 256 GPUs", "fsdp-6b-on-256", "fsdp-6b-off-256"),
        ("backward prefetch, GPT 175B on 512 GPUs", "fsdp-6b-on-512", "fsdp-6b-off-512"),
        ("full over hybrid, Llama 3 8B compiled", "gb200-8B-0", "gb200-8B-3"),
        ("full over hybrid, Llama 3 8B", "gb200-8B-1", "gb200-8B-4"),
        ("ZeRO-3 of 530B, one global batch, 640 to 2240", "sc21-zero3-2240", "sc21-zero3-640"),
    )
    return [
        # "approximately 18%", arXiv 2304.11277, section 5.3; figure 6(b) digitised gives 22%.
        _check("backward prefetch, GPT 175B on 128 GPUs", "ablation", on, off, published=1.18),
        *(_check(name, "ablation", table[a], table[b]) for name, a, b in pairs),
        _check("ZeRO-3 of 175B, one global batch, 384 to 1536", "ablation", spread, packed, published=many / few),
    ]


def _check(name: str, kind: str, row: Row, base: Row, published: float | None = None) -> Check:
    one, other = case(row), case(base)
    predicted = (one.tokens / predicted_s(one, PUBLISHED)) / (other.tokens / predicted_s(other, PUBLISHED))
    return Check(name=name, kind=kind, published=published or _measured(one) / _measured(other), predicted=predicted)


def _measured(one: PublishedCase) -> float:
    """Tokens per second per GPU."""
    if not one.measured_s:
        raise ValueError(f"{one.id} has no step time")
    return one.tokens / one.measured_s


# -- peak memory -----------------------------------------------------------------------------------------------------

# Rows that no Spec describes, each with the reason; reported separately. KempnerForge at its commit 01b461a, which the table
# is of, converts the model to bf16 (kempnerforge/distributed/parallel.py), so gradients and moments are in bf16 too.
_IN_BF16 = "parameters and Adam's moments are in bf16, where a Spec's are in fp32"
UNEXPLAINED: Mapping[str, str] = {"kempner-01": _IN_BF16, "kempner-02": _IN_BF16}


@dataclass(frozen=True, kw_only=True)
class MemoryRow:
    """Measured and predicted bytes; `kind`: "allocated", "reserved" or "used"."""

    case: PublishedCase
    kind: str
    measured_bytes: float
    predicted_bytes: float

    @property
    def is_explained(self) -> bool:
        return self.case.id not in UNEXPLAINED

    @property
    def error(self) -> float:
        """Relative to the measurement."""
        return self.predicted_bytes / self.measured_bytes - 1

    def to_dict(self) -> dict[str, Any]:
        return {
            "id": self.case.id, "source": self.case.source, "kind": self.kind, "is_explained": self.is_explained,
            "measured_bytes": self.measured_bytes, "predicted_bytes": self.predicted_bytes,
        }  # fmt: skip


def memory_rows(rows: Iterable[Row]) -> tuple[list[MemoryRow], list[tuple[str, str]]]:
    """Rows that have a peak and can be predicted; and (row id, reason) of those that cannot."""
    found, refused = [], []
    for row in rows:
        unit = unit_bytes(row)
        if not (row.get("peak_mem") or "").strip() or unit is None:
            continue
        try:
            one = case(row)
        except FieldError as e:
            refused.append((row.get("id", ""), str(e)))
            continue
        kind, device = memory_kind(row), one.machine.device
        planned = memory(one.spec, one.shape, device=device.type, software=one.software)
        predicted = planned.peak_of_kind(kind, device.memory_bytes)
        found.append(
            MemoryRow(case=one, kind=kind, measured_bytes=float(row["peak_mem"]) * unit, predicted_bytes=predicted)
        )
    return found, refused


def memory_coverage(rows: Sequence[MemoryRow], level: float = COVERED) -> float:
    """The share of the explained rows in bands that were made without their source, with sources weighted alike."""
    errors, sources = log_memory_errors(rows)
    inside = dict[str, list[bool]]()
    for source in dict.fromkeys(sources):
        others = [(e, s) for e, s in zip(errors, sources, strict=True) if s != source]
        half = memory_quantiles(*zip(*others, strict=True)).at(level)
        inside[source] = [abs(e) <= half for e, s in zip(errors, sources, strict=True) if s == source]
    return sum(sum(each) / len(each) for each in inside.values()) / len(inside)


def log_memory_errors(rows: Sequence[MemoryRow]) -> tuple[list[float], list[str]]:
    """ln(measured / predicted) and source of the explained rows."""
    explained = [row for row in rows if row.is_explained]
    return [-math.log1p(row.error) for row in explained], [row.case.source for row in explained]


def memory_lines(rows: Sequence[MemoryRow]) -> list[str]:
    """Errors by kind and source, as text, with and without the rows that no Spec describes."""
    lines = [
        f"Bands of memory, each made without its source: the 80 % band holds {memory_coverage(rows):.0%} of the rows."
    ]
    for kind in dict.fromkeys(row.kind for row in rows):
        of_kind = [row for row in rows if row.kind == kind]
        explained = [row for row in of_kind if row.is_explained]
        lines.append(f"{kind} memory, {len(explained)} rows: {mape(explained):.1%} mean absolute error")
        for source in dict.fromkeys(row.case.source for row in of_kind):
            of_source = [row for row in of_kind if row.case.source == source]
            reasons = dict.fromkeys(UNEXPLAINED[row.case.id] for row in of_source if not row.is_explained)
            excluded = f" (excluded: {'; '.join(reasons)})" if reasons else ""
            lines.append(f"    {source}: {mape(of_source):.1%} of {len(of_source)}{excluded}")
        if len(explained) < len(of_kind):
            lines.append(f"    including the excluded rows: {mape(of_kind):.1%} of {len(of_kind)}")
    return lines
