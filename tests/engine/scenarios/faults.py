"""Faults of an engine, seeded into one process: each scenario must see those that it is about.

Each fault is a context around a script's run. It stands for a way in which a sharding engine goes wrong without a word.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from tests.engine.scenarios.engines import Engine

Seeded = Callable[[Engine], AbstractContextManager[Any]]


@contextmanager
def _before_steps(change: Callable[[Optimizer], None]) -> Iterator[None]:
    """`change` is called before each step of any optimizer."""
    handle = register_optimizer_step_pre_hook(lambda optimizer, *_: change(optimizer))
    try:
        yield
    finally:
        handle.remove()


def _all(optimizer: Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _rank_left_out(e: Engine) -> AbstractContextManager[Any]:
    """What half of the ranks would add is missing."""
    rows_of_all = e.rows

    def rows(data: Tensor) -> Tensor:
        return rows_of_all(data)[: data.shape[0] // 2]

    return patch.object(e, "rows", rows)


def _parameter_frozen(e: Engine) -> AbstractContextManager[None]:
    """The last parameter with a gradient does not move."""

    def freeze(optimizer: Optimizer) -> None:
        for p in [p for p in _all(optimizer) if p.grad is not None][-1:]:
            p.grad = None

    return _before_steps(freeze)


def _step_skipped(e: Engine) -> AbstractContextManager[None]:
    """The second step of an optimizer does nothing."""
    steps = Counter[int]()

    def skip(optimizer: Optimizer) -> None:
        steps[id(optimizer)] += 1
        for p in _all(optimizer) if steps[id(optimizer)] == 2 else ():
            p.grad = None

    return _before_steps(skip)


def _zero_for_none(e: Engine) -> AbstractContextManager[None]:
    """Unused parameters have a gradient of zero, so that weight decay and moments move them."""

    def fill(optimizer: Optimizer) -> None:
        for p in _all(optimizer):
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad

    return _before_steps(fill)


@contextmanager
def _never_unfrozen(e: Engine) -> Iterator[None]:
    """What was frozen when it was sharded never moves."""
    frozen: set[int] = set()
    shard = e.shard

    def note(model: nn.Module, units: Iterable[nn.Module] = ()) -> Any:
        frozen.update(id(p) for p in model.parameters() if not p.requires_grad)
        return shard(model, units)

    def drop(optimizer: Optimizer) -> None:
        for p in _all(optimizer):
            p.grad = None if id(p) in frozen else p.grad

    with patch.object(e, "shard", note), _before_steps(drop):
        yield


def _micro_batches_lost(e: Engine) -> AbstractContextManager[Any]:
    """What is accumulated without communication is not in the sum."""

    @contextmanager
    def no_sync(model: nn.Module) -> Iterator[None]:
        before = [p.grad.clone() if p.grad is not None else None for p in model.parameters()]
        yield
        for p, grad in zip(model.parameters(), before, strict=True):
            p.grad = grad

    return patch.object(e, "no_sync", no_sync)


def _in_place_of(owner: Any, name: str, other: Callable[..., Any]) -> Seeded:
    return lambda e: patch.object(owner, name, other)


def _step_anyway(scaler: Any, optimizer: Optimizer) -> None:
    with suppress(RuntimeError):  # the script has done it
        scaler.unscale_(optimizer)
    optimizer.step()


GENERAL: Mapping[str, Seeded] = {  # each script is given one of these, by turns
    "a rank is left out": _rank_left_out,
    "a parameter is frozen": _parameter_frozen,
    "a step is skipped": _step_skipped,
}
FAULTS: Mapping[str, Seeded] = {
    **GENERAL,
    "zero where there is no gradient": _zero_for_none,
    "never unfrozen": _never_unfrozen,
    "micro-batches lost": _micro_batches_lost,
    "clips nothing": _in_place_of(torch.nn.utils, "clip_grad_norm_", lambda *args, **kwargs: torch.zeros(())),
    "clips no value": _in_place_of(torch.nn.utils, "clip_grad_value_", lambda *args, **kwargs: None),
    "the schedule stands still": _in_place_of(torch.optim.lr_scheduler.LambdaLR, "step", lambda *args: None),
    "no rank skips": _in_place_of(torch.amp.GradScaler, "step", _step_anyway),
}
