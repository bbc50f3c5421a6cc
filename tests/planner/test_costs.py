"""What is moved beside products, and what a full memory does to a step."""

from __future__ import annotations

from typing import Any

import pytest

from fsdp_lab.core.optimizer import TorchOptimizer
from fsdp_lab.core.spec import Spec
from fsdp_lab.planner.costs import update_bytes
from fsdp_lab.planner.devices import machine
from fsdp_lab.planner.plan import plan
from fsdp_lab.planner.shapes import shape_for


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


def test_a_model_in_one_unit_needs_no_block() -> None:
    spec = Spec(world_size=16).replace(backend="fsdp1", wrap="whole", model="gpt2-1m", held_out=0.0)
    assert plan(spec, shape_for("gpt2-1m", "whole"), machine("a100-80", 16)).fits
