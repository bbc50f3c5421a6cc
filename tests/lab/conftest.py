"""The labs of this folder, each started once: of two ranks without torch (see `tests.cluster.fake_rank`), and of two that
train."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fsdp_lab.lab import Lab
from tests.cluster.conftest import FAKE

HANG_S = 2.0


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


@pytest.fixture(scope="package")
def resident_real() -> Iterator[Lab]:
    with Lab(2, reduction="rank_ordered") as lab:
        yield lab


@pytest.fixture
def real_lab(resident_real: Lab) -> Iterator[Lab]:
    """The same of ranks that train: two healthy ones and no run that goes on."""
    if resident_real.ranks != 2 or resident_real.lost:
        resident_real.resize(2)
    yield resident_real
    if resident_real.slow is not None:
        resident_real.slow.close()
    if resident_real.current is not None:
        resident_real.current.stop(10)


@pytest.fixture
def impatient_lab(real_lab: Lab, monkeypatch: pytest.MonkeyPatch) -> Lab:
    """The same: a rank for which another one waits longer than HANG_S hangs, which the kernel alone decides."""
    monkeypatch.setattr(real_lab.cluster.supervisor.monitor, "_limit_s", HANG_S)
    return real_lab
