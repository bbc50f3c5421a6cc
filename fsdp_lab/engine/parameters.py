"""The three forms in which a parameter is met: what modules hold between steps, what they hold while gathered, and what the
optimizer may be given instead of many parameters.

    ShardedParameter    what `module.parameters()` yields between steps: its name and shape, and this rank's range of it
    UnshardedParameter  what modules hold while their unit is gathered: a leaf of autograd, a view of the gathered buffer
    Region              all parameters of a buffer that are in one optimizer group, as one tensor of one dimension

A sharded parameter's `grad` is its reduced gradient. It is a view of the buffer's, made when it is asked for, so parameters
and regions show the same gradients; setting one to None forgets it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from fsdp_lab.base.tensors import LeafOfSharded, take_gradient
from fsdp_lab.engine.errors import ShardError, replaced
from fsdp_lab.engine.extras.flat_tensor import FlatTensor
from fsdp_lab.engine.extras.optimizers import Steppable
from fsdp_lab.engine.layout import Slot


class ShardedParameter(Steppable):
    """See the module."""

    _is_param = True  # by which torch recognises an nn.Parameter
    flat: Any  # the `FlatBuffer` that made it
    number: int  # which of the buffer's parameters
    seen: list[weakref.ref[Any]]  # what `.data` was, where somebody holds it

    @property
    def grad(self) -> Tensor | None:
        """The reduced gradient; with what autograd added to this tensor itself, as for a penalty on weights."""
        if self.flat.sharded[self.number] is not self:
            raise replaced(self.fqn)
        self.note_read()
        own: Tensor | None = self.flat.gradients.gradient(self.number)
        return own

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        self.flat.gradients.set_gradient(self.number, value)

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """meta, until the values of what was built there are written."""
        return torch.device("meta") if self.flat.is_unwritten(self.number) else self._local_tensor.device

    @property
    def is_meta(self) -> bool:  # type: ignore[override]
        return self.device.type == "meta"

    def take_own_gradients(self) -> None:
        """Let what autograd adds to this tensor itself be added to the reduced gradient."""

        def take(p: Any) -> None:
            p.flat.gradients.add(p.number, take_gradient(p))

        trained = self.requires_grad
        watch: Any = Tensor.register_post_accumulate_grad_hook
        watch(self.requires_grad_(), take)
        self.requires_grad_(trained)

    @property
    def data(self) -> Tensor:
        seen = self.detach()
        self.seen = [*(ref for ref in self.seen if ref() is not None), weakref.ref(seen)]
        return seen

    @data.setter
    def data(self, value: Tensor) -> None:
        """A copy of other values. What `.data` was before, and a caller may set again, keeps its own."""
        if (value.dtype, value.shape, value.device.type) != (self.dtype, self.shape, self._local_tensor.device.type):
            raise ShardError(
                f"{self.fqn} is sharded, and cannot be given data of another shape, dtype or device, as by .to() or .half() "
                "of its module; choose dtypes by the mp_policy of fully_shard, and devices by its mesh"
            )
        value = value.clone() if any(ref() is value for ref in self.seen) else value
        for seen in (ref() for ref in self.seen):
            if seen is not None:
                seen._local_tensor = seen.counted = seen._local_tensor.clone()
        self.seen = []
        self.detach().copy_(value)

    def register_hook(self, hook: Any) -> Any:
        """Registers a hook that is called with this rank's own gradient, whole and before it is reduced, as under DDP."""
        return self.flat.parameters[self.number].register_hook(hook)

    def register_post_accumulate_grad_hook(self, hook: Callable[[Tensor], None]) -> RemovableHandle:
        """Registers a hook that is called when the gradient has been reduced."""
        handle = RemovableHandle(self.flat.reduce_hooks)
        self.flat.reduce_hooks[handle.id] = lambda: (
            hook(self)
            if self.flat.gradients.has_gradient(self.number) and self.flat.sharded[self.number] is self
            else None
        )
        return handle

    @property
    def fqn(self) -> str:
        """The parameter's name in the root module."""
        return str(self.flat.names[self.number])

    @property
    def slot(self) -> Slot:
        slot: Slot = self.flat.layout.slots[self.number]
        return slot

    @property
    def place(self) -> tuple[Any, Hashable]:
        return self.flat.gradients, self.slot.group

    def check_held(self, gathered: Tensor) -> None:
        """Raises ShardError where modules hold a gathered parameter no more, which has a gradient, and no values."""
        module, attribute = self.flat.uses[self.number][0]
        if module._parameters.get(attribute) is not gathered:
            raise ShardError(
                f"an optimizer was made while {self.fqn} was gathered, and has no values to step now; make it before the "
                "forward, or after the backward"
            )

    def __deepcopy__(self, memo: Any) -> FlatTensor:
        """A parameter of nobody's, with the values of now, such as an anchor to stay close to."""
        copy: Any = super().__deepcopy__(memo)
        copy._is_param = True
        return cast(FlatTensor, copy)


class UnshardedParameter(LeafOfSharded):
    """See the module. While the buffer is not gathered it reads as NaN (its data is one NaN, expanded), so that an absent
    value cannot be taken for a real one."""

    sharded: ShardedParameter

    @classmethod
    def of(cls, data: Tensor, sharded: ShardedParameter) -> UnshardedParameter:
        made = cls(data, requires_grad=sharded.requires_grad)
        made.sharded = sharded
        return made


class Region(Steppable):
    """See the module."""

    _is_param = True
    gradients: Any  # the `GradientBuffer` that made it
    group: Hashable

    @property
    def place(self) -> tuple[Any, Hashable]:
        return self.gradients, self.group

    @property
    def grad(self) -> Tensor | None:
        """Raises ShardError where some of the region's parameters have a gradient, and others have none."""
        if self.gradients.regions[self.group] is not self:
            raise replaced("a part of it")
        self.note_read()
        gradient: Tensor | None = self.gradients.gradient_of_region(self.group)
        return gradient

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        self.gradients.set_gradient_of_region(self.group, value)

    def __deepcopy__(self, memo: Any) -> Any:
        raise ShardError("a flat parameter is a part of its model, and not copied; take values from full_state(model)")


def sharded_form(p: Tensor) -> ShardedParameter | None:
    """The sharded parameter of what a module holds; None for a parameter that is not sharded."""
    if isinstance(p, LeafOfSharded):
        return p.sharded  # type: ignore[no-any-return]
    return p if isinstance(p, ShardedParameter) else None
