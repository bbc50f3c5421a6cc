"""`Awaited`: a result that another thread sets once, and that a notebook cell waits for, by `wait()` or by `await`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Generator
from concurrent.futures import Future, InvalidStateError
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Awaited(Generic[T]):
    """A result that another thread sets once, waited for by `wait()` or `await`: from any loop, any number of times.

    Subclasses define what Ctrl-C, or a cancelled task, does: `_given_up`.
    """

    def __init__(self) -> None:
        self._future: Future[None] = Future()
        self._future.set_running_or_notify_cancel()  # from here on a task that is cancelled does not cancel it for others

    def _outcome(self) -> T:
        """Returns the value, or raises. Called when it is over."""
        raise NotImplementedError

    def _given_up(self, blocking: bool) -> None:
        """The caller stopped waiting."""

    def _end(self) -> None:
        with contextlib.suppress(InvalidStateError):  # ended before
            self._future.set_result(None)

    @property
    def done(self) -> bool:
        return self._future.done()

    def wait(self, timeout: float | None = None) -> T:
        """Blocks until it is over. Raises what it failed with, or TimeoutError after `timeout` seconds."""
        try:
            if not self._wait_over(timeout):
                raise TimeoutError(f"{self!r} was not over after {timeout} s")
        except KeyboardInterrupt:
            self._given_up(blocking=True)
            raise
        return self._outcome()

    def _wait_over(self, timeout_s: float | None) -> bool:
        """Blocks until it is over, or for `timeout_s`; returns whether it is over."""
        with contextlib.suppress(TimeoutError):
            self._future.result(timeout_s)
        return self.done

    def __await__(self) -> Generator[Any, None, T]:
        return self._wait_async().__await__()

    async def _wait_async(self) -> T:
        try:
            await asyncio.wrap_future(self._future)
        except asyncio.CancelledError:
            self._given_up(blocking=False)
            raise
        return self._outcome()
