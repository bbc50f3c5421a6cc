"""`Lab.ssh` through a real sshd on each of two hosts."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from unittest.mock import Mock

import psutil
import pytest

from fsdp_lab.base.errors import ArgumentError
from fsdp_lab.base.process import marked
from fsdp_lab.cli.main import main
from fsdp_lab.cluster import RankLost, StartError
from fsdp_lab.cluster.assembly import StartProgress
from fsdp_lab.cluster.cluster import Cluster
from fsdp_lab.cluster.detached import detached_clusters
from fsdp_lab.cluster.engines import EngineProcess
from fsdp_lab.cluster.host_engines import HostAnswer, RankHost, SshEngines
from fsdp_lab.cluster.hosts import SshHosts
from fsdp_lab.lab import Lab
from fsdp_lab.runs import Run, RunState
from fsdp_lab.runs.recovery import REPLICA, RecoveryPolicy
from tests.cluster.conftest import FAKE
from tests.hosts.machines import Site, SshServers, end, kept_folders, killed_kernel, left, site, words_of
from tests.lab.events import losses
from tests.waiting import until

HEADERS = 0.10  # of Ethernet, IP and TCP, their acknowledgements, and the ranks' reports to the kernel
OWN = "/sshd-"  # its configuration
LEFT_S = 15.0  # for hosts to be clean after the kernel was killed
KEPT = 'SshHosts(names=("alpha", "beta"), ranks_per_host=1, ssh_args=("-F", sys.argv[1]), tunnel={})'


@pytest.fixture(scope="module")
def ssh(two: Site, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshServers]:
    servers = SshServers(two, tmp_path_factory.mktemp("ssh"))
    yield servers
    servers.close()


@pytest.fixture
def hosts(two: Site, ssh: SshServers) -> Iterator[Callable[..., SshHosts]]:
    """Makes the configuration; afterwards nothing runs on the hosts but their sshd."""
    before = kept_folders()
    yield lambda *names, **options: SshHosts(
        names=names or ("alpha", "beta"), ssh_args=("-F", str(ssh.config)), **{"ranks_per_host": 1, **options}
    )
    until(lambda: not left(two, OWN), LEFT_S, "the hosts are clean")
    until(lambda: kept_folders() <= before, LEFT_S, "no private folder is left")


def on(hosts: SshHosts) -> Cluster:
    return Cluster(hosts=hosts, rank_module=FAKE)


# -- from the start to the end -----------------------------------------------------------------------------------------
def sent(run: Run) -> list[tuple[int, int]]:
    """(to other hosts, in reduce-scatters) of each step of the first host's ranks, in bytes."""
    return [(sum(e.across_bytes for e in both), sum(e.comm["reduce_scatter"].link_bytes for e in both))
            for both in ([e for e in step.events if e.host == "alpha"] for step in run.events.steps())]  # fmt: skip


@pytest.mark.slow
def test_both_hosts_train_what_crosses_the_cable_is_as_theory_says_and_nothing_is_left(two: Site, ssh: SshServers):
    """With F ranks in each of R shard groups a rank sends (F-1)/F of the gradients inside its group, and 2 (R-1)/R of its
    F-th part of them to the other groups (arXiv 2304.11277, section 3.2.2): for F = R = 2 a half each, and no parameters.
    The interface has counted as much. Full sharding sends gradients and parameters through the cable."""
    stages: list[StartProgress] = []
    alpha = two.machines[0]
    counted, told = {}, {}
    with Lab.ssh(["alpha", "beta"], ranks_per_host=2, ssh_args=["-F", str(ssh.config)], history=False,
                 progress=stages.append) as lab:  # fmt: skip
        for sharding in ("hybrid_shard", "full_shard"):
            lab.run(model="gpt2-1m", seq_len=64, sharding=sharding, steps=2).wait(120)  # what is sent once
            before = alpha.sent_bytes
            run = lab.run(lab.spec, steps=12, fresh=False).wait(120)
            counted[sharding], told[sharding] = alpha.sent_bytes - before, sent(run)
        assert [s.host for s in lab.cluster.status()] == ["alpha"] * 2 + ["beta"] * 2
        assert "looking at hosts" in [p.stage for p in stages]
        words = [words_of(pid) for m in two.machines for pid in m.pids]
        keys = [lab.client.curve_serverkey.decode(), lab.client.session.key.decode()]
        assert not any(key in line for key in keys for line in words), "no key is on a command line"
        assert not any("IPP_ENABLE_CURVE" in note for note in lab.notes) and lab.client.curve_serverkey
    assert not left(two, OWN) and not lab.cluster.processes
    for sharding, steps in told.items():
        assert counted[sharding] == pytest.approx(sum(across for across, _ in steps), rel=HEADERS), sharding
    across, inside = (median(figures) for figures in zip(*told["hybrid_shard"], strict=True))
    assert across == pytest.approx(inside, rel=0.001)  # but for the vote
    assert across < 0.5 * median(full for full, _ in told["full_shard"])  # in a ring its gathers send less


