"""The learning rate over steps."""

from __future__ import annotations

from typing import Any

import pytest

from fsdp_lab.spec.optimizer import LrSchedule
from fsdp_lab.spec.spec import Spec


def factors(steps: int, **given: Any) -> list[float]:
    return [LrSchedule(**given).factor(step) for step in range(steps)]


def test_a_constant_rate_is_the_rate_itself() -> None:
    assert factors(3) == [1.0, 1.0, 1.0]
    assert factors(5, warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_linear_and_cosine_begin_at_the_full_rate_and_stay_at_their_end() -> None:
    assert factors(8, kind="linear", warmup_steps=2, decay_steps=6) == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    assert factors(4, kind="linear", decay_steps=2, end=0.5) == [1.0, 0.75, 0.5, 0.5]
    cosine = factors(7, kind="cosine", warmup_steps=2, decay_steps=6, end=0.1)
    assert cosine == pytest.approx([0.5, 1.0, 1.0, 0.868198, 0.55, 0.231802, 0.1], abs=1e-6)
    assert cosine[-1] == 0.1


@pytest.mark.parametrize(("given", "said"), [
    ({"lr_schedule": "cosine"}, "workload.decay_steps: cosine needs the step at which it ends; give one, such as 1000"),
    ({"lr_schedule": "linear", "warmup_steps": 5, "decay_steps": 5},
     "workload.decay_steps: 5 is not after the 5 steps of the warm-up; give a later step, or fewer warmup_steps"),
    ({"decay_steps": 5}, "workload.decay_steps: a constant rate has no end; leave it out, or use lr_schedule linear or"),
    ({"lr_end": 0.1}, "workload.lr_end: a constant rate has no end"),
    ({"lr_schedule": "step"}, "workload.lr_schedule: 'step' is refused; give one of constant, linear, cosine"),
    ({"lr_end": 1.5}, "workload.lr_end: 1.5 is refused; give a share of lr, from 0 to 1"),
    ({"warmup_steps": -1}, "workload.warmup_steps: -1 is refused"),
], ids=str)  # fmt: skip
def test_what_has_no_meaning_is_refused_with_a_way_out(given: dict[str, Any], said: str) -> None:
    refused = Spec().validate(**given)
    assert refused is not None and str(refused).startswith(said)
    if refused.fix:
        assert Spec().validate(**{**given, **refused.fix}) is None


def test_a_spec_without_a_schedule_keeps_its_id() -> None:
    before = Spec().to_dict()
    for name in ("lr_schedule", "warmup_steps", "decay_steps", "lr_end"):
        del before["workload"][name]
    assert Spec.from_dict(before) == Spec() and Spec.from_dict(before).id == Spec().id
    assert Spec().replace(warmup_steps=3).id != Spec().id
