"""The norm of all gradients of a sharded model, and clipping by it.

Each rank takes the norm of its shards, and the shard group adds the powers up: elements, padding left out, are counted once
however they are cut. The sum goes by shards, so its last bits differ from those of a model that is cut otherwise.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch import distributed as dist

from fsdp_lab.engine.errors import ShardError
from fsdp_lab.engine.fully_shard import sharded_parameters, units_of

_ROOM = 1e-6  # as torch's clip_grad_norm_ has it


def gradient_norm(module: nn.Module, norm_type: float = 2.0) -> float:
    """The `norm_type`-norm (inf too) of all gradients as one vector, in float64, equal on all ranks; collective.

    Raises:
        ShardError: a norm type of 0 or less.
    """
    if not norm_type > 0:
        raise ShardError(f"norm_type {norm_type} is refused; give a number above 0, or math.inf")
    gradients = [p.grad for p in sharded_parameters(module) if p.grad is not None and p.grad.numel()]
    largest = math.isinf(norm_type)
    grid = units_of(module)[0].grid
    total = torch.zeros((), dtype=torch.float64, device=grid.device)
    if gradients:
        each = _norms(gradients, norm_type).to(grid.device)
        total = each.max() if largest else each.pow(norm_type).sum()
    if grid.shards is not None:
        dist.all_reduce(total, op=dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=grid.shards)
    return float(total) if largest else float(total) ** (1.0 / norm_type)


def _norms(gradients: list[Tensor], norm_type: float) -> Tensor:
    """Each one's, in float64; sums are taken in float32 or better, as in a lower dtype they would overflow."""
    low = [g for g in gradients if g.dtype.itemsize < 4]
    others = [g for g in gradients if g.dtype.itemsize >= 4]
    each = list(torch._foreach_norm(low, norm_type, dtype=torch.float32)) if low else []
    each += torch._foreach_norm(others, norm_type) if others else []
    return torch.stack([norm.double() for norm in each])


def clip_gradients(module: nn.Module, max_norm: float, norm_type: float = 2.0) -> float:
    """Scale all gradients so that their norm is at most `max_norm`; collective. Returns the norm before.

    Raises:
        ShardError: a norm type of 0 or less, or a `max_norm` that is not above 0.
    """
    if not max_norm > 0:
        raise ShardError(f"max_norm {max_norm} is refused; give a number above 0")
    norm = gradient_norm(module, norm_type)
    if norm > max_norm:
        gradients = [p.grad for p in sharded_parameters(module) if p.grad is not None and p.grad.numel()]
        if gradients:
            torch._foreach_mul_(gradients, max_norm / (norm + _ROOM))
    return norm
