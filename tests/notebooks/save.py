"""Executes the notebooks and saves them with outputs that a page without a kernel shows: `python -m tests.notebooks.save`,
or with the numbers of some, as `... 03 10`.

Both run in a real JupyterLab in chromium, so that Bokeh pictures exist; each picture is saved in its cell as a PNG in the
place of the widget, which would be an empty frame wherever no kernel runs. The dashboard's own picture comes from the
browser test: `FSDP_LAB_SCREENSHOTS=DIR pytest tests/browser/test_notebook.py`, then DIR/dashboard.png."""

import base64
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nbformat
from playwright.sync_api import Page, sync_playwright

from tests.browser.jupyter import JupyterServer, Notebook, chromium

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"
WIDGET = "application/vnd.jupyter.widget-view+json"
PICTURES = {"02_first_steps_in_code.ipynb"}  # whose widgets are pictures; in the others a link shows the picture


def save(name: str, server: JupyterServer, page: Page) -> None:
    shutil.copy(NOTEBOOKS / name, server.root / name)
    notebook = Notebook(page, server)
    notebook.open(name)
    notebook.command("editmenu:clear-all")
    notebook.run_all(timeout_ms=180_000)
    pictures: list[bytes] = []
    if name in PICTURES:
        page.wait_for_selector(".bk-Figure", timeout=30_000)
        page.wait_for_timeout(1_000)  # for the last frame; a picture is looked at by people
        pictures = [view.screenshot() for view in page.query_selector_all(".jp-OutputArea-output:has(.bk-Figure)")]
    notebook.command("docmanager:save")
    made = nbformat.read(server.root / name, as_version=4)
    server.end_kernels()
    assert not notebook.wrong, notebook.wrong
    nbformat.write(still(made, pictures), NOTEBOOKS / name)


def still(notebook: Any, pictures: list[bytes]) -> Any:
    """Without what only a live kernel can show, or what only this run can mean."""
    notebook.metadata = {"kernelspec": notebook.metadata["kernelspec"], "language_info": {"name": "python"}}
    left = list(pictures)
    for cell in notebook.cells:
        cell.metadata = {}
        for output in list(cell.get("outputs", [])):
            output.get("metadata", {}).clear()
            if output.get("data", {}).pop(WIDGET, None) is None:
                continue
            if left:
                output["data"] = {"image/png": base64.b64encode(left.pop(0)).decode(), "text/plain": "<picture>"}
            else:
                cell.outputs.remove(output)
    assert not left, "a picture without a cell"
    return notebook


def main(wanted: Sequence[str]) -> None:
    """`wanted`: how the names of the notebooks begin; empty: all."""
    home = Path(tempfile.mkdtemp())
    server = JupyterServer(home)
    try:
        with sync_playwright() as playwright, chromium(playwright) as browser:
            for name in sorted(p.name for p in NOTEBOOKS.glob("*.ipynb") if p.name.startswith(tuple(wanted or [""]))):
                page = browser.new_page(viewport={"width": 1280, "height": 1000})
                save(name, server, page)
                page.close()
    finally:
        server.stop()
        shutil.rmtree(home, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1:])
