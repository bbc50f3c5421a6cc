"""`ShardError`: something was done with a sharded model that cannot be; and what raises it when used.

Those are what a caller holds and the model does not hold any more, where using it would silently do nothing:

    AbsentGradient  the `.grad` of a parameter from before the sharding
    FreedParameter  what modules held while a unit was gathered
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Hashable, Sequence
from types import FrameType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


class ShardError(RuntimeError):
    """`str()` is a sentence that names the parameter or module, and says what to do.

    Where ranks could disagree, every one of them raises it.
    """


class Unanswered(ShardError):
    """A collective that other ranks did not come to, or left. `str()` is what its process group said."""

    def __init__(self, said: str, waited_s: float) -> None:
        super().__init__(said)
        self.waited_s = waited_s


class AbsentGradient(Tensor):
    """The `.grad`, after a backward, of a parameter that was sharded. Any use of it raises ShardError.

    Without it an optimizer made before `fully_shard` would find None there, and silently do nothing.
    """

    name_of_parameter: str

    @classmethod
    def of(cls, parameter: Tensor, name: str) -> Self:
        """In the parameter's shape, dtype and place, without storage."""
        made: Self = Tensor._make_wrapper_subclass(cls, parameter.shape, dtype=parameter.dtype, device=parameter.device)
        made.name_of_parameter = name
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = next((a.name_of_parameter for a in args if isinstance(a, cls)), "a sharded parameter")
        raise ShardError(
            f"{name} was sharded, and this is the parameter that the model had before; make the optimizer, and other "
            "references to parameters, after fully_shard, from model.parameters()"
        )

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return cls.__torch_function__(func, types, args, kwargs)


def absent_gradients(
    originals: Sequence[nn.Parameter], names: Sequence[str]
) -> list[tuple[nn.Parameter, AbsentGradient]]:
    """What stands in `.grad` of the parameters that modules held before, which are trainable."""
    return [(p, AbsentGradient.of(p, name)) for p, name in zip(originals, names, strict=True) if p.requires_grad]


class FreedParameter(nn.Parameter):
    """What a gathered parameter becomes when it is freed, and until it is gathered again: the same object.

    An optimizer made between a forward and its backward has these, and so has a list of parameters that was taken there:
    their gradients are never set, so that it would silently do nothing. What describes a tensor may be asked,
    and gradients by it of a graph that is still alive; a hook may be put on it.
    """

    sharded: Any

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self.sharded.fqn})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _ALLOWED:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        name = next((a.sharded.fqn for a in args if isinstance(a, cls)), "a parameter")
        raise ShardError(
            f"{name} was taken from the model between a forward and its backward, and is not there any more; take "
            "parameters, also for an optimizer, before the forward or after the backward, or use `with unshard(model):`"
        )


_PROPERTIES: tuple[Any, ...] = (
    Tensor.shape,
    Tensor.ndim,
    Tensor.dtype,
    Tensor.device,
    Tensor.layout,
    Tensor.is_meta,
    Tensor.is_leaf,
    Tensor.requires_grad,
)
_FUNCTIONS = (Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.is_complex)
# a gradient gathers it again, and a hook waits for that
_ALLOWED = frozenset([*(p.__get__ for p in _PROPERTIES), *_FUNCTIONS, Tensor.register_hook, torch.autograd.grad])


ReaderRef = weakref.ref[Optimizer]


_BY_NAMES = "torch.distributed.checkpoint.state_dict"


def check_reader(gradients: Any, group: Hashable, name: str, *, of_region: bool = False) -> None:
    """Who reads `.grad` of a parameter, or of the region in which it lies: one of the two, for a step of the same values.

    A function that an optimizer calls has it as `self`, and nothing else tells an optimizer what another one was given.
    """
    frame = sys._getframe(2)
    if of_region and frame.f_globals.get("__name__") == _BY_NAMES:
        raise _without_names()
    optimizer = frame.f_locals.get("self")
    if not isinstance(optimizer, Optimizer) or frame.f_code.co_name == "zero_grad":
        return
    if of_region and refuse_names not in optimizer._optimizer_state_dict_pre_hooks.values():
        optimizer.register_state_dict_pre_hook(refuse_names)
    first = gradients.readers.setdefault(group, weakref.ref(optimizer))()
    views = set()
    for one in (optimizer, first):
        for p in (p for options in one.param_groups for p in options["params"]) if one is not None else ():
            if getattr(p, "gradients", None) is gradients and p.group == group:
                views.add("region")
            elif getattr(getattr(p, "flat", None), "gradients", None) is gradients and p.slot.group == group:
                views.add("parameter")
    if len(views) > 1:
        raise ShardError(
            f"{name} and others would be stepped twice, in model.parameters() and in sharded_parameters(model), which are "
            "the same values; give optimizers one of the two"
        )


def refuse_names(optimizer: Optimizer) -> None:
    """Before the state dict of an optimizer over regions is made for torch's functions that look for names in it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") != _BY_NAMES:
        frame = frame.f_back
    if frame is not None:
        raise _without_names()


def _without_names() -> ShardError:
    return ShardError(
        f"an optimizer over sharded_parameters(model) has no names for {_BY_NAMES}; save its state by full_optimizer_state, "
        "or make one over model.parameters()"
    )


def replaced(name: str) -> ShardError:
    """Of what an optimizer may have from before."""
    return ShardError(
        f"load_state_dict(assign=True) has put other parameters into the model, and this is {name} from before; make the "
        "optimizer afterwards, or load without assign=True"
    )
