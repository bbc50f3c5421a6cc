"""`Arena`: memory of one rank that the other ranks of its host read.

Note: shared memory. An arena is a memory file (`memfd_create`) without a name: it is gone with the last process that has
it, however that ends, and /dev/shm and its limit have no part in it. The file is as large as the machine's memory and
nearly all hole: a block takes memory when it is allocated, at once, so that a shortage is met there. The file cannot
shrink (a seal), so that no rank can take pages from under another; and it is in no core dump, which would fill the holes.

Each rank writes to its own arena only; others map it for reading. Blocks keep their addresses and pages, so a step that
allocates what the one before has freed has no page faults.

A block may have several users: the tensor that is in it (`Arena.tensor`, host_group.py), and what other ranks have yet to
read there (channels.py). It is free when the last one gives it back."""

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import threading
import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import NamedTuple
from weakref import WeakMethod, WeakValueDictionary, finalize

import torch
from torch import Tensor
from torch.autograd.profiler import record_function

ALIGN = 64  # bytes: a cache line, and a multiple of every element's size
REPORT = "fsdp_lab.arena "  # the name of an event of the profiler: with an address, and bytes, negative if freed
_STEPS = 8  # size classes between two powers of two, so that at most an eighth of a block is unused
_PAGE = mmap.PAGESIZE
_MOST_VIEWS = 4096  # of a file
_SLAB = 16 * _PAGE  # what is smaller shares one, so that larger blocks begin with a page


