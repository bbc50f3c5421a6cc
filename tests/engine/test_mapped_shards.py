"""The engine in memory that ranks share: nobody reads what was freed, or what comes too early or too late.

Also where gathered parameters are the shards of all ranks where they lie, and nothing is copied."""

import random
import re
import time
from typing import Any

import pytest
import torch
from torch import distributed as dist, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from fsdp_lab.base.errors import SpecError
from fsdp_lab.engine import ShardError, full_state, no_sync, unshard
from fsdp_lab.engine.api import flats_of
from fsdp_lab.spec.spec import Precision, Spec, Strategy
from fsdp_lab.wire import host_group
from fsdp_lab.wire.arena import Arena, ArenaBlock
from fsdp_lab.wire.meter import Collective
from tests.covering import tiered
from tests.engine.toys import Block, Net, Scenario, batch, by_block, everywhere, make, train_beside, update
from tests.pool import Place, Pool

MAPPED = Strategy(gather="mapped")


def late(place: Place, model: nn.Module, seed: int) -> None:
    """Lets this rank be late at moments of its own."""
    own = random.Random(f"{seed} {place.rank}")

    def pause(*_: Any) -> None:
        if own.random() < 0.3:
            time.sleep(0.003)

    for module in model.modules():
        module.register_forward_pre_hook(pause)
        module.register_full_backward_pre_hook(pause)


def unsharded_bytes(model: Any) -> int:
    return sum(flat.full.nbytes for flat in flats_of(model) if flat.gathered.is_held)


def mapped(**options: Any) -> Any:
    return by_block(make(**options), strategy=MAPPED)


def shown(place: Place) -> tuple[list[bool], int, list[Collective]]:
    """Whether what another rank writes to its shard is at once what is computed with; bytes beside shards; what was sent."""
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
        update(optimizer)
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
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.5), []
    (first,) = torch.autograd.grad(model(x).square().mean(), [model.last.weight], create_graph=True)
    with unshard(model), torch.no_grad():
        for name, p in model.named_parameters():
            if not twice or name == "last.bias":  # which the second part does not read
                p.mul_(0.9)
    if twice:
        first.square().sum().backward()
        model.zero_grad()
    del first
    for _ in range(4):
        loss = model(x).square().mean()
        loss.backward()
        update(optimizer)
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


DOES_NOT_GO_WITH = [({"backend": "fsdp2"}, "fsdp2 copies what it gathers"),
                    ({"sharding": "no_shard"}, "nothing is gathered with no_shard"),
                    ({"offload": "optimizer"}, "what is offloaded is copied"),
                    ({"precision": "bf16"}, "gathered in another precision"),
                    ({"precision": Precision(norm="bf16")}, "gathered in another precision"),
                    ({"world_size": 4, "reshard_size": 2}, "nothing is kept between forward and backward"),
                    ({"devices": ["cuda:0", "cuda:1"]}, "GPUs do not share memory"),
                    ({"link": "1 GB/s"}, "over an emulated link what is gathered would have to be sent")]  # fmt: skip


def test_a_spec_says_what_does_not_go_with_it() -> None:
    for changes, why in DOES_NOT_GO_WITH:
        error = Spec().validate(gather="mapped", **changes)
        assert isinstance(error, SpecError) and error.field == "strategy.gather" and why in error.reason
        assert Spec().validate(**{**changes, "gather": "mapped", **error.fix}) is None
    Spec().replace(gather="mapped", precision=Precision(norm="fp32", reduce="bf16", buffer="bf16", output="bf16"))
    assert Spec().id == Spec().replace(gather="copy").id != Spec().replace(gather="mapped").id


# -- freed memory, copies, and what users send ---------------------------------------------------------------------------
def poison(patch: pytest.MonkeyPatch) -> list[ArenaBlock]:
    """Fills what is free with ones, which are NaN as numbers. Returns a list of what was filled, which grows."""
    filled: list[ArenaBlock] = []
    give_back = Arena._give_back

    def poisoned(arena: Arena, block: ArenaBlock) -> None:
        give_back(arena, block)
        if block.offset not in arena._users:
            arena.bytes_at(block.offset, block.nbytes).fill_(255)
            filled.append(block)

    patch.setattr(Arena, "_give_back", poisoned)
    return filled


STRATEGIES: tuple[dict[str, Any], ...] = (
    {}, {"sharding": "shard_grad_op"}, {"forward_prefetch": 3, "backward_prefetch": 3}, {"offload": "all"},
)  # fmt: skip


