"""Predictions against published measurements: `validate` of step times, `checks` of ratios, `memory_rows` of peak memory.

`validate` is a cross-validation. Each fold leaves out one source; the largest source, llm-foundry, is split by GPU and model
size. Errors are averaged over rows, and over sources first, so that two hundred rows of one source do not decide alone."""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fsdp_lab.base.errors import FieldError
from fsdp_lab.planner.bands import COVERED
from tests.planner.research.fitting import Responses, coverage, leave_out, memory_quantiles
from tests.planner.research.published import PublishedCase, Row, case, memory_kind, unit_bytes
from tests.planner.research.software import peak_of_kind

# DeepSpeed's ZeRO-3 of 2021 with a fixed global batch on more and more GPUs, bound by communication on a network that the
# table does not give (arXiv 2104.04473, table 2).
STRESS = ("sc21-zero3-768", "sc21-zero3-640", "sc21-zero3-1120", "sc21-zero3-2240")
# Rows without a precision; model and cluster are those of figure 7(b), in bf16.
ALSO_BF16 = "arXiv 2304.11277 / PVLDB 16(12) Fig 6(b)"
LARGEST = "llm-foundry"


@dataclass(frozen=True, kw_only=True)
class Held:
    """A row and its prediction without its fold. `error`: predicted / measured - 1."""

    case: PublishedCase
    fold: str
    predicted_s: float

    @property
    def error(self) -> float:
        return self.predicted_s / (self.case.measured_s or 1.0) - 1.0

    def to_dict(self) -> dict[str, Any]:
        return {"id": self.case.id, "source": self.case.source, "fold": self.fold, "measured_s": self.case.measured_s,
                "predicted_s": self.predicted_s, "error": self.error}  # fmt: skip


def validate(rows: Sequence[Row]) -> dict[str, Any]:
    """Predicts every usable row with rates fitted to the other folds. Takes a minute or two. Errors are fractions:
    predicted / measured - 1. Widths are ln(high / low). `constant_mfu`: of predictions by a constant MFU per GPU."""
    cases, refused = usable(rows)
    fits = leave_out(cases, fold)
    held = [Held(case=c, fold=fold(c), predicted_s=c.predicted_s(fits[fold(c)])) for c in cases]
    stress = [Held(case=c, fold="stress", predicted_s=c.predicted_s())
              for c in (case(row) for row in rows if row["id"] in STRESS)]  # fmt: skip
    covered = coverage(Responses.of(cases, lambda one: fits[fold(one)]))
    constant = by_constant(cases)
    return {
        "rows": [row.to_dict() for row in held], **summary(held), "sources": grouped(held, lambda row: row.case.source),
        "constant_mfu": summary(constant), "by_binding": grouped(held, binding), "by_ranks": grouped(held, size_class),
        "coverage": covered.to_dict(), "stress": [row.to_dict() for row in stress],
        "checks": [vars(check) for check in checks(rows)], "refused": dict(refused),
        "memory": [vars(peak) for peak in memory_rows(rows)[0]],
    }  # fmt: skip


def usable(rows: Iterable[Row]) -> tuple[list[PublishedCase], list[tuple[str, str]]]:
    """Rows in half precision that have a step time and can be predicted; and (row id, reason) of the others."""
    cases, refused = [], []
    for row in rows:
        try:
            one = None if (reason := _unfit(row)) else case(row)
            if one and not one.measured_s:
                reason = "it gives neither step time nor throughput"
        except FieldError as e:
            reason = str(e)
        if reason:
            refused.append((row["id"], reason))
        elif one:
            cases.append(one)
    return cases, refused


def _unfit(row: Row) -> str:
    if row["suggested_use"] != "calibrate" or row["quality"] not in ("A", "B"):
        return f"quality {row['quality']}, for {row['suggested_use']}"
    if row["id"] in STRESS:
        return "a stress test of communication"
    if re.search("bf16|fp16", row["precision"]) or ALSO_BF16 in row["source"]:
        return ""
    return f"its precision is {row['precision'] or 'not given'}"


def fold(one: PublishedCase) -> str:
    """The name of a case's fold."""
    if LARGEST not in one.source:
        return one.source
    return f"{LARGEST}, {one.machine.device.name}, {one.shape.parameters / 1e9:.1f}B"


