"""A dashboard in a page, as a person uses it: press, choose, read."""

import re
from pathlib import Path

from playwright.sync_api import Locator, Page, TimeoutError as PageTimeout

from fsdp_lab.dashboard.panels.axis import STEP_LIMIT
from tests.browser.jupyter import Notebook

# Words are read as `textContent`: JupyterLab leaves cells that are far out of sight unrendered, and their `innerText` is "".
STEP = """() => { const m = document.querySelector('.fsdp-headline')?.textContent.match(/^step ([\\d,]+)/);
                  return m ? Number(m[1].replaceAll(',', '')) : -1 }"""


def model(name: str) -> str:
    """The newest Bokeh model of this name, in JavaScript; undefined where there is none."""
    return f"window.Bokeh.documents.flatMap((d) => [...d.all_models]).findLast((m) => m.name === '{name}')"


class DashboardPage:
    """The dashboard of an open notebook. Waits for what is to be seen, and never for time to pass."""

    def __init__(self, notebook: Notebook) -> None:
        self.notebook = notebook
        self.page: Page = notebook.page

    # -- press and choose -----------------------------------------------------------------------------------------

    def button(self, word: str) -> Locator:
        return self.page.locator("button.fsdp-button", has_text=re.compile(rf"^\s*{word}\s*$"))

    def start(self, button: str = "Start( over)?") -> None:
        """Presses Start, or Continue; what the page shows afterwards is of the new run."""
        live = self.page.locator(".fsdp-live").first
        # JupyterLab may just have moved the output, as when the window changes: then the former run is drawn once more.
        self.page.wait_for_function("() => document.querySelector('.fsdp-live')?.dataset.ready")
        former, blank = live.get_attribute("data-scene"), self.step() < 0
        self.button(button).first.click()
        self.page.wait_for_function(
            f"""([former, blank]) => document.querySelector('.fsdp-live').dataset.scene !== former
                                     || (blank && ({STEP})() >= 0)""",
            arg=[former, blank],
        )

    def field(self, label: str) -> Locator:
        """The control with this label, its note included."""
        return self.page.locator(".fsdp-field", has=self.page.get_by_text(label, exact=True))

    def tab(self, name: str) -> None:
        self.page.locator(f".fsdp-tab-button[data-tab={name}]").first.click()

    def choose(self, label: str, value: str) -> None:
        field = self.field(label)
        if not field.is_visible():
            self.tab("settings")
        if field.locator("select").count():
            field.locator("select").select_option(value)
        else:
            field.locator("input").fill(value)
            field.locator("input").press("Enter")

    # -- read -----------------------------------------------------------------------------------------------------

    def note(self, label: str) -> str:
        return (self.field(label).locator(".fsdp-note-line").text_content() or "").strip()

    def state(self) -> str:
        return self.page.locator(".fsdp-state").first.text_content() or ""

    def step(self) -> int:
        """The last step that the page shows; -1 before there is one."""
        return int(self.page.evaluate(STEP))

    def reading(self, card: str) -> str:
        return self.page.locator(f".fsdp-card-{card} .fsdp-reading").first.text_content() or ""

    def rows(self, source: str) -> int:
        return int(self.page.evaluate(f"() => {model(source)}?.get_length() ?? 0"))

    def refusals(self) -> str:
        return " ".join(self.page.locator(".fsdp-refusal-line:visible").all_text_contents())

    # -- wait -----------------------------------------------------------------------------------------------------

    def wait_drawn(self) -> None:
        drawn = self.page.locator(".fsdp-live[data-ready] .fsdp-card canvas").first
        try:
            drawn.wait_for(state="attached")
        except PageTimeout as e:
            raise AssertionError(f"not drawn: {self.notebook.outputs()} {self.notebook.wrong}") from e

    def wait_step(self, at_least: int) -> None:
        self.page.wait_for_function(f"(n) => ({STEP})() >= n", arg=at_least)

    def wait_steps_more(self, more: int) -> None:
        self.wait_step(max(0, self.step()) + more)

    def wait_note(self, label: str, pattern: str) -> str:
        """Until the note beside a control matches; returns it."""
        self.field(label).locator(".fsdp-note-line").get_by_text(re.compile(pattern)).wait_for()
        return self.note(label)

    def wait_state(self, word: str) -> None:
        self.page.locator(".fsdp-state", has_text=word).first.wait_for()

    def stop(self) -> int:
        """Presses Stop, and waits until the run is over and drawn: the state is shown as soon as it is known, the last steps
        with the next tick. Returns the last step."""
        self.button("Stop").click()
        self.wait_state("stopped")
        last = int(self.notebook.execute("print(lab.current.events.steps()[-1].number)"))
        self.page.wait_for_function(f"(n) => ({STEP})() === n", arg=last)
        return last

    def wait_refusal(self, text: str) -> None:
        """Until a line beside the controls says why something was refused."""
        self.page.locator(".fsdp-refusal-line:visible", has_text=text).first.wait_for()

    def wait_rows(self, source: str, count: int) -> None:
        self.page.wait_for_function(f"(n) => ({model(source)}?.get_length() ?? 0) === n", arg=count)

    def wait_steps_drawn(self, last: int) -> None:
        """Until the loss of every step is in its plot; on a slow machine a run may have more than a plot keeps."""
        self.wait_rows("loss.steps", min(last + 1, STEP_LIMIT))

    def wait_reading(self, card: str, pattern: str) -> str:
        self.page.locator(f".fsdp-card-{card} .fsdp-reading", has_text=re.compile(pattern)).first.wait_for()
        return self.reading(card)

    def wait_new_reading(self, card: str, old: str) -> str:
        self.page.wait_for_function(
            "([card, old]) => document.querySelector(`.fsdp-card-${card} .fsdp-reading`).textContent !== old",
            arg=[card, old],
        )
        return self.reading(card)

    # -- picture --------------------------------------------------------------------------------------------------

    def show(self, width: int, theme: str) -> None:
        """A window of this width, high enough for the whole dashboard, in a theme, painted."""
        self.page.set_viewport_size({"width": width, "height": 1900 if width < 1500 else 1600})
        self.notebook.theme(f"JupyterLab {theme}")
        painted = int(self.page.locator(".fsdp-live").first.get_attribute("data-painted") or 0)
        if self.state() == "running":
            self.page.wait_for_function(  # or the run has ended meanwhile
                """(n) => Number(document.querySelector('.fsdp-live').dataset.painted) > n + 4
                          || document.querySelector('.fsdp-state').textContent !== 'running'""",
                arg=painted,
            )

    def photograph(self, path: Path) -> None:
        """The dashboard alone, with a margin of the page around it."""
        self.page.locator(".fsdp-lab").first.evaluate("(e) => e.scrollIntoView()")
        box = self.page.locator(".fsdp-lab").first.bounding_box()
        height = min(box["height"] + 16, self.page.viewport_size["height"] - box["y"] - 30)  # type: ignore[index]
        clip = {"x": box["x"] - 8, "y": box["y"] - 1, "width": box["width"] + 16, "height": height}
        self.page.screenshot(path=path, clip=clip)  # type: ignore[arg-type]

    def clipped(self) -> list[str]:
        """Texts that do not fit their boxes, and boxes that scroll: none is what we want."""
        return list(
            self.page.evaluate("""() => {
          const wrong = [];
          for (const e of document.querySelectorAll('.fsdp-lab *')) {
            const style = getComputedStyle(e);
            const scrolls = ['auto', 'scroll'].includes(style.overflowX) || ['auto', 'scroll'].includes(style.overflowY);
            const over = e.scrollWidth > e.clientWidth + 1 || e.scrollHeight > e.clientHeight + 1;
            if (e.clientWidth && scrolls && over) wrong.push('scrolls: ' + e.className);
            const whole = e.title === e.textContent || e.scrollWidth <= e.clientWidth + 1;
            if (e.clientWidth && style.overflowX === 'hidden' && !whole)
              wrong.push('cut: ' + e.className + ' ' + e.textContent.slice(0, 40));
          }
          const box = document.querySelector('.fsdp-lab').getBoundingClientRect();
          for (const e of document.querySelectorAll('.fsdp-lab .fsdp-card, .fsdp-lab .fsdp-field'))
            if (e.getBoundingClientRect().right > box.right + 1) wrong.push('juts out: ' + e.className);
          return wrong }""")
        )
