"""`FlopCount`: the FLOPs of a step of a user's own loop, counted while it runs.

By the rule of `fsdp_lab.models.flops`: matrix products, attention and convolutions of the forward and the backward, as
`torch.utils.flop_counter` counts them; recomputation, a forward inside a backward, apart. That counter knows the fused
attention of GPUs, whose backward it charges with what the kernel recomputes, and not a CPU's: here the backward is twice the
forward for each of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as modules
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

_FUSED = (
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
)
_Shape = tuple[int, ...]


class FlopCount:
    """Counts one step, in the context `counting`.

    Attributes:
        model, recompute: FLOPs of this rank; None before.
        dtype: in which the model computed, if that was autocast's."""

    def __init__(self) -> None:
        self.model: int | None = None
        self.recompute = 0
        self.dtype: torch.dtype | None = None
        self._depth = 0  # of forwards inside a backward
        self._begun = 0

    @contextmanager
    def counting(self, device: torch.device) -> Iterator[None]:
        counter = FlopCounterMode(display=False, custom_mapping=_attention())
        self.recompute = self._depth = 0  # of a step that raised

        def before(_: nn.Module, __: Any) -> None:
            if torch.is_autocast_enabled(device.type):
                self.dtype = torch.get_autocast_dtype(device.type)
            if torch._C._current_graph_task_id() != -1:
                if not self._depth:
                    self._begun = counter.get_total_flops()
                self._depth += 1

        def after(*_: Any) -> None:
            if torch._C._current_graph_task_id() != -1 and self._depth:
                self._depth -= 1
                if not self._depth:
                    self.recompute += counter.get_total_flops() - self._begun

        handles = [
            modules.register_module_forward_pre_hook(before),
            modules.register_module_forward_hook(after, always_call=True),  # a checkpoint leaves it by an exception
        ]
        try:
            with counter:
                yield
        finally:
            for handle in handles:
                handle.remove()
        self.model = int(counter.get_total_flops()) - self.recompute


def can_count(model: nn.Module) -> bool:
    """Whether its operations are seen: those of a compiled model are not."""
    return not any(m._compiled_call_impl is not None or hasattr(m, "_orig_mod") for m in model.modules())


def _attention() -> dict[Any, Any]:
    counts = dict.fromkeys(_FUSED, _forward) | {f"{name}_backward": _backward for name in _FUSED}
    return {getattr(torch.ops.aten, name): count for name, count in counts.items() if hasattr(torch.ops.aten, name)}


def _forward(query: _Shape, key: _Shape, value: _Shape, *_: Any, out_shape: Any = None, **__: Any) -> int:
    return int(sdpa_flop_count(query, key, value))  # type: ignore[no-untyped-call]


def _backward(_: _Shape, query: _Shape, key: _Shape, value: _Shape, *__: Any, out_shape: Any = None, **___: Any) -> int:
    return 2 * int(sdpa_flop_count(query, key, value))  # type: ignore[no-untyped-call]
