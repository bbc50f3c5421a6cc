"""Errors of fields and arguments that many parts raise, and checks of numbers that raise them."""

import os
import sys
import traceback
from collections.abc import Mapping
from enum import StrEnum
from itertools import takewhile
from pathlib import Path
from typing import Any, Self, TypeGuard

_PACKAGE = str(Path(__file__).parents[1]) + os.sep
# Import name -> distribution, if not the same.
DISTRIBUTIONS = {"IPython": "ipython", "PIL": "pillow"}
# Package -> the extra of pyproject.toml that brings it.
EXTRAS = {"peft": "lora"} | dict.fromkeys(("mlflow", "tensorboard", "trackio", "wandb"), "trackers")
EXTRAS |= dict.fromkeys(("anywidget", "bokeh", "ipywidgets", "jinja2"), "page")


class Cause(StrEnum):
    """A known trouble of a run, by a short name; see `fsdp_lab.runs.diagnosis`."""

    LOADING = "loading"
    ADAPTERS = "adapters"
    ACCUMULATION = "accumulation"
    BATCHES = "batches"
    GENERATION = "generation"
    COMMUNICATION = "communication"
    OFFLOAD = "offload"
    COMPILATION = "compilation"
    REPLICAS = "replicas"
    CHECKPOINT = "checkpoint"
    LATE = "late"
    UPDATES = "updates"


class SentenceError(Exception):
    """An error whose message says all. A notebook shows the line of the cell and the message, and `%tb verbose` the whole
    traceback. `cause`: of a failed run, where it is a known one."""

    cause: Cause | None = None

    def _render_traceback_(self) -> list[str]:
        shell: Any = sys.modules["IPython"].get_ipython()  # which calls this
        if shell.InteractiveTB.mode == "Verbose":
            return list(shell.InteractiveTB.structured_traceback(type(self), self, self.__traceback__))
        name_of = getattr(shell.compile, "format_code_name", lambda file: None)  # "Cell", "In[3]"
        before_ours = takewhile(lambda f: not f.filename.startswith(_PACKAGE), traceback.extract_tb(self.__traceback__))
        frames = [f for f in before_ours if f"{os.sep}IPython{os.sep}" not in f.filename]
        places = [" ".join(name_of(f.filename) or ("File", f.filename)) for f in frames]
        lines = [f"{place}, line {f.lineno}\n----> {f.line}" for place, f in zip(places, frames, strict=True)]
        return [*lines, f"{type(self).__name__}: {self}"]


class FieldError(SentenceError, ValueError):
    """An invalid value of a `field`, by its dotted name such as "strategy.sharding". `str()` is "field: reason; hint".

    `fix`: flat field values for `Spec.replace` that follow the hint; empty if there is no single solution. `first_hint`:
    the hint without `other`, which is another way out, such as "use backend lab"."""

    def __init__(
        self,
        field: str,
        reason: str,
        hint: str,
        fix: Mapping[str, Any] | None = None,
        cause: Cause | None = None,
        *,
        other: str = "",
    ) -> None:
        self.cause = Cause(cause) if cause else None  # a text, where it was sent
        self.field, self.reason = field, reason
        self.first_hint, self.hint = hint, f"{hint}, or {other}" if other else hint
        super().__init__(f"{field}: {reason}; {self.hint}")
        self.fix: dict[str, Any] = dict(fix or {})

    @property
    def sentences(self) -> str:
        """Reason and hint, a sentence each. The reason may start with a value, and keeps its case."""
        return f"{self.reason}. {self.hint[:1].upper()}{self.hint[1:]}."

    @property
    def words(self) -> str:
        """`str()` with the field as people call it: "micro batch", not "workload.micro_batch"."""
        name = self.field.removeprefix("workload.").removeprefix("strategy.").replace("_", " ")
        return f"{name}: {self.reason}; {self.hint}"

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.field, self.reason, self.hint, self.fix, self.cause))

    def to_dict(self) -> dict[str, Any]:
        return {"kind": type(self).__name__, "arguments": [*self.__reduce__()[1]]}

    @classmethod
    def from_dict(cls, d: Mapping[str, Any]) -> Self:
        kind = next((kind for kind in cls.__subclasses__() if kind.__name__ == d["kind"]), cls)
        return kind(*d["arguments"])


class SpecError(FieldError):
    """An invalid field of a Spec, such as "strategy.sharding", or an invalid combination of fields."""


class ArgumentError(FieldError):
    """An invalid argument that is no field of a Spec, such as "passes" or "evaluate.every"."""


def is_whole(value: object, least: int = 1) -> TypeGuard[int]:
    """Returns whether it is an int of at least `least`; a bool is not."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_number(value: object) -> TypeGuard[float]:
    """Returns whether it is an int or a float, also infinite or NaN; a bool is not."""
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
    wanted = f"'fsdp-lab[{EXTRAS[package]}]'" if package in EXTRAS else package
    install = f"{sys.executable} -m pip install {wanted}"
    return ModuleNotFoundError(f"{part} needs {package}, which is not installed: {install}", name=error.name)
