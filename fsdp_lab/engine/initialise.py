"""Deferred initialisation (arXiv 2304.11277, section 3.1): values for a model that was built on meta and sharded.

No rank ever holds the whole model: parameters are made whole one at a time at most. `load_full_state(model, values)` with a
function from names to values is one way (`fsdp_lab.models.Initializer` draws them by seed and name); here are two more.
What was never given a value reads as NaN. Buffers are not sharded, and are the caller's to fill.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch import distributed as dist

from fsdp_lab.engine.errors import ShardError
from fsdp_lab.engine.state import Shard, shards_of


def load_ranges(module: nn.Module, read: Callable[[str, int, int], Tensor]) -> None:
    """Set every parameter from `read(name, start, stop)`: elements [start, stop) of its flattened values; not collective.

    Each rank reads only its own part, as from safetensors (`fsdp_lab.models.Weights`).

    Raises:
        ShardError: the reader gave another number of elements.
    """
    for shard in shards_of(module):
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
    shards = shards_of(module)
    _refuse_alike(shards, values)
    for shard in shards:
        if shard.flat.grid.across is None or dist.get_rank(shard.flat.grid.across) == 0:
            _fill(shard, None if values is None else values[shard.name])
        part = shard.local.to(shard.flat.grid.device)
        if part.numel():
            _broadcast(part, shard.flat.grid.across)
            shard.local.copy_(part)


def _fill(shard: Shard, value: Tensor | None) -> None:
    """In one group of shards. A function, so that one whole parameter is let go of before the next one is made."""
    whole = torch.empty(shard.shape, dtype=shard.local.dtype, device=shard.flat.grid.device)
    if value is not None:
        whole.copy_(value)
    _broadcast(whole, shard.flat.grid.shards)
    shard.local.copy_(whole.reshape(-1)[shard.start : shard.stop])


def _refuse_alike(shards: list[Shard], values: Mapping[str, Tensor] | None) -> None:
    """What rank 0 finds wrong, every rank raises."""
    grid = shards[0].flat.grid
    wrong: list[str | None] = [None]
    if values is not None:
        for shard in shards:
            if shard.name not in values:
                wrong = [f"there is no value for {shard.name} on rank 0; give one for every parameter of the model"]
                break
            if values[shard.name].shape != shard.shape:
                given = tuple(values[shard.name].shape)
                wrong = [f"{shard.name} has the shape {tuple(shard.shape)}, and rank 0's value {given}"]
                break
    for group in (grid.shards, grid.across):
        if group is not None:
            dist.broadcast_object_list(wrong, src=dist.get_global_rank(group, 0), group=group)
    if wrong[0] is not None:
        raise ShardError(wrong[0])


def _broadcast(tensor: Tensor, group: dist.ProcessGroup | None) -> None:
    if group is not None:
        dist.broadcast(tensor, src=dist.get_global_rank(group, 0), group=group)
