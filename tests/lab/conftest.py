"""One lab of two ranks without torch for this folder (see `tests.cluster.fake_rank`)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fsdp_lab.lab import Lab
from tests.cluster.conftest import FAKE


@pytest.fixture(scope="package")
def resident() -> Iterator[Lab]:
    with Lab(2, rank_module=FAKE) as lab:
        yield lab


@pytest.fixture
def lab(resident: Lab) -> Iterator[Lab]:
    """Two healthy ranks and no run that goes on."""
    if resident.ranks != 2 or resident.lost:
        resident.resize(2)
    yield resident
    if resident.sweep is not None:
        resident.sweep.stop(10)
    if resident.current is not None:
        resident.current.stop(10)
