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


# -- strategies do not change the result -----------------------------------------------------------------------------
ELSEWHERE = [{"offload": "optimizer", "sharding": "zero1"},
             {"wrap": "every:2", "forward_prefetch": 2, "backward_prefetch": 2, "offload": "all"},
             {"wrap": "min_params:100", "sharding": "shard_grad_op", "forward_prefetch": 3, "limit_all_gathers": 3},
             {"wrap": "class:LayerNorm", "sharding": "zero1"},
             {"recompute": "every:2", "wrap": "whole", "sharding": "no_shard"},
             {"recompute": "full", "wrap": "class:GPT2MLP", "backward_prefetch_point": "after"}]  # fmt: skip


def test_where_and_how_does_not_change_the_result(outcomes: Outcomes) -> None:
    compare(outcomes, "gpt2", 3, *ELSEWHERE, optimizer="adamw")


WHEN = {
    "sharding": ["full_shard", "shard_grad_op"], "forward_prefetch": [0, 2], "backward_prefetch": [0, 1, 3],
    "limit_all_gathers": [0, 1, 2], "limit_reductions": [1, 3], "backward_prefetch_point": ["before", "after"],
}  # fmt: skip


def test_when_it_is_gathered_does_not_change_the_result(outcomes: Outcomes) -> None:
    rows = [dict(zip(WHEN, row, strict=True)) for row in pairwise(*WHEN.values())]
    compare(outcomes, "gpt2", 2, *rows, optimizer="sgd")


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
    compare(outcomes, "gpt2", world_size, *others, *lab, **options)


@pytest.mark.slow
def test_accumulation_in_hybrid_sharding(outcomes: Outcomes) -> None:
    compare(outcomes, "gpt2", 4, sync=2, accumulate=3, sharding="hybrid_shard", optimizer="adamw")


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


# -- low precision ---------------------------------------------------------------------------------------------------
PRECISIONS = {"bf16": "bf16", "bf16 sums": Precision(param="bf16", reduce="bf16"), "fp16": "fp16",
              "fp32 sums of fp16": Precision(param="fp16", reduce="fp32"),
              "bf16 sums of fp32": Precision(param="fp32", reduce="bf16"),
              "fp32 output": Precision(param="bf16", output="fp32")}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gpt2", "t5"])
def test_models_in_low_precision(outcomes: Outcomes, model: str) -> None:
    """In bf16, whose sums are in fp32 or in bf16, and in fp16."""
    for precision in ("bf16" if model == "gpt2" else "bf16 sums", "fp16"):
        compare(outcomes, model, 3, precision=PRECISIONS[precision], optimizer="sgd")


@pytest.mark.parametrize("precision", tiered(PRECISIONS, lambda precision: precision in ("bf16 sums", "fp16")))
def test_every_precision(outcomes: Outcomes, precision: str) -> None:
    """In fp16 the sum of W summands is divided in two parts, before and after, the same for ours and FSDP2."""
    compare(outcomes, "llama", 2, precision=PRECISIONS[precision], optimizer="adamw")


@pytest.mark.slow
def test_hybrid_and_smaller_groups_in_low_precision(outcomes: Outcomes) -> None:
    common = {"precision": PRECISIONS["bf16 sums"], "optimizer": "sgd"}
    compare(outcomes, "gpt2", 4, {"offload": "all"}, sharding="hybrid_shard", **common)
    compare(outcomes, "gpt2", 4, reshard_size=2, **common)


@pytest.mark.parametrize(
    ("precision", "sync"), tiered([("bf16", "every"), ("fp16", "last")], lambda precision, sync: sync == "last")
)
def test_accumulation_in_low_precision(outcomes: Outcomes, precision: str, sync: str) -> None:
    """Gradients are summed in fp32 where the sum is fp32, over micro-batches as over ranks."""
    common = {"precision": PRECISIONS[precision], "optimizer": "sgd", "accumulate": 3, "sync": sync}
    compare(outcomes, "gpt2", 2, {"sharding": "zero1"}, {"offload": "optimizer"}, **common)


def test_low_gradients_until_the_step(outcomes: Outcomes) -> None:
    """They are brought to fp32 later than otherwise, which changes no bit as long as nothing is added to them."""
    low = Precision(param="bf16", reduce="bf16", keep_low_precision_gradients=True)
    common = {"optimizer": "sgd", "backend": "lab"}
    kept = [steady("gpt2", 3, precision=low, offload=offload, **common) for offload in ("none", "all")]
    same(outcomes, reference(outcomes, "gpt2", 3, precision=PRECISIONS["bf16 sums"], **common), *kept)


def test_buffers_in_bf16_are_as_fsdp1_has_them(outcomes: Outcomes) -> None:
    """FSDP2 and DDP have no dtype for them, so the backend casts them."""
    options = {"optimizer": "sgd"}
    ours, fsdp1, fsdp2, ddp, low_sums = outcomes.of(
        *(steady("llama", 2, backend=b, precision="bf16-pure", **options) for b in ("lab", "fsdp1", "fsdp2", "ddp")),
        steady("llama", 2, precision=PRECISIONS["bf16 sums"], **options),
    )
    assert_equal(fsdp1, ours)
    assert_equal(fsdp2, ours)
    assert ddp.buffers == ours.buffers != low_sums.buffers


@pytest.mark.slow
def test_batchnorm_stays_in_fp32(outcomes: Outcomes) -> None:
    """Torch wants it in the dtype of its running statistics, and FSDP1 leaves it so by itself."""
    options = {"precision": "bf16", "optimizer": "sgd"}
    others = ({"backend": "fsdp1"}, {}, {"offload": "all"}, {"precision": Precision(param="bf16", buffer="bf16")})
    compare(outcomes, "resnet", 2, *others, **options)


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
    steady, switched = outcomes.of(
        path("resnet", 2, (AROUND[0], len(around) + 1)), path("resnet", 2, *around, (AROUND[0], 2))
    )
    assert len(set(steady.buffers)) == 2
    assert_equal(switched, steady)
