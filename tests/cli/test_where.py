"""`--ssh` and `--slurm`: what they become, and what is refused before anything starts."""

from __future__ import annotations

import argparse

import pytest

from fsdp_lab.cli.console import Refused, add_hosts, hosts_of
from fsdp_lab.cluster.hosts import SlurmHosts, SshHosts


def hosts(*words: str):
    parser = argparse.ArgumentParser()
    add_hosts(parser)
    return hosts_of(parser.parse_args(words))


def test_hosts_by_ssh_and_of_slurm():
    assert hosts() is None
    found = hosts("--ssh", "gpu1, gpu2", "--gpus-per-host", "8", "--ssh-config", "config", "--sync-hosts")
    assert found == SshHosts(names=("gpu1", "gpu2"), gpus_per_host=8, ssh_args=("-F", "config"), sync=True)
    assert found.ranks == 16
    found = hosts("--slurm", "4", "--ranks-per-host", "2", "--time", "1:00:00", "--partition", "gpu")
    assert found == SlurmHosts(hosts=4, ranks_per_host=2, time="1:00:00", partition="gpu")
    assert found.request == ["--nodes=4", "--ntasks-per-node=2", "--time=1:00:00", "--partition=gpu"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--ssh", "a", "--slurm", "1", "--ranks-per-host", "1"), "choose one"),
        (("--ssh", "a"), "give --gpus-per-host N or --ranks-per-host N"),
        (("--ranks-per-host", "2"), "options for hosts are given and no hosts"),
        (("--ssh", "a", "--ranks-per-host", "1", "--time", "10"), "--time is of a Slurm job"),
    ],
)
def test_what_is_refused(words: tuple[str, ...], said: str):
    with pytest.raises(Refused, match=said):
        hosts(*words)
