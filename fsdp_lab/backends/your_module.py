"""`YourModule`: backend "yours" with an engine of the user's that wraps a whole module and has hooks of its own.

    class Engine:
        def wrap(self, module): ...                       # returns the module that is called in its place
        def after_backward(self, module, optimizer): ...  # may be left out: after each backward, before the update
        def whole(self, module): ...                      # may be left out: {name: whole parameter}

So an engine with the interface of Stanford's CS336 (`get_fsdp`, `fsdp_on_after_backward`, `fsdp_gather_full_params`) needs
three lines. The optimizer is given the parameters of what `wrap` returns, each of which holds a part of one parameter, or
all of it, and their gradients. What is where is found out as for units (your_shards.py). Its phases are not inspected.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fsdp_lab.backends import base
from fsdp_lab.backends.base import Backend
from fsdp_lab.backends.state import gather_json, together
from fsdp_lab.backends.storage import DeferredStorage, storage_id
from fsdp_lab.backends.wrapping import prepare
from fsdp_lab.backends.your_checks import whole_values, wrong_values
from fsdp_lab.backends.your_engine import YourEngine, YourUnit
from fsdp_lab.backends.your_shards import KeptPart, check_coverage, find_parts, number_elements
from fsdp_lab.core.errors import SpecError
from fsdp_lab.core.events import ROOT
from fsdp_lab.core.spec import Spec, Strategy
from fsdp_lab.engine import ParamShard

_AFTER, _WHOLE = "after_backward", "whole"
_COMPARED = (1, 2)  # steps before which `whole` is called: with values that have been updated


class YourModule(Backend):
    """See the module."""

    def __init__(self, skeleton: nn.Module, spec: Spec, mesh: DeviceMesh, device: torch.device) -> None:
        _check(spec)
        deferred, self._begun = DeferredStorage(), 0
        engine, module, unit, flats, parts = together(lambda: _wrapped(skeleton, spec, device))
        self._engine, self._unit, self._flats = engine, unit, flats
        rows = gather_json({name: part.to_row() for name, part in parts.items()})
        self._layout = {name: [KeptPart.of_row(of_rank[name]) for of_rank in rows] for name in parts}
        check_coverage(engine, unit, self._layout, replicated=None)
        self._shared = {name for name, p in zip(unit.names, unit.params, strict=True)
                        if unit.world_size > 1 and all(part.numel == p.numel() for part in self._layout[name])}  # fmt: skip
        shards = list(self._shards(list(module.parameters())))
        for t in {storage_id(t): t for t in flats}.values():
            deferred.defer(t)
        super().__init__(module, shards, deferred, spec, mesh, device)

    def _shards(self, trained: list[nn.Parameter]) -> Iterator[ParamShard]:
        for name, p in zip(self._unit.names, self._unit.params, strict=True):
            part = self._layout[name][self._unit.rank]
            there = next((other.tensor for other in self._layout[name] if other.numel), 0)
            local = part.of(self._flats) if part.numel else self._flats[there][:0]
            yield ParamShard(name=name, shape=p.shape, start=part.start, stop=part.stop, local=local,
                             param=trained[part.tensor if part.numel else there], offset=part.offset)  # fmt: skip

    def is_counted(self, shard: ParamShard) -> bool:
        return self._unit.rank == 0 or shard.name not in self._shared

    def counted_gradients(self) -> list[Tensor]:
        counted = map(self.gradient, filter(self.is_counted, self.param_shards()))
        return [g for g in counted if g is not None and g.numel()]

    def begin_step(self, step: int) -> bool:
        """Compares what `whole` returns with the shards of all ranks, before the first steps after an update."""
        self._engine.step, self._begun = step, self._begun + 1
        compares = self._begun - 1 in _COMPARED and self._engine.has(_WHOLE)
        if compares:
            self._compare()
        return compares

    def _compare(self) -> None:
        unit = self._unit
        right = whole_values(unit, self._layout, self._flats)
        found = self._engine.call(_WHOLE, unit, "", self.module)
        for name, p, values in zip(unit.names, unit.params, right, strict=True):
            given = found.get(name) if isinstance(found, dict) else None
            if not isinstance(given, Tensor) or given.shape != p.shape:
                what = f"has no {name}" if not isinstance(given, Tensor) else f"has {name} as {tuple(given.shape)}"
                raise self._engine.mistake(_WHOLE, unit, "", f"returned what {what}", "return {name: whole parameter}")
            if not torch.equal(given.detach().reshape(-1), values):
                wrong = wrong_values(given.detach().reshape(-1), values, None, self._layout[name][unit.rank])
                raise self._engine.mistake(_WHOLE, unit, "", f"makes {name} wrong: {wrong[0]}", wrong[1])

    @property
    def user_call(self) -> tuple[str, float] | None:
        return self._engine.call_in_progress

    @contextmanager
    def micro_batch(self, *, communicate: bool) -> Iterator[None]:
        yield
        if self._engine.has(_AFTER):
            self._engine.call(_AFTER, self._unit, "backward", self.module, self.optimizer)

    def unit_modules(self) -> list[tuple[str, nn.Module]]:
        return []


def _check(spec: Spec) -> None:
    """Raises SpecError for what such an engine is not asked for."""
    if not spec.strategy.reshards_after_forward:
        full = Strategy().sharding
        raise SpecError("strategy.sharding", "an engine that wraps a module decides itself what it frees", f"use {full}",
                        {"sharding": full})  # fmt: skip
    if spec.workload.accumulate > 1:
        raise SpecError("workload.accumulate", "an engine that wraps a module is not told which micro-batch is the last",
                        "use 1", {"accumulate": 1})  # fmt: skip


def _wrapped(
    skeleton: nn.Module, spec: Spec, device: torch.device
) -> tuple[YourEngine, nn.Module, YourUnit, list[Tensor], dict[str, KeptPart]]:
    """The engine, the wrapped module, the whole model as one unit of parameters on meta, and what this rank keeps of it."""
    engine = YourEngine(spec.strategy)
    metas = {base.original_name(name): p for name, p in skeleton.named_parameters()}
    prepare(skeleton, spec.strategy)
    skeleton.apply(base.materialiser(device))
    base.place_buffers(skeleton, device, spec.strategy.dtypes)
    number_elements(list(skeleton.parameters()))
    unit = YourUnit(ROOT, metas, dist.get_rank(), dist.get_world_size())
    module = engine.call("wrap", unit, "", skeleton)
    if not isinstance(module, nn.Module):
        raise engine.mistake("wrap", unit, "", f"returned a {type(module).__name__}", "return the module to be called")
    tensors = [p.detach() for p in module.parameters()]
    flats, parts = find_parts(engine, unit, tensors, "wrap")
    return engine, module, unit, flats, parts
