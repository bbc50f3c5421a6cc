"""Fully Sharded Data Parallel as its paper describes it (arXiv 2304.11277). README.md, beside this file, has the order of
reading, the walk of one step, and FSDP2 side by side.

It needs torch only. To install it alone, in a clone: `pip install torch && pip install --no-deps .`

    from fsdp_lab.engine import fully_shard

    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())

`AdamW(sharded_parameters(model))` steps the same values as a few flat tensors, which is faster.

What cannot be done raises a `ShardError`, which says what to do.
"""

from typing import TYPE_CHECKING

from fsdp_lab.base import lazy_names

if TYPE_CHECKING:
    from fsdp_lab.engine.api import (
        flats_of as flats_of,
        no_sync as no_sync,
        runtime_of as runtime_of,
        runtimes_of as runtimes_of,
        shard as shard,
        units_of as units_of,
    )
    from fsdp_lab.engine.buffer import FlatBuffer as FlatBuffer
    from fsdp_lab.engine.collectives import ShardError as ShardError
    from fsdp_lab.engine.extras.dropin import (
        Scaler as Scaler,
        UnshardHandle as UnshardHandle,
        free as free,
        fully_shard as fully_shard,
        original_parameters as original_parameters,
        parameter_groups as parameter_groups,
        register_fsdp_forward_method as register_fsdp_forward_method,
        reshard as reshard,
        sharded_parameters as sharded_parameters,
        split_unused as split_unused,
        unshard as unshard,
        upcast_gradients as upcast_gradients,
    )
    from fsdp_lab.engine.extras.dtensor import FlatDTensor as FlatDTensor
    from fsdp_lab.engine.mesh import ShardMesh as ShardMesh, build_mesh as build_mesh, known_groups as known_groups
    from fsdp_lab.engine.policy import MixedPrecisionPolicy as MixedPrecisionPolicy
    from fsdp_lab.engine.schedule import OffloadPolicy as OffloadPolicy, PrefetchPolicy as PrefetchPolicy
    from fsdp_lab.engine.state import (
        ParamShard as ParamShard,
        full_state as full_state,
        load_full_state as load_full_state,
        shards_of as shards_of,
    )
    from fsdp_lab.engine.unit import Unit as Unit, UnitState as UnitState

# Imported at their first use, since Specs and the planner read the schedule where torch is not installed.
_NAMES = {
    "api": "flats_of no_sync runtime_of runtimes_of shard units_of",
    "buffer": "FlatBuffer",
    "collectives": "ShardError",
    "extras.dropin": "Scaler UnshardHandle upcast_gradients free fully_shard original_parameters parameter_groups "
    "register_fsdp_forward_method reshard sharded_parameters split_unused unshard",
    "extras.dtensor": "FlatDTensor",
    "mesh": "ShardMesh build_mesh known_groups",
    "policy": "MixedPrecisionPolicy",
    "schedule": "OffloadPolicy PrefetchPolicy",
    "state": "ParamShard full_state load_full_state shards_of",
    "unit": "Unit UnitState",
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}

__all__ = sorted(_HOMES)
if not TYPE_CHECKING:  # a `__getattr__` would let any name pass
    __getattr__, __dir__ = lazy_names(__name__, _HOMES)