def by_constant(cases: Sequence[PublishedCase]) -> list[Held]:
    """Predictions by a constant MFU: the mean of the other folds' rows on the same GPU, or on any GPU if there are none."""
    at_peak_s = {}
    for one in cases:
        w, device = one.spec.workload, one.machine.device
        flops = 3 * w.micro_batch * w.accumulate * one.shape.forward_flops(w.seq_len)
        at_peak_s[one.id] = flops / device.flops_per_s(one.spec.strategy.dtypes.param)
    mfus = {c.id: at_peak_s[c.id] / (c.measured_s or 1.0) for c in cases}
    held = []
    for one in cases:
        others = [c for c in cases if fold(c) != fold(one)]
        same_gpu = [c for c in others if c.machine.device.name == one.machine.device.name] or others
        mfu = sum(mfus[c.id] for c in same_gpu) / len(same_gpu)
        held.append(Held(case=one, fold=fold(one), predicted_s=at_peak_s[one.id] / mfu))
    return held


# -- averages --------------------------------------------------------------------------------------------------------
def mape(rows: "Sequence[Held | MemoryRow]") -> float:
    """Mean absolute error relative to the measurement; NaN for no rows."""
    return sum(abs(row.error) for row in rows) / len(rows) if rows else float("nan")


def grouped(held: Sequence[Held], key: Callable[[Held], str]) -> dict[str, dict[str, float]]:
    groups = defaultdict[str, list[Held]](list)
    for row in held:
        groups[key(row)].append(row)
    return {name: {"rows": len(group), "mape": mape(group), "bias": sum(row.error for row in group) / len(group)}
            for name, group in groups.items()}  # fmt: skip


def summary(held: Sequence[Held]) -> dict[str, Any]:
    sources = grouped(held, lambda row: row.case.source)
    return {"by_row_mape": mape(held), "by_source_mape": sum(s["mape"] for s in sources.values()) / len(sources),
            "worst": max(held, key=lambda row: abs(row.error)).to_dict()}  # fmt: skip


def binding(row: Held) -> str:
    """What binds at the package's rates, and for communication whether the network is stated."""
    plan = row.case.plan()
    network = "assumed" if "network" in plan.assumed else "stated"
    return f"communication, network {network}" if plan.binding == "communication" else plan.binding


def size_class(row: Held) -> str:
    return next((f"up to {most} GPUs" for most in (8, 64, 256) if row.case.machine.ranks <= most), "more GPUs")


# -- ratios ----------------------------------------------------------------------------------------------------------

