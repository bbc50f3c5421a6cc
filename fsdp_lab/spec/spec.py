"""How it is sharded, `Strategy`, and what can be run: `Spec`, of a `Workload`, a `Strategy` and a world size.

The three are frozen and validated by their constructors, so every `Spec` can be run: anything else raises a `SpecError`
with the field, the reason and a hint (`fix` holds the hint as field values, for a user interface). Plain dataclasses,
neither torch nor numpy. Whether a model or a text exists is checked by `fsdp_lab.models.check`."""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

from fsdp_lab.base.errors import SpecError, is_whole
from fsdp_lab.engine.schedule import OffloadPolicy, PrefetchPolicy, Rules
from fsdp_lab.spec import fields
from fsdp_lab.spec.fields import BOOL, FieldRow, Limit, check_value, knob, one_of, only, rows_of, values, whole
from fsdp_lab.spec.link import OFFERED, LinkError, LinkSpec
from fsdp_lab.spec.user_code import UserCode, code_name, is_code
from fsdp_lab.spec.workload import Workload

YOURS = "yours"  # the backend that is a class of the user's, `Strategy.engine`
ENGINE_FIELD = "strategy.engine"
SHARDINGS = ("full_shard", "shard_grad_op", "zero1", "hybrid_shard", "hybrid_shard_zero2", "no_shard")
DTYPES = ("fp32", "bf16", "fp16")
OFFLOADS = tuple(policy.value for policy in OffloadPolicy)
GATHERS = ("copy", "mapped")
SYNCS = ("every", "last")
PREFETCH_POINTS = ("before", "after")
MOST_RANKS = 1 << 20


@dataclass(frozen=True, kw_only=True)
class BackendTraits:
    """The traits of a backend, for all that treat backends differently. Rows of fields have what else it lacks."""

    title: str
    shardings: tuple[str, ...]  # the first is proposed instead of another one
    why_not: Mapping[str, str] = field(default_factory=dict)  # another sharding, or "" for any -> why not
    own_prefetch: str = "torch's own"  # what a `forward_prefetch` of None means; "": the engine's default
    has_units: bool = True  # it gathers and reduces units; DDP reduces buckets
    autocasts: bool = False  # it computes in low precision by autocast
    takes_scalars: bool = True  # parameters without dimensions
    needs_gradients: bool = False  # of every parameter in every step
    reduces_own: bool = False  # it reduces only the gradients that a rank has
    runs_ahead: bool = False  # its host runs ahead of a GPU; on a CPU, which has no streams, it waits for collectives
    copies_gathered: bool = False  # it gathers to one buffer and copies from there


_BY_FSDP = ("full_shard", "shard_grad_op", "hybrid_shard", "hybrid_shard_zero2")
# fmt: off
BACKEND_TRAITS: Mapping[str, BackendTraits] = {
    "lab": BackendTraits(title="our engine", shardings=SHARDINGS, own_prefetch=""),
    "fsdp2": BackendTraits(
        title="FSDP2", shardings=_BY_FSDP, takes_scalars=False, reduces_own=True, runs_ahead=True, copies_gathered=True,
        why_not={"no_shard": "FSDP2 has no replicated mode",
                 "zero1": "FSDP2 always shards the gradients with the parameters"},
    ),
    "fsdp1": BackendTraits(
        title="FSDP1", shardings=(*_BY_FSDP, "no_shard"), takes_scalars=False, runs_ahead=True,
        why_not={"zero1": "FSDP1 always shards the gradients with the parameters"},
    ),
    "ddp": BackendTraits(
        title="DDP", shardings=("no_shard",), has_units=False, autocasts=True, needs_gradients=True,
        why_not={"": "DDP keeps a whole replica on every rank and shards nothing"},
    ),
    YOURS: BackendTraits(
        title="your engine", shardings=("full_shard", "shard_grad_op", "zero1", "no_shard"), own_prefetch="your own",
        why_not={"": "your engine has one group, that of all ranks"},
    ),
}
# fmt: on
BACKENDS = tuple(name for name in BACKEND_TRAITS if name != YOURS)

