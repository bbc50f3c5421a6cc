"""Shell-style patterns of parameter names, as in `Workload.freeze`: "*" is any text, "?" one letter, "[ab]" one of these."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether one of the patterns matches the whole name; upper and lower case are different."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def unmatched(patterns: Iterable[str], names: Sequence[str]) -> str | None:
    """The first pattern that matches none of the names; None if each matches one."""
    return next((p for p in patterns if not any(fnmatchcase(name, p) for name in names)), None)


def are_patterns(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(p, str) and p for p in value)
