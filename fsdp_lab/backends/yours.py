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

`shard` returns part number `rank` of the unit's parameters, joined flat and padded with zeros to a multiple of `world_size`:
a copy, in one tensor. Or it does so with each parameter, and returns a list or dict of them. With no_shard it returns
`unit.params`.

The root's unit, what is in no other unit, is gathered from the begin of the forward to the end of the backward. `prefetch`
gets the unit that is next in the model's definition, before the one at hand computes. `reduce` may return a function in
place of the gradient, which returns it and is called at the end of the backward, so that a reduction can run beside the
backward. Whole gradients that it leaves in p.grad are dropped after the optimizer's step. In micro-batches that do not
communicate, autograd adds to p.grad, and `reduce` is not called.

The first two steps are inspected: whole parameters are compared with the shards of all ranks, as the optimizer left them,
and gradients with the mean of what autograd gave on each rank. Both take collectives, so these steps are slower, and do
not count."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed as dist, nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_lab.backends import base
from fsdp_lab.backends.base import Backend, DeferredStorage, RoleTensor, free, storage_id
from fsdp_lab.backends.state import together
from fsdp_lab.backends.wrapping import context_of, named_units, prepare
from fsdp_lab.backends.your_engine import YourEngine, YourUnit, take_shard, tensors_of, told
from fsdp_lab.base.events import ROOT, Role
from fsdp_lab.base.formatting import size
from fsdp_lab.base.tensors import tensors_in, view_inputs
from fsdp_lab.engine import ParamShard
from fsdp_lab.models.wrapping import units
from fsdp_lab.spec.spec import Spec

_INSPECTED = 2  # steps: what is stale shows in the second


class _Unit:
    """A unit on this rank, with what the lab knows of it, and not the engine: the tensors that the rank keeps (`flats`), by
    tensor the ranges of parameters in it (`kept`), and what the optimizer trains of each parameter (`trained`). `calls`: in
    a forward, whose backward is not over. `has_reduced`: in this backward."""

    def __init__(self, unit: YourUnit, modules: Sequence[nn.Module]) -> None:
        self.unit, self.modules = unit, modules
        self.sizes = [p.numel() for p in unit.params]
        self.flats: list[Tensor] = []
        self.kept: list[list[range]] = []
        self.trained: list[nn.Parameter] = []
        self.is_whole = self.is_asked_for = self.has_reduced = False
        self.calls = 0

    def parts(self, flats: Sequence[Tensor]) -> Iterator[tuple[range, Tensor]]:
        """Yields what is in tensors like those that the rank keeps: of each parameter the range, and a view."""
        for t, ranges in zip(flats, self.kept, strict=True):
            sizes = [len(part) for part in ranges]
            yield from zip(ranges, torch.split(t[: sum(sizes)], sizes), strict=True)

    def shards(self) -> Iterator[ParamShard]:
        """Yields what the optimizer trains, while the storage of `flats` exists."""
        for name, p, (part, local) in zip(self.unit.names, self.unit.params, self.parts(self.flats), strict=True):
            self.trained.append(nn.Parameter(local, requires_grad=p.requires_grad))
            yield base.shard_at(name, self.trained[-1], p.shape, part.start, local)

    def whole(self) -> Sequence[Tensor]:
        """The parameters, flat, as the shards of all ranks have them. Collective."""
        right = torch.zeros(sum(self.sizes), device=self.flats[0].device)
        wholes = torch.split(right, self.sizes)
        for whole, (part, local) in zip(wholes, self.parts(self.flats), strict=True):
            whole[part.start : part.stop] = local
        dist.all_reduce(right)  # zeros are added: exact
        return wholes

    def gradients(self) -> list[tuple[Tensor, Tensor]]:
        """What autograd gave for each parameter, flat: on this rank, and the mean over ranks. Collective."""
        own = torch.cat([p.grad.reshape(-1) for p in self.unit.params if p.grad is not None])
        mean = own.clone()
        dist.all_reduce(mean)
        return list(zip(*(torch.split(t, self.sizes) for t in (own, mean / self.unit.world_size)), strict=True))


