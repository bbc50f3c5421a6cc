"""`Grid`: W ranks as R replicas of F shards. F is the sharding factor of arXiv 2304.11277, section 3.2.

F = 1 replicates (one shard, W replicas), F = W shards fully (one replica), and between them it is hybrid sharding: gathers
and reduce-scatters stay inside a shard group, an all-reduce of shards goes across.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp_lab.engine.collectives import Group
from fsdp_lab.engine.errors import ShardError
from fsdp_lab.spec import HYBRIDS, SpecError, Strategy


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Where this rank stands. A group of one rank is None: nothing is sent there."""

    device: torch.device
    factor: int  # F
    rank: int  # in its shard group, 0..F-1
    replicas: int  # R
    shards: Group | None
    across: Group | None  # the same shard in all replicas
    few: Group | None = None  # the smaller group that parameters are resharded to after the forward
    few_rank: int = 0
    asked: tuple[str, int | None, int | None] = ("full_shard", None, None)  # of a strategy: see `_asked`

    @property
    def world_size(self) -> int:
        return self.factor * self.replicas

    @classmethod
    def of(cls, mesh: DeviceMesh, strategy: Strategy) -> Grid:
        """From a mesh of ("shard",), or of ("replicate", "shard"); collective where a smaller group is asked for.

        Raises:
            SpecError: the mesh does not fit the strategy.
        """
        shard, replicate = _dimensions(mesh, strategy)
        few = _smaller_group(mesh, strategy.reshard_size) if strategy.reshard_size else None
        device = torch.device("cpu")
        if mesh.device_type != "cpu":
            device = torch.device(mesh.device_type, torch.cuda.current_device())
        return cls(
            device=device,
            factor=1 if shard is None else mesh.size(shard),
            rank=0 if shard is None else mesh.get_local_rank(shard),
            replicas=1 if replicate is None else mesh.size(replicate),
            shards=_group(mesh, shard),
            across=_group(mesh, replicate),
            few=few,
            few_rank=0 if few is None else few.rank(),
            asked=_asked(strategy),
        )

    def check(self, strategy: Strategy) -> None:
        """Raises SpecError unless this grid is what the strategy asks for."""
        if self.asked != _asked(strategy):
            reason = f"the grid was made for {self.asked}, and {_asked(strategy)} is asked for"
            raise SpecError("strategy.sharding", reason, "make it with Grid.of(mesh, strategy)")


def build_mesh(strategy: Strategy, device_type: str) -> DeviceMesh:
    """The mesh that a strategy asks for over all ranks; collective.

    Raises:
        SpecError: the world size is not a multiple of the sharding factor.
    """
    world = dist.get_world_size()
    if strategy.sharding not in HYBRIDS:
        return init_device_mesh(device_type, (world,), mesh_dim_names=("shard",))
    factor = strategy.shard_size or next((f for f in range(world // 2, 1, -1) if world % f == 0), world)
    if world % factor:
        raise SpecError("strategy.shard_size", f"{world} ranks cannot be parted into shard groups of {factor}",
                        "use a divisor of the world size")  # fmt: skip
    return init_device_mesh(device_type, (world // factor, factor), mesh_dim_names=("replicate", "shard"))


def same_everywhere(grid: Grid, told: list[str]) -> None:
    """Compare what the ranks are about to shard; collective.

    Raises:
        ShardError: on every rank, naming the first entry that differs.
    """
    everybodys = [told]
    for group in (grid.shards, grid.across):  # both, whatever the first one says: no rank must wait for one that raised
        if group is not None:
            parts = [everybodys] * group.size()
            dist.all_gather_object(parts, everybodys, group=group)
            everybodys = [one for part in parts for one in part]
    for rank, other in enumerate(everybodys):
        if other != everybodys[0]:
            pairs = zip([*everybodys[0], "nothing more"], [*other, "nothing more"], strict=False)
            first, differs = next((a, b) for a, b in pairs if a != b)
            raise ShardError(
                f"what is sharded differs between ranks: {first} on rank 0 of the mesh, {differs} on rank {rank}; build the "
                "same model on every rank before fully_shard"
            )


def _dimensions(mesh: DeviceMesh, strategy: Strategy) -> tuple[int | None, int | None]:
    """The mesh's dimensions for shards and for replicas."""
    hybrid = strategy.sharding in HYBRIDS
    if mesh.ndim == 1 and not hybrid:
        dimensions: tuple[int | None, int | None] = (None, 0) if strategy.sharding == "no_shard" else (0, None)
    elif mesh.ndim == 2 and hybrid:
        dimensions = (1, 0)
    else:
        wanted = '2 dimensions, ("replicate", "shard")' if hybrid else '1 dimension, ("shard",)'
        raise SpecError("strategy.sharding", f"{strategy.sharding} needs a mesh of {wanted}, and this one has {mesh.ndim}",
                        "make it with fsdp_lab.engine.build_mesh")  # fmt: skip
    if mesh.mesh_dim_names == ("shard", "replicate"):
        raise SpecError("strategy.sharding", 'the mesh has its dimensions the other way round, ("shard", "replicate")',
                        "make it with fsdp_lab.engine.build_mesh")  # fmt: skip
    factor = 1 if dimensions[0] is None else mesh.size(dimensions[0])
    if strategy.shard_size not in (None, factor):
        way_out = (
            "make the mesh with fsdp_lab.engine.build_mesh" if hybrid else "leave it empty, or choose hybrid_shard"
        )
        raise SpecError(
            "strategy.shard_size", f"{strategy.shard_size} is not the {factor} ranks of a shard group", way_out
        )
    return dimensions


def _asked(strategy: Strategy) -> tuple[str, int | None, int | None]:
    return strategy.sharding, strategy.shard_size, strategy.reshard_size


def _smaller_group(mesh: DeviceMesh, size: int) -> Group:
    """Neighbouring ranks of the shard group, `size` of them; collective."""
    if mesh.ndim != 1 or mesh.size() % size:
        raise SpecError("strategy.reshard_size", f"{mesh.size()} shards cannot be parted into groups of {size}",
                        "use a divisor of the world size, with full_shard")  # fmt: skip
    groups = [dist.new_group(ranks) for ranks in mesh.mesh.view(-1, size).tolist()]
    mine: Group = groups[mesh.get_local_rank() // size]
    return mine


def _group(mesh: DeviceMesh, dimension: int | None) -> Group | None:
    return None if dimension is None or mesh.size(dimension) == 1 else mesh.get_group(dimension)
