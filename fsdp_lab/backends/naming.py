"""Whose collectives are issued: the wire is told the unit, in every backend.

Our engine says it by itself. torch's wrappers are told apart by their own objects, one for each unit: what issues its
collectives is wrapped, on that object alone, so that the wire hears the unit's name meanwhile. All of it is private to
torch; where a release names it otherwise, units stay nameless and nothing else changes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_lab.engine import runtime_of
from fsdp_lab.frame import ROOT
from fsdp_lab.schedule import Phase
from fsdp_lab.wire import Hub, Wire


def named_units(model: nn.Module, groups: Sequence[Sequence[nn.Module]]) -> dict[str, Sequence[nn.Module]]:
    """Each unit by the name of its first module in `model`; before anything is wrapped."""
    names = {module: name for name, module in model.named_modules()}
    return {names[group[0]] or ROOT: group for group in groups}


def hub_of(mesh: DeviceMesh) -> Hub | None:
    """Who measures the mesh's groups; None on bare groups of torch's."""
    group = mesh.get_all_groups()[0]
    return group.hub if isinstance(group, Wire) else None


def name_lab(root: nn.Module, hub: Hub | None) -> None:
    """Our engine."""
    if hub is None:
        return

    @contextmanager
    def around(phase: Phase, unit: str) -> Iterator[None]:
        name, start_s = unit or ROOT, time.perf_counter()
        with hub.naming(name):
            yield
        if phase is Phase.HOST_COPY:
            hub.meter.copied(name, start_s, time.perf_counter())

    runtime_of(root).around = around


def name_fsdp2(name: str, groups: Iterable[Any], hub: Hub | None) -> None:
    """A unit's parameter groups: they gather in `unshard`, and reduce in `post_backward`."""
    if hub is not None:
        for group in groups:
            _wrap(group, ("unshard", "post_backward"), lambda call: _within(call, hub, name))


def name_fsdp1(name: str, handle: Any, hub: Hub | None) -> None:
    """One flat parameter: it gathers in `unshard`; its reduction follows its `reshard`, of which nobody tells the end."""
    if hub is not None:
        _wrap(handle, ("unshard",), lambda call: _within(call, hub, name))
        _wrap(handle, ("reshard",), lambda call: _after(call, hub, name))


def _wrap(owner: Any, methods: Sequence[str], wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    for method in methods:
        if hasattr(owner, method):
            setattr(owner, method, wrapper(getattr(owner, method)))


def _within(call: Callable[..., Any], hub: Hub, name: str) -> Callable[..., Any]:
    @wraps(call)
    def named(*args: Any, **kwargs: Any) -> Any:
        with hub.naming(name):
            return call(*args, **kwargs)

    return named


def _after(call: Callable[..., Any], hub: Hub, name: str) -> Callable[..., Any]:
    @wraps(call)
    def named(*args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        finally:
            hub.name(name)

    return named
