"""The what-if page in JupyterLab and chromium: choose, read the answer, be refused, search, take what was found. And the
one without a kernel, opened from disk, offline."""

import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page

from fsdp_lab.base.formatting import count, duration, figures, flop_rate, size
from fsdp_lab.cli.main import main
from fsdp_lab.cli.plan import TEACHING
from fsdp_lab.planner.questions import Target, planned
from fsdp_lab.report.what_if_page import Axis, Product, write_what_if
from fsdp_lab.spec.spec import Spec
from tests.browser.jupyter import LIMIT_S, Notebook
from tests.browser.test_report import CONTRASTS

CELL = "from fsdp_lab import WhatIf\nWhatIf()"
ROOT = ".fsdp-what-if"


@pytest.mark.slow
def test_choose_read_be_refused_search_and_take(warm: Notebook, watched: Callable[[Notebook], None]):
    notebook, page = warm, warm.page
    watched(notebook)
    notebook.show(CELL)
    page.set_viewport_size({"width": 1280, "height": 1750})
    at = page.locator(ROOT).locator

    def says(part: str, pattern: str) -> None:
        at(part, has_text=re.compile(pattern)).wait_for()

    def choose(label: str, value: str) -> None:
        select = page.get_by_label(label, exact=True)
        if select.evaluate("(e) => e.tagName") == "SELECT":
            select.select_option(value)
        else:
            select.fill(value)
            select.press("Enter")

    says(".headline", "llama-7b, 6.74 billion parameters · 64 × h100 in 8 hosts")
    choose("GPUs", "4")
    says(".headline", "4 × h100 in one host")
    says(".answer .reading", r"It fits 80\.0 GiB, [\d.]+ GiB to spare\. Bound by")
    says(".curve .strong", "^4: ")
    assert at(".point").count() == 13 and at(".bar.thin").count() == 2  # what was before, and what is sent
    at(".point").nth(3).click()
    says(".headline", "8 × h100 in one host")

    choose("GPUs", "other…")
    page.get_by_label("GPUs: another value").fill("24")
    page.get_by_label("GPUs: another value").press("Enter")
    says(".headline", "24 × h100 in 3 hosts")
    notebook.command("docmanager:save")
    page.reload()  # the kernel has the page's state
    says(".headline", "24 × h100 in 3 hosts")
    notebook.hide_sidebar()

    choose("sequence length", "65536")  # longer than the model takes
    says(".answer .reading", "sequence length: 65536 is over the model's 4096 positions")
    assert at(".field.refused label").all_inner_texts() == ["sequence length"]
    page.locator(f"{ROOT}.stale .memory").wait_for()
    choose("sequence length", "2048")
    says(".headline", "24 × h100")

    page.get_by_role("button", name="Find the best").click()
    at(".strategies tbody tr").nth(1).wait_for()
    at(".strategies button").nth(1).click()
    at('.strategies tr:nth-child(2) button[aria-pressed="true"]').wait_for()
    says(".take pre >> nth=0", r"^fsdp-lab plan --hardware h100 --ranks 24 ")
    says(".take pre >> nth=1", r"^Spec\(\).replace\(.*world_size=24")
    choose("price of a GPU hour", "2.5")
    says(".answer .figures", r"cost ?[\d,.]+")
    says(".take pre >> nth=0", r" --price 2.5$")
    for width, theme in ((1920, "Dark"), (800, "Light")):
        page.set_viewport_size({"width": width, "height": 1750})
        notebook.theme(f"JupyterLab {theme}")
        page.wait_for_function(
            f"(dark) => (document.querySelector('{ROOT}').style.colorScheme === 'dark') === dark", arg=theme == "Dark"
        )
        cut = f"""() => [...document.querySelectorAll('{ROOT} *')].filter((e) => !e.closest('.scroll') && e.clientWidth
            && e.scrollWidth > e.clientWidth + 1 && getComputedStyle(e).overflowX !== 'visible').map((e) => e.className)"""
        assert page.evaluate(cut) == []


