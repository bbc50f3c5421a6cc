"""`Hub`: what all groups of one rank share: the meter, the order of reduction, and the abort.

Note: abort. A Python exception does not reach a rank that sits in C++: Gloo's `wait`, or DDP's reducer waiting for a
future at the end of the backward. So nothing here waits in C++ for longer than a slice (`WireWork.wait`), and each
future that C++ may wait for is our own, so that `abort`, called from any thread, can complete it. What the future then
holds is void: the step that sees it must be raised and discarded, which `check` does at the next call to the wire.
Gloo's own operation cannot be called back, and to destroy its group waits for it: so the group is dropped in a thread of
its own (`bury`), and the session goes on with new groups. The rank that did not join the operation has nothing to wait
for: its end of the connections closes, which ends the operation of the others; else its timeout does (with torch 2.13 a
process in which several had timed out died seconds later, in the destructor of Gloo's exception). Until then it may
still read and write its tensors, or only begin to (Gloo's threads take operations from a queue): their storage must not
be freed by force (`busy`), and what an abort completes is finished by nobody afterwards (`Voidable.void`). What Gloo's
threads call back holds no group, since one that they drop last would be destroyed, and joined, by its own thread.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from typing import Any, Protocol

import torch

from fsdp_lab.wire.link import Alarm, Link, Way, pause_until
from fsdp_lab.wire.lost import Lost
from fsdp_lab.wire.meter import Collective, Meter

_RECENT = 64  # collectives remembered for a diagnosis: more than ranks run ahead of each other


class Reduction(Enum):
    """In which order the ranks' summands are added.

    RANK_ORDERED exchanges the summands and adds them in the order of ranks, so that an element's sum does not depend on
    where it lies in a buffer: with it all backends give equal bits. NATIVE leaves it to Gloo or NCCL. AUTO is
    rank-ordered where that is not slower: for reduce-scatter over Gloo, which is an all-reduce inside.
    """

    AUTO = "auto"
    RANK_ORDERED = "rank_ordered"
    NATIVE = "native"


class RankAborted(RuntimeError):
    """The step in progress was given up; the sentence says for whose sake."""


class WireTimeout(RuntimeError):
    """A collective did not complete in time."""


class Voidable(Protocol):
    """What an abort completes: a `WireWork`."""

    def void(self) -> None:
        """Afterwards nothing is written on behalf of it, but by Gloo."""


class Buriable(Protocol):
    """What is put aside after an abort: a `Wire`."""

    def shutdown(self) -> None: ...


@dataclass(frozen=True)
class Running:
    """An operation of Gloo."""

    issued: Collective
    storages: tuple[torch.UntypedStorage, ...]
    inner: Any  # its `Work`


class Hub:
    """One a rank. Groups report to it; the session reads its meter and calls its abort."""

    def __init__(self, *, reduction: Reduction = Reduction.AUTO, timeout_s: float = 120.0) -> None:
        self.meter = Meter()
        self.reduction = reduction
        self.timeout_s = timeout_s
        self.last: Collective | None = None
        self.watch: Callable[[Sequence[torch.Tensor]], None] | None = None  # told what a collective is about to move
        self._unit = ""  # whose collectives are issued now
        self.link: Link | None = None  # emulated; None: what is real is enough
        self.alarm = Alarm()
        self._given_up = threading.Event()  # set while `aborted`: wakes who waits for the link
        self._severed = self._heals = False
        self._sequence = 0
        self._ordinals: Counter[str] = Counter()  # by group
        self._recent: deque[Collective] = deque(maxlen=_RECENT)
        self._void_before = 0  # what was issued before is no longer waited for
        self._why: str | None = None
        self._lock = threading.Lock()
        self._clocks: list[tuple[Collective, Any, Any]] = []  # with NCCL's work and the event of its end
        self._began: tuple[Any, float] | None = None  # an event at the beginning of the step, and when it was
        self._running: dict[int, Running] = {}  # by sequence number
        self._open: weakref.WeakSet[Voidable] = weakref.WeakSet()  # those whose future C++ may be waiting for
        self._groups: weakref.WeakSet[Buriable] = weakref.WeakSet()
        self._members: dict[str, tuple[int, ...]] = {}  # ranks by group

    @property
    def timeout(self) -> timedelta:
        return timedelta(seconds=self.timeout_s)

    # -- groups ---------------------------------------------------------------------------------------------------

    def join(self, group: Buriable, name: str, ranks: Sequence[int]) -> None:
        """A group says that it is there, and of which ranks."""
        self._groups.add(group)
        self._members[name] = tuple(ranks)

    def leave(self, name: str) -> None:
        """It is no longer used."""
        self._members.pop(name, None)
        self._ordinals.pop(name, None)

    def groups(self) -> list[Buriable]:
        """The groups alive."""
        return list(self._groups)

    # -- one collective -------------------------------------------------------------------------------------------

    @contextmanager
    def naming(self, unit: str) -> Iterator[None]:
        """Within it collectives are issued on behalf of a unit."""
        before, self._unit = self._unit, unit
        try:
            yield
        finally:
            self._unit = before

    def name(self, unit: str) -> None:
        """The same, until another is named: where nobody tells when its collectives are all issued."""
        self._unit = unit

    def number(self, kind: str, group: str, size: int, *, link_bytes: int, payload_bytes: int, dtype: str,
               together: bool = True) -> Collective:  # fmt: skip
        """Count a collective at its issue; `together`: all its ranks issue it. Raises RankAborted after an abort."""
        self.check()
        issued = Collective(
            sequence=self._sequence,
            kind=kind,
            group=group,
            size=size,
            ordinal=self._ordinals[group] if together else -1,
            unit=self._unit,
            dtype=dtype,
            payload_bytes=payload_bytes,
            link_bytes=link_bytes,
            issue_s=time.perf_counter(),
        )
        self._ordinals[group] += together
        self._sequence += 1
        self.last = issued
        self._recent.append(issued)
        self.meter.issued(issued)
        return issued

    def begin(self, issued: Collective, tensors: Sequence[torch.Tensor], inner: Any) -> None:
        """Gloo has an operation of these tensors."""
        self._running[issued.sequence] = Running(issued, tuple(t.untyped_storage() for t in tensors), inner)

    def end(self, issued: Collective) -> None:
        """It is over, well or not. Once more does no harm."""
        self._running.pop(issued.sequence, None)

    def busy(self) -> set[int]:
        """Addresses of the storage that operations of Gloo may still read or write."""
        for sequence, running in list(self._running.items()):
            if running.inner.is_completed():
                self._running.pop(sequence, None)  # Gloo's threads take out of it too
        return {storage.data_ptr() for running in list(self._running.values()) for storage in running.storages}

    def expose(self, work: Voidable) -> None:
        """Remember a work whose future is in other hands, so that an abort can complete it."""
        with self._lock:
            self._open.add(work)
        if self._why is not None:
            work.void()

    def start_clocks(self) -> None:
        """On a GPU, at the beginning of a step, when the device has been synchronised: its times count from here."""
        self._clocks = []
        self._began = (_cuda_event(), time.perf_counter())

    def clock(self, issued: Collective, work: Any) -> None:
        """A work of NCCL has just been waited for by the current stream, which goes on when it has ended."""
        if self._began is not None:
            self._clocks.append((issued, work, _cuda_event()))

    def read_clocks(self) -> None:
        """Take the times of NCCL's works; call it when the device has been synchronised, at the end of a step.

        The end is of an event on the stream that waited, the duration NCCL's own.
        """
        clocks, began, self._clocks, self._began = self._clocks, self._began, [], None
        for issued, work, event in clocks:
            assert began is not None
            issued.end_s = issued.start_s = began[1] + began[0].elapsed_time(event) / 1e3
            with contextlib.suppress(RuntimeError):  # timing is off in this build
                issued.start_s = issued.end_s - work._get_duration() / 1e3
            issued.end_s = max(issued.end_s, issued.link_end_s or 0.0)

    # -- the emulated link: see link.py ---------------------------------------------------------------------------

    @contextmanager
    def linked(self, link: Link | None) -> Iterator[None]:
        """Inside, collectives take this link, which has nothing on it at first."""
        if link is not None:
            link.clear()
        self.link = link
        try:
            yield
        finally:
            self.link = None

    def book(self, issued: Collective, way: Way = Way.BOTH) -> None:
        """Queue a collective on the link. The lab's own vote is not queued, nor what stays in one rank; a barrier is,
        with its latency alone."""
        if self.link is not None and issued.size > 1 and issued.kind != "control":
            issued.link_end_s = self.link.book(issued.issue_s, issued.link_bytes, way)

    def await_link(self, issued: Collective) -> None:
        """Wait until the link has carried it. Raises RankAborted at once after an abort."""
        if issued.link_end_s is not None:
            pause_until(issued.link_end_s, self._given_up)
            self.check()

    # -- a link that is cut on purpose ----------------------------------------------------------------------------

    def sever(self, *, heals: bool) -> None:
        """From now on no collective of this rank passes a byte, in either direction, and none completes; what Gloo or NCCL
        already has may still. `heals`: until `clear`. Groups can still be opened: these meet at the store."""
        self._severed, self._heals = True, heals

    def mend(self) -> None:
        """What is issued from now on passes."""
        self._severed = False

    def lose(self, size: int) -> Lost | None:
        """What stands for an operation of a group of `size` ranks, where the link is cut; None where it passes."""
        return Lost(self._given_up) if self._severed and size > 1 else None

    # -- for who looks on, from a thread of its own: nothing here needs the one that may be blocked ---------------------

    def pending(self) -> Collective | None:
        """The oldest collective that has not finished; None also after an abort, when nobody waits any more."""
        if self._why is not None:
            return None
        of_gloo = [(r.issued, r.inner) for r in list(self._running.values())]
        of_nccl = [(clocked[0], clocked[1]) for clocked in list(self._clocks)]
        for issued, work in sorted(of_gloo + of_nccl, key=lambda pair: pair[0].sequence):
            if issued.sequence >= self._void_before and not work.is_completed():
                return issued
        return None

    def members(self, group: str) -> tuple[int, ...]:
        """The ranks of a group."""
        return self._members.get(group, ())

    def counts(self) -> dict[str, int]:
        """How many collectives were issued in each group that is in use."""
        return {name: self._ordinals[name] for name in list(self._members)}

    def recent(self) -> list[Collective]:
        """The last ones issued, oldest first."""
        return list(self._recent)

    # -- abort and after ------------------------------------------------------------------------------------------

    @property
    def aborted(self) -> str | None:
        """Why, or None."""
        return self._why

    def check(self) -> None:
        """Raises RankAborted after an abort."""
        if self._why is not None:
            raise RankAborted(self._why)

    def abort(self, why: str) -> None:
        """Free whoever waits in this rank, from any thread. The first reason stands."""
        with self._lock:
            if self._why is None:
                self._why = why
            waiting = list(self._open)
        self._given_up.set()
        self.alarm.clear()
        for work in waiting:
            work.void()

    def clear(self) -> None:
        """After an abort, once its groups are buried: collectives may be issued again."""
        with self._lock:
            self._why = None
            self._given_up.clear()
            self._open = weakref.WeakSet()
        for running in list(self._running.values()):
            if isinstance(running.inner, Lost):
                self.end(running.issued)
        if self._heals:
            self.mend()
        self._unit = ""
        self._ordinals.clear()  # a step that was given up may have been so at another collective on each rank
        self._recent.clear()
        self._void_before = self._sequence

    def bury(self, groups: list[Any]) -> None:
        """Empty a list of groups that may hold an operation, the last to refer to them; see the note on abort.

        In a thread of its own, as it waits for the operation, and as none of a group's threads may be the last to drop it.
        """
        threading.Thread(target=groups.clear, daemon=True).start()


def _cuda_event() -> Any:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
