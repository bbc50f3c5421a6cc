"""Memory of gathered buffers and of what is sent: from torch's allocator, or from the process group's own, where it has any.

A group may have a `buffer_pool`, as the lab's wire has between ranks that share memory (wire/shared_memory.py): what is
gathered or sent there is not copied once more, and is in the same place in every step, so that no page is touched for the
first time. Such memory must not be written to after it was sent, since other ranks may read it later; it may be freed. Here
that holds: gathered parameters are read only, except after an `unshard`, which waits until others have them, and a gradient
that was sent is dropped. Its reduced shard, which a user sees, is private. ZeRO-1 keeps what it sends, and uses torch's
allocator. A child that is forked shares such memory, too, and sees what is written later.

Note: shards that are mapped. Where shards lie in memory that all ranks of a host can read, the whole buffer can be a view of
them, so that one copy of the parameters serves the host, and nothing is gathered: see `MappedBuffer`. An all-gather then
only waits until all ranks have stepped their optimizers. And a rank that steps its optimizer writes to what others read: so
at the end of each forward and backward the ranks wait for each other. Inside `unshard`, where a caller may write to gathered
parameters, they are copies.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from fsdp_lab.engine.collectives import Group


class GatheredBuffer(Protocol):
    """A tensor that has memory only while it is held. Views of it see what it holds, whenever they were made."""

    tensor: Tensor  # [numel]

    @property
    def is_held(self) -> bool: ...

    def hold(self) -> None:
        """Takes the memory; its content is undefined then."""

    def free(self) -> None: ...


class MappedBuffer(GatheredBuffer, Protocol):
    """A `GatheredBuffer` whose tensor, unless it is held, shows the shards of all ranks after an all-gather from `shard`. It
    must then not be written to."""

    shard: Tensor  # [n], this rank's


class BufferPool(Protocol):
    """The protocol of a group's `buffer_pool`, for tensors on the host."""

    def empty(self, numel: int, dtype: torch.dtype, *, is_private: bool = False) -> Tensor:
        """[numel], with any content; its memory is free when nobody has it. `is_private`: it may be written to at any time,
        also after it was sent."""

    def reserve(self, numel: int, dtype: torch.dtype) -> GatheredBuffer:
        """numel: not 0."""

    def map_shards(self, numel: int, dtype: torch.dtype) -> MappedBuffer:
        """numel: of a shard, which has whole pages and is not empty."""

    def settle(self, tensor: Tensor) -> None:
        """Wait until other ranks have read what was sent from a tensor."""


class ResizedBuffer:
    """A `GatheredBuffer` of torch's allocator. Held when it is made: torch makes no view of what has no storage."""

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.tensor = torch.empty(numel, dtype=dtype, device=device)
        self._storage = self.tensor.untyped_storage()
        self._nbytes = self._storage.nbytes()

    @property
    def is_held(self) -> bool:
        return bool(self._storage.size())

    def hold(self) -> None:
        if not self.is_held:
            self._storage.resize_(self._nbytes)

    def free(self) -> None:
        self._storage.resize_(0)


def pool_of(group: Group | None, device: torch.device) -> BufferPool | None:
    return getattr(group, "buffer_pool", None) if device.type == "cpu" else None


def gathered_buffer(pool: BufferPool | None, numel: int, dtype: torch.dtype, device: torch.device) -> GatheredBuffer:
    """Views of it can be made at once; `free` it afterwards."""
    return ResizedBuffer(numel, dtype, device) if pool is None or not numel else pool.reserve(numel, dtype)


def empty(
    pool: BufferPool | None, numel: int, dtype: torch.dtype, device: torch.device, *, is_private: bool = False
) -> Tensor:
    """[numel], with any content. `is_private`: see `BufferPool`."""
    if pool is None:
        return torch.empty(numel, dtype=dtype, device=device)
    return pool.empty(numel, dtype, is_private=is_private)
