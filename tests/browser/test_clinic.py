"""The clinic in JupyterLab: one click has a pain on real ranks, the lab names it, one click cures it."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Locator

from tests.browser.driver import DashboardPage
from tests.browser.jupyter import JupyterServer

CELL = """\
from course.clinic import Clinic
from fsdp_lab import Lab
lab = Lab(2, history=False)
clinic = Clinic(lab)
clinic"""
LIMIT_MS = 120_000


@pytest.mark.nightly
@pytest.mark.timeout(400)
def test_a_pain_is_had_named_and_cured(server: JupyterServer, open_notebook, watched, picture) -> None:
    desk = DashboardPage(open_notebook())
    watched(desk.notebook)
    desk.notebook.open(server.write("clinic.ipynb", [CELL]))
    desk.notebook.run_cell(0)
    desk.wait_drawn()
    card = desk.page.locator(".fsdp-clinic").first

    def button(word: str) -> Locator:
        return card.locator("button", has_text=re.compile(rf"^\s*{word}\s*$"))

    def have(pain: str, sign: str, rows: tuple[str, str]) -> None:
        card.locator("select").select_option(pain)
        button("Reproduce").click()
        card.get_by_text(sign).first.wait_for(timeout=LIMIT_MS)
        desk.page.wait_for_function(
            "() => !document.querySelectorAll('.fsdp-clinic button')[1].disabled", timeout=LIMIT_MS
        )
        button("Apply the cure").click()
        card.locator("td", has_text="cured").wait_for(timeout=LIMIT_MS)
        figures = card.locator("td:nth-child(2)").all_inner_texts()
        assert [bool(re.search(p, f)) for p, f in zip(rows, figures, strict=True)] == [True, True], figures

    assert button("Apply the cure").is_disabled()
    have("Gradient accumulation runs out of memory", "Each rank holds whole gradients", ("4.* MiB", "3.* MiB"))
    have("generate() hangs", "A sharded model gathers its parameters in each forward", ("4", "8"))
    assert card.locator("summary").is_visible()
    for width, theme in ((1280, "Light"), (900, "Dark")):
        desk.show(width, theme)
        assert desk.clipped() == []
        desk.photograph(picture(f"clinic-{width}-{theme.lower()}"))

    # The dashboard names the trouble of any run, and its button cures it.
    desk.start('_ = lab.run(model="gpt2-1m", micro_batch=1, seq_len=32, accumulate=4, sync="last")')
    box = desk.page.locator(".fsdp-diagnosis")
    box.get_by_text("Each rank holds whole gradients").wait_for(timeout=LIMIT_MS)
    desk.photograph(picture("diagnosis"))
    box.locator("button:visible").first.click()
    box.get_by_text("Each rank holds whole gradients").wait_for(state="hidden", timeout=LIMIT_MS)
    assert "every running" in desk.notebook.execute("print(lab.current.spec.strategy.sync, lab.current.state.value)")
    desk.notebook.execute("lab.close()")
