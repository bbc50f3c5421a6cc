"""Turns of processes that run tests side by side: most run beside each other, one that measures time runs alone."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def locked(file: Path, how: int) -> Iterator[None]:
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, how)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def turn(folder: Path, *, alone: bool) -> Iterator[None]:
    """Within it, no process of the same folder has a turn that is `alone`; where this one is, none has any.

    Who waits to be alone holds the gate meanwhile, so that no other turn begins before it.
    """
    descriptor = os.open(folder / "room", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    try:
        with locked(folder / "gate", fcntl.LOCK_EX):
            fcntl.flock(descriptor, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield
    finally:
        os.close(descriptor)
