"""What is refused to optimizers: to step the same values twice, what a model had before it was sharded, what came into it
since, what was gathered, and to lack what was frozen when they were made.

Nothing tells a tensor who holds it. But who makes an optimizer asks each tensor whether it `is_leaf`, and a step reads its
`grad` and adds to it. What is no tensor of ours is left a gradient that cannot be used."""

import weakref
from collections.abc import Collection, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_lab.base.tensors import LeafOfSharded
from fsdp_lab.engine.collectives import ShardError
from fsdp_lab.engine.extras.dtensor import FlatDTensor

# With what optimizers change parameters. Who clamps them, or puts averages in their place, does not add.
_STEPS = ("add_", "sub_", "addcdiv_", "addcmul_")


class Steppable(FlatDTensor):
    """What an optimizer may be given: a parameter, or a region."""

    gradients: Any  # the `ShardedGradients` that it is stepped by
    group: Hashable
    beside: Sequence[Any] = ()  # parameters that were frozen when optimizers were made, and have a gradient now

    @property
    def is_leaf(self) -> bool:  # type: ignore[override]
        self.given = True
        return True

    def before_write(self, name: str, written: Sequence[Any]) -> None:
        """Raises ShardError where an optimizer lacks values, or steps what another form has stepped by these gradients."""
        if not name.startswith("_fused_") and name.removeprefix("_foreach_") not in _STEPS:
            return
        done: tuple[Any, Hashable] = None, None
        for t in written:
            if not t.given or (t.gradients, t.group) == done or type(t) not in t.gradients.read_by:
                continue
            done = t.gradients, t.group
            lacking = next(filter(_is_lacking, t.beside), None)
            if lacking is not None:
                raise ShardError(
                    f"{lacking.fqn} is trainable now, and was frozen when the optimizer was made, which lacks it; make the "
                    "optimizer after changing requires_grad, from sharded_parameters(model) or model.parameters()"
                )
            if t.gradients.stepped_as.setdefault(t.group, type(t)) is not type(t):
                raise ShardError(
                    f"{t.gradients.names[0]} and others would be stepped twice, in model.parameters() and in "
                    "sharded_parameters(model), which are the same values; give optimizers one of the two"
                )


def _is_lacking(p: Any) -> bool:
    p = p.flat.sharded[p.number]
    return bool(p.requires_grad and not _is_given(p) and p.flat.gradients.has_gradient(p.number))


def _is_given(p: Any) -> bool:
    """Returns whether an optimizer was given a parameter, or the region that it is in."""
    return bool(p.given or p.flat.gradients.regions[p.group].given)


class RefusedGradient(Tensor):
    """A gradient that raises ShardError when an optimizer, or anybody, uses it."""

    says: str
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def leave(cls, p: Any, says: str) -> None:
        """Leave one in a parameter's `grad`."""
        make: Any = Tensor._make_wrapper_subclass
        p.grad = made = make(cls, p.shape, dtype=p.dtype, device=p.device)
        made.says = says

    @property
    def is_sparse(self) -> bool:  # type: ignore[override]
        """Asked by optimizers before they change anything."""
        raise ShardError(self.says)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        lists = (a if isinstance(a, (list, tuple)) else [a] for a in args)
        raise ShardError(next(t.says for some in lists for t in some if isinstance(t, cls)))


class OptimizerGuard:
    """Looks, at the end of each backward, for what optimizers must not step, and what they lack. `ignored`: ids."""

    def __init__(self, modules: Sequence[nn.Module], flats: Sequence[Any], ignored: Collection[int]) -> None:
        self._modules, self._flats, self._ignored = modules, flats, ignored
        named = [(name, p) for flat in flats for name, p in zip(flat.names, flat.originals, strict=True)]
        self._before = [(name, weakref.ref(p)) for name, p in named if p.requires_grad]
        for flat in flats:
            flat.originals = ()  # now they are those of other holders alone
        self._seen: list[tuple[nn.Module, list[Any], int]] = []
        self._later: list[tuple[str, nn.Parameter]] = []
        self._frozen: list[Any] | None = None  # when the first optimizer had been made

    def look(self) -> None:
        self._before = [(name, ref) for name, ref in self._before if ref() is not None]
        for name, ref in self._before:
            says = (f"{name} was sharded, and this is the parameter that the model had before; make the optimizer, and "
                    "other references to parameters, after fully_shard, from model.parameters()")  # fmt: skip
            RefusedGradient.leave(ref(), says)
        for name, p in self._came_later():
            says = (f"{name} came into the model after it was sharded, so each rank would train one of its own; put it "
                    "there before fully_shard, or pass it in ignored_params and reduce its gradient")  # fmt: skip
            if p.grad is not None:
                RefusedGradient.leave(p, says)
        self._look_for_unfrozen()

    def _came_later(self) -> list[tuple[str, nn.Parameter]]:
        if not self._seen or any(
            len(m._parameters) != n or list(m._modules.values()) != children for m, children, n in self._seen
        ):
            inside = [m for module in self._modules for m in module.modules()]
            self._seen = [(m, list(m._modules.values()), len(m._parameters)) for m in inside]
            named = [one for module in self._modules for one in module.named_parameters()]
            ours = (FlatDTensor, LeafOfSharded)
            self._later = [(n, p) for n, p in named if id(p) not in self._ignored and not isinstance(p, ours)]
        return self._later

    def _look_for_unfrozen(self) -> None:
        inside = [p for flat in self._flats for p in flat.sharded] if self._frozen is None else []
        if self._frozen is None and any(map(_is_given, inside)):
            self._frozen = [p for p in inside if not p.requires_grad and not _is_given(p)]
        lacking = [p for p in self._frozen or () if _is_lacking(p)]
        if lacking:  # who is asked looks again: they may be given, or frozen, until then
            for t in (t for flat in self._flats for t in (*flat.sharded, *flat.gradients.regions.values())):
                t.beside = lacking
