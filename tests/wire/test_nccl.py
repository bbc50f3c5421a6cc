"""The wire over a simulated NCCL: what waits for what, what is held, how long a collective took, how groups are closed."""

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
from torch import distributed as dist

from fsdp_lab.rank.rendezvous import close_groups, open_groups
from fsdp_lab.wire import Nccl, RankAborted, Wire, nccl
from tests.engine.simulated import SimulatedDevice
from tests.pool import Place, Pool
from tests.wire.simulated_nccl import SimulatedNccl, simulated

N = 8  # elements of a rank's part


@contextmanager
def opened(place: Place) -> Iterator[tuple[Wire, SimulatedNccl]]:
    world = open_groups(place.info, place.store, place.context, 0)
    device: Any = place.context.nccl
    try:
        yield world, device
    finally:
        close_groups(place.context)


def gathered(world: Wire) -> torch.Tensor:
    """The output of an all-gather that the current stream waits for. [W * N]"""
    whole, part = torch.empty(world.size() * N), torch.full((N,), 1.0 + world.rank())
    world.all_gather_single(whole, part).wait()
    return whole


def begin(place: Place, world: Wire) -> None:
    """All ranks have met, and nothing is in flight; rank 1 waits until rank 0 has `looked`."""
    gathered(world).sum()
    if place.rank == 1:
        place.store.wait(["looked"], timedelta(seconds=20))


def _futures(place: Place) -> list[Any]:
    with opened(place) as (world, device):
        begin(place, world)
        future = world.allreduce([torch.full((N,), 1.0)]).get_future()
        seen = [len(device.main.behind), len(device.side.behind), future.done()]
        place.store.set("looked", "")
        value: Any = future.wait()
        right = [value[0].tolist() == [2.0] * N]
        if place.rank == 1:
            time.sleep(0.2)
        later = torch.full((N,), 1.0)
        work = world.allreduce([later])
        work.get_future()
        work.wait()  # after the future was handed out: orders the main stream too
        return [seen, [*right, later.tolist() == [2.0] * N]]


def test_a_future_does_not_order_the_stream_that_computes(pool: Pool) -> None:
    """Otherwise DDP's backward would wait for each bucket."""
    (seen, right), _ = pool.run(simulated, 2, _futures, reduction=None)
    assert seen == [0, 1, False], "the side stream waits, the main one does not, and nobody has waited on the host"
    assert right == [True, True]


def _held(place: Place, by_future: bool) -> bool:
    with opened(place) as (world, _):
        place.context.start_timing()
        gathered(world).sum()
        whole, part = torch.empty(place.world_size * N), torch.ones(N)
        work = world.all_gather_single(whole, part)
        if by_future:
            work.get_future().wait()
        else:
            work.wait()
        assert whole.sum() == place.world_size * N
        seen = weakref.ref(whole)
        del whole, work
        held = _comes(lambda: seen() is None)
        place.context.end_timing()()
        return held


def _comes(true: Callable[[], bool], within_s: float = 5.0) -> bool:
    end = time.monotonic() + within_s
    while not true() and time.monotonic() < end:
        time.sleep(0.01)
    return true()


def test_the_meter_holds_no_output(pool: Pool) -> None:
    """Otherwise what FSDP2 gathers would stay to the end of the step."""
    for by_future in (False, True):
        assert pool.run(simulated, 2, _held, by_future, reduction=None) == [True, True]


def _times(place: Place) -> list[tuple[float, float]]:
    """When each of two collectives in flight began and ended, since they were issued; rank 1 comes late to both."""
    with opened(place) as (world, _):
        gathered(world).sum()
        place.context.meter.take()
        place.context.start_timing()
        if place.rank == 1:
            time.sleep(0.4)
        start_s = time.perf_counter()
        for work in [world.all_gather_single(torch.empty(2 * N), torch.ones(N)) for _ in range(2)]:
            work.wait()
        place.context.end_timing()()
        return [(c.began_s - start_s, (c.end_s or 0.0) - start_s) for c in place.context.meter.take()]


def test_times_are_the_device_s(pool: Pool) -> None:
    (first, second), _ = pool.run(simulated, 2, _times, reduction=None)
    assert first[0] < 0.2 and first[1] > 0.3, "it waits for the late rank on the device"
    assert second[0] == pytest.approx(first[1]) and second[1] >= second[0], "it begins where the one before ends"


def _synchronous(place: Place) -> list[Any]:
    """torch's own synchronous call, for which NCCL would return no work."""
    with opened(place) as (world, _):
        begin(place, world)
        place.context.meter.take()
        place.context.start_timing()
        whole = torch.empty(2 * N)
        call: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        call(whole, torch.full((N,), 1.0 + place.rank))
        pending = place.context.pending()
        place.store.set("looked", "")
        total = float(whole.sum())
        place.context.end_timing()()
        (metered,) = place.context.meter.take()
        return [pending.kind if pending else None, total, metered.start_s is not None]


