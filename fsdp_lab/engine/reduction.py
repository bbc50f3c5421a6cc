"""`Reduction`: one flat gradient on its way from F * n summands to this rank's shard of the mean.

Reduce-scatter in the shard group, division by F, all-reduce across replicas, division by R: the order of FSDP2's hybrid
sharding, so that sums have the same bits. In fp16 a sum of large gradients would overflow, and of small ones too much
would vanish if all of the division came first: there, also as in FSDP2, about the root of W comes before the sums, the rest
after them.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch import distributed as dist

from fsdp_lab.engine.collectives import Lane, Pending, all_reduce, reduce_scatter
from fsdp_lab.engine.flat import FlatBuffer


class Reduction:
    """Issued when made (inside `lane.entered()`); `finish` brings it to the optimizer's `.grad`."""

    def __init__(self, flat: FlatBuffer, gradient: Tensor, lane: Lane) -> None:
        self.flat, self._grid, self._lane, self._whole = flat, flat.grid, lane, gradient
        self._in_parts = gradient.dtype is torch.float16
        self._rest = 1.0  # to divide by after all sums
        if self._in_parts:
            first, self._rest = _divisors(self._grid.world_size)
            gradient.div_(first)
        self._shard = gradient
        self._stages = [self._scatter, self._across, self._to_master]
        self._pending = self._next()
        while lane.stream is not None and self._stages:  # a stream queues all of it at once
            self._pending = self._next()

    @property
    def whole(self) -> Tensor:
        """[F * n]: the gradient that was sent."""
        return self._whole

    @property
    def shard(self) -> Tensor:
        """[n], or [F * n] where nothing is scattered: what has become of it so far."""
        return self._shard

    def advance(self) -> None:
        """Wait for the stage in flight and issue the next one."""
        self._pending.wait()
        if self._stages:
            with self._lane.entered():
                self._pending = self._next()

    def finish(self) -> None:
        while self._stages:
            self.advance()
        self._pending.wait(on_host=self._shard.device.type == "cpu")
        self.flat.add_gradient(self._shard)

    def _next(self) -> Pending:
        return self._stages.pop(0)()

    def _scatter(self) -> Pending:
        if self._grid.shards is None:
            return Pending(self._lane, None)
        self._shard = self._whole.new_empty(self.flat.layout.shard_numel)
        return self._sent(reduce_scatter(self._shard, self._whole, self._grid.shards), self._grid.factor)

    def _across(self) -> Pending:
        if self._grid.across is None:
            return Pending(self._lane, None)
        return self._sent(all_reduce(self._shard, self._grid.across), self._grid.replicas)

    def _sent(self, work: dist.Work | None, ranks: int) -> Pending:
        shard, ranks = self._shard, 1 if self._in_parts else ranks
        return Pending(self._lane, work, keeps=(self._whole, shard), then=lambda: _divide(shard, ranks))

    def _to_master(self) -> Pending:
        """In the dtype and the place of the master shard; under ZeRO-1 as a part of the whole gradient, which stays."""
        policy, master, reduced = self.flat.policy, self.flat.master, self._shard
        _divide(reduced, self._rest)
        if policy.whole_gradients and reduced is not self._whole:
            start, stop = self.flat.layout.shard(self._grid.rank)
            self._shard = self._whole[start:stop].copy_(reduced)
        dtype = self._shard.dtype if policy.low_gradients else master.dtype
        if master.device != self._shard.device:
            host = torch.empty(self._shard.shape, dtype=dtype, device=master.device, pin_memory=True)
            self._shard = host.copy_(self._shard, non_blocking=True)
        self._shard = self._shard.to(dtype)
        return Pending(self._lane, None, keeps=(self._whole, reduced))


def _divide(shard: Tensor, by: float) -> None:
    if by != 1:
        shard.div_(by)


def _divisors(ranks: int) -> tuple[int, float]:
    """Before the sum: the first power of two from the root of `ranks` on, or that no longer divides it; and the rest."""
    first = 1
    while ranks % first == 0 and ranks / first > first:
        first *= 2
    return first, ranks / first
