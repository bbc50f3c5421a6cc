"""`Runtime`: the units of one root at work: what is gathered, what is in flight, where in a step we are.

It owns no parameter and computes nothing. The hooks (hooks.py) tell it at which point of the step the model has arrived; it
asks the schedule what to issue there, and does it.

Note: following the schedule. Before the first forward the order of units is a guess, that of the modules' definition; every
forward records the real one, and the next step is scheduled by it. A forward that departs from its schedule goes on without
one: each unit is gathered when its turn comes. All ranks run the same model, so they depart alike, and collectives keep one
order on all ranks. Whatever the schedule said, a unit that computes is gathered first, and the end of a backward frees
and reduces what is left, in one order.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.profiler import record_function

from fsdp_lab.engine.collectives import Lane
from fsdp_lab.engine.errors import ShardError
from fsdp_lab.engine.flat import FlatBuffer
from fsdp_lab.engine.reduction import Reduction
from fsdp_lab.engine.unit import Unit, UnitState
from fsdp_lab.schedule import Action, Call, Direction, Moment, Phase, Point, Rules, Schedule

Watcher = Callable[[Phase, str, Direction], None]


class Pass:
    """One forward of the root, and the backward that belongs to it."""

    def __init__(self, schedule: Schedule, *, backward: bool) -> None:
        self.schedule, self.backward = schedule, backward
        self.calls: list[Call] = []
        self.open: list[int] = []  # calls whose forward has begun and not ended, outermost first
        self.follows = True  # the schedule, so far
        self.begun: set[int] = set()  # calls whose backward has begun, ended
        self.ended: set[int] = set()
        self.done = False  # its backward is over

    def enter(self, unit: int) -> int:
        """A call begins. Returns its number."""
        k = len(self.calls)
        self.calls.append(Call(unit, self.open[-1] if self.open else None))
        self.open.append(k)
        expected = self.schedule.calls
        self.follows = self.follows and k < len(expected) and expected[k] == self.calls[k]
        return k


class Runtime:
    """One for each root; made at its first forward, or when something is asked of the whole model."""

    def __init__(self, root: Unit, units: Sequence[Unit], guess: Sequence[Call]) -> None:
        self.root, self.units = root, tuple(units)
        self.rules: Rules = root.policy.rules
        self.gathers, self.reductions = Lane(root.grid.device), Lane(root.grid.device)
        self.communicate = True  # whether backwards reduce
        self.watch: Watcher | None = None
        self.peak_alive = 0  # units gathered at once, since it was last set to 0
        self.last: weakref.ref[Pass] | None = None  # the last pass with gradients, while its graph is alive
        self.current: Pass | None = None  # whose forward is running
        self.backward: Pass | None = None  # whose backward is running
        self._index = {unit: i for i, unit in enumerate(self.units)}
        self._calls = {True: tuple(guess), False: tuple(guess)}  # of the last forward, with and without gradients
        self._schedules: dict[bool, Schedule] = {}
        self._reducing: list[Reduction] = []

    # -- forward ----------------------------------------------------------------------------------------------------

    def begin(self) -> Pass:
        """The root's forward begins. Raises ShardError where the backward of the last one is still to come."""
        if self.current is not None or self.backward is not None:
            self.reset()  # an exception ended what was in progress
        backward = torch.is_grad_enabled()
        last = self.last() if self.last is not None else None
        if backward and last is not None and not last.done:
            raise ShardError(
                f"{type(self.root.modules[0]).__name__} was called again before the backward of its last forward; call "
                "backward first, let go of its outputs, or use torch.no_grad()"
            )
        for unit in self.units:
            unit.fetch()
        self.current = Pass(self._schedule(backward), backward=backward)
        if backward:
            self.last = weakref.ref(self.current)
        return self.current

    def before_forward(self, unit: Unit) -> tuple[Pass, int]:
        """Gather the unit, and those ahead of it. Returns the pass and the number of the call."""
        if self.current is None and unit is not self.root:
            raise ShardError(f"{unit.name} was called by itself; call {type(self.root.modules[0]).__name__}, the root")
        current = self.begin() if self.current is None else self.current
        k = current.enter(self._index[unit])
        if current.follows:
            self._issue(current, Point(Direction.FORWARD, k, Moment.BEFORE))
        self._make_ready(unit, Direction.FORWARD)
        self._say(Phase.COMPUTE, unit, Direction.FORWARD)
        return current, k

    def after_forward(self, unit: Unit, current: Pass, k: int) -> None:
        """Free the unit, unless the schedule keeps it."""
        while current.open and current.open[-1] != k:
            current.open.pop()  # inner calls that never came to their end
        current.open.pop()
        if current.follows:
            self._issue(current, Point(Direction.FORWARD, k, Moment.AFTER))
        elif self.rules.reshard_after_forward and unit is not self.root:
            self._reshard(unit, Direction.FORWARD)
        if k == 0:
            self._end_forward(current)

    def _end_forward(self, current: Pass) -> None:
        self.current = None
        if tuple(current.calls) != current.schedule.calls:  # the next one is scheduled by what was seen
            self._calls[current.backward] = tuple(current.calls)
            self._schedules.pop(current.backward)
            if self.rules.reshard_after_forward:
                self._free_all(but=self.root)
            current.schedule = self._schedule(current.backward)
        if not current.backward:
            self._free_all()

    # -- backward ---------------------------------------------------------------------------------------------------

    def before_backward(self, unit: Unit, current: Pass, k: int) -> None:
        """Gradients of a call's outputs are there: gather it, and those ahead."""
        if current.done:  # the graph was kept, and gone through again
            current.begun, current.ended, current.done = set(), set(), False
        if k in current.begun:
            return
        if self.backward is not current:
            self.backward = current
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(lambda: self.end_backward(current))
        current.begun.add(k)
        self._issue(current, Point(Direction.BACKWARD, k, Moment.BEFORE))
        self._make_ready(unit, Direction.BACKWARD)
        self._say(Phase.COMPUTE, unit, Direction.BACKWARD)

    def after_backward(self, unit: Unit, current: Pass, k: int) -> None:
        """Gradients of a call's inputs are there, hence those of its parameters: free it, and reduce them."""
        if k not in current.begun or k in current.ended:
            return
        current.ended.add(k)
        self._issue(current, Point(Direction.BACKWARD, k, Moment.AFTER))

    def end_backward(self, current: Pass) -> None:
        """What is left: units whose inputs need no gradient, late gradients, reductions in flight."""
        for k in current.schedule.order[Direction.BACKWARD] if current.schedule.backward else ():
            if k in current.begun and k not in current.ended:
                self.after_backward(self.units[current.calls[k].unit], current, k)
        for unit in reversed(self.units):
            self._reduce(unit)
        for reduction in self._reducing:
            reduction.finish()
        self._reducing = []
        self._free_all()
        current.done, self.backward = True, None

    # -- what the schedule names ------------------------------------------------------------------------------------

    def _issue(self, current: Pass, point: Point) -> None:
        for action in current.schedule.at(point):
            self._do(action)

    def _do(self, action: Action) -> None:
        unit, direction = self.units[action.unit], action.point.direction
        match action.phase:
            case Phase.UNSHARD:
                self._unshard(unit, direction)
            case Phase.RESHARD:
                self._reshard(unit, direction)
            case Phase.REDUCE:
                self._reduce(unit)
            case _:
                pass  # host copies are issued with what they belong to

    def _unshard(self, unit: Unit, direction: Direction) -> None:
        if unit.state in (UnitState.SHARDED, UnitState.FEW):
            with self.span(Phase.UNSHARD, unit, direction):
                unit.unshard(self.gathers)
            self.peak_alive = max(self.peak_alive, sum(u.state in _ALIVE for u in self.units))

    def _make_ready(self, unit: Unit, direction: Direction) -> None:
        self._unshard(unit, direction)
        unit.ready()

    def _reshard(self, unit: Unit, direction: Direction) -> None:
        to_few = unit.policy.reshard_to_few and direction is Direction.FORWARD and self._has_backward()
        with self.span(Phase.RESHARD, unit, direction):
            unit.reshard(to_few=to_few)

    def _reduce(self, unit: Unit) -> None:
        """At most one unit's reduction in flight: its buffer is freed before the next one's is sent."""
        if not self.communicate or not unit.has_gradient:
            return
        with self.span(Phase.REDUCE, unit, Direction.BACKWARD):
            for reduction in self._reducing:
                reduction.finish()
            self._reducing = unit.reduce(self.reductions)

    # -- spans ------------------------------------------------------------------------------------------------------

    @contextmanager
    def span(self, phase: Phase, unit: Unit, direction: Direction) -> Iterator[None]:
        """A phase under its name, for the watcher and for profiler traces."""
        self._say(phase, unit, direction)
        if not torch.autograd._profiler_enabled():
            yield
            return
        with record_function(f"{phase.value} {unit.name or 'root'}"):
            yield

    def _say(self, phase: Phase, unit: Unit, direction: Direction) -> None:
        if self.watch is not None:
            self.watch(phase, unit.name, direction)

    # -- the rest ---------------------------------------------------------------------------------------------------

    @property
    def reducing(self) -> list[FlatBuffer]:
        """The buffers whose gradients are in flight."""
        return [reduction.flat for reduction in self._reducing]

    @property
    def recomputes(self) -> bool:
        """Whether a forward that begins now is a checkpoint's, inside a backward."""
        return self.backward is not None and torch._C._current_graph_task_id() != -1

    def recompute(self, unit: Unit) -> None:
        """A unit's forward inside the backward: it needs its parameters, and nothing is recorded."""
        self._make_ready(unit, Direction.BACKWARD)

    def reset(self) -> None:
        """After an exception in the middle of a step: free everything, forget gradients that were not reduced."""
        self.current = self.backward = None
        self._reducing = []
        for unit in self.units:
            unit.drop_gradient()
        self._free_all()

    def _free_all(self, but: Unit | None = None) -> None:
        for unit in self.units:
            if unit is not but:
                unit.reshard()

    def _has_backward(self) -> bool:
        return self.current is not None and self.current.backward

    def _schedule(self, backward: bool) -> Schedule:
        if backward not in self._schedules:
            self._schedules[backward] = Schedule(self._calls[backward], self.rules, backward=backward)
        return self._schedules[backward]


_ALIVE = (UnitState.GATHERING, UnitState.UNSHARDED)


def guess_calls(root: nn.Module, unit_of: Callable[[nn.Module], int | None]) -> list[Call]:
    """The calls of a forward that calls every unit once, in the order in which modules are defined."""
    calls: list[Call] = []
    seen: set[int] = set()

    def visit(module: nn.Module, parent: int | None) -> None:
        unit = unit_of(module)
        if unit is not None and unit not in seen:
            seen.add(unit)
            calls.append(Call(unit, parent))
            parent = len(calls) - 1
        for child in module.children():
            visit(child, parent)

    visit(root, None)
    return calls
