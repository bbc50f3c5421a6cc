"""Ours against FSDP2 and DDP in fp32, on the rank-ordered wire: every loss and every parameter has the same bits.

The other suites: test_parity_precision.py (bf16, fp16), test_parity_switch.py (from one backend to another),
test_parity_session.py (the trainer: clipping, gradient norms, the scaler). test_naive.py has a second oracle.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, distributed as dist, nn

from fsdp_lab.models import Batches, resolve
from fsdp_lab.spec.spec import Spec
from fsdp_lab.spec.workload import Workload
from tests.covering import tiered
from tests.engine.naive import in_order
from tests.engine.parity import MODELS, Outcome, Outcomes, Plan, assert_equal, assert_learned, plan, spec
from tests.models.small import filled
from tests.pool import Place, Pool

STEPS = 2
OPTIMIZERS = ("sgd", "adamw")  # SGD's steps show a wrong scale, AdamW has state that lasts
WORLD_SIZES = (1, 2, 3, 4)


def optimizer_at(place: int, world_size: int) -> str:
    """By turns, so that over some places every place and every world size has both, and each pair of them one."""
    return OPTIMIZERS[(place + world_size) % 2]


def steady(model: str, world_size: int, **changes: Any) -> Plan:
    return plan((spec(model, world_size, **changes), STEPS))


@contextmanager
def noted(changes: dict[str, Any]) -> Iterator[None]:
    """A comparison that fails says what it was of."""
    try:
        yield
    except AssertionError as e:
        e.add_note(str(changes))
        raise


def reference(outcomes: Outcomes, model: str, world_size: int, **changes: Any) -> Outcome:
    """FSDP2, fully sharded."""
    return outcomes.of(steady(model, world_size, **changes))[0]


def of_model(model: str, world_size: int) -> str:
    """The optimizer that a model is compared with at this world size."""
    return optimizer_at(list(MODELS).index(model), world_size)


def places() -> list[tuple[str, int]]:
    """gpt2 at every world size, every other model at 2 and at one more, so that each of those has several models."""
    others = [model for model in MODELS if model != "gpt2"]
    more = [(model, (3, 1, 4)[i % 3]) for i, model in enumerate(others)]
    return [*(("gpt2", w) for w in WORLD_SIZES), *((model, 2) for model in others), *more]


@pytest.mark.parametrize(
    ("model", "world_size"), tiered(places(), lambda model, world_size: model == "gpt2" or world_size == 2)
)
def test_every_model_in_several_world_sizes(outcomes: Outcomes, model: str, world_size: int) -> None:
    """Full sharding by FSDP2 and by ours, and DDP.

    In T5 several blocks share an input (the encoder's output, position biases). FSDP2 and ours let blocks see inputs
    through views, and so their gradients are added up block by block; DDP must do the same, or its sums are rounded
    elsewhere.
    """
    optimizer = of_model(model, world_size)
    fsdp2, lab, ddp = outcomes.of(
        steady(model, world_size, optimizer=optimizer),
        steady(model, world_size, optimizer=optimizer, backend="lab"),
        plan((spec(model, world_size, optimizer=optimizer, backend="ddp"), STEPS), views=model == "t5"),
    )
    assert all(loss == loss for rank in fsdp2.losses for loss in rank)
    assert_equal(lab, fsdp2)
    assert_equal(ddp, fsdp2)


def test_on_the_wire_as_users_have_it(outcomes: Outcomes) -> None:
    """By itself the wire orders what is scattered and leaves all-reduce to Gloo: so sharded runs are equal there too."""
    shardings = ("full_shard", "shard_grad_op")
    plans = [steady("llama tied", 3, backend=b, sharding=s) for b in ("fsdp2", "lab") for s in shardings]
    wanted, *found = outcomes.of(*plans, reduction="auto")
    for got in found:
        assert_equal(got, wanted)


@pytest.mark.parametrize(
    ("model", "world_size"),  # gpt2 with both optimizers
    tiered([("gpt2", 3), *((model, 2) for model in MODELS)], lambda model, world_size: True),
)
def test_training_changes_every_parameter(outcomes: Outcomes, model: str, world_size: int) -> None:
    (before,) = outcomes.of(plan((spec(model, 2, backend="lab"), 0)))
    (after,) = outcomes.of(steady(model, world_size, backend="lab", optimizer=of_model(model, world_size)))
    assert_learned(after, before)


# -- strategies do not change the result -----------------------------------------------------------------------------

SHARDINGS = ("shard_grad_op", "zero1", "no_shard")
ELSEWHERE = [
    {"offload": "optimizer", "sharding": "zero1"},
    {"offload": "all", "sharding": "no_shard", "forward_prefetch": 1},
    {"offload": "all", "sharding": "shard_grad_op"},
    {"wrap": "every:2", "forward_prefetch": 2, "backward_prefetch": 2, "offload": "all"},
    {"wrap": "min_params:1000"},
    {"wrap": "min_params:100", "forward_prefetch": 3, "limit_all_gathers": 3},
    {"wrap": "class:GPT2MLP"},
    {"wrap": "class:LayerNorm", "sharding": "zero1"},
    {"wrap": "whole", "sharding": "no_shard"},
    {"recompute": "full", "sharding": "zero1", "offload": "all"},
    {"recompute": "every:2", "wrap": "every:2", "forward_prefetch": 1, "backward_prefetch": 0},
    {"recompute": "full", "wrap": "class:GPT2MLP", "backward_prefetch_point": "after"},
]


@pytest.mark.parametrize(
    ("sharding", "world_size"),
    tiered(
        [*itertools.product(SHARDINGS, (2, 3)), ("shard_grad_op", 1), ("zero1", 4)],
        lambda sharding, world_size: world_size in (2, 3),
    ),
)
def test_what_is_sharded_does_not_change_the_result(outcomes: Outcomes, sharding: str, world_size: int) -> None:
    options = {"optimizer": optimizer_at(SHARDINGS.index(sharding), world_size)}
    (got,) = outcomes.of(steady("gpt2", world_size, backend="lab", sharding=sharding, **options))
    assert_equal(got, reference(outcomes, "gpt2", world_size, **options))


@pytest.mark.parametrize("changes", tiered(ELSEWHERE, lambda changes: ELSEWHERE.index(changes) % 3 == 1), ids=str)
def test_where_and_how_does_not_change_the_result(outcomes: Outcomes, changes: dict[str, Any]) -> None:
    (got,) = outcomes.of(steady("gpt2", 3, backend="lab", optimizer="adamw", **changes))
    assert_equal(got, reference(outcomes, "gpt2", 3, optimizer="adamw"))


def prefetches() -> list[dict[str, Any]]:
    """Depths 0 to 3 both ways, limits 0 to 3 and both points, every pair of values at least once; fewer than 128."""
    return [{"forward_prefetch": f, "backward_prefetch": b, "limit_all_gathers": (f + b) % 4,
             "limit_reductions": 1 + (f + 2 * b) % 3,
             "backward_prefetch_point": ("before", "after")[(f // 2 + b) % 2]}
            for f, b in itertools.product(range(4), range(4))]  # fmt: skip


@pytest.mark.parametrize("sharding", ["full_shard", "shard_grad_op"])
def test_when_it_is_gathered_does_not_change_the_result(outcomes: Outcomes, sharding: str) -> None:
    chosen = prefetches()[:: 1 if sharding == "full_shard" else 3]
    got = outcomes.of(*(steady("gpt2", 2, backend="lab", optimizer="sgd", sharding=sharding, **c) for c in chosen))
    for changes, outcome in zip(chosen, got, strict=True):
        with noted(changes):
            assert_equal(outcome, reference(outcomes, "gpt2", 2, optimizer="sgd"))


HARSH = [
    {"sharding": "zero1", "forward_prefetch": 1, "backward_prefetch_point": "after"},
    {"sharding": "no_shard", "wrap": "whole", "offload": "optimizer"},
    {"wrap": "every:3", "offload": "all", "forward_prefetch": 3, "backward_prefetch": 3, "limit_all_gathers": 0},
    {"wrap": "min_params:300", "sharding": "shard_grad_op", "limit_all_gathers": 1},
    {"recompute": "full", "backward_prefetch": 0, "forward_prefetch": 2},
]


@pytest.mark.parametrize("model", tiered(MODELS, lambda model: model in ("gpt2", "resnet")))
def test_every_model_under_strategies_that_differ_in_everything(outcomes: Outcomes, model: str) -> None:
    options = {"optimizer": of_model(model, 3)}
    got = outcomes.of(*(steady(model, 3, backend="lab", **options, **changes) for changes in HARSH))
    for changes, outcome in zip(HARSH, got, strict=True):
        wanted = reference(outcomes, model, 3, **options, **what_matters(model, changes))
        with noted(changes):
            assert_equal(outcome, wanted)


def what_matters(model: str, changes: dict[str, Any]) -> dict[str, Any]:
    """What FSDP2 must do alike to compute the same.

    T5's gradients are added up by who sees inputs through views, as said above: the modules that are wrapped, in a unit of
    several each (of which FSDP2 gives views to the first alone, so it wraps block by block here). BatchNorm takes note of a
    batch whenever it sees it: twice where blocks are computed again.
    """
    matters = {"t5": ("wrap",), "resnet": ("recompute",)}.get(model, ())
    return {n: v for n, v in changes.items() if n in matters and not str(v).startswith("every")}


# -- hybrid sharding, and a smaller group between forward and backward ---------------------------------------------------

HYBRIDS = [
    {"sharding": "hybrid_shard"},
    {"sharding": "hybrid_shard_zero2"},
    {"sharding": "hybrid_shard", "shard_size": 2, "offload": "all", "forward_prefetch": 2, "recompute": "full"},
    {"sharding": "hybrid_shard_zero2", "wrap": "every:2", "offload": "optimizer", "backward_prefetch_point": "after"},
    {"sharding": "hybrid_shard", "wrap": "whole", "backward_prefetch": 0},
]


@pytest.mark.parametrize("model", tiered(MODELS, lambda model: model == "gpt2"))
def test_hybrid_is_compared_with_hybrid(outcomes: Outcomes, model: str) -> None:
    """Means of two, then the mean of those: another order than a sum of four, and FSDP2's too."""
    for changes in HYBRIDS if model in ("gpt2", "resnet") else HYBRIDS[:2]:
        plain = {"sharding": "hybrid_shard", "optimizer": "sgd"} | what_matters(model, changes)
        wanted, got = outcomes.of(
            steady(model, 4, **plain), steady(model, 4, backend="lab", **{"optimizer": "sgd", **changes})
        )
        assert_equal(got, wanted)


@pytest.mark.slow
def test_hybrid_with_adamw_and_against_fsdp1(outcomes: Outcomes) -> None:
    options = {"sharding": "hybrid_shard_zero2", "optimizer": "adamw"}
    fsdp2, fsdp1, lab = outcomes.of(*(steady("gpt2", 4, backend=b, **options) for b in ("fsdp2", "fsdp1", "lab")))
    assert_equal(lab, fsdp2)
    assert_equal(lab, fsdp1)
    with pytest.raises(AssertionError):  # so the two orders can be told apart
        assert_equal(lab, reference(outcomes, "gpt2", 4, optimizer="adamw"))


@pytest.mark.parametrize("model", tiered(["gpt2", "llama tied", "t5", "resnet"], lambda model: model == "gpt2"))
def test_resharding_to_a_smaller_group(outcomes: Outcomes, model: str) -> None:
    options = {"reshard_size": 2, "optimizer": "adamw"}
    fsdp2, *lab = outcomes.of(
        steady(model, 4, **options),
        steady(model, 4, backend="lab", **options),
        steady(model, 4, backend="lab", **options, forward_prefetch=2, backward_prefetch=2, offload="all"),
    )
    for got in lab:
        assert_equal(got, fsdp2)
        assert_equal(got, reference(outcomes, model, 4, optimizer="adamw"))


# -- accumulation ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sync", "accumulate", "world_size"),
    tiered(
        [("every", 2, 3), ("every", 3, 2), ("last", 2, 3), ("last", 3, 2), (2, 4, 3), (2, 5, 2)],
        lambda sync, accumulate, world_size: (sync, accumulate) in (("every", 2), ("last", 3), (2, 4)),
    ),
)
def test_accumulation(outcomes: Outcomes, sync: str | int, accumulate: int, world_size: int) -> None:
    """The same bits as FSDP2's each way, and as DDP's where the last micro-batch alone communicates."""
    options = {"sync": sync, "accumulate": accumulate, "optimizer": "sgd"}
    strategies = [{}, {"sharding": "zero1"}, {"sharding": "no_shard"}, {"offload": "all", "sharding": "shard_grad_op"}]
    fsdp2, fsdp1, ddp, *lab = outcomes.of(
        steady("gpt2", world_size, **options),
        steady("gpt2", world_size, backend="fsdp1", **options),
        steady("gpt2", world_size, backend="ddp", **options),
        *(steady("gpt2", world_size, backend="lab", **options, **s) for s in strategies),
    )
    for got in (fsdp1, *lab):
        assert_equal(got, fsdp2)
    if sync == "last":
        assert_equal(ddp, fsdp2)


