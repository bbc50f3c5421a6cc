"""Ratios that a plan must get right, published beside predicted: how throughput scales, and what switches are worth.

Each is of one row of the table and that row with a column changed, predicted by `PUBLISHED`. Published figures are of the
table where it has both rows, and otherwise stand here with their source.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fsdp_lab.planner.calibrate import predicted_s
from fsdp_lab.planner.published import PublishedCase, Row, case
from fsdp_lab.planner.rates import PUBLISHED, Rates


@dataclass(frozen=True, kw_only=True)
class Check:
    """A throughput of a GPU over another."""

    name: str
    kind: str  # "scaling", "ablation"
    published: float
    predicted: float

    @property
    def points(self) -> float:
        """By how many hundredths the prediction is above."""
        return 100 * (self.predicted - self.published)


def checks(rows: Sequence[Row], rates: Rates = PUBLISHED) -> tuple[Check, ...]:
    """rows: of the table."""
    table = {row["id"]: row for row in rows}
    return (*_scaling(table, rates), *_ablations(table, rates))


# Of a GPU at 512 GPUs and at 128: mosaicml/llm-foundry@8c8dd48 scripts/train/benchmarking/README.md, 'Large Scale'.
MPT_7B_TFLOPS = (417, 452)
# At 1,536 GPUs and at 384, global batch 1,536: arXiv 2104.04473, table 2.
ZERO3_175B_TFLOPS = (44, 144)


def _scaling(table: Mapping[str, Row], rates: Rates) -> list[Check]:
    pairs = (
        ("GPT 175B, 128 to 512 GPUs", "fsdp-6b-on-512", "fsdp-6b-on-128"),
        ("MPT 3B, 128 to 512 GPUs", "mosaic-013", "mosaic-015"),
        ("MPT 13B, 128 to 512 GPUs", "mosaic-007", "mosaic-009"),
        ("MPT 30B, 128 to 512 GPUs", "mosaic-004", "mosaic-006"),
        ("T5 11B, 8 to 512 GPUs", "fsdp-7c-B8-512", "fsdp-7c-B8-8"),
    )
    seven = table["mosaic-011"]
    many, few = MPT_7B_TFLOPS
    found = [_check(name, "scaling", table[a], table[b], rates) for name, a, b in pairs]
    at, beside = ({**seven, "n_gpus": str(n), "global_batch": str(6 * n)} for n in (512, 128))
    return [*found, _check("MPT 7B, 128 to 512 GPUs", "scaling", at, beside, rates, published=many / few)]


def _ablations(table: Mapping[str, Row], rates: Rates) -> list[Check]:
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
        _check("backward prefetch, GPT 175B on 128 GPUs", "ablation", on, off, rates, published=1.18),
        *(_check(name, "ablation", table[a], table[b], rates) for name, a, b in pairs),
        _check(
            "ZeRO-3 of 175B, one global batch, 384 to 1536", "ablation", spread, packed, rates, published=many / few
        ),
    ]


def _check(name: str, kind: str, row: Row, beside: Row, rates: Rates, published: float | None = None) -> Check:
    ours = [case(each) for each in (row, beside)]
    a, b = (one.tokens / predicted_s(one, rates) for one in ours)
    return Check(name=name, kind=kind, published=published or _told(ours[0]) / _told(ours[1]), predicted=a / b)


def _told(one: PublishedCase) -> float:
    """Tokens a second of a GPU."""
    if not one.measured_s:
        raise ValueError(f"{one.id} tells no step time")
    return one.tokens / one.measured_s
