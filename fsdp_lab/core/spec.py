"""What is trained and how it is sharded: `Workload`, `Strategy` and, with a world size, `Spec`.

The three are frozen and validated by their constructors, so every `Spec` can be run: anything else raises a `SpecError`
with the field, the reason and a hint (`fix` holds the hint as field values, for a user interface). Plain dataclasses,
neither torch nor numpy. Whether a model or a text exists is checked by `fsdp_lab.models.check`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from fsdp_lab.core.errors import SpecError, is_number, is_whole
from fsdp_lab.core.link import LinkError, LinkSpec
from fsdp_lab.core.schedule import OffloadPolicy, Rules

BACKENDS = ("lab", "fsdp2", "fsdp1", "ddp")
SHARDINGS = ("full_shard", "shard_grad_op", "zero1", "hybrid_shard", "hybrid_shard_zero2", "no_shard")
DTYPES = ("fp32", "bf16", "fp16")
OFFLOADS = tuple(policy.value for policy in OffloadPolicy)
OPTIMIZERS = ("adamw", "sgd")
SYNCS = ("every", "last")
PREFETCH_POINTS = ("before", "after")
MOST_HELD_OUT = 0.5


# -- small checks ----------------------------------------------------------------------------------------------------


def _refuse(field: str, value: Any, wanted: str) -> None:
    raise SpecError(field, f"{value!r} is refused", f"give {wanted}")


def _one_of(field: str, value: Any, tokens: Sequence[str]) -> None:
    if value not in tokens:
        _refuse(field, value, "one of " + ", ".join(tokens))


def _whole(field: str, value: Any, least: int) -> None:
    if not is_whole(value, least):
        _refuse(field, value, f"a whole number of {least} or more")


def _number(field: str, value: Any, *, positive: bool = False) -> None:
    if not is_number(value) or not math.isfinite(value) or value < 0 or (positive and value == 0):
        _refuse(field, value, "a finite number above 0" if positive else "a finite number of 0 or more")


def _share(field: str, value: Any, most: float) -> None:
    if not is_number(value) or not 0 <= value <= most:
        _refuse(field, value, f"a number from 0 to {most}")


def _pattern(field: str, value: Any, pattern: str, wanted: str) -> None:
    if not isinstance(value, str) or not re.fullmatch(pattern, value):
        _refuse(field, value, wanted)


@dataclass(frozen=True, kw_only=True)
class Precision:
    """The dtype of each role; None leaves it as the computation produces it. Master shards are always fp32."""

    param: str = "fp32"  # unsharded parameters, hence the matrix products and activations
    reduce: str = "fp32"  # gradients while they are reduced
    output: str | None = None  # what the root module returns
    buffer: str | None = None  # floating-point buffers
    norm: str | None = None  # normalisation layers except BatchNorm, which stays fp32; None: as the other parameters
    keep_low_precision_gradients: bool = False  # gradient shards stay in the reduce dtype until the optimizer's step

    def __post_init__(self) -> None:
        for name in ("param", "reduce"):
            _one_of(f"strategy.precision.{name}", getattr(self, name), DTYPES)
        for name in ("output", "buffer", "norm"):
            if getattr(self, name) is not None:
                _one_of(f"strategy.precision.{name}", getattr(self, name), DTYPES)
        if not isinstance(self.keep_low_precision_gradients, bool):
            _refuse(
                "strategy.precision.keep_low_precision_gradients", self.keep_low_precision_gradients, "true or false"
            )


PRECISIONS: Mapping[str, Precision] = {
    "fp32": Precision(),
    "bf16": Precision(param="bf16", reduce="fp32"),
    "bf16-pure": Precision(param="bf16", reduce="bf16", buffer="bf16"),
    "fp16": Precision(param="fp16", reduce="fp16"),
}


LINEAGE = ("model", "seed", "optimizer")  # a Spec that differs in one of these is a different training


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is trained. A step sees micro_batch x accumulate x world_size samples."""

    model: str | Mapping[str, Any] = "gpt2-10m"  # preset, transformers config as a dict, or its folder or file
    data: str = "stdlib"  # Python's own source; a file or folder of text; "images", or a folder of images
    held_out: float = 0.05  # fraction of the samples, at the end of the data, that is not trained on
    seq_len: int = 128
    micro_batch: int = 4  # samples per rank per forward
    accumulate: int = 1  # micro-batches per optimizer step
    optimizer: str = "adamw"
    lr: float = 3e-4
    weight_decay: float = 0.1
    clip_norm: float | None = None  # maximum of the global gradient norm; None: no clipping
    seed: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.model, (str, Mapping)) or not self.model:
            _refuse("workload.model", self.model, "the name of a preset, a folder, or a config as a dict")
        if not isinstance(self.data, str) or not self.data:
            _refuse("workload.data", self.data, '"stdlib", "images", or the path of a file or folder')
        _share("workload.held_out", self.held_out, MOST_HELD_OUT)
        _whole("workload.seq_len", self.seq_len, 2)
        _whole("workload.micro_batch", self.micro_batch, 1)
        _whole("workload.accumulate", self.accumulate, 1)
        _one_of("workload.optimizer", self.optimizer, OPTIMIZERS)
        _number("workload.lr", self.lr, positive=True)
        _number("workload.weight_decay", self.weight_decay)
        if self.clip_norm is not None:
            _number("workload.clip_norm", self.clip_norm, positive=True)
        _whole("workload.seed", self.seed, 0)


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """How the work is sharded, and by which backend. `Spec` refuses what a backend cannot do."""

    backend: str = "lab"
    sharding: str = "full_shard"
    shard_size: int | None = None  # ranks in one shard group: the sharding factor F of arXiv 2304.11277, section 3.2
    reshard_size: int | None = None  # ranks that share the parameters between forward and backward; None: by `sharding`
    precision: str | Precision = "fp32"
    offload: str = "none"
    wrap: str = "block"
    forward_prefetch: int = 0  # units gathered ahead of the one that computes
    backward_prefetch: int = 1
    backward_prefetch_point: str = "before"  # issued before the backward of the unit that computes, or after it
    limit_all_gathers: int = 2  # all-gathers in flight (section 3.4); 0: no limit
    recompute: str = "none"  # activations: saved, or recomputed in the backward
    sync: str = "every"  # the micro-batches that communicate
    compile: bool = False

    def __post_init__(self) -> None:
        _one_of("strategy.backend", self.backend, BACKENDS)
        _one_of("strategy.sharding", self.sharding, SHARDINGS)
        for name in ("shard_size", "reshard_size"):
            if getattr(self, name) is not None:
                _whole(f"strategy.{name}", getattr(self, name), 1)
        _check_precision(self.precision)
        _one_of("strategy.offload", self.offload, OFFLOADS)
        _pattern("strategy.wrap", self.wrap, r"block|whole|every:[1-9]\d*|min_params:[1-9]\d*|class:\w+",
                 '"block", "every:K", "min_params:N", "class:NAME" or "whole"')  # fmt: skip
        _whole("strategy.forward_prefetch", self.forward_prefetch, 0)
        _whole("strategy.backward_prefetch", self.backward_prefetch, 0)
        _one_of("strategy.backward_prefetch_point", self.backward_prefetch_point, PREFETCH_POINTS)
        _whole("strategy.limit_all_gathers", self.limit_all_gathers, 0)
        _pattern("strategy.recompute", self.recompute, r"none|full|every:[1-9]\d*", '"none", "full" or "every:K"')
        _one_of("strategy.sync", self.sync, SYNCS)
        if not isinstance(self.compile, bool):
            _refuse("strategy.compile", self.compile, "true or false")

    @property
    def dtypes(self) -> Precision:
        """The precision with its token resolved."""
        return self.precision if isinstance(self.precision, Precision) else PRECISIONS[self.precision]

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
            return self.shard_size or _default_factor(world_size) or world_size
        return world_size

    @property
    def schedule_rules(self) -> Rules:
        """The rules of the engine's and the planner's `Schedule`."""
        return Rules(
            reshard_after_forward=self.reshards_after_forward,
            forward_prefetch=self.forward_prefetch,
            backward_prefetch=self.backward_prefetch,
            prefetch_before=self.backward_prefetch_point == "before",
            limit=self.limit_all_gathers,
            offload=OffloadPolicy(self.offload),
        )


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
        _whole("world_size", self.world_size, 1)
        if self.devices is not None:
            object.__setattr__(self, "devices", _check_devices(self.devices, self.world_size))
        if self.link is not None:
            object.__setattr__(self, "link", _check_link(self.link))
        for rule in _RULES:
            rule(self)

    # -- JSON, both ways ------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists and scalars, from which `Spec.from_dict` makes an equal Spec."""
        d = dataclasses.asdict(self)
        d["workload"]["model"] = _plain(self.workload.model)
        d["devices"] = None if self.devices is None else list(self.devices)
        return d

    @classmethod
    def from_dict(cls, d: Mapping[str, Any]) -> Spec:
        """Raises SpecError for an unknown key or an invalid value."""
        top = _known("", d, cls)
        parts: dict[str, Any] = {}
        for name, kind in (("workload", Workload), ("strategy", Strategy)):
            given = top.pop(name, {})
            if not isinstance(given, Mapping):
                _refuse(name, given, "an object of fields")
            parts[name] = kind(**_known(f"{name}.", given, kind))
        return cls(**parts, **top)

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    @classmethod
    def from_json(cls, text: str) -> Spec:
        """Raises SpecError as `from_dict`, or if the text is not JSON, with the line."""
        try:
            d = json.loads(text)
        except json.JSONDecodeError as e:
            raise SpecError("spec", f"is not JSON (line {e.lineno}: {e.msg})", "mend the text") from None
        if not isinstance(d, dict):
            raise SpecError("spec", "is not a JSON object", 'write {"workload": {...}, "strategy": {...}}')
        return cls.from_dict(d)

    @cached_property
    def id(self) -> str:
        """Eight hex digits; equal Specs have equal ids, in any process."""
        d = self.to_dict()
        if not self.workload.held_out:
            del d["workload"]["held_out"]  # ids from before this field existed, in stored events, stay valid
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


