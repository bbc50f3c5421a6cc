"""`Awaited`: a result that another thread sets and a notebook cell waits for."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Generator
from concurrent.futures import Future, InvalidStateError
from typing import Any, Generic, TypeVar

from fsdp_lab.base.errors import plain_errors

T = TypeVar("T")
PROGRESS_S = 1.0


@plain_errors
class Awaited(Generic[T]):
    """A result that another thread sets once. `wait()` or `await` it from any thread or event loop, any number of times.

    Subclasses define `_given_up`: what Ctrl-C in `wait`, or cancelling the task that awaits, does.

    Attributes:
        while_awaited: called each second while a task awaits, and once at the end: to draw how far it is.
    """

    def __init__(self) -> None:
        self.while_awaited: Callable[[], None] = _nothing
        self._future: Future[None] = Future()
        self._future.set_running_or_notify_cancel()  # cancelling one task that awaits does not cancel it for the others

    def _outcome(self) -> T:
        """Returns the result, or raises. Called after `_end`."""
        raise NotImplementedError

    def _given_up(self, blocking: bool) -> None:
        """Called when the caller stops waiting. `blocking`: it was in `wait`, not in `await`."""

    def _end(self) -> None:
        """Wakes everyone who waits. Idempotent."""
        with contextlib.suppress(InvalidStateError):  # called before
            self._future.set_result(None)

    @property
    def done(self) -> bool:
        return self._future.done()

    def wait(self, timeout: float | None = None) -> T:
        """Blocks until the result is there and returns it, or raises its error; TimeoutError after `timeout` seconds."""
        try:
            if not self._wait_over(timeout):
                raise TimeoutError(f"{self!r} was not over after {timeout} s")
        except KeyboardInterrupt:
            self._given_up(blocking=True)
            raise
        return self._outcome()

    def _wait_over(self, timeout_s: float | None) -> bool:
        """Blocks until the result is there, or for `timeout_s`. Returns `done`."""
        with contextlib.suppress(TimeoutError):
            self._future.result(timeout_s)
        return self.done

    def __await__(self) -> Generator[Any, None, T]:
        return self._wait_async().__await__()

    async def _wait_async(self) -> T:
        future = asyncio.wrap_future(self._future)
        try:
            while not (await asyncio.wait([future], timeout=PROGRESS_S))[0]:
                self.while_awaited()
            self.while_awaited()
        except asyncio.CancelledError:
            self._given_up(blocking=False)
            raise
        return self._outcome()


def _nothing() -> None:
    pass
