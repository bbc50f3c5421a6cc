"""Executes the notebooks and saves them with outputs that a page without a kernel shows: `python -m tests.notebooks.save`,
or with the numbers of some, as `... 03 10`. Each runs in a fresh copy of the folder.

The dashboard's own picture comes from the browser test: `FSDP_LAB_SCREENSHOTS=DIR pytest tests/browser/test_notebook.py`,
then DIR/dashboard.png."""

import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"
WIDGET = "application/vnd.jupyter.widget-view+json"


def still(notebook: Any) -> Any:
    """Without what only a live kernel can show, or what only this run can mean."""
    notebook.metadata = {"kernelspec": notebook.metadata["kernelspec"], "language_info": {"name": "python"}}
    for cell in notebook.cells:
        cell.metadata = {}
        for output in list(cell.get("outputs", [])):
            output.get("metadata", {}).pop(WIDGET, None)
            if output.get("data", {}).pop(WIDGET, None) is not None or output.get("name") == "stderr":
                cell.outputs.remove(output)
    return notebook


def main(wanted: Sequence[str]) -> None:
    """`wanted`: how the names of the notebooks begin; empty: all."""
    for name in sorted(p.name for p in NOTEBOOKS.glob("*.ipynb") if p.name.startswith(tuple(wanted or [""]))):
        with tempfile.TemporaryDirectory() as home:
            os.environ["FSDP_LAB_HISTORY"] = f"{home}/history.sqlite3"
            folder = Path(shutil.copytree(NOTEBOOKS, f"{home}/notebooks"))
            notebook = nbformat.read(folder / name, as_version=4)
            client = NotebookClient(notebook, timeout=900, resources={"metadata": {"path": str(folder)}})
            client.record_timing = client.store_widget_state = False
            nbformat.write(still(client.execute()), NOTEBOOKS / name)


if __name__ == "__main__":
    main(sys.argv[1:])
