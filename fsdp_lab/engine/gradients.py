"""Gradients of one flat buffer: collected during a backward, reduced, and given to the optimizer.

`GradientBuffer` has `unsharded` [F * n] while gradients arrive from autograd. `Reduction` brings it to this rank's shard [n]
of the mean: reduce-scatter in the shard group, division by F, all-reduce across replicas, division by R. That is the order
of FSDP2's hybrid sharding, so that sums have the same bits. In fp16 a sum of large gradients would overflow, and small ones
would vanish if all of the division came first: there, also as in FSDP2, about the square root of W divides before the sums,
and the rest after them. What is reduced becomes the `.grad` of `regions`, the parameters that the optimizer was given.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch import Tensor, nn
from torch import distributed as dist

from fsdp_lab.core.layout import Layout
from fsdp_lab.engine.collectives import CommHandle, CommStream, all_reduce, reduce_scatter
from fsdp_lab.engine.mesh import ShardMesh
from fsdp_lab.engine.policy import ShardPolicy


class GradientBuffer:
    """See the module.

    Args:
        master: [n], the shard whose gradient this is.
        trainable: False: there are no regions, and nothing arrives.
    """

    def __init__(
        self, layout: Layout, mesh: ShardMesh, policy: ShardPolicy, master: Tensor, *, trainable: bool
    ) -> None:
        self.layout, self.mesh, self.policy, self.master = layout, mesh, policy, master
        self.unsharded: Tensor | None = None  # [F * n], while gradients arrive
        self.regions: dict[Hashable, nn.Parameter] = {}  # optimizer group -> a slice of the master shard
        for group in layout.regions if trainable else ():
            start, stop = layout.region_in_shard(group, mesh.shard_rank)
            self.regions[group] = nn.Parameter(master[start:stop])
        self._arrived: set[int] = set()

    def receive(self, i: int, grad: Tensor) -> None:
        """A parameter's gradient, from autograd; added where one came before."""
        if self.unsharded is None:
            dtype = self.policy.reduced_dtype(self.master.dtype)
            self.unsharded = torch.empty(self.layout.numel, dtype=dtype, device=self.mesh.device)
        slot = self.layout.slots[i]
        place = self.unsharded[slot.offset : slot.stop].view(slot.shape)
        if i in self._arrived:
            place.add_(grad)
        else:
            self._arrived.add(i)
            place.copy_(grad)

    def take(self) -> Tensor | None:
        """[F * n]; zero where no gradient came, and in padding. None where none came at all."""
        gradient, self.unsharded = self.unsharded, None
        if gradient is None:
            return None
        end = 0
        for i in sorted(range(len(self.layout.slots)), key=lambda i: self.layout.slots[i].offset):
            slot = self.layout.slots[i]
            gradient[end : slot.offset].zero_()
            end = max(end, slot.stop)  # one without elements may begin where another does
            if i not in self._arrived:
                gradient[slot.offset : slot.stop].zero_()
        gradient[end:].zero_()
        self._arrived = set()
        return gradient

    def accumulate(self, shard: Tensor) -> None:
        """shard: [n], reduced, in the master's dtype and place or in the reduce dtype; to the regions' `.grad`."""
        for group, region in self.regions.items():
            start, stop = self.layout.region_in_shard(group, self.mesh.shard_rank)
            if region.grad is None:
                if shard.dtype != region.dtype:
                    region.grad_dtype = shard.dtype
                region.grad = shard[start:stop]
            else:
                region.grad.add_(shard[start:stop])

    def upcast(self) -> None:
        """Bring gradient shards that were kept in a lower precision to the master's dtype."""
        for region in self.regions.values():
            if region.grad is not None and region.grad.dtype != region.dtype:
                upcast, region.grad = region.grad.to(region.dtype), None
                region.grad_dtype = region.dtype
                region.grad = upcast


