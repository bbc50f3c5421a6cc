"""Errors that several floors raise. Floor 0: the standard library."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

DISTRIBUTIONS = {
    "IPython": "ipython",
    "PIL": "pillow",
    "yaml": "pyyaml",
}  # import name -> distribution, if not the same


class FieldError(ValueError):
    """A refused value. `str()` is "field: reason; way out".

    Attributes:
        field: dotted name, such as "strategy.sharding".
        reason: why it cannot be.
        way_out: what to do instead, in words.
        fix: the way out as flat field values for `Spec.replace`, empty where there is no single one.
    """

    def __init__(self, field: str, reason: str, hint: str, fix: Mapping[str, Any] | None = None) -> None:
        super().__init__(f"{field}: {reason}; {hint}")
        self.field = field
        self.reason = reason
        self.hint = hint
        self.fix: dict[str, Any] = dict(fix or {})

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.field, self.reason, self.hint, self.fix))


class SpecError(FieldError):
    """A refused field of a Spec, such as "strategy.sharding", or a combination of them."""


class ArgumentError(FieldError):
    """A refused argument that is no field of a Spec, such as "passes" or "evaluate.every"."""


def not_installed(part: str, error: ModuleNotFoundError) -> ModuleNotFoundError:
    """The error for a `part` of fsdp_lab whose import failed: it names the package and the command that installs it."""
    module = (error.name or "").partition(".")[0]
    if module in ("", "fsdp_lab"):
        return error  # not a package that is missing, but a bug here
    package = DISTRIBUTIONS.get(module, module)
    install = f"{sys.executable} -m pip install {package}"
    return ModuleNotFoundError(f"{part} needs {package}, which is not installed: {install}", name=error.name)
