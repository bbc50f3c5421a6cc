"""`Layout`: where each parameter lies in a flat buffer, and which part of the buffer each rank keeps. Numbers only.

A buffer of F ranks has F shards of equal length. Parameters follow one another, those of one optimizer group together (a
`region`), each beginning on a 16-byte boundary: kernels are slow on misaligned views. Shards cut wherever they fall, also
through a parameter, so a rank's part of a parameter is a range of elements, perhaps an empty one (arXiv 2304.11277, section
3.2.1: FlatParameter). What no parameter covers is padding; it is zero in shards and gradients.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

ALIGN_BYTES = 16

Range = tuple[int, int]  # [start, stop)


@dataclass(frozen=True, kw_only=True)
class Slot:
    """One parameter's place."""

    shape: tuple[int, ...]
    offset: int  # elements from the buffer's beginning
    group: Hashable

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def stop(self) -> int:
        return self.offset + self.numel


@dataclass(frozen=True, kw_only=True)
class Layout:
    """See the module. Elements throughout; bytes depend on the dtype in which a copy is held."""

    slots: tuple[Slot, ...]
    factor: int  # F, the ranks that share one copy
    shard_numel: int  # n

    @classmethod
    def of(
        cls,
        shapes: Sequence[tuple[int, ...]],
        groups: Sequence[Hashable],
        factor: int,
        itemsize: int,
        *,
        whole_pages: bool = False,
    ) -> Layout:
        """Lay out parameters in their order, group by group. `itemsize`: bytes of one element when gathered. `whole_pages`:
        shards are as long as some pages of memory."""
        align = max(1, ALIGN_BYTES // itemsize)
        order = {group: i for i, group in enumerate(dict.fromkeys(groups))}
        slots: dict[int, Slot] = {}
        end = 0
        for i in sorted(range(len(shapes)), key=lambda i: order[groups[i]]):
            slots[i] = Slot(shape=tuple(shapes[i]), offset=end, group=groups[i])
            end = _aligned(slots[i].stop, align)
        shard_numel = _aligned(-(-end // factor), mmap.PAGESIZE // itemsize if whole_pages else align)
        return cls(slots=tuple(slots[i] for i in range(len(shapes))), factor=factor, shard_numel=shard_numel)

    @property
    def numel(self) -> int:
        """Elements of the whole buffer, with padding."""
        return self.factor * self.shard_numel

    def shard(self, rank: int) -> Range:
        """The range of the buffer that is a rank's shard."""
        return rank * self.shard_numel, (rank + 1) * self.shard_numel

    def own(self, slot: Slot, rank: int) -> Range:
        """The range of the flattened parameter in a rank's shard; (0, 0) if it is empty."""
        start, stop = _common(self.shard(rank), (slot.offset, slot.stop))
        return (start - slot.offset, stop - slot.offset) if start < stop else (0, 0)

    def in_shard(self, slot: Slot, rank: int) -> Range:
        """The slot's range, counted from the beginning of the rank's shard."""
        (start, stop), first = self.own(slot, rank), slot.offset - rank * self.shard_numel
        return (first + start, first + stop) if start < stop else (0, 0)

    @cached_property
    def regions(self) -> dict[Hashable, Range]:
        """Optimizer group -> its range of the buffer, with the padding inside it."""
        ranges: dict[Hashable, Range] = {}
        for slot in sorted(self.slots, key=lambda s: s.offset):
            start, _ = ranges.get(slot.group, (slot.offset, 0))
            ranges[slot.group] = (start, slot.stop)
        return ranges

    def region_in_shard(self, group: Hashable, rank: int) -> Range:
        """The range of a region in a rank's shard, counted from the shard's beginning; (0, 0) if it is empty."""
        begin = rank * self.shard_numel
        start, stop = _common(self.shard(rank), self.regions[group])
        return (start - begin, stop - begin) if start < stop else (0, 0)


@dataclass(frozen=True, kw_only=True)
class Chunks:
    """How what is reduced is cut. A rank's part has the n elements of its shard and then, if gradients are counted, one for
    each parameter (see "Note: which gradients came" in buffer.py); n' in all, also on a 16-byte boundary."""

    sizes: tuple[int, ...]  # of all chunks, one after the other
    places: tuple[tuple[tuple[int, int, int], ...], ...]  # by parameter: chunk, and range of the gradient
    padding: tuple[int, ...]  # chunks that no parameter covers
    counts: int  # P, or 0
    part_numel: int  # n'

    @property
    def numel(self) -> int:
        """F * n'"""
        return sum(self.sizes)

    @classmethod
    def of(cls, layout: Layout, *, counted: bool) -> Chunks:
        counts, n = len(layout.slots) if counted else 0, layout.shard_numel
        rest = _aligned(n + counts, ALIGN_BYTES // 2) - n if counts else 0
        order = sorted(range(len(layout.slots)), key=lambda i: layout.slots[i].offset)
        places: list[list[tuple[int, int, int]]] = [[] for _ in order]
        sizes: list[int] = []
        padding: list[int] = []

        def pad(size: int) -> None:
            if size:
                padding.append(len(sizes))
                sizes.append(size)

        for rank in range(layout.factor):
            at, end = layout.shard(rank)
            for i in order:
                slot, (start, stop) = layout.slots[i], layout.own(layout.slots[i], rank)
                if start < stop:
                    pad(slot.offset + start - at)
                    places[i].append((len(sizes), start, stop))
                    sizes.append(stop - start)
                    at = slot.offset + stop
            pad(end - at + rest)
        ranges = tuple(map(tuple, places))
        return cls(sizes=tuple(sizes), places=ranges, padding=tuple(padding), counts=counts, part_numel=n + rest)


def _aligned(n: int, align: int) -> int:
    return -(-n // align) * align


def _common(a: Range, b: Range) -> Range:
    return max(a[0], b[0]), min(a[1], b[1])
