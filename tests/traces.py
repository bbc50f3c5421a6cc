"""Traced steps with known answers: a small simulation of fully sharded ranks that share one link, in seconds.

Each rank computes at its own pace; a collective begins when its last rank has issued it and the link is free, and ends on
all ranks together. Clocks can be put off, as `StepEvent.begin_s` would be."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from fsdp_lab.base.events import Span, Track

ROOT = "root"
UNIT_BYTES = 6_000_000  # of a block's parameters


@dataclass
class _Rank:
    pace: float  # of computing: 1.1 takes a tenth longer
    now_s: float
    begin_s: float
    spans: list[Span] = field(default_factory=list)
    sequence: int = 0

    def add(self, track: Track, name: str, unit: str, start_s: float, end_s: float, **more: object) -> None:
        start_s, end_s = start_s - self.begin_s, end_s - self.begin_s
        self.spans.append(Span(track=track, name=name, unit=unit, start_s=start_s, end_s=end_s, **more))  # type: ignore


@dataclass(frozen=True)
class _Collective:
    name: str
    unit: str
    end_s: float
    about: tuple[tuple[str, object], ...]  # of each rank the same


class _World:
    def __init__(self, ranks: Sequence[_Rank], per_s: float, ordinal: int) -> None:
        self.ranks, self.per_s, self.ordinal, self.free_s = ranks, per_s, ordinal, 0.0

    def issue(self, track: Track, unit: str, payload: int) -> _Collective:
        size = len(self.ranks)
        times = 2 if track in (Track.ALL_REDUCE, Track.CONTROL) else 1
        link = times * payload * (size - 1) // size
        start_s = max(self.free_s, *(r.now_s for r in self.ranks), 0.0)
        self.free_s = end_s = start_s + 20e-6 + link / self.per_s
        sizes = {"size": size, "dtype": "float32", "link_bytes": link, "payload_bytes": payload}
        about = {"ordinal": self.ordinal, "group": "world", **sizes}
        self.ordinal += 1
        for r in self.ranks:
            r.add(track, track.value, unit, r.now_s, end_s, sequence=r.sequence, **about)
            r.sequence += 1
        return _Collective(track.value, unit, end_s, tuple(about.items()))

    def wait(self, c: _Collective) -> None:
        for r in self.ranks:
            if c.end_s > r.now_s:
                r.add(Track.WAIT, c.name, c.unit, r.now_s, c.end_s, sequence=r.sequence, **dict(c.about))
                r.now_s = c.end_s

    def compute(self, name: str, unit: str, seconds: float) -> None:
        for r in self.ranks:
            r.add(Track.COMPUTE, name, unit, r.now_s, r.now_s + seconds * r.pace)
            r.now_s += seconds * r.pace


@dataclass(frozen=True)
class Traced:
    """One rank's part of a traced step."""

    begin_s: float
    step_time_s: float
    spans: tuple[Span, ...]


@lru_cache(maxsize=64)
def traced(world_size: int, *, blocks: int = 4, forward_s: float = 0.010, per_s: float = 0.6e9, begin_s: float = 5.0,
           skew_s: float = 0.0004, ordinal: int = 0, seed: int = 0,
           step_time_s: float | None = None) -> tuple[Traced, ...]:  # fmt: skip
    """A step of each rank: gathers one block ahead, reduce-scatters that are waited for one block later, vote, update.

    Args:
        forward_s: of one block, of the fastest rank; backward takes twice as long.
        per_s: bytes per second of the link.
        skew_s: how much later each rank begins than the one before it.
        ordinal: of the first collective.
        step_time_s: about how long the step takes; None: as it comes of the above."""
    if step_time_s is not None:  # the same step, stretched
        usual = traced(world_size, blocks=blocks, forward_s=forward_s, per_s=per_s, skew_s=skew_s, seed=seed)
        times = step_time_s / usual[0].step_time_s
        forward_s, per_s, skew_s = forward_s * times, per_s / times, skew_s * times
    ranks = [_Rank(pace=1 + 0.05 * ((r * 7 + seed) % 5) / 4, now_s=begin_s + skew_s * r, begin_s=begin_s + skew_s * r)
             for r in range(world_size)]  # fmt: skip
    world = _World(ranks, per_s, ordinal)
    units = [f"transformer.h.{i}" for i in range(blocks)]
    world.wait(world.issue(Track.ALL_GATHER, ROOT, UNIT_BYTES // 2))
    _forward(world, units, forward_s)
    _backward(world, units, forward_s)
    world.wait(world.issue(Track.CONTROL, "", 16))
    world.compute("optimizer", "", 0.3 * forward_s)
    return tuple(Traced(r.begin_s, r.now_s - r.begin_s, tuple(r.spans)) for r in ranks)


def _forward(world: _World, units: Sequence[str], seconds: float) -> None:
    ahead = world.issue(Track.ALL_GATHER, units[0], UNIT_BYTES)
    world.compute("forward", ROOT, 0.3 * seconds)
    for i, unit in enumerate(units):
        world.wait(ahead)
        if i + 1 < len(units):
            ahead = world.issue(Track.ALL_GATHER, units[i + 1], UNIT_BYTES)
        world.compute("forward", unit, seconds)
    world.compute("forward", ROOT, 0.5 * seconds)


def _backward(world: _World, units: Sequence[str], seconds: float) -> None:
    world.compute("backward", ROOT, seconds)
    ahead = world.issue(Track.ALL_GATHER, units[-2], UNIT_BYTES)
    reducing: list[_Collective] = []
    for i, unit in reversed(list(enumerate(units))):
        if i + 1 < len(units):
            world.wait(ahead)
            if i:
                ahead = world.issue(Track.ALL_GATHER, units[i - 1], UNIT_BYTES)
        world.compute("backward", unit, 2 * seconds)
        reducing.append(world.issue(Track.REDUCE_SCATTER, unit, UNIT_BYTES))
        if len(reducing) > 1:
            world.wait(reducing.pop(0))
    reducing.append(world.issue(Track.REDUCE_SCATTER, ROOT, UNIT_BYTES // 2))
    for left in reducing:
        world.wait(left)
