"""`MemoryModel`: what a backend allocates and frees in a `MemoryTracker` during a step. Each backend has a subclass.

A model only adds up bytes at the points of a schedule, from the sizes of each unit in the forms that the backend stores
(`UnitBytes`). Where CPU ranks of a host share memory, tensors in it are counted, and copies and free blocks are not."""

import math
from dataclasses import dataclass, field
from typing import Self

from fsdp_lab.base.events import Role, RoleBytes
from fsdp_lab.engine.schedule import Point
from fsdp_lab.planner.model_shape import ModelShape, UnitShape
from fsdp_lab.spec.spec import Spec

MASTER = 4  # bytes of an fp32 element

PARAMETERS, UNSHARDED, GRADIENTS, OPTIMIZER, ACTIVATIONS, COMMUNICATION, OTHER = range(len(Role))  # in Role's order


@dataclass(slots=True)
class MemoryTracker:
    """Allocated bytes by class: now and at the peak. `where` is set by the caller; `peak_where` is its value at the peak."""

    now: list[float] = field(default_factory=lambda: [0.0] * len(Role))
    total: float = 0.0
    peak: list[float] = field(default_factory=lambda: [0.0] * len(Role))
    peak_total: float = 0.0
    where: tuple[str, int] = ("begin", 0)
    peak_where: tuple[str, int] = ("begin", 0)

    def alloc(self, role: int, size: float) -> None:
        self.now[role] += size
        self.total += size
        if self.total > self.peak_total:
            self.peak_total, self.peak, self.peak_where = self.total, self.now[:], self.where

    def free(self, role: int, size: float) -> None:
        self.now[role] -= size
        self.total -= size

    def add(self, other: Self) -> None:
        """Repeat the allocations of a tracker that began empty."""
        if self.total + other.peak_total > self.peak_total:
            self.peak_total = self.total + other.peak_total
            self.peak = [a + b for a, b in zip(self.now, other.peak, strict=True)]
            self.peak_where = self.where
        self.now = [a + b for a, b in zip(self.now, other.now, strict=True)]
        self.total += other.total


def role_bytes(sizes: list[float]) -> RoleBytes:
    """`MemoryTracker.now` or `.peak` in whole bytes."""
    return RoleBytes.of({role: round(max(0.0, size)) for role, size in zip(Role, sizes, strict=True)})


@dataclass(frozen=True, kw_only=True)
class UnitBytes:
    """Bytes of a unit on one rank, padding included, where F ranks share a copy."""

    shard: float  # this rank's shard in fp32
    cast: float  # the shard in the gathered dtype
    gathered: float  # all F shards in the gathered dtype
    whole: float  # the unsharded gradient in the dtype of the reduction
    reduced: float  # this rank's shard of the gradient in that dtype
    gradient: float  # the same in fp32
    state: float  # in fp32: the part of the shard that the optimizer has state for, what is not frozen
    decayed: float  # of the shard in fp32: parameters with weight decay, one parameter group of the optimizer
    others: float  # the rest of the shard
    mixed: bool  # gathered in another dtype than fp32
    recast: bool  # reduced in another dtype than fp32

    @classmethod
    def of(cls, numel: int, decayed: int, others: int, *, param: int, reduce: int, factor: int, reduced: int) -> Self:
        """Makes one from elements of a shard; `param` and `reduce` are bytes of an element in those dtypes. `reduced`:
        elements of its gradient, all of which have optimizer state."""
        return cls(
            shard=numel * MASTER,
            cast=numel * param,
            gathered=factor * numel * param,
            whole=factor * reduced * reduce,
            reduced=reduced * reduce,
            gradient=reduced * MASTER,
            state=reduced * MASTER,
            decayed=decayed * MASTER,
            others=others * MASTER,
            mixed=param != MASTER,
            recast=reduce != MASTER,
        )


