"""`Meter`: what crossed the wire, by kind of collective."""

from __future__ import annotations

import threading

from fsdp_lab.events import Traffic


def link_bytes(kind: str, payload_bytes: int, size: int) -> int:
    """Bytes that one rank of a group of `size` sends over its link for one collective.

    `payload_bytes` is the whole tensor: of an all-gather the output, of a reduce-scatter or an all-to-all the input.
    A ring or a direct exchange sends (W-1)/W of it, an all-reduce that twice (reduce-scatter, then all-gather; Thakur
    et al. 2005, section 4); a broadcast is counted as one payload, as its root sees it.
    """
    if size == 1 or kind == "barrier":
        return 0
    if kind == "broadcast":
        return payload_bytes
    times = 2 if kind in ("all_reduce", "control") else 1
    return times * payload_bytes * (size - 1) // size


class Meter:
    """Counts collectives as they are issued and their seconds as they land; any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: dict[str, int] = {}
        self._bytes: dict[str, int] = {}
        self._seconds: dict[str, float] = {}

    def issued(self, kind: str, bytes_: int) -> None:
        with self._lock:
            self._calls[kind] = self._calls.get(kind, 0) + 1
            self._bytes[kind] = self._bytes.get(kind, 0) + bytes_

    def landed(self, kind: str, seconds: float) -> None:
        with self._lock:
            self._seconds[kind] = self._seconds.get(kind, 0.0) + seconds

    def totals(self) -> dict[str, Traffic]:
        """Since the start of the session; subtract two readings for what lies between."""
        with self._lock:
            return {
                kind: Traffic(calls=calls, link_bytes=self._bytes[kind], seconds=self._seconds.get(kind, 0.0))
                for kind, calls in self._calls.items()
            }


def between(before: dict[str, Traffic], after: dict[str, Traffic]) -> dict[str, Traffic]:
    """What two readings of `Meter.totals` differ by; kinds without a call are left out."""
    gone = {kind: after[kind] - before.get(kind, Traffic()) for kind in after}
    return {kind: t for kind, t in gone.items() if t.calls}
