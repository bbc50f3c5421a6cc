"""How values reach a backend: from an initialiser (`fill`), from the backend before it (`carry`), or from one that was put
aside on the host (`park`, `unpark`).

A carry streams: of a few parameters at a time each rank gets what it will hold and does not hold yet (moves.py), so that no
rank ever holds the whole model, whatever the two backends are. Values move as they are, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from fsdp_lab.backends.base import Backend, Piece, original_name, seed_state, state_slots, steps_taken
from fsdp_lab.backends.moves import Layout, Move, moves

_BATCH_ELEMENTS = 4 << 20  # of parameters that are moved at once: 16 MiB of fp32
PARAM = "param"

T = TypeVar("T")
Parts = Mapping[str, tuple[Tensor, int]]  # by parameter: what this rank has of it, flat, and where that begins


def fill(backend: Backend, values: Callable[[str], Tensor]) -> None:
    """Set every parameter from `values`: name -> the whole tensor, fp32, on any device. Not collective."""
    for piece in backend.pieces():
        if piece.numel:
            piece.local.copy_(values(piece.name).reshape(-1)[piece.start : piece.stop])


def carry(old: Backend, new: Backend) -> None:
    """Move parameters, optimizer state and buffers; collective over all ranks. `old` is left as it was."""
    slots, steps = _optimizer(old)
    if slots:
        seed_state(new.optimizer, slots, steps)
    sources, targets = old.pieces(), {p.name: p for p in new.pieces()}
    layouts = everybodys((layout_of(sources), layout_of(targets.values())))
    held, wanted = [have for have, _ in layouts], [want for _, want in layouts]
    for batch in _batches(sources):
        plan = moves([p.name for p in batch], held, wanted)
        for slot in (PARAM, *slots):
            given = {p.name: (value_of(old, p, slot), p.start) for p in batch}
            into = {p.name: (place_of(new, p, slot), p.start) for p in (targets[p.name] for p in batch) if p.numel}
            _move(plan, given, into)
    for (_, source), (_, target) in zip(lasting(old.module), lasting(new.module), strict=True):
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
    slots, steps = _optimizer(backend)
    kept = {(p.name, slot): value_of(backend, p, slot) for p in backend.pieces() for slot in (PARAM, *slots)}
    return Parked(
        values={key: value.detach().to("cpu", copy=True) for key, value in kept.items()},
        slots=slots,
        steps=steps,
        buffers=tuple(b.detach().to("cpu", copy=True) for _, b in lasting(backend.module)),
    )


def unpark(parked: Parked, backend: Backend) -> None:
    """Into a backend that was built anew from the same Spec. Not collective."""
    if parked.slots:
        seed_state(backend.optimizer, parked.slots, parked.steps)
    for piece in backend.pieces():
        for slot in (PARAM, *parked.slots):
            value = parked.values[piece.name, slot]
            if value.numel():
                place_of(backend, piece, slot).copy_(value)
    for (_, target), source in zip(lasting(backend.module), parked.buffers, strict=True):
        target.copy_(source)


def lasting(module: nn.Module) -> list[tuple[str, Tensor]]:
    """The buffers that are state, such as BatchNorm's statistics, by the names that the model has for them, in order.

    Those that a model does not save, such as rotary frequencies, are constants: the new model has them already, and the
    old one perhaps in a lower precision.
    """
    inner = module.module if isinstance(module, DistributedDataParallel) else module
    found = ((f"{path}.{name}", m, name, b) for path, m in inner.named_modules() for name, b in m._buffers.items())
    kept = {
        original_name(where.lstrip(".")): b
        for where, m, name, b in found
        if b is not None and name not in m._non_persistent_buffers_set
    }
    return sorted(kept.items())


def _optimizer(backend: Backend) -> tuple[tuple[str, ...], int]:
    """The optimizer's slots and how many steps it took, the same on every rank, also on one whose first piece is empty."""
    mine = {slot for p in backend.pieces() for slot in state_slots(backend.optimizer, p)}
    told = everybodys((mine, steps_taken(backend.optimizer)))
    return tuple(sorted(set().union(*(slots for slots, _ in told)))), max(steps for _, steps in told)


def layout_of(pieces: Iterable[Piece]) -> Layout:
    return {p.name: (p.start, p.stop) for p in pieces}


def _batches(pieces: list[Piece]) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    for piece in pieces:
        batch.append(piece)
        if sum(p.shape.numel() for p in batch) >= _BATCH_ELEMENTS:
            yield batch
            batch = []
    if batch:
        yield batch


def value_of(backend: Backend, piece: Piece, slot: str) -> Tensor:
    """What this rank holds of it, flat; zeros where the optimizer has made no state, since there was no gradient."""
    if slot == PARAM:
        return piece.local
    found = state_slots(backend.optimizer, piece).get(slot)
    return torch.zeros_like(piece.local) if found is None else found


def place_of(backend: Backend, piece: Piece, slot: str) -> Tensor:
    """Where it goes; of a slot after `seed_state`."""
    return piece.local if slot == PARAM else state_slots(backend.optimizer, piece)[slot]


def _part(m: Move, parts: Parts) -> Tensor:
    value, begin = parts[m.name]
    return value[m.start - begin : m.stop - begin]


def _move(plan: Sequence[Move], given: Parts, into: Parts) -> None:
    """One exchange; none where every rank has what it needs."""
    rank, ranks = dist.get_rank(), range(dist.get_world_size())
    for m in plan:
        if m.source == m.target == rank:
            _part(m, into).copy_(_part(m, given))
    if all(m.source == m.target for m in plan):
        return
    sent = sorted((m for m in plan if m.source == rank != m.target), key=lambda m: m.target)
    got = sorted((m for m in plan if m.target == rank != m.source), key=lambda m: m.source)
    some, _ = next(iter(given.values()))
    outgoing = torch.cat([some[:0], *(_part(m, given) for m in sent)])
    incoming = some.new_empty(sum(m.stop - m.start for m in got))
    dist.all_to_all_single(
        incoming,
        outgoing,
        output_split_sizes=[sum(m.stop - m.start for m in got if m.source == other) for other in ranks],
        input_split_sizes=[sum(m.stop - m.start for m in sent if m.target == other) for other in ranks],
    )
    for m, values in zip(got, torch.split(incoming, [m.stop - m.start for m in got]), strict=True):
        _part(m, into).copy_(values)


def everybodys(mine: T) -> list[T]:
    everybodys: list[T] = [mine] * dist.get_world_size()
    if dist.get_world_size() > 1:
        dist.all_gather_object(everybodys, mine)
    return everybodys
