"""The simulated step against what can be reckoned by hand."""

import itertools
from collections.abc import Collection

import pytest
from hypothesis import given, strategies as st

from fsdp_lab.engine.schedule import Action, Direction, Phase, Rules
from fsdp_lab.planner.step import SimulatedTimeline, Simulation, computes, schedule_of

BLOCKS = 8
FORWARD, BACKWARD = 2.0, 4.0


def simulated(*, gather: float = 0.0, reduce: float = 0.0, ahead: bool = True, interference: float = 0.0,
              blocks: int = BLOCKS, blocking: Collection[Phase] = (), **rules: int) -> SimulatedTimeline:  # fmt: skip
    """Equal blocks below a root that costs nothing."""
    schedule = schedule_of(blocks + 1, Rules(**rules))

    def seconds(action: Action) -> float:
        if action.unit == 0:
            return 0.0
        if action.phase is Phase.COMPUTE:
            return FORWARD if action.point.direction is Direction.FORWARD else BACKWARD
        return {Phase.UNSHARD: gather, Phase.REDUCE: reduce}.get(action.phase, 0.0)

    assert all(computes(a, schedule) for a in schedule.actions if a.unit > 0 and a.phase is Phase.COMPUTE)
    where = {"ahead": ahead, "interference": interference, "blocking": frozenset(blocking)}
    return Simulation(schedule, seconds, **where).run()  # type: ignore[arg-type]


COMPUTING = BLOCKS * (FORWARD + BACKWARD)


def test_the_first_gather_and_the_last_reduction_stand_out_and_where_the_host_is_late_every_gather() -> None:
    found = simulated(gather=1.0, reduce=1.0)
    assert found.exposed_s == pytest.approx(2.0) and found.seconds == pytest.approx(COMPUTING + 2)
    assert simulated(gather=1.0, ahead=False, forward_prefetch=0).exposed_s == pytest.approx(BLOCKS)
    covered = simulated(gather=1.0, ahead=False)
    assert covered.exposed_s == pytest.approx(1.0), "as our engine does it unless it is asked not to"


def test_communication_that_binds_is_as_long_as_what_is_sent_and_in_flight_slows_computing_down() -> None:
    found = simulated(gather=10.0, reduce=20.0)
    gathers = sum(d.action.phase is Phase.UNSHARD and d.action.unit > 0 for d in found.done)
    assert found.seconds == pytest.approx(10 * gathers + 20 * BLOCKS, rel=0.1)
    calm, disturbed = simulated(gather=1.0), simulated(gather=1.0, interference=0.25)
    gathers = sum(d.action.phase is Phase.UNSHARD and d.action.unit > 0 for d in calm.done)
    assert disturbed.phase_s(Phase.COMPUTE) == pytest.approx(COMPUTING + 0.25 * gathers)


def test_gathers_wait_behind_reductions_without_backward_prefetch_and_for_the_limiter() -> None:
    ahead, behind = simulated(gather=1.5, reduce=1.5), simulated(gather=1.5, reduce=1.5, backward_prefetch=0)
    assert behind.seconds > ahead.seconds + 1.0
    free, limited = simulated(gather=0.1, limit=0), simulated(gather=0.1, limit=1)
    first = [d for d in free.done if d.action.phase is Phase.UNSHARD][1:4]
    held = [d for d in limited.done if d.action.phase is Phase.UNSHARD][1:4]
    assert first[-1].begin_s < FORWARD < held[-1].begin_s


@given(
    gather=st.floats(0, 10), reduce=st.floats(0, 10), blocks=st.integers(1, 12), ahead=st.booleans(),
    limit=st.integers(0, 4), prefetch=st.integers(0, 3), reshard=st.booleans(),
)  # fmt: skip
def test_every_queue_is_one_after_the_other_and_the_parts_make_the_whole(
    gather: float, reduce: float, blocks: int, ahead: bool, limit: int, prefetch: int, reshard: bool
) -> None:
    found = simulated(gather=gather, reduce=reduce, blocks=blocks, ahead=ahead, limit=limit, forward_prefetch=prefetch,
                      reshard_after_forward=reshard)  # fmt: skip
    computing = blocks * (FORWARD + BACKWARD)
    assert found.seconds == pytest.approx(computing + found.exposed_s)
    for queue in ((Phase.COMPUTE,), (Phase.UNSHARD, Phase.REDUCE)):
        spans = sorted((d.begin_s, d.end_s) for d in found.done if d.action.phase in queue)
        assert all(end <= begin + 1e-9 for (_, end), (begin, _) in itertools.pairwise(spans))
    for d in found.done:
        needs = [found.done[i].end_s for i in d.action.waits_for]
        if d.action.phase is not Phase.UNSHARD or not ahead:
            assert d.begin_s >= max(needs, default=0.0) - 1e-9


def test_what_blocks_is_waited_for_and_the_rest_overlaps() -> None:
    """A backend on a CPU that waits for its reductions, and not for its gathers."""
    found = simulated(gather=1.0, reduce=2.0, interference=0.5, blocking=(Phase.UNSHARD, Phase.REDUCE))
    assert found.exposed_s == pytest.approx(found.phase_s(Phase.UNSHARD) + found.phase_s(Phase.REDUCE))
    assert found.seconds == pytest.approx(COMPUTING + found.exposed_s)
    free, waits = (simulated(gather=1.0, reduce=1.0, ahead=False, blocking=b) for b in ((), (Phase.REDUCE,)))
    assert waits.seconds == pytest.approx(free.seconds + BLOCKS - 1)  # the last reduction is waited for anyway
