"""The card of checkpoints, recovery, incidents and drills in JupyterLab and chromium, over a lab without processes. With
ranks, one of which is killed: test_notebook.py."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Locator

from tests.browser.driver import DashboardPage


class SafetyPage(DashboardPage):
    """The card, its buttons and its words."""

    @property
    def card(self) -> Locator:
        return self.page.locator(".fsdp-safety").first

    def press(self, word: str) -> None:
        self.card.locator("button.fsdp-safety-button", has_text=re.compile(rf"^\s*{word}\s*$")).click()

    def wait_words(self, part: str, pattern: str) -> str:
        words = self.card.locator(f".fsdp-{part}", has_text=re.compile(pattern))
        words.first.wait_for()
        return str(words.first.inner_text())

    def top_of_plots(self) -> float:
        box = self.page.locator(".fsdp-live").first.bounding_box()
        lab = self.page.locator(".fsdp-lab").first.bounding_box()
        assert box is not None and lab is not None
        return float(box["y"] - lab["y"])


@pytest.mark.slow
def test_a_lost_rank_is_recovered_and_nothing_jumps(show):
    desk = show(SafetyPage)
    desk.press("Show")
    desk.card.locator(".fsdp-safety-body").wait_for()
    desk.field("save").locator("select").select_option("every n steps")
    desk.start()
    desk.wait_step(3)
    tops = [desk.top_of_plots()]
    for _ in range(2):
        desk.press("Save now")
        desk.wait_words("safety-said", "is saved in checkpoints")
    tops.append(desk.top_of_plots())
    desk.press("Inject fault")
    desk.wait_words("state-line", "rank 1 is gone")
    desk.wait_state("broken")
    tops.append(desk.top_of_plots())
    desk.press("Recover")
    desk.wait_words("incidents", "resumed from a checkpoint")
    desk.wait_state("running")
    tops.append(desk.top_of_plots())
    assert max(tops) - min(tops) <= 1, tops
    desk.show(800, "Dark")
    assert desk.clipped() == []
