"""`Lab.slurm` on Debian's real Slurm, with a slurmd on each of two hosts."""

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator

import pytest

from fsdp_lab.base.errors import ArgumentError
from fsdp_lab.cluster import StartError
from fsdp_lab.cluster.assembly import StartProgress
from fsdp_lab.cluster.batch_engines import SlurmEngines
from fsdp_lab.cluster.cluster import Cluster
from fsdp_lab.cluster.host_engines import started
from fsdp_lab.cluster.hosts import Hosts, SlurmHosts
from fsdp_lab.lab import Lab
from tests.cluster.conftest import FAKE
from tests.hosts.machines import Site, Slurm, kept_folders, killed_kernel, left
from tests.waiting import until

LEFT_S = 15.0
OWN = ("slurmd", "slurmstepd")
KEPT = "SlurmHosts(hosts=2, ranks_per_host=1, cut_s=5.0)"


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
    until(lambda: not slurm.jobs() and not left(two, *OWN), LEFT_S, "the job is given back")
    until(lambda: kept_folders() <= before, LEFT_S, "no private folder is left")


def on(hosts: Hosts, **options: object) -> Cluster:
    return Cluster(hosts=hosts, rank_module=FAKE, **options)  # type: ignore[arg-type]


@pytest.mark.slow
def test_ranks_train_in_a_job_that_is_given_back(two: Site, slurm: Slurm, hosts) -> None:
    stages: list[StartProgress] = []
    with Lab.slurm(hosts=2, ranks_per_host=1, time="10", history=False, progress=stages.append) as lab:
        assert lab.run(model="gpt2-1m", seq_len=32, steps=3).wait(120).step == 3
        assert [s.host for s in lab.cluster.status()] == ["alpha", "beta"]
        (job,) = slurm.jobs()
        assert f"granted: job {job}" in [p.stage for p in stages]
        assert slurm.ask("squeue", "-h", "-o", "%l").strip() == "10:00"
    assert not slurm.jobs() and not left(two, *OWN)


@pytest.mark.slow
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
        with pytest.raises(StartError, match="Slurm refuses the job: "):
            on(hosts(options=("--immediate=1",))).start()
        waiting = on(hosts())
        thread = threading.Thread(target=waiting.start)
        thread.start()
        until(lambda: len(slurm.jobs()) == 2, 20, "it waits")
        subprocess.run(["scancel", "--name=theirs"], check=True, timeout=20)
        thread.join(30)
        assert waiting.running
        waiting.close()
    finally:
        subprocess.run(["scancel", "--name=theirs"], timeout=20)


@pytest.mark.slow
def test_what_slurm_refuses_is_said(hosts) -> None:
    with pytest.raises(StartError, match="Slurm refuses the job: .*partition"):
        on(hosts(partition="none")).start()
    with pytest.raises(StartError, match="there is no /opt/none/python: give python="):
        on(hosts(python="/opt/none/python")).start()
    for given, field in (({"options": ("constraint",)}, "options"), ({"hosts": 0}, "hosts")):
        with pytest.raises(ArgumentError, match=field):
            SlurmHosts(**given)


def test_a_job_that_is_granted_and_revoked_is_refused() -> None:
    words = "echo 'salloc: Granted job allocation 7\nsalloc: error: Job allocation 7 has been revoked' >&2; exit 1"
    asked = started(["bash", "-c", words], b"")
    asked.process.wait()
    with pytest.raises(StartError, match="Slurm refuses the job: Job allocation 7 has been revoked"):
        SlurmEngines.__new__(SlurmEngines)._wait_in_queue(asked)


@pytest.mark.slow
def test_the_job_of_a_killed_kernel_is_given_back(two: Site, slurm: Slurm, hosts) -> None:
    killed_kernel(KEPT, persist_h=0)
    until(lambda: not slurm.jobs() and not left(two, *OWN), LEFT_S, "the job is given back")


@pytest.mark.nightly
def test_a_job_stays_for_the_next_kernel(two: Site, slurm: Slurm, hosts) -> None:
    (_, pids), job = killed_kernel(KEPT, persist_h=1), slurm.jobs()
    with on(hosts(cut_s=5.0), persist=1) as cluster:
        assert cluster.attached and cluster.pids == pids and slurm.jobs() == job
        assert [(d["host"], d["pid"]) for d in cluster.call("describe")] == [("alpha", pids[0]), ("beta", pids[1])]
        os.kill(cluster.pids[1], signal.SIGKILL)
        until(lambda: 1 in cluster.lost, 15, "the lost rank")
        assert cluster.lost[1].host == "beta" and "SIGKILL" in cluster.lost[1].reason
        cluster.resize(2)
        assert [s.host for s in cluster.status()] == ["alpha", "beta"]
        subprocess.run(["scancel", *job], check=True, timeout=20)
        until(lambda: len(cluster.lost) == 2, 60, "both ranks are lost")
        assert {one.host for one in cluster.lost.values()} == {"alpha", "beta"}
        with pytest.raises(StartError, match="alpha: srun: error: .*[Jj]ob"):
            cluster.resize(2)
    killed_kernel(KEPT, persist_h=1 / 3600)
    assert slurm.jobs()
    until(lambda: not slurm.jobs() and not left(two, *OWN), 1 + LEFT_S, "nobody came, and the job is given back")
