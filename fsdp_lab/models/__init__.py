"""Models, their initial values, their data and their FLOPs. Floor 1: torch, numpy, transformers.

`presets`, `check` and `data` import neither torch nor transformers; the names below are imported when they are used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fsdp_lab.models.batches import Batches as Batches
    from fsdp_lab.models.build import Initializer as Initializer
    from fsdp_lab.models.build import Weights as Weights
    from fsdp_lab.models.build import build_skeleton as build_skeleton
    from fsdp_lab.models.configs import resolve as resolve
    from fsdp_lab.models.flops import BestPeak as BestPeak
    from fsdp_lab.models.flops import Flops as Flops
    from fsdp_lab.models.flops import count_flops as count_flops
    from fsdp_lab.models.flops import device_peak as device_peak
    from fsdp_lab.models.flops import flops_per_sample as flops_per_sample
    from fsdp_lab.models.presets import PRESETS as PRESETS

_HOMES = {
    "Batches": "batches",
    "Flops": "flops",
    "Initializer": "build",
    "PRESETS": "presets",
    "Weights": "build",
    "build_skeleton": "build",
    "count_flops": "flops",
    "BestPeak": "flops",
    "device_peak": "flops",
    "flops_per_sample": "flops",
    "resolve": "configs",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
