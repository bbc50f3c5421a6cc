"""`Link`: an interconnect that is emulated, slower than the wire; `Alarm`: calls back when a transfer on it is over.

A collective is booked at its issue and completes when its bytes are really there and the link has carried them too,
whichever is later. Each rank books by itself, when it issues; the sum in the order of ranks happens while the link is busy,
as a GPU's collectives add while they receive.
"""

from __future__ import annotations

import heapq
import itertools
import os
import threading
import time
from collections.abc import Callable
from enum import Flag, auto

_SPIN_S = 200e-6  # what a sleep may come late (Linux: 60 to 200 us); so much of a wait is spent yielding
_IDLE_S = 1.0  # after so long without anything to do the alarm's thread ends


class Way(Flag):
    """Which directions of a rank's link a transfer occupies. A ring sends and receives the same at once."""

    OUT = auto()
    IN = auto()
    BOTH = OUT | IN


class Link:
    """One FIFO a direction, which all groups of a rank share, so that two collectives in flight halve the bandwidth:

        finish = max(now, link_free) + latency + link_bytes / bandwidth

    Args:
        bytes_per_s: of one direction.
        latency_s: of each collective, however small; the link is taken for it.

    Raises:
        ValueError: no bandwidth, or a negative latency.
    """

    def __init__(self, *, bytes_per_s: float, latency_s: float = 0.0) -> None:
        if not bytes_per_s > 0 or not latency_s >= 0:
            raise ValueError(f"a link of {bytes_per_s} bytes/s and {latency_s} s cannot be; give a bandwidth above 0")
        self.bytes_per_s, self.latency_s = bytes_per_s, latency_s
        self._lock = threading.Lock()
        self._free_s = {Way.OUT: 0.0, Way.IN: 0.0}

    def book(self, now_s: float, link_bytes: int, way: Way = Way.BOTH) -> float:
        """Queue a transfer; returns when it will be over, on the clock of `now_s`."""
        with self._lock:
            ways = [w for w in self._free_s if w in way]
            start_s = max(now_s, *(self._free_s[w] for w in ways))
            finish_s = start_s + self.latency_s + link_bytes / self.bytes_per_s
            self._free_s.update(dict.fromkeys(ways, finish_s))
        return finish_s

    def clear(self) -> None:
        """Nothing is on it any more."""
        with self._lock:
            self._free_s = {Way.OUT: 0.0, Way.IN: 0.0}


def pause_until(due_s: float, interrupt: threading.Event) -> None:
    """Wait for a moment of `time.perf_counter` to some microseconds, or until `interrupt` is set."""
    while (left_s := due_s - time.perf_counter()) > 0 and not interrupt.is_set():
        if left_s > _SPIN_S:
            interrupt.wait(left_s - _SPIN_S)
        else:
            os.sched_yield()


class Alarm:
    """Calls back at given moments, from one thread, which is there only while it is needed.

    What nobody waits for in Python (DDP's futures) is completed by it: a wait in Gloo's own threads would hold up what
    they have to do next.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._due: list[tuple[float, int, Callable[[], None]]] = []  # a heap
        self._count = itertools.count()
        self._running = False
        self._never = threading.Event()

    def at(self, due_s: float, call: Callable[[], None]) -> None:
        """At this moment of `time.perf_counter`, or at once if it has passed. `call` must not raise."""
        with self._changed:
            heapq.heappush(self._due, (due_s, next(self._count), call))
            if not self._running:
                self._running = True
                threading.Thread(target=self._run, name="fsdp-lab-link", daemon=True).start()
            self._changed.notify()

    def clear(self) -> None:
        """Forget all calls that are still to come."""
        with self._changed:
            self._due.clear()
            self._changed.notify()

    def _run(self) -> None:
        while (due := self._next()) is not None:
            due_s, call = due
            pause_until(due_s, self._never)
            call()
            del due, call  # what it refers to may go

    def _next(self) -> tuple[float, Callable[[], None]] | None:
        """Waits until shortly before the earliest call, and takes it; None when there has been nothing for a while."""
        with self._changed:
            while True:
                left_s = self._due[0][0] - time.perf_counter() - _SPIN_S if self._due else _IDLE_S
                if self._due and left_s <= 0:
                    due_s, _, call = heapq.heappop(self._due)
                    return due_s, call
                if not self._changed.wait(left_s) and not self._due:
                    self._running = False
                    return None
