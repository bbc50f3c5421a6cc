"""`WatchedLoop`, what is known of a training loop that is not the lab's: to such a run what a Spec is to the lab's own. And
both as text for tables, labels and messages: fields, what differs between Specs, the strategy on one line."""

import dataclasses
import hashlib
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Self

from fsdp_lab.spec.fields import AUTO, FieldRow
from fsdp_lab.spec.spec import BACKEND_TRAITS, FIELDS, YOURS, Spec, fields_with

UNKNOWN = "unknown"  # the value of a Spec's field that a watched loop does not tell
STRATEGY_FIELDS = fields_with("in_name")
_NO_FIELD = FieldRow()
DEFAULT_FIELDS = tuple(name for name in STRATEGY_FIELDS if FIELDS[name].bare)  # name Specs that do not differ
KEY = "watched"  # by which a stored one is told from a Spec


@dataclass(frozen=True, kw_only=True)
class WatchedLoop:
    """A model as a user set it up, as far as it shows. Not a Spec: nothing can be trained, switched or exported from it.

    `backend`: "lab", "fsdp2", "fsdp1", "ddp", or "module" (plain). `sharding`: as in a `Strategy`, "" if unknown."""

    model: str  # its class
    backend: str
    sharding: str
    shard_size: int  # ranks in one shard group
    parameters: int  # of the whole model
    units: int  # below the root; of DDP and of a plain module, its repeated blocks
    optimizer: str  # its class; "" if none was given
    precision: str  # "fp32", or "bf16/fp32": of computing, and of the reduction where it differs
    offload: str
    world_size: int
    device: str  # "cpu" or "cuda"
    title: str = ""  # as given by the user

    @property
    def name(self) -> str:
        """The name, as in `watched: FSDP2 GPT2LMHeadModel`."""
        kind = BACKEND_TRAITS[self.backend].title if self.backend in BACKEND_TRAITS else "plain"
        return self.title or f"watched: {kind} {self.model}"

    @cached_property
    def id(self) -> str:
        """Eight hex digits, as of a Spec."""
        text = json.dumps(self.to_dict(), sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()

    def flat(self) -> dict[str, Any]:
        """Field name -> value; where a Spec has a field of that name, it means the same."""
        return dataclasses.asdict(self)

    def to_dict(self) -> dict[str, Any]:
        return {KEY: self.flat()}

    @classmethod
    def from_dict(cls, d: Mapping[str, Any]) -> Self:
        return cls(**d[KEY])


Trained = Spec | WatchedLoop  # what a run trains, as far as it is known


def flat_fields(spec: Trained | Mapping[str, Any]) -> dict[str, Any]:
    """Flat field name -> value, also of a dict that is no valid Spec; fields missing there have their defaults. Of a watched
    loop, what is not known is `UNKNOWN`."""
    if isinstance(spec, Spec):
        return spec.flat()
    if isinstance(spec, WatchedLoop):
        known = {name: value or UNKNOWN for name, value in spec.flat().items()}
        return {name: known.get(name, UNKNOWN) for name in Spec().flat()}
    top = {**spec}
    parts = [part for name in ("workload", "strategy") if isinstance(part := top.pop(name, {}), Mapping)]
    given = {**{k: v for part in parts for k, v in part.items()}, **top}
    return {name: given.get(name, default) for name, default in Spec().flat().items()}


def differing_fields(flats: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Names of the fields whose values are not equal in all of them."""
    key = partial(json.dumps, sort_keys=True, default=str)
    told = {name: {key(flat[name]) for flat in flats if flat[name] != UNKNOWN} for name in (flats[0] if flats else ())}
    return tuple(name for name, values in told.items() if len(values) > 1)


def field_title(name: str) -> str:
    return name.replace("_", " ")


def row_of(name: str) -> FieldRow:
    """The row of a field; of what is none, such as a figure of a watched loop, an empty one."""
    return FIELDS.get(name, _NO_FIELD)


def describe_value(name: str, value: Any) -> str:
    """`full_shard`, `128`, `bf16/fp32`, `auto`, `off`, `every 2`, `eps=1e-06 fused`; a config of a model by its type,
    code of a user's own by its name."""
    row = row_of(name)
    if value is None:
        return AUTO if row.none == AUTO else "off"
    if isinstance(value, bool):
        return "on" if value else "off"
    if row.text is not None:
        return row.text(value)
    if isinstance(value, Mapping):
        if {"param", "reduce"} <= value.keys():
            return f"{value['param']}/{value['reduce']}"
        return str(value.get("model_type") or value.get("code") or "own config")
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def written(name: str, value: Any) -> str:
    """A value as written on the command line."""
    if value is None:
        return AUTO if row_of(name).none == AUTO else "none"
    return value if isinstance(value, str) else json.dumps(dict(value) if isinstance(value, Mapping) else value)


def command(spec: Spec) -> tuple[str, list[str]]:
    """The `fsdp-lab run` of a Spec, with its model and each field that is not at its default; and the fields that no option
    says: devices, code, configs, texts with commas."""
    words, unsaid = ["fsdp-lab run"], list[str]()
    for name, (_, value) in {"model": (None, spec.flat()["model"]), **Spec().difference(spec)}.items():
        row, text = row_of(name), written(name, value)
        is_read = row.json or name == "link" or ("," not in text and row.read(text) == value)
        option = "ranks" if name == "world_size" else name.replace("_", "-")
        if name == "devices" or not is_read:
            unsaid.append(name)
        else:
            words.append(f"--{option} {shlex.quote(text)}")
    return " ".join(words), unsaid


def describe_field(name: str, value: Any) -> str:
    """`full_shard`, `offload all`, `seq len 128`, `forward prefetch auto`, `no compile`, `real link`."""
    row = row_of(name)
    if value is None and name == "link":
        return "real link"
    if value is False or value == {} or (value is None and row.none != AUTO):
        return f"no {field_title(name)}"
    if value is True:
        return field_title(name)
    text = describe_value(name, value)
    return text if row.bare else f"{field_title(name)} {text}"


def describe_fields(flat: Mapping[str, Any], names: Sequence[str]) -> str:
    """The named fields that are set; all of them if none is."""
    # 0 is a value.
    used = [n for n in names if flat[n] not in (None, {}, UNKNOWN, row_of(n).off) and flat[n] is not False]
    if flat.get("backend") != YOURS:
        used = [name for name in used if name != "engine"]  # nobody uses it
    return " ".join(describe_field(name, flat[name]) for name in used or names)


def describe_changes(changes: Mapping[str, tuple[Any, Any]], arrow: str = "→") -> str:
    """A `Spec.difference`: `sharding full_shard → shard_grad_op, precision fp32 → bf16`."""
    values = {n: f"{describe_value(n, old)} {arrow} {describe_value(n, new)}" for n, (old, new) in changes.items()}
    return ", ".join(f"{field_title(name)} {both}" for name, both in values.items())


def describe_strategy(spec: Trained) -> str:
    """`lab full_shard bf16 link 0.25 GB/s`; `yours full_shard fp32 engine Mine`; `watched fsdp2 full_shard fp32`."""
    watched = "watched " if isinstance(spec, WatchedLoop) else ""
    return watched + describe_fields(flat_fields(spec), STRATEGY_FIELDS)
