"""`Meter`: the collectives that crossed the wire, and how long computing waited for them."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from fsdp_lab.base.events import Span, Track, Traffic

_MOST = 20_000  # collectives kept until they are taken


def link_bytes(kind: str, payload_bytes: int, size: int) -> int:
    """Bytes that one rank of a group of `size` sends over its link for one collective. `payload_bytes` is the whole
    tensor: of an all-gather the output, of a reduce-scatter or an all-to-all the input. A ring or a direct exchange
    sends (W-1)/W of it, an all-reduce that twice (reduce-scatter, then all-gather; Thakur et al. 2005, section 4); a
    broadcast is counted as one payload, as its root sees it."""
    if size == 1 or kind == "barrier":
        return 0
    if kind == "broadcast":
        return payload_bytes
    times = 2 if kind in ("all_reduce", "control") else 1
    return times * payload_bytes * (size - 1) // size


@dataclass
class Collective:
    """One collective as seen by this rank. Times are of its `time.perf_counter`, in seconds.

    On a CPU the start is not visible: between its issue and its end, a collective may have been queued for Gloo's
    threads, or waited for later ranks."""

    sequence: int  # over all groups of this rank, from 0
    kind: str
    group: str
    size: int
    link_bytes: int
    issue_s: float
    ordinal: int = 0  # within its group: the same number is the same collective on all ranks; -1: between two ranks
    unit: str = ""  # the unit whose parameters or gradients it moves, or ""
    dtype: str = ""
    payload_bytes: int = 0
    backward: int = 0  # how many backwards had ended when it was issued
    start_s: float | None = None  # when the device began; None on a CPU
    end_s: float | None = None  # when its results were available; None if unknown
    waits: tuple[tuple[float, float], ...] = ()  # (from, to) in which a thread waited for it
    put: tuple[float, float] | None = None  # (from, to) in which its issue copied what others read: in shared memory
    last: tuple[float, int] = (0.0, -1)  # when the last other rank issued it, and which of the group; -1: unknown
    link_end_s: float | None = None  # when the emulated link has carried it; None without one
    by_future: bool = False  # waited for in C++, where the wait is not visible: DDP's reducer

    @property
    def described(self) -> str:
        unit = f" of {self.unit}" if self.unit else ""
        return f"collective {self.sequence} ({self.kind}{unit} in group {self.group} of {self.size})"

    @property
    def began_s(self) -> float:
        """The start if known, otherwise the issue."""
        return self.issue_s if self.start_s is None else self.start_s


class Meter:
    """Keeps collectives until they are taken, once per step. Thread-safe, as deques are."""

    def __init__(self) -> None:
        self._kept: deque[Collective] = deque(maxlen=_MOST)
        self._copies: deque[tuple[str, float, float]] = deque(maxlen=_MOST)
        self.issued = self._kept.append  # to be called with each collective
        self.backwards = 0  # how many have ended

    def copied(self, unit: str, start_s: float, end_s: float) -> None:
        """A unit's parameters or gradients were copied between host and device."""
        self._copies.append((unit, start_s, end_s))

    def end_backward(self) -> None:
        """Collectives issued from now on belong to another backward: see `exposed`."""
        self.backwards += 1

    def take(self) -> list[Collective]:
        """The collectives issued since the last call, in order."""
        return [self._kept.popleft() for _ in range(len(self._kept))]

    def take_copies(self) -> list[tuple[str, float, float]]:
        """The host copies since the last call: (unit, from, to)."""
        return [self._copies.popleft() for _ in range(len(self._copies))]


def traffic(collectives: Sequence[Collective], exposed_s: Mapping[str, float] | None = None) -> dict[str, Traffic]:
    """Traffic by kind. A collective that has not ended adds no seconds. `exposed_s`: seconds of exposed communication
    by kind, if measured elsewhere, also of kinds that nothing was issued as: a reduction may be sent as an all-to-all."""
    exposed_s = exposed(collectives) if exposed_s is None else exposed_s
    by_kind: dict[str, list[Collective]] = {kind: [] for kind in exposed_s if collectives}
    for c in collectives:
        by_kind.setdefault(c.kind, []).append(c)
    found = {}
    for kind, some in by_kind.items():
        s, sent = sum((c.end_s - c.began_s for c in some if c.end_s is not None), 0.0), sum(c.link_bytes for c in some)
        found[kind] = Traffic(calls=len(some), link_bytes=sent, seconds=s, exposed_seconds=exposed_s.get(kind, 0.0))
    return found


def across(collectives: Sequence[Collective], share: Callable[[str, str], float]) -> tuple[int, float]:
    """Bytes that this rank sent to other hosts, and the seconds of the collectives of groups on several hosts. `share`:
    which part of what it sends in a collective of a group and kind goes to other hosts."""
    shares = {which: share(*which) for which in {(c.group, c.kind) for c in collectives}}
    parts = [(c, shares[c.group, c.kind]) for c in collectives]
    sent = sum(round(c.link_bytes * part) for c, part in parts)
    seconds = sum(c.end_s - c.began_s for c, part in parts if part and c.end_s is not None)
    return sent, float(seconds)


def exposed(collectives: Sequence[Collective]) -> dict[str, float]:
    """Exposed communication by kind, in seconds: the length of all `waits`."""
    by_kind: dict[str, float] = {}
    for start, end, c in waits(collectives):
        by_kind[c.kind] = by_kind.get(c.kind, 0.0) + end - start
    return by_kind


def waits(collectives: Sequence[Collective]) -> list[tuple[float, float, Collective]]:
    """Exposed communication: (from, to) in which computing waits for a collective, ordered by time. For a wait in
    Python it is the wait itself, including `finish` (the sum in rank order). DDP's reducer waits in C++ for all its
    buckets at the end of a backward: there it is the time from the last gradient, with which the last bucket is issued,
    to the completion of each bucket. Time spent waiting for several collectives counts once, for the one whose wait
    began first, so that waits do not overlap. Waits for late ranks are included."""
    ready: dict[int, float] = {}  # by backward: when its last bucket was issued
    for c in collectives:
        if c.by_future:
            ready[c.backward] = max(c.issue_s, ready.get(c.backward, 0.0))
    intervals = [(start, end, c) for c in collectives for start, end in (*c.waits, *([c.put] if c.put else ()))]
    for c in collectives:
        if c.by_future and not c.waits and c.end_s is not None:
            intervals.append((max(c.issue_s, ready[c.backward]), c.end_s, c))
    apart: list[tuple[float, float, Collective]] = []
    covered = float("-inf")
    for start, end, c in sorted(intervals, key=lambda wait: wait[:2]):
        if end > max(start, covered):
            apart.append((max(start, covered), end, c))
            covered = end
    return apart


def spans(collectives: Sequence[Collective], begin_s: float) -> list[Span]:
    """A span for each collective that has ended and for each wait, in seconds since `begin_s`."""
    sent = [(c.began_s, c.end_s, c) for c in collectives if c.end_s is not None]
    return [
        *(_span(Track.of(c.kind), start - begin_s, end - begin_s, c) for start, end, c in sent),
        *(_span(Track.WAIT, start - begin_s, end - begin_s, c) for start, end, c in waits(collectives)),
    ]


def _span(track: Track, start_s: float, end_s: float, c: Collective) -> Span:
    same = ("unit", "sequence", "ordinal", "group", "size", "dtype", "link_bytes", "payload_bytes")
    fields = {name: getattr(c, name) for name in same}
    return Span(track=track, name=c.kind, start_s=start_s, end_s=end_s, **fields)
