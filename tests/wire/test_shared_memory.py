"""Groups over shared memory: what they give whatever the order of waits, how a wait ends, and what is left afterwards.
That each collective gives what it gives over Gloo is in test_collectives.py."""

import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed as dist

from fsdp_lab.rank.rendezvous import close_groups, open_groups
from fsdp_lab.wire import RankAborted, WireContext, channels, shared_memory as shared
from fsdp_lab.wire.arena import Arena, class_bytes
from tests.pool import Place, Pool

N = 5  # elements of a rank's part


def _value(number: int, rank: int, part: int = 0) -> Tensor:
    """[N], whole numbers, so that a sum has the same bits in every order."""
    return torch.arange(N, dtype=torch.float32) + 1000 * number + 100 * rank + 10 * part


def _issued(world: Any, rank: int, size: int, number: int, kind: str) -> tuple[Any, Tensor, Tensor]:
    """A collective, its output, and what that is to be."""
    everyone = range(size)
    if kind == "all_gather":
        output = torch.empty(size * N)
        work = world.all_gather_single(output, _value(number, rank))
        return work, output, torch.cat([_value(number, r) for r in everyone])
    if kind == "reduce_scatter":
        output = torch.empty(N)
        work = world.reduce_scatter_single(output, torch.cat([_value(number, rank, p) for p in everyone]))
        return work, output, sum((_value(number, r, rank) for r in everyone), torch.zeros(N))
    if kind == "all_reduce":
        output = _value(number, rank)
        return world.allreduce([output]), output, sum((_value(number, r) for r in everyone), torch.zeros(N))
    if kind == "all_to_all":
        output = torch.empty(size * N)
        work = world.all_to_all_single(output, torch.cat([_value(number, rank, p) for p in everyone]), [], [])
        return work, output, torch.cat([_value(number, r, rank) for r in everyone])
    assert kind == "broadcast"
    output, root = _value(number, rank), number % size
    options = dist.BroadcastOptions()
    options.rootRank = root
    return world.broadcast([output], options), output, _value(number, root)


KINDS = ["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast"]


def _in_any_order(place: Place, seed: int, count: int) -> None:
    """Every rank issues the same collectives, and waits for them in an order and at times of its own."""
    plan, own, open_ = random.Random(seed), random.Random(f"{seed} {place.rank}"), list[Any]()
    for number in range(count):
        open_.append(_issued(place.world, place.rank, place.world_size, number, plan.choice(KINDS)))
        while open_ and own.random() < 0.5:
            _end(open_.pop(own.randrange(len(open_))), own)
    while open_:
        _end(open_.pop(own.randrange(len(open_))), own)


def _end(issued: tuple[Any, Tensor, Tensor], own: random.Random) -> None:
    work, output, wanted = issued
    how = own.randrange(3)
    if how == 0:
        work.get_future().wait()
    elif how == 1:
        while not work.is_completed():
            time.sleep(0)
    work.wait()
    assert torch.equal(output, wanted)


@pytest.mark.parametrize("world_size", [1, 4])
def test_waits_may_come_in_any_order(pool: Pool, world_size: int) -> None:
    for seed in range(2):
        pool.run(_in_any_order, world_size, seed, 60, shared_memory=True)


def _far_ahead(place: Place) -> None:
    """Rank 0 issues more than a ring has entries (256), before it waits for any; rank 1 waits for each."""
    open_ = []
    for number in range(300):
        issued = _issued(place.world, place.rank, place.world_size, number, "all_gather")
        if place.rank == 0:
            open_.append(issued)
        else:
            issued[0].wait()
    for work, output, wanted in open_:
        work.wait()
        assert torch.equal(output, wanted)


def _differ(place: Place, what: str) -> str:
    n = 4 + place.rank
    with pytest.raises(RankAborted) as refused:
        if what == "kind":
            _issued(place.world, place.rank, place.world_size, 0, KINDS[place.rank])[0].wait()
        for unit in ("", "layers.1", "layers.0") if what == "unit" else ():  # what is no unit's may be any unit's
            place.context.set_unit(unit if place.rank else "layers.1")
            place.world.barrier().wait()
        place.world.all_gather_single(torch.empty(2 * n), torch.empty(n)).wait()
    return str(refused.value)


