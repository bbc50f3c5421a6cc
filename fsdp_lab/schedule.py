"""`Schedule`: which phase of which unit is issued at which point of a step, and what it waits for.

It is data. The engine's hooks ask it what to issue now (`at`), the planner simulates the same list (`actions`), slow motion
and the timeline name what they draw by it; so what is predicted and what is executed cannot drift apart. Floor 0: no torch.

A forward is a tree of calls: the root's call encloses those of its units. The backward walks the same tree from the other
end. At each call there are four points: before and after its forward, before and after its backward.

Note: what stays gathered. With resharding after forward (arXiv 2304.11277, section 3.2.1) every unit is freed when its
forward is over, and gathered again for its backward. But what the backward asks for first, the root, the unit it begins with
and those prefetched beside it, would be freed only to be gathered at once: these stay. They are never more than the
limiter allows at that moment anyway, so the peak of memory is the same and the gathers are fewer.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from fsdp_lab.spec import Strategy


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


class Moment(enum.StrEnum):
    BEFORE = "before"
    AFTER = "after"


@dataclass(frozen=True)
class Point:
    """Where in a step: before or after the forward or the backward of one call."""

    direction: Direction
    call: int
    moment: Moment


@dataclass(frozen=True)
class Call:
    """One call of a unit's module in a forward; `parent` is the call that encloses it."""

    unit: int
    parent: int | None = None


@dataclass(frozen=True, kw_only=True)
class Action:
    """One phase of one unit. It may begin when the actions whose indices it waits for are complete."""

    phase: Phase
    unit: int  # -1: all of them
    point: Point
    waits_for: tuple[int, ...]
    ahead: bool = False  # issued before its own turn: a prefetch


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What a strategy says about order and memory."""

    reshard_after_forward: bool = True
    forward_prefetch: int = 0
    backward_prefetch: int = 1
    prefetch_before: bool = True  # issue backward prefetches before the unit's backward, or after it
    limit: int = 2  # gathered units beside the one that computes; 0: no limit
    offload: str = "none"

    @classmethod
    def of(cls, strategy: Strategy) -> Rules:
        return cls(
            reshard_after_forward=strategy.sharding in ("full_shard", "hybrid_shard"),
            forward_prefetch=strategy.forward_prefetch,
            backward_prefetch=strategy.backward_prefetch,
            prefetch_before=strategy.backward_prefetch_point == "before",
            limit=strategy.limit_all_gathers,
            offload=strategy.offload,
        )

    def has_room(self, alive: int) -> bool:
        """Whether one more unit may be gathered ahead of its turn."""
        return self.limit == 0 or alive < self.limit + 1


class Schedule:
    """One step's phases for a tree of calls.

    Args:
        calls: in the order of their beginnings; the first is the root's.
        rules: see `Rules`.
        backward: False for a forward without gradients, after which everything is freed.
    """

    def __init__(self, calls: Sequence[Call], rules: Rules, *, backward: bool = True) -> None:
        self.calls, self.rules, self.backward = tuple(calls), rules, backward
        self.actions: tuple[Action, ...] = tuple(_Writer(self).write())

    def at(self, point: Point) -> tuple[Action, ...]:
        """What is issued there, in this order; the computation itself is not listed."""
        return self._by_point.get(point, ())

    @cached_property
    def _by_point(self) -> dict[Point, tuple[Action, ...]]:
        found: dict[Point, list[Action]] = {}
        for action in self.actions:
            if action.phase not in (Phase.COMPUTE, Phase.OPTIM):
                found.setdefault(action.point, []).append(action)
        return {point: tuple(actions) for point, actions in found.items()}

    @cached_property
    def walk(self) -> tuple[Point, ...]:
        """Every point, in the order of time."""
        forward = list(self._points(Direction.FORWARD, 0, reverse=False)) if self.calls else []
        backward = list(self._points(Direction.BACKWARD, 0, reverse=True)) if self.calls and self.backward else []
        return (*forward, *backward)

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """For each call, those directly inside it."""
        inside: list[list[int]] = [[] for _ in self.calls]
        for k, call in enumerate(self.calls):
            if call.parent is not None:
                inside[call.parent].append(k)
        return tuple(map(tuple, inside))

    @cached_property
    def order(self) -> dict[Direction, tuple[int, ...]]:
        """The calls in the order in which they begin, each way."""
        ways = (Direction.FORWARD, Direction.BACKWARD)
        before = [p for p in self.walk if p.moment is Moment.BEFORE]
        return {way: tuple(p.call for p in before if p.direction is way) for way in ways}

    def following(self, point: Point, depth: int) -> tuple[int, ...]:
        """The next `depth` different units after a call's, in the order of its direction."""
        order = self.order[point.direction]
        own, found = self.calls[point.call].unit, dict[int, None]()
        for k in order[order.index(point.call) + 1 :]:
            if len(found) == depth:
                break
            if self.calls[k].unit != own:
                found[self.calls[k].unit] = None
        return tuple(found)

    @cached_property
    def kept(self) -> frozenset[int]:
        """Units that stay gathered between forward and backward: see the note."""
        if not self.backward:
            return frozenset()
        if not self.rules.reshard_after_forward:
            return frozenset(call.unit for call in self.calls)
        alive: set[int] = set()
        for k in self.order[Direction.BACKWARD]:
            alive.add(self.calls[k].unit)
            if self.rules.prefetch_before:
                alive.update(self.ahead(Point(Direction.BACKWARD, k, Moment.BEFORE), alive))
            if not self.children[k]:
                break
        return frozenset(alive)

    def ahead(self, point: Point, alive: set[int]) -> tuple[int, ...]:
        """The units to prefetch at a point, as far as the limiter allows."""
        forward = point.direction is Direction.FORWARD
        depth = self.rules.forward_prefetch if forward else self.rules.backward_prefetch
        chosen: list[int] = []
        for unit in self.following(point, depth):
            if unit not in alive and self.rules.has_room(len(alive) + len(chosen)):
                chosen.append(unit)
        return tuple(chosen)

    def _points(self, direction: Direction, call: int, *, reverse: bool) -> Iterator[Point]:
        yield Point(direction, call, Moment.BEFORE)
        for child in self.children[call][:: -1 if reverse else 1]:
            yield from self._points(direction, child, reverse=reverse)
        yield Point(direction, call, Moment.AFTER)


