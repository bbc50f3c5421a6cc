"""`SharedGroup`: the collectives of ranks on one host, through memory that they share. It has the methods of torch's Gloo
group that `Wire` calls.

Note: a collective through shared memory. A rank that issues one puts what others need into its arena, unless it is there
already, publishes to each of them where that is (channels.py), and goes on. When it waits, it takes the entries of the
others and reads their arenas, of all earlier collectives of the group first, in the order of issue, which is the same on
all ranks. So issuing waits for nobody, and a wait waits for the others to issue, not for their waits: what does not
deadlock over Gloo does not here. (Only who is RING collectives ahead waits for others to read.)

An entry is marked with the unit for which it was issued: a rank does not read what another one meant for something else.
Transfers between two ranks have channels of their own, as they are in no order with collectives, and arrive in their order.

Sums are added in the order of ranks, by each rank for itself: the same bits everywhere, and in an all-reduce. No thread
of ours runs beside the ranks: where there are as many as cores, it would take the time of one. A future, which DDP asks
for, is completed in a thread that waits (`WireWork`).

A group that is opened after an abort has new control files, so a late rank that still writes to the old ones does no
harm. What a closed group has published stays until all its ranks have left it (`WireContext.close_shared`), for late
readers."""

import contextlib
import os
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from enum import IntEnum
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, distributed as dist
from torch.autograd.profiler import record_function

from fsdp_lab.wire.arena import ALIGN, ArenaBlock, Mapping as MappedFile, memory_file
from fsdp_lab.wire.channels import (
    CHANNEL_BYTES,
    RING,
    SPIN_S,
    BlockMemory,
    BlockReference,
    Channel,
    NotYet,
    PeerConnection,
    PeerGone,
    Semaphores,
    SharedPeer,
    exchange_descriptors,
)
from fsdp_lab.wire.meter import Collective

_SLICE_S = 0.05  # the longest wait in C, hence how late an abort is seen
_CHUNK_BYTES = 256 << 10  # of a sum: stays in a core's cache
_DEVICE_CHUNK_BYTES = 64 << 20  # on a device each is some kernels
_CLOSE_S = 1.0  # for others to read what was published, when a group is closed
_PART_S, _LOOK_S = 1.0, 0.005  # for others to close what this rank has exported, and between two looks
_CLOSED = "the process group is closed"
_KIND_BITS = 8  # of the word that says what an entry is; above them is its mark

_Op: Any = dist.ReduceOp.RedOpType
_COMBINE: Mapping[Any, Callable[..., Tensor]] = {
    _Op.SUM: torch.add,
    _Op.PRODUCT: torch.mul,
    _Op.MIN: torch.minimum,
    _Op.MAX: torch.maximum,
    _Op.BAND: torch.bitwise_and,
    _Op.BOR: torch.bitwise_or,
    _Op.BXOR: torch.bitwise_xor,
}
G = TypeVar("G", bound="SharedGroup")
Memory = TypeVar("Memory", bound=BlockMemory)
Contents = dict[int, tuple[int, int]]  # by rank, where in its memory the bytes for this one begin, and how many
Offers = Mapping[int, Tensor]  # by rank, what it is to read
Finish = Callable[[Contents], None]
Lent = tuple[ArenaBlock, int] | None  # see `SharedGroup._find`
Tag = int | None
Peers = Mapping[int, SharedPeer]
Ends = tuple[Peers, Peers]
Check = Callable[[], None]


class What(IntEnum):
    """The kind of a collective; ranks compare it."""

    ALL_GATHER = 1
    REDUCE_SCATTER = 2
    ALL_REDUCE = 3
    ALL_TO_ALL = 4
    BROADCAST = 5
    REDUCE = 6
    SCATTER = 7
    GATHER = 8
    BARRIER = 9
    MAPPED_GATHER = 10
    TRANSFER = 11


class Unusable(RuntimeError):
    """The group was closed, or an interrupt left it in the middle of a collective."""


