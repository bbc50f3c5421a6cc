"""Questions to the planner, and the fields in which they are asked: a Spec's, and those of hardware that need not be here.

The fields of a `Question` are chosen one by one, as a Spec's are (`dashboard.choices.Chosen`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

from fsdp_lab.base.errors import ArgumentError, check_whole, is_number
from fsdp_lab.base.formatting import GIB
from fsdp_lab.dashboard.fields import CONTROLS, controls_of, presets
from fsdp_lab.planner.devices import ASSUMED_SHARE, DEVICES, Device
from fsdp_lab.planner.plan import Plan
from fsdp_lab.planner.questions import Target, curve, on_hosts, planned
from fsdp_lab.planner.search import SEARCHED
from fsdp_lab.spec.fields import FieldRow, knob, rows_of
from fsdp_lab.spec.spec import Spec

CUSTOM = "custom"
CUSTOM_ONLY = ("peak_tflops", "memory_gib", "link_gb_per_s")
LIKE = "a100-80"  # the device whose other values a custom one is given
_SIZE = FieldRow(none="", most=10**5)
_HOSTED = FieldRow(choices=(None, 1, 2, 4, 16, 32, 72), typed="6", none="8")


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
    # Of `DEVICES`, or `CUSTOM` with the last three.
    hardware: str = knob("h100", FieldRow(choices=(*DEVICES, CUSTOM)), help="The GPU")
    per_host: int | None = knob(None, _HOSTED, label="GPUs a host", help="With NVLink or PCI Express between them")
    # None: the usual rate.
    network: float | None = knob(
        None, _SIZE, most=10**6, none="as usual", label="network, Gb/s", help="Of all network cards of a host, one way"
    )
    peak_tflops: float = knob(312.0, _SIZE, label="peak, TFLOPS", help="Dense, in bf16")
    memory_gib: float = knob(80.0, _SIZE, label="memory, GiB", help="Of one GPU")
    link_gb_per_s: float = knob(300.0, _SIZE, label="link, GB/s", help="To the other GPUs of its host, one way")

    def __post_init__(self) -> None:
        for name, row in _OWN.items():
            value = getattr(self, name)
            if "float" not in row.type or (name == "network" and value is None):
                continue
            if not is_number(value) or not math.isfinite(value) or not 0 < value <= row.most:
                raise ArgumentError(name, f"{value!r} is refused", f"give a number above 0, up to {row.most:,}")
        if self.per_host is not None:
            check_whole("per_host", self.per_host)
        self.target.machine(self.spec.world_size)

    def flat(self) -> dict[str, Any]:
        """Every field by its name, the Spec's included."""
        return {**self.spec.flat(), **{name: getattr(self, name) for name in _OWN}}

    def replace(self, **changes: Any) -> Question:
        own = {name: value for name, value in changes.items() if name in _OWN}
        rest = {name: value for name, value in changes.items() if name not in _OWN}
        return replace(self, spec=self.spec.replace(**rest), **own)

    @property
    def target(self) -> Target:
        hardware = _custom(self) if self.hardware == CUSTOM else self.hardware
        return Target(hardware=hardware, per_host=self.per_host, network_gbit_per_s=self.network)

    @property
    def planned_spec(self) -> Spec:
        """The Spec with the shard size of hybrid sharding: the GPUs of a host, unless it is given."""
        return on_hosts(self.spec, self.target)

    def unsearched(self) -> dict[str, Any]:
        """The fields that a search keeps, and the global batch."""
        rest = {name: value for name, value in self.flat().items() if name not in SEARCHED}
        return {**rest, "global_batch": self.spec.global_batch}


_OWN = rows_of(Question)


def _custom(question: Question) -> Device:
    """A device from three numbers; the other values are listed in `assumed`."""
    like = DEVICES[LIKE]
    peak = question.peak_tflops * 1e12
    shares = {dtype: flops / like.flops_per_s("bf16") for dtype, flops in like.peak_flops_per_s.items()}
    return replace(
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


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The prediction for a question. `along` is empty until the scaling curve is computed: 1 to 4,096 GPUs, each with the
    same work."""

    question: Question
    plan: Plan
    along: tuple[Plan, ...] = ()

    @classmethod
    def of(cls, question: Question) -> Answer:
        """Takes milliseconds for a preset. Raises FieldError as `planner.questions.planned` does."""
        return cls(question=question, plan=planned(question.planned_spec, question.target))

    def with_curve(self) -> Answer:
        plans, _ = curve(self.question.planned_spec, self.question.target)
        return replace(self, along=tuple(plans))

    @property
    def assumed(self) -> dict[str, Any]:
        """The values that were not given, and what was assumed."""
        size = self.plan.spec.strategy.shard_size
        same = size == self.question.spec.strategy.shard_size
        return {**self.plan.assumed, **({} if same else {"shard size": f"{size}, the GPUs of a host"})}


def searched_fields(spec: Spec) -> dict[str, Any]:
    """The fields that a search chooses."""
    return {name: value for name, value in spec.flat().items() if name in SEARCHED}


# -- the fields of the page in a notebook ------------------------------------------------------------------------------


_POWERS = tuple(1 << i for i in range(18))
_ANY_MODEL = "A preset; or other: a type that transformers knows, or the folder of a config"
_MODEL = (
    replace(CONTROLS["model"], help=_ANY_MODEL, choices=presets(), typed="opt, or a folder"),
    replace(CONTROLS["seq_len"], choices=_POWERS[7:], typed="3000"),
    CONTROLS["micro_batch"],
    CONTROLS["accumulate"],
    replace(CONTROLS["optimizer"], help="Its state is a class of memory", typed=""),
    replace(CONTROLS["optimizer_args"], help="Fused: one pass over its state", choices=({}, {"fused": True})),
)
_HARDWARE = (
    _OWN["hardware"],
    replace(CONTROLS["world_size"], label="GPUs", help="One rank each", choices=_POWERS[:13], typed="96"),
    *(row for name, row in _OWN.items() if name != "hardware"),
)
FORM: tuple[tuple[str, tuple[FieldRow, ...]], ...] = (
    ("Model", _MODEL),
    ("Hardware", _HARDWARE),
    ("Sharding", controls_of("Sharding", planned=True)),
    ("Schedule", tuple(f for f in controls_of("Schedule", planned=True) if f.name not in ("accumulate", "link"))),
)
FIELDS = {f.name: f for _, fields in FORM for f in fields}
