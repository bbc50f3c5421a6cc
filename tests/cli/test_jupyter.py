"""`fsdp-lab lab`: what it opens, where it listens, what it says, and that Ctrl-C leaves nothing behind."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import psutil
import pytest

from fsdp_lab.cli import jupyter
from fsdp_lab.cli.console import Refused
from fsdp_lab.cli.jupyter import missing
from fsdp_lab.cli.main import main
from tests.waiting import until


def test_notebooks_are_copied_and_changed_ones_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = jupyter.notebooks_folder(tmp_path / "mine")
    first = folder / jupyter.FIRST_NOTEBOOK
    first.write_text("changed")
    assert jupyter.notebooks_folder(tmp_path / "mine") == folder and first.read_text() == "changed"
    with pytest.raises(Refused, match="--dir DIR"):
        jupyter.notebooks_folder(first / "below")
    assert (folder / "02_first_steps_in_code.ipynb").is_file()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(Path(__file__).parents[2] / "notebooks")
    assert jupyter.notebooks_folder(None) == tmp_path / "fsdp-lab-notebooks", "not in the repository"
    code = ("other_front_ends.md", "solutions/write_your_own_fsdp.py", "course/exercises.py", "course/memory_limit.py")
    assert all((folder / file).is_file() for file in code)
    learners = jupyter.notebooks_folder(tmp_path / "learner", learner=True)
    assert (learners / jupyter.COURSE).is_file() and (learners / "course" / "exercises.py").is_file()
    assert not (learners / "teacher.ipynb").exists() and not (learners / "solutions").exists()


def test_the_tunnel_leads_to_the_address_that_this_ssh_session_came_to(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SSH_CONNECTION", "198.51.100.7 51000 203.0.113.5 2222")
    monkeypatch.setenv("USER", "me")
    said = jupyter.announcement(Path("/n"), "http://127.0.0.1:9000", "t")
    assert "ssh -N -p 2222 -L 9000:127.0.0.1:9000 me@203.0.113.5" in said


@pytest.mark.parametrize(("code", "refused"), [(200, True), (403, False)])
def test_a_server_without_a_token_is_refused(code: int, refused: bool):
    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(code)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Silent."""

    with HTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        with pytest.raises(Refused, match="turns the token off") if refused else contextlib.nullcontext():
            jupyter.refuse_without_token(f"http://127.0.0.1:{server.server_port}")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command of an environment of its own, into which pip installed a wheel; it sees the packages of this one."""
    python, repo, folder = [sys.executable, "-m"], Path(__file__).parents[2], tmp_path_factory.mktemp("installed")
    run = partial(subprocess.run, check=True, cwd=folder, timeout=240, stdout=subprocess.DEVNULL)
    for module in ("build", "hatchling", "twine"):
        pytest.importorskip(module)
    run([*python, "build", "--no-isolation", "--outdir=dist", repo])  # the sdist, and of it the wheel
    run([*python, "twine", "check", "--strict", *(folder / "dist").iterdir()])
    run([*python, "venv", "--without-pip", "env"])
    run([*python, "pip", "--python=env", "install", "--no-deps", "--no-index", *(folder / "dist").glob("*.whl")])
    (site,) = (folder / "env").glob("lib/python3.*/site-packages")
    (site / "others.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    return folder / "env/bin/fsdp-lab"


@pytest.mark.slow
def test_a_wheel_has_all_that_the_commands_read(installed: Path, tmp_path: Path):
    """Where there is no clone, from an empty folder."""
    environment = {**os.environ, "FSDP_LAB_HISTORY": str(tmp_path / "runs.sqlite3")}
    environment.pop("PYTHONPATH", None)
    (empty := tmp_path / "empty").mkdir()
    run = partial(subprocess.run, cwd=empty, env=environment, capture_output=True, text=True, timeout=240)
    code = "import fsdp_lab, sys; print(fsdp_lab.__file__.startswith(sys.prefix))"
    assert run([installed.parent / "python", "-c", code]).stdout == "True\n"
    assert run([installed, "doctor"]).returncode in (0, 1)
    planned = run([installed, "plan", "--hardware=h100", "--model=gpt2-124m", "--page=page.html"])
    assert planned.returncode == 0 and (empty / "page.html").stat().st_size > 30_000, planned.stderr
    (empty / "loop.py").write_text(LOOP)
    watched = run([installed, "watch", "--", installed.parent / "python", "loop.py"])
    assert watched.returncode == 0 and "fsdp-lab history show" in watched.stderr, watched.stderr


LOOP = """
import torch
model = torch.nn.Linear(4, 4)
sgd = torch.optim.SGD(model.parameters())
for _ in range(8): sgd.zero_grad(), model(torch.ones(2, 4)).sum().backward(), sgd.step()
"""


@pytest.mark.slow
@pytest.mark.parametrize("of", ["clone", "wheel"])
def test_it_serves_until_ctrl_c_and_leaves_nothing(of: str, request: pytest.FixtureRequest, tmp_path: Path):
    environment = {**os.environ,
                   **{f"JUPYTER_{name}_DIR": str(tmp_path / name) for name in ("CONFIG", "DATA", "RUNTIME")},
                   "JUPYTERLAB_DIR": str(Path(sys.prefix, "share/jupyter/lab")),
                   "IPYTHONDIR": str(tmp_path / "ipython")}  # fmt: skip
    command = [sys.executable, "-m", "fsdp_lab", "lab", "--no-browser", "--dir", str(tmp_path / "notebooks")]
    if of == "wheel":
        command[:3] = [str(request.getfixturevalue("installed"))]
        environment.pop("PYTHONPATH", None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        given = [*command, f"--port={taken.getsockname()[1]}"]
        refused = subprocess.run(given, env=environment, capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert refused.returncode == 2 and "is not available" in refused.stderr and "another --port" in refused.stderr
    log = tmp_path / "out"
    with log.open("w") as out:
        process = subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT, cwd=tmp_path)
    family: list[psutil.Process] = []
    try:
        url = re.compile(r"(http://127\.0\.0\.1:\d+)/lab/tree/\S+\?token=(\w+)")
        until(lambda: url.search(log.read_text()) or process.poll() is not None, what="its URL")
        ((base, token),) = set(url.findall(log.read_text()))
        listed = {file["name"] for file in ask(f"{base}/api/contents?token={token}")["content"]}
        assert {"01_live_dashboard.ipynb", "reference.md", "other_front_ends.md", "course"} <= listed
        settings = ask(f"{base}/lab/api/settings/@jupyterlab/apputils-extension:notification?token={token}")
        assert settings["schema"]["properties"]["fetchNews"]["default"] == "false", "no question about news"
        assert not settings["settings"] and not any("notification" in p.name for p in tmp_path.rglob("*settings*"))
        assert ask(f"{base}/api/kernels?token={token}", {"name": "python3"})["id"]
        family = psutil.Process(process.pid).children(recursive=True)
        assert any("ipykernel" in " ".join(p.cmdline()) for p in family)
        assert not any(token in " ".join(p.cmdline()) for p in family), "a command line can be read by everybody"
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
        _, left = psutil.wait_procs(family, timeout=5)
        assert not left
    finally:
        for p in [*family, process]:
            if p.is_running() if isinstance(p, psutil.Process) else p.poll() is None:
                p.kill()
        process.wait()


def ask(url: str, data: dict[str, str] | None = None):
    body = None if data is None else json.dumps(data).encode()
    request = urllib.request.Request(url, data=body, method="GET" if data is None else "POST")
    with urllib.request.urlopen(request, timeout=30) as reply:
        return json.loads(reply.read())


# -- `fsdp-lab kernel install` ----------------------------------------------------------------------------------------
def test_the_kernel_runs_this_interpreter(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["kernel", "install", "--prefix", str(tmp_path)]) == 0
    described = json.loads((tmp_path / "share/jupyter/kernels/fsdp-lab/kernel.json").read_text())
    assert described["argv"][0] == sys.executable and described["display_name"].startswith("fsdp_lab (Python ")
    said = capsys.readouterr().out
    assert "fsdp-lab" in said and "'anywidget>=" in said and "'jupyterlab_widgets>=3'" in said


def test_what_an_environment_lacks_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "share/jupyter/labextensions/anywidget").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert missing(tmp_path) == ["jupyterlab_widgets>=3"]
