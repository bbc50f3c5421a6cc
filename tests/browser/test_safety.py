"""The card of checkpoints, recovery, incidents and drills in JupyterLab and chromium: with ranks, one of which is killed,
and over a lab without processes, in both themes."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Locator

from tests.browser.driver import DashboardPage
from tests.browser.jupyter import LIMIT_S, JupyterServer, Notebook

FAKE = """\
from tests.dashboard.fake_lab import FakeLab
from fsdp_lab.dashboard import Dashboard
lab = FakeLab(2, step_s=0.05)
dashboard = Dashboard(lab)
dashboard"""

REAL = """\
from fsdp_lab import Lab
lab = Lab(ranks=2, devices="cpu", progress=False)
dashboard = lab.dashboard()
dashboard"""


class SafetyPage(DashboardPage):
    """The card, its buttons and its words."""

    @property
    def card(self) -> Locator:
        return self.page.locator(".fsdp-safety").first

    def press(self, word: str) -> None:
        self.card.locator("button.fsdp-safety-button", has_text=re.compile(rf"^\s*{word}\s*$")).click()

    def wait_words(self, part: str, pattern: str, timeout_s: float = LIMIT_S) -> str:
        words = self.card.locator(f".fsdp-{part}", has_text=re.compile(pattern))
        words.first.wait_for(timeout=timeout_s * 1e3)
        return str(words.first.inner_text())

    def top_of_plots(self) -> float:
        box = self.page.locator(".fsdp-live").first.bounding_box()
        lab = self.page.locator(".fsdp-lab").first.bounding_box()
        assert box is not None and lab is not None
        return float(box["y"] - lab["y"])

    def look(self, width: int, theme: str, path: Path) -> None:
        self.show(width, theme)
        assert self.clipped() == []
        self.card.scroll_into_view_if_needed()
        box = self.page.locator(".fsdp-lab").first.bounding_box()
        card = self.card.bounding_box()
        assert box is not None and card is not None
        clip = {"x": box["x"] - 8, "y": max(0, box["y"]), "width": box["width"] + 16,
                "height": card["y"] + card["height"] + 40 - max(0, box["y"])}  # fmt: skip
        self.page.screenshot(path=path, clip=clip)  # type: ignore[arg-type]


def opened(page: SafetyPage, server: JupyterServer, name: str, cell: str) -> SafetyPage:
    page.notebook.open(server.write(name, [cell]))
    page.notebook.hide_sidebar()
    page.notebook.run_all()
    page.wait_drawn()
    return page


@pytest.mark.slow
def test_how_it_looks_and_that_nothing_jumps(server, open_notebook, watched, picture):
    desk = opened(SafetyPage(open_notebook()), server, "safety.ipynb", FAKE)
    watched(desk.notebook)
    desk.look(1280, "Light", picture("safety-folded"))
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
    for width, theme in ((1280, "Light"), (800, "Dark")):
        desk.look(width, theme, picture(f"safety-broken-{width}-{theme.lower()}"))
    desk.show(1280, "Light")
    desk.press("Recover")
    desk.wait_words("incidents", "Resumed from a checkpoint")
    desk.wait_state("running")
    tops.append(desk.top_of_plots())
    assert max(tops) - min(tops) <= 1, tops
    desk.look(800, "Light", picture("safety-incident"))
    server.end_kernels()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_killed_rank_and_the_way_out(server: JupyterServer, open_notebook: Callable[[], Notebook], watched, picture):
    """A person's path: save, lose a rank, read what happened, Recover, see that it goes on, stop, resume."""
    desk = opened(SafetyPage(open_notebook()), server, "killed.ipynb", REAL)
    watched(desk.notebook)
    try:
        for label, value in (("model", "gpt2-1m"), ("sequence length", "32"), ("micro batch", "1")):
            desk.choose(label, value)
        desk.press("Show")
        desk.field("save").locator("select").select_option("every n steps")
        desk.choose("n steps", "5")
        desk.field("evaluate").locator("select").select_option("every n steps")
        desk.choose("every (steps)", "5")
        desk.choose("samples", "2")
        desk.start()
        desk.wait_step(11)
        desk.wait_words("evaluation-said", r"Evaluation loss [\d.]+ \(perplexity [\d.]+\) at step \d+, best")
        desk.wait_words("safety-list", "MiB")
        desk.notebook.execute("import os, signal; os.kill(lab.rank_status()[1].pid, signal.SIGKILL)")
        desk.wait_state("broken", 30)
        desk.wait_words("state-line", r"rank 1 is gone: its process \d+ .* SIGKILL")
        desk.look(1280, "Light", picture("safety-killed"))
        at = desk.step()
        desk.press("Recover")
        desk.wait_words("incidents", r"training again [\d.]+ m?s")
        told = desk.wait_words("incidents", r"Resumed from a checkpoint of step \d+ · .* · 2 ranks")
        assert "detected 0 s → freed" in told
        desk.wait_state("running")
        desk.wait_step(at + 20)
        for theme in ("Light", "Dark"):
            desk.look(1280, theme, picture(f"safety-recovered-{theme.lower()}"))
        desk.button("Stop").click()
        desk.wait_state("stopped")
        last = int(desk.notebook.execute("print(lab.current.step)"))
        desk.press("Resume")
        desk.wait_state("running")
        assert int(desk.notebook.execute("print(lab.current.switches[0].step)")) == last
    finally:
        server.end_kernels()
