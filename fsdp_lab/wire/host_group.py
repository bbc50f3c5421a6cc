"""`HostGroup`: the `SharedGroup` of tensors on the host, which also gives memory for what is sent. `ReservedBuffer`: a
tensor that keeps its address, with memory only while it is held. `MappedShards`: one that can show the shards of all
ranks where they are.

Note: what is not copied. Tensors of `HostGroup.empty` and `reserve` are in the arena: of an input of a reduce-scatter
from the one, and of this rank's part of an output of an all-gather from either, the others read the original. It may be
freed, but nobody must write to it after the collective was issued, also when that has completed here: another rank may
read it later (`settle`). The result of a reduce-scatter is private: it becomes a user's gradient, who may send it and
write to it.

Note: addresses that stay. Autograd saves views of gathered parameters, which know their address: a unit that came back
somewhere else would give wrong gradients without an error. So each buffer has addresses of its own, at which the pages of
a block appear. When it is held again it is given the block of before, if that is free: then nothing is mapped. Units that
are never gathered at the same time so share a block. Otherwise another block is mapped, which takes about as long as a
copy. What is read at the addresses while the buffer is not held is another unit's.

Note: shards that are mapped. A whole buffer is the shards of all ranks, one after the other, each in the arena of its
rank. So their pages can appear at the addresses of the buffer, and an all-gather ends when all ranks have issued it. The
pages are mapped for this process alone: what is written to them becomes a copy of the page, which no other rank sees, and
which would hide what its rank writes there later. So the engine refuses it, and who is to write is given copies: `hold`."""

import ctypes
import errno
import mmap
import os
import time
from typing import Any
from weakref import WeakValueDictionary, finalize

import torch
from torch import Tensor

from fsdp_lab.wire.arena import Arena, ArenaBlock, Mapping as MappedFile
from fsdp_lab.wire.shared_memory import Contents, SharedGroup, SharedWork, What

_SETTLE_S = 1e-4  # between two looks at what others have read
_FIXED, _POPULATE, _NORESERVE, _NO_ACCESS = 0x10, 0x8000, 0x4000, 0  # of mmap, on Linux; the module lacks some
_READ_WRITE, _SHARED = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _FIXED | _POPULATE
_PRIVATE = mmap.MAP_PRIVATE | _FIXED | _POPULATE | _NORESERVE
_FAILED = ctypes.c_void_p(-1).value


class ReservedBuffer:
    """See the module. `tensor`: [numel], not 0."""

    def __init__(self, arena: Arena, numel: int, dtype: torch.dtype) -> None:
        """Raises MemoryError."""
        self._arena, self._nbytes = arena, numel * dtype.itemsize
        self._block: ArenaBlock | None = None  # whose pages are at the addresses
        self._address = _map(None, self._nbytes, _NO_ACCESS, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
        memory = (ctypes.c_ubyte * self._nbytes).from_address(self._address)
        finalize(memory, _unmap, arena, self._address, self._nbytes).atexit = False
        self._memory = memory  # also where torch moves the tensor, as its `share_memory_` does
        self.tensor: Tensor = torch.frombuffer(memory, dtype=dtype)

    @property
    def is_held(self) -> bool:
        return self._arena.is_lent(self._address)

    def hold(self) -> None:
        """Its content is undefined afterwards. Raises MemoryError."""
        if self.is_held:
            return
        self._arena.poll()
        block = self._arena.allocate(self._nbytes, is_mapped=True, again=self._block)
        if block != self._block:
            self._block = None
            try:
                _map(self._address, self._nbytes, _READ_WRITE, _SHARED, self._arena.file.descriptor, block.offset)
            except MemoryError:
                self._arena.free(block)
                raise
            self._block = block
        self._arena.lend(self._address, block, self._nbytes)

    def free(self) -> None:
        """The memory is used again when the other ranks have read what was sent from it."""
        if self.is_held:
            self._arena.free(self._arena.take_back(self._address, self._nbytes))


class MappedShards(ReservedBuffer):
    """See the notes. `tensor`: [W * n]; `shard`: [n], not 0, this rank's, at another address, whole pages long."""

    def __init__(self, arena: Arena, numel: int, dtype: torch.dtype, rank: int, size: int) -> None:
        """numel: n. Raises MemoryError."""
        super().__init__(arena, size * numel, dtype)
        self.shard = arena.tensor(numel, dtype, is_mapped=True)
        self._rank, self._part_nbytes = rank, numel * dtype.itemsize
        self._shown: dict[int, tuple[int, int]] = {}  # by rank: the arena and the offset of what is at its place

    def hold(self) -> None:
        """Its content is undefined afterwards, and it shows nothing until it is free. Raises MemoryError."""
        self._shown.clear()
        super().hold()

    def show_own(self) -> None:
        """At the place of this rank. Raises MemoryError."""
        place = self._arena.find(self.shard)
        assert place is not None
        self.show(self._rank, self._arena.file, place[1])

    def show(self, rank: int, mapping: MappedFile, offset: int) -> None:
        """What a rank has there in its arena is at its place from now on. Raises MemoryError."""
        if self._shown.get(rank) == (mapping.descriptor, offset):
            return
        self._block, address = None, self._address + rank * self._part_nbytes
        _map(address, self._part_nbytes, mmap.PROT_READ, _PRIVATE, mapping.descriptor, offset)
        # Of pages that are read by now: to allow it at once would copy all of them; not to allow it would end the process.
        if _libc().mprotect(ctypes.c_void_p(address), ctypes.c_size_t(self._part_nbytes), _READ_WRITE):
            reason = os.strerror(ctypes.get_errno())
            raise MemoryError(f"{self._part_nbytes} bytes could not be made writable: {reason}")
        self._shown[rank] = mapping.descriptor, offset


def _unmap(arena: Arena, address: int, nbytes: int) -> None:
    arena.dropped(address, nbytes)
    _libc().munmap(ctypes.c_void_p(address), ctypes.c_size_t(nbytes))


def _map(address: int | None, nbytes: int, protection: int, flags: int, descriptor: int = -1, offset: int = 0) -> int:
    """Returns the address."""
    call = _libc().mmap
    call.restype = ctypes.c_void_p
    where, length, begin = ctypes.c_void_p(address), ctypes.c_size_t(nbytes), ctypes.c_long(offset)
    mapped: int | None = call(where, length, protection, flags, descriptor, begin)
    if mapped == _FAILED or mapped is None:
        code = ctypes.get_errno()
        raise MemoryError(f"{nbytes} bytes of addresses could not be mapped: {os.strerror(code or errno.ENOMEM)}")
    return mapped


def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


class HostGroup(SharedGroup):
    """The `SharedGroup` of tensors on the host. Memory for what is sent can be had from it: see the note."""

    def __init__(self, rank: int, size: int, arena: Arena, *others: Any) -> None:
        super().__init__(rank, size, arena, *others)
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
        """The shards that these are of, where an all-gather from the one to the other copies nothing."""
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
            for r, (offset, nbytes) in contents.items():
                if nbytes != mapped.shard.nbytes:
                    raise RuntimeError(f"{self.peers[r].name} did not map its shard where this one did")
                arena = self.peers[r].arena
                assert isinstance(arena, MappedFile)
                mapped.show(r, arena, offset)

        return self._issue(What.MAPPED_GATHER, self._others(mapped.shard), finish, self._find(mapped.shard))
