"""What a schedule promises, over random trees of calls and random rules; and one that is written out by hand."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
from hypothesis import example, given, settings, strategies as st

from fsdp_lab.engine import OffloadPolicy
from fsdp_lab.engine.schedule import Action, Direction, Phase, Point, PointSide, Rules, Schedule, UnitCall


# -- random trees of calls, and a replay that knows nothing of how a schedule was written ---------------------------------
@st.composite
def call_trees(draw: st.DrawFn, units: int = 6) -> list[UnitCall]:
    """Nested and repeated calls of up to `units` units below the root; a unit may be called inside itself."""
    calls, path = [UnitCall(0)], [0]
    for _ in range(draw(st.integers(0, 14))):
        del path[draw(st.integers(1, len(path))) :]  # how many of the open calls end first
        calls.append(UnitCall(draw(st.integers(1, units)), path[-1]))
        path.append(len(calls) - 1)
    return calls


@st.composite
def rules(draw: st.DrawFn) -> Rules:
    return Rules(reshard_after_forward=draw(st.booleans()), forward_prefetch=draw(st.integers(0, 5)),
                 backward_prefetch=draw(st.integers(0, 5)), prefetch_before=draw(st.booleans()),
                 limit=draw(st.integers(0, 6)), offload=draw(st.sampled_from(OffloadPolicy)))  # fmt: skip


@dataclass(frozen=True)
class Moment:
    """An action, and the units gathered before and after it."""

    action: Action
    before: frozenset[int]
    after: frozenset[int]


def replay(schedule: Schedule) -> Iterator[Moment]:
    alive: frozenset[int] = frozenset()
    for action in schedule.actions:
        before = alive
        if action.phase is Phase.UNSHARD:
            alive |= {action.unit}
        elif action.phase is Phase.RESHARD:
            alive -= {action.unit}
        yield Moment(action, before, alive)


def peak(schedule: Schedule) -> int:
    """Units gathered at once."""
    return max((len(m.after) for m in replay(schedule)), default=0)


def enclosing(schedule: Schedule, call: int) -> set[int]:
    """The units of a call and of those around it: a forward inside them needs them all."""
    found = set()
    at: int | None = call
    while at is not None:
        found.add(schedule.calls[at].unit)
        at = schedule.calls[at].parent
    return found


def deepest(schedule: Schedule) -> int:
    """The most units that any call needs at once."""
    return max(len(enclosing(schedule, k)) for k in range(len(schedule.calls)))


# -- what always holds -------------------------------------------------------------------------------------------------
BLOCKS = [UnitCall(0), *(UnitCall(i, 0) for i in range(1, 5))]  # a root and four blocks, as in a transformer

schedules = st.builds(lambda calls, r, b: Schedule(calls, r, backward=b), call_trees(), rules(), st.booleans())
some = settings(max_examples=100)
INSIDE_ITSELF = Schedule([UnitCall(0), UnitCall(1, 0), UnitCall(1, 1)], Rules())
BEYOND_THE_LIMIT = Schedule(
    [UnitCall(0), UnitCall(1, 0), UnitCall(2, 0), UnitCall(3, 2), UnitCall(1, 0)], Rules(forward_prefetch=3, limit=1)
)
FIRST_AND_LAST = [UnitCall(0), UnitCall(1, 0), UnitCall(2, 0), UnitCall(3, 2), UnitCall(4, 3), UnitCall(1, 0)]


@given(schedules)
@some
@example(INSIDE_ITSELF)
@example(Schedule(BLOCKS, Rules(prefetch_before=False)))  # nothing is left to prefetch when the root's backward ends
def test_units_are_gathered_when_they_compute_and_no_all_gather_is_for_nothing(schedule: Schedule) -> None:
    waiting: set[int] = set()
    for moment in replay(schedule):
        action = moment.action
        if action.phase is Phase.UNSHARD:
            assert action.unit not in moment.before
            waiting.add(action.unit)
        elif action.phase is Phase.COMPUTE:
            assert action.unit in moment.before
            waiting.discard(action.unit)
        elif action.phase is Phase.RESHARD:
            assert action.unit in moment.before and action.unit not in waiting
    assert not waiting and not moment.after


@given(schedules)
@some
@example(BEYOND_THE_LIMIT)
def test_the_limit_holds_but_for_what_calls_enclose(schedule: Schedule) -> None:
    """A prefetch never brings more than limit + 1. A unit whose turn has come is gathered whatever the limit says; beyond
    limit + 1 all that is gathered then belongs to calls that have begun and not ended, so nothing can be freed."""
    if schedule.rules.limit == 0 or not schedule.rules.reshard_after_forward:
        return
    room = schedule.rules.limit + 1
    for moment in replay(schedule):
        action = moment.action
        if action.phase is Phase.UNSHARD and action.ahead:
            assert len(moment.after) <= room
        elif action.phase is Phase.UNSHARD and len(moment.after) > room:
            assert moment.after <= enclosing(schedule, action.point.call)
    assert peak(schedule) <= max(room, deepest(schedule))


class _KeepsNothing(Schedule):
    stays_gathered = frozenset()  # type: ignore[assignment]


def gathers(schedule: Schedule) -> int:
    return sum(a.phase is Phase.UNSHARD for a in schedule.actions)


@given(call_trees(), rules())
@some
@example(FIRST_AND_LAST, Rules())
def test_what_is_kept_for_the_backward_costs_no_peak_and_saves_gathers(calls: list[UnitCall], given: Rules) -> None:
    r = replace(given, reshard_after_forward=True)
    schedule, without = Schedule(calls, r), _KeepsNothing(calls, r)
    assert peak(schedule) <= peak(without) and gathers(schedule) <= gathers(without)
    kept = Schedule(calls, replace(given, reshard_after_forward=False))
    assert gathers(kept) == len({call.unit for call in calls})
    for action in kept.actions:
        assert action.phase is not Phase.RESHARD or action.point.direction is Direction.BACKWARD


@given(schedules)
@some
def test_each_unit_is_reduced_once_after_its_last_backward(schedule: Schedule) -> None:
    """And copied from and to the host, under offload, around its gathers and reductions."""
    units = {call.unit for call in schedule.calls} if schedule.backward else set()
    reductions = [a for a in schedule.actions if a.phase is Phase.REDUCE]
    assert sorted(a.unit for a in reductions) == sorted(units)
    for reduction in reductions:
        later = schedule.actions[schedule.actions.index(reduction) :]
        assert not any(a.phase is Phase.COMPUTE and a.unit == reduction.unit for a in later)
    updates = [a for a in schedule.actions if a.phase is Phase.OPTIM]
    assert len(updates) == schedule.backward
    if updates:
        assert updates[0] is schedule.actions[-1]
        assert {schedule.actions[i].unit for i in updates[0].waits_for} == units
    copies = sum(a.phase is Phase.HOST_COPY for a in schedule.actions)
    wanted = {"none": 0, "optimizer": len(reductions), "all": len(reductions) + gathers(schedule)}
    assert copies == wanted[schedule.rules.offload]


@given(schedules)
@some
def test_actions_wait_for_what_they_need_and_come_in_the_order_of_their_points(schedule: Schedule) -> None:
    """Indices point backwards, so the actions are a directed acyclic graph in the order in which they are listed."""
    gathered: dict[int, int] = {}
    computed: int | None = None
    for i, action in enumerate(schedule.actions):
        assert all(0 <= before < i for before in action.waits_for)
        assert len(set(action.waits_for)) == len(action.waits_for)
        if action.phase is Phase.UNSHARD:
            gathered[action.unit] = i
        elif action.phase is Phase.COMPUTE:
            assert gathered[action.unit] in action.waits_for and (computed is None or computed in action.waits_for)
            computed = i
        elif action.phase in (Phase.RESHARD, Phase.REDUCE):
            assert action.waits_for == (computed,)
    assert len(set(schedule.walk)) == len(schedule.walk)
    issued = [a for point in schedule.walk for a in schedule.at(point)]
    assert issued == [a for a in schedule.actions if a.phase not in (Phase.COMPUTE, Phase.OPTIM)]
    assert all(a.point == point for point in schedule.walk for a in schedule.at(point))


@given(schedules)
@some
def test_every_call_computes_each_way(schedule: Schedule) -> None:
    """At its beginning, and again at its end if calls lie in it."""
    computed = [a.point for a in schedule.actions if a.phase is Phase.COMPUTE]
    ways = (Direction.FORWARD, Direction.BACKWARD) if schedule.backward else (Direction.FORWARD,)
    wanted = [Point(way, k, moment) for way in ways for k in range(len(schedule.calls)) for moment in PointSide
              if moment is PointSide.BEFORE or k in schedule.enclosing]  # fmt: skip
    assert sorted(computed, key=str) == sorted(wanted, key=str)


# -- by hand ---------------------------------------------------------------------------------------------------------
U, C, F, R = Phase.UNSHARD, Phase.COMPUTE, Phase.RESHARD, Phase.REDUCE


def told(schedule: Schedule) -> list[str]:
    """Each action in a word or two: `u` an all-gather, `U` one ahead of its turn, `c` `f` `r` compute, free, reduce."""
    letters = {U: "u", C: "c", F: "f", R: "r", Phase.OPTIM: "optim", Phase.HOST_COPY: "h"}

    def word(a: Action) -> str:
        letter = letters[a.phase].upper() if a.ahead else letters[a.phase]
        return letter if a.unit < 0 else f"{letter}{a.unit}"

    return [word(a) for a in schedule.actions]


def test_four_blocks_with_the_defaults() -> None:
    """Block 4 stays: the backward begins with it. Never more than the root and two blocks."""
    schedule = Schedule(BLOCKS, Rules())
    assert " ".join(told(schedule)) == (
        "u0 U1 c0  U2 c1 f1  U3 c2 f2  U4 c3 f3  c4  c0  "  # forward
        "c0  U3 c4 f4 r4  U2 c3 f3 r3  U1 c2 f2 r2  c1 f1 r1  c0 f0 r0  optim"
    ).replace("  ", " ")
    assert schedule.stays_gathered == {0, 4} and peak(schedule) == 3
    words = told(schedule)
    forward, backward = (a for a, word in zip(schedule.actions, words, strict=True) if word == "U2")
    assert [words[i] for i in forward.waits_for] == ["c0"]  # beside block 1's forward
    assert [words[i] for i in backward.waits_for] == ["c4"]  # beside block 3's backward, not before block 4's


@pytest.mark.parametrize("keeps", [False, True])
def test_the_default_in_the_forward_costs_no_memory(keeps: bool) -> None:
    """Whatever the number of blocks, the most is in the backward anyway; and where the loss is computed, which is when
    activations are at their most, nothing has been gathered for later."""
    for n in range(1, 9):
        calls = [UnitCall(0), *(UnitCall(i, 0) for i in range(1, n + 1))]
        ahead = Schedule(calls, Rules(reshard_after_forward=not keeps))
        without = Schedule(calls, Rules(reshard_after_forward=not keeps, forward_prefetch=0))
        assert peak(ahead) == peak(without) and gathers(ahead) == gathers(without)
        end = Point(Direction.FORWARD, 0, PointSide.AFTER)
        (at_loss,) = [m.before for m in replay(ahead) if m.action.point == end and m.action.phase is Phase.COMPUTE]
        assert at_loss == ahead.stays_gathered
        assert all(a.ahead for a in ahead.actions if a.phase is Phase.UNSHARD and a.unit)


def test_four_blocks_with_forward_prefetch_and_the_limit() -> None:
    def forward(limit: int) -> str:
        return " ".join(told(Schedule(BLOCKS, Rules(forward_prefetch=2, limit=limit), backward=False)))

    assert forward(1) == "u0 U1 c0 c1 f1 u2 c2 f2 u3 c3 f3 u4 c4 f4 c0 f0"
    assert forward(2) == "u0 U1 U2 c0 c1 f1 U3 c2 f2 U4 c3 f3 c4 f4 c0 f0"
    assert forward(0) == "u0 U1 U2 c0 U3 c1 f1 U4 c2 f2 c3 f3 c4 f4 c0 f0"


def test_what_stays_anyway_does_not_hold_prefetching_back() -> None:
    """Without resharding after the forward: what is gathered is never freed by waiting for it."""
    many = [UnitCall(0), *(UnitCall(i, 0) for i in range(1, 12))]
    schedule = Schedule(many, Rules(reshard_after_forward=False, forward_prefetch=1, limit=2))
    assert [a.unit for a in schedule.actions if a.phase is Phase.UNSHARD and not a.ahead] == [0]
    assert gathers(schedule) == 12


def test_a_call_without_gradients_has_no_backward() -> None:
    """It is freed after its forward, and neither gathered ahead nor reduced; its unit's other call is."""
    calls = [UnitCall(0), UnitCall(1, 0), UnitCall(2, 0, detached=True), UnitCall(1, 0, detached=True)]
    words = "u0 c0  u1 c1 f1  u2 c2 f2  u1 c1  c0  c0  c1 f1 r1  c0 f0 r0  optim"
    assert told(Schedule(calls, Rules(forward_prefetch=0))) == words.split()
    kept = Schedule(calls, Rules(reshard_after_forward=False))
    assert kept.stays_gathered == {0, 1} and "f2" in told(kept)