_RANKS = values(lambda v: is_whole(v, 1) and v <= MOST_RANKS, f"a whole number from 1 to {MOST_RANKS:,}")
_KEEPS_FP32 = "{} keeps gradients in fp32"
_KEEPS_LOW = (
    "{} gives the optimizer low gradients as they are, and torch's AdamW wants those of fp32 parameters in fp32"
)


@fields.documented()
@dataclass(frozen=True, kw_only=True)
class Precision:
    """The dtype of each role; None leaves it as the computation produces it. Master shards are always fp32."""

    # fmt: off
    param: str = knob("fp32", one_of(DTYPES), help="Unsharded parameters, hence matrix products and activations")
    reduce: str = knob("fp32", one_of(DTYPES), help="Gradients while they are reduced")
    output: str | None = knob(
        None, one_of(DTYPES), only("ddp fsdp1", (None,), "{} has no dtype for outputs", "leave it empty"),
        help="What the root module returns",
    )
    buffer: str | None = knob(None, one_of(DTYPES), help="Floating-point buffers")
    norm: str | None = knob(
        None, one_of(DTYPES), only("fsdp2 fsdp1 ddp", (None,), "{} has no dtype of their own for normalisation layers",
                                   "leave it empty", other="use backend lab"),
        help="Normalisation layers except BatchNorm, which stays fp32; auto: as the other parameters",
    )
    keep_low_precision_gradients: bool = knob(
        False, BOOL, only("ddp fsdp2", (False,), _KEEPS_FP32, "leave it false", other="use backend lab"),
        only("fsdp1", (False,), _KEEPS_LOW, "leave it false", other="use backend lab"),
        help="Gradient shards stay in the reduce dtype until the optimizer's step",
    )
    # fmt: on

    def __post_init__(self) -> None:
        fields.check_fields("strategy.precision", self)


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
_WRAP = fields.matching(
    r"block|whole|every:[1-9]\d*|min_params:[1-9]\d*|class:\w+",
    '"block", "every:K", "min_params:N", "class:NAME" or "whole"',
)
_RECOMPUTE = fields.matching(r"none|full|every:[1-9]\d*", '"none", "full" or "every:K"')
_ENGINE = values(
    is_code, 'a class with the methods shard, gather, free and reduce, or its name as "package.module:name"'
)
_SYNC = values(
    lambda v: v in SYNCS if isinstance(v, str) else is_whole(v, 1),
    '"every", "last", or a whole number n of 1 or more: every n-th micro-batch, and the last',
)
_ONE_AHEAD = "your engine is asked for one unit ahead, if it has the method prefetch"
_FSDP1_ONE_AHEAD = "FSDP1 prefetches one unit ahead at most"


def _group_sizes(now: Mapping[str, Any]) -> Sequence[int | None]:
    return (None, *sorted({1, *_divisors(now["world_size"]), now["world_size"]}))


