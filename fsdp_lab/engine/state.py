"""The state of a sharded model and of its optimizer, by the parameters' original names; and deferred initialisation.

A rank's shards as they are (`shards_of`, `local_state`, `local_optimizer_state`), and whole tensors, one parameter at a
time (`full_state`, `full_optimizer_state`), so that no rank ever holds a whole model that it did not ask for. Whole tensors
can be loaded into any other world size, strategy or backend.

A model may be built on meta and sharded before it has values (arXiv 2304.11277, section 3.1). They come from
`load_full_state`, also from a function of names, from `load_ranges`, from `broadcast_full_state`, or from `module.to_empty`
and the modules' own initialisation, which writes to the sharded tensors; what was never given a value reads as NaN. Buffers
are not sharded; the caller fills them.

`module.state_dict()` has sharded tensors under their names, for torch's own functions (`watch_state_dict`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed as dist, nn
from torch.distributed.tensor import DTensor

from fsdp_lab.engine.collectives import gather_texts
from fsdp_lab.engine.dtensor import FlatDTensor, restored
from fsdp_lab.engine.errors import ShardError, check_module, check_optimizer, not_sharded
from fsdp_lab.engine.flat import FlatBuffer
from fsdp_lab.engine.hooks import unit_hooks
from fsdp_lab.engine.mesh import ShardMesh
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


def local_state(module: nn.Module) -> dict[str, ParamShard]:
    """This rank's shards by name; views, not copies."""
    return {shard.name: shard for shard in shards_of(module)}


