"""The read-only live page: a run of a learner's as a projector shows it, in a real browser, without a kernel behind it."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page

from fsdp_lab.cli.classroom import Classroom, learner_variables
from fsdp_lab.cli.jupyter import LOOPBACK, class_folder, jupyterlab, wait_until_up
from fsdp_lab.cluster.room import RoomLimits
from fsdp_lab.history.history import VARIABLE, History
from tests.browser.driver import STEP
from tests.browser.jupyter import LIMIT_S, LOCAL
from tests.dashboard.fake_lab import FakeLab
from tests.ports import free_ports

pytestmark = pytest.mark.slow
TOKEN = "secret"
PAGE_MS = 60_000


@dataclass(kw_only=True)
class Class:
    """A server of a class of two."""

    port: int
    folder: Path

    def url(self, path: str) -> str:
        return f"http://{LOOPBACK}:{self.port}/fsdp-lab/{path}"

    def history(self, learner: str) -> History:
        return History(learner_variables(self.folder, learner)[VARIABLE])

    def code(self, path: str, token: str = "") -> int:
        """Of the answer to a request."""
        headers = {"Authorization": f"token {token}"} if token else {}
        try:
            with urllib.request.urlopen(urllib.request.Request(self.url(path), headers=headers), timeout=30) as answer:
                return 403 if "/login?" in answer.url else int(answer.status)  # the page that asks for the token
        except urllib.error.HTTPError as e:
            return e.code


@pytest.fixture(scope="module")
def school(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Class]:
    folder, (port,) = tmp_path_factory.mktemp("class"), free_ports(1)
    room = Classroom(folder=folder, limits=RoomLimits(learners=2, labs=2))
    class_folder(room)
    with jupyterlab(folder, LOOPBACK, port, TOKEN, browser=False, room=room) as server:
        wait_until_up(server, LOOPBACK, port)
        yield Class(port=port, folder=folder)


@pytest.fixture
def lab() -> Iterator[FakeLab]:
    made = FakeLab(step_s=0.05)
    yield made
    if made.current is not None:
        made.current.stop()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A page that fails the test for an error that it says, and for what it asks of another machine."""
    context, wrong = browser.new_context(viewport={"width": 1280, "height": 900}), list[str]()
    opened = context.new_page()
    opened.set_default_timeout(LIMIT_S * 1e3)
    opened.set_default_timeout(PAGE_MS)
    opened.on("pageerror", lambda e: wrong.append(str(e)))
    opened.on("console", lambda m: wrong.append(m.text) if m.type == "error" else None)
    opened.on("request", lambda r: None if r.url.startswith(LOCAL) else wrong.append(r.url))
    yield opened
    context.close()
    assert wrong == []


def step(page: Page) -> int:
    return int(page.evaluate(STEP))


def wait_step(page: Page, least: int) -> None:
    page.wait_for_function(f"(n) => ({STEP})() >= n", arg=least)


def test_only_who_has_the_token_sees_a_run(school: Class):
    for path in ("live", "live/learner-01", "feed/learner-01", "static/live.js"):
        assert school.code(path) == 403, path
    assert school.code("live/learner-01", TOKEN) == 200
    assert school.code("live/learner-99", TOKEN) == 404 and school.code("live/..%2f..", TOKEN) == 404
    assert school.code("static/..%2fclassroom.py", TOKEN) == 404


def test_a_run_is_drawn_while_it_happens_and_nothing_can_be_chosen(
    school: Class, lab: FakeLab, page: Page, picture: Callable[[str], Path]
):
    page.goto(school.url(f"live/learner-01?token={TOKEN}&theme=light"))
    state = page.locator("#state")
    state.get_by_text("learner-01 · no run yet").wait_for()
    run = lab.run(lab.spec)
    history = school.history("learner-01")
    history.record(run)
    wait_step(page, 20)
    state.get_by_text(f"learner-01 · {run.id} running").wait_for()
    before = step(page)
    wait_step(page, before + 20)
    page.wait_for_selector(".fsdp-card-timeline canvas", state="attached")
    page.wait_for_function(
        "() => document.querySelector('.fsdp-card-timeline .fsdp-reading').innerText.startsWith('step')"
    )
    page.locator(".fsdp-card-ledger .fsdp-reading", has_text="in step").wait_for()
    page.screenshot(path=picture("projector_light"), full_page=True)
    assert page.locator("button:visible, input:visible, select:visible").count() == 0
    run.apply(run.spec.replace(precision="bf16"))
    page.locator(".fsdp-headline", has_text="bf16").wait_for()
    run.stop()
    history.flush()
    state.get_by_text("stopped").wait_for()
    last = run.events.steps()[-1].number
    page.wait_for_function(f"(n) => ({STEP})() === n", arg=last)
    page.emulate_media(color_scheme="dark")
    page.goto(school.url("live/learner-01"))
    page.wait_for_function(f"(n) => ({STEP})() === n", arg=last)
    page.screenshot(path=picture("projector_dark"), full_page=True)
    page.goto(school.url("live/learner-02"))
    state.get_by_text("learner-02 · no run yet").wait_for()


def test_the_newest_run_is_followed_or_the_one_that_is_named(school: Class, lab: FakeLab, page: Page):
    history = school.history("learner-02")
    first = lab.run(lab.spec)
    history.record(first)
    page.goto(school.url(f"live/learner-02?token={TOKEN}"))
    wait_step(page, 3)
    second = lab.run(lab.spec.replace(model="llama-1m"))
    history.record(second)
    page.locator(".fsdp-headline", has_text="llama-1m").wait_for()
    page.goto(school.url(f"live/learner-02?run={first.id}"))
    page.locator("#state", has_text=first.id).wait_for()
    wait_step(page, 0)
    assert "llama" not in page.locator(".fsdp-headline").inner_text()
