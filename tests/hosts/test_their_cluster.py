"""A cluster that its user started on several hosts: ranks find each other, whatever their networks and names are."""

import contextlib
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from fsdp_lab.cluster import StartError
from fsdp_lab.cluster.cluster import Cluster
from fsdp_lab.lab import Lab
from tests.cluster.conftest import FAKE
from tests.hosts.machines import Machine, Site, ip, program, site
from tests.waiting import until


class TheirCluster:
    """A controller on one host and an engine on each of `engines`, started by hand."""

    def __init__(self, folder: Path, controller: Machine, engines: list[Machine], **environment: str) -> None:
        self._started = []
        ip_ = f"--ip={controller.address}"
        self._started.append(controller.start(
            program("ipcontroller"), f"--profile-dir={folder}", ip_, "--HeartMonitor.period=200", log=folder / "c.log",
            IPP_ENABLE_CURVE="1",
        ))  # fmt: skip
        file = folder / "security" / "ipcontroller-engine.json"
        until(lambda: file.exists() and file.stat().st_size > 0, 30, "the controller's connection file")
        for i, machine in enumerate(engines):  # each has one core
            engine = ("taskset", "-c", str(i % (os.cpu_count() or 1)), program("ipengine"), f"--profile-dir={folder}")
            self._started.append(machine.start(*engine, log=folder / f"e{i}.log", **environment))

    def close(self) -> None:
        for process in self._started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its schedulers as well
            process.wait(10)


@pytest.fixture
def theirs(tmp_path: Path) -> Iterator[object]:
    started: list[TheirCluster] = []

    def start(controller: Machine, engines: list[Machine], **environment: str) -> str:
        folder = tmp_path / str(len(started))
        folder.mkdir()
        started.append(TheirCluster(folder, controller, engines, **environment))
        return str(folder / "security" / "ipcontroller-client.json")

    yield start
    for cluster in started:
        cluster.close()


def waited(given: str, n: int) -> Cluster:
    """A cluster without torch whose `n` engines have registered."""
    import ipyparallel as ipp

    client = ipp.Client(given, timeout=60)
    client.wait_for_engines(n, timeout=60, interactive=False)
    client.close()
    return Cluster(given=given, rank_module=FAKE)


@pytest.mark.slow
def test_losses_are_equal_bit_for_bit_to_those_of_one_host(two: Site, theirs) -> None:
    alpha, beta = two.machines
    given = theirs(alpha, [alpha, beta])
    waited(given, 2)
    changes = {"model": "gpt2-1m", "seq_len": 64, "sharding": "full_shard"}
    with Lab(2, cluster=given, reduction="rank_ordered", progress=False, history=False) as lab:
        assert {s.host for s in lab.cluster.status()} == {"alpha", "beta"}
        apart = lab.run(steps=4, **changes).wait(120)
        assert any("neither encrypted" in note for note in lab.notes)
        assert not any("IPP_ENABLE_CURVE" in note for note in lab.notes)
    with Lab(2, reduction="rank_ordered", progress=False, history=False) as lab:
        together = lab.run(steps=4, **changes).wait(120)
    assert apart.summary()["losses"] == together.summary()["losses"] != []


@pytest.mark.nightly
def test_hosts_train_over_the_interface_that_the_user_names_by_ipv6_alone(theirs) -> None:
    with site(["alpha", "beta"], 3) as made:
        made.connect(f"{made.bridges[0]}e", "extra", ["fd00:231::1/64", "fd00:231::2/64"])
        given = theirs(made.machines[0], made.machines, GLOO_SOCKET_IFNAME="extra")
        waited(given, 2)
        with Lab(2, cluster=given, progress=False, history=False) as lab:
            assert lab.run(model="gpt2-1m", seq_len=32, steps=2).wait(120).step == 2
            variables = lab.cluster.client[:].apply_sync(_variables)
    assert variables == [("extra", "=extra", "AF_INET6")] * 2


def _variables() -> tuple[str | None, ...]:
    import os

    return tuple(os.environ.get(n) for n in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_SOCKET_FAMILY"))


@pytest.mark.slow
def test_ranks_that_cannot_meet_are_said(theirs) -> None:
    """Each host reaches the controller's, which is this one, but not the other host."""
    with site(["alpha", "beta"], 5) as made:
        alpha, beta = made.machines
        folder_of_here = Machine("here", alpha.space, made.here)
        folder_of_here.command = lambda *argv: list(argv)  # type: ignore[method-assign]  # this process's own host
        ip("-n", alpha.space, "route", "add", "blackhole", f"{beta.address}/32")
        ip("-n", beta.space, "route", "add", "blackhole", f"{alpha.address}/32")
        cluster = waited(theirs(folder_of_here, made.machines), 2)
        with pytest.raises(StartError) as refused:
            cluster.start()
        assert re.match(r"(alpha does not reach beta|beta does not reach alpha): 10\.\d+\.\d+\.\d+ port \d+ \(cable\): ",
                        str(refused.value))  # fmt: skip
        assert "\n" not in str(refused.value)
