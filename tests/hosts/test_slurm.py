"""`Lab.slurm` on Debian's real Slurm, with a slurmd on each of two hosts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fsdp_lab.base.errors import ArgumentError
from fsdp_lab.cluster import ClusterError, RankLost, StartError
from fsdp_lab.cluster.assembly import StartProgress
from fsdp_lab.cluster.cluster import Cluster
from fsdp_lab.cluster.hosts import Hosts, LauncherHosts, SlurmHosts
from fsdp_lab.lab import Lab
from tests.cluster.conftest import FAKE
from tests.hosts.machines import Site, Slurm, eventually, kept_folders, within_start_limit

pytestmark = pytest.mark.slow
END_S, LEFT_S = 5.0, 15.0
KERNEL = """
import sys, time
from fsdp_lab.cluster.cluster import Cluster
from fsdp_lab.cluster.hosts import Hosts, LauncherHosts, SlurmHosts
cluster = Cluster(hosts=SlurmHosts(hosts=2, ranks_per_host=1), rank_module=sys.argv[1]).start()
print("started", flush=True)
time.sleep(600)
"""


KEPT = """
import sys, time
from fsdp_lab.cluster.cluster import Cluster
from fsdp_lab.cluster.hosts import SlurmHosts
hosts = SlurmHosts(hosts=2, ranks_per_host=1, cut_s=5.0)
cluster = Cluster(hosts=hosts, rank_module=sys.argv[1], persist=float(sys.argv[2])).start()
print(*cluster.pids, flush=True)
time.sleep(600)
"""


@pytest.fixture(scope="module")
def slurm(two: Site, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    made = Slurm(two, tmp_path_factory.mktemp("slurm"))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in made.environment.items():
            patch.setenv(name, value)
        yield made
    made.close()


@pytest.fixture
def hosts(two: Site, slurm: Slurm) -> Iterator[Callable[..., SlurmHosts]]:
    """Makes the configuration; afterwards there is no job, and nothing of it runs."""
    before = kept_folders()
    yield lambda **options: SlurmHosts(**{"hosts": 2, "ranks_per_host": 1, **options})
    eventually(lambda: not slurm.jobs() and not left(two), LEFT_S, "the job is given back")
    eventually(lambda: kept_folders() <= before, LEFT_S, "no private folder is left")


def left(made: Site) -> list[str]:
    """Processes on the hosts besides Slurm's own."""
    found = []
    for machine in made.machines:
        for pid in machine.pids:
            try:
                with open(f"/proc/{pid}/cmdline") as file:
                    words = file.read().replace("\0", " ")
            except OSError:
                continue
            if words and "slurmd" not in words and "slurmstepd" not in words:
                found.append(f"{machine.name}: {words}")
    return found


def on(hosts: Hosts, **options: object) -> Cluster:
    return Cluster(hosts=hosts, rank_module=FAKE, **options)  # type: ignore[arg-type]


def test_ranks_train_in_a_job_that_is_given_back(two: Site, slurm: Slurm, hosts) -> None:
    stages: list[StartProgress] = []
    begin_s = time.monotonic()
    lab = Lab.slurm(hosts=2, ranks_per_host=2, time="10", history=False, progress=stages.append)
    try:
        run = lab.run(model="gpt2-1m", seq_len=32, steps=3).wait(120)
        took_s = time.monotonic() - begin_s
        assert run.step == 3 and within_start_limit(took_s, 4)
        assert [s.host for s in lab.cluster.status()] == ["alpha"] * 2 + ["beta"] * 2
        (job,) = slurm.jobs()
        assert f"granted: job {job}" in [p.stage for p in stages]
        assert slurm.ask("squeue", "-h", "-o", "%l").strip() == "10:00"
    finally:
        begin_s = time.monotonic()
        lab.close()
    assert time.monotonic() - begin_s < END_S
    assert not slurm.jobs() and not left(two)


def test_a_queue_is_shown_and_can_be_left(slurm: Slurm, hosts) -> None:
    """Another job has the hosts."""
    subprocess.run(["salloc", "--no-shell", "--nodes=2", "--exclusive", "--job-name=theirs"], check=True, timeout=20)
    stages: list[str] = []

    def report(progress: StartProgress) -> None:
        stages.append(progress.stage)
        if "(Resources)" in progress.stage:
            signal.raise_signal(signal.SIGINT)

    try:
        with pytest.raises(KeyboardInterrupt):
            on(hosts(), report=report).start()
        assert "is pending (Resources)" in stages[-1]
        assert len(slurm.jobs()) == 1, "only theirs is left"
        with pytest.raises(StartError, match=r"job \d+ has waited \d+ s in Slurm's queue \(Resources\)"):
            on(hosts(queue_s=1.0)).start()
        waiting = on(hosts())
        thread = threading.Thread(target=waiting.start)
        thread.start()
        eventually(lambda: len(slurm.jobs()) == 2, 20, "it waits")
        subprocess.run(["scancel", "--name=theirs"], check=True, timeout=20)
        thread.join(30)
        assert waiting.running
        waiting.close()
    finally:
        subprocess.run(["scancel", "--name=theirs"], timeout=20)


