"""One JupyterLab and one chromium for all browser tests; a page and its kernels for each.

Nothing outside this machine is asked for, and nothing of the user's Jupyter is read or written. A page that says an
error, or asks the network for anything, fails its test. FSDP_LAB_SCREENSHOTS names a folder for pictures.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext, sync_playwright

from tests.browser.jupyter import JupyterServer, Notebook, chromium, find_chromium

HERE = Path(__file__).parent


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


class Pages:
    """Makes pages, each with nothing but a session of its own."""

    def __init__(self, server: JupyterServer, browser: Browser) -> None:
        self._server, self._browser = server, browser
        self.contexts: list[BrowserContext] = []

    def __call__(self) -> Notebook:
        context = self._browser.new_context(viewport={"width": 1280, "height": 900})
        self.contexts.append(context)
        return Notebook(context.new_page(), self._server)

    def close(self, since: int = 0) -> None:
        """Those but the first `since`; and all kernels, if no page is left."""
        for context in self.contexts[since:]:
            context.close()
        del self.contexts[since:]
        if not self.contexts:
            self._server.end_kernels()


@pytest.fixture(scope="module")
def open_notebook(server: JupyterServer, browser: Browser) -> Iterator[Pages]:
    pages = Pages(server, browser)
    yield pages
    pages.close()


@pytest.fixture(autouse=True)
def closes_its_pages(request: pytest.FixtureRequest) -> Iterator[None]:
    """What a test has opened by itself ends with it: a page that nobody looks at goes on drawing."""
    pages = request.getfixturevalue("open_notebook") if "open_notebook" in request.fixturenames else None
    before = len(pages.contexts) if pages is not None else 0
    yield
    if pages is not None and len(pages.contexts) > before:
        pages.close(before)


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


@pytest.fixture
def picture(tmp_path: Path) -> Callable[[str], Path]:
    """Where a picture of this name goes."""
    folder = Path(os.environ.get("FSDP_LAB_SCREENSHOTS") or tmp_path)
    folder.mkdir(parents=True, exist_ok=True)
    return lambda name: folder / f"{name}.png"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):
    report = yield
    if report.when == "call":
        item.failed_in_call = report.failed  # type: ignore[attr-defined]
    return report
