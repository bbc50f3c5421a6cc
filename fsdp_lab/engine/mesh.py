"""`ShardMesh`: W ranks as R replicas of F shards. F is the sharding factor of arXiv 2304.11277, section 3.2.

F = W shards fully, F = 1 replicates, and between them it is hybrid sharding: all-gathers and reduce-scatters stay inside a
shard group, and an all-reduce of gradient shards runs between the replicas.

Note: the end of a program. A thread of Gloo needs the interpreter to release the tensors of its last collective, and torch
aborts a process that ends meanwhile. `destroy_process_group` joins these threads once nobody holds their group. A model may
outlive it, and torch's cached plans of operations hold meshes, so neither may hold a group. A mesh that a caller makes does.
"""

import weakref
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp_lab.base.streams import Streams, streams_of
from fsdp_lab.engine.collectives import BufferPool, Group, ResizedStorage, ShardError, answered, pool_of
from fsdp_lab.engine.layout import Range

_POST_FORWARD = "fsdp_lab post-forward"  # the description by which such a group is found again
_BUILD = "make it with fsdp_lab.engine.build_mesh"


class WeakGroup:
    """A field of a mesh for a group, which torch keeps until it is destroyed. None: of one rank, nothing is sent in it."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = f"_{name}"

    def __set__(self, mesh: "ShardMesh", group: Group | None) -> None:
        mesh.__dict__[self._name] = None if group is None else weakref.ref(group)

    def __get__(self, mesh: "ShardMesh | None", owner: type) -> Group | None:
        """Raises ShardError where the group was destroyed."""
        kept = None if mesh is None else mesh.__dict__[self._name]
        group: Group | None = None if kept is None else kept()
        if kept is not None and group is None:
            raise ShardError("the process group of this model was destroyed; init_process_group and shard a new model")
        return group


@dataclass(frozen=True, kw_only=True)
class ShardMesh:
    """This rank's place in a mesh."""

    device: torch.device
    device_mesh: DeviceMesh
    ranks: tuple[int, ...]  # all of them, by their number in the world
    shard_size: int  # F
    shard_rank: int  # in the shard group, 0..F-1
    replicas: int  # R
    shard_group: WeakGroup = WeakGroup()
    replicate_group: WeakGroup = WeakGroup()  # the ranks that hold the same shard
    post_forward_group: WeakGroup = WeakGroup()  # the smaller one to which parameters are resharded after the forward
    # For errors: the step; phase and unit that are waited for.
    now: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(step=0, waits_for=()), compare=False)

    def answered(self, what: str | None = None) -> AbstractContextManager[None]:
        """A context around collectives that are waited for at once, in which an error says so; `what`: if no phase."""
        return answered(self.ranks, lambda: f"in step {self.now.step} ({what or ' '.join(self.now.waits_for)})")

    @property
    def buffer_pool(self) -> BufferPool | None:
        """Memory of the shard group's own for what it sends, where it has any."""
        return pool_of(self.shard_group, self.device)

    def empty(self, numel: int, dtype: torch.dtype, *, pooled: bool = True, is_private: bool = False) -> Tensor:
        """[numel], with any content, from the pool, if any, where it may be `pooled`. `is_private`: see `BufferPool`."""
        pool = self.buffer_pool if pooled else None
        if pool is None:
            return torch.empty(numel, dtype=dtype, device=self.device)
        return pool.empty(numel, dtype, is_private=is_private)

    def reserve(self, numel: int, dtype: torch.dtype, *, pooled: bool) -> Any:
        """The same as what has memory only while it is held: a `ResizedStorage`, or the pool's own."""
        pool = self.buffer_pool if pooled and numel else None
        return ResizedStorage(numel, dtype, self.device) if pool is None else pool.reserve(numel, dtype)

    @cached_property
    def streams(self) -> Streams | None:
        """The streams of the device; None on a CPU."""
        return streams_of(self.device)

    @cached_property
    def plain_mesh(self) -> DeviceMesh:
        """One mesh for numbers that are equal on all ranks, whatever mesh a unit has: torch's norm of norms needs that."""
        everybody = len(self.ranks) == dist.get_world_size()
        return _mesh_of_world(self.device) if everybody else self.device_mesh

    @classmethod
    def of(cls, mesh: DeviceMesh, device: torch.device | None = None) -> "ShardMesh":
        """Makes one from a mesh of ("shard",), ("replicate",) or ("replicate", "shard"). `device`: of this rank; None: the
        current one of the mesh's type. Raises ShardError: the mesh has other dimensions, or is not of this rank."""
        if not isinstance(mesh, DeviceMesh):
            raise ShardError(f"a {type(mesh).__name__} was given as a mesh; {_BUILD}")
        shard, replicate = _dimensions(mesh)
        if mesh.get_coordinate() is None:
            raise ShardError(f"rank {dist.get_rank()} is not in the mesh, which has ranks {mesh.mesh.flatten().tolist()}; "
                             "call fully_shard on these only")  # fmt: skip
        if mesh.device_type not in ("cpu", "cuda") or (mesh.device_type == "cuda" and not torch.cuda.is_available()):
            raise ShardError(f"the mesh is for {mesh.device_type}, and there is no such device here; {_BUILD}")
        if device is None and mesh.device_type == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
        return cls(
            device=device or torch.device("cpu"),
            device_mesh=mesh,
            ranks=tuple(mesh.mesh.flatten().tolist()),
            shard_size=1 if shard is None else mesh.size(shard),
            shard_rank=0 if shard is None else mesh.get_local_rank(shard),
            replicas=1 if replicate is None else mesh.size(replicate),
            shard_group=_group(mesh, shard),
            replicate_group=_group(mesh, replicate),
        )

    @classmethod
    def resolve(
        cls, mesh: "DeviceMesh | ShardMesh | None", *, post_forward_size: int | None, holding: Collection[torch.device]
    ) -> "ShardMesh":
        """Makes one from what `fully_shard` was given; `holding`: where the parameters are. Without a mesh all ranks share
        one copy, in the default group: no group is made. Raises ShardError: there is no process group."""
        if not dist.is_initialized():
            raise ShardError("there is no process group; call torch.distributed.init_process_group before fully_shard")
        if mesh is None:
            current = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None
            backends = dict(pair.split(":", 1) for pair in dist.get_backend_config().split(","))
            device = choose_device(backends, holding, current)
            mesh = cls.of(_mesh_of_world(device, "shard"), device)
        elif not isinstance(mesh, ShardMesh):
            mesh = cls.of(mesh)
        return mesh.with_post_forward(post_forward_size)

    def with_post_forward(self, size: int | None, *, own: bool = False) -> "ShardMesh":
        """The same mesh with the group of `size` neighbours in each shard group; collective, unless one is there to be
        used again. `own`: a new one, which is given to nobody else."""
        if size is None or (self.post_forward_group is not None and self.post_forward_group.size() == size):
            return self
        if not isinstance(size, int) or size < 1 or self.shard_size % size:
            raise ShardError(f"{self.shard_size} shards cannot be divided into groups of {size!r}; "
                             f"use a divisor of {self.shard_size}, or True")  # fmt: skip
        parts = [list(self.ranks[i : i + size]) for i in range(0, len(self.ranks), size)]
        alike = [] if own else [group for group in known_groups() if group.group_desc == _POST_FORWARD]
        group = next((group for group in alike if dist.get_process_group_ranks(group) in parts), None)
        if group is None:
            make: Any = dist.new_subgroups_by_enumeration
            with self.answered(f"fully_shard, groups of {size}"):
                group, _ = make(parts, group_desc=None if own else _POST_FORWARD)
        return replace(self, post_forward_group=group)


