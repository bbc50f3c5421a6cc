"""What of many cases is tested: `pairwise` rows in place of a full product, and `tiered`, a sample in the quick tier."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

Row = tuple[Any, ...]


def pairs_of(row: Row) -> set[tuple[int, Any, int, Any]]:
    """(factor, value, other factor, other value) for every two factors."""
    return {(i, row[i], j, row[j]) for i, j in itertools.combinations(range(len(row)), 2)}


def pairwise(*factors: Sequence[Any], allowed: Callable[[Row], bool] = lambda row: True) -> list[Row]:
    """Greedy: each row of the product that covers most pairs not covered yet, the first of equals; always the same rows.

    `allowed`: which rows may be taken. A pair that no allowed row has is left out."""
    rows = [row for row in itertools.product(*factors) if allowed(row)]
    missing = set().union(*map(pairs_of, rows)) if rows else set()
    chosen: list[Row] = []
    while missing:
        best = max(rows, key=lambda row: len(pairs_of(row) & missing))
        chosen.append(best)
        missing -= pairs_of(best)
    return chosen


def tiered(rows: Iterable[Any], quick: Callable[..., bool]) -> list[Any]:
    """Rows for `pytest.mark.parametrize`: those for which `quick(*row)` is false run in the whole tier alone."""
    found = [row if isinstance(row, tuple) else (row,) for row in rows]
    return [pytest.param(*row, marks=() if quick(*row) else pytest.mark.slow) for row in found]