def test_ranks_that_do_not_agree_are_told_what_the_other_did(pool: Pool) -> None:
    first, second = pool.run(_differ, 2, "kind", shared_memory=True)
    assert "rank 1 of the group issued reduce_scatter where this rank issued all_gather" in first
    assert "rank 0 of the group issued all_gather where this rank issued reduce_scatter" in second
    first, second = pool.run(_differ, 2, "unit", shared_memory=True)
    assert "rank 1 of the group issued barrier of another unit where this rank issued barrier of layers.1" in first
    assert "rank 0 of the group issued barrier of another unit where this rank issued barrier of layers.0" in second
    first, _ = pool.run(_differ, 2, "size", shared_memory=True)
    assert "20 bytes where this one expects 16" in first


def _transfers(place: Place) -> str:
    """Not in one order with collectives, nor with those of the other direction. Then a wrong size, and a wrong tag."""
    world, other, came = place.world, 1 - place.rank, [torch.empty(N) for _ in range(300)]
    receives = [world.recv([t], other, 0) for t in came] if place.rank else []
    works = [_issued(world, place.rank, 2, number, "all_gather") for number in range(2)]
    _end(works[0], random.Random(0))
    for number in range(200):
        world.send([_value(number, place.rank)], other, 0).wait()
    _end(works[1], random.Random(0))
    receives = receives or [world.recv([t], other, 0) for t in came]
    for number in range(200, 300):
        world.send([_value(number, place.rank)], other, 0).wait()
    for number, work in enumerate(receives):
        work.wait()
        assert torch.equal(came[number], _value(number, other))
    told = []
    for t, tag in ((torch.ones(N + place.rank), 3), (torch.ones(N), 3), (torch.ones(N), 4 + place.rank)):
        world.send([t], other, tag).wait()
        try:
            world.recv([t], other, tag).wait()
        except RankAborted as refused:
            told.append(str(refused))
    return "; ".join(told)


def test_transfers(pool: Pool) -> None:
    found, _ = pool.run(_transfers, 2, shared_memory=True)
    wrong_size, wrong_tag = found.split("; ")
    assert "a rank gave 24 bytes where this one expects 20" in wrong_size
    assert "rank 1 of the group issued transfer of another tag where this rank issued transfer of tag 4" in wrong_tag


def _waits_alone(place: Place, by: str) -> tuple[float, float, str]:
    """How long a wait lasts, and what CPU time it takes, that an abort ends; of rank 0."""
    if place.rank == 1:
        place.store.wait(["ended"])
        return 0.0, 0.0, ""
    work, *_ = _issued(place.world, 0, 2, 0, "all_gather")
    pending = place.context.pending()
    assert pending is not None and pending.kind == "all_gather"
    threading.Timer(0.2, place.context.abort, ["given up"]).start()
    begun_s, cpu_s = time.monotonic(), time.thread_time()
    with pytest.raises(RankAborted) as refused:
        if by == "future":
            work.get_future().wait()
        work.wait()
    spent = time.monotonic() - begun_s, time.thread_time() - cpu_s, str(refused.value)
    place.store.set("ended", "")
    return spent


def test_an_abort_ends_a_wait_which_costs_no_core(pool: Pool) -> None:
    for by in ("wait", "future"):
        lasted_s, cpu_s, why = pool.run(_waits_alone, 2, by, shared_memory=True)[0]
        assert why == "given up" and lasted_s < 10 and cpu_s < 0.1


def _after_an_abort(place: Place) -> None:
    """Groups are opened again, and an operation that was given up leaves no trace in them."""
    if place.rank == 0:
        _issued(place.world, 0, 2, 7, "all_gather")
    place.context.abort("given up")
    close_groups(place.context)
    world = open_groups(place.info, place.store, place.context, 1)
    for number, kind in enumerate(KINDS):
        _end(_issued(world, place.rank, 2, number, kind), random.Random(0))
    assert place.context._arena.used_bytes > 0
    close_groups(place.context)
    assert place.context._arena.used_bytes == 0


def _reads_late(place: Place) -> float:
    """Rank 0 gives up and closes its groups, while rank 1 has yet to read what both have issued."""
    total = torch.full((70_000,), place.rank + 1.0)
    work = place.world.allreduce([total])
    if place.rank == 0:
        work.wait()
        place.context.abort("given up")
        close_groups(place.context)
        place.context._arena.trim()
        place.store.set("left", "")
    else:
        place.store.wait(["left"])
        work.wait()
        close_groups(place.context)
    open_groups(place.info, place.store, place.context, 1)
    close_groups(place.context)
    assert place.context._arena.used_bytes == 0
    return float(total.sum())


