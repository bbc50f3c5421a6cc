"""Slow motion in JupyterLab and chromium, over a lab without processes: pressed, played, looked at."""

import pytest
from playwright.sync_api import Locator

from tests.browser.driver import DashboardPage, model


class SlowPage(DashboardPage):
    """Its buttons, its words, its picture."""

    def press(self, word: str) -> None:
        self.page.locator(".fsdp-slow button.fsdp-slow-button", has_text=word).first.click()

    @property
    def said(self) -> Locator:
        return self.page.locator(".fsdp-slow .fsdp-state-line")

    def wait_said(self, text: str) -> None:
        self.said.get_by_text(text).first.wait_for()

    def wait_phase(self, least: int) -> None:
        """Until that phase, or a later one, is in the picture."""
        self.page.wait_for_function(
            """(least) => { const m = document.querySelector('.fsdp-slow .fsdp-headline')?.textContent.match(/phase (\\d+)/);
                            return m && Number(m[1]) >= least }""", arg=least)  # fmt: skip

    def wait_painted(self) -> None:
        """Until the picture shows all that the kernel has sent."""
        self.page.wait_for_selector(".fsdp-slow .fsdp-live[data-ready] canvas", state="attached")
        self.page.wait_for_function(f"() => {model('slow.bars')}?.get_length() > 0")
        sent = int(self.notebook.execute("print(dashboard._slow._live._seq)"))
        self.page.wait_for_function(
            """(sent) => { const d = document.querySelector('.fsdp-slow .fsdp-live').dataset;
                           return Math.max(Number(d.painted ?? 0), Number(d.ready)) >= sent }""", arg=sent)  # fmt: skip


@pytest.mark.slow
def test_next_play_and_stop(show):
    """A person's path: read what it is, Next, look, Play, Pause, Stop, a run, Next again."""
    desk = show(SlowPage)
    desk.choose("model", "gpt2-1m")
    desk.tab("slow")
    empty = desk.page.locator(".fsdp-slow-empty")
    assert "A training step, phase by phase." in empty.inner_text()

    desk.press("Next")
    desk.wait_reading("slow", "forward · unshard root: all-gather of 180,480 parameters in fp32")
    desk.wait_painted()
    assert not empty.count() and desk.rows("slow.light") == 0
    desk.page.locator(".fsdp-slow .fsdp-plot").click()
    desk.page.keyboard.press("n")
    desk.wait_reading("slow", "forward · compute root")
    desk.wait_rows("slow.light", 2 * 4)
    names = desk.page.evaluate(f"() => [...{model('slow.ranks')}.major_label_overrides.values()]")
    assert names == ["0: 577,024, 2.55 MiB", "1: 577,024, 2.55 MiB"]

    desk.press("Back")
    desk.wait_rows("slow.light", 0)
    desk.wait_said("The ranks do not move backwards: they are still at phase 1")
    desk.page.locator(".fsdp-slow-speed select").select_option("0.5 phase a second")  # a busy page must reach Pause
    desk.press("Play")
    desk.wait_said("playing")
    desk.wait_phase(3)
    desk.press("Pause")
    desk.wait_said("halted")
    desk.press("Stop")
    desk.wait_said("Step 0 is over, its loss was")

    desk.start()
    desk.wait_step(5)
    desk.press("Next")
    desk.wait_said("The run was stopped for this and keeps its parameters")
    desk.wait_state("stopped")
    desk.start()
    desk.wait_said("Slow motion has ended: another run was started.")
    desk.button("Stop").click()
    desk.wait_state("stopped")
