"""`UnitBytes`: what one unit takes in each form in which a backend holds it: a shard, gathered, a gradient, reduced."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fsdp_lab.core.model_shape import UnitShape
from fsdp_lab.core.spec import Spec
from fsdp_lab.planner.compute import BYTES

ALIGN_BYTES = 16
MASTER = 4  # bytes of an fp32 element
STATE = {"adamw": 2, "sgd": 0}  # tensors of optimizer state for each parameter


@dataclass(frozen=True, kw_only=True)
class UnitBytes:
    """Bytes on one rank, padding included. F ranks share a copy."""

    shard: float  # this rank's, in fp32
    cast: float  # the same in the dtype in which it is gathered
    gathered: float  # F times that
    whole: float  # the gradient of all of it, in the dtype of the reduction
    reduced: float  # this rank's part of that
    decayed: float  # of the shard, fp32: what the optimizer decays, and steps at once
    others: float
    mixed: bool  # gathered in another dtype than fp32
    recast: bool  # reduced in another dtype than fp32


def lab_bytes(unit: UnitShape, spec: Spec, factor: int) -> UnitBytes:
    """Flat buffers, one for each dtype in which parameters are gathered: see the engine's layout."""
    dtypes = spec.strategy.dtypes
    parts = []
    for full in (False, True):
        chosen = [s for i, s in enumerate(_shapes(unit)) if (i in unit.full_precision) is full]
        if chosen:
            item = MASTER if full else BYTES[dtypes.param]
            parts.append(_flat(chosen, item, _reduce_item(spec, dtypes.param, dtypes.reduce), factor))
    return _sum(parts, spec)


def _flat(shapes: Sequence[tuple[int, ...]], item: int, reduce: int, factor: int) -> UnitBytes:
    align = ALIGN_BYTES // item
    first = len(shapes[0]) >= 2
    regions = [sum(_up(math.prod(s), align) for s in shapes if (len(s) >= 2) is one) for one in (first, not first)]
    n = _up(-(-sum(regions) // factor), align)
    begins = min(n, regions[0]), max(0, min(n, sum(regions)) - regions[0])
    decayed, others = begins if first else begins[::-1]
    return UnitBytes(
        shard=n * MASTER, cast=n * item, gathered=factor * n * item, whole=factor * n * reduce, reduced=n * reduce,
        decayed=decayed * MASTER, others=others * MASTER, mixed=item != MASTER, recast=reduce != MASTER,
    )  # fmt: skip


def torch_bytes(unit: UnitShape, spec: Spec, factor: int) -> UnitBytes:
    """FSDP2: each parameter by its first dimension; rank 0 has the largest part."""
    dtypes = spec.strategy.dtypes
    item, reduce = BYTES[dtypes.param], _reduce_item(spec, dtypes.param, dtypes.reduce)
    shapes = list(_shapes(unit))
    parts = [-(-s[0] // factor) * (math.prod(s) // s[0]) if s and s[0] else 0 for s in shapes]
    n = sum(parts)
    decayed = sum(p for p, s in zip(parts, shapes, strict=True) if len(s) >= 2)
    return UnitBytes(
        shard=n * MASTER, cast=n * item, gathered=factor * n * item, whole=factor * n * reduce, reduced=n * reduce,
        decayed=decayed * MASTER, others=(n - decayed) * MASTER, mixed=item != MASTER, recast=reduce != MASTER,
    )  # fmt: skip


def flat_bytes(unit: UnitShape, spec: Spec, factor: int) -> UnitBytes:
    """FSDP1: one flat parameter, padded to a multiple of the ranks, each parameter to 16 bytes."""
    dtypes = spec.strategy.dtypes
    item, reduce = BYTES[dtypes.param], BYTES[dtypes.reduce]
    shapes = list(_shapes(unit))
    sizes = [_up(math.prod(s), ALIGN_BYTES // MASTER) for s in shapes]
    n = -(-sum(sizes) // factor)
    end, decayed = 0, 0
    for size, shape in zip(sizes, shapes, strict=True):
        if len(shape) >= 2:
            decayed += max(0, min(n, end + math.prod(shape)) - min(n, end))
        end += size
    return UnitBytes(
        shard=n * MASTER, cast=n * item, gathered=factor * n * item, whole=factor * n * reduce, reduced=n * reduce,
        decayed=decayed * MASTER, others=(n - decayed) * MASTER, mixed=item != MASTER, recast=reduce != MASTER,
    )  # fmt: skip


def replica_bytes(unit: UnitShape, spec: Spec, factor: int) -> UnitBytes:
    """DDP: all of it."""
    n, reduce = unit.numel, BYTES[spec.strategy.dtypes.reduce]
    decayed = sum(math.prod(s) for s in _shapes(unit) if len(s) >= 2)
    return UnitBytes(
        shard=n * MASTER, cast=n * MASTER, gathered=0, whole=n * MASTER, reduced=n * reduce, decayed=decayed * MASTER,
        others=(n - decayed) * MASTER, mixed=False, recast=reduce != MASTER,
    )  # fmt: skip


def _shapes(unit: UnitShape) -> Iterator[tuple[int, ...]]:
    """Where only elements are known, of matrices so wide that rows divide evenly enough."""
    if unit.shapes:
        yield from unit.shapes
        return
    for n in unit.parameters:
        width = int(unit.boundary_elements) or 1
        yield (n // width, width) if n > width and n % width == 0 else (n,)


def _reduce_item(spec: Spec, param: str, reduce: str) -> int:
    return BYTES[reduce] if reduce != "fp32" or param != "fp32" else MASTER


def _sum(parts: Sequence[UnitBytes], spec: Spec) -> UnitBytes:
    if len(parts) == 1:
        return parts[0]
    names = ("shard", "cast", "gathered", "whole", "reduced", "decayed", "others")
    sums = {name: sum(getattr(p, name) for p in parts) for name in names}
    return UnitBytes(**sums, mixed=any(p.mixed for p in parts), recast=any(p.recast for p in parts))


def _up(n: int, align: int) -> int:
    return -(-n // align) * align
