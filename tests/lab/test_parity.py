"""Whether two runs computed the same, from what real ranks told: equal bits, rounding, and faults that are found out."""

import dataclasses
import math
import re
from collections.abc import Iterable
from contextlib import closing
from typing import Any

import pytest

from fsdp_lab.base.events import StepEvent
from fsdp_lab.runs.parity import Parity, Verdict, parity
from fsdp_lab.spec.spec import Spec
from tests.lab.events import event
from tests.lab.kept import RecordedRun, told
from tests.pool import Place, Pool
from tests.rank.test_session import DDP, session, spec

STEPS = 8
SEED = 2  # with which no gradient overflows in fp16
CHECKS = [0, 1, 3, 7]

KINDS: dict[str, dict[str, Any]] = {"lab": {}, "fsdp2": {"backend": "fsdp2"}, "ddp": DDP,
                                    "fp16": {"backend": "fsdp2", "precision": "fp16"},
                                    "fused": {"optimizer_args": {"fused": True}}}  # fmt: skip


def _honest(place: Place, plan: list[dict[str, Any]]) -> list[list[Any]]:
    found = []
    with closing(session(place)) as s:
        for given in plan:
            s.apply("run", given, fresh=True)
            found.append(s.train(STEPS, checks=CHECKS)["events"])
    return found


def recorded(pool: Pool, kinds: Iterable[str]) -> dict[str, RecordedRun]:
    specs = {name: spec(seed=SEED, **KINDS[name]) for name in kinds}
    by_rank = pool.run(_honest, 2, [s.to_dict() for s in specs.values()], reduction=None)
    return {name: told(s, [e for rank in by_rank for e in rank[i]]) for i, (name, s) in enumerate(specs.items())}


@pytest.fixture(scope="module")
def honest(pool: Pool) -> dict[str, RecordedRun]:
    """What the quick tests need."""
    return recorded(pool, ["lab", "fp16"])


@pytest.mark.slow
def test_backends_are_equal_bit_for_bit_in_fp32_and_a_fused_optimizer_within_rounding(
    pool: Pool, honest: dict[str, RecordedRun]
) -> None:
    for one, other in (("lab", "fp16"), ("fp16", "lab")):
        found = parity(honest[one], honest[other])
        assert found.verdict is Verdict.WITHIN and found.first_step == 0, "another precision rounds"
    more = recorded(pool, [name for name in KINDS if name not in honest])
    for name in ("fsdp2", "ddp"):
        found = parity(honest["lab"], more[name])
        assert (found.verdict, found.steps, found.checksums) == (Verdict.EQUAL, STEPS, len(CHECKS))
        assert found.sentence == "equal bit for bit over 8 steps: losses and 4 checksums of the parameters"
    found = parity(honest["lab"], more["fused"])
    assert found.verdict is Verdict.WITHIN and found.first_step in (0, 1)


# -- faults ----------------------------------------------------------------------------------------------------------
def _at_fault(place: Place, given: dict[str, Any], summed: bool) -> list[Any]:
    """From the fourth step on gradients are `summed` and not averaged, which AdamW hides from losses; or rank 1 is stale."""
    from fsdp_lab.wire import Wire

    inner = Wire.reduce_scatter_single

    def sums(self: Any, output: Any, input: Any, opts: Any = None) -> Any:
        return inner(self, output, input, opts).followed_by(lambda: output.mul_(self.size()), [output])

    with closing(session(place)) as s, pytest.MonkeyPatch.context() as patch:
        s.apply("run", given)
        events = s.train(3, checks=CHECKS)["events"]
        if summed:
            for name in ("reduce_scatter_single", "_reduce_scatter_base", "reduce_scatter_tensor"):
                patch.setattr(Wire, name, sums)
        elif place.rank == 1:
            s.trainer.backend.optimizer.step = lambda *a, **k: None
        return [*events, *s.train(STEPS - 3, checks=CHECKS)["events"]]


@pytest.mark.parametrize(("changes", "what"), [({"backend": "fsdp2"}, "gradient norm"), (DDP, "replicas")])
def test_a_fault_is_found_as_soon_as_it_shows(
    pool: Pool, honest: dict[str, RecordedRun], changes: dict[str, Any], what: str
) -> None:
    wrong = spec(seed=SEED, **changes)
    by_rank = pool.run(_at_fault, 2, wrong.to_dict(), what == "gradient norm", reduction=None)
    found = parity(honest["lab"], told(wrong, [e for events in by_rank for e in events]))
    assert (found.verdict, found.first_step, found.what) == (Verdict.DIFFERENT, 3, what)
    assert re.match(rf"different:? from step 3 on:? (its {what} hold different parameters|{what})", found.sentence)


