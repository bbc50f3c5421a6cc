"""`Runtime`: the units of one root during training: what is gathered, what is in flight, where in a step we are.

It owns no parameter and computes nothing. The hooks (hooks.py) report at which point of the step the model has arrived; it
asks the schedule what to issue there, and issues it.

Note: following the schedule. Before the first forward the order of units is a guess, that of the modules' definition; every
forward records the real one, by which the next step is scheduled. A forward that departs from its schedule goes on without
one: each unit is gathered when its turn comes. All ranks run the same model, so they depart alike, and collectives keep one
order on all ranks. Whatever the schedule says, a unit that computes is gathered first, and the end of a backward frees and
reduces what is left, in one order.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.autograd.profiler import record_function

from fsdp_lab.core.schedule import Direction, OffloadPolicy, Phase, Point, PointSide, Rules, Schedule, UnitCall
from fsdp_lab.engine.collectives import CommStream
from fsdp_lab.engine.errors import ShardError
from fsdp_lab.engine.gradients import Reduction
from fsdp_lab.engine.unit import Unit, UnitState

Watcher = Callable[[Phase, str, Direction], None]
Around = Callable[[Phase, str], AbstractContextManager[None]]  # within it a phase of a unit is issued


class TrainingState(enum.Enum):
    """The state of a pass, by the names of torch's FSDP2."""

    IDLE = "idle"  # nothing is to come: the backward is over, or there is none
    FORWARD = "forward"
    PRE_BACKWARD = "pre backward"  # the forward is over, and its backward is still to come
    BACKWARD = "backward"


class Pass:
    """One forward of the root, and the backward that belongs to it."""

    def __init__(self, schedule: Schedule, *, with_backward: bool) -> None:
        self.schedule: Schedule | None = schedule  # None where the forward has departed from it
        self.with_backward = with_backward
        self.state = TrainingState.FORWARD
        self.calls: list[UnitCall] = []
        self.open: list[int] = []  # calls whose forward has begun and not ended, outermost first
        self.backwards: dict[int, TrainingState] = {}  # of calls: BACKWARD once it has begun, IDLE when it is over
        self.spans: dict[tuple[Direction, int], record_function] = {}  # of computations under way, for the profiler

    def enter(self, unit: int) -> int:
        """A call begins. Returns its number."""
        k, call = len(self.calls), UnitCall(unit, self.open[-1] if self.open else None)
        self.calls.append(call)
        self.open.append(k)
        if self.schedule is not None and self.schedule.calls[k : k + 1] != (call,):
            self.schedule = None
        return k

    def is_open(self, unit: int) -> bool:
        """Whether a call of the unit has begun and not ended."""
        return any(self.calls[k].unit == unit for k in self.open)

    def in_backward(self) -> list[int]:
        """Calls whose backward has begun and not ended, in the order of the schedule."""
        order = self.backwards if self.schedule is None else self.schedule.order[Direction.BACKWARD]
        return [k for k in order if self.backwards.get(k) is TrainingState.BACKWARD]


