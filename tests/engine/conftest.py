"""Fixtures of the engine's tests."""

from __future__ import annotations

import pytest

from tests.engine.parity import Outcomes
from tests.pool import Pool


@pytest.fixture(scope="session")
def outcomes(pool: Pool) -> Outcomes:
    """Runs in the pool, each once for the whole test session."""
    return Outcomes(pool)
