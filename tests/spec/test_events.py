"""StepEvent and PhaseSnapshot: both ways through JSON, and what they derive."""

import json

from fsdp_lab.base.events import (
    ROOT,
    Memory,
    MemorySample,
    ParameterHolding,
    PhaseSnapshot,
    Role,
    RoleBytes,
    StepEvent,
    Traffic,
)


def event(**changes: object) -> StepEvent:
    fields: dict[str, object] = {
        "run": "r", "spec_id": "s", "rank": 1, "world_size": 2, "step": 3, "samples": 32, "end_unix_s": 1.5,
        "step_time_s": 0.5, "tokens": 100, "loss": 2.0, "mean_loss": 2.5, "grad_norm": 1.0, "flops": 10**12,
        "peak_flops_per_s": 8e12, "peak_source": "test", "memory": Memory(parameters_bytes=7, peak_bytes=9),
        "comm": {"all_gather": Traffic(calls=2, link_bytes=64, seconds=0.25)}, "notes": ("a note",),
    }  # fmt: skip
    return StepEvent(**{**fields, **changes})  # type: ignore[arg-type]


def test_json_both_ways_and_an_event_that_was_stored_before_some_fields_has_their_defaults() -> None:
    assert StepEvent.from_dict(json.loads(json.dumps(event().to_dict()))) == event()
    classes = RoleBytes(parameters_bytes=3, activations_bytes=4)
    sample = MemorySample(at_s=0.25, phase="backward", unit="h.0", moment="highest", classes=classes)
    whole = event(memory=Memory(at_peak=classes, peak_bytes=7), memory_curve=(sample,), ledger=True)
    assert StepEvent.from_dict(json.loads(json.dumps(whole.to_dict()))) == whole
    evaluated = event(eval_loss=2.25)
    assert StepEvent.from_dict(json.loads(json.dumps(evaluated.to_dict()))) == evaluated
    told = event(input_s=0.5, memory=Memory(alloc_retries=2, ooms=1))
    stored = json.loads(json.dumps(told.to_dict()))
    assert StepEvent.from_dict(stored) == told
    del stored["input_s"], stored["memory"]["alloc_retries"], stored["memory"]["ooms"]
    assert StepEvent.from_dict(stored) == event(input_s=None, memory=Memory())


def test_classes_are_the_roles_and_add_up() -> None:
    sizes = {role: 2**i for i, role in enumerate(Role)}
    classes = RoleBytes.of(sizes)
    assert {role: classes.of_role(role) for role in Role} == sizes and classes.total_bytes == 2 ** len(Role) - 1


def test_what_is_derived() -> None:
    e = event()
    assert (e.tokens_per_s, e.tflops, e.mfu) == (200, 2, 0.25)
    assert event(peak_flops_per_s=None).mfu is None and event(peak_flops_per_s=None).hfu is None
    assert e.hfu == e.mfu and e.hardware_flops == e.flops
    again = event(recompute_flops=10**12 // 4)
    assert (again.hardware_flops, again.hfu, again.mfu, again.tflops) == (1.25e12, 0.3125, 0.25, 2)
    assert e.counts and not event(ledger=True).counts and not event(first_after_switch=True).counts
    one = Traffic(calls=1, link_bytes=2, seconds=3.0, exposed_seconds=4.0)
    two = Traffic(calls=10, link_bytes=20, seconds=30.0, exposed_seconds=40.0)
    assert event(comm={"all_gather": one, "control": two}).exposed_comm_s == 44.0
    e = event(peak_flops_per_s=1e12, recompute_flops=10**12 // 4)
    assert e.best_flops_per_s == 2.5e12 and (e.mfu, e.hfu) == (0.8, 1.0)


# -- frames
def holding(**changes: object) -> ParameterHolding:
    fields: dict[str, object] = {
        "name": "h.0.weight", "unit": "h.0", "numel": 10, "start": 5, "stop": 10, "state": "sharded", "gradient": "none",
    }  # fmt: skip
    return ParameterHolding(**{**fields, **changes})  # type: ignore[arg-type]


def frame(*parameters: ParameterHolding) -> PhaseSnapshot:
    return PhaseSnapshot(rank=1, world_size=2, step=7, index=3, phase="unshard", unit=ROOT, direction="forward",
                 parameters=parameters)  # fmt: skip


def test_a_frame_goes_through_json_both_ways_and_all_of_a_parameter_is_held_when_it_is_unsharded() -> None:
    f = frame(holding(), holding(name="wte.weight", unit=ROOT, start=0, stop=0, gradient="sharded"))
    assert PhaseSnapshot.from_dict(json.loads(json.dumps(f.to_dict()))) == f
    assert PhaseSnapshot.from_dict(frame().to_dict()) == frame()
    held = [holding(state=state).held for state in ("sharded", "gathering", "unsharded")]
    assert held == [(5, 10), (5, 10), (0, 10)]
