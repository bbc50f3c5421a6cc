"""The same model in other units, and of another depth. No torch.

`rewrapped` joins blocks to groups or to one unit; `deepened` repeats blocks, or drops some.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fsdp_lab.engine.schedule import Direction, Point, PointSide
from fsdp_lab.planner.model_shape import (
    ALLOCATED,
    FREED,
    NO_KERNELS,
    Kernels,
    ModelShape,
    SizeFormula,
    TapeChange,
    TapeSegment,
    UnitShape,
    merged,
)


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
    place = {0: (0, 0)}  # old unit -> new unit, index of its first parameter there
    for n, i in enumerate(begins, 1):
        offset = 0
        for j in range(i, min(i + each, len(old))):
            place[j] = (n, offset)
            offset += len(old[j].parameters)
    calls = tuple((place[unit][0], parent) for unit, parent in shape.calls)
    tapes = {name: _regrouped(tape, shape.calls, place) for name, tape in shape.tapes.items()}
    names = (shape.unit_names[0], *(shape.unit_names[i] for i in begins)) if shape.unit_names else ()
    return dataclasses.replace(shape, units=tuple(units), calls=calls, tapes=tapes, unit_names=names)


def _regrouped(
    tape: Sequence[TapeSegment], calls: Sequence[tuple[int, int | None]], place: Mapping[int, tuple[int, int]]
) -> tuple[TapeSegment, ...]:
    """The tape with the gradients of the new units. Equal segments stay one object."""
    cache: dict[Any, tuple[TapeChange, ...]] = {}
    segments = []
    for s in tape:
        own = calls[s.point.call][0]
        key = (id(s.changes), place[own][0] == 0, place[own][1])
        if key not in cache or any(c.unit is not None for c in s.changes):
            changes = []
            for c in s.changes:
                if c.index >= 0:  # a parameter's gradient
                    unit, offset = place[own if c.unit is None else c.unit]
                    c = TapeChange(c.kind, c.size, None if unit == place[own][0] else unit, c.index + offset)
                changes.append(c)
            cache[key] = tuple(changes)
        segments.append(TapeSegment(s.point, cache[key]))
    return tuple(segments)


_CHAINED = ("parameters", "shapes", "products")


def joined_units(group: Sequence[UnitShape]) -> UnitShape:
    first, offsets = group[0], list(itertools.accumulate((len(unit.parameters) for unit in group), initial=0))
    chained: dict[str, Any] = {name: tuple(itertools.chain(*(getattr(u, name) for u in group))) for name in _CHAINED}
    for name in ("full_precision", "frozen"):
        chained[name] = tuple(j + o for u, o in zip(group, offsets, strict=False) for j in getattr(u, name))

    def kernels(name: str) -> tuple[Kernels, Kernels]:
        forward, backward = (sum((u.kernels[name][i] for u in group), NO_KERNELS) for i in (0, 1))
        return forward, backward

    return dataclasses.replace(
        first,
        **chained,
        has_backward=any(u.has_backward for u in group),
        pair_flops=sum(u.pair_flops for u in group),
        saved={dtype: sum((u.saved[dtype] for u in group), SizeFormula(())) for dtype in first.saved},
        heads=max(u.heads for u in group),
        causal=any(u.causal for u in group),
        kernels={name: kernels(name) for name in first.kernels},
    )


def _whole(shape: ModelShape) -> ModelShape:
    offsets = itertools.accumulate((len(unit.parameters) for unit in shape.units), initial=0)
    place = {i: (0, offset) for i, offset in zip(range(len(shape.units)), offsets, strict=False)}
    tapes = {}
    for name, tape in shape.tapes.items():
        of_root: list[tuple[Point, list[TapeChange]]] = []
        for s in _regrouped(tape, shape.calls, place):
            if s.point.call == 0:
                of_root.append((s.point, []))
            of_root[-1][1].extend(s.changes)
        tapes[name] = tuple(TapeSegment(point, tuple(merged(changes))) for point, changes in of_root)
    root = dataclasses.replace(joined_units(shape.units), name="root", boundary_elements=0.0)
    return dataclasses.replace(shape, units=(root,), calls=((0, None),), tapes=tapes, unit_names=("root",))


MIDDLE = 2  # index in a stack of the first block that equals those after it


def deepened(shape: ModelShape, blocks: int) -> ModelShape:
    """The model, of wrap "block", with so many blocks, in the same proportion in all stacks and at least one in each. What
    the root saves is not changed."""
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
    """The model with units repeated so many times; 0 drops one. The root calls each of them directly and once."""
    units, names, first = [shape.units[0]], [*shape.unit_names[:1]], {0: 0}
    calls: list[tuple[int, int | None]] = [(0, None)]
    for k in range(1, len(shape.units)):
        first[k] = len(units)
        for _ in range(times.get(k, 1)):
            units.append(shape.units[k])
            names += shape.unit_names[k : k + 1]
            calls.append((len(calls), 0))
    tapes = {name: _balanced(_repeated(tape, times, first), _net(tape)) for name, tape in shape.tapes.items()}
    return dataclasses.replace(
        shape, units=tuple(units), calls=tuple(calls) if shape.calls else (), tapes=tapes, unit_names=tuple(names)
    )


def _repeated(
    tape: Sequence[TapeSegment], times: Mapping[int, int], first: Mapping[int, int]
) -> tuple[TapeSegment, ...]:
    segments: list[TapeSegment] = []
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
                changes = tuple(c if c.unit is None else dataclasses.replace(c, unit=first[c.unit]) for c in s.changes)
                point = Point(direction, number, s.point.moment)
                segments.append(TapeSegment(point, s.changes if changes == s.changes else changes))
        i = stop
    return tuple(segments)


def net_bytes(changes: Iterable[TapeChange]) -> dict[tuple[int, int], float]:
    """Bytes that the changes leave allocated, except gradients: powers of samples and tokens -> coefficient."""
    sums: dict[tuple[int, int], float] = {}
    for change in changes:
        for b, t, c in change.size.terms:
            sums[b, t] = sums.get((b, t), 0) + c * {ALLOCATED: 1, FREED: -1}.get(change.kind, 0)
    return sums


def _net(tape: Sequence[TapeSegment]) -> dict[tuple[int, int], float]:
    return net_bytes(c for segment in tape for c in segment.changes)


def _balanced(tape: tuple[TapeSegment, ...], net: Mapping[tuple[int, int], float]) -> tuple[TapeSegment, ...]:
    """The tape with what repeated blocks leave allocated (autocast's copies of weights) freed where autocast ends."""
    more = {power: size - net.get(power, 0) for power, size in _net(tape).items()}
    terms = tuple((b, t, c) for (b, t), c in sorted(more.items()) if c)
    if not terms:
        return tape
    end = Point(Direction.FORWARD, 0, PointSide.AFTER)
    freed = TapeChange(FREED, SizeFormula(terms))
    return tuple(TapeSegment(s.point, tuple(merged([freed, *s.changes]))) if s.point == end else s for s in tape)
