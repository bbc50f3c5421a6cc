"""Hosts for this folder, and an ipyparallel cluster on them as a user would start it."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts.machines import Machine, Site, program, site
from tests.waiting import until


@pytest.fixture(scope="package")
def two() -> Iterator[Site]:
    with site(["alpha", "beta"]) as made:
        yield made


class TheirCluster:
    """A controller on one host and an engine on each of `engines`, started by hand."""

    def __init__(self, folder: Path, controller: Machine, engines: list[Machine], **environment: str) -> None:
        self.folder, self._started = folder, []
        ip_ = f"--ip={controller.address}"
        self._started.append(controller.start(
            program("ipcontroller"), f"--profile-dir={folder}", ip_, "--HeartMonitor.period=200", log=folder / "c.log",
            IPP_ENABLE_CURVE="1",
        ))  # fmt: skip
        file = folder / "security" / "ipcontroller-engine.json"
        until(lambda: file.exists() and file.stat().st_size > 0, 30, "the controller's connection file")
        for i, machine in enumerate(engines):
            engine = (
                "taskset",
                "-c",
                str(i % (os.cpu_count() or 1)),
                program("ipengine"),
                f"--profile-dir={folder}",
            )  # one core
            self._started.append(machine.start(*engine, log=folder / f"e{i}.log", **environment))

    @property
    def client_file(self) -> str:
        return str(self.folder / "security" / "ipcontroller-client.json")

    def close(self) -> None:
        for process in self._started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its schedulers as well
            process.wait(10)
