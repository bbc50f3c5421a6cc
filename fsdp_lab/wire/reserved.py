"""`ReservedBuffer`: a tensor that keeps its address, with memory only while it is held.

Note: addresses that stay. Autograd saves views of gathered parameters, as `F.linear` saves `weight.t()`, and a view knows
its address. A unit that came back somewhere else would give wrong gradients without an error. So each buffer has addresses
of its own, at which the pages of a block appear. When it is held again it is given the block of before, if that is free:
then nothing is mapped, and no page is touched for the first time. Units that are never gathered at the same time so share a
block, whose pages are mapped at the addresses of each. Otherwise another block is mapped, which takes about as long as a
copy.

What is read at the addresses while the buffer is not held is another unit's.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from typing import Any
from weakref import finalize

import torch
from torch import Tensor

from fsdp_lab.wire.arena import Arena, ArenaBlock

_FIXED, _POPULATE, _NORESERVE, _NO_ACCESS = 0x10, 0x8000, 0x4000, 0  # of mmap, on Linux; the module lacks some
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
                _map(self._address, self._nbytes, mmap.PROT_READ | mmap.PROT_WRITE,
                     mmap.MAP_SHARED | _FIXED | _POPULATE, self._arena.file.descriptor, block.offset)  # fmt: skip
            except MemoryError:
                self._arena.free(block)
                raise
            self._block = block
        self._arena.lend(self._address, block, self._nbytes)

    def free(self) -> None:
        """The memory is used again when the other ranks have read what was sent from it."""
        if self.is_held:
            self._arena.free(self._arena.take_back(self._address, self._nbytes))


def _unmap(arena: Arena, address: int, nbytes: int) -> None:
    arena.dropped(address, nbytes)
    _libc().munmap(ctypes.c_void_p(address), ctypes.c_size_t(nbytes))


def _map(address: int | None, nbytes: int, protection: int, flags: int, descriptor: int = -1, offset: int = 0) -> int:
    """Returns the address."""
    call = _libc().mmap
    call.restype = ctypes.c_void_p
    found: int | None = call(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), protection, flags, descriptor,
                             ctypes.c_long(offset))  # fmt: skip
    if found == _FAILED or found is None:
        code = ctypes.get_errno()
        raise MemoryError(f"{nbytes} bytes of addresses could not be mapped: {os.strerror(code or errno.ENOMEM)}")
    return found


def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)
