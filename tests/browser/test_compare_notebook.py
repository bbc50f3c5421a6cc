"""Notebook 04 as a person goes through it: compare, read the table, open the report, export a script."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from fsdp_lab import History
from fsdp_lab.export import text_of
from fsdp_lab.runs.history import RunList
from tests.browser.jupyter import LIMIT_S, REPO, JupyterServer, Notebook
from tests.notebooks.test_notebooks import LONGEST_S

NAME = "04_compare_strategies.ipynb"


@pytest.fixture(scope="module")
def gone_through(
    server: JupyterServer, open_notebook: Callable[[], Notebook], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Notebook, Path]:
    """The notebook with all its cells run, and the folder that it wrote to."""
    text = (REPO / "notebooks" / NAME).read_text(encoding="utf-8")
    assert "steps=30," in text
    (server.root / NAME).write_text(text.replace("steps=30,", "steps=16,"), encoding="utf-8")  # enough for its claims
    notebook = open_notebook()
    notebook.open(NAME)
    began_s = time.monotonic()
    (server.root / "train.py").write_text("# of an earlier time\n")
    notebook.run_all(timeout_ms=300_000)
    took_s = time.monotonic() - began_s
    print(f"\n{NAME}: {took_s:.0f} s")
    assert took_s <= LONGEST_S
    assert notebook.wrong == []
    return notebook, server.root


def kept(folder: Path) -> RunList:
    """What the notebook's kernel kept."""
    return History(folder.parent / "history.sqlite3").runs()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_table_says_who_is_equal(gone_through: tuple[Notebook, Path], picture: Callable[[str], Path]):
    notebook, _ = gone_through
    page = notebook.page
    table = page.locator(".jp-OutputArea-output table", has_text="parity with").first
    table.scroll_into_view_if_needed()
    text = table.text_content() or ""
    assert text.count("equal bit for bit") == 3 and text.count("equal within rounding") == 4
    assert "DIFFERENT" not in text.upper().replace("INDIFFERENT", "")
    said = "\n".join(notebook.outputs())
    assert re.search(r"The fastest that fits is \w \((lab|fsdp2|ddp) ", said)
    assert re.search(r"bf16 instead of fp32 .*memory", said)
    for theme in ("Light", "Dark"):
        notebook.theme(f"JupyterLab {theme}")
        page.screenshot(path=picture(f"compare_{theme}"))


@pytest.mark.slow
def test_the_report_holds_the_same_figures(gone_through: tuple[Notebook, Path], browser: Browser):
    _, folder = gone_through
    context = browser.new_context(offline=True)
    page = context.new_page()
    page.goto((folder / "comparison.html").as_uri())
    page.wait_for_selector("html[data-ready]", timeout=LIMIT_S * 1e3)
    told = json.loads(page.locator("#fsdp-lab-records").text_content() or "")
    shown = page.locator("#comparison tbody tr").all_inner_texts()
    context.close()
    runs = {run.id: run for run in kept(folder)}
    assert len(told["records"]) == len(shown) == 8
    for record, row in zip(told["records"], shown, strict=True):
        run = runs[record["run"]]
        assert record["last_loss"] == run.summary()["losses"][-1]
        assert (record["parity"] or "") in row


@pytest.mark.slow
def test_the_exported_script_is_that_of_the_recommended_run(gone_through: tuple[Notebook, Path]):
    """Whose losses it has: tests/export/test_script.py."""
    _, folder = gone_through
    script = (folder / "train.py").read_text()
    assert "fsdp_lab" not in re.sub(r'""".*?"""', "", script, flags=re.S)
    embedded = re.search(r'id="fsdp-lab-records"[^>]*>(.*?)</script>', (folder / "comparison.html").read_text(), re.S)
    assert embedded is not None
    told = json.loads(embedded[1])
    (taken,) = (record["run"] for record in told["records"] if record["label"] == told["fastest"])
    assert script == text_of(kept(folder)[taken].spec, "script")
