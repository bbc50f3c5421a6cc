"""`until`: a test waits for a condition, never for a time."""

import time
from collections.abc import Callable


def until(condition: Callable[[], object], timeout_s: float = 60.0, what: str = "that", *,
          meanwhile: Callable[[], object] = lambda: None) -> None:  # fmt: skip
    """Returns when `condition()` is true; fails if it is not within `timeout_s`. Calls `meanwhile` between two looks."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {timeout_s:g} s: {what}"
        meanwhile()
        time.sleep(0.005)
