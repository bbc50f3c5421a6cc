"""The learning rate over steps: alike under all backends, in a run that is switched, changed or resumed, and told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fsdp_lab.spec.spec import Spec
from tests.pool import Place, Pool
from tests.rank.test_session import BACKENDS, DDP, session, spec

COSINE = {"lr_schedule": "cosine", "warmup_steps": 2, "decay_steps": 6, "lr_end": 0.1}


def trained(place: Place, plans: list[list[tuple[dict[str, Any], int]]]) -> list[list[dict[str, Any]]]:
    """The events of each plan, whose Specs follow each other; each last step of a Spec with a checksum."""
    s, told = session(place, reduction="rank_ordered"), []
    for i, plan in enumerate(plans):
        events: list[dict[str, Any]] = []
        for j, (given, steps) in enumerate(plan):
            s.apply(f"run{i}", given, fresh=j == 0)
            events += s.train(steps, checks=[len(events) + steps - 1])["events"]
        told.append(events)
    s.close()
    return told


def outcome(by_rank: list[list[list[dict[str, Any]]]], plan: int) -> tuple[list[float], int]:
    """The losses, and the checksum of the parameters of one replica at the end."""
    events = [told[plan] for told in by_rank]
    last = [e[-1] for e in events]
    checksum = sum(e["checksum"] for e in last if e["replica"] == 0) % (1 << 64)
    return [e["mean_loss"] for e in events[0]], checksum


def planned(*parts: tuple[Spec, int]) -> list[tuple[dict[str, Any], int]]:
    return [(part.to_dict(), steps) for part, steps in parts]


def test_the_rates_of_all_backends_are_equal_and_survive_a_switch(pool: Pool) -> None:
    steady = [planned((spec(**COSINE, **b), 8)) for b in BACKENDS.values()]
    switched = planned(*((spec(**COSINE, **b), 2) for b in BACKENDS.values()))
    plain = planned((spec(), 8))
    told = pool.run(trained, 2, [*steady, switched, plain], reduction=None)
    for plan in range(1, 5):
        assert outcome(told, plan) == outcome(told, 0)
    assert outcome(told, 5) != outcome(told, 0)
    rates = spec(**COSINE).workload.rates
    for plan in range(5):
        assert [e["lr"] for e in told[1][plan]] == [0.01 * rates.factor(step) for step in range(8)]
    assert [e["lr"] for e in told[0][5]] == [0.01] * 8 and told[0][5][0]["loss_scale"] is None


def test_a_change_of_rates_needs_no_new_backend(pool: Pool) -> None:
    """And it counts from the run's first step."""
    linear = spec(1, lr=0.02, lr_schedule="linear", decay_steps=10)
    plan = planned((spec(1), 2), (linear, 2), (spec(1, **COSINE), 2))
    [told] = pool.run(trained, 1, [plan], reduction=None)
    factor = spec(**COSINE).workload.rates.factor
    assert [e["lr"] for e in told[0]] == [0.01, 0.01, 0.02 * 0.8, 0.02 * 0.7, 0.01 * factor(4), 0.01 * factor(5)]


def _skipping(place: Place, given: dict[str, Any]) -> list[dict[str, Any]]:
    s = session(place)
    s.apply("run", given, fresh=True)
    s.arm({"kind": "nan", "ranks": [0], "phase": "backward"})
    events: list[dict[str, Any]] = s.train(4)["events"]
    s.close()
    return events


def test_fp16_tells_its_loss_scale_and_a_skipped_step_counts(pool: Pool) -> None:
    given = spec(1, precision="fp16", lr=1e-4, **COSINE).to_dict()
    [told] = pool.run(_skipping, 1, given, reduction=None)
    assert [e["skipped"] for e in told] == [True, False, False, False]
    assert [e["loss_scale"] for e in told] == [2.0**16] + [2.0**15] * 3
    assert [e["lr"] for e in told] == [1e-4 * spec(**COSINE).workload.rates.factor(step) for step in range(4)]


def _saved(place: Place, given: dict[str, Any], root: str) -> list[Any]:
    s = session(place)
    s.apply("run", given, fresh=True)
    s.train(3)
    s.save(root)
    events = s.train(4, checks=[6])["events"]
    assert not s.saves(30.0)["under_way"]
    s.close()
    return list(events)


def _restored(place: Place, given: dict[str, Any], path: str) -> list[Any]:
    s = session(place)
    s.restore("again", given, path)
    events = s.train(4, checks=[6])["events"]
    s.close()
    return list(events)


@pytest.mark.parametrize("after", [{}, DDP], ids=str)
def test_a_resumed_run_goes_on_where_its_rates_were(pool: Pool, tmp_path: Path, after: dict[str, Any]) -> None:
    events, _ = pool.run(_saved, 2, spec(**COSINE).to_dict(), str(tmp_path), reduction=None)
    again = pool.run(_restored, 2, spec(**COSINE, **after).to_dict(), str(tmp_path), reduction=None)[0]
    names = ("step", "lr", "mean_loss")
    assert [[e[n] for n in names] for e in again] == [[e[n] for n in names] for e in events]
