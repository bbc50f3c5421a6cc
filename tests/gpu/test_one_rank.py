"""What only a machine with a GPU can show, of one rank. Needs torch, numpy, transformers and psutil; no Jupyter."""

import json
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.autograd.profiler import profile, record_function
from torch.profiler import DeviceType

from fsdp_lab.base.events import StepEvent
from fsdp_lab.export import export_script
from fsdp_lab.rank.ledger import KernelTimes
from fsdp_lab.rank.measure import GpuGauge
from fsdp_lab.rank.trainer import _pinned
from fsdp_lab.spec.spec import Spec
from tests.export.ranks import losses_of, torchrun
from tests.pool import Place, Pool
from tests.rank.test_session import DDP, session

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")]

ONE = ("cuda:0",)
SMALL = {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 384, "n_positions": 64}
EACH = [{}, {"forward_prefetch": 1, "backward_prefetch": 2}, {"sharding": "shard_grad_op"}, {"sharding": "zero1"},
        {"offload": "optimizer"}, {"offload": "all"}, {"recompute": "full"}, {"sharding": "no_shard"},
        {"backend": "fsdp2"}, {"backend": "fsdp2", "offload": "all"}, {"backend": "fsdp1"},
        {"backend": "fsdp1", "offload": "all"},
        {"backend": "ddp", "sharding": "no_shard"}]  # fmt: skip


def as_spec(world_size: int = 1, **changes: Any) -> Spec:
    return Spec(world_size=world_size).replace(model=SMALL, seq_len=32, micro_batch=2, lr=0.01).replace(**changes)


def _each(place: Place, precision: str, model: str) -> list[Any]:
    """For each of EACH, from initial values, the events of three steps, or the traceback of what ended it."""
    s, told = session(place), list[Any]()
    base = as_spec(precision=precision).replace(**({"model": model} if model else {}))
    for changes in EACH:
        try:
            s.apply("gpu", base.replace(**changes).to_dict(), fresh=True)
            told.append(s.train(3)["events"])
        except Exception:  # so that each is a test of its own
            told.append(traceback.format_exc())
    s.close()
    return told


def told_by(ran: Callable[..., list[Any]], precision: str, case: int, model: str = "") -> list[StepEvent]:
    (told,) = ran(_each, 1, precision, model, devices=ONE, reduction=None)
    assert not isinstance(told[case], str), told[case]
    return [StepEvent.from_dict(e) for e in told[case]]


CASES = pytest.mark.parametrize("case", range(len(EACH)), ids=[str(changes) for changes in EACH])


@CASES
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_rank_trains_what_fsdp2_trains_and_tells_its_figures(ran: Callable[..., Any], precision: str, case: int):
    """Kernels may add in another order, hence a tolerance of some ulps of the dtype."""
    events, theirs = (told_by(ran, precision, i) for i in (case, EACH.index({"backend": "fsdp2"})))
    losses = [e.mean_loss for e in events]
    assert losses == pytest.approx([e.mean_loss for e in theirs], rel=1e-4 if precision == "fp32" else 2e-2)
    assert losses[-1] < losses[0]
    for e in events:
        assert e.memory.peak_bytes > 0 and e.memory.reserved_bytes
        assert all("TF32 is off" in note for note in e.notes)
        assert e.peak_flops_per_s and e.mfu
    assert [e.ledger for e in events] == [False, False, True]


@CASES
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_ledger_s_sum_is_what_the_allocator_says(ran: Callable[..., list[Any]], precision: str, case: int) -> None:
    """At the peak and between steps, within 1%, and little of it is of no class."""
    events = told_by(ran, precision, case, "gpt2-10m")
    assert case or all(e.memory.at_peak.total_bytes == e.memory.peak_bytes for e in events)
    e = events[-1]
    found = max((s.classes for s in e.memory_curve), key=lambda c: c.total_bytes)
    assert found.total_bytes == pytest.approx(e.memory.peak_bytes, rel=0.01)
    assert e.memory_curve[-1].classes.total_bytes == pytest.approx(e.memory.allocated_bytes, rel=0.01, abs=1e6)
    assert e.memory.at_peak.total_bytes == pytest.approx(e.memory.peak_bytes, rel=0.01)
    assert e.memory.limit_bytes is not None and e.memory.reserved_bytes is not None
    assert e.memory.peak_bytes <= e.memory.reserved_bytes <= e.memory.limit_bytes
    assert e.memory.outside_bytes > 0


