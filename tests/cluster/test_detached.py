"""Ranks that outlive their kernel, until the next one comes, somebody ends them, or nobody has come for long."""

import os
import re
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from fsdp_lab.base.errors import ArgumentError
from fsdp_lab.base.process import MARK, Identity, alive, end, machine, marked
from fsdp_lab.cli import jupyter
from fsdp_lab.cli.main import main
from fsdp_lab.cluster import ClusterError
from fsdp_lab.cluster.cluster import Cluster
from fsdp_lab.cluster.detached import FILE, MODULE, DetachedCluster, detached_clusters, detached_pids, private_folder
from tests.cluster.conftest import FAKE
from tests.waiting import until

KERNEL = """
import sys, time
from fsdp_lab.cluster.cluster import Cluster
from fsdp_lab.spec.spec import Spec

if __name__ == "__main__":
    cluster = Cluster(2, rank_module="tests.cluster.fake_rank", persist=float(sys.argv[1])).start()
    cluster.call("apply", run="r", spec=Spec().replace(seed=7).to_dict(), fresh=True)
    heard = []
    cluster.submit("train", steps=int(sys.argv[2]), take=heard.append)
    while not heard:
        time.sleep(0.01)
    if sys.argv[3] == "tear":
        cluster.dispatcher.send("train", {0: {"steps": 1}})
    if sys.argv[3] == "empty":
        cluster.interrupt()
        cluster.call("leave")
    print(cluster.token, flush=True)
    time.sleep(60)
"""


pytestmark = pytest.mark.usefixtures("temporary")


def kernel(hours: float, steps: int, how: str) -> str:
    """Starts a kernel that trains, ends it, and returns its cluster's token."""
    command = [sys.executable, "-c", KERNEL, str(hours), str(steps), how]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    token = process.stdout.readline().strip()
    assert token
    process.kill()
    process.wait(20)
    return token


@pytest.mark.slow
def test_the_next_kernel_finds_ranks_that_were_busy_when_theirs_was_killed(temporary: Path):
    """An interrupt while it waits for them loses nothing, and the former kernel's guardian leaves them alone."""
    token = kernel(1, 200, "kill")  # four seconds
    (record,) = detached_clusters()
    assert record.token == token and record.free and set(record.pids) < detached_pids()
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        Cluster(2, rank_module=FAKE, persist=1).start()
        time.sleep(60)  # if they were through before
    assert detached_clusters()[0].free and marked(token)
    with Cluster(2, rank_module=FAKE, persist=1) as cluster:
        assert cluster.attached and tuple(cluster.pids) == record.pids and cluster.token == token
        assert [told["step"] for told in cluster.assembly.attached_status] == [200, 200]
        assert [told["spec"]["workload"]["seed"] for told in cluster.assembly.attached_status] == [7, 7]
        assert detached_clusters()[0].owner == Identity.this()
        resume_held_spec(cluster)
        assert [t["step"] for t in cluster.call("train", steps=3)] == [203, 203]

        call = cluster.submit("train", steps=10_000)
        until(lambda: cluster.status()[0].step > 203)
        cluster.interrupt()
        assert all(r["stopped"] for r in call.results(5)), "SIGINT reaches them"

        cluster.membership.engines.unpersist()  # type: ignore[union-attr]  # as a change of ranks does, while it lasts
        until(lambda: len(guardians(token)) == 1)
        assert cluster.attached and [d["pid"] for d in cluster.call("describe")] == cluster.pids and cluster.running

        os.kill(cluster.pids[1], signal.SIGKILL)
        until(lambda: cluster.lost)
        assert "ended" in cluster.lost[1].reason
        cluster.resize(3)
        assert cluster.pids[0] == record.pids[0] and [t["rank"] for t in cluster.call("status")] == [0, 1, 2]
        assert detached_clusters()[0].pids == tuple(cluster.pids)
    assert not guardians(token) and marked(token) == [] and list(temporary.glob("fsdp_lab-*")) == []


def guardians(token: str) -> list[int]:
    return [p.pid for p in psutil.process_iter(["cmdline"]) if {MODULE, token} <= {*(p.info["cmdline"] or ())}]


def resume_held_spec(cluster: Cluster) -> None:
    """The Spec that they hold goes on."""
    held = cluster.assembly.attached_status[0]["spec"]
    assert all(t["carried"] for t in cluster.call("apply", run="again", spec=held, fresh=False))


@pytest.mark.slow
def test_a_rank_that_waits_for_what_its_kernel_had_no_time_to_send_is_freed(temporary: Path):
    token = kernel(1, 5, "tear")
    with Cluster(2, rank_module=FAKE, persist=1) as cluster:
        assert cluster.attached and cluster.token == token and not cluster.lost
        resume_held_spec(cluster)
        steps = [t["step"] for t in cluster.call("train", steps=3)]
        assert steps == [8, 8], "the step that only one rank began is given up"


@pytest.mark.slow
def test_ranks_that_hold_nothing_are_ended_and_others_are_left(temporary: Path):
    token = kernel(1, 5, "empty")
    with Cluster(1, rank_module=FAKE, persist=1) as other:
        assert not other.attached and marked(token)
    with Cluster(2, rank_module=FAKE, persist=1) as cluster:
        assert not cluster.attached and not marked(token) and [t["rank"] for t in cluster.call("status")] == [0, 1]
        said = re.search(r"and new ones started: rank [01] failed in attach", " ".join(cluster.notes))
        assert said, "whichever answers first"


