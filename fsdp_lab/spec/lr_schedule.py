"""`LrSchedule`: the learning rate over the steps of a training, as a factor on `Workload.lr`.

The factor depends on the number of the step alone, so that a resumed or switched training has the same rates bit for bit. A
step whose update fp16 overflow skips is counted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from fsdp_lab.base.errors import SpecError

LR_SCHEDULES = ("constant", "linear", "cosine")
_ENOUGH_STEPS = 1000  # proposed after the warm-up, where no end is given


@dataclass(frozen=True, kw_only=True)
class LrSchedule:
    """A linear warm-up to the full rate, then `kind`. Raises SpecError for an end that is missing, or has no meaning.

    Attributes:
        warmup_steps: step n < warmup_steps has (n + 1) / warmup_steps of the rate, so that no step has none.
        decay_steps: the first step at the rate of the end, which later steps keep. How long a run trains is not part of a
            Spec, so it must be given for all kinds but "constant", which has none.
        end: the rate there, as a share of the full rate.
    """

    kind: str = "constant"
    warmup_steps: int = 0
    decay_steps: int | None = None
    end: float = 0.0

    def __post_init__(self) -> None:
        if self.kind == "constant":
            if self.decay_steps is not None or self.end:
                name = "lr_end" if self.decay_steps is None else "decay_steps"
                raise _refused(name, "a constant rate has no end", "leave it out, or use lr_schedule linear or cosine",
                               decay_steps=None, lr_end=0.0)  # fmt: skip
            return
        enough = self.warmup_steps + _ENOUGH_STEPS
        if self.decay_steps is None:
            raise _refused("decay_steps", f"{self.kind} needs the step at which it ends", f"give one, such as {enough}",
                           decay_steps=enough)  # fmt: skip
        if self.decay_steps <= self.warmup_steps:
            raise _refused("decay_steps", f"{self.decay_steps} is not after the {self.warmup_steps} steps of the warm-up",
                           "give a later step, or fewer warmup_steps", decay_steps=enough)  # fmt: skip

    @property
    def varies(self) -> bool:
        return self.kind != "constant" or self.warmup_steps > 1

    def factor(self, step: int) -> float:
        """For the update of step 0, 1, 2, ..."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.decay_steps is None:
            return 1.0
        done = min(1.0, (step - self.warmup_steps) / (self.decay_steps - self.warmup_steps))
        left = 1.0 - done if self.kind == "linear" else (1.0 + math.cos(math.pi * done)) / 2
        return self.end + (1.0 - self.end) * left


def _refused(name: str, reason: str, hint: str, **fix: Any) -> SpecError:
    return SpecError(f"workload.{name}", reason, hint, fix)
