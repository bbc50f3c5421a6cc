"""`Channel`: one rank of a host publishes to another, in order, where in its arena there are bytes to read.
`BlockReference`: a block of the arena and how many ranks have yet to read it.

A channel is in the control file of the rank that publishes: a ring of entries and two semaphores. One is raised for each
entry, the other by the reader when it has read the bytes of one, so that their memory can be used again. Each process has a
`Channel` for its own end.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import time
from array import array
from collections import deque
from collections.abc import Sequence
from socket import SHUT_WR
from typing import Any, Protocol

from torch import Tensor

from fsdp_lab.wire.arena import ArenaBlock, Mapping as MappedFile
from fsdp_lab.wire.exchange import PeerConnection

SPIN_S = 50e-6  # of a wait where every rank has a core: about as long as the kernel needs to wake one
SIZE_BYTES = 64  # room for a sem_t, and a cache line of its own


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


class Semaphores:
    """POSIX semaphores in memory that processes share, by ctypes: the functions, each of a semaphore at an address.

    A semaphore is a counter that one process raises and another lowers, waiting in the kernel while it is zero. It has no
    owner, so a process that dies holds none; and it orders memory: what was written before `post` is read after `take`.
    """

    def __init__(self, spin_s: float = 0.0) -> None:
        """`spin_s`: how long a wait first looks again and again. Raises OSError where the system has no semaphores that
        processes share."""
        self._spin_s = spin_s
        try:
            waiting, quick = ctypes.CDLL(None, use_errno=True), ctypes.PyDLL(None, use_errno=True)
            self._init, self._post, self._try = quick.sem_init, quick.sem_post, quick.sem_trywait
            # Only the wait releases the interpreter's lock. The monotonic clock is not set while one waits; not everywhere.
            self._clock_wait: Any = getattr(waiting, "sem_clockwait", None)
            self._timed_wait: Any = waiting.sem_timedwait
        except (AttributeError, OSError):
            raise OSError(errno.ENOSYS, "this system has no semaphores that processes share") from None
        probe = (ctypes.c_char * SIZE_BYTES)()
        self.init(ctypes.addressof(probe))

    def init(self, address: int) -> None:
        """A new one, at zero."""
        if self._init(ctypes.c_void_p(address), 1, 0):
            raise OSError(ctypes.get_errno(), "no semaphore can be made: " + os.strerror(ctypes.get_errno()))

    def post(self, address: int) -> None:
        """Raise it by one."""
        if self._post(ctypes.c_void_p(address)):
            raise OSError(ctypes.get_errno(), "a semaphore cannot be raised: " + os.strerror(ctypes.get_errno()))

    def take(self, address: int, timeout_s: float = 0.0) -> bool:
        """Lower it by one, waiting for that at most so long. Returns whether it was lowered."""
        if not self._try(ctypes.c_void_p(address)):
            return True
        if timeout_s <= 0.0:
            return False
        end_s = time.perf_counter() + self._spin_s
        while self._spin_s and time.perf_counter() < end_s:
            if not self._try(ctypes.c_void_p(address)):
                return True
        clock = time.CLOCK_MONOTONIC if self._clock_wait is not None else time.CLOCK_REALTIME
        until_s = time.clock_gettime(clock) + timeout_s
        until = _Timespec(int(until_s), int(until_s % 1 * 1e9))
        while self._wait(address, clock, until):
            code = ctypes.get_errno()
            if code == errno.ETIMEDOUT:
                return False
            if code != errno.EINTR:  # a signal, whose handler has run by now
                raise OSError(code, "a semaphore cannot be waited for: " + os.strerror(code))
        return True

    def _wait(self, address: int, clock: int, until: _Timespec) -> int:
        if self._clock_wait is not None:
            return int(self._clock_wait(ctypes.c_void_p(address), clock, ctypes.byref(until)))
        return int(self._timed_wait(ctypes.c_void_p(address), ctypes.byref(until)))


RING = 256  # how far a rank can be behind another
_WORDS = 4  # of an entry: its number, what it is, where its bytes begin, and how many there are
_RING_BYTES = RING * _WORDS * 8
CHANNEL_BYTES = 2 * SIZE_BYTES + _RING_BYTES


class NotYet(RuntimeError):
    """The time for a wait is over; it can be repeated."""


class PeerGone(RuntimeError):
    """A rank that is waited for has left the group."""


class PeerMemory(Protocol):
    """Another rank's memory, as this one sees it."""

    def bytes_at(self, offset: int, nbytes: int) -> Tensor:
        """uint8 [nbytes]"""

    def close(self) -> None:
        """This rank will not read it any more."""


