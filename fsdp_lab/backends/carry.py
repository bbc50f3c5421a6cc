"""How values reach a backend: from an initialiser (`fill`), from the backend before it (`carry`), or from one that was put
aside on the host (`park`, `unpark`).

A carry streams: a few parameters at a time are made whole on every rank, which keeps its part of them, so that no rank
ever holds the whole model, whatever the two backends are. Values move as they are, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch import distributed as dist

from fsdp_lab.backends.base import Backend, Piece, seed_state, state_slots, steps_taken

_BATCH_ELEMENTS = 8 << 20  # made whole at once: 32 MiB of fp32
PARAM = "param"

T = TypeVar("T")
Range = tuple[int, int]


def fill(backend: Backend, values: Callable[[str], Tensor]) -> None:
    """Set every parameter from `values`: name -> the whole tensor, fp32, on any device. Not collective."""
    for piece in backend.pieces():
        if piece.numel:
            piece.local.copy_(values(piece.name).reshape(-1)[piece.start : piece.stop])


def carry(old: Backend, new: Backend) -> None:
    """Move parameters, optimizer state and buffers; collective over all ranks. `old` is left as it was."""
    steps = max(_everybodys(steps_taken(old.optimizer)))
    slots = _slots(old)
    if slots:
        seed_state(new.optimizer, slots, steps)
    targets = {p.name: p for p in new.pieces()}
    for name, slot, whole in _stream(old, (PARAM, *slots)):
        piece = targets[name]
        into = piece.local if slot == PARAM else state_slots(new.optimizer, piece)[slot]
        into.copy_(whole[piece.start : piece.stop])
    for (_, source), (_, target) in zip(_lasting(old.module), _lasting(new.module), strict=True):
        target.copy_(source)


@dataclass(frozen=True, kw_only=True)
class Parked:
    """This rank's part of a training, on the host; it fits a backend of the same Spec and rank."""

    values: Mapping[tuple[str, str], Tensor]  # (parameter, slot or PARAM) -> this rank's range of it, flat
    slots: tuple[str, ...]
    steps: int  # that the optimizer took
    buffers: tuple[Tensor, ...]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (*self.values.values(), *self.buffers))


def park(backend: Backend) -> Parked:
    """Parameters, optimizer state and buffers as they are; collective. The backend may be released afterwards."""
    slots = _slots(backend)
    kept = {(p.name, slot): _value(backend, p, slot) for p in backend.pieces() for slot in (PARAM, *slots)}
    return Parked(
        values={key: value.detach().to("cpu", copy=True) for key, value in kept.items()},
        slots=slots,
        steps=max(_everybodys(steps_taken(backend.optimizer))),
        buffers=tuple(b.detach().to("cpu", copy=True) for _, b in _lasting(backend.module)),
    )


def unpark(parked: Parked, backend: Backend) -> None:
    """Into a backend that was built anew from the same Spec. Not collective."""
    if parked.slots:
        seed_state(backend.optimizer, parked.slots, parked.steps)
    for piece in backend.pieces():
        for slot in (PARAM, *parked.slots):
            value = parked.values[piece.name, slot]
            if value.numel():
                (piece.local if slot == PARAM else state_slots(backend.optimizer, piece)[slot]).copy_(value)
    for (_, target), source in zip(_lasting(backend.module), parked.buffers, strict=True):
        target.copy_(source)


def _lasting(module: nn.Module) -> list[tuple[str, Tensor]]:
    """The buffers that are state, such as BatchNorm's statistics; wrappers change their names, but not their order.

    Those that a model does not save, such as rotary frequencies, are constants: the new model has them already, and the
    old one perhaps in a lower precision.
    """
    found = ((f"{path}.{name}", m, name, b) for path, m in module.named_modules() for name, b in m._buffers.items())
    return sorted((where, b) for where, m, name, b in found if b is not None and name not in m._non_persistent_buffers_set)


def _slots(backend: Backend) -> tuple[str, ...]:
    """The optimizer's slots, the same on every rank, also on one whose first piece is empty."""
    mine = {slot for p in backend.pieces() for slot in state_slots(backend.optimizer, p)}
    return tuple(sorted(set().union(*_everybodys(mine))))


def _stream(old: Backend, slots: tuple[str, ...]) -> Iterator[tuple[str, str, Tensor]]:
    """(name, slot, the whole flat tensor) for every parameter and slot, in one order on all ranks."""
    pieces = old.pieces()
    layouts = _everybodys({p.name: (p.start, p.stop) for p in pieces})
    for slot in slots:
        for batch in _batches(pieces):
            yield from ((name, slot, whole) for name, whole in _whole(old, batch, slot, layouts))


def _batches(pieces: list[Piece]) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    for piece in pieces:
        batch.append(piece)
        if sum(p.shape.numel() for p in batch) >= _BATCH_ELEMENTS:
            yield batch
            batch = []
    if batch:
        yield batch


def _whole(
    old: Backend, batch: list[Piece], slot: str, layouts: list[dict[str, Range]]
) -> Iterator[tuple[str, Tensor]]:
    """One all-gather for the batch; none where every rank holds everything."""
    local = {p.name: _value(old, p, slot) for p in batch}
    if all(layout[p.name] == (0, p.shape.numel()) for p in batch for layout in layouts):
        yield from local.items()
        return
    rows = _gather([local[p.name] for p in batch], [_length(batch, layout) for layout in layouts])
    offsets = [0] * len(layouts)
    for piece in batch:
        whole = rows.new_empty(piece.shape.numel())
        for rank, layout in enumerate(layouts):
            start, stop = layout[piece.name]
            whole[start:stop] = rows[rank, offsets[rank] : offsets[rank] + stop - start]
            offsets[rank] += stop - start
        yield piece.name, whole


def _value(backend: Backend, piece: Piece, slot: str) -> Tensor:
    return piece.local if slot == PARAM else state_slots(backend.optimizer, piece).get(slot, piece.local[:0])


def _gather(parts: list[Tensor], lengths: list[int]) -> Tensor:
    """[W, longest]: each rank's parts, one after the other."""
    longest = max(lengths)
    mine = torch.zeros(longest, dtype=parts[0].dtype, device=parts[0].device)
    joined = torch.cat(parts)
    mine[: joined.numel()] = joined
    rows = mine.new_empty(len(lengths) * longest)
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(rows, mine)
    return rows.view(len(lengths), longest)


def _length(batch: list[Piece], layout: dict[str, Range]) -> int:
    return sum(layout[p.name][1] - layout[p.name][0] for p in batch)


def _everybodys(mine: T) -> list[T]:
    everybodys: list[T] = [mine] * dist.get_world_size()
    if dist.get_world_size() > 1:
        dist.all_gather_object(everybodys, mine)
    return everybodys
