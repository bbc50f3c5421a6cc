"""The same model in other units, and of another depth. No torch.

`rewrapped` makes of blocks groups of blocks, or one unit; `deepened` repeats blocks, or leaves some out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from fsdp_lab.core.model_shape import (
    ALLOCATED,
    FREED,
    ModelShape,
    SavedBytes,
    SizeFormula,
    TapeChange,
    TapeSegment,
    UnitShape,
    merged,
)
from fsdp_lab.core.schedule import Direction, Point, PointSide


def rewrapped(shape: ModelShape, wrap: str) -> ModelShape:
    """A shape of wrap "block" in the units of "every:K" or "whole"."""
    if wrap == "whole" and len(shape.units) > 1:
        return _whole(shape)
    each = int(wrap.partition(":")[2]) if wrap.startswith("every:") else 1
    return _grouped(shape, each) if each > 1 else shape


def _grouped(shape: ModelShape, each: int) -> ModelShape:
    old = shape.units
    begins = range(1, len(old), each)
    joined: dict[tuple[int, ...], UnitShape] = {}
    units = [old[0]]
    for i in begins:
        group = old[i : i + each]
        key = tuple(map(id, group))
        units.append(joined.setdefault(key, joined_units(group)))
    place = {0: (0, 0)}  # of an old unit: the new one, and where its parameters begin there
    for n, i in enumerate(begins, 1):
        offset = 0
        for j in range(i, min(i + each, len(old))):
            place[j] = (n, offset)
            offset += len(old[j].parameters)
    calls = tuple((place[unit][0], parent) for unit, parent in shape.calls)
    tapes = {name: _moved(tape, shape.calls, place) for name, tape in shape.tapes.items()}
    names = (shape.unit_names[0], *(shape.unit_names[i] for i in begins)) if shape.unit_names else ()
    return dataclasses.replace(shape, units=tuple(units), calls=calls, tapes=tapes, unit_names=names)


def _moved(tape: Sequence[TapeSegment], calls: Sequence[tuple[int, int | None]],
           place: Mapping[int, tuple[int, int]]) -> tuple[TapeSegment, ...]:  # fmt: skip
    """With gradients named by the units that they belong to now."""
    done: dict[Any, tuple[TapeChange, ...]] = {}
    found = []
    for s in tape:
        own = calls[s.point.call][0]
        key = (id(s.changes), place[own][0] == 0, place[own][1])
        if key not in done or any(c.unit is not None for c in s.changes):
            moved = []
            for c in s.changes:
                if c.index < 0:
                    moved.append(c)
                    continue
                unit, offset = place[own if c.unit is None else c.unit]
                moved.append(TapeChange(c.kind, c.size, None if unit == place[own][0] else unit, c.index + offset))
            done[key] = tuple(moved)
        found.append(TapeSegment(s.point, done[key]))
    return tuple(found)


def joined_units(group: Sequence[UnitShape]) -> UnitShape:
    first, offsets = group[0], [0]
    for unit in group:
        offsets.append(offsets[-1] + len(unit.parameters))
    return dataclasses.replace(
        first,
        parameters=tuple(n for u in group for n in u.parameters), shapes=tuple(s for u in group for s in u.shapes),
        full_precision=tuple(j + o for u, o in zip(group, offsets, strict=False) for j in u.full_precision),
        products=tuple(p for u in group for p in u.products), pair_flops=sum(u.pair_flops for u in group),
        saved={dtype: SavedBytes(
            per_token_bytes=sum(u.saved[dtype].per_token_bytes for u in group),
            per_pair_bytes=sum(u.saved[dtype].per_pair_bytes for u in group),
            fixed_bytes=sum(u.saved[dtype].fixed_bytes for u in group),
        ) for dtype in first.saved},
        heads=max(u.heads for u in group), causal=any(u.causal for u in group),
    )  # fmt: skip


def _whole(shape: ModelShape) -> ModelShape:
    place = {}
    offset = 0
    for i, unit in enumerate(shape.units):
        place[i] = (0, offset)
        offset += len(unit.parameters)
    tapes = {}
    for name, tape in shape.tapes.items():
        found: list[tuple[Point, list[TapeChange]]] = []
        for s in _moved(tape, shape.calls, place):
            if s.point.call == 0:
                found.append((s.point, []))
            found[-1][1].extend(s.changes)
        tapes[name] = tuple(TapeSegment(point, tuple(merged(changes))) for point, changes in found)
    root = dataclasses.replace(joined_units(shape.units), name="root", boundary_elements=0.0)
    return dataclasses.replace(shape, units=(root,), calls=((0, None),), tapes=tapes, unit_names=("root",))


# -- another depth ---------------------------------------------------------------------------------------------------

MIDDLE = 2  # of a stack's blocks, the first that is as those after it


def deepened(shape: ModelShape, blocks: int) -> ModelShape:
    """The model with so many blocks in all, of wrap "block"; those of its stacks in the same proportion. What its root saves
    is taken as it is. Needs at least one block of each kind.
    """
    stacks: dict[str, list[int]] = {}
    for i, name in enumerate(shape.unit_names or [unit.name for unit in shape.units]):
        if i:
            stacks.setdefault(name.rpartition(".")[0], []).append(i)
    times: dict[int, int] = {}
    for places in stacks.values():
        wanted = max(1, round(blocks * len(places) / (len(shape.units) - 1)))
        middle = MIDDLE if len(places) > 2 * MIDDLE else min(1, len(places) - 1)
        if wanted >= len(places):
            times[places[middle]] = wanted - len(places) + 1
        else:
            first = min(middle, wanted)
            times.update(dict.fromkeys(places[first : first + len(places) - wanted], 0))
    grown = repeated(shape, times)
    return dataclasses.replace(grown, name=f"{shape.name}, {len(grown.units) - 1} blocks")


def repeated(shape: ModelShape, times: Mapping[int, int]) -> ModelShape:
    """With units that the root calls directly, once each, repeated so often; 0 leaves one out."""
    units, names, first = [shape.units[0]], [*shape.unit_names[:1]], {0: 0}
    calls: list[tuple[int, int | None]] = [(0, None)]
    for k in range(1, len(shape.units)):
        first[k] = len(units)
        for _ in range(times.get(k, 1)):
            units.append(shape.units[k])
            names += shape.unit_names[k : k + 1]
            calls.append((len(calls), 0))
    tapes = {name: _balanced(_repeated(tape, times, first), _left(tape)) for name, tape in shape.tapes.items()}
    return dataclasses.replace(
        shape, units=tuple(units), calls=tuple(calls) if shape.calls else (), tapes=tapes, unit_names=tuple(names)
    )


def _repeated(
    tape: Sequence[TapeSegment], times: Mapping[int, int], first: Mapping[int, int]
) -> tuple[TapeSegment, ...]:
    found: list[TapeSegment] = []
    i = 0
    while i < len(tape):
        call, direction = tape[i].point.call, tape[i].point.direction
        stop = i + 1
        while stop < len(tape) and call and tape[stop].point.call == call and tape[stop].point.direction is direction:
            stop += 1
        count = times.get(call, 1)
        numbers = [first[call] + n for n in range(count)]
        for number in numbers if direction is Direction.FORWARD else reversed(numbers):
            for s in tape[i:stop]:
                changes = tuple(_renumbered(c, first) for c in s.changes)
                found.append(
                    TapeSegment(
                        Point(direction, number, s.point.moment), s.changes if changes == s.changes else changes
                    )
                )
        i = stop
    return tuple(found)


def _left(tape: Sequence[TapeSegment]) -> dict[tuple[int, int], float]:
    """What the tape leaves allocated in the end."""
    sums: dict[tuple[int, int], float] = {}
    for change in (c for stretch in tape for c in stretch.changes):
        for b, t, c in change.size.terms:
            sums[b, t] = sums.get((b, t), 0) + c * {ALLOCATED: 1, FREED: -1}.get(change.kind, 0)
    return sums


def _balanced(tape: tuple[TapeSegment, ...], left: Mapping[tuple[int, int], float]) -> tuple[TapeSegment, ...]:
    """With what repeated blocks leave behind, autocast's copies of weights, freed where autocast ends."""
    more = {power: size - left.get(power, 0) for power, size in _left(tape).items()}
    terms = tuple((b, t, c) for (b, t), c in sorted(more.items()) if c)
    if not terms:
        return tape
    end = Point(Direction.FORWARD, 0, PointSide.AFTER)
    freed = TapeChange(FREED, SizeFormula(terms))
    return tuple(TapeSegment(s.point, tuple(merged([freed, *s.changes]))) if s.point == end else s for s in tape)


def _renumbered(change: TapeChange, first: Mapping[int, int]) -> TapeChange:
    return change if change.unit is None else dataclasses.replace(change, unit=first[change.unit])
