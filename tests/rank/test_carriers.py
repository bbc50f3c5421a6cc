"""What the collectives of a training go over, told in the first step after a switch."""

from __future__ import annotations

import pytest

from fsdp_lab.base.events import Carrier, StepEvent
from fsdp_lab.wire import channels
from tests.pool import Place, Pool
from tests.rank.test_session import DDP, Call, _play, apply, follow, spec, train

HYBRID = {"sharding": "hybrid_shard", "shard_size": 2}


def test_it_is_measured_once_and_told_after_each_switch(pool: Pool) -> None:
    (mine, _), _ = follow(pool, [(spec(), 2), (spec(**DDP), 2), (spec(link="0.01 GB/s"), 1)])
    told = [e.carriers for e in mine]
    (carrier,) = told[0]
    assert (carrier.between, carrier.name) == ("ranks", "shared memory") and carrier.bytes_per_s > 1e6
    assert told == [(carrier,), (), (carrier,), (), ()], "an emulated link has a note of its own"


def _on_two_hosts(place: Place, calls: list[Call]) -> list[tuple[Carrier, ...]]:
    """Of each, as if ranks 0 and 1 were on one host and the others on another."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(channels, "host_id", lambda: f"host {place.rank // 2}")
        events = [answer["events"][0] for answer in _play(place, calls, {})[1::2]]
    return [StepEvent.from_dict(event).carriers for event in events]


@pytest.mark.slow
def test_hybrid_sharding_has_memory_inside_hosts_and_gloo_between_them(pool: Pool) -> None:
    plan = [spec(4, **HYBRID), spec(4, **HYBRID, gather="mapped"), spec(4)]
    calls = [c for given in plan for c in (apply(given, fresh=True), train(1))]
    for hybrid, mapped, whole in pool.run(_on_two_hosts, 4, calls, reduction=None):
        for carriers in (hybrid, mapped):
            assert [(c.between, c.name) for c in carriers] == [("shards", "shared memory"), ("replicas", "Gloo")]
        assert [(c.between, c.name) for c in whole] == [("ranks", "Gloo")]
