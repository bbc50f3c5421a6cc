"""Deferred initialisation: a model built on meta gets the values that an eager build has, from wherever they come."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fsdp_lab.base.errors import SpecError
from fsdp_lab.engine import (
    ShardError,
    broadcast_full_state,
    flats_of,
    full_state,
    load_full_state,
    load_ranges,
    sharded_parameters,
    shards_of,
)
from fsdp_lab.models import Initializer, Weights, build_skeleton, resolve
from fsdp_lab.spec.spec import Strategy
from tests.covering import tiered
from tests.engine.toys import Net, assert_equal, batch, by_block, by_policy, make, mean_square, options_of
from tests.models.small import SMALL, filled
from tests.pool import Place, Pool

STRATEGIES = {
    1: (Strategy(), Strategy(precision="bf16", offload="all")),
    2: (Strategy(), Strategy(sharding="zero1"), Strategy(sharding="no_shard"), Strategy(precision="bf16")),
    3: (Strategy(wrap="min_params:5000"), Strategy(offload="optimizer")),
    4: (
        Strategy(),
        Strategy(sharding="hybrid_shard"),
        Strategy(sharding="hybrid_shard_zero2"),
        Strategy(reshard_size=2),
    ),
}


def on_meta(family: str, strategy: Strategy) -> nn.Module:
    """Built and sharded without a value."""
    return by_policy(build_skeleton(resolve(SMALL[family])), strategy.wrap, **options_of(strategy))


def drawn_by_name(place: Place, family: str) -> None:
    for strategy in STRATEGIES[place.world_size]:
        sharded = on_meta(family, strategy)
        initial = Initializer(build_skeleton(resolve(SMALL[family])), seed=3)
        load_full_state(sharded, initial)
        assert_equal(sharded, filled(SMALL[family], seed=3))


@pytest.mark.parametrize(
    ("family", "world_size"),
    tiered(
        [("gpt2", 1), ("gpt2", 2), ("llama tied", 3), ("t5", 2), ("gpt2", 4)],
        lambda family, world_size: family == "llama tied" or world_size == 2,
    ),
)
def test_values_drawn_by_name_are_those_of_an_eager_build(pool: Pool, family: str, world_size: int) -> None:
    pool.run(drawn_by_name, world_size, family)


def one_parameter_at_a_time(place: Place) -> None:
    """No more than one whole parameter is alive at once, whatever the model's size."""
    sharded = on_meta("gpt2", Strategy())
    initial = Initializer(build_skeleton(resolve(SMALL["gpt2"])), seed=0)
    seen: list[weakref.ref[Tensor]] = []

    def values(name: str) -> Tensor:
        assert not any(whole() is not None for whole in seen)
        whole = initial(name)
        seen.append(weakref.ref(whole))
        return whole

    load_full_state(sharded, values)
    own = sum(flat.master.nbytes for flat in flats_of(sharded))
    assert own < 0.6 * sum(p.numel() for p in sharded.parameters()) * 4


def test_no_rank_ever_holds_two_whole_parameters(pool: Pool) -> None:
    pool.run(one_parameter_at_a_time, 2)


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
    """A model that was built on meta trains as one that was built with values."""
    plain = make()
    with torch.device("meta"):
        model = Net()
    by_block(model)
    load_full_state(model, {name: p.detach() for name, p in plain.named_parameters()})
    eager = by_block(make())
    assert all(p.device.type == "cpu" for p in model.parameters())
    for m in (model, eager):
        mean_square(m, batch(0, place.rank)).backward()
        torch.optim.AdamW(sharded_parameters(m)).step()
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(full_state(model), full_state(eager), strict=True))


def tied_on_meta(place: Place) -> None:
    """A tie that is found when the root is sharded is kept, and has one value."""
    with torch.device("meta"):
        model = Net()
    model.blocks[0].up.weight = model.blocks[2].up.weight
    by_block(model)
    plain = make()
    plain.blocks[0].up.weight = plain.blocks[2].up.weight
    load_full_state(model, {name: p.detach() for name, p in plain.named_parameters()})
    assert_equal(model, plain)
    assert model.blocks[0].up.weight is model.blocks[2].up.weight


@pytest.mark.parametrize("scenario", [forgotten, trained, tied_on_meta], ids=lambda s: s.__name__)
def test_models_built_on_meta(pool: Pool, scenario: Callable[[Place], None]) -> None:
    pool.run(scenario, 2)


# -- from files --------------------------------------------------------------------------------------------------------