def trained_while_poisoned(place: Place) -> list[int]:
    """The same bits as a plain copy of the model, while what is free is poisoned and ranks are late. Returns how often."""
    found = []
    for seed, changes in enumerate(STRATEGIES):

        def shard(model: nn.Module, changes: dict[str, Any] = changes, seed: int = seed) -> None:
            by_block(model, strategy=Strategy(**changes))
            late(place, model, seed)

        with pytest.MonkeyPatch.context() as patch:
            filled = poison(patch)
            train_beside(place, make(), shard, steps=3)
            found.append(sum(block.is_mapped for block in filled))
    return found


def test_freed_memory_is_nobody_s(pool: Pool) -> None:
    for poisoned in pool.run(trained_while_poisoned, 2, shared_memory=True):
        assert all(times > 4 for times in poisoned)


def steady(place: Place, steps: int, strategy: Strategy) -> tuple[int, list[int]]:
    """How often addresses were mapped in steps after the first two, and what the arena took before each step; of ranks that
    begin each unit together, so that nobody is late."""
    calls, taken = list[Any](), list[int]()

    def shard(model: nn.Module) -> None:
        by_block(model, strategy=strategy)
        for module in model.modules():
            module.register_forward_pre_hook(lambda *_: place.world.barrier().wait() and None)
            module.register_full_backward_pre_hook(lambda *_: place.world.barrier().wait() and None)

    def at_step(model: nn.Module, step: int) -> None:
        if step == 2:
            calls.clear()
        taken.append(place.context._arena.used_bytes)

    with pytest.MonkeyPatch.context() as patch:
        map_ = host_group._map
        patch.setattr(host_group, "_map", lambda *given: calls.append(given) or map_(*given))
        train_beside(place, make(), shard, steps=steps, at_step=at_step)
    return len(calls), taken


@pytest.mark.parametrize("gather", ["copy", "mapped"])
def test_a_step_maps_nothing_and_takes_no_more_memory(pool: Pool, gather: str) -> None:
    for calls, taken in pool.run(steady, 2, 8, Strategy(gather=gather), shared_memory=True):
        assert calls == 0 and len(set(taken[4:])) == 1


def gathered_parameters_are_written_when_all_have_them(place: Place) -> None:
    """Rank 1 is late to read what rank 0 has gathered and writes to at once."""
    model = by_block(make(), strategy=Strategy())
    for number in range(5):
        if place.rank == 1:
            time.sleep(0.005)
        with unshard(model), torch.no_grad():
            for p in model.parameters():
                assert number == 0 or bool((p == number).all()), "what every rank wrote before"
                p.fill_(number + 1)


def what_is_gathered_is_entered_alone(place: Place) -> None:
    """One rank enters: it waits for nobody."""
    model = by_block(make(), strategy=Strategy())
    unshard(model)
    place.world.barrier().wait()
    if place.rank == 0:
        with unshard(model):
            pass
    place.world.barrier().wait()


@everywhere(globals())
def test_what_is_gathered_in_shared_memory(pool: Pool, scenario: Scenario, ranks: int) -> None:
    pool.run(scenario, ranks, shared_memory=True)


def sent_by_a_user(place: Place, backend: str, rounds: int) -> int:
    """How many sums are right of gradients that a user sends, blocking, and writes to afterwards, with late ranks."""
    model = make()
    if backend == "fsdp2":
        for module in (*model.blocks, model):
            fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
            module.set_allocate_memory_from_process_group_for_comm(True)
    else:
        by_block(model, strategy=Strategy())
    own, right = random.Random(f"{place.rank}"), 0
    for number in range(rounds):
        model(batch(number, place.rank)).square().mean().backward()
        gradients: list[Any] = [p.grad for p in model.parameters()]
        local = next(g.to_local().reshape(-1)[:4] for g in gradients if g.to_local().numel() > 3)
        everyone = [torch.empty_like(local) for _ in range(2)]
        dist.all_gather(everyone, local.clone())
        summed = torch.empty(2)
        if own.random() < 0.5:
            time.sleep(0.002)
        dist.reduce_scatter_tensor(summed, local)
        local.fill_(7.0)
        half = slice(place.rank * summed.numel(), (place.rank + 1) * summed.numel())
        right += torch.equal(summed, everyone[0][half] + everyone[1][half])
        model.zero_grad()
    return right


@pytest.mark.parametrize("backend", ["lab", "fsdp2"])
def test_a_user_may_send_gradients_and_write_to_them(pool: Pool, backend: str) -> None:
    assert pool.run(sent_by_a_user, 2, backend, 12, shared_memory=True) == [12, 12]
