"""`python -m tests.bench class`: as many labs at once as a class has, on this machine, as people start them.

Note: what is measured. A real server of a class, and a kernel of a notebook for each learner, in which the same cell starts
a lab, shows its dashboard and begins a run. One learner's notebook is open in a chromium, and that cell is run there by a
key. *First plot* is from the request for the kernel (in chromium: for the page) to the first step in the dashboard: there to
the picture of it, elsewhere to the kernel's having it. First all learners start at the same moment. Then all train for a
while, with the time from event to pixel in the page, the steps of each lab, and the memory of all. Then one more learner is
refused. Then, some times over, one kernel is shut down, and its learner begins again beside the others, which train on.
"""

from __future__ import annotations

import contextlib
import json
import queue
import secrets
import shutil
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_core.paths import jupyter_runtime_dir

from fsdp_lab.bench.benches import Say, format_spread, spread
from fsdp_lab.bench.plan import BenchError
from fsdp_lab.cli.classroom import Classroom
from fsdp_lab.cli.jupyter import LOOPBACK, class_folder, free_port, jupyterlab, wait_until_up
from fsdp_lab.cluster.room import RoomLimits

CELL_S = 300.0  # limit for a cell, and for a first plot
POLL_S = 0.1
NOTEBOOK = "bench.ipynb"
CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
# The headline's step, once the first plot is painted.
PAINTED = """() => Number(document.querySelector('.fsdp-live[data-ready]')?.dataset.painted) > 0
    && /^step [\\d,]+/.test(document.querySelector('.fsdp-headline')?.innerText ?? '')"""


def cell(model: str, ranks: int) -> str:
    """What each learner runs."""
    return (f"from fsdp_lab import Lab\nlab = Lab(ranks={ranks})\ndashboard = lab.dashboard()\n"
            f"run = lab.run(model={model!r}, micro_batch=1, seq_len=64)\ndashboard")  # fmt: skip


class Learner:
    """A notebook of a learner's, and its kernel."""

    def __init__(self, server: ClassUnderTest, name: str) -> None:
        self.server, self.name, self.path = server, name, f"{name}/{NOTEBOOK}"
        self.began_s = 0.0
        self._client: BlockingKernelClient | None = None

    def start(self) -> None:
        """Requests the kernel."""
        self.began_s = time.monotonic()
        wanted = {"path": self.path, "name": NOTEBOOK, "type": "notebook", "kernel": {"name": "python3"}}
        self.server.ask("/api/sessions", "POST", wanted)

    def first_plot(self) -> float:
        """Starts all, and waits for the first step; seconds. Raises BenchError."""
        self.start()
        self.execute(cell(self.server.model, self.server.ranks))
        self.await_step()
        return time.monotonic() - self.began_s

    def await_step(self) -> None:
        while self.execute("print(len(run.events.latest()) == run.spec.world_size)") != "True":
            if time.monotonic() > self.began_s + CELL_S or self.execute("print(run.done)") == "True":
                raise BenchError(f"{self.name} made no step: {self.execute('print(run.reason or run.state.value)')}")
            time.sleep(POLL_S)

    def execute(self, code: str) -> str:
        """What a cell printed. Raises BenchError for its error."""
        said: list[str] = []
        failed: list[str] = []

        def hear(message: dict[str, Any]) -> None:
            content = message["content"]
            if message["header"]["msg_type"] == "stream":
                said.append(content["text"])
            if message["header"]["msg_type"] == "error":
                failed.append(f"{content['ename']}: {content['evalue']}")

        try:
            self.client.execute_interactive(code, output_hook=hear, timeout=CELL_S, stop_on_error=False)
        except TimeoutError:
            raise BenchError(f"the kernel of {self.name} did not answer for {CELL_S:.0f} s") from None
        if failed:
            raise BenchError(f"{self.name}: {failed[0]}")
        return "".join(said).strip()

    @property
    def client(self) -> BlockingKernelClient:
        """Connected, when the kernel answers. Raises BenchError."""
        limit_s = time.monotonic() + CELL_S
        while self._client is None:
            if time.monotonic() > limit_s:
                raise BenchError(f"the kernel of {self.name} does not answer after {CELL_S:.0f} s")
            # Read again each time: a kernel that is started again has other ports.
            file = Path(jupyter_runtime_dir()) / f"kernel-{self.kernel_id}.json"
            client = BlockingKernelClient(connection_file=str(file))
            client.load_connection_file()
            client.start_channels(stdin=False, hb=False)  # a starting kernel on a busy machine misses heartbeats
            if answers(client):
                self._client = client
            else:
                client.stop_channels()
        return self._client

    @property
    def kernel_id(self) -> str:
        return str(next(s["kernel"]["id"] for s in self.server.ask("/api/sessions") if s["path"] == self.path))

    def end(self) -> None:
        """Shuts the kernel down, and with it the session."""
        self.disconnect()
        for session in self.server.ask("/api/sessions"):
            if session["path"] == self.path:
                self.server.ask(f"/api/sessions/{session['id']}", "DELETE")

    def disconnect(self) -> None:
        if self._client is not None:
            self._client.stop_channels()
            self._client = None


