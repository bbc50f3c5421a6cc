"""The engine in memory that ranks share: nobody reads what was freed, or what comes too early or too late."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch
from torch import distributed as dist, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fsdp_lab.engine import unshard
from fsdp_lab.spec.spec import Strategy
from fsdp_lab.wire import host_group
from fsdp_lab.wire.arena import Arena, ArenaBlock
from tests.engine.toys import Scenario, batch, by_block, everywhere, make, train_beside
from tests.pool import Place, Pool


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


def late(place: Place, model: nn.Module, seed: int) -> None:
    """Lets this rank be late at moments of its own."""
    own = random.Random(f"{seed} {place.rank}")

    def pause(*_: Any) -> None:
        if own.random() < 0.3:
            time.sleep(0.003)

    for module in model.modules():
        module.register_forward_pre_hook(pause)
        module.register_full_backward_pre_hook(pause)


STRATEGIES: tuple[dict[str, Any], ...] = (
    {},
    {"sharding": "shard_grad_op"},
    {"forward_prefetch": 3, "backward_prefetch": 3},
    {"offload": "all"},
)


def trained(place: Place) -> list[int]:
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
    for poisoned in pool.run(trained, 2, shared_memory=True):
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
    for mapped, taken in pool.run(steady, 2, 8, Strategy(gather=gather), shared_memory=True):
        assert mapped == 0 and len(set(taken[4:])) == 1


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


@everywhere(gathered_parameters_are_written_when_all_have_them, what_is_gathered_is_entered_alone)
def test_what_is_gathered_in_shared_memory(pool: Pool, scenario: Scenario) -> None:
    pool.run(scenario, 2, shared_memory=True)


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
