"""`TorchOptimizer`: the optimizer of a workload: a class of torch.optim, its arguments, and the state that it keeps; and
`LrSchedule`: the learning rate over the steps of a training, as a factor on `Workload.lr`.

AdamW and SGD are known without torch, so that a Spec is validated, and its memory and time are planned, where torch is not
installed. Of other classes only the state is known here (`_SLOTS`); whether torch has one and takes its arguments is checked
where torch is (`backends/base.py`). `tests/backends/test_optimizers.py` compares `_KINDS` and `_SLOTS` with torch's.

Note: bits. With `foreach` and without it, the rounding of an update does not depend on where an element lies. A fused
kernel computes the end of a tensor in another way than the rest, so that its bits depend on how parameters are sharded.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from fsdp_lab.base.errors import SpecError, is_number
from fsdp_lab.spec.fields import NOT_NEGATIVE

FIELD = "optimizer_args"
KERNELS = ("foreach", "fused")  # arguments that choose how an update is computed, not what
# Arguments of all classes that a Spec does not give here, and why.
_ELSEWHERE: Mapping[str, tuple[str, str]] = {
    "params": ("are the model's", "leave it out"),
    "lr": ("is a field of its own", "set lr"),
    "weight_decay": ("is a field of its own", "set weight_decay"),
    "maximize": ("would raise the loss", "leave it out"),
    "capturable": ("is for CUDA graphs, and gathered parameters have another address in every step", "leave it out"),
    "differentiable": ("would keep the graph of every step", "leave it out"),
}


class Arguments(Mapping[str, Any]):
    """A mapping that does not change and has a hash; its values are scalars and tuples."""

    def __init__(self, values: Mapping[str, Any] | None = None) -> None:
        self._values = dict(values or {})

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __hash__(self) -> int:
        return hash(frozenset(self._values.items()))

    def __repr__(self) -> str:
        return repr(self._values)


@dataclass(frozen=True, kw_only=True)
class _Argument:
    default: Any  # of the class, except for `foreach` and `fused`, which torch chooses by the device if they are None
    accepts: Callable[[Any], bool]
    wanted: str  # for a hint
    read: Callable[[Any], Any]  # a valid value in one spelling


def _flag(default: bool = False) -> _Argument:
    return _Argument(default=default, accepts=lambda v: isinstance(v, bool), wanted="true or false", read=bool)


def _number(default: float) -> _Argument:
    wanted = NOT_NEGATIVE.wanted
    return _Argument(default=default, accepts=NOT_NEGATIVE.accepts, wanted=wanted, read=float)


def _are_betas(value: object) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == 2 and all(is_number(b) and 0 <= b < 1 for b in value)


@dataclass(frozen=True, kw_only=True)
class _Kind:
    class_name: str
    arguments: Mapping[str, _Argument]
    slots: tuple[str, ...] = ()  # of a parameter's state: tensors of its shape
    more_slots: Mapping[str, str] = field(default_factory=dict)  # argument -> the slot that it adds, if it is not 0


_HOW = {"foreach": _flag(True), "fused": _flag()}
_KINDS: Mapping[str, _Kind] = {
    "adamw": _Kind(
        class_name="AdamW",
        arguments={
            "betas": _Argument(
                default=(0.9, 0.999),
                accepts=_are_betas,
                wanted="two numbers from 0 to below 1",
                read=lambda betas: tuple(map(float, betas)),
            ),
            "eps": _number(1e-8),
            "amsgrad": _flag(),
            **_HOW,
        },
        slots=("exp_avg", "exp_avg_sq"),
        more_slots={"amsgrad": "max_exp_avg_sq"},
    ),
    "sgd": _Kind(
        class_name="SGD",
        arguments={"momentum": _number(0.0), "dampening": _number(0.0), "nesterov": _flag(), **_HOW},
        more_slots={"momentum": "momentum_buffer"},
    ),
}
OPTIMIZERS = tuple(_KINDS)
# Of other classes: slots, and those that an argument adds if it is not 0.
_SLOTS: Mapping[str, tuple[tuple[str, ...], Mapping[str, str]]] = {
    "ASGD": (("ax",), {}),
    "Adadelta": (("square_avg", "acc_delta"), {}),
    "Adagrad": (("sum",), {}),
    "Adam": (("exp_avg", "exp_avg_sq"), {"amsgrad": "max_exp_avg_sq"}),
    "Adamax": (("exp_avg", "exp_inf"), {}),
    "NAdam": (("exp_avg", "exp_avg_sq"), {}),
    "RAdam": (("exp_avg", "exp_avg_sq"), {}),
    "RMSprop": (("square_avg",), {"momentum": "momentum_buffer", "centered": "grad_avg"}),
    "Rprop": (("prev", "step_size"), {}),
}


def is_class_name(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[A-Za-z]\w*", value) is not None


def one_spelling(name: str) -> str:
    """ "adamw" for "AdamW"; other names as they are."""
    return next((token for token, kind in _KINDS.items() if kind.class_name == name), name)


def _is_plain(value: object) -> bool:
    """A number, a bool, a text, or a list of such."""
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return isinstance(value, (bool, str)) or (is_number(value) and math.isfinite(value))


def _read_plain(value: Any) -> Any:
    return tuple(map(_read_plain, value)) if isinstance(value, (list, tuple)) else value


@dataclass(frozen=True, kw_only=True)
class TorchOptimizer:
    """Raises SpecError for an argument that the class has not, or that is not given here, and for a wrong value.

    Attributes:
        args: those that differ from the default, in one spelling, so that equal optimizers are equal.
    """

    name: str
    args: Mapping[str, Any] = field(default_factory=Arguments)

    def __post_init__(self) -> None:
        for name, value in self.args.items():
            self._check(name, value)
        if self.args.get("fused") and self.args.get("foreach"):
            raise self._refused("an update is fused, or it is foreach", "give one of the two", "foreach")
        if self.name == "sgd" and self["nesterov"] and not (self["momentum"] and not self["dampening"]):
            reason = "nesterov needs a momentum above 0 and no dampening"
            raise self._refused(reason, "give momentum=0.9, or leave it out", "nesterov")
        known = self._arguments
        read = {name: known[name].read(self.args[name]) for name in known if name in self.args}
        if not self.is_known:
            read |= {name: _read_plain(value) for name, value in self.args.items() if name not in known}
        changed = {name: value for name, value in read.items() if name not in known or value != known[name].default}
        if changed.get("fused"):
            changed.pop("foreach", None)  # it has none beside a fused kernel
        object.__setattr__(self, "args", Arguments(changed))

    @property
    def is_known(self) -> bool:
        """True if all of its arguments are known without torch."""
        return self.name in _KINDS

    @property
    def _arguments(self) -> Mapping[str, _Argument]:
        """The arguments that are known."""
        return _KINDS[self.name].arguments if self.is_known else _HOW

    @staticmethod
    def is_given_elsewhere(argument: str) -> bool:
        """Returns whether it is not given as an argument here."""
        return argument in _ELSEWHERE

    def __getitem__(self, argument: str) -> Any:
        """The value of an argument, given or by default; None if the class has none of this name."""
        known = self._arguments.get(argument)
        return self.args.get(argument, known.default if known is not None else None)

    @property
    def class_name(self) -> str:
        """The name of the class in torch.optim."""
        return _KINDS[self.name].class_name if self.is_known else self.name

    @property
    def keywords(self) -> dict[str, Any]:
        """The arguments of the class, without those that have fields of their own."""
        return dict(self.args) if self.is_fused else {"foreach": True, **self.args}

    @property
    def is_fused(self) -> bool:
        return bool(self["fused"])

    @property
    def is_foreach(self) -> bool:
        return bool(self["foreach"]) and not self.is_fused

    @property
    def hyperparameters(self) -> Mapping[str, Any]:
        """The arguments that determine what is computed; the others only how."""
        return Arguments({name: value for name, value in self.args.items() if name not in KERNELS})

    @cached_property
    def slots(self) -> tuple[str, ...]:
        """The tensors of a parameter's shape that it keeps for each, once it has stepped. Raises SpecError for a class whose
        state is known to torch alone."""
        if self.is_known:
            slots, more = _KINDS[self.name].slots, _KINDS[self.name].more_slots
        elif self.name in _SLOTS:
            slots, more = _SLOTS[self.name]
        else:
            reason = f"the state of {self.name} is not known without torch, so that its memory cannot be planned"
            hint = f"use one of {', '.join((*OPTIMIZERS, *_SLOTS))}"
            raise SpecError("workload.optimizer", reason, hint, {"optimizer": "adamw", FIELD: {}})
        return (*slots, *(slot for name, slot in more.items() if self[name]))

    def without(self, *names: str) -> dict[str, Any]:
        """The arguments without these, as a `fix`."""
        return {FIELD: {name: value for name, value in self.args.items() if name not in names}}

    def _check(self, name: object, value: object) -> None:
        if name in _ELSEWHERE:
            reason, hint = _ELSEWHERE[str(name)]
            raise self._refused(f"{name} {reason}", hint, name)
        known = self._arguments.get(name) if isinstance(name, str) else None
        if known is None and not self.is_known and isinstance(name, str) and name.isidentifier():
            if not _is_plain(value):
                hint = "give a finite number, true, false, a text, or a list"
                raise self._refused(f"{name}={value!r} is refused", hint, name)
            return
        if known is None:
            hint = f"its arguments are {', '.join(self._arguments)}"
            raise self._refused(f"{self.class_name} has no argument {name!r}", hint, name)
        if not known.accepts(value):
            raise self._refused(f"{name}={value!r} is refused", f"give {known.wanted}", name)

    def _refused(self, reason: str, hint: str, name: object) -> SpecError:
        def is_kept(other: str) -> bool:
            known = self._arguments.get(other)
            return other != name and (known.accepts(self.args[other]) if known is not None else not self.is_known)

        return SpecError(f"workload.{FIELD}", reason, hint, {FIELD: {n: v for n, v in self.args.items() if is_kept(n)}})


LR_SCHEDULES = ("constant", "linear", "cosine")
_ENOUGH_STEPS = 1000  # proposed after the warm-up, where no end is given


@dataclass(frozen=True, kw_only=True)
class LrSchedule:
    """A linear warm-up to the full rate, then `kind`. Raises SpecError for an end that is missing, or has no meaning.

    The factor depends on the number of the step alone, so that a resumed or switched training has the same rates bit for
    bit. A step whose update fp16 overflow skips is counted.

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
                name = "workload.lr_end" if self.decay_steps is None else "workload.decay_steps"
                hint, fix = "leave it out, or use lr_schedule linear or cosine", {"decay_steps": None, "lr_end": 0.0}
                raise SpecError(name, "a constant rate has no end", hint, fix)
            return
        enough = self.warmup_steps + _ENOUGH_STEPS
        if self.decay_steps is None:
            reason, hint = f"{self.kind} needs the step at which it ends", f"give one, such as {enough}"
        elif self.decay_steps <= self.warmup_steps:
            reason = f"{self.decay_steps} is not after the {self.warmup_steps} steps of the warm-up"
            hint = "give a later step, or fewer warmup_steps"
        else:
            return
        raise SpecError("workload.decay_steps", reason, hint, {"decay_steps": enough})

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
