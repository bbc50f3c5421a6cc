"""`Lora`: low-rank adapters (arXiv 2106.09685): W x + alpha / r * B A x, where W is frozen, and A and B are trained."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fsdp_lab.base.errors import SpecError, is_number, is_whole

FIELD = "workload.lora"
_HINT = 'give {"r": 8}, and if you like alpha (a number above 0) and targets (a list of module names)'


@dataclass(frozen=True, kw_only=True)
class Lora:
    """`r`: the rank. `alpha`: None: 2 r. `targets`: names of the modules that get adapters, such as "q_proj"; None: those
    that peft chooses for the type of model. Raises SpecError."""

    r: int
    alpha: float | None = None
    targets: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if not is_whole(self.r):
            raise _refused("r", self.r)
        if self.alpha is not None and not (is_number(self.alpha) and 0 < self.alpha < float("inf")):
            raise _refused("alpha", self.alpha)
        if self.targets is not None:
            given = self.targets
            if isinstance(given, str) or not isinstance(given, Sequence) or not given:
                raise _refused("targets", given)
            if not all(isinstance(name, str) and name for name in given):
                raise _refused("targets", given)
            object.__setattr__(self, "targets", tuple(dict.fromkeys(given)))

    @classmethod
    def of(cls, given: Any) -> Lora | None:
        """From its fields as a mapping, or None."""
        if given is None or isinstance(given, cls):
            return given
        names = [f.name for f in dataclasses.fields(cls)]
        if not isinstance(given, Mapping) or not set(given) <= set(names) or "r" not in given:
            raise SpecError(FIELD, f"{given!r} is refused", _HINT, {"lora": None})
        return cls(**given)

    @property
    def scale(self) -> float:
        """alpha, with None resolved."""
        return 2.0 * self.r if self.alpha is None else float(self.alpha)


def _refused(name: str, value: Any) -> SpecError:
    return SpecError(FIELD, f"{name}={value!r} is refused", _HINT, {"lora": None})
