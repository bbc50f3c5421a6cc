"""What only a machine with a GPU can show. Needs torch, numpy, transformers and psutil; no Jupyter."""

from __future__ import annotations

import math
import statistics
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd.profiler import profile, record_function
from torch.profiler import DeviceType

from fsdp_lab.core.events import StepEvent
from fsdp_lab.core.spec import Spec
from fsdp_lab.planner.calibration import Calibration, references, shapes_of
from fsdp_lab.planner.questions import planned_here
from fsdp_lab.rank import Session
from fsdp_lab.rank.ledger import KernelTimes
from fsdp_lab.rank.trainer import _pinned
from tests.pool import Place, Pool

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]

SMALL = {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 384, "n_positions": 64}
EACH = [{}, {"forward_prefetch": 1, "backward_prefetch": 2}, {"sharding": "shard_grad_op"}, {"sharding": "zero1"},
        {"offload": "optimizer"}, {"offload": "all"}, {"recompute": "full"}, {"sharding": "no_shard"},
        {"backend": "fsdp2"}, {"backend": "fsdp2", "offload": "all"}, {"backend": "fsdp1"},
        {"backend": "fsdp1", "offload": "all"},
        {"backend": "ddp", "sharding": "no_shard"}]  # fmt: skip


def _train(place: Place, plan: list[dict[str, Any]], shared: int, shared_memory: bool = True) -> list[dict[str, Any]]:
    said: list[dict[str, Any]] = []
    s = Session(rank=place.rank, world_size=place.world_size, device="cuda:0", store=place.store, shared_gpu_ranks=shared,
                memory_cap=0.9 / shared, shared_memory=shared_memory, on_event=said.append)  # fmt: skip
    for given in plan:
        s.apply("gpu", given)
        s.train(3)
    s.close()
    return said


def plan(world_size: int, **changes: Any) -> list[dict[str, Any]]:
    base = Spec(world_size=world_size).replace(model=SMALL, seq_len=32, micro_batch=2, lr=0.01).replace(**changes)
    return [base.replace(**one).to_dict() for one in EACH]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_one_rank_over_nccl(pool: Pool, precision: str) -> None:
    (said,) = pool.run(_train, 1, plan(1, precision=precision), 1, reduction=None)
    events = [StepEvent.from_dict(e) for e in said]
    assert all(math.isfinite(e.mean_loss) for e in events)
    assert events[-1].mean_loss < events[0].mean_loss
    for e in events:
        assert e.memory.peak_bytes > 0 and e.memory.reserved_bytes
        assert all("TF32 is off" in note for note in e.notes)
        assert e.peak_flops_per_s and e.mfu
    assert [e.ledger for e in events] == [False, False, True] * len(EACH)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_ledger_s_sum_is_what_the_allocator_says(pool: Pool, precision: str) -> None:
    """At the peak and between steps, within 1%, and little of it is of no class."""
    (said,) = pool.run(_train, 1, plan(1, precision=precision, model="gpt2-10m"), 1, reduction=None)
    events = [StepEvent.from_dict(e) for e in said if e["ledger"]]
    assert len(events) == len(EACH)
    for e, changes in zip(events, EACH, strict=True):
        found = max((s.classes for s in e.memory_curve), key=lambda c: c.total_bytes)
        assert found.total_bytes == pytest.approx(e.memory.peak_bytes, rel=0.01), changes
        assert e.memory_curve[-1].classes.total_bytes == pytest.approx(e.memory.allocated_bytes, rel=0.01, abs=1e6), (
            changes
        )
        assert e.memory.at_peak.total_bytes == pytest.approx(e.memory.peak_bytes, rel=0.01), changes
        assert e.memory.limit_bytes is not None and e.memory.reserved_bytes is not None
        assert e.memory.peak_bytes <= e.memory.reserved_bytes <= e.memory.limit_bytes
        assert e.memory.outside_bytes > 0


