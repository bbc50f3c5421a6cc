"""What optimizers step in place of parameters that were gathered, and what is refused to them: to step the same values
twice, what came into a model after it was sharded, and what the model had before.

A parameter lies in a region too, and both show the same gradients (parameters.py). Nothing tells an optimizer what another
one, or another of its own groups, was given, so torch's hooks around any optimizer's step look at both.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterator
from functools import partial
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fsdp_lab.base.tensors import LeafOfSharded
from fsdp_lab.engine.buffer import sharded_form
from fsdp_lab.engine.collectives import ShardError
from fsdp_lab.engine.extras.dtensor import FlatDTensor
from fsdp_lab.engine.extras.parameters import Region, ShardedParameter
from fsdp_lab.engine.runtime import Runtime

Place = tuple[Any, Hashable]  # the `GradientBuffer`, and a group in it


def watch_steps(runtime: Runtime) -> None:
    """Watches the steps of optimizers, as long as the runtime is alive."""
    before = partial(_before_step, weakref.ref(runtime))
    for handle in (register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(_after_step)):
        weakref.finalize(runtime, handle.remove)


def _before_step(watched: weakref.ref[Runtime], optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    _give_sharded(optimizer)
    _check_once(optimizer)
    runtime = watched()
    plain = {id(p) for options in optimizer.param_groups for p in options["params"] if not isinstance(p, FlatDTensor)}
    if runtime is not None and plain:
        _check_sharded(runtime, plain)


def _give_sharded(optimizer: Optimizer) -> None:
    """Gives an optimizer that was made between a forward and its backward the shards in place of what modules held then."""
    for options in optimizer.param_groups:
        taken = options["params"]
        for i, p in enumerate(taken):
            if isinstance(p, LeafOfSharded):
                taken[i] = p.sharded
                if p in optimizer.state:
                    optimizer.state[p.sharded] = optimizer.state.pop(p)


def _check_sharded(runtime: Runtime, plain: set[int]) -> None:
    """Raises ShardError where parameters with these ids were in the model, and would not be stepped; or came into it since,
    and each rank would train its own."""
    for flat in (flat for unit in runtime.units for flat in unit.flats):
        for name, p in zip(flat.names, flat.originals, strict=True):
            if id(p) in plain:
                raise ShardError(
                    f"{name} was sharded, and this is the parameter that the model had before; make the optimizer, and "
                    "other references to parameters, after fully_shard, from model.parameters()"
                )
    ignored = frozenset[int]().union(*(unit.ignored for unit in runtime.units))
    for name, p in (named for module in runtime.root.modules for named in module.named_parameters()):
        if id(p) in plain and id(p) not in ignored and sharded_form(p) is None:
            raise ShardError(
                f"{name} came into the model after it was sharded, so each rank would train one of its own; put it there "
                "before fully_shard, or pass it in ignored_params and reduce its gradient"
            )


def _check_once(optimizer: Optimizer) -> None:
    """Raises ShardError where an optimizer would step values as parameters and as regions, or another one has stepped them
    by the same gradients."""
    forms: dict[Place, type] = {}
    for (gradients, group), form, name in _given(optimizer):
        stepped = gradients.stepped_as.get(group, form)
        if form is not forms.setdefault((gradients, group), form) or form is not stepped:
            raise ShardError(
                f"{name} and others would be stepped twice, in model.parameters() and in sharded_parameters(model), which "
                "are the same values; give optimizers one of the two"
            )


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for gradients, group, form in {(*place, form) for place, form, _ in _given(optimizer)}:
        slots = gradients.layout.slots
        if any(gradients.has_gradient(i) for i, slot in enumerate(slots) if slot.group == group):
            gradients.stepped_as[group] = form


def _given(optimizer: Optimizer) -> Iterator[tuple[Place, type, str]]:
    """Yields, of each tensor of an optimizer, its place, the class of what was given, and a name."""
    for p in (p for options in optimizer.param_groups for p in options["params"]):
        if isinstance(p, Region):
            yield (p.gradients, p.group), Region, p.gradients.names[0]
        elif isinstance(p, ShardedParameter):
            yield (p.flat.gradients, p.slot.group), ShardedParameter, p.fqn
