"""torch's FSDP2 (`torch.distributed.fsdp.fully_shard`) as a peer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from fsdp_lab.backends import base
from fsdp_lab.backends.base import DTYPES, Piece
from fsdp_lab.backends.wrapping import prepare, units
from fsdp_lab.spec import Spec, Strategy


class FSDP2:
    """Each parameter is a DTensor sharded in its first dimension; a unit's are gathered together and copied out."""

    keeps_gradients = False

    def __init__(self, skeleton: nn.Module, spec: Spec, mesh: DeviceMesh, device: torch.device) -> None:
        self.mesh, self._device, self._strategy = mesh, device, spec.strategy
        self.replicas = spec.world_size // spec.shard_factor
        self.module: nn.Module = _shard(skeleton, spec.strategy, mesh)
        _materialise(self.module, torch.device("cpu") if spec.strategy.offload == "all" else device)
        base.move_buffers(self.module, device)
        self._pieces = [self._piece(base.original_name(n), p) for n, p in self.module.named_parameters()]
        self.optimizer = base.make_optimizer(self._pieces, spec.workload)

    def pieces(self) -> list[Piece]:
        return self._pieces

    def loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        loss: Tensor = self.module(**base.to_device(batch, self._device))["loss"]
        return loss

    @contextmanager
    def micro_batch(self, *, communicate: bool) -> Iterator[None]:
        assert isinstance(self.module, FSDPModule)
        self.module.set_requires_gradient_sync(communicate)
        yield

    def gradient(self, piece: Piece) -> Tensor | None:
        return None if piece.param.grad is None else base.local_tensor(piece.param.grad)

    def release(self) -> None:
        base.free_backend(self)

    def _piece(self, name: str, param: nn.Parameter) -> Piece:
        local = base.local_part(param)
        start = _rows_before(param.shape[0], self.mesh["shard"]) * (param.shape.numel() // max(1, param.shape[0]))
        return Piece(name=name, shape=param.shape, start=start, stop=start + local.numel(), local=local, param=param)


def _rows_before(rows: int, shards: DeviceMesh) -> int:
    """Rows of a parameter that lie on ranks before this one: torch.chunk's rule, ceil(rows / F) each till they end."""
    each = -(-rows // shards.size())
    return min(rows, each * shards.get_local_rank())


def _shard(model: nn.Module, strategy: Strategy, mesh: DeviceMesh) -> nn.Module:
    """Wrap bottom-up, then the root."""
    inside = units(model, strategy.wrap)
    outer = prepare(model, strategy)
    groups = [[outer(m) for m in group] for group in inside]
    dtypes = strategy.dtypes
    policy = MixedPrecisionPolicy(
        param_dtype=None if dtypes.param == "fp32" else DTYPES[dtypes.param],
        reduce_dtype=DTYPES[dtypes.reduce],
        output_dtype=None if dtypes.output is None else DTYPES[dtypes.output],
    )
    on_gpu = mesh.device_type == "cuda"
    offload = CPUOffloadPolicy(pin_memory=on_gpu) if strategy.offload == "all" else OffloadPolicy()
    reshard = strategy.sharding in ("full_shard", "hybrid_shard")
    options = {"mesh": mesh, "mp_policy": policy, "offload_policy": offload, "reshard_after_forward": reshard}
    for group in groups:
        fully_shard(group if len(group) > 1 else group[0], **options)  # type: ignore[call-overload]
    fully_shard(model, **options)  # type: ignore[call-overload]
    _order_prefetch([g[0] for g in groups], model, strategy)
    return model


def _materialise(model: nn.Module, device: torch.device) -> None:
    """By `to_empty`, since FSDP2 takes note of new parameters there only; buffers keep their values."""
    kept = {name: b.clone() for name, b in model.named_buffers()}
    model.to_empty(device=device)
    for name, b in model.named_buffers():
        b.data = kept[name]


def _order_prefetch(wrapped: list[nn.Module], root: nn.Module, strategy: Strategy) -> None:
    """Depths beyond torch's default; on a CPU a prefetch runs ahead only if the unshard is asynchronous."""
    for i, module in enumerate(wrapped):
        assert isinstance(module, FSDPModule)
        if strategy.forward_prefetch:
            module.set_modules_to_forward_prefetch(_fsdp(wrapped[i + 1 : i + 1 + strategy.forward_prefetch]))
        if strategy.backward_prefetch > 1:
            module.set_modules_to_backward_prefetch(_fsdp(wrapped[max(0, i - strategy.backward_prefetch) : i][::-1]))
    if strategy.forward_prefetch or strategy.backward_prefetch > 1:
        assert isinstance(root, FSDPModule)
        for module in [*wrapped, root]:
            assert isinstance(module, FSDPModule)
            module._set_unshard_async_op(True)


def _fsdp(modules: list[nn.Module]) -> list[FSDPModule]:
    return [m for m in modules if isinstance(m, FSDPModule)]
