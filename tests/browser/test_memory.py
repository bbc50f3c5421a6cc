"""Memory in a real page: classes at the peak, and within the last ledger step."""

from __future__ import annotations

from tests.browser.driver import DashboardPage
from tests.browser.jupyter import JupyterServer

CELL = """\
from tests.dashboard.fake_lab import FakeLab
from fsdp_lab.dashboard import Dashboard
lab = FakeLab(2, step_s=0.05)
dashboard = Dashboard(lab)
dashboard"""


def test_a_ledger_step_is_drawn_by_unit_and_class(server: JupyterServer, open_notebook, watched, picture):
    dashboard = DashboardPage(open_notebook())
    watched(dashboard.notebook)
    dashboard.notebook.open(server.write("memory.ipynb", [CELL]))
    dashboard.notebook.run_all()
    dashboard.wait_drawn()
    assert "none measured yet" in dashboard.reading("ledger")
    dashboard.start()
    dashboard.wait_reading("ledger", r"rank \d+ in step 10: peak [\d.]+ MiB in forward, h.5", timeout_s=60)
    card = dashboard.page.locator(".fsdp-card-ledger").first
    card.scroll_into_view_if_needed()  # what is out of sight is not painted
    dashboard.wait_rows("ledger.curve", 16)
    dashboard.wait_rows("ledger.phases", 4)
    dashboard.wait_rows("memory.now", 2)
    assert "limit 64.0 GiB" in dashboard.reading("memory")
    legend = dashboard.page.locator(".fsdp-card-ledger .fsdp-key").all_inner_texts()
    assert [text.strip() for text in legend] == [
        "sharded parameters", "optimizer state", "unsharded parameters", "gradients", "activations", "communication buffers",
        "other", "in all"]  # fmt: skip
    for width, theme in ((1280, "Light"), (1920, "Dark")):
        dashboard.show(width, theme)
        assert dashboard.clipped() == []
        card.screenshot(path=picture(f"memory_{width}_{theme}"))
    server.end_kernels()
