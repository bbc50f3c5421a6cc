"""`plan`: the predicted memory and time of a Spec on a machine, in milliseconds, as a `Plan`."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from html import escape
from typing import Any, Self

from fsdp_lab.base.errors import ArgumentError, SpecError, is_number
from fsdp_lab.base.events import Role
from fsdp_lab.base.formatting import Table, count, duration, duration_range, figures, flop_rate, size
from fsdp_lab.planner import bands
from fsdp_lab.planner.bands import COVERED, MEMORY_ERRORS, PUBLISHED_ERRORS, Band, ErrorScale, error_scale, of_network
from fsdp_lab.planner.costs import Computing, ComputingOf
from fsdp_lab.planner.devices import PUBLISHED, Machine, Rates
from fsdp_lab.planner.memory import CONTEXT_BYTES, MemoryPlan, loading_bytes, memory
from fsdp_lab.planner.model_shape import ModelShape
from fsdp_lab.planner.step import StepModel, StepTime, recomputed, step_seconds
from fsdp_lab.spec.describe import describe_value, differing_fields, field_title
from fsdp_lab.spec.spec import Spec

PARTS = ("computing", "slowed by sending", "exposed communication", "waiting for the host", "optimizer")
FIGURES = ("fits", "memory", "step", "80 % band", "tokens/s", "FLOPS", "MFU", "exposed", "bound by")
BILL = {"training_s": "time of training", "gpu_hours": "GPU hours", "cost": "cost"}
LEFT_ALIGNED = frozenset({"strategy", "why", "bound by", "fits"})
SURE = 0.98
BOUND = 0.2  # communication is the bottleneck if it takes more of a step, exposed or by slowdown


@dataclass(frozen=True, kw_only=True)
class Training:
    """A whole training: so many tokens, at a price for an hour of one GPU in any currency; None: unknown."""

    tokens: float = 1e9
    price_per_gpu_hour: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("tokens", self.tokens), ("price_per_gpu_hour", self.price_per_gpu_hour)):
            if value is not None and not (is_number(value) and 0 < value < 1e18):
                raise ArgumentError(name, f"{value!r} is refused", "give a number above 0, such as 15e9 or 2.49")

    @classmethod
    def of(cls, tokens: float | str | None, price_per_gpu_hour: float | None) -> Self | None:
        """None if neither is given. `tokens`: a number, or a text such as "15B"; None: a billion. Raises ArgumentError."""
        if tokens is None and price_per_gpu_hour is None:
            return None
        number = cls.tokens if tokens is None else tokens
        if isinstance(number, str):
            word, power = number.strip(), {"K": 3, "M": 6, "B": 9, "T": 12}.get(number.strip()[-1:].upper(), 0)
            try:
                number = float(word[:-1] if power else word) * 10**power
            except ValueError:
                raise ArgumentError("tokens", f"{tokens!r} is refused", "give a number, such as 15e9 or 15B") from None
        return cls(tokens=number, price_per_gpu_hour=price_per_gpu_hour)


@dataclass(frozen=True, kw_only=True, repr=False)
class Plan:
    """One prediction. Figures are per rank unless stated otherwise; `assumed` lists defaults that were used."""

    spec: Spec
    shape: ModelShape
    machine: Machine
    step: StepTime
    memory: MemoryPlan
    comm_s: Mapping[str, float]  # by kind of collective: seconds per step without overlap
    link_bytes: Mapping[str, int]
    assumed: Mapping[str, Any]
    rates: Rates
    computing: ComputingOf = Computing
    training: Training | None = None

    @property
    def step_time_s(self) -> float:
        return self.step.seconds

    @property
    def tokens(self) -> int:
        """Tokens per step of all ranks."""
        return self.spec.global_batch * self.shape.tokens(self.spec.workload.seq_len)

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of all ranks."""
        return self.tokens / self.step_time_s

    @cached_property
    def model_flops(self) -> float:
        """FLOPs of a rank per step: forward and backward without recompute."""
        return self.spec.rank_samples * self.shape.step_flops(self.spec.workload.seq_len)

    @cached_property
    def recompute_flops(self) -> float:
        """FLOPs of a rank per step that recompute adds."""
        units, tokens = recomputed(self.spec, len(self.shape.units)), self.shape.tokens(self.spec.workload.seq_len)
        return self.spec.rank_samples * sum(self.shape.units[i].forward_flops(tokens) for i in units)

    @property
    def flops_per_s(self) -> float:
        return self.model_flops / self.step_time_s

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation, 0 to 1, relative to the device's peak in the compute dtype, as of a run on it."""
        return self.flops_per_s / self.machine.device.flops_per_s(self.spec.strategy.dtypes.param)

    @property
    def hfu(self) -> float:
        """Hardware FLOPs utilisation, which includes recompute."""
        return self.mfu * (1 + self.recompute_flops / self.model_flops)

    @property
    def margin_bytes(self) -> int:
        """Free memory of a device; negative if the plan does not fit."""
        return self.memory.margin_bytes(self.machine.device)

    @property
    def fits(self) -> bool:
        return self.margin_bytes >= 0

    @cached_property
    def scale(self) -> ErrorScale:
        """The scale by which the step time may be wrong. Takes a dozen simulations."""
        if self.machine.is_measured:
            return ErrorScale(below=1.0, above=1.0, causes={})
        errors = PUBLISHED_ERRORS if self.machine.device.measured is None else of_network(PUBLISHED_ERRORS)

        def seconds(rates: Rates) -> float:
            return step_seconds(self.spec, self.shape, self.machine, rates, self.computing)

        return error_scale(errors, self.machine, self.rates, seconds)

    @cached_property
    def bill(self) -> Mapping[str, tuple[float, Band]]:
        """ "training_s", "gpu_hours" and, if the price is known, "cost" of the training, each with the band that the step
        time has. Empty if no training was asked for."""
        if (training := self.training) is None:
            return {}
        factors = {"training_s": training.tokens / self.tokens}
        factors["gpu_hours"] = factors["training_s"] * self.machine.ranks / 3600
        if training.price_per_gpu_hour is not None:
            factors["cost"] = factors["gpu_hours"] * training.price_per_gpu_hour
        step, band = self.step_time_s, self.step_time_band_s()
        return {name: (step * f, Band(band.low * f, band.high * f)) for name, f in factors.items()}

    @property
    def _errors(self) -> bands.TimeErrors | bands.CalibratedErrors:
        return bands.CALIBRATED_ERRORS if self.machine.is_measured else PUBLISHED_ERRORS

    def step_time_band_s(self, level: float = COVERED) -> Band:
        """The interval that holds the measured step time with this probability."""
        return self.scale.band(self.step_time_s, self._errors.quantiles.at(level))

    def is_apart(self, other: Self) -> bool:
        """Returns whether the step times of two plans for one machine differ by more than their ratio is uncertain."""
        ratio = abs(math.log(self.step_time_s / other.step_time_s))
        return ratio > self.scale.apart(other.scale, self._errors.between, self._errors.quantiles.at(COVERED))

    def tokens_per_s_band(self, level: float = COVERED) -> Band:
        return self.step_time_band_s(level).inverse(self.tokens)

    def memory_band_bytes(self, of_bytes: float) -> Band:
        """The interval around a predicted peak."""
        width = MEMORY_ERRORS[self.machine.device.type].at(COVERED)
        return Band(of_bytes * math.exp(-width), of_bytes * math.exp(width))

    @property
    def fits_probability(self) -> float:
        """Probability that the device's memory is enough."""
        available = self.margin_bytes + self.memory.reserved_bytes
        if available <= 0:
            return 0.0
        errors = MEMORY_ERRORS[self.machine.device.type]
        return errors.probability_below(math.log(available / self.memory.reserved_bytes))

    @property
    def binding(self) -> str:
        """The bottleneck of a step: "communication", "computing" or "the loop"."""
        if self.step.exposed_comm_s + self.step.slowed_s > BOUND * self.step_time_s:
            return "communication"
        return "computing" if self.step.computing_s > self.step_time_s / 2 else "the loop"

    def __repr__(self) -> str:
        return "\n".join(sentences(self))

    def _repr_html_(self) -> str:
        text = "".join(f"<p>{escape(line)}</p>" for line in sentences(self))
        return f"{text}{time_table(self)._repr_html_()}{memory_table(self)._repr_html_()}"

    def within(self, limit_bytes: int | None) -> Self:
        """The same plan with a memory limit per device; None: its own."""
        return replace(self, machine=self.machine.limited(limit_bytes))

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers under the same names as in the summary of a measured run (`fsdp_lab.runs.summary`)."""
        ranks, memory, machine = self.machine.ranks, self.memory, self.machine
        d: dict[str, Any] = {"spec": self.spec.to_dict(), "hardware": machine.device.name, "ranks": ranks}
        d |= {"hosts": machine.hosts, "network_gbit_per_s": machine.network_bytes_per_s * 8 / 1e9}
        d |= {"parameters": self.shape.parameters, "fits": self.fits, "margin_bytes": self.margin_bytes}
        d |= {"peak_memory_bytes": memory.peak_bytes, "reserved_memory_bytes": memory.reserved_bytes}
        d["host_memory_bytes"] = memory.host_bytes
        d["loading_memory_bytes"] = loading_bytes(self.spec, self.shape, device=machine.device.type)
        d["memory_limit_bytes"] = machine.device.memory_bytes
        d["memory_at_peak_bytes"] = {role.value: memory.at_peak.of_role(role) for role in Role}
        d |= {"fits_probability": self.fits_probability, **self._bands()}
        d |= {"step_time_s": self.step_time_s, "tokens_per_s": self.tokens_per_s}
        d |= {"tokens_per_s_per_rank": self.tokens_per_s / ranks, "tflops_per_rank": self.flops_per_s / 1e12}
        d |= {"mfu": self.mfu, "hfu": self.hfu}
        d |= {name: getattr(self.step, name) for name in ("computing_s", "slowed_s", "host_s", "optimizer_s")}
        d |= {"comm_s_per_step": dict(self.comm_s), "comm_bytes_per_step": dict(self.link_bytes)}
        if self.training is not None:
            d |= {"training_tokens": self.training.tokens, "price_per_gpu_hour": self.training.price_per_gpu_hour}
        for name, (value, band) in self.bill.items():
            d |= {name: value, f"{name}_low": band.low, f"{name}_high": band.high}
        return d | {"exposed_comm_s": self.step.exposed_comm_s, "binding": self.binding, "assumed": dict(self.assumed)}

    def _bands(self) -> dict[str, float]:
        """Ends of the 80 % band beside each figure, and of the 50 % band of times."""
        ranks, told = self.machine.ranks, dict[tuple[str, str], Band]()  # by name and end
        for end, level in (("", COVERED), ("_50", 0.5)):
            step_s, tokens = self.step_time_band_s(level), self.tokens_per_s_band(level)
            each = Band(tokens.low / ranks, tokens.high / ranks)
            told |= {("step_time_s", end): step_s, ("tokens_per_s", end): tokens, ("tokens_per_s_per_rank", end): each}
        told["peak_memory_bytes", ""] = self.memory_band_bytes(self.memory.peak_bytes)
        told["reserved_memory_bytes", ""] = self.memory_band_bytes(self.memory.reserved_bytes)
        sides = ("low", "high")
        return {f"{name}_{side}{end}": getattr(band, side) for (name, end), band in told.items() for side in sides}


def plan(
    spec: Spec, shape: ModelShape, machine: Machine, *, rates: Rates = PUBLISHED, computing: ComputingOf = Computing
) -> Plan:
    """Predicts a step of a model, in the units of `spec.strategy.wrap`, on a machine with as many ranks as the Spec has.
    Raises FieldError for another number of ranks, and for a dtype or gathers that the device does not support."""
    if machine.ranks != spec.world_size:
        reason = f"the machine has {machine.ranks} and the Spec {spec.world_size}"
        raise ArgumentError("ranks", reason, "give both the same")
    if spec.strategy.gather == "mapped" and machine.device.type != "cpu":
        raise SpecError("strategy.gather", "mapped is for ranks on CPUs", "use copy", {"gather": "copy"})
    model = StepModel(spec, shape.units, shape.tokens(spec.workload.seq_len), machine, rates, computing)
    step = model.step()
    comm_s, link_bytes = model.communicated()
    assumed = {**machine.device.assumed, **machine.assumed}
    if machine.device.measured is None:
        assumed["attention"] = "flash2"
    if not spec.workload.torch_optimizer.is_known:
        assumed["optimizer time"] = "in proportion to its state, as of AdamW"
    return Plan(
        spec=spec,
        shape=shape,
        machine=machine,
        step=step,
        memory=memory(spec, shape, device=machine.device.type),
        comm_s=comm_s,
        link_bytes=link_bytes,
        assumed=assumed,
        rates=rates,
        computing=computing,
    )


def scaling(spec: Spec, shape: ModelShape, machine: Machine, ranks: Sequence[int]) -> list[Plan]:
    """Plans for other numbers of ranks with the same work per rank. Numbers that are invalid for the Spec are left out."""
    plans = []
    for world_size in ranks:
        changes = {"world_size": world_size, "devices": None}
        if machine.allows(world_size) and spec.validate(**changes) is None:
            plans.append(plan(spec.replace(**changes), shape, machine.with_ranks(world_size)))
    return plans


def limit(plans: Sequence[Plan]) -> str:
    """The bottleneck along a scaling curve, as a sentence."""
    bound = next((p for p in plans if p.binding == "communication"), None)
    network = f"{plans[-1].machine.network_bytes_per_s * 8 / 1e9:,.0f} Gb/s a host"
    if bound is None:
        return f"bound by {plans[-1].binding} up to {plans[-1].machine.ranks:,} GPUs at {network}"
    fewer = [p for p in plans if p.machine.ranks < bound.machine.ranks]
    if not fewer:
        return f"bound by communication from {bound.machine.ranks:,} GPUs on at {network}"
    return f"bound by communication above {fewer[-1].machine.ranks:,} GPUs at {network}"


def sentences(plan: Plan) -> list[str]:
    """The Spec with its batch and the machine, whether it fits, how fast it is, and what was assumed."""
    s, w, m = plan.spec.strategy, plan.spec.workload, plan.machine
    network = f" at {m.network_bytes_per_s * 8 / 1e9:,.0f} Gb/s a host" if m.hosts > 1 else ""
    model = describe_value("model", w.model)
    assumed = "; ".join(f"{name} {value}" for name, value in plan.assumed.items())
    several = f"{w.accumulate} x " if w.accumulate > 1 else ""
    bill = []
    if (training := plan.training) is not None:
        texts, tokens = bill_texts(plan), figures(training.tokens / 1e9)
        cost = f", and cost {texts['cost']} at {training.price_per_gpu_hour:,g} a GPU hour" if "cost" in texts else ""
        bill = [f"{tokens} billion tokens take {texts['training_s']}, {texts['gpu_hours']} GPU hours{cost}."]
    batch = f"{several}{w.micro_batch} x {plan.shape.tokens(w.seq_len):,} tokens a rank, global batch {plan.tokens:,} tokens"
    return [
        f"{model}, {parameter_count(plan.shape.parameters)}, {s.backend} {s.sharding}, {s.precision}, on {m.ranks:,} x "
        f"{m.device.name} in {m.hosts:,} host{'s' * (m.hosts > 1)}{network}: {batch}",
        f"It {fit_sentence(plan)}.",
        f"Step {duration(plan.step_time_s)} ({band_text(plan)} 8 times in 10), {count(plan.tokens_per_s)} tokens/s, "
        f"{flop_rate(plan.flops_per_s)} a rank, MFU {plan.mfu:.1%}, HFU {plan.hfu:.1%}; bound by {plan.binding}.",
        *bill,
        *([f"Assumed: {assumed}."] if assumed else []),
    ]


def billed(plans: Sequence[Plan]) -> Iterator[str]:
    """The titles of the entries that the plans' bills have."""
    return (BILL[name] for p in plans[:1] for name in p.bill)


