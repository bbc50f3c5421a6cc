"""Covering arrays have every pair, and few rows."""

from __future__ import annotations

import itertools

import pytest

from tests.covering import pairs_of, pairwise

FACTORS = [((1, 2), "ab"), (tuple(range(7)), (1, 2, 3, 4), ("lab", "fsdp2", "ddp")), ("abc",) * 5, ("ab", "c")]


@pytest.mark.parametrize("factors", FACTORS)
def test_every_pair_is_covered(factors) -> None:
    rows = pairwise(*factors)
    every = set().union(*map(pairs_of, itertools.product(*factors)))
    assert set().union(*map(pairs_of, rows)) == every
    assert len(rows) == len(set(rows))


def test_there_are_few_rows_and_always_the_same() -> None:
    assert len(pairwise(range(7), range(4), range(3))) <= 30  # 28 at least, 84 in the product
    assert len(pairwise(*["abc"] * 5)) <= 20  # 243 in the product
    assert pairwise("ab", "cd", "ef") == pairwise("ab", "cd", "ef")


def test_a_row_that_is_not_allowed_is_not_taken() -> None:
    rows = pairwise((1, 2), "ab", "xy", allowed=lambda row: row[:2] != (1, "a"))
    assert all(row[:2] != (1, "a") for row in rows)
    assert {row[:2] for row in rows} == {(1, "b"), (2, "a"), (2, "b")}


def test_one_factor_has_no_pairs() -> None:
    assert pairwise("abc") == []
