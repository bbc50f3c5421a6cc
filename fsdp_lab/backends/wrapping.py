"""What happens to a model around its wrapping: recompute and compile before, unit names for the wire after.

Our engine names its units itself. torch's wrappers are identified by their own objects, one per unit: the methods that issue
its collectives are wrapped, on that object only. If a release renames these private methods, units stay nameless."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ContextDecorator, contextmanager
from typing import Any

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh

from fsdp_lab.base.events import ROOT
from fsdp_lab.engine import runtimes_of
from fsdp_lab.engine.schedule import Phase
from fsdp_lab.models.wrapping import blocks
from fsdp_lab.spec.spec import Strategy
from fsdp_lab.wire import Wire, WireContext


def prepare(model: nn.Module, strategy: Strategy) -> Callable[[nn.Module], nn.Module]:
    """Apply `Strategy.recompute` and `Strategy.compile`, block by block, before a backend wraps the model. Returns:
    module -> the module in its place: its checkpoint wrapper, or itself."""
    if strategy.compile:
        for block in blocks(model):
            block.compile()
    wrappers: dict[int, nn.Module] = {}
    _replace(model, {id(b) for b in recomputed(model, strategy)}, wrappers)
    return lambda module: wrappers.get(id(module), module)


def recomputed(model: nn.Module, strategy: Strategy) -> list[nn.Module]:
    """The blocks whose activations are recomputed in the backward, in forward order."""
    each = int(strategy.recompute.partition(":")[2] or 1)
    return [] if strategy.recompute == "none" else blocks(model)[::each]


def _replace(module: nn.Module, chosen: set[int], wrappers: dict[int, nn.Module]) -> None:
    for name, child in list(module.named_children()):
        if id(child) in chosen:
            wrappers[id(child)] = checkpoint_wrapper(child, checkpoint_impl=CheckpointImpl.NO_REENTRANT)
            setattr(module, name, wrappers[id(child)])
        else:
            _replace(child, chosen, wrappers)


def named_units(model: nn.Module, groups: Sequence[Sequence[nn.Module]]) -> dict[str, Sequence[nn.Module]]:
    """Each unit by the name of its first module in `model`; call it before anything is wrapped."""
    names = {module: name for name, module in model.named_modules()}
    return {names[group[0]] or ROOT: group for group in groups}


def context_of(mesh: DeviceMesh) -> WireContext | None:
    """The context of the mesh's groups; None for plain groups of torch's."""
    group = mesh.get_all_groups()[0]
    return group.context if isinstance(group, Wire) else None


def name_flat_units(root: nn.Module, context: WireContext | None) -> None:
    """Our engine reports each phase with its unit, whose name begins at the outermost sharded module."""
    if context is None:
        return

    def naming(prefix: str) -> Callable[[Phase, str], AbstractContextManager[None]]:
        @contextmanager
        def around(phase: Phase, unit: str) -> Iterator[None]:
            name, start_s = ".".join(filter(None, (prefix, unit))) or ROOT, time.perf_counter()
            with context.unit_scope(name):
                yield
            if phase is Phase.HOST_COPY:
                context.meter.copied(name, start_s, time.perf_counter())

        return around

    names = {module: name for name, module in root.named_modules()}
    for runtime in runtimes_of(root):
        runtime.around = naming(names.get(runtime.root.modules[0], ""))


def name_fsdp2_unit(name: str, groups: Iterable[Any], context: WireContext | None) -> None:
    """A unit's parameter groups gather in `unshard` and reduce in `post_backward`."""
    if context is not None:
        for group in groups:
            _wrap(group, "unshard", context.unit_scope(name))
            _wrap(group, "post_backward", context.unit_scope(name))


def name_fsdp1_unit(name: str, handle: Any, context: WireContext | None) -> None:
    """A flat parameter gathers in `unshard`; its reduction follows its `reshard`, and its end is not visible."""
    if context is not None:
        _wrap(handle, "unshard", context.unit_scope(name))
        _wrap(handle, "reshard", _set_unit_after(context, name))


def _wrap(owner: Any, method: str, around: ContextDecorator) -> None:
    vars(owner).pop(method, None)  # of an earlier wire
    if hasattr(owner, method):
        setattr(owner, method, around(getattr(owner, method)))


@contextmanager
def _set_unit_after(context: WireContext, name: str) -> Iterator[None]:
    try:
        yield
    finally:
        context.set_unit(name)
