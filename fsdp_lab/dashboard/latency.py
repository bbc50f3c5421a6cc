"""From the end of a step in its rank to its pixels on a screen, measured with what the page acknowledges.

Clocks: a rank stamps its event with the wall clock, and the page its acknowledgement. On one machine that is one clock;
across machines the figure is only as good as their agreement.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Latency:
    """Quantiles over `events`; NaN where there are none."""

    events: int
    p50_s: float
    p95_s: float
    worst_s: float

    def __str__(self) -> str:
        if not self.events:
            return "no event has been painted yet"
        ms = [f"{1e3 * s:.0f} ms" for s in (self.p50_s, self.p95_s, self.worst_s)]
        return f"rank to pixel over {self.events:,} events: median {ms[0]}, p95 {ms[1]}, worst {ms[2]}"


class Stamps:
    """Event times on their way: waiting for a message, in a message on its way, painted."""

    def __init__(self, *, keep: int = 5000, keep_messages: int = 64) -> None:
        self._waiting: deque[float] = deque(maxlen=keep)
        self._sent: dict[int, list[float]] = {}
        self._keep_messages = keep_messages
        self._seconds: deque[float] = deque(maxlen=keep)

    def wait(self, ends_unix_s: Sequence[float]) -> None:
        self._waiting.extend(ends_unix_s)

    def sent(self, seq: int) -> None:
        """What waits goes with message `seq`."""
        self._sent[seq] = list(self._waiting)
        self._waiting.clear()
        while len(self._sent) > self._keep_messages:
            del self._sent[next(iter(self._sent))]

    def painted(self, seq: int, painted_unix_s: float) -> None:
        """All messages up to `seq` are on the screen; what a second view paints later is not counted again."""
        for number in [n for n in self._sent if n <= seq]:
            self._seconds.extend(painted_unix_s - end for end in self._sent.pop(number))

    def forget(self) -> None:
        self._seconds.clear()

    def latency(self) -> Latency:
        if not self._seconds:
            return Latency(events=0, p50_s=np.nan, p95_s=np.nan, worst_s=np.nan)
        p50, p95, worst = np.quantile(np.array(self._seconds), [0.5, 0.95, 1.0])
        return Latency(events=len(self._seconds), p50_s=float(p50), p95_s=float(p95), worst_s=float(worst))
