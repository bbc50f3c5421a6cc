"""What crosses the cable between two hosts: as many bytes as theory says, in the time that an emulated link predicts."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

import pytest

from fsdp_lab.lab import Lab
from fsdp_lab.runs import Run
from tests.hosts.machines import Site, SshServers, site

pytestmark = pytest.mark.slow
WORK = {"model": "gpt2-1m", "seq_len": 64}
HEADERS = 0.10  # of Ethernet, IP and TCP, their acknowledgements, and the ranks' reports to the kernel
WITHIN = 0.10
PLANNED_WITHIN = 0.35  # two ranks of a host share a core here


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Site, SshServers]]:
    with site(["alpha", "beta"], 8) as made:
        servers = SshServers(made, tmp_path_factory.mktemp("ssh"), pinned=True)
        yield made, servers
        servers.close()


def lab_on(servers: SshServers, ranks_per_host: int) -> Lab:
    return Lab.ssh("alpha,beta", ranks_per_host=ranks_per_host, ssh_args=["-F", str(servers.config)], history=False,
                   progress=False)  # fmt: skip


def sent(run: Run) -> list[tuple[int, int]]:
    """(to other hosts, in reduce-scatters) of each step of the first host's ranks, in bytes."""
    return [
        (sum(e.across_bytes for e in both), sum(e.comm["reduce_scatter"].link_bytes for e in both))
        for both in ([e for e in step.events if e.host == "alpha"] for step in run.events.steps())
    ]


def step_s(run: Run) -> float:
    return median(e.step_time_s for e in run.events.since()[0] if e.counts and e.rank == 0)


def test_hybrid_sharding_inside_hosts_sends_what_theory_says(hosts: tuple[Site, SshServers]) -> None:
    """With F ranks in each of R shard groups a rank sends (F-1)/F of the gradients inside its group, and 2 (R-1)/R of its
    F-th part of them to the other groups (arXiv 2304.11277, section 3.2.2): for F = R = 2 a half each, and no parameters.
    The interface has counted as much. Full sharding sends gradients and parameters through the cable."""
    made, servers = hosts
    alpha = made.machines[0]
    counted, told = {}, {}
    with lab_on(servers, 2) as lab:
        for sharding in ("hybrid_shard", "full_shard"):
            lab.run(**WORK, sharding=sharding, steps=2).wait(120)  # what is sent once
            before = alpha.counted("tx")
            run = lab.run(lab.spec, steps=12, fresh=False).wait(120)
            counted[sharding], told[sharding] = alpha.counted("tx") - before, sent(run)
    for sharding, steps in told.items():
        assert counted[sharding] == pytest.approx(sum(across for across, _ in steps), rel=HEADERS), sharding
    across, inside = (median(figures) for figures in zip(*told["hybrid_shard"], strict=True))
    assert across == pytest.approx(inside, rel=0.001)  # but for the vote
    assert across < 0.5 * median(full for full, _ in told["full_shard"])  # in a ring its gathers send less


@pytest.mark.alone
def test_an_emulated_link_takes_the_time_of_a_cable_as_fast(hosts: tuple[Site, SshServers]) -> None:
    made, servers = hosts
    for machine in made.machines:
        machine.shape("100mbit")
    with lab_on(servers, 1) as lab:
        run = lab.run(**WORK, steps=14).wait(300)
        cable_s = step_s(run)
        measured = min(e.carriers[0].bytes_per_s for e in run.events.since()[0] if e.carriers)
    assert 10e6 < measured < 12.5e6, "both directions of the cable at once"
    with Lab(2, history=False, progress=False) as lab:
        emulated_s = step_s(lab.run(**WORK, steps=14, link=f"{measured / 1e6:.3f} MB/s").wait(300))
    print(f"{measured / 1e6:.2f} MB/s: {cable_s:.3f} s on the cable, {emulated_s:.3f} s emulated")
    assert emulated_s == pytest.approx(cable_s, rel=WITHIN)


@pytest.mark.alone
@pytest.mark.timeout(600)
def test_the_planner_knows_both_links(hosts: tuple[Site, SshServers]) -> None:
    """Calibrated on two hosts of two ranks, it says which sharding suits their cable, and about how long a step takes."""
    made, servers = hosts
    for machine in made.machines:
        machine.shape("400mbit")
    measured, planned = dict[str, float](), dict[str, float]()
    with lab_on(servers, 2) as lab:
        here = lab.calibrate(passes=1).machine
        for sharding in ("full_shard", "hybrid_shard", "no_shard"):
            run = lab.run(**WORK, sharding=sharding, steps=10).wait(300)
            measured[sharding], planned[sharding] = step_s(run), lab.plan(run.spec).step_time_s
    print("; ".join(f"{s}: measured {measured[s]:.3f} s, planned {planned[s]:.3f} s" for s in measured))
    assert (here.hosts, here.per_host) == (2, 2)
    assert 30e6 < here.network_bytes_per_s < 55e6 < 5 * 55e6 < here.device.link_bytes_per_s
    assert sorted(planned, key=planned.__getitem__) == sorted(measured, key=measured.__getitem__)
    assert planned == pytest.approx(measured, rel=PLANNED_WITHIN)