@pytest.mark.slow
def test_hosts_are_clean_when_the_kernel_and_its_guardian_are_killed(two: Site, ssh: SshServers, hosts) -> None:
    """As when the kernel's host loses its power, but that its controller is killed too: no more is heard of it."""
    with on(hosts(cut_s=5.0)) as cluster:
        for pid in cluster.processes:
            os.kill(pid, signal.SIGKILL)
        os.kill(cluster.membership.engines._guardian.identity.pid, signal.SIGKILL)
        until(lambda: not left(two, OWN), LEFT_S, "the hosts are clean")


@pytest.mark.slow
def test_an_interrupted_start_leaves_nothing(two: Site, ssh: SshServers, hosts) -> None:
    stage = threading.Event()

    def report(progress: StartProgress) -> None:
        if progress.stage == "starting engines" and progress.total == 2 and not stage.is_set():
            stage.set()
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        Cluster(hosts=hosts(), rank_module=FAKE, report=report).start()


# -- what cannot work is said ------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_a_host_that_cannot_be_reached_or_used_is_said(two: Site, ssh: SshServers, hosts) -> None:
    alpha, other = two.machines[0], ssh.folder / "other"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(other)], check=True)
    named, _, common = ssh.config.read_text().partition("Host *")
    own = (
        f"Host closed\nHostName {alpha.address}\nPort 2222\n"
        f"Host locked\nHostName {alpha.address}\nIdentityFile {other}\nIdentitiesOnly yes\n"
        f"UserKnownHostsFile {ssh.folder}/known\n"
        f"Host stranger\nHostName {alpha.address}\nUserKnownHostsFile /dev/null\nIdentityFile {ssh.folder}/key\n"
    )
    for names, said in (
        (("alpha", "nowhere"), r"ssh to nowhere failed \(.*resolve.*\): it must work without a question"),
        (("closed",), r"closed failed \(.*refused.*\)"),
        (("locked",), r"locked failed \(.*Permission denied"),
        (("stranger",), r"stranger failed \(Host key verification"),
    ):
        config = ssh.folder / "bad"
        config.write_text(own + named + ("" if "locked" in names else f"Host *{common}"))
        with pytest.raises(StartError) as refused:
            on(SshHosts(names=names, ssh_args=("-F", str(config)), ranks_per_host=1)).start()
        assert re.search(said, str(refused.value)) and "\n" not in str(refused.value)
    with pytest.raises(StartError, match=r"alpha has no /opt/none/python.*give python="):
        on(hosts(python="/opt/none/python")).start()
    with pytest.raises(ArgumentError, match=r"gpus_per_host: 1 GPUs a host are not to be had on (alpha|beta)"):
        on(hosts(ranks_per_host=None, gpus_per_host=1)).start()


def test_invalid_hosts_are_refused_before_anything_starts() -> None:
    wrong = [({"names": names}, "hosts") for names in ((), ("",), ("-oProxyCommand=evil",), ("a", "a"))]
    wrong += [({"ranks_per_host": 0}, "ranks_per_host"), ({"ranks_per_host": 2, "gpus_per_host": 2}, "gpus_per_host")]
    for given, field in wrong:
        with pytest.raises(ArgumentError, match=field):
            SshHosts(**{"names": ("a",), **given})


# -- ranks that stay, and ranks that move ------------------------------------------------------------------------------
@pytest.mark.slow
def test_the_next_kernel_finds_the_ranks_on_their_hosts(two: Site, ssh: SshServers, hosts) -> None:
    token, pids = killed_kernel(KEPT.format(True), str(ssh.config), persist_h=1)
    with Cluster(hosts=hosts(tunnel=True), rank_module=FAKE, persist=1) as cluster:
        assert cluster.attached and (cluster.token, cluster.pids) == (token, pids)
        assert cluster.membership.engines._connection["interface"] == "tcp://127.0.0.1", "all comes through ssh"
        assert [s.host for s in cluster.status()] == ["alpha", "beta"]
        assert [t["step"] for t in cluster.assembly.attached_status] == [5, 5]
        held = cluster.assembly.attached_status[0]["spec"]
        assert all(t["carried"] for t in cluster.call("apply", run="again", spec=held, fresh=False))
        assert [t["step"] for t in cluster.call("train", steps=3)] == [8, 8]
        os.kill(cluster.pids[1], signal.SIGKILL)
        until(lambda: 1 in cluster.lost, 15, "the lost rank")
        assert cluster.lost[1].host == "beta" and "SIGKILL" in cluster.lost[1].reason
        cluster.resize(3)
        assert [s.host for s in cluster.status()] == ["alpha", "alpha", "beta"] and cluster.pids[0] == pids[0]
        assert detached_clusters()[0].pids == tuple(cluster.pids)


