"""`Awaited`: something that ends once, on another thread, and is waited for in a cell, by `wait()` or by `await`."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Generator
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Awaited(Generic[T]):
    """Something that ends once, on another thread: waited for by `wait()` in a cell or by `await`.

    Subclasses say what Ctrl-C (or a cancelled task) does, in `_given_up`.
    """

    def __init__(self) -> None:
        self._over = threading.Event()
        self._callbacks: list[Callable[[], None]] = []
        self._callbacks_lock = threading.Lock()

    def _outcome(self) -> T:
        """The value, or raises. Called when it is over."""
        raise NotImplementedError

    def _given_up(self, blocking: bool) -> None:
        """The one who waits has given up."""

    def _end(self) -> None:
        with self._callbacks_lock:
            self._over.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            with contextlib.suppress(RuntimeError):  # that loop is closed by now
                callback()

    @property
    def done(self) -> bool:
        return self._over.is_set()

    def wait(self, timeout: float | None = None) -> T:
        """Blocks until it is over. Raises what it failed with, or TimeoutError after `timeout` seconds."""
        try:
            if not self._over.wait(timeout):
                raise TimeoutError(f"{self!r} was not over after {timeout} s")
        except KeyboardInterrupt:
            self._given_up(blocking=True)
            raise
        return self._outcome()

    def __await__(self) -> Generator[Any, None, T]:
        return self._wait_async().__await__()

    async def _wait_async(self) -> T:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()

        def tell() -> None:
            loop.call_soon_threadsafe(lambda: None if future.done() else future.set_result(None))

        with self._callbacks_lock:
            if not self._over.is_set():
                self._callbacks.append(tell)
            else:
                future.set_result(None)
        try:
            await future
        except asyncio.CancelledError:
            self._given_up(blocking=False)
            raise
        return self._outcome()