class Runtime:
    """One for each root; made at its first forward, or when something is asked of the whole model."""

    def __init__(self, root: Unit, units: Sequence[Unit], guess: Sequence[UnitCall]) -> None:
        self.root, self.units = root, tuple(units)
        self.rules: Rules = _rules(root, units)
        self.gathers, self.reductions = CommStream(root.mesh.device), CommStream(root.mesh.device)
        self.communicate = True  # whether backwards reduce
        self.watch: Watcher | None = None
        self.around: Around = lambda phase, unit: nullcontext()
        self._active: Pass | None = None  # whose forward or backward is running
        self._last: weakref.ref[Pass] | None = None
        self._index = {unit: i for i, unit in enumerate(self.units)}
        self._calls = {True: tuple(guess), False: tuple(guess)}  # of the last forward, with and without gradients
        self._schedules: dict[bool, Schedule] = {}
        self._reducing: list[tuple[Unit, list[Reduction]]] = []  # in flight, oldest first

    @property
    def state(self) -> TrainingState:
        current = self._active or self.last
        return TrainingState.IDLE if current is None else current.state

    @property
    def last(self) -> Pass | None:
        """The last pass with a backward, while its graph is alive."""
        return None if self._last is None else self._last()

    # -- forward ----------------------------------------------------------------------------------------------------

    def begin(self) -> Pass:
        """The root's forward begins. Raises ShardError where the backward of the last one is still to come."""
        if self._active is not None:
            self.reset()  # an exception ended what was in progress
        with_backward = torch.is_grad_enabled()
        if with_backward and self.state is TrainingState.PRE_BACKWARD:
            raise ShardError(
                f"{type(self.root.modules[0]).__name__} was called again before the backward of its last forward; call "
                "backward first, let go of its outputs, or use torch.no_grad()"
            )
        for unit in self.units:
            if unit.policy.offload == OffloadPolicy.OPTIMIZER:  # which has stepped since
                self._copy_to_device(unit, Direction.FORWARD)
        self._active = Pass(self._schedule(with_backward), with_backward=with_backward)
        if with_backward:
            self._last = weakref.ref(self._active)
        return self._active

    def before_forward(self, unit: Unit) -> tuple[Pass, int]:
        """Gather the unit, and those ahead of it. Returns the pass and the number of the call."""
        current = self.begin() if unit is self.root else self._in_forward()  # an exception may have left one open
        if current is None:
            raise ShardError(f"{unit.name} was called by itself; call {type(self.root.modules[0]).__name__}, the root")
        k = current.enter(self._index[unit])
        self._issue(current, Point(Direction.FORWARD, k, PointSide.BEFORE))
        self.make_ready(unit, Direction.FORWARD)
        self._begin_computing(unit, current, Direction.FORWARD, k)
        return current, k

    def ending(self, unit: Unit) -> tuple[Pass, int] | None:
        """The pass and the number of the unit's call whose forward is about to end; None where there is none."""
        current, index = self._in_forward(), self._index[unit]
        if current is None:
            return None
        k = next((k for k in reversed(current.open) if current.calls[k].unit == index), None)
        return None if k is None else (current, k)

    def after_forward(self, unit: Unit, current: Pass, k: int) -> None:
        """Free the unit, unless the schedule keeps it."""
        self._end_computing(current, Direction.FORWARD, k)
        while current.open.pop() != k:
            pass  # inner calls that never came to their end
        self._issue(current, Point(Direction.FORWARD, k, PointSide.AFTER))
        departed = current.schedule is None and unit.policy.rules.reshard_after_forward
        if departed and not current.is_open(self._index[unit]) and unit is not self.root:
            self._reshard(unit, Direction.FORWARD)
        if k == 0:
            self._end_forward(current)

    def _end_forward(self, current: Pass) -> None:
        self._active = None
        current.state = TrainingState.PRE_BACKWARD if current.with_backward else TrainingState.IDLE
        calls = tuple(current.calls)
        if current.schedule is None or calls != current.schedule.calls:  # the next one is scheduled by what was seen
            self._calls[current.with_backward] = calls
            self._schedules.pop(current.with_backward)
            for unit in self.units:
                if unit.policy.rules.reshard_after_forward and unit is not self.root:
                    unit.reshard()
            current.schedule = self._schedule(current.with_backward)
        if not current.with_backward:
            self._free_all()

    def _in_forward(self) -> Pass | None:
        return self._active if self.state is TrainingState.FORWARD else None

    # -- backward ---------------------------------------------------------------------------------------------------

    def before_backward(self, unit: Unit, current: Pass, k: int) -> None:
        """Gradients of a call's outputs are there: gather it, and those ahead."""
        if current.state is TrainingState.IDLE:  # the graph was kept, and is gone through again
            current.backwards = {}
        if k in current.backwards:
            return
        self._begin_backward(current)
        current.backwards[k] = TrainingState.BACKWARD
        self._issue(current, Point(Direction.BACKWARD, k, PointSide.BEFORE))
        self.make_ready(unit, Direction.BACKWARD)
        self._begin_computing(unit, current, Direction.BACKWARD, k)

    def after_backward(self, unit: Unit, current: Pass, k: int) -> None:
        """Gradients of a call's inputs are there, hence those of its parameters: free it, and reduce them."""
        if current.backwards.get(k) is not TrainingState.BACKWARD:
            return
        current.backwards[k] = TrainingState.IDLE
        self._end_computing(current, Direction.BACKWARD, k)
        self._issue(current, Point(Direction.BACKWARD, k, PointSide.AFTER))

    def before_gradient(self, unit: Unit, name: str) -> None:
        """A parameter's gradient comes. Raises ShardError where the begin of the backward was missed."""
        if unit.state is not UnitState.UNSHARDED:
            raise ShardError(
                f"the gradient of {name} came while {unit.name or 'the root'} was not gathered: its backward was not seen; "
                "let its forward return tensors, or tuples, lists, dicts or dataclasses of them"
            )
        if self.state is not TrainingState.BACKWARD:  # the root's output had no hook, or it was used inside `unshard`
            last = self.last
            if last is None or last.state is TrainingState.IDLE:
                last = Pass(self._schedule(True), with_backward=True)
            self._begin_backward(last)

    def _begin_backward(self, current: Pass) -> None:
        if self._active is not current or current.state is not TrainingState.BACKWARD:
            self._active, current.state = current, TrainingState.BACKWARD
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(lambda: self.end_backward(current))

    def end_backward(self, current: Pass) -> None:
        """What is left: units whose inputs need no gradient, late gradients, reductions in flight."""
        for k in current.in_backward():
            self.after_backward(self.units[current.calls[k].unit], current, k)
        for unit in reversed(self.units):
            self._reduce(unit)
        while self._reducing:
            self._advance_reductions()
        self._free_all()
        self._active, current.state = None, TrainingState.IDLE
        for flat in (flat for unit in self.units for flat in unit.flats):
            flat.refuse_gradients()

    # -- what the schedule names ------------------------------------------------------------------------------------

    def _issue(self, current: Pass, point: Point) -> None:
        """What the schedule names at a point; host copies are issued with what they belong to."""
        for action in current.schedule.at(point) if current.schedule is not None else ():
            unit = self.units[action.unit]
            if action.phase is Phase.UNSHARD:
                self._unshard(unit, point.direction)
            elif action.phase is Phase.RESHARD:
                self._reshard(unit, point.direction)
            elif action.phase is Phase.REDUCE:
                self._reduce(unit)

    def _unshard(self, unit: Unit, direction: Direction) -> None:
        if unit.is_sharded:
            if unit.policy.offload == OffloadPolicy.ALL and unit.state is UnitState.SHARDED:
                self._copy_to_device(unit, direction)
            with self.span(Phase.UNSHARD, unit, direction):
                unit.unshard(self.gathers)

    def _copy_to_device(self, unit: Unit, direction: Direction) -> None:
        with self.span(Phase.HOST_COPY, unit, direction):
            unit.copy_to_device(self.gathers)

    def make_ready(self, unit: Unit, direction: Direction) -> None:
        """Gather a unit now, unless it is."""
        self._unshard(unit, direction)
        unit.wait_for_unshard()

    def _reshard(self, unit: Unit, direction: Direction) -> None:
        current = self._in_forward()
        post_forward = unit.mesh.post_forward_group is not None and current is not None and current.with_backward
        with self.span(Phase.RESHARD, unit, direction):
            unit.reshard(post_forward=post_forward)

    def _reduce(self, unit: Unit) -> None:
        """At most one unit's whole gradient in flight: it is freed before the next one's is sent."""
        if not self.communicate or not unit.has_gradient:
            return
        self._advance_reductions()
        with self.span(Phase.REDUCE, unit, Direction.BACKWARD):
            self._reducing.append((unit, unit.reduce(self.reductions)))

    def _advance_reductions(self) -> None:
        """Wait for the collectives in flight, the last issued first, and issue what follows them: in hybrid sharding the
        all-reduce of a unit then runs beside the reduce-scatter and the backward of the next."""
        for in_flight in reversed(self._reducing.copy()):
            unit, reductions = in_flight
            ends = all(reduction.is_sent for reduction in reductions)
            copies = ends and unit.policy.offload != OffloadPolicy.NONE  # under offload its shard then is on the host
            with (
                self.span(Phase.HOST_COPY, unit, Direction.BACKWARD) if copies else self.around(Phase.REDUCE, unit.name)
            ):
                for reduction in reductions:
                    reduction.advance()
            if ends:
                self._reducing.remove(in_flight)
                for hook in [hook for flat in unit.flats for hook in flat.reduce_hooks.values()]:
                    hook()

    # -- spans ------------------------------------------------------------------------------------------------------

    @contextmanager
    def span(self, phase: Phase, unit: Unit, direction: Direction) -> Iterator[None]:
        """A phase under its name, for the watcher and for profiler traces."""
        self._report(phase, unit, direction)
        named = record_function(_label(phase, unit)) if torch.autograd._profiler_enabled() else nullcontext()
        with named, self.around(phase, unit.name):
            yield

    def _begin_computing(self, unit: Unit, current: Pass, direction: Direction, k: int) -> None:
        """Its span ends in another hook, or with the pass."""
        self._report(Phase.COMPUTE, unit, direction)
        if torch.autograd._profiler_enabled():
            current.spans[direction, k] = record_function(_label(Phase.COMPUTE, unit))
            current.spans[direction, k].__enter__()  # type: ignore[no-untyped-call]

    def _end_computing(self, current: Pass, direction: Direction, k: int) -> None:
        span = current.spans.pop((direction, k), None)
        if span is not None:
            span.__exit__(None, None, None)

    def _report(self, phase: Phase, unit: Unit, direction: Direction) -> None:
        if self.watch is not None:
            self.watch(phase, unit.name, direction)

    # -- the rest ---------------------------------------------------------------------------------------------------

    @property
    def reducing(self) -> tuple[Reduction, ...]:
        """The gradients in flight."""
        return tuple(reduction for _, reductions in self._reducing for reduction in reductions)

    @property
    def recomputes(self) -> bool:
        """Whether a forward that begins now is a checkpoint's, inside a backward."""
        return self.state is TrainingState.BACKWARD and torch._C._current_graph_task_id() != -1

    def reset(self) -> None:
        """After an exception in the middle of a step: free everything; of a backward, forget what was not reduced."""
        in_backward = self.state is TrainingState.BACKWARD
        self._active = self._last = None
        self._reducing = []
        for unit in self.units if in_backward else ():
            unit.drop_gradient()
        self._free_all()

    def _free_all(self) -> None:
        for unit in self.units:
            unit.reshard()

    def _schedule(self, with_backward: bool) -> Schedule:
        if with_backward not in self._schedules:
            own = {i: unit.policy.rules for i, unit in enumerate(self.units)}
            self._schedules[with_backward] = Schedule(
                self._calls[with_backward], self.rules, backward=with_backward, own_rules=own
            )
        return self._schedules[with_backward]


def _rules(root: Unit, units: Sequence[Unit]) -> Rules:
    """The root's; prefetching as any unit was given it, since all that were, were given the same."""
    given = [unit.policy for unit in units if unit.policy.has_own_prefetch]
    prefetch = given[0].rules if given else root.policy.rules
    return Rules.of(
        prefetch, reshard_after_forward=root.policy.rules.reshard_after_forward, offload=root.policy.offload
    )


def _label(phase: Phase, unit: Unit) -> str:
    return f"{phase.value} {unit.name or 'root'}"


def guess_calls(root: nn.Module, unit_of: Callable[[nn.Module], int | None]) -> list[UnitCall]:
    """The calls of a forward that calls every module of every unit once, in the order in which modules are defined."""
    calls: list[UnitCall] = []
    seen: set[nn.Module] = set()

    def visit(module: nn.Module, parent: int | None) -> None:
        unit = unit_of(module)
        if unit is not None and module not in seen:
            seen.add(module)
            calls.append(UnitCall(unit, parent))
            parent = len(calls) - 1
        for child in module.children():
            visit(child, parent)

    visit(root, None)
    return calls
