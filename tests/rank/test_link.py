"""A Session on an emulated link: bits stay, times follow, it is switched while training, and a stop does not wait for it."""

import os
import re
import signal
import threading
import time
from contextlib import closing
from typing import Any

import pytest

from fsdp_lab.base.events import Carrier, StepEvent
from fsdp_lab.wire import channels
from tests.pool import Place, Pool
from tests.rank.test_session import DDP, Call, _play, apply, fails, follow, play, running, session, spec, train


def _switched(place: Place, plan: list[tuple[dict[str, Any], int]]) -> tuple[list[dict[str, Any]], list[Any], bool]:
    events, answers, optimizers = [], [], set()
    with closing(session(place, reduction="rank_ordered")) as s:
        for given, steps in plan:
            answers.append(s.apply("run", given))
            optimizers.add(id(s.namespace()["optimizer"]))
            events += s.train(steps)["events"]
    return events, answers, len(optimizers) == 1


@pytest.mark.slow
def test_it_is_switched_while_training(pool: Pool, steady: list[float]) -> None:
    plan = [(spec(link=link).to_dict(), 2) for link in (None, "2 MB/s", None, "4 MB/s")]
    for told, answers, nothing_rebuilt in pool.run(_switched, 2, plan, reduction=None):
        events = [StepEvent.from_dict(e) for e in told]
        assert [e.mean_loss for e in events] == steady[:8]
        assert nothing_rebuilt and [a["carried"] for a in answers] == [False, True, True, True]
        noted = [[n for n in e.notes if n.startswith("Emulated link")] for e in events]
        assert noted == [[]] * 2 + [["Emulated link: 2 MB/s."]] * 2 + [[]] * 2 + [["Emulated link: 4 MB/s."]] * 2
        assert re.fullmatch(r"Real link: shared memory, [\d.]+ [kMG]B/s a rank\.", answers[1]["notes"][-2])
        for e in events[2:4]:
            sent = [t for kind, t in e.comm.items() if kind != "control"]
            assert e.step_time_s > sum(t.link_bytes for t in sent) / 2e6 > 0.05


def test_a_link_faster_than_the_wire_is_refused_on_all_ranks(pool: Pool) -> None:
    calls = [fails(apply(spec(link=link))) for link in ("900 GB/s", "1000 TB/s of t4")]
    for _, plain, scaled, after in play(pool, 2, apply(spec()), *calls, train(1)):
        sentence = r"SpecError: link: 900 GB/s is faster than the wire of these ranks, which moves [\d.]+ [GM]B/s; "
        hint = r"use a slower one, or one of a GPU, .* such as \"100 Gb/s of h100\"; fix: {'link': '100 Gb/s of h100'}"
        assert re.fullmatch(sentence + hint, plain)
        assert re.search(r"1000 TB/s of t4 comes to .* here, faster than the wire.*; fix: {'link': None}", scaled)
        assert [e["step"] for e in after["events"]] == [0]


def test_a_scaled_link_says_what_it_comes_to(pool: Pool) -> None:
    (mine, theirs), (answer,) = follow(pool, [(spec(link="100 Gb/s of h100"), 2)])
    (label,) = [n for n in mine[0].notes if n.startswith("Emulated link")]
    assert label == answer["notes"][-1] and label in theirs[0].notes
    found = re.fullmatch(r"Emulated link: ([\d.]+) ([kM])B/s \(100 Gb/s of h100, scaled by ([\d.e-]+): "
                         r"computing here in fp32 to its in fp32\)\.", label)  # fmt: skip
    rate, scale = float(found[1]) * {"k": 1e3, "M": 1e6}[found[2]], float(found[3])
    assert rate == pytest.approx(12.5e9 * scale, rel=0.05)
    assert mine[0].peak_flops_per_s is not None and scale == pytest.approx(mine[0].peak_flops_per_s / 66.9e12, rel=0.05)


