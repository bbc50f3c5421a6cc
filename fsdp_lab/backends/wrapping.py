"""`Strategy.recompute` and `Strategy.compile` applied to a model before it is sharded."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper

from fsdp_lab.engine import blocks
from fsdp_lab.spec import Strategy


def prepare(model: nn.Module, strategy: Strategy) -> Callable[[nn.Module], nn.Module]:
    """Recompute and compile, block by block, before a backend wraps.

    Returns: what stands where a module stood: its checkpoint wrapper, or the module itself.
    """
    if strategy.compile:
        for block in blocks(model):
            block.compile()
    wrappers: dict[int, nn.Module] = {}
    _replace(model, {id(b) for b in recomputed(model, strategy)}, wrappers)
    return lambda module: wrappers.get(id(module), module)


def recomputed(model: nn.Module, strategy: Strategy) -> list[nn.Module]:
    """The blocks whose activations are computed again in the backward, in the order of the forward."""
    if strategy.recompute == "none":
        return []
    each = int(strategy.recompute.partition(":")[2] or 1)
    return [b for i, b in enumerate(blocks(model)) if i % each == 0]


def _replace(module: nn.Module, chosen: set[int], wrappers: dict[int, nn.Module]) -> None:
    """Put a checkpoint wrapper around each chosen child, wherever it hangs."""
    for name, child in list(module.named_children()):
        if id(child) in chosen:
            wrappers[id(child)] = checkpoint_wrapper(child, checkpoint_impl=CheckpointImpl.NO_REENTRANT)
            setattr(module, name, wrappers[id(child)])
        else:
            _replace(child, chosen, wrappers)
