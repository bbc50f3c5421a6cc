"""`shard`: the entry of the core, on which `fully_shard` (extras/dropin.py) is built, and what may be asked of a model."""

from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn

from fsdp_lab.engine.buffer import Entry, FlatBuffer, Use, sharded_form
from fsdp_lab.engine.collectives import ShardError
from fsdp_lab.engine.hooks import UnitHooks, not_sharded, unit_hooks
from fsdp_lab.engine.mesh import ShardMesh
from fsdp_lab.engine.policy import ModuleKind, ShardPolicy, kind_of, place_buffers
from fsdp_lab.engine.runtime import Runtime
from fsdp_lab.engine.unit import Unit

GroupOf = Callable[[str, nn.Parameter], Hashable]


def shard(
    modules: Sequence[nn.Module],
    mesh: ShardMesh,
    policy: ShardPolicy,
    *,
    ignored: Collection[int] = (),
    group_of: GroupOf = lambda name, parameter: "all",
    buffer: type[FlatBuffer] = FlatBuffer,
    adopt: Callable[[UnitHooks], Runtime] | None = None,
) -> Unit:
    """Make one unit of the parameters that no earlier call took: of inner modules first, of the root last.

    With the core's own `FlatBuffer`, parameters become plain ones of this rank's range [m]; an optimizer of
    `module.parameters()` made afterwards steps them. Their `.grad` is this rank's range of the mean over the ranks.

    Args:
        ignored: ids of parameters to leave alone.
        group_of: the optimizer group of a parameter, by its name in its module.
        buffer: the class of flat buffers.
        adopt: makes the runtime of a root; None: `adopt_units`."""
    inside = units_inside(modules)
    alike: dict[tuple[torch.dtype, torch.dtype, bool], list[Entry]] = {}  # one buffer each
    for t in take(modules, ignored):
        key = t.value.dtype, policy.gathered_dtype(t.value.dtype, t.kind), t.value.requires_grad
        alike.setdefault(key, []).append((t.value, t.uses, t.name, group_of(t.name, t.value)))
    flats = [buffer(some, mesh=mesh, policy=policy, dtype=dtype) for (_, dtype, _), some in alike.items()]
    unit = Unit(modules, flats, mesh, policy)
    unit.ignored = frozenset(ignored)
    place_buffers(modules, mesh.device, policy)
    hooks = UnitHooks(unit, adopt or adopt_units)
    for h in inside.values():
        h.outer = h.outer or hooks
    return unit


# -- what is in a model ----------------------------------------------------------------------------------------------


def units_of(module: nn.Module) -> list[Unit]:
    """The units of a module: its own first, the others in the order in which modules are defined."""
    hooks = unit_hooks(module)
    if hooks is not None and hooks.runtime is not None and module is hooks.runtime.root.modules[0]:
        return list(hooks.runtime.units)
    each = (unit_hooks(m) for m in module.modules())
    return list(dict.fromkeys(h.unit for h in each if h is not None))


def flats_of(module: nn.Module) -> list[FlatBuffer]:
    """The flat buffers of its units."""
    return [flat for unit in units_of(module) for flat in unit.flats]


def runtime_of(module: nn.Module) -> Runtime:
    """The runtime of a root. Raises ShardError for a module that is none."""
    hooks = unit_hooks(module)
    if hooks is None:
        raise not_sharded(module)
    return hooks.runtime if hooks.runtime is not None else hooks.adopt(hooks)


def runtimes_of(module: nn.Module) -> list[Runtime]:
    """One of each outermost sharded module, itself or inside it."""
    return list(dict.fromkeys(runtime_of(m) for m in module.modules() if unit_hooks(m) is not None))


@contextmanager
def no_sync(module: nn.Module) -> Iterator[None]:
    """A context in which backwards keep gradients of the module's units, and of those inside it, unsharded on this rank.

    The first backward after it reduces the sum. It is the backward that counts, not the forward."""
    runtime_of(module)
    before = {unit: unit.communicates for unit in units_of(module)}
    try:
        for unit in before:
            unit.communicates = False
        yield
    finally:
        for unit, communicates in before.items():
            unit.communicates = communicates


# -- making units ----------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Taken:
    """A parameter, its name in the module, and who holds it."""

    name: str
    value: nn.Parameter
    uses: list[Use] = field(default_factory=list)

    @property
    def kind(self) -> ModuleKind:
        kinds = {kind_of(module) for module, _ in self.uses}
        return kinds.pop() if len(kinds) == 1 else ModuleKind.PLAIN


def take(modules: Sequence[nn.Module], ignored: Collection[int]) -> list[Taken]:
    """The parameters that no earlier call took, each once: one that is shared belongs to one unit."""
    taken: dict[int, Taken] = {}
    for root in modules:
        inner = {id(p) for flat in flats_of(root) for p in flat.sharded}
        for path, module in root.named_modules():
            for attribute, p in module._parameters.items():
                if p is not None and id(p) not in ignored and id(p) not in inner:
                    name = f"{path}.{attribute}" if path else attribute
                    taken.setdefault(id(p), Taken(name, p)).uses.append((module, attribute))
    return list(taken.values())


def units_inside(modules: Sequence[nn.Module]) -> dict[Unit, UnitHooks]:
    """The units below. Raises ShardError where `modules` are units already, or an inner one is at work as a root."""
    for root in modules:
        if unit_hooks(root) is not None:
            raise ShardError(f"{type(root).__name__} is sharded already; call fully_shard once for each module")
    inside = {h.unit: h for root in modules for h in map(unit_hooks, root.modules()) if h is not None}
    for unit, hooks in inside.items():
        inner, outer = type(unit.modules[0]).__name__, type(modules[0]).__name__
        if hooks.outer is not None and hooks.outer.unit not in inside:
            other = type(hooks.outer.unit.modules[0]).__name__
            raise ShardError(f"{inner} is in {other} too, which was sharded around it, and a unit has one root; shard a "
                             "module around both, or give each an inner one of its own")  # fmt: skip
        if hooks.runtime is not None:
            raise ShardError(f"{inner} was called before {outer}, which contains it, was sharded; shard {outer} first")
    return inside


def adopt_units(hooks: UnitHooks) -> Runtime:
    """The outermost unit around the first one to be called, or asked, is the root of all units inside it."""
    while hooks.outer is not None:
        hooks = hooks.outer
    root = hooks.unit.modules[0]
    inside = {h.unit: h for h in map(unit_hooks, root.modules()) if h is not None}
    runtime = Runtime(hooks.unit, list(inside))
    names = {module: name for name, module in root.named_modules()}
    for unit, h in inside.items():
        h.runtime, unit.name = runtime, names[unit.modules[0]]
    for name, p in root.named_parameters():
        if (sharded := sharded_form(p)) is not None:
            sharded.flat.names[sharded.number] = name
    return runtime