def full_state(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields (name, the whole parameter in the master's dtype), one at a time; collective, so go through all of it."""
    for shard, p in _shards(module):
        yield shard.name, gather_one(p.flat, p.number, p.flat.master)


def load_full_state(module: nn.Module, values: Mapping[str, Tensor] | Callable[[str], Tensor]) -> None:
    """Set every parameter from whole tensors; not collective, each rank takes its part.

    Raises ShardError: a name is missing, or a shape differs; nothing has been changed then if `values` is a mapping.
    """
    shards = [shard for shard, _ in _shards(module)]
    if isinstance(values, Mapping):
        for shard in shards:
            wrong = _wrong_value(shard, values)
            if wrong:
                raise ShardError(wrong)
    elif not callable(values):
        raise ShardError(
            f"a {type(values).__name__} was given where values are needed; give a dict, or a function of names"
        )
    for shard in shards:
        _fill(shard, values[shard.name] if isinstance(values, Mapping) else values(shard.name))


# -- deferred initialisation ------------------------------------------------------------------------------------------


def load_ranges(module: nn.Module, read: Callable[[str, int, int], Tensor]) -> None:
    """Set every parameter from `read(name, start, stop)`: elements [start, stop) of its flattened values; not collective.

    Each rank reads only its own part, as from safetensors (`fsdp_lab.models.Weights`).

    Raises ShardError: the reader gave another number of elements.
    """
    if not callable(read):
        raise ShardError(f"a {type(read).__name__} was given to read from; give a function of a name and a range")
    for shard, _ in _shards(module):
        if shard.stop == shard.start:
            continue
        part: Any = read(shard.name, shard.start, shard.stop)
        came = part.numel() if isinstance(part, Tensor) and not part.is_meta else 0
        if came != shard.local.numel():
            raise ShardError(f"{shard.name}: {shard.local.numel()} elements were asked for and {came} came")
        shard.local.copy_(part.reshape(-1))


def broadcast_full_state(module: nn.Module, values: Mapping[str, Tensor] | None) -> None:
    """Set every parameter from the whole tensors that rank 0 of the mesh has; collective, one parameter at a time.

    Args:
        values: on rank 0, by name; elsewhere they are not looked at.

    Raises ShardError: on every rank, where rank 0 lacks a value or has one of another shape.
    """
    shards = _shards(module)
    _check_values(shards, values)
    for shard, p in shards:
        mesh = p.flat.mesh
        if mesh.replicate_group is None or dist.get_rank(mesh.replicate_group) == 0:
            _scatter(shard, values[shard.name] if values is not None and mesh.shard_rank == 0 else None, mesh)
        part = shard.local.to(mesh.device)
        if part.numel():
            _broadcast(part, mesh.replicate_group, mesh)
            shard.local.copy_(part)


def _scatter(shard: ParamShard, value: Tensor | None, mesh: ShardMesh) -> None:
    """Scatters a value in one shard group. A function, so that one whole parameter is freed before the next one is made."""
    whole = torch.empty(shard.shape, dtype=shard.local.dtype, device=mesh.device)
    if value is not None:
        whole.copy_(value)
    _broadcast(whole, mesh.shard_group, mesh)
    shard.local.copy_(whole.reshape(-1)[shard.start : shard.stop])


def _check_values(shards: list[tuple[ParamShard, ShardedParameter]], values: Mapping[str, Tensor] | None) -> None:
    """Raise on every rank the error that rank 0 finds."""
    if not shards:
        return
    mesh = shards[0][1].flat.mesh  # those of other units have the same ranks
    wrong = next((w for w in (_wrong_value(shard, values, " on rank 0") for shard, _ in shards) if w), "")
    with mesh.answered("broadcast_full_state"):
        for group in (mesh.shard_group, mesh.replicate_group):
            if group is not None:
                wrong = gather_texts(wrong, group, mesh.device)[0]
    if wrong:
        raise ShardError(wrong)


def _broadcast(tensor: Tensor, group: dist.ProcessGroup | None, mesh: ShardMesh) -> None:
    if group is not None:
        with mesh.answered("broadcast_full_state"):
            dist.broadcast(tensor, src=dist.get_global_rank(group, 0), group=group)


# -- the optimizer's -------------------------------------------------------------------------------------------------


def local_optimizer_state(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    """name -> slot -> this rank's part of it, [stop - start]; what is no flat tensor (AdamW's "step") as it is."""
    check_optimizer(optimizer)
    return {s.name: {slot: part_of(s, v) for slot, v in s.slots(optimizer).items()} for s in shards_of(module)}


def full_optimizer_state(module: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (name, slot -> the whole tensor in the parameter's shape), one parameter at a time; collective."""
    check_optimizer(optimizer)
    for shard, p in _shards(module):
        yield shard.name, {slot: _whole_slot(shard, p, v) for slot, v in shard.slots(optimizer).items()}


def load_full_optimizer_state(
    module: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Mapping[str, Any]]
) -> None:
    """Set the optimizer's state from whole tensors; not collective.

    Raises ShardError: a trainable parameter has no state where others have one, or a slot of another shape; nothing has been
    changed then.
    """
    check_optimizer(optimizer)
    pairs = [(shard, p) for shard, p in _shards(module) if shard.param is not None]
    shards = [shard for shard, _ in pairs]
    for shard in shards:
        if not isinstance(state, Mapping) or not isinstance(state.get(shard.name), Mapping):
            raise ShardError(f"there is no optimizer state for {shard.name}; give one for every trainable parameter")
        for value in state[shard.name].values():
            if isinstance(value, Tensor) and value.dim() and _wrong_tensor(shard, value):
                raise ShardError(_wrong_tensor(shard, value))
    like_steps = _like_steps(shards, state)
    names = {p: shard.name for shard, p in pairs}
    _split(module, optimizer, lambda p: str({k: v for k, v in state[names[p]].items() if k in like_steps}))
    given = _given(optimizer)
    for shard, p in pairs:
        target = p if p in given else shard.param
        assert target is not None
        into = optimizer.state[target] if state[shard.name] else {}
        for slot, value in state[shard.name].items():
            if slot in like_steps:
                into[slot] = value.clone() if isinstance(value, Tensor) else value
                continue
            if slot not in into:
                into[slot] = torch.zeros_like(target)
            part_of(shard, into[slot]).copy_(value.reshape(-1)[shard.start : shard.stop])


def split_unused(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Called before a step of an optimizer over `sharded_parameters(module)`: where some parameters of a region have no
    gradient, gives the optimizer the region's parameters instead, each with its part of the state, so that only the
    others move."""
    _split(module, optimizer, lambda p: str(p.flat.gradients.has_gradient(p.number)))


def _split(module: nn.Module, optimizer: torch.optim.Optimizer, kind: Callable[[ShardedParameter], str]) -> None:
    """Split the regions whose parameters are not of one kind."""
    check_optimizer(optimizer)
    inside: dict[Region, list[ParamShard]] = {}
    for shard, p in _shards(module):
        inside.setdefault(p.flat.gradients.regions[p.slot.group], []).append(shard)
    for region in _given(optimizer) & inside.keys():
        if len({kind(s.sharded) for s in inside[region] if s.sharded is not None}) > 1:
            _split_region(optimizer, region, inside[region])


def _split_region(optimizer: torch.optim.Optimizer, region: Region, inside: Sequence[ParamShard]) -> None:
    for options in optimizer.param_groups:
        options["params"] = [
            q for p in options["params"] for q in ([s.sharded for s in inside] if p is region else [p])
        ]
    state = optimizer.state.pop(region, {})
    for shard in inside if state else ():
        parts = {slot: part_of(shard, v) for slot, v in state.items()}
        assert shard.sharded is not None
        like = shard.sharded.like
        optimizer.state[shard.sharded] = {k: v.clone() if v is state[k] else like(v.clone()) for k, v in parts.items()}


def _given(optimizer: torch.optim.Optimizer) -> set[Any]:
    return {p for options in optimizer.param_groups for p in options["params"]}


def _like_steps(shards: Sequence[ParamShard], state: Mapping[str, Mapping[str, Any]]) -> set[str]:
    """The slots that are one value for a whole parameter. A parameter without dimensions alone could not tell them apart,
    so others are asked too; where there are no others, "step" is the one that torch's optimizers have."""
    shared = {"step"}
    for shard in shards:
        for slot, value in state[shard.name].items():
            if not isinstance(value, Tensor) or value.shape != shard.shape:
                shared.add(slot)
    return shared


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


def gather_one(flat: FlatBuffer, number: int, held: Tensor) -> Tensor:
    """The whole tensor of one parameter from `held`, [n], this rank's part of what is laid out as the master shard."""
    slot, placement = flat.layout.slots[number], flat.sharded[number].flat_placement
    return placement.gather(held[slice(*flat.layout.in_shard(slot, flat.mesh.shard_rank))], slot.numel).view(slot.shape)


def part_of(shard: ParamShard, value: Any) -> Any:
    if not isinstance(value, FlatDTensor):
        return value
    local = value._local_tensor.detach()
    return local if local.numel() == shard.numel else local[shard.offset : shard.offset + shard.numel]


def _whole_slot(shard: ParamShard, p: ShardedParameter, value: Any) -> Any:
    if not isinstance(value, FlatDTensor):
        return value.clone() if isinstance(value, Tensor) else value
    return p.flat_placement.gather(part_of(shard, value), shard.shape.numel()).view(shard.shape)


def _fill(shard: ParamShard, whole: Tensor) -> None:
    """A function, so that one whole parameter is freed before the next one is made."""
    wrong = _wrong_tensor(shard, whole)
    if wrong:
        raise ShardError(wrong)
    shard.local.copy_(whole.reshape(-1)[shard.start : shard.stop])


def _wrong_value(shard: ParamShard, values: Mapping[str, Any] | None, where: str = "") -> str:
    """Why a parameter cannot be set from these; "": it can."""
    if not isinstance(values, Mapping) or shard.name not in values:
        return f"there is no value for {shard.name}{where}; give one for every parameter of the model"
    return _wrong_tensor(shard, values[shard.name], where)


def _wrong_tensor(shard: ParamShard, value: Any, where: str = "") -> str:
    if not isinstance(value, Tensor):
        return (
            f"{shard.name} was given a {type(value).__name__}{where}; give a tensor of the shape {tuple(shard.shape)}"
        )
    if value.shape != shard.shape:
        return f"{shard.name} has the shape {tuple(shard.shape)}, and the value{where} {tuple(value.shape)}"
    if value.is_meta or isinstance(value, DTensor):
        what = "is on meta, without values" if value.is_meta else "is a DTensor"
        return f"what was given for {shard.name}{where} {what}; give a plain tensor, as from full_tensor()"
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
