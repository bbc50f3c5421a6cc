"""`shape_for`: the `ModelShape` of a model. Those of presets are read from a file of the package, without torch.

`recorded` records shapes with torch, and writes that file; `tape` records the tape of a step; `rewrapping` makes other units
of a shape."""

import gzip
import json
from collections.abc import Mapping
from functools import lru_cache
from importlib import resources
from typing import Any

from fsdp_lab.models.presets import key_of
from fsdp_lab.planner.model_shape import ModelShape
from fsdp_lab.planner.shapes.rewrapping import rewrapped
from fsdp_lab.spec.spec import Strategy
from fsdp_lab.spec.user_code import loaded
from fsdp_lab.spec.workload import CODE_FIELDS, Lora, Workload


class _Own:
    """A Workload of the user's own code, by what the shape depends on."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        codes = {f"workload.{name}": getattr(workload, name) for name in CODE_FIELDS}
        # What a name means is another object after a reload.
        self._named = [loaded(field, code) for field, code in codes.items() if isinstance(code, str)]
        digests = (code["digest"] for code in codes.values() if not isinstance(code, str))
        self._key = (*digests, *map(id, self._named), workload.freeze)

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Own) and self._key == other._key


def shape_of_workload(workload: Workload, wrap: str = "block") -> ModelShape:
    """As `shape_for`, also of a model of the user's own, where its code is."""
    if workload.is_own:
        return _own(_Own(workload), wrap)
    return shape_for(workload.model, wrap, workload.freeze, workload.adapters, workload.dropout)


@lru_cache(maxsize=16)
def _own(own: _Own, wrap: str) -> ModelShape:
    from fsdp_lab.planner.shapes.recorded import own_shape

    return own_shape(own.workload, wrap)


Patterns = tuple[str, ...] | None  # `Workload.freeze`


def shape_for(
    model: str | Mapping[str, Any],
    wrap: str = "block",
    frozen: Patterns = None,
    lora: Lora | None = None,
    dropout: str = "off",
) -> ModelShape:
    """A model in the units of a `Strategy.wrap`. Presets and the models of a calibration take milliseconds if the wrap is
    "block", "every:K" or "whole", nothing is frozen, nothing added (`Workload.freeze`, `lora`), and dropout is off; the rest
    takes seconds, and torch. Raises SpecError: no such model, or no module to wrap."""
    key = key_of(model)
    if is_packaged(model, wrap, frozen, lora, dropout):
        return _packaged(key, wrap)
    return _recorded(key, wrap, frozen, lora, dropout)


def is_packaged(model: str | Mapping[str, Any], wrap: str, frozen: Patterns, lora: Lora | None, dropout: str) -> bool:
    """Returns whether `shape_for` takes milliseconds."""
    is_plain = (frozen, lora, dropout) == (None, None, "off") and not wrap.startswith(("class:", "min_params:"))
    return is_plain and key_of(model) in packaged_jsons()


@lru_cache(maxsize=64)
def _recorded(model: str, wrap: str, frozen: Patterns, lora: Lora | None, dropout: str) -> ModelShape:
    from fsdp_lab.planner.shapes.recorded import shape_of

    if wrap == "whole" or wrap.startswith("every:"):  # other units of what is recorded once
        Strategy(wrap=wrap)  # validates it
        return rewrapped(_recorded(model, "block", frozen, lora, dropout), wrap)
    return shape_of(json.loads(model) if model.startswith("{") else model, wrap, frozen, lora, dropout)


@lru_cache(maxsize=64)
def _packaged(key: str, wrap: str) -> ModelShape:
    if wrap != "block":
        return rewrapped(_packaged(key, "block"), wrap)
    return ModelShape.from_dict(json.loads(packaged_jsons()[key]))


@lru_cache(maxsize=1)
def packaged_jsons() -> dict[str, str]:
    """The JSON of each shape that the package has, by `key_of` its model; empty while the file is being made."""
    try:
        packed = resources.files("fsdp_lab.planner").joinpath("data/shapes.json.gz").read_bytes()
    except FileNotFoundError:
        return {}
    jsons: dict[str, str] = json.loads(gzip.decompress(packed))
    return jsons
