"""What the commands share: how a refusal is said, and how signals end a command so that it can clean up."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


class Refused(Exception):
    """What was asked for cannot be done. `str()` is a sentence: what, why, and the way out. Exit code 2."""


class Failed(Exception):
    """It was started and did not go well. `str()` is a sentence. Exit code 1."""


class CommandEnded(KeyboardInterrupt):
    """SIGTERM or SIGHUP (a closed terminal), raised where Ctrl-C would be, so that both clean up alike."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number


@contextlib.contextmanager
def signals_raise() -> Iterator[None]:
    """Within it SIGTERM and SIGHUP raise `CommandEnded`. Elsewhere than in the main thread it does nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        raise CommandEnded(number)

    names = [name for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    before = {name: signal.signal(getattr(signal, name), end) for name in names}
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(getattr(signal, name), handler)


@contextlib.contextmanager
def unhurried() -> Iterator[None]:
    """Within it (a bounded clean-up) a second Ctrl-C, SIGTERM or SIGHUP waits for nothing: it is ignored."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    names = [name for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
    before = {name: signal.signal(getattr(signal, name), signal.SIG_IGN) for name in names}
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(getattr(signal, name), handler)
