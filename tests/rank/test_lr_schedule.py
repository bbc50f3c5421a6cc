"""The learning rate over steps, in a run that is changed. Under all backends: test_same_bits.py; resumed:
test_checkpoint.py."""

from __future__ import annotations

from contextlib import closing
from typing import Any

from fsdp_lab.spec.spec import Spec
from tests.pool import Place, Pool
from tests.rank.test_session import apply, call, play, session, spec, train

COSINE = {"lr_schedule": "cosine", "warmup_steps": 2, "decay_steps": 6, "lr_end": 0.1}


def trained(place: Place, plans: list[list[tuple[dict[str, Any], int]]]) -> list[list[dict[str, Any]]]:
    """The events of each plan, whose Specs follow each other; each last step of a Spec with a checksum."""
    told = []
    with closing(session(place, reduction="rank_ordered")) as s:
        for i, plan in enumerate(plans):
            events: list[dict[str, Any]] = []
            for j, (given, steps) in enumerate(plan):
                s.apply(f"run{i}", given, fresh=j == 0)
                events += s.train(steps, checks=[len(events) + steps - 1])["events"]
            told.append(events)
    return told


def outcome(by_rank: list[list[list[dict[str, Any]]]], plan: int) -> tuple[list[float], int]:
    """The losses, and the checksum of the parameters of one replica at the end."""
    events = [told[plan] for told in by_rank]
    last = [e[-1] for e in events]
    checksum = sum(e["checksum"] for e in last if e["replica"] == 0) % (1 << 64)
    return [e["mean_loss"] for e in events[0]], checksum


def planned(*parts: tuple[Spec, int]) -> list[tuple[dict[str, Any], int]]:
    return [(part.to_dict(), steps) for part, steps in parts]


def test_a_change_of_rates_needs_no_new_backend(pool: Pool) -> None:
    """And it counts from the run's first step."""
    linear = spec(1, lr=0.02, lr_schedule="linear", decay_steps=10)
    plan = planned((spec(1), 2), (linear, 2), (spec(1, **COSINE), 2))
    [told] = pool.run(trained, 1, [plan], reduction=None)
    factor = spec(**COSINE).workload.rates.factor
    assert [e["lr"] for e in told[0]] == [0.01, 0.01, 0.02 * 0.8, 0.02 * 0.7, 0.01 * factor(4), 0.01 * factor(5)]


def test_fp16_tells_its_loss_scale_and_a_skipped_step_counts(pool: Pool) -> None:
    given, nan = spec(1, precision="fp16", lr=1e-4, **COSINE), {"kind": "nan", "ranks": [0], "phase": "backward"}
    ((*_, answer),) = play(pool, 1, apply(given), call("arm", nan), train(4))
    told = answer["events"]
    assert [e["skipped"] for e in told] == [True, False, False, False]
    assert [e["loss_scale"] for e in told] == [2.0**16] + [2.0**15] * 3
    assert [e["lr"] for e in told] == [1e-4 * given.workload.rates.factor(step) for step in range(4)]
