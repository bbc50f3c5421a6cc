"""`MemoryModel`: what a backend allocates and frees in a `MemoryTracker` during a step. Each backend has one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fsdp_lab.core.model_shape import ModelShape, UnitShape
from fsdp_lab.core.schedule import Point
from fsdp_lab.core.spec import Spec
from fsdp_lab.planner.memory_tracker import COMMUNICATION, GRADIENTS, OPTIMIZER, PARAMETERS, MemoryTracker
from fsdp_lab.planner.unit_bytes import STATE, UnitBytes

Measure = Callable[[UnitShape, Spec, int], UnitBytes]


class MemoryModel:
    """State of one rank in one step.

    Args:
        measure: the bytes of a unit, as this backend lays it out.
        on_gpu: whether the host's memory is another one.
    """

    def __init__(self, spec: Spec, shape: ModelShape, book: MemoryTracker, measure: Measure, *, on_gpu: bool) -> None:
        self.spec, self.shape, self.book, self.on_gpu = spec, shape, book, on_gpu
        self.factor, self.strategy = spec.shard_factor, spec.strategy
        self.replicas = spec.world_size // self.factor
        known = {id(unit): unit for unit in shape.units}
        of = {key: measure(unit, spec, self.factor) for key, unit in known.items()}
        self.units = [of[id(unit)] for unit in shape.units]
        self.gradients = [0.0] * len(self.units)  # shards that are reduced
        self.offloaded = self.strategy.offload != "none"
        self.keeps_gradients = False  # between steps
        self.loud = True  # whether this micro-batch communicates
        self.flying = 0.0  # scratch of gathers on their way
        self._over_gloo = not on_gpu and self.factor > 1

    # -- between steps ----------------------------------------------------------------------------------------------

    @property
    def shards(self) -> float:
        """Bytes of fp32 parameters."""
        return sum(u.shard for u in self.units)

    def hold(self) -> None:
        """What is there when a step begins."""
        if self.keeps_gradients and not self.offloaded:
            self.gradients = [u.shard for u in self.units]
            self.book.alloc(GRADIENTS, self.shards)
        if not self.offloaded:
            self.book.alloc(PARAMETERS, self.shards)
            self.book.alloc(OPTIMIZER, self.shards * STATE[self.spec.workload.optimizer])

    @property
    def host_bytes(self) -> float:
        """Of the host under offload: shards, gradients, optimizer state."""
        return self.shards * (2 + STATE[self.spec.workload.optimizer]) if self.offloaded else 0.0

    # -- on the wire ------------------------------------------------------------------------------------------------

    def gathering(self, size: float) -> float:
        """What a gather of so many bytes takes beside its output while it is on its way: Gloo lands it elsewhere first."""
        return size if self._over_gloo else 0.0

    def reducing(self, size: float) -> float:
        """The same of a reduce-scatter: over Gloo the wire exchanges the summands, and adds them in the order of ranks."""
        return size if self._over_gloo else 0.0

    def pass_by(self, size: float, *, ahead: bool = False) -> None:
        """So many bytes for a moment; of a collective that runs beside computing, till about the middle of the unit that
        computes: till its first gradient is made, or its forward is over."""
        self.book.alloc(COMMUNICATION, size)
        if ahead:
            self.flying += size
        else:
            self.book.free(COMMUNICATION, size)

    def landed(self) -> None:
        if self.flying:
            self.book.free(COMMUNICATION, self.flying)
            self.flying = 0.0

    # -- in a micro-batch -------------------------------------------------------------------------------------------

    def begin(self, *, loud: bool) -> None:
        """A micro-batch begins."""
        self.loud = loud

    def at(self, point: Point) -> None:
        """The step has come to a point of the schedule."""

    def arrived(self, unit: int, index: int, size: float) -> None:
        """A parameter's gradient is complete: a block of `size` of the class of gradients."""

    def end_backward(self) -> None:
        """Autograd is through."""

    # -- update -----------------------------------------------------------------------------------------------------

    def update(self) -> None:
        """The optimizer's scratch: AdamW's square roots, SGD's gradients with decay added; a group of parameters at once."""
        if self.offloaded:
            return
        groups = [sum(u.decayed for u in self.units), sum(u.others for u in self.units)]
        decay = self.spec.workload.weight_decay > 0
        if self.spec.workload.optimizer == "sgd":
            groups = groups[:1] if decay else []
        for scratch in groups:
            self.book.alloc(OPTIMIZER, scratch)
            self.book.free(OPTIMIZER, scratch)

    def forget(self) -> None:
        """Gradients are dropped."""
        if self.keeps_gradients:
            return
        if not self.offloaded:
            self.book.free(GRADIENTS, sum(self.gradients))
        self.gradients = [0.0] * len(self.units)

    # -- alike units ------------------------------------------------------------------------------------------------

    def key(self, unit: int) -> tuple[object, ...]:
        """What decides how this unit's gradients are taken."""
        raise NotImplementedError

    def after(self, unit: int) -> Any:
        """The unit's state, for `restore` to set without its gradients coming one by one."""
        raise NotImplementedError

    def restore(self, unit: int, state: Any) -> None:
        raise NotImplementedError
