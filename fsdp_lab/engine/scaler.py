"""`Scaler`: loss scaling for fp16, alike on all ranks (Micikevicius et al. 2018, section 3.2).

Small fp16 gradients would vanish, so the loss is multiplied by `scale` and gradients are divided by it before the optimizer.
A gradient that is not finite means that the scale was too large: that step is skipped. With sharded gradients one rank
alone may see it, so all must agree. In the lab the vote that ends a step carries the squared norm over all ranks, which is
not finite exactly where some gradient is not; by itself the engine asks with `unscale_gradients`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fsdp_lab.engine.fully_shard import raise_gradients, sharded_parameters
from fsdp_lab.engine.norms import gradient_norm

GROWTH = 2.0
BACKOFF = 0.5
GROWTH_INTERVAL = 2000  # steps without an overflow before the scale grows
LARGEST = 2.0**24


@dataclass(kw_only=True)
class Scaler:
    """`scale` multiplies the loss; 1 and constant where `enabled` is not set."""

    enabled: bool
    scale: float = 1.0
    good_steps: int = 0

    def __post_init__(self) -> None:
        if self.enabled and self.scale == 1.0:
            self.scale = 2.0**16

    def update(self, *, overflowed: bool) -> None:
        """After each step, with the same answer on every rank."""
        if not self.enabled:
            return
        if overflowed:
            self.scale, self.good_steps = max(1.0, self.scale * BACKOFF), 0
            return
        self.good_steps += 1
        if self.good_steps >= GROWTH_INTERVAL:
            self.scale, self.good_steps = min(LARGEST, self.scale * GROWTH), 0

    def scale_loss(self, loss: Tensor) -> Tensor:
        """What `backward` is called on."""
        return loss * self.scale

    def unscale_gradients(self, module: nn.Module) -> bool:
        """Divide the gradients of a sharded model by the scale; collective.

        Returns:
            Whether the optimizer may step: False, on every rank, where any gradient of any rank is not finite.
        """
        if self.enabled:
            raise_gradients(module)  # divided in fp16 they would vanish
        gradients = [p.grad for p in sharded_parameters(module) if p.grad is not None and p.grad.numel()]
        if self.enabled and gradients:
            torch._foreach_mul_(gradients, 1.0 / self.scale)
        return math.isfinite(gradient_norm(module))
