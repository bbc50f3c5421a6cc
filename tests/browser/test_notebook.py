"""Notebook 01 as a person opens it: real ranks in JupyterLab, driven in chromium, and the card of safety with them. It also
takes the notebook's picture, into the folder that FSDP_LAB_SCREENSHOTS names."""

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.browser.driver import DashboardPage
from tests.browser.jupyter import REPO, JupyterServer, Notebook

NOTEBOOK = REPO / "notebooks" / "01_live_dashboard.ipynb"


class SafetyPage(DashboardPage):
    """The forms of safety, their buttons and their words."""

    def press(self, word: str) -> None:
        self.page.locator("button.fsdp-safety-button", has_text=re.compile(rf"^\s*{word}\s*$")).click()

    def wait_words(self, part: str, pattern: str) -> str:
        words = self.page.locator(f".fsdp-{part}", has_text=re.compile(pattern))
        words.first.wait_for()
        return str(words.first.inner_text())

    def top_of_plots(self) -> float:
        box = self.page.locator(".fsdp-live").first.bounding_box()
        lab = self.page.locator(".fsdp-lab").first.bounding_box()
        return float(box["y"] - lab["y"])


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_notebook_01(server: JupyterServer, open_notebook: Callable[[str], Notebook], watched, tmp_path: Path):
    """Run all, Start, change sharding and offload while it trains, save, lose a rank, recover, Stop; and nothing jumps."""
    shutil.copy(NOTEBOOK, server.root)
    shutil.copy(NOTEBOOK.with_name("dashboard.png"), server.root)
    notebook = open_notebook(NOTEBOOK.name)
    watched(notebook)
    opened = SafetyPage(notebook)
    notebook.run_all()
    opened.wait_drawn()
    opened.choose("model", "gpt2-1m")  # as on Binder: on few cores it makes several steps a second
    opened.start()
    opened.wait_step(3)
    opened.wait_reading("memory", r"peak [\d.]+ MiB")
    before = opened.reading("memory")
    opened.choose("sharding", "shard_grad_op")
    opened.choose("offload", "all")
    for label in ("sharding", "offload"):
        assert int(opened.wait_note(label, r"applied at step \d+").split()[-1]) > 3
    assert opened.wait_new_reading("memory", before) != before
    opened.wait_reading("memory", r"[\d.]+ MiB on the host")

    notebook.hide_sidebar()
    opened.tab("loss")
    opened.show(1280, "Light")
    assert opened.clipped() == []
    opened.photograph(Path(os.environ.get("FSDP_LAB_SCREENSHOTS") or tmp_path) / "dashboard.png")

    opened.tab("safety")
    tops = [opened.top_of_plots()]
    opened.press("Save now")
    opened.wait_words("safety-list", "MiB")
    tops.append(opened.top_of_plots())
    opened.press("Inject fault")
    opened.wait_words("notice-text", r"rank 1 is gone: its process \d+ .* SIGKILL")
    opened.wait_state("broken")
    at = opened.step()
    opened.press("Recover")
    opened.wait_words("incidents", r"It resumed from a \w+")
    opened.wait_step(at + 2)
    tops.append(opened.top_of_plots())
    assert max(tops) - min(tops) <= 1, tops
    opened.stop()
    opened.show(800, "Dark")
    assert opened.clipped() == []
