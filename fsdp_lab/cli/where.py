"""Options for ranks on other hosts: `--ssh gpu1,gpu2`, `--slurm 4`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from fsdp_lab.cli.console import Refused

if TYPE_CHECKING:
    from fsdp_lab.cluster.hosts import Hosts

COMMON = ("gpus_per_host", "ranks_per_host", "python")
OF_SLURM = ("time", "partition", "account", "qos")


def add_hosts(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("ranks on other hosts (see Lab.ssh and Lab.slurm)")
    add = group.add_argument
    add("--ssh", metavar="HOST,HOST", help="hosts that ssh reaches without a question")
    add("--ssh-config", metavar="FILE", help="for ssh, instead of ~/.ssh/config")
    add("--slurm", type=int, metavar="N", help="N hosts of a job that Slurm grants")
    add("--gpus-per-host", type=int, metavar="N", help="so many ranks on each host, each with a GPU")
    add("--ranks-per-host", type=int, metavar="N", help="so many ranks on each host")
    add("--python", metavar="PATH", help="of Python on the hosts (default: the same path as here)")
    add("--sync-hosts", action="store_true", help="install on the hosts what they lack")
    for name in OF_SLURM:
        add(f"--{name}", help="of the job, as for sbatch")


def hosts_of(args: argparse.Namespace) -> Hosts | None:
    """Raises Refused, ArgumentError."""
    common: dict[str, Any] = {name: getattr(args, name) for name in COMMON} | {"sync": args.sync_hosts}
    of_slurm = {name: value for name in OF_SLURM if (value := getattr(args, name)) is not None}
    if args.ssh is None and args.slurm is None:
        if any(common.values()) or of_slurm or args.ssh_config:
            raise Refused("options for hosts are given and no hosts; name them with --ssh, or give --slurm N")
        return None
    if args.ssh is not None and args.slurm is not None:
        raise Refused("--ssh and --slurm are given; choose one")
    if common["gpus_per_host"] is None and common["ranks_per_host"] is None:
        raise Refused("the ranks of each host are missing; give --gpus-per-host N or --ranks-per-host N")
    from fsdp_lab.cluster.hosts import SlurmHosts, ssh_hosts

    if args.slurm is not None:
        return SlurmHosts(hosts=args.slurm, **common, **of_slurm)
    if of_slurm:
        raise Refused(f"--{next(iter(of_slurm))} is of a Slurm job; leave it out with --ssh")
    return ssh_hosts(args.ssh, **common, ssh_args=("-F", args.ssh_config) if args.ssh_config else ())
