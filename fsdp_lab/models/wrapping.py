"""Which modules become units: wrapping policies (arXiv 2304.11277, section 4.2).

A policy is any callable from a model to lists of modules, each list one unit; what is left over belongs to the root's unit.
`units` has the policies that `Strategy.wrap` names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from fsdp_lab.core.errors import SpecError
from fsdp_lab.core.spec import Strategy
from fsdp_lab.engine import fully_shard

Wrapping = Callable[[nn.Module], list[list[nn.Module]]]

# Where the repeated list is not the unit to shard by: its stages are few and very unequal.
_INSIDE_STAGES = ("ResNetBasicLayer", "ResNetBottleNeckLayer", "ConvNextLayer")


def shard_model(model: nn.Module, wrap: str | Wrapping = "block", **options: Any) -> nn.Module:
    """`fully_shard` for every unit that a policy finds, then for the model; collective.

    Args:
        wrap: a policy, or its name as in `Strategy.wrap`.
        options: those of `fully_shard`.
    """
    for group in wrap(model) if callable(wrap) else units(model, wrap):
        fully_shard(group, **options)
    fully_shard(model, **options)
    return model


def units(model: nn.Module, wrap: str) -> list[list[nn.Module]]:
    """The modules of each unit below the root, in the order of the model; the rest belongs to the root's unit.

    Raises:
        SpecError: `wrap` is none of the policies, or nothing in the model answers to it.
    """
    Strategy(wrap=wrap)  # which knows how it is written
    kind, _, argument = wrap.partition(":")
    if kind == "whole":
        return []
    if kind == "class":
        return _of_class(model, argument)
    if kind == "min_params":
        return [[m] for m in _by_size(model, int(argument), _uses(model)) if m is not model]
    uses = _uses(model)
    found = [m for m in blocks(model) if _is_closed(m, uses)]
    if not found:
        raise SpecError("strategy.wrap", "no repeated blocks were found in this model", "use min_params:N or whole",
                        {"wrap": "whole"})  # fmt: skip
    each = int(argument) if kind == "every" else 1
    return [found[i : i + each] for i in range(0, len(found), each)]


def blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated layers of `model`, in the order of the forward.

    They are transformer blocks, or the residual layers of a convnet: the modules of the classes that a transformers model
    names in `_no_split_modules`, or else the elements of an outermost list of modules of one class. Where several classes
    repeat (encoder and decoder), those count that hold a quarter of the repeated parameters or more. Empty where nothing
    repeats."""
    inside = [m for m in model.modules() if type(m).__name__ in _INSIDE_STAGES]
    if inside:
        return inside
    named = set(getattr(model, "_no_split_modules", None) or ())
    found = list(_outermost_of(model, named)) or list(_outermost(model))
    held: Counter[type[nn.Module]] = Counter()
    for module in found:
        held[type(module)] += _size(module)
    return [m for m in found if held[type(m)] >= held.total() / 4]


def block_class_names(model: nn.Module) -> tuple[str, ...]:
    """Class names of `blocks(model)`, each once, in the order of their first block."""
    return tuple(dict.fromkeys(type(m).__name__ for m in blocks(model)))


def _outermost_of(module: nn.Module, names: set[str]) -> Iterator[nn.Module]:
    for child in module.children():
        if type(child).__name__ in names:
            yield child
        else:
            yield from _outermost_of(child, names)


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


def _of_class(model: nn.Module, name: str) -> list[list[nn.Module]]:
    found = [m for m in model.modules() if type(m).__name__ == name]
    if not found:
        known = sorted({type(m).__name__ for m in model.modules() if next(m.children(), None) is not None})
        raise SpecError("strategy.wrap", f"the model has no module of class {name}", f"use one of {', '.join(known)}")
    found.sort(key=lambda m: sum(type(inner).__name__ == name for inner in m.modules()))  # inner ones first
    uses = _uses(model)
    return [[m] for m in found if m is not model and _is_closed(m, uses)]


def _uses(model: nn.Module) -> dict[int, int]:
    """How many modules use each parameter, by its id."""
    return Counter(id(p) for m in model.modules() for p in m._parameters.values() if p is not None)


def _is_closed(module: nn.Module, uses: dict[int, int]) -> bool:
    """Whether no parameter in it is tied to one outside: a tied one belongs to a unit that contains all its uses."""
    return all(uses[p] == n for p, n in _uses(module).items())


def _by_size(module: nn.Module, least: int, uses: dict[int, int]) -> list[nn.Module]:
    """Innermost first: a module whose parameters, less those of units inside it, number `least` or more."""
    found: list[nn.Module] = []

    def rest_of(m: nn.Module) -> int:
        rest = sum(p.numel() for p in m.parameters(recurse=False)) + sum(rest_of(c) for c in m.children())
        if rest >= least and not isinstance(m, (nn.ModuleList, nn.ModuleDict)) and _is_closed(m, uses):
            found.append(m)
            return 0
        return rest

    rest_of(module)
    return found
