"""Few plots for tests of what is around them: to make all of them takes a second, and to lay them out two."""

from collections.abc import Callable

import pytest

from fsdp_lab.dashboard.board import Board, ComparisonCard
from fsdp_lab.dashboard.feed import Feed
from fsdp_lab.dashboard.live import LiveView
from fsdp_lab.dashboard.panels.curves import LossPanel, ThroughputPanel
from tests.dashboard.fake_lab import FakeLab
from tests.waiting import until

FEW = (LossPanel, ThroughputPanel)


class Show:
    def __init__(self) -> None:
        self.lab = FakeLab(2, step_s=0.002)
        self.live = LiveView()
        self.board = Board(self.lab)
        self.card = ComparisonCard(lambda word, about: None)
        self.feed = Feed(self.lab, self.live, self.board, self.card)

    def table(self, name: str):
        return next(s for s in self.live._scene.sources if s.name == name)

    def steps(self) -> list[float]:
        return self.table("loss.steps").column("step").tolist()

    def until(self, what: Callable[[], bool], meanwhile: Callable[[], object] | None = None) -> None:
        until(what, meanwhile=meanwhile or self.feed.tick)

    def reading(self, card: str) -> str:
        return str(self.live._scene.captions()[card]["reading"])


@pytest.fixture
def show():
    s = Show()
    yield s
    s.lab.close()


@pytest.fixture
def all_panels() -> None:
    """For tests of what other plots show of a run."""


@pytest.fixture(autouse=True)
def few_panels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "all_panels" not in request.fixturenames:
        monkeypatch.setattr("fsdp_lab.dashboard.feed.PANELS", FEW)
