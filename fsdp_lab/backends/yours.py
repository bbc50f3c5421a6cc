"""An engine of the user's own as a backend, "yours" in a Spec: a class with five methods.

    class Engine:
        def shard(self, unit): ...     # once: returns what this rank keeps of unit.params, which the optimizer trains
        def gather(self, unit): ...    # makes unit.params whole again, from unit.shard of all ranks
        def free(self, unit): ...      # gives the memory of unit.params back
        def reduce(self, unit): ...    # returns the gradient of unit.shard: the mean over ranks of p.grad of unit.params
        def prefetch(self, unit): ...  # may be left out: begins to gather a unit, which `gather` will end

The lab makes one object of it on each rank, calls its methods from hooks, without gradients, and does the rest. Collectives
are torch's, in the default group, which is the Wire. `Strategy.sharding` says when which method is called:

    sharding        before the forward      after it    before the backward    after it
    full_shard      gather                  free        gather                 reduce, free
    shard_grad_op   gather                  -           -                      reduce, free
    zero1           gather, once a step     -           -                      reduce
    no_shard        -                       -           -                      reduce

The root's unit, what is in no other unit, is gathered from the begin of the forward to the end of the backward. `prefetch`
gets the unit that will be gathered next, before the one at hand computes. `reduce` may return a function in place of the
gradient, which returns it and is called at the end of the backward, so that a reduction can run beside the backward. Whole
gradients that it leaves in p.grad are dropped after the optimizer's step. In micro-batches that do not communicate,
autograd adds to p.grad, and `reduce` is not called.

The first two steps are inspected (your_checks.py).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fsdp_lab.backends import base
from fsdp_lab.backends.base import Backend, RoleTensor
from fsdp_lab.backends.state import gather_json, together
from fsdp_lab.backends.storage import DeferredStorage, free, storage_id
from fsdp_lab.backends.wrapping import context_of, named_units, prepare
from fsdp_lab.backends.your_checks import Inspector
from fsdp_lab.backends.your_engine import YourEngine, YourUnit, frees_after_backward, kind_of_value, tensors_of
from fsdp_lab.backends.your_shards import KeptPart, check_coverage, check_shapes, take_shard
from fsdp_lab.core.events import ROOT, Role
from fsdp_lab.core.spec import Spec
from fsdp_lab.engine import ParamShard
from fsdp_lab.engine.tensors import tensors_in, view_inputs
from fsdp_lab.models.wrapping import units

_INSPECTED = 2  # steps: what is stale shows in the second


class HeldState(enum.Enum):
    """What a rank has of a unit's parameters."""

    SHARD = "its shard"
    ASKED_FOR = "a gather was begun"
    WHOLE = "all"


class UnitOfYours:
    """A unit on this rank, with its modules: what the lab knows of it, and not the engine."""

    def __init__(self, unit: YourUnit, modules: Sequence[nn.Module], flats: list[Tensor]) -> None:
        self.unit, self.modules, self.flats = unit, tuple(modules), flats
        self.parts: dict[str, KeptPart] = {}  # what this rank keeps of each parameter
        self.locals: dict[str, Tensor] = {}  # views of `flats`; made before their storage is deferred
        self.empties: list[Tensor] = []  # [0] each, of the same storage as `flats`
        self.trained: list[tuple[KeptPart, nn.Parameter]] = []  # what the optimizer is given
        self.held = HeldState.SHARD
        self.calls = 0  # in a forward, whose backward is not over
        self.has_reduced = False  # in this backward

    def shard(self, engine: YourEngine) -> None:
        """Let the engine take its part of the parameters, which exist and are freed afterwards."""
        self.flats, self.parts = take_shard(engine, self.unit)
        self.locals = {name: part.of(self.flats) for name, part in self.parts.items()}
        self.empties = [t[:0] for t in self.flats]

    def layout(self) -> dict[str, list[int]]:
        """As JSON, for the other ranks."""
        return {name: part.to_row() for name, part in self.parts.items()}

    def train(self, everybodys: Mapping[str, Sequence[KeptPart]]) -> Iterator[ParamShard]:
        """The shards that the optimizer trains. What is empty here lies in the storage that it has on another rank: the
        order in which a transfer goes through storages is then the same on all ranks."""
        for (name, part), p in zip(self.parts.items(), self.unit.params, strict=True):
            there = next((other.tensor for other in everybodys[name] if other.numel), 0)
            local = self.locals[name] if part.numel or not self.empties else self.empties[there]
            trained = nn.Parameter(local, requires_grad=p.requires_grad)
            self.trained += [(part, trained)] * p.requires_grad
            yield ParamShard(name=name, shape=p.shape, start=part.start, stop=part.stop, local=local,
                             param=base.trained(trained))  # fmt: skip


