"""`fsdp-lab kernel install`: the kernel's description, and what other servers are told to install."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from fsdp_lab.cli import jupyter
from fsdp_lab.cli.jupyter import NEEDED, Server, missing
from fsdp_lab.cli.main import main


def test_the_kernel_runs_this_interpreter(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["kernel", "install", "--prefix", str(tmp_path)]) == 0
    described = json.loads((tmp_path / "share/jupyter/kernels/fsdp-lab/kernel.json").read_text())
    assert described["argv"][0] == sys.executable
    assert described["display_name"].startswith("fsdp_lab (Python ")
    assert "fsdp-lab" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["--prefix", "/dev/null"], ["--name", "a/b"]])
def test_what_cannot_be_registered_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]):
    assert main(["kernel", "install", *arguments]) == 2
    assert arguments[0] in capsys.readouterr().err


def test_a_server_of_another_environment_is_told_what_it_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "share/jupyter/labextensions/anywidget").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert missing(tmp_path) == [NEEDED[1]]
    server = Server(pid=1, port=8890, python="/opt/jupyter/bin/python", prefix=tmp_path)
    monkeypatch.setattr(jupyter, "running_servers", lambda: [server])
    said = "\n".join(jupyter.what_servers_need())
    assert "port 8890" in said
    assert "/opt/jupyter/bin/python -m pip install 'jupyterlab_widgets>=3'" in said


def test_where_no_server_runs_both_packages_are_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jupyter, "running_servers", list)
    said = "\n".join(jupyter.what_servers_need())
    assert "anywidget" in said
    assert "jupyterlab_widgets" in said
