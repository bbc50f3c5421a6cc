"""Steps of the engine whose collectives go over the wire, on a simulated device: over NCCL, metered, or staged through the
host. tests/engine/test_streams.py has the same on groups that order nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from tests.covering import tiered
from tests.engine.simulated import Mode, SimulatedDevice
from tests.engine.test_streams import ASKED, CASES, Case, Values, train
from tests.pool import Place
from tests.wire.simulated_wire import Over, wire_on_device


def _plainly(place: Place, which: Case) -> Values:
    return train(place, which)[0]


def _over(place: Place, which: Case, over: str, mode: Mode) -> Any:
    """What `train` returns; or the first race that was found."""
    device = SimulatedDevice(mode)
    with wire_on_device(place, over) as wire, wire.on(device):
        place.context.start_timing()
        found = train(place, which, device)
        place.context.read_timing()
    return device.races[0] if device.races else found


def _rows() -> Iterable[tuple[str, str, Mode]]:
    """Each case over one of the wires in one mode, by turns; the first of all over every wire."""
    wires = (Over.NCCL, Over.GPU, Over.HOST)
    return [
        (name, wires[(i + j) % 3], [*Mode][(i + j) % 2])
        for i, name in enumerate(CASES)
        for j in range(1 if i else len(wires))
    ]


def _is_quick(name: str, over: str, mode: Mode) -> bool:
    return (name, over) in {("full_shard", Over.NCCL), ("full_shard", Over.GPU)}


@pytest.mark.parametrize(("name", "over", "mode"), tiered(_rows(), _is_quick))
def test_every_wait_is_there(ran: Callable[..., Any], name: str, over: str, mode: Mode) -> None:
    which, order = CASES[name], "native" if over == Over.NCCL else "auto"
    plain = ran(_plainly, which.ranks, which, reduction=order)
    for rank, found in enumerate(ran(_over, which.ranks, which, over, mode, reduction=None)):
        assert not isinstance(found, str), found
        assert found[0].keys() == plain[rank].keys()
        for key, value in found[0].items():
            assert value.equal(plain[rank][key]), key


# -- what the wire adds to a step --------------------------------------------------------------------------------------

# To the table in tests/engine/test_streams.py, in the last of three steps of four units. Over NCCL with metering on: marks,
# two for each collective; and how often a lane waits for NCCL. Staged through the host, where metering asks nothing of the
# device, and an emulated link neither: copies between host and device, and how often the host waits for the device. It
# adds no stream and no other event: the engine asks for no futures.
ADDED = {
    #                          NCCL: marks waits, staged: copies host waits
    "full_shard": (20, 10, 20, 20),
    "shard_grad_op": (16, 8, 16, 16),
    "zero1": (16, 8, 16, 16),
    "no_shard": (8, 4, 8, 8),
    "hybrid_shard": (28, 14, 28, 28),
    "hybrid_shard_zero2": (24, 12, 24, 24),
    "post forward": (20, 10, 20, 20),
    "bf16": (20, 10, 20, 20),
    "offload all": (20, 10, 20, 20),
    "offload optimizer": (20, 10, 20, 20),
    "offload, hybrid": (28, 14, 28, 28),
    "offload, replicated": (8, 4, 8, 8),
    "accumulation": (40, 20, 40, 40),
    "accumulation, kept": (32, 16, 32, 32),
    "accumulation, offload": (40, 20, 40, 40),
    "accumulation, hybrid": (56, 28, 56, 56),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ADDED)
def test_what_the_wire_adds_to_a_step(ran: Callable[..., Any], name: str) -> None:
    which, (*_, copies, events, by_compute, by_host) = CASES[name], ASKED[name]
    marks, by_lanes, staged_copies, staged_waits = ADDED[name]
    asked = {}
    for over in (Over.NCCL, Over.HOST):
        _, waits, counts = ran(_over, which.ranks, which, over, Mode.EAGER, reduction=None)[0]
        compute = sum(n for wait, n in waits.items() if wait.waiting == "compute")
        for_nccl = sum(n for wait, n in waits.items() if wait.waited_for.startswith("nccl"))
        assert (counts["streams"], counts["events"], compute) == (0, events, by_compute)
        asked[over] = (counts["marks"], for_nccl, counts["copies"], counts["synchronisations"])
    assert asked[Over.NCCL] == (marks, by_lanes, copies, by_host)
    assert asked[Over.HOST] == (0, 0, copies + staged_copies, by_host + staged_waits)
