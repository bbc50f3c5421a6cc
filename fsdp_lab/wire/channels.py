"""`Channel`: one rank of a host publishes to another, in order, where in its arena there are bytes to read.
`BlockReference`: a block of the arena and how many ranks have yet to read it.

A channel is in the control file of the rank that publishes: a ring of entries and two semaphores. One is raised for each
entry, the other by the reader when it has read the bytes of one, so that their memory can be used again. Each process has a
`Channel` for its own end.
"""

from __future__ import annotations

import contextlib
import time
from array import array
from collections import deque
from collections.abc import Sequence
from socket import SHUT_WR
from typing import Protocol

from torch import Tensor

from fsdp_lab.wire.arena import ArenaBlock, Mapping as MappedFile
from fsdp_lab.wire.exchange import PeerConnection
from fsdp_lab.wire.semaphores import SIZE_BYTES, Semaphores

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
        """By one of the readers."""
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
        """How many entries the other has not read, as far as `poll_ack` has looked. At most RING."""
        return len(self._unread)

    def publish(self, what: int, begin: int, nbytes: int, reference: BlockReference) -> None:
        at = self._count % RING * _WORDS
        self._ring[at : at + _WORDS] = array("q", (self._count, what, begin, nbytes))
        self._count += 1
        self._unread.append(reference)
        self._semaphores.post(self._published)

    def poll_ack(self, timeout_s: float = 0.0) -> bool:
        """Whether the other has read one more; its memory is given back."""
        seen = bool(self._unread) and self._semaphores.take(self._acknowledged, timeout_s)
        if seen:
            self._unread.popleft().release()
        return seen

    def release_unread(self) -> None:
        """When the other rank has left: what it has not read it never will."""
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
        """When it does not matter any more whether the other rank has left."""
        self._connection.socket.close()