# -- rules that need the whole Spec: each raises or returns ----------------------------------------------------------

_CAN_SHARD: Mapping[str, tuple[str, ...]] = {
    "lab": SHARDINGS,
    "fsdp2": ("full_shard", "shard_grad_op", "hybrid_shard", "hybrid_shard_zero2"),
    "fsdp1": ("full_shard", "shard_grad_op", "hybrid_shard", "hybrid_shard_zero2", "no_shard"),
    "ddp": ("no_shard",),
}
_WHY_NOT: Mapping[tuple[str, str], str] = {
    ("ddp", "*"): "DDP keeps a whole replica on every rank and shards nothing",
    ("fsdp2", "no_shard"): "FSDP2 has no replicated mode",
    ("fsdp2", "zero1"): "FSDP2 always shards the gradients with the parameters",
    ("fsdp1", "zero1"): "FSDP1 always shards the gradients with the parameters",
}


def _rule_sharding(spec: Spec) -> None:
    backend, sharding = spec.strategy.backend, spec.strategy.sharding
    can = _CAN_SHARD[backend]
    if sharding in can:
        return
    why = _WHY_NOT.get((backend, sharding)) or _WHY_NOT[(backend, "*")]
    instead = " or ".join([", ".join(can[:-1]), can[-1]] if len(can) > 1 else can)
    hint = f"use sharding {instead}" + ("" if sharding != "no_shard" else ", or backend ddp")
    reason = f"{sharding} is not available with {backend}: {why}"
    raise SpecError("strategy.sharding", reason, hint, {"sharding": can[0]})