@pytest.mark.nightly
def test_ranks_on_hosts_that_nobody_comes_for_end(two: Site, ssh: SshServers, hosts, capsys) -> None:
    killed_kernel(KEPT.format(None), str(ssh.config), persist_h=1 / 3600)
    assert left(two, OWN)
    until(lambda: not left(two, OWN), 1 + LEFT_S, "the limit has ended them")
    token, _ = killed_kernel(KEPT.format(None), str(ssh.config), persist_h=1)
    assert main(["ranks"]) == 0
    assert f"{token[:8]}  2 ranks on cpu of alpha, beta; no kernel uses them" in capsys.readouterr().out
    assert main(["ranks", "--end", token[:8]]) == 0
    until(lambda: not left(two, OWN), LEFT_S, "they were ended")


@pytest.mark.slow
def test_ranks_move_to_hosts_and_back(hosts) -> None:
    """A host that is not found costs nothing; where a start fails there are as many ranks as before, where they were."""
    with Cluster(2, rank_module=FAKE) as cluster:
        token = cluster.token
        cluster.move(hosts())
        assert [s.host for s in cluster.status()] == ["alpha", "beta"] and not cluster.local
        assert cluster.token != token and not marked(token), "those before have ended"
        kept, ended = (cluster.token, cluster.pids), []
        with pytest.raises(StartError, match="ssh to nowhere failed"):
            cluster.move(hosts("nowhere"), before=lambda: ended.append(True))
        assert (cluster.token, cluster.pids) == kept and not ended, "it was looked for first"
        with pytest.raises(ArgumentError, match="gpus_per_host"):
            cluster.move(hosts("beta", ranks_per_host=None, gpus_per_host=1))
        assert [d["pid"] for d in cluster.call("describe")] == cluster.pids and cluster.ranks == 2
        cluster.move(None, 3)
        assert cluster.local and cluster.ranks == 3 and len({s.host for s in cluster.status()} - {"alpha", "beta"}) == 1


def test_a_host_is_asked_again_how_an_engine_ended() -> None:
    """Its agent looks at its engines now and then."""
    engines, alpha = SshEngines.__new__(SshEngines), RankHost(name="alpha", id="a", pids={5})
    said = [{"alpha": HostAnswer(value={"running": [], "exits": exits, "logs": {}})} for exits in ({}, {"5": -9})]
    vars(engines).update(token="t", shell=Mock(), _hosts={"alpha": alpha}, _unreached_s={}, _exits={}, _logs={})
    engines.shell.script.side_effect = said
    assert engines.exit_code(EngineProcess(engine=0, pid=5, host_id="a")) == -9


def test_a_process_that_ends_meanwhile_does_not_keep_tunnels_from_opening(monkeypatch: pytest.MonkeyPatch) -> None:
    gone, ssh = Mock(cmdline=Mock(side_effect=psutil.NoSuchProcess(9))), Mock(cmdline=lambda: ["ssh", "-R", "alpha"])
    monkeypatch.setattr("fsdp_lab.cluster.host_engines.marked", lambda token: [gone, ssh])
    engines = SshEngines.__new__(SshEngines)
    vars(engines).update(token="t", _connection={})
    engines._open_tunnels(["alpha"])


