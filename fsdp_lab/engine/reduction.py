"""`Reduction`: one flat gradient on its way to the optimizer.

Reduce-scatter in the shard group, division by F, all-reduce across replicas, division by R. That is the order of FSDP2's
hybrid sharding, so that sums have the same bits. In fp16 a sum of large gradients would overflow, and small ones would
vanish if all of the division came first: there, also as in FSDP2, about the square root of W divides before the sums, and
the rest after them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from fsdp_lab.base.streams import CommStreams
from fsdp_lab.engine.buffers import empty
from fsdp_lab.engine.collectives import CommHandle, all_reduce, reduce_scatter
from fsdp_lab.engine.gradients import GradientBuffer, Taken


class Reduction:
    """One flat gradient in flight. Issued when made; `advance` takes it to the optimizer.

    On a CPU a collective can be issued only when the one before it has ended, so somebody must come back for it. The runtime
    comes when the next unit's gradients are complete: all ranks come at the same point, so that they issue all collectives
    in one order, and each of them has had the backward of one unit to run beside.

    On a device all of it is queued at once. The whole gradient is freed when the next unit's is complete. What follows the
    reduce-scatter (all-reduce, copy to the host) is waited for at the end of the backward, since the optimizer is the first
    to read it; earlier, where it is added to the gradient of an earlier backward, or where a hook reads it.
    """

    def __init__(self, target: GradientBuffer, taken: Taken, streams: CommStreams, *, stays: bool) -> None:
        """stays: whether it may be in flight until the end of the backward."""
        self.target, self._mesh, self._streams, self._arrived = target, target.mesh, streams, taken.arrived
        gradient = taken.tensor
        self.unsharded: Tensor | None = gradient  # [F * n'], what is sent, until it has been scattered
        self.shard = gradient  # what it has become so far: [n'], then [n]; whole where nothing is scattered
        self._counts: Tensor | None = None  # [P], where not all came here
        self._final_dtype = gradient.dtype if target.policy.mp.keep_low_precision_gradients else target.master.dtype
        self._divides_first = gradient.dtype is torch.float16
        self._rest = 1.0  # to divide by after all sums
        if self._divides_first:
            first, self._rest = _divisors(self._mesh.world_size)
            gradient.div_(first)
        self._is_on_host = target.policy.is_on_host(self._mesh)
        is_queued = self._mesh.streams is not None
        self._handle: CommHandle | None = None  # the last that was issued
        self._unsent = [*self._stages()]
        if self._unsent:
            self._send()
        else:
            self.shard = gradient.to(self._final_dtype)
        self._scattered = self._handle if self._mesh.shard_group is not None else None
        while is_queued and self._unsent:
            self._send()
        self._stays = stays and is_queued and (self._is_on_host or self._mesh.replicate_group is not None)

    def ends(self, *, last: bool) -> bool:
        """Returns whether the next `advance` gives the gradient to the optimizer; `last`: at the end of the backward."""
        return not self._unsent and (last or not self._stays)

    def advance(self, *, ends: bool) -> None:
        """Wait for what is in flight. `ends`: give the shard to the optimizer; otherwise free the whole gradient, and issue
        the next collective."""
        if ends:
            if self._handle is not None:
                self._handle.wait(on_host=self._is_on_host)
            self.target.accumulate(self.shard, self._arrived, self._counts)
            return
        if self._scattered is not None:
            self._scattered.wait()
            self._scattered = None
            if not self.target.policy.shard_optimizer_only:
                self.unsharded = None
        if self._unsent:
            self._send()

    def _stages(self) -> Iterator[Callable[[], CommHandle]]:
        if self._mesh.shard_group is not None:
            yield self._reduce_scatter
        if self._mesh.replicate_group is not None:
            yield self._all_reduce
        if self._is_on_host:
            yield self._deliver

    def _send(self) -> None:
        self._handle = self._unsent.pop(0)()

    def _reduce_scatter(self) -> CommHandle:
        group, unsharded, is_last = self._mesh.shard_group, self.unsharded, self._mesh.replicate_group is None
        assert group is not None and unsharded is not None
        n, rank = self.target.chunks.part_numel, self._mesh.shard_rank
        part = self.shard = unsharded[
            rank * n : (rank + 1) * n
        ]  # in place: no more than the whole gradient is in flight

        def landed() -> None:
            self._to_mean(part, self._mesh.shard_size, is_last=is_last)
            if is_last:
                self._cut(part)
            elif not self.target.policy.shard_optimizer_only:
                self.shard = part.clone()

        with self._streams.reduce.entered():
            work = reduce_scatter(part, unsharded, group)
            return CommHandle(self._streams.reduce, work, then=landed)

    def _all_reduce(self) -> CommHandle:
        group, shard = self._mesh.replicate_group, self.shard
        assert group is not None

        def landed() -> None:
            self._to_mean(shard, self._mesh.replicas, is_last=True)
            self._cut(shard)

        with self._streams.all_reduce.entered():
            if self._handle is not None:
                self._handle.order()
            return CommHandle(self._streams.all_reduce, all_reduce(shard, group), keeps=(shard,), then=landed)

    def _cut(self, mean: Tensor) -> None:
        """The shard without its counts, in the dtype that the optimizer is given. mean: [n']"""
        n, counts = self.target.layout.shard_numel, self.target.chunks.counts
        if len(self._arrived) < counts:
            self._counts = mean[n : n + counts].clone()
        if self.target.policy.shard_optimizer_only:  # it may stay a part of the whole gradient
            self.shard = mean[:n].to(self._final_dtype)
        else:
            self.shard = empty(self._mesh.buffer_pool, n, self._final_dtype, mean.device, is_private=True).copy_(
                mean[:n]
            )

    def _deliver(self) -> CommHandle:
        """Copies the gradient to the host, where the master shard is."""
        with self._streams.to_host.entered():
            if self._handle is not None:
                self._handle.order()
            reduced, cast = self.shard, self.shard.to(self._final_dtype)
            assert self._mesh.streams is not None
            self.shard = self._mesh.streams.host_memory(cast.numel(), cast.dtype).copy_(cast, non_blocking=True)
            return CommHandle(self._streams.to_host, None, keeps=(reduced, cast))

    def _to_mean(self, summed: Tensor, ranks: int, *, is_last: bool) -> None:
        for by in (1 if self._divides_first else ranks, self._rest if is_last else 1):
            if by != 1:
                summed.div_(by)


def _divisors(ranks: int) -> tuple[int, float]:
    """The divisors before the sum and after it: first the smallest power of two not below the square root of `ranks`,
    or that no longer divides it; then the rest."""
    first = 1
    while ranks % first == 0 and ranks / first > first:
        first *= 2
    return first, ranks / first
