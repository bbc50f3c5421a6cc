"""Questions to the planner on the what-if page, and its answers. No widgets: the fields of a `Question` are chosen one by
one, as a Spec's are (`choices.Chosen`)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fsdp_lab.core.errors import ArgumentError, check_whole, is_number
from fsdp_lab.core.formatting import GIB
from fsdp_lab.core.spec import Spec
from fsdp_lab.planner.devices import ASSUMED_SHARE, DEVICES, Device
from fsdp_lab.planner.plan import Plan
from fsdp_lab.planner.questions import Target, curve, planned, searched
from fsdp_lab.planner.search import Search

CUSTOM = "custom"
LIKE = "a100-80"  # the device whose other values a custom one is given


def default_spec() -> Spec:
    """The Spec that a page begins with."""
    return Spec(world_size=64).replace(model="llama-7b", precision="bf16", seq_len=2048, micro_batch=2)


@dataclass(frozen=True, kw_only=True)
class Question:
    """A Spec, and hardware that need not be this machine's.

    Raises:
        FieldError: a value or a combination of values is impossible.
    """

    spec: Spec = field(default_factory=default_spec)
    hardware: str = "h100"  # of `DEVICES`, or `CUSTOM` with the three below
    per_host: int | None = None  # GPUs; None: eight
    network: float | None = None  # Gb/s of all network cards of a host; None: the usual rate
    peak_tflops: float = 312.0  # dense, in bf16 and fp16
    memory_gib: float = 80.0
    link_gb_per_s: float = 300.0  # to the other GPUs of a host, one way

    def __post_init__(self) -> None:
        for name, most in (("peak_tflops", 1e5), ("memory_gib", 1e5), ("link_gb_per_s", 1e5)):
            _check_positive(name, getattr(self, name), most)
        if self.network is not None:
            _check_positive("network", self.network, 1e6)
        if self.per_host is not None:
            check_whole("per_host", self.per_host)
        self.target.machine(self.spec.world_size)

    def flat(self) -> dict[str, Any]:
        """Every field by its name, the Spec's included."""
        return {**self.spec.flat(), **{name: getattr(self, name) for name in _OWN}}

    def replace(self, **changes: Any) -> Question:
        own = {name: value for name, value in changes.items() if name in _OWN}
        rest = {name: value for name, value in changes.items() if name not in _OWN}
        return dataclasses.replace(self, spec=self.spec.replace(**rest), **own)

    @property
    def target(self) -> Target:
        hardware = custom(self) if self.hardware == CUSTOM else self.hardware
        return Target(hardware=hardware, per_host=self.per_host, network_gbit_per_s=self.network)

    @property
    def planned_spec(self) -> Spec:
        """The Spec with the shard size of hybrid sharding: the GPUs of a host, unless it is given."""
        s, ranks = self.spec.strategy, self.spec.world_size
        per_host = self.target.machine(ranks).per_host
        if s.is_hybrid and s.shard_size is None and 1 < per_host < ranks and ranks % per_host == 0:
            return self.spec.replace(shard_size=per_host)
        return self.spec


_OWN = tuple(f.name for f in dataclasses.fields(Question) if f.name != "spec")


def custom(question: Question) -> Device:
    """A device from three numbers; the other values are listed in `assumed`."""
    like = DEVICES[LIKE]
    peak = question.peak_tflops * 1e12
    shares = {dtype: flops / like.flops_per_s("bf16") for dtype, flops in like.peak_flops_per_s.items()}
    return dataclasses.replace(
        like,
        name=CUSTOM,
        peak_flops_per_s={dtype: peak * share for dtype, share in shares.items()},
        matrix_share=ASSUMED_SHARE,
        memory_bytes=int(question.memory_gib * GIB),
        link_bytes_per_s=question.link_gb_per_s * 1e9,
        assumed={
            "matrix_share": f"{ASSUMED_SHARE} of the peak",
            "device": f"fp32 and memory bandwidth ({like.memory_bytes_per_s / 1e12:.1f} TB/s) as of {LIKE}",
        },
    )


# -- answers ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The prediction for a question. `along` and `binds` are empty until the scaling curve is computed."""

    question: Question
    plan: Plan
    along: Sequence[Plan] = ()  # the same work of each GPU on 1 to 4,096 of them
    binds: str = ""  # what limits the speed along the curve

    @property
    def assumed(self) -> Mapping[str, Any]:
        """The values that were not given, and what was assumed."""
        assumed = dict(self.plan.assumed)
        if self.plan.spec.strategy.shard_size != self.question.spec.strategy.shard_size:
            assumed["shard size"] = f"{self.plan.spec.strategy.shard_size}, the GPUs of a host"
        return assumed


def answer(question: Question) -> Answer:
    """Takes milliseconds for a preset. Raises FieldError as `planner.questions.planned` does."""
    return Answer(question=question, plan=planned(question.planned_spec, question.target))


def with_curve(answered: Answer) -> Answer:
    """The same answer with its scaling curve."""
    question = answered.question
    along, binds = curve(question.planned_spec, question.target)
    return dataclasses.replace(answered, along=tuple(along), binds=binds)


def best(question: Question) -> Search:
    """Searches for the fastest strategies that fit; takes seconds."""
    return searched(question.planned_spec, question.target)


SEARCHED = ("sharding", "shard_size", "recompute", "micro_batch", "accumulate", "forward_prefetch", "offload")


def searched_fields(spec: Spec) -> dict[str, Any]:
    """The fields that a search chooses."""
    flat = spec.flat()
    return {name: flat[name] for name in SEARCHED}


def unsearched_fields(question: Question) -> dict[str, Any]:
    """The fields that a search keeps, and the global batch."""
    rest = {name: value for name, value in question.flat().items() if name not in SEARCHED}
    return {**rest, "global_batch": question.spec.global_batch}


def _check_positive(name: str, value: Any, most: float) -> None:
    if not is_number(value) or not math.isfinite(value) or not 0 < value <= most:
        raise ArgumentError(name, f"{value!r} is refused", f"give a number above 0, up to {most:,.0f}")
