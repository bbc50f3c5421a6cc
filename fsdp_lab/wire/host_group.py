"""`HostGroup`: the `SharedGroup` of tensors on the host, which also gives memory for what is sent.

Note: what is not copied. Tensors of `HostGroup.empty` and `reserve` are in the arena: of an input of a reduce-scatter
from the one, and of this rank's part of an output of an all-gather from either, the others read the original. Nobody must
write to it after the collective was issued, also when that has completed here: another rank may read it later (`settle`).
It may be freed. The result of a reduce-scatter is private: it becomes a user's gradient, who may send it and write to it.
An all-gather from `MappedShards.shard` to its tensor copies nothing at all: it ends when all ranks have issued it.
"""

from __future__ import annotations

import time
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from fsdp_lab.wire.arena import Arena, Mapping as MappedFile
from fsdp_lab.wire.reserved import MappedShards, ReservedBuffer
from fsdp_lab.wire.shared_memory import Contents, SharedGroup, SharedWork, What

_SETTLE_S = 1e-4  # between two looks at what others have read


class HostGroup(SharedGroup):
    """Of tensors on the host. Memory for what is sent can be had from it: see the note."""

    def __init__(self, rank: int, size: int, arena: Arena, *rest: Any) -> None:
        super().__init__(rank, size, arena, *rest)
        self._host = arena
        self._mapped: WeakValueDictionary[int, MappedShards] = WeakValueDictionary()  # by the address of the whole
        arena.watch(self.poll)

    def empty(self, numel: int, dtype: torch.dtype, *, is_private: bool = False) -> Tensor:
        """[numel], with any content. `is_private`: what is sent from it is copied. Raises MemoryError."""
        return self._host.tensor(numel, dtype, is_private=is_private) if numel else torch.empty(0, dtype=dtype)

    def reserve(self, numel: int, dtype: torch.dtype) -> ReservedBuffer:
        """For a tensor [numel], not 0, that is there again and again. Raises MemoryError."""
        return ReservedBuffer(self._host, numel, dtype)

    def map_shards(self, numel: int, dtype: torch.dtype) -> MappedShards:
        """For a whole [W * numel] that is not copied. A shard has whole pages, and is not empty. Raises MemoryError."""
        made = MappedShards(self._host, numel, dtype, self._rank, self._size)
        self._mapped[made.tensor.data_ptr()] = made
        return made

    def mapped(self, whole: Tensor, shard: Tensor) -> MappedShards | None:
        """What these are of, where an all-gather from the one to the other copies nothing."""
        mapped = self._mapped.get(whole.data_ptr())
        if mapped is None or mapped.is_held or whole.numel() != mapped.tensor.numel():
            return None
        return mapped if shard.data_ptr() == mapped.shard.data_ptr() else None

    def settle(self, tensor: Tensor) -> None:
        """Wait until the others have read what was sent from a tensor, each in a wait of its own. Raises RuntimeError after
        the group's timeout, and what `check` raises."""
        end_s = time.monotonic() + self._timeout_s
        self._host.poll()
        while self._host.is_unread(tensor):
            self._check()
            if time.monotonic() > end_s:
                raise RuntimeError(f"a rank did not read what this one sent, for {self._timeout_s:.0f} s")
            time.sleep(_SETTLE_S)
            self._host.poll()

    def _allgather_base(self, output: Tensor, input: Tensor, opts: Any = None) -> SharedWork:
        """output: [W * n], input: [n]"""
        mapped = self.mapped(output, input)
        if mapped is None:
            return super()._allgather_base(output, input, opts)
        mapped.show_own()

        def finish(contents: Contents) -> None:
            for r, content in contents.items():
                if content.numel() != mapped.shard.nbytes:
                    raise RuntimeError(f"{self.peers[r].name} did not map its shard where this one did")
                arena = self.peers[r].arena
                assert isinstance(arena, MappedFile)
                mapped.show(r, arena, content.data_ptr() - arena.address)

        return self._issue(What.MAPPED_GATHER, self._others(mapped.shard), finish, in_place=True)
