"""What a checkpoint holds of a backend: each element of its parameters and optimizer state once, flat, by name.

Note: shares. Ranks that hold the same range of a parameter divide it evenly, so that nothing is written twice and replicas
write together: of DDP on four ranks each writes a quarter. Every rank knows all layouts (`Layouts`, gathered when the
backend is built), so each finds its share without asking; also when some ranks are gone, of those that are left.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fsdp_lab.backends.base import Backend, seed_state, state_slots, steps_taken
from fsdp_lab.backends.carry import PARAM, everybodys, lasting, layout_of, place_of, value_of
from fsdp_lab.backends.moves import Layout

Layouts = Sequence[Layout]  # of all ranks, by rank


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """`name[start : start + len(values)]` of a flat tensor."""

    name: str
    start: int
    values: Tensor  # [n]; of a snapshot on the CPU, of a target where it is to go

    @property
    def stop(self) -> int:
        return self.start + self.values.numel()


def layouts_of(backend: Backend) -> Layouts:
    """Collective."""
    return everybodys(layout_of(backend.pieces()))


def shapes_of(backend: Backend) -> dict[str, list[int]]:
    return {p.name: list(p.shape) for p in backend.pieces()}


def slots_of(backend: Backend) -> dict[str, object]:
    """The optimizer's slots on this rank, and how often it stepped."""
    slots = {slot for p in backend.pieces() for slot in state_slots(backend.optimizer, p)}
    return {"slots": sorted(slots), "steps": steps_taken(backend.optimizer)}


def snapshot(backend: Backend, layouts: Layouts, rank: int, writers: Collection[int]) -> list[Chunk]:
    """A copy on the CPU of what this rank is to write, of which more than one `writers` may hold a part. Not collective.

    Raises:
        LookupError: the writers together do not hold all of it; the same on each of them.
    """
    ranges = dict(_shares(layouts, rank, sorted(writers), shapes_of(backend)))
    slots = {slot for p in backend.pieces() for slot in state_slots(backend.optimizer, p)}
    chunks = []
    for piece in backend.pieces():
        start, stop = ranges[piece.name]
        if start < stop:
            for slot in (PARAM, *sorted(slots)):
                values = value_of(backend, piece, slot)[start - piece.start : stop - piece.start]
                chunks.append(Chunk(name=key(piece.name, slot), start=start, values=_on_cpu(values)))
    for path, buffer in lasting(backend.module):
        chunks.append(Chunk(name=buffer_key(rank, path), start=0, values=_on_cpu(buffer.reshape(-1))))
    return chunks


def targets(backend: Backend, slots: Sequence[str], steps: int, whose: int) -> list[Chunk]:
    """Where a checkpoint's values go in a backend that was just built, its optimizer's state seeded. Not collective.

    `whose`: the rank that saved the buffers which this one takes.
    """
    if slots:
        seed_state(backend.optimizer, tuple(slots), steps)
    wanted = [
        Chunk(name=key(p.name, slot), start=p.start, values=place_of(backend, p, slot))
        for p in backend.pieces()
        for slot in (PARAM, *slots)
        if p.numel
    ]
    buffers = [Chunk(name=buffer_key(whose, path), start=0, values=b.view(-1))
               for path, b in lasting(backend.module)]  # fmt: skip
    return wanted + buffers


def key(name: str, slot: str) -> str:
    """The name of a flat tensor in a checkpoint."""
    return f"parameter.{name}" if slot == PARAM else f"optimizer.{slot}.{name}"


def buffer_key(rank: int, path: str) -> str:
    """Of each rank its own: statistics of a BatchNorm are of the samples that a rank saw."""
    return f"buffer.{rank}.{path}"


def _on_cpu(values: Tensor) -> Tensor:
    return values.detach().to("cpu", copy=True)


def _shares(
    layouts: Layouts, rank: int, writers: Sequence[int], shapes: Mapping[str, Sequence[int]]
) -> Iterator[tuple[str, tuple[int, int]]]:
    """Parameter -> the range of it that `rank` writes. See the note."""
    for name, shape in shapes.items():
        holders: dict[tuple[int, int], list[int]] = {}
        for writer in writers:
            start, stop = layouts[writer][name]
            if start < stop:
                holders.setdefault((start, stop), []).append(writer)
        if not _covers(holders, torch.Size(shape).numel()):
            raise LookupError(f"ranks {list(writers)} do not hold all of {name}")
        (start, stop), among = next(((r, h) for r, h in holders.items() if rank in h), ((0, 0), [rank]))
        i, n = among.index(rank), len(among)
        yield name, (start + (stop - start) * i // n, start + (stop - start) * (i + 1) // n)


def _covers(ranges: Collection[tuple[int, int]], numel: int) -> bool:
    """Whether they lie side by side from 0 to the end: in every layout of ours they are equal or apart."""
    at = 0
    for start, stop in sorted(ranges):
        if start != at:
            return False
        at = stop
    return at == numel
