"""Ten pains on two real ranks: the cause is named by itself, the cure changes the figure; on healthy runs none is named."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from course import exercises
from course.pains import PAINS
from fsdp_lab.cluster import ClusterError
from fsdp_lab.lab import Lab
from fsdp_lab.runs import RunState
from fsdp_lab.runs.diagnosis import Cause
from fsdp_lab.runs.history import History
from fsdp_lab.spec.spec import Spec
from tests.lab.test_exercises import check

SMALL = {"model": "gpt2-1m", "micro_batch": 2, "seq_len": 64}
# Runs that nothing is wrong with: accumulation with exchange, adapters that save memory.
HEALTHY: list[dict[str, Any]] = [
    {"backend": "fsdp2", "sharding": "shard_grad_op", "accumulate": 3},
    {"lora": {"r": 4}, "recompute": "full", "micro_batch": 8, "seq_len": 128, "wrap": "every:2"},
]


# The dear ones, whose causes tests/lab/test_diagnosis.py finds on both sides of each limit; a patient below has two of them.
DEAR = (Cause.LOADING, Cause.OFFLOAD, Cause.COMPILATION, Cause.COMMUNICATION, Cause.ACCUMULATION)


@pytest.mark.parametrize(
    "name", [pytest.param(c, marks=pytest.mark.nightly if c in DEAR else pytest.mark.slow, id=c.value) for c in Cause]
)
def test_the_cause_is_named_and_the_cure_is_measured(real_lab: Lab, name: str) -> None:
    pain = PAINS[name]
    sick = pain.reproduce(real_lab)
    (named,) = sick.diagnoses
    assert named.cause is pain.cause and named.sentence.endswith(".") and named.cure
    if name == Cause.BATCHES:
        assert isinstance(real_lab.history, History) and real_lab.history.flush(10)
        assert real_lab.runs()[sick.id].diagnoses == sick.diagnoses, "the stored run's are the same"
    cured = pain.cure(real_lab, sick)
    assert cured.state is RunState.FINISHED and pain.cause not in {d.cause for d in cured.diagnoses}, cured
    before, after = map(pain.measure.value, (sick, cured))
    assert after < before if pain.measure.lower_is_better else after > before, (before, after)
    if pain.code:
        with pytest.raises(ClusterError, match="does not have the cause"):
            pain.cure(real_lab, cured)


@pytest.mark.slow
@pytest.mark.parametrize("changes", HEALTHY, ids=str)
def test_nothing_is_named_where_nothing_is_wrong(real_lab: Lab, changes: dict[str, Any]) -> None:
    run = real_lab.run(Spec().replace(**{**SMALL, **changes}), steps=7).wait(90)
    assert run.diagnoses == ()


PATIENT = Spec().replace(
    model="gpt2-1m", micro_batch=1, seq_len=32, accumulate=2, sync="last", link="0.01 GB/s, 100 us"
)


@pytest.mark.slow
def test_the_exercise_refuses_half_a_cure(real_lab: Lab) -> None:
    patient = real_lab.run(PATIENT, steps=8).wait(90)
    causes = [d.cause for d in patient.diagnoses]
    assert causes == [Cause.ACCUMULATION, Cause.COMMUNICATION]
    check(exercises.heals(patient, patient), "Nothing is changed yet")
    half = {"state": RunState.FINISHED, "events": patient.events}
    for changes, left, text in (
        ({"link": None}, (), "another machine: link is"),
        ({"accumulate": 1}, (), "2 samples a step, and the patient 4"),
        ({"sync": "every"}, patient.diagnoses[1:], "Still there: Computing waits"),
        ({"sharding": "shard_grad_op"}, patient.diagnoses[:1], "Still there: Each rank holds whole gradients"),
    ):
        after: Any = SimpleNamespace(spec=PATIENT.replace(**changes), diagnoses=left, **half)
        check(exercises.heals(patient, after), text)
    check(exercises.heals(patient, real_lab.run(PATIENT.replace(sharding="no_shard"), steps=8).wait(90)), "")
