"""Memory of a GPU that ranks share, on a simulated one: what is used again, what grows, and what happens where it fails."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fsdp_lab.wire import gpu_memory, shared_memory
from fsdp_lab.wire.gpu_memory import GpuArena
from tests.engine.simulated import SimulatedDevice
from tests.pool import Place, Pool
from tests.wire.simulated_wire import ExportedMemory, Over, wire_on_device

STEPS = 4


def _gathered(place: Place, sizes: list[int]) -> tuple[list[bool], list[int]]:
    """Whether each all-gather has the parts of all ranks, and how many pieces there were after it. What it gave is computed
    with when the next one was issued; the last rank is late to issue that. What a rank tells the others is so by then: the
    host has waited for the stream that writes or reads."""
    device, right, pieces, before = SimulatedDevice(), list[bool](), list[int](), torch.zeros(0)

    def when_it_is_so(tell: Callable[..., None]) -> Callable[..., None]:
        def told(*given: Any) -> None:
            right.append(device.current_stream.record_event().query())
            tell(*given)

        return told

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_memory, "_PIECE_BYTES", 4096)
        with wire_on_device(place, Over.GPU) as wire, wire.on(device):
            arena: Any = wire.world._on_gpu.arena
            for peer in wire.world._on_gpu.peers.values():
                patch.setattr(peer.to, "publish", when_it_is_so(peer.to.publish))
                patch.setattr(peer.from_, "acknowledge", when_it_is_so(peer.from_.acknowledge))
            stream = device.new("gather")
            for number, n in enumerate([*sizes, 1]):
                part, whole = torch.full((n,), float(number + place.rank)), torch.empty(n * place.world_size)
                stream.wait_stream(device.current())
                if place.rank == place.world_size - 1:
                    time.sleep(0.01)
                with device.entered(stream):
                    work = wire.world.all_gather_single(whole, part)
                part.fill_(-1.0)  # it was sent
                device.current().wait_stream(stream)
                parts = enumerate(before.chunk(place.world_size) if number else ())
                right += [bool((p == number - 1 + r).all()) for r, p in parts]
                with device.entered(stream):
                    work.wait()
                before = whole
                pieces.append(len(arena._pieces))
            assert wire.world.carrier == "the GPU's memory"
    assert not device.races, device.races[0]
    return right, pieces[:-1]


def test_memory_is_used_again_and_grows_with_the_largest(pool: Pool) -> None:
    for right, pieces in pool.run(_gathered, 3, [100] * STEPS + [5000] * STEPS + [100] * STEPS, reduction=None):
        assert all(right) and len(right) > 3 * 3 * STEPS
        assert pieces[0] == pieces[STEPS - 1] < pieces[-1] <= pieces[0] + 4
        assert pieces[-1] == pieces[2 * STEPS + 1], "what is there serves what comes later"


def _parts(place: Place, patience_s: float) -> tuple[bool, float, int]:
    """Of a rank that closes its groups at once, before the other one: whether the other has closed its memory by then, how
    long it took, and how many groups are kept."""
    with pytest.MonkeyPatch.context() as patch, wire_on_device(place, Over.GPU) as wire:
        patch.setattr(shared_memory, "_PART_S", patience_s)
        group: Any = wire.world._on_gpu
        wire.world.barrier().wait()
        time.sleep(0.2 * place.rank)
        began_s = time.monotonic()
        wire.world.shutdown()
        return group.all_parted, time.monotonic() - began_s, len(place.context._closed)


def test_memory_is_freed_when_nobody_has_it_open(pool: Pool) -> None:
    (parted, took_s, kept), *_ = pool.run(_parts, 2, 5.0, reduction=None)
    assert parted and took_s > 0.1 and not kept
    (parted, took_s, kept), *_ = pool.run(_parts, 2, 0.05, reduction=None)
    assert not parted and kept == 1


def _refused(place: Place, method: str) -> tuple[bool, str, list[bool]]:
    """Whether there is such memory where a method fails on rank 1, why not, and whether an all-gather is right then."""

    def fail(*_: Any) -> Any:
        raise OSError(801, f"{method}: operation not supported")

    with pytest.MonkeyPatch.context() as patch:
        if place.rank == 1:
            patch.setattr(ExportedMemory, method, fail)
        device = SimulatedDevice()
        with wire_on_device(place, Over.GPU) as wire:
            why = next(iter(place.context.not_on_gpu.values()), "")
            with wire.on(device):
                part, whole = torch.full((4,), float(place.rank)), torch.empty(12)
                wire.world.all_gather_single(whole, part).wait()
                right = [bool((p == r).all()) for r, p in enumerate(whole.chunk(3))]
            return wire.world._on_gpu is not None, why, right


@pytest.mark.parametrize(
    ("method", "why"),
    [("allocate", "allocate: operation not supported"), ("open", "rank 1 could not map the memory of the others")],
)
def test_all_ranks_go_through_the_host_where_one_cannot(pool: Pool, method: str, why: str) -> None:
    for has_any, said, right in pool.run(_refused, 3, method, reduction=None):
        assert not has_any and why in said and all(right)


class Garbled(ExportedMemory):
    """Opens something else."""

    def open(self, handle: bytes, nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8)


def test_what_cannot_be_read_is_found_when_a_group_is_opened() -> None:
    store = torch.distributed.HashStore()
    arenas = [GpuArena(Garbled(), store, rank, lambda: None) for rank in range(2)]
    with pytest.raises(OSError, match="what rank 1 wrote to this GPU cannot be read"):
        arenas[0].peer(1, ())


def test_the_driver_is_asked_for_or_there_is_none() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one: tests/gpu")
    with pytest.raises(OSError, match=r"libcuda\.so\.1"):
        gpu_memory.CudaMemory(torch.device("cuda"))