@pytest.mark.parametrize("sync", tiered(["every", "last", 2], lambda sync: sync == "last"))
def test_accumulation_in_hybrid_sharding(outcomes: Outcomes, sync: str | int) -> None:
    options = {"sync": sync, "accumulate": 3 if sync == 2 else 2, "sharding": "hybrid_shard", "optimizer": "adamw"}
    fsdp2, lab = outcomes.of(*(steady("t5", 4, backend=b, **options) for b in ("fsdp2", "lab")))
    assert_equal(lab, fsdp2)


def _by_hand(place: Place, given: dict[str, Any]) -> list[dict[str, Tensor]]:
    """One step of SGD in two orders of summation, with nothing of ours.

    Returns: by name the gradients as FSDP2 and ours add them up, the gradients as DDP does, the sum over micro-batches of
    the ranks' mean of |gradient|, and the parameters after a step with each of the two.
    """
    s = Spec.from_dict(given)
    w, config = s.workload, resolve(s.workload.model)
    model = filled(w.model)
    batches = Batches(w, config, rank=place.rank, world_size=place.world_size)
    named = dict(model.named_parameters())
    sharded, replicated, size = ({n: torch.zeros_like(p) for n, p in named.items()} for _ in range(3))
    for micro in range(w.accumulate):
        loss = model(**batches.batch(0, micro))["loss"] / w.accumulate
        for (name, p), grad in zip(named.items(), torch.autograd.grad(loss, named.values()), strict=True):
            everybodys = [torch.empty_like(p) for _ in range(place.world_size)]
            dist.all_gather(everybodys, grad.contiguous())
            sharded[name] += in_order(everybodys) / place.world_size
            replicated[name] = in_order([replicated[name] + g for g in everybodys]) / place.world_size
            size[name] += torch.stack(everybodys).abs().mean(0)
    return [sharded, replicated, size, _stepped(named, sharded, w), _stepped(named, replicated, w)]