# -- software ----------------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_a_host_without_this_package_is_said_or_sent_it(hosts, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its Python has this environment's packages but for fsdp_lab."""
    folder = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (target,) = folder.glob("lib/python*/site-packages")
    for entry in next(Path(p) for p in sys.path if p.endswith("site-packages")).iterdir():
        if "fsdp_lab" not in entry.name and entry.name != "__pycache__":
            (target / entry.name).symlink_to(entry)
    bare = str(folder / "bin" / "python")
    monkeypatch.setattr("fsdp_lab.cluster.host_engines.package_path", lambda: "/nowhere")
    monkeypatch.setattr("fsdp_lab.cluster.host_engines.SENT_FOLDER", str(tmp_path / "code"))
    lacks = r"alpha has no fsdp_lab: install version .*give sync=True|give sync=True: alpha"
    with pytest.raises(StartError, match=lacks):
        on(hosts(python=bare)).start()
    with Cluster(hosts=hosts(python=bare, sync=True)) as cluster:  # its own rank module, which was sent as well
        files = cluster.client[:].apply_sync(eval, "__import__('fsdp_lab').__file__")
    assert all(file.startswith(str(tmp_path / "code")) for file in files)
    assert all(folder.stat().st_mode & 0o077 == 0 for folder in (tmp_path / "code").iterdir())


# -- ranks that end ----------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_a_deaf_rank_and_one_beyond_a_cut_cable_are_ended_on_their_host(two: Site, ssh: SshServers, hosts) -> None:
    lost: list[RankLost] = []
    beta = two.machines[1]
    with on(hosts(cut_s=2.0)) as cluster:
        cluster.on_lost(lost.append)
        pid = cluster.pids[1]
        os.kill(pid, signal.SIGSTOP)
        cluster.dispatcher.end_rank(1, "was ended")
        until(lambda: not words_of(pid), 10, "its process has ended")
        until(lambda: len(lost) == 1, 10, "it is lost")
        cluster.resize(2)
        assert [s.host for s in cluster.status()] == ["alpha", "beta"]
        beta.cable("down")
        try:
            until(lambda: len(lost) == 2, 30, "the rank on the other side is lost")
            assert [one.host for one in lost] == ["beta", "beta"]
            until(lambda: set(beta.pids) == {ssh.servers["beta"].pid}, LEFT_S, "its host has ended it")
            cluster.resize(2)  # on the host that is left
            assert [s.host for s in cluster.status()] == ["alpha", "alpha"]
        finally:
            beta.cable("up")


# -- hosts that share no folder: state is carried, and a run outlives what heals ----------------------------------
WORK = {"model": "gpt2-1m", "seq_len": 32, "micro_batch": 2}
STEPS = 40


@pytest.fixture
def apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Site, SshServers]]:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    (tmp_path / "ssh").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    with site(["alpha", "beta"], 10) as made:
        servers = SshServers(made, tmp_path / "ssh", pinned=True, temporary=temporary)
        yield made, servers
        servers.close()
    assert list(temporary.iterdir()) == []


@pytest.mark.nightly
def test_state_is_carried_to_other_ranks_past_what_heals_and_from_a_host_that_dies(apart: tuple[Site, SshServers]):
    made, servers = apart
    beta = made.machines[1]
    with Lab.ssh("alpha,beta", ranks_per_host=1, ssh_args=["-F", str(servers.config)], history=False, progress=False,
                 cut_s=4.0) as lab:  # fmt: skip
        expected = losses(lab.run(**WORK, steps=STEPS, sharding="full_shard").wait(120))

        run = lab.run(**WORK, steps=STEPS, sharding="full_shard")
        until(lambda: run.step > 2, 60, "it trains")
        run.pause()
        grown = run.apply(world_size=4, micro_batch=1).wait(90)
        assert [s.host for s in lab.cluster.status()] == ["alpha"] * 2 + ["beta"] * 2
        shrunk = run.apply(world_size=1, micro_batch=4, sharding="no_shard").wait(90)
        assert grown.carried and shrunk.carried and [s.host for s in lab.cluster.status()] == ["alpha"]
        run.resume()
        run.wait(120)
        told = losses(run)
        assert told.keys() == expected.keys()
        assert all(told[step] == pytest.approx(loss, rel=1e-4) for step, loss in expected.items())

        lab.resize(2)
        policy = RecoveryPolicy(how="auto", ranks="fewer")
        run = lab.run(**WORK, steps=STEPS, sharding="no_shard", recover=policy)
        until(lambda: run.step > 2, 60, "it trains")
        servers.servers["beta"].kill()
        beta.cable("down")
        time.sleep(1.0)  # shorter than `cut_s`
        beta.cable("up")
        before = run.step
        until(lambda: run.step > before + 2, 60, "it goes on")
        assert not run.incidents and not run.done and lab.ranks == 2
        beta.cable("down")
        end(beta.pids)
        run.wait(120)
        assert run.state is RunState.FINISHED and run.incidents[0].source == REPLICA
        assert "beta" in run.incidents[0].sentence
        assert all(losses(run)[step] == pytest.approx(loss, rel=1e-4) for step, loss in expected.items())
        beta.cable("up")