# -- without a kernel ------------------------------------------------------------------------------------------------
LISTS = ["--model", "llama-1b,llama-70b", "--hardware", "l40s,h100", "--ranks", "1,8,64,512", "--seq-len", "2048",
         "--sharding", "full_shard,hybrid_shard", "--recompute", "none,full", "--precision", "bf16",
         "--network", "800"]  # fmt: skip
WINDOW = {"width": 1280, "height": 800}


class StaticPage:
    """A page without a kernel, from disk and offline, with whatever it says to the console or asks of anyone."""

    def __init__(self, page: Page, file: Path, hash: str = "") -> None:
        self.page, self.wrong = page, list[str]()
        page.on("console", lambda m: self.wrong.append(f"{m.type}: {m.text}"))
        page.on("pageerror", lambda e: self.wrong.append(f"page error: {e}"))
        page.on("request", lambda r: r.url.startswith((file.as_uri(), "data:,")) or self.wrong.append(r.url[:200]))
        page.set_viewport_size(WINDOW)
        page.goto(file.as_uri() + hash)
        page.wait_for_selector("html[data-ready]")

    def choose(self, label: str, value: str) -> None:
        select = self.page.get_by_label(label, exact=True)
        texts = select.locator("option").all_inner_texts()
        select.select_option(index=[text.split(" – ")[0] for text in texts].index(value))

    def fill(self, label: str, value: str) -> None:
        self.page.get_by_label(label, exact=True).fill(value)
        self.page.keyboard.press("Enter")

    def chosen(self) -> dict[str, str]:
        return dict(
            self.page.evaluate("""() => Object.fromEntries([...document.querySelectorAll('select')].map((s) =>
            [s.labels[0].textContent, s.selectedOptions[0].text]))""")
        )

    def text(self, part: str) -> str:
        return self.page.locator(f".{part}").inner_text()

    def figures(self) -> dict[str, str]:
        names, texts = (self.page.locator(f".answer .figures {tag}").all_inner_texts() for tag in ("dt", "dd"))
        return dict(zip(names, texts, strict=True))

    def legend(self, card: str) -> list[str]:
        return self.page.locator(f".{card} .key").all_inner_texts()


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("page") / "what-if.html"
    assert main(["plan", "--page", str(made), *LISTS]) == 0
    return made


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Callable[..., StaticPage]]:
    """Opens pages in a context without network. What they say or ask for fails the test."""
    context, pages = browser.new_context(offline=True), list[StaticPage]()
    context.set_default_timeout(LIMIT_S * 1e3)

    def make(file: Path, hash: str = "") -> StaticPage:
        pages.append(StaticPage(context.new_page(), file, hash))
        return pages[-1]

    yield make
    assert [page.wrong for page in pages] == [[]] * len(pages)
    context.close()


