"""An optimizer over `model.parameters()` would find no gradient there and change nothing, silently. Here it is told so.

No hook of a model sees an optimizer's step, so as long as there is a sharded model this one is hung on all optimizers.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fsdp_lab.engine.errors import ShardError
from fsdp_lab.engine.flat import OriginalParameter, is_absent


def refuse_originals(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Before a step. Raises ShardError where the optimizer was given a trainable parameter that is sharded."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.requires_grad and (isinstance(p, OriginalParameter) or is_absent(p)):
                early = "a parameter from before the model was sharded"
                name = p.flat.names[p.number] if isinstance(p, OriginalParameter) else early
                raise ShardError(
                    f"the optimizer was given {name}, whose gradient lives in flat shards; make it with "
                    "sharded_parameters(model), or parameter_groups(model), in place of model.parameters()"
                )


def watch_optimizers(owner: object) -> None:
    """Refuse from now on, until `owner` is gone."""
    handle = register_optimizer_step_pre_hook(refuse_originals)
    weakref.finalize(owner, handle.remove)
