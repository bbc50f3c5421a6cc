"""Tensors inside the things that modules take and return: tuples, lists, dicts, dataclasses, nested."""

import copy
import dataclasses
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor of a nested value, in order."""
    return (leaf for leaf in _leaves(value) if isinstance(leaf, Tensor))


def hiding_in(value: Any) -> Any:
    """The first object of a nested value in which there is a tensor with a gradient, where nobody looks for it: in a set, or
    in an object's attributes or slots, up to four deep."""
    return next((leaf for leaf in _leaves(value) if not isinstance(leaf, Tensor) and _hides(leaf, 4)), None)


def _hides(value: Any, depth: int) -> bool:
    if isinstance(value, (nn.Module, type)):
        return False
    leaves = [leaf for part in _hidden_parts(value) for leaf in _leaves(part)]
    found = any(leaf.grad_fn is not None for leaf in leaves if isinstance(leaf, Tensor))
    return found or any(_hides(leaf, depth - 1) for leaf in leaves if depth > 1 and not isinstance(leaf, Tensor))


def _hidden_parts(value: Any) -> list[Any]:
    elements = value if isinstance(value, (set, frozenset)) else ()
    slots = [getattr(kind, "__slots__", ()) for kind in type(value).__mro__]
    names = [name for some in slots for name in ([some] if isinstance(some, str) else some)]
    return [*elements, *(getattr(value, name, None) for name in names), *getattr(value, "__dict__", {}).values()]


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for v in value.values():
            yield from _leaves(v)
    elif isinstance(value, (tuple, list)):
        for v in value:
            yield from _leaves(v)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _leaves(getattr(value, field.name))
    else:
        yield value


def map_tensors(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """The same value with `change` applied to every tensor in it; the very same object where nothing changed."""
    if isinstance(value, Tensor):
        return change(value)
    if not value and isinstance(value, (dict, tuple, list)):
        return value
    if isinstance(value, Mapping):
        # One that is also a dataclass (the outputs of transformers) keeps both in step by its own setter.
        return _with_mapped(change, value, value, operator.setitem)
    if isinstance(value, (tuple, list)):
        items = [change(v) if isinstance(v, Tensor) else map_tensors(change, v) for v in value]
        if all(map(operator.is_, items, value)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return _with_mapped(change, value, fields, object.__setattr__)  # of frozen ones too
    return value


def _with_mapped(change: Callable[[Tensor], Tensor], value: Any, parts: Mapping[Any, Any], put: Any) -> Any:
    """The value, or a copy with what became of its parts."""
    mapped = {k: map_tensors(change, v) for k, v in parts.items()}
    if all(mapped[k] is v for k, v in parts.items()):
        return value
    changed = copy.copy(value)
    for k, v in mapped.items():
        put(changed, k, v)
    return changed


def cast(value: Any, dtype: torch.dtype | None) -> Any:
    """Floating tensors in another dtype; None leaves them."""
    if dtype is None:
        return value
    return map_tensors(lambda t: t.to(dtype) if t.is_floating_point() and t.dtype != dtype else t, value)


def move(value: Any, device: torch.device) -> Any:
    """Every tensor on that device."""
    return map_tensors(lambda t: t if t.device == device else t.to(device, non_blocking=True), value)


def view_inputs(value: Any) -> tuple[Any, list[Tensor]]:
    """The same value with a view in place of every tensor that requires a gradient, and those views, in order."""
    views: list[Tensor] = []

    def view(t: Tensor) -> Tensor:
        if not t.requires_grad:
            return t
        views.append(t.view_as(t))
        return views[-1]

    return map_tensors(view, value), views


class LeafOfSharded(nn.Parameter):
    """What stands for a sharded parameter while it is gathered, or did. Its gradient is that one's: what autograd leaves
    here is taken at once. Writes to its `.data` count as writes to it."""

    sharded: Any

    @property
    def grad(self) -> Tensor | None:
        gradient: Tensor | None = self.sharded.grad
        return gradient

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        self.sharded.grad = value

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        set_data(self, value)

    def set_(self, source: Any = None, *where: Any) -> Any:
        """torch's parametrizations set a parameter to itself, which is no write."""
        set_other: Any = super().set_
        return self if source is self and not where else set_other(source, *where)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.sharded.__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Any:
        return self.sharded.__deepcopy__(memo)


_own_data: Any = Tensor.data
_own_grad: Any = Tensor.grad
set_data: Callable[[Tensor, Tensor], None] = _own_data.__set__  # whatever the class of the tensor makes of `.data`


def take_gradient(p: Tensor) -> Any:
    """Returns what autograd left in a leaf's own `.grad`, whatever its class shows; it adds to what it finds there."""
    gradient = _own_grad.__get__(p)
    _own_grad.__set__(p, None)
    return gradient