def _rule_shard_size(spec: Spec) -> None:
    sharding, size, world = spec.strategy.sharding, spec.strategy.shard_size, spec.world_size
    if not spec.strategy.is_hybrid:
        whole = 1 if spec.strategy.is_replicated else world
        if size not in (None, whole):
            raise SpecError("strategy.shard_size", f"{size} has no meaning with {sharding}: its groups are of {whole}",
                            "leave it empty, or choose hybrid_shard", {"shard_size": None})  # fmt: skip
        return
    factors = [f for f in range(2, world) if world % f == 0]
    if not factors:
        raise SpecError("strategy.sharding", f"{sharding} needs a shard size between 1 and world_size that divides it, "
                        f"and {world} ranks have none", f"use {_hybrid_ranks(world)} ranks, or full_shard",
                        {"world_size": _hybrid_ranks(world)})  # fmt: skip
    if size is not None and size not in factors:
        raise SpecError("strategy.shard_size", f"{size} is not a divisor of {world} between 1 and {world}",
                        f"use one of {', '.join(map(str, factors))}",
                        {"shard_size": _default_factor(world)})  # fmt: skip


def _rule_offload(spec: Spec) -> None:
    backend, offload = spec.strategy.backend, spec.strategy.offload
    if offload == "none" or backend == "lab":
        return
    if backend == "ddp":
        raise SpecError("strategy.offload", "DDP keeps parameters, gradients and optimizer state on the device",
                        "use offload none, or backend lab", {"offload": "none"})  # fmt: skip
    if offload == "optimizer":
        raise SpecError("strategy.offload", f"{backend} moves parameters, gradients and optimizer state together",
                        "use offload all or none, or backend lab", {"offload": "all"})  # fmt: skip
    if backend == "fsdp1" and spec.strategy.sync == "last" and spec.workload.accumulate > 1:
        raise SpecError("strategy.sync", "FSDP1 cannot accumulate without communication while it offloads",
                        "use sync every", {"sync": "every"})  # fmt: skip


