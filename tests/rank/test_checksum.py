"""The checksum of the parameters: the same however they are sharded, another when one element is."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fsdp_lab.base.events import StepEvent
from fsdp_lab.rank.trainer import checksum
from tests.covering import tiered
from tests.pool import Place, Pool
from tests.rank.test_session import DDP, session, spec

LAYOUTS = [
    {},
    {"sharding": "shard_grad_op"},
    {"sharding": "zero1"},
    {"sharding": "no_shard"},
    {"sharding": "hybrid_shard", "shard_size": 2},
    {"offload": "all"},
    {"wrap": "whole"},
    {"backend": "fsdp2"},
    {"backend": "fsdp2", "sharding": "hybrid_shard", "shard_size": 2},
    {"backend": "fsdp1"},
    DDP,
]


def _told(place: Place, plan: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The event of step 1, with its checksum, under each Spec from the beginning."""
    s = session(place, reduction="rank_ordered")
    found = []
    for given in plan:
        s.apply("run", given, fresh=True)
        plain, checked = s.train(2, checks=[1])["events"]
        assert plain["checksum"] is None and checked["checksum"] is not None
        found.append(checked)
    s.close()
    return found


def copies(events: list[StepEvent]) -> dict[int, int]:
    """Replica -> the whole checksum of its parameters."""
    found: dict[int, int] = {}
    for e in events:
        assert e.checksum is not None
        found[e.replica] = (found.get(e.replica, 0) + e.checksum) % (1 << 64)
    return found


@pytest.mark.parametrize("ranks", tiered([3, 4], lambda ranks: ranks == 3))
def test_the_checksum_is_that_of_the_parameters_whatever_holds_them(pool: Pool, ranks: int) -> None:
    layouts = LAYOUTS if ranks == 4 else LAYOUTS[:4]
    plan = [spec(ranks, **changes).to_dict() for changes in layouts]
    by_rank = pool.run(_told, ranks, plan, reduction=None)
    found = [copies([StepEvent.from_dict(told[i]) for told in by_rank]) for i in range(len(plan))]
    sums: dict[bool, set[int]] = {}
    for changes, parts in zip(layouts, found, strict=True):
        hybrid = changes.get("sharding") == "hybrid_shard"  # sums in another order, within groups first
        sums.setdefault(hybrid, set()).update(parts.values())
        replicas = 2 if hybrid else ranks if changes.get("sharding") == "no_shard" else 1
        assert len(parts) == replicas, changes
    assert [len(different) for different in sums.values()] == [1] * len(sums)


class Held:
    """A backend as far as a checksum needs one."""

    def __init__(self, *shards: Any) -> None:
        self._param_shards = list(shards)

    def param_shards(self) -> list[Any]:
        return self._param_shards


def piece(name: str, values: torch.Tensor, start: int = 0, stop: int | None = None) -> Any:
    from fsdp_lab.engine import ParamShard

    stop = values.numel() if stop is None else stop
    return ParamShard(name=name, shape=values.shape, start=start, stop=stop, local=values[start:stop], param=None)


def test_parts_add_up_and_every_element_counts() -> None:
    values = torch.randn(3 << 20, generator=torch.Generator().manual_seed(0))  # more than is summed at a time
    whole = checksum(Held(piece("w", values)))
    cut = 1_500_001
    parts = [checksum(Held(piece("w", values, 0, cut))), checksum(Held(piece("w", values, cut)))]
    assert sum(parts) % (1 << 64) == whole
    assert checksum(Held(piece("v", values))) != whole  # under another name
    for at in (0, 1 << 20, values.numel() - 1):
        changed = values.clone()
        changed[at] = torch.nextafter(changed[at], torch.tensor(9e9))
        assert checksum(Held(piece("w", changed))) != whole
    changed = values.clone()
    changed[[5, 7]] = changed[[7, 5]]
    assert checksum(Held(piece("w", changed))) != whole


def test_the_sign_of_zero_is_nothing() -> None:
    assert checksum(Held(piece("w", torch.tensor([0.0, 1.0])))) == checksum(Held(piece("w", torch.tensor([-0.0, 1.0]))))
