"""torch's DDP: parameters, gradients in buckets and optimizer state, whole on every rank.

A gradient is copied into its bucket as it comes. Where the reduction has a dtype of its own, each bucket is sent as a copy.
"""

from __future__ import annotations

from typing import Any

from fsdp_lab.core.model_shape import ModelShape
from fsdp_lab.core.spec import Spec
from fsdp_lab.planner.memory_models.base import MemoryModel
from fsdp_lab.planner.memory_tracker import COMMUNICATION, GRADIENTS, MemoryTracker
from fsdp_lab.planner.unit_bytes import replica_bytes

FIRST_BUCKET, BUCKET = 1 << 20, 25 << 20  # torch's defaults, in bytes


class DDPMemory(MemoryModel):
    def __init__(self, spec: Spec, shape: ModelShape, book: MemoryTracker, *, on_gpu: bool) -> None:
        super().__init__(spec, shape, book, replica_bytes, on_gpu=on_gpu)
        self._filled, self._limit, self._sent = 0.0, float(FIRST_BUCKET), 0.0
        self._recast = self.units[0].recast
        self._kept, self._fresh = [0.0] * len(self.units), [0.0] * len(self.units)  # by unit
        self._share = self.units[0].reduced / max(1.0, self.units[0].shard)

    def hold(self) -> None:
        super().hold()
        self.book.alloc(GRADIENTS, self.shards)

    def arrived(self, unit: int, index: int, size: float) -> None:
        """Without communication the first ones stay beside the buckets, and later ones are added to them."""
        if not self.loud and not self._kept[unit]:
            self._fresh[unit] += size
            return
        self.book.free(GRADIENTS, size)
        if self.loud and self._kept[unit]:
            self.book.free(GRADIENTS, 4.0 * self.shape.units[unit].parameters[index])
        if self._recast and self.loud:
            self._fill(4.0 * self.shape.units[unit].parameters[index])

    def _fill(self, size: float) -> None:
        self._filled += size
        if self._filled >= self._limit:
            self._send()

    def _send(self) -> None:
        sent = self._filled * self._share
        self.book.alloc(COMMUNICATION, sent)
        self._sent += sent
        self._filled, self._limit = 0.0, float(BUCKET)

    def end_backward(self) -> None:
        self._kept = [0.0 if self.loud else kept + fresh for kept, fresh in zip(self._kept, self._fresh, strict=True)]
        self._fresh = [0.0] * len(self.units)
        if self._recast and self._filled:
            self._send()
        self.book.free(COMMUNICATION, self._sent)
        self._sent, self._filled, self._limit = 0.0, 0.0, float(FIRST_BUCKET)

    def forget(self) -> None:
        """The buckets stay."""

    def key(self, unit: int) -> tuple[object, ...]:
        sent = (self._filled, self._limit, self._sent) if self._recast and self.loud else ()
        return (self.loud, bool(self._kept[unit]), self._fresh[unit], *sent)

    def after(self, unit: int) -> Any:
        return self._filled, self._limit, self._sent, self._fresh[unit]

    def restore(self, unit: int, state: Any) -> None:
        self._filled, self._limit, self._sent, self._fresh[unit] = state
