"""The step timeline in JupyterLab and chromium, over a lab without processes: read, hovered, pinned, looked at."""

from __future__ import annotations

from collections.abc import Callable

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
            arg=[condition, arg])  # fmt: skip

    def wait_begun(self) -> None:
        """A new run whose first traced step is drawn."""
        self.start()
        self.wait_shown("s >= n", 4)
        self.card.scroll_into_view_if_needed()
        self.page.wait_for_function(f"() => {model('timeline.spans')}?.get_length() > 0")

    def lefts(self) -> list[float]:
        return list(self.page.evaluate(f"() => [...{model('timeline.spans')}.data.left]"))


@pytest.fixture(scope="module")
def desk(server: JupyterServer, open_notebook: Callable[[], Notebook]) -> TimelinePage:
    page = TimelinePage(open_notebook())
    page.notebook.open(server.write("timeline.ipynb", [CELL.format(ranks=2)]))
    page.notebook.hide_sidebar()
    page.notebook.run_all()
    page.wait_drawn()
    return page


@pytest.fixture
def opened(desk: TimelinePage, watched: Callable[[Notebook], None]) -> TimelinePage:
    """A run that is going."""
    watched(desk.notebook)
    desk.page.set_viewport_size({"width": 1280, "height": 1000})
    desk.notebook.execute("lab.current and lab.current.stop()")
    desk.page.wait_for_function("() => !document.querySelector('button.fsdp-button').disabled")
    desk.wait_begun()
    return desk


@pytest.mark.slow
def test_it_follows_the_newest_traced_step_and_holds_a_pinned_one(opened: TimelinePage):
    """A person's path: watch, pin, look at others, type a number, let go."""
    opened.wait_shown("s > n", opened.shown())
    opened.hold.click()
    opened.wait_reading("timeline", r"^pinned · step [\d,]+: [\d.]+ ms, [\d.]+ ms exposed on rank \d, most for ")
    held, lefts = opened.shown(), opened.lefts()
    opened.wait_step(opened.step() + 25)
    assert opened.shown() == held and opened.lefts() == lefts
    assert opened.hold.inner_text() == "Unpin" and opened.hold.get_attribute("aria-pressed") == "true"

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


@pytest.mark.slow
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
    newest = int(opened.notebook.execute("print(lab.current.events.traced()[-1].number)"))
    opened.wait_shown("s === n", newest)


# The figure's view, wherever it is in the tree of views.
VIEW = """(() => { const all = (v) => [v, ...[...(v.child_views ?? [])].flatMap(all)];
    return Object.values(window.Bokeh.index).flatMap(all).find((v) => v.model.name === 'timeline') })()"""

PLACE = f"""() => {{
    const data = {model("timeline.spans")}.data, i = data.what.findIndex((what) => what === 'all-gather');
    const view = {VIEW}, box = view.el.getBoundingClientRect(), {{ x_scale, y_scale }} = view.frame;
    const says = ['unit', 'link', 'bandwidth'].map((column) => data[column][i]);
    return {{ x: box.x + x_scale.compute((data.left[i] + data.right[i]) / 2),
              y: box.y + y_scale.compute((data.top[i] + data.bottom[i]) / 2), says }} }}"""

TIPS = """(words) => {
    const inside = (r) => [...r.querySelectorAll('*')].flatMap((e) => [e, ...(e.shadowRoot ? inside(e.shadowRoot) : [])]);
    const tips = inside(document).filter((e) => e.classList?.contains('bk-tooltip-content'));
    return tips.some((tip) => words.every((word) => tip.innerText.includes(word))) }"""


@pytest.mark.slow
def test_a_span_says_what_it_was(opened: TimelinePage, picture):
    """Over an all-gather the pointer finds its unit, bytes, bandwidth, dtype and group."""
    opened.hold.click()
    opened.wait_reading("timeline", "^pinned")
    place = opened.page.evaluate(PLACE)
    opened.page.mouse.move(place["x"], place["y"])
    words = ["all-gather", *place["says"], "float32, 2 ranks"]
    assert "GB/s bus" in place["says"][2]
    opened.page.wait_for_function(TIPS, arg=words)
    opened.card.screenshot(path=picture("timeline-hover"))


@pytest.mark.slow
def test_the_axis_stands_still_while_steps_change(opened: TimelinePage):
    end = f"() => {model('timeline.x')}.end"
    seen = {opened.page.evaluate(end)}
    for _ in range(4):
        opened.wait_shown("s > n", opened.shown())
        seen.add(opened.page.evaluate(end))
    assert len(seen) == 1


@pytest.mark.slow
def test_how_it_looks(opened: TimelinePage, picture):
    opened.hold.click()
    opened.wait_reading("timeline", "^pinned")
    for width, theme in ((1280, "Light"), (1920, "Light"), (1920, "Dark"), (1280, "Dark")):
        opened.page.set_viewport_size({"width": width, "height": 1400})
        opened.notebook.theme(f"JupyterLab {theme}")
        assert opened.clipped() == []
        opened.card.scroll_into_view_if_needed()
        opened.card.screenshot(path=picture(f"timeline-{width}-{theme.lower()}"))


@pytest.mark.slow
def test_many_ranks(desk: TimelinePage, watched, picture):
    """Of 64 ranks three are drawn, each by its name."""
    watched(desk.notebook)
    desk.notebook.execute("lab.current and lab.current.stop(); lab.ranks = 64; lab.step_s = 0.3")
    desk.notebook.execute("run = lab.run(lab.spec.replace(world_size=64))")
    desk.page.locator(".fsdp-card-timeline .fsdp-note", has_text="3 of 64 ranks").wait_for()
    desk.notebook.execute("run.stop(); print(len(run.events))")
    labels = desk.page.evaluate(f"() => [...{model('timeline.ranks')}.major_label_overrides.values()]")
    said = desk.card.locator(".fsdp-note").inner_text()
    assert all(rank in said for rank in labels) and len(set(labels)) == 3
    assert desk.clipped() == []
    desk.card.scroll_into_view_if_needed()
    desk.card.screenshot(path=picture("timeline-64-ranks"))