class Section:
    """A lock. An exception that is no `Exception`, as an interrupt, makes it unusable: it may have come between two steps
    that belong together, such as lowering a semaphore and counting that."""

    def __init__(self) -> None:
        self._lock, self._unusable = threading.Lock(), ""

    def held(self, timeout_s: float) -> Self:
        """To be entered at once. Raises NotYet after the timeout, and Unusable."""
        if not self._lock.acquire(timeout=min(timeout_s, threading.TIMEOUT_MAX)):
            raise NotYet("another thread is inside")
        if self._unusable:
            self._lock.release()
            raise Unusable(self._unusable)
        return self

    def __enter__(self) -> None:
        return

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is not None and not issubclass(error, Exception):
            self._unusable = "an interrupt came in the middle of a collective; open the process groups again"
        self._lock.release()

    def close(self, timeout_s: float) -> None:
        """Waits until nobody is inside, or for the timeout: nobody enters any more."""
        with contextlib.suppress(NotYet, Unusable), self.held(timeout_s):
            self._unusable = _CLOSED
        self._unusable = _CLOSED  # also after the timeout


class SharedWork:
    """A collective that this rank has issued, as `dist.Work`. `finish` is given what the others offer. `on_read` is called
    with `issued` when it has been read, by whoever reads it."""

    _failed: str | None = None
    _done = False
    issued: Collective
    on_read: Callable[[Collective], None] | None = None

    def __init__(self, group: "SharedGroup", word: int, about: str, finish: Finish, sources: Peers) -> None:
        """`word`: what entries of others are to be. `about`: its mark, in words."""
        self._group, self._word, self._about, self._finish, self._sources = group, word, about, finish, sources
        self._taken: Contents = {}
        self.last = (0.0, -1)  # when the last of the other ranks has issued it, and which one

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Raises NotYet after the timeout, if it is not 0, and RuntimeError if it has failed."""
        if not self._done:
            try:
                self._group.finish(self, timeout.total_seconds() or threading.TIMEOUT_MAX)
            except Unusable as e:
                self._done, self._failed = True, str(e)
        if self._failed is not None:
            raise RuntimeError(self._failed)
        return True

    def is_completed(self) -> bool:
        return self._done

    def joined(self) -> bool:
        """Returns whether all ranks have issued it."""
        if not self._done:
            self._group.look()
        return self._done or len(self._taken) == len(self._sources)

    def try_finish(self) -> bool:
        """Read it if no rank has to be waited for. Returns whether it is completed."""
        with contextlib.suppress(NotYet, Unusable):
            self._group.finish(self, 0.0)
        return self._done

    def get_future(self) -> torch.futures.Future[Any]:
        raise RuntimeError("only a wait completes it")

    def take(self, end_s: float) -> None:
        """The entries of the others, in the order of issue. Raises NotYet. If one has left, the work fails."""
        for r, peer in self._sources.items():
            if r not in self._taken and self._failed is None:
                try:
                    word, begin, nbytes, put_s = peer.take(end_s)
                except PeerGone as e:
                    self._failed = str(e)
                    return
                self._taken[r] = begin, nbytes
                self.last = max(self.last, (put_s, r))
                if word != self._word:
                    self._compare(peer.name, word)

    def _compare(self, name: str, word: int) -> None:
        """If one has no mark, only kinds are compared."""
        theirs, own = (What(w & (1 << _KIND_BITS) - 1) for w in (word, self._word))
        another = "another tag" if own is What.TRANSFER else "another unit"
        if theirs is not own:
            self._failed = f"{name} issued {theirs.name.lower()} where this rank issued {own.name.lower()}"
        elif word >> _KIND_BITS and self._word >> _KIND_BITS:
            kind = own.name.lower()
            self._failed = f"{name} issued {kind} of {another} where this rank issued {kind} of {self._about}"

    def read(self) -> None:
        """Called when all is taken, or it has failed."""
        try:
            if self._failed is None:
                with profiled():
                    self._finish(self._taken)
                    self._group.arena.synchronize()  # what was read has been read then
        except Exception as e:
            self._failed = str(e) or type(e).__name__
        finally:
            for r in self._taken:
                self._sources[r].from_.acknowledge()
            self._done, self._finish, self._taken = True, lambda _: None, {}
            if self.on_read is not None:
                self.issued.last = self.last
                self.on_read(self.issued)


class SharedGroup:
    """See above. Tensors are where the memory is: on the host (host_group.py), or on a GPU that ranks share (gpu_memory.py).
    The methods after `close` are named and called as those of torch's groups."""

    def __init__(self, rank: int, size: int, arena: BlockMemory, ends: Ends, check: Check, timeout_s: float) -> None:
        """`ends`: the other ranks, with channels for collectives, and for transfers. `check` raises after an abort."""
        self._rank, self._size, self.arena, self._check, self._timeout_s = rank, size, arena, check, timeout_s
        self.peers, self._transfers = ends
        self._pairs: dict[int, SharedGroup] = {}  # with the transfers to another rank and from it, once there are any
        self.unit = ""  # on whose behalf a collective is issued next
        self.all_parted = True  # whether, once it is closed, no other rank may still have its memory open
        self._issued: deque[SharedWork] = deque()  # and not read, oldest first
        self._issuing, self._reading = Section(), Section()

    def finish(self, work: SharedWork, timeout_s: float) -> None:
        """Read all collectives up to this one. Raises NotYet and Unusable."""
        end_s = time.monotonic() + timeout_s
        with self._reading.held(timeout_s):
            while not work.is_completed():
                self._issued[0].take(end_s)
                self._check()  # after an abort nothing is written any more, since its memory may be freed
                self._issued.popleft().read()

    def look(self) -> None:
        """Take what others have published by now, without reading it."""
        with contextlib.suppress(NotYet, Unusable), self._reading.held(0.0):
            for work in list(self._issued):
                work.take(0.0)

    def poll(self) -> None:
        """Take back the memory of what others have read, unless another thread is issuing."""
        if unread := [peer.to for peer in self.peers.values() if peer.to.unread]:
            with contextlib.suppress(NotYet, Unusable), self._issuing.held(0.0):
                for channel in unread:
                    while channel.poll_ack():
                        continue
        for pair in self._pairs.values():
            pair.poll()

    def _make_room(self, channel: Channel) -> None:
        """Until a channel takes one more entry. The other rank may be waiting for this one to read."""
        end_s = time.monotonic() + self._timeout_s
        while channel.unread >= RING:
            self._check()
            if time.monotonic() > end_s:
                raise RuntimeError(f"a rank is {RING} collectives behind, for {self._timeout_s:.0f} s")
            with contextlib.suppress(NotYet, IndexError):
                self.finish(self._issued[0], 0.0)
            channel.poll_ack(_SLICE_S)

    def close(self, *, aborted: bool) -> list[Channel]:
        """Leave. Returns channels whose entries others have yet to read: `release_unread` when they have left, too."""
        groups = [self, *self._pairs.values()]
        for section in (section for group in groups for section in (group._reading, group._issuing)):
            section.close(_CLOSE_S)
        channels, end_s = [peer.to for group in groups for peer in group.peers.values()], time.monotonic() + _CLOSE_S
        for channel in channels:
            while channel.poll_ack(0.0 if aborted else max(0.0, end_s - time.monotonic())):
                continue
        self._part()
        for peer in self.peers.values():
            peer.end()
        self.arena.trim()
        return [channel for channel in channels if channel.unread]

    def _part(self) -> None:
        """Let other ranks see that this one does not read any more."""
        for peer in self.peers.values():
            peer.leave()

    def _issue(self, what: What, offers: Offers, finish: Finish, lent: Lent = None, tag: Tag = None) -> SharedWork:
        """A tensor that is offered to several is put into the arena once; not at all if it is `lent`. `tag`: of a transfer,
        to the rank that is offered something, or from the other."""
        to = sources = self.peers
        if tag is None:
            mark, about = zlib.crc32(self.unit.encode()), self.unit
        else:
            mark, about, to, sources = tag + 1, f"tag {tag}", to if offers else {}, {} if offers else sources
        word = what | mark << _KIND_BITS
        work = SharedWork(self, word, about, finish, sources)
        with self._issuing.held(threading.TIMEOUT_MAX):
            for peer in to.values():
                while peer.to.poll_ack():
                    continue
                if peer.to.unread >= RING:
                    self._make_room(peer.to)
            places, reference = self._lend(offers, lent, len(to))
            if places:
                self.arena.synchronize()
            if sources:
                self._issued.append(work)
            for r, peer in to.items():
                peer.to.publish(word, *places.get(r, (0, 0)), reference)
        if not sources:
            work.read()
        return work

    def _lend(self, offers: Offers, lent: Lent, readers: int) -> tuple[Contents, BlockReference]:
        """Where each rank finds its bytes, and how many."""
        if lent is not None and readers:
            block, shift = lent
            self.arena.share(block)
            places = {r: (t.data_ptr() + shift, t.nbytes) for r, t in offers.items()}
            return places, BlockReference(self.arena, block, readers)
        begins, end = dict[int, int](), 0
        for t in offers.values():
            if id(t) not in begins:
                begins[id(t)], end = end, end + -(-t.nbytes // ALIGN) * ALIGN
        if not end or not readers:
            return {}, BlockReference(self.arena, None, readers)
        block = self.arena.allocate(end)
        places = {r: (block.offset + begins[id(t)], t.nbytes) for r, t in offers.items()}
        for r, t in offers.items():
            if begins.pop(id(t), None) is not None:
                _shaped(self.arena.bytes_at(*places[r], t.dtype), t).copy_(t.detach())
        return places, BlockReference(self.arena, block, readers)

    def _find(self, tensor: Tensor) -> Lent:
        """The block of the arena that a tensor is in, and what is to be added to an address in it for the place in the
        file; None where others do not read it there."""
        found = self.arena.find(tensor) if tensor.is_contiguous() else None
        return None if found is None else (found[0], found[1] - tensor.data_ptr())

    def _content(self, r: int, where: tuple[int, int], like: Tensor) -> Tensor:
        """What a rank offers, as a tensor of the shape and type of another."""
        if where[1] != like.nbytes:
            raise RuntimeError(f"a rank gave {where[1]} bytes where this one expects {like.nbytes}")
        return _shaped(self.peers[r].arena.bytes_at(*where, like.dtype), like)

    def _others(self, tensor: Tensor) -> dict[int, Tensor]:
        return dict.fromkeys(self.peers, tensor)

    def _allgather_base(self, output: Tensor, input: Tensor, opts: Any = None) -> SharedWork:
        """output: [W * n], input: [n]"""
        flat = output.detach() if output.dim() == 1 else output.detach().view(-1)
        return self._gather_all(flat.chunk(self._size) if flat.numel() else [flat] * self._size, input)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> SharedWork:
        return self._gather_all(outputs[0], inputs[0])

    def _gather_all(self, parts: Sequence[Tensor], own: Tensor) -> SharedWork:
        place = parts[self._rank]
        if place.data_ptr() != own.data_ptr():
            place.detach().copy_(own.detach().reshape_as(place))
        lent, places = self._find(place), {r: parts[r] for r in self.peers}
        return self._move(What.ALL_GATHER, self._others(own if lent is None else place), places, lent)

    def _move(self, what: What, offers: Offers, places: Offers, lent: Lent = None, tag: Tag = None) -> SharedWork:
        """`places`: by rank, for what it offers to this one."""

        def finish(contents: Contents) -> None:
            for r, place in places.items():
                place.detach().copy_(self._content(r, contents[r], place))

        return self._issue(what, offers, finish, lent, tag)

    def _reduce(self, what: What, offers: Offers, opts: Any, out: Tensor | None, own: Tensor, lent: Lent) -> SharedWork:
        """What all ranks give is combined in `out`; None: another rank has it."""
        if (operator := _COMBINE.get(opts.reduceOp.op)) is None:
            raise RuntimeError(f"{opts.reduceOp.op} is no reduction of this process group")

        def finish(contents: Contents) -> None:
            if out is not None:
                flat = _flat(out)
                given = {r: self._content(r, where, flat) for r, where in contents.items()}
                given[self._rank] = _flat(own)
                _combine(operator, flat, [given[r] for r in sorted(given)])
                if flat.data_ptr() != out.data_ptr():  # it is not contiguous
                    out.detach().copy_(flat.view(out.shape))

        return self._issue(what, offers, finish, lent)

    def _reduce_scatter_base(self, output: Tensor, input: Tensor, opts: Any) -> SharedWork:
        """output: [n], which may be its part of the input: [W * n]"""
        if output.untyped_storage().data_ptr() != input.untyped_storage().data_ptr():
            self.arena.keep_private(output)
        flat = _flat(input)
        parts = flat.chunk(self._size) if flat.numel() else [flat] * self._size
        lent, offers = self._find(flat), {r: parts[r] for r in self.peers}
        lent = None if lent is not None and lent[0].is_mapped else lent  # a user sends what is gathered
        return self._reduce(What.REDUCE_SCATTER, offers, opts, output, parts[self._rank], lent)

    def allreduce(self, tensors: list[Tensor], opts: Any) -> SharedWork:
        (tensor,) = tensors
        return self._reduce(What.ALL_REDUCE, self._others(tensor), opts, tensor, tensor, None)

    def reduce(self, tensors: list[Tensor], opts: Any) -> SharedWork:
        (tensor,), root = tensors, opts.rootRank
        if self._rank == root:
            return self._reduce(What.REDUCE, {}, opts, tensor, tensor, None)
        return self._reduce(What.REDUCE, {root: tensor}, opts, None, tensor, None)

    def alltoall_base(
        self, output: Tensor, input: Tensor, output_splits: list[int], input_splits: list[int], opts: Any = None
    ) -> SharedWork:
        sent, received = _split(input, input_splits, self._size), _split(output, output_splits, self._size)
        received[self._rank].copy_(sent[self._rank])
        offers, places = ({r: rows[r] for r in self.peers} for rows in (sent, received))
        return self._move(What.ALL_TO_ALL, offers, places)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> SharedWork:
        (tensor,), root = tensors, opts.rootRank
        if self._rank == root:
            return self._move(What.BROADCAST, self._others(tensor), {})
        return self._move(What.BROADCAST, {}, {root: tensor})

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> SharedWork:
        (output,), root = outputs, opts.rootRank
        if self._rank != root:
            return self._move(What.SCATTER, {}, {root: output})
        output.detach().copy_(inputs[0][root].detach())
        return self._move(What.SCATTER, {r: inputs[0][r] for r in self.peers}, {})

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> SharedWork:
        (own,), root = inputs, opts.rootRank
        if self._rank != root:
            return self._move(What.GATHER, {root: own}, {})
        outputs[0][root].detach().copy_(own.detach())
        return self._move(What.GATHER, {}, {r: outputs[0][r] for r in self.peers})

    def barrier(self, opts: Any = None) -> SharedWork:
        return self._move(What.BARRIER, {}, {})

    def send(self, tensors: list[Tensor], to: int, tag: int) -> SharedWork:
        """Complete at once: nothing has to be waited for."""
        return self._pair(to)._move(What.TRANSFER, {to: tensors[0]}, {}, None, tag)

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> SharedWork:
        return self._pair(source)._move(What.TRANSFER, {}, {source: tensors[0]}, None, tag)

    def _pair(self, r: int) -> "SharedGroup":
        if r not in self._pairs:
            ends = {r: self._transfers[r]}, dict[int, SharedPeer]()
            self._pairs[r] = SharedGroup(self._rank, self._size, self.arena, ends, self._check, self._timeout_s)
        return self._pairs[r]

    def _set_default_timeout(self, timeout: timedelta) -> None:
        """Waits have the limit of who waits."""


class GpuGroup(SharedGroup):
    """The `SharedGroup` of tensors on a GPU. Its memory is to be freed when no other rank has it open: the driver asks for
    that."""

    def _part(self) -> None:
        self.arena.synchronize()
        super()._part()
        end_s = time.monotonic() + _PART_S
        self.all_parted = False
        while not self.all_parted and time.monotonic() < end_s:
            time.sleep(_LOOK_S)
            self.all_parted = all(peer.connection.is_gone for peer in self.peers.values())


def open_shared(
    store: dist.Store,
    rank: int,
    size: int,
    *,
    group: Callable[..., G],
    arena: Callable[[], Memory],
    check: Callable[[], None],
    timeout: timedelta,
    most_ranks: int,
) -> G:
    """Collective. `group` makes the group, `arena` this rank's memory, or returns what it has. `most_ranks`: of any group,
    by which waits spin or not. Raises NotShared on all ranks."""

    def offer() -> tuple[tuple[Semaphores, MappedFile, Memory], list[int]]:
        spin_s = SPIN_S if most_ranks <= len(os.sched_getaffinity(0)) else 0.0
        semaphores, control, own = Semaphores(spin_s), memory_file(2 * size * CHANNEL_BYTES), arena()
        for i in range(2 * size):
            Channel(semaphores, control, i).make()
        return (semaphores, control, own), [control.descriptor, *own.descriptors]

    def use(made: tuple[Semaphores, MappedFile, Memory], theirs: Mapping[int, PeerConnection]) -> G:
        (semaphores, control, own), peers, transfers = made, dict[int, SharedPeer](), dict[int, SharedPeer]()
        for r in sorted(theirs, key=lambda r: (r - rank) % size):  # not all ranks read the same one first
            its_control, *its_memory = theirs[r].descriptors
            its, memory = MappedFile(its_control, writes=True), own.peer(r, its_memory)
            for kind, first in ((peers, 0), (transfers, size)):
                to, from_ = Channel(semaphores, control, first + r), Channel(semaphores, its, first + rank)
                kind[r] = SharedPeer(f"rank {r} of the group", memory, to, from_, theirs[r])
        return group(rank, size, own, (peers, transfers), check, timeout.total_seconds())

    return exchange_descriptors(store, rank, size, offer, use, timeout.total_seconds())


def unavailable() -> str:
    """Why this machine has no memory that ranks can share; "" if it has."""
    try:
        Semaphores()
        memory_file(CHANNEL_BYTES)
    except (OSError, AttributeError) as e:
        return getattr(e, "strerror", None) or str(e)
    return ""


def profiled() -> AbstractContextManager[Any]:
    """A profiler sees that operators inside are not the model's."""
    return record_function("wire") if torch.autograd._profiler_enabled() else contextlib.nullcontext()


def _flat(tensor: Tensor) -> Tensor:
    """[n], a copy if it is not contiguous"""
    return tensor.detach() if tensor.dim() == 1 else tensor.detach().reshape(-1)


def _shaped(flat: Tensor, like: Tensor) -> Tensor:
    return flat if like.dim() == 1 else flat.view(like.shape)


def _split(whole: Tensor, splits: Sequence[int], size: int) -> list[Tensor]:
    """Rows for each rank; without splits equal parts."""
    rows = whole.detach()
    if not splits:
        return list(rows.view(size, -1)) if rows.numel() else [rows] * size
    return list(torch.split(rows, list(splits)))


def _combine(operator: Callable[..., Tensor], flat: Tensor, parts: Sequence[Tensor]) -> None:
    """flat = the parts of all ranks, in their order, combined chunk by chunk; the memory of one, perhaps. All are [n]."""
    step = max(1, (_CHUNK_BYTES if flat.is_cpu else _DEVICE_CHUNK_BYTES) // flat.itemsize)
    if len(parts) == 1:
        flat.copy_(parts[0])
    elif len(parts) == 2 and flat.numel() <= step:
        operator(*parts, out=flat)
    else:
        scratch = torch.empty_like(flat[: step if len(parts) > 2 else 0])
        for begin in range(0, flat.numel(), step):
            total, *pieces, last = (part[begin : begin + step] for part in parts)
            for piece in pieces:
                total = operator(total, piece, out=scratch[: len(piece)])
            operator(total, last, out=flat[begin : begin + step])
