"""Each collective over the wire, in each order of reduction, against what it should give."""

import functools
import itertools
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import distributed as dist

from fsdp_lab.wire import WireTimeout, traffic
from tests.pool import Place, Pool

Run = Callable[..., list[Any]]


@pytest.fixture(params=[False, True], ids=["gloo", "shared_memory"])
def over(pool: Pool, request: pytest.FixtureRequest) -> Run:
    """The pool's `run`, with groups over Gloo or over shared memory."""
    return functools.partial(pool.run, shared_memory=request.param)


def _values(rank: int, n: int) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(rank))


def _sums(place: Place, n: int, ops: list[str]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """By operation: what an all-reduce and a reduce-scatter give this rank."""
    return {op: (_all_reduce(place, n, op), _reduce_scatter(place, n, op)) for op in ops}


def _reduce_scatter(place: Place, n: int, op: str) -> torch.Tensor:
    out = torch.empty(n)
    place.world.reduce_scatter_single(
        out, _values(place.rank, n * place.world_size), _opts(dist.ReduceScatterOptions(), op)
    ).wait()
    return out


def _all_reduce(place: Place, n: int, op: str) -> torch.Tensor:
    t = _values(place.rank, n)
    place.world.allreduce([t], _opts(dist.AllreduceOptions(), op)).wait()
    return t


def _opts(opts: object, op: str) -> object:
    opts.reduceOp = dist.ReduceOp.PREMUL_SUM(0.25) if op == "PREMUL_SUM" else getattr(dist.ReduceOp, op)  # type: ignore[attr-defined]
    return opts


def _expected(world_size: int, n: int, op: str) -> torch.Tensor:
    """The sum in the order of ranks, then the scale: what rank-ordered reduction promises, bit for bit."""
    total = _values(0, n).clone()
    for r in range(1, world_size):
        total += _values(r, n)
    return {"SUM": total, "AVG": total / world_size, "PREMUL_SUM": total * 0.25}[op]


OPERATIONS = ["SUM", "AVG", "PREMUL_SUM"]


@pytest.mark.parametrize(("reduction", "world_size"), [("rank_ordered", 4), ("native", 2), ("auto", 3)])
def test_sums(over: Run, world_size: int, reduction: str) -> None:
    n = 1001
    same = torch.equal if reduction == "rank_ordered" else functools.partial(torch.allclose, atol=1e-6)
    by_rank = over(_sums, world_size, n, OPERATIONS, reduction=reduction)
    for op in OPERATIONS:
        reduced, parts = zip(*(found[op] for found in by_rank), strict=True)
        assert all(same(got, _expected(world_size, n, op)) for got in reduced), op
        assert same(torch.cat(parts), _expected(world_size, n * world_size, op)), op


def _in_place(place: Place, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What a reduce-scatter and an all-gather give this rank, each into its own part of the whole."""
    first, last = place.rank * n, (place.rank + 1) * n
    summed, gathered = _values(place.rank, n * place.world_size), torch.full((n * place.world_size,), torch.nan)
    place.world.reduce_scatter_single(summed[first:last], summed, _opts(dist.ReduceScatterOptions(), "SUM")).wait()
    gathered[first:last] = _values(place.rank, n)
    place.world.all_gather_single(gathered, gathered[first:last]).get_future().wait()
    return summed[first:last].clone(), gathered


def test_in_place(over: Run) -> None:
    """Each part comes to where another was sent from, and none is overwritten before it was sent or added."""
    world_size = 3
    for n in (0, 1, 70_001):
        parts, gathered = zip(*over(_in_place, world_size, n, reduction="rank_ordered"), strict=True)
        assert torch.equal(torch.cat(parts), _expected(world_size, n * world_size, "SUM"))
        assert all(torch.equal(got, torch.cat([_values(r, n) for r in range(world_size)])) for got in gathered)


def _every_kind(place: Place) -> dict[str, object]:
    r, w, group, cpu = place.rank, place.world_size, place.world, torch.device("cpu")
    gathered = torch.empty(3 * w)
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(gathered, torch.full((3,), float(r)))
    listed = [torch.empty(2) for _ in range(w)]
    dist.all_gather(listed, torch.full((2,), float(r)))
    told = torch.full((4,), float(r))
    dist.broadcast(told, src=1)
    swapped = torch.empty(w)
    dist.all_to_all_single(swapped, torch.arange(w, dtype=torch.float32) + 10 * r)
    dist.barrier()
    objects: list[object] = [None] * w
    dist.all_gather_object(objects, {"rank": r})
    biggest = torch.tensor([float(r)])
    dist.all_reduce(biggest, op=dist.ReduceOp.MAX)
    ones = torch.ones(2, dtype=torch.float64)
    place.world.control(ones)
    totals = {k: (t.calls, t.link_bytes, t.seconds > 0) for k, t in traffic(place.context.meter.take()).items()}
    sequence = place.context.last.sequence
    # What loops of users and of torch's libraries call beside these.
    with pytest.raises(NotImplementedError, match="has no such collective of lists; give tensors to all_gather_single"):
        dist.all_to_all(listed, listed)
    one, two = torch.full((3,), 1.0 + r), torch.full((5,), 2.0 + r)
    with dist.distributed_c10d._coalescing_manager(group, cpu, async_ops=True) as together:
        dist.all_reduce(one)
        dist.all_reduce(two)
    together.wait()
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=30), group)
    dist.distributed_c10d._add_ephemeral_timeout_for_all_pgs(timedelta(seconds=1))
    assert group._get_sequence_number_for_group() > 0
    return {
        "gathered": gathered.tolist(), "listed": torch.cat(listed).tolist(), "told": told.tolist(),
        "swapped": swapped.tolist(), "objects": objects, "biggest": biggest.item(), "ones": ones.tolist(),
        "together": [one[0].item(), two[-1].item()], "totals": totals, "sequence": sequence,
    }  # fmt: skip


def test_every_kind_arrives_and_is_counted(over: Run) -> None:
    for r, got in enumerate(over(_every_kind, 3)):
        totals, sequence = got.pop("totals"), got.pop("sequence")
        assert totals["all_to_all"] == (1, 8, True)  # 3 floats, of which 2 leave
        assert totals["broadcast"][:2] == (1, 16) and totals["control"] == (1, 2 * 16 * 2 // 3, True)
        assert totals["barrier"][1] == 0 and sequence == sum(calls for calls, _, _ in totals.values()) - 1
        assert got == {"gathered": [0.0] * 3 + [1.0] * 3 + [2.0] * 3, "listed": [0.0, 0.0, 1.0, 1.0, 2.0, 2.0],
                       "told": [1.0] * 4, "swapped": [10.0 * s + r for s in range(3)],
                       "objects": [{"rank": s} for s in range(3)], "biggest": 2.0, "ones": [3.0, 3.0],
                       "together": [6.0, 9.0]}  # fmt: skip


def _passes_on(place: Place, late_s: float) -> list[float]:
    """From rank to rank, each to the next and from the last one, which comes late."""
    rank, size = place.rank, place.world_size
    big, came = torch.full((1 << 18,), float(rank)), torch.empty(1 << 18)
    pair = [dist.P2POp(dist.isend, big, (rank + 1) % size), dist.P2POp(dist.irecv, came, (rank - 1) % size)]
    for work in dist.batch_isend_irecv(pair):
        work.wait()
    assert came[0] == (rank - 1) % size
    t = torch.full((3,), float(place.rank))
    if place.rank == place.world_size - 1:
        time.sleep(late_s)
        place.world.send([t], 0, 0).wait()
    elif place.rank == 0:
        place.world.recv([t], place.world_size - 1, 0).wait()
    place.world.barrier().wait()
    return t.tolist()


def test_a_rank_that_sends_late_is_waited_for(over: Run) -> None:
    """Gloo closes the connection where a wait for it times out, so it must not be waited for in slices."""
    assert over(_passes_on, 3, 0.2) == [[2.0] * 3, [1.0] * 3, [2.0] * 3]


def _exchanged(place: Place, n: int, ring: bool, piece_bytes: int) -> list[torch.Tensor]:
    place.world._ring, place.world._piece_bytes = ring, piece_bytes
    whole, part = torch.empty(n * place.world_size), _values(place.rank, n)
    place.world.all_gather_single(whole, part).wait()
    return [whole, _reduce_scatter(place, n, "SUM"), _all_reduce(place, n, "SUM")]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "n"), [(2, 1), (2, 256), (3, 255), (4, 1000)])
def test_between_hosts_all_bits_are_the_same(pool: Pool, ranks: int, n: int) -> None:
    """In a ring or not, whole or in pieces of 1,000 bytes, of which the last is smaller."""
    inside, *others = (pool.run(_exchanged, ranks, n, ring, piece_bytes, reduction="rank_ordered")
                       for ring, piece_bytes in itertools.product((False, True), (0, 1000)))  # fmt: skip
    for other in others:
        for one, two in zip(inside, other, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def _chosen(place: Place) -> int:
    return place.world._fastest_pieces()


def test_all_ranks_choose_alike_how_they_exchange(pool: Pool) -> None:
    (chosen,) = set(pool.run(_chosen, 3))
    assert chosen in (0, 128 << 10)


def _never_comes(place: Place) -> str:
    """What rank 0 is told of a collective that rank 1 does not join."""
    if place.rank == 1:
        place.store.wait(["told"])
        return ""
    with pytest.raises(WireTimeout) as late:
        place.world.all_gather_single(torch.empty(2), torch.empty(1)).wait(timedelta(seconds=1))
    place.context.abort("the end")  # the group may be closed only so
    place.store.set("told", "")
    return str(late.value)


def test_a_collective_that_a_rank_does_not_join_ends_in_time(pool: Pool) -> None:
    told = "collective 0 (all_gather in group 0 of 2) did not complete in 1 s: a rank did not join it"
    assert pool.run(_never_comes, 2)[0] == told


def _not_here(place: Place) -> None:
    with pytest.raises(NotImplementedError, match="time estimator is not supported"):
        dist.distributed_c10d._time_estimator(place.world).__enter__()
    dist.all_reduce(plain := torch.ones(4))
    assert plain[0] == place.world_size, "and the group goes on"


def test_estimates_of_time_are_refused(over: Run) -> None:
    over(_not_here, 2)
