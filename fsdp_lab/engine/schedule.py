"""`Schedule`: which phase of which unit is issued at which point of a step, and what it waits for.

It is data: the engine's hooks look up what to issue (`at`), the planner simulates the same list (`actions`), slow motion
and the timeline use its names. So prediction and execution cannot drift apart. No torch.

A forward is a tree of calls: the root's call encloses those of its units. The backward walks the same tree from the other
end. At each call there are four points: before and after its forward, before and after its backward.

Note: what stays gathered. With resharding after forward (arXiv 2304.11277, section 3.2.1) every unit is freed after its
forward and gathered again for its backward. But the units that the backward needs first (the root, and the unit it begins
with) would be gathered again immediately, so they stay gathered. No more than these: between the two passes, where the loss
is computed, activations are at their most. A unit that is called more than once stays from
its last call on; earlier it would add to the memory of the units in between. If nothing is freed after the forward (ZeRO-2),
the limiter counts only the unit that computes and those gathered ahead: waiting for the others would have no effect.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import NamedTuple


class Phase(enum.StrEnum):
    """The names that plots, profiler traces and the documentation share."""

    UNSHARD = "unshard"  # all-gather a unit's parameters
    COMPUTE = "compute"  # its forward or its backward
    RESHARD = "reshard"  # free what was gathered
    REDUCE = "reduce"  # reduce-scatter (and, in hybrid sharding, all-reduce) its gradients
    HOST_COPY = "host_copy"  # between host and device, under offload
    OPTIM = "optim"  # the optimizer's step


class Direction(enum.StrEnum):
    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"


class PointSide(enum.StrEnum):
    BEFORE = "before"
    AFTER = "after"


@dataclass(frozen=True)
class Point:
    """A point of a step: before or after the forward or the backward of one call."""

    direction: Direction
    call: int
    moment: PointSide


class UnitCall(NamedTuple):
    """One call of a unit's module in a forward; `parent` is the call that encloses it."""

    unit: int
    parent: int | None = None
    detached: bool = False  # made without gradients in a forward that has them: it has no backward


@dataclass(frozen=True, kw_only=True)
class Action:
    """One phase of one unit. It may begin when the actions whose indices it waits for are complete."""

    phase: Phase
    unit: int  # -1: all of them
    point: Point
    waits_for: tuple[int, ...]
    ahead: bool = False  # issued before its own turn: a prefetch


class OffloadPolicy(enum.StrEnum):
    """Names what is stored on the host: with either of the last two, the master shards."""

    NONE = "none"
    OPTIMIZER = "optimizer"  # gradients and the optimizer's state; a shard in the gathered dtype stays on the device
    ALL = "all"  # parameters too: each gather begins with a copy from the host


@dataclass(frozen=True, kw_only=True)
class PrefetchPolicy:
    """How many units are gathered ahead of time, and how many reductions may lag behind."""

    forward_prefetch: int = 1  # units ahead of the one that computes
    backward_prefetch: int = 1
    prefetch_before: bool = True  # issue backward prefetches before the unit's backward, or after it
    limit: int = 2  # gathered units beside the one that computes; 0: no limit
    limit_reductions: int = field(default=1, metadata={"least": 1})  # units whose whole gradients are in flight


@dataclass(frozen=True, kw_only=True)
class Rules(PrefetchPolicy):
    """Everything that a schedule depends on, except the calls."""

    reshard_after_forward: bool = True
    offload: OffloadPolicy = OffloadPolicy.NONE
    keeps_first: bool = True  # keep the units that the backward needs first, see the note; FSDP1 and FSDP2: the root

    @classmethod
    def of(cls, prefetch: PrefetchPolicy, *, reshard_after_forward: bool, offload: OffloadPolicy) -> Rules:
        given = {f.name: getattr(prefetch, f.name) for f in fields(PrefetchPolicy)}
        return cls(**given, reshard_after_forward=reshard_after_forward, offload=offload)

    def has_room(self, gathered: int) -> bool:
        """Returns whether one more unit may be gathered ahead of time."""
        return self.limit == 0 or gathered < self.limit + 1


