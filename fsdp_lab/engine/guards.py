"""A mistake that would go unnoticed: to look for gradients in `module.parameters()`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Self

from torch import Tensor, nn

from fsdp_lab.engine.errors import ShardError


class AbsentGradient(Tensor):
    """The `.grad` of a sharded parameter after a backward. Any use of it raises ShardError: the gradient is in the shards.

    Without it an optimizer, a clip or a log over `module.parameters()` would find None there, and silently do nothing.
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
            f"the gradient of {name} lives in flat shards, not in its .grad; give the optimizer sharded_parameters(model), "
            "or parameter_groups(model), in place of model.parameters(), and clip by clip_gradients(model, max_norm)"
        )

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return cls.__torch_function__(func, types, args, kwargs)


def absent_gradients(
    parameters: Sequence[nn.Parameter], names: Iterable[str], originals: Iterable[nn.Parameter]
) -> list[tuple[nn.Parameter, AbsentGradient]]:
    """Of the parameters that modules hold, by name, and of those they held before: what stands in `.grad`."""
    before = "a parameter from before the model was sharded"
    named = [*zip(parameters, names, strict=True), *((p, before) for p in originals)]
    return [(p, AbsentGradient.of(p, name)) for p, name in named]
