"""`Scaler`: loss scaling for fp16. `upcast_gradients`: for an optimizer that needs gradients in the masters' dtype.

Small fp16 gradients would vanish, so the loss is multiplied by `scale` and gradients are divided by it before the optimizer
(Micikevicius et al. 2018, section 3.2). A gradient that is not finite means that the scale was too large: that step is
skipped. With sharded gradients one rank alone may see it, so all must agree: in the lab the vote that ends a step carries
the squared norm over all ranks, which is not finite exactly where some gradient is not. Elsewhere torch's GradScaler and
`clip_grad_norm_` serve, over `module.parameters()` or flat shards.
"""

from dataclasses import dataclass

from torch import nn

from fsdp_lab.engine.api import flats_of
from fsdp_lab.engine.collectives import ShardError

GROWTH = 2.0
BACKOFF = 0.5
GROWTH_INTERVAL = 2000  # steps without an overflow before the scale grows
LARGEST = 2.0**24


def upcast_gradients(module: nn.Module) -> None:
    """Under `keep_low_precision_gradients`, brings gradients to the masters' dtype, for an optimizer that needs them so."""
    for flat in flats_of(module):
        flat.gradients.upcast()


@dataclass(kw_only=True)
class Scaler:
    """`scale` multiplies the loss; 1 and constant where `enabled` is not set."""

    enabled: bool
    scale: float = 1.0
    good_steps: int = 0

    def __post_init__(self) -> None:
        if not self.scale > 0:
            raise ShardError(f"scale {self.scale} is refused; give a number above 0")
        if self.enabled and self.scale == 1.0:
            self.scale = 2.0**16

    def update(self, *, overflowed: bool) -> None:
        """Called after each step, with the same answer on every rank."""
        if self.enabled and overflowed:
            self.scale, self.good_steps = max(1.0, self.scale * BACKOFF), 0
        elif self.enabled:
            self.good_steps += 1
            if self.good_steps >= GROWTH_INTERVAL:
                self.scale, self.good_steps = min(LARGEST, self.scale * GROWTH), 0