class Schedule:
    """One step's phases for a tree of calls.

    Args:
        calls: in the order in which they begin; the first is the root's.
        rules: the root's.
        backward: False for a forward without gradients, after which everything is freed.
        own_rules: of units with rules of their own: what these say of resharding and of offload counts, for that unit.
    """

    def __init__(
        self,
        calls: Sequence[UnitCall],
        rules: Rules,
        *,
        backward: bool = True,
        own_rules: Mapping[int, Rules] | None = None,
    ) -> None:
        self.calls, self.rules, self.backward = tuple(calls), rules, backward
        self._own_rules = dict(own_rules) if own_rules is not None else {}
        self.actions: tuple[Action, ...] = tuple(_Builder(self).build())

    def rules_of(self, unit: int) -> Rules:
        """The rules of a unit: its own, or the root's."""
        return self._own_rules.get(unit, self.rules)

    def at(self, point: Point) -> tuple[Action, ...]:
        """The actions to issue at a point, in this order, without the computation itself."""
        return tuple(self.by_call[point.direction, point.moment].get(point.call, ()))

    @cached_property
    def by_call(self) -> dict[tuple[Direction, PointSide], dict[int, list[Action]]]:
        """The actions to issue at the points of one direction and side, by call."""
        by_call = {(direction, side): dict[int, list[Action]]() for direction in Direction for side in PointSide}
        for action in self.actions:
            if action.phase not in (Phase.COMPUTE, Phase.OPTIM):
                by_call[action.point.direction, action.point.moment].setdefault(action.point.call, []).append(action)
        return by_call

    @cached_property
    def walk(self) -> tuple[Point, ...]:
        """Every point, ordered by time."""
        points = list[Point]()
        for direction in (Direction.FORWARD, Direction.BACKWARD) if self.backward else (Direction.FORWARD,):
            stack = [0] if self.calls else []  # a call, or ~call for its end
            while stack:
                k = stack.pop()
                if direction is Direction.FORWARD or not self.calls[max(k, ~k)].detached:
                    points.append(Point(direction, max(k, ~k), PointSide.BEFORE if k >= 0 else PointSide.AFTER))
                if k >= 0:
                    stack += (~k, *self.children[k][:: -1 if direction is Direction.FORWARD else 1])
        return tuple(points)

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """For each call, the calls directly inside it."""
        inside: list[list[int]] = [[] for _ in self.calls]
        for k, call in enumerate(self.calls):
            if call.parent is not None:
                inside[call.parent].append(k)
        return tuple(map(tuple, inside))

    @cached_property
    def order(self) -> dict[Direction, tuple[int, ...]]:
        """The calls in the order in which they begin, in the forward and in the backward."""
        before = [p for p in self.walk if p.moment is PointSide.BEFORE]
        return {direction: tuple(p.call for p in before if p.direction is direction) for direction in Direction}

    @cached_property
    def begun(self) -> dict[Point, int]:
        """How many calls have begun at a point, including its own: its position in the `order` of its direction."""
        counts, places = {Direction.FORWARD: 0, Direction.BACKWARD: 0}, {}
        for point in self.walk:
            counts[point.direction] += point.moment is PointSide.BEFORE
            places[point] = counts[point.direction]
        return places

    @cached_property
    def never_reshards(self) -> frozenset[int]:
        """Units whose rules keep them gathered between forward and backward."""
        with_backward = (call.unit for call in self.calls if not call.detached)
        return frozenset(unit for unit in with_backward if not self.rules_of(unit).reshard_after_forward)

    @cached_property
    def stays_gathered(self) -> frozenset[int]:
        """Units that stay gathered between forward and backward (see the note)."""
        gathered = set(self.never_reshards) if self.backward else set()
        for k in self.order[Direction.BACKWARD]:
            gathered.add(self.calls[k].unit)
            if not self.rules.keeps_first or not self.children[k]:
                break
        return frozenset(gathered)

    def ahead(self, point: Point, gathered: set[int]) -> tuple[int, ...]:
        """The units to prefetch at a point, within the limit: those of the next calls; before a call, not its own."""
        is_forward, order, units = point.direction is Direction.FORWARD, self.order[point.direction], dict[int, None]()
        depth = self.rules.forward_prefetch if is_forward else self.rules.backward_prefetch
        own = self.calls[point.call].unit if point.moment is PointSide.BEFORE else None
        for i in range(self.begun[point], len(order)):
            if len(units) == depth:
                break
            if self.calls[order[i]].unit != own:
                units[self.calls[order[i]].unit] = None
        chosen, limited = list[int](), gathered - self._unlimited(point)
        for unit in units:
            if unit not in gathered and self.rules.has_room(len(limited) + len(chosen)):
                chosen.append(unit)
        return tuple(chosen)

    def _unlimited(self, point: Point) -> set[int]:
        """Units that the limiter does not count: of those not freed after the forward, what has computed in it."""
        if not self.backward or not self.never_reshards:
            return set()
        forward = self.order[Direction.FORWARD]
        if point.direction is Direction.FORWARD:
            forward = forward[: self.begun[point] - (point.moment is PointSide.BEFORE)]
        return ({self.calls[k].unit for k in forward} & self.never_reshards) - {self.calls[point.call].unit}


