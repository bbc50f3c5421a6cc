"""`Semaphores`: POSIX semaphores in memory that processes share, by ctypes.

A semaphore is a counter that one process raises and another lowers, waiting in the kernel while it is zero. It has no owner,
so a process that dies holds none; and it orders memory: what was written before `post` is read after `take`.
"""

from __future__ import annotations

import ctypes
import errno
import os
import time
from typing import Any

SPIN_S = 50e-6  # of a wait where every rank has a core: about as long as the kernel needs to wake one
SIZE_BYTES = 64  # room for a sem_t, and a cache line of its own


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


class Semaphores:
    """The functions, each of a semaphore at an address."""

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
        if self._spin_s and self._spin(address):
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

    def _spin(self, address: int) -> bool:
        end_s = time.perf_counter() + self._spin_s
        while time.perf_counter() < end_s:
            if not self._try(ctypes.c_void_p(address)):
                return True
        return False

    def _wait(self, address: int, clock: int, until: _Timespec) -> int:
        if self._clock_wait is not None:
            return int(self._clock_wait(ctypes.c_void_p(address), clock, ctypes.byref(until)))
        return int(self._timed_wait(ctypes.c_void_p(address), ctypes.byref(until)))
