"""Wrapping policies: which modules become FSDP units (arXiv 2304.11277, section 4.2).

`units` implements the policies of `Strategy.wrap`; parameters of no unit belong to the root's."""

from collections import Counter
from collections.abc import Iterator

from torch import nn

from fsdp_lab.base.errors import SpecError
from fsdp_lab.spec.spec import Strategy

# Blocks inside stages; the stages are few and very unequal, so they are poor units.
_INSIDE_STAGES = ("ResNetBasicLayer", "ResNetBottleNeckLayer", "ConvNextLayer")


def units(model: nn.Module, wrap: str) -> list[list[nn.Module]]:
    """The modules of each unit below the root, in the order of the model.

    Raises SpecError: `wrap` is no policy, or no module matches it."""
    Strategy(wrap=wrap)  # validates it
    kind, _, argument = wrap.partition(":")
    if kind == "whole":
        return []
    uses = _uses(model)
    if kind == "class":
        alike = [m for m in model.modules() if type(m).__name__ == argument]
        if not alike:
            classes = sorted({type(m).__name__ for m in model.modules() if next(m.children(), None) is not None})
            reason = f"the model has no module of class {argument}"
            raise SpecError("strategy.wrap", reason, f"use one of {', '.join(classes)}")
        # Inner ones first.
        alike.sort(key=lambda m: sum(type(inner).__name__ == argument for inner in m.modules()))
        return [[m] for m in alike if m is not model and _is_closed(m, uses)]
    if kind == "min_params":
        return [[m] for m in _by_size(model, int(argument), uses) if m is not model]
    closed = [m for m in blocks(model) if _is_closed(m, uses)]
    if not closed:
        reason = "no repeated blocks were found in this model"
        raise SpecError("strategy.wrap", reason, "use min_params:N or whole", {"wrap": "whole"})
    each = int(argument) if kind == "every" else 1
    return [closed[i : i + each] for i in range(0, len(closed), each)]


def blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated layers of `model`, in the order of the forward; empty if nothing repeats.

    They are transformer blocks, or the residual layers of a convnet: modules of the classes in a transformers model's
    `_no_split_modules`, or else the elements of an outermost list of modules of one class. If several classes repeat
    (encoder and decoder), those with at least a quarter of the repeated parameters count."""
    inside = [m for m in model.modules() if type(m).__name__ in _INSIDE_STAGES]
    if inside:
        return inside
    named = set(getattr(model, "_no_split_modules", None) or ())
    outer = list(_outermost_of(model, named)) or list(_outermost(model))
    sizes: Counter[type[nn.Module]] = Counter()
    for module in outer:
        sizes[type(module)] += _size(module)
    return [m for m in outer if sizes[type(m)] >= sizes.total() / 4]


def _outermost_of(module: nn.Module, names: set[str]) -> Iterator[nn.Module]:
    for child in module.children():
        if type(child).__name__ in names:
            yield child
        else:
            yield from _outermost_of(child, names)


def _outermost(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        members = list(child.children())
        alike = len({type(m) for m in members}) == 1 and not isinstance(members[0], nn.ModuleList)  # has no forward
        if isinstance(child, (nn.ModuleList, nn.Sequential)) and alike and _size(members[0]):
            yield from members
        else:
            yield from _outermost(child)


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _uses(model: nn.Module) -> dict[int, int]:
    """Counts the modules that use each parameter, by its id."""
    return Counter(id(p) for m in model.modules() for p in m._parameters.values() if p is not None)


def _is_closed(module: nn.Module, uses: dict[int, int]) -> bool:
    """Returns whether no parameter in it is tied to a module outside: a tied one is of a unit with all its uses."""
    return all(uses[p] == n for p, n in _uses(module).items())


def _by_size(module: nn.Module, least: int, uses: dict[int, int]) -> list[nn.Module]:
    """Modules with at least `least` parameters, not counting those of units inside them; innermost first."""
    chosen: list[nn.Module] = []

    def rest_of(m: nn.Module) -> int:
        rest = sum(p.numel() for p in m.parameters(recurse=False)) + sum(rest_of(c) for c in m.children())
        if rest >= least and not isinstance(m, (nn.ModuleList, nn.ModuleDict)) and _is_closed(m, uses):
            chosen.append(m)
            return 0
        return rest

    rest_of(module)
    return chosen
