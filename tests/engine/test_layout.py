"""Where parameters lie, over any shapes: nothing is lost, nothing is kept twice."""

from __future__ import annotations

import itertools
import math

from hypothesis import example, given, settings, strategies as st

from fsdp_lab.engine.layout import ALIGN_BYTES, Layout

SIZES = st.sampled_from([0, 1, 2, 3, 7, 13, 16, 31, 64, 97])
SHAPES = st.lists(st.lists(SIZES, max_size=3).map(tuple), min_size=1, max_size=8)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Layout, int]:
    """A layout and the bytes of one of its elements."""
    shapes = draw(SHAPES)
    groups = draw(st.lists(st.sampled_from(["decay", "no decay", None]), min_size=len(shapes), max_size=len(shapes)))
    itemsize = draw(st.sampled_from([2, 4, 8]))
    return Layout.of(shapes, groups, draw(st.integers(1, 7)), itemsize), itemsize


def elements(bounds: tuple[int, int]) -> range:
    return range(*bounds)


@given(layouts())
def test_shards_partition_the_buffer(given: tuple[Layout, int]) -> None:
    layout, itemsize = given
    ranks = range(layout.factor)
    assert [x for rank in ranks for x in elements(layout.shard(rank))] == list(range(layout.numel))
    assert {stop - start for start, stop in map(layout.shard, ranks)} == {layout.shard_numel}
    assert layout.shard_numel * itemsize % ALIGN_BYTES == 0


@given(layouts())
def test_every_parameter_begins_aligned_and_none_overlap(given: tuple[Layout, int]) -> None:
    layout, itemsize = given
    covered = [x for slot in layout.slots for x in range(slot.offset, slot.stop)]
    assert all(slot.offset * itemsize % ALIGN_BYTES == 0 for slot in layout.slots)
    assert len(set(covered)) == len(covered) == sum(slot.numel for slot in layout.slots)
    assert set(covered) <= set(range(layout.numel))
    assert layout.padding == layout.numel - len(covered) >= 0


@given(layouts())
def test_padding_is_no_more_than_alignment_asks_for(given: tuple[Layout, int]) -> None:
    """Less than 16 bytes behind each parameter, less than 16 in each shard but for what F does not divide."""
    layout, itemsize = given
    align = ALIGN_BYTES // itemsize
    behind = sum(-slot.numel % align for slot in layout.slots)
    end = sum(slot.numel for slot in layout.slots) + behind
    assert layout.numel - end < layout.factor * align
    assert layout.padding == behind + layout.numel - end


@given(layouts())
def test_what_ranks_own_of_a_parameter_partitions_it(given: tuple[Layout, int]) -> None:
    layout, _ = given
    for slot in layout.slots:
        owned = [x for rank in range(layout.factor) for x in elements(layout.own(slot, rank))]
        assert owned == list(range(slot.numel))  # in the order of ranks, each element once


@given(layouts())
def test_a_place_in_a_shard_is_the_same_element(given: tuple[Layout, int]) -> None:
    layout, _ = given
    for slot in layout.slots:
        for rank in range(layout.factor):
            own, inside = layout.own(slot, rank), layout.in_shard(slot, rank)
            assert 0 <= inside[0] <= inside[1] <= layout.shard_numel
            in_buffer = [layout.shard(rank)[0] + x for x in elements(inside)]
            assert in_buffer == [slot.offset + x for x in elements(own)]


@given(layouts())
def test_regions_hold_one_group_each(given: tuple[Layout, int]) -> None:
    layout, _ = given
    assert set(layout.regions) == {slot.group for slot in layout.slots}
    for slot in layout.slots:
        start, stop = layout.regions[slot.group]
        assert start <= slot.offset <= slot.stop <= stop
    seen = sorted(layout.regions.values())
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(seen))


@given(layouts())
def test_regions_in_shards_put_together_are_the_regions(given: tuple[Layout, int]) -> None:
    layout, _ = given
    for group, region in layout.regions.items():
        found: list[int] = []
        for rank in range(layout.factor):
            first = layout.shard(rank)[0]
            found += [first + x for x in elements(layout.region_in_shard(group, rank))]
        assert found == list(elements(region))


@given(layouts())
def test_a_part_of_a_parameter_lies_in_its_region_of_the_shard(given: tuple[Layout, int]) -> None:
    layout, _ = given
    for slot in layout.slots:
        for rank in range(layout.factor):
            start, stop = layout.in_shard(slot, rank)
            region = layout.region_in_shard(slot.group, rank)
            assert start == stop or region[0] <= start < stop <= region[1]


@given(SHAPES, st.sampled_from([2, 4, 8]))
@example([()], 4)
def test_one_group_keeps_the_order_of_parameters(shapes: list[tuple[int, ...]], itemsize: int) -> None:
    layout = Layout.of(shapes, ["all"] * len(shapes), 1, itemsize)
    offsets = [slot.offset for slot in layout.slots]
    assert offsets == sorted(offsets) and offsets[0] == 0
    assert [slot.numel for slot in layout.slots] == [math.prod(shape) for shape in shapes]


@given(layouts())
@settings(max_examples=20)
def test_groups_follow_in_the_order_of_their_first_parameter(given: tuple[Layout, int]) -> None:
    layout, _ = given
    first = list(dict.fromkeys(slot.group for slot in layout.slots))
    nonempty = [g for g in first if layout.regions[g][0] < layout.regions[g][1]]
    starts = [layout.regions[g][0] for g in nonempty]
    assert starts == sorted(starts)


def test_a_layout_by_hand() -> None:
    """fp32, 2 ranks: a matrix of 6, a bias of 3, a matrix of 5; biases apart. 4 elements are 16 bytes."""
    layout = Layout.of([(2, 3), (3,), (5,)], ["matrix", "bias", "matrix"], 2, 4)
    assert [slot.offset for slot in layout.slots] == [0, 16, 8]
    assert (layout.shard_numel, layout.numel, layout.padding) == (12, 24, 10)
    assert layout.regions == {"matrix": (0, 13), "bias": (16, 19)}
    matrix, bias, other = layout.slots
    assert [layout.own(matrix, rank) for rank in (0, 1)] == [(0, 6), (0, 0)]
    assert [layout.own(other, rank) for rank in (0, 1)] == [(0, 4), (4, 5)]
    assert [layout.in_shard(other, rank) for rank in (0, 1)] == [(8, 12), (0, 1)]
    assert layout.region_in_shard("matrix", 1) == (0, 1)
    assert layout.in_shard(bias, 1) == (4, 7)
