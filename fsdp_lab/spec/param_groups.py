"""`ParamGroup`: parameters, by patterns of names, with a learning rate or weight decay of their own; `unwrapped` names.

Patterns are shell-style, as in `Workload.freeze`: "*" is any text, "?" one letter, "[ab]" one of these."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from fsdp_lab.base.errors import is_number

_NAMES = {"match", "lr", "weight_decay"}
GroupKey = tuple[int, bool]  # the number of a group, -1 for the rest; whether it is a matrix


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Returns whether one of the patterns matches the whole name; upper and lower case are different."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def unmatched(patterns: Iterable[str], names: Sequence[str]) -> str | None:
    """The first pattern that matches none of the names; None if each matches one."""
    return next((p for p in patterns if not any(fnmatchcase(name, p) for name in names)), None)


def are_patterns(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(p, str) and p for p in value)


@dataclass(frozen=True, kw_only=True)
class ParamGroup:
    """A group of parameters with its own values; None: the workload's. Its `weight_decay` is that of vectors, too."""

    match: tuple[str, ...]
    lr: float | None = None
    weight_decay: float | None = None


def are_groups(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and all(map(_is_group, value))


def _is_group(value: Any) -> bool:
    if isinstance(value, ParamGroup):
        return True
    if not isinstance(value, Mapping) or not value.keys() <= _NAMES or not are_patterns(value.get("match")):
        return False
    lr, decay = value.get("lr"), value.get("weight_decay")
    numbers = all(n is None or (is_number(n) and math.isfinite(n) and n >= 0) for n in (lr, decay))
    return numbers and lr != 0 and (lr, decay) != (None, None)


def read_groups(value: Sequence[Any] | None) -> tuple[ParamGroup, ...] | None:
    """The groups, from what `are_groups` accepts."""
    if value is None:
        return None
    made = ({**g, "match": tuple(dict.fromkeys(g["match"]))} if isinstance(g, Mapping) else g for g in value)
    return tuple(g if isinstance(g, ParamGroup) else ParamGroup(**g) for g in made)


def key_of(groups: Sequence[ParamGroup] | None, name: str, dimensions: int) -> GroupKey:
    """The group of a parameter: the first that matches."""
    number = next((i for i, g in enumerate(groups or ()) if matches(name, g.match)), -1)
    return number, dimensions >= 2


# -- names of wrapped models -----------------------------------------------------------------------------------------

_IN_FRONT = "module."  # of DDP and DataParallel; elsewhere a module of the model may be named so
_ANYWHERE = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")


def unwrapped(name: str) -> str:
    """The name that a parameter had before DDP, FSDP1, torch.compile or checkpointing wrapped its module."""
    for part in _ANYWHERE:
        name = name.replace(part, "")
    return name.removeprefix(_IN_FRONT)