def choose_device(
    backends: Mapping[str, str], holding: Collection[torch.device], current: torch.device | None
) -> torch.device:
    """The device for a module that was given no mesh: the GPU that is `holding` parameters of it; else the current one, if
    there is one and the process group has a backend for GPUs apart (`backends`, by device type); else the CPU. Raises
    ShardError: parameters are on several GPUs, or nothing of the process group serves where they would go."""
    gpus = {str(device): device for device in holding if device.type not in ("cpu", "meta")}
    if len(gpus) > 1:
        raise ShardError(f"parameters are on {' and '.join(sorted(gpus))}; a rank shards on one device, so bring the module "
                         "to one before fully_shard")  # fmt: skip
    device = next(iter(gpus.values()), torch.device("cpu"))
    if not gpus and current is not None and backends.get(current.type, backends.get("cpu")) != backends.get("cpu"):
        device = current
    if device.type not in backends:
        raise ShardError(f"the process group has no backend for {device.type}, where the parameters are; choose one in "
                         "init_process_group, such as gloo for cpu and nccl for cuda")  # fmt: skip
    return device


def build_mesh(device_type: str, *, shard_size: int | None = None) -> DeviceMesh:
    """A mesh of all ranks; collective. `shard_size`: ranks that share one copy of the parameters (F); None: all of them. 1
    replicates. Raises ShardError: the world size is not a multiple of it, or there is no such device."""
    world = dist.get_world_size()
    if device_type != "cpu" and not (device_type == "cuda" and torch.cuda.is_available()):
        raise ShardError(f"the mesh is to be for {device_type!r}, and there is no such device here; give cpu or cuda")
    if shard_size is not None and (not isinstance(shard_size, int) or shard_size < 1 or world % shard_size):
        raise ShardError(f"{world} ranks cannot be divided into shard groups of {shard_size!r}; "
                         "use a divisor of the world size")  # fmt: skip
    size = shard_size or world
    given = {name: n for name, n in (("replicate", world // size), ("shard", size)) if n > 1} or {"shard": world}
    return letting_go(init_device_mesh(device_type, tuple(given.values()), mesh_dim_names=tuple(given)))


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


def known_groups() -> list[Group]:
    """All groups that torch has registered in this process, except the default one."""
    return [group for group in c10d._world.pg_map if group is not dist.group.WORLD]


def _mesh_of_world(device: torch.device, *names: str) -> DeviceMesh:
    world: Any = dist.group.WORLD
    return letting_go(DeviceMesh.from_group(world, device.type, mesh_dim_names=names or None))


def letting_go(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh, which no longer keeps its groups: torch looks them up by name, but for torch.compile."""
    if hasattr(mesh, "_pg_registry"):
        mesh._pg_registry = weakref.WeakValueDictionary(mesh._pg_registry)  # type: ignore[assignment]
    return mesh


def _group(mesh: DeviceMesh, dimension: int | None) -> Group | None:
    return None if dimension is None or mesh.size(dimension) == 1 else mesh.get_group(dimension)


def gather_parts(mesh: ShardMesh, local: Tensor, ranges: Sequence[Range], numel: int) -> Tensor:
    """[numel], a whole tensor flattened, of which rank r of the shard group holds `ranges[r]`; collective. Each sends its
    part to the others: an all-gather of equal parts would hold F times the longest one."""
    whole = torch.empty(numel, dtype=local.dtype, device=mesh.device)
    whole[slice(*ranges[mesh.shard_rank])].copy_(local)
    with mesh.answered("a whole tensor"):
        works: list[Any] = [
            dist.broadcast(whole[start:stop], group=mesh.shard_group, group_src=rank, async_op=True)
            for rank, (start, stop) in enumerate(ranges)
            if start < stop and mesh.shard_group is not None
        ]
        for work in works:
            work.wait()
    return whole
