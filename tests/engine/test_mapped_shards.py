"""Gathered parameters that are the shards of all ranks where they lie: nothing is copied, and nobody sees what is later."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from fsdp_lab.base.errors import SpecError
from fsdp_lab.engine import ShardError, full_state, no_sync, unshard
from fsdp_lab.engine.api import flats_of
from fsdp_lab.spec.spec import Precision, Spec, Strategy
from fsdp_lab.wire.meter import Collective
from tests.covering import tiered
from tests.engine.test_buffers import late
from tests.engine.toys import Block, Net, batch, by_block, make
from tests.pool import Place, Pool

MAPPED = Strategy(gather="mapped")


def unsharded_bytes(model: Any) -> int:
    return sum(flat.full.nbytes for flat in flats_of(model) if flat.is_gathered)


def mapped(**options: Any) -> Any:
    return by_block(make(**options), strategy=MAPPED)


def shown(place: Place) -> tuple[list[bool], int, list[Collective]]:
    """Whether what another rank writes to its shard is at once in what this one computes with; bytes beside shards; and what
    was sent."""
    model, seen = mapped(), list[bool]()
    flat = flats_of(model.blocks[0])[0]

    def inside(*_: Any) -> None:
        flat.master.fill_(place.rank + 1.0)
        place.world.barrier().wait()
        seen.extend(bool((part == r + 1).all()) for r, part in enumerate(flat.full.chunk(place.world_size)))
        seen.append(unsharded_bytes(model) == 0)
        place.world.barrier().wait()

    model.blocks[0].register_forward_pre_hook(inside)
    place.context.meter.take()
    with torch.no_grad():
        model(batch(0, place.rank))
    return seen, unsharded_bytes(model), place.context.meter.take()


def test_what_is_gathered_is_the_shards(pool: Pool) -> None:
    for seen, held, sent in pool.run(shown, 3, shared_memory=True):
        assert len(seen) == 3 + 1 and all(seen) and held == 0
        gathers = [c for c in sent if c.kind == "all_gather"]
        assert len(gathers) == 4 and all(c.link_bytes == 0 < c.payload_bytes for c in gathers)


def trained(place: Place, changes: dict[str, Any]) -> Any:
    """Losses and parameters, of ranks that are late at moments of their own."""
    model = by_block(make(), strategy=Strategy(**changes))
    late(place, model, 5)
    optimizer, losses = torch.optim.AdamW(model.parameters()), list[float]()
    for step in range(4):
        loss = model(batch(step, place.rank)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: t.tolist() for name, t in full_state(model)}


@pytest.mark.parametrize(
    ("ranks", "changes"),
    tiered([(2, {"sharding": "zero1"}), (1, {}), (4, {"sharding": "hybrid_shard"})], lambda ranks, changes: ranks == 2),
)
def test_it_trains_to_the_bits_of_copies(pool: Pool, ranks: int, changes: dict[str, Any]) -> None:
    copied = pool.run(trained, ranks, changes, shared_memory=True)
    assert pool.run(trained, ranks, {**changes, "gather": "mapped"}, shared_memory=True) == copied


def written_between(place: Place, what: str, rounds: int) -> list[bool]:
    """Each rank writes to its shards at once after a forward or a backward; rank 1 is late inside."""
    model, right = mapped(), list[bool]()
    plain = make()
    if place.rank == 1:
        late(place, model, 3)
    for number in range(rounds):
        with torch.no_grad():
            for flat in flats_of(model):
                flat.master.fill_(0.01 * number)
            for p in plain.parameters():
                p.fill_(0.01 * number)
        x = batch(number, 0)
        with torch.set_grad_enabled(what != "no_grad"):
            found, wanted = model(x), plain(x)
        right.append(torch.equal(found, wanted))
        if what == "backward":
            plain.zero_grad()
            wanted.square().mean().backward()
            found.register_hook(lambda g: time.sleep(0.002 * place.rank))
            with no_sync(model):
                found.square().mean().backward()
            flat = flats_of(model.blocks[0])[0]
            mine = flat.gradients.unsharded
            assert mine is not None
            pairs = zip(flat.layout.slots, plain.blocks[0].parameters(), strict=True)
            right += [torch.equal(mine[slot.offset : slot.stop], p.grad.reshape(-1)) for slot, p in pairs]
            for flat in flats_of(model):
                flat.gradients.drop()
    return right


def test_shards_are_written_when_nobody_reads_them(pool: Pool) -> None:
    for what in ("no_grad", "forward", "backward"):
        for right in pool.run(written_between, 2, what, 8, shared_memory=True):
            assert len(right) >= 8 and all(right), what


def written_inside(place: Place, sharding: str) -> tuple[bool, list[Any]]:
    """By each rank, to what the context shows: once, wherever it lies. Then all is mapped again."""
    model = by_block(make(), strategy=Strategy(gather="mapped", sharding=sharding))
    before = [p.full_tensor() for p in model.parameters()]
    x = batch(0, place.rank)
    for entered in ("when sharded", "when gathered"):
        if entered == "when gathered":
            model(x)  # the root stays gathered for a backward
        with unshard(model), torch.no_grad():
            time.sleep(0.02 * place.rank)
            for p in model.parameters():
                p.add_(1.0)
            with unshard(model.blocks[0]):
                model.blocks[0].norm.bias.add_(1.0)
    model(x).square().mean().backward()
    model.zero_grad()
    assert unsharded_bytes(model) == 0
    after = [p.full_tensor() for p in model.parameters()]
    names = [name for name, _ in model.named_parameters()]
    plain = make()
    with torch.no_grad():
        for p in (*plain.parameters(), *(flat.master for flat in flats_of(model))):
            p.fill_(0.1)
        trains_on = torch.equal(model(x), plain(x))
    return trains_on, [(name, (b - a).unique().tolist()) for name, a, b in zip(names, before, after, strict=True)]


@pytest.mark.parametrize("sharding", ["full_shard", "zero1"])
def test_what_is_written_inside_unshard_is_written_once(pool: Pool, sharding: str) -> None:
    for trains_on, found in pool.run(written_inside, 2, sharding, shared_memory=True):
        assert trains_on, "shards are shown again"
        for name, added in found:
            assert added == pytest.approx([4.0 if name == "blocks.0.norm.bias" else 2.0] * len(added), abs=1e-5), name


def written_after_a_gradient(place: Place, strategy: Strategy, twice: bool) -> list[float]:
    """Losses after parameters are written inside `unshard` between the two parts of a double backward, or after one that was
    abandoned; what a double backward needs is gathered then."""
    model, x = by_block(make(), strategy=strategy), batch(0, 0)
    (first,) = torch.autograd.grad(model(x).square().mean(), [model.last.weight], create_graph=True)
    with unshard(model), torch.no_grad():
        for name, p in model.named_parameters():
            if not twice or name == "last.bias":  # which the second part does not read
                p.mul_(0.9)
    if twice:
        first.square().sum().backward()
        model.zero_grad()
    del first
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.5), []
    for _ in range(4):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_what_a_double_backward_holds_is_shown_again(pool: Pool) -> None:
    for twice in (False, True):
        copied = pool.run(written_after_a_gradient, 2, Strategy(), twice, shared_memory=True)
        assert pool.run(written_after_a_gradient, 2, MAPPED, twice, shared_memory=True) == copied
        assert len(set(copied[0])) == 4


def alone(place: Place) -> list[float]:
    """One rank computes with what all have gathered; then all train on."""
    model, found = mapped(), []
    with unshard(model):
        if place.rank == 0:
            with torch.no_grad():
                found.append(model(batch(7, 0)).square().mean().item())
            loss = model(batch(7, 0)).square().mean()
            torch.autograd.grad(loss, [model.last.weight])
            found.append(loss.item())
    for step in range(2):
        loss = model(batch(step, 0)).square().mean()
        loss.backward()
        model.zero_grad()
        found.append(loss.item())
    return found


def test_one_rank_may_compute_alone_inside_unshard(pool: Pool) -> None:
    mine, theirs = pool.run(alone, 2, shared_memory=True)
    assert mine[0] == mine[1] and mine[2:] == theirs


class WritesToItself(Block):
    def forward(self, x: Any) -> Any:
        with torch.no_grad():
            self.up.weight.mul_(0.5)
        return super().forward(x)


class WritesByData(Block):
    def forward(self, x: Any) -> Any:
        self.up.weight.data.mul_(0.5)
        return super().forward(x)


def written_in_forward(place: Place, block: type[Block]) -> tuple[str, list[bool]]:
    model = by_block(Net(block=block), strategy=MAPPED)
    shards = [flat.master.clone() for flat in flats_of(model)]
    text = ""
    try:
        model(batch(0, place.rank)).square().mean().backward()
    except ShardError as e:
        text = str(e)
    place.world.barrier().wait()
    return text, [torch.equal(flat.master, before) for flat, before in zip(flats_of(model), shards, strict=True)]


@pytest.mark.parametrize("block", [WritesToItself, WritesByData])
def test_what_a_forward_writes_is_refused_and_no_shard_has_it(pool: Pool, block: type[Block]) -> None:
    for text, kept in pool.run(written_in_forward, 2, block, shared_memory=True):
        assert "up.weight was written to between forward and backward" in text and all(kept)


def refused(place: Place, options: dict[str, Any]) -> str:
    try:
        by_block(make(), strategy=Strategy(), map_shards=True, **options)
    except ShardError as e:
        return str(e)
    return ""


def test_where_it_is_not_possible_it_is_refused_in_a_sentence(pool: Pool) -> None:
    for options, why in (
        ({"offload_policy": CPUOffloadPolicy()}, "map_shards is for ranks on CPUs that share memory"),
        ({"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}, "mp_policy makes .*weight another dtype"),
    ):
        for text in pool.run(refused, 2, options, shared_memory=True):
            assert re.search(why, text)
    for text in pool.run(refused, 2, {}, shared_memory=False):
        assert "map_shards is for ranks on CPUs that share memory, as by fsdp_lab.init_process_group()" in text


DOES_NOT_GO_WITH = [
    ({"backend": "fsdp2"}, "fsdp2 copies what it gathers"),
    ({"sharding": "no_shard"}, "nothing is gathered with no_shard"),
    ({"offload": "optimizer"}, "what is offloaded is copied"),
    ({"precision": "bf16"}, "gathered in another precision"),
    ({"precision": Precision(norm="bf16")}, "gathered in another precision"),
    ({"world_size": 4, "reshard_size": 2}, "nothing is kept between forward and backward"),
    ({"devices": ["cuda:0", "cuda:1"]}, "GPUs do not share memory"),
    ({"link": "1 GB/s"}, "over an emulated link what is gathered would have to be sent"),
]


def test_a_spec_says_what_does_not_go_with_it() -> None:
    for changes, why in DOES_NOT_GO_WITH:
        error = Spec().validate(gather="mapped", **changes)
        assert isinstance(error, SpecError) and error.field == "strategy.gather" and why in error.reason
        assert Spec().validate(**{**changes, "gather": "mapped", **error.fix}) is None
    Spec().replace(gather="mapped", precision=Precision(norm="fp32", reduce="bf16", buffer="bf16", output="bf16"))
    assert Spec().id == Spec().replace(gather="copy").id != Spec().replace(gather="mapped").id
