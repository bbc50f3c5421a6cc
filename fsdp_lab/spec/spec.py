"""How it is sharded, `Strategy`, and what can be run: `Spec`, of a `Workload`, a `Strategy` and a world size.

The three are frozen and validated by their constructors, so every `Spec` can be run: anything else raises a `SpecError`
with the field, the reason and a hint (`fix` holds the hint as field values, for a user interface). Plain dataclasses,
neither torch nor numpy. Whether a model or a text exists is checked by `fsdp_lab.models.check`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from fsdp_lab.base.errors import SpecError, is_whole, plain_errors
from fsdp_lab.engine.schedule import OffloadPolicy, PrefetchPolicy, Rules
from fsdp_lab.spec.fields import BOOL, check_fields, check_value, matching, one_of, values, whole
from fsdp_lab.spec.link import LinkError, LinkSpec
from fsdp_lab.spec.user_code import UserCode, is_code
from fsdp_lab.spec.workload import Workload

BACKENDS = ("lab", "fsdp2", "fsdp1", "ddp")
YOURS = "yours"  # the backend that is a class of the user's, `Strategy.engine`
ENGINE_FIELD = "strategy.engine"
SHARDINGS = ("full_shard", "shard_grad_op", "zero1", "hybrid_shard", "hybrid_shard_zero2", "no_shard")
DTYPES = ("fp32", "bf16", "fp16")
OFFLOADS = tuple(policy.value for policy in OffloadPolicy)
GATHERS = ("copy", "mapped")
SYNCS = ("every", "last")
PREFETCH_POINTS = ("before", "after")
MOST_RANKS = 1 << 20


_RANKS = values(lambda v: is_whole(v, 1) and v <= MOST_RANKS, f"a whole number from 1 to {MOST_RANKS:,}")


@dataclass(frozen=True, kw_only=True)
class Precision:
    """The dtype of each role; None leaves it as the computation produces it. Master shards are always fp32."""

    param: str = field(
        default="fp32", metadata=one_of(DTYPES)
    )  # unsharded parameters, hence matrix products, activations
    reduce: str = field(default="fp32", metadata=one_of(DTYPES))  # gradients while they are reduced
    output: str | None = field(default=None, metadata=one_of(DTYPES))  # what the root module returns
    buffer: str | None = field(default=None, metadata=one_of(DTYPES))  # floating-point buffers
    # Normalisation layers except BatchNorm, which stays fp32; None: as the other parameters.
    norm: str | None = field(default=None, metadata=one_of(DTYPES))
    # Gradient shards stay in the reduce dtype until the optimizer's step.
    keep_low_precision_gradients: bool = field(default=False, metadata=BOOL)

    def __post_init__(self) -> None:
        check_fields("strategy.precision", self)


PRECISIONS: Mapping[str, Precision] = {
    "fp32": Precision(),
    "bf16": Precision(param="bf16", reduce="fp32"),
    "bf16-pure": Precision(param="bf16", reduce="bf16", buffer="bf16"),
    "fp16": Precision(param="fp16", reduce="fp16"),
}
_PRECISION = values(
    lambda v: isinstance(v, Precision) or (isinstance(v, str) and v in PRECISIONS),
    f"one of {', '.join(PRECISIONS)}, or param, reduce, output and buffer",
)
_WRAP = matching(
    r"block|whole|every:[1-9]\d*|min_params:[1-9]\d*|class:\w+",
    '"block", "every:K", "min_params:N", "class:NAME" or "whole"',
)
_RECOMPUTE = matching(r"none|full|every:[1-9]\d*", '"none", "full" or "every:K"')
_ENGINE = values(
    is_code, 'a class with the methods shard, gather, free and reduce, or its name as "package.module:name"'
)
_SYNC = values(
    lambda v: v in SYNCS if isinstance(v, str) else is_whole(v, 1),
    '"every", "last", or a whole number n of 1 or more: every n-th micro-batch, and the last',
)


@plain_errors
@dataclass(frozen=True, kw_only=True)
class Strategy:
    """How the work is sharded, and by which backend. `Spec` refuses what a backend cannot do."""

    backend: str = field(default="lab", metadata=one_of((*BACKENDS, YOURS)))
    sharding: str = field(default="full_shard", metadata=one_of(SHARDINGS))
    # Ranks in one shard group: the sharding factor F of arXiv 2304.11277, section 3.2.
    shard_size: int | None = field(default=None, metadata=whole(1))
    # Ranks that share the parameters between forward and backward; None: by `sharding`.
    reshard_size: int | None = field(default=None, metadata=whole(1))
    precision: str | Precision = field(default="fp32", metadata=_PRECISION)
    offload: str = field(default="none", metadata=one_of(OFFLOADS))
    # Gathered parameters are copies, or, between ranks of one host, the shards of all ranks where they lie.
    gather: str = field(default="copy", metadata=one_of(GATHERS))
    wrap: str = field(default="block", metadata=_WRAP)
    # Units gathered ahead of the one that computes; None: the backend's own, see `forward_depth`.
    forward_prefetch: int | None = field(default=None, metadata=whole(0))
    backward_prefetch: int = field(default=1, metadata=whole(0))
    # Issued before the backward of the unit that computes, or after it.
    backward_prefetch_point: str = field(default="before", metadata=one_of(PREFETCH_POINTS))
    limit_all_gathers: int = field(default=2, metadata=whole(0))  # in flight (section 3.4); 0: no limit
    # Units whose whole gradients are in flight; the backward waits before it sends one more.
    limit_reductions: int = field(default=1, metadata=whole(1))
    recompute: str = field(default="none", metadata=_RECOMPUTE)  # activations: saved, or recomputed in the backward
    # The micro-batches that communicate; n: every n-th one of a step. The last always does.
    sync: str | int = field(default="every", metadata=_SYNC)
    compile: bool = field(default=False, metadata=BOOL)
    # Code: the class of backend "yours" (fsdp_lab/backends/yours.py); the other backends do not look at it.
    engine: str | Mapping[str, Any] | None = field(default=None, metadata=_ENGINE)

    def __post_init__(self) -> None:
        if callable(self.engine):
            raise SpecError(ENGINE_FIELD, f"{self.engine!r} is refused: a Spec holds what JSON can",
                            'give it to lab.run(engine=...), or its name, as "package.module:name"')  # fmt: skip
        check_fields("strategy", self)
        if isinstance(self.engine, Mapping) and not isinstance(self.engine, UserCode):
            object.__setattr__(self, "engine", UserCode.of(ENGINE_FIELD, self.engine))
        if self.is_yours and self.engine is None:
            raise SpecError(ENGINE_FIELD, "backend yours is a class of your own, and there is none",
                            "give engine=YourClass, with the methods shard, gather, free and reduce",
                            {"backend": "lab"})  # fmt: skip

    @property
    def dtypes(self) -> Precision:
        """The precision with its token resolved."""
        return self.precision if isinstance(self.precision, Precision) else PRECISIONS[self.precision]

    @property
    def is_yours(self) -> bool:
        """Whether the user's own engine shards."""
        return self.backend == YOURS

    # -- the meaning of `sharding`: use these instead of comparing tokens ------------------------------------------

    @property
    def is_replicated(self) -> bool:
        """Every rank holds the whole model."""
        return self.sharding == "no_shard"

    @property
    def is_hybrid(self) -> bool:
        """Replicas of shard groups that are smaller than the world."""
        return self.sharding in ("hybrid_shard", "hybrid_shard_zero2")

    @property
    def shards_optimizer_only(self) -> bool:
        """ZeRO-1: gradients and gathered parameters keep their full size."""
        return self.sharding == "zero1"

    @property
    def reshards_after_forward(self) -> bool:
        """ZeRO-3: parameters are freed after the forward, and gathered again for the backward."""
        return self.sharding in ("full_shard", "hybrid_shard")

    def shard_factor(self, world_size: int) -> int:
        """Ranks that share one copy of the parameters: 1 replicates, world_size shards fully."""
        if self.is_replicated:
            return 1
        if self.is_hybrid:
            return self.shard_size or max(_divisors(world_size), default=world_size)
        return world_size

    @property
    def forward_depth(self) -> int:
        """`forward_prefetch`, with None resolved: the engine's default under lab; 0 under torch's backends, which are then
        left as they come."""
        if self.forward_prefetch is not None:
            return self.forward_prefetch
        return PrefetchPolicy().forward_prefetch if self.backend == "lab" else 0

    @property
    def schedule_rules(self) -> Rules:
        """The rules of the engine's and the planner's `Schedule`."""
        return Rules(
            reshard_after_forward=self.reshards_after_forward,
            forward_prefetch=self.forward_depth,
            backward_prefetch=self.backward_prefetch,
            prefetch_before=self.backward_prefetch_point == "before",
            limit=self.limit_all_gathers,
            limit_reductions=self.limit_reductions,
            offload=OffloadPolicy(self.offload),
        )


