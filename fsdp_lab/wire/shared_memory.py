"""`SharedGroup`: the collectives of ranks on one host, through memory that they share. It has the methods of torch's Gloo
group that `Wire` calls.

Note: a collective through shared memory. A rank that issues one puts what others need into its arena, tells each of them
where (lanes.py), and goes on. Nothing else happens until it waits: then it takes what the others tell and reads their
arenas. Whoever waits for one reads the earlier ones of the group first, in the order of issue, which is the same on all
ranks. So issuing waits for nobody, and a wait waits for the others to issue, not for their waits: what does not deadlock
over Gloo does not here. (Only who is RING collectives ahead waits for others to read.)

Sums are added in the order of ranks, by each rank for itself: the same bits everywhere, and in an all-reduce.

No thread of ours runs beside the ranks: where there are as many as cores, it would take the time of one. A future, which DDP
asks for, is completed in a thread that waits (`WireWork`).

A group that is opened after an abort has new control files, so what late ranks still raise harms nobody; what they still
read, they discard.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.autograd.profiler import record_function

from fsdp_lab.wire.arena import Arena, MemoryFile
from fsdp_lab.wire.arena import Mapping as MappedFile
from fsdp_lab.wire.lanes import LANE_BYTES, RING, Lane, Loan, NotYet, Peer
from fsdp_lab.wire.meeting import meet
from fsdp_lab.wire.semaphores import Semaphores

_SLICE_S = 0.05  # the longest wait in C, hence how late an abort is seen
_CHUNK_BYTES = 256 << 10  # of a sum: stays in a core's cache
_CLOSE_S = 1.0  # for others to read what they were told, when a group is closed
_ALIGN = 64

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
_Found = dict[int, Tensor]  # by rank, what it offers to this one: uint8


class _What(IntEnum):
    """What a collective is; ranks compare it."""

    ALL_GATHER = 1
    REDUCE_SCATTER = 2
    ALL_REDUCE = 3
    ALL_TO_ALL = 4
    BROADCAST = 5
    REDUCE = 6
    SCATTER = 7
    GATHER = 8
    BARRIER = 9


class SharedWork:
    """A collective that this rank has issued, as `dist.Work`. `finish` is given what the others offer."""

    def __init__(self, group: SharedGroup, what: _What, finish: Callable[[_Found], None]) -> None:
        self._group, self._what, self._finish = group, what, finish
        self._found: _Found = {}
        self._failed: str | None = None
        self._done = False
        self.read_s: float | None = None  # when reading began, by time.perf_counter: all ranks had issued it

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Raises NotYet after the timeout, if it is not 0, and RuntimeError for a collective that others do not issue."""
        if not self._done:
            self._group.finish(self, timeout.total_seconds() or threading.TIMEOUT_MAX)
        if self._failed is not None:
            raise RuntimeError(self._failed)
        return True

    def is_completed(self) -> bool:
        return self._done

    def joined(self) -> bool:
        """Whether all ranks have issued it."""
        if not self._done:
            self._group.look()
        return self._done or len(self._found) == len(self._group.peers)

    def try_finish(self) -> bool:
        """Read it if no rank has to be waited for. Returns whether it is completed."""
        with contextlib.suppress(NotYet):
            self._group.finish(self, 0.0)
        return self._done

    def get_future(self) -> torch.futures.Future[Any]:
        raise RuntimeError("only a wait completes it")

    def take(self, end_s: float) -> None:
        """What the others tell, in the order of issue. Raises NotYet."""
        for r, peer in self._group.peers.items():
            if r not in self._found:
                what, self._found[r] = peer.take(end_s)
                if what != self._what and self._failed is None:
                    theirs, own = _What(what).name.lower(), self._what.name.lower()
                    self._failed = f"{peer.name} issued {theirs} where this rank issued {own}"

    def read(self) -> None:
        """When all is taken."""
        self.read_s = time.perf_counter()
        if self._failed is None:
            try:
                with torch.no_grad(), record_function("wire"):
                    self._finish(self._found)
            except RuntimeError as e:
                self._failed = str(e)
        self._done, self._finish = True, _nothing
        self._found.clear()
        for peer in self._group.peers.values():
            peer.has_read()


