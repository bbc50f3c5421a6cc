"""Fixtures that several folders share."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator

import pytest

from tests.pool import Pool


def pytest_configure(config: pytest.Config) -> None:
    """No test writes to the history of whoever runs it; what tests start inherits that."""
    folder = tempfile.mkdtemp(prefix="fsdp_lab-history-")
    os.environ["FSDP_LAB_HISTORY"] = os.path.join(folder, "history.sqlite3")
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Four rank processes for the whole test session."""
    ranks = Pool(4)
    yield ranks
    ranks.close()
