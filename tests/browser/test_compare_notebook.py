"""Notebook 04 as a person goes through it: compare, read the table, write the report, export a script."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import pytest

from fsdp_lab import History
from fsdp_lab.export.script import script
from tests.browser.jupyter import REPO, JupyterServer, Notebook

NAME = "04_compare_strategies.ipynb"
LONGEST_MS = 360_000  # a fault of the notebook ends sooner; a busy machine takes minutes for eight runs


@pytest.mark.nightly
@pytest.mark.timeout(500)
def test_its_table_its_report_and_its_script_are_of_the_same_runs(
    server: JupyterServer, open_notebook: Callable[[str], Notebook], watched
):
    """Eight runs, which take minutes. Their parts: tests/lab/test_sweep.py, tests/report, tests/export/test_script.py."""
    text = (REPO / "notebooks" / NAME).read_text(encoding="utf-8")
    assert "steps=30," in text
    (server.root / NAME).write_text(text.replace("steps=30,", "steps=16,"), encoding="utf-8")  # enough for its claims
    (server.root / "train.py").write_text("# of an earlier time\n")
    notebook = open_notebook(NAME)
    watched(notebook)
    notebook.run_all(timeout_ms=LONGEST_MS)

    table = notebook.page.locator(".jp-OutputArea-output table", has_text="parity with").first
    said = table.text_content() or ""
    assert said.count("equal bit for bit") == 3 and said.count("equal within rounding") == 4
    assert "DIFFERENT" not in said.upper().replace("INDIFFERENT", "")
    printed = "\n".join(notebook.outputs())
    assert re.search(r"The fastest that fits is \w \((lab|fsdp2|ddp) ", printed)
    assert re.search(r"bf16 instead of fp32 .*memory", printed)

    report = (server.root / "comparison.html").read_text()
    embedded = re.search(r'id="fsdp-lab-records"[^>]*>(.*?)</script>', report, re.S)
    assert embedded is not None
    told = json.loads(embedded[1])
    runs = {run.id: run for run in History(server.root.parent / "history.sqlite3").runs()}
    assert len(told["records"]) == 8
    assert all(record["last_loss"] == runs[record["run"]].summary()["losses"][-1] for record in told["records"])
    rows = table.locator("tbody tr").all_text_contents()
    assert all((record["parity"] or "") in row for record, row in zip(told["records"], rows, strict=True))

    written = (server.root / "train.py").read_text()
    assert "fsdp_lab" not in re.sub(r'""".*?"""', "", written, flags=re.S)
    (taken,) = (record["run"] for record in told["records"] if record["label"] == told["fastest"])
    assert written == script(runs[taken].spec)[0]
