"""Planned memory beside the ledger of real ranks, beside closed forms, and beside published peaks."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest

from fsdp_lab.core.events import Role, StepEvent
from fsdp_lab.core.model_shape import ALLOCATED, MADE
from fsdp_lab.core.spec import Spec
from fsdp_lab.planner.costs import Software
from fsdp_lab.planner.devices import machine
from fsdp_lab.planner.memory import GPU_SLACK, SPARE, loading_bytes, memory, peak_in_theory, tape_of
from fsdp_lab.planner.named_models import NamedModel, named_model, shape_of
from fsdp_lab.planner.plan import plan as planned_step
from fsdp_lab.planner.published import peak_in_unit
from fsdp_lab.planner.shapes import shape_for
from fsdp_lab.planner.shapes.rewrapping import deepened
from fsdp_lab.planner.validate import UNEXPLAINED, MemoryRow, mape, memory_lines, memory_rows, published
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

LLAMA = NamedModel(
    family="llama", layers=32, hidden=4096, heads=32, kv_heads=32, inner=11008, vocabulary=32000, seq_len=4096
)


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


@pytest.mark.parametrize("backend", ["fsdp2", "fsdp1"])
@pytest.mark.parametrize(("keeps", "each"), [(False, 12), (True, 16)])
def test_model_state_is_12_bytes_a_parameter_and_16_where_gradients_stay(keeps: bool, each: int, backend: str) -> None:
    """Values and AdamW's moments in fp32; the peak is where the backward begins, and there are no gradients yet."""
    shape, software = shape_of(LLAMA), Software(keeps_gradients=keeps)
    peaks = {
        n: memory(wide(n, backend=backend, micro_batch=32), shape, device="cuda", software=software) for n in (16, 32)
    }
    assert {p.peak_phase for p in peaks.values()} == {"backward"}
    slope = (peaks[16].peak_bytes - peaks[32].peak_bytes) / (shape.parameters * (1 / 16 - 1 / 32))
    assert slope == pytest.approx(each, rel=1e-4)


@pytest.mark.parametrize("backend", ["lab", "fsdp2"])
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_model_of_which_only_sizes_are_known_is_as_one_that_was_recorded(
    backend: str, recompute: str, precision: str
) -> None:
    spec = wide(64, backend=backend, recompute=recompute, precision=precision, seq_len=1024)
    recorded, known = (memory(spec, s, device="cuda") for s in (shape_for("llama-7b"), shape_of(LLAMA)))
    assert known.peak_bytes == pytest.approx(recorded.peak_bytes, rel=0.02)
    assert known.at_peak.activations_bytes == pytest.approx(recorded.at_peak.activations_bytes, rel=0.06)


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


# -- beside published peaks ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rows() -> list[MemoryRow]:
    return memory_rows(published())[0]


def test_allocated_memory_of_published_rows(rows: list[MemoryRow]) -> None:
    explained = [m for m in rows if m.kind == "allocated" and m.is_explained]
    first = [m for m in explained if m.case.id.startswith(("fsdp-7", "dlrover"))]
    assert len(first) == 23 and mape(first) <= 0.05 and max(abs(m.error) for m in first) <= 0.12
    assert len(explained) == 60 and mape(explained) <= 0.05
    for source in {m.case.source for m in explained}:
        assert mape([m for m in explained if m.case.source == source]) <= 0.08, source
    assert any(line.startswith("allocated memory, 60 rows") for line in memory_lines(rows))


def test_reserved_memory_of_published_rows(rows: list[MemoryRow]) -> None:
    reserved = [m for m in rows if m.kind == "reserved"]
    first = [m for m in reserved if m.case.id.startswith(("tt165", "tt-8B"))]
    assert len(first) == 9 and mape(first) <= 0.05
    assert len(reserved) == 29 and mape(reserved) <= 0.12


def test_reserved_memory_beside_allocated_in_one_figure() -> None:
    """The slack is what an allocator needs at least, and what it takes where there is room is in the middle."""
    ratios = [float(row["other_value"].split(";")[1]) / float(row["peak_mem"]) for row in published()
              if row["other_metric"] == "peak_active_GB;peak_reserved_GB"]  # fmt: skip
    assert len(ratios) == 21
    assert 1 + GPU_SLACK < min(ratios) < SPARE < max(ratios)


def test_a_row_left_out_contradicts_the_spec_and_says_why(rows: list[MemoryRow]) -> None:
    """Values, gradients and moments in fp32 are 16 bytes a parameter on one GPU."""
    assert {m.case.id for m in rows if not m.is_explained} == set(UNEXPLAINED)
    alone = next(m for m in rows if m.case.id == "kempner-01")
    assert 8 < alone.measured_bytes / alone.case.shape.parameters < 12
    assert any(UNEXPLAINED["kempner-01"] in line for line in memory_lines(rows))


