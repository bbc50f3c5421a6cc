"""Models, their initial values, their data and their FLOPs. Floor 1: torch, numpy, transformers.

`presets`, `check` and `data` import neither torch nor transformers; the names below are imported when they are used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsdp_lab.base import lazy_names

if TYPE_CHECKING:
    from fsdp_lab.models.batches import Batches as Batches
    from fsdp_lab.models.build import Initializer as Initializer, build_skeleton as build_skeleton
    from fsdp_lab.models.configs import resolve as resolve
    from fsdp_lab.models.flops import (
        BestPeak as BestPeak,
        Flops as Flops,
        count_flops as count_flops,
        device_peak as device_peak,
        flops_per_sample as flops_per_sample,
    )
    from fsdp_lab.models.presets import PRESETS as PRESETS
    from fsdp_lab.models.pretrained import (
        Pretrained as Pretrained,
        initial_values as initial_values,
        weights_folder as weights_folder,
    )
    from fsdp_lab.models.weights import Weights as Weights

_HOMES = {
    "Batches": "batches",
    "Flops": "flops",
    "Initializer": "build",
    "PRESETS": "presets",
    "Pretrained": "pretrained",
    "Weights": "weights",
    "initial_values": "pretrained",
    "weights_folder": "pretrained",
    "build_skeleton": "build",
    "count_flops": "flops",
    "BestPeak": "flops",
    "device_peak": "flops",
    "flops_per_sample": "flops",
    "resolve": "configs",
}

__all__ = sorted(_HOMES)
if not TYPE_CHECKING:  # a `__getattr__` would let any name pass
    __getattr__, __dir__ = lazy_names(__name__, _HOMES)
