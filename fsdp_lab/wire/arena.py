"""`Arena`: memory of one rank that the other ranks of its host read.

Note: shared memory. An arena is a memory file (`memfd_create`) without a name: it is gone with the last process that has
it, however that ends, and /dev/shm and its limit have no part in it. The file is as large as the machine's memory and
nearly all hole: a block takes memory when it is allocated, at once, so that a shortage is met there. The file cannot shrink
(a seal), so that no rank can take pages from under another; and it is in no core dump, which would fill the holes.

Each rank writes to its own arena only; others map it for reading. Blocks keep their addresses and pages, so a step that
allocates what the one before has freed has no page faults.

A block may have several users: the tensor that is in it (`Arena.tensor`, reserved.py), and what other ranks have yet to read
there (channels.py). It is free when the last one gives it back.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import math
import mmap
import os
import threading
import warnings
from collections import Counter, defaultdict, deque
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakValueDictionary, finalize

import torch
from torch import Tensor
from torch.autograd.profiler import record_function

ALIGN = 64  # bytes: a cache line, and a multiple of every element's size
REPORT = "fsdp_lab.arena "  # the name of an event of the profiler: with an address, and bytes, negative if freed
_CGROUP_FILES = (  # of versions 2 and 1
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
)
_STEPS = 8  # size classes between two powers of two, so that at most an eighth of a block is unused
_PAGE = mmap.PAGESIZE
_SLAB = 16 * _PAGE  # what is smaller shares one, so that larger blocks begin with a page


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
    """A piece of an arena. `nbytes`: of its size class, what was asked for or a little more. `is_mapped`: at other addresses
    as well (reserved.py)."""

    offset: int
    nbytes: int
    is_mapped: bool = False


class Arena:
    """Blocks of a rank's memory file. Thread-safe."""

    def __init__(self, capacity_bytes: int | None = None, cgroup: Path = Path("/sys/fs/cgroup")) -> None:
        """`cgroup`: the container's. Raises OSError where the system has no such files."""
        if capacity_bytes is None:
            capacity_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        self.file = MemoryFile(capacity_bytes)
        self._capacity, self._end, self._cgroup = capacity_bytes, 0, cgroup
        self._free: defaultdict[tuple[int, bool], list[int]] = defaultdict(list)  # offsets by size and `is_mapped`
        self._users: Counter[int] = Counter()  # how many a block has, by offset
        self._holes: dict[int, int] = {}  # of free blocks: bytes that were given back, by offset
        self._lock = threading.Lock()
        self._lent: dict[int, ArenaBlock] = {}  # where tensors are, by the address of their storage
        self._dropped: deque[ArenaBlock] = deque()  # by finalizers, which may run while this thread has the lock
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

    # -- blocks ---------------------------------------------------------------------------------------------------

    def allocate(self, nbytes: int, *, is_mapped: bool = False, again: ArenaBlock | None = None) -> ArenaBlock:
        """A block of at least so many bytes, with any content, for one user. `again`: this one, if it is free. Raises
        MemoryError."""
        size = class_bytes(nbytes)
        size = -(-size // _PAGE) * _PAGE if is_mapped else size
        with self._lock:
            self._take_dropped()
            free = self._free[size, is_mapped]
            if not free:
                self._extend(size, free)
            offset = again.offset if again is not None and again.offset in free else free[-1]
            if offset in self._holes:
                self._fill(offset, size)
            free.remove(offset)
            self._users[offset] = 1
            return ArenaBlock(offset, size, is_mapped)

    def share(self, block: ArenaBlock) -> None:
        """One more user has it."""
        with self._lock:
            self._users[block.offset] += 1

    def free(self, block: ArenaBlock) -> None:
        """By one of its users."""
        with self._lock:
            self._give_back(block)

    def _give_back(self, block: ArenaBlock) -> None:
        self._users[block.offset] -= 1
        if not self._users[block.offset]:
            del self._users[block.offset]
            self._free[block.nbytes, block.is_mapped].append(block.offset)

    def _take_dropped(self) -> None:
        while self._dropped:
            self._give_back(self._dropped.popleft())

    def _extend(self, size: int, free: list[int]) -> None:
        """More of the file: one block, or a slab of small ones."""
        taken = max(size, _SLAB)
        if self._end + taken > self._capacity:
            raise MemoryError(f"{size} bytes more than the {self._end} in use exceed this machine's memory")
        self._fill(self._end, taken)
        free += reversed(range(self._end, self._end + taken - size + 1, size))
        self._end += taken

    def _fill(self, offset: int, nbytes: int) -> None:
        left = bytes_left(self._cgroup)
        if nbytes > left:
            raise MemoryError(f"{nbytes} bytes of shared memory are more than the {max(0, left)} that the memory limit of "
                              "this container leaves")  # fmt: skip
        try:
            os.posix_fallocate(self.file.descriptor, offset, nbytes)
        except OSError as e:
            raise MemoryError(f"{nbytes} bytes of shared memory could not be allocated: {e.strerror}") from None
        self._holes.pop(offset, None)

    def trim(self) -> None:
        """Give the memory of free blocks back to the machine."""
        with self._lock:
            self._take_dropped()
            if not self._users:
                if self._end == 0 or self._punch(0, -(-self._end // _PAGE) * _PAGE):
                    self._free.clear()
                    self._holes.clear()
                    self._end = 0
                return
            for (size, _), offsets in self._free.items():
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

    # -- tensors --------------------------------------------------------------------------------------------------

    def tensor(self, numel: int, dtype: torch.dtype) -> Tensor:
        """[numel], not 0, with any content. Its block is free when its storage is. Raises MemoryError."""
        block = self.allocate(numel * dtype.itemsize)
        address = self.file.mapping.address + block.offset
        memory = (ctypes.c_ubyte * (numel * dtype.itemsize)).from_address(address)
        self.lend(address, block, len(memory))
        finalize(memory, self.dropped, address, len(memory)).atexit = False
        return torch.frombuffer(memory, dtype=dtype)

    def lend(self, address: int, block: ArenaBlock, nbytes: int) -> None:
        """A storage at this address is in the block from now on."""
        self._lent[address] = block
        _report(address, nbytes)

    def is_lent(self, address: int) -> bool:
        return address in self._lent

    def take_back(self, address: int, nbytes: int) -> ArenaBlock:
        """It no longer is. The caller frees the block."""
        block = self._lent.pop(address)
        _report(address, -nbytes)
        return block

    def dropped(self, address: int, nbytes: int) -> None:
        """Nobody has the storage at this address any more. Takes no lock."""
        if address in self._lent:
            self._dropped.append(self.take_back(address, nbytes))

    def find(self, tensor: Tensor) -> tuple[ArenaBlock, int] | None:
        """The block that a tensor is in, and where in the file its first element is. None: it is not in this arena."""
        address = tensor.untyped_storage().data_ptr()
        block = self._lent.get(address)
        return None if block is None else (block, block.offset + tensor.data_ptr() - address)

    def bytes_at(self, offset: int, nbytes: int) -> Tensor:
        """uint8 [nbytes]"""
        return self.file.mapping.data[offset : offset + nbytes]


def bytes_left(cgroup: Path) -> float:
    """Under a container's memory limit, without what the kernel would drop first: files that were not read lately. Beyond it
    the kernel ends a process; `posix_fallocate` does not fail. Infinite without a limit."""
    for limit, used, stat, dropped in _CGROUP_FILES:
        try:
            limit_bytes, used_bytes = (int((cgroup / name).read_text()) for name in (limit, used))
            lines = (cgroup / stat).read_text().splitlines()
        except (OSError, ValueError):  # not this version of cgroups, or no limit ("max")
            continue
        return limit_bytes - used_bytes + sum(int(line.split()[1]) for line in lines if line.split()[0] == dropped)
    return math.inf


def _report(address: int, nbytes: int) -> None:
    """Let the profiler see it, which sees allocations of torch's allocator by itself."""
    if torch.autograd._profiler_enabled():
        with record_function(f"{REPORT}{address} {nbytes}"):
            pass


def class_bytes(nbytes: int) -> int:
    """The size of the block for so many bytes."""
    step = ALIGN
    if nbytes > ALIGN * _STEPS:
        step = max(ALIGN, 1 << ((nbytes - 1).bit_length() - _STEPS.bit_length()))
    return max(ALIGN, -(-nbytes // step) * step)
