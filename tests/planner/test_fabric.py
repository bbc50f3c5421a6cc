"""Collectives against their formula and against published timings."""

import csv
import math
from dataclasses import replace
from pathlib import Path

import pytest

from fsdp_lab.planner.costs import RankGroup, collective_seconds, late_s, link_bytes
from fsdp_lab.planner.devices import PUBLISHED, Curve, machine

GB = 1e9


def test_a_ring_sends_what_the_textbook_says_over_the_whole_network_of_its_hosts_which_replicas_share() -> None:
    assert link_bytes("all_gather", 8.0, 4) == link_bytes("reduce_scatter", 8.0, 4) == 6.0
    assert link_bytes("all_reduce", 8.0, 4) == 12.0
    where = machine("a100-80", 32, hosts=4, network_gbit_per_s=400)
    whole = collective_seconds("all_gather", GB, RankGroup(size=32), where, PUBLISHED)
    assert whole == pytest.approx(GB * 31 / 32 / (50 * GB * PUBLISHED.network), rel=0.01)
    inside = collective_seconds("all_gather", GB, RankGroup(size=8), where, PUBLISHED)
    assert inside == pytest.approx(GB * 7 / 8 / (300 * GB * PUBLISHED.link), rel=0.1)
    replicas = collective_seconds("all_reduce", GB / 8, RankGroup(size=4, stride=8), where, PUBLISHED)
    eight_rings = 2 * 3 / 4 * GB / (50 * GB * PUBLISHED.network)  # an eighth each
    assert replicas == pytest.approx(eight_rings, rel=0.01)
    assert collective_seconds("all_gather", GB, RankGroup(size=1), where, PUBLISHED) == 0.0


def test_measured_collectives_take_the_time_of_the_links_that_their_group_uses() -> None:
    """Two hosts of four ranks: a host's four at 4 GB/s, one of each host at 1 while four do so, all at 2."""
    rates = {"collectives": 2 * GB, "inside": 4 * GB, "across": GB}
    curves = {name: {"all_reduce": Curve.of([[1e3, 1e3 / r], [1e9, 1e9 / r]])} for name, r in rates.items()}
    where = replace(machine("a100-80", 8, hosts=2), **curves)

    def seconds(size: int, stride: int = 1) -> float:
        alone = collective_seconds("all_reduce", GB, RankGroup(size=size, stride=stride), where, PUBLISHED)
        return alone / (link_bytes("all_reduce", GB, size) / GB)

    assert [seconds(2), seconds(4), seconds(8)] == pytest.approx([1 / 4, 1 / 4, 1 / 2])
    assert seconds(2, stride=2) == pytest.approx(1 / 4), "in one host"
    assert seconds(2, stride=4) == pytest.approx(1.0)
    assert seconds(4, stride=2) == pytest.approx(1 / 2), "two rings on the network, and four were measured"
    alone = replace(machine("a100-80", 2, hosts=2), collectives=curves["collectives"])
    assert collective_seconds("all_reduce", GB, RankGroup(size=2), alone, PUBLISHED) == pytest.approx(1 / 2)
    # a shared bus is shared
    t4 = machine("t4", 4, hosts=1)
    two, four = (collective_seconds("all_gather", GB, RankGroup(size=n), t4, PUBLISHED) for n in (2, 4))
    assert four / two == pytest.approx((3 / 4 * 4) / (1 / 2 * 2), rel=0.01)


NAMES = {"A100": "a100-80", "H100": "h100", "H200": "h200", "B200": "b200"}


def test_collectives_of_the_sizes_that_fsdp_sends_take_what_is_published() -> None:
    """By NCCL as it chooses by itself, with nccl-tests. (Megatron's kernels use multicast for gathers too.)"""
    text = (Path(__file__).parent / "research" / "data" / "collective_timings.csv").read_text(encoding="utf-8")
    ratios: list[float] = []  # predicted over measured
    for row in csv.DictReader(text.splitlines()):
        if row["gpu"] not in NAMES or not row["nodes"] or not row["time_us"] or "Megatron" in row["source"]:
            continue
        ranks, payload_bytes = int(row["n_gpus"]), float(row["payload_bytes"])
        where = machine(NAMES[row["gpu"]], ranks, hosts=int(row["nodes"]), network_gbit_per_s=3200)
        seconds = collective_seconds(row["collective"], payload_bytes, RankGroup(size=ranks), where, PUBLISHED)
        ratios += [seconds / float(row["time_us"]) * 1e6] if payload_bytes >= 64e6 else []
    ratios.sort()
    assert len(ratios) >= 80 and ratios[len(ratios) // 2] == pytest.approx(1.0, abs=0.1)
    assert ratios[0] > 0.6 and ratios[-1] < 1.2
    assert sum(abs(math.log(ratio)) for ratio in ratios) / len(ratios) < 0.1


def test_the_last_of_many_ranks_comes_later() -> None:
    assert late_s(1, PUBLISHED) == 0.0
    once, twice, more = (late_s(size, PUBLISHED) for size in (8, 64, 512))
    assert once == pytest.approx(math.log(8) * PUBLISHED.jitter_s)
    assert more - twice == pytest.approx(twice - once), "as much again for each eightfold number"
