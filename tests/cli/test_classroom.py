"""`fsdp-lab lab --class`: the links and folders of a class, and that its kernels share the machine and nothing else."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import stat
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from jupyter_client.blocking import BlockingKernelClient

from fsdp_lab.cli import classroom, jupyter
from fsdp_lab.cli.classroom import Classroom
from fsdp_lab.cli.main import main
from fsdp_lab.cluster.room import RoomLimits

KERNEL_S = 120.0  # for a cell, on a busy machine


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--class", "0"], "class: 0 is refused"),
        (["--class", "201"], "200 people at most"),
        (["--class", "4", "--labs", "0"], "labs: 0 is refused"),
        (["--class", "4", "--ranks", "-1"], "ranks: -1 is refused"),
        (["--labs", "4"], "--labs is of a class"),
        (["--url", "https://x"], "--url is of a class"),
        (["--class", "4", "--url", "lab.example.org"], "no address of the web"),
    ],
)
def test_what_is_no_class_is_refused(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]):
    assert main(["lab", "--no-browser", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_each_learner_has_a_folder_and_a_link_and_changed_notebooks_stay(tmp_path: Path):
    made = Classroom(folder=tmp_path / "class", limits=RoomLimits(learners=11, labs=8))
    jupyter.class_folder(made)
    mine = tmp_path / "class/learner-07" / jupyter.FIRST_NOTEBOOK
    mine.write_text("changed")
    jupyter.class_folder(made)
    assert mine.read_text() == "changed"
    assert (tmp_path / "class/learner-11/solutions/write_your_own_fsdp.py").is_file()
    said = jupyter.announcement(made.folder, "127.0.0.1", 8888, "secret", made, "https://lab.example.org")
    assert "http://127.0.0.1:8888/lab/workspaces/teacher/tree/teacher/01_live_dashboard.ipynb?token=secret" in said
    assert (
        "11 learners, 8 labs at once, so take turns; 2 ranks for each" in said and "not of each other's files" in said
    )
    links = tmp_path / "class" / classroom.LINKS
    assert stat.S_IMODE(links.stat().st_mode) == 0o600, "it contains the token"
    names, urls = zip(*(line.split("\t") for line in links.read_text().splitlines()), strict=True)
    assert names == ("teacher", *made.names) and len(set(urls)) == 12
    here = "https://lab.example.org/lab/workspaces/learner-07/tree/learner-07/01_live_dashboard.ipynb?token=secret"
    assert urls[7] == here, "a workspace each: JupyterLab keeps its tabs there"


def test_links_name_an_address_that_learners_reach():
    assert classroom.base_url(None, "127.0.0.1", 8888) == "http://127.0.0.1:8888"
    assert classroom.base_url(None, "::1", 8888) == "http://[::1]:8888"
    assert classroom.base_url("https://lab.example.org/", "127.0.0.1", 8888) == "https://lab.example.org"
    assert "0.0.0.0" not in classroom.base_url(None, "0.0.0.0", 8888)


# -- the real thing ----------------------------------------------------------------------------------------------------


class ClassServer:
    """A class that really runs, and kernels in its folders."""

    def __init__(self, home: Path, *options: str) -> None:
        self.runtime, self.log, self._home = home / "RUNTIME", home / "out", home
        environment = {
            **os.environ,
            **{f"JUPYTER_{name}_DIR": str(home / name) for name in ("CONFIG", "DATA", "RUNTIME")},
            "IPYTHONDIR": str(home / "ipython"),
        }
        command = [sys.executable, "-m", "fsdp_lab", "lab", "--no-browser", "--dir", str(home / "class"), *options]
        with self.log.open("w") as out:
            self.process = subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT, cwd=home)
        self.base, self.token = self._url()
        self.clients: list[BlockingKernelClient] = []

    def _url(self) -> tuple[str, str]:
        deadline = time.monotonic() + 90
        while time.monotonic() < deadline:
            if found := re.search(r"(http://127\.0\.0\.1:\d+)/lab/\S+\?token=(\w+)", self.log.read_text()):
                return found[1], found[2]
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.1)
        raise AssertionError(self.log.read_text())

    def ask(self, path: str, data: dict[str, Any] | None = None) -> Any:
        request = urllib.request.Request(
            f"{self.base}{path}",
            data=None if data is None else json.dumps(data).encode(),
            headers={"Authorization": f"token {self.token}"},
            method="GET" if data is None else "POST",
        )
        with urllib.request.urlopen(request, timeout=60) as reply:
            return json.loads(reply.read())

    def kernel(self, notebook: str) -> BlockingKernelClient:
        """A kernel for a notebook of a learner's, as JupyterLab starts it."""
        wanted = {"path": notebook, "name": Path(notebook).name, "type": "notebook", "kernel": {"name": "python3"}}
        session = self.ask("/api/sessions", wanted)
        client = BlockingKernelClient(connection_file=str(self.runtime / f"kernel-{session['kernel']['id']}.json"))
        client.load_connection_file()
        client.start_channels()
        client.wait_for_ready(timeout=60)
        self.clients.append(client)
        return client

    def stop(self) -> None:
        for client in self.clients:
            client.stop_channels()
        family = psutil.Process(self.process.pid).children(recursive=True) if self.process.poll() is None else []
        self.process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(40)
        _, left = psutil.wait_procs(family, timeout=10)
        for p in left:
            p.kill()
        assert not left and self.process.returncode == 130, (left, self.log.read_text())


