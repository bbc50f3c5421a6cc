"""Traced steps of real ranks on one clock: no collective ends before its last rank has issued it, and each is found on
all its ranks by its number."""

from __future__ import annotations

import pytest

from fsdp_lab.runs.timeline import MEETINGS, Timeline, _meetings
from tests.covering import tiered
from tests.pool import Pool
from tests.rank.test_tracing import BACKENDS, trained


@pytest.mark.parametrize(
    ("backend", "ranks"), tiered([("lab", 3), ("fsdp1", 2), ("ddp", 3)], lambda backend, ranks: ranks == 2)
)
def test_clocks_of_real_ranks_agree_with_what_was_done(pool: Pool, backend: str, ranks: int) -> None:
    steps = list(zip(*trained(pool, [1] * 10, ranks, **BACKENDS[backend]), strict=True))
    for events in steps:
        timeline = Timeline.of(events)
        assert timeline.contradicted == () and all(lane.aligned for lane in timeline.lanes)
        met = _meetings({e.rank: e for e in events}, {e.rank: e.spans for e in events})
        assert {track for _, _, track in met} <= set(MEETINGS) and len(met) > 1
        assert all(len(issued) == ranks for issued, _ in met.values())
        assert len(met) == sum(s.track in MEETINGS for s in events[0].spans)
