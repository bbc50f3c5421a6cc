"""`Calibration`: measurements of the local machine, and the `Machine` and `Rates` that follow from them.

`fsdp_lab.rank.calibration` measures, in a minute or two, on all ranks at the same time:

* matrix products, attention, copies, the optimizer and collectives, each at several sizes, which give curves; on several
  hosts collectives of all ranks, inside hosts, and between them, which are the links that a sharding uses;
* steps of GPT-2s of width 32, which hardly compute, with every backend: with 6 blocks, with 2, and with 6 in one unit. The
  time that the curves do not explain is the overhead of a step, of a collective and of a parameter tensor, `Rates.hosts`;
* steps of an unsharded GPT-2 of two blocks of width 256 with the lab's engine, in each dtype. The unexplained time is the
  memory traffic of norms, activations and losses, `Rates.traffic_of`; the same on few tokens shows that of weights, which a
  product that is repeated keeps in the cache, `Rates.weights`;
* steps of a fully sharded one of four blocks, on so few tokens that communication takes about as long as computing. Their
  time gives the slowdown of overlapping communication, `Rates.interference`, or, for backends whose computing waits, and on
  slow networks for all, how much longer a collective takes in a step than alone, `HostOverhead.stretch`.

So the predicted model, workload and sharding need not be among the measured ones. A calibration is valid for the same number
of ranks on the same devices under the same other load.

On a GPU the host runs ahead of the device, and the smallest models show its time alone: that of a kernel
(`Rates.eager_s`) from DDP's, which adds next to nothing to a block, then of a step, a gather or reduction, and a tensor.
Norms, activations and losses take as long as copies of as many bytes (`UnitShape.kernels`). Predictions of this path have
not been compared with measured steps of a GPU."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import fmean, median
from typing import Any, Self

from fsdp_lab.base.errors import ArgumentError
from fsdp_lab.base.formatting import figures, plural
from fsdp_lab.models.presets import timed_config
from fsdp_lab.planner.costs import PASSES, SEND_KERNELS, link_bytes
from fsdp_lab.planner.devices import PUBLISHED, Curve, Device, HostOverhead, Machine, MeasuredCurves, Rates, machine
from fsdp_lab.planner.shapes import shape_for
from fsdp_lab.planner.step import AHEAD, OVERLAPPING, StepModel
from fsdp_lab.spec.spec import BACKEND_TRAITS, BACKENDS, Spec

SMALL = ("deep", "shallow", "whole")
TCP_SHARE = 0.941  # of an Ethernet's rate: 1,448 bytes of payload in a frame that takes 1,538
MOST = 4.0  # upper bound of interference and of stretch
SHOWN = 1.02  # by how much a step must depend on them


def references(
    ranks: int, dtypes: Sequence[str], devices: Sequence[str] | None = None, per_host: int | None = None
) -> list[tuple[str, Spec]]:
    """The Specs to time, each with its role: "deep", "shallow", "whole", a small model with 6 blocks, 2, 6 in one unit;
    "traffic", "weights", "overlap", the quantity that it shows. `per_host`: ranks of a host, if there are several; the small
    models are sharded inside hosts then, so that the network has little part in their time."""
    start = Spec(world_size=ranks, devices=None if devices is None else tuple(devices))
    on_gpu = devices is not None and devices[0] != "cpu"
    width, seq_len = (2048, 512) if on_gpu else (256, 128)
    timed = []
    inside = {"sharding": "hybrid_shard", "shard_size": per_host} if 1 < (per_host or ranks) < ranks else {}
    for backend in BACKENDS:
        has_units = BACKEND_TRAITS[backend].has_units
        sharding = {"sharding": "full_shard"} | inside if has_units else {"sharding": "no_shard"}
        small = start.replace(backend=backend, micro_batch=1, seq_len=16, **sharding)
        deep, shallow = (small.replace(model=timed_config(32, blocks, 128)) for blocks in (6, 2))
        timed += [("deep", deep), ("shallow", shallow)]
        if has_units:
            timed.append(("whole", deep.replace(wrap="whole")))
    plain = start.replace(model=timed_config(width, 2, seq_len), sharding="no_shard", micro_batch=4, seq_len=seq_len)
    if ranks > 1:
        overlap = start.replace(model=timed_config(width, 4, seq_len), micro_batch=2, seq_len=seq_len // 2)
        timed += [("overlap", overlap.replace(backend=b)) for b in OVERLAPPING]
    if on_gpu:
        return timed
    # fp16's steps wait for the scale of the loss; its computing is as in bf16.
    timed += [("traffic", plain.replace(precision=dtype)) for dtype in dtypes if dtype != "fp16"]
    few = plain.replace(model=timed_config(width, 4, seq_len), micro_batch=2, seq_len=seq_len // 2)
    timed.append(("weights", few.replace(accumulate=4, sync="last") if ranks > 1 else few))
    return timed


@dataclass(frozen=True, kw_only=True, repr=False)
class Calibration:
    """Measurements of one machine."""

    unix_s: float  # time of the calibration
    seconds: float  # its duration
    name: str  # of the device
    devices: tuple[str, ...]  # one per rank
    probes: Mapping[str, Any] = field(repr=False)  # results of `fsdp_lab.rank.calibration`, the mean over ranks

    def __repr__(self) -> str:
        peak = self.machine.device.peak_flops_per_s
        peaks = ", ".join(f"{figures(peak[dtype] / 1e12)} TFLOPS in {dtype}" for dtype in peak)
        return f"<Calibration of {plural(self.ranks, 'rank')} on {self.name}, in {self.seconds:.0f} s: {peaks} a rank>"

    @property
    def ranks(self) -> int:
        return len(self.devices)

    @property
    def per_host(self) -> int:
        """Ranks of a host."""
        return int(self.probes.get("per_host", self.ranks))

    @property
    def beside_s(self) -> list[list[float]]:
        """Seconds of each counted step of the additional Specs that were timed; nothing is fitted to them."""
        steps = self.probes["steps"]
        return [steps[str(i)] for i in range(len(self._steps), len(steps))]

    @classmethod
    def of(cls, each: Sequence[Mapping[str, Any]], **fields: Any) -> Self:
        """Makes one from the probes of every rank, and the other fields."""
        return cls(probes=_mean(each), **fields)

    @property
    def on_gpu(self) -> bool:
        return self.devices[0] != "cpu"

    @property
    def dtypes(self) -> tuple[str, ...]:
        return tuple(self.probes["products"])

    @cached_property
    def machine(self) -> Machine:
        """The measured machine, for `plan`."""
        p = self.probes
        products = {dtype: Curve.of(rows) for dtype, rows in p["products"].items()}
        peaks = {dtype: p.get("peaks", {}).get(dtype) or curve.best for dtype, curve in products.items()}
        scores = {
            dtype: Curve.of((count, seconds / 3.5 - flops / peaks[dtype]) for count, flops, seconds in rows)
            for dtype, rows in p["scores"].items()
        }
        copies, updates = Curve.of(p["copies"]), {name: Curve.of(rows) for name, rows in p["updates"].items()}
        per_host = self.per_host
        sizes = {"collectives": self.ranks, "inside": per_host, "across": self.ranks // per_host}
        curves: dict[str, Any] = {name: _curves(p.get(name, {}), size) for name, size in sizes.items()}
        all_ranks = max((curve.best for curve in curves["collectives"].values()), default=2 * copies.best)
        link = max((curve.best for curve in curves["inside"].values()), default=all_ranks)
        network = max((per_host * curve.best for curve in curves["across"].values()), default=all_ranks)
        device = Device(
            name=self.name,
            peak_flops_per_s=peaks,
            matrix_share=1.0,
            memory_bytes=int(p["memory_bytes"]),
            memory_bytes_per_s=2 * copies.best,
            link_bytes_per_s=link,
            switched=True,
            generation="here" if self.on_gpu else "cpu",
            assumed={},
            measured=MeasuredCurves(products=products, scores=scores, copies=copies, updates=updates),
        )
        made = Machine(device=device, ranks=self.ranks, per_host=per_host, network_bytes_per_s=network, assumed={})
        return replace(made, **curves)

    def on_hosts(self, hosts: int, network_gbit_per_s: float | None = None) -> tuple[Machine, Rates]:
        """So many hosts like the calibrated one, and the rates there: inside a host those that were measured, between hosts
        a stated network, of which GPUs reach the share of published timings, and CPUs what TCP leaves. None: the usual
        network, which is assumed. Raises ArgumentError: several hosts were calibrated, or a rate is out of range."""
        if self.per_host != self.ranks:
            reason = f"{self.ranks // self.per_host} hosts were calibrated, and their network with them"
            raise ArgumentError("hosts", reason, "calibrate on one host to plan for more")
        device = self.machine.device
        there = machine(device, hosts * self.ranks, hosts=hosts, network_gbit_per_s=network_gbit_per_s)
        rates = replace(self.rates, network=PUBLISHED.network if self.on_gpu else TCP_SHARE)
        rates = replace(rates, **{name: getattr(PUBLISHED, name) for name in ("hop_s", "latency_s", "jitter_s")})
        return replace(there, inside=self.machine.collectives), rates

    @cached_property
    def rates(self) -> Rates:
        """The measured rates, for `plan`."""
        rates = replace(PUBLISHED, matrix=1.0, memory=1.0, link=1.0, network=1.0)
        rates = replace(rates, latency_s=0.0, hop_s=0.0, jitter_s=0.0, step_s=0.0, kernel_s=0.0, interference=0.5)
        for _ in range(6):  # each has a small effect on the measurements that determine the others
            if self.on_gpu:
                rates = replace(rates, eager_s=self._eager_s(rates))
            rates = replace(rates, hosts={backend: self._host(backend, rates) for backend in BACKENDS})
            if not self.on_gpu:
                rates = replace(rates, traffic_of=self._traffic(rates))
                ((_, spec, seconds),) = (step for step in self._steps if step[0] == "weights")
                weights = self._linear(spec, seconds, *(replace(rates, weights=times) for times in (0.0, 1.0)))
                rates = replace(rates, weights=weights)
            for backend in OVERLAPPING:
                rates = self._with_overlap(backend, rates)
        return rates

    @cached_property
    def _steps(self) -> list[tuple[str, Spec, float]]:
        """Each reference with the median seconds of its steps."""
        wanted = references(self.ranks, self.dtypes, self.devices, self.per_host)
        return [(*one, median(self.probes["steps"][str(i)])) for i, one in enumerate(wanted)]

    def _unexplained(self, backend: str, rates: Rates) -> dict[str, tuple[float, StepModel]]:
        """Seconds of the small models' steps that are not predicted, by role."""
        return {
            role: (seconds - self._predicted_s(spec, rates), self._model(spec, rates))
            for role, spec, seconds in self._steps
            if spec.strategy.backend == backend and role in SMALL
        }

    def _linear(self, spec: Spec, seconds: float, none: Rates, one: Rates) -> float:
        """The quantity, 0 or more, that predicts these seconds of a step, which is linear in it, at rates with 0 and 1."""
        none_s, one_s = self._predicted_s(spec, none), self._predicted_s(spec, one)
        return max(0.0, (seconds - none_s) / (one_s - none_s))

    def _eager_s(self, rates: Rates) -> float:
        """The host's time for a kernel, from what DDP's steps take longer with more blocks."""
        of_role = self._unexplained("ddp", rates)
        (deep_s, deep), (shallow_s, shallow) = of_role["deep"], of_role["shallow"]
        issuing_s = [sum(sum(work.issue_s.values()) for work in model.works) for model in (deep, shallow)]
        kernels = (issuing_s[0] - issuing_s[1]) / rates.eager_s
        return max(1e-7, rates.eager_s + (deep_s - shallow_s) / kernels)

    def _host(self, backend: str, rates: Rates) -> HostOverhead:
        """The overhead per step, collective and tensor, from the unexplained time of the small models' steps."""
        unexplained = {
            role: (seconds, model.sends.total(), sum(len(unit.parameters) for unit in model.units))
            for role, (seconds, model) in self._unexplained(backend, rates).items()
        }
        deep, shallow, whole = unexplained["deep"], unexplained["shallow"], unexplained.get("whole")
        now = rates.host(backend)
        send_s = (deep[0] - whole[0]) / (deep[1] - whole[1]) if whole is not None and deep[1] != whole[1] else 0.0
        # Issuing a collective in a step may be cheaper than alone by as much as the smallest one takes.
        smallest_s = min((curve.points[0][1] for curve in self.machine.collectives.values()), default=0.0)
        least_s = SEND_KERNELS * rates.eager_s if self.on_gpu else smallest_s
        send_s = max(send_s, -least_s - now.send_s)
        tensor_s = (deep[0] - shallow[0] - send_s * (deep[1] - shallow[1])) / (deep[2] - shallow[2])
        tensor_s = max(tensor_s, -now.tensor_s)
        step_s = max(deep[0] - send_s * deep[1] - tensor_s * deep[2], -now.step_s)
        return replace(now, step_s=now.step_s + step_s, send_s=now.send_s + send_s, tensor_s=now.tensor_s + tensor_s)

    def _traffic(self, rates: Rates) -> dict[str, float]:
        """The traffic by dtype, from the step of the unsharded model, which is linear in it."""
        traffic = {}
        for role, spec, seconds in self._steps:
            if role == "traffic":
                dtype = spec.strategy.dtypes.param
                both = (replace(rates, traffic_of={dtype: share}) for share in (0.0, 1.0))
                traffic[dtype] = self._linear(spec, seconds, *both)
        return {**traffic, "fp16": traffic["bf16"]} if "bf16" in traffic else traffic

    def _with_overlap(self, backend: str, rates: Rates) -> Rates:
        """The rates with the interference or stretch that predicts the step of role "overlap", by bisection (it grows
        with both). Where the network is so slow that computing hides little of it, interference stays."""
        steps = [step for step in self._steps if step[0] == "overlap" and step[1].strategy.backend == backend]
        if not steps:
            return rates
        ((_, spec, seconds),) = steps
        alone = self._model(spec, replace(rates, interference=0.0)).step()
        overlaps = backend not in AHEAD and alone.exposed_comm_s < alone.computing_s

        def with_(value: float) -> Rates:
            if overlaps:
                return replace(rates, interference=value)
            return replace(rates, hosts={**rates.hosts, backend: replace(rates.host(backend), stretch=value)})

        low, high = 0.0, MOST
        least_s, most_s = (self._predicted_s(spec, with_(value)) for value in (low, high))
        if most_s < SHOWN * least_s:  # the host takes longer than both, and the step shows neither
            return rates
        for _ in range(12):
            middle = (low + high) / 2
            if self._predicted_s(spec, with_(middle)) < seconds:
                low = middle
            else:
                high = middle
        return with_((low + high) / 2)

    def _predicted_s(self, spec: Spec, rates: Rates) -> float:
        return self._model(spec, rates).step().seconds

    def _model(self, spec: Spec, rates: Rates) -> StepModel:
        shape = shape_for(spec.workload.model, spec.strategy.wrap)
        return StepModel(spec, shape.units, shape.tokens(spec.workload.seq_len), self.machine, rates)


def _curves(rows: Mapping[str, Sequence[Sequence[float]]], size: int) -> dict[str, Curve]:
    """Curves by link bytes, from rows by payload bytes."""
    sent = {kind: [(link_bytes(kind, n, size), s) for n, s in rows[kind]] for kind in rows if kind in PASSES}
    return {kind: Curve.of(each) for kind, each in sent.items()}


def _mean(each: Sequence[Any]) -> Any:
    """The mean of nested values, number by number. (Computing and waiting add up to the same time on every rank.)"""
    first = each[0]
    if isinstance(first, Mapping):
        return {key: _mean([one[key] for one in each]) for key in first}
    if isinstance(first, (list, tuple)):
        return [_mean(list(values)) for values in zip(*each, strict=True)]
    return fmean(each)
