"""What the fields of a Spec accept, as metadata of the fields, and the checks by it."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fsdp_lab.base.errors import SpecError, is_number, is_whole

# "accepts": whether a value other than the default is valid; "wanted": what is, for a hint; "json": see `as_json`
Values = Mapping[str, Any]


def values(accepts: Callable[[Any], bool], wanted: str) -> Values:
    return {"accepts": accepts, "wanted": wanted}


def one_of(tokens: Sequence[str]) -> Values:
    return values(lambda v: v in tokens, "one of " + ", ".join(tokens))


def whole(least: int) -> Values:
    return values(lambda v: is_whole(v, least), f"a whole number of {least} or more")


def matching(pattern: str, wanted: str) -> Values:
    return values(lambda v: isinstance(v, str) and re.fullmatch(pattern, v) is not None, wanted)


def text(wanted: str) -> Values:
    return values(lambda v: isinstance(v, str) and bool(v), wanted)


POSITIVE = values(lambda v: is_number(v) and math.isfinite(v) and v > 0, "a finite number above 0")
NOT_NEGATIVE = values(lambda v: is_number(v) and math.isfinite(v) and v >= 0, "a finite number of 0 or more")
BOOL = values(lambda v: isinstance(v, bool), "true or false")


def as_json(accepted: Values) -> Values:
    """Of a field whose values a command line gives as JSON, because they contain commas."""
    return {**accepted, "json": True}


def check_value(name: str, value: Any, accepted: Values) -> None:
    """Raises SpecError unless the value is accepted."""
    if not accepted["accepts"](value):
        raise SpecError(name, f"{value!r} is refused", f"give {accepted['wanted']}")


def check_fields(prefix: str, part: Any) -> None:
    """Raises SpecError for the first field of a dataclass whose value is neither accepted nor the default."""
    for f in dataclasses.fields(part):
        if (value := getattr(part, f.name)) is not f.default:
            check_value(f"{prefix}.{f.name}", value, f.metadata)
