"""What an abort leaves behind: operations that Gloo may still begin, whose memory must not be freed under them."""

import time
from datetime import timedelta

import torch

from fsdp_lab.backends import base
from tests.pool import Place, Pool
from tests.wire.test_nccl import _comes


def _given_up(place: Place) -> None:
    world, context = place.world, place.context
    whole, part = torch.empty(2 * 64), torch.empty(64)
    world.all_gather_single(whole, part).wait()
    assert not context.busy_addresses()
    if place.rank == 1:
        place.store.wait(["looked"], timedelta(seconds=20))
        return  # and has never joined what rank 0 issued
    # more than Gloo has threads: some wait in its queue
    held = [(torch.zeros(2 * 64), torch.zeros(64)) for _ in range(4)]
    for gathered, shard in held:
        world.all_gather_single(gathered, shard)
    context.abort("given up")
    assert context.busy_addresses() == {t.untyped_storage().data_ptr() for pair in held for t in pair}
    base.free([*held[0], whole], context.busy_addresses())
    assert [t.untyped_storage().size() for t in (*held[0], whole)] == [512, 256, 0]
    place.store.set("looked", "")
    assert _comes(lambda: not context.busy_addresses(), context.timeout_s - 5)  # rank 1 has closed its end


def _ends_late(place: Place) -> str | None:
    """What aborts the context when an operation that an abort had given up fails after it."""
    place.world.all_gather_single(torch.empty(2), torch.empty(1)).wait()  # so that both are connected
    if place.rank == 1:
        return None
    work = place.world.all_gather_single(torch.empty(2), torch.empty(1))
    done = work.get_future()
    place.context.abort("given up")
    assert done.done()
    place.context.reset()
    assert _comes(work.is_completed, place.context.timeout_s - 5)
    time.sleep(0.1)  # for what Gloo calls back
    why = place.context.aborted
    place.context.abort("the end")  # the group may be closed only so
    return why


def test_an_operation_given_up_disturbs_nobody_later(pool: Pool) -> None:
    assert pool.run(_ends_late, 2) == [None, None]


def test_memory_of_operations_in_flight_is_left_alone(pool: Pool) -> None:
    pool.run(_given_up, 2)
