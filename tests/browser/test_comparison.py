"""Pins, the comparison's table and its form in JupyterLab and chromium, over a lab without processes."""

import re

import pytest
from playwright.sync_api import Locator, expect

from tests.browser.driver import DashboardPage, model


class ComparisonPage(DashboardPage):
    """Its card and its form."""

    @property
    def card(self) -> Locator:
        return self.page.locator(".fsdp-card-comparison")

    def row(self, label: str) -> Locator:
        button = self.page.locator(".fsdp-press-baseline", has_text=re.compile(rf"^{label}$"))
        return self.card.locator("tbody tr", has=button)

    def cell(self, label: str, column: int) -> str:
        return self.row(label).locator("td").nth(column).inner_text().strip()

    def pin(self, label: str) -> None:
        self.button(f"Keep as {label}").click()
        self.row(label).wait_for()

    def chip(self, field: str, value: str) -> Locator:
        row = self.page.locator(".fsdp-sweep-row", has=self.page.get_by_text(field, exact=True))
        return row.locator("button", has_text=re.compile(rf"^\s*{re.escape(value)}\s*$"))

    def ask(self, words: str) -> Locator:
        return self.page.locator(".fsdp-sweep-button", has_text=words)

    def visible_overlays(self, plot: str) -> list[str]:
        return list(
            self.page.evaluate(
                """(plot) => window.Bokeh.documents.flatMap((d) => [...d.all_models])
                    .filter((m) => m.name?.startsWith(`${plot}.overlay.`) && m.visible).map((m) => m.name)""",
                plot,
            )
        )


@pytest.fixture
def opened(show) -> ComparisonPage:
    """A run that is going."""
    desk = show(ComparisonPage)
    desk.start()
    desk.wait_step(12)
    return desk


@pytest.mark.slow
def test_pin_toggle_pin_compare_unpin_load_the_page_again_and_compare_by_the_form(opened: ComparisonPage):
    opened.tab("compare")
    assert not opened.card.is_visible()
    opened.pin("A")
    assert opened.card.is_visible() and opened.cell("A", 2) == "baseline"
    opened.page.wait_for_function(f"() => {model('overlay.0')}.get_length() > 10")
    assert opened.visible_overlays("loss") == ["loss.overlay.0"]
    opened.choose("sharding", "shard_grad_op")
    opened.wait_note("sharding", r"applied at step \d+")
    opened.page.locator(".fsdp-difference", has_text=re.compile(r"A → shard_grad_op: time (≈ )?×[\d.]+ \(")).wait_for()
    opened.pin("B")
    opened.card.locator("th", has_text="time / B").wait_for()  # what is kept last is compared with
    assert opened.cell("B", 1).startswith("shard_grad_op") and re.match("(≈ )?×", opened.cell("A", 4))
    opened.row("A").locator(".fsdp-press-baseline").click()
    opened.card.locator("th", has_text="time / A").wait_for()
    assert "not comparable" in opened.cell("B", 2)  # of the same run: no step in common
    opened.row("B").locator(".fsdp-press-baseline").click()
    opened.card.locator("th", has_text="time / B").wait_for()
    opened.row("A").locator(".fsdp-press-unpin").click()
    opened.row("A").wait_for(state="detached")
    assert opened.visible_overlays("loss") == ["loss.overlay.1"]
    last = opened.stop()
    opened.notebook.command("docmanager:save")
    opened.page.reload()
    opened.wait_drawn()
    opened.row("B").wait_for()
    assert opened.visible_overlays("loss") == ["loss.overlay.1"]
    opened.tab("loss")
    opened.wait_steps_drawn(last)
    assert opened.step() == last, "the whole history is back"
    opened.tab("compare")
    opened.start()  # and it is alive: another run begins at step 0
    opened.row("B").locator(".fsdp-press-unpin").click()
    opened.wait_step(12)
    compare_by_its_form(opened)


def compare_by_its_form(opened: ComparisonPage):
    """What can run is said before, its progress meanwhile; the run that was suspended for it goes on afterwards."""
    for field, value in (("sharding", "no_shard"), ("backend", "ddp")):
        opened.chip(field, value).click()
    said = opened.page.locator(".fsdp-sweep-said:visible").first
    opened.page.locator(".fsdp-sweep-said", has_text="4 combinations: 3 can run, 1 cannot").wait_for()
    assert "DDP keeps a whole replica" in said.inner_text()
    opened.page.locator(".fsdp-number", has_text="steps").locator("input").fill("24")
    scene = opened.page.locator(".fsdp-live").first.get_attribute("data-scene")
    # It waits in its second round, until all has been read that is only there meanwhile.
    opened.notebook.execute(
        "import threading\ngo_on = threading.Event()\nlab.before_step = lambda run: run.step < 8 or go_on.wait(300)"
    )
    opened.ask("Start comparison").click()
    opened.wait_state("comparing")
    opened.page.locator(".fsdp-sweep-said", has_text=re.compile(r"of 72 steps · about .+ left · now \d")).wait_for()
    assert opened.field("sharding").locator("select").is_disabled()
    opened.card.locator("tbody tr").nth(2).wait_for()
    assert opened.page.locator(".fsdp-live").first.get_attribute("data-scene") == scene
    opened.notebook.execute("go_on.set()")
    opened.wait_state("running")
    opened.page.locator(".fsdp-card-comparison .fsdp-reading", has_text="The fastest that fits is").wait_for()
    opened.card.get_by_text(re.compile(r"Refused, so not in the table: 4 ddp shard_grad_op \(")).first.wait_for()
    assert opened.field("sharding").locator("select").is_enabled()
    shown = "r = dashboard.comparison['2']; print(f'{r.figures.tokens_per_s.median:,.0f} ×{r.memory_ratio:.2f}')"
    for column, text in zip((5, 9), opened.notebook.execute(shown).split(), strict=True):
        expect(opened.row("2").locator("td").nth(column)).to_have_text(text)
    opened.show(1920, "Light")
    assert opened.clipped() == []
