"""The state of a sharded model and of its optimizer, by the parameters' original names; and deferred initialisation.

A rank's shards as they are (`shards_of`), and whole tensors, one parameter at a time (`full_state`), so that no rank ever
holds a whole model that it did not ask for. Whole tensors can be loaded into any other world size, strategy or backend.

A model may be built on meta and sharded before it has values (arXiv 2304.11277, section 3.1). They come from
`load_full_state`, also from a function of names, from torch's `set_model_state_dict`, or from `module.to_empty` and the
modules' own initialisation, which writes to the sharded tensors; what was never given a value reads as NaN. Buffers are not
sharded; the caller fills them.

`module.state_dict()` has sharded tensors under their names, for torch's own functions (`watch_state_dict`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_lab.engine.errors import ShardError, check_module, not_sharded
from fsdp_lab.engine.extras.dtensor import FlatDTensor, restored
from fsdp_lab.engine.flat import FlatBuffer
from fsdp_lab.engine.hooks import unit_hooks
from fsdp_lab.engine.parameters import Region, ShardedParameter, sharded_form
from fsdp_lab.engine.unit import Unit

_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")


@dataclass(frozen=True, kw_only=True)
class ParamShard:
    """The part of one parameter that one rank holds: a range of its elements."""

    name: str  # in the model, without what checkpoint and compile wrappers put into it
    shape: torch.Size  # the whole parameter's
    start: int  # range of the flattened parameter, [start, stop)
    stop: int
    local: Tensor  # [stop - start], a view of the master shard
    param: nn.Parameter | None  # the region that an optimizer may be given; None where it is frozen
    offset: int = 0  # where the range begins in `param`, flat
    sharded: ShardedParameter | None = None  # what it may be given in place of the region

    @property
    def numel(self) -> int:
        return self.stop - self.start

    def slots(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The optimizer's state for it, or for the region in which it lies."""
        for p in (self.param, self.sharded):
            if self.param is not None and p is not None and p in optimizer.state:
                return dict(optimizer.state[p])
        return {}


def shards_of(module: nn.Module) -> list[ParamShard]:
    """Every sharded parameter, in the order of `module.parameters()`; a tied one once, by its first name."""
    return [shard for shard, _ in _shards(module)]


def original_parameters(module: nn.Module) -> list[ShardedParameter]:
    """The sharded parameters, in the same order."""
    return [p for _, p in _shards(module)]


