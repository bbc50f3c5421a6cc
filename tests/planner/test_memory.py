"""Planned memory beside the ledger of real ranks and beside closed forms; models that are frozen in part, and dropout."""

import itertools
from typing import Any

import pytest

from fsdp_lab.base.events import Role, StepEvent
from fsdp_lab.models.configs import resolve
from fsdp_lab.models.flops import count_flops
from fsdp_lab.planner.devices import machine
from fsdp_lab.planner.memory import MemoryPlan, loading_bytes, memory
from fsdp_lab.planner.plan import plan
from fsdp_lab.planner.shapes import shape_for
from fsdp_lab.spec.spec import Spec
from tests.planner.theory import peak_in_theory
from tests.pool import Pool
from tests.rank.test_ledger import ledger_steps

pytestmark = pytest.mark.timeout(600)  # a fixture trains all Specs, within the pool's own limit

# Patterns of what is frozen: all of the first blocks, and parts of the others.
FROZEN = ["transformer.wte.*", "transformer.wpe.*", "transformer.h.[01].*", "transformer.h.*.attn.*",
          "transformer.ln_f.*"]  # fmt: skip

# Every backend, offload, sharding, precision, optimizer, wrap and kind of model is in one of them: not every pair.
FIELDS: dict[str, dict[str, Any]] = {
    "lab": {}, "fsdp2": {"backend": "fsdp2"}, "lab, mapped, zero1": {"gather": "mapped", "sharding": "zero1"},
    "lab, offload of all, recompute, dropout": {"offload": "all", "recompute": "full", "dropout": "config"},
    "lab, offload of the optimizer": {"offload": "optimizer", "precision": "bf16-pure"},
    "lab, t5, fused": {"model": "t5-1m", "optimizer_args": {"fused": True, "amsgrad": True}},
    "lab, llama, zero2": {"model": "llama-1m", "sharding": "shard_grad_op", "precision": "bf16"},
    "lab, pairs, frozen": {"wrap": "every:2", "freeze": FROZEN}, "fsdp2, frozen": {"backend": "fsdp2", "freeze": FROZEN},
    "fsdp1, resnet, bf16": {"model": "resnet-1m", "data": "images", "backend": "fsdp1", "precision": "bf16-pure"},
    "fsdp1, momentum": {"backend": "fsdp1", "optimizer": "sgd", "optimizer_args": {"momentum": 0.9, "nesterov": True}},
    # 16 samples: on a busy machine Gloo's thread frees a gathered copy late, which 4 samples show as 2.6 % of the peak.
    "ddp, bf16, every second": {"backend": "ddp", "sharding": "no_shard", "precision": "bf16", "accumulate": 3, "sync": 2,
                                "micro_batch": 16},
}  # fmt: skip
SPECS = {name: Spec(world_size=2).replace(**{"model": "gpt2-1m", "seq_len": 128, "micro_batch": 4, **fields})
         for name, fields in FIELDS.items()}  # fmt: skip


def planned(spec: Spec) -> MemoryPlan:
    w = spec.workload
    wrap = "block" if spec.strategy.backend == "ddp" else spec.strategy.wrap
    return memory(spec, shape_for(w.model, wrap, w.freeze, w.adapters, w.dropout), device="cpu")


@pytest.fixture(scope="module")
def events(pool: Pool) -> dict[str, StepEvent]:
    """Rank 0's ledger step of each Spec."""
    mine, *_ = pool.run(ledger_steps, 2, [s.to_dict() for s in SPECS.values()], reduction=None, timeout_s=600)
    return {name: StepEvent.from_dict(e) for name, e in zip(SPECS, mine, strict=True) if e is not None}