def test_two_ranks_share_one_gpu_through_its_memory(pool: Pool) -> None:
    mine, theirs = pool.run(_train, 2, plan(2), 2, reduction=None)
    events = [StepEvent.from_dict(e) for e in mine]
    assert [e["mean_loss"] for e in mine] == [e["mean_loss"] for e in theirs]
    assert events[-1].mean_loss < events[0].mean_loss
    assert "shared by 2 ranks over the GPU's memory" in events[0].notes[0]
    assert {c.name for e in events for c in e.carriers} == {"the GPU's memory"}
    assert events[0].comm["all_gather"].seconds > 0
    staged, _ = pool.run(_train, 2, plan(2), 2, False, reduction=None)
    assert [e["mean_loss"] for e in staged] == pytest.approx([e["mean_loss"] for e in mine], rel=1e-5)
    assert "shared by 2 ranks over Gloo" in staged[0]["notes"][0]


def _losses(place: Place, given: dict[str, Any], steps: int) -> list[float]:
    s = Session(rank=place.rank, world_size=1, device="cuda:0", store=place.store)
    s.apply("gpu", given)
    events = s.train(steps)["events"]
    s.close()
    return [e["mean_loss"] for e in events]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("changes", [
    {},
    {"forward_prefetch": 2, "backward_prefetch": 2, "limit_all_gathers": 3},
    {"sharding": "zero1"},
    {"offload": "optimizer"},
    {"offload": "all"},
], ids=str)  # fmt: skip
def test_our_engine_trains_what_fsdp2_trains(pool: Pool, precision: str, changes: dict[str, Any]) -> None:
    """On one GPU; kernels may add in another order, hence a tolerance of some ulps of the dtype over ten steps."""
    base = Spec(world_size=1).replace(model=SMALL, seq_len=32, micro_batch=2, lr=0.01, precision=precision)
    (theirs,) = pool.run(_losses, 1, base.replace(backend="fsdp2").to_dict(), 10, reduction=None)
    (ours,) = pool.run(_losses, 1, base.replace(**changes).to_dict(), 10, reduction=None)
    assert ours == pytest.approx(theirs, rel=1e-4 if precision == "fp32" else 2e-2)
    assert ours[-1] < ours[0]


def _kernels_around_a_gap() -> tuple[KernelTimes, float]:
    """A product, a sleep on another stream for which the first one waits, and a product; inside one range."""
    side, a = torch.cuda.Stream(), torch.ones(2048, 2048, device="cuda")
    a @ a
    torch.cuda.synchronize()
    with profile(use_kineto=True, use_device="cuda") as profiler:
        with record_function("compute root"):
            a @ a
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                torch.cuda._sleep(100_000_000)
            torch.cuda.current_stream().wait_stream(side)
            a @ a
        torch.cuda.synchronize()
    events = list(profiler.kineto_results.events())
    (slept,) = [e for e in events if "spin" in e.name().lower() and not e.is_user_annotation()]
    # what sleeps stands for a collective, whose kernels have NCCL's names
    named = [SimpleNamespace(name=lambda e=e: "ncclDevKernel_AllGather" if e is slept else e.name(),
                             device_type=e.device_type, is_user_annotation=e.is_user_annotation,
                             start_ns=e.start_ns, end_ns=e.end_ns) for e in events]  # fmt: skip
    assert any(e.is_user_annotation() and e.device_type() == DeviceType.CUDA for e in events)
    return KernelTimes.of(named), (slept.end_ns() - slept.start_ns()) / 1e9


def test_a_range_around_a_gap_hides_no_exposed_communication() -> None:
    found, slept_s = _kernels_around_a_gap()
    assert found.exposed_s is not None and found.exposed_s["all_gather"] == pytest.approx(slept_s, rel=0.05)


def test_a_batch_on_the_gpu_stays_there() -> None:
    batch = {"ids": torch.ones(2, device="cuda"), "labels": torch.ones(2)}
    pinned = _pinned(batch, torch.device("cuda:0"))
    assert pinned["ids"] is batch["ids"] and pinned["labels"].is_pinned()


LARGE = [("gpt2-124m", 8, 10 << 30), ("llama-1b", 2, 24 << 30)]  # with 1,024 tokens: what a step takes of the GPU


def _calibrate(place: Place, specs: list[dict[str, Any]]) -> dict[str, Any]:
    s = Session(rank=place.rank, world_size=1, device="cuda:0", store=place.store)
    found = s.calibrate(specs, ("fp32", "bf16"), 2)
    s.close()
    return found