def from_files(place: Place, folder: str, family: str) -> None:
    weights = Weights(folder)
    for strategy in STRATEGIES[place.world_size]:
        sharded = on_meta(family, strategy)
        asked: list[tuple[str, int]] = []

        def read(name: str, start: int, stop: int) -> Tensor:
            asked.append((name, stop - start))  # noqa: B023
            return weights.read(name, start, stop)

        load_ranges(sharded, read)
        assert_equal(sharded, filled(SMALL[family], seed=5))
        own = {shard.name: shard.local.numel() for shard in shards_of(sharded) if shard.local.numel()}
        assert dict(asked) == own and len(asked) == len(own)  # its own part of each, and no more


@pytest.mark.parametrize(
    ("world_size", "size"),
    tiered(
        [(2, "100GB"), (2, "500KB"), (3, "100GB"), (3, "500KB")],
        lambda world_size, size: (world_size == 2) == (size == "100GB"),
    ),
    ids=["2-one file", "2-an index of several", "3-one file", "3-an index of several"],
)
def test_weights_from_files(pool: Pool, tmp_path: Path, size: str, world_size: int) -> None:
    filled(SMALL["gpt2"], seed=5).save_pretrained(tmp_path, max_shard_size=size)  # type: ignore[operator]
    files = list(tmp_path.glob("*.safetensors"))
    assert len(files) == 1 if size == "100GB" else len(files) > 3
    pool.run(from_files, world_size, str(tmp_path), "gpt2")


def test_weights_of_a_tied_model_from_files(pool: Pool, tmp_path: Path) -> None:
    filled(SMALL["llama tied"], seed=5).save_pretrained(tmp_path)  # type: ignore[operator]
    pool.run(from_files, 2, str(tmp_path), "llama tied")


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        SpecError, match=r"has neither model.safetensors nor .*give a folder that model.save_pretrained"
    ):
        Weights(tmp_path)


def wrong_reader(place: Place) -> None:
    model = by_block(make())
    with pytest.raises(ShardError, match=r"(first|last)\.weight: \d+ elements were asked for and 1 came"):
        load_ranges(model, lambda name, start, stop: torch.zeros(1))


def test_a_reader_that_gives_too_little_is_refused(pool: Pool) -> None:
    pool.run(wrong_reader, 2)


# -- from rank 0 -------------------------------------------------------------------------------------------------------


def broadcast(place: Place, family: str) -> None:
    for strategy in STRATEGIES[place.world_size]:
        sharded = on_meta(family, strategy)
        plain = filled(SMALL[family], seed=7)
        values = {name: p.detach() for name, p in plain.named_parameters()} if place.rank == 0 else None
        broadcast_full_state(sharded, values)
        assert_equal(sharded, plain)


@pytest.mark.parametrize(
    ("family", "world_size"),
    tiered([("gpt2", 1), ("llama tied", 2), ("gpt2", 3), ("gpt2", 4)], lambda family, world_size: world_size in (2, 3)),
)
def test_rank_0_gives_its_values_to_all(pool: Pool, family: str, world_size: int) -> None:
    pool.run(broadcast, world_size, family)


def wrong_values(place: Place) -> list[str]:
    """What each rank is told; and afterwards all goes on."""
    told = []
    for strategy in STRATEGIES[place.world_size]:
        model = by_block(make(), strategy)
        values = {name: p.detach() for name, p in make().named_parameters()}
        before = {name: t.clone() for name, t in full_state(model)}
        missing = {name: t for name, t in values.items() if name != "blocks.1.up.bias"}
        bent = {**values, "blocks.0.up.weight": values["blocks.0.up.weight"].T}
        for wrong in (missing, bent):
            with pytest.raises(ShardError) as e:
                broadcast_full_state(model, wrong if place.rank == 0 else None)
            told.append(str(e.value))
            with pytest.raises(ShardError) as e:
                load_full_state(model, wrong)
            told.append(str(e.value))
        assert all(torch.equal(t, before[name]) for name, t in full_state(model))  # nothing was changed
        broadcast_full_state(model, values if place.rank == 0 else None)
        assert all(torch.equal(t, before[name]) for name, t in full_state(model))
    return told


@pytest.mark.parametrize("world_size", tiered([2, 4], lambda world_size: world_size == 2))
def test_wrong_values_are_refused_on_every_rank(pool: Pool, world_size: int) -> None:
    told = pool.run(wrong_values, world_size)
    assert all(other == told[0] for other in told)
    missing, missing_here, bent, bent_here = told[0][:4]
    assert missing.startswith("there is no value for blocks.1.up.bias on rank 0; give one for every parameter")
    assert missing_here.startswith("there is no value for blocks.1.up.bias; give one for every parameter")
    assert bent == "blocks.0.up.weight has the shape (7, 6), and the value on rank 0 (6, 7)"
    assert bent_here == "blocks.0.up.weight has the shape (7, 6), and the value (6, 7)"
