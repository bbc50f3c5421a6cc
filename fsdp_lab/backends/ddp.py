"""torch's DistributedDataParallel: a replica on every rank, gradients all-reduced in buckets. Buffers are not broadcast, as
with FSDP; mixed precision is autocast over fp32 parameters. On the Wire, gradients are summed, then divided, as in the other
backends; on a plain torch group (in benchmarks) DDP's own reduction is used."""

from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, distributed as dist, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from fsdp_lab.backends import base
from fsdp_lab.backends.base import DTYPES, Backend, DeferredStorage
from fsdp_lab.backends.wrapping import prepare
from fsdp_lab.base.errors import FieldError
from fsdp_lab.models.sources import Batch
from fsdp_lab.models.wrapping import units
from fsdp_lab.spec.spec import Spec
from fsdp_lab.wire import Wire


class DDP(Backend):
    """Every shard is a whole parameter."""

    def __init__(self, skeleton: nn.Module, spec: Spec, mesh: DeviceMesh, device: torch.device) -> None:
        dtypes = spec.strategy.dtypes
        self._autocast = None if dtypes.param == "fp32" else DTYPES[dtypes.param]
        prepare(skeleton, spec.strategy)
        deferred = DeferredStorage()
        skeleton.apply(base.materialiser(device, deferred.defer))
        base.place_buffers(skeleton, device, dtypes)
        named = ((base.original_name(n), p) for n, p in skeleton.named_parameters())
        shards = [base.shard_at(name, p, p.shape, 0, p.detach().view(-1)) for name, p in named]
        group = mesh.get_group()
        module = DistributedDataParallel(
            skeleton,
            process_group=group,
            device_ids=[device] if device.type == "cuda" else None,
            broadcast_buffers=False,
            init_sync=False,  # all ranks fill the same values
            gradient_as_bucket_view=True,
        )
        if isinstance(group, Wire):
            reduce = None if dtypes.reduce == "fp32" else DTYPES[dtypes.reduce]
            # a lambda, since DDP compares a hook's annotations with types, and ours are strings
            module.register_comm_hook((group, reduce), lambda state, bucket: _sum_then_divide(state, bucket))
        self._wrap = spec.strategy.wrap
        super().__init__(module, shards, deferred, spec, mesh, device)

    def loss(self, batch: Batch) -> Tensor:
        with self._mixed():
            return super().loss(batch)

    def outputs(self, arguments: Mapping[str, Any]) -> Any:
        with self._mixed():
            return super().outputs(arguments)

    def _mixed(self) -> torch.autocast:
        return torch.autocast(self.device.type, dtype=self._autocast, enabled=self._autocast is not None)

    def unit_modules(self) -> list[tuple[str, nn.Module]]:
        assert isinstance(self.module, DistributedDataParallel)
        model: nn.Module = self.module.module
        try:
            chosen = {id(m) for group in units(model, self._wrap) for m in group}
        except FieldError:  # names without a module in this model do not matter for DDP
            return []
        return [(base.original_name(name), m) for name, m in model.named_modules() if id(m) in chosen]

    def resident_bytes(self) -> int:
        """The buckets."""
        return sum(p.local.nbytes for p in self.param_shards() if p.param is not None)

    def retire(self, busy: Collection[int] = ()) -> None:
        """Also drops torch's reducer, which owns the buckets; an operation that still uses one keeps it."""
        super().retire(busy)
        self.module.__dict__.pop("logger", None)  # it refers to the reducer
        self.module.__dict__.pop("reducer", None)

    def micro_batch(self, *, communicate: bool) -> AbstractContextManager[None]:
        assert isinstance(self.module, DistributedDataParallel)
        return nullcontext() if communicate else self.module.no_sync()


def _sum_then_divide(state: tuple[Any, torch.dtype | None], bucket: Any) -> torch.futures.Future[Tensor]:
    """DDP's own hook divides, then sums; the other backends sum, then divide. Equal bits need the same order."""
    group, dtype = state
    buffer: Tensor = bucket.buffer()
    sent = buffer if dtype is None else buffer.to(dtype)
    with group.context.unit_scope(f"bucket {bucket.index()}"):
        work = dist.all_reduce(sent, op=dist.ReduceOp.AVG, group=group, async_op=True)
    assert work is not None

    def result(done: torch.futures.Future[list[Tensor]]) -> Tensor:
        (mean,) = done.value()
        return buffer if dtype is None else buffer.copy_(mean)

    mean: torch.futures.Future[Tensor] = work.get_future().then(result)
    return mean
