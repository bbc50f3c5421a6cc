"""The norm of all gradients of a sharded model, clipping by it, and `Scaler`: loss scaling for fp16.

Each rank takes the norm of its shards, and the shard group of each unit sums the powers: elements, without padding, are
counted once however they are cut, and so are replicated ones, which every rank has. The sum goes by shards, so its last bits
differ from those of a model that is cut otherwise. torch's `clip_grad_norm_` and GradScaler do the same over
`module.parameters()`, with a kernel for each parameter where here there is one for each buffer.

Small fp16 gradients would vanish, so the loss is multiplied by `scale` and gradients are divided by it before the optimizer
(Micikevicius et al. 2018, section 3.2). A gradient that is not finite means that the scale was too large: that step is
skipped. With sharded gradients one rank alone may see it, so all must agree. In the lab the vote that ends a step carries
the squared norm over all ranks, which is not finite exactly where some gradient is not; by itself the engine asks with
`unscale_gradients`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, distributed as dist, nn

from fsdp_lab.engine.api import flats_of, units_of
from fsdp_lab.engine.collectives import Group
from fsdp_lab.engine.errors import ShardError, not_sharded
from fsdp_lab.engine.flat import FlatBuffer

_ROOM = 1e-6  # as in torch's clip_grad_norm_
GROWTH = 2.0
BACKOFF = 0.5
GROWTH_INTERVAL = 2000  # steps without an overflow before the scale grows
LARGEST = 2.0**24


def gradient_norm(module: nn.Module, norm_type: float = 2.0) -> float:
    """The `norm_type`-norm (inf too) of all gradients as one vector, in float64, equal on all ranks; collective.

    Raises ShardError: a norm type of 0 or less.
    """
    norm_type = _above_zero("norm_type", norm_type)
    largest, totals = math.isinf(norm_type), []
    for group, flats in _by_shard_group(module).items():
        device = flats[0].mesh.device
        total, gradients = torch.zeros((), dtype=torch.float64, device=device), _gradients(flats)
        if gradients:
            each = _norms(gradients, norm_type).to(device)
            total = each.max() if largest else each.pow(norm_type).sum()
        if group is not None:
            with flats[0].mesh.answered("gradient_norm"):
                dist.all_reduce(total, op=dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=group)
        totals.append(total)
    if not totals:
        return 0.0
    total = torch.stack(totals).max() if largest else torch.stack(totals).sum()
    return float(total) if largest else float(total) ** (1.0 / norm_type)


def _by_shard_group(module: nn.Module) -> dict[Group | None, list[FlatBuffer]]:
    """Buffers whose shards together are whole, in an order that is the same on all ranks; under None the replicated ones."""
    groups: dict[Group | None, list[FlatBuffer]] = {}
    for flat in _flats(module):
        groups.setdefault(flat.mesh.shard_group, []).append(flat)
    return groups


def _norms(gradients: list[Tensor], norm_type: float) -> Tensor:
    """Each one's, in float64; sums are taken in float32 or better, as in a lower dtype they would overflow."""
    low = [g for g in gradients if g.dtype.itemsize < 4]
    others = [g for g in gradients if g.dtype.itemsize >= 4]
    each = list(torch._foreach_norm(low, norm_type, dtype=torch.float32)) if low else []
    each += torch._foreach_norm(others, norm_type) if others else []
    return torch.stack([norm.double() for norm in each])


def clip_gradients(module: nn.Module, max_norm: float, norm_type: float = 2.0) -> float:
    """Scale all gradients so that their norm is at most `max_norm`; collective. Returns the norm before.

    Raises ShardError: a norm type of 0 or less, or a `max_norm` that is not above 0.
    """
    max_norm = _above_zero("max_norm", max_norm)
    norm = gradient_norm(module, norm_type)
    if norm > max_norm:
        gradients = _gradients(_flats(module))
        if gradients:
            torch._foreach_mul_(gradients, max_norm / (norm + _ROOM))
    return norm


def upcast_gradients(module: nn.Module) -> None:
    """Under `keep_low_precision_gradients`, brings gradients to the masters' dtype, for an optimizer that needs them so."""
    for flat in _flats(module):
        flat.gradients.upcast()


def _above_zero(name: str, given: object) -> float:
    """The number, from a number or its text, as torch accepts it."""
    try:
        value = float(given)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        value = math.nan
    if not value > 0:
        raise ShardError(f"{name} {given} is refused; give a number above 0, or math.inf")
    return value


def _flats(module: nn.Module) -> list[FlatBuffer]:
    """The flat buffers of all units. Raises ShardError for a module without units: to say 0 would hide a mistake."""
    if not units_of(module):
        raise not_sharded(module)
    return flats_of(module)


def _gradients(flats: Iterable[FlatBuffer]) -> list[Tensor]:
    """The gradients of the flat shards that have one with elements."""
    shards = [flat.gradients.local() for flat in flats]
    return [g for g in shards if g is not None and g.numel()]


@dataclass(kw_only=True)
class Scaler:
    """`scale` multiplies the loss; 1 and constant where `enabled` is not set."""

    enabled: bool
    scale: float = 1.0
    good_steps: int = 0

    def __post_init__(self) -> None:
        self.scale = _above_zero("scale", self.scale)
        if self.enabled and self.scale == 1.0:
            self.scale = 2.0**16

    def update(self, *, overflowed: bool) -> None:
        """Called after each step, with the same answer on every rank."""
        if not self.enabled:
            return
        if overflowed:
            self.scale, self.good_steps = max(1.0, self.scale * BACKOFF), 0
            return
        self.good_steps += 1
        if self.good_steps >= GROWTH_INTERVAL:
            self.scale, self.good_steps = min(LARGEST, self.scale * GROWTH), 0

    def scale_loss(self, loss: Tensor) -> Tensor:
        """The scaled loss, on which `backward` is called."""
        return loss * self.scale

    def unscale_gradients(self, module: nn.Module) -> bool:
        """Divide the gradients of a sharded model by the scale; collective.

        Returns:
            Whether the optimizer may step: False, on every rank, where any gradient of any rank is not finite.
        """
        if self.enabled:
            upcast_gradients(module)  # divided in fp16 they would vanish
        gradients = _gradients(_flats(module))
        if self.enabled and gradients:
            torch._foreach_mul_(gradients, 1.0 / self.scale)
        return math.isfinite(gradient_norm(module))
