"""What a sharded model and its optimizer hold, by the parameters' original names.

A rank's shards as they are (`shards_of`, `local_state`, `local_optimizer_state`), and whole tensors, one parameter at a
time (`full_state`, `full_optimizer_state`), so that no rank ever holds a whole model that it did not ask for. Whole tensors
can be loaded into any other world size, strategy or backend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from fsdp_lab.engine.collectives import settle
from fsdp_lab.engine.errors import ShardError
from fsdp_lab.engine.flat import FlatBuffer, OriginalParameter

_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")


@dataclass(frozen=True, kw_only=True)
class Shard:
    """What this rank holds of one parameter."""

    name: str  # in the model, without what checkpoint and compile wrappers put into it
    shape: torch.Size  # the whole parameter's
    start: int  # range of the flattened parameter, [start, stop)
    stop: int
    local: Tensor  # [stop - start], a view of the master shard
    param: nn.Parameter | None  # the optimizer's flat parameter; None where it is frozen
    offset: int  # where the range begins in `param`
    flat: FlatBuffer
    number: int  # in `flat`


def shards_of(module: nn.Module) -> list[Shard]:
    """Every sharded parameter, in the order of `module.parameters()`; a tied one once, by its first name."""
    return [_shard(_original(name), p) for name, p in module.named_parameters() if isinstance(p, OriginalParameter)]


def local_state(module: nn.Module) -> dict[str, Shard]:
    """This rank's shards by name; views, not copies."""
    return {shard.name: shard for shard in shards_of(module)}


def full_state(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name, the whole parameter in the master's dtype), one at a time; collective, so go through all of it."""
    for shard in shards_of(module):
        yield shard.name, _whole(shard, shard.flat.master)
    settle()


def load_full_state(module: nn.Module, values: Mapping[str, Tensor] | Callable[[str], Tensor]) -> None:
    """Set every parameter from whole tensors; not collective, each rank takes its part.

    Raises:
        ShardError: a name is missing, or a shape differs; nothing has been changed then if `values` is a mapping.
    """
    shards = shards_of(module)
    if isinstance(values, Mapping):
        for shard in shards:
            if shard.name not in values:
                raise ShardError(f"there is no value for {shard.name}; give one for every parameter of the model")
            _check_shape(shard, values[shard.name])
    for shard in shards:
        _fill(shard, values[shard.name] if isinstance(values, Mapping) else values(shard.name))


# -- the optimizer's -------------------------------------------------------------------------------------------------


def local_optimizer_state(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    """name -> slot -> this rank's part of it, [stop - start]; what is no flat tensor (AdamW's "step") as it is."""
    return {s.name: {slot: _part(s, v) for slot, v in _slots(s, optimizer).items()} for s in shards_of(module)}


def full_optimizer_state(module: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, slot -> the whole tensor in the parameter's shape), one parameter at a time; collective."""
    for shard in shards_of(module):
        yield shard.name, {slot: _whole_slot(shard, v) for slot, v in _slots(shard, optimizer).items()}
    settle()


def load_full_optimizer_state(
    module: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Mapping[str, Any]]
) -> None:
    """Set the optimizer's state from whole tensors; not collective. `optimizer` is over `sharded_parameters(module)`.

    Raises:
        ShardError: a trainable parameter has no state where others have one, or a slot of another shape; nothing has been
            changed then.
    """
    shards = [shard for shard in shards_of(module) if shard.param is not None]
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


def _like_steps(shards: Sequence[Shard], state: Mapping[str, Mapping[str, Any]]) -> set[str]:
    """The slots that are one value for a whole parameter. A parameter without dimensions alone could not tell them apart,
    so others are asked too; where there are no others, "step" is the one that torch's optimizers have."""
    found = {"step"}
    for shard in shards:
        for slot, value in state[shard.name].items():
            if not isinstance(value, Tensor) or value.shape != shard.shape:
                found.add(slot)
    return found


# -- small helpers ---------------------------------------------------------------------------------------------------


def _shard(name: str, p: OriginalParameter) -> Shard:
    flat = p.flat
    start, stop = flat.layout.own(p.slot, flat.grid.rank)
    param, offset = flat.in_region(p.number)
    local = flat.own_part(p.number)
    return Shard(name=name, shape=torch.Size(p.slot.shape), start=start, stop=stop, local=local, param=param, offset=offset,
                 flat=flat, number=p.number)  # fmt: skip


def _whole(shard: Shard, held: Tensor) -> Tensor:
    return gather_one(shard.flat, shard.number, held)


def gather_one(flat: FlatBuffer, number: int, held: Tensor) -> Tensor:
    """The whole tensor of one parameter from `held`, [n], this rank's part of what is laid out as the master shard.

    Each rank sends its part to the others: an all-gather of equal parts would hold F times the longest one."""
    slot, grid = flat.layout.slots[number], flat.grid
    whole = torch.empty(slot.numel, dtype=held.dtype, device=grid.device)
    works: list[dist.Work | None] = []
    for rank in range(grid.factor):
        start, stop = flat.layout.own(slot, rank)
        if rank == grid.rank:
            first, last = flat.layout.in_shard(slot, rank)
            whole[start:stop].copy_(held[first:last])
        if start < stop and grid.shards is not None:
            source = dist.get_global_rank(grid.shards, rank)
            works.append(dist.broadcast(whole[start:stop], src=source, group=grid.shards, async_op=True))
    for work in works:
        if work is not None:
            work.wait()
    return whole.view(slot.shape)


def _slots(shard: Shard, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {} if shard.param is None else dict(optimizer.state.get(shard.param, {}))


def _part(shard: Shard, value: Any) -> Any:
    if not isinstance(value, Tensor) or value.dim() == 0:
        return value
    return value[shard.offset : shard.offset + shard.stop - shard.start]


def _whole_slot(shard: Shard, value: Any) -> Any:
    """A flat slot is laid out as its region: bring it to where the region lies in a shard."""
    if not isinstance(value, Tensor) or value.dim() == 0:
        return value.clone() if isinstance(value, Tensor) else value
    flat = shard.flat
    group = flat.layout.slots[shard.number].group
    begin, end = flat.layout.region_in_shard(group, flat.grid.rank)
    held = value.new_zeros(flat.layout.shard_numel)
    held[begin:end] = value
    return _whole(shard, held)


def _fill(shard: Shard, whole: Tensor) -> None:
    """A function, so that one whole parameter is let go of before the next one is made."""
    _check_shape(shard, whole)
    shard.local.copy_(whole.reshape(-1)[shard.start : shard.stop])


def _check_shape(shard: Shard, value: Tensor) -> None:
    if value.shape != shard.shape:
        raise ShardError(f"{shard.name} has the shape {tuple(shard.shape)}, and the value {tuple(value.shape)}")


def _original(name: str) -> str:
    for part in _WRAPPERS:
        name = name.replace(part, "")
    return name
