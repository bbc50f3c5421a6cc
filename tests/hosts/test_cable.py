"""What crosses the cable between two hosts: as many bytes as theory says, in the time that an emulated link predicts."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

import pytest

from fsdp_lab.lab import Lab
from fsdp_lab.runs import Run
from tests.hosts.machines import Site, SshServers, site

WORK = {"model": "gpt2-1m", "seq_len": 64}
HEADERS = 0.10  # of Ethernet, IP and TCP, their acknowledgements, and the ranks' reports to the kernel
WITHIN = 0.10
STEPS = 6


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


@pytest.mark.slow
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


@pytest.mark.nightly
def test_an_emulated_link_takes_the_time_of_a_cable_as_fast(hosts: tuple[Site, SshServers]) -> None:
    made, servers = hosts
    for machine in made.machines:
        machine.shape("25mbit")  # where a shaper that wakes 20 ms late, on a busy core, sends no less
    with lab_on(servers, 1) as lab:
        run = lab.run(**WORK, steps=STEPS).wait(300)
        cable_s = step_s(run)
        measured = min(e.carriers[0].bytes_per_s for e in run.events.since()[0] if e.carriers)
    assert 0.8 < measured / (25e6 / 8) < 1, "both directions of the cable at once"
    with Lab(2, history=False, progress=False) as lab:
        emulated_s = step_s(lab.run(**WORK, steps=STEPS, link=f"{measured / 1e6:.3f} MB/s").wait(300))
    print(f"{measured / 1e6:.2f} MB/s: {cable_s:.3f} s on the cable, {emulated_s:.3f} s emulated")
    assert emulated_s == pytest.approx(cable_s, rel=WITHIN)