def _stopped(place: Place, given: dict[str, Any]) -> tuple[float, bool, list[int]]:
    """SIGINT on rank 0, within a transfer of a minute; seconds until `train` returns. Then on without the link."""
    with running(place, given, steps=1) as s:
        s.apply("run", {**given, "link": "3 kB/s"})
        start_s = time.perf_counter()
        if place.rank == 0:
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        stopped = s.train(5)["stopped"]
        freed_s = time.perf_counter() - start_s
        s.apply("run", given)
        return freed_s, stopped, [e["step"] for e in s.train(2)["events"]]


def test_a_stop_does_not_wait_for_the_link(pool: Pool) -> None:
    for freed_s, stopped, steps in pool.run(_stopped, 2, spec().to_dict(), reduction=None):
        assert stopped and steps == [1, 2] and freed_s < 20


# -- what the collectives of a training go over, told in the first step after a switch ---------------------------------
HYBRID, MAPPED = {"sharding": "hybrid_shard", "shard_size": 2}, {"gather": "mapped"}


def test_it_is_measured_once_and_told_after_each_switch(pool: Pool) -> None:
    (mine, _), _ = follow(pool, [(spec(), 2), (spec(**DDP), 2), (spec(link="0.01 GB/s"), 1)])
    told = [e.carriers for e in mine]
    (carrier,) = told[0]
    assert (carrier.between, carrier.name) == ("ranks", "shared memory") and carrier.bytes_per_s > 1e6
    assert told == [(carrier,), (), (carrier,), (), ()], "an emulated link has a note of its own"


def _on_two_hosts(place: Place, calls: list[Call]) -> list[tuple[Carrier, ...]]:
    """Of each, as if ranks 0 and 1 were on one host and the others on another."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(channels, "host_id", lambda: f"host {place.rank // 2}")
        events = [answer["events"][0] for answer in _play(place, calls, {})[1::2]]
    return [StepEvent.from_dict(event).carriers for event in events]


@pytest.mark.slow
def test_hybrid_sharding_has_memory_inside_hosts_and_gloo_between_them(pool: Pool) -> None:
    plan = [spec(4, **HYBRID), spec(4, **HYBRID, **MAPPED), spec(4)]
    calls = [c for given in plan for c in (apply(given, fresh=True), train(1))]
    for hybrid, mapped, whole in pool.run(_on_two_hosts, 4, calls, reduction=None):
        for carriers in (hybrid, mapped):
            assert [(c.between, c.name) for c in carriers] == [("shards", "shared memory"), ("replicas", "Gloo")]
        assert [(c.between, c.name) for c in whole] == [("ranks", "Gloo")]


def test_switches_to_mapped_shards_and_back_keep_every_bit_and_gather_nothing(pool: Pool, steady: list[float]) -> None:
    kinds = [({}, 4), (MAPPED, 4), ({**MAPPED, "sharding": "zero1"}, 1), (DDP, 1)]
    (told, _), answers = follow(pool, [(spec(**changes), count) for changes, count in kinds])
    assert [e.mean_loss for e in told] == steady and all(answer["carried"] for answer in answers[1:])
    there, here = told[3], told[7]
    assert here.comm["all_gather"].calls == there.comm["all_gather"].calls >= 3
    assert here.comm["all_gather"].link_bytes == 0 < there.comm["all_gather"].link_bytes
    # shards end with a page
    assert there.comm["reduce_scatter"].link_bytes <= here.comm["reduce_scatter"].link_bytes
    assert here.memory.at_peak.unsharded_bytes == 0 < there.memory.at_peak.unsharded_bytes
    assert here.memory.at_peak.communication_bytes == there.memory.at_peak.communication_bytes
    assert here.memory.parameters_bytes >= there.memory.parameters_bytes
    assert here.memory.peak_bytes < there.memory.peak_bytes


def test_ranks_without_shared_memory_refuse_it_and_go_on(pool: Pool) -> None:
    calls = (apply(spec()), train(1), fails(apply(spec(**MAPPED))), train(2))
    for *_, said, after in play(pool, 2, *calls, shared_memory=False):
        assert said.startswith("SpecError: strategy.gather: mapped is for ranks that share memory, and these do not")
        assert len(after["events"]) == 2
