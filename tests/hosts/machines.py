"""Hosts as network namespaces on one bridge, with names of their own that resolve nowhere, and no default route.

The test's process is on the bridge too, as the kernel's host: it drives a lab as a notebook would. What crosses a host's
cable is counted by its interface. Needs root and Debian's iproute2."""

import contextlib
import glob
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cluster.conftest import FAKE
from tests.waiting import until

RENAMED = 'hostname "$0" && exec "$@"'
LIMIT_S = 20
KERNEL = """
import sys, time
from fsdp_lab.cluster.cluster import Cluster
from fsdp_lab.cluster.hosts import SlurmHosts, SshHosts
from fsdp_lab.spec.spec import Spec
cluster = Cluster(hosts={hosts}, rank_module={module!r}, persist={persist_h} or False).start()
cluster.call("apply", run="r", spec=Spec().replace(seed=7).to_dict(), fresh=True)
cluster.call("train", steps=5)
print(cluster.token, *cluster.pids, flush=True)
time.sleep(600)
"""


def which(name: str) -> str | None:
    """A program, also one of the system's, whose folder is not on each user's path."""
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=LIMIT_S).stdout


@dataclass
class Machine:
    """One host: the namespace `space`, in which its interface is "cable"."""

    name: str
    space: str
    address: str

    def command(self, *argv: str) -> list[str]:
        """Runs on this host, under its name. (`ip netns exec` would hide the control groups.)"""
        inside = ["nsenter", f"--net=/run/netns/{self.space}", "unshare", "--uts", "sh", "-c", RENAMED, self.name]
        return [*inside, *argv]

    def start(self, *argv: str, log: Path, **environment: str) -> subprocess.Popen[bytes]:
        with log.open("wb") as output:
            return subprocess.Popen(
                self.command(*argv), env={**os.environ, **environment}, stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def cable(self, state: str) -> None:
        """ "down" or "up"."""
        ip("-n", self.space, "link", "set", "cable", state)

    @property
    def sent_bytes(self) -> int:
        """What this host has sent through the cable."""
        (found,) = json.loads(ip("-n", self.space, "-s", "-j", "link", "show", "cable"))
        return int(found["stats64"]["tx"]["bytes"])

    @property
    def pids(self) -> list[int]:
        return [int(pid) for pid in ip("netns", "pids", self.space).split()]


@dataclass
class Site:
    """Hosts and the bridges between them; `here` is the address of this process's host on the first."""

    machines: list[Machine]
    here: str
    bridges: list[str]

    def connect(self, bridge: str, interface: str, addresses: Sequence[str]) -> None:
        """A network between all hosts: an interface of this name on each, with an address ("10.0.0.1/24")."""
        ip("link", "add", bridge, "type", "bridge")
        self.bridges.append(bridge)
        ip("link", "set", bridge, "up")
        for i, machine in enumerate(self.machines):
            ip("link", "add", interface, "netns", machine.space, "type", "veth", "peer", "name", f"{bridge}p{i}")
            ip("link", "set", f"{bridge}p{i}", "master", bridge, "up")
            # else IPv6 takes two seconds to look for another like it
            at_once = ["nodad"] if ":" in addresses[i] else []
            ip("-n", machine.space, "addr", "add", addresses[i], "dev", interface, *at_once)
            ip("-n", machine.space, "link", "set", interface, "up")


@contextmanager
def site(names: Sequence[str], number: int = 0) -> Iterator[Site]:
    """Hosts with these names, on network 10.231.x.0/24; skips where there are no rights for it."""
    net = f"10.231.{(os.getpid() + number) % 200 + 20}"
    bridge, here = f"lab{os.getpid() % 100000}x{number}", f"{net}.254"
    spaces = [f"fsdp-lab-{os.getpid()}-{number}-{i}" for i in range(len(names))]
    made = Site([Machine(n, s, f"{net}.{i + 1}") for i, (n, s) in enumerate(zip(names, spaces, strict=True))], here, [])
    try:
        try:
            for machine in made.machines:
                ip("netns", "add", machine.space)
                ip("-n", machine.space, "link", "set", "lo", "up")
            made.connect(bridge, "cable", [f"{machine.address}/24" for machine in made.machines])
            ip("addr", "add", f"{here}/24", "dev", bridge)
        except (OSError, subprocess.CalledProcessError) as e:
            pytest.skip(f"network namespaces are not to be had here: {getattr(e, 'stderr', '') or e}".strip())
        yield made
    finally:
        for machine in made.machines:
            with contextlib.suppress(subprocess.CalledProcessError):
                end(machine.pids)
            subprocess.run(["ip", "netns", "delete", machine.space], capture_output=True, timeout=LIMIT_S)
        for name in made.bridges:
            subprocess.run(["ip", "link", "delete", name], capture_output=True, timeout=LIMIT_S)


def kept_folders() -> set[str]:
    """Private folders on hosts, in the temporary folder that these hosts share with this process."""
    return set(glob.glob(f"{tempfile.gettempdir()}/fsdp_lab-*/exits.json"))


def words_of(pid: int) -> str:
    """Its command line; "" if it has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    return ""


def left(made: Site, *own: str) -> list[str]:
    """What runs on the hosts, but for command lines with one of these words."""
    running = [(m.name, words) for m in made.machines for pid in m.pids if (words := words_of(pid))]
    return [f"{name}: {words}" for name, words in running if not any(word in words for word in own)]


def killed_kernel(hosts: str, *arguments: str, persist_h: float) -> tuple[str, list[int]]:
    """The token and pids of ranks that have trained five steps and whose kernel was killed.

    Args:
        hosts: the configuration as Python's text, in which `arguments` are `sys.argv[1:]`."""
    kernel = subprocess.Popen(
        [sys.executable, "-c", KERNEL.format(hosts=hosts, module=FAKE, persist_h=persist_h), *arguments],
        stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    token, *pids = kernel.stdout.readline().split()  # type: ignore[union-attr]
    kernel.kill()
    kernel.wait(10)
    assert len(pids) == 2
    return token, [int(pid) for pid in pids]


def end(pids: Sequence[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


class SshServers:
    """A real sshd on each host, and the configuration with which ssh finds them by name. This process's user has a key."""

    def __init__(self, made: Site, folder: Path, *, pinned: bool = False, temporary: Path | None = None) -> None:
        """`temporary`: a folder that each host has for itself, as hosts that share no disk."""
        self.names, self.pinned, self.temporary = [m.name for m in made.machines], pinned, temporary
        for name in ("sshd", "ssh-keygen"):
            if which(name) is None:
                pytest.skip(f"there is no {name}: apt-get install openssh-server")
        self.folder, self.config = folder, folder / "config"
        key = folder / "key"
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True, timeout=LIMIT_S)
        shutil.copy(f"{key}.pub", folder / "authorized")
        Path("/run/sshd").mkdir(exist_ok=True)
        self.servers = {m.name: self.start(m) for m in made.machines}
        known = (folder / "key.pub").read_text().split()[:2]
        (folder / "known").write_text("".join(f"{m.address} {' '.join(known)}\n" for m in made.machines))
        common = f"IdentityFile {key}\nIdentitiesOnly yes\nUserKnownHostsFile {folder / 'known'}\nControlPath none\n"
        hosts = "".join(f"Host {m.name}\nHostName {m.address}\n" for m in made.machines)
        self.config.write_text(f"{hosts}Host *\n{common}")
        for machine in made.machines:
            until(lambda m=machine: self.answers(m), 10, f"sshd on {machine.name}")

    def start(self, machine: Machine) -> subprocess.Popen[bytes]:
        settings = {
            "ListenAddress": machine.address, "HostKey": self.folder / "key", "PidFile": "none", "UsePAM": "no",
            "AuthorizedKeysFile": self.folder / "authorized", "StrictModes": "no", "PermitRootLogin": "yes",
        }  # fmt: skip
        own = ()
        if self.temporary is not None:
            settings["SetEnv"] = f"TMPDIR={self.temporary}"
            own = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs tmpfs "$0" && exec "$@"', str(self.temporary))
        file = self.folder / f"sshd-{machine.name}"
        file.write_text("".join(f"{name} {value}\n" for name, value in settings.items()))
        core = str(self.names.index(machine.name) % (os.cpu_count() or 1))  # each host has one, for all that it starts
        program_ = (which("taskset") or "", "-c", core, which("sshd") or "") if self.pinned else (which("sshd") or "",)
        return machine.start(*own, *program_, "-D", "-e", "-f", str(file), log=self.folder / f"log-{machine.name}")

    def answers(self, machine: Machine) -> bool:
        with contextlib.suppress(OSError), socket.create_connection((machine.address, 22), timeout=1):
            return True
        return False

    def close(self) -> None:
        for server in self.servers.values():
            server.kill()
            server.wait(10)


def program(name: str) -> str:
    """Of the environment that runs the tests."""
    return str(Path(sys.executable).parent / name)


class Slurm:
    """Debian's slurmctld on this host, a slurmd on each of the others, and munge."""

    def __init__(self, made: Site, folder: Path) -> None:
        for name in ("slurmctld", "slurmd", "munged"):
            if which(name) is None:
                pytest.skip(f"there is no {name}: apt-get install --no-install-recommends slurm-wlm munge")
        self.conf = folder / "slurm.conf"
        names = ",".join(m.name for m in made.machines)
        nodes = "".join(
            f"NodeName={m.name} NodeAddr={m.address} NodeHostname={m.name} CPUs={os.cpu_count()} RealMemory=4000\n"
            for m in made.machines
        )
        self.conf.write_text(
            f"ClusterName=lab{os.getpid()}\nSlurmctldHost={socket.gethostname()}({made.here})\nSlurmUser=root\nSlurmdUser=root\n"
            "AuthType=auth/munge\nMpiDefault=none\nProctrackType=proctrack/linuxproc\nTaskPlugin=task/none\n"
            "JobAcctGatherType=jobacct_gather/none\nAccountingStorageType=accounting_storage/none\n"
            "SwitchType=switch/none\nSelectType=select/cons_tres\nSelectTypeParameters=CR_Core\nReturnToService=2\n"
            f"StateSaveLocation={folder}/state\nSlurmdSpoolDir={folder}/spool-%n\nSlurmctldPidFile={folder}/ctld.pid\n"
            f"SlurmdPidFile={folder}/slurmd-%n.pid\nSlurmdTimeout=20\nKillWait=2\nCompleteWait=0\n"
            f"SchedulerParameters=sched_interval=1,batch_sched_delay=0\n{nodes}"
            f"PartitionName=debug Nodes={names} Default=YES MaxTime=INFINITE State=UP\n"
        )
        (folder / "state").mkdir()
        self._started: list[subprocess.Popen[bytes]] = []
        self._munge()
        self.environment = {"SLURM_CONF": str(self.conf)}
        with (folder / "ctld.log").open("wb") as log:
            own = {**os.environ, **self.environment}
            self._started.append(subprocess.Popen(
                [which("slurmctld") or "", "-D", "-c"], env=own, stdout=log, stderr=log, start_new_session=True
            ))  # fmt: skip
        for m in made.machines:
            (folder / f"spool-{m.name}").mkdir()
            log_ = folder / f"slurmd-{m.name}.log"
            self._started.append(m.start(which("slurmd") or "", "-D", "-N", m.name, log=log_, **self.environment))
        until(lambda: self.states() == ["idle"] * len(made.machines), 30, f"Slurm's nodes are idle ({folder})")

    def _munge(self) -> None:
        """One serves all namespaces: it is reached by a socket's name."""
        subprocess.run(["sh", "-c", "mkdir -p /run/munge && chown munge: /run/munge"], check=True, timeout=LIMIT_S)
        if subprocess.run(["munge", "-n"], capture_output=True, timeout=LIMIT_S).returncode:
            munged = ["runuser", "-u", "munge", "--", which("munged") or "", "-F"]
            self._started.append(
                subprocess.Popen(munged, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            )
            until(lambda: not subprocess.run(["munge", "-n"], capture_output=True).returncode, 10, "munge")

    def ask(self, *command: str) -> str:
        own = {**os.environ, **self.environment}
        return subprocess.run(command, env=own, capture_output=True, text=True, timeout=LIMIT_S).stdout

    def states(self) -> list[str]:
        return self.ask("sinfo", "-h", "-N", "-o", "%t").split()

    def jobs(self) -> list[str]:
        return self.ask("squeue", "-h", "-o", "%i").split()

    def close(self) -> None:
        for process in reversed(self._started):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        for process in self._started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)