class Reduction:
    """One flat gradient in flight. Issued when made (inside `stream.entered()`); `advance` takes it to the optimizer.

    On a CPU a collective can be issued only when the one before it has ended, so somebody must come back for it. The runtime
    comes when the next unit's gradients are complete: all ranks come at the same point, so that they issue all collectives
    in one order, and each of them has had the backward of one unit to run beside. A CUDA stream queues all of it at once.
    """

    def __init__(self, target: GradientBuffer, gradient: Tensor, stream: CommStream) -> None:
        self.target, self._mesh, self._stream = target, target.mesh, stream
        self.unsharded: Tensor | None = gradient  # [F * n], what is sent, until it has been scattered
        self.shard = gradient  # what it has become so far: [n], or [F * n] where nothing is scattered
        self._divides_first = gradient.dtype is torch.float16
        self._rest = 1.0  # to divide by after all sums
        if self._divides_first:
            first, self._rest = _divisors(self._mesh.world_size)
            gradient.div_(first)
        self._unsent: list[Callable[[], CommHandle]] = []  # collectives to be issued yet
        if self._mesh.shard_group is not None:
            self._unsent.append(self._reduce_scatter)
        if self._mesh.replicate_group is not None:
            self._unsent.append(self._all_reduce)
        self._handle = CommHandle(stream, None)
        if self._unsent:
            self._send()
        if stream.stream is not None:
            while self._unsent:
                self._send()
            self._handle = self._to_master()

    @property
    def is_sent(self) -> bool:
        """Whether no collective is to be issued any more, so that the next `advance` is the last."""
        return not self._unsent

    def advance(self) -> None:
        """Wait for the collective in flight and issue the next one; after the last, give the shard to the optimizer."""
        if self._unsent:
            self._handle.wait()
            if not self.target.policy.shard_optimizer_only:
                self.unsharded = None
            self._send()
            return
        if self._stream.stream is None:
            self._handle.wait()
            self._handle = self._to_master()
        self._handle.wait(on_host=self.shard.device.type == "cpu")
        self.target.accumulate(self.shard)

    def _send(self) -> None:
        self._handle = self._unsent.pop(0)()

    def _reduce_scatter(self) -> CommHandle:
        group, unsharded = self._mesh.shard_group, self.unsharded
        assert group is not None and unsharded is not None
        self.shard = unsharded.new_empty(self.target.layout.shard_numel)
        return self._mean(reduce_scatter(self.shard, unsharded, group), self._mesh.shard_size)

    def _all_reduce(self) -> CommHandle:
        assert self._mesh.replicate_group is not None
        return self._mean(all_reduce(self.shard, self._mesh.replicate_group), self._mesh.replicas)

    def _mean(self, work: dist.Work | None, ranks: int) -> CommHandle:
        shard, ranks = self.shard, 1 if self._divides_first else ranks
        return CommHandle(self._stream, work, keeps=self._kept, then=lambda: _divide(shard, ranks))

    @property
    def _kept(self) -> tuple[Tensor, ...]:
        return (self.shard,) if self.unsharded is None else (self.unsharded, self.shard)

    def _to_master(self) -> CommHandle:
        """In the dtype and the place of the master shard; under ZeRO-1 as a part of the whole gradient, which stays."""
        policy, master, reduced, kept = self.target.policy, self.target.master, self.shard, self._kept
        _divide(reduced, self._rest)
        if policy.shard_optimizer_only and reduced is not self.unsharded:
            assert self.unsharded is not None
            start, stop = self.target.layout.shard(self._mesh.shard_rank)
            self.shard = self.unsharded[start:stop].copy_(reduced)
        dtype = self.shard.dtype if policy.mp.keep_low_precision_gradients else master.dtype
        if master.device != self.shard.device:
            host = torch.empty(self.shard.shape, dtype=dtype, device=master.device, pin_memory=True)
            self.shard = host.copy_(self.shard, non_blocking=True)
        self.shard = self.shard.to(dtype)
        return CommHandle(self._stream, None, keeps=kept)


def _divide(shard: Tensor, by: float) -> None:
    if by != 1:
        shard.div_(by)


def _divisors(ranks: int) -> tuple[int, float]:
    """What divides before the sum, and after it: first the smallest power of two not below the square root of `ranks`,
    or that no longer divides it; then the rest."""
    first = 1
    while ranks % first == 0 and ranks / first > first:
        first *= 2
    return first, ranks / first
