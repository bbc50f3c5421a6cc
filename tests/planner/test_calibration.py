"""A calibration finds what a made-up machine was made of, and predicts what it was not told."""

import functools
from dataclasses import replace
from typing import Any

import pytest

from fsdp_lab.base.errors import ArgumentError, SpecError
from fsdp_lab.planner.bands import RateKind
from fsdp_lab.planner.calibration import TCP_SHARE, Calibration, references
from fsdp_lab.planner.devices import PUBLISHED, Curve, HostOverhead, Rates, machine
from fsdp_lab.planner.model_shape import ModelShape
from fsdp_lab.planner.plan import Plan, plan
from fsdp_lab.planner.questions import planned_here
from fsdp_lab.planner.shapes import shape_for
from fsdp_lab.planner.step import StepModel
from fsdp_lab.spec.spec import Spec

RANKS = 2
DTYPES = ("fp32", "bf16")
BASE = Spec(world_size=RANKS)
OTHER = "gpt2-1m"
OF_BACKENDS: list[dict[str, Any]] = [
    {"backend": "lab"}, {"backend": "lab", "sharding": "no_shard"}, {"backend": "lab", "precision": "bf16"},
    {"backend": "fsdp2", "accumulate": 2}, {"backend": "fsdp1", "sharding": "shard_grad_op"},
    {"backend": "ddp", "sharding": "no_shard"},
]  # fmt: skip


def shape(spec: Spec) -> ModelShape:
    return shape_for(spec.workload.model, spec.strategy.wrap)


def step_s(spec: Spec, here: Calibration, rates: Rates) -> float:
    s = shape(spec)
    return StepModel(spec, s.units, s.tokens(spec.workload.seq_len), here.machine, rates).step().seconds


def probes() -> dict[str, Any]:
    """Of a machine of 50 GFLOP/s and 1 GB/s."""
    sizes = [1e3, 1e5, 1e7, 1e9]
    return {
        "products": {"fp32": [[n, 2e-6 + n / 5e10] for n in sizes], "bf16": [[n, 9e-6 + n / 1e11] for n in sizes]},
        "scores": {dtype: [[n, 256 * n, 3.5 * (1e-5 + 256 * n / 5e10 + n * 2e-9)] for n in sizes[:3]] for dtype in DTYPES},
        "copies": [[n, 1e-6 + n / 5e9] for n in sizes],
        "updates": {"adamw": [[n, 1e-4 + 3e-9 * n] for n in sizes], "sgd": [[n, 1e-5 + 1e-9 * n] for n in sizes]},
        "collectives": {
            kind: [[n, 2e-4 + n / 1e9] for n in (1024.0, 2.0**18, 2.0**24)]
            for kind in ("all_gather", "reduce_scatter", "all_reduce")
        },
        "memory_bytes": 8e9,
    }  # fmt: skip


TRUTH = {"lab": HostOverhead(step_s=2e-3, send_s=2e-4, tensor_s=5e-5),
         "fsdp2": HostOverhead(step_s=3e-3, send_s=5e-4, tensor_s=9e-5, stretch=1.7),
         "fsdp1": HostOverhead(step_s=2e-3, send_s=-1e-4, tensor_s=6e-5, stretch=1.2),
         "ddp": HostOverhead(step_s=2e-3, tensor_s=4e-5)}  # fmt: skip


@functools.cache
def made_up(traffic: float = 8.0, interference: float = 0.6) -> tuple[Calibration, Rates]:
    """A calibration on steps that follow from known rates, and those."""
    timed = references(RANKS, DTYPES, ("cpu",) * RANKS)
    bare = {**probes(), "steps": {str(i): [1.0] for i in range(len(timed))}}
    said: dict[str, Any] = {"unix_s": 0.0, "seconds": 1.0, "name": "CPU", "devices": ("cpu",) * RANKS}
    empty = Calibration.of([bare], **said)
    rates = Rates(
        matrix=1.0, attention=PUBLISHED.attention, memory=1.0, operands=1.0, link=1.0, network=1.0, latency_s=0.0,
        hop_s=0.0, kernel_s=0.0, jitter_s=0.0, interference=interference, step_s=0.0,
        hosts=TRUTH, traffic_of=dict.fromkeys(DTYPES, traffic),
    )  # fmt: skip
    steps = {}
    for i, (_, spec) in enumerate(timed):
        seconds = step_s(spec, empty, rates)
        steps[str(i)] = [0.9 * seconds, seconds, 1.3 * seconds]
    return Calibration.of([{**bare, "steps": steps}], **said), rates


