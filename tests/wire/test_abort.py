"""What an abort leaves behind: operations that Gloo may still begin, whose memory must not be freed under them."""

from __future__ import annotations

import time

import torch

from fsdp_lab.backends import base
from tests.pool import Place, Pool


def _given_up(place: Place) -> None:
    world, hub = place.world, place.hub
    whole, part = torch.empty(2 * 64), torch.empty(64)
    world.all_gather_single(whole, part).wait()
    assert not hub.busy()
    if place.rank == 1:
        return  # and never joins what rank 0 issues now
    held = [(torch.zeros(2 * 64), torch.zeros(64)) for _ in range(4)]  # more than Gloo has threads: some wait in its queue
    for gathered, shard in held:
        world.all_gather_single(gathered, shard)
    hub.abort("given up")
    assert hub.busy() == {t.untyped_storage().data_ptr() for pair in held for t in pair}
    base.free([*held[0], whole], hub.busy())
    assert [t.untyped_storage().size() for t in (*held[0], whole)] == [512, 256, 0]
    end = time.monotonic() + 2 * hub.timeout_s
    while hub.busy() and time.monotonic() < end:
        time.sleep(0.1)
    assert not hub.busy()  # the operations have run into their timeout


def test_memory_of_operations_in_flight_is_left_alone(pool: Pool) -> None:
    pool.run(_given_up, 2)
