"""`Lab.ssh` through a real sshd on each of two hosts."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fsdp_lab.base.errors import ArgumentError
from fsdp_lab.base.process import marked
from fsdp_lab.cli.main import main
from fsdp_lab.cluster import RankLost, StartError
from fsdp_lab.cluster.assembly import StartProgress
from fsdp_lab.cluster.cluster import Cluster
from fsdp_lab.cluster.detached import detached_clusters
from fsdp_lab.cluster.hosts import SshHosts
from fsdp_lab.lab import Lab
from tests.cluster.conftest import FAKE
from tests.hosts.machines import Site, SshServers, eventually, kept_folders, program, within_start_limit

pytestmark = pytest.mark.slow
END_S = 5.0
LEFT_S = 15.0  # for hosts to be clean after the kernel was killed
KERNEL = """
import sys, time
from fsdp_lab.cluster.cluster import Cluster
from fsdp_lab.cluster.hosts import SshHosts
cluster = Cluster(hosts=SshHosts(names=("alpha", "beta"), ranks_per_host=2, ssh_args=("-F", sys.argv[1])),
                  rank_module=sys.argv[2]).start()
print("started", flush=True)
time.sleep(600)
"""
KEPT = """
import sys, time
from fsdp_lab.cluster.cluster import Cluster
from fsdp_lab.cluster.hosts import SshHosts
from fsdp_lab.spec.spec import Spec
config, module, tunnel, hours = sys.argv[1:]
hosts = SshHosts(names=("alpha", "beta"), ranks_per_host=1, ssh_args=("-F", config), tunnel=True if tunnel else None)
cluster = Cluster(hosts=hosts, rank_module=module, persist=float(hours)).start()
cluster.call("apply", run="r", spec=Spec().replace(seed=7).to_dict(), fresh=True)
cluster.call("train", steps=5)
print(cluster.token, *cluster.pids, flush=True)
time.sleep(600)
"""


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
    eventually(lambda: not left(two, ssh), LEFT_S, "the hosts are clean")
    eventually(lambda: kept_folders() <= before, LEFT_S, "no private folder is left")


def left(made: Site, ssh: SshServers) -> dict[str, list[str]]:
    """What runs on each host besides its sshd, and the folders that a lab has left."""
    found = {m.name: [_words(pid) for pid in m.pids if pid != ssh.servers[m.name].pid] for m in made.machines}
    return {name: words for name, words in found.items() if words}


def _words(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return "ended"


def on(hosts: SshHosts) -> Cluster:
    return Cluster(hosts=hosts, rank_module=FAKE)


# -- from the start to the end -----------------------------------------------------------------------------------------


def test_ranks_train_on_both_hosts_and_nothing_is_left(two: Site, ssh: SshServers, hosts) -> None:
    stages: list[StartProgress] = []
    begin_s = time.monotonic()
    lab = Lab.ssh(["alpha", "beta"], ranks_per_host=2, ssh_args=["-F", str(ssh.config)], history=False,
                  progress=stages.append)  # fmt: skip
    try:
        run = lab.run(model="gpt2-1m", seq_len=32, steps=3).wait(120)
        took_s = time.monotonic() - begin_s
        assert run.step == 3 and within_start_limit(took_s, 4)
        assert [s.host for s in lab.cluster.status()] == ["alpha"] * 2 + ["beta"] * 2
        assert "looking at hosts" in [p.stage for p in stages]
        words = [_words(pid) for m in two.machines for pid in m.pids]
        keys = [lab.client.curve_serverkey.decode(), lab.client.session.key.decode()]
        assert not any(key in line for key in keys for line in words), "no key is on a command line"
        assert not any("IPP_ENABLE_CURVE" in note for note in lab.notes) and lab.client.curve_serverkey
    finally:
        begin_s = time.monotonic()
        lab.close()
    assert time.monotonic() - begin_s < END_S
    assert not left(two, ssh) and not lab.cluster.processes


def test_the_command_line_runs_on_hosts(ssh: SshServers, hosts, tmp_path: Path) -> None:
    spec = tmp_path / "spec.json"
    spec.write_text('{"workload": {"model": "gpt2-1m", "seq_len": 32}}')
    where = ("--ssh", "alpha,beta", "--ssh-config", str(ssh.config), "--ranks-per-host", "1")
    command = [program("fsdp-lab"), "run", str(spec), "--steps", "2", *where]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "on 2 ranks: finished" in done.stdout, done.stdout + done.stderr


def test_a_killed_kernel_leaves_nothing_on_any_host(two: Site, ssh: SshServers, hosts) -> None:
    kernel = subprocess.Popen(
        [sys.executable, "-c", KERNEL, str(ssh.config), FAKE], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert kernel.stdout is not None and kernel.stdout.readline() == "started\n"
    assert len(left(two, ssh)) == 2
    kernel.kill()
    kernel.wait(10)
    eventually(lambda: not left(two, ssh), LEFT_S, "the hosts are clean")


def test_hosts_are_clean_when_the_kernel_and_its_guardian_are_killed(two: Site, ssh: SshServers, hosts) -> None:
    """As when the kernel's host loses its power, but that its controller is killed too: no more is heard of it."""
    with on(hosts()) as cluster:
        for pid in cluster.processes:
            os.kill(pid, signal.SIGKILL)
        os.kill(cluster.membership.engines._guardian.identity.pid, signal.SIGKILL)
        eventually(lambda: not left(two, ssh), LEFT_S, "the hosts are clean")