def _stepped(named: dict[str, nn.Parameter], gradients: dict[str, Tensor], w: Workload) -> dict[str, Tensor]:
    copies = {name: nn.Parameter(p.detach().clone()) for name, p in named.items()}
    for name, p in copies.items():
        p.grad = gradients[name]
        torch.optim.SGD([p], lr=w.lr, weight_decay=w.weight_decay if p.dim() >= 2 else 0.0, foreach=True).step()
    return {name: p.detach() for name, p in copies.items()}


@pytest.mark.parametrize("accumulate", tiered([2, 3], lambda accumulate: accumulate == 2))
def test_where_ddp_accumulates_in_another_order(pool: Pool, outcomes: Outcomes, accumulate: int) -> None:
    """With communication in every micro-batch, DDP puts what it has so far on every rank's side of the next sum.

    Both orders, written down by hand, give the bits of the backends. Of K micro-batches and W ranks ours rounds W times for
    each mean and K - 1 times between them, DDP K (W + 1) times, never anything larger than M, the sum of the means of
    |gradient|; each time by u at most. So they differ by (K (W + 1) + W + K - 1) u M at most, to the first order.
    """
    world_size, u = 3, 2.0**-24
    options = {"accumulate": accumulate, "optimizer": "sgd"}
    ours, ddp = outcomes.of(*(plan((spec("gpt2", world_size, backend=b, **options), 1)) for b in ("lab", "ddp")))
    given = spec("gpt2", world_size, **options).to_dict()
    sharded, replicated, size, as_ours, as_ddps = pool.run(_by_hand, world_size, given, reduction="rank_ordered")[0]
    roundings = accumulate * (world_size + 1) + world_size + accumulate - 1
    for name, tensor in ours.parameters.items():
        assert torch.equal(tensor, as_ours[name])
        assert torch.equal(ddp.parameters[name], as_ddps[name])
        differ = (sharded[name].double() - replicated[name].double()).abs()
        assert (differ <= roundings * u * size[name].double() * (1 + 1e-6)).all(), name
    assert any(not torch.equal(sharded[name], replicated[name]) for name in sharded)


# -- compiled blocks -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="torch.compile needs a C++ compiler")
def test_compiled_blocks(outcomes: Outcomes) -> None:
    """Against FSDP2 with the same compiled blocks: kernels that compute several operations at once round elsewhere.

    One rank comes first: what it compiles is found again by two, none of which then waits long for the other.
    """
    for world_size in (1, 2):
        (fsdp2,) = outcomes.of(steady("gpt2", world_size, compile=True, optimizer="sgd"))
        for strategy in ({}, {"sharding": "zero1", "offload": "optimizer"}):
            (ours,) = outcomes.of(steady("gpt2", world_size, backend="lab", compile=True, optimizer="sgd", **strategy))
            assert_equal(ours, fsdp2)
