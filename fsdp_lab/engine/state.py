"""The state of a sharded model and of its optimizer, by the parameters' original names; and deferred initialisation.

A rank's shards as they are (`shards_of`), and whole tensors, one parameter at a time (`full_state`), so that no rank ever
holds a whole model that it did not ask for. Whole tensors can be loaded into any other world size, strategy or backend.

A model may be built on meta and sharded before it has values (arXiv 2304.11277, section 3.1). They come from
`load_full_state`, also from a function of names, from torch's `set_model_state_dict`, or from `module.to_empty` and the
modules' own initialisation, which writes to the sharded tensors; what was never given a value reads as NaN. Buffers are not
sharded; the caller fills them."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_lab.engine.buffer import FlatBuffer, sharded_form
from fsdp_lab.engine.collectives import ShardError
from fsdp_lab.engine.hooks import not_sharded, unit_hooks
from fsdp_lab.engine.mesh import gather_parts


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
    sharded: Any = None  # what it may be given in place of the region

    @property
    def numel(self) -> int:
        return self.stop - self.start

    def slots(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The optimizer's state for it, or for the region in which it lies."""
        given = () if self.param is None else (self.param, self.sharded)
        return next((dict(optimizer.state[p]) for p in given if p in optimizer.state), {})


def shards_of(module: nn.Module) -> list[ParamShard]:
    """Every sharded parameter, in the order of `module.parameters()`; a tied one once, by its first name."""
    hooks, parameters = unit_hooks(module), [(name, sharded_form(p)) for name, p in module.named_parameters()]
    sharded = [shard_of(name, p.flat, p.number) for name, p in parameters if p is not None]
    if parameters and not sharded and hooks is None:
        raise not_sharded(module)
    return sharded


def full_state(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields (name, the whole parameter in the master's dtype), one at a time; collective, so go through all of it."""
    for shard in shards_of(module):
        yield shard.name, gather_one(shard.sharded.flat, shard.sharded.number)


def load_full_state(module: nn.Module, values: Mapping[str, Tensor] | Callable[[str], Tensor]) -> None:
    """Set every parameter from whole tensors; not collective, each rank takes its part.

    Raises ShardError: a name is missing, or a shape differs; nothing has been changed then if `values` is a mapping."""
    shards = shards_of(module)
    if isinstance(values, Mapping):
        for shard in shards:
            _check_tensor(shard, values.get(shard.name))
        values = values.__getitem__
    elif not callable(values):
        kind = type(values).__name__
        raise ShardError(f"a {kind} was given where values are needed; give a dict, or a function of names")
    for shard in shards:
        whole = values(shard.name)
        _check_tensor(shard, whole)
        shard.local.copy_(whole.reshape(-1)[shard.start : shard.stop])
        del whole  # before the next one is made


def shard_of(name: str, flat: FlatBuffer, number: int) -> ParamShard:
    slot, p = flat.layout.slots[number], flat.sharded[number]
    name = name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")
    start, stop = flat.layout.own(slot, flat.mesh.shard_rank)
    param, offset = flat.for_optimizer(number) if p.requires_grad else (None, 0)
    shape, local = torch.Size(slot.shape), flat.own_part(number)
    at = {"start": start, "stop": stop, "offset": offset}
    return ParamShard(name=name, shape=shape, local=local, param=param, sharded=p, **at)


def gather_one(flat: FlatBuffer, number: int) -> Tensor:
    """The whole tensor of one parameter, in the master's dtype; collective in the shard group."""
    slot, layout = flat.layout.slots[number], flat.layout
    ranges = [layout.own(slot, rank) for rank in range(layout.factor)]
    return gather_parts(flat.mesh, flat.own_part(number), ranges, slot.numel).view(slot.shape)


def _check_tensor(shard: ParamShard, value: Any) -> None:
    """Raises ShardError."""
    what = "no value" if value is None else f"a {type(value).__name__}"
    if isinstance(value, Tensor) and not isinstance(value, DTensor):
        if value.shape == shard.shape and not value.is_meta:
            return
        what = "one on meta, without values" if value.is_meta else f"one of the shape {tuple(value.shape)}"
    shape = tuple(shard.shape)
    raise ShardError(f"{shard.name} was given {what}; give a plain tensor of the shape {shape}, as from full_tensor()")
