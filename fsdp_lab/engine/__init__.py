"""Fully Sharded Data Parallel as its paper describes it (arXiv 2304.11277), to be read in an hour.

It needs torch only. To install it alone, in a clone: `pip install torch && pip install --no-deps .`

    from fsdp_lab.engine import fully_shard, sharded_parameters

    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(sharded_parameters(model))

End a script by `torch.distributed.destroy_process_group()`: over Gloo, torch may abort a process that ends while a thread of
Gloo still holds the tensor of a collective.

The core is 1,893 lines. Read its files in this order:

    fully_shard.py    the entry and its contract; how units are made
    unit.py           `Unit`: the parameters of one module, gathered and freed together; its states
    flat.py           `FlatBuffer`: those parameters as one buffer, of which each rank keeps a shard
    gradients.py      what comes from autograd, its reduction, and what the optimizer is given
    collectives.py    all-gather, reduce-scatter and all-reduce on streams of their own
    runtime.py        a training step: what is gathered and reduced when
    hooks.py          how autograd and modules report where they are
    ../core/layout.py    where each parameter lies in the buffer, and which part each rank keeps
    ../core/schedule.py  what is issued at which point of a step, as data; the planner simulates the same list

Beside the core: mesh.py (replicas and shards), policy.py (dtypes), state.py (state by parameter names, checkpoints, deferred
initialisation), scaling.py (gradient norm, clipping, loss scaling), memory.py (bytes by class), ties.py (shared
parameters), refusals.py (what cannot be sharded), tensors.py (tensors inside nested values), unshard_handle.py (parameters
that a caller asked for), errors.py.
"""

from fsdp_lab.core.schedule import OffloadPolicy, PrefetchPolicy
from fsdp_lab.engine.dtensor import FlatDTensor
from fsdp_lab.engine.errors import ShardError
from fsdp_lab.engine.flat import FlatBuffer
from fsdp_lab.engine.fully_shard import (
    flats_of,
    fully_shard,
    no_sync,
    parameter_groups,
    register_fsdp_forward_method,
    reshard,
    runtime_of,
    sharded_parameters,
    units_of,
    unshard,
)
from fsdp_lab.engine.memory import MemoryBreakdown, free, memory_stats
from fsdp_lab.engine.mesh import ShardMesh, build_mesh, known_groups
from fsdp_lab.engine.policy import MixedPrecisionPolicy
from fsdp_lab.engine.runtime import TrainingState
from fsdp_lab.engine.scaling import Scaler, clip_gradients, gradient_norm, upcast_gradients
from fsdp_lab.engine.state import (
    ParamShard,
    broadcast_full_state,
    full_optimizer_state,
    full_state,
    load_full_optimizer_state,
    load_full_state,
    load_ranges,
    local_optimizer_state,
    local_state,
    original_parameters,
    shards_of,
    split_unused,
)
from fsdp_lab.engine.unit import Unit, UnitState
from fsdp_lab.engine.unshard_handle import UnshardHandle

__all__ = [
    "FlatBuffer",
    "FlatDTensor",
    "MemoryBreakdown",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "ParamShard",
    "PrefetchPolicy",
    "Scaler",
    "ShardError",
    "ShardMesh",
    "TrainingState",
    "Unit",
    "UnitState",
    "UnshardHandle",
    "broadcast_full_state",
    "build_mesh",
    "clip_gradients",
    "flats_of",
    "free",
    "full_optimizer_state",
    "full_state",
    "fully_shard",
    "gradient_norm",
    "known_groups",
    "load_full_optimizer_state",
    "load_full_state",
    "load_ranges",
    "local_optimizer_state",
    "local_state",
    "memory_stats",
    "no_sync",
    "original_parameters",
    "parameter_groups",
    "register_fsdp_forward_method",
    "reshard",
    "runtime_of",
    "sharded_parameters",
    "shards_of",
    "split_unused",
    "units_of",
    "unshard",
    "upcast_gradients",
]
