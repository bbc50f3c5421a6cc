"""Which hosts a lab's ranks are to be on, and how they are reached: `SshHosts`, `SlurmHosts`. Configuration only."""

import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from fsdp_lab.base.errors import ArgumentError, check_whole, is_number

CUT_S = 20.0  # less than a collective waits for a rank: so it is the host that is named


@dataclass(frozen=True, kw_only=True)
class Hosts:
    """What is common to all.

    Args:
        gpus_per_host: so many ranks on each host, each with a GPU of its own; a host with fewer free GPUs is refused.
        ranks_per_host: so many, on GPUs where these are enough, else shared, else on CPUs. None, with `gpus_per_host` None:
            one for each GPU of the host, or one on a host without GPUs.
        python: the path of Python on the hosts; None: that of this kernel.
        sync: install what the hosts lack, in the versions of this kernel, and send this package.
        cut_s: how long ranks stay when nothing is heard of this kernel's host, as while a cable is cut."""

    gpus_per_host: int | None = None
    ranks_per_host: int | None = None
    python: str | None = None
    sync: bool = False
    cut_s: float = CUT_S

    def __post_init__(self) -> None:
        if not is_number(self.cut_s) or not 0 < self.cut_s < math.inf:
            raise ArgumentError("cut_s", f"{self.cut_s!r} is refused", "give a number of seconds above 0")
        for name in ("gpus_per_host", "ranks_per_host"):
            if (value := getattr(self, name)) is not None:
                check_whole(name, value)
        if self.gpus_per_host is not None and self.ranks_per_host is not None:
            beside = "it is given beside gpus_per_host, which has a rank for each GPU"
            raise ArgumentError("ranks_per_host", beside, "give one of them")

    @property
    def each(self) -> int | None:
        """Ranks on each host, if it is stated."""
        return self.gpus_per_host or self.ranks_per_host

    @property
    def host_count(self) -> int:
        raise NotImplementedError

    @property
    def ranks(self) -> int | None:
        """Number of ranks, if it is stated."""
        return None if self.each is None else self.each * self.host_count

    @property
    def path(self) -> str:
        return self.python or sys.executable


@dataclass(frozen=True, kw_only=True)
class SshHosts(Hosts):
    """Hosts that `ssh` reaches without a question: with a key, known by the names in ~/.ssh/config or by address.

    Args:
        names: "gpu1" or "user@10.0.0.7", each once.
        ssh_args: more arguments for ssh, such as ("-F", "config").
        tunnel: whether the hosts reach this kernel through SSH, as those that cannot connect to it must, such as to a laptop
            behind a router; None: where they do not reach it otherwise."""

    names: tuple[str, ...] = ()
    ssh_args: tuple[str, ...] = ()
    tunnel: bool | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        good = [n for n in self.names if isinstance(n, str) and re.fullmatch(r"[^\s-]\S*", n)]
        if not good or len({*good}) < len(self.names):
            hint = 'give names such as ["gpu1", "user@gpu2"], each once'
            raise ArgumentError("hosts", f"{list(self.names)} is no list of hosts", hint)

    @property
    def host_count(self) -> int:
        return len(self.names)


@dataclass(frozen=True, kw_only=True)
class SlurmHosts(Hosts):
    """Hosts of a job that Slurm grants.

    Args:
        hosts: how many.
        time: of the job, as Slurm writes it ("1:00:00"); None: the partition's default.
        partition, account, qos: as for sbatch; None: the defaults.
        options: more options of salloc, such as ("--constraint=h100", "--cpus-per-task=96"), or ("--immediate=60",), which
            limits the wait in the queue; else it waits until it is interrupted."""

    hosts: int = 1
    time: str | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    options: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("hosts", self.hosts)
        if bad := next((o for o in self.options if not str(o).startswith("-")), None):
            raise ArgumentError("options", f"{bad!r} is no option", 'give options of salloc, such as ("--exclusive",)')

    @property
    def host_count(self) -> int:
        return self.hosts

    @property
    def request(self) -> list[str]:
        """Options of salloc."""
        asked = {"nodes": self.hosts, "ntasks-per-node": self.each or 1, "gpus-per-node": self.gpus_per_host}
        asked |= {name: getattr(self, name) for name in ("time", "partition", "account", "qos")}
        return [*(f"--{name}={value}" for name, value in asked.items() if value is not None), *self.options]


def ssh_hosts(hosts: Sequence[str] | str, **options: object) -> SshHosts:
    """From what a user writes: a list, or names with commas between them. Raises ArgumentError."""
    names = [n.strip() for n in hosts.split(",")] if isinstance(hosts, str) else list(hosts)
    if "ssh_args" in options:
        options["ssh_args"] = tuple(options["ssh_args"])  # type: ignore[arg-type]
    return SshHosts(names=tuple(names), **options)  # type: ignore[arg-type]