@fields.documented()
@dataclass(frozen=True, kw_only=True)
class Strategy:
    """How the work is sharded, and by which backend. `Spec` refuses what a backend cannot do."""

    # fmt: off
    backend: str = knob("lab", one_of((*BACKENDS, YOURS)), group="Sharding", help="Whose engine shards", tokens=BACKENDS,
                        choices=lambda now: (*BACKENDS, YOURS) if now.get("engine") else BACKENDS, bare=True, in_name=True)
    sharding: str = knob(
        "full_shard", one_of(SHARDINGS), group="Sharding", help="What a rank holds a shard of", bare=True, in_name=True
    )
    # The sharding factor F of arXiv 2304.11277, section 3.2.
    shard_size: int | None = knob(
        None, whole(1), group="Sharding", help="Ranks in one shard group of hybrid sharding", choices=_group_sizes
    )
    # Ranks that a unit is resharded over after its forward; None: as `sharding` says.
    reshard_size: int | None = knob(
        None, whole(1),
        only(YOURS, (None,), "your engine has one group, that of all ranks"),
        only("fsdp1 ddp", (None,), "{} cannot reshard to a smaller group", "leave it empty", other="use backend lab"),
        group="Sharding", help="Ranks that share the parameters between forward and backward", planned=True,
        choices=_group_sizes,
    )
    precision: str | Precision = knob(
        "fp32", _PRECISION, only(YOURS, ("fp32",), "your engine trains in fp32"), group="Sharding",
        help="dtype of computing and of reducing gradients", tokens=tuple(PRECISIONS), bare=True, in_name=True,
    )
    offload: str = knob(
        "none", one_of(OFFLOADS),
        only(YOURS, ("none",), "your engine keeps everything on the device"),
        only("ddp", ("none",), "DDP keeps parameters, gradients and optimizer state on the device", "use offload none",
             other="backend lab"),
        only("fsdp2 fsdp1", ("none", "all"), "{} moves parameters, gradients and optimizer state together",
             "use offload all or none", fix="all", other="backend lab"),
        group="Sharding", help="What is kept in the host's memory between uses", off="none", in_name=True,
    )
    # Gathered parameters are copies, or, between ranks of one host, the shards of all ranks where they lie.
    gather: str = knob(
        "copy", one_of(GATHERS),
        only("fsdp2 fsdp1 ddp yours", ("copy",), "mapped is not possible here: {} copies what it gathers", "use copy",
             other="backend lab"),
        group="Sharding", help="Copies, or the shards where they lie, on CPUs of one host", planned=True, off="copy",
        in_name=True,
    )
    wrap: str = knob(
        "block", _WRAP,
        only("ddp", ("block", "whole"), "DDP has no units to wrap", "use block"),
        Limit(of=("fsdp1",), allows=lambda v: not v.startswith("every:") or v == "every:1", fix="block",
              why="an FSDP1 unit is one module, not several blocks", hint="use block", other="backend lab"),
        group="Sharding", help="Modules that are gathered and freed as one unit",
        others="block; every:K, so many blocks; min_params:N, the smallest modules of N parameters or more, such as "
               "min_params:100000; class:NAME, each module of a class; whole",
        choices=("block", "every:2", "every:4", "min_params:100000", "whole"),
    )
    # Units gathered ahead of the one that computes; None: the backend's own, see `forward_depth`.
    forward_prefetch: int | None = knob(
        None, whole(0),
        only(YOURS, (None,), _ONE_AHEAD),
        only("ddp", (None, 0), "DDP gathers no parameters", "use 0", fix=0),
        only("fsdp1", (None, 0, 1), _FSDP1_ONE_AHEAD, "use 0 or 1", fix=1),
        group="Schedule", help="Units gathered ahead in the forward", choices=(None, 0, 1, 2, 3), typed="4",
        automatic=lambda now: BACKEND_TRAITS[now["backend"]].own_prefetch or str(PrefetchPolicy().forward_prefetch),
    )
    backward_prefetch: int = knob(
        1, whole(0),
        only(YOURS, (1,), _ONE_AHEAD),
        only("fsdp1", (1, 0), _FSDP1_ONE_AHEAD, "use 0 or 1"),
        Limit(of=("fsdp2",), allows=lambda v: v >= 1, fix=1, why="FSDP2 always prefetches in the backward",
              hint="use 1 or more", other=""),
        group="Schedule", help="Units gathered ahead in the backward", most=16,
    )
    # Issued before the backward of the unit that computes, or after it.
    backward_prefetch_point: str = knob(
        "before", one_of(PREFETCH_POINTS),
        only(YOURS, ("before",), "your engine is asked before the backward of the unit that computes"),
        only("fsdp2 ddp", ("before",), "{} has no choice of it", "use before", other="backend lab"),
        group="Schedule", label="prefetch point", help="Before or after the backward of a unit", planned=True,
    )
    # In flight (section 3.4); 0: no limit.
    limit_all_gathers: int = knob(
        2, whole(0),
        only(YOURS, (2,), "your engine is asked for one unit ahead at most"),
        only("fsdp1", (2, 0), "FSDP1's limiter is on, at 2, or off", "use 0 or 2"),
        only("fsdp2", (2,), "FSDP2 has no limiter to set", "use 2"),
        only("ddp", (2,), "DDP gathers no parameters", "use 2"),
        group="Schedule", label="gathers in flight", help="All-gathers in flight; 0: no limit", planned=True, most=64,
    )
    # Units whose whole gradients are in flight; the backward waits before it sends one more.
    limit_reductions: int = knob(
        1, whole(1),
        only(YOURS, (1,), "your engine is asked to reduce one unit at a time"),
        only("fsdp1 ddp", (1,), "{} has no limit to set", "use 1", other="backend lab"),
        group="Schedule", label="reductions in flight", help="Units whose gradients are in flight", planned=True, most=64,
    )
    recompute: str = knob("none", _RECOMPUTE, group="Schedule", help="Activations that the backward computes again",
                          others="none; full; every:K, of each K-th block", choices=("none", "every:2", "full"), off="none")
    # The micro-batches that communicate; n: every n-th one of a step. The last always does.
    sync: str | int = knob(
        "every", _SYNC, group="Schedule", help="Micro-batches that communicate", tokens=SYNCS,
        others="or n: every n-th micro-batch", choices=("every", 2, 4, 8, "last"), typed="3", live=True,
        text=lambda v: f"every {v}" if isinstance(v, int) else str(v),
    )
    compile: bool = knob(
        False, BOOL, only(YOURS, (False,), "the lab calls your engine from hooks that a compiler would leave out"),
        group="Schedule", help="torch.compile of each block", planned=True, choices=(False, True),
    )
    # The other backends do not look at it.
    engine: str | Mapping[str, Any] | None = knob(
        None, _ENGINE, help="The class of backend yours", none="off", code=True, in_name=True, text=code_name
    )
    # fmt: on

    def __post_init__(self) -> None:
        fields.check_fields("strategy", self)
        if self.is_yours and self.engine is None:
            reason = "backend yours is a class of your own, and there is none"
            hint = "give engine=YourClass, with the methods shard, gather, free and reduce"
            raise SpecError(ENGINE_FIELD, reason, hint, {"backend": "lab"})

    @property
    def dtypes(self) -> Precision:
        """The precision with its token resolved."""
        return self.precision if isinstance(self.precision, Precision) else PRECISIONS[self.precision]

    @property
    def traits(self) -> BackendTraits:
        """The traits of its backend: use these and the next two instead of comparing tokens."""
        return BACKEND_TRAITS[self.backend]

    @property
    def is_lab(self) -> bool:
        """True if our own engine shards."""
        return self.backend == "lab"

    @property
    def is_yours(self) -> bool:
        """True if the user's own engine shards."""
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
        return PrefetchPolicy().forward_prefetch if self.is_lab else 0

    @property
    def reshards(self) -> bool | int:
        """Whether parameters are freed after the forward, or the number of ranks that share them until the backward, if
        not all do."""
        return self.reshard_size or self.reshards_after_forward

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


