"""`exchange_descriptors`: ranks of one host give each other file descriptors of their memory. `Channel`: one rank publishes
to another, in order, where in its arena there are bytes to read.

Note: who shares a host. That is asked of the kernel, over sockets whose names it makes: ranks have the same boot and network
namespace, and each could map the memory of all others. The names of hosts say nothing: containers share them, and one host
can have several. What any rank finds is written to the store, so that all come to the same answer. Each two ranks keep their
connection. Nothing is sent over it afterwards: it ends when one of them leaves, however it does.

Note: channels. One is in the control file of the rank that publishes: a ring of entries and two semaphores. The first is
raised for each entry, the second by the reader when it has read the bytes of one, so that their memory can be used again.
Each process has a `Channel` for its own end."""

import contextlib
import ctypes
import errno
import json
import os
import secrets
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from socket import MSG_PEEK, SHUT_WR
from typing import Any, Self, TypeVar

from torch import distributed as dist

from fsdp_lab.wire.arena import Arena, ArenaBlock, Mapping as MappedFile
from fsdp_lab.wire.gpu_memory import GpuArena, PeerGpuMemory

SEVERAL_HOSTS = "its ranks are on several hosts"
_PEER = struct.Struct("3i")  # SO_PEERCRED: pid, uid, gid
_TOKEN_BYTES, _RANK_BYTES = 16, 4
_ANSWER_S = 10.0  # at most, for what ranks do that are all here
_STRANGER_S = 1.0  # for who connects to say who it is
T = TypeVar("T")
Own = TypeVar("Own")
Everyone = Sequence[Mapping[str, str]]  # of each rank, what it says of itself


class NotShared(Exception):
    """Ranks do not share memory; the message says why. All ranks of the group raise it."""


