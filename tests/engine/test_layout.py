"""Where parameters lie, over any shapes: nothing is lost, nothing is kept twice."""

import itertools

import pytest
from hypothesis import given, strategies as st

from fsdp_lab.engine.layout import ALIGN_BYTES, Layout

SIZES = st.sampled_from([0, 1, 2, 3, 7, 13, 16, 31, 64, 97])


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Layout, int]:
    """A layout and the bytes of one of its elements."""
    shapes = draw(st.lists(st.lists(SIZES, max_size=3).map(tuple), min_size=1, max_size=8))
    groups = draw(st.lists(st.sampled_from(["decay", "no decay", None]), min_size=len(shapes), max_size=len(shapes)))
    itemsize = draw(st.sampled_from([2, 4, 8]))
    return Layout.of(shapes, groups, draw(st.integers(1, 7)), itemsize), itemsize


def elements(bounds: tuple[int, int]) -> range:
    return range(*bounds)


@given(layouts())
def test_shards_and_parameters_partition_the_buffer_and_padding_is_no_more_than_asked_for(given: tuple[Layout, int]):
    """Less than 16 bytes behind each parameter, less than 16 in each shard but for what F does not divide."""
    layout, itemsize = given
    ranks, align = range(layout.factor), ALIGN_BYTES // itemsize
    assert [x for rank in ranks for x in elements(layout.shard(rank))] == list(range(layout.numel))
    assert {stop - start for start, stop in map(layout.shard, ranks)} == {layout.shard_numel}
    assert layout.shard_numel * itemsize % ALIGN_BYTES == 0
    covered = [x for slot in layout.slots for x in range(slot.offset, slot.stop)]
    assert all(slot.offset * itemsize % ALIGN_BYTES == 0 for slot in layout.slots)
    assert len(set(covered)) == len(covered) == sum(slot.numel for slot in layout.slots)
    assert set(covered) <= set(range(layout.numel))
    behind = sum(-slot.numel % align for slot in layout.slots)
    end = len(covered) + behind
    assert layout.numel - end < layout.factor * align and behind + layout.numel - end == layout.numel - len(covered)


@pytest.mark.slow
@given(layouts())
def test_what_ranks_own_of_a_parameter_partitions_it_and_lies_in_its_region(given: tuple[Layout, int]) -> None:
    layout, _ = given
    for slot in layout.slots:
        owned: list[int] = []
        for rank in range(layout.factor):
            own, inside = layout.own(slot, rank), layout.in_shard(slot, rank)
            owned += elements(own)
            assert 0 <= inside[0] <= inside[1] <= layout.shard_numel
            in_buffer = [layout.shard(rank)[0] + x for x in elements(inside)]
            assert in_buffer == [slot.offset + x for x in elements(own)]
            region = layout.region_in_shard(slot.group, rank)
            assert inside[0] == inside[1] or region[0] <= inside[0] < inside[1] <= region[1]
        assert owned == list(range(slot.numel))  # in the order of ranks, each element once


@given(layouts())
def test_regions_hold_one_group_each_in_the_order_of_their_first_parameter(given: tuple[Layout, int]) -> None:
    layout, _ = given
    assert set(layout.regions) == {slot.group for slot in layout.slots}
    for slot in layout.slots:
        start, stop = layout.regions[slot.group]
        assert start <= slot.offset <= slot.stop <= stop
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(sorted(layout.regions.values())))
    first = [layout.regions[group] for group in dict.fromkeys(slot.group for slot in layout.slots)]
    starts = [start for start, stop in first if start < stop]
    assert starts == sorted(starts)
    for group, region in layout.regions.items():
        found: list[int] = []
        for rank in range(layout.factor):
            begin = layout.shard(rank)[0]
            found += [begin + x for x in elements(layout.region_in_shard(group, rank))]
        assert found == list(elements(region))


def test_a_layout_by_hand() -> None:
    """fp32, 2 ranks: a matrix of 6, a bias of 3, a matrix of 5; biases apart. 4 elements are 16 bytes."""
    layout = Layout.of([(2, 3), (3,), (5,)], ["matrix", "bias", "matrix"], 2, 4)
    assert [slot.offset for slot in layout.slots] == [0, 16, 8] and (layout.shard_numel, layout.numel) == (12, 24)
    assert layout.regions == {"matrix": (0, 13), "bias": (16, 19)}
    matrix, bias, other = layout.slots
    assert [layout.own(matrix, rank) for rank in (0, 1)] == [(0, 6), (0, 0)]
    assert [layout.own(other, rank) for rank in (0, 1)] == [(0, 4), (4, 5)]
    assert [layout.in_shard(other, rank) for rank in (0, 1)] == [(8, 12), (0, 1)]
    assert layout.region_in_shard("matrix", 1) == (0, 1) and layout.in_shard(bias, 1) == (4, 7)