def test_a_given_cluster_and_invalid_values_are_refused():
    for persist in (0, -1, float("nan"), "yes", None):
        with pytest.raises(ArgumentError, match="persist: .* is refused; give True for a day, a number of hours"):
            Cluster(2, persist=persist)
    with pytest.raises(ArgumentError, match="yours, and stay anyway"):
        Cluster(given="mine", persist=True)
    cluster = Cluster(1, persist=True)
    with pytest.raises(ClusterError, match="not started"):
        cluster.detach()


# -- nobody comes -------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_ranks_that_nobody_can_come_back_to_are_ended(temporary: Path):
    """One has died, and the others' time is over."""
    tokens = [kernel(1, 5, "kill")]
    (broken,) = detached_clusters()
    os.kill(broken.pids[0], signal.SIGKILL)
    tokens.append(kernel(2 / 3600, 5, "kill"))
    until(lambda: not any(map(marked, tokens)) and not list(temporary.glob("fsdp_lab-*")))
    until(lambda: not broken.guardian.alive)
    assert detached_clusters() == []


# -- the file, without ranks ------------------------------------------------------------------------------------------
@pytest.fixture
def left(temporary: Path) -> Iterator[DetachedCluster]:
    """A process that a dead kernel has left, and its file; the guardian is this process."""
    token = os.urandom(8).hex()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env={**os.environ, MARK: token})
    until(lambda: len(marked(token)) == 1)
    cluster = DetachedCluster(
        folder=private_folder(), token=token, machine=machine(), asked={"notebook": "a.ipynb"}, engines=(0,),
        pids=(child.pid,), placement={"seats": [{"device": "cpu"}], "notes": []}, begun_unix_s=time.time(),
        limit_s=7200.0, guardian=Identity.this(), owner=Identity(pid=os.getpid(), born="long ago"),
    )  # fmt: skip
    cluster.write()
    yield cluster
    end([psutil.Process(child.pid)], term_s=0)
    child.wait()


def test_only_its_user_can_read_the_file(left: DetachedCluster):
    assert stat.S_IMODE((left.folder / FILE).stat().st_mode) == 0o600
    assert stat.S_IMODE(left.folder.stat().st_mode) == 0o700 and detached_clusters() == [left]
    left.folder.chmod(0o755)
    assert detached_clusters() == [], "somebody else may have written what stands there"
    left.folder.chmod(0o700)
    (left.folder / FILE).chmod(0o644)
    assert detached_clusters() == []
    (left.folder / FILE).write_text("{")
    (left.folder / FILE).chmod(0o600)
    assert detached_clusters() == [] and left.folder.is_dir()
    left.write()
    end(marked(left.token), term_s=0)
    assert detached_clusters() == [] and not left.folder.exists(), "what a dead cluster left is removed"


def test_two_kernels_never_have_the_same_ranks(left: DetachedCluster):
    code = """
import sys
from pathlib import Path
from fsdp_lab.cluster.detached import DetachedCluster
from fsdp_lab.base.process import Identity
record = DetachedCluster.read(Path(sys.argv[1]))
input()
print(record.claim(Identity.this(), 60.0) is not None, flush=True)
input()
"""
    command = [sys.executable, "-c", code, left.folder]
    rivals = [subprocess.Popen(command, stdin=-1, stdout=-1, text=True) for _ in range(4)]
    try:
        for rival in rivals:
            rival.stdin.write("\n")  # type: ignore[union-attr]
            rival.stdin.flush()  # type: ignore[union-attr]
        assert sorted(rival.stdout.readline().strip() for rival in rivals) == ["False"] * 3 + ["True"]  # type: ignore[union-attr]
        (record,) = detached_clusters()
        assert not record.free and record.owner.pid in [rival.pid for rival in rivals]  # type: ignore[union-attr]
        assert not left.end() and marked(left.token), "what a kernel has is not ended beside it"
    finally:
        for rival in rivals:
            rival.communicate("\n", timeout=10)
    assert detached_clusters()[0].free, "its claim ends with it"


@pytest.mark.slow
def test_the_end_of_jupyterlab_spares_them_and_nobody_else(left: DetachedCluster):
    code = """
import os, subprocess, sys, time
sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
staying = subprocess.Popen(sleep, env={**os.environ, sys.argv[1]: sys.argv[2]})
print(staying.pid, subprocess.Popen(sleep).pid, flush=True)
time.sleep(60)
"""
    server = subprocess.Popen([sys.executable, "-c", code, MARK, left.token], stdout=subprocess.PIPE)
    staying, going = (psutil.Process(int(pid)) for pid in server.stdout.readline().split())
    until(lambda: staying.pid in detached_pids())
    jupyter.end(server)
    until(lambda: not alive(going))
    assert alive(staying)
    end([staying], term_s=0)


def test_they_are_listed_and_ended_by_a_command(left: DetachedCluster, capsys: pytest.CaptureFixture[str]):
    assert main(["ranks"]) == 0
    said = capsys.readouterr().out
    assert left.id in said and "1 rank on cpu" in said and "they end in 2.0 h" in said and "a.ipynb" in said
    assert main(["ranks", "--end", "no-such"]) == 2 and "no ranks have the id no-such" in capsys.readouterr().err
    assert (claimed := left.claim(left.guardian, 3600.0)) is not None
    assert main(["ranks", "--end", left.id]) == 2 and f"process {os.getpid()} uses" in capsys.readouterr().err
    assert main(["ranks", "--end"]) == 0 and marked(left.token), "what is in use is passed over"
    assert claimed.release() is not None
    assert main(["ranks", "--end"]) == 0 and f"{left.id}: 1 rank ended" in capsys.readouterr().out
    assert not marked(left.token) and not left.folder.exists()
    assert main(["ranks"]) == 0 and capsys.readouterr().out.strip().endswith("no persistent ranks")
