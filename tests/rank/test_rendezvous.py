"""The store listens for whom it is meant; groups that could not be opened do not keep ranks from meeting later."""

from __future__ import annotations

import sys

import psutil
import pytest
import torch
from torch import distributed as dist

from fsdp_lab.rank.rendezvous import close_groups, find_store, host_store, open_groups
from fsdp_lab.wire import WireContext
from tests.pool import Place, Pool


def _alone_first(place: Place) -> float:
    if place.rank == 0:  # the other one does not come
        context = WireContext(timeout_s=1)
        with pytest.raises(dist.DistError):
            open_groups(place.info, dist.PrefixStore("alone", place.store), context, 0)
        close_groups(context)
    context = WireContext(timeout_s=10)
    wire = open_groups(place.info, dist.PrefixStore("together", place.store), context, 1)
    total = torch.tensor([float(place.rank + 1)])
    wire.allreduce([total]).wait()
    close_groups(context)
    return float(total)


def test_a_rank_that_waited_in_vain_meets_the_others_afterwards(pool: Pool) -> None:
    assert pool.run(_alone_first, 2, reduction=None) == [3.0, 3.0]


def _listeners() -> set[tuple[str, int]]:
    return {
        (c.laddr.ip, c.laddr.port) for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN
    }


def test_the_store_listens_where_it_is_told_and_nowhere_else() -> None:
    here = "127.0.0.2" if sys.platform == "linux" else "127.0.0.1"
    before = _listeners()
    store = host_store(here)
    assert _listeners() - before == {(here, store.port)}
    store.set("told", "1")
    assert find_store(here, store.port).get("told") == b"1"
