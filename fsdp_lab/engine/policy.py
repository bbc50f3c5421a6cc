"""`Policy`: a strategy in torch's terms, as one unit needs it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

import torch
from torch import nn

from fsdp_lab.schedule import Rules
from fsdp_lab.spec import Strategy

DTYPES: Mapping[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Kind(Enum):
    """What precision asks of a module before it says the dtype of its parameters."""

    PLAIN = "plain"
    NORM = "norm"
    BATCH_NORM = (
        "batch norm"  # torch wants its parameters in the dtype of its running statistics: both stay as they are
    )


@dataclass(frozen=True, kw_only=True)
class Policy:
    """A dtype of None leaves things in the dtype they have."""

    param: torch.dtype | None  # gathered parameters, hence inputs and products
    norm: torch.dtype | None  # the same, of normalisation layers
    reduce: torch.dtype | None
    output: torch.dtype | None
    buffer: torch.dtype | None
    low_gradients: bool  # gradient shards stay in the reduce dtype until the optimizer's step
    offload: str
    whole_gradients: bool  # ZeRO-1: gradients keep their unsharded size ...
    whole_parameters: bool  # ... and gathered parameters their storage, between steps
    reshard_to_few: bool  # after the forward, to a smaller group
    rules: Rules

    @classmethod
    def of(cls, strategy: Strategy) -> Policy:
        d = strategy.dtypes
        param = None if d.param == "fp32" else DTYPES[d.param]
        norm = param if d.norm is None else DTYPES[d.norm]
        return cls(
            param=param,
            norm=None if norm is torch.float32 else norm,
            reduce=DTYPES[d.reduce] if d.reduce != "fp32" or param is not None else None,
            output=None if d.output is None else DTYPES[d.output],
            buffer=None if d.buffer is None else DTYPES[d.buffer],
            low_gradients=d.keep_low_precision_gradients,
            offload=strategy.offload,
            whole_gradients=strategy.sharding == "zero1",
            whole_parameters=strategy.sharding == "zero1",
            reshard_to_few=strategy.reshard_size is not None,
            rules=Rules.of(strategy),
        )

    def gathered(self, own: torch.dtype, kind: Kind) -> torch.dtype:
        """The dtype in which a parameter of dtype `own`, of a module of that kind, is gathered."""
        wanted = {Kind.PLAIN: self.param, Kind.NORM: self.norm, Kind.BATCH_NORM: None}[kind]
        return wanted if wanted is not None and own.is_floating_point else own

    def reduced(self, own: torch.dtype) -> torch.dtype:
        """The dtype in which its gradient is reduced."""
        return self.reduce if self.reduce is not None and own.is_floating_point else own


def kind_of(module: nn.Module) -> Kind:
    """Norms are torch's own classes, and those that say so by their name."""
    if "Norm" not in type(module).__name__ or next(module.children(), None) is not None:
        return Kind.PLAIN
    return Kind.NORM if getattr(module, "running_mean", None) is None else Kind.BATCH_NORM
