"""The classes of torch.optim: `check_optimizer`, and `kept_state`: what one keeps for a parameter, found from a step.

Note: shards. A rank updates the ranges of parameters that it holds, cut anywhere, and a switch cuts them elsewhere.
So only classes that update each element by itself are taken: their state is tensors of the parameter's shape (slots), and
scalars that are equal for all parameters (such as the number of steps).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_lab.base.errors import SpecError
from fsdp_lab.spec.optimizer import FIELD, TorchOptimizer
from fsdp_lab.spec.workload import Workload

_INSTEAD: Mapping[str, Any] = {"optimizer": "adamw", FIELD: {}}
_NOT_BY_ELEMENTS: Mapping[str, str] = {
    "LBFGS": "computes the loss several times in a step",
    "Adafactor": "keeps sums over the rows and columns of whole matrices",
    "Muon": "orthogonalises whole matrices",
    "SparseAdam": "takes sparse gradients, which cannot be reduced",
}


@dataclass(frozen=True, kw_only=True)
class KeptState:
    """The state that an optimizer keeps of each parameter, once it has stepped.

    Attributes:
        slots: name -> the value that all its elements begin with; of tensors of the parameter's shape.
        scalars: name -> (dtype, whether it is on the parameter's device): of tensors without dimensions.
    """

    slots: Mapping[str, float]
    scalars: Mapping[str, tuple[torch.dtype, bool]]


def torch_class(optimizer: TorchOptimizer) -> type[torch.optim.Optimizer]:
    """Raises SpecError for a class that torch.optim has not, or that updates no elements by themselves."""
    kind = getattr(torch.optim, optimizer.class_name, None)
    if not (inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer)) or kind is torch.optim.Optimizer:
        hint = "give adamw, sgd, or another class of torch.optim such as RMSprop"
        raise SpecError("workload.optimizer", f"torch.optim has no optimizer {optimizer.class_name!r}", hint, _INSTEAD)
    if why := _NOT_BY_ELEMENTS.get(optimizer.class_name):
        raise _by_elements(optimizer, why)
    return kind


def check_optimizer(workload: Workload) -> None:
    """Raises SpecError for a class or an argument that torch refuses, and for a class that cannot be applied to shards."""
    optimizer = workload.torch_optimizer
    known = inspect.signature(torch_class(optimizer)).parameters
    if (other := next((name for name in optimizer.args if name not in known), None)) is not None:
        named = ", ".join(name for name in known if not optimizer.is_given_elsewhere(name))
        reason = f"{optimizer.class_name} has no argument {other!r}"
        raise SpecError(f"workload.{FIELD}", reason, f"its arguments are {named}", optimizer.without(other))
    try:
        kept_state(optimizer, "cpu")
    except SpecError:
        raise
    except Exception as e:  # of many classes; the message names the argument
        reason = f"{optimizer.class_name} refuses its arguments: {' '.join(str(e).split())}"
        raise SpecError(f"workload.{FIELD}", reason, "correct that one, or leave it out", {FIELD: {}}) from None


@lru_cache(maxsize=64)
def kept_state(optimizer: TorchOptimizer, device: str) -> KeptState:
    """Returns what a step on a tiny parameter shows. Raises SpecError for a class that keeps anything else than slots and
    scalars, and what torch raises for arguments."""
    p = nn.Parameter(torch.zeros(2, 3, device=device))
    p.grad = torch.zeros_like(p)
    made = torch_class(optimizer)([p], lr=1e-3, **optimizer.keywords)  # type: ignore[call-arg]
    made.step()
    state = {name: t for name, t in made.state[p].items() if t is not None}
    if other := next((n for n, t in state.items() if not isinstance(t, Tensor) or t.shape not in ((), p.shape)), None):
        raise _by_elements(optimizer, f"keeps {other!r}, which is neither of the parameter's shape nor one number")
    first = {name: float(t.flatten()[0]) for name, t in state.items() if t.dim()}
    slots = {name: value if math.isfinite(value) else 0.0 for name, value in first.items()}
    scalars = {name: (t.dtype, t.device.type != "cpu") for name, t in state.items() if not t.dim()}
    return KeptState(slots=slots, scalars=scalars)


def _by_elements(optimizer: TorchOptimizer, why: str) -> SpecError:
    reason = f"{optimizer.class_name} {why}, and a rank has parts of them, cut anywhere"
    hint = "use adamw, or a class that updates each element by itself"
    return SpecError("workload.optimizer", reason, hint, _INSTEAD)