class _Builder:
    """Visits the points in order and records which units are gathered and what each action waits for."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._gathered: set[int] = set()
        self._actions: list[Action] = []
        self._computed: tuple[int, ...] = ()  # index of the last computation
        self._unshards: dict[int, int] = {}  # unit -> index of its last unshard
        self._reduces: dict[int, int] = {}  # unit -> index of its last reduce, or of the copy after it
        calls = tuple(enumerate(schedule.calls))  # the unit's first call that has a backward, and its last call of all
        self._first = {call.unit: k for k, call in reversed(calls) if not call.detached}
        self._last = {call.unit: k for k, call in calls}

    def build(self) -> list[Action]:
        schedule = self._schedule
        for point in schedule.walk:
            unit = schedule.calls[point.call].unit
            is_forward, begins = point.direction is Direction.FORWARD, point.moment is PointSide.BEFORE
            if begins and unit not in self._gathered:
                self._unshard(unit, point, ahead=False)
            if not begins and schedule.children[point.call]:
                self._compute(unit, point)  # the part of an enclosing unit after its inner ones
            if not begins and self._is_freed(unit, point):
                self._add(Phase.RESHARD, unit, point, self._computed)
                self._gathered.discard(unit)
            if begins == (is_forward or schedule.rules.prefetch_before):
                for other in schedule.ahead(point, self._gathered):
                    self._unshard(other, point, ahead=True)
            if begins:
                self._compute(unit, point)
            elif not is_forward and not self._comes_again(unit, point):
                at = self._add(Phase.REDUCE, unit, point, self._computed)
                if schedule.rules_of(unit).offload != OffloadPolicy.NONE:
                    at = self._add(Phase.HOST_COPY, unit, point, (at,))
                self._reduces[unit] = at
        if schedule.backward and schedule.calls:
            end = Point(Direction.UPDATE, 0, PointSide.AFTER)
            self._add(Phase.OPTIM, -1, end, tuple(self._reduces.values()))
        return self._actions

    def _is_freed(self, unit: int, point: Point) -> bool:
        schedule, around = self._schedule, self._schedule.calls[point.call].parent
        while around is not None and schedule.calls[around].unit != unit:
            around = schedule.calls[around].parent
        order, i = schedule.order[point.direction], schedule.begun[point]
        if around is not None or (i < len(order) and schedule.calls[order[i]].unit == unit):
            return False  # the call is inside another one of the unit, or the next one is of the same unit
        stays = schedule.stays_gathered if point.direction is Direction.FORWARD else ()
        if unit in (schedule.never_reshards if self._comes_again(unit, point) else stays):
            return False
        return unit not in schedule.ahead(point, self._gathered - {unit})  # it would be gathered again at once

    def _comes_again(self, unit: int, point: Point) -> bool:
        """Returns whether another call of the unit begins later in this direction."""
        if point.direction is Direction.FORWARD:
            return self._last[unit] >= self._schedule.begun[point]
        return self._first[unit] != point.call

    def _unshard(self, unit: int, point: Point, *, ahead: bool) -> None:
        waits = self._computed
        if self._schedule.rules_of(unit).offload == OffloadPolicy.ALL:
            waits = (self._add(Phase.HOST_COPY, unit, point, waits, ahead=ahead),)
        self._unshards[unit] = self._add(Phase.UNSHARD, unit, point, waits, ahead=ahead)
        self._gathered.add(unit)

    def _compute(self, unit: int, point: Point) -> None:
        waits = {*self._computed, self._unshards[unit]}
        self._computed = (self._add(Phase.COMPUTE, unit, point, tuple(sorted(waits))),)

    def _add(self, phase: Phase, unit: int, point: Point, waits: tuple[int, ...], *, ahead: bool = False) -> int:
        self._actions.append(Action(phase=phase, unit=unit, point=point, waits_for=waits, ahead=ahead))
        return len(self._actions) - 1
