"""Planned memory with dropout, whose masks are saved, beside the ledger of real ranks."""

from __future__ import annotations

from typing import Any

import pytest

from fsdp_lab.core.spec import Spec
from tests.planner.measured import USUAL, beside, measured, planned
from tests.pool import Pool

FIELDS: dict[str, dict[str, Any]] = {
    "lab": {}, "lab, bf16": {"precision": "bf16"}, "lab, recompute": {"recompute": "full"}, "fsdp2": {"backend": "fsdp2"},
    "fsdp1": {"backend": "fsdp1"}, "ddp": {"backend": "ddp", "sharding": "no_shard"}, "t5": {"model": "t5-1m"},
}  # fmt: skip
SPECS = {name: Spec(world_size=2).replace(**{"model": "gpt2-1m", **USUAL, **fields, "dropout": "config"})
         for name, fields in FIELDS.items()}  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_peak_is_the_ledger_s_within_2_percent(pool: Pool) -> None:
    events = measured(pool, SPECS)
    assert {b.name: b.error for b in beside(SPECS, events.items()) if abs(b.error) > 0.02} == {}


def test_masks_take_memory() -> None:
    with_masks, without = (planned(SPECS["lab"].replace(dropout=d)) for d in ("config", "off"))
    assert with_masks.at_peak.activations_bytes > 1.05 * without.at_peak.activations_bytes