def bill_texts(plan: Plan, *, ranges: bool = True) -> dict[str, str]:
    """The entries of a bill as text, with their ranges in brackets."""
    texts = {}
    for name, (value, band) in plan.bill.items():
        is_time = name == "training_s"
        between = duration_range(band.low, band.high) if is_time else f"{figures(band.low)} to {figures(band.high)}"
        texts[name] = (duration(value) if is_time else figures(value)) + (f" ({between})" if ranges else "")
    return texts


def parameter_count(number: int) -> str:
    return f"{number / 1e9:.2f} billion parameters" if number >= 1e9 else f"{number / 1e6:.1f} million parameters"


def fit_sentence(plan: Plan) -> str:
    peak, reserved = size(plan.memory.peak_bytes), size(plan.memory.reserved_bytes)
    context = f", and {size(CONTEXT_BYTES)} of CUDA's context" if plan.machine.device.type == "cuda" else ""
    limit = size(plan.machine.device.memory_bytes)
    needed = f"{reserved} reserved of {limit}, {peak} of them allocated at the peak{context}"
    verb, rest = ("fits", "to spare") if plan.fits else ("does not fit", "too much")
    return f"{verb}: {needed}; {size(abs(plan.margin_bytes))} {rest}{likely_text(plan)}"


def likely_text(plan: Plan) -> str:
    """The probability that the plan fits, where that is not nearly certain."""
    share = plan.fits_probability
    return f"; {share:.0%} likely to fit" if 1 - SURE <= share <= SURE else ""


