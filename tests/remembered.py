"""What a training finds out or builds when it begins, and the next test would find the same: once in a process."""

import copy
import functools
from collections.abc import Callable
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from fsdp_lab.models import check
from fsdp_lab.models.build import build_skeleton
from fsdp_lab.rank import lifecycle, prepare


def once(function: Callable[..., Any], key: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, called once for each value of `key`, which takes its arguments."""
    known: dict[Any, Any] = {}

    def remembered(*arguments: Any) -> Any:
        asked = key(*arguments)
        if asked not in known:
            known[asked] = function(*arguments)
        return known[asked]

    return remembered


_built = once(build_skeleton, lambda config: config.to_json_string(use_diff=False))


def skeleton(config: PreTrainedConfig) -> PreTrainedModel:
    """As `build_skeleton`; each is a copy of the first, whose initialisation on meta is most of the work."""
    return copy.deepcopy(_built(config))


def remember() -> None:
    """Sessions of this process share the device's peaks, the FLOPs of samples, skeletons and the standard library's text."""
    flops: dict[str, Any] = {}
    sample = prepare.Preparation._sample

    def shared(self: prepare.Preparation, *arguments: Any) -> Any:
        self._flops = flops
        return sample(self, *arguments)

    stdlib, other = functools.cache(functools.partial(check.open_text, check.STDLIB)), check.open_text
    check.open_text = lambda data: stdlib() if data == check.STDLIB else other(data)
    prepare.Preparation._sample = shared  # type: ignore[method-assign]
    prepare.device_peak = functools.cache(prepare.device_peak)  # type: ignore[assignment]
    prepare.build_skeleton = lifecycle.build_skeleton = skeleton
