"""`Calibration`: what was measured on this machine, and the `Machine` and `Rates` that it comes to.

What is measured, in a minute or two, on all ranks at once (`fsdp_lab.rank.calibration`), and what for:

* matrix products, attention, copies, the optimizer and collectives over the wire, each at several sizes: curves;
* steps of GPT-2s of width 32, which hardly compute, of every backend: with 6 and with 2 blocks, and with 6 in one unit. What
  the curves do not explain of these three is what a step, a unit and a parameter tensor cost: `Rates.hosts`;
* steps of a GPT-2 of two blocks of width 256 that is not sharded, of our own engine, in each dtype: what is left of
  these is the traffic of norms, activations and losses: `Rates.traffic_of`;
* steps of one of four blocks that is sharded fully, on so few tokens that it sends about as long as it computes: how
  much the two slow each other where they overlap, `Rates.interference`; where computing waits, how much longer
  collectives take in a step than by themselves, `HostOverhead.stretch`.

So no model, workload or sharding that is predicted has to be among those that were measured. It holds for as many ranks
on the same devices, as long as the machine does nothing else than it did then.

On a GPU the host runs ahead: what the smallest models take is its time alone and is passed over, and the others are as large
as a GPU wants them. That path has not been held against a GPU's steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import fmean, median
from typing import Any

from fsdp_lab.core.model_shape import ModelShape
from fsdp_lab.core.spec import BACKENDS, Spec
from fsdp_lab.planner.costs import link_bytes
from fsdp_lab.planner.devices import PUBLISHED, Curve, Device, HostOverhead, Machine, MeasuredCurves, Rates
from fsdp_lab.planner.step import AHEAD, StepModel

SMALL = ("deep", "shallow", "whole")
Row = Sequence[float]
MOST = 4.0  # of interference, and of a collective's stretch


@dataclass(frozen=True, kw_only=True)
class Reference:
    """A Spec whose steps are timed. `role`: what they tell."""

    role: str  # "deep", "shallow", "whole": of a small model with 6 blocks, with 2, with 6 in one unit; "traffic", "beside"
    spec: Spec


def references(ranks: int, dtypes: Sequence[str], devices: Sequence[str] | None = None) -> list[Reference]:
    """The steps to be timed."""
    start = Spec(world_size=ranks, devices=None if devices is None else tuple(devices))
    on_gpu = devices is not None and devices[0] != "cpu"
    width, seq_len = (2048, 512) if on_gpu else (256, 128)
    found = []
    for backend in BACKENDS:
        sharding = "no_shard" if backend == "ddp" else "full_shard"
        small = start.replace(backend=backend, sharding=sharding, micro_batch=1, seq_len=16)
        found += [
            Reference(role="deep", spec=small.replace(model=gpt2(32, 6))),
            Reference(role="shallow", spec=small.replace(model=gpt2(32, 2))),
        ]
        if backend != "ddp":  # which has no units
            found.append(Reference(role="whole", spec=small.replace(model=gpt2(32, 6), wrap="whole")))
    plain = start.replace(model=gpt2(width, 2, seq_len), sharding="no_shard", micro_batch=4, seq_len=seq_len)
    if ranks > 1:
        beside = start.replace(model=gpt2(width, 4, seq_len), micro_batch=2, seq_len=seq_len // 2)
        found += [Reference(role="beside", spec=beside.replace(backend=b)) for b in ("lab", *AHEAD)]
    scaled = ("fp16",)  # its steps wait for a scale of the loss; computing is as in bf16
    found += [Reference(role="traffic", spec=plain.replace(precision=dtype)) for dtype in dtypes if dtype not in scaled]
    return found


def gpt2(width: int, layers: int, positions: int = 128) -> dict[str, Any]:
    """A transformers config, on bytes."""
    return {
        "model_type": "gpt2", "vocab_size": 384, "n_embd": width, "n_layer": layers, "n_head": max(2, width // 64),
        "n_positions": positions, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": None,
    }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Frozen; JSON both ways."""

    unix_s: float  # when
    seconds: float  # how long it took
    name: str  # of the device
    devices: tuple[str, ...]  # one a rank
    probes: Mapping[str, Any] = field(repr=False)  # what `fsdp_lab.rank.calibration` measured: the mean over ranks
    shapes: tuple[ModelShape, ...] = field(repr=False)  # of the references, in their order

    @property
    def ranks(self) -> int:
        return len(self.devices)

    @property
    def beside_s(self) -> list[list[float]]:
        """Seconds of each counted step of the Specs that were timed beside it; nothing is fitted to them."""
        taken = self.probes["steps"]
        return [taken[str(i)] for i in range(len(self.shapes), len(taken))]

    @classmethod
    def of(cls, each: Sequence[Mapping[str, Any]], **said: Any) -> Calibration:
        """From what every rank measured."""
        return cls(probes=_mean(each), **said)

    @property
    def on_gpu(self) -> bool:
        return self.devices[0] != "cpu"

    @property
    def dtypes(self) -> tuple[str, ...]:
        return tuple(self.probes["products"])

    @cached_property
    def machine(self) -> Machine:
        """The measured machine, for `fsdp_lab.planner.plan`."""
        p = self.probes
        products = {dtype: Curve.of(rows) for dtype, rows in p["products"].items()}
        peaks = {dtype: curve.best for dtype, curve in products.items()}
        scores = {
            dtype: Curve.of((count, seconds / 3.5 - flops / peaks[dtype]) for count, flops, seconds in rows)
            for dtype, rows in p["scores"].items()
        }
        copies = Curve.of(p["copies"])
        measured = MeasuredCurves(products=products, scores=scores, copies=copies,
                            updates={name: Curve.of(rows) for name, rows in p["updates"].items()})  # fmt: skip
        collectives, pairs = _curves(p["collectives"], self.ranks), _curves(p.get("pairs", {}), 2)
        fastest = max((curve.best for curve in collectives.values()), default=2 * copies.best)
        device = Device(
            name=self.name, peak_flops_per_s=peaks, matrix_share=1.0, memory_bytes=int(p["memory_bytes"]),
            memory_bytes_per_s=2 * copies.best, link_bytes_per_s=fastest, switched=True,
            generation="here" if self.on_gpu else "cpu", assumed={}, measured=measured,
        )  # fmt: skip
        return Machine(device=device, ranks=self.ranks, per_host=self.ranks, network_bytes_per_s=fastest, assumed={},
                       collectives=collectives, pairs=pairs)  # fmt: skip

    @cached_property
    def rates(self) -> Rates:
        """The measured rates, for `fsdp_lab.planner.plan`."""
        bare = replace(
            PUBLISHED, matrix=1.0, memory=1.0, link=1.0, network=1.0, latency_s=0.0, jitter_s=0.0, step_s=0.0,
            interference=0.5,
        )  # fmt: skip
        rates = bare
        for _ in range(6):  # each is little in what the others are found from
            if not self.on_gpu:
                rates = replace(rates, hosts={backend: self._host(backend, rates) for backend in BACKENDS})
            rates = replace(rates, traffic_of=self._traffic(rates))
            for backend in ("lab", *AHEAD):
                rates = self._beside(backend, rates)
        return rates

    @cached_property
    def _steps(self) -> list[tuple[Reference, ModelShape, float]]:
        """With the median seconds of each."""
        found, taken = references(self.ranks, self.dtypes, self.devices), self.probes["steps"]
        return [(r, shape, median(taken[str(i)])) for i, (r, shape) in enumerate(zip(found, self.shapes, strict=True))]

    def _host(self, backend: str, rates: Rates) -> HostOverhead:
        """From what is left of the small models' steps: so much more a step, a send and a tensor."""
        left = {
            r.role: (seconds - self._predicted_s(r, shape, rates), self._model(r, shape, rates).sends, _tensors(shape))
            for r, shape, seconds in self._steps
            if r.spec.strategy.backend == backend and r.role in SMALL
        }
        deep, shallow, whole, now = left["deep"], left["shallow"], left.get("whole"), rates.host(backend)
        send_s = (deep[0] - whole[0]) / (deep[1] - whole[1]) if whole is not None and deep[1] != whole[1] else 0.0
        send_s = max(send_s, -self._latency_s - now.send_s)
        tensor_s = (deep[0] - shallow[0] - send_s * (deep[1] - shallow[1])) / (deep[2] - shallow[2])
        tensor_s = max(tensor_s, -now.tensor_s)
        step_s = max(deep[0] - send_s * deep[1] - tensor_s * deep[2], -now.step_s)
        return replace(now, step_s=now.step_s + step_s, send_s=now.send_s + send_s, tensor_s=now.tensor_s + tensor_s)

    @cached_property
    def _latency_s(self) -> float:
        """Of the smallest collective: by so much less may one in a step take than one by itself."""
        return min((curve.points[0][1] for curve in self.machine.collectives.values()), default=0.0)

    def _traffic(self, rates: Rates) -> dict[str, float]:
        """By dtype: so that the step of the larger model comes out, which is a straight line in it."""
        found = {}
        for r, shape, seconds in self._steps:
            if r.role == "traffic":
                dtype = r.spec.strategy.dtypes.param
                none, one = (
                    self._predicted_s(r, shape, replace(rates, traffic_of={dtype: share})) for share in (0.0, 1.0)
                )
                found[dtype] = max(0.0, (seconds - none) / (one - none))
        return {**found, "fp16": found["bf16"]} if "bf16" in found else found

    def _beside(self, backend: str, rates: Rates) -> Rates:
        """So that the step comes out in which sending is beside computing: by halving, as a step grows with both."""
        told = [step for step in self._steps if step[0].role == "beside" and step[0].spec.strategy.backend == backend]
        if not told:
            return rates
        ((r, shape, seconds),) = told

        def with_(value: float) -> Rates:
            if backend not in AHEAD:
                return replace(rates, interference=value)
            return replace(rates, hosts={**rates.hosts, backend: replace(rates.host(backend), stretch=value)})

        low, high = 0.0, MOST
        for _ in range(12):
            middle = (low + high) / 2
            if self._predicted_s(r, shape, with_(middle)) < seconds:
                low = middle
            else:
                high = middle
        return with_((low + high) / 2)

    def _predicted_s(self, r: Reference, shape: ModelShape, rates: Rates) -> float:
        return self._model(r, shape, rates).step().seconds

    def _model(self, r: Reference, shape: ModelShape, rates: Rates) -> StepModel:
        return StepModel(r.spec, shape.units, shape.tokens(r.spec.workload.seq_len), self.machine, rates)

    # -- JSON, both ways ------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        shapes = [replace(shape, tapes={}).to_dict() for shape in self.shapes]
        return {
            "unix_s": self.unix_s, "seconds": self.seconds, "name": self.name, "devices": list(self.devices),
            "probes": dict(self.probes), "shapes": shapes,
        }  # fmt: skip

    @classmethod
    def from_dict(cls, d: Mapping[str, Any]) -> Calibration:
        """Raises ValueError for what is none."""
        try:
            shapes = tuple(ModelShape.from_dict(shape) for shape in d["shapes"])
            return cls(unix_s=d["unix_s"], seconds=d["seconds"], name=d["name"], devices=tuple(d["devices"]),
                       probes=d["probes"], shapes=shapes)  # fmt: skip
        except (KeyError, TypeError) as e:
            raise ValueError(f"this is no calibration ({type(e).__name__}: {e}); make one with lab.calibrate()") from e


def _curves(rows: Mapping[str, Sequence[Row]], size: int) -> dict[str, Curve]:
    """Curves by link bytes, from rows by payload bytes."""
    return {
        kind: Curve.of((link_bytes(kind, payload, size), seconds) for payload, seconds in each)
        for kind, each in rows.items()
    }


def _tensors(shape: ModelShape) -> int:
    return sum(len(unit.parameters) for unit in shape.units)


def _mean(each: Sequence[Any]) -> Any:
    """Of values of one shape, number by number: computing and waiting of a rank add up to the same time on all of them."""
    first = each[0]
    if isinstance(first, Mapping):
        return {key: _mean([one[key] for one in each]) for key in first}
    if isinstance(first, (list, tuple)):
        return [_mean(list(values)) for values in zip(*each, strict=True)]
    return fmean(each)
