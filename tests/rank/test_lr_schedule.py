"""The learning rate over steps, in a run that is changed. Under all backends: test_same_bits.py; resumed:
test_checkpoint.py."""

from __future__ import annotations

from tests.pool import Pool
from tests.rank.test_session import apply, call, play, spec, train

COSINE = {"lr_schedule": "cosine", "warmup_steps": 2, "decay_steps": 6, "lr_end": 0.1}


def test_a_change_of_rates_needs_no_new_backend(pool: Pool) -> None:
    """And it counts from the run's first step."""
    linear = spec(1, lr=0.02, lr_schedule="linear", decay_steps=10)
    [told] = play(pool, 1, *(c for given in (spec(1), linear, spec(1, **COSINE)) for c in (apply(given), train(2))))
    factor, rates = spec(**COSINE).workload.rates.factor, [e["lr"] for a in told[1::2] for e in a["events"]]
    assert rates == [0.01, 0.01, 0.02 * 0.8, 0.02 * 0.7, 0.01 * factor(4), 0.01 * factor(5)]


def test_fp16_tells_its_loss_scale_and_a_skipped_step_counts(pool: Pool) -> None:
    given, nan = spec(1, precision="fp16", lr=1e-4, **COSINE), {"kind": "nan", "ranks": [0], "phase": "backward"}
    ((*_, answer),) = play(pool, 1, apply(given), call("arm", nan), train(4))
    told = answer["events"]
    assert [e["skipped"] for e in told] == [True, False, False, False]
    assert [e["loss_scale"] for e in told] == [2.0**16] + [2.0**15] * 3
    assert [e["lr"] for e in told] == [1e-4 * given.workload.rates.factor(step) for step in range(4)]
