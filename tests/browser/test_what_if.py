"""The what-if page in JupyterLab and chromium: choose, read the answer, be refused, search, take what was found."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from tests.browser.driver import DashboardPage, model
from tests.browser.jupyter import JupyterServer, Notebook

CELL = "from fsdp_lab import WhatIf\npage = WhatIf()\npage"


@pytest.fixture(scope="module")
def desk(server: JupyterServer, open_notebook: Callable[[], Notebook]) -> DashboardPage:
    page = DashboardPage(open_notebook())
    page.notebook.open(server.write("what_if.ipynb", [CELL]))
    page.notebook.run_all()
    page.notebook.hide_sidebar()
    page.page.set_viewport_size({"width": 1280, "height": 1750})  # what is out of sight is not painted
    page.wait_drawn()
    return page


def headline(desk: DashboardPage, pattern: str) -> None:
    desk.page.locator(".fsdp-headline", has_text=re.compile(pattern)).wait_for(timeout=20_000)


@pytest.mark.slow
def test_choose_read_be_refused_search_and_take(desk, watched, picture):
    watched(desk.notebook)
    headline(desk, "llama-7b, 6.74 billion parameters · 64 × h100 in 8 hosts")
    desk.choose("GPUs", "4")
    headline(desk, "4 × h100 in one host")
    desk.wait_reading("answer", r"It fits 80\.0 GiB, [\d.]+ GiB to spare\. Bound by")
    desk.page.wait_for_function(f"() => {model('scaling.here')}?.get_column('gpus')?.[0] === 4", timeout=20_000)
    desk.wait_rows("scaling.points", 13)

    desk.choose("sequence length", "65536")  # longer than the model takes
    desk.wait_note("sequence length", "refused, see below")
    desk.page.locator(".fsdp-refusal-line:visible", has_text="65536 is over the model's 4096 positions").wait_for()
    desk.page.locator(".fsdp-stale").wait_for(state="attached")
    desk.photograph(picture("what_if_refused"))
    headline(desk, "4 × h100")
    desk.choose("sequence length", "2048")
    desk.page.locator(".fsdp-stale").wait_for(state="detached")
    desk.page.locator(".fsdp-refusal-line:visible").wait_for(state="detached")

    assert not desk.field("memory, GiB").is_visible()
    desk.choose("hardware", "custom")
    desk.choose("memory, GiB", "24")
    desk.wait_reading("answer", r"It does not fit 24\.0 GiB: [\d.]+ GiB too much")
    desk.photograph(picture("what_if_custom"))
    desk.choose("hardware", "h100")
    desk.wait_reading("answer", r"It fits 80\.0 GiB")

    desk.button("Find the best").click()
    uses = desk.page.locator(".fsdp-card-strategies button.fsdp-press")
    uses.first.wait_for(timeout=30_000)
    if uses.first.get_attribute("aria-pressed") == "false":
        uses.first.click()
    desk.page.locator('.fsdp-card-strategies tr:first-child button[aria-pressed="true"]').wait_for(timeout=20_000)
    for width, theme in ((1480, "Dark"), (800, "Light")):
        desk.page.set_viewport_size({"width": width, "height": 1750})
        desk.notebook.theme(f"JupyterLab {theme}")
        desk.page.wait_for_function(
            "(dark) => document.querySelector('.fsdp-live').classList.contains('fsdp-dark') === dark",
            arg=theme == "Dark",
        )
        assert desk.clipped() == []
        desk.photograph(picture(f"what_if_{width}_{theme}"))
