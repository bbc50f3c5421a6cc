"""The step timeline in JupyterLab and chromium, over a lab without processes: read, hovered, pinned, looked at."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import Locator

from tests.browser.driver import DashboardPage, model
from tests.browser.jupyter import JupyterServer, Notebook

CELL = """\
from tests.dashboard.fake_lab import FakeLab
from fsdp_lab.dashboard import Dashboard
lab = FakeLab({ranks}, step_s=0.03)
dashboard = Dashboard(lab)
dashboard"""


class TimelinePage(DashboardPage):
    """Its card: what it says, and which step it holds."""

    @property
    def card(self) -> Locator:
        return self.page.locator(".fsdp-card-timeline")

    @property
    def hold(self) -> Locator:
        return self.card.locator(".fsdp-hold")

    def shown(self) -> int:
        return int(self.reading("timeline").split("step ")[1].split(":")[0].replace(",", ""))

    def wait_shown(self, condition: str, arg: int) -> None:
        """Until the shown step `s` is so beside `n`, in JavaScript."""
        self.page.wait_for_function(
            """([condition, n]) => {
              const said = document.querySelector('.fsdp-card-timeline .fsdp-reading').innerText.match(/step ([\\d,]+):/);
              return said && Function('s', 'n', `return ${condition}`)(Number(said[1].replaceAll(',', '')), n) }""",
            arg=[condition, arg], timeout=30_000)  # fmt: skip

    def wait_begun(self) -> None:
        """A new run whose first traced step is drawn."""
        self.start()
        self.wait_shown("s >= n", 4)
        self.card.scroll_into_view_if_needed()
        self.page.wait_for_function(f"() => {model('timeline.spans')}?.get_length() > 0")

    def lefts(self) -> list[float]:
        return list(self.page.evaluate(f"() => [...{model('timeline.spans')}.data.left]"))


@pytest.fixture(scope="module")
def desk(server: JupyterServer, open_notebook: Callable[[], Notebook]) -> Iterator[TimelinePage]:
    page = TimelinePage(open_notebook())
    page.notebook.open(server.write("timeline.ipynb", [CELL.format(ranks=2)]))
    page.notebook.hide_sidebar()
    page.notebook.run_all()
    page.wait_drawn()
    yield page
    server.end_kernels()


@pytest.fixture
def opened(desk: TimelinePage, watched: Callable[[Notebook], None]) -> TimelinePage:
    """A run that is going."""
    watched(desk.notebook)
    desk.page.set_viewport_size({"width": 1280, "height": 1000})
    desk.notebook.execute("lab.current and lab.current.stop()")
    desk.page.wait_for_function("() => !document.querySelector('button.fsdp-button').disabled", timeout=10_000)
    desk.wait_begun()
    return desk


def test_it_follows_the_newest_traced_step_and_holds_a_pinned_one(opened: TimelinePage):
    """A person's path: watch, pin, look at others, type a number, let go."""
    opened.wait_shown("s > n", opened.shown())
    opened.hold.click()
    opened.wait_reading("timeline", r"^pinned · step [\d,]+: \d+ ms, [\d.]+ ms exposed on rank \d, most for ")
    held, lefts = opened.shown(), opened.lefts()
    opened.wait_step(opened.step() + 25)
    assert opened.shown() == held and opened.lefts() == lefts
    assert opened.hold.inner_text() == "Let go" and opened.hold.get_attribute("aria-pressed") == "true"

    opened.card.get_by_role("button", name="before this one").click()
    opened.wait_shown("s === n", held - 5)
    opened.card.get_by_role("button", name="after this one").click()
    opened.wait_shown("s === n", held)
    number = opened.card.get_by_role("spinbutton", name="step")
    number.fill("6")
    number.press("Enter")
    opened.wait_shown("s === n", 4)  # the nearest that was traced
    assert number.input_value() == "4"
    assert opened.lefts() != lefts

    opened.hold.click()
    opened.wait_shown("s > n", held)
    assert "pinned" not in opened.reading("timeline")