class DrawnLearner(Learner):
    """One whose notebook is open in a page of a chromium, which runs the cell."""

    def __init__(self, server: ClassUnderTest, name: str, browser: Any) -> None:
        super().__init__(server, name)
        self._browser = browser
        self._page: Any = None

    def first_plot(self) -> float:
        self.began_s = time.monotonic()
        page = self._page = self._browser.new_page(viewport={"width": 1280, "height": 1600})
        page.set_default_timeout(CELL_S * 1e3)
        page.goto(self.server.url(self.name))
        self._await_connection()  # JupyterLab drops what is run before
        page.locator(".jp-CodeCell .cm-content").first.click()
        page.keyboard.press("Shift+Enter")
        try:
            page.wait_for_function(PAINTED)
        except Exception as e:  # playwright's
            raise BenchError(f"the page of {self.name} shows no plot after {CELL_S:.0f} s: {e}") from None
        seconds = time.monotonic() - self.began_s
        self.await_step()
        return seconds

    def _await_connection(self) -> None:
        """Until the page is connected to a kernel that is ready. Raises BenchError."""
        while time.monotonic() < self.began_s + CELL_S:
            for session in self.server.ask("/api/sessions"):
                kernel = session["kernel"]
                if session["path"] == self.path and kernel["connections"] and kernel["execution_state"] == "idle":
                    return
            self._page.wait_for_timeout(1e3 * POLL_S)
        raise BenchError(f"the page of {self.name} has no kernel after {CELL_S:.0f} s")

    def end(self) -> None:
        if self._page is not None:
            self._page.close()
            self._page = None
        super().end()


