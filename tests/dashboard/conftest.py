"""Few plots for tests of what is around them: to make all of them takes a second, and to lay them out two."""

from __future__ import annotations

import pytest

from fsdp_lab.dashboard.panels.curves import LossPanel, ThroughputPanel

FEW = (LossPanel, ThroughputPanel)


@pytest.fixture
def all_panels() -> None:
    """For tests of what other plots show of a run."""


@pytest.fixture(autouse=True)
def few_panels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "all_panels" not in request.fixturenames:
        monkeypatch.setattr("fsdp_lab.dashboard.feed.PANELS", FEW)
