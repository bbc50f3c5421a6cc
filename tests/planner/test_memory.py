"""Planned memory beside the ledger of real ranks, beside closed forms, and beside published peaks."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest

from fsdp_lab.core.events import Role, StepEvent
from fsdp_lab.core.spec import Spec
from fsdp_lab.planner.devices import machine
from fsdp_lab.planner.memory import loading_bytes, memory, peak_in_theory
from fsdp_lab.planner.plan import plan as planned_step
from fsdp_lab.planner.shapes import shape_for
from fsdp_lab.planner.shapes.rewrapping import deepened
from tests.planner.measured import MODELS, USUAL, Beside, beside, measured, planned
from tests.planner.switching import planned_switch
from tests.pool import Pool

pytestmark = pytest.mark.timeout(900)  # a fixture trains all Specs, each within the pool's own limit

GB = 1e9

# -- beside real ranks -----------------------------------------------------------------------------------------------

DDP = {"backend": "ddp", "sharding": "no_shard"}
ZERO2 = {"sharding": "shard_grad_op", "precision": "bf16"}
RESNET = {"model": "resnet-1m", "data": "images"}
FSDP1_IN_BF16 = {"backend": "fsdp1", "precision": "bf16-pure"}
FIELDS: dict[str, dict[str, Any]] = {
    "lab": {}, "lab, bf16": {"precision": "bf16"}, "lab, offload of all": {"offload": "all"},
    "lab, offload of the optimizer": {"offload": "optimizer", "precision": "bf16-pure"},
    "lab, mapped": {"gather": "mapped"}, "lab, mapped, zero1": {"gather": "mapped", "sharding": "zero1"},
    "lab, zero1": {"sharding": "zero1"}, "lab, no shard": {"sharding": "no_shard"},
    "lab, whole": {"wrap": "whole"}, "lab, t5": {"model": "t5-1m"}, "lab, llama, zero2": {"model": "llama-1m", **ZERO2},
    "lab, vit": {"model": "vit-1m", "data": "images"}, "lab, resnet": RESNET,
    "lab, resnet, bf16": {"precision": "bf16", **RESNET}, "fsdp1, resnet, bf16": {**RESNET, **FSDP1_IN_BF16},
    **{f"{b}, resnet": {"backend": b, **RESNET} for b in ("fsdp1", "fsdp2")}, "ddp, resnet": {**DDP, **RESNET},
    "fsdp2, resnet, bf16": {"backend": "fsdp2", "precision": "bf16", **RESNET},
    "lab, resnet, one sample": {**RESNET, "micro_batch": 1}, "fsdp2": {"backend": "fsdp2"},
    "fsdp2, bf16, zero2": {"backend": "fsdp2", "precision": "bf16", "sharding": "shard_grad_op"},
    "lab, fused": {"optimizer_args": {"fused": True, "amsgrad": True}},
    "fsdp1, momentum": {"backend": "fsdp1", "optimizer": "sgd", "optimizer_args": {"momentum": 0.9, "nesterov": True}},
    "fsdp2, recompute": {"backend": "fsdp2", "recompute": "full"},
    "fsdp1, bf16": FSDP1_IN_BF16, "ddp": DDP, "t5, ddp": {**DDP, "model": "t5-1m"},
    "ddp, bf16, accumulate": {**DDP, "precision": "bf16", "accumulate": 2, "sync": "last"},
    **{f"{b}, every second": {"backend": b, "accumulate": 4, "sync": 2} for b in ("lab", "fsdp2", "fsdp1")},
    "fsdp1, no shard, every second": {"backend": "fsdp1", "sharding": "no_shard", "accumulate": 4, "sync": 2},
    # 16 samples: on a busy machine Gloo's thread frees a gathered copy late, which 4 samples show as 2.6 % of the peak.
    "ddp, bf16, every second": {**DDP, "precision": "bf16", "accumulate": 5, "sync": 2, "micro_batch": 16},
}  # fmt: skip
# Two moments are as high as each other, within half a percent; images in bf16 are activations or "other".
OF_OTHER_CLASSES = ("lab, resnet, one sample", "fsdp2, resnet, bf16")
SPECS = {name: Spec(world_size=2).replace(**{"model": "gpt2-1m", **USUAL, **fields}) for name, fields in FIELDS.items()}


@pytest.fixture(scope="module")
def events(pool: Pool) -> dict[str, StepEvent]:
    return measured(pool, SPECS)


@pytest.fixture(scope="module")
def pairs(events: dict[str, StepEvent]) -> dict[str, Beside]:
    return {b.name: b for b in beside(SPECS, events.items())}


@pytest.mark.slow
@pytest.mark.parametrize("name", SPECS)
def test_the_peak_and_its_classes_are_the_ledger_s_within_2_percent(pairs: dict[str, Beside], name: str) -> None:
    assert abs(pairs[name].error) <= 0.02
    assert name in OF_OTHER_CLASSES or {role: e for role, e in pairs[name].errors() if abs(e) > 0.02} == {}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lab", "lab, bf16", "lab, t5", "lab, llama, zero2", "lab, vit", "lab, resnet"])
def test_the_peak_is_the_closed_form_s(events: dict[str, StepEvent], name: str) -> None:
    theory = peak_in_theory(SPECS[name], shape_for(SPECS[name].workload.model))
    assert 0.98 <= events[name].memory.at_peak.total_bytes / theory <= 1.02


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("model", ["gpt2-1m", *MODELS])
def test_the_schedule_s_peak_is_the_closed_form_s(model: str, ranks: int) -> None:
    data = {"data": "images"} if model.startswith(("vit", "resnet")) else {}
    for precision, sharding in itertools.product(("fp32", "bf16"), ("full_shard", "shard_grad_op")):
        spec = Spec(world_size=ranks).replace(model=model, precision=precision, sharding=sharding, **data)
        assert planned(spec).peak_bytes == pytest.approx(peak_in_theory(spec, shape_for(model)), rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", SPECS)
def test_what_is_held_between_steps_is_the_ledger_s_begin(events: dict[str, StepEvent], name: str) -> None:
    there, here = events[name].memory_curve[0].classes, planned(SPECS[name]).held
    for role in set(Role) - {Role.OTHER}:
        assert here.of_role(role) == pytest.approx(there.of_role(role), rel=0.001, abs=64), role


@pytest.mark.slow
def test_offloaded_state_is_the_host_s(events: dict[str, StepEvent]) -> None:
    name = "lab, offload of all"
    assert planned(SPECS[name]).host_bytes == pytest.approx(events[name].memory.host_bytes, rel=0.001)


# -- beside closed forms ---------------------------------------------------------------------------------------------


def wide(ranks: int, **changes: Any) -> Spec:
    fields = {
        "seq_len": 4096,
        "micro_batch": 4,
        "recompute": "full",
        "precision": "bf16",
        "backend": "fsdp2",
        **changes,
    }
    return Spec(world_size=ranks).replace(held_out=0.0, **fields)


def test_what_saves_memory_saves_it() -> None:
    shape = shape_for("llama-7b")

    def peak(ranks: int = 64, **changes: Any) -> int:
        return memory(wide(ranks, **{"backend": "lab", **changes}), shape, device="cuda").peak_bytes

    assert peak() > peak(128) > peak(128, offload="optimizer") > peak(128, offload="all")
    assert peak(recompute="none") > peak(recompute="every:2") > peak()
    assert peak(sharding="no_shard") > peak(sharding="zero1") > peak(sharding="shard_grad_op") > peak()
    assert peak(precision="fp32") > peak() > peak(micro_batch=2)
    assert peak(sharding="hybrid_shard", shard_size=8) > peak(sharding="hybrid_shard", shard_size=16)


def test_a_plan_of_126_layers_takes_milliseconds() -> None:
    shape, spec = deepened(shape_for("llama-7b"), 126), wide(64, backend="lab")
    memory(spec, shape, device="cuda")
    best = min(_seconds(spec, shape) for _ in range(5))
    assert best < 0.25  # some 3 ms where nobody else is at work


def _seconds(spec: Spec, shape: Any) -> float:
    begin = time.thread_time()
    memory(spec, shape, device="cuda")
    return time.thread_time() - begin


# -- loading and switching: beside real ranks in tests/rank/test_pretrained.py and test_switch_memory.py ---------------


def test_a_switch_takes_the_larger_layout_and_one_unit_s_state() -> None:
    shape = shape_for("gpt2-10m")
    lab, offloaded = (Spec(world_size=2).replace(model="gpt2-10m", offload=offload) for offload in ("none", "all"))
    state = 12 * shape.parameters / 2
    unit = 12 * max(u.numel for u in shape.units) / 2
    moved = planned_switch(lab, lab.replace(backend="fsdp2"), device="cuda")
    assert moved.before_bytes == moved.after_bytes == pytest.approx(state, rel=0.01)
    assert unit < moved.peak_bytes - state < 1.7 * unit, "and what comes and goes"
    assert planned_switch(lab, offloaded, device="cuda").after_bytes == 0
    assert planned_switch(lab, offloaded, device="cpu").after_bytes == pytest.approx(state, rel=0.01)
    wide = planned_switch(lab, lab.replace(wrap="whole"), device="cuda")
    assert wide.peak_bytes == pytest.approx(2 * state, rel=0.02), "units that differ are taken for one"


def test_loading_takes_what_a_rank_keeps_without_optimizer_state() -> None:
    shape, spec = shape_for("gpt2-10m"), Spec(world_size=4).replace(model="gpt2-10m")
    values = 4 * shape.parameters
    for device in ("cpu", "cuda"):
        assert loading_bytes(spec, shape, device=device) == pytest.approx(values / 4, rel=0.01)
        ddp = spec.replace(backend="ddp", sharding="no_shard")
        assert loading_bytes(ddp, shape, device=device) == pytest.approx(2 * values, rel=0.01), "with buckets"
    found = planned_step(spec, shape, machine("h100", 4)).to_dict()["loading_memory_bytes"]
    assert found == pytest.approx(values / 4, rel=0.01)
