"""`Meter`: what crossed the wire, collective by collective, and how long computing waited for it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from fsdp_lab.events import Traffic

_MOST = 20_000  # collectives kept where nobody takes them


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


@dataclass(kw_only=True, slots=True)
class Collective:
    """One collective as this rank saw it. Times are of its `time.perf_counter`, in seconds."""

    sequence: int  # over all groups of this rank, from 0
    kind: str
    group: str
    size: int
    link_bytes: int
    issue_s: float
    backward: int = 0  # how many backwards had ended when it was issued
    end_s: float | None = None  # its results are there; None where nobody was told
    waits: list[tuple[float, float]] = field(default_factory=list)  # from and to: somebody computed nothing meanwhile
    link_end_s: float | None = None  # when the emulated link has carried it; None: there is none
    by_future: bool = False  # it is waited for in C++, where nobody sees the wait: DDP's reducer


class Meter:
    """Keeps collectives until they are taken, once a step; any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: deque[Collective] = deque(maxlen=_MOST)
        self._backwards = 0

    def issued(self, collective: Collective) -> None:
        with self._lock:
            collective.backward = self._backwards
            self._kept.append(collective)

    def end_backward(self) -> None:
        """Collectives issued from now on belong to another backward: see `exposed`."""
        with self._lock:
            self._backwards += 1

    def take(self) -> list[Collective]:
        """What was issued since the last time, in that order."""
        with self._lock:
            taken = list(self._kept)
            self._kept.clear()
        return taken


def traffic(collectives: Sequence[Collective]) -> dict[str, Traffic]:
    """By kind. One that has not ended counts no seconds."""
    shown = exposed(collectives)
    found: dict[str, Traffic] = {}
    for c in collectives:
        seconds = 0.0 if c.end_s is None else c.end_s - c.issue_s
        found[c.kind] = found.get(c.kind, Traffic()) + Traffic(calls=1, link_bytes=c.link_bytes, seconds=seconds)
    return {kind: t + Traffic(exposed_seconds=shown.get(kind, 0.0)) for kind, t in found.items()}


def exposed(collectives: Sequence[Collective]) -> dict[str, float]:
    """Exposed communication by kind, in seconds: the time during which computing waits for a collective.

    Where this side waits, it is the wait, with what is left to do when the bytes have come (the sum in the order of ranks).
    DDP's reducer waits in C++ for all its buckets at the end of a backward: there it is the time from the last gradient,
    with which the last bucket is issued, to each bucket's landing. An instant in which several are waited for counts once,
    for the one whose wait began first. Waits for ranks that come late are part of it.
    """
    ready: dict[int, float] = {}  # by backward: when its last bucket was issued
    for c in collectives:
        if c.by_future:
            ready[c.backward] = max(c.issue_s, ready.get(c.backward, 0.0))
    waits = [(start, end, c.kind) for c in collectives for start, end in c.waits]
    for c in collectives:
        if c.by_future and not c.waits and c.end_s is not None:
            waits.append((max(c.issue_s, ready[c.backward]), c.end_s, c.kind))
    found: dict[str, float] = {}
    covered = float("-inf")
    for start, end, kind in sorted(waits):
        if end > max(start, covered):
            found[kind] = found.get(kind, 0.0) + end - max(start, covered)
            covered = end
    return found