def test_an_interrupted_start_leaves_nothing(two: Site, ssh: SshServers, hosts) -> None:
    stage = threading.Event()

    def report(progress: StartProgress) -> None:
        if progress.stage == "starting engines" and progress.total == 2 and not stage.is_set():
            stage.set()
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        Cluster(hosts=hosts(), rank_module=FAKE, report=report).start()


# -- what cannot work is said ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (("alpha", "nowhere"), r"the name nowhere does not resolve \(.*\): give an address"),
        (("closed",), r"closed cannot be reached by SSH \(.*refused.*\)"),
        (("locked",), r"locked refuses the login \(.*Permission denied.*ssh-copy-id"),
        (("stranger",), r"the host key of stranger is not known"),
    ],
)
def test_a_host_that_cannot_be_reached(two: Site, ssh: SshServers, hosts, names, said: str) -> None:
    alpha = two.machines[0]
    text = ssh.config.read_text()
    other = ssh.folder / "other"
    if not other.exists():
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(other)], check=True)
    own = (
        f"Host closed\nHostName {alpha.address}\nPort 2222\n"
        f"Host locked\nHostName {alpha.address}\nIdentityFile {other}\nIdentitiesOnly yes\n"
        f"UserKnownHostsFile {ssh.folder}/known\n"
        f"Host stranger\nHostName {alpha.address}\nUserKnownHostsFile /dev/null\nIdentityFile {ssh.folder}/key\n"
    )
    config = ssh.folder / "bad"
    config.write_text(
        own + text.partition("Host *")[0] + ("" if "locked" in names else f"Host *{text.partition('Host *')[2]}")
    )
    begin_s = time.monotonic()
    with pytest.raises(StartError) as refused:
        on(SshHosts(names=names, ssh_args=("-F", str(config)), ranks_per_host=1)).start()
    assert re.search(said, str(refused.value)) and "\n" not in str(refused.value)
    assert time.monotonic() - begin_s < 10


def test_a_python_that_is_not_there(hosts) -> None:
    with pytest.raises(StartError, match=r"alpha has no /opt/none/python.*give python="):
        on(hosts(python="/opt/none/python")).start()


def test_invalid_hosts_are_refused_before_anything_starts() -> None:
    for names in ((), ("",), ("-oProxyCommand=evil",), ("a", "a")):
        with pytest.raises(ArgumentError, match="hosts"):
            SshHosts(names=names)
    with pytest.raises(ArgumentError, match="ranks_per_host"):
        SshHosts(names=("a",), ranks_per_host=0)
    with pytest.raises(ArgumentError, match="gpus_per_host"):
        SshHosts(names=("a",), ranks_per_host=2, gpus_per_host=2)


