"""Which modules of a model are its blocks: the units that sharding gathers one after another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torch import nn

# Where the repeated list is not the unit to shard by: its stages are few and very unequal.
_INSIDE_STAGES = ("ResNetBasicLayer", "ResNetBottleNeckLayer", "ConvNextLayer")


def blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated layers of `model`, in the order of the forward.

    They are transformer blocks, or the residual layers of a convnet: the elements of an outermost list of
    modules of one class. Where several classes repeat (encoder and decoder), those count that hold a quarter
    of the repeated parameters or more. Empty where nothing repeats."""
    inside = [m for m in model.modules() if type(m).__name__ in _INSIDE_STAGES]
    if inside:
        return inside
    found = list(_outermost(model))
    held: Counter[type[nn.Module]] = Counter()
    for module in found:
        held[type(module)] += _size(module)
    return [m for m in found if held[type(m)] >= held.total() / 4]


def block_class_names(model: nn.Module) -> tuple[str, ...]:
    """Class names of `blocks(model)`, each once, in the order of their first block."""
    return tuple(dict.fromkeys(type(m).__name__ for m in blocks(model)))


def _outermost(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        members = list(child.children())
        alike = len({type(m) for m in members}) == 1
        if isinstance(child, (nn.ModuleList, nn.Sequential)) and alike and _size(members[0]):
            yield from members
        else:
            yield from _outermost(child)


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())
