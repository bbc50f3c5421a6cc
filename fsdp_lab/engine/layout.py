"""`Layout`: where each parameter lies in a flat buffer, and which part of the buffer each rank keeps. Numbers only.

A buffer of F ranks has F shards of equal length. Parameters follow one another, those of one optimizer group together (a
`region`), each beginning on a 16-byte boundary: kernels are slow on misaligned views. Shards cut wherever they fall, also
through a parameter, so a rank's part of a parameter is a range of elements, perhaps an empty one (arXiv 2304.11277, section
3.2.1: FlatParameter). What no parameter covers is padding; it is zero in shards and gradients."""

import itertools
import math
import mmap
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

ALIGN_BYTES = 16

Shapes = Sequence[tuple[int, ...]]
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
        cls, shapes: Shapes, groups: Sequence[Hashable], factor: int, itemsize: int, *, whole_pages: bool = False
    ) -> "Layout":
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
        return self._in_shard((slot.offset, slot.stop), rank, slot.offset)

    def in_shard(self, slot: Slot, rank: int) -> Range:
        """The slot's range, counted from the beginning of the rank's shard."""
        return self._in_shard((slot.offset, slot.stop), rank, rank * self.shard_numel)

    def region_in_shard(self, group: Hashable, rank: int) -> Range:
        """The range of a region in a rank's shard, counted from the shard's beginning; (0, 0) if it is empty."""
        return self._in_shard(self.regions[group], rank, rank * self.shard_numel)

    def _in_shard(self, wanted: Range, rank: int, origin: int) -> Range:
        (begin, end), (start, stop) = self.shard(rank), wanted
        start, stop = max(start, begin), min(stop, end)
        return (start - origin, stop - origin) if start < stop else (0, 0)

    @cached_property
    def regions(self) -> dict[Hashable, Range]:
        """Optimizer group -> its range of the buffer, with the padding inside it."""
        ranges: dict[Hashable, Range] = {}
        for slot in sorted(self.slots, key=lambda s: s.offset):
            start, _ = ranges.get(slot.group, (slot.offset, 0))
            ranges[slot.group] = (start, slot.stop)
        return ranges


@dataclass(frozen=True, kw_only=True)
class Chunks:
    """How what is reduced is cut. A rank's part has the n elements of its shard and then, if gradients are counted, one for
    each parameter (see "Note: which gradients came" in buffer.py); n' in all, also on a 16-byte boundary."""

    sizes: Sequence[int]  # of all chunks, one after the other: F * n' together
    places: Sequence[Sequence[tuple[int, int, int]]]  # by parameter: chunk, and range of the gradient
    fixed: Mapping[int, Sequence[int]]  # chunks that no parameter covers, and what they hold: counts of 1, and zeros
    counts: int  # P, or 0
    part_numel: int  # n'

    @classmethod
    def of(cls, layout: Layout, *, counted: bool) -> "Chunks":
        counts, n = len(layout.slots) if counted else 0, layout.shard_numel
        part_numel = _aligned(n + counts, ALIGN_BYTES // 2) if counts else n
        begins: dict[int, tuple[int, int, int]] = {}  # of what parameters cover -> which one, and range of its gradient
        for rank, (i, slot) in itertools.product(range(layout.factor), enumerate(layout.slots)):
            start, stop = layout.own(slot, rank)
            if start < stop:
                begins[rank * part_numel + layout.in_shard(slot, rank)[0]] = i, start, stop
        ends = (begin + stop - start for begin, (_, start, stop) in begins.items())
        cuts = sorted({0, layout.factor * part_numel, *begins, *ends})
        chunks = {begin: chunk for chunk, begin in enumerate(cuts[:-1])}
        fixed = {
            chunks[begin]: [int(n <= i % part_numel < n + counts) for i in range(begin, end)]
            for begin, end in itertools.pairwise(cuts)
            if begin not in begins
        }
        places: list[list[tuple[int, int, int]]] = [[] for _ in layout.slots]
        for begin, (i, start, stop) in begins.items():
            places[i].append((chunks[begin], start, stop))
        sizes = [stop - start for start, stop in itertools.pairwise(cuts)]
        return cls(sizes=sizes, places=places, fixed=fixed, counts=counts, part_numel=part_numel)


def _aligned(n: int, align: int) -> int:
    return -(-n // align) * align