def time_table(plan: Plan) -> Table:
    """Parts of the step time."""
    step = plan.step
    parts = (step.computing_s, step.slowed_s, step.exposed_comm_s, step.host_s, step.optimizer_s)
    sent = {kind.replace("_", " "): f"{duration(s)}, {size(plan.link_bytes[kind])}" for kind, s in plan.comm_s.items()}
    return Table(columns=(*PARTS, *sent), rows=((*map(duration, parts), *sent.values()),))


def memory_table(plan: Plan) -> Table:
    """Memory at the peak by class."""
    memory = plan.memory
    cells = {role.value: size(number) for role in Role if (number := memory.at_peak.of_role(role))}
    cells |= {"peak": size(memory.peak_bytes), "reserved": size(memory.reserved_bytes)}
    return Table(columns=tuple(cells), rows=(tuple(cells.values()),))


def plan_table(plans: Sequence[Plan]) -> Table:
    """One row per plan: fields in which the plans differ, and figures."""
    flat = [p.spec.flat() for p in plans]
    differing = differing_fields(flat)
    names = tuple("ranks" if name == "world_size" else field_title(name) for name in differing)
    rows = []
    for p, fields in zip(plans, flat, strict=True):
        cells = [f"{v:,}" if type(v := fields[name]) is int else describe_value(name, v) for name in differing]
        share = f" ({p.fits_probability:.0%})" if 1 - SURE <= p.fits_probability <= SURE else ""
        cells += [("yes" if p.fits else "no") + share, size(p.memory.reserved_bytes), duration(p.step_time_s)]
        cells += [band_text(p), count(p.tokens_per_s), flop_rate(p.flops_per_s), f"{p.mfu:.1%}"]
        cells += [f"{p.step.exposed_comm_s / p.step_time_s:.0%}", p.binding]
        rows.append((*cells, *bill_texts(p, ranges=False).values()))
    left, columns = LEFT_ALIGNED | {n for n in names if n != "ranks"}, (*names, *FIGURES, *billed(plans))
    return Table(columns=columns, rows=tuple(rows), left=left)


def band_text(p: Plan) -> str:
    """The 80 % band of the step time."""
    band = p.step_time_band_s()
    return duration_range(band.low, band.high)
