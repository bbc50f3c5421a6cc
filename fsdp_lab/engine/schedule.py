"""`Schedule`: which phase of which unit is issued at which point of a step, and what it waits for.

It is data: the engine's hooks look up what to issue (`at`), the planner simulates the same list (`actions`), slow motion
and the timeline use its names. So prediction and execution cannot drift apart. No torch.

A forward is a tree of calls: the root's call encloses those of its units. The backward walks the same tree from the other
end. At each call there are four points: before and after its forward, before and after its backward.

Note: what stays gathered. With resharding after forward (arXiv 2304.11277, section 3.2.1) every unit is freed after its
forward and gathered again for its backward. But the units that the backward needs first (the root, and the unit it begins
with) would be gathered again immediately, so they stay gathered. No more than these: between the two passes, where the loss
is computed, activations are at their most. Of a unit that is called more than once only the last call may leave it gathered:
an earlier one would add to the memory of the units in between. If nothing is freed after the forward (ZeRO-2), the limiter
counts only the unit that computes and those gathered ahead: waiting for the others would have no effect."""

import enum
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
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


class Point(NamedTuple):
    """A point of a step: before or after the forward or the backward of one call."""

    direction: Direction
    call: int
    side: PointSide


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


class Schedule:
    """One step's phases for a tree of calls.

    Args:
        calls: in the order in which they begin; the first is the root's.
        rules: the root's.
        backward: False for a forward without gradients, after which everything is freed.
        own_rules: of units with rules of their own: what these say of resharding and offload counts, for that unit."""

    def __init__(
        self,
        calls: Sequence[UnitCall],
        rules: Rules,
        *,
        backward: bool = True,
        own_rules: Mapping[int, Rules] | None = None,
    ) -> None:
        self.calls, self.rules, self.backward = tuple(calls), rules, backward
        self._own_rules = own_rules or {}
        self.enclosing = frozenset(call.parent for call in self.calls)  # calls that have others inside them
        self.walk = self._walk()
        self.actions: list[Action] = []
        self._at: dict[tuple[Direction, int, PointSide], list[Action]] = {}
        # What is so at the point to which the actions have been listed:
        self._gathered: set[int] = set()
        self._begun: set[int] = set()  # units of which a call has begun
        self._upcoming: dict[Direction, deque[int]] = {direction: deque() for direction in Direction}  # next one first
        self._computed: tuple[int, ...] = ()  # index of the last computation
        self._unshards: dict[int, int] = {}  # unit -> index of its last unshard
        self._reduces: dict[int, int] = {}  # unit -> index of its last reduce, or of the copy after it
        for direction, k, side in self.walk:
            if side is PointSide.BEFORE:
                self._upcoming[direction].append(self.calls[k].unit)
        for point in self.walk:
            self._come_to(point)
        if self.backward and self.calls:
            end = Point(Direction.UPDATE, 0, PointSide.AFTER)
            self._add(Phase.OPTIM, -1, end, tuple(self._reduces.values()))

    def rules_of(self, unit: int) -> Rules:
        """The rules of a unit: its own, or the root's."""
        return self._own_rules.get(unit, self.rules)

    def at(self, point: tuple[Direction, int, PointSide]) -> Sequence[Action]:
        """The actions to issue at a `Point`, in this order, without the computation itself."""
        return self._at.get(point, ())

    def _walk(self) -> tuple[Point, ...]:
        """Every point, ordered by time: the forward, and the same way back."""
        points, inside = list[Point](), list[int]()
        for k, call in enumerate(self.calls):
            while inside and inside[-1] != call.parent:
                points.append(Point(Direction.FORWARD, inside.pop(), PointSide.AFTER))
            points.append(Point(Direction.FORWARD, k, PointSide.BEFORE))
            inside.append(k)
        points += [Point(Direction.FORWARD, k, PointSide.AFTER) for k in reversed(inside)]
        other = {PointSide.BEFORE: PointSide.AFTER, PointSide.AFTER: PointSide.BEFORE}
        back = [Point(Direction.BACKWARD, k, other[side]) for _, k, side in points[::-1] if not self.calls[k].detached]
        return (*points, *back) if self.backward else tuple(points)

    @cached_property
    def backward_order(self) -> tuple[int, ...]:
        """The calls in the order in which their backwards begin."""
        back = (point for point in self.walk if point.direction is Direction.BACKWARD)
        return tuple(point.call for point in back if point.side is PointSide.BEFORE)

    @cached_property
    def never_reshards(self) -> frozenset[int]:
        """Units whose rules keep them gathered between forward and backward."""
        with_backward = (call.unit for call in self.calls if not call.detached)
        return frozenset(unit for unit in with_backward if not self.rules_of(unit).reshard_after_forward)

    @cached_property
    def stays_gathered(self) -> frozenset[int]:
        """Units that stay gathered between forward and backward (see the note)."""
        gathered = set(self.never_reshards) if self.backward else set()
        for k in self.backward_order:
            gathered.add(self.calls[k].unit)
            if not self.rules.keeps_first or k not in self.enclosing:
                break
        return frozenset(gathered)

    def _come_to(self, point: Point) -> None:
        """Lists the actions of the next point."""
        (direction, k, side), unit = point, self.calls[point.call].unit
        begins, upcoming, around = side is PointSide.BEFORE, self._upcoming[direction], self.calls[k].parent
        if begins:
            self._begun.add(upcoming.popleft())
            if unit not in self._gathered:
                self._unshard(unit, point, ahead=False)
        elif k in self.enclosing:
            self._compute(unit, point)  # the part of an enclosing unit after its inner ones
        while around is not None and self.calls[around].unit != unit:
            around = self.calls[around].parent
        ends = not begins and around is None  # and the call is not inside another one of the unit
        stays = () if direction is Direction.BACKWARD else self.stays_gathered
        if ends and unit not in (self.never_reshards if unit in upcoming else stays):
            again_at_once = *islice(upcoming, 1), *self.ahead(point, self._gathered - {unit})
            if unit not in again_at_once:
                self._add(Phase.RESHARD, unit, point, self._computed)
                self._gathered.discard(unit)
        if begins == (direction is Direction.FORWARD or self.rules.prefetch_before):
            for other in self.ahead(point, self._gathered):
                self._unshard(other, point, ahead=True)
        if begins:
            self._compute(unit, point)
        elif ends and direction is Direction.BACKWARD and unit not in upcoming:
            at = self._add(Phase.REDUCE, unit, point, self._computed)
            if self.rules_of(unit).offload != OffloadPolicy.NONE:
                at = self._add(Phase.HOST_COPY, unit, point, (at,))
            self._reduces[unit] = at

    def ahead(self, point: Point, gathered: set[int]) -> list[int]:
        """The units to prefetch at a point, within the limit: those of the next calls; before a call, not its own. The
        limiter does not count units that are not freed after the forward, and have computed in it."""
        is_forward, own, units = point.direction is Direction.FORWARD, self.calls[point.call].unit, dict[int, None]()
        depth = self.rules.forward_prefetch if is_forward else self.rules.backward_prefetch
        for unit in self._upcoming[point.direction]:
            if len(units) == depth:
                break
            if unit != own or point.side is PointSide.AFTER:
                units[unit] = None
        counted = len(gathered - (self.never_reshards & self._begun - {own}) if self.backward else gathered)
        room = self.rules.limit + 1 - counted if self.rules.limit else depth
        return [unit for unit in units if unit not in gathered][: max(0, room)]

    def _unshard(self, unit: int, point: Point, *, ahead: bool) -> None:
        waits = self._computed
        if self.rules_of(unit).offload == OffloadPolicy.ALL:
            waits = (self._add(Phase.HOST_COPY, unit, point, waits, ahead=ahead),)
        self._unshards[unit] = self._add(Phase.UNSHARD, unit, point, waits, ahead=ahead)
        self._gathered.add(unit)

    def _compute(self, unit: int, point: Point) -> None:
        waits = {*self._computed, self._unshards[unit]}
        self._computed = (self._add(Phase.COMPUTE, unit, point, tuple(sorted(waits))),)

    def _add(self, phase: Phase, unit: int, point: Point, waits: tuple[int, ...], *, ahead: bool = False) -> int:
        action = Action(phase=phase, unit=unit, point=point, waits_for=waits, ahead=ahead)
        self.actions.append(action)
        if phase not in (Phase.COMPUTE, Phase.OPTIM):
            self._at.setdefault(point, []).append(action)
        return len(self.actions) - 1
