"""A page that is loaded again, in a notebook of its own.

In a page that is slowed twelvefold ipywidgets looks for a widget's model while it restores it, and not again afterwards:
so no other test runs beside this one.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.browser.driver import DashboardPage
from tests.browser.jupyter import JupyterServer, Notebook
from tests.browser.test_dashboard import CELL


@pytest.mark.slow
@pytest.mark.alone
def test_a_reload_brings_the_whole_history_back(
    server: JupyterServer, open_notebook: Callable[[], Notebook], watched: Callable[[Notebook], None]
) -> None:
    dashboard = DashboardPage(open_notebook())
    watched(dashboard.notebook)
    dashboard.notebook.open(server.write("reload.ipynb", [CELL]))
    dashboard.notebook.run_all()
    dashboard.wait_drawn()
    dashboard.start()
    dashboard.wait_step(25)
    step = dashboard.stop()
    dashboard.notebook.command("docmanager:save")
    dashboard.page.reload()
    dashboard.wait_drawn()
    dashboard.page.locator(".fsdp-card-loss").scroll_into_view_if_needed()
    dashboard.wait_rows("loss.steps", step + 1)
    assert dashboard.step() == step
    dashboard.start()  # and it is alive: another run begins at step 0
    dashboard.wait_step(2)
