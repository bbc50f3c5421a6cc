"""`Lost`: what stands for an operation whose bytes never pass, because the link of this rank was cut (`Hub.sever`)."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import torch


class Lost:
    """The part of Gloo's `Work` that a `WireWork` uses. Nothing was sent, and nobody writes to its tensors.

    Args:
        given_up: set by an abort: then nobody waits any more.
    """

    def __init__(self, given_up: threading.Event) -> None:
        self._given_up = given_up

    def is_completed(self) -> bool:
        return False

    def wait(self, timeout: timedelta) -> None:
        """Raises RuntimeError: after `timeout`, or at once after an abort."""
        self._given_up.wait(timeout.total_seconds())
        raise RuntimeError("the link of this rank is cut")

    def get_future(self) -> torch.futures.Future[Any]:
        """One that stays open."""
        return torch.futures.Future()