class Yours(Backend):
    """See the module."""

    def __init__(self, skeleton: nn.Module, spec: Spec, mesh: DeviceMesh, device: torch.device) -> None:
        self._strategy, self._several = spec.strategy, spec.communications > 1
        self._frees, self._is_replicated = frees_after_backward(spec.strategy), spec.strategy.is_replicated
        self._context = context_of(mesh)
        deferred = DeferredStorage()
        names = [base.original_name(name) for name, _ in skeleton.named_parameters()]
        self._engine, self._units = together(lambda: self._shard(skeleton, device, deferred))
        by_rank = gather_json({one.unit.name: [len(one.flats), one.layout()] for one in self._units})
        layouts = {
            one.unit.name: _by_parameter(one, [of_rank[one.unit.name] for of_rank in by_rank]) for one in self._units
        }
        for one in self._units:
            self._check(one, layouts[one.unit.name], [of_rank[one.unit.name][0] for of_rank in by_rank])
        shards = {s.name: s for one in self._units for s in one.train(layouts[one.unit.name])}
        base.place_buffers(skeleton, device, spec.strategy.dtypes)
        super().__init__(skeleton, [shards[name] for name in names], deferred, spec, mesh, device)
        self._inspector: Inspector | None = Inspector(self._engine, self._context, layouts)
        self._inspects, self._begun = False, 0  # this step; how many steps have begun
        self._communicates, self._in_backward = True, False
        self._ending: list[tuple[UnitOfYours, Callable[[], Any], Any]] = []  # reductions in flight
        self._root = self._units[-1]
        self._order = self._units[:-1]  # in which a forward calls them: a guess before the first
        self._called: list[UnitOfYours] = []  # in this forward
        self._handles = [handle for one in self._units for handle in self._hooks_of(one)]
        self.optimizer.register_step_post_hook(lambda *_: self._after_update())

    # -- building ---------------------------------------------------------------------------------------------------

    def _shard(
        self, skeleton: nn.Module, device: torch.device, deferred: DeferredStorage
    ) -> tuple[YourEngine, list[UnitOfYours]]:
        """Let the engine shard unit by unit, each of which is freed before the next exists."""
        engine = YourEngine(self._strategy)
        metas = dict(skeleton.named_parameters())  # kept, so that no new parameter gets the id of one
        names = {id(p): base.original_name(name) for name, p in metas.items()}
        groups = named_units(skeleton, units(skeleton, self._strategy.wrap))
        outer = prepare(skeleton, self._strategy)
        found: list[UnitOfYours] = []
        make, taken = base.materialiser(device), set[int]()
        for name, modules in (*groups.items(), (ROOT, [skeleton])):
            named = _parameters_of(modules, names, taken, make)
            unit = YourUnit(name, named, dist.get_rank(), dist.get_world_size())
            one = UnitOfYours(unit, [outer(m) for m in modules], [])
            if named:
                one.shard(engine)
                self._check_storage(engine, one)
                if self._frees:
                    shapes = [p.shape for p in unit.params]
                    engine.call("free", unit, "")
                    check_shapes(engine, unit, shapes)
                whole = [p.detach() for p in unit.params]
                for t in {storage_id(t): t for t in one.flats}.values():
                    deferred.defer(t, *whole)
                    whole = []
            if named or name == ROOT:
                found.append(one)
        return engine, found

    def _check(self, one: UnitOfYours, layout: Mapping[str, Sequence[KeptPart]], counts: Sequence[int]) -> None:
        """What ranks keep together. Raises SpecError, the same on each."""
        other = next((rank for rank, count in enumerate(counts) if count != counts[0]), None)
        if other is not None:
            what = f"returned {counts[0]} tensors on rank 0 and {counts[other]} on rank {other}"
            raise self._engine.mistake("shard", one.unit, "", what, "return as many on every rank; they may be empty")
        check_coverage(self._engine, one.unit, layout, replicated=self._is_replicated)

    def _check_storage(self, engine: YourEngine, one: UnitOfYours) -> None:
        """Raises SpecError where the shard cannot be there without the whole parameters, or the other way round."""
        whole, kept = {storage_id(p) for p in one.unit.params}, {storage_id(t) for t in one.flats}
        if self._frees and whole & kept:
            raise engine.mistake("shard", one.unit, "", "returned a view of the whole parameters, whose memory would stay",
                                 "return a copy (clone) of this rank's part")  # fmt: skip
        if self._is_replicated and not whole <= kept:
            raise engine.mistake("shard", one.unit, "", "returned other memory than that of unit.params, which no_shard "
                                 "never gathers", "return unit.params")  # fmt: skip

    def _hooks_of(self, one: UnitOfYours) -> Iterator[Any]:
        """On the modules of a unit. See "Note: hooks and autograd" in fsdp_lab/engine/hooks.py."""
        first, last = one.modules[0], one.modules[-1]
        for module in one.modules:
            yield module.register_forward_pre_hook(
                lambda m, args, kwargs: self._before_forward(one, args, kwargs, watch=m is first),
                prepend=True, with_kwargs=True,
            )  # fmt: skip
            yield module.register_forward_hook(lambda m, _, output: self._after_forward(one, output, last=m is last))

    # -- a step -----------------------------------------------------------------------------------------------------

    def begin_step(self, step: int) -> bool:
        """Inspects the first steps."""
        self._engine.step = step
        self._begun += 1
        self._drop_whole_gradients()  # of a step that was given up
        self._inspects = self._engine.guards = self._begun <= _INSPECTED
        if not self._inspects:
            self._inspector = None  # with what it remembers
        return self._inspects

    @property
    def user_call(self) -> tuple[str, float] | None:
        return self._engine.call_in_progress

    @contextmanager
    def micro_batch(self, *, communicate: bool) -> Iterator[None]:
        if self._communicates and any(one.has_reduced for one in self._units):
            self._drop_whole_gradients()  # of the micro-batch before: they were sent
        self._communicates = communicate
        for one in self._units:
            one.has_reduced = False
        yield

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        inspects, self._inspects = self._inspects, False
        try:
            with super().evaluating():
                yield
        finally:
            self._inspects = inspects

    def _after_update(self) -> None:
        for one in self._units:
            if not self._is_replicated:
                one.held = HeldState.SHARD if one.held is HeldState.WHOLE else one.held
        self._drop_whole_gradients()

    def _drop_whole_gradients(self) -> None:
        for p in (p for one in self._units for p in one.unit.params):
            p.grad = None

    def _before_forward(self, one: UnitOfYours, args: Any, kwargs: Any, *, watch: bool) -> Any:
        if torch._C._current_graph_task_id() != -1:  # a recomputation, inside the backward
            self._gather(one, "backward")
            return None
        if one is self._root:
            self._reset()
        self._gather(one, "forward")
        if one is not self._root and watch:
            self._called.append(one)
        self._prefetch(self._next(one, self._order), "forward")
        if one is self._root or not watch or not torch.is_grad_enabled():
            return None
        inputs, views = view_inputs((args, kwargs))
        one.calls += 1  # one whose inputs need no gradient ends with the whole backward
        if views:
            torch.autograd.graph.register_multi_grad_hook(views, lambda _: self._after_call(one), mode="all")
        return inputs

    def _after_forward(self, one: UnitOfYours, output: Any, *, last: bool) -> None:
        if torch._C._current_graph_task_id() != -1:
            return
        trains = torch.is_grad_enabled()
        for t in tensors_in(output) if trains else ():
            if t.requires_grad:
                t.register_hook(lambda _: self._before_backward(one))  # type: ignore[no-untyped-call]
        if one is not self._root:
            if last and self._strategy.reshards_after_forward:
                self._free(one, "forward")
            return
        self._order, self._called = self._called or self._order, []
        for other in [] if trains else self._units:
            self._leave(other, "forward")

    def _before_backward(self, one: UnitOfYours) -> None:
        self._begin_backward()
        if not one.has_reduced:
            self._gather(one, "backward")
            self._prefetch(self._next(one, self._order[::-1]), "backward")

    def _begin_backward(self) -> None:
        if not self._in_backward:
            self._in_backward = True
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._end_backward)

    def _after_call(self, one: UnitOfYours) -> None:
        """The backward of one of its calls is over; autograd gives a parameter the gradients of all calls at once."""
        one.calls -= 1
        if one.calls == 0:
            self._after_backward(one)

    def _after_backward(self, one: UnitOfYours) -> None:
        """Its gradients have all come: reduce them, and free the unit."""
        if one.has_reduced:
            return
        one.has_reduced = True
        if self._communicates and one.unit.params:
            self._reduce(one)
        if self._frees:
            self._free(one, "backward")
            if self._inspects and self._communicates and self._inspector is not None:
                self._inspector.check_dropped(one.unit)

    def _end_backward(self) -> None:
        for one in reversed(self._units):
            self._after_backward(one)
            self._leave(one, "backward")
        ending, self._ending = self._ending, []
        for one, reduction, right in ending:
            with self._unit_scope(one):
                found = self._engine.end(reduction, one.unit)
            self._take_gradient(one, found, right)
        self._in_backward = False

    def _reset(self) -> None:
        """After a step that an exception ended."""
        self._in_backward, self._ending, self._called = False, [], []
        for one in self._units:
            one.calls = 0
            self._leave(one, "forward")

    # -- the engine's methods ---------------------------------------------------------------------------------------

    def _gather(self, one: UnitOfYours, during: str) -> None:
        if self._is_replicated or one.held is HeldState.WHOLE or not one.unit.params:
            return
        inspector = self._inspector if self._inspects else None
        right = None if inspector is None else inspector.whole(one.unit, one.flats)
        with self._unit_scope(one):
            self._engine.call("gather", one.unit, during)
        one.held = HeldState.WHOLE
        if inspector is not None and right is not None:
            inspector.check_gathered(one.unit, right, one.flats, during)

    def _prefetch(self, one: UnitOfYours | None, during: str) -> None:
        is_due = one is not None and one.held is HeldState.SHARD and not one.has_reduced and bool(one.unit.params)
        if one is not None and is_due and self._engine.prefetches and not self._is_replicated:
            with self._unit_scope(one):
                self._engine.call("prefetch", one.unit, during)
            one.held = HeldState.ASKED_FOR

    def _free(self, one: UnitOfYours, during: str) -> None:
        if one.held is not HeldState.WHOLE or not one.unit.params:
            return
        inspector = self._inspector if self._inspects else None
        before = {} if inspector is None else inspector.storages(one.unit)
        with self._unit_scope(one):
            self._engine.call("free", one.unit, during)
        one.held = HeldState.SHARD
        if inspector is not None:
            inspector.check_freed(one.unit, before, one.flats, during)

    def _leave(self, one: UnitOfYours, during: str) -> None:
        """Free a unit that nobody uses now; one that was asked for and not used is gathered before."""
        if self._frees:
            if one.held is HeldState.ASKED_FOR:
                self._gather(one, during)
            self._free(one, during)

    def _reduce(self, one: UnitOfYours) -> None:
        for p in one.unit.params:
            if p.grad is None:  # the loss does not depend on it
                p.grad = torch.zeros_like(p)
        inspector = self._inspector if self._inspects else None
        right = None if inspector is None else inspector.gradients(one.unit)
        with self._unit_scope(one):
            found = self._engine.call("reduce", one.unit, "backward")
        if callable(found) and not isinstance(found, Tensor):
            self._ending.append((one, found, right))
        else:
            self._take_gradient(one, found, right)

    def _take_gradient(self, one: UnitOfYours, returned: Any, right: Any) -> None:
        found = tensors_of(returned)
        if found is None or [t.numel() for t in found] != [t.numel() for t in one.flats]:
            given = kind_of_value(returned) if found is None else _told(found)
            what = f"returned {given}, and the shard is {_told(one.flats)}"
            hint = "return the gradient of what shard returned, as it is laid out"
            raise self._engine.mistake("reduce", one.unit, "backward", what, hint)
        flats = [t.contiguous().view(-1) for t in found]
        if self._inspects and self._inspector is not None and right is not None:
            self._inspector.check_reduced(one.unit, flats, right)
        for part, trained in one.trained:
            gradient = part.of(flats) if part.numel else torch.empty_like(trained)
            if trained.grad is None:
                trained.grad = gradient.clone() if self._several else gradient
            else:
                trained.grad += gradient

    def _unit_scope(self, one: UnitOfYours) -> AbstractContextManager[Any]:
        return nullcontext() if self._context is None else self._context.unit_scope(one.unit.name)

    @staticmethod
    def _next(one: UnitOfYours, order: Sequence[UnitOfYours]) -> UnitOfYours | None:
        at = order.index(one) + 1 if one in order else 0
        return order[at] if at < len(order) else None

    # -- what it holds ----------------------------------------------------------------------------------------------

    def unit_modules(self) -> list[tuple[str, nn.Module]]:
        return [(one.unit.name, m) for one in self._units if one is not self._root for m in one.modules]

    def transient_tensors(self) -> Iterator[RoleTensor]:
        for p in (p for one in self._units for p in one.unit.params):
            if p.untyped_storage().nbytes():
                yield Role.UNSHARDED, p.detach()
            if p.grad is not None:
                yield Role.GRADIENTS, p.grad

    def resident_bytes(self) -> int:
        """ZeRO-1's gathered parameters."""
        kept = {storage_id(s.local) for s in self.param_shards()}
        stays = not self._is_replicated and not self._frees
        return sum(p.nbytes for one in self._units if stays for p in one.unit.params if storage_id(p) not in kept)

    def retire(self, busy: Collection[int] = ()) -> None:
        self._drop_whole_gradients()
        super().retire(busy)

    def release(self, busy: Collection[int] = ()) -> None:
        for handle in self._handles:
            handle.remove()
        super().release(busy)
        free([t for one in self._units for t in one.flats], busy)
        self._units, self._order, self._called, self._ending, self._inspector = [], [], [], [], None


