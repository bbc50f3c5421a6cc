"""`Scaler`: loss scaling for fp16, alike for all backends.

The overflow check needs no pass of its own: the vote that ends a step carries the squared gradient norm over all ranks,
and that is not finite exactly where some gradient is not (Micikevicius et al. 2018, section 3.2, for the method).
"""

from __future__ import annotations

from dataclasses import dataclass

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
