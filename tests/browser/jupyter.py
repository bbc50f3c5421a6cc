"""JupyterLab in a process of its own and a page of chromium that drives it, offline and with private settings."""

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page, Playwright

from tests.ports import free_ports
from tests.waiting import until

REPO = Path(__file__).resolve().parents[2]
CHROMIUM_FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-default-apps",
]  # fmt: skip
LOCAL = ("http://127.0.0.1", "ws://127.0.0.1", "data:", "blob:")
LIMIT_S = 120.0  # of a wait that says no other: two busy cores are no fault

# What a page says that is not about us.
NOT_OURS = (
    "favicon",
    "widget model not found",  # ipywidgets, of outputs whose kernel was restarted: they are run again
    "Comm not found for",  # JupyterLab, of widgets that a busy kernel closed before the page had heard of them
    "Canceled future for",  # JupyterLab's own requests to a kernel that is restarted
    "Failed to load resource",  # JupyterLab asks for optional settings and workspaces that are not there
)

IDLE = """() => {
  const session = window.jupyterapp?.shell?.currentWidget?.sessionContext?.session;
  return session?.kernel?.status === 'idle' && session?.kernel?.connectionStatus === 'connected';
}"""


def find_chromium() -> str | None:
    """Debian's chromium without a window, or another one on the path."""
    names = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
    return next((path for name in names if (path := shutil.which(name))), None)