class _Writer:
    """Walks through the points once, keeping what is gathered and what each action has to wait for."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule, self._rules = schedule, schedule.rules
        self._alive: set[int] = set()
        self._actions: list[Action] = []
        self._computed: int | None = None  # the last computation
        self._gathered: dict[int, int] = {}  # the unit's last unshard, reduce: their actions
        self._reduced: dict[int, int] = {}

    def write(self) -> list[Action]:
        for point in self._schedule.walk:
            if point.moment is Moment.BEFORE:
                self._before(point)
            else:
                self._after(point)
        if self._schedule.backward and self._schedule.calls:
            end = Point(Direction.UPDATE, 0, Moment.AFTER)
            self._add(Phase.OPTIM, -1, end, tuple(self._reduced.values()))
        return self._actions

    def _before(self, point: Point) -> None:
        unit = self._schedule.calls[point.call].unit
        if unit not in self._alive:
            self._unshard(unit, point, ahead=False)
        if point.direction is Direction.FORWARD or self._rules.prefetch_before:
            for other in self._schedule.ahead(point, self._alive):
                self._unshard(other, point, ahead=True)
        self._compute(unit, point)

    def _after(self, point: Point) -> None:
        unit = self._schedule.calls[point.call].unit
        if self._schedule.children[point.call]:
            self._compute(unit, point)  # what an enclosing unit does after its inner ones
        if self._is_freed(unit, point):
            self._add(Phase.RESHARD, unit, point, self._after_computing())
            self._alive.discard(unit)
        if point.direction is Direction.BACKWARD:
            if not self._rules.prefetch_before:
                for other in self._schedule.ahead(point, self._alive):
                    self._unshard(other, point, ahead=True)
            if self._is_first_call(point.call):
                self._reduce(unit, point)

    def _is_freed(self, unit: int, point: Point) -> bool:
        forward = point.direction is Direction.FORWARD
        if forward and unit in self._schedule.kept:
            return False
        depth = self._rules.forward_prefetch if forward else self._rules.backward_prefetch
        return unit not in self._next_units(point, depth)

    def _next_units(self, point: Point, depth: int) -> set[int]:
        """Those of the next calls, this unit's own too."""
        order = self._schedule.order[point.direction]
        at = order.index(point.call) + 1
        return {self._schedule.calls[k].unit for k in order[at : at + depth]}

    def _is_first_call(self, call: int) -> bool:
        unit = self._schedule.calls[call].unit
        return all(c.unit != unit for c in self._schedule.calls[:call])

    def _unshard(self, unit: int, point: Point, *, ahead: bool) -> None:
        waits = self._after_computing()
        if self._rules.offload == "all":
            waits = (self._add(Phase.HOST_COPY, unit, point, waits, ahead=ahead),)
        self._gathered[unit] = self._add(Phase.UNSHARD, unit, point, waits, ahead=ahead)
        self._alive.add(unit)

    def _compute(self, unit: int, point: Point) -> None:
        waits = {*self._after_computing(), self._gathered[unit]}
        self._computed = self._add(Phase.COMPUTE, unit, point, tuple(sorted(waits)))

    def _reduce(self, unit: int, point: Point) -> None:
        at = self._add(Phase.REDUCE, unit, point, self._after_computing())
        if self._rules.offload != "none":
            at = self._add(Phase.HOST_COPY, unit, point, (at,))
        self._reduced[unit] = at

    def _after_computing(self) -> tuple[int, ...]:
        return () if self._computed is None else (self._computed,)

    def _add(self, phase: Phase, unit: int, point: Point, waits: tuple[int, ...], *, ahead: bool = False) -> int:
        self._actions.append(Action(phase=phase, unit=unit, point=point, waits_for=waits, ahead=ahead))
        return len(self._actions) - 1
