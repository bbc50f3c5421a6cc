"""The public names of `fsdp_lab.engine`, which imports them at the first use of one."""

# ruff: noqa: F401
from fsdp_lab.engine.api import flats_of, no_sync, runtime_of, runtimes_of, shard, units_of
from fsdp_lab.engine.buffer import FlatBuffer
from fsdp_lab.engine.collectives import ShardError
from fsdp_lab.engine.extras.dropin import (
    UnshardHandle,
    free,
    fully_shard,
    original_parameters,
    parameter_groups,
    register_fsdp_forward_method,
    reshard,
    sharded_parameters,
    split_unused,
    unshard,
    upcast_gradients,
)
from fsdp_lab.engine.extras.dtensor import FlatDTensor
from fsdp_lab.engine.mesh import ShardMesh, build_mesh, known_groups
from fsdp_lab.engine.policy import MixedPrecisionPolicy
from fsdp_lab.engine.schedule import OffloadPolicy, PrefetchPolicy
from fsdp_lab.engine.state import ParamShard, full_state, load_full_state, shards_of
from fsdp_lab.engine.unit import Unit, UnitState