def execute(client: BlockingKernelClient, code: str) -> str:
    """What a cell printed, or its error."""
    said: list[str] = []

    def hear(message: dict[str, Any]) -> None:
        content = message["content"]
        if message["header"]["msg_type"] == "stream":
            said.append(content["text"])
        if message["header"]["msg_type"] == "error":
            said.append(f"{content['ename']}: {content['evalue']}")

    client.execute_interactive(code, output_hook=hear, timeout=KERNEL_S, stop_on_error=False)
    return "".join(said).strip()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ClassServer]:
    started = ClassServer(tmp_path, "--class", "3", "--labs", "1", "--ranks", "1")
    yield started
    started.stop()


@pytest.mark.slow
@pytest.mark.alone  # ranks of a class leave the cores to others, and so would wait for other tests
def test_two_learners_share_the_machine_and_see_nothing_of_each_other(server: ClassServer):
    """One lab at once: the second learner is refused, and has the place when the first kernel is killed."""
    first, second = (server.kernel(f"learner-0{i}/02_first_steps_in_code.ipynb") for i in (1, 2))
    start = "import os\nfrom fsdp_lab import Lab, History\nlab = Lab(ranks=1, progress=False)"
    train = "lab.run(model='gpt2-1m', steps=3).wait(); lab.history.flush(); print(len(lab.runs()), lab.notes[0])"
    assert execute(first, start) == ""
    ran = execute(first, train)
    assert ran.startswith("1 up to 1 lab of a class share this machine"), ran
    ranks = [int(pid) for pid in execute(first, "print(*[s.pid for s in lab.rank_status()])").split()]
    deadline = time.monotonic() + 10
    while os.getpriority(os.PRIO_PROCESS, ranks[0]) == 0 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert [os.getpriority(os.PRIO_PROCESS, pid) for pid in ranks] == [15]
    if Path("/proc/self/autogroup").exists():
        assert [Path(f"/proc/{pid}/autogroup").read_text().split()[-1] for pid in ranks] == ["15"]
    refused = execute(second, start)
    assert refused.startswith("ArgumentError: ranks: the machine of this class is full: 1 lab with 1 rank runs on it")
    assert execute(second, "print(len(History().runs()), os.getcwd().rpartition('/')[2])") == "0 learner-02"
    pid = int(execute(first, "print(os.getpid())"))
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while (said := execute(second, start)) and time.monotonic() < deadline:
        assert "is full" in said, said
        time.sleep(0.2)
    assert execute(second, train).startswith("1 up to 1 lab")
    teacher = server.kernel("teacher/02_first_steps_in_code.ipynb")
    assert execute(teacher, "from fsdp_lab import History\nprint(len(History().runs()))") == "0"
    kept = {name: Path(server.log.parent / "class" / name / ".fsdp-lab/history.sqlite3") for name in
            ("learner-01", "learner-02", "teacher")}  # fmt: skip
    assert [file.exists() for file in kept.values()] == [True, True, False]
    assert execute(second, "lab.close()") == ""
