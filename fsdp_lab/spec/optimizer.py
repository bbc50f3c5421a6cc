"""`TorchOptimizer`: the optimizer of a workload: a class of torch.optim, its arguments, and the state that it keeps; and
`LrSchedule`: the learning rate over the steps of a training, as a factor on `Workload.lr`.

AdamW and SGD are known without torch, so that a Spec is validated, and its memory and time are planned, where torch is not
installed. Of other classes only the state is known here (`_SLOTS`); whether torch has one and takes its arguments is checked
where torch is (`backends/base.py`). `tests/backends/test_optimizers.py` compares `_KNOWN` and `_SLOTS` with torch's.

Note: bits. With `foreach` and without it, the rounding of an update does not depend on where an element lies. A fused
kernel computes the end of a tensor in another way than the rest, so its bits depend on how parameters are sharded."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from fsdp_lab.base.errors import SpecError, is_number
from fsdp_lab.spec.fields import NOT_NEGATIVE

FIELD = "optimizer_args"
KERNELS = ("foreach", "fused")  # arguments that choose how an update is computed, not what
# Arguments of all classes that a Spec does not give here, and why.
ELSEWHERE: Mapping[str, tuple[str, str]] = {
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


# Of classes that are known without torch: their names there, and their arguments with the class's own defaults, which show
# the types too; but `foreach` and `fused`, if they are None, torch chooses by the device.
_HOW = {"foreach": True, "fused": False}
_KNOWN: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "adamw": ("AdamW", {"betas": (0.9, 0.999), "eps": 1e-8, "amsgrad": False, **_HOW}),
    "sgd": ("SGD", {"momentum": 0.0, "dampening": 0.0, "nesterov": False, **_HOW}),
}
_WANTED = {bool: "true or false", float: NOT_NEGATIVE.wanted, tuple: "two numbers from 0 to below 1"}  # by type
OPTIMIZERS = tuple(_KNOWN)
# Of a parameter's state: the tensors of its shape, and those that an argument adds if it is not 0.
_SLOTS: Mapping[str, tuple[tuple[str, ...], Mapping[str, str]]] = {
    "ASGD": (("ax",), {}),
    "Adadelta": (("square_avg", "acc_delta"), {}),
    "Adagrad": (("sum",), {}),
    "Adam": (("exp_avg", "exp_avg_sq"), {"amsgrad": "max_exp_avg_sq"}),
    "AdamW": (("exp_avg", "exp_avg_sq"), {"amsgrad": "max_exp_avg_sq"}),
    "Adamax": (("exp_avg", "exp_inf"), {}),
    "NAdam": (("exp_avg", "exp_avg_sq"), {}),
    "RAdam": (("exp_avg", "exp_avg_sq"), {}),
    "RMSprop": (("square_avg",), {"momentum": "momentum_buffer", "centered": "grad_avg"}),
    "Rprop": (("prev", "step_size"), {}),
    "SGD": ((), {"momentum": "momentum_buffer"}),
}


def one_spelling(name: str) -> str:
    """ "adamw" for "AdamW"; other names as they are."""
    return next((token for token, (class_name, _) in _KNOWN.items() if class_name == name), name)


def _read(value: Any, default: Any) -> Any:
    """A valid value of an argument in one spelling, else None. `default`: of its type; None if that is not known."""
    if isinstance(default, bool):
        return value if isinstance(value, bool) else None
    if isinstance(default, float):
        return float(value) if NOT_NEGATIVE.accepts(value) else None
    if isinstance(value, (list, tuple)):
        parts = [_read(v, None) for v in value]
        are_betas = len(value) == 2 and all(is_number(b) and 0 <= b < 1 for b in value)
        if default is not None:
            return tuple(map(float, value)) if are_betas else None
        return None if None in parts else tuple(parts)
    is_plain = isinstance(value, (bool, str)) or (is_number(value) and math.isfinite(value))
    return value if is_plain and default is None else None


@dataclass(frozen=True, kw_only=True)
class TorchOptimizer:
    """Raises SpecError for an argument that the class has not, or that is not given here, and for a wrong value.

    Attributes:
        args: those that differ from the default, in one spelling, so that equal optimizers are equal."""

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
        names = [*(name for name in known if name in self.args), *(name for name in self.args if name not in known)]
        read = {name: _read(self.args[name], known.get(name)) for name in names}
        changed = {name: value for name, value in read.items() if name not in known or value != known[name]}
        if changed.get("fused"):
            changed.pop("foreach", None)  # it has none beside a fused kernel
        object.__setattr__(self, "args", Arguments(changed))

    @property
    def is_known(self) -> bool:
        """True if all of its arguments are known without torch."""
        return self.name in _KNOWN

    @property
    def _arguments(self) -> Mapping[str, Any]:
        """The arguments that are known, with their defaults."""
        return _KNOWN[self.name][1] if self.is_known else _HOW

    def __getitem__(self, argument: str) -> Any:
        """The value of an argument, given or by default; None if the class has none of this name."""
        return self.args.get(argument, self._arguments.get(argument))

    @property
    def class_name(self) -> str:
        """The name of the class in torch.optim."""
        return _KNOWN[self.name][0] if self.is_known else self.name

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
        if self.class_name not in _SLOTS:
            reason = f"the state of {self.name} is not known without torch, so that its memory cannot be planned"
            hint = f"use one of {', '.join(_SLOTS)}"
            raise SpecError("workload.optimizer", reason, hint, {"optimizer": "adamw", FIELD: {}})
        slots, more = _SLOTS[self.class_name]
        return (*slots, *(slot for name, slot in more.items() if self[name]))

    def without(self, *names: str) -> dict[str, Any]:
        """The arguments without these, as a `fix`."""
        return {FIELD: {name: value for name, value in self.args.items() if name not in names}}

    def _check(self, name: object, value: object) -> None:
        if name in ELSEWHERE:
            reason, hint = ELSEWHERE[str(name)]
            raise self._refused(f"{name} {reason}", hint, name)
        known = self._arguments
        if name not in known and (self.is_known or not isinstance(name, str) or not name.isidentifier()):
            hint = f"its arguments are {', '.join(known)}"
            raise self._refused(f"{self.class_name} has no argument {name!r}", hint, name)
        default = known.get(str(name))
        if _read(value, default) is None:
            wanted = _WANTED.get(type(default), "a finite number, true, false, a text, or a list")
            raise self._refused(f"{name}={value!r} is refused", f"give {wanted}", name)

    def _refused(self, reason: str, hint: str, name: object) -> SpecError:
        kept = {n: v for n, v in self.args.items() if n != name and _read(v, self._arguments.get(n)) is not None}
        if self.is_known:
            kept = {n: v for n, v in kept.items() if n in self._arguments}
        return SpecError(f"workload.{FIELD}", reason, hint, {FIELD: kept})


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
        end: the rate there, as a share of the full rate."""

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