@pytest.mark.slow
def test_a_page_without_a_kernel_says_what_its_command_says(
    open_page: Callable[..., StaticPage], file: Path, capsys: pytest.CaptureFixture[str]
):
    """Each figure is the planner's, for choices that a reader makes."""
    page = open_page(file)
    for label, value in (("model", "llama-70b"), ("hardware", "h100"), ("ranks", "512"), ("recompute", "full")):
        page.choose(label, value)
    page.fill("tokens to train", "2T")
    page.fill("price of a GPU hour", "2.50")
    command = shlex.split(page.text("take pre"))
    assert command[:2] == ["fsdp-lab", "plan"]
    assert command[-6:] == ["--network", "800.0", "--tokens", "2T", "--price", "2.50"]
    capsys.readouterr()
    assert main([*command[1:], "--json"]) == 0
    (plan,) = json.loads(capsys.readouterr().out)["plans"]

    def between(name: str, write: Callable[[float], str]) -> str:
        return f"{write(plan[name])}\n{write(plan[f'{name}_low'])} to {write(plan[f'{name}_high'])}"

    mfu = " to ".join(
        f"{100 * plan['mfu'] * plan['step_time_s'] / plan[f'step_time_s_{end}']:.1f} %" for end in ("high", "low")
    )
    shown = page.figures()
    bill = [shown.pop(name) for name in ("time of training", "GPU hours", "cost")]
    assert bill[0] == between("training_s", duration) and bill[1:] == [
        between(n, figures) for n in ("gpu_hours", "cost")
    ]
    rates = [float(number.replace(",", "")) for number in re.split("\n| to ", shown.pop("tokens/s"))]
    told = [plan[f"tokens_per_s{end}"] for end in ("", "_low", "_high")]
    assert rates == pytest.approx(told, rel=1e-5), "the page has seven digits of each"
    assert shown == {
        "step": between("step_time_s", duration),
        "tokens/s a rank": count(plan["tokens_per_s_per_rank"]), "FLOPS a rank": flop_rate(1e12 * plan["tflops_per_rank"]),
        "MFU": f"{100 * plan['mfu']:.1f} %\n{mfu}", "HFU": f"{100 * plan['hfu']:.1f} %",
        "exposed communication": f"{100 * plan['exposed_comm_s'] / plan['step_time_s']:.1f} %",
    }  # fmt: skip
    head = "llama-70b, 70.6 billion parameters · 512 × h100 in 64 hosts at 800 Gb/s each"
    assert page.text("headline").startswith(head)
    said = f"It fits 80.0 GiB, {size(plan['margin_bytes'])} to spare. Bound by {plan['binding']}."
    assert page.text("answer .reading") == said
    memory, step = page.legend("memory"), page.legend("step")
    assert f"activations {size(plan['memory_at_peak_bytes']['activations'])}" in memory
    assert f"sharded parameters {size(plan['memory_at_peak_bytes']['parameters'])}" in memory
    assert f"computing {duration(plan['computing_s'])}" in step and f"optimizer {duration(plan['optimizer_s'])}" in step
    assert f"all-gather {duration(plan['comm_s_per_step']['all_gather'])}" in step
    assert "network 800" not in page.text("assumed") and "hosts 64, of 8 devices each" in page.text("assumed")
    rows = page.page.locator(".scaling tbody th").all_text_contents()
    assert rows == ["1", "8", "64", "512"] and page.page.locator(".scaling .cross").count() == 2
    assert re.search(r"Predicted by fsdp_lab \S+ on \S+ \S+ UTC, 64 combinations, with fsdp-lab plan --page what-if.html "
                     "--hardware l40s,h100 --ranks 1,8,64,512", page.page.locator("footer").inner_text())  # fmt: skip


def test_a_refused_combination_says_why_and_has_a_way_out(open_page: Callable[..., StaticPage], file: Path):
    page = open_page(file)
    page.choose("sharding", "hybrid_shard")
    assert page.text("verdict") == "refused"
    assert page.text("answer .reading") == (
        "sharding: hybrid_shard needs a shard size between 1 and world_size that divides it, and 1 ranks have "
        "none; use 4 ranks, or full_shard."
    )
    assert page.figures() == {} and not page.page.locator(".pictures").is_visible()
    ways = page.page.locator(".ways button")
    assert ways.all_inner_texts() == ["ranks 8", "sharding full_shard"]
    ways.first.click()
    assert page.chosen() == {"model": "llama-1b", "hardware": "l40s", "ranks": "8", "sharding": "hybrid_shard",
                             "recompute": "none"}  # fmt: skip
    assert page.text("verdict") == "fits" and page.page.locator(".pictures").is_visible()
    page.choose("model", "llama-70b")
    assert page.text("verdict") == "does not fit" and page.text("ways").startswith("What fits:")
    assert "llama-70b – does not fit" not in page.chosen().values()  # of what is chosen, the badge says it
    page.page.locator(".ways button", has_text="model llama-1b").click()
    assert page.text("verdict") == "fits" and not page.page.locator(".ways").is_visible()


