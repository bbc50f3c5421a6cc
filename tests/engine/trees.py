"""Random trees of calls and random rules, and a replay of a schedule that knows nothing of how it was written."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hypothesis import strategies as st

from fsdp_lab.engine.schedule import Action, OffloadPolicy, Phase, Rules, Schedule, UnitCall


@st.composite
def call_trees(draw: st.DrawFn, units: int = 6) -> list[UnitCall]:
    """Nested and repeated calls of up to `units` units below the root; a unit may be called inside itself."""
    calls = [UnitCall(0)]
    path = [0]
    for _ in range(draw(st.integers(0, 14))):
        del path[draw(st.integers(1, len(path))) :]  # how many of the open calls end first
        calls.append(UnitCall(draw(st.integers(1, units)), path[-1]))
        path.append(len(calls) - 1)
    return calls


@st.composite
def rules(draw: st.DrawFn) -> Rules:
    return Rules(
        reshard_after_forward=draw(st.booleans()),
        forward_prefetch=draw(st.integers(0, 5)),
        backward_prefetch=draw(st.integers(0, 5)),
        prefetch_before=draw(st.booleans()),
        limit=draw(st.integers(0, 6)),
        offload=draw(st.sampled_from(OffloadPolicy)),
    )


@dataclass(frozen=True)
class PointSide:
    """An action, and the units gathered before and after it."""

    action: Action
    before: frozenset[int]
    after: frozenset[int]


def replay(schedule: Schedule) -> Iterator[PointSide]:
    alive: frozenset[int] = frozenset()
    for action in schedule.actions:
        before = alive
        if action.phase is Phase.UNSHARD:
            alive |= {action.unit}
        elif action.phase is Phase.RESHARD:
            alive -= {action.unit}
        yield PointSide(action, before, alive)


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
