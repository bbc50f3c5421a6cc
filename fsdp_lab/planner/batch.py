"""Many rows at once: what a table's cells leave empty is predicted, in the units and kinds that the row asks for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from fsdp_lab.core.errors import FieldError
from fsdp_lab.planner.memory_rows import in_kind
from fsdp_lab.planner.plan import plan
from fsdp_lab.planner.published import PublishedCase, Row, case, counted_flops_per_token
from fsdp_lab.planner.rates import PUBLISHED, Rates


def predict(rows: Iterable[Row], rates: Rates = PUBLISHED) -> list[dict[str, Any]]:
    """One dict a row, in their order: `id`, `tokens_per_s_per_gpu`, `tflops_per_gpu` (as the row's `tflops_kind` counts),
    `peak_mem` (in its `peak_mem_unit`, of its `peak_mem_kind`; None where the unit is unknown), `step_time_s`, and
    `assumed`, by field; or `id` and `error`, a sentence that names the column."""
    return [_predicted(row, rates) for row in rows]


def _predicted(row: Row, rates: Rates) -> dict[str, Any]:
    name = row.get("id", "")
    try:
        one = case(row)
        found = plan(one.spec, one.shape, one.machine, rates=rates, software=one.software)
    except FieldError as e:
        return {"id": name, "error": str(e)}
    tokens_per_s = found.tokens_per_s / one.spec.world_size
    tflops = tokens_per_s * flops_per_token(one, row) / 1e12
    return {
        "id": name, "tokens_per_s_per_gpu": tokens_per_s, "tflops_per_gpu": tflops, "peak_mem": in_kind(found.memory, row),
        "step_time_s": found.step_time_s, "assumed": {**found.assumed, **one.assumed},
    }  # fmt: skip


def flops_per_token(one: PublishedCase, row: Mapping[str, str]) -> float:
    """As the row counts them."""
    recomputed = one.spec.strategy.recompute == "full"
    return counted_flops_per_token(
        row.get("tflops_kind", ""), one.shape, one.spec.workload.seq_len, recomputed=recomputed
    )
