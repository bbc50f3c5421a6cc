"""The content of a checkpoint: each element of a backend's parameters and optimizer state once, flat, by name.

Note: shares. Ranks that hold the same range of a parameter divide it evenly, so that nothing is written twice and
replicas share the writing: with DDP on four ranks each writes a quarter. Every rank has all layouts (`Layouts`,
gathered when the backend is built), so each computes its share without communication, also when some ranks are lost.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fsdp_lab.backends.base import Backend, seed_state, state_slots, steps_taken
from fsdp_lab.backends.transfer import (
    PARAM,
    Layout,
    gather_objects,
    layout_of,
    persistent_buffers,
    slot_target,
    slot_values,
)

Layouts = Sequence[Layout]  # of all ranks, by rank


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """`name[start : start + len(values)]` of a flat tensor."""

    name: str
    start: int
    values: Tensor  # [n]; in a snapshot on the CPU; in a target the tensor to fill

    @property
    def stop(self) -> int:
        return self.start + self.values.numel()


def layouts_of(backend: Backend) -> Layouts:
    """Collective."""
    return gather_objects(layout_of(backend.param_shards()))


def shapes_of(backend: Backend) -> dict[str, list[int]]:
    return {p.name: list(p.shape) for p in backend.param_shards()}


def slots_of(backend: Backend) -> dict[str, object]:
    """The optimizer's slots on this rank, and its number of steps."""
    slots = {slot for p in backend.param_shards() for slot in state_slots(backend.optimizer, p)}
    return {"slots": sorted(slots), "steps": steps_taken(backend.optimizer)}


def snapshot(backend: Backend, layouts: Layouts, rank: int, writers: Collection[int]) -> list[Chunk]:
    """A CPU copy of the share that this rank writes, when the ranks `writers` write together. Not collective.

    Raises:
        LookupError: the writers do not hold all of the model; on each of them alike.
    """
    ranges = dict(_shares(layouts, rank, sorted(writers), shapes_of(backend)))
    slots = {slot for p in backend.param_shards() for slot in state_slots(backend.optimizer, p)}
    chunks = []
    for shard in backend.param_shards():
        start, stop = ranges[shard.name]
        if start < stop:
            for slot in (PARAM, *sorted(slots)):
                values = slot_values(backend, shard, slot)[start - shard.start : stop - shard.start]
                chunks.append(Chunk(name=key(shard.name, slot), start=start, values=_on_cpu(values)))
    for path, buffer in persistent_buffers(backend.module):
        chunks.append(Chunk(name=buffer_key(rank, path), start=0, values=_on_cpu(buffer.reshape(-1))))
    return chunks


def targets(backend: Backend, slots: Sequence[str], steps: int, buffers_of: int) -> list[Chunk]:
    """Where a checkpoint's values go in a new backend, whose optimizer state is seeded here. Not collective.

    `buffers_of`: the rank whose saved buffers this one takes.
    """
    if slots:
        seed_state(backend.optimizer, tuple(slots), steps)
    wanted = [
        Chunk(name=key(p.name, slot), start=p.start, values=slot_target(backend, p, slot))
        for p in backend.param_shards()
        for slot in (PARAM, *slots)
        if p.numel
    ]
    buffers = [Chunk(name=buffer_key(buffers_of, path), start=0, values=b.view(-1))
               for path, b in persistent_buffers(backend.module)]  # fmt: skip
    return wanted + buffers


def key(name: str, slot: str) -> str:
    """The name of a flat tensor in a checkpoint."""
    return f"parameter.{name}" if slot == PARAM else f"optimizer.{slot}.{name}"


def buffer_key(rank: int, path: str) -> str:
    """Each rank has its own: BatchNorm's statistics are of the samples of one rank."""
    return f"buffer.{rank}.{path}"


def _on_cpu(values: Tensor) -> Tensor:
    return values.detach().to("cpu", copy=True)


def _shares(
    layouts: Layouts, rank: int, writers: Sequence[int], shapes: Mapping[str, Sequence[int]]
) -> Iterator[tuple[str, tuple[int, int]]]:
    """(parameter, the range of it that `rank` writes). See the note."""
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
    """Whether they are contiguous from 0 to the end: in our layouts, two ranges are equal or disjoint."""
    at = 0
    for start, stop in sorted(ranges):
        if start != at:
            return False
        at = stop
    return at == numel
