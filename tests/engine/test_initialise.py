"""Deferred initialisation: a model built on meta gets the values that an eager build has, from wherever they come."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from fsdp_lab.engine import full_state, load_full_state, sharded_parameters
from fsdp_lab.models.build import Initializer, build_skeleton
from fsdp_lab.models.configs import resolve
from fsdp_lab.spec.spec import Strategy
from tests.engine.toys import (
    Net,
    Scenario,
    assert_equal,
    batch,
    by_block,
    by_policy,
    everywhere,
    make,
    mean_square,
    options_of,
)
from tests.models.small import SMALL, filled
from tests.pool import Place, Pool

STRATEGIES = {
    2: (Strategy(sharding="zero1"), Strategy(sharding="no_shard"), Strategy(precision="bf16", offload="all")),
    3: (Strategy(wrap="min_params:5000"), Strategy(offload="optimizer")),
    4: (Strategy(sharding="hybrid_shard"), Strategy(sharding="hybrid_shard_zero2"), Strategy(reshard_size=2)),
}


def filled_by_turns(place: Place, family: str) -> None:
    """By each strategy in another way: from a function of names, from whole values, and by torch from those of rank 0."""
    for i, strategy in enumerate(STRATEGIES[place.world_size]):
        model = by_policy(build_skeleton(resolve(SMALL[family])), strategy.wrap, **options_of(strategy))
        plain = filled(SMALL[family], seed=3)
        values = {name: p.detach() for name, p in plain.named_parameters()}
        match (i + place.world_size) % 3:
            case 0:
                load_full_state(model, Initializer(build_skeleton(resolve(SMALL[family])), seed=3))
            case 1:
                load_full_state(model, values)
            case _:
                options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
                set_model_state_dict(model, values if place.rank == 0 else {}, options=options)
        assert_equal(model, plain)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "world_size"), [("gpt2", 2), ("llama tied", 3), ("t5", 4)])
def test_a_model_on_meta_gets_the_values_of_an_eager_build(pool: Pool, family: str, world_size: int) -> None:
    pool.run(filled_by_turns, world_size, family)


def forgotten(place: Place) -> None:
    """Without values a model says so: what it computes is not a number."""
    with torch.device("meta"):
        model = Net()
    by_block(model)
    assert all(p.is_meta and p.device.type == "meta" for p in model.parameters())
    assert all(bool(t.isnan().all()) for _, t in full_state(model))
    loss = mean_square(model, batch(0, place.rank))
    assert bool(loss.isnan())
    loss.backward()


def trained(place: Place) -> None:
    """A model that was built on meta, with a tie that is found when the root is sharded, trains as one that was built with
    values."""
    with torch.device("meta"):
        model = Net()
    plain = make()
    for m in (model, plain):
        m.blocks[0].up.weight = m.blocks[2].up.weight
    values = {name: p.detach() for name, p in plain.named_parameters()}
    by_block(model)
    load_full_state(model, values)
    assert_equal(model, plain)
    assert model.blocks[0].up.weight is model.blocks[2].up.weight
    assert all(p.device.type == "cpu" for p in model.parameters())
    for m in (model, by_block(plain)):
        mean_square(m, batch(0, place.rank)).backward()
        torch.optim.AdamW(sharded_parameters(m)).step()
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(full_state(model), full_state(plain), strict=True))


@everywhere(forgotten, trained)
def test_models_built_on_meta(pool: Pool, scenario: Scenario) -> None:
    pool.run(scenario, 2)