def test_what_slurm_refuses_is_said(hosts) -> None:
    with pytest.raises(StartError, match="Slurm refuses the job: .*partition"):
        on(hosts(partition="none")).start()
    with pytest.raises(ArgumentError, match="options"):
        SlurmHosts(options=("constraint",))
    with pytest.raises(ArgumentError, match="hosts"):
        SlurmHosts(hosts=0)


def test_a_python_that_is_not_there(hosts) -> None:
    with pytest.raises(StartError, match="there is no /opt/none/python: give python="):
        on(hosts(python="/opt/none/python")).start()


def test_a_killed_rank_is_named_with_its_host(two: Site, hosts) -> None:
    lost: list[RankLost] = []
    with on(hosts()) as cluster:
        cluster.on_lost(lost.append)
        os.kill(cluster.pids[1], signal.SIGKILL)
        eventually(lambda: bool(lost), 10, "the lost rank")
        assert lost[0].host == "beta" and "SIGKILL" in lost[0].reason
        cluster.resize(2)
        assert [s.host for s in cluster.status()] == ["alpha", "beta"]


def test_a_job_that_ends_is_said_by_name(slurm: Slurm, hosts) -> None:
    lost: list[RankLost] = []
    with on(hosts()) as cluster:
        cluster.on_lost(lost.append)
        (job,) = slurm.jobs()
        subprocess.run(["scancel", job], check=True, timeout=20)
        eventually(lambda: len(lost) == 2, 20, "both ranks are lost")
        assert all(f"Slurm job {job} (cancelled)" in one.reason for one in lost)
        with pytest.raises(StartError, match=f"job {job} has ended"):
            cluster.resize(2)


def test_ipyparallel_s_own_launcher_starts_engines_too(two: Site, slurm: Slurm, hosts, tmp_path: Path) -> None:
    """As for batch systems that have no entry of their own: here ipyparallel's launcher for Slurm."""
    where = LauncherHosts(launcher="slurm", count=4, address=two.here, folder=str(tmp_path), queue_s=60.0)
    with on(where) as cluster:
        assert sorted(s.host for s in cluster.status()) == ["alpha"] * 2 + ["beta"] * 2
        assert len(slurm.jobs()) == 1 and cluster.client.curve_serverkey
        os.kill(cluster.pids[0], signal.SIGSTOP)
        cluster.dispatcher.end_rank(0, "was ended")
        eventually(lambda: 0 in cluster.lost, 10, "it is lost")
    assert not list(tmp_path.iterdir()) and not Path("slurm_engine.sbatch").exists()
    with pytest.raises(StartError, match="no launcher 'none'"):
        on(LauncherHosts(launcher="none", count=1, address=two.here, folder=str(tmp_path))).start()
    with pytest.raises(StartError, match="has no option 'quue'"):
        wrong = (("quue", "gpu"),)
        on(LauncherHosts(launcher="pbs", count=1, options=wrong, address=two.here, folder=str(tmp_path))).start()
    assert not list(tmp_path.iterdir())


def test_a_killed_kernel_gives_the_job_back(two: Site, slurm: Slurm, hosts) -> None:
    kernel = subprocess.Popen(
        [sys.executable, "-c", KERNEL, FAKE], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert kernel.stdout is not None and kernel.stdout.readline() == "started\n"
    assert slurm.jobs() and left(two)
    kernel.kill()
    kernel.wait(10)
    eventually(lambda: not slurm.jobs() and not left(two), LEFT_S, "the job is given back")


def test_the_job_stays_for_the_next_kernel_or_is_given_back(two: Site, slurm: Slurm, hosts) -> None:
    def kept(hours: float) -> list[int]:
        words = [sys.executable, "-c", KEPT, FAKE, str(hours)]
        kernel = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, start_new_session=True)
        assert kernel.stdout is not None
        pids = kernel.stdout.readline().split()
        kernel.kill()
        kernel.wait(10)
        return [int(pid) for pid in pids]

    pids, job = kept(1.0), slurm.jobs()
    with on(hosts(cut_s=5.0), persist=1) as cluster:
        assert cluster.attached and cluster.pids == pids and slurm.jobs() == job
        assert [s.host for s in cluster.status()] == ["alpha", "beta"] and cluster.call("ping") == pids
        subprocess.run(["scancel", *job], check=True, timeout=20)
        eventually(lambda: len(cluster.lost) == 2, 60, "both ranks are lost")
        assert f"Slurm job {job[0]} (cancelled)" in cluster.lost[0].reason
    kept(4 / 3600)
    assert slurm.jobs()
    eventually(lambda: not slurm.jobs() and not left(two), 4 + LEFT_S, "nobody came, and the job is given back")


def test_a_queue_is_left_where_the_move_to_it_is_cancelled(slurm: Slurm, hosts) -> None:
    def report(progress: StartProgress) -> None:
        if "pending" in progress.stage:
            raise ClusterError("cancelled")

    subprocess.run(["salloc", "--no-shell", "--nodes=2", "--exclusive", "--job-name=theirs"], check=True, timeout=20)
    try:
        with Cluster(2, rank_module=FAKE) as cluster:
            pids = cluster.pids
            with pytest.raises(ClusterError, match="cancelled"):
                cluster.move(hosts(), None, report)
            assert cluster.running and cluster.pids == pids and len(slurm.jobs()) == 1
    finally:
        subprocess.run(["scancel", "--name=theirs"], timeout=20)
