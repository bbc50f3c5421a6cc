"""`freeze`: `Workload.freeze` on a model: parameters that are not trained, by patterns of their names."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from fsdp_lab.base.errors import SpecError
from fsdp_lab.spec.patterns import matches, unmatched

FIELD = "workload.freeze"


def frozen_names(model: nn.Module, patterns: Sequence[str] | None) -> list[str]:
    """The names of the parameters that the patterns freeze; a tied one goes by its first name.

    Raises:
        SpecError: a pattern matches nothing, or nothing is left to train.
    """
    if patterns is None:
        return []
    names = [name for name, _ in model.named_parameters()]
    if (wrong := unmatched(patterns, names)) is not None:
        others = [p for p in patterns if p != wrong]
        hint = f"give a pattern of names such as {names[0]}, {names[-1]}"
        raise SpecError(FIELD, f"{wrong!r} matches no parameter", hint, {"freeze": others or None})
    frozen = [name for name in names if matches(name, patterns)]
    if len(frozen) == len(names):
        raise SpecError(FIELD, "nothing is left to train", "leave a pattern out", {"freeze": None})
    return frozen


def freeze(model: nn.Module, patterns: Sequence[str] | None) -> None:
    """Clear `requires_grad` of these parameters. Raises SpecError as `frozen_names`, before any is changed."""
    for name in frozen_names(model, patterns):
        model.get_parameter(name).requires_grad_(False)
