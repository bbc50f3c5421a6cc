"""The state of a sharded model and of its optimizer, by the parameters' original names; and deferred initialisation.

A rank's shards as they are (`shards_of`), and whole tensors, one parameter at a time (`full_state`), so that no rank ever
holds a whole model that it did not ask for. Whole tensors can be loaded into any other world size, strategy or backend.

A model may be built on meta and sharded before it has values (arXiv 2304.11277, section 3.1). They come from
`load_full_state`, also from a function of names, from torch's `set_model_state_dict`, or from `module.to_empty` and the
modules' own initialisation, which writes to the sharded tensors; what was never given a value reads as NaN. Buffers are not
sharded; the caller fills them.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_lab.engine.buffer import FlatBuffer, sharded_form
from fsdp_lab.engine.collectives import ShardError
from fsdp_lab.engine.hooks import check_module, not_sharded, unit_hooks
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
        for p in (self.param, self.sharded):
            if self.param is not None and p is not None and p in optimizer.state:
                return dict(optimizer.state[p])
        return {}


def shards_of(module: nn.Module) -> list[ParamShard]:
    """Every sharded parameter, in the order of `module.parameters()`; a tied one once, by its first name."""
    check_module(module)
    parameters = [(_original(name), sharded_form(p)) for name, p in module.named_parameters()]
    sharded = [shard_of(name, p.flat, p.number) for name, p in parameters if p is not None]
    if parameters and not sharded and unit_hooks(module) is None:
        raise not_sharded(module)
    return sharded


def full_state(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields (name, the whole parameter in the master's dtype), one at a time; collective, so go through all of it."""
    for shard in shards_of(module):
        yield shard.name, gather_one(shard.sharded.flat, shard.sharded.number)


def load_full_state(module: nn.Module, values: Mapping[str, Tensor] | Callable[[str], Tensor]) -> None:
    """Set every parameter from whole tensors; not collective, each rank takes its part.

    Raises ShardError: a name is missing, or a shape differs; nothing has been changed then if `values` is a mapping.
    """
    shards = shards_of(module)
    if isinstance(values, Mapping):
        for shard in shards:
            if shard.name not in values:
                raise ShardError(f"there is no value for {shard.name}; give one for every parameter of the model")
            _check_tensor(shard, values[shard.name])
    elif not callable(values):
        raise ShardError(
            f"a {type(values).__name__} was given where values are needed; give a dict, or a function of names"
        )
    for shard in shards:
        _fill(shard, values[shard.name] if isinstance(values, Mapping) else values(shard.name))


def shard_of(name: str, flat: FlatBuffer, number: int) -> ParamShard:
    slot, p = flat.layout.slots[number], flat.sharded[number]
    start, stop = flat.layout.own(slot, flat.mesh.shard_rank)
    param, offset = flat.for_optimizer(number) if p.requires_grad else (None, 0)
    shape, local = torch.Size(slot.shape), flat.own_part(number)
    return ParamShard(
        name=name, shape=shape, start=start, stop=stop, local=local, param=param, offset=offset, sharded=p
    )


def gather_one(flat: FlatBuffer, number: int) -> Tensor:
    """The whole tensor of one parameter, in the master's dtype; collective in the shard group."""
    slot, layout = flat.layout.slots[number], flat.layout
    ranges = [layout.own(slot, rank) for rank in range(layout.factor)]
    return gather_parts(flat.mesh, flat.own_part(number), ranges, slot.numel).view(slot.shape)


def _fill(shard: ParamShard, whole: Tensor) -> None:
    """A function, so that one whole parameter is freed before the next one is made."""
    _check_tensor(shard, whole)
    shard.local.copy_(whole.reshape(-1)[shard.start : shard.stop])


def _check_tensor(shard: ParamShard, value: Any) -> None:
    """Raises ShardError."""
    if not isinstance(value, Tensor):
        raise ShardError(
            f"{shard.name} was given a {type(value).__name__}; give a tensor of the shape {tuple(shard.shape)}"
        )
    if value.shape != shard.shape:
        raise ShardError(f"{shard.name} has the shape {tuple(shard.shape)}, and the value {tuple(value.shape)}")
    if value.is_meta or isinstance(value, DTensor):
        what = "is on meta, without values" if value.is_meta else "is a DTensor"
        raise ShardError(f"what was given for {shard.name} {what}; give a plain tensor, as from full_tensor()")


def _original(name: str) -> str:
    return name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")
