"""`Link`: an emulated interconnect, slower than the real one. `Alarm`: calls back when a transfer on it is over.

A collective reserves the link when it is issued, and completes when its bytes have arrived and the link has carried
them, whichever is later. Each rank reserves on its own. The sum in rank order is computed while the link is busy, as a
GPU's collectives add while they receive."""

import heapq
import itertools
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from enum import Flag, auto
from typing import Any

import torch

_SPIN_S = 200e-6  # a sleep may end this much late (Linux: 60 to 200 us); the end of a wait is spent yielding
_IDLE_S = 1.0  # the alarm's thread ends after so long without work


class LinkDirection(Flag):
    """The directions of a rank's link that a transfer occupies. A ring sends and receives at the same time."""

    OUT = auto()
    IN = auto()
    BOTH = OUT | IN


class Link:
    """One FIFO per direction, shared by all groups of a rank, so that two collectives in flight halve the bandwidth:

        finish = max(now, link_free) + latency + link_bytes / bandwidth

    `bytes_per_s` is of one direction; `latency_s` of each collective, whatever its size. Raises ValueError without
    bandwidth, or for a negative latency."""

    def __init__(self, *, bytes_per_s: float, latency_s: float = 0.0) -> None:
        if not bytes_per_s > 0 or not latency_s >= 0:
            given = f"{bytes_per_s} bytes/s and {latency_s} s"
            raise ValueError(f"a link of {given} is impossible; give a bandwidth above 0")
        self.bytes_per_s, self.latency_s = bytes_per_s, latency_s
        self._lock = threading.Lock()
        self.reset()

    def reserve(self, now_s: float, link_bytes: int, direction: LinkDirection = LinkDirection.BOTH) -> float:
        """Queue a transfer; returns when it ends, on the clock of `now_s`."""
        with self._lock:
            directions = [d for d in self._free_s if d in direction]
            start_s = max(now_s, *(self._free_s[d] for d in directions))
            finish_s = start_s + self.latency_s + link_bytes / self.bytes_per_s
            self._free_s.update(dict.fromkeys(directions, finish_s))
        return finish_s

    def reset(self) -> None:
        """Empty the queues."""
        with self._lock:
            self._free_s = {LinkDirection.OUT: 0.0, LinkDirection.IN: 0.0}


class DroppedWork:
    """Replaces an operation whose bytes never pass, because this rank's link was cut (`WireContext.cut_link`).

    It has the part of Gloo's `Work` that a `WireWork` uses. Nothing is sent, and nothing writes to its tensors. An abort
    sets `abort_event`, which ends all waits."""

    def __init__(self, abort_event: threading.Event) -> None:
        self._abort_event = abort_event

    def is_completed(self) -> bool:
        return False

    def wait(self, timeout: timedelta) -> None:
        """Raises RuntimeError: after `timeout`, or at once after an abort."""
        self._abort_event.wait(timeout.total_seconds())
        raise RuntimeError("the link of this rank is cut")

    def get_future(self) -> torch.futures.Future[Any]:
        """A future that never completes."""
        return torch.futures.Future()


def pause_until(due_s: float, interrupt: threading.Event) -> None:
    """Wait for a moment of `time.perf_counter`, within some microseconds, or until `interrupt` is set."""
    while (left_s := due_s - time.perf_counter()) > 0 and not interrupt.is_set():
        if left_s > _SPIN_S:
            interrupt.wait(left_s - _SPIN_S)
        else:
            os.sched_yield()


class Alarm:
    """Calls back at given moments, from one thread that exists only while it is needed. It completes DDP's futures, for
    which Python does not wait: a wait in Gloo's own threads would delay their next operations."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._due: list[tuple[float, int, Callable[[], None]]] = []  # a heap
        self._count = itertools.count()
        self._running = False
        self._never = threading.Event()

    def at(self, due_s: float, call: Callable[[], None]) -> None:
        """Call at this moment of `time.perf_counter`, or at once if it has passed. `call` must not raise."""
        with self._changed:
            heapq.heappush(self._due, (due_s, next(self._count), call))
            if not self._running:
                self._running = True
                threading.Thread(target=self._run, name="fsdp-lab-link", daemon=True).start()
            self._changed.notify()

    def clear(self) -> None:
        """Cancel all calls that have not been made."""
        with self._changed:
            self._due.clear()
            self._changed.notify()

    def _run(self) -> None:
        while (due := self._next()) is not None:
            due_s, call = due
            pause_until(due_s, self._never)
            call()
            del due, call  # do not keep what they refer to

    def _next(self) -> tuple[float, Callable[[], None]] | None:
        """Waits until shortly before the earliest call and takes it; None after a while without any."""
        with self._changed:
            while True:
                left_s = self._due[0][0] - time.perf_counter() - _SPIN_S if self._due else _IDLE_S
                if self._due and left_s <= 0:
                    due_s, _, call = heapq.heappop(self._due)
                    return due_s, call
                if not self._changed.wait(left_s) and not self._due:
                    self._running = False
                    return None