def full_state(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields (name, the whole parameter in the master's dtype), one at a time; collective, so go through all of it."""
    for shard, p in _shards(module):
        yield shard.name, gather_one(p.flat, p.number)


def load_full_state(module: nn.Module, values: Mapping[str, Tensor] | Callable[[str], Tensor]) -> None:
    """Set every parameter from whole tensors; not collective, each rank takes its part.

    Raises ShardError: a name is missing, or a shape differs; nothing has been changed then if `values` is a mapping.
    """
    shards = [shard for shard, _ in _shards(module)]
    if isinstance(values, Mapping):
        for shard in shards:
            if shard.name not in values:
                raise ShardError(f"there is no value for {shard.name}; give one for every parameter of the model")
            if wrong := _wrong_tensor(shard, values[shard.name]):
                raise ShardError(wrong)
    elif not callable(values):
        raise ShardError(
            f"a {type(values).__name__} was given where values are needed; give a dict, or a function of names"
        )
    for shard in shards:
        _fill(shard, values[shard.name] if isinstance(values, Mapping) else values(shard.name))


# -- the optimizer's -------------------------------------------------------------------------------------------------


def split_unused(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Called before a step of an optimizer over `sharded_parameters(module)`: where some parameters of a region have no
    gradient, gives the optimizer the region's parameters instead, each with its part of the state, so that only the
    others move."""
    inside: dict[Region, list[ShardedParameter]] = {}
    for p in (p for p in map(sharded_form, module.parameters()) if p is not None):
        inside.setdefault(p.flat.gradients.regions[p.slot.group], []).append(p)
    given = {p for options in optimizer.param_groups for p in options["params"]}
    for region in given & inside.keys():
        if len({p.flat.gradients.has_gradient(p.number) for p in inside[region]}) > 1:
            _split_region(optimizer, region, inside[region])


def _split_region(optimizer: torch.optim.Optimizer, region: Region, inside: Sequence[ShardedParameter]) -> None:
    for options in optimizer.param_groups:
        options["params"] = [q for p in options["params"] for q in (inside if p is region else [p])]
    state = optimizer.state.pop(region, {})
    for p in inside if state else ():
        begin = (shard := shard_of("", p)).offset
        parts = {k: v._local_tensor.detach() for k, v in state.items() if isinstance(v, FlatDTensor)}
        own = {k: p.like(t[begin : begin + shard.numel].clone()) for k, t in parts.items()}
        optimizer.state[p] = {k: own[k] if k in own else v.clone() for k, v in state.items()}


# -- small helpers ---------------------------------------------------------------------------------------------------


def _shards(module: nn.Module) -> list[tuple[ParamShard, ShardedParameter]]:
    check_module(module)
    parameters = [(_original(name), sharded_form(p)) for name, p in module.named_parameters()]
    sharded = [(shard_of(name, p), p) for name, p in parameters if p is not None]
    if parameters and not sharded and unit_hooks(module) is None:
        raise not_sharded(module)
    return sharded


def shard_of(name: str, p: ShardedParameter) -> ParamShard:
    layout, rank = p.flat.layout, p.flat.mesh.shard_rank
    start, stop = layout.own(p.slot, rank)
    param: Any = p.flat.gradients.regions[p.slot.group] if p.requires_grad else None
    offset = 0
    if param is not None and start < stop:
        offset = layout.in_shard(p.slot, rank)[0] - layout.region_in_shard(p.slot.group, rank)[0]
    shape, local = torch.Size(p.slot.shape), p.flat.own_part(p.number)
    return ParamShard(
        name=name, shape=shape, start=start, stop=stop, local=local, param=param, offset=offset, sharded=p
    )


def gather_one(flat: FlatBuffer, number: int) -> Tensor:
    """The whole tensor of one parameter, in the master's dtype; collective in the shard group."""
    slot, placement = flat.layout.slots[number], flat.sharded[number].flat_placement
    return placement.gather(flat.own_part(number), slot.numel).view(slot.shape)


def _fill(shard: ParamShard, whole: Tensor) -> None:
    """A function, so that one whole parameter is freed before the next one is made."""
    if wrong := _wrong_tensor(shard, whole):
        raise ShardError(wrong)
    shard.local.copy_(whole.reshape(-1)[shard.start : shard.stop])


def _wrong_tensor(shard: ParamShard, value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"{shard.name} was given a {type(value).__name__}; give a tensor of the shape {tuple(shard.shape)}"
    if value.shape != shard.shape:
        return f"{shard.name} has the shape {tuple(shard.shape)}, and the value {tuple(value.shape)}"
    if value.is_meta or isinstance(value, DTensor):
        what = "is on meta, without values" if value.is_meta else "is a DTensor"
        return f"what was given for {shard.name} {what}; give a plain tensor, as from full_tensor()"
    return ""


def _original(name: str) -> str:
    for part in _WRAPPERS:
        name = name.replace(part, "")
    return name


# -- state_dict -----------------------------------------------------------------------------------------------------


def watch_state_dict(unit: Unit) -> None:
    """Let `state_dict` show sharded tensors (inside `unshard`, whole ones), and `load_state_dict` write to them. What
    `torch.save` makes of them may be read by `torch.load`, as of torch's own."""
    torch.serialization.add_safe_globals([restored])

    def saving(module: nn.Module, *_: Any) -> None:
        unit.reshard()

    def loading(module: nn.Module, state: dict[str, Any], prefix: str, local: dict[str, Any], *_: Any) -> None:
        unit.reshard()
        for name, p in module._parameters.items():
            if local.get("assign_to_params_buffers") and isinstance(p, ShardedParameter) and prefix + name in state:
                new = p.flat.replace(p.number)
                new.data, state[prefix + name] = state[prefix + name], new  # assigned to itself

    for module in {use[0]: None for flat in unit.flats for uses in flat.uses for use in uses}:
        module.register_state_dict_pre_hook(saving)  # type: ignore[no-untyped-call]
        module.register_load_state_dict_pre_hook(loading)  # type: ignore[no-untyped-call]
