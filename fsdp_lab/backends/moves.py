"""`moves`: who gives which part of a parameter to whom, where ranges of it lie on other ranks than before.

Note: routes. Every rank knows all ranges, before and after, so each computes the same moves and none has to ask. What a rank
holds already it takes from itself; the rest from the next rank after it, counted in a circle, that holds it: so replicas
share the giving. Nothing is moved that its taker does not need, and where nothing changes nothing is sent.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

Range = tuple[int, int]
Layout = Mapping[str, Range]  # of one rank: parameter -> its range of the flat parameter, perhaps an empty one


@dataclass(frozen=True, kw_only=True, slots=True)
class Move:
    """`name[start:stop]`, flat, from rank to rank; both may be the same."""

    name: str
    start: int
    stop: int
    source: int
    target: int


def moves(names: Collection[str], held: Sequence[Layout], wanted: Sequence[Layout]) -> list[Move]:
    """All of them, of all ranks, in the same order on each. `held` and `wanted`: by rank.

    Raises:
        ValueError: somebody wants what nobody holds.
    """
    return [m for name in names for m in _of_one(name, [at[name] for at in held], [at[name] for at in wanted])]


def _of_one(name: str, held: Sequence[Range], wanted: Sequence[Range]) -> Iterator[Move]:
    segments = list(_segments(held))
    for target, (start, stop) in enumerate(wanted):
        at = start
        for left, right, holders in segments:
            if at < stop and left <= at < right:
                source = min(holders, key=lambda rank: (rank - target) % len(held))
                yield Move(name=name, start=at, stop=min(right, stop), source=source, target=target)
                at = min(right, stop)
        if at < stop:
            raise ValueError(f"no rank holds {name}[{at}:{stop}]")


def _segments(held: Sequence[Range]) -> Iterator[tuple[int, int, list[int]]]:
    """From one end of somebody's range to the next, in order, and who holds what lies between."""
    edges = sorted({edge for bounds in held for edge in bounds})
    for left, right in pairwise(edges):
        if holders := [rank for rank, (start, stop) in enumerate(held) if start <= left and right <= stop]:
            yield left, right, holders
