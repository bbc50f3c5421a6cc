"""`Guard`: the side thread of a rank that can free it, and tells the others.

Note: giving up a step. A rank is asked to stop by SIGINT, or learns from the store that another rank gave up. Either must
work while the main thread sits in C++, where no Python handler runs; but the interpreter's own C handler writes a byte to
the wakeup descriptor at once, and this thread reads it. It then aborts the hub (Note: abort, wire/hub.py) and writes the
reason to the store, where the guards of the other ranks find it. The exception itself is raised by the wire, at the next
collective, so that no line of ours is ever cut in half.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from torch import distributed as dist

from fsdp_lab.rank.line import Line
from fsdp_lab.wire import Hub

INTERRUPTED = "was interrupted"  # how the reason of a stop ends
_POLL_S = 0.1
ANSWER_S = 5.0  # for rank 0's store, when a step is given up
_INSIST_S = 1.0  # a SIGINT so long after the abort means it: the first one may only be late


class Guard:
    """Watches from `start` to `close`, and acts only inside `guarding`."""

    def __init__(self, hub: Hub, store: dist.Store, rank: int) -> None:
        self._hub, self._store, self._rank = hub, store, rank
        self._line = Line(ANSWER_S)
        self._epoch: int | None = None  # None: not guarding
        self._lock = threading.Lock()
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        self._closed = False
        self._aborted_s = 0.0
        self._turn = 0  # the number of the call that is guarded
        self.insisted = False  # asked again to give up, by one who knows that a rank will not answer
        self._thread = threading.Thread(target=self._watch, name="fsdp-lab-guard", daemon=True)
        self._thread.start()

    @contextmanager
    def guarding(self, epoch: int, turn: int) -> Iterator[None]:
        """While ranks work together, in the call of this number. In the main thread SIGINT is taken over, and put back
        after."""
        with self._lock:
            self._epoch, self._turn = epoch, turn
        self.insisted = False
        in_main = threading.current_thread() is threading.main_thread()
        if not in_main:
            try:
                yield
            finally:
                self._rest()
            return
        handler = signal.signal(signal.SIGINT, _nothing)
        wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        try:
            yield
        finally:
            self._rest()
            signal.set_wakeup_fd(wakeup)
            signal.signal(signal.SIGINT, handler)

    @property
    def working(self) -> bool:
        """Whether it guards: ranks work together."""
        return self._epoch is not None

    def follow(self, epoch: int) -> None:
        """Go on guarding, under a new epoch; before the hub is cleared, so that no late word of the old one hits it."""
        with self._lock:
            self._epoch = epoch

    def announce(self, why: str) -> None:
        """Give up on this rank, and tell the others, where the store still stands."""
        self._hub.abort(why)
        epoch = self._epoch
        if epoch is None:
            return
        with contextlib.suppress(RuntimeError):
            told = f"{self._turn} {why}"
            self._line.ask(lambda: self._store.compare_set(_key(epoch), "", told))  # the first reason stands

    def announced(self, epoch: int) -> str | None:
        """What a rank gave up for in this epoch, or None."""
        told = self._told(epoch)
        return None if told is None else told[1]

    def announced_now(self, epoch: int) -> str | None:
        """The same, where it was in the very call that is guarded: a rank that came to it first has left it again."""
        told = self._told(epoch)
        return told[1] if told is not None and told[0] == self._turn else None

    def _told(self, epoch: int) -> tuple[int, str] | None:
        if not self._store.check([_key(epoch)]):
            return None
        turn, _, why = self._store.get(_key(epoch)).decode().partition(" ")
        return int(turn), why

    def close(self) -> None:
        self._closed = True
        os.write(self._write, b"\0")
        self._thread.join(2)
        os.close(self._read)
        os.close(self._write)

    def _rest(self) -> None:
        with self._lock:
            self._epoch = None

    def _watch(self) -> None:
        while not self._closed:
            ready, _, _ = select.select([self._read], [], [], _POLL_S)
            interrupted = bool(ready) and signal.SIGINT in os.read(self._read, 1024)
            with self._lock:
                epoch = self._epoch
            if epoch is None or self._hub.aborted is not None:
                self.insisted |= interrupted and time.monotonic() - self._aborted_s > _INSIST_S
                continue
            try:
                self._aborted_s = time.monotonic()  # true only of the last round, in which an abort is found
                if interrupted:
                    self.announce(f"rank {self._rank} {INTERRUPTED}")
                elif (why := self.announced(epoch)) is not None:
                    self._abort_in(epoch, why)
            except RuntimeError as e:
                self._abort_in(epoch, f"the store of rank 0 is gone ({str(e).splitlines()[0]})")

    def _abort_in(self, epoch: int, why: str) -> None:
        """Unless the main thread has gone on to another epoch while this one asked the store."""
        with self._lock:
            if self._epoch == epoch:
                self._hub.abort(why)


def _key(epoch: int) -> str:
    return f"abort/{epoch}"


def _nothing(number: int, frame: FrameType | None) -> None:
    """SIGINT's Python handler while guarding: the guard has already read it."""
