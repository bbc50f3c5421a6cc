"""The state of a sharded model and of its optimizer, by the parameters' original names; and deferred initialisation.

A rank's shards as they are (`shards_of`, `local_state`, `local_optimizer_state`), and whole tensors, one parameter at a
time (`full_state`, `full_optimizer_state`), so that no rank ever holds a whole model that it did not ask for. Whole tensors
can be loaded into any other world size, strategy or backend.

A model may be built on meta and sharded before it has values (arXiv 2304.11277, section 3.1). They come from
`load_full_state`, also from a function of names, from `load_ranges` or from `broadcast_full_state`; what was never given a
value reads as NaN. Buffers are not sharded; the caller fills them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from fsdp_lab.engine.errors import ShardError
from fsdp_lab.engine.flat import FlatBuffer, OriginalParameter
from fsdp_lab.engine.mesh import ShardMesh
from fsdp_lab.engine.unit import Unit

_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")


@dataclass(frozen=True, kw_only=True)
class ParamShard:
    """What one rank holds of one parameter: a range of its elements."""

    name: str  # in the model, without what checkpoint and compile wrappers put into it
    shape: torch.Size  # the whole parameter's
    start: int  # range of the flattened parameter, [start, stop)
    stop: int
    local: Tensor  # [stop - start], a view of the master shard
    param: nn.Parameter | None  # what the optimizer was given; None where it is frozen
    offset: int = 0  # where the range begins in `param`, flat

    @property
    def numel(self) -> int:
        return self.stop - self.start


def shards_of(module: nn.Module) -> list[ParamShard]:
    """Every sharded parameter, in the order of `module.parameters()`; a tied one once, by its first name."""
    return [shard for shard, _ in _shards(module)]


def original_parameters(module: nn.Module) -> list[OriginalParameter]:
    """What modules hold in place of sharded parameters, in the same order."""
    return [p for p in module.parameters() if isinstance(p, OriginalParameter)]


def local_state(module: nn.Module) -> dict[str, ParamShard]:
    """This rank's shards by name; views, not copies."""
    return {shard.name: shard for shard in shards_of(module)}


