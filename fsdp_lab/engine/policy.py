"""How a unit is sharded, in torch's terms: precision, offload and, for the schedule, prefetching and limits."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import nn
from torch.distributed import fsdp
from torch.utils.hooks import RemovableHandle

from fsdp_lab.base.tensors import cast
from fsdp_lab.engine.collectives import ShardError
from fsdp_lab.engine.mesh import ShardMesh
from fsdp_lab.engine.schedule import OffloadPolicy, Rules


class ModuleKind(Enum):
    """The distinctions that mixed precision makes between modules before it chooses the dtype of its parameters."""

    PLAIN = "plain"
    NORM = "norm"
    BATCH_NORM = "batch norm"  # torch wants parameters in the dtype of the running statistics: both stay as they are


@dataclass(frozen=True, kw_only=True)
class MixedPrecisionPolicy(fsdp.MixedPrecisionPolicy):
    """torch's policy with three fields more. Master shards keep the dtype that parameters had; None keeps a dtype, but a
    `reduce_dtype` of None is that of gathered parameters."""

    norm_dtype: torch.dtype | None = None  # gathered parameters of normalisation layers; None: `param_dtype`
    buffer_dtype: torch.dtype | None = None
    keep_low_precision_gradients: bool = False  # gradient shards stay in `reduce_dtype`: see `upcast_gradients`

    @classmethod
    def of(cls, policy: fsdp.MixedPrecisionPolicy | None) -> "MixedPrecisionPolicy":
        """The policy that `fully_shard` was given, which may be torch's."""
        policy = cls() if policy is None else policy
        if not isinstance(policy, fsdp.MixedPrecisionPolicy):
            raise ShardError(f"mp_policy is a {type(policy).__name__}; give a MixedPrecisionPolicy")
        given = vars(policy)
        for name, dtype in given.items():
            is_floating = isinstance(dtype, torch.dtype) and dtype.is_floating_point
            if name.endswith("_dtype") and dtype is not None and not is_floating:
                raise ShardError(f"mp_policy has {name}={dtype!r}; give a floating dtype, as torch.bfloat16, or None")
        return cls(**given)


def offload_of(policy: OffloadPolicy | fsdp.OffloadPolicy | None) -> OffloadPolicy:
    """The policy that `fully_shard` was given, which may be torch's: its `CPUOffloadPolicy` keeps parameters on the
    host too."""
    if policy is None or isinstance(policy, fsdp.OffloadPolicy):
        return OffloadPolicy.ALL if isinstance(policy, fsdp.CPUOffloadPolicy) else OffloadPolicy.NONE
    if not isinstance(policy, OffloadPolicy):
        raise ShardError(f"offload_policy is {policy!r}; give one of {', '.join(map(str, OffloadPolicy))}")
    return policy


@dataclass(frozen=True, kw_only=True)
class ShardPolicy:
    """The arguments of `fully_shard` except the mesh; one for each unit."""

    mp: MixedPrecisionPolicy
    rules: Rules
    has_own_prefetch: bool  # whether prefetching was chosen for this unit; it is one for all units of a root
    shard_optimizer_only: bool  # ZeRO-1: gradients and gathered parameters keep their storage
    map_shards: bool = False  # what is gathered is a view of the ranks' shards, and no copy: see extras/parameters.py

    def is_on_host(self, mesh: ShardMesh) -> bool:
        """Returns whether master shards lie elsewhere than where they are gathered."""
        return self.rules.offload != OffloadPolicy.NONE and mesh.streams is not None

    def gathered_dtype(self, own: torch.dtype, kind: ModuleKind) -> torch.dtype:
        """The dtype in which a parameter of dtype `own`, in a module of that kind, is gathered."""
        norm = self.mp.norm_dtype or self.mp.param_dtype
        wanted = {ModuleKind.PLAIN: self.mp.param_dtype, ModuleKind.NORM: norm, ModuleKind.BATCH_NORM: None}[kind]
        return wanted if wanted is not None and own.is_floating_point else own

    def reduced_dtype(self, gathered: torch.dtype) -> torch.dtype:
        """The dtype in which the gradient of a parameter is reduced that is gathered in `gathered`."""
        return (self.mp.reduce_dtype or gathered) if gathered.is_floating_point else gathered


def kind_of(module: nn.Module) -> ModuleKind:
    """Norms are torch's own classes, and others with "Norm" in their name."""
    if "Norm" not in type(module).__name__ or next(module.children(), None) is not None:
        return ModuleKind.PLAIN
    return ModuleKind.NORM if getattr(module, "running_mean", None) is None else ModuleKind.BATCH_NORM


def cast_around_norms(modules: Iterable[nn.Module], policy: ShardPolicy) -> list[RemovableHandle]:
    """Normalisation layers that compute in a dtype of their own take their inputs in it and return the unit's."""
    plain = policy.gathered_dtype(torch.float32, ModuleKind.PLAIN)
    handles: list[RemovableHandle] = []
    for module in modules:
        own = policy.gathered_dtype(torch.float32, kind_of(module))
        if own is not plain:
            handles.append(module.register_forward_pre_hook(lambda _, args, inside=own: cast(args, inside)))
            handles.append(module.register_forward_hook(lambda _, __, output: cast(output, plain)))
    return handles


def place_buffers(modules: Sequence[nn.Module], device: torch.device, policy: ShardPolicy) -> None:
    """Moves buffers, which stay whole on every rank, to `device`."""
    for module in {m: None for root in modules for m in root.modules()}:
        dtype = None if kind_of(module) is ModuleKind.BATCH_NORM else policy.mp.buffer_dtype
        for b in module.buffers(recurse=False):
            if not b.is_meta:
                b.data = b.data.to(device=device, dtype=dtype if b.is_floating_point() else None)
