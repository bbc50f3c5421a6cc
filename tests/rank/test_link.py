"""A Session on an emulated link: bits stay, times follow, it is switched while training, and a stop does not wait for it."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from typing import Any

import pytest
import torch

from fsdp_lab.base.errors import SpecError
from fsdp_lab.base.events import StepEvent
from tests.pool import Place, Pool
from tests.rank.test_session import BACKENDS, DDP, follow, session, spec


def _trained(place: Place, given: dict[str, Any], links: list[str | None]) -> list[Any]:
    """Under each link, from the same beginning: the losses and gradient norms of three steps, and the parameters."""
    s, found = session(place), []
    for link in links:
        s.apply("run", {**given, "link": link}, fresh=True)
        events = s.train(3)["events"]
        assert s.trainer is not None
        held = [p.local.clone() for p in s.trainer.backend.param_shards()]
        found.append(([(e["mean_loss"], e["grad_norm"]) for e in events], held))
    s.close()
    return found


@pytest.mark.parametrize("backend", BACKENDS)
def test_results_do_not_change_by_a_bit(pool: Pool, backend: str) -> None:
    given = spec(optimizer="sgd", lr=0.1, **BACKENDS[backend]).to_dict()
    for (bare, wanted), (linked, found) in pool.run(_trained, 2, given, [None, "20 MB/s, 0.2 ms"], reduction=None):
        assert bare == linked
        assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))


@pytest.mark.alone
def test_the_exposed_time_of_ddp_follows_the_formula(pool: Pool) -> None:
    """All gradients of so small a model are in one bucket: nothing overlaps. A busy machine only makes steps longer, so
    none is shorter than the formula, and the best step meets it."""
    (mine, theirs), (answer,) = follow(pool, [(spec(link="1 MB/s, 5 ms", **DDP), 5)])
    assert re.fullmatch(r"The wire: shared memory, [\d.]+ [kMG]B/s a rank\.", answer["notes"][-2])
    assert answer["notes"][-1] == "Emulated link: 1 MB/s, 5 ms latency."
    for e in (*mine[1:], *theirs[1:]):
        assert e.notes[-1] == answer["notes"][-1]
        sent = e.comm["all_reduce"]
        assert sent.calls == 1
        wanted_s = sent.link_bytes / 1e6 + 5e-3
        assert sent.exposed_seconds == pytest.approx(sent.seconds, rel=0.05)
        assert e.step_time_s > sent.seconds > 0.95 * wanted_s
    for by_rank in (mine, theirs):
        best = min(by_rank[1:], key=lambda e: e.comm["all_reduce"].seconds)
        assert best.comm["all_reduce"].exposed_seconds == pytest.approx(wanted_s, rel=0.05)
        assert (
            min(e.comm["control"].seconds for e in by_rank[1:]) < wanted_s / 2
        )  # the vote of the lab does not take it


def _switched(place: Place, plan: list[tuple[dict[str, Any], int]]) -> tuple[list[dict[str, Any]], list[Any], bool]:
    s = session(place, reduction="rank_ordered")
    events, answers, optimizers = [], [], set()
    for given, steps in plan:
        answers.append(s.apply("run", given))
        optimizers.add(id(s.namespace()["optimizer"]))
        events += s.train(steps)["events"]
    s.close()
    return events, answers, len(optimizers) == 1


@pytest.mark.alone
def test_it_is_switched_while_training(pool: Pool) -> None:
    plan = [(spec(link=link).to_dict(), 3) for link in (None, "2 MB/s", None, "4 MB/s")]
    (steady, _), _ = follow(pool, [(spec(), 12)])
    for told, answers, nothing_rebuilt in pool.run(_switched, 2, plan, reduction=None):
        events = [StepEvent.from_dict(e) for e in told]
        assert [e.mean_loss for e in events] == [e.mean_loss for e in steady]
        assert nothing_rebuilt and [a["carried"] for a in answers] == [False, True, True, True]
        noted = [[n for n in e.notes if "link" in n] for e in events]
        assert noted == [[]] * 3 + [["Emulated link: 2 MB/s."]] * 3 + [[]] * 3 + [["Emulated link: 4 MB/s."]] * 3
        for e in events[3:6]:
            sent = [t for kind, t in e.comm.items() if kind != "control"]
            assert e.step_time_s > sum(t.link_bytes for t in sent) / 2e6 > 0.05
        assert min(e.step_time_s for e in events[6:9]) < min(e.step_time_s for e in events[3:6]) / 2


def _refused(place: Place, bad: list[dict[str, Any]]) -> tuple[list[str], list[Any], list[int]]:
    s = session(place)
    s.apply("run", spec().to_dict())
    s.train(1)
    said, fixes = [], []
    for given in bad:
        with pytest.raises(SpecError) as e:
            s.apply("run", given)
        said.append(str(e.value))
        fixes.append(e.value.fix)
    steps = [e["step"] for e in s.train(1)["events"]]
    s.close()
    return said, fixes, steps


def test_a_link_faster_than_the_wire_is_refused_on_all_ranks(pool: Pool) -> None:
    bad = [spec(link=link).to_dict() for link in ("900 GB/s", "1000 TB/s of t4")]
    zero, one = pool.run(_refused, 2, bad, reduction=None)
    assert zero == one
    (plain, scaled), fixes, steps = zero
    assert re.fullmatch(r"link: 900 GB/s is faster than the wire of these ranks, which moves [\d.]+ [GM]B/s; "
                        r"use a slower one, or one of a GPU, .* such as \"100 Gb/s of h100\"", plain)  # fmt: skip
    assert re.search(r"1000 TB/s of t4 comes to .* here, faster than the wire", scaled)
    assert fixes == [{"link": "100 Gb/s of h100"}, {"link": None}] and steps == [1]


def test_a_scaled_link_says_what_it_comes_to(pool: Pool) -> None:
    (mine, theirs), (answer,) = follow(pool, [(spec(link="100 Gb/s of h100"), 2)])
    (label,) = [n for n in mine[0].notes if n.startswith("Emulated link")]
    assert label == answer["notes"][-1] and label in theirs[0].notes
    found = re.fullmatch(r"Emulated link: ([\d.]+) ([kM])B/s \(100 Gb/s of h100, scaled by ([\d.e-]+): "
                         r"computing here in fp32 to its in fp32\)\.", label)  # fmt: skip
    assert found is not None
    rate, scale = float(found[1]) * {"k": 1e3, "M": 1e6}[found[2]], float(found[3])
    assert rate == pytest.approx(12.5e9 * scale, rel=0.05)
    assert mine[0].peak_flops_per_s is not None and scale == pytest.approx(mine[0].peak_flops_per_s / 66.9e12, rel=0.05)


def test_one_rank_has_no_link_to_wait_for(pool: Pool) -> None:
    ((one,), _) = follow(pool, [(spec(1, link="1 kB/s"), 2)])
    assert "Emulated link: 1 kB/s." in one[1].notes and one[1].step_time_s < 5


def _slowly(place: Place) -> tuple[int, dict[str, Any]]:
    s = session(place)
    s.apply("run", spec(link="4 MB/s", backend="lab").to_dict())
    frames = 0
    while (told := s.slow_next())["frame"] is not None:
        frames += 1
    s.close()
    return frames, told["event"]


def test_slow_motion_takes_it_too(pool: Pool) -> None:
    for frames, event in pool.run(_slowly, 2, reduction=None):
        assert frames > 5 and "Emulated link: 4 MB/s." in event["notes"]
        assert event["comm"]["all_gather"]["seconds"] > 0.999 * event["comm"]["all_gather"]["link_bytes"] / 4e6


def _stopped(place: Place, given: dict[str, Any]) -> tuple[float, bool, list[int]]:
    """SIGINT on rank 0, within a transfer of a minute; seconds until `train` returns. Then on without the link."""
    s = session(place)
    s.apply("run", given)
    s.train(1)
    s.apply("run", {**given, "link": "3 kB/s"})
    at_s = time.perf_counter() + 0.7
    if place.rank == 0:
        threading.Timer(0.7, os.kill, (os.getpid(), signal.SIGINT)).start()
    stopped = s.train(5)
    freed_s = time.perf_counter() - at_s
    s.apply("run", given)
    steps = [e["step"] for e in s.train(2)["events"]]
    s.close()
    return freed_s, stopped["stopped"], steps


@pytest.mark.alone
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_stop_does_not_wait_for_the_link(pool: Pool, backend: str) -> None:
    freed_s = []
    for _ in range(3):
        by_rank = pool.run(_stopped, 2, spec(**BACKENDS[backend]).to_dict(), reduction=None)
        assert all(stopped and steps == [1, 2] for _, stopped, steps in by_rank)
        freed_s.append(max(seconds for seconds, _, _ in by_rank))
        if freed_s[-1] < 0.5:
            break
    print(backend, freed_s)
    assert min(freed_s) < 0.5