def test_a_synchronous_collective_is_seen_and_timed(pool: Pool) -> None:
    (pending, total, timed), _ = pool.run(simulated, 2, _synchronous, reduction=None)
    assert pending == "all_gather" and total == 3 * N and timed


def _never_meets(place: Place) -> list[Any]:
    """Rank 1 never comes to the first collective."""
    with opened(place) as (world, device):
        if place.rank == 1:
            place.store.wait(["looked"], timedelta(seconds=20))
            return []
        threading.Timer(0.3, place.context.abort, ("stopped",)).start()
        start_s = time.perf_counter()
        with pytest.raises(RankAborted, match="stopped"):
            gathered(world)
        place.store.set("looked", "")
        return [time.perf_counter() - start_s, device.groups[0].issued]


def test_a_rank_that_waits_for_its_first_collective_is_freed(pool: Pool) -> None:
    """NCCL's own meeting cannot be aborted."""
    (seconds, issued), _ = pool.run(simulated, 2, _never_meets, reduction=None)
    assert seconds < 10 and issued == 0


def _closes(place: Place, aborted: bool) -> list[Any]:
    """Rank 0 closes its groups while a collective of its own runs, which rank 1 never joins. Then both open new ones."""
    with mock.patch.object(nccl, "_CLOSE_S", 0.5):
        world = open_groups(place.info, place.store, place.context, 0)
        begin(place, world)
        work = None
        if place.rank == 0:
            work = world.all_gather_single(torch.empty(2 * N), torch.ones(N))
            for _ in range(2 * aborted):
                place.context.abort("stopped")
        start_s = time.perf_counter()
        close_groups(place.context)
        seconds, ended = time.perf_counter() - start_s, work is None or work.is_completed()
        place.store.set("looked", "")
    world = open_groups(place.info, place.store, place.context, 1)
    whole = gathered(world).clone().tolist()
    close_groups(place.context)
    return [seconds, ended, whole]


@pytest.mark.parametrize("aborted", [True, False])
def test_closing_does_not_hang_and_new_groups_open(pool: Pool, aborted: bool) -> None:
    (seconds, ended, whole), _ = pool.run(simulated, 2, _closes, aborted, reduction=None)
    assert seconds < 10 and ended, "its kernel does not run on"
    assert whole == [1.0] * N + [2.0] * N


def test_the_settings_are_ours_for_our_groups_only(monkeypatch: pytest.MonkeyPatch) -> None:
    class Opened:
        class Options:
            pass

        def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
            self.seen = {name: os.environ[name] for name in nccl._SETTINGS}
            self.level, self.options, self.place = dist.get_debug_level(), options, (store, rank, size)

    monkeypatch.setattr(dist, "ProcessGroupNCCL", Opened, raising=False)
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    monkeypatch.delenv("TORCH_NCCL_ENABLE_MONITORING", raising=False)
    monkeypatch.setattr(dist, "get_debug_level", lambda: dist.DebugLevel.DETAIL)
    levels: list[Any] = []
    monkeypatch.setattr(dist, "set_debug_level", levels.append)
    group = Nccl(SimulatedDevice()).open("store", 1, 2, timedelta(seconds=60))
    assert group.seen == nccl._SETTINGS and group.seen["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    assert group.options._timeout == timedelta(seconds=60) and group.place == ("store", 1, 2)
    assert not group.supports_time_estimate and isinstance(group, Opened), "torch's functions ask for its class"
    assert group.options.is_high_priority_stream, "a peer's collectives run here, and its own stream would have it"
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "1" and "TORCH_NCCL_ENABLE_MONITORING" not in os.environ
    assert levels == [dist.DebugLevel.INFO, dist.DebugLevel.DETAIL], "DETAIL would switch the error handling on again"


def _pair(place: Place) -> list[Any]:
    with opened(place) as (world, device):
        gathered(world).sum()
        before, other = device.groups[0].issued, 1 - place.rank
        came = torch.empty(N)
        ops = [dist.P2POp(dist.isend, torch.full((N,), 1.0 + place.rank), other), dist.P2POp(dist.irecv, came, other)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        assert world._get_backend(torch.device("cuda")) is device.groups[0]
        return [came.tolist(), device.groups[0].issued - before]


def test_a_pair_of_sends_and_receives_goes_over_the_host(pool: Pool) -> None:
    """NCCL would run them in the order of issue: with two that both send first, for ever."""
    assert pool.run(simulated, 2, _pair, reduction=None) == [[[2.0] * N, 0], [[1.0] * N, 0]]
