"""torch's DDP: parameters, gradients in buckets and optimizer state, unsharded on every rank.

A gradient is copied to its bucket when it is ready. If the reduction has a dtype of its own, a bucket is sent as a copy.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from fsdp_lab.planner.costs import BUCKET, BYTES, FIRST_BUCKET
from fsdp_lab.planner.memory_models.base import (
    COMMUNICATION,
    GRADIENTS,
    MASTER,
    MemoryModel,
    MemoryTracker,
    UnitBytes,
    decayed_numel,
)
from fsdp_lab.planner.model_shape import ModelShape, UnitShape
from fsdp_lab.spec.spec import Spec


class DDPMemory(MemoryModel):
    """DDP. `fresh`: bytes of a unit's gradients of this micro-batch that are not in buckets, as under `no_sync`."""

    def __init__(self, spec: Spec, shape: ModelShape, tracker: MemoryTracker, *, on_gpu: bool) -> None:
        super().__init__(spec, shape, tracker, on_gpu=on_gpu)
        self._filled, self._limit, self._sent = 0.0, float(FIRST_BUCKET), 0.0
        self._recast = self.units[0].recast
        self._kept = [0.0] * len(self.units)  # those of earlier micro-batches
        self._in_buckets = False  # gradients are views of buckets: from the first reduction of a step on
        self._share = BYTES[spec.strategy.dtypes.reduce] / MASTER

    def unit_bytes(self, unit: UnitShape) -> UnitBytes:
        decayed, reduce = decayed_numel(unit), BYTES[self.strategy.dtypes.reduce]
        trained = unit.trained_numel
        whole = UnitBytes.of(
            unit.numel, decayed, trained - decayed, param=MASTER, reduce=reduce, factor=1, reduced=trained
        )
        return dataclasses.replace(whole, gathered=0, whole=whole.gradient)

    def alloc_state(self) -> None:
        super().alloc_state()
        self.tracker.alloc(GRADIENTS, self.gradient_shards)

    def gradient_ready(self, unit: int, index: int, size: float) -> None:
        """Under `no_sync` the first gradients stay outside of the buckets, and later ones are added to them; after a
        reduction, to the buckets."""
        if not (self.reduces or self._kept[unit] or self._in_buckets):
            self.fresh[unit] += size
            return
        numel = self.shape.units[unit].parameters[index]
        self.tracker.free(GRADIENTS, size)
        if self.reduces and self._kept[unit]:
            self.tracker.free(GRADIENTS, 4.0 * numel)
        if self._recast and self.reduces:
            self._filled += 4.0 * numel
            if self._filled >= self._limit:
                self._send()

    def _send(self) -> None:
        sent = self._filled * self._share
        self.tracker.alloc(COMMUNICATION, sent)
        self._sent += sent
        self._filled, self._limit = 0.0, float(BUCKET)

    def end_backward(self) -> None:
        self._kept = [0.0 if self.reduces else kept + new for kept, new in zip(self._kept, self.fresh, strict=True)]
        self._in_buckets = self._in_buckets or self.reduces
        self.fresh = [0.0] * len(self.units)
        if self._recast and self._filled:
            self._send()
        self.tracker.free(COMMUNICATION, self._sent)
        self._sent, self._filled, self._limit = 0.0, 0.0, float(FIRST_BUCKET)

    def drop_gradients(self) -> None:
        """The buckets stay."""

    def state_key(self, unit: int) -> tuple[object, ...]:
        sent = (self._filled, self._limit, self._sent) if self._recast and self.reduces else ()
        return (self.reduces, bool(self._kept[unit]), self._in_buckets, self.fresh[unit], *sent)

    def unit_state(self, unit: int) -> Any:
        return self._filled, self._limit, self._sent, self.fresh[unit]

    def set_unit_state(self, unit: int, state: Any) -> None:
        self._filled, self._limit, self._sent, self.fresh[unit] = state