# (name, kind, row, its base, changes of both, published ratio); None: that of the table.
CHECKS: tuple[tuple[str, str, str, str, Row, Row, float | None], ...] = (
    ("GPT 175B, 128 to 512 GPUs", "scaling", "fsdp-6b-on-512", "fsdp-6b-on-128", {}, {}, None),
    ("MPT 3B, 128 to 512 GPUs", "scaling", "mosaic-013", "mosaic-015", {}, {}, None),
    ("MPT 13B, 128 to 512 GPUs", "scaling", "mosaic-007", "mosaic-009", {}, {}, None),
    ("MPT 30B, 128 to 512 GPUs", "scaling", "mosaic-004", "mosaic-006", {}, {}, None),
    ("T5 11B, 8 to 512 GPUs", "scaling", "fsdp-7c-B8-512", "fsdp-7c-B8-8", {}, {}, None),
    # TFLOPS of a GPU: mosaicml/llm-foundry@8c8dd48 scripts/train/benchmarking/README.md, 'Large Scale'.
    ("MPT 7B, 128 to 512 GPUs", "scaling", "mosaic-011", "mosaic-011", {"n_gpus": "512", "global_batch": "3072"},
     {"n_gpus": "128", "global_batch": "768"}, 417 / 452),
    # "approximately 18%", arXiv 2304.11277, section 5.3; figure 6(b) digitised gives 22%.
    ("backward prefetch, GPT 175B on 128 GPUs", "ablation", "fsdp-6b-on-128", "fsdp-6b-on-128", {},
     {"other_value": "off"}, 1.18),
    ("backward prefetch, GPT 175B on 256 GPUs", "ablation", "fsdp-6b-on-256", "fsdp-6b-off-256", {}, {}, None),
    ("backward prefetch, GPT 175B on 512 GPUs", "ablation", "fsdp-6b-on-512", "fsdp-6b-off-512", {}, {}, None),
    ("full over hybrid, Llama 3 8B compiled", "ablation", "gb200-8B-0", "gb200-8B-3", {}, {}, None),
    ("full over hybrid, Llama 3 8B", "ablation", "gb200-8B-1", "gb200-8B-4", {}, {}, None),
    ("ZeRO-3 of 530B, one global batch, 640 to 2240", "ablation", "sc21-zero3-2240", "sc21-zero3-640", {}, {}, None),
    # TFLOPS of a GPU at global batch 1,536: arXiv 2104.04473, table 2.
    ("ZeRO-3 of 175B, one global batch, 384 to 1536", "ablation", "sc21-zero3-768", "sc21-zero3-768",
     {"n_gpus": "1536", "micro_batch": "1"}, {"n_gpus": "384", "micro_batch": "4"}, 44 / 144),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Check:
    """A ratio of two throughputs per GPU."""

    name: str
    kind: str  # "scaling", "ablation"
    published: float
    predicted: float


def checks(rows: Sequence[Row]) -> list[Check]:
    """Scaling and ablations. rows: the whole table."""
    table, results = {row["id"]: row for row in rows}, []
    for name, kind, row, base, changes, base_changes, published in CHECKS:
        one, other = case({**table[row], **changes}), case({**table[base], **base_changes})
        predicted, measured = (
            (one.tokens / seconds[0]) / (other.tokens / seconds[1])
            for seconds in ((one.predicted_s(), other.predicted_s()), (one.measured_s or 1, other.measured_s or 1))
        )
        results.append(Check(name=name, kind=kind, published=published or measured, predicted=predicted))
    return results


# -- peak memory -----------------------------------------------------------------------------------------------------

# Rows that no Spec describes, each with the reason; reported separately. KempnerForge at its commit 01b461a, which the table
# is of, converts the model to bf16 (kempnerforge/distributed/parallel.py), so gradients and moments are in bf16 too.
_IN_BF16 = "parameters and Adam's moments are in bf16, where a Spec's are in fp32"
UNEXPLAINED: Mapping[str, str] = {"kempner-01": _IN_BF16, "kempner-02": _IN_BF16}


@dataclass(frozen=True, kw_only=True)
class MemoryRow:
    """Measured and predicted bytes; `kind`: "allocated", "reserved" or "used"."""

    id: str
    source: str
    kind: str
    is_explained: bool
    measured_bytes: float
    predicted_bytes: float

    @property
    def error(self) -> float:
        """Relative to the measurement."""
        return self.predicted_bytes / self.measured_bytes - 1


def memory_rows(rows: Iterable[Row]) -> tuple[list[MemoryRow], list[tuple[str, str]]]:
    """Rows that have a peak and can be predicted; and (row id, reason) of those that cannot."""
    peaks, refused = [], []
    for row in rows:
        unit = unit_bytes(row)
        if not (row.get("peak_mem") or "").strip() or unit is None:
            continue
        try:
            one = case(row)
        except FieldError as e:
            refused.append((row.get("id", ""), str(e)))
            continue
        kind = memory_kind(row)
        predicted = peak_of_kind(one.memory(), kind, one.machine.device.memory_bytes)
        peaks.append(MemoryRow(id=one.id, source=one.source, kind=kind, is_explained=one.id not in UNEXPLAINED,
                               measured_bytes=float(row["peak_mem"]) * unit, predicted_bytes=predicted))  # fmt: skip
    return peaks, refused


def memory_coverage(rows: Sequence[MemoryRow], level: float = COVERED) -> float:
    """The share of the explained rows in bands that were made without their source, with sources weighted alike."""
    pairs = list(zip(*log_memory_errors(rows), strict=True))
    shares = []
    for source in dict.fromkeys(s for _, s in pairs):
        half = memory_quantiles(*zip(*((e, s) for e, s in pairs if s != source), strict=True)).at(level)
        inside = [abs(e) <= half for e, s in pairs if s == source]
        shares.append(sum(inside) / len(inside))
    return sum(shares) / len(shares)


def log_memory_errors(rows: Sequence[MemoryRow]) -> tuple[list[float], list[str]]:
    """ln(measured / predicted) and source of the explained rows."""
    explained = [row for row in rows if row.is_explained]
    return [-math.log1p(row.error) for row in explained], [row.source for row in explained]


# -- text ------------------------------------------------------------------------------------------------------------
def lines(d: Mapping[str, Any], constant: Mapping[str, Mapping[str, float]]) -> list[str]:
    """`validate` as text. constant: its errors by source of a constant MFU."""

    def row(name: str, g: Mapping[str, float]) -> str:
        return f"{name[:52]:52s} {g['rows']:4d} {g['mape']:7.1%} {g['bias']:+7.1%}"

    sources = sorted(d["sources"].items(), key=lambda item: -item[1]["mape"])
    of_constant, worst, usual = d["constant_mfu"], d["worst"], d["constant_mfu"]["worst"]
    bias = sum(one["error"] for one in d["rows"]) / len(d["rows"])
    every = {"rows": len(d["rows"]), "mape": d["by_row_mape"], "bias": bias}
    c = d["coverage"]
    return [
        f"Error of step time, {len(d['rows'])} rows of {len(sources)} sources, each predicted without its own fold:",
        f"{'':52s} {'rows':>4s} {'error':>7s} {'bias':>7s} {'constant MFU':>13s}",
        *(f"{row(name, group)} {constant[name]['mape']:13.1%}" for name, group in sources),
        f"{row('average by row', every)} {of_constant['by_row_mape']:13.1%}",
        f"{'average by source':52s} {'':4s} {d['by_source_mape']:7.1%} {'':7s} {of_constant['by_source_mape']:13.1%}",
        f"worst: {worst['id']}, {worst['error']:+.1%}; with a constant MFU {usual['id']}, {usual['error']:+.1%}", "",
        *(row(f"by what binds: {name}", group) for name, group in sorted(d["by_binding"].items())),
        *(row(f"by size: {name}", group) for name, group in sorted(d["by_ranks"].items())), "",
        f"Bands, each made without its source: the 80 % band holds {c['inside_80']:.0%} of the rows, the 50 % band"
        f" {c['inside_50']:.0%}, with sources weighted alike;",
        f"its mean width is ln(high/low) {c['mean_width']:.2f}, {c['mean_width'] / c['constant_width']:.2f} of the"
        " narrowest +-x % that holds 80 %.",
        f"{'sources of 10 rows or more':52s} {'rows':>4s} {'inside':>7s} {'expected':>9s} {'width':>6s}",
        *(f"{name[:52]:52s} {s['rows']:4d} {s['inside_80']:7d} {'{}-{}'.format(*s['expected']):>9s} {s['width']:6.2f}"
          f"{'' if s['expected'][0] <= s['inside_80'] <= s['expected'][1] else '  !'}"
          for name, s in c["sources"].items() if s["rows"] >= 10),
        "", "Stress tests of communication, not in the averages:",
        *(f"{one['id']:52s} {one['error']:+12.1%}" for one in d["stress"]),
        "", f"{'Throughput of a GPU, as a ratio':52s} {'published':>9s} {'predicted':>9s} {'points':>7s}",
        *(f"{one['name']:52s} {one['published']:9.3f} {one['predicted']:9.3f}"
          f" {100 * (one['predicted'] - one['published']):+7.1f}" for one in d["checks"]),
        "", "Peak memory:", *memory_lines([MemoryRow(**one) for one in d["memory"]]),
    ]  # fmt: skip


def memory_lines(rows: Sequence[MemoryRow]) -> list[str]:
    """Errors by kind and source, as text, with and without the rows that no Spec describes."""
    held = f"the 80 % band holds {memory_coverage(rows):.0%} of the rows."
    text = [f"Bands of memory, each made without its source: {held}"]
    for kind in dict.fromkeys(row.kind for row in rows):
        of_kind = [row for row in rows if row.kind == kind]
        explained = [row for row in of_kind if row.is_explained]
        text.append(f"{kind} memory, {len(explained)} rows: {mape(explained):.1%} mean absolute error")
        for source in dict.fromkeys(row.source for row in of_kind):
            of_source = [row for row in of_kind if row.source == source]
            reasons = dict.fromkeys(UNEXPLAINED[row.id] for row in of_source if not row.is_explained)
            excluded = f" (excluded: {'; '.join(reasons)})" if reasons else ""
            text.append(f"    {source}: {mape(of_source):.1%} of {len(of_source)}{excluded}")
        if len(explained) < len(of_kind):
            text.append(f"    including the excluded rows: {mape(of_kind):.1%} of {len(of_kind)}")
    return text
