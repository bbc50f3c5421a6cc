"""Fully Sharded Data Parallel as its paper describes it (arXiv 2304.11277), to be read in an hour; torch alone is needed.

    from fsdp_lab.engine import fully_shard, sharded_parameters

    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(sharded_parameters(model))

Read in this order: `fsdp_lab/schedule.py` (what is issued when, as data), layout.py (where a parameter lies), flat.py (the
buffer), collectives.py (streams and lifetimes), reduction.py, unit.py (its states), runtime.py (a step), hooks.py
(autograd), fully_shard.py (the entry and its contract). Beside them: grid.py and policy.py (mesh and strategy in these
terms), wrapping.py, ties.py, initialise.py, state.py, norms.py, scaler.py, optimizers.py, slow_motion.py, account.py,
tensors.py, errors.py.
"""

from fsdp_lab.engine.account import Account, account
from fsdp_lab.engine.errors import ShardError
from fsdp_lab.engine.fully_shard import (
    free,
    fully_shard,
    no_sync,
    parameter_groups,
    raise_gradients,
    runtime_of,
    sharded_parameters,
    units_of,
    unshard,
)
from fsdp_lab.engine.grid import Grid, build_mesh
from fsdp_lab.engine.initialise import broadcast_full_state, load_ranges
from fsdp_lab.engine.norms import clip_gradients, gradient_norm
from fsdp_lab.engine.scaler import Scaler
from fsdp_lab.engine.slow_motion import Holding, SlowMotion, Stop, holdings
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
from fsdp_lab.engine.wrapping import blocks, shard_model, units

__all__ = [
    "Account",
    "Grid",
    "Holding",
    "Scaler",
    "Shard",
    "ShardError",
    "SlowMotion",
    "Stop",
    "account",
    "blocks",
    "broadcast_full_state",
    "build_mesh",
    "clip_gradients",
    "free",
    "full_optimizer_state",
    "full_state",
    "fully_shard",
    "gradient_norm",
    "holdings",
    "load_full_optimizer_state",
    "load_full_state",
    "load_ranges",
    "local_optimizer_state",
    "local_state",
    "no_sync",
    "parameter_groups",
    "raise_gradients",
    "runtime_of",
    "shard_model",
    "sharded_parameters",
    "shards_of",
    "units",
    "units_of",
    "unshard",
]