def test_a_link_opens_what_it_was_made_of(open_page: Callable[..., StaticPage], file: Path):
    page = open_page(file)
    page.choose("model", "llama-70b")
    page.choose("ranks", "64")
    link = page.page.locator(".linked a").evaluate("(e) => e.href")
    assert page.page.url == link
    other = open_page(file, link.removeprefix(file.as_uri()))
    assert other.chosen() == page.chosen() and other.text("headline") == page.text("headline")
    page.page.evaluate("location.hash = '#model=llama-1b&ranks=8'")  # as by a link on another page, or the button back
    page.page.locator(".headline", has_text="llama-1b").wait_for()
    strange = open_page(file, "#model=llama-9t&ranks=64&colour=red")
    assert strange.text("notice") == "The link asks for model llama-9t, colour red, which this page does not have."
    assert strange.chosen()["ranks"] == "64"


def test_it_is_used_by_keyboard_and_by_pressing_the_curve(open_page: Callable[..., StaticPage], file: Path):
    page = open_page(file)
    page.page.keyboard.press("Tab")
    assert page.page.evaluate("document.activeElement.labels[0].textContent") == "model"
    page.page.keyboard.press("ArrowDown")
    page.page.locator(".headline", has_text="llama-70b").wait_for()
    page.page.locator(".scaling .point").nth(3).click()
    assert page.chosen()["ranks"] == "512"
    assert page.page.locator(".scaling .strong").text_content().startswith("512: ")


@pytest.mark.slow
def test_the_page_for_teaching(open_page: Callable[..., StaticPage], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What `fsdp-lab plan --page FILE` makes by itself, of fewer values: the whole takes minutes of a core."""
    few = {"model": "llama-1b,llama-7b", "ranks": "64,512", "hardware": "l40s,h100", "sharding": "full_shard,no_shard"}
    for name, values in {**few, "micro_batch": "1,2"}.items():
        monkeypatch.setitem(TEACHING, name, values)
    assert main(["plan", "--page", str(tmp_path / "teaching.html")]) == 0
    page = open_page(tmp_path / "teaching.html")
    assert page.text("headline").startswith("llama-7b, 6.74 billion parameters · 64 × h100 in 8 hosts")
    assert set(page.chosen()) == {"model", "hardware", "ranks", "sharding", "recompute", "micro batch"}


@pytest.mark.slow
def test_it_is_readable(open_page: Callable[..., StaticPage], file: Path):
    """Nothing is wider than the window, inputs have labels, and text stands out from its ground (WCAG 2.1: 4.5 to 1)."""
    for hash_ in ("#model=llama-70b&hardware=h100", "#sharding=hybrid_shard"):
        page = open_page(file, hash_).page
        page.locator(".scaling summary").click()
        assert page.evaluate("() => [...document.querySelectorAll('select')].every((s) => s.labels.length === 1)")
        for width, scheme in ((1280, "dark"), (390, "light")):
            page.set_viewport_size({"width": width, "height": 844})
            page.wait_for_function("() => document.documentElement.scrollWidth <= innerWidth")
            page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
            assert [(text, ratio) for text, ratio in page.evaluate(CONTRASTS) if ratio < 4.5] == [], (width, scheme)


def test_uncertainty_is_said_and_drawn(open_page: Callable[..., StaticPage], tmp_path: Path):
    axes = {"model": ("llama-7b",), "hardware": ("h100",), "world_size": (8, 64)}
    product = Product(axes=[
        Axis(name=name, label=name, option=f"--{name}", values=values, words=tuple(map(str, values)))
        for name, values in axes.items()
    ])  # fmt: skip

    def predicted(values: Mapping[str, Any]) -> dict[str, Any]:
        spec = Spec(world_size=values["world_size"]).replace(model="llama-7b", precision="bf16", seq_len=2048)
        return {**planned(spec, Target(hardware="h100")).to_dict(), "fits_probability": 0.93}

    page, plan = open_page(write_what_if(tmp_path / "page.html", product, predicted)), predicted({"world_size": 8})
    assert page.text("verdict") == "fits: 93 %" and page.page.locator(".error").count() == 2
    between = f"{duration(plan['step_time_s_low'])} to {duration(plan['step_time_s_high'])}"
    assert f"A step takes {between}, 8 times in 10." in page.text("step")
    heights = "() => [...document.querySelectorAll('.band')].map((band) => band.getBBox().height)"
    wide, narrow = page.page.evaluate(heights)
    assert wide > narrow > 5
