"""The hooks that a unit's modules and tensors carry: they report to the runtime where the model has arrived.

Note: hooks and autograd. Three hooks on tensors are enough. Before a module's forward its inputs pass through views of
themselves; a hook on such a view runs when its gradient is complete, which is when the backward of everything inside the
module is over, and not, as a hook on the input itself would, when that of every other user of the input is. A hook on the
module's outputs runs before its backward. A parameter's gradient is taken by a hook of autograd's accumulation node. These
nodes run as soon as they can, before any hook on a view, so a unit's gradients are complete when its backward is reported as
over; what comes later all the same (a parameter used again outside) is reduced at the end of the backward. The hooks of a
pass hold its `Pass`; when the graph is freed without a backward, so are they.

torch.compile is kept out of the hooks: what they do must happen at every call, so a compiled module calls them, and its
graph begins after the first and ends before the second."""

import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_lab.base.tensors import cast, hiding_in, move, take_gradient, tensors_in, view_inputs
from fsdp_lab.engine.buffer import Gradients
from fsdp_lab.engine.collectives import ShardError
from fsdp_lab.engine.policy import cast_around_norms
from fsdp_lab.engine.runtime import Pass, Runtime
from fsdp_lab.engine.unit import Unit

_STATE = "_fsdp_lab_hooks"  # the attribute of a sharded module that holds its `UnitHooks`


