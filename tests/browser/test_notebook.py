"""Notebook 01 as a person opens it: real ranks in JupyterLab, driven in chromium. It also takes the notebook's picture,
into the folder that FSDP_LAB_SCREENSHOTS names."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.browser.jupyter import REPO, JupyterServer, Notebook
from tests.browser.test_safety import SafetyPage

NOTEBOOK = REPO / "notebooks" / "01_live_dashboard.ipynb"


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_notebook_01(server: JupyterServer, open_notebook: Callable[[str], Notebook], watched, tmp_path: Path):
    """Run all, Start, change sharding, offload and link while it trains, save, lose a rank, recover, Stop, load the page
    again."""
    shutil.copy(NOTEBOOK, server.root)
    shutil.copy(NOTEBOOK.with_name("dashboard.png"), server.root)
    notebook = open_notebook(NOTEBOOK.name)
    watched(notebook)
    opened = SafetyPage(notebook)
    notebook.run_all()
    opened.wait_drawn()
    opened.choose("model", "gpt2-1m")  # as on Binder: on few cores it makes several steps a second
    opened.start()
    opened.wait_step(6)
    opened.wait_reading("memory", r"peak [\d.]+ MiB")

    for label, value in (("sharding", "shard_grad_op"), ("offload", "all")):
        before = opened.reading("memory")
        opened.choose(label, value)
        note = opened.wait_note(label, r"applied at step \d+")
        assert int(note.split()[-1]) > 6
        assert opened.wait_new_reading("memory", before) != before
    opened.wait_reading("memory", r"[\d.]+ MiB on the host")
    opened.choose("link", "other…")
    opened.field("link").locator("input").fill("0.06 GB/s, 50 us")
    opened.field("link").locator("input").press("Enter")
    opened.page.get_by_text("Emulated link: 60 MB/s, 50 µs latency.").first.wait_for()
    opened.choose("link", "off")
    opened.wait_note("link", r"applied at step \d+")

    notebook.hide_sidebar()
    opened.show(1600, "Light")
    assert opened.clipped() == []
    opened.photograph(Path(os.environ.get("FSDP_LAB_SCREENSHOTS") or tmp_path) / "dashboard.png")

    opened.press("Show")
    opened.press("Save now")
    opened.wait_words("safety-list", "MiB")
    notebook.execute("import os, signal; os.kill(lab.rank_status()[1].pid, signal.SIGKILL)")
    opened.wait_words("state-line", r"rank 1 is gone: its process \d+ .* SIGKILL")
    opened.wait_state("broken")
    at = opened.step()
    opened.press("Recover")
    opened.wait_words("incidents", r"It resumed from a \w+")
    opened.wait_step(at + 5)
    last = opened.stop()

    notebook.command("docmanager:save")
    notebook.page.reload()
    opened.wait_drawn()
    assert opened.step() == last
