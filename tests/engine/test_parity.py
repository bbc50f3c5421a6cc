"""Ours against FSDP2 and DDP in fp32, on the rank-ordered wire: every loss and every parameter has the same bits.

The other suites: test_parity_precision.py (bf16, fp16), test_parity_switch.py (from one backend to another),
test_parity_session.py (the trainer: clipping, gradient norms, the scaler). test_properties.py has a second oracle.
"""

from __future__ import annotations

import shutil
from typing import Any

import pytest

from tests.covering import pairwise, tiered
from tests.engine.parity import MODELS, Outcome, Outcomes, Plan, assert_equal, assert_learned, plan, spec
from tests.engine.toys import noted

STEPS = 2
OPTIMIZERS = ("sgd", "adamw")  # SGD's steps show a wrong scale, AdamW has state that lasts


def steady(model: str, world_size: int, **changes: Any) -> Plan:
    return plan((spec(model, world_size, **changes), STEPS))


def same(outcomes: Outcomes, wanted: Outcome, *plans: Plan) -> None:
    """Each has the bits of `wanted`; where one has not, the failure says which."""
    for one, got in zip(plans, outcomes.of(*plans), strict=True):
        with noted(one.key):
            assert_equal(got, wanted)


def reference(outcomes: Outcomes, model: str, world_size: int, **changes: Any) -> Outcome:
    """FSDP2, fully sharded where `changes` do not say otherwise."""
    return outcomes.of(steady(model, world_size, **changes))[0]


def of_model(model: str, world_size: int) -> str:
    """The optimizer that a model is compared with at this world size, by turns."""
    return OPTIMIZERS[(list(MODELS).index(model) + world_size) % 2]


PLACES = [("gpt2", 2), ("resnet", 2), ("llama tied", 1), ("t5", 2), ("bert", 3), ("vit", 2)]


@pytest.mark.parametrize(
    ("model", "world_size"),
    tiered(PLACES, lambda model, world_size: (model, world_size) in (("gpt2", 2), ("resnet", 2))),
)
def test_every_model_in_several_world_sizes(outcomes: Outcomes, model: str, world_size: int) -> None:
    """Full sharding by FSDP2 and by ours, and DDP; and every parameter moves.

    In T5 several blocks share an input (the encoder's output, position biases). FSDP2 and ours let blocks see inputs
    through views, and so their gradients are added up block by block; DDP must do the same, or its sums are rounded
    elsewhere.
    """
    options = {"optimizer": of_model(model, world_size)}
    ddp = plan((spec(model, world_size, backend="ddp", **options), STEPS), views=model == "t5")
    fsdp2 = reference(outcomes, model, world_size, **options)
    assert all(loss == loss for rank in fsdp2.losses for loss in rank)
    same(outcomes, fsdp2, steady(model, world_size, backend="lab", **options), ddp)
    assert_learned(fsdp2, outcomes.of(plan((spec(model, world_size), 0)))[0])


def test_on_the_wire_as_users_have_it(outcomes: Outcomes) -> None:
    """By itself the wire orders what is scattered and leaves all-reduce to Gloo: so sharded runs are equal there too."""
    fsdp2, lab = steady("llama tied", 3), steady("llama tied", 3, backend="lab", sharding="shard_grad_op")
    assert_equal(*outcomes.of(lab, fsdp2, reduction="auto"))


# -- strategies do not change the result -----------------------------------------------------------------------------

ELSEWHERE = [
    {"offload": "optimizer", "sharding": "zero1"},
    {"wrap": "every:2", "forward_prefetch": 2, "backward_prefetch": 2, "offload": "all"},
    {"wrap": "min_params:100", "sharding": "shard_grad_op", "forward_prefetch": 3, "limit_all_gathers": 3},
    {"wrap": "class:LayerNorm", "sharding": "zero1"},
    {"recompute": "every:2", "wrap": "whole", "sharding": "no_shard"},
    {"recompute": "full", "wrap": "class:GPT2MLP", "backward_prefetch_point": "after"},
]


def test_where_and_how_does_not_change_the_result(outcomes: Outcomes) -> None:
    lab = [steady("gpt2", 3, backend="lab", optimizer="adamw", **changes) for changes in ELSEWHERE]
    same(outcomes, reference(outcomes, "gpt2", 3, optimizer="adamw"), *lab)


WHEN = {
    "sharding": ["full_shard", "shard_grad_op"],
    "forward_prefetch": [0, 2],
    "backward_prefetch": [0, 1, 3],
    "limit_all_gathers": [0, 1, 2],
    "limit_reductions": [1, 3],
    "backward_prefetch_point": ["before", "after"],
}


