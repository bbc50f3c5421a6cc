"""Groups that could not be opened do not keep ranks from meeting later."""

from __future__ import annotations

import pytest
import torch
from torch import distributed as dist

from fsdp_lab.rank.rendezvous import close_groups, open_groups
from fsdp_lab.wire import Hub
from tests.pool import Place, Pool


def _alone_first(place: Place) -> float:
    if place.rank == 0:  # the other one does not come
        hub = Hub(timeout_s=1)
        with pytest.raises(dist.DistError):
            open_groups(place.seat, dist.PrefixStore("alone", place.store), hub, 0)
        close_groups(hub)
    hub = Hub(timeout_s=10)
    wire = open_groups(place.seat, dist.PrefixStore("together", place.store), hub, 1)
    total = torch.tensor([float(place.rank + 1)])
    wire.allreduce([total]).wait()
    close_groups(hub)
    return float(total)


def test_a_rank_that_waited_in_vain_meets_the_others_afterwards(pool: Pool) -> None:
    assert pool.run(_alone_first, 2, reduction=None) == [3.0, 3.0]