class Receipt:
    """A transfer from another rank, as `dist.Work`."""

    def __init__(self, inbox: Inbox, tag: int, target: Tensor) -> None:
        self._inbox, self._tag, self._target, self._done = inbox, tag, target, False

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        if not self._done:
            content = self._inbox.next(self._tag, timeout.total_seconds() or threading.TIMEOUT_MAX)
            _put(content, self._target)
            self._done = True
        return True

    def is_completed(self) -> bool:
        return self._done

    def get_future(self) -> torch.futures.Future[Any]:
        raise RuntimeError("only a wait completes it")


class Inbox:
    """What another rank sends, by tag: it may send it in another order than it is asked for."""

    def __init__(self, peer: Peer) -> None:
        self._peer, self._early = peer, defaultdict[int, deque[Tensor]](deque)
        self._lock = threading.Lock()

    def next(self, tag: int, timeout_s: float) -> Tensor:
        """Raises NotYet."""
        end_s = time.monotonic() + timeout_s
        with _held(self._lock, timeout_s):
            while not self._early[tag]:
                found, content = self._peer.take(end_s)
                self._early[found].append(content.clone())
                self._peer.has_read()
            return self._early[tag].popleft()


class SharedGroup:
    """See above. Tensors are on the host. The methods after `close` are named and called as those of torch's groups."""

    def __init__(self, rank: int, size: int, arena: Arena, peers: Mapping[int, Peer], senders: Mapping[int, Peer],
                 check: Callable[[], None]) -> None:  # fmt: skip
        """`peers`, `senders`: the other ranks, for collectives and for transfers. `check` raises after an abort."""
        self.peers, self._rank, self._size, self._arena, self._check = peers, rank, size, arena, check
        self._to = {r: peer.to for r, peer in senders.items()}
        self._inboxes = {r: Inbox(peer) for r, peer in senders.items()}
        self._issued: deque[SharedWork] = deque()  # and not read, oldest first
        self._issuing, self._reading = threading.Lock(), threading.Lock()

    # -- progress -------------------------------------------------------------------------------------------------

    def finish(self, work: SharedWork, timeout_s: float) -> None:
        """Read all collectives up to this one. Raises NotYet."""
        end_s = time.monotonic() + timeout_s
        with _held(self._reading, timeout_s):
            while not work.is_completed():
                self._issued[0].take(end_s)
                self._check()  # after an abort nothing is written any more, since its memory may be freed
                self._issued.popleft().read()

    def look(self) -> None:
        """Take what others have told by now, without reading it."""
        try:
            with _held(self._reading, 0.0):
                for work in list(self._issued):
                    work.take(0.0)
        except NotYet:
            return

    def _make_room(self, lane: Lane) -> None:
        """Until a lane takes one more entry. The other rank may be waiting for this one to read."""
        while lane.see_read():
            continue
        while lane.unread >= RING:
            self._check()
            oldest = self._issued[0] if self._issued else None
            if oldest is None:
                lane.see_read(_SLICE_S)
                continue
            try:
                self.finish(oldest, _SLICE_S)
            except NotYet:
                lane.see_read()

    def close(self, *, aborted: bool) -> None:
        """Give its memory back: after an abort when no thread reads, otherwise when the others have read."""
        end_s = time.monotonic() + _CLOSE_S
        if aborted:
            with contextlib.suppress(NotYet), _held(self._reading, _CLOSE_S):
                self._issued.clear()
        for lane in [*(peer.to for peer in self.peers.values()), *self._to.values()]:
            while not aborted and lane.see_read(max(0.0, end_s - time.monotonic())):
                continue
            if aborted:
                lane.end_loans()
        self._arena.trim()

    # -- issuing --------------------------------------------------------------------------------------------------

    def _issue(self, what: _What, offers: Mapping[int, Tensor], finish: Callable[[_Found], None]) -> SharedWork:
        """`offers`: what some ranks are to read. One tensor for several is put into the arena once."""
        work = SharedWork(self, what, finish)
        with self._issuing:
            for peer in self.peers.values():
                self._make_room(peer.to)
            places, loan = self._lend(offers, len(self.peers))
            self._issued.append(work)
            for r, peer in self.peers.items():
                peer.to.tell(what, *places.get(r, (0, 0)), loan)
        return work

    def _lend(self, offers: Mapping[int, Tensor], readers: int) -> tuple[dict[int, tuple[int, int]], Loan]:
        """Where each rank finds its bytes, and how many."""
        distinct = {id(t): t for t in offers.values()}
        ends = list(itertools.accumulate((-(-t.nbytes // _ALIGN) * _ALIGN for t in distinct.values()), initial=0))
        block = self._arena.allocate(ends[-1]) if ends[-1] and readers else None
        if block is None:
            return {}, Loan(self._arena, None, readers)
        begins = dict(zip(distinct, (block.offset + begin for begin in ends), strict=False))
        for key, t in distinct.items():
            place = self._arena.bytes_at(begins[key], t.nbytes)
            place.view(t.dtype).view(t.shape).copy_(t.detach())
        return {r: (begins[id(t)], t.nbytes) for r, t in offers.items()}, Loan(self._arena, block, readers)

    def _others(self, tensor: Tensor) -> dict[int, Tensor]:
        return dict.fromkeys(self.peers, tensor)

    # -- collectives ----------------------------------------------------------------------------------------------

    def _allgather_base(self, output: Tensor, input: Tensor, opts: Any = None) -> SharedWork:
        """output: [W * n], input: [n]"""
        parts = output.detach().view(-1).chunk(self._size) if output.numel() else [output] * self._size
        return self._gather_all(list(parts), input)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> SharedWork:
        return self._gather_all(outputs[0], inputs[0])

    def _gather_all(self, parts: Sequence[Tensor], own: Tensor) -> SharedWork:
        place = parts[self._rank]
        if place.data_ptr() != own.data_ptr():
            place.detach().copy_(own.detach().view_as(place))

        def finish(found: _Found) -> None:
            for r, content in found.items():
                _put(content, parts[r])

        return self._issue(_What.ALL_GATHER, self._others(own), finish)

    def _reduce_scatter_base(self, output: Tensor, input: Tensor, opts: Any) -> SharedWork:
        """output: [n], which may be its part of the input: [W * n]"""
        flat = input.detach().reshape(-1)
        parts = list(flat.chunk(self._size)) if flat.numel() else [flat] * self._size

        def finish(found: _Found) -> None:
            _combine(opts, output, parts[self._rank], self._rank, found)

        return self._issue(_What.REDUCE_SCATTER, {r: parts[r] for r in self.peers}, finish)

    def allreduce(self, tensors: list[Tensor], opts: Any) -> SharedWork:
        (tensor,) = tensors

        def finish(found: _Found) -> None:
            _combine(opts, tensor, tensor, self._rank, found)

        return self._issue(_What.ALL_REDUCE, self._others(tensor), finish)

    def reduce(self, tensors: list[Tensor], opts: Any) -> SharedWork:
        (tensor,), root = tensors, opts.rootRank

        def finish(found: _Found) -> None:
            if self._rank == root:
                _combine(opts, tensor, tensor, self._rank, found)

        return self._issue(_What.REDUCE, {root: tensor} if self._rank != root else {}, finish)

    def alltoall_base(
        self, output: Tensor, input: Tensor, output_splits: list[int], input_splits: list[int], opts: Any = None
    ) -> SharedWork:
        sent, received = _split(input, input_splits, self._size), _split(output, output_splits, self._size)
        received[self._rank].copy_(sent[self._rank])

        def finish(found: _Found) -> None:
            for r, content in found.items():
                _put(content, received[r])

        return self._issue(_What.ALL_TO_ALL, {r: sent[r] for r in self.peers}, finish)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> SharedWork:
        (tensor,), root = tensors, opts.rootRank

        def finish(found: _Found) -> None:
            if self._rank != root:
                _put(found[root], tensor)

        return self._issue(_What.BROADCAST, self._others(tensor) if self._rank == root else {}, finish)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> SharedWork:
        (output,), root = outputs, opts.rootRank
        if self._rank == root:
            output.detach().copy_(inputs[0][root].detach())

        def finish(found: _Found) -> None:
            if self._rank != root:
                _put(found[root], output)

        offers = {r: inputs[0][r] for r in self.peers} if self._rank == root else {}
        return self._issue(_What.SCATTER, offers, finish)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> SharedWork:
        (own,), root = inputs, opts.rootRank
        if self._rank == root:
            outputs[0][root].detach().copy_(own.detach())

        def finish(found: _Found) -> None:
            if self._rank == root:
                for r, content in found.items():
                    _put(content, outputs[0][r])

        return self._issue(_What.GATHER, {} if self._rank == root else {root: own}, finish)

    def barrier(self, opts: Any = None) -> SharedWork:
        return self._issue(_What.BARRIER, {}, _nothing)

    # -- transfers between two ranks ------------------------------------------------------------------------------

    def send(self, tensors: list[Tensor], to: int, tag: int) -> None:
        """Goes on at once; no work is returned, since nothing has to be waited for."""
        (tensor,), lane = tensors, self._to[to]
        with self._issuing:
            self._make_room(lane)
            places, loan = self._lend({to: tensor}, 1)
            lane.tell(tag, *places.get(to, (0, 0)), loan)

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Receipt:
        return Receipt(self._inboxes[source], tag, tensors[0])

    def _set_default_timeout(self, timeout: timedelta) -> None:
        """Waits have the limit of who waits."""


def open_shared(
    store: dist.Store,
    rank: int,
    size: int,
    *,
    arena: Callable[[], Arena],
    check: Callable[[], None],
    timeout: timedelta,
) -> SharedGroup:
    """Collective. `arena` makes this rank's, or returns the one that it has. Raises NotShared on all ranks."""

    def offer() -> tuple[tuple[Semaphores, MemoryFile, Arena], list[int]]:
        semaphores, control, own = Semaphores(), MemoryFile(2 * size * LANE_BYTES), arena()
        for r in range(size):
            for lane in _lanes(semaphores, control.mapping, r):
                lane.make()
        return (semaphores, control, own), [control.descriptor, own.file.descriptor]

    def use(made: tuple[Semaphores, MemoryFile, Arena], theirs: Mapping[int, Sequence[int]]) -> SharedGroup:
        (semaphores, control, own), peers, senders = made, dict[int, Peer](), dict[int, Peer]()
        for r in sorted(theirs, key=lambda r: (r - rank) % size):  # not all ranks read the same one first
            its, mapped = MappedFile(theirs[r][0], writes=True), own.mapped(theirs[r][1])
            ends = zip(_lanes(semaphores, control.mapping, r), _lanes(semaphores, its, rank), strict=True)
            peers[r], senders[r] = (Peer(f"rank {r} of the group", mapped, *pair) for pair in ends)
        return SharedGroup(rank, size, own, peers, senders, check)

    return meet(store, rank, size, offer, use, timeout.total_seconds())


def _lanes(semaphores: Semaphores, control: MappedFile, rank: int) -> tuple[Lane, Lane]:
    """For collectives and for transfers, from the rank whose control file it is to this one."""
    return Lane(semaphores, control, 2 * rank), Lane(semaphores, control, 2 * rank + 1)


def _nothing(_: _Found) -> None:
    return


@contextmanager
def _held(lock: threading.Lock, timeout_s: float) -> Iterator[None]:
    """Raises NotYet after the timeout."""
    if not lock.acquire(timeout=min(timeout_s, threading.TIMEOUT_MAX)):
        raise NotYet("another thread is reading")
    try:
        yield
    finally:
        lock.release()


def _put(content: Tensor, target: Tensor) -> None:
    """content: uint8, the bytes of a tensor like `target`"""
    target.detach().copy_(_like(content, target).view(target.shape))


def _split(whole: Tensor, splits: Sequence[int], size: int) -> list[Tensor]:
    """Rows for each rank; without splits equal parts."""
    rows = whole.detach()
    if not splits:
        return list(rows.view(size, -1)) if rows.numel() else [rows] * size
    return list(torch.split(rows, list(splits)))


def _combine(opts: Any, output: Tensor, own: Tensor, rank: int, found: _Found) -> None:
    """output = what all ranks give, combined in their order, chunk by chunk. It may be the memory of `own`."""
    operator, flat = _COMBINE[opts.reduceOp.op], output.detach().view(-1)
    parts = [_like(found[r], output) if r in found else own.detach().reshape(-1) for r in sorted([*found, rank])]
    if len(parts) == 1:
        flat.copy_(parts[0])
    step = max(1, _CHUNK_BYTES // flat.itemsize)
    scratch = torch.empty_like(flat[: step if len(parts) > 2 else 0])
    for begin in range(0, flat.numel() if len(parts) > 1 else 0, step):
        total, *pieces, last = (part[begin : begin + step] for part in parts)
        for piece in pieces:
            total = operator(total, piece, out=scratch[: len(piece)])
        operator(total, last, out=flat[begin : begin + step])


def _like(content: Tensor, tensor: Tensor) -> Tensor:
    """[n] of the tensor's dtype"""
    if content.numel() != tensor.nbytes:
        raise RuntimeError(f"a rank gave {content.numel()} bytes where this one expects {tensor.nbytes}")
    return content.view(tensor.dtype)
