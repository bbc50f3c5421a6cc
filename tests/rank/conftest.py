"""What several files compare with."""

import pytest

from tests.pool import Pool
from tests.rank.test_session import follow, spec


@pytest.fixture(scope="session")
def steady(pool: Pool) -> list[float]:
    """The losses of ten undisturbed steps, summed in the order of ranks: of the lab, and so of every backend."""
    (events, _), _ = follow(pool, [(spec(), 10)])
    return [e.mean_loss for e in events]