@dataclass(kw_only=True)
class ClassUnderTest:
    """A server of a class that runs."""

    process: psutil.Process
    port: int
    token: str
    model: str
    ranks: int

    def url(self, name: str) -> str:
        return f"http://{LOOPBACK}:{self.port}/lab/workspaces/{name}/tree/{name}/{NOTEBOOK}?token={self.token}"

    def ask(self, path: str, method: str = "GET", data: Any = None) -> Any:
        request = urllib.request.Request(
            f"http://{LOOPBACK}:{self.port}{path}", method=method, headers={"Authorization": f"token {self.token}"},
            data=None if data is None else json.dumps(data).encode(),
        )  # fmt: skip
        with urllib.request.urlopen(request, timeout=CELL_S) as answer:
            body = answer.read()
        return json.loads(body) if body else None

    def used_bytes(self) -> int:
        """Of the server, its kernels and their ranks; memory that they share is counted in parts."""
        pss = 0
        for process in [self.process, *self.process.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                pss += process.memory_full_info().pss
        return pss


@contextlib.contextmanager
def class_server(folder: Path, limits: RoomLimits, model: str) -> Iterator[ClassUnderTest]:
    room = Classroom(folder=folder, limits=limits)
    class_folder(room)
    for name in room.names:
        write_notebook(folder / name / NOTEBOOK, cell(model, limits.ranks))
    port, token = free_port(LOOPBACK, None), secrets.token_hex(24)
    with jupyterlab(folder, LOOPBACK, port, token, browser=False, room=room) as server:
        wait_until_up(server, LOOPBACK, port)
        yield ClassUnderTest(
            process=psutil.Process(server.pid), port=port, token=token, model=model, ranks=limits.ranks
        )


def answers(client: BlockingKernelClient, timeout_s: float = 20.0) -> bool:
    """Whether the kernel answers on both channels within the time."""
    limit_s = time.monotonic() + timeout_s
    while time.monotonic() < limit_s:
        client.kernel_info()
        with contextlib.suppress(queue.Empty):
            client.get_shell_msg(timeout=timeout_s)
            client.get_iopub_msg(timeout=1)
            return True
    return False


def write_notebook(file: Path, code: str) -> None:
    one: dict[str, Any] = {
        "cell_type": "code",
        "id": "only",
        "source": code,
        "metadata": {},
        "execution_count": None,
        "outputs": [],
    }
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook = {"cells": [one], "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    file.write_text(json.dumps(notebook), encoding="utf-8")


@contextlib.contextmanager
def browser() -> Iterator[Any]:
    """A chromium. Raises BenchError without one, and ModuleNotFoundError without playwright."""
    from playwright.sync_api import sync_playwright

    path = next((found for name in CHROMIUM if (found := shutil.which(name))), None)
    if path is None:
        raise BenchError(f"there is no browser here ({', '.join(CHROMIUM)}); install one, or give --no-page")
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        try:
            yield started
        finally:
            started.close()


# -- the bench ---------------------------------------------------------------------------------------------------------


def measure_class(
    labs: int, ranks: int, model: str, rounds: int, seconds: float, *, page: bool, say: Say
) -> dict[str, Any]:
    """Raises BenchError."""
    limits = RoomLimits(learners=labs + 1, labs=labs, ranks=ranks)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fsdp-lab-bench-")))
        chromium = stack.enter_context(browser()) if page else None
        server = stack.enter_context(class_server(folder, limits, model))
        names = Classroom(folder=folder, limits=limits).names
        first = Learner(server, names[0]) if chromium is None else DrawnLearner(server, names[0], chromium)
        learners = [first, *(Learner(server, name) for name in names[1:])]
        for learner in learners:
            stack.callback(learner.disconnect)
        return _measured(learners, rounds, seconds, page=page, say=say)


def _measured(learners: Sequence[Learner], rounds: int, seconds: float, *, page: bool, say: Say) -> dict[str, Any]:
    *running, one_more = learners
    first, server = running[0], running[0].server
    figures: dict[str, Any] = {"environment": {"labs": len(running), "ranks": server.ranks, "model": server.model}}
    together = start_together(running)
    say(f"first plot, {len(running)} labs started together: {format_spread(spread(together), 's', 1)}, "
        f"longest {max(together):.1f}{f', on the page {together[0]:.1f}' if page else ''}")  # fmt: skip
    figures["together_s"] = together
    figures |= steady(running, seconds, page=page, say=say)
    figures["refused_s"] = refused(one_more, say)
    beside = []
    for _ in range(rounds):
        first.end()
        beside.append(first.first_plot())
    say(f"first plot beside {len(running) - 1} labs that train: {format_spread(spread(beside), 's', 1)}, "
        f"longest {max(beside):.1f}")  # fmt: skip
    figures["beside_s"] = beside
    alive = sum(learner.execute("print(run.state.value)") == "running" for learner in running)
    say(f"at the end {alive} of {len(running)} labs train")
    if alive < len(running):
        raise BenchError(f"{len(running) - alive} of {len(running)} labs do not train any more")
    return figures


def start_together(learners: Sequence[Learner]) -> list[float]:
    """Seconds of each until its first plot. The first is run on this thread, as a page must be."""
    with ThreadPoolExecutor(len(learners)) as threads:
        others = [threads.submit(learner.first_plot) for learner in learners[1:]]
        mine = learners[0].first_plot()
        return [mine, *(other.result() for other in others)]


def steady(learners: Sequence[Learner], seconds: float, *, page: bool, say: Say) -> dict[str, Any]:
    """While all train."""
    first, count = learners[0], "print(max(e.step for e in run.events.latest().values()))"
    first.execute("dashboard.reset_measurements()")
    begun_s, before = time.monotonic(), [int(learner.execute(count)) for learner in learners]
    since = busy_s()
    time.sleep(seconds)
    others = others_s(since, busy_s()) / seconds
    say(f"other programs use {others:.1f} of {psutil.cpu_count()} cores")
    steps = [int(learner.execute(count)) - n for learner, n in zip(learners, before, strict=True)]
    per_s = [n / (time.monotonic() - begun_s) for n in steps]
    say(f"steps of each lab: {format_spread(spread(per_s), 'a second', 2)}, {min(per_s):.2f} to {max(per_s):.2f}")
    found: dict[str, Any] = {"others_cores": others, "steps_per_s": per_s, "used_bytes": first.server.used_bytes()}
    say(f"memory of the server, kernels and ranks: {found['used_bytes'] / 2**30:.2f} GiB, "
        f"{found['used_bytes'] / len(learners) / 2**20:.0f} MiB for each lab")  # fmt: skip
    if page:
        said = first.execute("import dataclasses, json; print(json.dumps(dataclasses.asdict(dashboard.latency())))")
        found["event_to_pixel"] = latency = json.loads(said)
        say(f"event to pixel on the page: median {latency['p50_s']:.2f} s, p95 {latency['p95_s']:.2f} s, "
            f"worst {latency['worst_s']:.2f} s, {latency['events']:,} events")  # fmt: skip
    return found


def busy_s() -> tuple[float, dict[int, float]]:
    """Seconds of all cores since the machine started, and of this process and all below it, by pid."""
    machine, own = psutil.cpu_times(), dict[int, float]()
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        with contextlib.suppress(psutil.Error):
            own[process.pid] = sum(process.cpu_times()[:2])
    return machine.user + machine.nice + machine.system, own


def others_s(before: tuple[float, dict[int, float]], after: tuple[float, dict[int, float]]) -> float:
    """Seconds of cores that other programs have used between two results of `busy_s`, and processes of ours that ended."""
    own = sum(seconds - before[1].get(pid, 0.0) for pid, seconds in after[1].items())
    return max(0.0, after[0] - before[0] - own)


def refused(learner: Learner, say: Say) -> float:
    """Seconds until a lab too many is refused. Raises BenchError if it is not, or its kernel is gone."""
    learner.start()
    learner.execute("from fsdp_lab import Lab")
    begun_s = time.monotonic()
    try:
        learner.execute(f"Lab(ranks={learner.server.ranks})")
    except BenchError as e:
        if "is full" not in str(e):
            raise
        seconds = time.monotonic() - begun_s
        say(f"one more is refused after {seconds:.2f} s: {str(e).partition(': ')[2]}")
    else:
        raise BenchError("one lab more than the class has places for was not refused")
    if learner.execute("print(6 * 7)") != "42":
        raise BenchError("the kernel of the refused learner does not answer")
    learner.end()
    return seconds
