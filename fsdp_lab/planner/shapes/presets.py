"""`shape_for`: the shapes of presets from a file of the package, without torch.

The file is made by `python -m fsdp_lab.planner.shapes.presets`, which takes some minutes.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

from fsdp_lab.core.model_shape import ModelShape
from fsdp_lab.models.presets import PRESETS
from fsdp_lab.planner.shapes.rewrapping import rewrapped

FILE = "data/shapes.json.gz"


def shape_for(model: str | Mapping[str, Any], wrap: str = "block") -> ModelShape:
    """A model as a wrap of `Strategy` splits it into units: of a preset at once, where the wrap is "block", "every:K" or
    "whole"; of any other model, and of other wraps, with torch and in seconds.

    Raises:
        SpecError: no such model, nothing to wrap.
    """
    if isinstance(model, str):
        return _shape(model, wrap)
    from fsdp_lab.planner.shapes.recorded import shape_of

    return _of_config(json.dumps(model, sort_keys=True, default=dict), wrap) if model else shape_of(model, wrap)


@lru_cache(maxsize=64)
def _shape(name: str, wrap: str) -> ModelShape:
    if name in _rows() and not wrap.startswith(("class:", "min_params:")):
        return rewrapped(_preset(name), wrap)
    from fsdp_lab.planner.shapes.recorded import shape_of

    return shape_of(name, wrap)


@lru_cache(maxsize=16)
def _of_config(config: str, wrap: str) -> ModelShape:
    from fsdp_lab.planner.shapes.recorded import shape_of

    return shape_of(json.loads(config), wrap)


@lru_cache(maxsize=64)
def _preset(name: str) -> ModelShape:
    return ModelShape.from_dict(json.loads(_rows()[name]))


@lru_cache(maxsize=1)
def _rows() -> dict[str, str]:
    """Each shape's own JSON, by preset."""
    try:
        packed = resources.files("fsdp_lab.planner").joinpath(FILE).read_bytes()
    except FileNotFoundError:
        return {}
    found: dict[str, str] = json.loads(gzip.decompress(packed))
    return found


def write(path: Path) -> None:
    """Every preset's shape, of wrap "block"."""
    from fsdp_lab.planner.shapes.recorded import shape_of

    rows = {name: json.dumps(shape_of(name).to_dict(), separators=(",", ":")) for name in PRESETS}
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(gzip.compress(json.dumps(rows).encode(), mtime=0))


if __name__ == "__main__":
    write(Path(__file__).parents[1] / FILE)
