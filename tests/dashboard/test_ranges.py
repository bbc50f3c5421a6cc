"""Axes hold their data, and do not jump."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from fsdp_lab.dashboard.panels.axis import SpanRange, ZeroRange, calm, step_window

POSITIVE = st.floats(1e-6, 1e12)


@given(st.lists(POSITIVE, min_size=1, max_size=30))
def test_a_range_from_zero_holds_its_data(values):
    """Closely, where nothing was larger before."""
    axis = ZeroRange()
    for value in values:
        assert axis.cover(np.array([value])) >= value * 0.999
    assert ZeroRange().cover(np.array(values)) <= 2 * max(values)


def test_a_range_from_zero_does_not_follow_noise_and_shrinks_when_the_data_has_left_it():
    axis = ZeroRange()
    chance = np.random.default_rng(0)
    assert len({axis.cover(chance.normal(100, 4, 50)) for _ in range(200)}) <= 2
    axis = ZeroRange()
    before = axis.cover(np.array([100.0]))
    assert axis.cover(np.array([70.0])) == before and axis.cover(np.array([10.0])) < 20


def test_what_is_far_above_the_others_is_beyond_a_range_unless_it_lasts():
    values = np.full(200, 100.0)
    values[[0, 50]] = np.nan, 2500
    assert calm(values).max() == 100 and calm(np.append(values, [300.0] * 3)).max() == 300
    assert calm(np.array([1.0, 9.0])).max() == 9, "a few say nothing of what is usual"


@pytest.mark.parametrize("nothing", [[], [np.nan], [np.inf], [0.0]])
def test_nothing_to_show_leaves_a_range_as_it_is(nothing):
    assert ZeroRange().cover(np.array(nothing)) == 1.0


@given(st.lists(st.floats(-50, 50), min_size=1, max_size=40))
def test_a_span_holds_its_data(values):
    axis = SpanRange()
    for end in range(1, len(values) + 1):
        low, high = axis.cover(np.array(values[:end]))
        assert low <= min(values[:end]) <= max(values[:end]) <= high


def test_a_falling_loss_moves_its_axis_seldom_and_the_window_of_steps_grows_by_doubling_then_moves_in_tenths():
    axis = SpanRange()
    losses = 2 + 4 * np.exp(-np.arange(1000) / 200)
    assert len({axis.cover(losses[: n + 1]) for n in range(1000)}) < 12
    seen = list(dict.fromkeys(step_window(s) for s in range(1300)))
    assert seen == [(0, 50), (0, 100), (0, 200), (0, 400), (0, 800), (0, 1000), (100, 1100), (200, 1200), (300, 1300)]