def test_what_a_rank_gave_can_be_read_when_it_has_left(pool: Pool) -> None:
    assert pool.run(_reads_late, 2, shared_memory=True) == [3.0 * 70_000] * 2


def _leaves(place: Place) -> tuple[float, str]:
    """How long rank 0 waits for one that leaves, and what it is told."""
    place.world.barrier().wait()
    if place.rank == 1:
        close_groups(place.context)
        return 0.0, ""
    begun_s = time.monotonic()
    with pytest.raises(RankAborted) as refused:
        place.world.barrier().wait()
    return time.monotonic() - begun_s, str(refused.value)


def test_a_rank_that_leaves_is_not_waited_for(pool: Pool) -> None:
    waited_s, why = pool.run(_leaves, 2, shared_memory=True)[0]
    assert "rank 1 of the group has left or ended" in why and waited_s < 10


def _unusual(place: Place) -> None:
    r = place.rank
    for tensor in (torch.arange(6.0).view(2, 3).t(), torch.tensor(2.0), torch.zeros(0), torch.tensor([True, False]),
                   torch.tensor([1 + 2j]), torch.arange(3, dtype=torch.bfloat16)):  # fmt: skip
        total, wanted = tensor.clone(memory_format=torch.preserve_format), tensor + tensor
        place.world.allreduce([total]).wait()
        assert torch.equal(total, wanted) and total.stride() == tensor.stride()
    gathered = torch.empty(12)
    place.world.all_gather_single(gathered, torch.arange(6.0).view(2, 3).t()).wait()
    assert gathered.tolist() == [0.0, 3.0, 1.0, 4.0, 2.0, 5.0] * 2
    mean, options = torch.tensor([1.0 + 2 * r]), dist.ReduceOptions()
    options.reduceOp, options.rootRank = dist.ReduceOp.AVG, 1
    place.world.reduce([mean], options).wait()
    assert mean.item() == (2.0 if r == 1 else 1.0)


@pytest.mark.parametrize("scenario", [_far_ahead, _after_an_abort, _unusual])
def test_what_ranks_check_themselves(pool: Pool, scenario: Callable[[Place], None]) -> None:
    pool.run(scenario, 2, shared_memory=True)


def _interrupted(place: Place) -> str:
    """An interrupt may come between any two steps, so what comes after it is refused."""
    work, *_ = _issued(place.world, place.rank, 2, 0, "all_gather")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(shared.SharedPeer, "take", _interrupt)
        work.wait()
    with pytest.raises(RankAborted) as refused:
        work.wait()
    return str(refused.value)


def _interrupt(*_: Any) -> Any:
    raise KeyboardInterrupt


def test_an_interrupt_in_the_middle_makes_a_group_unusable(pool: Pool) -> None:
    for why in pool.run(_interrupted, 2, shared_memory=True):
        assert "an interrupt came in the middle of a collective; open the process groups again" in why


def _ends(place: Place) -> tuple[bool, bool]:
    """A collective ends when it is read, by the wait for a later one, and not when it is waited for."""
    first, *_ = _issued(place.world, place.rank, 2, 0, "all_gather")
    second, *_ = _issued(place.world, place.rank, 2, 1, "all_gather")
    second.wait()
    assert place.context.pending() is None, "what all ranks have joined is not, though it is not waited for"
    read_s = time.perf_counter()
    first.wait()
    one, other = place.context.meter.take()[-2:]
    return one.end_s <= other.end_s <= read_s, bool(one.put and one.issue_s <= one.put[0] <= one.put[1] <= one.end_s)


def test_the_end_of_a_collective_is_when_it_is_read(pool: Pool) -> None:
    assert pool.run(_ends, 2, shared_memory=True) == [(True, True)] * 2


# -- who uses it -----------------------------------------------------------------------------------------------------
def _no_memory(*_: Any, **__: Any) -> Any:
    raise OSError(12, "Cannot allocate memory")


FAULTS = {"another host": (channels, "host_id", lambda: "elsewhere", "its ranks are on several hosts"),
          "no file": (shared, "memory_file", _no_memory, "Cannot allocate memory"),
          "no mapping": (shared, "MappedFile", _no_memory, "rank 1 could not map the memory of the others"),
          "another user": (os, "geteuid", lambda: 12345, "its ranks are of several users")}  # fmt: skip