# -- the rule, on changed copies -----------------------------------------------------------------------------------
def changed(run: RecordedRun, step: int, **values: Any) -> RecordedRun:
    events: list[StepEvent] = run.events.since()[0]
    return told(run.spec, [dataclasses.replace(e, **values) if e.step == step else e for e in events])


def test_one_bit_is_seen_and_called_rounding_and_no_number_is_different(honest: dict[str, RecordedRun]) -> None:
    lab = honest["lab"]
    loss = next(e.mean_loss for e in lab.events.since()[0] if e.step == 5)
    found = parity(lab, changed(lab, 5, mean_loss=math.nextafter(loss, 9.0)))
    assert (found.verdict, found.first_step, found.what) == (Verdict.WITHIN, 5, "loss")
    found = parity(lab, changed(lab, 7, checksum=1))
    assert (found.verdict, found.first_step, found.what) == (Verdict.WITHIN, 7, "parameters")
    for value in (math.nan, math.inf, 0.0):
        found = parity(lab, changed(lab, 6, mean_loss=value))
        assert (found.verdict, found.first_step, found.what) == (Verdict.DIFFERENT, 6, "loss")
    nan = changed(lab, 6, mean_loss=math.nan, grad_norm=math.inf)
    assert parity(nan, nan).verdict is Verdict.EQUAL


def trained_on(losses: list[float], norms: list[float], precision: str = "fp32") -> RecordedRun:
    """One rank's run that told these."""
    one = Spec(world_size=1).replace(precision=precision)
    return told(one, [event(0, i, one, mean_loss=x, grad_norm=n)
                      for i, (x, n) in enumerate(zip(losses, norms, strict=True))])  # fmt: skip


def test_a_leap_late_in_another_precision_is_training_and_a_skipped_step_is_not(honest: dict[str, RecordedRun]) -> None:
    """As gpt2-10m does it: a norm of 23 where the other run has 1, and the loss of one step 5 % off."""
    losses, norms = [5.0 - 0.04 * i for i in range(50)], [1.0] * 50
    leaps = [x * (1.048 if i == 46 else 1.003) for i, x in enumerate(losses)]
    found = parity(trained_on(losses, norms), trained_on(leaps, [*norms[:46], 23.0, *norms[47:]], "bf16"))
    assert (found.verdict, found.first_step) == (Verdict.WITHIN, 0)
    found = parity(honest["lab"], changed(honest["fp16"], 3, grad_norm=math.inf, skipped=True))
    assert (found.verdict, found.first_step, found.what) == (Verdict.DIFFERENT, 3, "gradient norm")


@pytest.mark.parametrize(("from_step", "factor", "precision", "at"), [
    (20, 1.08, "bf16", 23),  # after four of the mean's eight steps
    (20, 1.01, "fp32", 20),
])  # fmt: skip
def test_losses_that_part_late_are_found_by_their_mean(from_step: int, factor: float, precision: str, at: int) -> None:
    losses, norms = [5.0 - 0.04 * i for i in range(50)], [1.0] * 50
    other = [x * (1 + 1e-7) * (factor if i >= from_step else 1) for i, x in enumerate(losses)]
    found = parity(trained_on(losses, norms), trained_on(other, norms, precision))
    assert (found.verdict, found.first_step, found.what) == (Verdict.DIFFERENT, at, "loss")
    wrong = [n * (1.001 if i >= 40 else 1) for i, n in enumerate(norms)]
    found = parity(trained_on(losses, norms), trained_on(losses, wrong))
    assert (found.verdict, found.first_step, found.what) == (Verdict.DIFFERENT, 40, "gradient norm")


def test_what_is_not_the_same_training_is_not_compared(honest: dict[str, RecordedRun]) -> None:
    lab = honest["lab"]

    def against(**changes: Any) -> Parity:
        other: Spec = lab.spec.replace(**changes)
        return parity(lab, told(other, lab.events.since()[0]))

    assert against(lr=0.5, seed=3).sentence == "another training: lr, seed differ"
    assert against(optimizer_args={"eps": 1e-6}).sentence == "another training: optimizer_args differs"
    assert against(optimizer_args={"fused": True}).verdict is not Verdict.UNKNOWN, "the same, by another kernel"
    assert against(micro_batch=4).sentence == "another training: samples a step (4 and 8) differs"
    assert against(micro_batch=1, accumulate=2).verdict is Verdict.EQUAL  # the same samples
    dropping = told(lab.spec.replace(dropout="config"), lab.events.since()[0])
    split = told(dropping.spec.replace(micro_batch=1, accumulate=2), lab.events.since()[0])
    assert "micro_batch (each draws its own random numbers)" in parity(dropping, split).sentence
    assert parity(lab, told(lab.spec, [])).sentence == "no step in common yet"