def _rule_precision(spec: Spec) -> None:
    backend, precision = spec.strategy.backend, spec.strategy.precision
    buffer = precision.buffer if isinstance(precision, Precision) else None
    output = precision.output if isinstance(precision, Precision) else None
    if output is not None and backend in ("ddp", "fsdp1"):
        raise SpecError("strategy.precision.output", f"{backend} has no dtype for outputs", "leave it empty",
                        {"precision": dataclasses.replace(spec.strategy.dtypes, output=None)})  # fmt: skip
    if buffer not in (None, "fp32") and backend in ("fsdp2", "ddp"):
        raise SpecError("strategy.precision.buffer", f"{backend} has no dtype for buffers", "leave it empty",
                        {"precision": dataclasses.replace(spec.strategy.dtypes, buffer=None)})  # fmt: skip
    if spec.strategy.dtypes.norm is not None and backend != "lab":
        raise SpecError("strategy.precision.norm", f"{backend} has no dtype of their own for normalisation layers",
                        "leave it empty, or use backend lab",
                        {"precision": dataclasses.replace(spec.strategy.dtypes, norm=None)})  # fmt: skip
    if spec.strategy.dtypes.keep_low_precision_gradients and backend != "lab":
        plain = dataclasses.replace(spec.strategy.dtypes, keep_low_precision_gradients=False)
        raise SpecError("strategy.precision.keep_low_precision_gradients", f"{backend} keeps gradients in fp32",
                        "leave it false, or use backend lab", {"precision": plain})  # fmt: skip


def _rule_units(spec: Spec) -> None:
    backend, wrap = spec.strategy.backend, spec.strategy.wrap
    if backend == "ddp" and wrap not in ("block", "whole"):
        raise SpecError("strategy.wrap", "DDP has no units to wrap", "use block", {"wrap": "block"})
    if backend == "fsdp1" and wrap.startswith("every:") and wrap != "every:1":
        raise SpecError("strategy.wrap", "an FSDP1 unit is one module, not several blocks",
                        "use block, or backend lab", {"wrap": "block"})  # fmt: skip


def _rule_reshard_size(spec: Spec) -> None:
    s, size = spec.strategy, spec.strategy.reshard_size
    if size is None:
        return
    if s.backend not in ("lab", "fsdp2"):
        raise SpecError("strategy.reshard_size", f"{s.backend} cannot reshard to a smaller group",
                        "leave it empty, or use backend lab", {"reshard_size": None})  # fmt: skip
    if s.sharding != "full_shard":
        raise SpecError("strategy.reshard_size", f"{s.sharding} does not reshard over all ranks after the forward",
                        "leave it empty, or use full_shard", {"reshard_size": None})  # fmt: skip
    sizes = [n for n in range(2, spec.world_size) if spec.world_size % n == 0]
    if size not in sizes:
        hint = f"use one of {', '.join(map(str, sizes))}, or leave it empty" if sizes else "leave it empty"
        world = spec.world_size
        raise SpecError("strategy.reshard_size", f"{size} is not a divisor of {world} between 1 and {world}",
                        hint, {"reshard_size": None})  # fmt: skip


