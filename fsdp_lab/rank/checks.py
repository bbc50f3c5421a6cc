"""Checks of what a step computes: `not_finite` finds where a NaN began, `checksum` compares parameters across layouts.

A loss belongs to one rank. A gradient shard does not: it is a sum over ranks, so that a NaN of one rank is in all
shards. So if the losses are finite, the step, which no rank has applied, is computed again, and each rank checks its
own summands."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fsdp_lab.backends import Backend
from fsdp_lab.wire import RankAborted, Wire, WireContext

_SUMS = ("reduce_scatter", "all_reduce")
_HINT = "the step was applied on no rank; lower lr, set clip_norm, or use precision bf16 or fp32"
_CHUNK = 1 << 20  # elements at a time: the temporaries are several times their size
_STRIDE = 0x9E3779B97F4A7C15 - (1 << 64)  # odd, so that no two positions of a parameter have the same weight


class NotFinite(RuntimeError):
    """The loss or a gradient of this rank is not finite."""


def not_finite(*, step: int, loss: float, backend: Backend, world: Wire, again: Callable[[], object]) -> RuntimeError:
    """The exception for this rank after a vote that was not finite, while its gradients exist; collective.

    Args:
        step, loss: of this rank.
        again: repeats forward and backward of the step, starting without gradients.

    Returns:
        `NotFinite` on the rank that caused it, or on rank 0 if only the sum is not finite; `RankAborted` on the others.
    """
    rank = world.rank()
    losses = _gather(world, 0.0 if math.isfinite(loss) else 1.0)
    if any(losses):
        return _error(rank, losses, f"its loss in step {step} is {loss}", f"its loss in step {step} is not finite")
    name = _last_bad_gradient(backend, world)
    mine = f"its gradient of {name} in step {step} is not finite"
    if not name:
        whole = f"the gradient norm of step {step} is not finite, though each gradient is"
        return _error(rank, [1.0], whole, whole)
    if world.size() == 1:
        return _error(rank, [1.0], mine, mine)
    sums = _gather(world, _first_bad_summand(world.context, again))
    if any(sums):
        first = min(number for number in sums if number)
        return _error(rank, [number == first for number in sums], mine, mine)
    whole = f"the gradient of {name} in step {step} is not finite, though each rank's summand, computed again, is"
    return _error(rank, [1.0], whole, whole)


def _error(rank: int, guilty: Sequence[object], mine: str, others: str) -> RuntimeError:
    """`guilty`: by rank, true for the ranks that caused it; may be shorter than the world size."""
    if any(guilty[rank : rank + 1]):
        return NotFinite(f"{mine}; {_HINT}")
    first = next(r for r, is_guilty in enumerate(guilty) if is_guilty)
    return RankAborted(f"rank {first} failed: NotFinite: {others}")


def _gather(world: Wire, mine: float) -> list[float]:
    """The values of all ranks, in rank order."""
    gathered = torch.zeros(world.size(), dtype=torch.float64)
    gathered[world.rank()] = mine
    world.control(gathered)
    values: list[float] = gathered.tolist()
    return values


def _last_bad_gradient(backend: Backend, world: Wire) -> str:
    """The last parameter, in model order, whose gradient is not finite on some rank: the backward reaches it first. ""
    if all gradients are finite, and only their norm is not."""
    shards = backend.param_shards()
    gradients = ((i, backend.gradient(shard)) for i, shard in enumerate(shards))
    mine = max((i + 1 for i, g in gradients if g is not None and _bad(g)), default=0)
    last = int(max(_gather(world, float(mine))))
    return shards[last - 1].name if last else ""


def _first_bad_summand(context: WireContext, again: Callable[[], object]) -> float:
    """The number, from 1, of the first sum to which this rank contributes a non-finite value; 0 if none."""
    count, found = 0, 0

    def look(tensors: Sequence[Tensor]) -> None:
        nonlocal count, found
        if context.last is not None and context.last.kind in _SUMS:
            count += 1
            found = found or (count if _bad(tensors[0]) else 0)  # the first tensor is its summand

    before, context.on_issue = context.on_issue, look
    try:
        again()
    finally:
        context.on_issue = before
    return float(found)


def _bad(t: Tensor) -> bool:
    return not bool(torch.isfinite(t).all())


def checksum(backend: Backend) -> int:
    """This rank's part: the parts of all ranks of a replica add up, modulo 2^64, to the checksum of the whole
    parameters.

    Each element's 32 bits (fp32; -0 as 0) are weighted by its parameter's name and its position in it, and summed
    modulo 2^64, so that the sum does not depend on the sharding. Padding is in no shard. A single different element
    changes the sum."""
    total = 0
    for shard in backend.param_shards():
        seed = int.from_bytes(hashlib.blake2b(shard.name.encode(), digest_size=8).digest(), "little", signed=True)
        for first in range(0, shard.numel, _CHUNK):
            bits = (shard.local[first : first + _CHUNK].detach() + 0.0).view(torch.int32).long()
            weights = torch.arange(bits.numel(), device=bits.device).add_(shard.start + first).mul_(_STRIDE).add_(seed)
            total += int(bits.mul_(weights.bitwise_or_(1)).sum())
    return total % (1 << 64)