def test_gpus_that_are_not_there(hosts) -> None:
    with pytest.raises(ArgumentError, match=r"gpus_per_host: 1 GPUs a host are not to be had on (alpha|beta)"):
        on(hosts(ranks_per_host=None, gpus_per_host=1)).start()


def test_hosts_that_cannot_reach_this_machine_come_through_ssh(two: Site, hosts) -> None:
    with on(hosts(tunnel=True)) as cluster:
        assert {s.host for s in cluster.status()} == {"alpha", "beta"}
        assert cluster.call("ping") == cluster.pids
        info = cluster.membership.engines._connection
        assert info["interface"] == "tcp://127.0.0.1"


# -- ranks that stay, and ranks that move ------------------------------------------------------------------------------


def kept(ssh: SshServers, *, tunnel: bool = False, hours: float = 1.0) -> tuple[str, list[int]]:
    """The token and pids of ranks whose kernel was killed."""
    words = [sys.executable, "-c", KEPT, str(ssh.config), FAKE, "tunnel" if tunnel else "", str(hours)]
    kernel = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert kernel.stdout is not None
    token, *pids = kernel.stdout.readline().split()
    kernel.kill()
    kernel.wait(10)
    return token, [int(pid) for pid in pids]


def test_the_next_kernel_finds_the_ranks_on_their_hosts(two: Site, ssh: SshServers, hosts) -> None:
    token, pids = kept(ssh, tunnel=True)
    begin_s = time.monotonic()
    with Cluster(hosts=hosts(tunnel=True), rank_module=FAKE, persist=1) as cluster:
        assert time.monotonic() - begin_s < 5 and cluster.attached
        assert (cluster.token, cluster.pids) == (token, pids)
        assert [s.host for s in cluster.status()] == ["alpha", "beta"]
        assert [t["step"] for t in cluster.assembly.attached_status] == [5, 5]
        held = cluster.assembly.attached_status[0]["spec"]
        assert all(t["carried"] for t in cluster.call("apply", run="again", spec=held, fresh=False))
        assert [t["step"] for t in cluster.call("train", steps=3)] == [8, 8]
        os.kill(cluster.pids[1], signal.SIGKILL)
        eventually(lambda: 1 in cluster.lost, 15, "the lost rank")
        cluster.resize(3)
        assert [s.host for s in cluster.status()] == ["alpha", "alpha", "beta"] and cluster.pids[0] == pids[0]
        assert detached_clusters()[0].pids == tuple(cluster.pids)


def test_ranks_on_hosts_that_nobody_comes_for_end(two: Site, ssh: SshServers, hosts, capsys) -> None:
    kept(ssh, hours=4 / 3600)
    assert left(two, ssh)
    eventually(lambda: not left(two, ssh), 4 + LEFT_S, "the limit has ended them")
    token, _ = kept(ssh)
    assert main(["ranks"]) == 0
    assert f"{token[:8]}  2 ranks on cpu of alpha, beta; no kernel uses them" in capsys.readouterr().out
    assert main(["ranks", "--end", token[:8]]) == 0
    eventually(lambda: not left(two, ssh), LEFT_S, "they were ended")


def test_ranks_move_to_hosts_and_back(hosts) -> None:
    """A host that is not found costs nothing; where a start fails there are as many ranks as before, where they were."""
    with Cluster(2, rank_module=FAKE) as cluster:
        token = cluster.token
        cluster.move(hosts())
        assert [s.host for s in cluster.status()] == ["alpha", "beta"] and not cluster.local
        assert cluster.token != token and not marked(token), "those before have ended"
        kept, ended = (cluster.token, cluster.pids), []
        with pytest.raises(StartError, match="the name nowhere does not resolve"):
            cluster.move(hosts("nowhere"), before=lambda: ended.append(True))
        assert (cluster.token, cluster.pids) == kept and not ended, "it was looked for first"
        with pytest.raises(ArgumentError, match="gpus_per_host"):
            cluster.move(hosts("beta", ranks_per_host=None, gpus_per_host=1))
        assert cluster.call("ping") == cluster.pids and cluster.ranks == 2
        cluster.move(None, 3)
        assert cluster.local and cluster.ranks == 3 and len({s.host for s in cluster.status()} - {"alpha", "beta"}) == 1