def test_when_it_is_gathered_does_not_change_the_result(outcomes: Outcomes) -> None:
    rows = [dict(zip(WHEN, row, strict=True)) for row in pairwise(*WHEN.values())]
    lab = [steady("gpt2", 2, backend="lab", optimizer="sgd", **changes) for changes in rows]
    same(outcomes, reference(outcomes, "gpt2", 2, optimizer="sgd"), *lab)


# -- hybrid sharding, and a smaller group between forward and backward ---------------------------------------------------

HYBRIDS = [
    {"sharding": "hybrid_shard"},
    {"sharding": "hybrid_shard", "shard_size": 2, "offload": "all", "forward_prefetch": 2, "recompute": "full"},
    {"sharding": "hybrid_shard_zero2", "wrap": "every:2", "offload": "optimizer", "backward_prefetch_point": "after"},
]


@pytest.mark.slow
def test_hybrid_is_compared_with_hybrid(outcomes: Outcomes) -> None:
    """Means of two, then the mean of those: another order than a sum of four, and that of FSDP2 and FSDP1 too."""
    lab = [steady("gpt2", 4, backend="lab", optimizer="adamw", **changes) for changes in HYBRIDS]
    fsdp1 = steady("gpt2", 4, backend="fsdp1", sharding="hybrid_shard_zero2", optimizer="adamw")
    wanted = reference(outcomes, "gpt2", 4, sharding="hybrid_shard", optimizer="adamw")
    same(outcomes, wanted, *lab, fsdp1)
    with pytest.raises(AssertionError):
        assert_equal(wanted, reference(outcomes, "gpt2", 4, optimizer="adamw"))


@pytest.mark.slow
def test_resharding_to_a_smaller_group(outcomes: Outcomes) -> None:
    smaller = {"reshard_size": 2, "optimizer": "adamw"}
    ahead = {"forward_prefetch": 2, "backward_prefetch": 2, "offload": "all"}
    lab = [steady("gpt2", 4, backend="lab", **smaller, **changes) for changes in ({}, ahead)]
    same(outcomes, reference(outcomes, "gpt2", 4, optimizer="adamw"), steady("gpt2", 4, **smaller), *lab)


# -- accumulation ----------------------------------------------------------------------------------------------------


SYNCS = [("every", 2, 3), ("last", 3, 2)]


@pytest.mark.parametrize(("sync", "accumulate", "world_size"), tiered(SYNCS, lambda sync, *_: sync == "last"))
def test_accumulation(outcomes: Outcomes, sync: str, accumulate: int, world_size: int) -> None:
    """The same bits as FSDP2's each way, and as DDP's where the last micro-batch alone communicates."""
    options = {"sync": sync, "accumulate": accumulate, "optimizer": "sgd"}
    others = [{"backend": "fsdp1"}, {"backend": "ddp"}] if sync == "last" else []
    lab = [{}, {"sharding": "no_shard"}, {"offload": "all", "sharding": "shard_grad_op"}]
    plans = [steady("gpt2", world_size, **options, **{"backend": "lab", **changes}) for changes in (*others, *lab)]
    same(outcomes, reference(outcomes, "gpt2", world_size, **options), *plans)


@pytest.mark.slow
def test_accumulation_in_hybrid_sharding(outcomes: Outcomes) -> None:
    options = {"sync": 2, "accumulate": 3, "sharding": "hybrid_shard", "optimizer": "adamw"}
    same(outcomes, reference(outcomes, "gpt2", 4, **options), steady("gpt2", 4, backend="lab", **options))


# -- compiled blocks -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="torch.compile needs a C++ compiler")
def test_compiled_blocks(outcomes: Outcomes) -> None:
    """Against FSDP2 with the same compiled blocks: kernels that compute several operations at once round elsewhere.

    One rank comes first: what it compiles is found again by two, none of which then waits long for the other.
    """
    options = {"compile": True, "optimizer": "sgd"}
    for world_size in (1, 2):
        lab = steady("gpt2", world_size, backend="lab", sharding="zero1", offload="optimizer", **options)
        wanted = reference(outcomes, "gpt2", world_size, **options)
        same(outcomes, wanted, lab)
        assert_learned(wanted, outcomes.of(plan((spec("gpt2", world_size), 0)))[0])
        plain = reference(outcomes, "gpt2", world_size, optimizer="sgd")
        assert wanted.losses == [pytest.approx(losses, rel=1e-4) for losses in plain.losses]