def _rule_overlap(spec: Spec) -> None:
    s = spec.strategy
    if s.backend == "lab":
        return
    if s.backend != "fsdp1" and s.backward_prefetch_point != "before":
        raise SpecError("strategy.backward_prefetch_point", f"{s.backend} has no choice of it", "use before, or backend lab",
                        {"backward_prefetch_point": "before"})  # fmt: skip
    if s.backend == "ddp" and s.forward_prefetch:
        raise SpecError("strategy.forward_prefetch", "DDP gathers no parameters", "use 0", {"forward_prefetch": 0})
    if s.backend == "fsdp1" and s.forward_prefetch > 1:
        raise SpecError("strategy.forward_prefetch", "FSDP1 prefetches one unit ahead at most", "use 0 or 1",
                        {"forward_prefetch": 1})  # fmt: skip
    if s.backend == "fsdp1" and s.backward_prefetch > 1:
        raise SpecError("strategy.backward_prefetch", "FSDP1 prefetches one unit ahead at most", "use 0 or 1",
                        {"backward_prefetch": 1})  # fmt: skip
    if s.backend == "fsdp2" and s.backward_prefetch < 1:
        raise SpecError("strategy.backward_prefetch", "FSDP2 always prefetches in the backward", "use 1 or more",
                        {"backward_prefetch": 1})  # fmt: skip
    limits = {"fsdp1": (0, 2), "fsdp2": (2,), "ddp": (2,)}[s.backend]
    if s.limit_all_gathers not in limits:
        why = {"fsdp1": "FSDP1's limiter is on, at 2, or off", "fsdp2": "FSDP2 has no limiter to set",
               "ddp": "DDP gathers no parameters"}[s.backend]  # fmt: skip
        raise SpecError("strategy.limit_all_gathers", why, f"use {' or '.join(map(str, limits))}",
                        {"limit_all_gathers": 2})  # fmt: skip


_RULES: tuple[Callable[[Spec], None], ...] = (
    _rule_sharding,
    _rule_shard_size,
    _rule_offload,
    _rule_precision,
    _rule_units,
    _rule_reshard_size,
    _rule_overlap,
)


# -- checks of single fields -----------------------------------------------------------------------------------------


def _check_precision(value: Any) -> None:
    if isinstance(value, Precision):
        return
    if not isinstance(value, str) or value not in PRECISIONS:
        _refuse("strategy.precision", value, f"one of {', '.join(PRECISIONS)}, or param, reduce, output and buffer")


def _check_devices(devices: Any, world_size: int) -> tuple[str, ...]:
    if isinstance(devices, str) or not isinstance(devices, Sequence) or len(devices) != world_size:
        only_cpu = isinstance(devices, (str, Sequence)) and bool(devices) and all(d == "cpu" for d in devices)
        instead = ["cpu"] * world_size if only_cpu else None
        raise SpecError("devices", f"{devices!r} does not name one device for each of {world_size} ranks",
                        'give a list such as ["cuda:0", "cuda:1"], or nothing', {"devices": instead})  # fmt: skip
    for d in devices:
        _pattern("devices", d, r"cpu|cuda:\d+", '"cpu" or "cuda:N" for each rank')
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


def _known(prefix: str, given: Mapping[str, Any], kind: type) -> dict[str, Any]:
    """The fields of `kind`; a precision given as a dict becomes a `Precision`."""
    names = [f.name for f in dataclasses.fields(kind)]
    for name in given:
        if name not in names:
            raise SpecError(f"{prefix}{name}", "there is no such field", f"the fields are {', '.join(names)}")
    fields = dict(given)
    if isinstance(fields.get("precision"), Mapping):
        fields["precision"] = Precision(**_known("strategy.precision.", fields["precision"], Precision))
    return fields


def part_of(name: str) -> str:
    """The part with a flat field name: "workload", "strategy", or "" for the Spec itself. Raises SpecError."""
    if name in {f.name for f in dataclasses.fields(Workload)}:
        return "workload"
    if name in {f.name for f in dataclasses.fields(Strategy)}:
        return "strategy"
    if name in {f.name for f in dataclasses.fields(Spec)}:
        return ""
    raise SpecError(name, "there is no such field", "see the fields of Workload, Strategy and Spec")


def _hybrid_ranks(world_size: int) -> int:
    """The smallest number of ranks, at least `world_size`, that has a valid shard size for hybrid sharding."""
    return next(n for n in range(max(4, world_size), 2 * world_size + 4) if _default_factor(n) is not None)


def _default_factor(world_size: int) -> int | None:
    """The largest shard group with at least two replicas; None if `world_size` has no such divisor."""
    return next((f for f in range(world_size // 2, 1, -1) if world_size % f == 0), None)


def _plain(value: Any) -> Any:
    """Mappings as dicts and sequences as lists, recursively."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value