def test_one_host_is_measured_and_more_like_it_are_planned_with_a_stated_network() -> None:
    here, _ = made_up()
    spec = Spec(world_size=RANKS).replace(model="gpt2-1m", seq_len=64)

    def on(hosts: int, gbit: float, **changes: Any) -> Plan:
        return planned_here(spec.replace(world_size=RANKS * hosts, **changes), here, hosts, gbit)

    alone, one = planned_here(spec, here), planned_here(spec, here, hosts=1)
    assert one.step_time_s == alone.step_time_s and one.step_time_band_s() == alone.step_time_band_s()
    times = [on(4, gbit).step_time_s for gbit in (0.1, 1.0, 10.0, 10_000.0)]
    assert times == sorted(times, reverse=True) and times[0] > 2 * times[-1] > alone.step_time_s
    slow = on(4, 1.0)
    assert slow.link_bytes["all_gather"] > 0 and slow.machine.network_bytes_per_s == 125e6
    sent = slow.link_bytes["all_gather"] / 125e6 / TCP_SHARE
    assert slow.comm_s["all_gather"] == pytest.approx(sent, rel=0.2)
    hybrid = on(4, 1.0, sharding="hybrid_shard", shard_size=RANKS)
    assert hybrid.comm_s["all_gather"] == pytest.approx(alone.comm_s["all_gather"])  # inside hosts, as it was measured
    band, sure = slow.step_time_band_s(), alone.step_time_band_s()
    assert band.high / band.low > (sure.high / sure.low) ** 1.3 and set(slow.scale.causes) >= {RateKind.NETWORK}
    assert slow.scale.causes[RateKind.COMPUTING] == slow.scale.causes[RateKind.TRAFFIC] == 0.0


def test_hosts_that_were_not_calibrated_are_refused() -> None:
    here, _ = made_up()
    spec = Spec(world_size=RANKS)
    with pytest.raises(SpecError, match=f"{RANKS} ranks were calibrated, and the Spec has {RANKS}; .*give hosts"):
        planned_here(spec, here, hosts=2)
    with pytest.raises(ArgumentError, match="one machine was calibrated, and has no network; give hosts"):
        planned_here(spec, here, network_gbit_per_s=10)
    with pytest.raises(ArgumentError, match="hosts: 0 is refused"):
        planned_here(spec, here, hosts=0)
    with pytest.raises(ArgumentError, match="network: -1 Gb/s is refused"):
        planned_here(spec.replace(world_size=2 * RANKS), here, 2, -1)


@pytest.mark.parametrize(("traffic", "interference"), [(2.0, 1.2), (30.0, 0.1)])
def test_a_fit_predicts_what_was_not_measured(traffic: float, interference: float) -> None:
    """Every backend and sharding of another model on another workload, within 3 % of what the machine was made of."""
    here, truth = made_up(traffic, interference)
    for changes in (*OF_BACKENDS, {"backend": "lab", "recompute": "full"}):
        spec = BASE.replace(model=OTHER, seq_len=96, micro_batch=3).replace(**changes)
        assert step_s(spec, here, here.rates) == pytest.approx(step_s(spec, here, truth), rel=0.03), changes


def test_a_calibration_on_several_hosts_tells_their_links_apart() -> None:
    here, _ = made_up()
    slow = {kind: [[n, 10 * seconds] for n, seconds in rows] for kind, rows in here.probes["collectives"].items()}
    probes = {**here.probes, "per_host": 2, "inside": here.probes["collectives"], "across": slow, "collectives": slow}
    found = replace(here, devices=("cpu",) * 4, probes=probes).machine
    assert (found.hosts, found.per_host) == (2, 2)
    assert found.inside["all_gather"](1e6) == pytest.approx(here.machine.collectives["all_gather"](1e6))
    assert found.device.link_bytes_per_s == pytest.approx(here.machine.device.link_bytes_per_s)
    assert found.network_bytes_per_s == pytest.approx(2 * found.across["all_reduce"].best)
    hybrid, full = (
        plan(Spec(world_size=4).replace(sharding=sharding, model="gpt2-1m"), shape_for("gpt2-1m"), found,
             rates=here.rates).step_time_s
        for sharding in ("hybrid_shard", "full_shard")
    )  # fmt: skip
    assert hybrid < full


