"""A run that goes from ours to every other backend and back has the same bits as one that never left.

Where not, and why: hybrid sharding sums in another order, and steps in low precision are other steps; a run that passes
through them is compared with one of FSDP2's that does (test_parity_session.py).
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.parity import Outcomes, Plan, assert_equal, plan, spec

AROUND = (
    {"backend": "lab"},
    {"backend": "fsdp2", "sharding": "shard_grad_op"},
    {"backend": "lab", "sharding": "zero1", "wrap": "every:2"},
    {"backend": "ddp"},
    {"backend": "fsdp1", "wrap": "whole"},
    {"backend": "lab", "offload": "all", "recompute": "full"},
    {"backend": "lab", "sharding": "no_shard", "offload": "optimizer"},
    {"backend": "fsdp2", "offload": "all"},
    {"backend": "lab", "wrap": "min_params:300", "forward_prefetch": 2},
)


def path(model: str, world_size: int, *parts: tuple[dict[str, Any], int], **common: Any) -> Plan:
    return plan(*((spec(model, world_size, **{**common, **changes}), count) for changes, count in parts))


@pytest.mark.slow
def test_around_all_backends(outcomes: Outcomes) -> None:
    """Two steps on each of the first, one on the others, and one at home again."""
    around = [*((changes, 2 if i < 2 else 1) for i, changes in enumerate(AROUND)), (AROUND[0], 1)]
    steady, switched = outcomes.of(
        path("llama tied", 2, (AROUND[0], len(AROUND) + 3), optimizer="adamw"),
        path("llama tied", 2, *around, optimizer="adamw"),
    )
    assert_equal(switched, steady)


def test_there_and_back_loses_no_bit(outcomes: Outcomes) -> None:
    """To every precision, and back before a step was done: neither masters, nor moments, nor rotary frequencies change."""
    away = [
        {"precision": "bf16"},
        {"precision": "fp16", "offload": "all"},
        {"precision": "bf16-pure", "sharding": "zero1"},
    ]
    around = path("llama", 2, ({}, 2), *((s, 0) for s in away), ({}, 2), backend="lab")
    steady, switched = outcomes.of(path("llama", 2, ({}, 4), backend="lab"), around)
    assert_equal(switched, steady)


@pytest.mark.slow
def test_batchnorm_statistics_stay_with_their_rank(outcomes: Outcomes) -> None:
    """Each rank has seen batches of its own. Recomputation would show it some of them twice."""
    around = [(s, 1) for s in AROUND if "recompute" not in s] + [({"backend": "lab", "precision": "bf16"}, 0)]
    steady, switched = outcomes.of(
        path("resnet", 2, (AROUND[0], len(around) + 1)), path("resnet", 2, *around, (AROUND[0], 2))
    )
    assert len(set(steady.buffers)) == 2
    assert_equal(switched, steady)