def full_state(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name, the whole parameter in the master's dtype), one at a time; collective, so go through all of it."""
    for shard, p in _shards(module):
        yield shard.name, gather_one(p.flat, p.number, p.flat.master)


def load_full_state(module: nn.Module, values: Mapping[str, Tensor] | Callable[[str], Tensor]) -> None:
    """Set every parameter from whole tensors; not collective, each rank takes its part.

    Raises:
        ShardError: a name is missing, or a shape differs; nothing has been changed then if `values` is a mapping.
    """
    shards = [shard for shard, _ in _shards(module)]
    if isinstance(values, Mapping):
        for shard in shards:
            if shard.name not in values:
                raise ShardError(f"there is no value for {shard.name}; give one for every parameter of the model")
            _check_shape(shard, values[shard.name])
    for shard in shards:
        _fill(shard, values[shard.name] if isinstance(values, Mapping) else values(shard.name))


# -- deferred initialisation ------------------------------------------------------------------------------------------


def load_ranges(module: nn.Module, read: Callable[[str, int, int], Tensor]) -> None:
    """Set every parameter from `read(name, start, stop)`: elements [start, stop) of its flattened values; not collective.

    Each rank reads only its own part, as from safetensors (`fsdp_lab.models.Weights`).

    Raises:
        ShardError: the reader gave another number of elements.
    """
    for shard, _ in _shards(module):
        if shard.stop == shard.start:
            continue
        part = read(shard.name, shard.start, shard.stop).reshape(-1)
        if part.numel() != shard.local.numel():
            raise ShardError(f"{shard.name}: {shard.local.numel()} elements were asked for and {part.numel()} came")
        shard.local.copy_(part)


def broadcast_full_state(module: nn.Module, values: Mapping[str, Tensor] | None) -> None:
    """Set every parameter from the whole tensors that rank 0 of the mesh has; collective, one parameter at a time.

    Args:
        values: on rank 0, by name; None elsewhere.

    Raises:
        ShardError: on every rank, where rank 0 lacks a value or has one of another shape.
    """
    shards = _shards(module)
    _check_values(shards, values)
    for shard, p in shards:
        mesh = p.flat.mesh
        if mesh.replicate_group is None or dist.get_rank(mesh.replicate_group) == 0:
            _scatter(shard, None if values is None else values[shard.name], mesh)
        part = shard.local.to(mesh.device)
        if part.numel():
            _broadcast(part, mesh.replicate_group)
            shard.local.copy_(part)


def _scatter(shard: ParamShard, value: Tensor | None, mesh: ShardMesh) -> None:
    """In one shard group. A function, so that one whole parameter is freed before the next one is made."""
    whole = torch.empty(shard.shape, dtype=shard.local.dtype, device=mesh.device)
    if value is not None:
        whole.copy_(value)
    _broadcast(whole, mesh.shard_group)
    shard.local.copy_(whole.reshape(-1)[shard.start : shard.stop])


def _check_values(shards: list[tuple[ParamShard, OriginalParameter]], values: Mapping[str, Tensor] | None) -> None:
    """Raise on every rank the error that rank 0 finds."""
    if not shards:
        return
    mesh = shards[0][1].flat.mesh  # those of other units have the same ranks
    wrong: list[str | None] = [None]
    if values is not None:
        for shard, _ in shards:
            if shard.name not in values:
                wrong = [f"there is no value for {shard.name} on rank 0; give one for every parameter of the model"]
                break
            if values[shard.name].shape != shard.shape:
                given = tuple(values[shard.name].shape)
                wrong = [f"{shard.name} has the shape {tuple(shard.shape)}, and rank 0's value {given}"]
                break
    for group in (mesh.shard_group, mesh.replicate_group):
        if group is not None:
            dist.broadcast_object_list(wrong, src=dist.get_global_rank(group, 0), group=group)
    if wrong[0] is not None:
        raise ShardError(wrong[0])


def _broadcast(tensor: Tensor, group: dist.ProcessGroup | None) -> None:
    if group is not None:
        dist.broadcast(tensor, src=dist.get_global_rank(group, 0), group=group)


# -- the optimizer's -------------------------------------------------------------------------------------------------


def local_optimizer_state(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    """name -> slot -> this rank's part of it, [stop - start]; what is no flat tensor (AdamW's "step") as it is."""
    return {s.name: {slot: _part(s, v) for slot, v in _slots(s, optimizer).items()} for s in shards_of(module)}


def full_optimizer_state(module: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, slot -> the whole tensor in the parameter's shape), one parameter at a time; collective."""
    for shard, p in _shards(module):
        yield shard.name, {slot: _whole_slot(p, v) for slot, v in _slots(shard, optimizer).items()}


def load_full_optimizer_state(
    module: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Mapping[str, Any]]
) -> None:
    """Set the optimizer's state from whole tensors; not collective. `optimizer` is over `sharded_parameters(module)`.

    Raises:
        ShardError: a trainable parameter has no state where others have one, or a slot of another shape; nothing has been
            changed then.
    """
    shards = [shard for shard, _ in _shards(module) if shard.param is not None]
    for shard in shards:
        if shard.name not in state:
            raise ShardError(f"there is no optimizer state for {shard.name}; give one for every trainable parameter")
        for value in state[shard.name].values():
            if isinstance(value, Tensor) and value.dim():
                _check_shape(shard, value)
    like_steps = _like_steps(shards, state)
    for shard in shards:
        assert shard.param is not None
        into = optimizer.state[shard.param]
        for slot, value in state[shard.name].items():
            if slot in like_steps:
                into[slot] = value.clone() if isinstance(value, Tensor) else value
                continue
            if slot not in into:
                into[slot] = torch.zeros_like(shard.param)
            part = value.reshape(-1)[shard.start : shard.stop]
            into[slot][shard.offset : shard.offset + part.numel()].copy_(part)


def _like_steps(shards: Sequence[ParamShard], state: Mapping[str, Mapping[str, Any]]) -> set[str]:
    """The slots that are one value for a whole parameter. A parameter without dimensions alone could not tell them apart,
    so others are asked too; where there are no others, "step" is the one that torch's optimizers have."""
    found = {"step"}
    for shard in shards:
        for slot, value in state[shard.name].items():
            if not isinstance(value, Tensor) or value.shape != shard.shape:
                found.add(slot)
    return found


# -- small helpers ---------------------------------------------------------------------------------------------------


def _shards(module: nn.Module) -> list[tuple[ParamShard, OriginalParameter]]:
    parameters = [(_original(name), p) for name, p in module.named_parameters() if isinstance(p, OriginalParameter)]
    return [(_shard(name, p), p) for name, p in parameters]


def _shard(name: str, p: OriginalParameter) -> ParamShard:
    layout, rank = p.flat.layout, p.flat.mesh.shard_rank
    start, stop = layout.own(p.slot, rank)
    param = p.flat.gradients.regions.get(p.slot.group)
    offset = 0
    if param is not None and start < stop:
        offset = layout.in_shard(p.slot, rank)[0] - layout.region_in_shard(p.slot.group, rank)[0]
    shape, local = torch.Size(p.slot.shape), p.flat.own_part(p.number)
    return ParamShard(name=name, shape=shape, start=start, stop=stop, local=local, param=param, offset=offset)


def gather_one(flat: FlatBuffer, number: int, held: Tensor) -> Tensor:
    """The whole tensor of one parameter from `held`, [n], this rank's part of what is laid out as the master shard.

    Each rank sends its part to the others: an all-gather of equal parts would hold F times the longest one."""
    slot, mesh = flat.layout.slots[number], flat.mesh
    whole = torch.empty(slot.numel, dtype=held.dtype, device=mesh.device)
    works: list[dist.Work | None] = []
    for rank in range(mesh.shard_size):
        start, stop = flat.layout.own(slot, rank)
        if rank == mesh.shard_rank:
            first, last = flat.layout.in_shard(slot, rank)
            whole[start:stop].copy_(held[first:last])
        if start < stop and mesh.shard_group is not None:
            source = dist.get_global_rank(mesh.shard_group, rank)
            works.append(dist.broadcast(whole[start:stop], src=source, group=mesh.shard_group, async_op=True))
    for work in works:
        if work is not None:
            work.wait()
    return whole.view(slot.shape)


def _slots(shard: ParamShard, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {} if shard.param is None else dict(optimizer.state.get(shard.param, {}))


def _part(shard: ParamShard, value: Any) -> Any:
    if not isinstance(value, Tensor) or value.dim() == 0:
        return value
    return value[shard.offset : shard.offset + shard.stop - shard.start]


def _whole_slot(p: OriginalParameter, value: Any) -> Any:
    """A flat slot is laid out as its region: bring it to where the region lies in a shard."""
    if not isinstance(value, Tensor) or value.dim() == 0:
        return value.clone() if isinstance(value, Tensor) else value
    begin, end = p.flat.layout.region_in_shard(p.slot.group, p.flat.mesh.shard_rank)
    held = value.new_zeros(p.flat.layout.shard_numel)
    held[begin:end] = value
    return gather_one(p.flat, p.number, held)


def _fill(shard: ParamShard, whole: Tensor) -> None:
    """A function, so that one whole parameter is freed before the next one is made."""
    _check_shape(shard, whole)
    shard.local.copy_(whole.reshape(-1)[shard.start : shard.stop])


def _check_shape(shard: ParamShard, value: Tensor) -> None:
    if value.shape != shard.shape:
        raise ShardError(f"{shard.name} has the shape {tuple(shard.shape)}, and the value {tuple(value.shape)}")


def _original(name: str) -> str:
    for part in _WRAPPERS:
        name = name.replace(part, "")
    return name


# -- refused ------------------------------------------------------------------------------------------------------


def refuse_state_dict(unit: Unit) -> None:
    """Of its modules, outside `unshard`: let `state_dict` and `load_state_dict` raise ShardError."""

    def saving(module: nn.Module, *_: Any) -> None:
        if not unit.pins:
            raise ShardError("state_dict() would hold NaN for parameters that are sharded; use full_state(model), "
                             "local_state(model), or `with unshard(model):`")  # fmt: skip

    def loading(module: nn.Module, *_: Any) -> None:
        if not unit.pins:
            raise ShardError("load_state_dict() cannot write to parameters that are sharded; use load_full_state(model, "
                             "values), or `with unshard(model):`")  # fmt: skip

    for module in unit.modules:
        module.register_state_dict_pre_hook(saving)  # type: ignore[no-untyped-call]
        module.register_load_state_dict_pre_hook(loading)  # type: ignore[no-untyped-call]