def test_it_can_be_pinned_while_a_cell_is_busy_and_after_the_run(opened: TimelinePage):
    opened.notebook.write_and_run("import time\nfor _ in range(6000): time.sleep(0.1)", wait=False)
    busy = opened.page.locator(".jp-InputPrompt", has_text="[*]:")
    busy.wait_for()
    opened.hold.click()
    opened.wait_reading("timeline", "^pinned · step")
    assert busy.count()  # the cell still runs
    opened.notebook.command("notebook:interrupt-kernel")
    busy.wait_for(state="detached")
    opened.button("Stop").click()
    opened.wait_state("stopped")
    opened.hold.click()
    newest = int(opened.notebook.execute("print(lab.current.events.traced()[-1][0].step)"))
    opened.wait_shown("s === n", newest)


def test_a_span_says_what_it_was(opened: TimelinePage):
    """Over an all-gather the pointer finds its unit, bytes and bandwidth."""
    opened.hold.click()
    opened.wait_reading("timeline", "^pinned")
    place = opened.page.evaluate(f"""() => {{
      const source = {model("timeline.spans")}, d = source.data, i = d.what.findIndex((w) => w === 'all-gather');
      const view = Object.values(window.Bokeh.index).map(v => v.model.name === 'timeline' ? v : null).find(Boolean)
        ?? [...Object.values(window.Bokeh.index)].flatMap(v => v.child_views ?? []).find(v => v.model.name === 'timeline');
      const box = view.el.getBoundingClientRect(), f = view.frame;
      return {{ x: box.x + f.x_scale.compute((d.left[i] + d.right[i]) / 2), y: box.y + f.y_scale.compute((d.top[i] + d.bottom[i]) / 2),
                unit: d.unit[i], link: d.link[i], bandwidth: d.bandwidth[i] }} }}""")
    opened.page.mouse.move(place["x"], place["y"])
    opened.page.wait_for_function(
        """(words) => {
          const all = (root) => [...root.querySelectorAll('*')].flatMap((e) => [e, ...(e.shadowRoot ? all(e.shadowRoot) : [])]);
          const tips = all(document).filter((e) => e.classList?.contains('bk-tooltip-content')).map((e) => e.innerText ?? '');
          return tips.some((tip) => words.every((word) => tip.includes(word))) }""",
        arg=["all-gather", place["unit"], place["link"], place["bandwidth"], "float32, 2 ranks"], timeout=10_000)  # fmt: skip


def test_the_axis_stands_still_while_steps_change(opened: TimelinePage):
    end = f"() => {model('timeline.x')}.end"
    seen = {opened.page.evaluate(end)}
    for _ in range(4):
        opened.wait_shown("s > n", opened.shown())
        seen.add(opened.page.evaluate(end))
    assert len(seen) == 1


@pytest.mark.parametrize("width", [1280, 1920])
@pytest.mark.parametrize("theme", ["Light", "Dark"])
def test_how_it_looks(opened: TimelinePage, picture, width: int, theme: str):
    opened.page.set_viewport_size({"width": width, "height": 1400})
    opened.notebook.theme(f"JupyterLab {theme}")
    opened.hold.click()
    opened.wait_reading("timeline", "^pinned")
    assert opened.clipped() == []
    opened.card.scroll_into_view_if_needed()
    opened.card.screenshot(path=picture(f"timeline-{width}-{theme.lower()}"))


@pytest.mark.parametrize("ranks", [8, 64])
def test_many_ranks(server: JupyterServer, open_notebook: Callable[[], Notebook], watched, picture, ranks: int):
    page = TimelinePage(open_notebook())
    watched(page.notebook)
    page.notebook.open(server.write(f"timeline_{ranks}.ipynb", [CELL.format(ranks=ranks).replace("0.03", "0.3")]))
    page.notebook.hide_sidebar()
    page.notebook.run_all()
    page.wait_drawn()
    page.wait_begun()
    if ranks == 64:
        assert "3 of 64 ranks" in page.card.locator(".fsdp-note").inner_text()
    for theme in ("Light", "Dark"):
        page.notebook.theme(f"JupyterLab {theme}")
        assert page.clipped() == []
        page.card.screenshot(path=picture(f"timeline-{ranks}-ranks-{theme.lower()}"))
    server.end_kernels()