@plain_errors
@dataclass(frozen=True, kw_only=True)
class Spec:
    """One thing that can be run: a workload, a strategy and a world size, valid as a whole.

    Raises:
        SpecError: a field, or a combination that the backend cannot do.
    """

    workload: Workload = field(default_factory=Workload)
    strategy: Strategy = field(default_factory=Strategy)
    world_size: int = 2
    devices: tuple[str, ...] | None = None  # per rank: "cpu", "cuda:0"; None: a GPU per rank, or CPUs if there are none
    link: str | None = None  # an emulated link, see link.py: "0.25 GB/s, 50 us", "nvlink of h100"; None: the real wire

    def __post_init__(self) -> None:
        check_value("world_size", self.world_size, _RANKS)
        if self.devices is not None:
            object.__setattr__(self, "devices", _check_devices(self.devices, self.world_size))
        if self.link is not None:
            object.__setattr__(self, "link", _check_link(self.link))
        for rule in _RULES:
            rule(self)

    # -- JSON, both ways ------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists and scalars, from which `Spec.from_dict` makes an equal Spec."""
        d: dict[str, Any] = _plain(dataclasses.asdict(self))
        return d

    @classmethod
    def from_dict(cls, d: Mapping[str, Any]) -> Spec:
        """Raises SpecError for an unknown key or an invalid value."""
        top = _fields("", d, cls)
        parts: dict[str, Any] = {}
        for name, kind in PARTS.items():
            given = top.pop(name, {})
            check_value(name, given, values(lambda v: isinstance(v, Mapping), "an object of fields"))
            parts[name] = kind(**_fields(f"{name}.", given, kind))
        return cls(**parts, **top)

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    @classmethod
    def from_json(cls, text: str) -> Spec:
        """Raises SpecError as `from_dict`, or if the text is not JSON, with the line."""
        try:
            d = json.loads(text)
        except json.JSONDecodeError as e:
            raise SpecError("spec", f"is not JSON (line {e.lineno}: {e.msg})", "correct the text") from None
        if not isinstance(d, dict):
            raise SpecError("spec", "is not a JSON object", 'write {"workload": {...}, "strategy": {...}}')
        return cls.from_dict(d)

    @cached_property
    def id(self) -> str:
        """Eight hex digits; equal Specs have equal ids, in any process."""
        d = self.to_dict()
        if not self.strategy.is_yours:
            del d["strategy"]["engine"]  # nobody uses it
        text = json.dumps(d, sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()

    # -- change ---------------------------------------------------------------------------------------------------

    def replace(self, **changes: Any) -> Spec:
        """A copy with fields replaced, by flat name: `spec.replace(sharding="shard_grad_op", micro_batch=8)`."""
        parts: dict[str, dict[str, Any]] = {"workload": {}, "strategy": {}, "": {}}
        for name, value in changes.items():
            parts[part_of(name)][name] = value
        return Spec(
            workload=parts[""].pop("workload", None) or dataclasses.replace(self.workload, **parts["workload"]),
            strategy=parts[""].pop("strategy", None) or dataclasses.replace(self.strategy, **parts["strategy"]),
            **{"world_size": self.world_size, "devices": self.devices, "link": self.link, **parts[""]},
        )

    def with_code(self, objects: Mapping[str, Any]) -> Spec:
        """The same Spec, with the objects of code that was sent, by digest, where it has none."""
        found = {
            name: value.with_object(objects[value.digest])
            for name, value in self.sent_code().items()
            if value.given is None and value.digest in objects
        }
        return self.replace(**found) if found else self

    def sent_code(self) -> dict[str, UserCode]:
        """Flat field name -> code that was sent, not imported, and that the ranks need."""
        engine = self.strategy.engine if self.strategy.is_yours else None
        return self.workload.sent_code() | ({"engine": engine} if isinstance(engine, UserCode) else {})

    def validate(self, **changes: Any) -> SpecError | None:
        """The error that `replace(**changes)` would raise, or None."""
        try:
            self.replace(**changes)
        except SpecError as e:
            return e
        return None

    def difference(self, other: Spec) -> dict[str, tuple[Any, Any]]:
        """Flat field name -> (own value, other's value), for the fields that differ."""
        own, others = self.flat(), other.flat()
        return {name: (own[name], others[name]) for name in own if own[name] != others[name]}

    def flat(self) -> dict[str, Any]:
        """Every field by its flat name."""
        d = self.to_dict()
        return {**d.pop("workload"), **d.pop("strategy"), **d}

    # -- derived --------------------------------------------------------------------------------------------------

    @property
    def global_batch(self) -> int:
        """Samples a step, over all ranks and micro-batches."""
        return self.workload.micro_batch * self.workload.accumulate * self.world_size

    @property
    def shard_factor(self) -> int:
        """Ranks that share one copy of the parameters: 1 replicates, world_size shards fully."""
        return self.strategy.shard_factor(self.world_size)

    @property
    def sync_interval(self) -> int:
        """Micro-batches from one communication of gradients to the next: 1 is every one, `accumulate` only the last."""
        sync, most = self.strategy.sync, self.workload.accumulate
        if isinstance(sync, int):
            return min(sync, most)
        return 1 if sync == "every" else most

    def communicates(self, micro: int) -> bool:
        """Whether a micro-batch of a step, counted from 0, communicates its gradients and those before it."""
        return (micro + 1) % self.sync_interval == 0 or micro + 1 == self.workload.accumulate

    @property
    def communications(self) -> int:
        """Micro-batches of a step that communicate gradients."""
        return -(-self.workload.accumulate // self.sync_interval)


PARTS: Mapping[str, type[Workload] | type[Strategy]] = {"workload": Workload, "strategy": Strategy}


# -- rules that need the whole Spec: each raises or returns ----------------------------------------------------------

_CAN_SHARD: Mapping[str, tuple[str, ...]] = {
    "lab": SHARDINGS,
    YOURS: ("full_shard", "shard_grad_op", "zero1", "no_shard"),
    "fsdp2": ("full_shard", "shard_grad_op", "hybrid_shard", "hybrid_shard_zero2"),
    "fsdp1": ("full_shard", "shard_grad_op", "hybrid_shard", "hybrid_shard_zero2", "no_shard"),
    "ddp": ("no_shard",),
}
_WHY_NOT: Mapping[tuple[str, str], str] = {
    ("ddp", "*"): "DDP keeps a whole replica on every rank and shards nothing",
    ("fsdp2", "no_shard"): "FSDP2 has no replicated mode",
    ("fsdp2", "zero1"): "FSDP2 always shards the gradients with the parameters",
    ("fsdp1", "zero1"): "FSDP1 always shards the gradients with the parameters",
    (YOURS, "*"): "your engine has one group, that of all ranks",
}


def _invalid(field: str, reason: str, hint: str, other: str = "", /, **fix: Any) -> SpecError:
    """The error for a field of Strategy."""
    return SpecError(f"strategy.{field}", reason, hint, fix, other=other)


def _rule_sharding(spec: Spec) -> None:
    backend, sharding = spec.strategy.backend, spec.strategy.sharding
    can = _CAN_SHARD[backend]
    if sharding in can:
        return
    why = _WHY_NOT.get((backend, sharding)) or _WHY_NOT[(backend, "*")]
    instead = " or ".join([", ".join(can[:-1]), can[-1]] if len(can) > 1 else can)
    hint = f"use sharding {instead}" + ("" if sharding != "no_shard" else ", or backend ddp")
    raise _invalid("sharding", f"{sharding} is not available with {backend}: {why}", hint, sharding=can[0])


def _rule_shard_size(spec: Spec) -> None:
    sharding, size, world = spec.strategy.sharding, spec.strategy.shard_size, spec.world_size
    if not spec.strategy.is_hybrid:
        whole = 1 if spec.strategy.is_replicated else world
        if size not in (None, whole):
            raise _invalid("shard_size", f"{size} has no meaning with {sharding}: its groups are of {whole}",
                           "leave it empty, or choose hybrid_shard", shard_size=None)  # fmt: skip
        return
    factors = _divisors(world)
    if not factors:
        enough = next(n for n in range(max(4, world), 2 * world + 4) if _divisors(n))
        raise _invalid("sharding", f"{sharding} needs a shard size between 1 and world_size that divides it, and {world} "
                       f"ranks have none", f"use {enough} ranks, or full_shard", world_size=enough)  # fmt: skip
    if size is not None and size not in factors:
        raise _invalid("shard_size", f"{size} is not a divisor of {world} between 1 and {world}",
                       f"use one of {', '.join(map(str, factors))}", shard_size=factors[-1])  # fmt: skip


def _rule_offload(spec: Spec) -> None:
    s = spec.strategy
    if s.offload == "none" or s.backend == "lab":
        return
    if s.backend == "ddp":
        raise _invalid("offload", "DDP keeps parameters, gradients and optimizer state on the device",
                       "use offload none", "backend lab", offload="none")  # fmt: skip
    if s.offload == "optimizer":
        raise _invalid("offload", f"{s.backend} moves parameters, gradients and optimizer state together",
                       "use offload all or none", "backend lab", offload="all")  # fmt: skip


def _rule_gather(spec: Spec) -> None:
    s, fix = spec.strategy, {"gather": "copy"}
    if s.gather == "copy":
        return
    is_cast = s.dtypes.param != "fp32" or s.dtypes.norm not in (None, "fp32")
    for is_so, why, hint in (
        (s.backend != "lab", f"{s.backend} copies what it gathers", "use copy, or backend lab"),
        (s.is_replicated, "nothing is gathered with no_shard", "use copy, or another sharding"),
        (s.offload != "none", "what is offloaded is copied to be gathered", "use copy, or offload none"),
        (is_cast, "shards are fp32, and these are gathered in another precision", "use copy, or precision fp32"),
        (s.reshard_size is not None, "nothing is kept between forward and backward", "use copy, or no reshard_size"),
        (any(d != "cpu" for d in spec.devices or ()), "GPUs do not share memory", "use copy, or ranks on CPUs"),
        (spec.link is not None, "over an emulated link what is gathered would have to be sent", "use copy, or no link"),
    ):
        if is_so:
            raise _invalid("gather", f"mapped is not possible here: {why}", hint, **fix)


def _rule_sync(spec: Spec) -> None:
    s, param = spec.strategy, spec.strategy.dtypes.param
    if s.backend != "fsdp1" or spec.sync_interval == 1:
        return
    if s.offload != "none":
        raise _invalid("sync", "FSDP1 cannot accumulate without communication while it offloads", "use sync every",
                       sync="every")  # fmt: skip
    if spec.shard_factor == 1 and param != "fp32":
        raise _invalid("sync", f"FSDP1 that shards nothing cannot keep gradients in {param} for a later micro-batch",
                       "use sync every, or backend ddp", sync="every")  # fmt: skip


# Field of Precision, backends that do not support it, values that they accept, reason, hint.
_PRECISION_LIMITS: tuple[tuple[str, tuple[str, ...], tuple[Any, ...], str, str], ...] = (
    ("output", ("ddp", "fsdp1"), (None,), "has no dtype for outputs", "leave it empty"),
    ("norm", BACKENDS[1:], (None,), "has no dtype of their own for normalisation layers",
     "leave it empty"),
    ("keep_low_precision_gradients", ("ddp", "fsdp2"), (False,), "keeps gradients in fp32",
     "leave it false"),
    ("keep_low_precision_gradients", ("fsdp1",), (False,),
     "gives the optimizer low gradients as they are, and torch's AdamW wants those of fp32 parameters in fp32",
     "leave it false"),
)  # fmt: skip


def _rule_precision(spec: Spec) -> None:
    backend, precision = spec.strategy.backend, spec.strategy.precision
    if isinstance(precision, str):
        return  # a token means, in each backend, what the backend has of it
    for name, backends, allowed, reason, hint in _PRECISION_LIMITS:
        if backend in backends and getattr(precision, name) not in allowed:
            instead = dataclasses.replace(precision, **{name: allowed[0]})
            other = "" if name == "output" else "use backend lab"
            raise _invalid(f"precision.{name}", f"{backend} {reason}", hint, other, precision=instead)


def _rule_units(spec: Spec) -> None:
    backend, wrap = spec.strategy.backend, spec.strategy.wrap
    if backend == "ddp" and wrap not in ("block", "whole"):
        raise _invalid("wrap", "DDP has no units to wrap", "use block", wrap="block")
    if backend == "fsdp1" and wrap.startswith("every:") and wrap != "every:1":
        raise _invalid(
            "wrap", "an FSDP1 unit is one module, not several blocks", "use block", "backend lab", wrap="block"
        )


def _rule_reshard_size(spec: Spec) -> None:
    s, size, world = spec.strategy, spec.strategy.reshard_size, spec.world_size
    if size is None:
        return
    sizes, other = _divisors(world), ""
    if s.backend not in ("lab", "fsdp2"):
        reason, hint, other = f"{s.backend} cannot reshard to a smaller group", "leave it empty", "use backend lab"
    elif s.sharding != "full_shard":
        reason = f"{s.sharding} does not reshard over all ranks after the forward"
        hint = "leave it empty, or use full_shard"
    elif size not in sizes:
        reason = f"{size} is not a divisor of {world} between 1 and {world}"
        hint = f"use one of {', '.join(map(str, sizes))}, or leave it empty" if sizes else "leave it empty"
    else:
        return
    raise _invalid("reshard_size", reason, hint, other, reshard_size=None)


def _rule_overlap(spec: Spec) -> None:
    s, backend = spec.strategy, spec.strategy.backend
    if backend == "lab" or s.is_yours:
        return
    if backend != "fsdp1" and s.backward_prefetch_point != "before":
        raise _invalid("backward_prefetch_point", f"{backend} has no choice of it", "use before", "backend lab",
                       backward_prefetch_point="before")  # fmt: skip
    if backend == "ddp" and s.forward_depth:
        raise _invalid("forward_prefetch", "DDP gathers no parameters", "use 0", forward_prefetch=0)
    for name, depth in (("forward_prefetch", s.forward_depth), ("backward_prefetch", s.backward_prefetch)):
        if backend == "fsdp1" and depth > 1:
            fix: dict[str, Any] = {name: 1}
            raise _invalid(name, "FSDP1 prefetches one unit ahead at most", "use 0 or 1", **fix)
    if backend == "fsdp2" and s.backward_prefetch < 1:
        raise _invalid(
            "backward_prefetch", "FSDP2 always prefetches in the backward", "use 1 or more", backward_prefetch=1
        )
    limits, why = {
        "fsdp1": ((0, 2), "FSDP1's limiter is on, at 2, or off"),
        "fsdp2": ((2,), "FSDP2 has no limiter to set"),
        "ddp": ((2,), "DDP gathers no parameters"),
    }[backend]
    if s.limit_all_gathers not in limits:
        raise _invalid("limit_all_gathers", why, f"use {' or '.join(map(str, limits))}", limit_all_gathers=2)
    if backend in ("fsdp1", "ddp") and s.limit_reductions != 1:
        raise _invalid("limit_reductions", f"{backend} has no limit to set", "use 1", "backend lab",
                       limit_reductions=1)  # fmt: skip


def _rule_optimizer(spec: Spec) -> None:
    optimizer, why = spec.workload.torch_optimizer, "does not take DTensors, which are FSDP2's parameters"
    if spec.strategy.backend != "fsdp2":
        return
    if optimizer.is_fused and optimizer.class_name in ("SGD", "Adagrad"):
        raise SpecError("workload.optimizer_args", f"torch's fused {optimizer.class_name} {why}",
                        "leave fused out", optimizer.without("fused"), other="use backend lab")  # fmt: skip
    if optimizer.class_name == "Rprop":
        raise SpecError("workload.optimizer", f"torch's Rprop {why}", "use adamw",
                        {"optimizer": "adamw", "optimizer_args": {}}, other="backend lab")  # fmt: skip


def _rule_dropout(spec: Spec) -> None:
    if spec.strategy.compile and spec.workload.dropout != "off":
        raise _invalid("compile", "a compiler draws dropout's masks in its own way, so that they would not be those of "
                       "other Specs", "use compile false, or dropout off", compile=False)  # fmt: skip


# Of backend yours: fields of Strategy that keep their default, and why.
_NOT_YOURS: Mapping[str, str] = {
    "precision": "your engine trains in fp32",
    "offload": "your engine keeps everything on the device",
    "reshard_size": "your engine has one group, that of all ranks",
    "forward_prefetch": "your engine is asked for one unit ahead, if it has the method prefetch",
    "backward_prefetch": "your engine is asked for one unit ahead, if it has the method prefetch",
    "backward_prefetch_point": "your engine is asked before the backward of the unit that computes",
    "limit_all_gathers": "your engine is asked for one unit ahead at most",
    "limit_reductions": "your engine is asked to reduce one unit at a time",
    "compile": "the lab calls your engine from hooks that a compiler would leave out",
}


def _rule_yours(spec: Spec) -> None:
    if not spec.strategy.is_yours:
        return
    for f in dataclasses.fields(Strategy):
        if f.name in _NOT_YOURS and getattr(spec.strategy, f.name) != f.default:
            fix: dict[str, Any] = {f.name: f.default}
            raise _invalid(f.name, _NOT_YOURS[f.name], f"leave it at {f.default}", **fix)
    for name in ("freeze", "lora"):
        if getattr(spec.workload, name) is not None:
            raise SpecError(f"workload.{name}", "your engine is given parameters that are all trained",
                            "leave it out", {name: None}, other="use backend lab")  # fmt: skip


_RULES: tuple[Callable[[Spec], None], ...] = (
    _rule_yours,
    _rule_sharding,
    _rule_shard_size,
    _rule_offload,
    _rule_gather,
    _rule_sync,
    _rule_precision,
    _rule_units,
    _rule_reshard_size,
    _rule_overlap,
    _rule_optimizer,
    _rule_dropout,
)


def _divisors(world_size: int) -> list[int]:
    """The group sizes above 1 and below `world_size` that divide it, ascending."""
    small = [n for n in range(2, math.isqrt(world_size) + 1) if world_size % n == 0]
    return sorted({*small, *(world_size // n for n in small)})


# -- devices, link and dicts -----------------------------------------------------------------------------------------


def _check_devices(devices: Any, world_size: int) -> tuple[str, ...]:
    if isinstance(devices, str) or not isinstance(devices, Sequence) or len(devices) != world_size:
        only_cpu = isinstance(devices, (str, Sequence)) and bool(devices) and all(d == "cpu" for d in devices)
        instead = ["cpu"] * world_size if only_cpu else None
        raise SpecError("devices", f"{devices!r} does not name one device for each of {world_size} ranks",
                        'give a list such as ["cuda:0", "cuda:1"], or nothing', {"devices": instead})  # fmt: skip
    for d in devices:
        check_value("devices", d, matching(r"cpu|cuda:\d+", '"cpu" or "cuda:N" for each rank'))
    if len({d == "cpu" for d in devices}) > 1:
        raise SpecError("devices", "ranks on CPUs and on GPUs cannot share one model", "choose one kind",
                        {"devices": None})  # fmt: skip
    return tuple(devices)


def _check_link(text: Any) -> str:
    """The link in canonical spelling, so that equal links make equal Specs."""
    try:
        return LinkSpec.parse(text).text
    except LinkError as e:
        raise SpecError("link", e.reason, e.hint, {"link": None}) from None


def _fields(prefix: str, given: Mapping[str, Any], kind: type) -> dict[str, Any]:
    """The fields of `kind`; a precision given as a dict becomes a `Precision`."""
    names = [f.name for f in dataclasses.fields(kind)]
    for name in given:
        if name not in names:
            raise SpecError(f"{prefix}{name}", "there is no such field", f"the fields are {', '.join(names)}")
    fields = dict(given)
    if isinstance(fields.get("precision"), Mapping):
        fields["precision"] = Precision(**_fields("strategy.precision.", fields["precision"], Precision))
    return fields


def part_of(name: str) -> str:
    """The part with a flat field name: "workload", "strategy", or "" for the Spec itself. Raises SpecError."""
    for part, kind in {**PARTS, "": Spec}.items():
        if name in {f.name for f in dataclasses.fields(kind)}:
            return part
    raise SpecError(name, "there is no such field", "see the fields of Workload, Strategy and Spec")


def check_field(name: str, value: Any) -> None:
    """Raises SpecError for a value that a field of Workload or of Strategy refuses by itself."""
    part = part_of(name)
    known = {f.name: f for f in dataclasses.fields(PARTS[part])}[name]
    if value is not known.default:
        check_value(f"{part}.{name}", value, known.metadata)


def _plain(value: Any) -> Any:
    """Mappings as dicts and sequences as lists, recursively."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value