def _opened(place: Place, fault: str) -> tuple[list[str], bool]:
    """Why it is not used where rank 1 has a fault; and whether there is Gloo."""
    context = WireContext(timeout_s=3, shared_memory=True)
    with pytest.MonkeyPatch.context() as patch:
        if place.rank == 1:
            patch.setattr(*FAULTS[fault][:3])
        world = open_groups(place.info, place.store, context, 0)
    why, over_gloo = list(context.not_shared.values()), world._gloo is not None
    _end(_issued(world, place.rank, place.world_size, 0, "all_gather"), random.Random(0))
    world.barrier().wait()
    close_groups(context)
    return why, over_gloo


@pytest.mark.parametrize(("fault", "why"), [(fault, why) for fault, (*_, why) in FAULTS.items()])
def test_all_ranks_use_gloo_where_one_cannot(pool: Pool, fault: str, why: str) -> None:
    for found, over_gloo in pool.run(_opened, 3, fault, reduction=None):
        assert over_gloo and len(found) == 1 and why in found[0]


def test_no_port_is_opened(pool: Pool) -> None:
    assert pool.run(_sockets, 2, True, reduction=None) == [set(), set()]
    assert all(pool.run(_sockets, 2, False, reduction=None)), "Gloo's are found"


def _sockets(place: Place, shared_memory: bool) -> set[str]:
    """Of the internet, those that this process has opened with a group. (It may have others of earlier groups.)"""
    before, context = _internet_sockets(), WireContext(timeout_s=15, shared_memory=shared_memory)
    world = open_groups(place.info, place.store, context, 0)
    world.barrier().wait()
    opened = _internet_sockets() - before
    world.barrier().wait()
    close_groups(context)
    return opened


def _internet_sockets() -> set[str]:
    own = {os.readlink(fd) for fd in Path("/proc/self/fd").iterdir() if fd.exists() or fd.is_symlink()}
    tables = [Path(f"/proc/self/net/{kind}").read_text() for kind in ("tcp", "tcp6", "udp", "udp6")]
    inodes = [line.split()[9] for table in tables for line in table.splitlines()[1:]]
    return {inode for inode in inodes if f"socket:[{inode}]" in own}


# -- the arena -------------------------------------------------------------------------------------------------------
def test_size_classes_waste_at_most_an_eighth_and_memory_of_free_blocks_is_given_back() -> None:
    for nbytes in [*range(1, 3000), *(n + d for n in (1 << 20, 3 << 20, 1 << 31) for d in (-1, 0, 1))]:
        size = class_bytes(nbytes)
        assert size % 64 == 0 and nbytes <= size <= max(nbytes * 9 / 8 + 64, 64) and class_bytes(size) == size
    arena, pages = Arena(1 << 24), 4096 * 32
    blocks = [arena.allocate(pages) for _ in range(4)]
    for block in blocks:
        arena.bytes_at(block.offset, pages).fill_(7)
    arena.free(blocks[1])
    arena.free(blocks[3])
    arena.trim()
    assert arena.used_bytes == 2 * pages == _taken_bytes(arena)
    again = arena.allocate(pages)
    assert again in (blocks[1], blocks[3]) and arena.used_bytes == 3 * pages == _taken_bytes(arena)
    assert bool((arena.bytes_at(blocks[0].offset, pages) == 7).all())


def _taken_bytes(arena: Arena) -> int:
    return os.fstat(arena.file.descriptor).st_blocks * 512


def test_no_core_dump_has_an_arena_in_it() -> None:
    arena, maps = Arena(1 << 24), Path("/proc/self/smaps").read_text()
    of_ours = maps[maps.index(f"{arena.file.address:x}-") :]
    assert " dd" in of_ours[: of_ours.index("\n", of_ours.index("VmFlags"))]


def test_an_arena_that_is_full_says_so_and_goes_on() -> None:
    arena = Arena(1 << 20)
    block = arena.allocate(900_000)
    with pytest.raises(MemoryError, match="exceed this machine's memory"):
        arena.allocate(300_000)
    arena.free(block)
    assert arena.allocate(890_000) == block
    arena.free(block)
    arena.trim()
    assert arena.used_bytes == 0 and arena.allocate(64).offset == 0
    assert not arena.bytes_at(0, 64).any(), "the pages were given back"
