"""Fully Sharded Data Parallel as its paper describes it (arXiv 2304.11277), to be read in an hour; torch alone is needed.

    from fsdp_lab.engine import fully_shard, sharded_parameters

    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(sharded_parameters(model))

Read in this order: `fsdp_lab/schedule.py` (what is issued when, as data), layout.py (where a parameter lies), flat.py (the
buffer), collectives.py (streams and lifetimes), reduction.py, unit.py (its states), runtime.py (a step), hooks.py (autograd),
fully_shard.py (the entry and its contract). Beside them: grid.py and policy.py (mesh and strategy in these terms), wrapping.py,
initialise.py, state.py, norms.py, scaler.py, slow_motion.py, tensors.py, errors.py.
"""

from fsdp_lab.engine.errors import ShardError
from fsdp_lab.engine.fully_shard import (
    free,
    fully_shard,
    no_sync,
    parameter_groups,
    runtime_of,
    sharded_parameters,
    units_of,
    unshard,
)
from fsdp_lab.engine.grid import build_mesh
from fsdp_lab.engine.state import (
    Shard,
    full_optimizer_state,
    full_state,
    load_full_optimizer_state,
    load_full_state,
    local_optimizer_state,
    local_state,
    shards_of,
)

__all__ = [
    "Shard",
    "ShardError",
    "build_mesh",
    "free",
    "full_optimizer_state",
    "full_state",
    "fully_shard",
    "load_full_optimizer_state",
    "load_full_state",
    "local_optimizer_state",
    "local_state",
    "no_sync",
    "parameter_groups",
    "runtime_of",
    "sharded_parameters",
    "shards_of",
    "units_of",
    "unshard",
]
