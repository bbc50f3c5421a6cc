"""`rewrapped`: the same model in other units, whose blocks are joined to groups or to one unit. No torch."""

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fsdp_lab.engine.schedule import Point
from fsdp_lab.planner import model_shape
from fsdp_lab.planner.model_shape import Kernels, ModelShape, SizeFormula, TapeChange, TapeSegment, UnitShape, merged


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
        forward, backward = (sum((u.kernels[name][i] for u in group), model_shape.NO_KERNELS) for i in (0, 1))
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


def net_bytes(changes: Iterable[TapeChange]) -> dict[tuple[int, int], float]:
    """Bytes that the changes leave allocated, except gradients: powers of samples and tokens -> coefficient."""
    sums: dict[tuple[int, int], float] = {}
    for change in changes:
        for b, t, c in change.size.terms:
            sums[b, t] = sums.get((b, t), 0) + c * {model_shape.ALLOCATED: 1, model_shape.FREED: -1}.get(change.kind, 0)
    return sums
