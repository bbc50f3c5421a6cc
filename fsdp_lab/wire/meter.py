"""`Meter`: what crossed the wire, collective by collective, and how long computing waited for it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fsdp_lab.events import Traffic
from fsdp_lab.spans import Span, Track

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
    """One collective as this rank saw it. Times are of its `time.perf_counter`, in seconds.

    On a CPU nobody sees when Gloo's threads begin with it; between its issue and its end it may have stood in their queue,
    or waited for ranks that came later.
    """

    sequence: int  # over all groups of this rank, from 0
    kind: str
    group: str
    size: int
    link_bytes: int
    issue_s: float
    ordinal: int = 0  # within its group: on all its ranks the same number is the same collective; -1: from rank to rank
    unit: str = ""  # whose parameters or gradients it moves; "" where it belongs to none
    dtype: str = ""
    payload_bytes: int = 0
    backward: int = 0  # how many backwards had ended when it was issued
    start_s: float | None = None  # when the device began with it; None on a CPU
    end_s: float | None = None  # its results are there; None where nobody was told
    waits: list[tuple[float, float]] = field(default_factory=list)  # from and to: somebody computed nothing meanwhile
    link_end_s: float | None = None  # when the emulated link has carried it; None: there is none
    by_future: bool = False  # it is waited for in C++, where nobody sees the wait: DDP's reducer

    @property
    def began_s(self) -> float:
        """As early as is known."""
        return self.issue_s if self.start_s is None else self.start_s


class Meter:
    """Keeps collectives until they are taken, once a step; any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: deque[Collective] = deque(maxlen=_MOST)
        self._copies: deque[tuple[str, float, float]] = deque(maxlen=_MOST)
        self._backwards = 0

    def issued(self, collective: Collective) -> None:
        with self._lock:
            collective.backward = self._backwards
            self._kept.append(collective)

    def copied(self, unit: str, start_s: float, end_s: float) -> None:
        """A unit's parameters or gradients went from host to device or back."""
        with self._lock:
            self._copies.append((unit, start_s, end_s))

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

    def take_copies(self) -> list[tuple[str, float, float]]:
        """Host copies since the last time: unit, from, to."""
        with self._lock:
            taken = list(self._copies)
            self._copies.clear()
        return taken


def traffic(collectives: Sequence[Collective], shown: Mapping[str, float] | None = None) -> dict[str, Traffic]:
    """By kind. One that has not ended counts no seconds. `shown`: what is exposed, where another knows it better."""
    shown = exposed(collectives) if shown is None else shown
    found: dict[str, Traffic] = {}
    for c in collectives:
        seconds = 0.0 if c.end_s is None else c.end_s - c.began_s
        found[c.kind] = found.get(c.kind, Traffic()) + Traffic(calls=1, link_bytes=c.link_bytes, seconds=seconds)
    return {kind: t + Traffic(exposed_seconds=shown.get(kind, 0.0)) for kind, t in found.items()}


def exposed(collectives: Sequence[Collective]) -> dict[str, float]:
    """Exposed communication by kind, in seconds: the length of all `waits`."""
    found: dict[str, float] = {}
    for start, end, c in waits(collectives):
        found[c.kind] = found.get(c.kind, 0.0) + end - start
    return found


def waits(collectives: Sequence[Collective]) -> list[tuple[float, float, Collective]]:
    """Exposed communication: when computing waits for a collective, from and to, in the order of time.

    Where this side waits, it is the wait, with what is left to do when the bytes have come (the sum in the order of ranks).
    DDP's reducer waits in C++ for all its buckets at the end of a backward: there it is the time from the last gradient,
    with which the last bucket is issued, to each bucket's landing. An instant in which several are waited for counts once,
    for the one whose wait began first, so no two overlap. Waits for ranks that come late are part of it.
    """
    ready: dict[int, float] = {}  # by backward: when its last bucket was issued
    for c in collectives:
        if c.by_future:
            ready[c.backward] = max(c.issue_s, ready.get(c.backward, 0.0))
    asked = [(start, end, c) for c in collectives for start, end in c.waits]
    for c in collectives:
        if c.by_future and not c.waits and c.end_s is not None:
            asked.append((max(c.issue_s, ready[c.backward]), c.end_s, c))
    found: list[tuple[float, float, Collective]] = []
    covered = float("-inf")
    for start, end, c in sorted(asked, key=lambda wait: wait[:2]):
        if end > max(start, covered):
            found.append((max(start, covered), end, c))
            covered = end
    return found


def spans(collectives: Sequence[Collective], begin_s: float) -> list[Span]:
    """Each collective that has ended, and each wait, as seconds since `begin_s`."""
    sent = [(c.began_s, c.end_s, c) for c in collectives if c.end_s is not None]
    return [
        *(_span(Track.of(c.kind), start - begin_s, end - begin_s, c) for start, end, c in sent),
        *(_span(Track.WAIT, start - begin_s, end - begin_s, c) for start, end, c in waits(collectives)),
    ]


def _span(track: Track, start_s: float, end_s: float, c: Collective) -> Span:
    return Span(
        track=track,
        name=c.kind,
        unit=c.unit,
        start_s=start_s,
        end_s=end_s,
        sequence=c.sequence,
        ordinal=c.ordinal,
        group=c.group,
        size=c.size,
        dtype=c.dtype,
        link_bytes=c.link_bytes,
        payload_bytes=c.payload_bytes,
    )