def parameter_shapes(unit: UnitShape) -> list[tuple[int, ...]]:
    """Shapes of a unit's parameters. If only their numbers of elements are known, matrices as wide as the unit's input."""
    if unit.shapes:
        return list(unit.shapes)
    width = int(unit.boundary_elements) or 1
    return [(n // width, width) if n > width and n % width == 0 else (n,) for n in unit.parameters]


def decayed_numel(unit: UnitShape) -> int:
    """Elements of the trained matrices, which have weight decay; biases and norms have none."""
    return sum(math.prod(s) for i, s in enumerate(parameter_shapes(unit)) if len(s) >= 2 and i not in unit.frozen)


class MemoryModel:
    """Memory state of one rank during one step. On a GPU device and host memory are separate."""

    def __init__(self, spec: Spec, shape: ModelShape, tracker: MemoryTracker, *, on_gpu: bool) -> None:
        self.spec, self.shape, self.tracker, self.on_gpu = spec, shape, tracker, on_gpu
        self.factor, self.strategy = spec.shard_factor, spec.strategy
        self.replicas = spec.world_size // self.factor
        self.optimizer = spec.workload.torch_optimizer
        sizes = {id(unit): self.unit_bytes(unit) for unit in {id(unit): unit for unit in shape.units}.values()}
        self.units = [sizes[id(unit)] for unit in shape.units]
        self.gradients = [0.0] * len(self.units)  # reduced gradients of each unit
        self.fresh = [0.0] * len(self.units)  # gradients that became ready after the unit's last reduction
        self.offloaded = self.strategy.offload != "none"
        self.reduces_on_host = self.offloaded and not on_gpu  # reduced gradients are host memory, which is not counted
        self.reductions = self.strategy.limit_reductions  # units whose whole gradients are in flight
        self.reduces = True  # whether this micro-batch reduces gradients

    def unit_bytes(self, unit: UnitShape) -> UnitBytes:
        """Sizes of a unit as this backend lays it out. Called by the constructor, after `spec` and `factor` are set."""
        raise NotImplementedError

    @property
    def shards(self) -> float:
        """Bytes of this rank's fp32 parameters."""
        return sum(u.shard for u in self.units)

    @property
    def gradient_shards(self) -> float:
        """Bytes of their gradients, of those that are trained."""
        return sum(u.gradient for u in self.units)

    @property
    def state(self) -> float:
        """Bytes of this rank's optimizer state."""
        return sum(u.state for u in self.units) * len(self.optimizer.slots)

    def alloc_state(self) -> None:
        """Allocates what a rank holds when a step begins."""
        if not self.offloaded:
            self.tracker.alloc(PARAMETERS, self.shards)
            self.tracker.alloc(OPTIMIZER, self.state)

    @property
    def host_bytes(self) -> float:
        """Host memory under offload: shards, gradients, optimizer state."""
        return self.shards + self.gradient_shards + self.state if self.offloaded else 0.0

    def begin_micro_batch(self, *, reduces: bool) -> None:
        self.reduces = reduces

    def at(self, point: Point) -> None:
        """Called at each point of the schedule."""

    def kept_after_forward(self, unit: int) -> float:
        """Bytes of its gathered parameters that a rank keeps from the forward to the backward."""
        size = self.strategy.reshard_size
        return self.units[unit].gathered / size if size else 0.0

    def gradient_ready(self, unit: int, index: int, size: float) -> None:
        """Called when a parameter's gradient, of `size` bytes, is complete."""

    def keep_gradient(self, unit: int, size: float) -> None:
        """A reduced gradient of `size` bytes is moved to the host, added to that of an earlier micro-batch, or kept."""
        if self.offloaded or self.gradients[unit]:
            self.tracker.free(GRADIENTS, size)
        else:
            self.gradients[unit] = size

    def end_backward(self) -> None:
        """Called after the backward."""

    def update(self) -> None:
        """Scratch of the optimizer's kernels: AdamW's square roots, SGD's gradients with weight decay added. Foreach ones
        take a parameter group at a time, fused ones have none; others take a tensor at a time, counted as one unit."""
        if self.offloaded or self.optimizer.is_fused:
            return
        groups = [[u.decayed for u in self.units], [u.others for u in self.units]]
        if self.optimizer.name == "sgd" and (self.optimizer.is_foreach or not self.optimizer["nesterov"]):
            groups = groups[:1] if self.spec.workload.weight_decay > 0 else []
        for parts in groups:
            scratch = sum(parts) if self.optimizer.is_foreach else max(parts, default=0.0)
            self.tracker.alloc(OPTIMIZER, scratch)
            self.tracker.free(OPTIMIZER, scratch)

    def drop_gradients(self) -> None:
        """Called for `zero_grad`."""
        if not self.offloaded:
            self.tracker.free(GRADIENTS, sum(self.gradients))
        self.gradients = [0.0] * len(self.units)

    def state_key(self, unit: int) -> tuple[object, ...]:
        """All state that determines what happens to this unit's gradients."""
        return (self.fresh[unit],)