class Mapping:
    """A memory file, mapped in this process."""

    def __init__(self, descriptor: int, *, writes: bool) -> None:
        """Keeps a descriptor of its own. Raises OSError."""
        nbytes, protection = os.fstat(descriptor).st_size, mmap.PROT_READ | (mmap.PROT_WRITE if writes else 0)
        self.descriptor = os.dup(descriptor)
        finalize(self, os.close, self.descriptor).atexit = False  # a thread may allocate until the process is over
        self.memory = mmap.mmap(descriptor, nbytes, flags=mmap.MAP_SHARED, prot=protection)
        self.memory.madvise(mmap.MADV_DONTDUMP)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given buffer is not writable")  # nobody writes to it
            self.data: Tensor = torch.frombuffer(self.memory, dtype=torch.uint8)  # all of it; keeps it mapped
        self.address = self.data.data_ptr()
        self._views: dict[tuple[int, int, torch.dtype], Tensor] = {}

    def bytes_at(self, offset: int, nbytes: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        """[n] of the type, so many bytes. It is kept, as steps read at the same places again."""
        key = offset, nbytes, dtype
        if (view := self._views.get(key)) is None:
            if len(self._views) >= _MOST_VIEWS:
                self._views.clear()
            view = self._views[key] = self.data[offset : offset + nbytes].view(dtype)
        return view

    def close(self) -> None:
        """Other groups may use it."""


def memory_file(nbytes: int) -> Mapping:
    """An unnamed file in memory that cannot shrink, mapped for writing. Raises OSError."""
    if not hasattr(os, "memfd_create"):
        raise OSError(errno.ENOSYS, "this system has no files in memory without a name")
    descriptor = os.memfd_create("fsdp_lab", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, nbytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        return Mapping(descriptor, writes=True)
    finally:
        os.close(descriptor)


class ArenaBlock(NamedTuple):
    """A piece of an arena. `nbytes`: of its size class, what was asked for or a little more. `is_mapped`: at other addresses
    as well (host_group.py)."""

    offset: int
    nbytes: int
    is_mapped: bool = False


class Arena:
    """Blocks of a rank's memory file. Thread-safe."""

    def __init__(self, capacity_bytes: int | None = None) -> None:
        """Raises OSError where the system has no such files."""
        if capacity_bytes is None:
            capacity_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        self.file = memory_file(capacity_bytes)
        self.bytes_at = self.file.bytes_at
        self._capacity, self._end = capacity_bytes, 0
        self._free: defaultdict[tuple[int, bool], list[int]] = defaultdict(list)  # offsets by size and `is_mapped`
        self._users: dict[int, int] = {}  # how many a block has, by offset
        self._holes: list[tuple[int, int]] = []  # whole pages that were given back: begin and end, in order
        self._lock = threading.Lock()
        self._lent: dict[int, ArenaBlock] = {}  # where tensors are, by the address of their storage
        self._private: set[int] = set()  # those of them that others do not read
        self._pollers: list[WeakMethod[Callable[[], None]]] = []
        self._dropped: deque[ArenaBlock] = deque()  # by finalizers, which may run while this thread has the lock
        self._mapped: WeakValueDictionary[tuple[int, int], Mapping] = WeakValueDictionary()  # those of others, by file

    @property
    def descriptors(self) -> list[int]:
        """The descriptors that other ranks are given."""
        return [self.file.descriptor]

    def peer(self, rank: int, descriptors: Sequence[int]) -> Mapping:
        """Another rank's arena, of which these were given. It is mapped once, for all groups."""
        (descriptor,) = descriptors
        file = os.fstat(descriptor)
        key = file.st_dev, file.st_ino
        if (mapping := self._mapped.get(key)) is None:
            self._mapped[key] = mapping = Mapping(descriptor, writes=False)
        return mapping

    @property
    def used_bytes(self) -> int:
        """Bytes that it takes of the machine's memory, at most: blocks in use, and free ones with their pages."""
        with self._lock:
            return self._end - sum(end - begin for begin, end in self._holes)

    def allocate(self, nbytes: int, *, is_mapped: bool = False, again: ArenaBlock | None = None) -> ArenaBlock:
        """A block of at least so many bytes, with any content, for one user. `again`: this one, if it is free. Raises
        MemoryError."""
        size = class_bytes(nbytes)
        size = -(-size // _PAGE) * _PAGE if is_mapped else size
        with self._lock:
            self._take_dropped()
            free = self._free[size, is_mapped]
            if again is not None and again.offset in free:
                free.remove(again.offset)
                block = again
            else:
                if not free:
                    self._extend(size, free)
                block = ArenaBlock(free.pop(), size, is_mapped)
            self._users[block.offset] = 1
            return block

    def share(self, block: ArenaBlock) -> None:
        """One more user has it."""
        with self._lock:
            self._users[block.offset] += 1

    def free(self, block: ArenaBlock) -> None:
        """Gives a block back; called by each of its users."""
        with self._lock:
            self._give_back(block)

    def _give_back(self, block: ArenaBlock) -> None:
        users = self._users.pop(block.offset) - 1
        if users:
            self._users[block.offset] = users
        else:
            self._free[block.nbytes, block.is_mapped].append(block.offset)

    def _take_dropped(self) -> None:
        while self._dropped:
            self._give_back(self._dropped.popleft())

    def _extend(self, size: int, free: list[int]) -> None:
        """Pages for one block more, or for a slab of small ones: in the first hole that has room, else at the end."""
        taken = -(-max(size, _SLAB) // _PAGE) * _PAGE
        hole = next((hole for hole in self._holes if hole[1] - hole[0] >= taken), None)
        begin = self._end if hole is None else hole[0]
        if begin + taken > self._capacity:
            raise MemoryError(f"{size} bytes more than the {self._end} in use exceed this machine's memory")
        try:
            os.posix_fallocate(self.file.descriptor, begin, taken)
        except OSError as e:
            raise MemoryError(f"{taken} bytes of shared memory could not be allocated: {e.strerror}") from None
        if hole is None:
            self._end += taken
        else:
            self._holes.remove(hole)
            self._holes += [(begin + taken, hole[1])] if begin + taken < hole[1] else []
            self._holes.sort()
        free += reversed(range(begin, begin + taken - size + 1, size))

    def trim(self) -> None:
        """Give the memory of free blocks back to the machine, except of small ones beside others that are in use."""
        with self._lock:
            self._take_dropped()
            if not self._users:
                if self._punch(0, self._end):
                    self._free.clear()
                    self._holes, self._end = [], 0
                return
            for (size, is_mapped), offsets in self._free.items():
                if size >= _SLAB:
                    given = [offset for offset in offsets if self._punch(offset, offset + size)]
                    self._free[size, is_mapped] = [offset for offset in offsets if offset not in given]
                    self._holes += [(offset, offset + size) for offset in given]
            self._holes = _joined(sorted(self._holes))

    def _punch(self, begin: int, end: int) -> bool:
        """Give back these pages, from a whole one to a whole one."""
        with contextlib.suppress(OSError):  # it is locked in memory, and stays
            if end > begin:
                self.file.memory.madvise(mmap.MADV_REMOVE, begin, end - begin)
            return True
        return False

    def tensor(self, numel: int, dtype: torch.dtype, *, is_private: bool = False, is_mapped: bool = False) -> Tensor:
        """[numel], not 0, with any content. Its block is free when its storage is. `is_private`: `find` does not find it.
        `is_mapped`: as of its block. Raises MemoryError."""
        block = self.allocate(numel * dtype.itemsize, is_mapped=is_mapped)
        address = self.file.address + block.offset
        memory = (ctypes.c_ubyte * (numel * dtype.itemsize)).from_address(address)
        self.lend(address, block, len(memory))
        if is_private:
            self._private.add(address)
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
        self._private.discard(address)
        _report(address, -nbytes)
        return block

    def dropped(self, address: int, nbytes: int) -> None:
        """Nobody has the storage at this address any more. Takes no lock."""
        if address in self._lent:
            self._dropped.append(self.take_back(address, nbytes))

    def keep_private(self, tensor: Tensor) -> None:
        """Let `find` not find what has this storage."""
        if (address := tensor.untyped_storage().data_ptr()) in self._lent:
            self._private.add(address)

    def find(self, tensor: Tensor) -> tuple[ArenaBlock, int] | None:
        """The block that a tensor is in, and where in the file its first element is. None: it is not in this arena, or
        private."""
        address = tensor.untyped_storage().data_ptr()
        block = self._lent.get(address)
        if block is None or address in self._private:
            return None
        return block, block.offset + tensor.data_ptr() - address

    def is_unread(self, tensor: Tensor) -> bool:
        """Returns whether others have yet to read what was sent from a tensor, as far as `poll` has looked."""
        place = self.find(tensor)
        with self._lock:
            return place is not None and self._users.get(place[0].offset, 0) > 1

    def synchronize(self) -> None:
        """Memory of the host is written when a copy returns."""

    def watch(self, poll: Callable[[], None]) -> None:
        """A method that notices what others have read, of a group that sends from this arena, while that exists."""
        self._pollers = [each for each in self._pollers if each() is not None] + [WeakMethod(poll)]

    def poll(self) -> None:
        """Notice what others have read."""
        for each in self._pollers:
            if (poll := each()) is not None:
                poll()


def _joined(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges in order, those that touch as one."""
    joined: list[tuple[int, int]] = []
    for begin, end in ranges:
        if joined and joined[-1][1] == begin:
            joined[-1] = joined[-1][0], end
        else:
            joined.append((begin, end))
    return joined


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