@dataclass(frozen=True)
class PeerConnection:
    """Another rank: the connection to it, which does not block, and the descriptors that it gave."""

    socket: socket.socket
    descriptors: Sequence[int]

    @property
    def is_gone(self) -> bool:
        """Whether it has closed the connection, or has ended."""
        try:
            return not self.socket.recv(1, MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True


def host_id() -> str:
    """Identifies this boot of this machine, and the network namespace, in which the sockets' names are."""
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/net')}"


def exchange_descriptors(
    store: dist.Store,
    rank: int,
    size: int,
    offer: Callable[[], tuple[Own, Sequence[int]]],
    use: Callable[[Own, Mapping[int, PeerConnection]], T],
    timeout_s: float,
) -> T:
    """Gives the descriptors of what `offer` makes to all other ranks, and returns what `use` makes of it and of the others,
    whose descriptors are closed then. Collective. Raises NotShared; either function may raise OSError for that. Raises
    dist.DistStoreError if a rank does not come."""
    facts = {"why": "", "host": "", "user": str(os.geteuid())}
    with contextlib.ExitStack() as stack:
        token = secrets.token_bytes(_TOKEN_BYTES)
        try:
            own, descriptors = offer()
            listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            listener.bind("")  # a name that the kernel makes, which is in no folder and gone with the socket
            listener.listen(size)
            facts |= {"host": host_id(), "name": listener.getsockname().hex(), "token": token.hex()}
        except (OSError, AttributeError) as e:
            facts["why"] = getattr(e, "strerror", None) or str(e)
        everyone = _share_facts(store, "has", rank, size, facts, timeout_s)
        for what, why in (("host", SEVERAL_HOSTS), ("user", "its ranks are of several users")):
            if len({f[what] for f in everyone}) > 1:
                raise NotShared(why)
        answer_s = min(_ANSWER_S, timeout_s / 2)
        with _Exchange(rank, everyone, listener, descriptors, answer_s) as connections:
            why, made = "", None
            try:
                made = use(own, connections.opened())
            except (OSError, ValueError) as e:
                why = f"rank {rank} could not map the memory of the others ({e})"
            _share_facts(store, "uses", rank, size, {"why": why}, timeout_s)
            assert made is not None
            return made


class _Exchange:
    """Connects with each other rank: to those after it, and from those before it."""

    def __init__(
        self, rank: int, everyone: Everyone, listener: socket.socket, descriptors: Sequence[int], answer_s: float
    ) -> None:
        self._rank, self._everyone, self._listener = rank, everyone, listener
        self._token = bytes.fromhex(everyone[rank]["token"])
        self._descriptors, self.peers = list(descriptors), dict[int, PeerConnection]()
        self._open: dict[int, socket.socket] = {}
        self._end_s = time.monotonic() + answer_s

    def opened(self) -> Mapping[int, PeerConnection]:
        """Raises OSError or ValueError."""
        for r in range(self._rank + 1, len(self._everyone)):
            connection = self._open[r] = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.settimeout(self._left_s)
            connection.connect(bytes.fromhex(self._everyone[r]["name"]))
            self._give(connection, bytes.fromhex(self._everyone[r]["token"]))
        while len(self.peers) < self._rank:
            self._accept()
        for r in range(self._rank + 1, len(self._everyone)):
            self._open[r].settimeout(self._left_s)
            message, descriptors = self._received(self._open[r])
            self._keep(r, self._open.pop(r), descriptors)
            if message != self._token + r.to_bytes(_RANK_BYTES, "little"):
                raise ValueError(f"rank {r} answered for another one")
        return self.peers

    @property
    def _left_s(self) -> float:
        return max(0.01, self._end_s - time.monotonic())

    def _accept(self) -> None:
        self._listener.settimeout(self._left_s)
        connection, _ = self._listener.accept()
        with contextlib.ExitStack() as stack:
            stack.callback(connection.close)
            _, user, _ = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
            if user != os.geteuid():
                return
            connection.settimeout(min(self._left_s, _STRANGER_S))
            try:
                message, descriptors = self._received(connection)
            except OSError:
                return  # a stranger
            r = int.from_bytes(message[_TOKEN_BYTES:], "little")
            known = secrets.compare_digest(message[:_TOKEN_BYTES], self._token)
            if not known or r in self.peers or not 0 <= r < self._rank:
                _close(descriptors)
                return
            stack.pop_all()
        self._keep(r, connection, descriptors)
        self._give(connection, bytes.fromhex(self._everyone[r]["token"]))

    def _keep(self, r: int, connection: socket.socket, descriptors: Sequence[int]) -> None:
        connection.setblocking(False)
        self.peers[r] = PeerConnection(connection, descriptors)
        if len(descriptors) != len(self._descriptors):
            raise ValueError(f"rank {r} sent {len(descriptors)} descriptors")

    def _give(self, connection: socket.socket, token: bytes) -> None:
        socket.send_fds(connection, [token + self._rank.to_bytes(_RANK_BYTES, "little")], self._descriptors)

    def _received(self, connection: socket.socket) -> tuple[bytes, list[int]]:
        flags = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
        size = _TOKEN_BYTES + _RANK_BYTES
        message, descriptors, *_ = socket.recv_fds(connection, size, len(self._descriptors), flags)
        return message, list(descriptors)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        """Closes all descriptors, and the connections too unless they are used."""
        for peer in self.peers.values():
            _close(peer.descriptors)
        for connection in (*self._open.values(), *([peer.socket for peer in self.peers.values()] if error else [])):
            connection.close()


def _close(descriptors: Sequence[int]) -> None:
    for d in descriptors:
        os.close(d)


def _share_facts(
    store: dist.Store, what: str, rank: int, size: int, facts: Mapping[str, str], timeout_s: float
) -> Everyone:
    """The facts of all ranks, in their order, through the store. Raises NotShared for the first reason in them."""
    keys = [f"{what}/{r}" for r in range(size)]
    store.set(keys[rank], json.dumps(facts))
    store.wait(keys, timedelta(seconds=timeout_s))
    everyone = [json.loads(store.get(key)) for key in keys]
    if why := next((each["why"] for each in everyone if each["why"]), ""):
        raise NotShared(why)
    return everyone


# -- channels ----------------------------------------------------------------------------------------------------------

SPIN_S = 50e-6  # of a wait where every rank has a core: about as long as the kernel needs to wake one
SIZE_BYTES = 64  # room for a sem_t, and a cache line of its own


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


class Semaphores:
    """POSIX semaphores in memory that processes share, by ctypes: the functions, each of a semaphore at an address.

    A semaphore is a counter that one process raises and another lowers, waiting in the kernel while it is zero. It has no
    owner, so a process that dies holds none; and it orders memory: what was written before `post` is read after `take`."""

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
        self.init(ctypes.c_void_p(ctypes.addressof(probe)))

    def init(self, address: ctypes.c_void_p) -> None:
        """A new one, at zero."""
        if self._init(address, 1, 0):
            raise OSError(ctypes.get_errno(), "no semaphore can be made: " + os.strerror(ctypes.get_errno()))

    def post(self, address: ctypes.c_void_p) -> None:
        """Raise it by one."""
        if self._post(address):
            raise OSError(ctypes.get_errno(), "a semaphore cannot be raised: " + os.strerror(ctypes.get_errno()))

    def take(self, address: ctypes.c_void_p, timeout_s: float = 0.0) -> bool:
        """Lower it by one, waiting for that at most so long. Returns whether it was lowered."""
        if not self._try(address):
            return True
        if timeout_s <= 0.0:
            return False
        end_s = time.perf_counter() + self._spin_s
        while self._spin_s and time.perf_counter() < end_s:
            if not self._try(address):
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

    def _wait(self, address: ctypes.c_void_p, clock: int, until: _Timespec) -> int:
        if self._clock_wait is not None:
            return int(self._clock_wait(address, clock, ctypes.byref(until)))
        return int(self._timed_wait(address, ctypes.byref(until)))


RING = 256  # how far a rank can be behind another
_ENTRY = struct.Struct("=4qd")  # its number, what it is, where its bytes begin, how many there are, and when it was put
_RING_BYTES = RING * _ENTRY.size
CHANNEL_BYTES = 2 * SIZE_BYTES + _RING_BYTES


class NotYet(RuntimeError):
    """The time for a wait is over; it can be repeated."""


class PeerGone(RuntimeError):
    """A rank that is waited for has left the group."""


BlockMemory = Arena | GpuArena  # a rank's own, in which others read
PeerMemory = MappedFile | PeerGpuMemory  # another rank's, as this one sees it


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
        self._semaphores, self._memory, begin = semaphores, control.memory, index * CHANNEL_BYTES
        places = (control.address + begin, control.address + begin + SIZE_BYTES)
        self._published, self._acknowledged = map(ctypes.c_void_p, places)
        self._first = begin + 2 * SIZE_BYTES  # entry
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
        count = self._count
        at = self._first + count % RING * _ENTRY.size
        _ENTRY.pack_into(self._memory, at, count, what, begin, nbytes, time.perf_counter())
        self._count = count + 1
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

    def take(self, end_s: float) -> tuple[int, int, int, float]:
        """What, where, how many and when (by the host's one clock), of the next entry. Raises
        NotYet at `end_s` of the monotonic clock."""
        if not self._semaphores.take(self._published) and not (
            end_s > (now_s := time.monotonic()) and self._semaphores.take(self._published, end_s - now_s)
        ):
            raise NotYet("the next entry is not there yet")
        at = self._first + self._count % RING * _ENTRY.size
        number, what, begin, nbytes, put_s = _ENTRY.unpack_from(self._memory, at)
        if number != self._count:
            raise RuntimeError(f"entry {self._count} in shared memory has the number {number}")
        self._count += 1
        return what, begin, nbytes, put_s

    def acknowledge(self) -> None:
        """The oldest entry that was taken and not read."""
        self._semaphores.post(self._acknowledged)


class SharedPeer:
    """Another rank of a group on this host: its arena, the channels to and from it, and whether it is still there."""

    def __init__(self, name: str, arena: PeerMemory, to: Channel, from_: Channel, connection: PeerConnection) -> None:
        self.name, self.to, self.from_, self.arena, self.connection = name, to, from_, arena, connection

    def take(self, end_s: float) -> tuple[int, int, int, float]:
        """Its next entry: what it is, where its bytes begin in its memory, how many there are, and when it was put. Raises
        NotYet, and PeerGone if there will be none."""
        try:
            return self.from_.take(end_s)
        except NotYet:
            if not self.connection.is_gone:
                raise
            try:
                return self.from_.take(0.0)  # published before it left
            except NotYet:
                raise PeerGone(f"{self.name} has left or ended") from None

    def leave(self) -> None:
        """Tells the other rank that this one has left. It can still be seen here whether the other one leaves."""
        self.arena.close()
        with contextlib.suppress(OSError):  # it has ended
            self.connection.socket.shutdown(SHUT_WR)

    def end(self) -> None:
        """Called when it does not matter any more whether the other rank has left."""
        self.connection.socket.close()
