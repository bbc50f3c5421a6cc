"""Collectives against their formula and against published timings."""

from __future__ import annotations

import csv
from dataclasses import replace
from importlib import resources

import pytest

from fsdp_lab.core.errors import ArgumentError
from fsdp_lab.planner.costs import RankGroup, collective_seconds, late_s, link_bytes
from fsdp_lab.planner.devices import PUBLISHED, Curve, machine

GB = 1e9


def test_a_ring_sends_what_the_textbook_says() -> None:
    assert link_bytes("all_gather", 8.0, 4) == link_bytes("reduce_scatter", 8.0, 4) == 6.0
    assert link_bytes("all_reduce", 8.0, 4) == 12.0


def test_one_group_over_hosts_has_their_whole_network_and_replicas_share_it() -> None:
    where = machine("a100-80", 32, hosts=4, network_gbit_per_s=400)
    whole = collective_seconds("all_gather", GB, RankGroup(size=32), where, PUBLISHED)
    assert whole == pytest.approx(GB * 31 / 32 / (50 * GB * PUBLISHED.network), rel=0.01)
    inside = collective_seconds("all_gather", GB, RankGroup(size=8), where, PUBLISHED)
    assert inside == pytest.approx(GB * 7 / 8 / (300 * GB * PUBLISHED.link), rel=0.1)
    replicas = collective_seconds("all_reduce", GB / 8, RankGroup(size=4, stride=8), where, PUBLISHED)
    assert replicas == pytest.approx(2 * 3 / 4 * GB / (50 * GB * PUBLISHED.network), rel=0.01), (
        "eight rings, an eighth each"
    )
    assert collective_seconds("all_gather", GB, RankGroup(size=1), where, PUBLISHED) == 0.0


def measured(name: str, rate: float) -> dict[str, Curve]:
    return {name: Curve.of([[1e3, 1e3 / rate], [1e9, 1e9 / rate]])}


def test_measured_collectives_take_the_time_of_the_links_that_their_group_uses() -> None:
    """Two hosts of four ranks: pairs at 8 GB/s, a host's four at 4, one of each host at 1 while four do so, all at 2."""
    rates = {"collectives": 2 * GB, "pairs": 8 * GB, "inside": 4 * GB, "across": GB}
    curves = {name: measured("all_reduce", rate) for name, rate in rates.items()}
    where = replace(machine("a100-80", 8, hosts=2), **curves)

    def seconds(size: int, stride: int = 1) -> float:
        alone = collective_seconds("all_reduce", GB, RankGroup(size=size, stride=stride), where, PUBLISHED)
        return alone / (link_bytes("all_reduce", GB, size) / GB)

    assert [seconds(2), seconds(4), seconds(8)] == pytest.approx([1 / 8, 1 / 4, 1 / 2])
    assert seconds(3) == pytest.approx((1 / 8 + 1 / 4) / 2), "between both"
    assert seconds(2, stride=2) == pytest.approx(1 / 8), "in one host"
    assert seconds(2, stride=4) == pytest.approx(1.0)
    assert seconds(4, stride=2) == pytest.approx(1 / 2), "two rings on the network, and four were measured"
    alone = replace(machine("a100-80", 2, hosts=2), collectives=curves["collectives"])
    assert collective_seconds("all_reduce", GB, RankGroup(size=2), alone, PUBLISHED) == pytest.approx(1 / 2)


def test_a_shared_bus_is_shared() -> None:
    t4 = machine("t4", 4, hosts=1)
    two, four = (collective_seconds("all_gather", GB, RankGroup(size=n), t4, PUBLISHED) for n in (2, 4))
    assert four / two == pytest.approx((3 / 4 * 4) / (1 / 2 * 2), rel=0.01)


def test_large_all_reduces_of_nccl_tests_are_within_the_calibrated_share() -> None:
    """A collective alone reaches more than one beside computing: the prediction is slower, and not twice as slow."""
    text = resources.files("fsdp_lab.planner").joinpath("data/collective_timings.csv").read_text(encoding="utf-8")
    names = {"A100": "a100-80", "H200": "h200", "B200": "b200"}
    checked = 0
    for row in csv.DictReader(text.splitlines()):
        if row["collective"] != "all_reduce" or row["nodes"] != "1" or row["n_gpus"] != "8" or row["gpu"] not in names:
            continue
        size = float(row["payload_bytes"])
        if size < 1 << 28 or not row["time_us"]:
            continue
        told = float(row["time_us"]) / 1e6
        found = collective_seconds("all_reduce", size, RankGroup(size=8), machine(names[row["gpu"]], 8), PUBLISHED)
        assert 0.8 < found / told < 2.0, (row["gpu"], size, found / told)
        checked += 1
    assert checked >= 7


def test_gathers_and_reductions_of_nccl_tests_follow_the_model_over_sizes_and_hosts() -> None:
    """Alone, with the shares of a link and of a network that large collectives reach: latency and bandwidth give the others,
    from 4 MiB to 16 GiB, on one host, four and ten. (Megatron's kernels use multicast, which rings do not.)"""
    alone = replace(PUBLISHED, link=0.8, network=0.86)
    text = resources.files("fsdp_lab.planner").joinpath("data/collective_timings.csv").read_text(encoding="utf-8")
    ratios: dict[int, list[float]] = {}
    for row in csv.DictReader(text.splitlines()):
        is_ring = row["collective"] in ("all_gather", "reduce_scatter") and "Megatron" not in row["source"]
        if row["gpu"] != "H100" or not is_ring or float(row["payload_bytes"]) < 4 << 20:
            continue
        ranks, hosts = int(row["n_gpus"]), int(row["nodes"])
        where = machine("h100", ranks, hosts=hosts, network_gbit_per_s=3200)
        size, told = float(row["payload_bytes"]), float(row["time_us"]) / 1e6
        found = collective_seconds(row["collective"], size, RankGroup(size=ranks), where, alone)
        ratios.setdefault(hosts, []).append(found / told)
    assert {hosts: len(each) for hosts, each in ratios.items()} == {1: 20, 4: 12, 10: 20}
    for hosts, each in ratios.items():
        assert sorted(each)[len(each) // 2] == pytest.approx(1.0, abs=0.2), hosts
        assert min(each) > 0.6 and max(each) < 1.3, hosts


@pytest.mark.parametrize(("ranks", "options", "said"), [
    (8, {"hardware": "a101"}, "hardware: 'a101' is not known; use one of a10"),
    (12, {"hosts": 5}, "hosts: 12 ranks cannot be divided among 5 hosts; use 4"),
    (8, {"network_gbit_per_s": -1}, "network: -1 Gb/s is refused"),
    (0, {}, "ranks: 0 is refused"),
])  # fmt: skip
def test_what_cannot_be_is_refused_with_the_nearest_that_can(ranks: int, options: dict[str, object], said: str) -> None:
    with pytest.raises(ArgumentError) as refused:
        machine(**{"hardware": "a100", "ranks": ranks, **options})  # type: ignore[arg-type]
    assert str(refused.value).startswith(said)


def test_the_last_of_many_ranks_comes_later() -> None:
    assert late_s(1, PUBLISHED) == 0.0
    assert late_s(512, PUBLISHED) == pytest.approx(511 * PUBLISHED.jitter_s)
