"""One JupyterLab, one chromium and one page with its kernel for all browser tests, but for those that need their own.

Nothing outside this machine is asked for, and nothing of the user's Jupyter is read or written. A page that says an
error, or asks the network for anything, fails its test."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from playwright.sync_api import Browser, sync_playwright

from tests.browser.driver import DashboardPage
from tests.browser.jupyter import JupyterServer, Notebook, chromium, find_chromium

HERE = Path(__file__).parent
WINDOW = {"width": 1280, "height": 900}
FAKE = """\
from tests.dashboard.fake_lab import FakeLab
from fsdp_lab.dashboard import Dashboard
lab = FakeLab({lab})
dashboard = Dashboard(lab)
dashboard"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skip = None if find_chromium() else pytest.mark.skip(reason="no chromium on this machine")
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.browser)
            if skip is not None:
                item.add_marker(skip)


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JupyterServer]:
    jupyter = JupyterServer(tmp_path_factory.mktemp("jupyter"))
    yield jupyter
    jupyter.stop()


# Of the package, not of the session: while Playwright's synchronous form is open, an event loop runs in this thread, and
# no later test could call asyncio.run.
@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright, chromium(playwright) as started:
        yield started


def page_of(server: JupyterServer, browser: Browser) -> Notebook:
    """A page with nothing but a session of its own."""
    return Notebook(browser.new_context(viewport=WINDOW).new_page(), server)


@pytest.fixture
def open_notebook(server: JupyterServer, browser: Browser) -> Iterator[Callable[[str], Notebook]]:
    """Opens a notebook of the server's folder, for tests that need a kernel of their own; both end with the test."""
    made: list[Notebook] = []

    def open_(name: str) -> Notebook:
        made.append(page_of(server, browser))
        made[-1].open(name)
        return made[-1]

    yield open_
    for notebook in made:
        notebook.page.context.close()
        server.end_kernel(notebook.name)


@pytest.fixture(scope="package")
def warm(server: JupyterServer, browser: Browser) -> Iterator[Notebook]:
    """One page and one kernel for all tests that leave both as they were: each takes seconds to start."""
    notebook = page_of(server, browser)
    notebook.open(server.write("warm.ipynb", ["import fsdp_lab.dashboard"]))
    yield notebook
    notebook.page.context.close()


Desk = TypeVar("Desk", bound=DashboardPage)


@pytest.fixture
def show(warm: Notebook, watched: Callable[[Notebook], None]) -> Iterator[Callable[..., Any]]:
    """Shows a new dashboard over a lab without processes in the warm page, in a light window of 1280 px."""

    def show_(kind: type[Desk], lab: str = "2, step_s=0.05") -> Desk:
        desk = kind(warm)
        desk.page.set_viewport_size(WINDOW)
        warm.theme("JupyterLab Light")
        warm.show(FAKE.format(lab=lab))
        desk.wait_drawn()
        desk.tab("loss")  # the page remembers that of the test before
        return desk

    watched(warm)
    yield show_
    warm.execute("'dashboard' in globals() and (dashboard.close(), lab.close())")  # what nobody looks at draws no more


@pytest.fixture
def watched(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Callable[[Notebook], None]]:
    """Watches a page during a test: what it said must be nothing; how it looked is kept where the test failed."""
    pages: list[Notebook] = []
    yield pages.append
    for notebook in pages:
        wrong, notebook.wrong = notebook.wrong, []
        if getattr(request.node, "failed_in_call", False):
            notebook.page.screenshot(path=tmp_path / "failed.png")
            print(f"the page as it was: {tmp_path / 'failed.png'}\nwhat went wrong in it: {wrong}")
            print(f"what its cells printed: {notebook.outputs()}")
        else:
            assert wrong == []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):
    report = yield
    if report.when == "call":
        item.failed_in_call = report.failed  # type: ignore[attr-defined]
    return report
