"""`LauncherEngines`: engines started by one of ipyparallel's own launchers (PBS, LSF, SGE, HTCondor, MPI, ...), for systems
that `Lab.ssh` and `Lab.slurm` do not know."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ipyparallel.cluster.launcher import find_launcher_class
from traitlets.config import Config

from fsdp_lab.base.process import MARK
from fsdp_lab.cluster.addresses import own_addresses
from fsdp_lab.cluster.detached import EndCommand, write_end_commands
from fsdp_lab.cluster.errors import StartError
from fsdp_lab.cluster.guardian import package_path
from fsdp_lab.cluster.host_script import PREFIX
from fsdp_lab.cluster.hosts import LauncherHosts
from fsdp_lab.cluster.local_engines import ENVIRONMENT, LocalEngines, OnEnd, controller_args, engine_environment

STOP_S = 10.0  # for a batch system to take a job back


class LauncherEngines(LocalEngines):
    """The private folder is one that hosts find too. Engines get the controller's connection by their environment."""

    local = False

    def __init__(
        self,
        token: str,
        environment: Mapping[str, str],
        on_end: OnEnd,
        timeout_s: float,
        hosts: LauncherHosts,
        report: Callable[[str, int, int], None],
    ) -> None:
        self._asked, self._report_stage = hosts, report
        self._variables = {**ENVIRONMENT, "PYTHONPATH": package_path(), MARK: token, **environment}  # of the engines
        self._address = hosts.address or next((a for _, a in own_addresses() if ":" not in a), "")
        if not self._address:
            raise StartError("this machine has no address that other hosts could reach: give address=")
        super().__init__(token, engine_environment(token, hosts.count, environment), on_end, timeout_s)

    def _make_folder(self) -> Path:
        where = Path(self._asked.folder).expanduser() if self._asked.folder else Path.home()
        return Path(tempfile.mkdtemp(prefix=f".{PREFIX}", dir=where))

    @property
    def _controller_args(self) -> list[str]:
        return controller_args(engine_ip=self._address, lost_s=self._asked.cut_s)

    def _cluster_options(self) -> dict[str, Any]:
        options, name = super()._cluster_options(), self._asked.launcher
        try:
            kind = find_launcher_class(name, "engine")
        except (ValueError, TypeError, ImportError, KeyError) as e:
            raise StartError(f"ipyparallel has no launcher {name!r} ({e})") from None
        own: dict[str, Any] = dict(self._asked.options)
        if unknown := sorted(set(own) - set(kind.class_trait_names(config=True))):
            raise StartError(f"ipyparallel's {kind.__name__} has no option {unknown[0]!r}")
        if kind.class_traits(config=True).keys() & {"batch_file_name"}:
            own.setdefault("batch_file_name", str(self._folder / "job.sh"))  # else it is in the working folder
        options["config"].merge(Config({kind.__name__: own}))
        return {**options, "engines": kind}

    @property
    def default_ranks(self) -> int:  # type: ignore[override]
        return self._asked.count

    def add(self, n: int, ready: Callable[[int], None], timeout_s: float = 60) -> list[int]:
        before, begin_s = set(self.client.ids), time.monotonic()
        try:
            self._loop.run(self._cluster.start_engines(n, environment=self._variables), timeout_s)
        except Exception as e:
            why = " ".join(str(e).split())
            raise StartError(f"ipyparallel's launcher could not start the engines: {why}") from None
        launchers = [
            x for x in self._cluster.engines.values() if getattr(x, "job_id", "")
        ]  # those that can take jobs back
        commands = [EndCommand(argv=(*x.delete_command, x.job_id)) for x in launchers if x.delete_command]
        write_end_commands(self._folder, commands)

        def check(missing: int) -> None:
            limit_s = self._asked.queue_s
            if limit_s is not None and time.monotonic() - begin_s > limit_s:
                late = f"{missing} of {n} engines did not reach {self._address} within {limit_s:g} s"
                raise StartError(f"{late}: look at the job, or give another address=")

        return self._await_engines(n, before, ready, check)

    def _end_all(self) -> bool:
        for name in list(self._cluster.engines) if self._cluster is not None else ():
            with contextlib.suppress(Exception):
                self._loop.run(self._cluster.stop_engines(name), STOP_S)
        return self._cluster is None or not self._cluster.engines
