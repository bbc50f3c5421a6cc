"""Notebook 01 without JupyterLab: a plain kernel on its five sockets, with this environment's packages and with Colab's."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from fsdp_lab.dashboard.live import SILENCE_S
from tests.front_ends.bare import BareFrontEnd, RemotePage
from tests.front_ends.test_colab import COLAB, KERNEL_PACKAGES

pytestmark = pytest.mark.timeout(400)

REPO = Path(__file__).resolve().parents[2]
CLUSTER = ("ipyparallel.", "fsdp_lab.cluster.engine_server")  # modules that listen for each other
MARK = "FSDP_LAB_FRONT_END"  # in the environment of the kernel and of all that it starts


def started(mark: str) -> list[psutil.Process]:
    """The kernel and all that it has started, whoever their parents are now."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == mark:
                found.append(process)
    return found


def listening(process: psutil.Process) -> set[tuple[str, int]]:
    return {(c.laddr.ip, c.laddr.port) for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN}


def run_notebook(front_end: BareFrontEnd) -> RemotePage:
    """Its cells, then Start, until steps are drawn; then another sharding, until that is drawn."""
    notebook = json.loads((REPO / "notebooks" / "01_live_dashboard.ipynb").read_text(encoding="utf-8"))
    code = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for cell in code[: code.index("lab.dashboard()") + 1]:
        front_end.run(cell)
    page = front_end.look()
    front_end.choose("model", "gpt2-1m")  # as on Binder: on few cores it makes several steps a second
    front_end.press("Start")
    front_end.wait(lambda: steps_of(page) >= 3, 120, "three steps in the plots")
    front_end.choose("sharding", "shard_grad_op")
    front_end.wait(lambda: bool(page.rows["frame.markers"]), 60, "the mark of a switch")
    assert front_end.run("print(lab.current.spec.strategy.sharding)") == "shard_grad_op\n"
    return page


def steps_of(page: RemotePage) -> int:
    return len(page.rows.get("loss.steps", ()))


@pytest.fixture
def front_end(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[BareFrontEnd]:
    """After the test, nothing that it started is left. Its parameter: whether the kernel has Colab's packages."""
    packages = colab_packages(tmp_path / "colab") if request.param else None
    env = {**os.environ, MARK: str(tmp_path), "IPYTHONDIR": str(tmp_path / "ipython"),
           "JUPYTER_RUNTIME_DIR": str(tmp_path / "runtime"), "FSDP_LAB_HISTORY": str(tmp_path / "history.sqlite3"),
           "PYTHONPATH": os.pathsep.join(map(str, [*([packages] if packages else []), REPO]))}  # fmt: skip
    made = BareFrontEnd(tmp_path, env)
    try:
        yield made
    finally:
        made.close()
    _, left = psutil.wait_procs(started(str(tmp_path)), 60)
    assert not left


def colab_packages(folder: Path) -> Path:
    """What Colab's kernel has imported when a notebook opens, in a folder that goes first."""
    wanted = [f"{name}=={COLAB[name]}" for name in KERNEL_PACKAGES if name in COLAB]
    wanted += [name for name in KERNEL_PACKAGES if name not in COLAB]
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), *wanted]
    done = subprocess.run(install, capture_output=True, text=True, timeout=180)
    if done.returncode:
        pytest.skip(f"Colab's packages cannot be installed here: {done.stderr[-300:]}")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("front_end", [False], indirect=True)
def test_notebook_01_in_a_kernel_that_is_not_ours(front_end: BareFrontEnd, tmp_path: Path) -> None:
    kernel = psutil.Process(front_end.pid)
    at_first = listening(kernel)
    page = run_notebook(front_end)
    assert max(page.buffer_bytes) < 1e6, "a message stays far below what front ends take"
    assert listening(kernel) == at_first, "the kernel listens where its front end is, and nowhere else"
    others = {p.pid: ports for p in started(str(tmp_path)) if p.pid != kernel.pid and (ports := listening(p))}
    words = [psutil.Process(pid).cmdline()[1:3] for pid in others]
    assert words and all(m == "-m" and name.startswith(CLUSTER) for m, name in words), "no server of pages"
    assert {ip for ports in [at_first, *others.values()] for ip, _ in ports} == {"127.0.0.1"}
    page.acknowledges = False  # the run goes on, and messages wait in the kernel, as rows that it has anyway
    ticks, step, began_s = page.seq, steps_of(page), time.monotonic()
    front_end.wait(lambda: int(front_end.run("print(lab.current.step)")) >= step + 20, 120, "twenty more steps")
    assert page.seq - ticks <= 3 + (time.monotonic() - began_s) / SILENCE_S, "two messages, then one in two seconds"
    front_end.press("Stop")
    front_end.wait(lambda: front_end.run("print(lab.current.state.over)") == "True\n", 60, "the end of the run")
    front_end.run("lab.close()")


@pytest.mark.nightly
@pytest.mark.parametrize("front_end", [True], indirect=True)
def test_notebook_01_with_the_packages_of_colabs_kernel(front_end: BareFrontEnd) -> None:
    versions = "import importlib.metadata as m; print(*(m.version(n) for n in {!r}))"
    pinned = [name for name in KERNEL_PACKAGES if name in COLAB]
    assert front_end.run(versions.format(pinned)).split() == [COLAB[name] for name in pinned]
    run_notebook(front_end)
    front_end.run("await lab.run(lab.spec, steps=2)")  # in a cell, as the other notebooks do
    front_end.run("lab.close()")
