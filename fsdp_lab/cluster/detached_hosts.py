"""Engines on other hosts that a former kernel of this machine left, as `DetachedEngines` are those on this machine.

While no kernel uses them, the controller here, the agents on the hosts, a Slurm job with its steps and the tunnels go on,
and the guardian here ends all of them if no kernel comes."""

from __future__ import annotations

from collections.abc import Mapping

from fsdp_lab.cluster.detached import DetachedCluster
from fsdp_lab.cluster.guardian import Guardian
from fsdp_lab.cluster.host_engines import HostEngines, Report
from fsdp_lab.cluster.hosts import Hosts, SlurmHosts, SshHosts
from fsdp_lab.cluster.local_engines import DetachedEngines, OnEnd, engine_environment
from fsdp_lab.cluster.slurm_engines import SlurmEngines
from fsdp_lab.cluster.ssh_engines import SshEngines


class DetachedHostEngines(DetachedEngines, HostEngines):
    """Their hosts are those of the record."""

    def __init__(
        self, record: DetachedCluster, guardian: Guardian, environment: Mapping[str, str], on_end: OnEnd, hosts: Hosts,
        report: Report,
    ) -> None:  # fmt: skip
        self._configure(hosts, environment, report)
        super().__init__(record, guardian, engine_environment(record.token, 1, environment), on_end)
        self._take_over(record.where)


class DetachedSshEngines(DetachedHostEngines, SshEngines):
    """The former kernel's tunnels are used as long as they stay open."""


class DetachedSlurmEngines(DetachedHostEngines, SlurmEngines):
    """Their steps are no children of this process: how an engine ended is asked of its host."""


DETACHED: Mapping[type[Hosts], type[DetachedHostEngines]] = {
    SshHosts: DetachedSshEngines, SlurmHosts: DetachedSlurmEngines,
}  # fmt: skip