class UnitHooks:
    """Installed on a unit's modules. Found again on a module by `unit_hooks`."""

    def __init__(self, unit: Unit, adopt: "Callable[[UnitHooks], Runtime]") -> None:
        self.unit = unit
        self.runtime: Runtime | None = None
        self.outer: UnitHooks | None = None  # of the next module around it that was sharded
        self.adopt = adopt
        self._handles: list[Any] = []
        # Of each call under way: the exception that was being handled when it began, and what the runtime calls it.
        self._calls: list[tuple[BaseException | None, tuple[Pass, int] | None]] = []
        self.install()

    def install(self) -> None:
        """Put the hooks on; again, when the unit's buffers were made anew."""
        self.remove()
        disable: Any = torch.compiler.disable
        before, after = disable(self.before_forward), disable(self.after_forward)
        for module in self.unit.modules:
            module.__dict__[_STATE] = self
            self._handles.append(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
            self._handles.append(module.register_forward_hook(after, always_call=True))
        for flat in self.unit.flats:
            for i, p in enumerate(flat.parameters):
                if p.is_floating_point() or p.is_complex():
                    self._handles.append(self._watch_gradient(weakref.ref(self), flat.gradients, i, p))
        holders = {use[0]: None for flat in self.unit.flats for uses in flat.uses for use in uses}
        self._handles += cast_around_norms(holders, self.unit.policy)

    def remove(self) -> None:
        """Take all hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        for module in self.unit.modules:
            module.__dict__.pop(_STATE, None)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Called by a module's deepcopy. Raises ShardError: most of it is on other ranks."""
        name = self.unit.name or type(self.unit.modules[0]).__name__
        raise ShardError(
            f"{name} is sharded, and cannot be copied or pickled; copy it before fully_shard, or take the values from "
            "full_state(model)"
        )

    def before_forward(self, module: nn.Module, args: Any, kwargs: Any, *, method: bool = False) -> tuple[Any, Any]:
        """`method`: it is not `forward` that is called."""
        self._calls.append((sys.exception(), None))
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise ShardError("torch.func transforms, as grad or vmap, of a sharded model are not supported, since they wrap "
                             "what is gathered; use torch.autograd.grad and its like")  # fmt: skip
        runtime = self.runtime if self.runtime is not None else self.adopt(self)
        current, k = runtime.before_forward(self.unit, method=method)
        self._calls[-1] = self._calls[-1][0], (current, k)
        mp, device = self.unit.policy.mp, self.unit.mesh.device
        inputs = args, kwargs
        if k == 0 and device.type != "cpu":
            inputs = move(inputs, device)
        if mp.cast_forward_inputs:
            inputs = cast(inputs, mp.param_dtype)
        if torch.is_grad_enabled() and self.unit is not runtime.root:
            inputs = self._watch_inputs(runtime, current, k, inputs)
        return inputs

    def after_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Called after an exception too, in the forward or in a hook of somebody else."""
        before, call = self._calls.pop() if self._calls else (None, None)
        if self.runtime is None or call is None:
            return None
        current, k = call
        try:
            if sys.exception() is not before:
                return None
            output = cast(output, self.unit.policy.mp.output_dtype)
            watched = torch.is_grad_enabled() and self._watch_outputs(self.runtime, current, k, output)
            self.runtime.after_forward(self.unit, current, k, has_graph=watched)
            return output
        finally:
            self.runtime.close(current, k)

    def call(self, method: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        """A method of a module, with what goes before and after its forward."""
        output = None
        try:
            args, kwargs = self.before_forward(module, args, kwargs, method=True)
            output = method(*args, **kwargs)
        finally:  # after an exception too
            output = self.after_forward(module, args, output)
        return output

    def _watch_inputs(self, runtime: Runtime, current: Pass, k: int, inputs: Any) -> Any:
        inputs, views = view_inputs(inputs)
        unit = self.unit
        if len(views) == 1:
            views[0].register_hook(lambda _: runtime.after_backward(unit, current, k))  # type: ignore[no-untyped-call]
        elif views:
            torch.autograd.graph.register_multi_grad_hook(views, lambda _: runtime.after_backward(unit, current, k))
        return inputs

    def _watch_outputs(self, runtime: Runtime, current: Pass, k: int, output: Any) -> bool:
        """Returns whether any output has a graph."""

        def arrived(_: Any) -> None:
            runtime.before_backward(self.unit, current, k)

        watched = [t for t in tensors_in(output) if t.requires_grad]
        for t in watched:
            t.register_hook(arrived)  # type: ignore[no-untyped-call]
            if t._base is not None and t._base.grad_fn is not None:
                t._base.grad_fn.register_prehook(arrived)
        hiding = None if watched or self.unit is runtime.root else hiding_in(output)
        if hiding is not None:
            raise ShardError(
                f"{self.unit.name} returned a {type(hiding).__name__}, in which tensors are not found, so that its backward "
                "could not be seen; return tensors, or tuples, lists, dicts or dataclasses of them"
            )
        return bool(watched)

    @staticmethod
    def _watch_gradient(own: "weakref.ref[UnitHooks]", gradients: Gradients, i: int, p: nn.Parameter) -> Any:
        """Watches a parameter's gradient, also of a frozen one: it may be trained later. The garbage collector does not see
        what a hook holds, so it holds nothing that holds the parameter."""

        def take(p: Tensor) -> None:
            hooks = own()
            if hooks is not None:
                if hooks.runtime is not None and not gradients.pieces:  # the first one of this backward
                    hooks.runtime.before_gradient(hooks.unit, gradients.names[i])
                gradients.receive(i, take_gradient(p))

        trained = p.requires_grad
        watch: Any = p.requires_grad_().register_post_accumulate_grad_hook
        handle = watch(take)
        p.requires_grad_(trained)
        return handle


def unit_hooks(module: nn.Module) -> UnitHooks | None:
    """The hooks of the unit that a module was sharded as, or None. Wrappers forward attributes, so only its own count.
    Raises ShardError for what is no module, such as a list of parameters."""
    if not isinstance(module, nn.Module):
        kind = type(module).__name__
        raise ShardError(f"a {kind} was given where a module is needed; give the module that was sharded")
    hooks: UnitHooks | None = module.__dict__.get(_STATE)
    return hooks


def not_sharded(module: nn.Module) -> ShardError:
    return ShardError(f"{type(module).__name__} is not sharded; call fully_shard(module) first")
