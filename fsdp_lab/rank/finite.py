"""`NotFinite`: a step whose loss or gradients are not finite, and with whom that began.

A loss is a rank's own. A gradient shard is not: it is a sum over ranks, and one rank's NaN is in the shards of all. So where
the losses are finite, the step, which nobody has applied, is done again, and each rank looks at what it gives to the sums.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fsdp_lab.backends import Backend
from fsdp_lab.wire import Hub, RankAborted, Wire

_SUMS = ("reduce_scatter", "all_reduce")
_WAY_OUT = "the step was applied on no rank; lower lr, set clip_norm, or use precision bf16 or fp32"


class NotFinite(RuntimeError):
    """The loss or a gradient of this rank is not finite."""


def not_finite(*, step: int, loss: float, backend: Backend, world: Wire, again: Callable[[], object]) -> RuntimeError:
    """What this rank is to raise after a vote that said so, while its gradients are there; collective.

    Args:
        step, loss: of this rank.
        again: does forward and backward of the step once more, from no gradients.

    Returns:
        `NotFinite`, where it is this rank's, and where only the sum is not finite on rank 0; `RankAborted` on others.
    """
    rank = world.rank()
    losses = _tell(world, 0.0 if math.isfinite(loss) else 1.0)
    if any(losses):
        return _word(rank, losses, f"its loss in step {step} is {loss}", f"its loss in step {step} is not finite")
    name = _last_bad(backend, world)
    mine = f"its gradient of {name} in step {step} is not finite"
    if not name:
        whole = f"the gradient norm of step {step} is not finite, though each gradient is"
        return _word(rank, [1.0], whole, whole)
    if world.size() == 1:
        return _word(rank, [1.0], mine, mine)
    sums = _tell(world, _first_bad_sum(world.hub, again))
    if any(sums):
        first = min(number for number in sums if number)
        return _word(rank, [number == first for number in sums], mine, mine)
    whole = f"the gradient of {name} in step {step} is not finite, and what each rank gives to that sum is, done again"
    return _word(rank, [1.0], whole, whole)


def _word(rank: int, theirs: Sequence[object], mine: str, others: str) -> RuntimeError:
    """`theirs` is true of the ranks whose it is, as far as it goes."""
    if any(theirs[rank : rank + 1]):
        return NotFinite(f"{mine}; {_WAY_OUT}")
    first = next(r for r, its in enumerate(theirs) if its)
    return RankAborted(f"rank {first} failed: NotFinite: {others}")


def _tell(world: Wire, mine: float) -> list[float]:
    """What every rank tells, in rank order."""
    told = torch.zeros(world.size(), dtype=torch.float64)
    told[world.rank()] = mine
    world.control(told)
    values: list[float] = told.tolist()
    return values


def _last_bad(backend: Backend, world: Wire) -> str:
    """The last parameter, in the model's order, that has a gradient which is not finite on any rank: a backward, which goes
    the other way, comes to it first. "" where each is finite, and their norm alone is not."""
    pieces = backend.pieces()
    gradients = ((i, backend.gradient(piece)) for i, piece in enumerate(pieces))
    mine = max((i + 1 for i, g in gradients if g is not None and _bad(g)), default=0)
    last = int(max(_tell(world, float(mine))))
    return pieces[last - 1].name if last else ""


def _first_bad_sum(hub: Hub, again: Callable[[], object]) -> float:
    """The number, from 1, of the first sum to which this rank gives something that is not finite; 0: it gives no such."""
    count, found = 0, 0

    def look(tensors: Sequence[Tensor]) -> None:
        nonlocal count, found
        if hub.last is not None and hub.last.kind in _SUMS:
            count += 1
            found = found or (count if _bad(tensors[0]) else 0)  # the first is what it gives

    before, hub.watch = hub.watch, look
    try:
        again()
    finally:
        hub.watch = before
    return float(found)


def _bad(t: Tensor) -> bool:
    return not bool(torch.isfinite(t).all())
