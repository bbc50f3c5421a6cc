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
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.autograd.profiler import record_function

from fsdp_lab.engine.collectives import Lane
from fsdp_lab.engine.errors import ShardError
from fsdp_lab.engine.reduction import Reduction
from fsdp_lab.engine.unit import Unit, UnitState
from fsdp_lab.schedule import Action, Call, Direction, Moment, Phase, Point, Rules, Schedule

Watcher = Callable[[Phase, str, Direction], None]
Around = Callable[[Phase, str], AbstractContextManager[None]]  # within it a phase of a unit is issued


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
        self.spans: dict[tuple[Direction, int], record_function] = {}  # of computations under way, for the profiler

    def enter(self, unit: int) -> int:
        """A call begins. Returns its number."""
        k = len(self.calls)
        self.calls.append(Call(unit, self.open[-1] if self.open else None))
        self.open.append(k)
        expected = self.schedule.calls
        self.follows = self.follows and k < len(expected) and expected[k] == self.calls[k]
        return k

    def is_open(self, unit: int) -> bool:
        """Whether a call of the unit has begun and not ended."""
        return any(self.calls[k].unit == unit for k in self.open)


class Runtime:
    """One for each root; made at its first forward, or when something is asked of the whole model."""

    def __init__(self, root: Unit, units: Sequence[Unit], guess: Sequence[Call]) -> None:
        self.root, self.units = root, tuple(units)
        self.rules: Rules = root.policy.rules
        self.gathers, self.reductions = Lane(root.grid.device), Lane(root.grid.device)
        self.communicate = True  # whether backwards reduce
        self.watch: Watcher | None = None
        self.around: Around = _nothing_around
        self.peak_alive = 0  # units gathered at once, since it was last set to 0
        self.last: weakref.ref[Pass] | None = None  # the last pass with gradients, while its graph is alive
        self.current: Pass | None = None  # whose forward is running
        self.backward: Pass | None = None  # whose backward is running
        self._index = {unit: i for i, unit in enumerate(self.units)}
        self._calls = {True: tuple(guess), False: tuple(guess)}  # of the last forward, with and without gradients
        self._schedules: dict[bool, Schedule] = {}
        self._reducing: list[Reduction] = []
        self._reduced: Unit | None = None  # whose they are

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
        if self.rules.offload == "optimizer":  # which has stepped since
            for unit in self.units:
                self._fetch(unit, Direction.FORWARD)
        self.current = Pass(self._schedule(backward), backward=backward)
        if backward:
            self.last = weakref.ref(self.current)
        return self.current

    def before_forward(self, unit: Unit) -> tuple[Pass, int]:
        """Gather the unit, and those ahead of it. Returns the pass and the number of the call."""
        current = self.begin() if unit is self.root else self.current  # also where an exception left the last one open
        if current is None:
            raise ShardError(f"{unit.name} was called by itself; call {type(self.root.modules[0]).__name__}, the root")
        k = current.enter(self._index[unit])
        if current.follows:
            self._issue(current, Point(Direction.FORWARD, k, Moment.BEFORE))
        self._make_ready(unit, Direction.FORWARD)
        self._begin_computing(unit, current, Direction.FORWARD, k)
        return current, k

    def ending(self, unit: Unit) -> tuple[Pass, int] | None:
        """The pass and the number of the unit's call whose forward is about to end; None where there is none."""
        current, index = self.current, self._index[unit]
        if current is None:
            return None
        k = next((k for k in reversed(current.open) if current.calls[k].unit == index), None)
        return None if k is None else (current, k)

    def after_forward(self, unit: Unit, current: Pass, k: int) -> None:
        """Free the unit, unless the schedule keeps it."""
        self._end_computing(current, Direction.FORWARD, k)
        while current.open.pop() != k:
            pass  # inner calls that never came to their end
        if current.follows:
            self._issue(current, Point(Direction.FORWARD, k, Moment.AFTER))
        elif self.rules.reshard_after_forward and not current.is_open(self._index[unit]) and unit is not self.root:
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
        self._begin_backward(current)
        current.begun.add(k)
        self._issue(current, Point(Direction.BACKWARD, k, Moment.BEFORE))
        self._make_ready(unit, Direction.BACKWARD)
        self._begin_computing(unit, current, Direction.BACKWARD, k)

    def after_backward(self, unit: Unit, current: Pass, k: int) -> None:
        """Gradients of a call's inputs are there, hence those of its parameters: free it, and reduce them."""
        if k not in current.begun or k in current.ended:
            return
        current.ended.add(k)
        self._end_computing(current, Direction.BACKWARD, k)
        self._issue(current, Point(Direction.BACKWARD, k, Moment.AFTER))

    def before_gradient(self, unit: Unit, name: str) -> None:
        """A parameter's gradient comes. Raises ShardError where the backward could not be seen to begin."""
        if unit.state is not UnitState.UNSHARDED:
            raise ShardError(
                f"the gradient of {name} came while {unit.name or 'the root'} was not gathered: its backward was not seen; "
                "let its forward return tensors, or tuples, lists, dicts or dataclasses of them"
            )
        if (
            self.backward is None
        ):  # the root gave back nothing to hang a hook on, or a parameter was used inside `unshard`
            last = self.last() if self.last is not None else None
            self._begin_backward(Pass(self._schedule(True), backward=True) if last is None or last.done else last)

    def _begin_backward(self, current: Pass) -> None:
        if self.backward is not current:
            self.backward = current
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(lambda: self.end_backward(current))

    def end_backward(self, current: Pass) -> None:
        """What is left: units whose inputs need no gradient, late gradients, reductions in flight."""
        for k in current.schedule.order[Direction.BACKWARD] if current.schedule.backward else ():
            if k in current.begun and k not in current.ended:
                self.after_backward(self.units[current.calls[k].unit], current, k)
        for unit in reversed(self.units):
            self._reduce(unit)
        self._finish_reducing()
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
            if self.rules.offload == "all" and unit.state is UnitState.SHARDED:
                self._fetch(unit, direction)
            with self.span(Phase.UNSHARD, unit, direction):
                unit.unshard(self.gathers)
            self.peak_alive = max(self.peak_alive, sum(u.state in _ALIVE for u in self.units))

    def _fetch(self, unit: Unit, direction: Direction) -> None:
        with self.span(Phase.HOST_COPY, unit, direction):
            unit.fetch(self.gathers)

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
        self._finish_reducing()
        with self.span(Phase.REDUCE, unit, Direction.BACKWARD):
            self._reducing = unit.reduce(self.reductions)
        self._reduced = unit

    def _finish_reducing(self) -> None:
        """Wait for the reduction in flight; under offload its shard then is on the host."""
        if not self._reducing or self._reduced is None:
            return
        unit = self._reduced
        if self.rules.offload == "none":
            with self.around(Phase.REDUCE, unit.name):
                self._finish_each()
            return
        with self.span(Phase.HOST_COPY, unit, Direction.BACKWARD):
            self._finish_each()

    def _finish_each(self) -> None:
        for reduction in self._reducing:
            reduction.finish()
        self._reducing = []

    # -- spans ------------------------------------------------------------------------------------------------------

    @contextmanager
    def span(self, phase: Phase, unit: Unit, direction: Direction) -> Iterator[None]:
        """A phase under its name, for the watcher and for profiler traces."""
        self._say(phase, unit, direction)
        named = record_function(_label(phase, unit)) if torch.autograd._profiler_enabled() else nullcontext()
        with named, self.around(phase, unit.name):
            yield

    def _begin_computing(self, unit: Unit, current: Pass, direction: Direction, k: int) -> None:
        """Its span ends in another hook, or with the pass."""
        self._say(Phase.COMPUTE, unit, direction)
        if torch.autograd._profiler_enabled():
            current.spans[direction, k] = record_function(_label(Phase.COMPUTE, unit))
            current.spans[direction, k].__enter__()  # type: ignore[no-untyped-call]

    def _end_computing(self, current: Pass, direction: Direction, k: int) -> None:
        span = current.spans.pop((direction, k), None)
        if span is not None:
            span.__exit__(None, None, None)

    def _say(self, phase: Phase, unit: Unit, direction: Direction) -> None:
        if self.watch is not None:
            self.watch(phase, unit.name, direction)

    # -- the rest ---------------------------------------------------------------------------------------------------

    @property
    def reducing(self) -> tuple[Reduction, ...]:
        """The gradients in flight."""
        return tuple(self._reducing)

    @property
    def recomputes(self) -> bool:
        """Whether a forward that begins now is a checkpoint's, inside a backward."""
        return self.backward is not None and torch._C._current_graph_task_id() != -1

    def recompute(self, unit: Unit) -> None:
        """A unit's forward inside the backward: it needs its parameters, and nothing is recorded."""
        self._make_ready(unit, Direction.BACKWARD)

    def reset(self) -> None:
        """After an exception in the middle of a step: free everything; of a backward, forget what was not reduced."""
        in_backward = self.backward is not None
        self.current = self.backward = self.last = None
        self._reducing = []
        for unit in self.units if in_backward else ():
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


def _nothing_around(phase: Phase, unit: str) -> AbstractContextManager[None]:
    return nullcontext()


_ALIVE = (UnitState.GATHERING, UnitState.UNSHARDED)


def _label(phase: Phase, unit: Unit) -> str:
    return f"{phase.value} {unit.name or 'root'}"


def guess_calls(root: nn.Module, unit_of: Callable[[nn.Module], int | None]) -> list[Call]:
    """The calls of a forward that calls every module of every unit once, in the order in which modules are defined."""
    calls: list[Call] = []
    seen: set[nn.Module] = set()

    def visit(module: nn.Module, parent: int | None) -> None:
        unit = unit_of(module)
        if unit is not None and module not in seen:
            seen.add(module)
            calls.append(Call(unit, parent))
            parent = len(calls) - 1
        for child in module.children():
            visit(child, parent)

    visit(root, None)
    return calls
