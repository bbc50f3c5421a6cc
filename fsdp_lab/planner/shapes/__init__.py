"""`shape_for`: the `ModelShape` of a model. Those of presets are read from a file of the package, without torch.

`recorded` records shapes with torch, and writes that file; `tape` records the tape of a step; `rewrapping` makes other units
and other depths of a shape.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from functools import lru_cache
from importlib import resources
from typing import Any

from fsdp_lab.core.model_shape import ModelShape
from fsdp_lab.planner.shapes.rewrapping import rewrapped


def shape_for(model: str | Mapping[str, Any], wrap: str = "block") -> ModelShape:
    """A model in the units of a `Strategy.wrap`. Presets take milliseconds if the wrap is "block", "every:K" or "whole";
    other models and wraps take seconds, and torch.

    Raises:
        SpecError: no such model, or no module to wrap.
    """
    if isinstance(model, str):
        if model in _preset_jsons() and not wrap.startswith(("class:", "min_params:")):
            return _preset(model, wrap)
        return _recorded(model, wrap, is_json=False)
    return _recorded(json.dumps(model, sort_keys=True, default=dict), wrap, is_json=True)


@lru_cache(maxsize=64)
def _recorded(model: str, wrap: str, *, is_json: bool) -> ModelShape:
    from fsdp_lab.planner.shapes.recorded import shape_of

    return shape_of(json.loads(model) if is_json else model, wrap)


@lru_cache(maxsize=64)
def _preset(name: str, wrap: str) -> ModelShape:
    if wrap != "block":
        return rewrapped(_preset(name, "block"), wrap)
    return ModelShape.from_dict(json.loads(_preset_jsons()[name]))


@lru_cache(maxsize=1)
def _preset_jsons() -> dict[str, str]:
    """The JSON of each preset's shape; empty while the file is being made."""
    try:
        packed = resources.files("fsdp_lab.planner").joinpath("data/shapes.json.gz").read_bytes()
    except FileNotFoundError:
        return {}
    jsons: dict[str, str] = json.loads(gzip.decompress(packed))
    return jsons
