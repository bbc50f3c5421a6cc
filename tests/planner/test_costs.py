"""What is moved beside products, and what a full memory does to a step."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from fsdp_lab.core.optimizer import TorchOptimizer
from fsdp_lab.core.spec import Spec
from fsdp_lab.planner.costs import (
    FUSED_SCORE_BYTES,
    GATE,
    RESIDUAL,
    RMS_NORM,
    ROTARY,
    SCORE_BYTES,
    Attention,
    Software,
    attention_seconds,
    memory_traffic,
    padding,
    update_bytes,
)
from fsdp_lab.planner.devices import DEVICES, PUBLISHED, machine
from fsdp_lab.planner.memory import needed_bytes, under_pressure
from fsdp_lab.planner.named_models import gpt_model, named_model, shape_of
from fsdp_lab.planner.plan import plan
from fsdp_lab.planner.published import case
from fsdp_lab.planner.shapes import shape_for
from fsdp_lab.planner.validate import published

SEVEN = shape_of(named_model("Llama-2 7B"))  # type: ignore[arg-type]


def test_a_gated_block_moves_what_its_kernels_do() -> None:
    h, inner = 4096, 11008
    by_hand = 2 * h * (RESIDUAL[0] + RMS_NORM[0]) + 2 * h * ROTARY[0] + inner * GATE[0]
    found = memory_traffic(SEVEN.units[1])
    assert found is not None and found[0] == pytest.approx(by_hand)
    assert found[2] < found[0] / 3, "a compiler fuses them"


def test_a_gpt_of_that_size_moves_far_less_and_a_head_its_logits() -> None:
    gpt, llama = memory_traffic(shape_of(named_model("GPT 6.7B")).units[1]), memory_traffic(SEVEN.units[1])  # type: ignore[arg-type]
    assert gpt is not None and llama is not None and 3 < llama[0] / gpt[0] < 5
    root = memory_traffic(SEVEN.units[0])
    assert root is not None and root[0] == 32000 * 14


@pytest.mark.parametrize(("name", "args", "each"), [
    ("adamw", {}, 80), ("adamw", {"amsgrad": True}, 92), ("adamw", {"fused": True}, 28),
    ("adamw", {"fused": True, "amsgrad": True}, 36), ("sgd", {}, 12), ("sgd", {"momentum": 0.9}, 32),
    ("sgd", {"momentum": 0.9, "nesterov": True, "fused": True}, 20),
], ids=str)  # fmt: skip
def test_an_update_moves_what_its_kernels_do(name: str, args: dict[str, Any], each: int) -> None:
    """And a step takes as much longer or shorter."""
    assert update_bytes(TorchOptimizer(name=name, args=args)) == each
    spec = Spec(world_size=8).replace(model="gpt2-124m", optimizer=name)
    shape, where = shape_for("gpt2-124m"), machine("a100-80", 8)
    one, usual = (plan(s, shape, where).step.optimizer_s for s in (spec.replace(optimizer_args=args), spec))
    assert one / usual == pytest.approx(each / {"adamw": 80, "sgd": 12}[name])


def test_published_runs_with_a_fused_optimizer_are_planned_with_one() -> None:
    rows = {row["id"]: row for row in published()}
    assert case(rows["kempner-01"]).spec.workload.torch_optimizer.is_fused
    assert not case(rows["mosaic-080"]).spec.workload.torch_optimizer.is_fused


def test_where_memory_is_nearly_full_fsdp1_does_not_overlap() -> None:
    rows = {row["id"]: row for row in published()}
    full, roomy = case(rows["mosaic-080"]), case(rows["mosaic-081"])  # 30B on eight GPUs, 8,192 tokens and 4,096
    assert under_pressure(full.spec, full.shape, full.machine)
    assert not under_pressure(roomy.spec, roomy.shape, roomy.machine)
    other = full.spec.replace(backend="fsdp2")
    assert not under_pressure(other, full.shape, full.machine)
    larger = dataclasses.replace(full.machine.device, memory_bytes=2 * full.machine.device.memory_bytes)
    there = dataclasses.replace(full.machine, device=larger)
    tight, free = (plan(full.spec, full.shape, where, software=full.software) for where in (full.machine, there))
    assert tight.step_time_s > 1.05 * free.step_time_s and tight.step.exposed_comm_s > 5 * free.step.exposed_comm_s


def test_a_model_in_one_unit_needs_no_block() -> None:
    spec = Spec(world_size=16).replace(backend="fsdp1", wrap="whole", model="gpt2-1m", held_out=0.0)
    assert plan(spec, shape_for("gpt2-1m", "whole"), machine("a100-80", 16)).fits


def test_what_is_needed_is_state_and_what_is_kept() -> None:
    one = case(next(row for row in published() if row["id"] == "mosaic-080"))
    state = 16 * one.shape.parameters / 8
    assert state < needed_bytes(one.spec, one.shape) < 1.4 * state
    twice = one.spec.replace(micro_batch=2)
    assert needed_bytes(twice, one.shape) > needed_bytes(one.spec, one.shape)


def test_a_head_of_an_odd_width_takes_as_long_as_the_next_whole_one() -> None:
    """FlashAttention's kernels of 80 wide heads are those of 96."""
    hidden, heads = 2560, 32
    narrow = shape_of(gpt_model(4, hidden, heads)).units[-1]
    whole = shape_of(gpt_model(4, 3072, heads)).units[-1]
    assert padding(narrow) == pytest.approx(96 / 80) and padding(whole) == 1.0
    a100, software = DEVICES["a100-80"], Software()
    times = [attention_seconds(unit, 4096, 1, "bf16", a100, PUBLISHED, software) for unit in (narrow, whole)]
    assert times[0] == pytest.approx(times[1])


def test_a_fused_softmax_moves_less_and_flash_attention_has_no_scores_to_move() -> None:
    unit, a100 = shape_of(gpt_model(4, 4096, 32)).units[-1], DEVICES["a100-80"]

    def seconds(kernel: Attention, fused: bool) -> float:
        software = Software(attention=kernel, fused_softmax=fused)
        return attention_seconds(unit, 2048, 1, "bf16", a100, PUBLISHED, software)

    saved = seconds(Attention.PLAIN, False) - seconds(Attention.PLAIN, True)
    moved = (SCORE_BYTES - FUSED_SCORE_BYTES) * 32 * 2048**2
    assert saved == pytest.approx(moved / (a100.memory_bytes_per_s * PUBLISHED.memory))
    assert seconds(Attention.FLASH2, False) == seconds(Attention.FLASH2, True)