# -- software ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Python with this environment's packages, and without fsdp_lab."""
    folder = tmp_path_factory.mktemp("bare")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    here = Path(os.__file__).parents[0]
    site_packages = next(Path(p) for p in sys.path if p.endswith("site-packages"))
    target = next(folder.glob("lib/python*/site-packages"))
    for entry in site_packages.iterdir():
        if "fsdp_lab" not in entry.name and entry.name != "__pycache__":
            (target / entry.name).symlink_to(entry)
    assert here.is_dir()
    return str(folder / "bin" / "python")


def test_a_host_without_this_package_is_said(hosts, bare: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fsdp_lab.cluster.host_engines.package_path", lambda: "/nowhere")
    with pytest.raises(
        StartError, match=r"alpha has no fsdp_lab: install version .*give sync=True|give sync=True: alpha"
    ):
        on(hosts(python=bare)).start()


def test_sync_sends_this_package(hosts, bare: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("fsdp_lab.cluster.host_engines.package_path", lambda: "/nowhere")
    monkeypatch.setattr("fsdp_lab.cluster.host_engines.SENT_FOLDER", str(tmp_path / "code"))
    with Cluster(hosts=hosts(python=bare, sync=True)) as cluster:  # its own rank module, which was sent as well
        files = cluster.client[:].apply_sync(_package_file)
    assert all(file.startswith(str(tmp_path / "code")) for file in files)
    assert all(folder.stat().st_mode & 0o077 == 0 for folder in (tmp_path / "code").iterdir())


def _package_file() -> str:
    import fsdp_lab

    return str(fsdp_lab.__file__)


# -- ranks that end ----------------------------------------------------------------------------------------------------


def test_a_killed_rank_is_named_with_its_host_and_replaced_there(two: Site, hosts) -> None:
    lost: list[RankLost] = []
    with on(hosts()) as cluster:
        cluster.on_lost(lost.append)
        os.kill(cluster.pids[1], signal.SIGKILL)
        eventually(lambda: bool(lost), 10, "the lost rank")
        assert lost[0].rank == 1 and lost[0].host == "beta" and "SIGKILL" in lost[0].reason
        cluster.resize(2)
        assert {s.host for s in cluster.status()} == {"alpha", "beta"}
        cluster.resize(4)
        assert [s.host for s in cluster.status()] == ["alpha"] * 2 + ["beta"] * 2
        cluster.resize(1)
        assert cluster.ranks == 1


def test_a_rank_that_does_not_answer_is_ended_on_its_host(two: Site, hosts) -> None:
    with on(hosts()) as cluster:
        os.kill(cluster.pids[1], signal.SIGSTOP)
        pid = cluster.pids[1]
        cluster.dispatcher.end_rank(1, "was ended")
        eventually(
            lambda: not Path(f"/proc/{pid}").exists() or _words(pid) in ("", "ended"), 10, "its process has ended"
        )
        eventually(lambda: 1 in cluster.lost, 10, "it is lost")


def test_a_cable_that_stays_cut_ends_that_hosts_ranks(two: Site, ssh: SshServers, hosts) -> None:
    lost: list[RankLost] = []
    with on(hosts(cut_s=4.0)) as cluster:
        cluster.on_lost(lost.append)
        beta = two.machines[1]
        beta.cable("down")
        try:
            eventually(lambda: bool(lost), 30, "the rank on the other side is lost")
            assert lost[0].host == "beta"
            eventually(lambda: set(beta.pids) == {ssh.servers["beta"].pid}, LEFT_S, "its host has ended it")
            cluster.resize(2)  # on the host that is left
            assert [s.host for s in cluster.status()] == ["alpha", "alpha"]
        finally:
            beta.cable("up")
