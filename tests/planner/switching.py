"""`planned_switch`: the memory of a rank while a live training is moved to another Spec, as rank/lifecycle.py and
backends/transfer.py do it. What they are held against.

A switch first makes a model without values, one parameter at a time on the host. Then it drops gradients, copies and what is
gathered, and builds the new backend, which has no storage yet; for FSDP1 torch makes a copy of each unit on the way. Then
parameters move in batches, with their optimizer state. A batch allocates the new storages of its parameters, and afterwards
frees the old ones that have no other parameter left. A unit is one storage in the lab's engine and in FSDP1; in FSDP2 and in
DDP each parameter has its own. Values that another rank holds come through two buffers.

Note: on a GPU the host's memory does not count, on a CPU that of offloaded state does. Units that differ are taken for one,
which is an upper bound.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fsdp_lab.core.model_shape import ModelShape
from fsdp_lab.core.spec import Spec
from fsdp_lab.planner.memory import MODELS
from fsdp_lab.planner.memory_models.base import (
    GRADIENTS,
    MASTER,
    PARAMETERS,
    UNSHARDED,
    MemoryModel,
    MemoryTracker,
    UnitBytes,
)
from fsdp_lab.planner.questions import shape_of

BATCHES, LEAST_NUMEL, MOST_NUMEL = 64, 1 << 16, 4 << 20  # of parameters that move at once, as in backends/transfer.py
_FLAT = ("lab", "fsdp1")  # backends in which a unit is one storage


@dataclass(frozen=True, kw_only=True)
class SwitchPlan:
    """Bytes of one rank on its compute device: between steps before the switch, at most, and before the first step after."""

    before_bytes: int
    peak_bytes: int
    after_bytes: int


def planned_switch(old: Spec, new: Spec, *, device: str) -> SwitchPlan:
    """A switch of a training that has stepped; `device` is "cpu" or "cuda"."""
    before, after = (_Layout(s, shape_of(s), on_gpu=device != "cpu") for s in (old, new))
    now = sum(before.units) - before.copies
    held = sum(before.units) + before.beside
    peak = max(held + after.skeleton, now + after.building)
    now += after.at_build + after.buffers_beside(before)
    for allocated, freed in _moves(before, after):
        peak = max(peak, now + allocated)
        now += allocated - freed
    return SwitchPlan(
        before_bytes=round(held), peak_bytes=round(peak), after_bytes=round(sum(after.units) + after.at_build)
    )


class _Layout:
    """What a Spec keeps between steps. `units`: bytes of parameters with their optimizer state, of each unit. `copies`: of
    them, what offload computes with. `beside`: gathered parameters and gradients. `at_build`: of those, what exists before
    the first step: DDP's buckets."""

    def __init__(self, spec: Spec, shape: ModelShape, *, on_gpu: bool) -> None:
        tracker = MemoryTracker()
        model: MemoryModel = MODELS[spec.strategy.backend](spec, shape, tracker, on_gpu=on_gpu)
        model.alloc_state()
        self.spec, self.is_flat = spec, spec.strategy.backend in _FLAT
        self.numels = [unit.parameters for unit in shape.units]
        is_here = not (model.offloaded and on_gpu)
        has_copies = model.offloaded and tracker.now[PARAMETERS] > 0
        slots = len(model.optimizer.slots)

        def parameters(u: UnitBytes) -> float:
            return u.shard * is_here + u.cast * has_copies

        self.units = [parameters(u) + slots * u.state * is_here for u in model.units]
        self.copies = sum(u.cast for u in model.units) * has_copies
        self.beside = tracker.now[UNSHARDED] + tracker.now[GRADIENTS]
        self.at_build = self.beside if spec.strategy.backend == "ddp" else 0.0
        self.skeleton = 0.0 if on_gpu else float(MASTER * max(n for numels in self.numels for n in numels))
        whole = MASTER * max(unit.numel for unit in shape.units)
        self.building = whole * (2 + 1 / spec.shard_factor) if spec.strategy.backend == "fsdp1" else 0.0

    @property
    def most_numel(self) -> int:
        """Elements that move at once, unless one parameter has more."""
        return min(MOST_NUMEL, max(LEAST_NUMEL, sum(map(sum, self.numels)) // BATCHES))

    def buffers_beside(self, old: _Layout) -> float:
        """Bytes of what is sent and of what comes, if another rank holds any of it."""
        own = old.spec.shard_factor == 1 or self._ranges == old._ranges
        return 0.0 if own else 2.0 * MASTER * self.most_numel

    @property
    def _ranges(self) -> tuple[object, ...]:
        """Specs that are equal in this give a rank the same ranges of parameters."""
        s = self.spec.strategy
        return s.backend, s.wrap, s.dtypes.param, self.spec.shard_factor


def _moves(old: _Layout, new: _Layout) -> Iterator[tuple[float, float]]:
    """Bytes that each batch allocates before it moves, and frees afterwards."""
    if old.numels != new.numels:
        yield sum(new.units), sum(old.units) - old.copies
        return
    shares = [was * (1 - old.copies / (sum(old.units) or 1)) for was in old.units]
    for numels, was, becomes in zip(old.numels, shares, new.units, strict=True):
        batches = [sum(batch) / (sum(numels) or 1) for batch in _batched(numels, new.most_numel)]
        for i, share in enumerate(batches):
            allocated = becomes * (i == 0) if new.is_flat else becomes * share
            yield allocated, was * (i == len(batches) - 1) if old.is_flat else was * share


def _batched(numels: tuple[int, ...], most: int) -> Iterator[list[int]]:
    """Parameters that move together."""
    batch: list[int] = []
    for numel in numels:
        if batch and sum(batch) + numel > most:
            yield batch
            batch = []
        batch.append(numel)
    yield batch