class BlockMemory(Protocol):
    """A rank's own memory in which others read: see `Arena`."""

    @property
    def descriptors(self) -> Sequence[int]: ...

    def peer(self, rank: int, descriptors: Sequence[int]) -> PeerMemory: ...

    def allocate(self, nbytes: int) -> ArenaBlock: ...

    def share(self, block: ArenaBlock) -> None: ...

    def free(self, block: ArenaBlock) -> None: ...

    def bytes_at(self, offset: int, nbytes: int) -> Tensor: ...

    def find(self, tensor: Tensor) -> tuple[ArenaBlock, int] | None: ...

    def keep_private(self, tensor: Tensor) -> None: ...

    def trim(self) -> None: ...

    def synchronize(self) -> None:
        """Let the host wait for what was queued on the current stream, if this is memory of a device."""


class BlockReference:
    """Frees a block of the arena, as one of its users, when all its readers have read it."""

    def __init__(self, arena: BlockMemory, block: ArenaBlock | None, readers: int) -> None:
        self._arena, self._block, self._readers = arena, block, readers

    def release(self) -> None:
        """One of the readers has read it."""
        self._readers -= 1
        if self._readers == 0 and self._block is not None:
            self._arena.free(self._block)


class Channel:
    def __init__(self, semaphores: Semaphores, control: MappedFile, index: int) -> None:
        self._semaphores, begin = semaphores, index * CHANNEL_BYTES
        self._published, self._acknowledged = control.address + begin, control.address + begin + SIZE_BYTES
        first = begin + 2 * SIZE_BYTES
        self._ring = memoryview(control.memory)[first : first + _RING_BYTES].cast("B").cast("q")
        self._count = 0  # entries that this process has published, or taken
        self._unread: deque[BlockReference] = deque()  # of what is not read yet

    # -- the rank that publishes ----------------------------------------------------------------------------------

    def make(self) -> None:
        """Before the other maps it."""
        self._semaphores.init(self._published)
        self._semaphores.init(self._acknowledged)

    @property
    def unread(self) -> int:
        """The number of entries that the other has not read, as far as `poll_ack` has looked. At most RING."""
        return len(self._unread)

    def publish(self, what: int, begin: int, nbytes: int, reference: BlockReference) -> None:
        at = self._count % RING * _WORDS
        self._ring[at : at + _WORDS] = array("q", (self._count, what, begin, nbytes))
        self._count += 1
        self._unread.append(reference)
        self._semaphores.post(self._published)

    def poll_ack(self, timeout_s: float = 0.0) -> bool:
        """Returns whether the other has read one more; its memory is given back."""
        seen = bool(self._unread) and self._semaphores.take(self._acknowledged, timeout_s)
        if seen:
            self._unread.popleft().release()
        return seen

    def release_unread(self) -> None:
        """Called when the other rank has left: what it has not read it never will."""
        while self._unread:
            self._unread.popleft().release()

    # -- the other ------------------------------------------------------------------------------------------------

    def take(self, end_s: float) -> tuple[int, int, int]:
        """What, where and how many, of the next entry. Raises NotYet at `end_s` of the monotonic clock."""
        if not self._semaphores.take(self._published) and not (
            end_s > (now_s := time.monotonic()) and self._semaphores.take(self._published, end_s - now_s)
        ):
            raise NotYet("the next entry is not there yet")
        at = self._count % RING * _WORDS
        number, what, begin, nbytes = self._ring[at : at + _WORDS]
        if number != self._count:
            raise RuntimeError(f"entry {self._count} in shared memory has the number {number}")
        self._count += 1
        return what, begin, nbytes

    def acknowledge(self) -> None:
        """The oldest entry that was taken and not read."""
        self._semaphores.post(self._acknowledged)


class SharedPeer:
    """Another rank of a group on this host: its arena, the channels to and from it, and whether it is still there."""

    def __init__(self, name: str, arena: PeerMemory, to: Channel, from_: Channel, connection: PeerConnection) -> None:
        self.name, self.to, self._from, self.arena, self._connection = name, to, from_, arena, connection

    def take(self, end_s: float) -> tuple[int, int, int]:
        """Its next entry: what it is, and where its bytes begin in its memory, and how many there are. Raises NotYet, and
        PeerGone if there will be none."""
        try:
            what, begin, nbytes = self._from.take(end_s)
        except NotYet:
            if not self.is_gone:
                raise
            try:
                what, begin, nbytes = self._from.take(0.0)  # published before it left
            except NotYet:
                raise PeerGone(f"{self.name} has left or ended") from None
        return what, begin, nbytes

    def acknowledge(self) -> None:
        self._from.acknowledge()

    @property
    def is_gone(self) -> bool:
        """Whether the other rank has left, or has ended."""
        return self._connection.is_gone

    def leave(self) -> None:
        """The other rank sees it, and this one still sees whether that has left."""
        self.arena.close()
        with contextlib.suppress(OSError):  # it has ended
            self._connection.socket.shutdown(SHUT_WR)

    def end(self) -> None:
        """Called when it does not matter any more whether the other rank has left."""
        self._connection.socket.close()
