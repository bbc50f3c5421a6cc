"""The backends compute the same thing: in fp32, on the rank-ordered wire, equal bit for bit.

Ours against FSDP2 and DDP, over models and strategies, is in tests/engine/test_parity.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fsdp_lab.spec import Spec
from tests.backends.train import train
from tests.pool import Pool, RankError

SMALL = {"model_type": "gpt2", "n_layer": 2, "n_embd": 36, "n_head": 4, "vocab_size": 384, "n_positions": 32}


def spec(world_size: int, **changes: Any) -> dict[str, Any]:
    base = Spec(world_size=world_size).replace(model=SMALL, seq_len=32, micro_batch=2, lr=0.01)
    return base.replace(**changes).to_dict()


def outcome(
    pool: Pool, world_size: int, plan: list[tuple[dict[str, Any], int]], reduction: str = "rank_ordered"
) -> Any:
    """Per-rank losses and the parameters, which must agree on all ranks."""
    results = pool.run(train, world_size, plan, reduction=reduction)
    for _, parameters in results[1:]:
        assert_equal(results[0][1], parameters)
    return [losses for losses, _ in results], results[0][1]


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    differ = [name for name in one if not torch.equal(one[name], other[name])]
    assert not differ, f"not equal: {differ}"


def sharded(backend: str, world_size: int, **changes: Any) -> dict[str, Any]:
    return spec(world_size, backend=backend, sharding="no_shard" if backend == "ddp" else "full_shard", **changes)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_all_backends_are_equal_bit_for_bit(pool: Pool, world_size: int, optimizer: str) -> None:
    outcomes = {
        b: outcome(pool, world_size, [(sharded(b, world_size, optimizer=optimizer), 3)])
        for b in ("lab", "fsdp2", "fsdp1", "ddp")
    }
    losses, parameters = outcomes.pop("lab")
    assert all(loss == loss for rank in losses for loss in rank)
    for other_losses, other in outcomes.values():
        assert other_losses == losses
        assert_equal(parameters, other)


def test_training_changes_every_parameter(pool: Pool) -> None:
    _, before = outcome(pool, 2, [(sharded("fsdp2", 2), 0)])
    _, after = outcome(pool, 2, [(sharded("fsdp2", 2), 2)])
    assert not [name for name in before if torch.equal(before[name], after[name])]


@pytest.mark.parametrize("backend", ["lab", "fsdp2", "fsdp1"])
@pytest.mark.parametrize("changes", [
    {"sharding": "shard_grad_op"},
    {"wrap": "whole"},
    {"wrap": "min_params:2000"},
    {"offload": "all"},
    {"forward_prefetch": 1},
    {"recompute": "full"},
    {"recompute": "every:2"},
], ids=str)  # fmt: skip
def test_a_strategy_does_not_change_the_result(pool: Pool, backend: str, changes: dict[str, Any]) -> None:
    if backend == "fsdp1" and "offload" in changes:
        with pytest.raises(RankError, match=r"strategy\.offload: FSDP1 pins"):
            pool.run(train, 2, [(spec(2, backend=backend, **changes), 2)])
        return
    plain = outcome(pool, 2, [(sharded("fsdp2", 2), 2)])
    other = outcome(pool, 2, [(spec(2, backend=backend, **changes), 2)])
    assert other[0] == plain[0]
    assert_equal(plain[1], other[1])


@pytest.mark.parametrize("backend", ["lab", "fsdp2"])
def test_blocks_together_in_one_unit(pool: Pool, backend: str) -> None:
    plain = outcome(pool, 2, [(sharded("fsdp2", 2), 2)])
    other = outcome(pool, 2, [(spec(2, backend=backend, wrap="every:2", backward_prefetch=2, forward_prefetch=2), 2)])
    assert other[0] == plain[0]
    assert_equal(plain[1], other[1])


@pytest.mark.parametrize("sharding", ["hybrid_shard", "hybrid_shard_zero2"])
def test_hybrid_backends_are_equal(pool: Pool, sharding: str) -> None:
    one = outcome(pool, 4, [(spec(4, backend="fsdp2", sharding=sharding), 2)])
    two = outcome(pool, 4, [(spec(4, backend="fsdp1", sharding=sharding), 2)])
    assert one[0] == two[0]
    assert_equal(one[1], two[1])


@pytest.mark.parametrize("sync", ["every", "last"])
def test_accumulation(pool: Pool, sync: str) -> None:
    runs = [
        outcome(pool, 2, [(sharded(b, 2, accumulate=2, sync=sync, optimizer="sgd"), 2)])
        for b in ("lab", "fsdp2", "fsdp1", "ddp")
    ]
    for losses, parameters in runs[1:]:
        assert losses[0][0] == runs[0][0][0][0]  # the first step's, before any gradient
        for name, tensor in runs[0][1].items():
            torch.testing.assert_close(parameters[name], tensor, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_a_switch_carries_every_bit(pool: Pool, optimizer: str) -> None:
    """fsdp2 -> ddp -> lab -> fsdp1 -> fsdp2 (ZeRO-2, offloaded) -> lab, against a run that never switched."""
    common = {"optimizer": optimizer}
    path = [
        sharded("fsdp2", 3, **common),
        sharded("ddp", 3, **common),
        sharded("lab", 3, wrap="every:2", **common),
        sharded("fsdp1", 3, wrap="whole", **common),
        spec(3, backend="fsdp2", sharding="shard_grad_op", offload="all", **common),
        spec(3, backend="lab", sharding="zero1", offload="optimizer", **common),
    ]
    steady = outcome(pool, 3, [(path[0], 12)])
    switched = outcome(pool, 3, [(p, 2) for p in path])
    assert switched[0] == steady[0]
    assert_equal(steady[1], switched[1])


@pytest.mark.parametrize("backend", ["lab", "fsdp2", "fsdp1", "ddp"])
@pytest.mark.parametrize("precision", ["bf16", "bf16-pure", "fp16"])
def test_low_precision_stays_near_fp32(pool: Pool, backend: str, precision: str) -> None:
    plain = outcome(pool, 2, [(sharded("fsdp2", 2), 3)])
    other = outcome(pool, 2, [(sharded(backend, 2, precision=precision), 3)], reduction="auto")
    for one, two in zip(plain[0][0], other[0][0], strict=True):
        assert one != two  # it did compute in another precision
        assert abs(one - two) < 0.05
    assert all(t.dtype == torch.float32 for t in other[1].values())
