"""The labs of this folder, each started once: of two ranks without torch (see `tests.cluster.fake_rank`), and of two that
train."""

from collections.abc import Iterator

import pytest

from fsdp_lab.lab import Lab
from tests.cluster.conftest import FAKE

HANG_S = 2.0


@pytest.fixture(scope="package")
def resident() -> Iterator[Lab]:
    with Lab(2, rank_module=FAKE) as lab:
        yield lab


@pytest.fixture(scope="package")
def resident_real() -> Iterator[Lab]:
    with Lab(2, reduction="rank_ordered") as lab:
        yield lab


def healthy(lab: Lab) -> Iterator[Lab]:
    """Two healthy ranks; nothing goes on afterwards."""
    if lab.ranks != 2 or lab.lost:
        lab.resize(2)
    yield lab
    if lab.slow is not None:
        lab.slow.close()
    for one in (lab.sweep, lab.current):
        if one is not None:
            one.stop(10)


@pytest.fixture
def lab(resident: Lab) -> Iterator[Lab]:
    yield from healthy(resident)


@pytest.fixture
def real_lab(resident_real: Lab) -> Iterator[Lab]:
    yield from healthy(resident_real)


@pytest.fixture
def impatient_lab(real_lab: Lab, monkeypatch: pytest.MonkeyPatch) -> Lab:
    """A rank for which another one waits longer than HANG_S hangs, which the kernel alone decides."""
    monkeypatch.setattr(real_lab.cluster.supervisor.monitor, "_limit_s", HANG_S)
    return real_lab
