"""`Arena`: memory of one rank that the other ranks of its host read.

Note: shared memory. An arena is a memory file (`memfd_create`) without a name: it is gone with the last process that has
it, however that ends, and /dev/shm and its limit have no part in it. The file is as large as the machine's memory and
nearly all hole: a block takes memory when it is allocated, at once, so that a shortage is met there. The file cannot shrink
(a seal), so that no rank can take pages from under another; and it is in no core dump, which would fill the holes.

Each rank writes to its own arena only; others map it for reading. Blocks keep their addresses and pages, so a step that
allocates what the one before has freed has no page faults.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import threading
import warnings
from collections import defaultdict
from dataclasses import dataclass
from weakref import WeakValueDictionary

import torch
from torch import Tensor

ALIGN = 64  # bytes: a cache line, and a multiple of every element's size
_STEPS = 8  # size classes between two powers of two, so that at most an eighth of a block is unused
_PAGE = mmap.PAGESIZE


class Mapping:
    """A memory file, mapped in this process."""

    def __init__(self, descriptor: int, *, writes: bool) -> None:
        """Does not take the descriptor over. Raises OSError."""
        nbytes, protection = os.fstat(descriptor).st_size, mmap.PROT_READ | (mmap.PROT_WRITE if writes else 0)
        self.memory = mmap.mmap(descriptor, nbytes, flags=mmap.MAP_SHARED, prot=protection)
        self.memory.madvise(mmap.MADV_DONTDUMP)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given buffer is not writable")  # nobody writes to it
            self.data: Tensor = torch.frombuffer(self.memory, dtype=torch.uint8)  # all of it; keeps it mapped
        self.address = self.data.data_ptr()


class MemoryFile:
    """An unnamed file in memory that cannot shrink, mapped for writing. Its descriptor is closed with it."""

    def __init__(self, nbytes: int) -> None:
        """Raises OSError."""
        self.descriptor = -1
        if not hasattr(os, "memfd_create"):
            raise OSError(errno.ENOSYS, "this system has no files in memory without a name")
        self.descriptor = os.memfd_create("fsdp_lab", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.descriptor, nbytes)
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        self.mapping = Mapping(self.descriptor, writes=True)

    def __del__(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)


@dataclass(frozen=True)
class ArenaBlock:
    """A piece of an arena. `nbytes`: of its size class, what was asked for or a little more."""

    offset: int
    nbytes: int


class Arena:
    """Blocks of a rank's memory file. Thread-safe."""

    def __init__(self, capacity_bytes: int | None = None) -> None:
        """Raises OSError where the system has no such files."""
        if capacity_bytes is None:
            capacity_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        self.file = MemoryFile(capacity_bytes)
        self._capacity, self._end = capacity_bytes, 0
        self._free: defaultdict[int, list[int]] = defaultdict(list)  # offsets by size
        self._holes: dict[int, int] = {}  # of free blocks: bytes that were given back, by offset
        self._lock = threading.Lock()
        self._mapped: WeakValueDictionary[tuple[int, int], Mapping] = WeakValueDictionary()  # those of others, by file

    def mapped(self, descriptor: int) -> Mapping:
        """Another rank's arena. It is mapped once, for all groups."""
        found = os.fstat(descriptor)
        key = found.st_dev, found.st_ino
        if (mapping := self._mapped.get(key)) is None:
            self._mapped[key] = mapping = Mapping(descriptor, writes=False)
        return mapping

    @property
    def used_bytes(self) -> int:
        """What it takes of the machine's memory, at most: blocks in use, and free ones with their pages."""
        with self._lock:
            return self._end - sum(self._holes.values())

    def allocate(self, nbytes: int) -> ArenaBlock:
        """A block of at least so many bytes, with any content. Raises MemoryError."""
        size = class_bytes(nbytes)
        with self._lock:
            offset = self._free[size][-1] if self._free[size] else self._end
            if offset + size > self._capacity:
                raise MemoryError(f"{size} bytes more than the {self._end} in use exceed this machine's memory")
            if offset == self._end or offset in self._holes:
                try:
                    os.posix_fallocate(self.file.descriptor, offset, size)
                except OSError as e:
                    raise MemoryError(f"{size} bytes of shared memory could not be allocated: {e.strerror}") from None
            self._holes.pop(offset, None)
            if offset == self._end:
                self._end += size
            else:
                self._free[size].pop()
            return ArenaBlock(offset, size)

    def free(self, block: ArenaBlock) -> None:
        with self._lock:
            self._free[block.nbytes].append(block.offset)

    def trim(self) -> None:
        """Give the memory of free blocks back to the machine."""
        with self._lock:
            if sum(size * len(offsets) for size, offsets in self._free.items()) == self._end:
                if self._end == 0 or self._punch(0, -(-self._end // _PAGE) * _PAGE):
                    self._free.clear()
                    self._holes.clear()
                    self._end = 0
                return
            for size, offsets in self._free.items():
                for offset in [o for o in offsets if o not in self._holes]:
                    self._holes[offset] = self._punch(offset, size)

    def _punch(self, offset: int, nbytes: int) -> int:
        """Gives back the whole pages of these bytes. Returns how many bytes that is."""
        first, end = -(-offset // _PAGE) * _PAGE, (offset + nbytes) // _PAGE * _PAGE
        with contextlib.suppress(OSError):  # it is locked in memory, and stays
            if end > first:
                self.file.mapping.memory.madvise(mmap.MADV_REMOVE, first, end - first)
                return end - first
        return 0

    def bytes_at(self, offset: int, nbytes: int) -> Tensor:
        """uint8 [nbytes]"""
        return self.file.mapping.data[offset : offset + nbytes]


def class_bytes(nbytes: int) -> int:
    """The size of the block for so many bytes."""
    step = ALIGN
    if nbytes > ALIGN * _STEPS:
        step = max(ALIGN, 1 << ((nbytes - 1).bit_length() - _STEPS.bit_length()))
    return max(ALIGN, -(-nbytes // step) * step)
