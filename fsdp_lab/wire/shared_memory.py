"""`SharedGroup`: the collectives of ranks on one host, through memory that they share. It has the methods of torch's Gloo
group that `Wire` calls.

Note: a collective through shared memory. A rank that issues one puts what others need into its arena, unless it is there
already, publishes to each of them where that is (channels.py), and goes on. When it waits, it takes the entries of the
others and reads their arenas, of all earlier collectives of the group first, in the order of issue, which is the same on
all ranks. So issuing waits for nobody, and a wait waits for the others to issue, not for their waits: what does not
deadlock over Gloo does not here. (Only who is RING collectives ahead waits for others to read.)

Sums are added in the order of ranks, by each rank for itself: the same bits everywhere, and in an all-reduce. No thread
of ours runs beside the ranks: where there are as many as cores, it would take the time of one. A future, which DDP asks
for, is completed in a thread that waits (`WireWork`).

A group that is opened after an abort has new control files, so a late rank that still writes to the old ones does no
harm. What a closed group has published stays until all its ranks have left it (`WireContext.close_shared`), for late
readers."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from enum import IntEnum
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed as dist
from torch.autograd.profiler import record_function

from fsdp_lab.wire.arena import ALIGN, Mapping as MappedFile, memory_file
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

_SLICE_S = 0.05  # the longest wait in C, hence how late an abort is seen
_CHUNK_BYTES = 256 << 10  # of a sum: stays in a core's cache
_DEVICE_CHUNK_BYTES = 64 << 20  # on a device each is some kernels
_CLOSE_S = 1.0  # for others to read what was published, when a group is closed
_PART_S, _LOOK_S = 1.0, 0.005  # for others to close what this rank has exported, and between two looks
_CLOSED = "the process group is closed"

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
Contents = dict[int, Tensor]  # by rank, what it offers to this one: uint8
Peers = Mapping[int, SharedPeer]
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


class Unusable(RuntimeError):
    """The group was closed, or an interrupt left it in the middle of a collective."""


class Section:
    """A lock. An exception that is no `Exception`, as an interrupt, makes it unusable: it may have come between two steps
    that belong together, such as lowering a semaphore and counting that."""

    def __init__(self) -> None:
        self._lock, self._unusable = threading.Lock(), ""

    @contextmanager
    def held(self, timeout_s: float) -> Iterator[None]:
        """Raises NotYet after the timeout, and Unusable."""
        if not self._lock.acquire(timeout=min(timeout_s, threading.TIMEOUT_MAX)):
            raise NotYet("another thread is inside")
        try:
            if self._unusable:
                raise Unusable(self._unusable)
            yield
        except Exception:
            raise
        except BaseException:
            self._unusable = "an interrupt came in the middle of a collective; open the process groups again"
            raise
        finally:
            self._lock.release()

    def close(self, timeout_s: float) -> None:
        """Waits until nobody is inside, or for the timeout: nobody enters any more."""
        with contextlib.suppress(NotYet, Unusable), self.held(timeout_s):
            self._unusable = _CLOSED
        self._unusable = _CLOSED  # also after the timeout


class SharedWork:
    """A collective that this rank has issued, as `dist.Work`. `finish` is given what the others offer. `on_read` is called
    when it has been read, by whoever reads it."""

    def __init__(self, group: SharedGroup, what: What, finish: Callable[[Contents], None]) -> None:
        self._group, self._what, self._finish = group, what, finish
        self._taken: dict[int, tuple[int, int]] = {}  # by rank, where in its memory its bytes begin, and how many
        self._failed: str | None = None
        self._done = False
        self.on_read: Callable[[], None] | None = None

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
        return self._done or len(self._taken) == len(self._group.peers)

    def try_finish(self) -> bool:
        """Read it if no rank has to be waited for. Returns whether it is completed."""
        with contextlib.suppress(NotYet, Unusable):
            self._group.finish(self, 0.0)
        return self._done

    def get_future(self) -> torch.futures.Future[Any]:
        raise RuntimeError("only a wait completes it")

    def take(self, end_s: float) -> None:
        """The entries of the others, in the order of issue. Raises NotYet. If one has left, the work fails."""
        for r, peer in self._group.peers.items():
            if r not in self._taken and self._failed is None:
                try:
                    what, *where = peer.take(end_s)
                except PeerGone as e:
                    self._failed = str(e)
                    return
                self._taken[r] = where[0], where[1]
                if what != self._what:
                    theirs, own = What(what).name.lower(), self._what.name.lower()
                    self._failed = f"{peer.name} issued {theirs} where this rank issued {own}"

    def read(self) -> None:
        """Called when all is taken, or it has failed."""
        try:
            if self._failed is None:
                with torch.no_grad(), record_function("wire"):
                    peers = self._group.peers
                    self._finish({r: peers[r].arena.bytes_at(*where) for r, where in self._taken.items()})
                    self._group.arena.synchronize()  # what was read has been read then
        except Exception as e:
            self._failed = str(e) or type(e).__name__
        finally:
            for r in self._taken:
                self._group.peers[r].from_.acknowledge()
            self._done, self._finish, self._taken = True, _nothing, {}
            if self.on_read is not None:
                self.on_read()


class SharedGroup:
    """See above. Tensors are where the memory is: on the host (host_group.py), or on a GPU that ranks share (gpu_memory.py).
    The methods after `close` are named and called as those of torch's groups."""

    def __init__(self, rank: int, size: int, arena: BlockMemory, peers: Peers, check: Check, timeout_s: float) -> None:
        """`peers`: the other ranks. `check` raises after an abort."""
        self.peers, self._rank, self._size, self.arena, self._check = peers, rank, size, arena, check
        self._timeout_s = timeout_s
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
        with contextlib.suppress(NotYet, Unusable), self._issuing.held(0.0):
            for peer in self.peers.values():
                while peer.to.poll_ack():
                    continue

    def _make_room(self, channel: Channel) -> None:
        """Until a channel takes one more entry. The other rank may be waiting for this one to read."""
        end_s = time.monotonic() + self._timeout_s
        while channel.poll_ack():
            continue
        while channel.unread >= RING:
            self._check()
            if time.monotonic() > end_s:
                raise RuntimeError(f"a rank is {RING} collectives behind, for {self._timeout_s:.0f} s")
            with contextlib.suppress(NotYet, IndexError):
                self.finish(self._issued[0], 0.0)
            channel.poll_ack(_SLICE_S)

    def close(self, *, aborted: bool) -> list[Channel]:
        """Leave. Returns channels whose entries others have yet to read: `release_unread` when they have left, too."""
        for section in (self._reading, self._issuing):
            section.close(_CLOSE_S)
        end_s, channels = time.monotonic() + _CLOSE_S, [peer.to for peer in self.peers.values()]
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

    def _issue(
        self, what: What, offers: Mapping[int, Tensor], finish: Callable[[Contents], None], *, in_place: bool = False
    ) -> SharedWork:
        """`offers`: what some ranks are to read. One tensor for several is put into the arena once. `in_place`: not at all,
        if it is there."""
        work = SharedWork(self, what, finish)
        with self._issuing.held(threading.TIMEOUT_MAX):
            for peer in self.peers.values():
                self._make_room(peer.to)
            places, reference = self._lend(offers, len(self.peers), in_place=in_place)
            if places:
                self.arena.synchronize()
            self._issued.append(work)
            for r, peer in self.peers.items():
                peer.to.publish(what, *places.get(r, (0, 0)), reference)
        return work

    def _lend(
        self, offers: Mapping[int, Tensor], readers: int, *, in_place: bool = False
    ) -> tuple[dict[int, tuple[int, int]], BlockReference]:
        """Where each rank finds its bytes, and how many. `in_place`: offers are contiguous parts of one tensor."""
        place = next((self.arena.find(t) for t in offers.values()), None) if in_place and readers else None
        if place is not None:
            shared, first = place
            self.arena.share(shared)
            begin = next(iter(offers.values())).data_ptr()
            places = {r: (first + t.data_ptr() - begin, t.nbytes) for r, t in offers.items()}
            return places, BlockReference(self.arena, shared, readers)
        distinct = {id(t): t for t in offers.values()}
        ends = list(itertools.accumulate((-(-t.nbytes // ALIGN) * ALIGN for t in distinct.values()), initial=0))
        block = self.arena.allocate(ends[-1]) if ends[-1] and readers else None
        if block is None:
            return {}, BlockReference(self.arena, None, readers)
        begins = dict(zip(distinct, (block.offset + begin for begin in ends), strict=False))
        for key, t in distinct.items():
            self.arena.bytes_at(begins[key], t.nbytes).view(t.dtype).view(t.shape).copy_(t.detach())
        return {r: (begins[id(t)], t.nbytes) for r, t in offers.items()}, BlockReference(self.arena, block, readers)

    def _others(self, tensor: Tensor) -> dict[int, Tensor]:
        return dict.fromkeys(self.peers, tensor)

    def _allgather_base(self, output: Tensor, input: Tensor, opts: Any = None) -> SharedWork:
        """output: [W * n], input: [n]"""
        parts = output.detach().view(-1).chunk(self._size) if output.numel() else [output] * self._size
        return self._gather_all(list(parts), input)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> SharedWork:
        return self._gather_all(outputs[0], inputs[0])

    def _gather_all(self, parts: Sequence[Tensor], own: Tensor) -> SharedWork:
        place = parts[self._rank]
        if place.data_ptr() != own.data_ptr():
            place.detach().copy_(own.detach().reshape(place.shape))
        offered = place.detach() if place.is_contiguous() and self.arena.find(place) else own
        in_place, places = offered is not own, {r: parts[r] for r in self.peers}
        return self._move(What.ALL_GATHER, self._others(offered), places, in_place=in_place)

    def _move(
        self, what: What, offers: Mapping[int, Tensor], places: Mapping[int, Tensor], *, in_place: bool = False
    ) -> SharedWork:
        """`places`: by rank, for what it offers to this one."""

        def finish(contents: Contents) -> None:
            for r, place in places.items():
                _put(contents[r], place)

        return self._issue(what, offers, finish, in_place=in_place)

    def _reduce(
        self, what: What, offers: Mapping[int, Tensor], opts: Any, output: Tensor | None, own: Tensor, **how: bool
    ) -> SharedWork:
        """What all ranks give is combined in the output; None: another rank has it."""
        _check_operator(opts)

        def finish(contents: Contents) -> None:
            if output is not None:
                _combine(opts, output, own, self._rank, contents)

        return self._issue(what, offers, finish, **how)

    def _reduce_scatter_base(self, output: Tensor, input: Tensor, opts: Any) -> SharedWork:
        """output: [n], which may be its part of the input: [W * n]"""
        _check_operator(opts)
        if output.untyped_storage().data_ptr() != input.untyped_storage().data_ptr():
            self.arena.keep_private(output)
        flat = input.detach().reshape(-1)
        parts = list(flat.chunk(self._size)) if flat.numel() else [flat] * self._size
        place, offers = self.arena.find(flat), {r: parts[r] for r in self.peers}
        in_place = place is not None and not place[0].is_mapped  # else a user sends what is gathered
        return self._reduce(What.REDUCE_SCATTER, offers, opts, output, parts[self._rank], in_place=in_place)

    def allreduce(self, tensors: list[Tensor], opts: Any) -> SharedWork:
        (tensor,) = tensors
        return self._reduce(What.ALL_REDUCE, self._others(tensor), opts, tensor, tensor)

    def reduce(self, tensors: list[Tensor], opts: Any) -> SharedWork:
        (tensor,), root = tensors, opts.rootRank
        if self._rank == root:
            return self._reduce(What.REDUCE, {}, opts, tensor, tensor)
        return self._reduce(What.REDUCE, {root: tensor}, opts, None, tensor)

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
        semaphores, control, own = Semaphores(spin_s), memory_file(size * CHANNEL_BYTES), arena()
        for r in range(size):
            Channel(semaphores, control, r).make()
        return (semaphores, control, own), [control.descriptor, *own.descriptors]

    def use(made: tuple[Semaphores, MappedFile, Memory], theirs: Mapping[int, PeerConnection]) -> G:
        (semaphores, control, own), peers = made, dict[int, SharedPeer]()
        for r in sorted(theirs, key=lambda r: (r - rank) % size):  # not all ranks read the same one first
            its_control, *its_memory = theirs[r].descriptors
            its, memory = MappedFile(its_control, writes=True), own.peer(r, its_memory)
            to, from_ = Channel(semaphores, control, r), Channel(semaphores, its, rank)
            peers[r] = SharedPeer(f"rank {r} of the group", memory, to, from_, theirs[r])
        return group(rank, size, own, peers, check, timeout.total_seconds())

    return exchange_descriptors(store, rank, size, offer, use, timeout.total_seconds())


def unavailable() -> str:
    """Why this machine has no memory that ranks can share; "" if it has."""
    try:
        Semaphores()
        memory_file(CHANNEL_BYTES)
    except (OSError, AttributeError) as e:
        return getattr(e, "strerror", None) or str(e)
    return ""


def _nothing(_: Contents) -> None:
    return


def _put(content: Tensor, target: Tensor) -> None:
    """content: uint8, the bytes of a tensor like `target`"""
    target.detach().copy_(_like(content, target).view(target.shape))


def _split(whole: Tensor, splits: Sequence[int], size: int) -> list[Tensor]:
    """Rows for each rank; without splits equal parts."""
    rows = whole.detach()
    if not splits:
        return list(rows.view(size, -1)) if rows.numel() else [rows] * size
    return list(torch.split(rows, list(splits)))


def _check_operator(opts: Any) -> None:
    if opts.reduceOp.op not in _COMBINE:
        raise RuntimeError(f"{opts.reduceOp.op} is no reduction of this process group")


def _combine(opts: Any, output: Tensor, own: Tensor, rank: int, contents: Contents) -> None:
    """output = what all ranks give, combined in their order, chunk by chunk. It may be the memory of `own`."""
    operator, flat = _COMBINE[opts.reduceOp.op], output.detach().reshape(-1)
    parts = [
        _like(contents[r], output) if r in contents else own.detach().reshape(-1) for r in sorted([*contents, rank])
    ]
    if len(parts) == 1:
        flat.copy_(parts[0])
    step = max(1, (_CHUNK_BYTES if flat.device.type == "cpu" else _DEVICE_CHUNK_BYTES) // flat.itemsize)
    scratch = torch.empty_like(flat[: step if len(parts) > 2 else 0])
    for begin in range(0, flat.numel() if len(parts) > 1 else 0, step):
        total, *pieces, last = (part[begin : begin + step] for part in parts)
        for piece in pieces:
            total = operator(total, piece, out=scratch[: len(piece)])
        operator(total, last, out=flat[begin : begin + step])
    if flat.data_ptr() != output.data_ptr():  # it is not contiguous
        output.detach().copy_(flat.view(output.shape))


def _like(content: Tensor, tensor: Tensor) -> Tensor:
    """[n] of the tensor's dtype"""
    if content.numel() != tensor.nbytes:
        raise RuntimeError(f"a rank gave {content.numel()} bytes where this one expects {tensor.nbytes}")
    return content.view(tensor.dtype)