def test_t5_s_peaks_are_those_of_a_first_forward(rows: list[MemoryRow]) -> None:
    """Between 8 GPUs and 512 fp32 values alone, within the rounding to GB; between 8 samples and 16 the end of a forward."""
    by_id = {m.case.id: m for m in rows}
    few, many = by_id["fsdp-7c-B16-8"], by_id["fsdp-7c-B16-512"]
    parameters = few.case.shape.parameters * (1 / 8 - 1 / 512)
    assert (few.measured_bytes - many.measured_bytes) / parameters == pytest.approx(4, abs=1 * GB / parameters)
    assert (few.predicted_bytes - many.predicted_bytes) / parameters == pytest.approx(4, abs=0.01)
    fewer = by_id["fsdp-7c-B8-512"]
    assert (many.predicted_bytes - fewer.predicted_bytes) / 8 == pytest.approx(
        (many.measured_bytes - fewer.measured_bytes) / 8, abs=GB / 8
    )


def test_a_first_step_makes_the_optimizer_s_state_in_its_update() -> None:
    shape, state = shape_of(LLAMA), 8 * shape_of(LLAMA).parameters / 16
    for backend in ("fsdp1", "fsdp2", "lab"):
        usual, first = (
            memory(wide(16, backend=backend), shape, device="cuda", software=Software(first_step=is_first))
            for is_first in (False, True)
        )
        assert usual.held.optimizer_bytes == pytest.approx(state, rel=0.001) and not first.held.optimizer_bytes
        assert first.held.parameters_bytes == usual.held.parameters_bytes and not first.held.gradients_bytes
        assert usual.peak_bytes - first.peak_bytes == pytest.approx(state, rel=0.25)


def test_a_t5_s_cache_lives_until_its_forward_ends() -> None:
    model = named_model("t5-11b")
    assert model is not None
    shape, ends = shape_of(model), {}
    for returns_cache in (False, True):
        tape = tape_of(shape, wide(64, seq_len=512), Software(returns_cache=returns_cache))
        total, sizes = 0.0, []
        for segment in tape:
            for change in segment.changes:
                total += change.size.bytes_of(1, 512) * (1 if change.kind in (ALLOCATED, MADE) else -1)
            sizes.append(total)
        ends[returns_cache] = max(sizes[: len(sizes) // 2]), sizes[-1]
    cache = 24 * 4 * model.width * 2 * 512  # bytes: blocks, keys and values of two attentions, bf16, tokens
    assert ends[True][0] - ends[False][0] == pytest.approx(cache)
    assert ends[True][1] == pytest.approx(ends[False][1])  # nothing of it is left


def test_slopes_of_published_rows(rows: list[MemoryRow]) -> None:
    """Bytes a parameter between two numbers of GPUs: of dlrover's rows, which are exact, 12."""
    by_id = {m.case.id: m for m in rows}
    few, many = by_id["dlrover-7B-16"], by_id["dlrover-7B-32"]
    parameters = few.case.shape.parameters * (1 / 16 - 1 / 32)
    assert (few.measured_bytes - many.measured_bytes) / parameters == pytest.approx(12, abs=0.01)
    assert (few.predicted_bytes - many.predicted_bytes) / parameters == pytest.approx(12, abs=0.3)


def test_units_and_kinds() -> None:
    plan = memory(wide(64), shape_of(LLAMA), device="cuda")
    gib = peak_in_unit(plan, {"peak_mem_unit": "GiB", "peak_mem_kind": "allocated"})
    gb = peak_in_unit(plan, {"peak_mem_unit": "GB", "peak_mem_kind": "allocated"})
    mib = peak_in_unit(plan, {"peak_mem_unit": "MB (slope fits MiB)", "peak_mem_kind": "max allocated"})
    assert gib is not None and gb is not None and mib is not None
    assert gb * GB == pytest.approx(gib * 2**30) == pytest.approx(plan.peak_bytes) == pytest.approx(mib * 2**20)
    reserved = peak_in_unit(plan, {"peak_mem_unit": "GB", "peak_mem_kind": "reserved"})
    assert reserved is not None and reserved > plan.reserved_bytes / GB > gb
    full = peak_in_unit(plan, {"peak_mem_unit": "GiB", "peak_mem_kind": "reserved", "gpu_mem_gb": "16"})
    assert full == pytest.approx(0.95 * 16)
    assert peak_in_unit(plan, {"peak_mem_unit": "bananas", "peak_mem_kind": "reserved"}) is None