def test_a_calibrated_gpu_is_planned_within_a_tenth(pool: Pool) -> None:
    """Of the lab's engine in bf16, on models that were not among those timed for the calibration."""
    timed, total = references(1, ("fp32", "bf16"), ("cuda:0",)), torch.cuda.get_device_properties(0).total_memory
    wanted = [
        Spec(world_size=1).replace(model=model, micro_batch=samples, seq_len=1024, precision="bf16")
        for model, samples, nbytes in LARGE
        if 2 * nbytes < total
    ]
    assert wanted, "24 GiB are needed"
    specs = [spec.to_dict() for spec in (*(r.spec for r in timed), *wanted)]
    probes = pool.run(_calibrate, 1, specs, reduction=None, timeout_s=600)
    here = Calibration.of(probes, unix_s=0.0, seconds=1.0, name=torch.cuda.get_device_name(0), devices=("cuda:0",),
                          shapes=shapes_of(timed))  # fmt: skip
    assert 1e-6 < here.rates.eager_s < 1e-4
    for spec, taken in zip(wanted, here.beside_s, strict=True):
        assert planned_here(spec, here).step_time_s == pytest.approx(statistics.median(taken), rel=0.1), spec


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_classes_of_a_peak_add_up_to_the_allocator_s(pool: Pool, precision: str) -> None:
    given = Spec(world_size=1).replace(model="gpt2-10m", seq_len=32, micro_batch=2, precision=precision).to_dict()
    (said,) = pool.run(_train, 1, [given], 1, reduction=None)
    for e in map(StepEvent.from_dict, said):
        assert e.memory.at_peak.total_bytes == e.memory.peak_bytes


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_fsdp1_offloads_trains_what_fsdp2_trains(pool: Pool, precision: str) -> None:
    """On one rank FSDP1 shards nothing, and computes with a copy of the host's values from the first step on."""
    base = Spec(world_size=1).replace(model=SMALL, seq_len=32, micro_batch=2, lr=0.01, precision=precision)
    theirs, mine = (pool.run(_losses, 1, base.replace(backend=b, offload="all").to_dict(), 3, reduction=None)[0]
                    for b in ("fsdp2", "fsdp1"))  # fmt: skip
    assert mine == pytest.approx(theirs, rel=1e-4 if precision == "fp32" else 2e-2)


def _over_nccl(place: Place, given: dict[str, Any], steps: int) -> list[dict[str, Any]]:
    """Each rank on a GPU of its own."""
    s = Session(rank=place.rank, world_size=place.world_size, device=f"cuda:{place.rank}", store=place.store)
    s.apply("gpu", given)
    events: list[dict[str, Any]] = s.train(steps)["events"]
    s.close()
    return events


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="it needs two GPUs")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("changes", EACH, ids=str)
def test_two_gpus_over_nccl_train_what_fsdp2_trains(pool: Pool, precision: str, changes: dict[str, Any]) -> None:
    base = Spec(world_size=2).replace(model=SMALL, seq_len=32, micro_batch=2, lr=0.01, precision=precision)
    theirs, mine = (pool.run(_over_nccl, 2, s.to_dict(), 4, reduction=None)[0]
                    for s in (base.replace(backend="fsdp2"), base.replace(**changes)))  # fmt: skip
    rel = 1e-4 if precision == "fp32" else 2e-2
    assert [e["mean_loss"] for e in mine] == pytest.approx([e["mean_loss"] for e in theirs], rel=rel)
    assert {c.name for e in mine for c in StepEvent.from_dict(e).carriers} == {"NCCL"}


@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="it needs four GPUs")
def test_four_gpus_in_two_replicas(pool: Pool) -> None:
    base = Spec(world_size=4).replace(model=SMALL, seq_len=32, micro_batch=2, lr=0.01)
    plain, hybrid = (pool.run(_over_nccl, 4, base.replace(sharding=s).to_dict(), 4, reduction=None)[0]
                     for s in ("full_shard", "hybrid_shard"))  # fmt: skip
    assert [e["mean_loss"] for e in hybrid] == pytest.approx([e["mean_loss"] for e in plain], rel=1e-4)