@pytest.mark.slow
@pytest.mark.parametrize("name", SPECS)
def test_the_peak_and_its_classes_are_the_ledger_s_within_2_percent(events: dict[str, StepEvent], name: str) -> None:
    """Or within 6 % where convolutions copy; what is held between steps to the byte. Classes: of 2 % of the peak or more."""
    here, event = planned(SPECS[name]), events[name]
    there = event.memory.at_peak
    assert here.peak_bytes == pytest.approx(there.total_bytes, rel=0.06 if "resnet" in name else 0.02)
    # Two moments are as high as each other, within a percent; images in bf16 are activations or "other".
    if name != "fsdp1, resnet, bf16" and "dropout" not in name:
        pairs = {role: (here.at_peak.of_role(role), there.of_role(role)) for role in Role}
        assert {role: pair for role, pair in pairs.items()
                if max(pair) >= 0.02 * there.total_bytes and abs(pair[0] - pair[1]) > 0.02 * max(pair)} == {}  # fmt: skip
    held = event.memory_curve[0].classes
    for role in set(Role) - {Role.OTHER} if SPECS[name].workload.freeze is None else ():
        assert here.held.of_role(role) == pytest.approx(held.of_role(role), rel=0.001, abs=64), role
    if "offload of all" in name:
        assert here.host_bytes == pytest.approx(event.memory.host_bytes, rel=0.001)
    if name in ("lab", "lab, llama, zero2"):
        theory = peak_in_theory(SPECS[name], shape_for(SPECS[name].workload.model))
        assert there.total_bytes == pytest.approx(theory, rel=0.02)
    if name == "lab":
        assert there.total_bytes <= events["fsdp2"].memory.at_peak.total_bytes


@pytest.mark.parametrize(("model", "ranks"), [("gpt2-1m", 4), ("t5-1m", 2), ("vit-1m", 2), ("resnet-1m", 4)])
def test_the_schedule_s_peak_is_the_closed_form_s(model: str, ranks: int) -> None:
    data = {"data": "images"} if model.startswith(("vit", "resnet")) else {}
    for precision, sharding in itertools.product(("fp32", "bf16"), ("full_shard", "shard_grad_op")):
        spec = Spec(world_size=ranks).replace(model=model, precision=precision, sharding=sharding, **data)
        assert planned(spec).peak_bytes == pytest.approx(peak_in_theory(spec, shape_for(model)), rel=1e-3)


def test_recompute_of_more_blocks_and_larger_shard_groups_save_memory() -> None:
    shape = shape_for("llama-7b")

    def peak(ranks: int = 64, **changes: Any) -> int:
        usual = {"seq_len": 4096, "micro_batch": 4, "recompute": "full", "precision": "bf16", "held_out": 0.0}
        return memory(Spec(world_size=ranks).replace(**{**usual, **changes}), shape, device="cuda").peak_bytes

    assert peak(recompute="none") > peak(recompute="every:2") > peak()
    assert peak(sharding="hybrid_shard", shard_size=8) > peak(sharding="hybrid_shard", shard_size=16)


def test_loading_takes_what_a_rank_keeps_without_optimizer_state() -> None:
    shape, spec = shape_for("gpt2-10m"), Spec(world_size=4).replace(model="gpt2-10m")
    values = 4 * shape.parameters
    for device in ("cpu", "cuda"):
        assert loading_bytes(spec, shape, device=device) == pytest.approx(values / 4, rel=0.01)
        ddp = spec.replace(backend="ddp", sharding="no_shard")
        assert loading_bytes(ddp, shape, device=device) == pytest.approx(2 * values, rel=0.01), "with buckets"
    told = plan(spec, shape, machine("h100", 4)).to_dict()["loading_memory_bytes"]
    assert told == pytest.approx(values / 4, rel=0.01)


@pytest.mark.slow
def test_a_plan_of_a_frozen_model_has_less_of_all_and_its_blocks_are_told_apart_once() -> None:
    spec, mlp, where = Spec(world_size=8).replace(model="gpt2-10m"), ("transformer.h.*.mlp.*",), machine("h100", 8)
    whole, part = (plan(spec.replace(freeze=f), shape_for("gpt2-10m", frozen=f), where) for f in (None, mlp))
    for found in (whole, part):
        counted = count_flops(resolve("gpt2-10m"), 128, frozen=found.spec.workload.freeze).model
        assert found.shape.step_flops(128) == pytest.approx(counted, rel=0.05)
    units = part.shape.units
    assert len(set(map(id, units))) <= 5 < len(units) and [len(u.frozen) for u in units] == [0] + [4] * (len(units) - 1)
    assert part.memory.peak_bytes < whole.memory.peak_bytes and part.step_time_s < whole.step_time_s
    assert part.model_flops < whole.model_flops and part.memory.held.optimizer_bytes < whole.memory.held.optimizer_bytes
    assert part.link_bytes["reduce_scatter"] < whole.link_bytes["reduce_scatter"]
    assert part.link_bytes["all_gather"] == whole.link_bytes["all_gather"]
