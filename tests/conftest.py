"""Fixtures that several folders share."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from tests.pool import Pool

if TYPE_CHECKING:
    from tests.engine.parity import Outcomes


def pytest_configure(config: pytest.Config) -> None:
    """No test writes to the history of whoever runs it; what tests start inherits that."""
    folder = tempfile.mkdtemp(prefix="fsdp_lab-history-")
    os.environ["FSDP_LAB_HISTORY"] = os.path.join(folder, "history.sqlite3")
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    settings.register_profile("patient", deadline=None)  # a busy machine is no fault
    settings.load_profile("patient")


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Four rank processes for the whole test session."""
    ranks = Pool(4)
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def outcomes(pool: Pool) -> Outcomes:
    """Runs in the pool, each once for the whole test session."""
    from tests.engine.parity import Outcomes  # imports torch, which many tests do without

    return Outcomes(pool)