def _told(tensors: Sequence[Tensor]) -> str:
    """`a tensor of 1,296 elements`, `12 tensors of 15,984 elements in all`."""
    elements = f"{sum(t.numel() for t in tensors):,} elements"
    return f"a tensor of {elements}" if len(tensors) == 1 else f"{len(tensors)} tensors of {elements} in all"


def _by_parameter(one: UnitOfYours, by_rank: Sequence[Any]) -> dict[str, list[KeptPart]]:
    """What each rank keeps, from what they have told."""
    return {name: [KeptPart.of_row(layout[name]) for _, layout in by_rank] for name in one.parts}


def _parameters_of(
    modules: Sequence[nn.Module], names: dict[int, str], taken: set[int], make: Callable[[nn.Module], None]
) -> dict[str, nn.Parameter]:
    """Those of the modules that no unit before had, by name, with storage."""
    before = {id(p): p for m in modules for p in m.parameters() if id(p) in names and id(p) not in taken}
    taken.update(before)
    where = {names[i]: [(m, n) for top in modules for m in top.modules() for n, p in m._parameters.items() if id(p) == i]
             for i in before}  # fmt: skip
    for module in modules:
        module.apply(make)
    return {name: m._parameters[n] for name, ((m, n), *_) in where.items()}  # type: ignore[misc]