class Yours(Backend):
    has_user_code = True

    def __init__(self, skeleton: nn.Module, spec: Spec, mesh: DeviceMesh, device: torch.device) -> None:
        self._strategy, self._several = spec.strategy, spec.communications > 1
        self._is_replicated = spec.strategy.is_replicated
        self._frees = not self._is_replicated and not spec.strategy.shards_optimizer_only  # after the backward
        needed = ["shard", *["gather"] * (not self._is_replicated), *["free"] * self._frees, "reduce"]
        self._context = context_of(mesh)
        self._engine = together(lambda: YourEngine(spec.strategy, needed, self._context))
        self._inspects, self._begun = False, 0  # this step; how many steps have begun
        self._communicates, self._in_backward = True, False
        self._ending: list[tuple[_Unit, Callable[[], Any], Any]] = []  # reductions in flight
        self._units: list[_Unit] = []
        names = [base.original_name(name) for name, _ in skeleton.named_parameters()]
        deferred = DeferredStorage()
        shards = {s.name: s for s in self._sharded(skeleton, device, deferred)}
        self._root = self._units[-1]
        base.place_buffers(skeleton, device, spec.strategy.dtypes)
        super().__init__(skeleton, [shards[name] for name in names], deferred, spec, mesh, device)
        self._handles = [handle for one in self._units for handle in self._hooks_of(one)]
        self.optimizer.register_step_post_hook(lambda *_: self._after_update())

    # -- building ---------------------------------------------------------------------------------------------------

    def _sharded(self, skeleton: nn.Module, device: torch.device, deferred: DeferredStorage) -> Iterator[ParamShard]:
        """Let the engine shard unit by unit, each of which is freed before the next exists."""
        groups = named_units(skeleton, units(skeleton, self._strategy.wrap))
        outer = prepare(skeleton, self._strategy)
        made: list[nn.Parameter] = []
        make = base.materialiser(device, made.append)
        for name, modules in (*groups.items(), (ROOT, [skeleton])):
            made.clear()
            for module in modules:
                module.apply(make)
            new = set(map(id, made))
            named = {base.original_name(n): p for n, p in skeleton.named_parameters() if id(p) in new}
            one = _Unit(YourUnit(name, named), [outer(m) for m in modules])
            if named:
                together(partial(self._shard, one))
                yield from one.shards()
                whole = [p.detach() for p in named.values()]
                for t in {storage_id(t): t for t in one.flats}.values():
                    deferred.defer(t, *whole)
                    whole = []
            if named or name == ROOT:
                self._units.append(one)

    def _shard(self, one: _Unit) -> None:
        one.flats, one.kept = take_shard(self._engine, one.unit, replicated=self._is_replicated)
        if self._frees:
            with self._freeing(one, ""):
                self._engine.call("free", one.unit)

    def _hooks_of(self, one: _Unit) -> Iterator[Any]:
        """Yields the handles of a unit's hooks. See "Note: hooks and autograd" in fsdp_lab/engine/hooks.py."""
        first, last = one.modules[0], one.modules[-1]
        for module in one.modules:
            before = lambda m, args, kwargs: self._before_forward(one, args, kwargs, watch=m is first)  # noqa: E731
            yield module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
            yield module.register_forward_hook(lambda m, _, output: self._after_forward(one, output, last=m is last))

    # -- a step -----------------------------------------------------------------------------------------------------

    def begin_step(self, step: int) -> bool:
        """Inspects the first steps."""
        self._engine.step = step
        self._begun += 1
        self._drop_whole_gradients()  # of a step that was given up
        self._inspects = self._engine.guards = self._begun <= _INSPECTED
        return self._inspects

    @property
    def user_call(self) -> tuple[str, float] | None:
        return self._engine.in_progress

    @contextmanager
    def micro_batch(self, *, communicate: bool) -> Iterator[None]:
        if self._communicates:
            self._drop_whole_gradients()  # of the micro-batch before: they were sent
        self._communicates, self._in_backward, self._ending = communicate, False, []
        for one in self._units:
            one.has_reduced, one.calls = False, 0
        yield

    def _after_update(self) -> None:
        for one in self._units:
            one.is_whole = False
        self._drop_whole_gradients()

    def _drop_whole_gradients(self) -> None:
        for p in (p for one in self._units for p in one.unit.params):
            p.grad = None

    def _before_forward(self, one: _Unit, args: Any, kwargs: Any, *, watch: bool) -> Any:
        if torch._C._current_graph_task_id() != -1:  # a recomputation, inside the backward
            self._gather(one, "backward")
            return None
        self._gather(one, "forward")
        self._prefetch(one, self._units[:-1], "forward")
        if one is self._root or not watch or not torch.is_grad_enabled():
            return None
        inputs, views = view_inputs((args, kwargs))
        one.calls += 1  # one whose inputs need no gradient ends with the whole backward
        if views:
            torch.autograd.graph.register_multi_grad_hook(views, lambda _: self._after_call(one), mode="all")
        return inputs

    def _after_forward(self, one: _Unit, output: Any, *, last: bool) -> None:
        if torch._C._current_graph_task_id() != -1:
            return
        trains = torch.is_grad_enabled()
        for t in tensors_in(output) if trains else ():
            if t.requires_grad:
                t.register_hook(lambda _: self._before_backward(one))  # type: ignore[no-untyped-call]
        if one is self._root and not trains:
            self._free_all("forward")
        elif one is not self._root and last and self._strategy.reshards_after_forward:
            self._free(one, "forward")

    def _before_backward(self, one: _Unit) -> None:
        if not self._in_backward:
            self._in_backward = True
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._end_backward)
        if not one.has_reduced:
            self._gather(one, "backward")
            self._prefetch(one, self._units[-2::-1], "backward")

    def _after_call(self, one: _Unit) -> None:
        """The backward of one of its calls is over; autograd gives a parameter the gradients of all calls at once."""
        one.calls -= 1
        if one.calls == 0:
            self._after_backward(one)

    def _after_backward(self, one: _Unit) -> None:
        """Reduces its gradients, which have all come, and frees the unit."""
        if one.has_reduced:
            return
        one.has_reduced = True
        if self._communicates and one.unit.params:
            self._reduce(one)
        if self._frees:
            self._free(one, "backward")
            held = [(n, p.grad) for n, p in zip(one.unit.names, one.unit.params, strict=True) if p.grad is not None]
            if held and self._inspects and self._communicates:
                name, gradient = held[0]
                what = f"never frees the whole gradient of {name}, {size(gradient.nbytes)}"
                raise self._engine.mistake("reduce", one.unit, "backward", what, "set p.grad = None once it is sent")

    def _end_backward(self) -> None:
        for one in reversed(self._units):
            self._after_backward(one)
        self._free_all("backward")
        for one, reduction, right in self._ending:
            self._take_gradient(one, self._engine.call("reduce", one.unit, "backward", reduction), right)
        self._ending, self._in_backward = [], False

    # -- the engine's methods ---------------------------------------------------------------------------------------

    def _gather(self, one: _Unit, during: str) -> None:
        if self._is_replicated or one.is_whole or not one.unit.params:
            return
        with self._gathering(one, during) if self._inspects else nullcontext():
            self._engine.call("gather", one.unit, during)
            one.is_whole, one.is_asked_for = True, False

    def _prefetch(self, one: _Unit, order: Sequence[_Unit], during: str) -> None:
        following = order[order.index(one) + 1 :] if one in order else order
        if not following or not self._engine.prefetches or self._is_replicated:
            return
        there = following[0]
        if not (there.is_whole or there.is_asked_for or there.has_reduced):
            self._engine.call("prefetch", there.unit, during)
            there.is_asked_for = True

    def _free(self, one: _Unit, during: str) -> None:
        if one.is_whole and one.unit.params:
            with self._freeing(one, during) if self._inspects else nullcontext():
                self._engine.call("free", one.unit, during)
                one.is_whole = False

    def _free_all(self, during: str) -> None:
        """Free what nobody uses now; what was asked for and not used is gathered before."""
        for one in self._units if self._frees else ():
            if one.is_asked_for:
                self._gather(one, during)
            self._free(one, during)

    def _reduce(self, one: _Unit) -> None:
        for p in one.unit.params:
            if p.grad is None:  # the loss does not depend on it
                p.grad = torch.zeros_like(p)
        right = one.gradients() if self._inspects else []
        returned = self._engine.call("reduce", one.unit, "backward")
        if callable(returned) and not isinstance(returned, Tensor):
            self._ending.append((one, returned, right))
        else:
            self._take_gradient(one, returned, right)

    def _take_gradient(self, one: _Unit, returned: Any, right: Sequence[tuple[Tensor, Tensor]]) -> None:
        tensors = tensors_of(returned)
        if tensors is None or [t.numel() for t in tensors] != [t.numel() for t in one.flats]:
            what = f"returned {told(returned)}, and the shard is {told(one.flats)}"
            hint = "return the gradient of what shard returned, as it is laid out"
            raise self._engine.mistake("reduce", one.unit, "backward", what, hint)
        flats = [t.contiguous().view(-1) for t in tensors]
        if right:
            self._check_gradients(one, flats, right)
        for trained, (_, gradient) in zip(one.trained, one.parts(flats), strict=True):
            if not trained.requires_grad:
                continue
            if trained.grad is None:
                trained.grad = gradient.clone() if self._several else gradient
            else:
                trained.grad += gradient

    # -- the inspection ---------------------------------------------------------------------------------------------

    @contextmanager
    def _gathering(self, one: _Unit, during: str) -> Iterator[None]:
        """The context of a call of `gather`. Collective."""
        unit, wrong = one.unit, partial(self._engine.mistake, "gather", one.unit, during)
        right = one.whole()
        before = [p.detach().reshape(-1).clone() if _has_memory(p) else None for p in unit.params]
        yield
        if kind := self._in_flight(unit):
            late = f"has not waited for its {kind}, so the values come too late"
            raise wrong(late, "call wait() on what it returned")
        kept = one.parts(one.flats)
        for name, p, whole, was, (part, local) in zip(unit.names, unit.params, right, before, kept, strict=True):
            if not _has_memory(p):
                hint = "give its storage its size back, and copy the gathered values into it"
                raise wrong(f"leaves {name} without memory", hint)
            if not torch.equal(local, whole[part.start : part.stop]):
                raise wrong(f"changes this rank's shard of {name}", "gather into other memory than the shard's")
            values = p.detach().reshape(-1)
            if torch.equal(values, whole):
                continue
            first = int(torch.nonzero(values != whole)[0])
            what = f"element {first:,} is the first that differs from the ranks' shards"
            hint = "copy the parts of all ranks into it, in the order of ranks, without padding"
            if was is not None and torch.equal(values, was):
                what, hint = "it is stale, as of before the call", "gather again after every step of the optimizer"
            raise wrong(f"makes {name} wrong: {what}", hint)

    def _in_flight(self, unit: YourUnit) -> str:
        """The kind of the unit's last all-gather, if nobody waited for it; else ""."""
        recent = self._context.recent_issues() if self._context is not None and unit.params[0].is_cpu else []
        own = (c for c in reversed(recent) if c.unit == unit.name and "gather" in c.kind)
        return next((c.kind for c in own if not c.waits and not c.by_future), "")

    @contextmanager
    def _freeing(self, one: _Unit, during: str) -> Iterator[None]:
        """The context of a call of `free`."""
        unit, wrong = one.unit, partial(self._engine.mistake, "free", one.unit, during)
        before = [(name, storage_id(p), p.untyped_storage()) for name, p in zip(unit.names, unit.params, strict=True)]
        yield
        if any(t.numel() and not t.untyped_storage().nbytes() for t in one.flats):
            raise wrong("frees this rank's shard too", "let shard return a copy (clone) of its part")
        for (name, key, storage), p in zip(before, unit.params, strict=True):
            held = size(storage.nbytes())
            if key != storage_id(p):
                what = f"replaces the data of {name}, whose {held} are held by what autograd saved"
                hint = "do not replace p.data, but empty the parameter's storage: p.untyped_storage().resize_(0)"
                raise wrong(what, hint)
            if storage.nbytes():
                hint = "empty its storage: p.untyped_storage().resize_(0)"
                raise wrong(f"never frees {name}: its {held} are still there", hint)

    def _check_gradients(self, one: _Unit, flats: Sequence[Tensor], right: Sequence[tuple[Tensor, Tensor]]) -> None:
        """`right`: what `_Unit.gradients` returned before."""
        n = one.unit.world_size
        for name, (own, mean), (part, found) in zip(one.unit.names, right, one.parts(flats), strict=True):
            kept, near = slice(part.start, part.stop), partial(torch.allclose, found, rtol=1e-4, equal_nan=True)
            off = 1e-5 * float(mean.abs().max()) if mean.numel() else 0.0
            if near(mean[kept], atol=off):
                continue
            what, hint = "is not the mean over ranks", "sum p.grad, divide by unit.world_size, and keep your part"
            if near(mean[kept] * n, atol=off):
                what, hint = "is the sum over ranks, not the mean", "divide it by unit.world_size"
            elif near(own[kept], atol=off):
                what, hint = "is this rank's own, unreduced", "sum it over all ranks, and divide by unit.world_size"
            raise self._engine.mistake("reduce", one.unit, "backward", f"gives {name} a gradient that {what}", hint)

    # -- what it holds ----------------------------------------------------------------------------------------------

    def unit_modules(self) -> list[tuple[str, nn.Module]]:
        return [(one.unit.name, m) for one in self._units[:-1] for m in one.modules]

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

    def release(self, busy: Collection[int] = ()) -> None:
        for handle in self._handles:
            handle.remove()
        super().release(busy)
        free([t for one in self._units for t in one.flats], busy)
        self._units, self._ending = [], []


def _has_memory(p: Tensor) -> bool:
    return p.untyped_storage().nbytes() >= p.numel() * p.element_size()
