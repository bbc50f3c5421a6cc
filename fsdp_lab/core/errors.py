"""Errors of fields and arguments that many parts raise, and checks of numbers that raise them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, TypeGuard

# Import name -> distribution, if not the same.
DISTRIBUTIONS = {"IPython": "ipython", "PIL": "pillow", "yaml": "pyyaml"}


class FieldError(ValueError):
    """An invalid value. `str()` is "field: reason; hint".

    Attributes:
        field: dotted name, such as "strategy.sharding".
        reason: why it is invalid.
        hint: what to do instead.
        fix: flat field values for `Spec.replace` that follow the hint; empty if there is no single solution.
    """

    def __init__(self, field: str, reason: str, hint: str, fix: Mapping[str, Any] | None = None) -> None:
        super().__init__(f"{field}: {reason}; {hint}")
        self.field = field
        self.reason = reason
        self.hint = hint
        self.fix: dict[str, Any] = dict(fix or {})

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.field, self.reason, self.hint, self.fix))

    def to_dict(self) -> dict[str, Any]:
        return {"kind": type(self).__name__, "arguments": [self.field, self.reason, self.hint, self.fix]}

    @classmethod
    def from_dict(cls, d: Mapping[str, Any]) -> FieldError:
        kind = next((kind for kind in cls.__subclasses__() if kind.__name__ == d["kind"]), cls)
        return kind(*d["arguments"])


class SpecError(FieldError):
    """An invalid field of a Spec, such as "strategy.sharding", or an invalid combination of fields."""


class ArgumentError(FieldError):
    """An invalid argument that is no field of a Spec, such as "passes" or "evaluate.every"."""


def is_whole(value: object, least: int = 1) -> TypeGuard[int]:
    """Whether it is an int of at least `least`; a bool is not."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_number(value: object) -> TypeGuard[float]:
    """Whether it is an int or a float, also infinite or NaN; a bool is not."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def check_whole(field: str, value: object, least: int = 1, wanted: str = "") -> None:
    """Raises ArgumentError unless it is an int of at least `least`. `wanted` replaces that description in the hint."""
    if not is_whole(value, least):
        wanted = wanted or f"a whole number of {least} or more"
        raise ArgumentError(field, f"{value!r} is refused", f"give {wanted}")


def not_installed(part: str, error: ModuleNotFoundError) -> ModuleNotFoundError:
    """The error for a `part` of fsdp_lab whose import failed, with the missing package and the command that installs it."""
    module = (error.name or "").partition(".")[0]
    if module in ("", "fsdp_lab"):
        return error  # not a package that is missing, but a bug here
    package = DISTRIBUTIONS.get(module, module)
    install = f"{sys.executable} -m pip install {package}"
    return ModuleNotFoundError(f"{part} needs {package}, which is not installed: {install}", name=error.name)
