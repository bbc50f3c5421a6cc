"""Causes from events with known figures, on both sides of each limit; what a cure may be; the box of the dashboard."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from fsdp_lab.base.errors import Cause
from fsdp_lab.base.events import AuditFinding, AuditKind, Memory, RoleBytes, Span, StepEvent, Track, Traffic
from fsdp_lab.base.hang import LoopPlace, LoopRank, cause_in_loop
from fsdp_lab.dashboard.forms import HIDDEN
from fsdp_lab.dashboard.opened_forms import DiagnosisBox
from fsdp_lab.runs.diagnosis import Diagnosis, diagnose
from fsdp_lab.runs.steps import EventStore
from fsdp_lab.spec.describe import Trained
from fsdp_lab.spec.param_groups import unwrapped
from fsdp_lab.spec.spec import Spec
from tests.lab.events import LOOP, event

MIB = 1 << 20
SHARDS = Memory(parameters_bytes=10 * MIB, gradients_bytes=10 * MIB, optimizer_bytes=20 * MIB, limit_bytes=1000 * MIB)


def found(spec: Trained, events: Sequence[StepEvent] = (), *why: Any, **more: Any) -> tuple[Diagnosis, ...]:
    store = EventStore()
    store.add(events)
    return diagnose(spec, store, *why, **more)


def causes(spec: Trained, events: Sequence[StepEvent] = ()) -> list[Cause]:
    return [d.cause for d in found(spec, events)]


def steps(spec: Trained, count: int = 8, **fields: Any) -> list[StepEvent]:
    given: dict[str, Any] = {"memory": SHARDS, "spec_id": spec.id, **fields}
    return [event(rank, step, **given) for step in range(count) for rank in (0, 1)]


def waiting(share: float, sent: int = 30 * MIB) -> dict[str, Traffic]:
    return {"all_gather": Traffic(calls=4, link_bytes=sent, seconds=0.1, exposed_seconds=0.1 * share)}


def peak(**roles: int) -> Memory:
    at_peak = RoleBytes(**{f"{role}_bytes": size for role, size in roles.items()})
    return replace(SHARDS, at_peak=at_peak, peak_bytes=at_peak.total_bytes)


def test_too_few_steps_and_replicas_are_not_judged_by_their_times() -> None:
    replica = Spec().replace(sharding="no_shard")
    assert not found(Spec(), steps(Spec(), 4, comm=waiting(0.9)))
    assert not found(replica, steps(replica, comm=waiting(0.9)))
    one_waits = [replace(e, comm=waiting(0.9 if e.rank else 0.1)) for e in steps(Spec())]
    assert not found(Spec(), one_waits), "it waits for the other rank, not for the link"


def test_a_replica_is_advised_where_it_fits() -> None:
    small = replace(peak(parameters=10 * MIB), limit_bytes=1000 * MIB)
    (d,) = found(Spec(), steps(Spec(), comm=waiting(0.9), memory=small))
    assert d.changes == {"sharding": "no_shard"} and Spec().validate(**d.changes) is None
    fsdp2 = Spec().replace(backend="fsdp2")
    (d,) = found(fsdp2, steps(fsdp2, comm=waiting(0.9), memory=small))
    assert d.changes == {"sharding": "no_shard", "backend": "ddp"}
    (d,) = found(Spec(), steps(Spec(), comm=waiting(0.9), memory=replace(small, limit_bytes=60 * MIB)))
    assert d.changes == {"micro_batch": 4 * Spec().workload.micro_batch}
    (d,) = found(LOOP, steps(LOOP, comm={**waiting(0.9), "all_reduce": Traffic(exposed_seconds=0.0)}))
    assert d.changes == {}, "a loop has no fields"


# Cause -> fields of a Spec, what it has told, and whether the cause is named: on both sides of each limit.
Case = tuple[Cause, dict[str, Any], dict[str, Any], int]


def communication(changes: dict[str, Any], share: float, sent_mib: float, named: int) -> Case:
    return Cause.COMMUNICATION, changes, {"comm": waiting(share, int(sent_mib * MIB))}, named


def gradients(changes: dict[str, Any], mib: int, named: int) -> Case:
    return Cause.ACCUMULATION, changes, {"memory": peak(gradients=mib * MIB, parameters=10 * MIB)}, named


def activations(changes: dict[str, Any], mib: int, named: int) -> Case:
    held = replace(peak(activations=mib * MIB, parameters=10 * MIB), gradients_bytes=0, optimizer_bytes=0)
    return Cause.ADAPTERS, changes, {"memory": held}, named


def offload(host_s: float, limit_mib: int, named: int) -> Case:
    spans = (Span(track=Track.COMPUTE, name="optimizer", unit="", start_s=0, end_s=host_s),)
    held = replace(SHARDS, peak_bytes=5 * MIB, host_bytes=40 * MIB, limit_bytes=limit_mib * MIB)
    return Cause.OFFLOAD, {"offload": "all"}, {"spans": spans, "memory": held}, named


PART, LORA = {"freeze": ["transformer.h.*"]}, {"lora": {"r": 4}}
CASES: tuple[Case, ...] = (
    *(communication({}, *case) for case in ((0.7, 30, 1), (0.5, 30, 0), (0.7, 20, 0))),
    *(communication(PART, 0.7, *case) for case in ((2, 1), (0.5, 0))),  # a replica sends the part that is trained
    communication({**PART, "precision": "bf16-pure"}, 0.7, 1.5, 1),
    gradients({"accumulate": 4, "sync": "last"}, 20, 1),
    gradients({"accumulate": 4, "sync": "last"}, 15, 0),
    gradients({"sync": "last"}, 20, 0),  # of one micro-batch
    gradients({"accumulate": 4, "sync": "last", "sharding": "zero1"}, 20, 0),  # whole by design
    *(activations(LORA, *case) for case in ((200, 1), (20, 0))),
    activations({**LORA, "recompute": "full"}, 200, 0),
    activations({}, 200, 0),
    *(offload(*case) for case in ((0.05, 1000, 1), (0.01, 1000, 0), (0.05, 50, 0))),
)


@pytest.mark.parametrize(("cause", "changes", "told", "named"), CASES)
def test_a_cause_is_named_beyond_its_limit(cause: Cause, changes: dict[str, Any], told: dict[str, Any], named: int):
    spec = Spec().replace(**changes)
    assert causes(spec, steps(spec, **told)) == [cause] * named


def test_compiling_again_and_again_is_named_with_the_guard() -> None:
    spec, why = Spec().replace(compile=True), ("x is 3",)
    twice, thrice = ([replace(e, recompiled=why if 0 < e.step < n else ()) for e in steps(spec)] for n in (3, 4))
    (d,) = found(spec, thrice)
    assert d.cause is Cause.COMPILATION and not found(spec, twice)
    assert "3 steps, last in step 3" in d.sentence and "x is 3" in d.sentence and d.changes == {"compile": False}


def test_replicas_that_exchange_nothing_are_named() -> None:
    for size, kind, named in ((1, "all_gather", 1), (1, "all_reduce", 0), (1, "send", 0), (2, "all_gather", 0)):
        loop = replace(LOOP, shard_size=size)
        events = steps(loop, comm={kind: Traffic(calls=1, link_bytes=64, exposed_seconds=0.0)})
        assert causes(loop, events) == [Cause.REPLICAS] * named, (size, kind)
        assert not found(loop, [replace(e, skipped=True) for e in events]), "nothing was updated"


@pytest.mark.parametrize(("count", "slow_s", "named"), [(20, 0.02, 1), (12, 0.02, 0), (20, 0.004, 0)])
def test_a_rank_that_is_late_is_named_where_it_costs_much(count: int, slow_s: float, named: int) -> None:
    """Rank 1 waits for its input, and rank 0 for rank 1."""
    parts: tuple[dict[str, Any], ...] = (
        {"late": ((1, slow_s),), "comm": {"all_gather": Traffic(calls=1, exposed_seconds=slow_s)}},
        {"part_s": {"input": slow_s}, "comm": {"all_gather": Traffic(calls=1, exposed_seconds=0.0)}},
    )
    told = found(LOOP, [replace(e, **parts[e.rank]) for e in steps(LOOP, count)])
    assert [d.cause for d in told] == [Cause.LATE] * named
    said = "20% of the time all wait for rank 1, which waits for its input; without that, steps would be 20% shorter."
    assert not told or (told[0].sentence == said and "DataLoader" in told[0].cure)


def test_what_the_audit_found_is_a_trouble() -> None:
    what = "it has a gradient, no optimizer, and does not move"
    lost = [AuditFinding(kind=AuditKind.NOT_IN_OPTIMIZER, parameter=n, rank=0, step=3, what=what) for n in ("a", "b")]
    differ = AuditFinding(kind=AuditKind.REPLICAS_DIFFER, parameter="a", rank=1, step=0, what="it differs")
    (d,) = found(LOOP, audit=lost)
    assert d.sentence == f"a (in no optimizer): {what}, seen in step 3 (1 other: run.audit())."
    assert d.cause is Cause.UPDATES and d.cure.startswith("Give it to the optimizer")
    apart, exchanged = replace(LOOP, shard_size=1), {"all_gather": Traffic(calls=1, exposed_seconds=0.0)}
    assert [d.cause for d in found(apart, steps(apart, comm=exchanged), audit=[differ])] == [Cause.REPLICAS]


def test_a_failure_whose_cause_its_error_names_is_explained() -> None:
    for cause in Cause:
        explained = [d for d in found(Spec(), failure=cause) if d.sentence.endswith(".") and d.cure.endswith(".")]
        assert [d.cause for d in explained] == [cause] * (cause in ("loading", "checkpoint", "batches", "generation"))
    assert not found(Spec(world_size=1), failure=Cause.LOADING), "it has no shards to read"


LEFT, STEP = LoopRank(place=LoopPlace.OVER, steps=3), LoopRank(place=LoopPlace.STEP, steps=4)
ALONE = LoopRank(place=LoopPlace.FORWARD, steps=3, generates=True)


def test_why_the_ranks_of_a_loop_do_not_meet() -> None:
    cause, why = cause_in_loop({0: STEP, 1: LEFT})
    assert cause is Cause.BATCHES and "rank 1 left the loop after 3 steps" in why
    cause, why = cause_in_loop({0: ALONE, 1: STEP})
    assert cause is Cause.GENERATION and why.startswith("rank 0 ran the model") and why.endswith("in generate")
    assert cause_in_loop({0: ALONE, 1: ALONE}) == (None, "") == cause_in_loop({0: STEP, 1: STEP})
    ended_together = {0: STEP, 1: replace(LEFT, steps=4)}
    assert cause_in_loop(ended_together) == (None, ""), "rank 0 may still be in its last step"


def test_names_before_wrapping() -> None:
    name = "module._orig_mod.h.0._fsdp_wrapped_module.mlp._checkpoint_wrapped_module.weight"
    assert unwrapped(name) == "h.0.mlp.weight" and unwrapped("h.module.weight") == "h.module.weight"


def test_the_box_shows_what_is_found_and_its_button_chooses_the_cure() -> None:
    chosen: list[Any] = []
    box = DiagnosisBox(chosen.append)
    assert box.widget.layout.display == HIDDEN or not box.diagnoses
    box.show([Diagnosis(cause=Cause.OFFLOAD, sentence="It <crawls>.", cure="Stop.", changes={"offload": "none"})])
    button = box._cure
    assert "It &lt;crawls&gt;." in box.message.value and box.widget.layout.display == ""
    button.click()
    assert chosen == [{"offload": "none"}]
    box.show([])
    button.click()
    assert box.widget.layout.display == HIDDEN and len(chosen) == 1
