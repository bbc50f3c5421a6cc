"""A widget's first picture, which needs no answer of the kernel."""

from __future__ import annotations

import pytest

from tests.browser.jupyter import JupyterServer

CELL = """
import pathlib, time
from bokeh.plotting import figure
from IPython.display import display
from fsdp_lab.dashboard import picture
plot = figure(height=200, x_axis_label="step")
plot.line([0, 1, 2], [3, 1, 2])
display(picture(plot, "A figure"))
while not pathlib.Path("go").exists():
    time.sleep(0.02)
print("the cell is over")
"""
DRAWN = ".fsdp-live .fsdp-card canvas"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_picture_is_drawn_while_its_kernel_is_busy(server: JupyterServer, open_notebook, watched):
    notebook = open_notebook()
    watched(notebook)
    notebook.open(server.write("first_picture.ipynb", [CELL]))
    notebook.run_all(wait=False)
    notebook.page.wait_for_selector(DRAWN, state="attached", timeout=90_000)
    assert "the cell is over" not in notebook.outputs()[0]
    canvases = len(notebook.page.query_selector_all(DRAWN))
    (server.root / "go").touch()
    notebook.page.wait_for_selector(".fsdp-live[data-ready]")
    assert len(notebook.page.query_selector_all(DRAWN)) == canvases, "the same picture, filled anew"
    assert notebook.page.evaluate("() => window.Bokeh.documents.length") == 1
