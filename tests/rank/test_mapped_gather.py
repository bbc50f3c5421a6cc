"""`gather="mapped"` on ranks: the same training, switched to and from, with nothing gathered and nothing sent for it."""

from __future__ import annotations

import pytest

from tests.pool import Pool
from tests.rank.test_session import DDP, apply, fails, follow, play, spec, train

MAPPED = {"gather": "mapped"}


@pytest.mark.slow
def test_switches_to_and_from_it_do_not_disturb_the_loss(pool: Pool, steady: list[float]) -> None:
    kinds = (MAPPED, {}, {**MAPPED, "sharding": "shard_grad_op"}, DDP, {**MAPPED, "sharding": "zero1"})
    (switched, _), answers = follow(pool, [(spec(**changes), 1) for changes in kinds])
    assert [e.mean_loss for e in switched] == steady[:5]
    assert all(answer["carried"] for answer in answers[1:])


def test_an_event_says_that_nothing_is_gathered(pool: Pool) -> None:
    (told, _), _ = follow(pool, [(spec(), 4), (spec(**MAPPED), 4)])
    there, here = told[3], told[7]
    assert here.comm["all_gather"].calls == there.comm["all_gather"].calls >= 3
    assert here.comm["all_gather"].link_bytes == 0 < there.comm["all_gather"].link_bytes
    # shards end with a page
    assert there.comm["reduce_scatter"].link_bytes <= here.comm["reduce_scatter"].link_bytes
    assert here.memory.at_peak.unsharded_bytes == 0 < there.memory.at_peak.unsharded_bytes
    assert here.memory.at_peak.communication_bytes == there.memory.at_peak.communication_bytes
    assert here.memory.parameters_bytes >= there.memory.parameters_bytes
    assert here.memory.peak_bytes < there.memory.peak_bytes


def test_ranks_without_shared_memory_refuse_it_and_go_on(pool: Pool) -> None:
    calls = (apply(spec()), train(1), fails(apply(spec(**MAPPED))), train(2))
    for *_, said, after in play(pool, 2, *calls, shared_memory=False):
        assert said.startswith("SpecError: strategy.gather: mapped is for ranks that share memory, and these do not")
        assert len(after["events"]) == 2
