"""A Spec as text for tables, labels and messages: its fields, what differs between Specs, its strategy on one line."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from fsdp_lab.spec.loops import Trained, WatchedLoop
from fsdp_lab.spec.spec import YOURS, Spec
from fsdp_lab.spec.user_code import code_name

UNKNOWN = "unknown"  # the value of a Spec's field that a watched loop does not tell
DEFAULT_FIELDS = ("backend", "sharding", "precision")  # name Specs that do not differ
STRATEGY_FIELDS = (*DEFAULT_FIELDS, "engine", "offload", "gather", "link")
SELF_EXPLAINING = (
    "model",
    "data",
    "backend",
    "sharding",
    "precision",
    "optimizer",
    "optimizer_args",
)  # shown without the field's name
# None turns these off; of other fields it means a choice by the backend.
NONE_IS_OFF = ("link", "clip_norm", "decay_steps", "freeze", "param_groups", "lora", "engine")


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

    def key(value: Any) -> str:
        return json.dumps(value, sort_keys=True, default=str)

    told = {name: {key(flat[name]) for flat in flats if flat[name] != UNKNOWN} for name in (flats[0] if flats else ())}
    return tuple(name for name, values in told.items() if len(values) > 1)


def field_title(name: str) -> str:
    return name.replace("_", " ")


def describe_value(name: str, value: Any) -> str:
    """`full_shard`, `128`, `bf16/fp32`, `auto`, `off`, `every 2`, `eps=1e-06 fused`; a config of a model by its type,
    code of a user's own by its name."""
    if value is None:
        return "off" if name in NONE_IS_OFF else "auto"
    if isinstance(value, bool):
        return "on" if value else "off"
    if name == "sync" and isinstance(value, int):
        return f"every {value}"
    if name == "optimizer_args" and isinstance(value, Mapping):
        return " ".join(argument if v is True else f"{argument}={v}" for argument, v in value.items()) or "none"
    if name == "engine":
        return code_name(value)
    if name == "lora" and isinstance(value, Mapping):
        return " ".join(f"{part}={v}" for part, v in value.items() if v is not None)
    if isinstance(value, Mapping):
        if {"param", "reduce"} <= value.keys():
            return f"{value['param']}/{value['reduce']}"
        return str(value.get("model_type") or value.get("code") or "own config")
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def describe_field(name: str, value: Any) -> str:
    """`full_shard`, `offload all`, `seq len 128`, `forward prefetch auto`, `no compile`, `real link`."""
    if value is None and name == "link":
        return "real link"
    if value is False or value == {} or (value is None and name in NONE_IS_OFF):
        return f"no {field_title(name)}"
    if value is True:
        return field_title(name)
    text = describe_value(name, value)
    return text if name in SELF_EXPLAINING else f"{field_title(name)} {text}"


def describe_fields(flat: Mapping[str, Any], names: Sequence[str]) -> str:
    """Those of the named fields that are set; all of them if none is."""
    unset: tuple[Any, ...] = (None, "none", "copy", {}, UNKNOWN)
    used = [name for name in names if flat[name] not in unset and flat[name] is not False]  # 0 is a value
    if flat.get("backend") != YOURS:
        used = [name for name in used if name != "engine"]  # nobody uses it
    return " ".join(describe_field(name, flat[name]) for name in used or names)


def describe_changes(changes: Mapping[str, tuple[Any, Any]], arrow: str = "→") -> str:
    """A `Spec.difference`: `sharding full_shard → shard_grad_op, precision fp32 → bf16`."""
    return ", ".join(
        f"{field_title(name)} {describe_value(name, old)} {arrow} {describe_value(name, new)}"
        for name, (old, new) in changes.items()
    )


def describe_strategy(spec: Trained) -> str:
    """`lab full_shard bf16 link 0.25 GB/s`; `yours full_shard fp32 engine Mine`; `watched fsdp2 full_shard fp32`."""
    watched = "watched " if isinstance(spec, WatchedLoop) else ""
    return watched + describe_fields(flat_fields(spec), STRATEGY_FIELDS)
