"""A report is opened from disk, offline: its numbers are read back, and it is looked at in both colour schemes."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page

from fsdp_lab import Comparison, write_report
from fsdp_lab.runs.comparison import finite, ratio_words
from tests.browser.jupyter import LIMIT_S
from tests.lab.events import SPEC
from tests.lab.past import past
from tests.report.runs import HOSTILE, sweep

WINDOW = {"width": 1360, "height": 900}

CELLS = """(id) => [...document.querySelectorAll(`#${id} tr`)].map((r) =>
  [...r.children].map((c) => c.textContent.replace(/\\s+/g, ' ').trim()))"""
COLUMN = """([plot, column]) => { const id = JSON.parse(document.getElementById('fsdp-lab-plots').textContent).roots[plot];
  const model = Bokeh.documents.flatMap((d) => d.roots()).find((r) => r.id === id);
  return model.renderers.map((r) => r.data_source.data[column]).filter(Boolean).map((c) => Array.from(c)) }"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(tmp_path_factory.mktemp("report") / "report.html", sweep(), title=f"A report {HOSTILE}")


@pytest.fixture(scope="module")
def drawn(browser: Browser, file: Path) -> Iterator[tuple[Page, list[str]]]:
    """The report, and whatever it says to the console or asks of anyone."""
    context = browser.new_context(offline=True)
    page, wrong = context.new_page(), list[str]()
    page.on("console", lambda m: m.type in ("error", "warning") and wrong.append(f"{m.type}: {m.text}"))
    page.on("pageerror", lambda e: wrong.append(f"page error: {e}"))
    page.on("request", lambda r: r.url.startswith((file.as_uri(), "data:")) or wrong.append(f"request: {r.url[:200]}"))
    page.set_viewport_size(WINDOW)
    page.goto(file.as_uri())
    page.wait_for_selector("html[data-ready]", timeout=LIMIT_S * 1e3)
    yield page, wrong
    context.close()


@pytest.fixture
def opened(drawn: tuple[Page, list[str]]) -> Iterator[Page]:
    """The report in a wide window on a light screen. What it says or asks for fails the test."""
    page, wrong = drawn
    page.emulate_media(color_scheme="light", media="screen")
    page.set_viewport_size(WINDOW)
    yield page
    assert wrong == []


@pytest.mark.slow
def test_its_numbers_are_those_of_the_comparison_and_text_from_runs_does_nothing(opened: Page):
    assert opened.title() == f"A report {HOSTILE}" and opened.locator("h1").inner_text() == f"A report {HOSTILE}"
    assert opened.evaluate("window.hacked") is None and opened.locator("main img").count() == 0
    compared = Comparison.of(sweep())
    for name, table in (("comparison", compared.table()), ("memory", compared.memory_table())):
        head, *rows = opened.evaluate(CELLS, name)
        assert head == ["run", *table.columns[1:]] and rows == [list(row) for row in table.rows]
    kept = opened.evaluate("JSON.parse(document.getElementById('fsdp-lab-records').textContent)")
    assert kept["records"] == finite(compared.records())


@pytest.mark.slow
def test_its_plots_draw_what_was_measured(opened: Page):
    compared, runs = Comparison.of(sweep()), sweep()
    losses = [[e.mean_loss for e in run.events.since()[0] if e.rank == 0] for run in runs[:4]]  # type: ignore[union-attr]
    assert opened.evaluate(COLUMN, ["loss", "value"]) == losses
    ratios = opened.locator("#plot-time_ratio .end").all_inner_texts()
    assert ratios == [ratio_words(row.time_ratio) for row in compared.rows if row.time_ratio]
    assert sum(len(lefts) for lefts in opened.evaluate(COLUMN, ["timeline0", "left"])) > 100
    timeline = opened.locator("figure:has(#plot-timeline0)")
    timeline.get_by_role("searchbox", name="Find spans").fill("Forward h.1 rank 1")  # not h.10 and h.11
    timeline.get_by_text(re.compile(r"^1 of \d+ spans, ([\d.]+ ms) together: rank 1 \1$")).wait_for()
    painted = """() => [...document.querySelectorAll('.plot')].map((plot) => plot.getBoundingClientRect().height > 90
        && !!(plot.querySelector('.track .swatch') ?? plot.firstElementChild?.shadowRoot)
        && plot.getAttribute('aria-label').length > 20)"""
    assert opened.evaluate(painted) == [True] * 12
    rows = "".join(f"{step},{loss}\n" for step, loss in enumerate(losses[0]))
    for plot, kind, begins in (
        ("memory", "PNG", "\x89PNG"),  # of bars
        ("loss", "CSV", f"# A lab no_shard: loss, mean of all ranks against optimizer step\nstep,value\n{rows}\n"),
        ("memory", "CSV", "# Memory of the fullest rank, at its peak\nrun,part,bytes\nA lab no_shard,sharded"),
    ):
        with opened.expect_download() as saved:
            opened.locator(f"figure:has(#plot-{plot}) .tools button", has_text=kind).click()
        assert saved.value.path().read_text("latin-1").startswith(begins)


@pytest.mark.slow
def test_both_colour_schemes_and_paper_and_a_narrow_window(opened: Page):
    """Text and its ground are far enough apart (WCAG 2.1: 4.5 to 1) in both, plots follow, and paper is light. Nothing is
    wider than the window but tables, which scroll in their card."""
    seen: dict[str, Any] = {}
    for scheme, media in (("light", "screen"), ("dark", "screen"), ("dark", "print"), ("light", "screen")):
        opened.emulate_media(color_scheme=scheme, media=media)  # type: ignore[arg-type]
        wanted = "dark" if (scheme, media) == ("dark", "screen") else "light"
        opened.wait_for_function("(wanted) => document.documentElement.dataset.painted === wanted", arg=wanted)
        low = [(text, ratio) for text, ratio in opened.evaluate(CONTRASTS) if ratio < 4.5]
        assert not low, (scheme, media, low[:5])
        seen[f"{scheme} {media}"] = opened.evaluate(INK)
    assert seen["light screen"] == seen["dark print"] != seen["dark screen"]
    opened.set_viewport_size({"width": 420, "height": 900})
    opened.wait_for_function("() => document.documentElement.scrollWidth <= innerWidth")


INK = "[...Bokeh.documents[0].all_models].find((m) => m.type === 'LinearAxis').axis_label_text_color"
CONTRASTS = """() => {
  const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
  const linear = (v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  const light = ([r, g, b]) => [r, g, b].map((v) => linear(v / 255))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = (e) => { const c = rgb(getComputedStyle(e).backgroundColor);
    return (c.length < 4 || c[3] > 0.9) ? c : e.parentElement ? ground(e.parentElement) : [255, 255, 255]; };
  return [...document.querySelectorAll('main *')]
    .filter((e) => [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim()) && e.checkVisibility())
    .map((e) => { const a = light(rgb(getComputedStyle(e).color)), b = light(ground(e));
      return [e.textContent.slice(0, 40), (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05)]; });
}"""


@pytest.mark.slow
def test_more_runs_than_colours_are_drawn(browser: Browser, tmp_path: Path):
    runs = [past(str(i), SPEC.replace(forward_prefetch=i), steps=6) for i in range(10)]
    page = browser.new_page()
    page.goto(write_report(tmp_path / "many.html", runs).as_uri())
    page.wait_for_selector("html[data-ready]", timeout=LIMIT_S * 1e3)
    assert page.locator("#comparison tbody tr").count() == len(page.evaluate(COLUMN, ["loss", "value"])) == 10
    page.close()
