"""Mistakes that would go unnoticed: optimizers over `model.parameters()`, which find no gradients, and `state_dict()`, which
would hold NaN."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_lab.engine.errors import ShardError
from fsdp_lab.engine.flat import OriginalParameter, is_absent
from fsdp_lab.engine.unit import Unit


def refuse_optimizers_of_originals() -> None:
    """Find optimizers that hold sharded parameters in place of flat shards, and let their next step raise ShardError.

    No other optimizer is touched. This looks at every object of the process, so it is called once for a model, and only
    where nobody has asked for its flat shards before its first backward.
    """
    for found in gc.get_objects():
        if issubclass(type(found), torch.optim.Optimizer) and any(map(_is_original, _parameters(found))):
            found.register_step_pre_hook(_refuse)


def refuse_state_dict(unit: Unit) -> None:
    """Of its modules, outside `unshard`: let `state_dict` and `load_state_dict` raise ShardError."""

    def saving(module: nn.Module, *_: Any) -> None:
        if not unit.pins:
            raise ShardError("state_dict() would hold NaN for parameters that are sharded; use full_state(model), "
                             "local_state(model), or `with unshard(model):`")  # fmt: skip

    def loading(module: nn.Module, *_: Any) -> None:
        if not unit.pins:
            raise ShardError("load_state_dict() cannot write to parameters that are sharded; use load_full_state(model, "
                             "values), or `with unshard(model):`")  # fmt: skip

    for module in unit.modules:
        module.register_state_dict_pre_hook(saving)  # type: ignore[no-untyped-call]
        module.register_load_state_dict_pre_hook(loading)  # type: ignore[no-untyped-call]


def _refuse(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    wrong = next(filter(_is_original, _parameters(optimizer)), None)
    if wrong is not None:
        name = wrong.fqn if isinstance(wrong, OriginalParameter) else "a parameter from before the model was sharded"
        raise ShardError(
            f"the optimizer was given {name}, whose gradient lives in flat shards; make it with sharded_parameters(model), "
            "or parameter_groups(model), in place of model.parameters()"
        )


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in getattr(optimizer, "param_groups", ()) for p in group["params"]]


def _is_original(p: Tensor) -> bool:
    return p.requires_grad and (isinstance(p, OriginalParameter) or is_absent(p))
