"""Causes from events with known figures, on both sides of each limit; what a cure may be; the box of the dashboard."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from fsdp_lab.base.events import Memory, RoleBytes, Span, StepEvent, Track, Traffic
from fsdp_lab.base.hang import FORWARD_ALONE, UNEQUAL_BATCHES, LoopPlace, LoopRank, cause_in_loop
from fsdp_lab.dashboard.forms import HIDDEN
from fsdp_lab.dashboard.opened_forms import DiagnosisBox
from fsdp_lab.models.wrapper_names import WRAPPED_NAMES, unwrapped
from fsdp_lab.runs.diagnosis import Cause, Diagnosis, diagnose
from fsdp_lab.runs.steps import EventStore
from fsdp_lab.spec.loops import Trained, WatchedLoop
from fsdp_lab.spec.spec import Spec
from tests.lab.events import event

MIB = 1 << 20
SHARDS = Memory(parameters_bytes=10 * MIB, gradients_bytes=10 * MIB, optimizer_bytes=20 * MIB, limit_bytes=1000 * MIB)
LOOP = WatchedLoop(
    model="Net", backend="fsdp2", sharding="full_shard", shard_size=2, parameters=1, units=3, optimizer="AdamW",
    precision="fp32", offload="none", world_size=2, device="cpu",
)  # fmt: skip


def found(spec: Trained, events: Sequence[StepEvent] = (), failure: str = "") -> tuple[Diagnosis, ...]:
    store = EventStore()
    store.add(events)
    return diagnose(spec, store, failure)


def causes(spec: Trained, events: Sequence[StepEvent] = (), failure: str = "") -> list[Cause]:
    return [d.cause for d in found(spec, events, failure)]


def steps(spec: Trained, count: int = 8, **fields: Any) -> list[StepEvent]:
    given: dict[str, Any] = {"memory": SHARDS, "spec_id": spec.id, **fields}
    return [event(rank, step, **given) for step in range(count) for rank in (0, 1)]


def waiting(share: float, sent: int = 30 * MIB) -> dict[str, Traffic]:
    return {"all_gather": Traffic(calls=4, link_bytes=sent, seconds=0.1, exposed_seconds=0.1 * share)}


def peak(**roles: int) -> Memory:
    at_peak = RoleBytes(**{f"{role}_bytes": size for role, size in roles.items()})
    return replace(SHARDS, at_peak=at_peak, peak_bytes=at_peak.total_bytes)


@pytest.mark.parametrize(("share", "sent", "named"), [(0.7, 30 * MIB, 1), (0.5, 30 * MIB, 0), (0.7, 20 * MIB, 0)])
def test_communication_is_named_where_computing_waits_long_and_replicas_would_send_less(
    share: float, sent: int, named: int
) -> None:
    assert causes(Spec(), steps(Spec(), comm=waiting(share, sent))) == [Cause.COMMUNICATION] * named


@pytest.mark.parametrize(("changes", "sent", "named"), [({}, 2, 1), ({}, 0.5, 0), ({"precision": "bf16-pure"}, 1.5, 1)])
def test_of_a_part_that_is_trained_a_replica_sends_less_than_of_all(changes, sent: float, named: int) -> None:
    spec = Spec().replace(freeze=["transformer.h.*"], **changes)
    found_causes = causes(spec, steps(spec, comm=waiting(0.7, int(sent * MIB))))
    assert found_causes == [Cause.COMMUNICATION] * named


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


@pytest.mark.parametrize(
    ("changes", "gradients", "named"),
    [
        ({"accumulate": 4, "sync": "last"}, 20, 1),
        ({"accumulate": 4, "sync": "last"}, 15, 0),
        ({"sync": "last"}, 20, 0),  # of one micro-batch
        ({"accumulate": 4, "sync": "last", "sharding": "zero1"}, 20, 0),  # whole by design
    ],
)
def test_whole_gradients_are_named_where_they_need_not_be(changes: dict[str, Any], gradients: int, named: int) -> None:
    spec = Spec().replace(**changes)
    events = steps(spec, memory=peak(gradients=gradients * MIB, parameters=10 * MIB))
    assert causes(spec, events) == [Cause.ACCUMULATION] * named


@pytest.mark.parametrize(
    ("changes", "activations", "named"),
    [({}, 200, 1), ({}, 20, 0), ({"recompute": "full"}, 200, 0), ({"lora": None}, 200, 0)],
)
def test_adapters_that_save_little_are_named(changes: dict[str, Any], activations: int, named: int) -> None:
    spec = Spec().replace(**{"lora": {"r": 4}, **changes})
    memory = replace(peak(activations=activations * MIB, parameters=10 * MIB), gradients_bytes=0, optimizer_bytes=0)
    assert causes(spec, steps(spec, memory=memory)) == [Cause.ADAPTERS] * named


@pytest.mark.parametrize(("host_s", "limit", "named"), [(0.05, 1000, 1), (0.01, 1000, 0), (0.05, 50, 0)])
def test_offload_is_named_where_it_costs_time_and_there_is_room(host_s: float, limit: int, named: int) -> None:
    spec = Spec().replace(offload="all")
    spans = (Span(track=Track.COMPUTE, name="optimizer", unit="", start_s=0, end_s=host_s),)
    memory = replace(SHARDS, peak_bytes=5 * MIB, host_bytes=40 * MIB, limit_bytes=limit * MIB)
    assert causes(spec, steps(spec, spans=spans, memory=memory)) == [Cause.OFFLOAD] * named


@pytest.mark.parametrize(("again", "named"), [((1, 2, 3), 1), ((1, 2), 0)])
def test_compiling_again_and_again_is_named_with_the_guard(again: Sequence[int], named: int) -> None:
    spec = Spec().replace(compile=True)
    events = [replace(e, recompiled=("x is 3",) if e.step in again else ()) for e in steps(spec)]
    assert causes(spec, events) == [Cause.COMPILATION] * named
    if named:
        (d,) = found(spec, events)
        assert "3 steps, last in step 3" in d.sentence and "x is 3" in d.sentence and d.changes == {"compile": False}


@pytest.mark.parametrize(
    ("size", "kind", "named"), [(1, "all_gather", 1), (1, "all_reduce", 0), (1, "send", 0), (2, "all_gather", 0)]
)
def test_replicas_that_exchange_nothing_are_named(size: int, kind: str, named: int) -> None:
    loop = replace(LOOP, shard_size=size)
    events = steps(loop, comm={kind: Traffic(calls=1, link_bytes=64, exposed_seconds=0.0)})
    assert causes(loop, events) == [Cause.REPLICAS] * named
    assert not found(loop, [replace(e, skipped=True) for e in events]), "nothing was updated"


@pytest.mark.parametrize(
    ("failure", "cause"),
    [
        ("workload.model: build() raised RuntimeError: DefaultCPUAllocator: can't allocate memory", Cause.LOADING),
        (f"workload.weights: the 9 tensors lack 9, and {WRAPPED_NAMES}: module.a is a", Cause.CHECKPOINT),
        (f"{UNEQUAL_BATCHES}: rank 1 left the loop after 3 steps, rank 0 began step 4", Cause.BATCHES),
        (f"rank 0 {FORWARD_ALONE} in generate; collective 4 failed", Cause.GENERATION),
    ],
)
def test_a_failure_is_explained(failure: str, cause: Cause) -> None:
    (d,) = found(Spec(), failure=failure)
    assert d.cause is cause and d.sentence.endswith(".") and d.cure.endswith(".") and ";" not in d.sentence


def test_other_failures_are_not() -> None:
    assert not found(Spec(), failure="rank 1 is gone: its process 7 on box was killed")
    assert not found(Spec(), failure="OutOfMemoryError: CUDA out of memory"), "perhaps of the first step's activations"
    building = "workload.model: build() raised OutOfMemoryError: CUDA out of memory"
    assert not found(Spec(), steps(Spec(), 2), failure=building), "it had begun"


LEFT, STEP = LoopRank(place=LoopPlace.OVER, steps=3), LoopRank(place=LoopPlace.STEP, steps=4)
ALONE = LoopRank(place=LoopPlace.FORWARD, steps=3, generates=True)


def test_why_the_ranks_of_a_loop_do_not_meet() -> None:
    assert cause_in_loop({0: STEP, 1: LEFT}).startswith(f"{UNEQUAL_BATCHES}: rank 1 left the loop after 3 steps")
    assert cause_in_loop({0: ALONE, 1: STEP}) == f"rank 0 {FORWARD_ALONE} in generate"
    assert cause_in_loop({0: ALONE, 1: ALONE}) == "" == cause_in_loop({0: STEP, 1: STEP})
    ended_together = {0: STEP, 1: replace(LEFT, steps=4)}
    assert cause_in_loop(ended_together) == "", "rank 0 may still be in its last step"


def test_names_before_wrapping() -> None:
    name = "module._orig_mod.h.0._fsdp_wrapped_module.mlp._checkpoint_wrapped_module.weight"
    assert unwrapped(name) == "h.0.mlp.weight" and unwrapped("h.module.weight") == "h.module.weight"


def test_the_box_shows_what_is_found_and_its_button_chooses_the_cure() -> None:
    chosen: list[Any] = []
    box = DiagnosisBox(chosen.append)
    assert box.widget.layout.display == HIDDEN or not box.diagnoses
    box.show([Diagnosis(cause=Cause.OFFLOAD, sentence="It <crawls>.", cure="Stop.", changes={"offload": "none"})])
    (first, text, button), (second, _, _) = box._rows
    assert "It &lt;crawls&gt;." in text.value and first.layout.display == "" and second.layout.display == HIDDEN
    button.click()
    assert chosen == [{"offload": "none"}]
    box.show([])
    button.click()
    assert box.widget.layout.display == HIDDEN and len(chosen) == 1
