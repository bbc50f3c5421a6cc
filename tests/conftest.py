"""Fixtures that several folders share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Four rank processes for the whole test session."""
    ranks = Pool(4)
    yield ranks
    ranks.close()
