"""Which modules become units: `Strategy.wrap`, `Strategy.recompute` and `Strategy.compile` applied to a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper

from fsdp_lab.models import blocks
from fsdp_lab.spec import SpecError, Strategy


def units(model: nn.Module, wrap: str) -> list[list[nn.Module]]:
    """The modules of each unit below the root, in the order of the model; the rest belongs to the root's unit.

    Raises:
        SpecError: nothing in the model answers to `wrap`.
    """
    kind, _, argument = wrap.partition(":")
    if kind == "whole":
        return []
    if kind == "class":
        found = [m for m in model.modules() if type(m).__name__ == argument]
        if not found:
            known = sorted({type(m).__name__ for m in model.modules() if next(m.children(), None) is not None})
            raise SpecError("strategy.wrap", f"the model has no module of class {argument}",
                            f"use one of {', '.join(known)}")  # fmt: skip
        uses = _uses(model)
        return [[m] for m in found if m is not model and _is_closed(m, uses)]
    if kind == "min_params":
        return [[m] for m in _by_size(model, int(argument), _uses(model)) if m is not model]
    of_model = blocks(model)
    if not of_model:
        raise SpecError("strategy.wrap", "no repeated blocks were found in this model", "use min_params:N or whole",
                        {"wrap": "whole"})  # fmt: skip
    each = int(argument) if kind == "every" else 1
    return [of_model[i : i + each] for i in range(0, len(of_model), each)]


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


def prepare(model: nn.Module, strategy: Strategy) -> Callable[[nn.Module], nn.Module]:
    """Recompute and compile, block by block, before a backend wraps.

    Returns: what stands where a module stood: its checkpoint wrapper, or the module itself.
    """
    if strategy.compile:
        for block in blocks(model):
            block.compile()
    wrappers: dict[int, nn.Module] = {}
    if strategy.recompute != "none":
        each = int(strategy.recompute.partition(":")[2] or 1)
        _replace(model, {id(b) for i, b in enumerate(blocks(model)) if i % each == 0}, wrappers)
    return lambda module: wrappers.get(id(module), module)


def _replace(module: nn.Module, chosen: set[int], wrappers: dict[int, nn.Module]) -> None:
    """Put a checkpoint wrapper around each chosen child, wherever it hangs."""
    for name, child in list(module.named_children()):
        if id(child) in chosen:
            wrappers[id(child)] = checkpoint_wrapper(child, checkpoint_impl=CheckpointImpl.NO_REENTRANT)
            setattr(module, name, wrappers[id(child)])
        else:
            _replace(child, chosen, wrappers)
