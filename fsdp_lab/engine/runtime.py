"""`Runtime`: the units of one root during training: what is gathered, what is in flight, where in a step we are.

It owns no parameter and computes nothing. The hooks (hooks.py) report at which point of the step the model has arrived; it
asks the schedule what to issue there, and issues it.

Note: following the schedule. Every forward records its calls, by which its backward and the next step are scheduled. The
first one, and one that departs from its schedule, go on without one: each unit is gathered when its turn comes. All ranks
run the same model, so they depart alike, and collectives keep one order on all ranks. Whatever the schedule says, a unit
that computes is gathered first, and the end of a backward frees and reduces what is left, in one order.

Note: passes. A forward begins at the outermost unit that is called, whichever it is: the root, a block by itself, a teacher
inside. Its `Pass` waits for a backward as long as autograd's graph holds it, and any number of them may. A new one frees
what those before it left gathered, and the optimizer may have stepped: the backward gathers again what it needs. A backward
runs through one pass or several, whole or in part: a `Backward` is a run of autograd, and lives exactly as long as its task
does, so that one which an exception ended is known by its absence. What is called inside a backward is recomputed for it (an
activation checkpoint): it is a pass of its own without a schedule, gathered there and freed by its own backward, if one
comes, else by that of the call it repeats. Nothing that is issued depends on whether a graph is still alive: ranks could
differ in that."""

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import distributed as dist
from torch.autograd.profiler import record_function

from fsdp_lab.base.streams import CommStreams
from fsdp_lab.engine.buffer import Reduction
from fsdp_lab.engine.collectives import ShardError
from fsdp_lab.engine.schedule import Direction, OffloadPolicy, Phase, PointSide, Schedule, UnitCall
from fsdp_lab.engine.unit import Unit, UnitState

_NOTHING: AbstractContextManager[None] = nullcontext()


class Pass:
    """One forward from the outermost unit called, and the backward that belongs to it."""

    def __init__(self, outermost: Unit, *, is_scheduled: bool) -> None:
        self.outermost, self.is_scheduled, self.with_backward = outermost, is_scheduled, torch.is_grad_enabled()
        self.schedule: Schedule | None = None  # None where the forward has departed from it, or is the first
        self.calls: list[UnitCall] = []
        self.open: list[int] = []  # calls whose forward has begun and not ended, outermost first
        self.backwards: dict[int, bool] = {}  # of calls whose backward has begun: whether it has not ended
        self.spans: dict[int, record_function] = {}  # of calls that compute, for the profiler

    def enter(self, unit: int) -> int:
        """A call begins. Returns its number."""
        detached = self.with_backward and not torch.is_grad_enabled()
        k, call = len(self.calls), UnitCall(unit, self.open[-1] if self.open else None, detached)
        self.open.append(k)
        self.calls.append(call)
        if self.schedule is not None and self.schedule.calls[k : k + 1] != (call,):
            self.schedule = None
        return k


class Backward:
    """One run of autograd, through the passes that have joined it. Only autograd's task holds it."""

    def __init__(self) -> None:
        self.passes: list[Pass] = []
        self.at_work: Counter[Unit] = Counter()  # how many calls of a unit have begun and not ended
        self.makes_graph = False  # through which another backward may go, with the same parameters


