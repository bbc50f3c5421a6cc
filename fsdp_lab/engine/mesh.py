"""`ShardMesh`: W ranks as R replicas of F shards. F is the sharding factor of arXiv 2304.11277, section 3.2.

F = W shards fully, F = 1 replicates, and between them it is hybrid sharding: all-gathers and reduce-scatters stay inside a
shard group, and an all-reduce of gradient shards runs between the replicas.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp_lab.engine.collectives import Group
from fsdp_lab.engine.errors import ShardError

_BUILD = "make it with fsdp_lab.engine.build_mesh"


@dataclass(frozen=True, kw_only=True)
class ShardMesh:
    """This rank's place in a mesh. A group of one rank is None: nothing is sent in it."""

    device: torch.device
    device_mesh: DeviceMesh
    shard_size: int  # F
    shard_rank: int  # in the shard group, 0..F-1
    replicas: int  # R
    shard_group: Group | None
    replicate_group: Group | None  # the ranks that hold the same shard
    post_forward_group: Group | None = None  # the smaller group to which parameters are resharded after the forward

    @property
    def world_size(self) -> int:
        return self.shard_size * self.replicas

    @classmethod
    def of(cls, mesh: DeviceMesh, *, post_forward_size: int | None = None) -> ShardMesh:
        """From a mesh of ("shard",), ("replicate",) or ("replicate", "shard").

        Args:
            post_forward_size: ranks that share the parameters between forward and backward; making their group is
                collective, so make one `ShardMesh` for all units.

        Raises:
            ShardError: the mesh has other dimensions, or cannot be divided into such groups.
        """
        shard, replicate = _dimensions(mesh)
        post_forward = None if post_forward_size is None else _post_forward_group(mesh, shard, post_forward_size)
        device = torch.device("cpu")
        if mesh.device_type != "cpu":
            device = torch.device(mesh.device_type, torch.cuda.current_device())
        return cls(
            device=device,
            device_mesh=mesh,
            shard_size=1 if shard is None else mesh.size(shard),
            shard_rank=0 if shard is None else mesh.get_local_rank(shard),
            replicas=1 if replicate is None else mesh.size(replicate),
            shard_group=_group(mesh, shard),
            replicate_group=_group(mesh, replicate),
            post_forward_group=post_forward,
        )

    @classmethod
    def resolve(cls, mesh: DeviceMesh | ShardMesh | None, *, post_forward_size: int | None) -> ShardMesh:
        """From what `fully_shard` was given. Raises ShardError for a `ShardMesh` with groups of another size."""
        if not isinstance(mesh, ShardMesh):
            device_type = "cuda" if torch.cuda.is_available() else "cpu"
            return cls.of(build_mesh(device_type) if mesh is None else mesh, post_forward_size=post_forward_size)
        group = mesh.post_forward_group
        if post_forward_size != (None if group is None else group.size()):
            raise ShardError(f"reshard_after_forward={post_forward_size} is not the post_forward_size of the mesh; "
                             "make it with ShardMesh.of(mesh, post_forward_size=...)")  # fmt: skip
        return mesh


def build_mesh(device_type: str, *, shard_size: int | None = None) -> DeviceMesh:
    """A mesh of all ranks; collective.

    Args:
        shard_size: ranks that share one copy of the parameters (F); None: all of them. 1 replicates.

    Raises:
        ShardError: the world size is not a multiple of `shard_size`.
    """
    world = dist.get_world_size()
    if shard_size is None or shard_size == world:
        return init_device_mesh(device_type, (world,), mesh_dim_names=("shard",))
    if world % shard_size:
        raise ShardError(f"{world} ranks cannot be divided into shard groups of {shard_size}; "
                         "use a divisor of the world size")  # fmt: skip
    if shard_size == 1:
        return init_device_mesh(device_type, (world,), mesh_dim_names=("replicate",))
    return init_device_mesh(device_type, (world // shard_size, shard_size), mesh_dim_names=("replicate", "shard"))


def check_equal_on_all_ranks(mesh: ShardMesh, entries: list[str]) -> None:
    """Compare what the ranks are about to shard; collective.

    Raises:
        ShardError: on every rank, naming the first entry that differs.
    """
    by_rank = [entries]
    for group in (mesh.shard_group, mesh.replicate_group):  # always both: no rank may wait for one that raised
        if group is not None:
            parts = [by_rank] * group.size()
            dist.all_gather_object(parts, by_rank, group=group)
            by_rank = [one for part in parts for one in part]
    for rank, other in enumerate(by_rank):
        if other != by_rank[0]:
            pairs = zip([*by_rank[0], "nothing more"], [*other, "nothing more"], strict=False)
            first, differs = next((a, b) for a, b in pairs if a != b)
            raise ShardError(
                f"what is sharded differs between ranks: {first} on rank 0 of the mesh, {differs} on rank {rank}; build the "
                "same model on every rank before fully_shard"
            )


def _dimensions(mesh: DeviceMesh) -> tuple[int | None, int | None]:
    """The mesh's dimensions for shards and for replicas."""
    names = mesh.mesh_dim_names
    if names == ("shard", "replicate"):
        raise ShardError(f'the mesh has its dimensions in the wrong order, ("shard", "replicate"); {_BUILD}')
    if mesh.ndim == 1:
        return (None, 0) if names == ("replicate",) else (0, None)
    if mesh.ndim == 2:
        return 1, 0
    raise ShardError(f'a mesh of ("shard",), ("replicate",) or ("replicate", "shard") is needed, and this one has '
                     f"{mesh.ndim} dimensions; {_BUILD}")  # fmt: skip


def _post_forward_group(mesh: DeviceMesh, shard: int | None, size: int) -> Group:
    """Neighbouring ranks of the shard group, `size` of them; collective."""
    if mesh.ndim != 1 or shard is None:
        raise ShardError('resharding to a smaller group after the forward needs a mesh of ("shard",)')
    if size < 1 or mesh.size() % size:
        raise ShardError(
            f"{mesh.size()} shards cannot be divided into groups of {size}; use a divisor of the world size"
        )
    groups = [dist.new_group(ranks) for ranks in mesh.mesh.view(-1, size).tolist()]
    mine: Group = groups[mesh.get_local_rank() // size]
    return mine


def _group(mesh: DeviceMesh, dimension: int | None) -> Group | None:
    return None if dimension is None or mesh.size(dimension) == 1 else mesh.get_group(dimension)