class JupyterServer:
    """JupyterLab on a free loopback port, with a token, on a folder of its own, ended by its process id."""

    def __init__(self, home: Path) -> None:
        self.root = home / "notebooks"
        shutil.copytree(REPO / "notebooks" / "course", self.root / "course")
        (self.port,) = free_ports(1)
        self.token = secrets.token_hex(16)
        self.log = home / "jupyter.log"
        quiet = home / "settings/@jupyterlab/apputils-extension"
        quiet.mkdir(parents=True)
        (quiet / "notification.jupyterlab-settings").write_text(
            json.dumps({"fetchNews": "false", "checkForUpdates": False})
        )
        env = {**os.environ, "JUPYTER_CONFIG_DIR": str(home / "config"), "JUPYTER_DATA_DIR": str(home / "data"),
               "JUPYTER_RUNTIME_DIR": str(home / "runtime"), "IPYTHONDIR": str(home / "ipython"),
               "FSDP_LAB_HISTORY": str(home / "history.sqlite3"), "JUPYTERLAB_SETTINGS_DIR": str(home / "settings"),
               "JUPYTERLAB_WORKSPACES_DIR": str(home / "workspaces"),
               "PYTHONPATH": os.pathsep.join([str(REPO), os.environ.get("PYTHONPATH", "")])}  # fmt: skip
        command = [
            sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ServerApp.ip=127.0.0.1",
            f"--ServerApp.port={self.port}", "--ServerApp.port_retries=0", f"--IdentityProvider.token={self.token}",
            f"--ServerApp.root_dir={self.root}", "--LabApp.expose_app_in_browser=True", "--LabApp.news_url=None",
        ]  # fmt: skip
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, env=env, stdout=log, stderr=subprocess.STDOUT, cwd=home, start_new_session=True
            )
        until(lambda: self._answers() or self.process.poll() is not None, LIMIT_S, "JupyterLab answers")
        assert self.process.poll() is None, f"JupyterLab did not start:\n{self.log.read_text()[-3000:]}"

    def _answers(self) -> bool:
        with contextlib.suppress(OSError):
            return bool(self.api("/api/status"))
        return False

    def api(self, path: str, method: str = "GET") -> Any:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", method=method, headers={"Authorization": f"token {self.token}"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            body = answer.read()
        return json.loads(body) if body else None

    def url(self, notebook: str) -> str:
        return f"http://127.0.0.1:{self.port}/lab/tree/{notebook}?token={self.token}&reset"

    def write(self, name: str, cells: Sequence[str]) -> str:
        """A notebook of code cells in the server's folder."""
        kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
        made = [{"cell_type": "code", "id": f"cell{i}", "source": cell, "metadata": {}, "execution_count": None,
                 "outputs": []} for i, cell in enumerate(cells)]  # fmt: skip
        notebook = {"cells": made, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
        (self.root / name).write_text(json.dumps(notebook), encoding="utf-8")
        return name

    def end_kernels(self) -> None:
        for kernel in self.api("/api/kernels"):
            with contextlib.suppress(urllib.error.HTTPError):
                self.api(f"/api/kernels/{kernel['id']}", "DELETE")

    def end_kernel(self, notebook: str) -> None:
        for session in self.api("/api/sessions"):
            if session["path"] == notebook:
                with contextlib.suppress(OSError):  # its ranks may take longer to end than an answer may
                    self.api(f"/api/sessions/{session['id']}", "DELETE")

    def stop(self) -> None:
        with contextlib.suppress(Exception):
            self.end_kernels()
        self.process.terminate()
        try:
            self.process.wait(15)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


class Notebook:
    """A notebook open in a page, with what went wrong in that page."""

    def __init__(self, page: Page, server: JupyterServer) -> None:
        self.page, self.server = page, server
        self.name = ""
        self.wrong: list[str] = []
        page.set_default_timeout(LIMIT_S * 1e3)
        page.on("console", lambda m: self._console(m.type, m.text))
        page.on("pageerror", lambda e: self.wrong.append(f"page error: {e.stack or e}"))
        page.on("request", lambda r: r.url.startswith(LOCAL) or self.wrong.append(f"external request: {r.url}"))

    def _console(self, kind: str, text: str) -> None:
        if kind == "error" and not any(part in text for part in NOT_OURS):
            self.wrong.append(f"console error: {text[:500]}")

    def open(self, name: str) -> None:
        self.name = name
        self.page.goto(self.server.url(name))
        self.page.wait_for_selector(".jp-Notebook .jp-Cell")
        self.page.wait_for_function(IDLE)

    def command(self, name: str, args: dict[str, Any] | None = None) -> None:
        """Runs a command of JupyterLab and waits for it."""
        self.page.evaluate("async ([name, args]) => { await window.jupyterapp.commands.execute(name, args) }",
                           [name, args or {}])  # fmt: skip

    def run_all(self, *, wait: bool = True, timeout_ms: float = LIMIT_S * 1e3) -> None:
        self.page.evaluate("""() => { window.ranAll = null;
            window.jupyterapp.commands.execute('notebook:run-all-cells').then(r => { window.ranAll = String(r) }) }""")
        if wait:
            self.page.wait_for_function("() => window.ranAll !== null", timeout=timeout_ms)
            assert self.page.evaluate("() => window.ranAll") == "true", f"a cell failed: {self.outputs()} {self.wrong}"

    def execute(self, code: str) -> str:
        """Runs code in the notebook's kernel, beside its cells; returns what it printed, or its error."""
        return str(self.page.evaluate("""async (code) => {
            const kernel = window.jupyterapp.shell.currentWidget.sessionContext.session.kernel;
            let out = '';
            const future = kernel.requestExecute({ code, stop_on_error: false });
            future.onIOPub = (m) => {
              if (m.header.msg_type === 'stream') out += m.content.text;
              if (m.header.msg_type === 'error') out += m.content.ename + ': ' + m.content.evalue;
            };
            const late = new Promise((resolve) => setTimeout(() => resolve('late'), 120000));
            if (await Promise.race([future.done, late]) === 'late') throw new Error('the kernel is busy: ' + code);
            return out; }""", code))  # fmt: skip

    def write_and_run(self, code: str, *, wait: bool = True) -> None:
        """Adds a cell at the end and runs it; `wait` until it has run."""
        self.page.evaluate("""async ([code, wait]) => {
            const { content } = window.jupyterapp.shell.currentWidget;
            const commands = window.jupyterapp.commands;
            content.activeCellIndex = content.widgets.length - 1;
            await commands.execute('notebook:insert-cell-below');
            content.activeCell.model.sharedModel.setSource(code);
            const ran = commands.execute('notebook:run-cell');
            if (wait) await ran }""", [code, wait])  # fmt: skip

    def show(self, code: str) -> None:
        """One cell in place of all others, run."""
        self.hide_sidebar()
        self.page.evaluate("""(source) => {
            const cells = window.jupyterapp.shell.currentWidget.content.model.sharedModel;
            cells.deleteCellRange(0, cells.cells.length);
            cells.insertCell(0, { cell_type: 'code', source, metadata: {} }) }""", code)  # fmt: skip
        self.run_cell(0)

    def run_cell(self, index: int) -> None:
        """Runs one cell and waits for it."""
        self.page.evaluate("""async (index) => {
            window.jupyterapp.shell.currentWidget.content.activeCellIndex = index;
            await window.jupyterapp.commands.execute('notebook:run-cell') }""", index)  # fmt: skip

    def restart_kernel(self) -> None:
        """As the menu does, without its question."""
        self.page.evaluate(
            "async () => { await window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.restart() }"
        )
        self.page.wait_for_function(IDLE)

    def hide_sidebar(self) -> None:
        """The folder's list takes a quarter of a narrow window."""
        self.page.evaluate("() => window.jupyterapp.shell.collapseLeft()")

    def theme(self, name: str) -> None:
        """ "JupyterLab Light" or "JupyterLab Dark"."""
        self.command("apputils:change-theme", {"theme": name})
        self.page.wait_for_function(
            # The splash goes last; JupyterLab stumbles over a theme that is changed while it still stands.
            """(dark) => (document.body.dataset.jpThemeLight === 'false') === dark
                && !document.querySelector('#jupyterlab-splash')""",
            arg=name.endswith("Dark"),
        )

    def outputs(self) -> list[str]:
        return list(
            self.page.evaluate("""() => [...document.querySelectorAll('.jp-CodeCell')].map(c =>
            [...c.querySelectorAll('.jp-OutputArea-output')].map(
                o => (o.innerText || o.textContent).slice(0, 800)).join('|'))""")
        )


@contextlib.contextmanager
def chromium(playwright: Playwright) -> Iterator[Browser]:
    browser = playwright.chromium.launch(executable_path=find_chromium(), headless=True, args=CHROMIUM_FLAGS)
    try:
        yield browser
    finally:
        browser.close()
