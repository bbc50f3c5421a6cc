"""State that moves to another backend, or to the host and back, on a simulated device (tests/wire/simulated_wire.py)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from fsdp_lab.backends import transfer
from fsdp_lab.backends.state import resume_state, suspend_state
from tests.backends.train import start, steps
from tests.engine.parity import spec
from tests.engine.simulated import SimulatedDevice, Wait
from tests.pool import Place, Pool
from tests.wire.simulated_wire import Over, wire_on_device

BATCH = Wait("host", "compute", "transfer._await_all")
SPECS = [{}, {"sharding": "no_shard"}, {"offload": "all"}, {"sharding": "shard_grad_op"}]


def _trained(place: Place, device: SimulatedDevice | None = None) -> list[float]:
    """Losses of a step under each Spec, by switches; then to the host, and a step of a backend that resumes there."""
    backend, losses = None, list[float]()
    for changes in SPECS:
        one = spec("gpt2", place.world_size, backend="lab", **changes)
        backend = start(place, one, backend)
        losses += steps(place, one, backend, len(losses), 1)
    assert backend is not None
    suspended = suspend_state(backend)
    total = sum(float(t.sum()) for t in suspended.values.values())
    backend.release()
    backend = start(place, one)
    resume_state(suspended, backend)
    return [*losses, total, *steps(place, one, backend, len(losses), 1)]


def _on_device(place: Place, without: Wait | None = None) -> tuple[list[str], bool, list[float]]:
    """Races; whether all batches had arrived whenever the ranks met for it; and the losses."""
    device, arrived = SimulatedDevice(without=without), []
    with wire_on_device(place, Over.NCCL) as wire, ExitStack() as stack:
        world = wire.world
        meet = world.barrier

        def exchange(output: Tensor, input: Tensor, *, output_split_sizes: Any, input_split_sizes: Any) -> None:
            world.all_to_all_single(output, input, output_split_sizes, input_split_sizes).wait()

        def barrier(*given: Any) -> Any:
            arrived.append(device.compute.record_event().query())
            return meet(*given)

        stack.enter_context(patch.object(transfer, "streams_of", lambda _: device))
        stack.enter_context(patch.object(transfer.dist, "all_to_all_single", exchange))
        stack.enter_context(wire.on(device))
        world.allreduce([torch.zeros(1)]).wait()  # NCCL's own meeting, of which `barrier` is a part
        stack.enter_context(patch.object(world, "barrier", barrier))
        losses = _trained(place)
    assert arrived
    return device.races[:1], all(arrived), losses


@pytest.mark.slow
def test_every_wait_is_there(ran: Callable[..., list[Any]]) -> None:
    plain = ran(_trained, 2, reduction="native")
    for rank, (races, arrived, losses) in enumerate(ran(_on_device, 2, reduction=None)):
        assert races == [] and arrived
        assert losses == plain[rank]


@pytest.mark.slow
def test_a_wait_that_is_left_out_is_found(pool: Pool) -> None:
    races, arrived, _ = pool.run(_on_device, 2, BATCH, reduction=None)[0]
    assert races == [] and not arrived
