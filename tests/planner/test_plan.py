"""Plans of one Spec: their figures hang together, and say what nobody said."""

from typing import Any

import pytest

from fsdp_lab.base.errors import ArgumentError, SpecError
from fsdp_lab.planner.costs import update_bytes
from fsdp_lab.planner.devices import machine
from fsdp_lab.planner.plan import limit, plan, scaling
from fsdp_lab.planner.shapes import shape_for
from fsdp_lab.spec.optimizer import TorchOptimizer
from fsdp_lab.spec.spec import Spec

SEVEN = shape_for("llama-7b")
SPEC = Spec(world_size=64).replace(backend="fsdp2", precision="bf16", seq_len=4096, micro_batch=2, recompute="full")


def test_figures_hang_together() -> None:
    found = plan(SPEC, SEVEN, machine("a100-80", 64))
    assert found.tokens == 64 * 2 * 4096 and found.tokens_per_s == pytest.approx(found.tokens / found.step_time_s)
    weights = sum(p.weights for unit in SEVEN.units for p in unit.products)
    by_rule = (6 * weights + 12 * 32 * 4096 * 4096) * 2 * 4096  # PaLM's, arXiv 2204.02311, appendix B
    assert found.model_flops == pytest.approx(by_rule) and 0.3 < found.mfu < 0.6 and found.binding == "computing"
    gathered = 2 * SEVEN.parameters * 63 / 64
    assert found.link_bytes["all_gather"] == pytest.approx(2 * gathered, rel=0.05)  # twice, but what is kept
    assert found.link_bytes["reduce_scatter"] == pytest.approx(2 * gathered, rel=0.001), "once, in fp32"
    assert found.assumed["network"] == "800 Gb/s a host" and found.assumed["attention"] == "flash2"


def test_a_slow_network_binds_and_the_curve_says_from_where() -> None:
    where = machine("a100-80", 64, network_gbit_per_s=100)
    curve = scaling(SPEC.replace(micro_batch=1), SEVEN, where, [1, 2, 4, 8, 16, 32, 64])
    assert [p.spec.world_size for p in curve] == [1, 2, 4, 8, 16, 32, 64]
    assert limit(curve) == "bound by communication above 8 GPUs at 100 Gb/s a host"
    fast = scaling(SPEC, SEVEN, machine("a100-80", 64), [8, 64])
    assert limit(fast) == "bound by computing up to 64 GPUs at 800 Gb/s a host"


@pytest.mark.parametrize("changes", [{"sharding": "hybrid_shard", "shard_size": 8}, {"sharding": "shard_grad_op"}])
def test_less_is_sent_where_more_is_kept(changes: dict[str, object]) -> None:
    where = machine("a100-80", 64, network_gbit_per_s=100)
    full, kept = (plan(SPEC.replace(precision="bf16-pure", **c), SEVEN, where) for c in ({}, changes))
    assert kept.step.exposed_comm_s < full.step.exposed_comm_s


def test_gradients_are_sent_as_often_as_micro_batches_communicate() -> None:
    where = machine("a100-80", 64, network_gbit_per_s=100)
    syncs = ("every", 1, 2, 3, 4, 9, "last")
    found = {s: plan(SPEC.replace(accumulate=4, sync=s), SEVEN, where) for s in syncs}
    once = found["last"].link_bytes["reduce_scatter"]
    times = {s: p.link_bytes["reduce_scatter"] / once for s, p in found.items()}
    assert times == pytest.approx({"every": 4, 1: 4, 2: 2, 3: 2, 4: 1, 9: 1, "last": 1})
    assert len({p.link_bytes["all_gather"] for p in found.values()}) == 1, "parameters, in every micro-batch"
    seconds = {s: p.step_time_s for s, p in found.items()}
    assert seconds["every"] == seconds[1] > seconds[2] == seconds[3] > seconds[4] == seconds[9] == seconds["last"]
    memory = {s: p.memory.peak_bytes for s, p in found.items()}
    assert memory["every"] == memory[1] < memory[3] == memory["last"], "gradients that wait are whole"
    assert memory["last"] < memory[2], "and wait here beside the reduced ones of the first two"


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ArgumentError, match="the machine has 8 and the Spec 64"):
        plan(SPEC, SEVEN, machine("a100-80", 8))
    with pytest.raises(ArgumentError, match="ranks: 0 is refused"):
        machine("a100", 0)
    with pytest.raises(SpecError, match="mapped is for ranks on CPUs; use copy"):
        plan(SPEC.replace(backend="lab", gather="mapped", precision="fp32"), SEVEN, machine("a100-80", 64))


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