class Runtime:
    """One for each root; made at the first forward of any of its units, or when something is asked of the whole model."""

    def __init__(self, root: Unit, units: Sequence[Unit]) -> None:
        self.root, self.units = root, tuple(units)
        own, given = root.policy.rules, (unit.policy.rules for unit in units if unit.policy.has_own_prefetch)
        # All that were given prefetching were given the same.
        self.rules = replace(next(given, own), reshard_after_forward=own.reshard_after_forward, offload=own.offload)
        self.streams = CommStreams.of(root.mesh.streams)
        self.watch: Callable[[Phase, str, Direction], None] | None = None  # told of each phase of a unit
        # Within it a phase of a unit is issued.
        self.around: Callable[[Phase, str], AbstractContextManager[None]] = lambda phase, unit: _NOTHING
        self.choices: dict[Unit, Unit] = {}  # units of which a forward may call some, as experts; and those around them
        self.agree: Callable[[Unit, str], None] = lambda unit, what: None  # raises where ranks' calls are not the same
        self.guard: Callable[[], None] = lambda: None  # called at the end of each backward
        # The optimizer's steps so far, and how often it had written when the last was counted: see `begin`.
        self._step, self._written = 0, -1
        self._forward: Pass | None = None  # the one under way
        self._backward: weakref.ref[Backward] | None = None  # the one under way; dead where an exception ended it
        self._reads_shards = False  # of other ranks, in the pass or the backward under way
        self._held: list[Unit] = []  # gathered for the second backward of a double one
        self._index = {unit: i for i, unit in enumerate(self.units)}
        # Of the last pass from a unit, with gradients or without.
        self._schedules: dict[tuple[Unit, bool], Schedule] = {}
        self.reducing: list[tuple[Unit, list[Reduction]]] = []  # in flight, oldest first

    @property
    def backward(self) -> Backward | None:
        """The backward under way."""
        return None if self._backward is None else self._backward()

    # -- forward ----------------------------------------------------------------------------------------------------

    def begin(self, unit: Unit, *, method: bool) -> Pass:
        """A forward begins at this unit. What earlier ones left gathered is freed, except this unit."""
        if self._forward is not None or self._backward is not None:
            self.reset()  # an exception ended what was in progress
        if (written := self._count_writes()) != self._written:
            self._release()
            self._step, self._written = self._step + 1, written
        for other in self.units:
            other.mesh.now.step = self._step
            if other.policy.rules.reshard_after_forward and other is not unit and not other.asked_for:
                other.reshard()
            if other.policy.rules.offload == OffloadPolicy.OPTIMIZER:  # which has stepped since
                with self.span(Phase.HOST_COPY, other):
                    other.copy_to_device(self.streams)
        # Inside `unshard` a rank may compute alone: from what it calls others would not know its schedule.
        current = self._forward = Pass(unit, is_scheduled=not method and not unit.pins)
        current.schedule = self._schedules.get((unit, current.with_backward)) if current.is_scheduled else None
        return current

    def before_forward(self, unit: Unit, *, method: bool = False) -> tuple[Pass, int]:
        """Gather the unit, and those ahead of it. Returns the pass and the number of the call.

        `method`: it is not `forward` that is called. What it calls may differ in each call: no schedule."""
        if torch._C._current_graph_task_id() != -1:  # a checkpoint's, inside a backward
            self._begin_backward()
            self.make_ready(unit)
            again = Pass(unit, is_scheduled=False)
            return again, again.enter(self._index[unit])
        current = self._forward
        # Is it what an exception left? torch tells of no other kind than Exception: after KeyboardInterrupt the outermost
        # unit, or the root, is called again, and the optimizer has stepped.
        begins = current is not None and unit in (current.outermost, self.root)
        if current is None or not current.open or (begins and self._count_writes() != self._written):
            current = self.begin(unit, method=method)
        if unit in self.choices:
            self.agree(unit, unit.name)
        self._free_stale(unit)
        k = current.enter(self._index[unit])
        try:
            self._issue(current, Direction.FORWARD, k, PointSide.BEFORE)
            self.make_ready(unit)
        except BaseException:
            self.close(current, k)
            raise
        self._begin_computing(unit, current, k)
        return current, k

    def _count_writes(self) -> int:
        return sum(flat.master._version for unit in self.units for flat in unit.flats)

    def after_forward(self, unit: Unit, current: Pass, k: int, *, has_graph: bool) -> None:
        """Free the unit, unless the schedule keeps it, or a backward needs it now. `has_graph`: of the call's outputs."""
        if current is not self._forward:
            return
        if any(unit is outer for outer in self.choices.values()):
            self.agree(unit, f"the end of {unit.name}")
        self.close(current, k)
        self._issue(current, Direction.FORWARD, k, PointSide.AFTER)
        if current.schedule is None and unit.policy.rules.reshard_after_forward and unit is not current.outermost:
            self._reshard(unit)
        if k == 0:
            self._end_forward(current, has_graph=has_graph)

    def close(self, current: Pass, k: int) -> None:
        """A call is over, and inner ones that never came to their end. What a pass that an exception ended left gathered is
        freed when the next one begins."""
        self._end_computing(current, k)
        if k in current.open:
            del current.open[current.open.index(k) :]

    def _end_forward(self, current: Pass, *, has_graph: bool) -> None:
        self._forward = None
        departed = current.schedule is None or len(current.calls) != len(current.schedule.calls)
        if departed and current.is_scheduled:  # the next one is scheduled by what was seen
            for unit in self.units:
                if unit.policy.rules.reshard_after_forward and unit is not current.outermost:
                    unit.reshard()
            own = {i: unit.policy.rules for i, unit in enumerate(self.units)}
            seen = Schedule(current.calls, self.rules, backward=current.with_backward, own_rules=own)
            self._schedules[current.outermost, current.with_backward] = current.schedule = seen
        trained = (p.requires_grad for unit in self.units for flat in unit.flats for p in flat.sharded)
        if not current.with_backward or not (has_graph or any(trained)):  # of a frozen model without a graph
            self._free_all()
        self._let_shards_change("end of the forward")

    # -- backward ---------------------------------------------------------------------------------------------------

    def before_backward(self, unit: Unit, current: Pass, k: int) -> None:
        """Gradients of a call's outputs are there: gather it, and those ahead."""
        backward = self._begin_backward()
        if current not in backward.passes:  # where the graph was kept, not for the first time
            current.backwards = {}
            backward.passes.append(current)
        if k in current.backwards:
            return
        self._free_stale(unit)
        current.backwards[k] = True
        backward.at_work[unit] += 1
        self._issue(current, Direction.BACKWARD, k, PointSide.BEFORE)
        self.make_ready(unit)
        self._begin_computing(unit, current, k)
        if torch.is_grad_enabled():
            backward.makes_graph = True
            self._held.append(unit)
            unit.pins += 1

    def after_backward(self, unit: Unit, current: Pass, k: int) -> None:
        """Gradients of a call's inputs are there, hence those of its parameters: free it, and reduce them."""
        backward = self.backward
        if backward is None or current not in backward.passes or not current.backwards.get(k):
            return
        current.backwards[k] = False
        backward.at_work[unit] -= 1
        self._end_computing(current, k)
        if current.schedule is not None and current.schedule.backward:
            self._issue(current, Direction.BACKWARD, k, PointSide.AFTER)
        else:
            self._reshard(unit)
            self._reduce(unit)

    def before_gradient(self, unit: Unit, name: str) -> None:
        """A parameter's gradient comes; late by what torch.autocast keeps of a forward for the next one. Raises ShardError
        where the begin of the backward was missed."""
        if unit.state is not UnitState.UNSHARDED:
            i, passes = self._index[unit], () if self.backward is None else self.backward.passes
            has_ended = any(current.calls[k].unit == i for current in passes for k in current.backwards)
            if not has_ended or any(flat.reduce_hooks for flat in unit.flats):  # these were shown it as complete
                raise ShardError(
                    f"the gradient of {name} came while {unit.name or 'the root'} was not gathered: its backward was not "
                    "seen; let its forward return tensors, or tuples, lists, dicts or dataclasses of them, and put "
                    "torch.autocast around one forward"
                )
        self._begin_backward()  # the root's output had no hook, or it was used inside `unshard`

    def _begin_backward(self) -> Backward:
        """The backward under way, from here on at the latest."""
        if (backward := self.backward) is not None:
            return backward
        if self._backward is not None:
            self.reset()  # an exception ended the last one
        begun = Backward()
        self._backward = weakref.ref(begun)
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(lambda: self.end_backward(begun))
        return begun

    def end_backward(self, backward: Backward) -> None:
        """Finishes what is left: units whose inputs need no gradient, late gradients, reductions in flight."""
        for current in backward.passes:
            scheduled = () if current.schedule is None else current.schedule.backward_order
            for k in (*scheduled, *current.backwards):
                if current.backwards.get(k):
                    self.after_backward(self.units[current.calls[k].unit], current, k)
        for unit in reversed(self.units):
            self._reduce(unit)
        while self.reducing:
            self._advance_reductions(last=True)
        self._backward = None
        if not backward.makes_graph:
            self._release()
        self._free_all()
        self._let_shards_change("end of the backward")
        self.guard()

    # -- what the schedule names ------------------------------------------------------------------------------------

    def _issue(self, current: Pass, direction: Direction, k: int, side: PointSide) -> None:
        """Issues what the schedule names before or after a call; host copies are issued with the gather or reduction that
        they belong to."""
        if current.schedule is None:
            return
        for action in current.schedule.at((direction, k, side)):
            unit = self.units[action.unit]
            if action.phase is Phase.UNSHARD:
                self._unshard(unit)
            elif action.phase is Phase.RESHARD:
                self._reshard(unit)
            elif action.phase is Phase.REDUCE:
                self._reduce(unit)

    def _unshard(self, unit: Unit) -> None:
        self._free_stale(unit)
        if unit.is_sharded:
            if unit.policy.rules.offload == OffloadPolicy.ALL and unit.state is UnitState.SHARDED:
                with self.span(Phase.HOST_COPY, unit):
                    unit.copy_to_device(self.streams)
            with self.span(Phase.UNSHARD, unit):
                unit.unshard(self.streams)

    def _free_stale(self, unit: Unit) -> None:
        """Free a unit that was gathered before the optimizer stepped, so that it is gathered again."""
        if unit.is_stale and not self._is_at_work(unit):
            unit.reshard()

    def make_ready(self, unit: Unit) -> None:
        """Gather a unit now, unless it is."""
        if unit.state is not UnitState.UNSHARDED or unit.is_stale:
            self._unshard(unit)
            unit.wait_for_unshard()
        self._reads_shards |= unit.policy.map_shards and not unit.asked_for

    def _reshard(self, unit: Unit) -> None:
        if self._is_at_work(unit):
            return
        needs_it_again = self._forward is not None and self._forward.with_backward
        with self.span(Phase.RESHARD, unit):
            unit.reshard(to=unit.mesh.post_forward_group if needs_it_again else None)

    def _reduce(self, unit: Unit) -> None:
        """The oldest whole gradient in flight is freed before the next one is sent, where their limit is reached."""
        if not any(flat.gradients.is_waiting for flat in unit.flats):
            return
        if not unit.communicates:
            for flat in unit.flats:
                flat.gradients.collect()  # later ones are added in the dtype of the reduction
            return
        self._advance_reductions(but=self.rules.limit_reductions - 1)
        with self.span(Phase.REDUCE, unit):
            self.reducing.append((unit, unit.reduce(self.streams)))

    def _advance_reductions(self, *, but: int = 0, last: bool = False) -> None:
        """Wait for the collectives in flight, and issue what follows them: in hybrid sharding the all-reduce of a unit then
        runs beside the reduce-scatter and the backward of the next. The last issued comes first: its all-reduce is issued
        before an older unit's is waited for. `but`: so many units, the last ones, are left in flight. `last`: it is the end
        of the backward."""
        for unit, reductions in self.reducing[: max(0, len(self.reducing) - but)][::-1]:
            ends = all(reduction.ends(last=last) for reduction in reductions)
            copies = ends and unit.policy.rules.offload != OffloadPolicy.NONE  # its shard then is on the host
            unit.mesh.now.waits_for = Phase.REDUCE, unit.name or "root"
            with self.span(Phase.HOST_COPY, unit) if copies else self.around(Phase.REDUCE, unit.name):
                for reduction in reductions:
                    reduction.advance(ends=ends)
            if ends:
                self.reducing.remove((unit, reductions))
                for hook in [hook for flat in unit.flats for hook in flat.reduce_hooks.values()]:
                    hook()

    # -- spans ------------------------------------------------------------------------------------------------------

    def span(self, phase: Phase, unit: Unit) -> AbstractContextManager[Any]:
        """A context, to be entered at once: a phase under its name, for the watcher and for profiler traces."""
        self._tell(phase, unit)
        around = self.around(phase, unit.name)
        return around if not torch.autograd._profiler_enabled() else _named(f"{phase} {unit.name or 'root'}", around)

    def _tell(self, phase: Phase, unit: Unit) -> None:
        if self.watch is not None:
            self.watch(phase, unit.name, Direction.FORWARD if self.backward is None else Direction.BACKWARD)

    def _begin_computing(self, unit: Unit, current: Pass, k: int) -> None:
        """Begins a span that ends in another hook, or with the pass."""
        self._tell(Phase.COMPUTE, unit)
        if torch.autograd._profiler_enabled():
            span: Any = record_function(f"{Phase.COMPUTE} {unit.name or 'root'}")
            current.spans[k] = span.__enter__()

    def _end_computing(self, current: Pass, k: int) -> None:
        if current.spans and (span := current.spans.pop(k, None)) is not None:
            span.__exit__(None, None, None)

    # -- the rest ---------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Called after an exception in the middle of a step: frees everything; of a backward, forgets what was not
        reduced."""
        for flat in (flat for unit in self.units if self._backward is not None for flat in unit.flats):
            flat.gradients.drop()
        for reduction in (reduction for _, reductions in self.reducing for reduction in reductions):
            reduction.drop()
        self._forward = self._backward = None
        self.reducing = []
        self._release()
        self._free_all()

    def _is_at_work(self, unit: Unit) -> bool:
        """Returns whether a call of the unit is under way, in a forward or in a backward."""
        current, backward, i = self._forward, self.backward, self._index[unit]
        in_forward = current is not None and any(current.calls[k].unit == i for k in current.open)
        return in_forward or (backward is not None and backward.at_work[unit] > 0)

    def _release(self) -> None:
        """Releases what a double backward held: its second part is over, or the optimizer has stepped without one."""
        for unit in self._held:
            unit.pins -= 1
            unit.reshard()
        self._held = []

    def _free_all(self) -> None:
        if any(unit.policy.rules.offload != OffloadPolicy.NONE for unit in self.units):
            self.streams.to_device.synchronize()  # the optimizer may write next to what was copied from the host
        for unit in self.units:
            if not self._is_at_work(unit):
                unit.reshard()

    def _let_shards_change(self, when: str) -> None:
        """Wait until no rank reads the shards of others any more, if it did: see "Note: shards that are mapped" in
        extras/parameters.py. What `unshard` has gathered are copies, with which a rank may compute alone."""
        groups = dict.fromkeys(unit.mesh.shard_group for unit in self.units if unit.policy.map_shards)
        reads, self._reads_shards = self._reads_shards, False
        for group in filter(None, groups if reads else ()):
            with self.root.mesh.answered(when):
                dist.barrier(group)


@contextmanager
def _named(label: str, around: AbstractContextManager[Any]) -> Iterator[None]:
    with record_function(label), around:
        yield
