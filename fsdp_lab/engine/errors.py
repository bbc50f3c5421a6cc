"""`ShardError`: something was done with a sharded model that cannot be; and what raises it when used.

Those are what a caller holds and the model does not hold any more, where using it would silently do nothing:

    AbsentGradient  the `.grad` of a parameter from before the sharding
    FreedParameter  what modules held while a unit was gathered
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, Self

import torch
from torch import Tensor, distributed as dist, nn
from torch.distributed.checkpoint.filesystem import SerializationFormat

from fsdp_lab.base.tensors import LeafOfSharded


class ShardError(RuntimeError):
    """`str()` is a sentence that names the parameter or module, and says what to do.

    Where ranks could disagree, every one of them raises it.
    """


class Unanswered(ShardError):
    """A collective that other ranks did not come to, or left. `str()` is what its process group said."""

    def __init__(self, said: str, waited_s: float) -> None:
        super().__init__(said)
        self.waited_s = waited_s


@contextmanager
def waiting(ranks: Sequence[int], what: str) -> Iterator[None]:
    """Says, if other ranks do not come, as after their last batch, what this one waits for: `what`, among `ranks`."""
    try:
        yield
    except Unanswered as e:
        others = [rank for rank in ranks if rank != dist.get_rank()]
        who = f"rank {others[0]}" if len(others) == 1 else f"one of ranks {', '.join(map(str, others))}"
        raise ShardError(
            f"rank {dist.get_rank()} waited {e.waited_s:.1f} s {what} for {who}, which did not "
            f"come; give every rank the same number of batches, and let all make the same calls: {e}"
        ) from e


@contextmanager
def answered(ranks: Sequence[int], what: str) -> Iterator[None]:
    """As `waiting`, around collectives that are waited for at once, and nothing else."""
    with waiting(ranks, what), giving_up():
        yield


@contextmanager
def giving_up() -> Iterator[None]:
    """Raises Unanswered where torch's group gives up. A group of somebody else's has errors of its own kinds: they pass."""
    began_s = time.monotonic()
    try:
        yield
    except RuntimeError as e:
        if type(e) is not RuntimeError and not isinstance(e, dist.DistError):
            raise
        raise Unanswered(str(e), time.monotonic() - began_s) from e


def check_module(given: object) -> None:
    """Raises ShardError for what is no module, such as a list of parameters."""
    if not isinstance(given, nn.Module):
        raise ShardError(
            f"a {type(given).__name__} was given where a module is needed; give the module that was sharded"
        )


def check_optimizer(given: object) -> None:
    """Raises ShardError for what is none; something around one will do."""
    if not hasattr(given, "param_groups") or not hasattr(given, "state"):
        raise ShardError(f"a {type(given).__name__} was given where an optimizer is needed; give the one of the model")


def not_sharded(module: nn.Module) -> ShardError:
    return ShardError(f"{type(module).__name__} is not sharded; call fully_shard(module) first")


class AbsentGradient(Tensor):
    """The `.grad`, after a backward, of a parameter that was sharded. Any use of it raises ShardError.

    Without it an optimizer made before `fully_shard` would find None there, and silently do nothing.
    """

    name_of_parameter: str

    @classmethod
    def of(cls, parameter: Tensor, name: str) -> Self:
        """One with the parameter's shape, dtype and place, without storage."""
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
    """Stands in `.grad` of trainable parameters that modules held before they were sharded."""
    return [(p, AbsentGradient.of(p, name)) for p, name in zip(originals, names, strict=True) if p.requires_grad]


class FreedParameter(LeafOfSharded):
    """A gathered parameter after it was freed, until it is gathered again: the same object.

    A list of parameters that was taken between a forward and its backward has these. They have gradients, and an optimizer
    steps the sharded ones in their place (optimizers.py), but no values. What describes a tensor may be asked,
    and gradients by it of a graph that is still alive; a hook may be put on it.
    """

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self.sharded.fqn})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _ALLOWED:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        name = next((a.sharded.fqn for a in args if isinstance(a, cls)), "a parameter")
        raise ShardError(
            f"{name} was taken from the model between a forward and its backward, and its values are not there any more; "
            "take parameters before the forward or after the backward, or use `with unshard(model):`"
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


BY_NAMES = "torch.distributed.checkpoint.state_dict"  # the module of torch's that looks for names


def without_names() -> ShardError:
    return ShardError(
        f"an optimizer over sharded_parameters(model) has no names for {BY_NAMES}; save its state by full_optimizer_state, "
        "or make one over model.parameters()"
    )


def refuse_names() -> None:
    """Raise ShardError where a function of torch's that looks for names asked."""
    if sys._getframe(2).f_globals.get("__name__") == BY_NAMES:
        raise without_names()


def refuse_parts(name: str) -> None:
    """Raise ShardError where torch's writer of safetensors asks: of several parts of a tensor it would keep the last."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        writer = frame.f_locals.get("storage_writer")
        if getattr(writer, "serialization_format", None) is SerializationFormat.SAFETENSORS:
            raise ShardError(
                f"{name} is in several parts on a rank, of which {type(writer).__name__} keeps one; give it whole tensors "
                "on rank 0, as from get_model_state_dict with full_state_dict=True, or use FileSystemWriter"
            )
        frame = frame.f_back


def replaced(name: str) -> ShardError:
    """The error for parameters that an optimizer has from before the model was sharded."""
    return ShardError(
        f"load_state_dict(assign=True) has put other parameters into the model, and this is {name} from before; make the "
        "optimizer afterwards, or load without assign=True"
    )