@fields.documented(Workload, Strategy)
@dataclass(frozen=True, kw_only=True)
class Spec:
    """One thing that can be run: a workload, a strategy and a world size, valid as a whole. Raises SpecError for a field, or
    a combination that the backend cannot do."""

    workload: Workload = field(default_factory=Workload)
    strategy: Strategy = field(default_factory=Strategy)
    world_size: int = knob(
        2, _RANKS, group="Workload", label="ranks", help="A change takes seconds; training goes on", least=1, most=256
    )
    # Per rank: "cpu", "cuda:0"; None: a GPU per rank, or CPUs if there are none.
    devices: tuple[str, ...] | None = knob(
        None, FieldRow(), group="Workload", help="auto, or one a rank: cuda:0, cuda:1. A change takes seconds"
    )
    # An emulated link, see link.py: "0.25 GB/s, 50 us", "nvlink of h100"; None: the real wire.
    # fmt: off
    link: str | None = knob(
        None, FieldRow(), group="Schedule", help="Emulate a slower interconnect; a GPU's is scaled to this machine",
        none="off", choices=(None, *OFFERED), typed="0.25 GB/s, 50 us", in_name=True, live=True,
    )
    # fmt: on

    def __post_init__(self) -> None:
        check_value("world_size", self.world_size, FIELDS["world_size"])
        if self.devices is not None:
            object.__setattr__(self, "devices", _check_devices(self.devices, self.world_size))
        if self.link is not None:
            object.__setattr__(self, "link", _check_link(self.link))
        for rule in _RULES:
            rule(self)

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists and scalars, from which `Spec.from_dict` makes an equal Spec."""
        d: dict[str, Any] = plain(dataclasses.asdict(self))
        return d

    @classmethod
    def from_dict(cls, d: Mapping[str, Any]) -> Spec:
        """The dict may be as `to_dict` makes it, or have all fields by their flat names. Raises SpecError for an unknown key
        or an invalid value."""
        top = _fields("", {name: value for name, value in d.items() if part_of(name, "") == ""}, cls)
        parts: dict[str, Any] = {}
        for name, kind in PARTS.items():
            given = top.pop(name, {})
            check_value(name, given, values(lambda v: isinstance(v, Mapping), "an object of fields"))
            flat = {one: value for one, value in d.items() if part_of(one, "") == name}
            parts[name] = kind(**_fields(f"{name}.", {**given, **flat}, kind))
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

    def __repr__(self) -> str:
        """What differs from the default, as code that makes an equal Spec; code of the user's by its name."""
        changed = {name: own for name, (own, _) in self.difference(Spec()).items()}
        changed |= {name: code_name(value) for name, value in changed.items() if FIELDS[name].code and is_code(value)}
        if "precision" in changed:
            changed["precision"] = self.strategy.precision
        return f"Spec().replace({', '.join(f'{name}={v!r}' for name, v in changed.items())})" if changed else "Spec()"

    def _repr_html_(self) -> str:
        """Every field with its value and what it is; what differs from the default in bold."""
        return fields.html_table(self.flat(), FIELDS, set(self.difference(Spec())))

    @cached_property
    def id(self) -> str:
        """Eight hex digits; equal Specs have equal ids, in any process."""
        d = self.to_dict()
        if not self.strategy.is_yours:
            del d["strategy"]["engine"]  # nobody uses it
        text = json.dumps(d, sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()

    def replace(self, **changes: Any) -> Spec:
        """A copy with fields replaced, by flat name: `spec.replace(sharding="shard_grad_op", micro_batch=8)`; also
        by the names of transformers' Trainer where they mean the same (`fsdp_lab.spec.fields.ALIASES`)."""
        parts: dict[str, dict[str, Any]] = {"workload": {}, "strategy": {}, "": {}}
        for name, value in fields.own_names(changes).items():
            parts[part_of(name)][name] = value
        return Spec(
            workload=parts[""].pop("workload", None) or dataclasses.replace(self.workload, **parts["workload"]),
            strategy=parts[""].pop("strategy", None) or dataclasses.replace(self.strategy, **parts["strategy"]),
            **{"world_size": self.world_size, "devices": self.devices, "link": self.link, **parts[""]},
        )

    def with_code(self, objects: Mapping[str, Any]) -> Spec:
        """The same Spec, with the objects of code that was sent, by digest, where it has none."""
        lacking = {n: code for n, code in self.sent_code().items() if code.given is None and code.digest in objects}
        known = {name: code.with_object(objects[code.digest]) for name, code in lacking.items()}
        return self.replace(**known) if known else self

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

    def refused_by(self, name: str) -> SpecError | None:
        """The error for the first field that a backend does not support, or a target of an export, by the fields' rows."""
        parts: dict[str, Any] = {"strategy": self.strategy, "workload": self.workload}
        if isinstance(self.strategy.precision, Precision):  # a token means, in each backend, what the backend has of it
            parts["strategy.precision"] = self.strategy.precision
        for prefix, part in parts.items():
            for known, limit in _limits(name, prefix):
                if not limit.allows(getattr(part, known)):
                    fix = {known: limit.fix}
                    if isinstance(part, Precision):
                        fix = {"precision": dataclasses.replace(part, **fix)}
                    return SpecError(f"{prefix}.{known}", limit.why.format(name), limit.hint, fix, other=limit.other)
        return None

    def difference(self, other: Spec) -> dict[str, tuple[Any, Any]]:
        """Flat field name -> (own value, other's value), for the fields that differ."""
        own, others = self.flat(), other.flat()
        return {name: (own[name], others[name]) for name in own if own[name] != others[name]}

    def flat(self) -> dict[str, Any]:
        """Every field by its flat name."""
        d = self.to_dict()
        return {**d.pop("workload"), **d.pop("strategy"), **d}

    @property
    def rank_samples(self) -> int:
        """Samples a step of one rank, over all micro-batches."""
        return self.workload.micro_batch * self.workload.accumulate

    @property
    def global_batch(self) -> int:
        """Samples a step, over all ranks and micro-batches."""
        return self.rank_samples * self.world_size

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
        """Returns whether a micro-batch of a step, counted from 0, communicates its gradients and those before it."""
        return (micro + 1) % self.sync_interval == 0 or micro + 1 == self.workload.accumulate

    @property
    def communications(self) -> int:
        """Micro-batches of a step that communicate gradients."""
        return -(-self.workload.accumulate // self.sync_interval)


PARTS: Mapping[str, type[Workload] | type[Strategy]] = {"workload": Workload, "strategy": Strategy}
# Every field by its flat name, in the order of `Spec.flat`.
FIELDS: Mapping[str, FieldRow] = {**rows_of(Workload), **rows_of(Strategy), **rows_of(Spec)}


def fields_with(trait: str) -> tuple[str, ...]:
    """The names of the fields whose rows have an attribute that is not empty: `fields_with("live")`."""
    return tuple(name for name, row in FIELDS.items() if getattr(row, trait))


@cache
def _limits(name: str, part: str) -> tuple[tuple[str, Limit], ...]:
    """The (field, limit) pairs of a backend, or of a target of an export, in a part."""
    kind = PARTS.get(part, Precision)
    return tuple((field, one) for field, row in rows_of(kind).items() for one in row.limits if name in one.of)


# -- rules that need the whole Spec: each raises or returns ----------------------------------------------------------


def _invalid(field: str, reason: str, hint: str, other: str = "", /, **fix: Any) -> SpecError:
    """The error for a field of Strategy."""
    return SpecError(f"strategy.{field}", reason, hint, fix, other=other)


def _rule_sharding(spec: Spec) -> None:
    """The sharding is one of the backend's, the shard size one of the sharding's, and other fields the backend has."""
    s, traits, world = spec.strategy, spec.strategy.traits, spec.world_size
    sharding, size = s.sharding, s.shard_size
    if sharding not in traits.shardings:
        why = traits.why_not.get(sharding) or traits.why_not[""]
        *first, last = traits.shardings
        instead = f"{', '.join(first)} or {last}" if first else last
        reason = f"{sharding} is not available with {s.backend}: {why}"
        hint = f"use sharding {instead}" + ("" if sharding != "no_shard" else ", or backend ddp")
        raise _invalid("sharding", reason, hint, sharding=traits.shardings[0])
    whole, factors = 1 if s.is_replicated else world, _divisors(world) if s.is_hybrid else []
    if not s.is_hybrid and size not in (None, whole):
        reason = f"{size} has no meaning with {sharding}: its groups are of {whole}"
        raise _invalid("shard_size", reason, "leave it empty, or choose hybrid_shard", shard_size=None)
    if s.is_hybrid and not factors:
        enough = next(n for n in range(max(4, world), 2 * world + 4) if _divisors(n))
        why = f"needs a shard size between 1 and world_size that divides it, and {world} ranks have none"
        raise _invalid("sharding", f"{sharding} {why}", f"use {enough} ranks, or full_shard", world_size=enough)
    if s.is_hybrid and size is not None and size not in factors:
        reason = f"{size} is not a divisor of {world} between 1 and {world}"
        raise _invalid("shard_size", reason, f"use one of {', '.join(map(str, factors))}", shard_size=factors[-1])
    if (refused := spec.refused_by(s.backend)) is not None:
        raise refused


def _rule_gather(spec: Spec) -> None:
    s = spec.strategy
    if s.gather == "copy":
        return
    is_cast = s.dtypes.param != "fp32" or s.dtypes.norm not in (None, "fp32")
    for is_so, why, hint in (
        (s.is_replicated, "nothing is gathered with no_shard", "use copy, or another sharding"),
        (s.offload != "none", "what is offloaded is copied to be gathered", "use copy, or offload none"),
        (is_cast, "shards are fp32, and these are gathered in another precision", "use copy, or precision fp32"),
        (s.reshard_size is not None, "nothing is kept between forward and backward", "use copy, or no reshard_size"),
        (any(d != "cpu" for d in spec.devices or ()), "GPUs do not share memory", "use copy, or ranks on CPUs"),
        (spec.link is not None, "over an emulated link what is gathered would have to be sent", "use copy, or no link"),
    ):
        if is_so:
            raise _invalid("gather", f"mapped is not possible here: {why}", hint, gather="copy")


def _rule_sync(spec: Spec) -> None:
    s, param = spec.strategy, spec.strategy.dtypes.param
    if s.backend != "fsdp1" or spec.sync_interval == 1:
        return
    if s.offload != "none":
        reason = "FSDP1 cannot accumulate without communication while it offloads"
        raise _invalid("sync", reason, "use sync every", sync="every")
    if spec.shard_factor == 1 and param != "fp32":
        reason = f"FSDP1 that shards nothing cannot keep gradients in {param} for a later micro-batch"
        raise _invalid("sync", reason, "use sync every, or backend ddp", sync="every")


def _rule_reshard_size(spec: Spec) -> None:
    s, size = spec.strategy, spec.strategy.reshard_size
    if size is None:
        return
    sizes = _divisors(spec.world_size)
    if s.sharding == "full_shard" and size in sizes:
        return
    if s.sharding != "full_shard":
        reason = f"{s.sharding} does not reshard over all ranks after the forward"
        hint = "leave it empty, or use full_shard"
    else:
        reason = f"{size} is not a divisor of {spec.world_size} between 1 and {spec.world_size}"
        hint = f"use one of {', '.join(map(str, sizes))}, or leave it empty" if sizes else "leave it empty"
    raise _invalid("reshard_size", reason, hint, reshard_size=None)


def _rule_optimizer(spec: Spec) -> None:
    optimizer, why = spec.workload.torch_optimizer, "does not take DTensors, which are FSDP2's parameters"
    if spec.strategy.backend == "fsdp2" and optimizer.is_fused and optimizer.class_name in ("SGD", "Adagrad"):
        reason, fix = f"torch's fused {optimizer.class_name} {why}", optimizer.without("fused")
        raise SpecError("workload.optimizer_args", reason, "leave fused out", fix, other="use backend lab")
    if spec.strategy.backend == "fsdp2" and optimizer.class_name == "Rprop":
        fix = {"optimizer": "adamw", "optimizer_args": {}}
        raise SpecError("workload.optimizer", f"torch's Rprop {why}", "use adamw", fix, other="backend lab")
    if spec.strategy.compile and spec.workload.dropout != "off":
        reason = "a compiler draws dropout's masks in its own way, so that they would not be those of other Specs"
        raise _invalid("compile", reason, "use compile false, or dropout off", compile=False)


_RULES: tuple[Callable[[Spec], None], ...]
_RULES = (_rule_sharding, _rule_gather, _rule_sync, _rule_reshard_size, _rule_optimizer)


def _divisors(world_size: int) -> list[int]:
    """The group sizes above 1 and below `world_size` that divide it, ascending."""
    small = [n for n in range(2, math.isqrt(world_size) + 1) if world_size % n == 0]
    return sorted({*small, *(world_size // n for n in small)})


def _check_devices(devices: Any, world_size: int) -> tuple[str, ...]:
    if isinstance(devices, str) or not isinstance(devices, Sequence) or len(devices) != world_size:
        only_cpu = isinstance(devices, (str, Sequence)) and bool(devices) and all(d == "cpu" for d in devices)
        instead = ["cpu"] * world_size if only_cpu else None
        reason = f"{devices!r} does not name one device for each of {world_size} ranks"
        hint = 'give a list such as ["cuda:0", "cuda:1"], or nothing'
        raise SpecError("devices", reason, hint, {"devices": instead})
    for d in devices:
        check_value("devices", d, fields.matching(r"cpu|cuda:\d+", '"cpu" or "cuda:N" for each rank'))
    if len({d == "cpu" for d in devices}) > 1:
        reason = "ranks on CPUs and on GPUs cannot share one model"
        raise SpecError("devices", reason, "choose one kind", {"devices": None})
    return tuple(devices)


def _check_link(text: Any) -> str | None:
    """The link in canonical spelling, so that equal links make equal Specs; None for "off"."""
    if isinstance(text, str) and text and FIELDS["link"].means_none(text):
        return None
    try:
        return LinkSpec.parse(text).text
    except LinkError as e:
        raise SpecError("link", e.reason, e.hint, {"link": None}) from None


def _fields(prefix: str, given: Mapping[str, Any], kind: type) -> dict[str, Any]:
    """The fields of `kind`; a precision given as a dict becomes a `Precision`."""
    names = [f.name for f in dataclasses.fields(kind)]
    for name in given:
        if name not in names:
            raise _no_field(prefix, name, names)
    made = dict(given)
    if isinstance(made.get("precision"), Mapping):
        made["precision"] = Precision(**_fields("strategy.precision.", made["precision"], Precision))
    return made


def changed_dict(base: Spec, changes: Mapping[str, Any]) -> dict[str, Any]:
    """The dict of a Spec with fields replaced by flat name, whether or not it can be run. Raises SpecError for a name."""
    made = base.to_dict()
    for name, value in changes.items():
        part = part_of(name)
        (made[part] if part else made)[name] = value
    return made


def part_of(name: str, unknown: str | None = None) -> str:
    """The part with a flat field name: "workload", "strategy", or "" for the Spec itself. `unknown`: for a name of none;
    None: raises SpecError."""
    for part, kind in {**PARTS, "": Spec}.items():
        if name in {f.name for f in dataclasses.fields(kind)}:
            return part
    if name in fields.NOT_FIELDS:
        raise SpecError(name, *fields.NOT_FIELDS[name])
    if unknown is None:
        raise _no_field("", name, [*FIELDS])
    return unknown


def _no_field(prefix: str, name: str, names: Sequence[str]) -> SpecError:
    similar = difflib.get_close_matches(name, names, n=2)
    hint = f"did you mean {' or '.join(similar)}" if similar else "help(fsdp_lab.Spec) names the fields"
    return SpecError(f"{prefix}{name}", "there is no such field", hint)


def check_field(name: str, value: Any) -> None:
    """Raises SpecError for a value that a field of Workload or of Strategy refuses by itself."""
    part = part_of(name)
    if value is not getattr(PARTS[part], name):  # the default
        check_value(f"{part}.{name}", value, FIELDS[name])


def plain(value: Any) -> Any:
    """Mappings as dicts and sequences as lists, recursively."""
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    return [plain(v) for v in value] if isinstance(value, (list, tuple)) else value