def test_a_curve_goes_through_its_points_and_on() -> None:
    curve = Curve.of([[4.0, 2.0], [1.0, 1.0], [4.0, 6.0]])
    assert curve.points == ((1.0, 1.0), (4.0, 4.0))
    assert [curve(x) for x in (0, 0.5, 1, 2, 4, 8)] == pytest.approx([0, 1, 1, 2, 4, 8]) and curve.best == 1.0
    with pytest.raises(ValueError, match="one point"):
        Curve.of([])


def test_an_emulated_link_is_planned_here_and_not_on_hardware_that_is_named() -> None:
    here, _ = made_up()
    spec = BASE.replace(model="gpt2-1m", seq_len=64)

    def on(link: str | None, **changes: Any) -> Plan:
        return planned_here(spec.replace(link=link, **changes), here)

    none, fast, slow = on(None), on("100 GB/s"), on("0.01 GB/s")
    assert fast.step_time_s == none.step_time_s
    assert slow.step_time_s == pytest.approx(sum(slow.link_bytes.values()) / 10e6, rel=0.1)
    later, latency = on("0.01 GB/s, 5 ms"), 5e-3
    model = StepModel(spec, shape_for("gpt2-1m").units, 64, here.machine, here.rates)
    assert later.step_time_s - slow.step_time_s == pytest.approx(model.sends.total() * latency, rel=0.2)
    assert on("0.01 GB/s", backend="fsdp2").step_time_s > slow.step_time_s, "which waits while it gathers"
    assert on("nvlink of h100").step_time_s > 0
    there, with_link = (plan(spec.replace(link=to), shape(spec), machine("h100", RANKS)) for to in (None, "1 kB/s"))
    assert there.step_time_s == with_link.step_time_s


EAGER_S, ON_GPU = 40e-6, {name: replace(host, stretch=1.0) for name, host in TRUTH.items()}


def test_on_a_gpu_the_host_s_time_for_a_kernel_comes_out_and_plans_what_was_not_measured() -> None:
    """Of a host that takes 40 us for a kernel, and for a backend's work beside them as long as `ON_GPU` says. Products are
    those of a GPU, so that the smallest models show the host alone."""
    timed, fast = references(1, DTYPES, ("cuda:0",)), probes()
    for row in ("products", "scores"):
        fast[row] = {dtype: [[*sizes, 1e-3 * s] for *sizes, s in rows] for dtype, rows in fast[row].items()}
    bare = {**fast, "copies": [[n, 1e-6 + n / 1e12] for n in (1e3, 1e9)], "collectives": {}, "peaks": {"fp32": 67e12}}
    said: dict[str, Any] = {"unix_s": 0.0, "seconds": 1.0, "name": "NVIDIA H100 80GB HBM3", "devices": ("cuda:0",)}
    empty = Calibration.of([{**bare, "steps": {str(i): [1.0] for i in range(len(timed))}}], **said)
    truth = replace(PUBLISHED, matrix=1.0, memory=1.0, step_s=0.0, kernel_s=0.0, eager_s=EAGER_S, hosts=ON_GPU)
    steps = {str(i): [step_s(spec, empty, truth)] for i, (_, spec) in enumerate(timed)}
    here = Calibration.of([{**bare, "steps": steps}], **said)
    assert here.rates.eager_s == pytest.approx(EAGER_S, rel=0.5), "with what DDP takes for a tensor"
    truth = replace(here.rates, eager_s=EAGER_S, hosts=ON_GPU)
    for model, changes in (("gpt2-10m", {}), ("gpt2-30m", {"backend": "fsdp2", "precision": "bf16"}),
                           ("gpt2-124m", {"backend": "ddp", "sharding": "no_shard", "precision": "bf16"})):  # fmt: skip
        spec = Spec(world_size=1).replace(model=model, seq_len=128, **changes)
        told, true = (plan(spec, shape_for(model), here.machine, rates=rates) for rates in (here.rates, truth))
        assert told.step_time_s == pytest.approx(true.step_time_s, rel=0.1), model
    assert here.machine.device.flops_per_s("fp32") == 67e12, "MFU is relative to what a run's is"
