"""The same model in other units: `rewrapped` makes of blocks groups of blocks, or one unit. No torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from fsdp_lab.model_shape import Change, ModelShape, Saved, Stretch, UnitShape, merged
from fsdp_lab.schedule import Point


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


def _moved(tape: Sequence[Stretch], calls: Sequence[tuple[int, int | None]],
           place: Mapping[int, tuple[int, int]]) -> tuple[Stretch, ...]:  # fmt: skip
    """With gradients named by the units that they belong to now."""
    done: dict[Any, tuple[Change, ...]] = {}
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
                moved.append(Change(c.kind, c.size, None if unit == place[own][0] else unit, c.index + offset))
            done[key] = tuple(moved)
        found.append(Stretch(s.point, done[key]))
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
        saved={dtype: Saved(
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
        found: list[tuple[Point, list[Change]]] = []
        for s in _moved(tape, shape.calls, place):
            if s.point.call == 0:
                found.append((s.point, []))
            found[-1][1].extend(s.changes)
        tapes[name] = tuple(Stretch(point, tuple(merged(changes))) for point, changes in found)
    root = dataclasses.replace(joined_units(shape.units), name="root", boundary_elements=0.0)
    return dataclasses.replace(shape, units=(root,), calls=((0, None),), tapes=tapes, unit_names=("root",))