def waits_only_to_read(place: Place, given: dict[str, Any]) -> tuple[list[int], int]:
    """Three steps in which nothing but the read of a vote makes the host wait for the device; else torch raises. What they
    make once, and a ledger's step, comes before. Returns the steps, and how many votes were read before the update."""
    s, mode = session(place), torch.cuda.set_sync_debug_mode
    s.apply("gpu", given)
    s.train(3)
    reads, read = [0], torch.Tensor.tolist

    def reading(t: torch.Tensor) -> Any:
        reads[0] += t.is_cuda
        mode("default")
        try:
            return read(t)
        finally:
            mode("error")

    with mock.patch.object(torch.Tensor, "tolist", reading):
        mode("error")
        try:
            steps = [e["step"] for e in s.train(3)["events"]]
        finally:
            mode("default")
    s.close()
    return steps, reads[0]


FUSED = {"optimizer_args": {"fused": True}}
READING = [({}, 3), ({"precision": "bf16"}, 3), ({"backend": "fsdp2"}, 3), (DDP, 3), (FUSED, 1), (FUSED | DDP, 1)]


@pytest.mark.parametrize(("changes", "reads"), READING, ids=str)
def test_the_host_waits_only_to_read_the_vote(pool: Pool, changes: dict[str, Any], reads: int) -> None:
    """That of a fused update when the next step begins, but the last one's."""
    given = as_spec(**{"clip_norm": 1.0 if reads == 3 else None, **changes}, accumulate=2).to_dict()
    assert pool.run(waits_only_to_read, 1, given, devices=ONE, reduction=None) == [([3, 4, 5], reads)]


def kernels_in(events: Iterable[Any]) -> list[tuple[int, int, bool]]:
    """Begin, end, and whether it is NCCL's, of each kernel that kineto saw."""
    return [(e.start_ns(), e.end_ns(), "nccl" in e.name().lower()) for e in events
            if e.device_type() == DeviceType.CUDA and not e.is_user_annotation()
            and not e.name().startswith(("Memcpy", "Memset"))]  # fmt: skip


def alone_s(kernels: Iterable[tuple[int, int, bool]]) -> float:
    """Seconds in which kernels of NCCL's run and no others, from one begin or end to the next."""
    edges = sorted((at, sends, by) for begin, end, sends in kernels for at, by in ((begin, 1), (end, -1)))
    running, before_ns, found_ns = {False: 0, True: 0}, 0, 0
    for at_ns, sends, by in edges:
        if running[True] and not running[False]:
            found_ns += at_ns - before_ns
        running[sends] += by
        before_ns = at_ns
    return found_ns / 1e9


def test_a_range_around_a_gap_hides_no_exposed_communication() -> None:
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
    found, slept_s = KernelTimes.of(named).exposed_s, (slept.end_ns() - slept.start_ns()) / 1e9
    assert found is not None and found["all_gather"] == pytest.approx(slept_s, rel=0.05)
    assert found["all_gather"] == pytest.approx(alone_s(kernels_in(named)))


def test_a_batch_on_the_gpu_stays_there() -> None:
    batch = {"ids": torch.ones(2, device="cuda"), "labels": torch.ones(2)}
    pinned = _pinned(batch, torch.device("cuda:0"))
    assert pinned["ids"] is batch["ids"] and pinned["labels"].is_pinned()


def test_the_driver_says_how_the_gpu_is_used() -> None:
    gauge = GpuGauge(torch.device("cuda:0"))
    assert gauge.look() == {} and gauge._asking is not None
    gauge._asking.join(30)
    told = gauge.look()
    assert 0 <= told["gpu_percent"] <= 100 and 5 < told["gpu_power_w"] < 2000 and 5 < told["gpu_temperature_c"] < 120


def test_a_spec_and_its_script_train_under_torchrun_as_a_session_does(ran: Callable[..., list[Any]], tmp_path: Path):
    changes: dict[str, Any] = {"backend": "fsdp2"}
    given, file = as_spec(devices=ONE, **changes), tmp_path / "spec.json"
    file.write_text(given.to_json())
    wanted = pytest.approx([e.mean_loss for e in told_by(ran, "fp32", EACH.index(changes))], rel=1e-5)
    printed = torchrun(1, "-m", "fsdp_lab.rank", file, "--steps", "3").splitlines()
    assert [json.loads(line)["mean_loss"] for line in printed if line.startswith("{")] == wanted
    assert losses_of(torchrun(1, export_script(given, tmp_path / "train.py"), "--steps", "3")) == wanted
