"""`Lane`: what one rank of a host tells another, in order: where in its arena bytes are for it. `Loan`: memory that is lent
to its readers.

A lane is in the control file of the rank that tells: a ring of entries and two semaphores. `told` is raised for each entry,
and `read` by the other rank when it has read the bytes of one, so that their memory can be used again. Each process has a
Lane of its own for its end.
"""

from __future__ import annotations

import time
from array import array
from collections import deque

from torch import Tensor

from fsdp_lab.wire.arena import Arena, ArenaBlock
from fsdp_lab.wire.arena import Mapping as MappedFile
from fsdp_lab.wire.meeting import Met
from fsdp_lab.wire.semaphores import SIZE_BYTES, Semaphores

RING = 256  # how far a rank can be behind another
_WORDS = 4  # of an entry: its number, what it is, where its bytes begin, and how many there are
_RING_BYTES = RING * _WORDS * 8
LANE_BYTES = 2 * SIZE_BYTES + _RING_BYTES


class NotYet(RuntimeError):
    """The time for a wait is over; it can be repeated."""


class PeerGone(RuntimeError):
    """A rank that is waited for has left the group."""


class Loan:
    """A block of the arena, freed when all its readers have read."""

    def __init__(self, arena: Arena, block: ArenaBlock | None, readers: int) -> None:
        self._arena, self._block, self._readers = arena, block, readers

    def end(self) -> None:
        """By one of the readers."""
        self._readers -= 1
        if self._readers == 0 and self._block is not None:
            self._arena.free(self._block)


class Lane:
    def __init__(self, semaphores: Semaphores, control: MappedFile, index: int) -> None:
        self._semaphores, begin = semaphores, index * LANE_BYTES
        self._told, self._read = control.address + begin, control.address + begin + SIZE_BYTES
        first = begin + 2 * SIZE_BYTES
        self._ring = memoryview(control.memory)[first : first + _RING_BYTES].cast("B").cast("q")
        self._count = 0  # entries that this process has told, or taken
        self._loans: deque[Loan] = deque()  # of what is not read yet

    # -- the rank that tells --------------------------------------------------------------------------------------

    def make(self) -> None:
        """Before the other maps it."""
        self._semaphores.init(self._told)
        self._semaphores.init(self._read)

    @property
    def unread(self) -> int:
        """How many entries the other has not read, as far as `see_read` has looked. At most RING."""
        return len(self._loans)

    def tell(self, what: int, begin: int, nbytes: int, loan: Loan) -> None:
        at = self._count % RING * _WORDS
        self._ring[at : at + _WORDS] = array("q", (self._count, what, begin, nbytes))
        self._count += 1
        self._loans.append(loan)
        self._semaphores.post(self._told)

    def see_read(self, timeout_s: float = 0.0) -> bool:
        """Whether the other has read one more; its memory is given back."""
        seen = bool(self._loans) and self._semaphores.take(self._read, timeout_s)
        if seen:
            self._loans.popleft().end()
        return seen

    def end_loans(self) -> None:
        """When the other rank has left: what it has not read it never will."""
        while self._loans:
            self._loans.popleft().end()

    # -- the other ------------------------------------------------------------------------------------------------

    def take(self, end_s: float) -> tuple[int, int, int]:
        """What, where and how many, of the next entry. Raises NotYet at `end_s` of the monotonic clock."""
        if not self._semaphores.take(self._told) and not (
            end_s > (now_s := time.monotonic()) and self._semaphores.take(self._told, end_s - now_s)
        ):
            raise NotYet("the next entry is not there yet")
        at = self._count % RING * _WORDS
        number, what, begin, nbytes = self._ring[at : at + _WORDS]
        if number != self._count:
            raise RuntimeError(f"entry {self._count} in shared memory has the number {number}")
        self._count += 1
        return what, begin, nbytes

    def has_read(self) -> None:
        """The oldest entry that was taken and not read."""
        self._semaphores.post(self._read)


class SharedPeer:
    """Another rank of a group on this host: its arena, the lanes to and from it, and whether it is still there."""

    def __init__(self, name: str, arena: MappedFile, to: Lane, from_: Lane, met: Met) -> None:
        self.name, self.to, self._from, self._arena, self._met = name, to, from_, arena, met

    def take(self, end_s: float) -> tuple[int, Tensor]:
        """The next that it tells: what it is, and its bytes, uint8. Raises NotYet, and PeerGone if it never will."""
        try:
            what, begin, nbytes = self._from.take(end_s)
        except NotYet:
            if not self._met.is_gone:
                raise
            try:
                what, begin, nbytes = self._from.take(0.0)  # told before it left
            except NotYet:
                raise PeerGone(f"{self.name} has left or ended") from None
        return what, self._arena.data[begin : begin + nbytes]

    def has_read(self) -> None:
        self._from.has_read()

    def leave(self) -> None:
        """The other rank sees it."""
        self._met.connection.close()
