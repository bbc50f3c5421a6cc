"""Ours against FSDP2 and DDP, on the rank-ordered wire: every loss and every parameter has the same bits.

In low precision too: casts stand at the same places and sums go in the same order. What differs, and why: DDP computes in
low precision by autocast, which leaves normalisation, softmax and loss in fp32: it can only be near
(tests/backends/test_parity.py). FSDP2 casts no buffers, so Llama's rotary frequencies stay fp32 under it; where a strategy
asks for bf16 buffers ours has the bits of FSDP1.

A run that goes from ours to every other backend and back has the same bits as one that never left, but where it passes
through hybrid sharding or low precision: it is compared with one of FSDP2's that does in test_parity_session.py (the
trainer: clipping, gradient norms, the scaler). test_properties.py has a second oracle."""

import shutil
from typing import Any

import pytest

from fsdp_lab.spec.spec import Precision
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


def compare(outcomes: Outcomes, model: str, world_size: int, *strategies: dict[str, Any], **common: Any) -> None:
    """FSDP2 with `common`, and ours with `common` and each of the strategies."""
    lab = [steady(model, world_size, **{**common, "backend": "lab", **s}) for s in strategies or ({},)]
    same(outcomes, reference(outcomes, model, world_size, **common), *lab)


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
    elsewhere."""
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


# -- many strategies, each with the bits of FSDP2 ----------------------------------------------------------------------
ELSEWHERE = [{"offload": "optimizer", "sharding": "zero1"},
             {"wrap": "every:2", "forward_prefetch": 2, "backward_prefetch": 2, "offload": "all"},
             {"wrap": "min_params:100", "sharding": "shard_grad_op", "forward_prefetch": 3, "limit_all_gathers": 3},
             {"wrap": "class:LayerNorm", "sharding": "zero1"},
             {"recompute": "every:2", "wrap": "whole", "sharding": "no_shard"},
             {"recompute": "full", "wrap": "class:GPT2MLP", "backward_prefetch_point": "after"}]  # fmt: skip
WHEN = {
    "sharding": ["full_shard", "shard_grad_op"], "forward_prefetch": [0, 2], "backward_prefetch": [0, 1, 3],
    "limit_all_gathers": [0, 1, 2], "limit_reductions": [1, 3], "backward_prefetch_point": ["before", "after"],
}  # fmt: skip
SMALLER = {"reshard_size": 2}
ACCUMULATED = [{}, {"sharding": "no_shard"}, {"offload": "all", "sharding": "shard_grad_op"}]
# Sums are in fp32 or as it is said. In fp16 the sum of W summands is divided in two parts, before and after.
PRECISIONS = {"bf16": "bf16", "bf16 sums": Precision(param="bf16", reduce="bf16"), "fp16": "fp16",
              "fp32 sums of fp16": Precision(param="fp16", reduce="fp32"),
              "bf16 sums of fp32": Precision(param="fp32", reduce="bf16"),
              "fp32 output": Precision(param="bf16", output="fp32")}  # fmt: skip
SUMS = PRECISIONS["bf16 sums"]
LOW = Precision(param="bf16", reduce="bf16", keep_low_precision_gradients=True)
SGD, ADAMW = {"optimizer": "sgd"}, {"optimizer": "adamw"}
# Model, ranks, what one of ours (or of another backend) has beside what all have, and that.
CASES: dict[str, tuple[str, int, list[dict[str, Any]], dict[str, Any]]] = {
    "where and how": ("gpt2", 3, ELSEWHERE, ADAMW),
    "when it is gathered": ("gpt2", 2, [dict(zip(WHEN, row, strict=True)) for row in pairwise(*WHEN.values())], SGD),
    "last": ("gpt2", 2, [{"backend": "fsdp1"}, {"backend": "ddp"}, *ACCUMULATED], {"sync": "last", "accumulate": 3, **SGD}),
    # Gradients are brought to fp32 later than otherwise, which changes no bit as long as nothing is added to them.
    "low until the step": ("gpt2", 3, [{"precision": LOW}, {"precision": LOW, "offload": "all"}],
                           {"precision": SUMS, "backend": "lab", **SGD}),
    **{name: ("llama", 2, [{}], {"precision": precision, **ADAMW}) for name, precision in PRECISIONS.items()},
    # Gradients are summed in fp32 where the sum is fp32, over micro-batches as over ranks.
    **{f"{precision}, {sync}": ("gpt2", 2, [{"sharding": "zero1"}, {"offload": "optimizer"}],
                                {"precision": precision, "accumulate": 3, "sync": sync, **SGD})
       for precision, sync in (("fp16", "last"), ("bf16", "every"))},
    "every": ("gpt2", 3, ACCUMULATED, {"sync": "every", "accumulate": 2, **SGD}),
    "accumulation, hybrid": ("gpt2", 4, [{}], {"sync": 2, "accumulate": 3, "sharding": "hybrid_shard", **ADAMW}),
    "resharding to a smaller group": ("gpt2", 4, [{"backend": "fsdp2", **SMALLER}, SMALLER, {
        **SMALLER, "forward_prefetch": 2, "backward_prefetch": 2, "offload": "all"}], ADAMW),
    **{f"{model}, {name}": (model, 3, [{}], {"precision": PRECISIONS[name], **SGD})
       for model, name in (("gpt2", "bf16"), ("gpt2", "fp16"), ("t5", "bf16 sums"), ("t5", "fp16"))},
    "hybrid, bf16 sums": ("gpt2", 4, [{"offload": "all"}], {"precision": SUMS, "sharding": "hybrid_shard", **SGD}),
    "a smaller group, bf16 sums": ("gpt2", 4, [{}], {"precision": SUMS, **SMALLER, **SGD}),
    # Torch wants batchnorm in the dtype of its running statistics, fp32, and FSDP1 leaves it so by itself.
    "batchnorm": ("resnet", 2, [{"backend": "fsdp1"}, {}, {"offload": "all"},
                                {"precision": Precision(param="bf16", buffer="bf16")}], {"precision": "bf16", **SGD}),
}  # fmt: skip
QUICK = ("where and how", "when it is gathered", "last", "low until the step", "bf16 sums", "fp16", "fp16, last")


@pytest.mark.parametrize("name", tiered(CASES, lambda name: name in QUICK))
def test_no_strategy_changes_the_result(outcomes: Outcomes, name: str) -> None:
    model, ranks, strategies, common = CASES[name]
    compare(outcomes, model, ranks, *strategies, **common)


# -- hybrid sharding -------------------------------------------------------------------------------------------------
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


# -- compiled blocks -------------------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="torch.compile needs a C++ compiler")
def test_compiled_blocks(outcomes: Outcomes) -> None:
    """Against FSDP2 with the same compiled blocks: kernels that compute several operations at once round elsewhere.

    One rank comes first: what it compiles is found again by two, none of which then waits long for the other."""
    options = {"compile": True, "optimizer": "sgd"}
    for world_size in (1, 2):
        lab = steady("llama tied", world_size, backend="lab", sharding="zero1", offload="optimizer", **options)
        wanted = reference(outcomes, "llama tied", world_size, **options)
        same(outcomes, wanted, lab)
        assert_learned(wanted, outcomes.of(plan((spec("llama tied", world_size), 0)))[0])
        plain = reference(outcomes, "llama tied", world_size, optimizer="sgd")
        assert wanted.losses == [pytest.approx(losses, rel=1e-4) for losses in plain.losses]


def test_buffers_in_bf16_are_as_fsdp1_has_them(outcomes: Outcomes) -> None:
    """FSDP2 and DDP have no dtype for them, so the backend casts them."""
    options = {"optimizer": "sgd"}
    ours, fsdp1, fsdp2, ddp, low_sums = outcomes.of(
        *(steady("llama", 2, backend=b, precision="bf16-pure", **options) for b in ("lab", "fsdp1", "fsdp2", "ddp")),
        steady("llama", 2, precision=SUMS, **options),
    )
    assert_equal(fsdp1, ours)
    assert_equal(fsdp2, ours)
    assert ddp.buffers == ours.buffers != low_sums.buffers


# -- from one backend to another -------------------------------------------------------------------------------------
AROUND = ({"backend": "lab"}, {"backend": "fsdp2", "sharding": "shard_grad_op"},
          {"backend": "lab", "sharding": "zero1", "wrap": "every:2"}, {"backend": "ddp"},
          {"backend": "fsdp1", "wrap": "whole"}, {"backend": "lab", "offload": "all", "recompute": "full"},
          {"backend": "lab", "sharding": "no_shard", "offload": "optimizer"}, {"backend": "fsdp2", "offload": "all"},
          {"backend": "lab", "wrap": "min_params:300", "forward_prefetch": 2})  # fmt: skip


def path(model: str, world_size: int, *parts: tuple[dict[str, Any], int], **common: Any) -> Plan:
    return plan(*((spec(model, world_size, **{**common, **changes}), count) for changes, count in parts))


@pytest.mark.slow
def test_around_all_backends(outcomes: Outcomes) -> None:
    """Two steps on each of the first, one on the others, and one at home again."""
    around = [*((changes, 2 if i < 2 else 1) for i, changes in enumerate(AROUND)), (AROUND[0], 1)]
    steady, switched = outcomes.of(path("llama tied", 2, (AROUND[0], len(AROUND) + 3), optimizer="adamw"),
                                   path("llama tied", 2, *around, optimizer="adamw"))  # fmt: skip
    assert_equal(switched, steady)


def test_there_and_back_loses_no_bit(outcomes: Outcomes) -> None:
    """To every precision, and back before a step was done: neither masters, nor moments, nor rotary frequencies change."""
    away = ({"precision": "bf16"}, {"precision": "fp16", "offload": "all"},
            {"precision": "bf16-pure", "sharding": "zero1"})  # fmt: skip
    around = path("llama", 2, ({}, 2), *((s, 0) for s in away), ({}, 2), backend="lab")
    steady, switched = outcomes.of(path("llama", 2, ({}, 4), backend="lab"), around)
    assert_equal(switched, steady)


@pytest.mark.slow
def test_batchnorm_statistics_stay_with_their_rank(outcomes: Outcomes) -> None:
    """Each rank has seen batches of its own. Recomputation would show it some of them twice."""
    around = [(s, 1) for s in AROUND if "recompute" not in s] + [({"backend": "lab", "precision": "bf16"}, 0)]
    ways = [(AROUND[0], len(around) + 1)], [*around, (AROUND[0], 2)]
    steady, switched = outcomes.of(*(path("resnet", 2, *way) for way in ways))
    assert len(set(steady.buffers)) == 2
    assert_equal(switched, steady)
