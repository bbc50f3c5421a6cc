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


@pytest.mark.slow
def test_it_serves_until_ctrl_c_and_leaves_nothing(tmp_path: Path):
    environment = {**os.environ,
                   **{f"JUPYTER_{name}_DIR": str(tmp_path / name) for name in ("CONFIG", "DATA", "RUNTIME")},
                   "IPYTHONDIR": str(tmp_path / "ipython")}  # fmt: skip
    command = [sys.executable, "-m", "fsdp_lab", "lab", "--no-browser", "--dir", str(tmp_path / "notebooks")]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        given = [*command, f"--port={taken.getsockname()[1]}"]
        refused = subprocess.run(given, env=environment, capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert refused.returncode == 2 and "is not available" in refused.stderr and "another --port" in refused.stderr
    log = tmp_path / "out"
    with log.open("w") as out:
        process = subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT, cwd=tmp_path)
    family: list[psutil.Process] = []
    try:
        base, token = url_of(log, process)
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


def url_of(log: Path, process: subprocess.Popen[bytes]) -> tuple[str, str]:
    url = re.compile(r"(http://127\.0\.0\.1:\d+)/lab/tree/\S+\?token=(\w+)")
    until(lambda: url.search(log.read_text()) or process.poll() is not None, what="its URL")
    found = url.search(log.read_text())
    assert found, log.read_text()
    return found[1], found[2]


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
