"""torch's FSDP2 (`torch.distributed.fsdp.fully_shard`)."""

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from fsdp_lab.backends import base
from fsdp_lab.backends.base import DTYPES, Backend, DeferredStorage, Measured, RoleTensor
from fsdp_lab.backends.wrapping import context_of, name_fsdp2_unit, named_units, prepare
from fsdp_lab.base.errors import SpecError
from fsdp_lab.base.events import ROOT, Role
from fsdp_lab.engine import ParamShard
from fsdp_lab.engine.collectives import pool_of
from fsdp_lab.engine.policy import ModuleKind, kind_of
from fsdp_lab.models.wrapping import units
from fsdp_lab.spec.spec import Spec, Strategy


class FSDP2Tensors(Measured):
    """The tensors of FSDP2 besides shards, and its units."""

    def transient_tensors(self) -> Iterator[RoleTensor]:
        for group in _param_groups(self.module):
            yield from ((Role.GRADIENTS, t) for t in (group._partial_reduce_output,) if t is not None)
            for p in group.fsdp_params:
                yield from ((Role.UNSHARDED, t) for t in p.all_gather_outputs)
                full: Any = getattr(p, "_unsharded_param", None)  # exists from its first gather on
                gradients = (p.unsharded_accumulated_grad, None if full is None else full.grad)
                yield from ((Role.GRADIENTS, t) for t in gradients if t is not None)
                partial = getattr(p, "_sharded_post_forward_param_data", None)
                yield from ((Role.UNSHARDED, t) for t in (partial,) if t is not None)

    def leaves(self) -> Iterator[Tensor]:
        for p in (p for group in _param_groups(self.module) for p in group.fsdp_params):
            if hasattr(p, "_unsharded_param"):
                yield p._unsharded_param

    def unit_modules(self) -> list[tuple[str, nn.Module]]:
        inner = ((name, m) for name, m in self.module.named_modules() if m is not self.module)
        return [(base.original_name(name), m) for name, m in inner if _is_unit(m)]


class FSDP2(FSDP2Tensors, Backend):
    """Each parameter is a DTensor sharded in dimension 0; those of a unit are gathered together and copied out."""

    @classmethod
    def check(cls, spec: Spec, device: torch.device) -> None:
        if spec.strategy.limit_reductions > 1 and not hasattr(FSDPModule, "set_reduce_scatter_max_input_buffers"):
            reason = f"FSDP2 of torch {torch.__version__} has no limit to set"
            hint = "use 1, backend lab, or torch 2.13"
            raise SpecError("strategy.limit_reductions", reason, hint, {"limit_reductions": 1})

    def __init__(self, skeleton: nn.Module, spec: Spec, mesh: DeviceMesh, device: torch.device) -> None:
        module = _shard(skeleton, spec.strategy, mesh)
        deferred = DeferredStorage()
        home = torch.device("cpu") if spec.strategy.offload == "all" else device
        for p in (p for group in _param_groups(module) for p in group.fsdp_params):
            # Uninitialised storage for torch's private parameter, as `to_empty` gives a whole model; torch pads it.
            empty = torch.empty_like(p.sharded_param, device=home)
            p._setattr_on_modules(nn.Parameter(empty, requires_grad=p.sharded_param.requires_grad))
            with torch.no_grad():
                p.reset_sharded_param()
            deferred.defer(p.sharded_param)
        base.place_buffers(module, device, spec.strategy.dtypes)
        shards = [_param_shard(base.original_name(n), p, mesh["shard"]) for n, p in module.named_parameters()]
        super().__init__(module, shards, deferred, spec, mesh, device)

    @contextmanager
    def micro_batch(self, *, communicate: bool) -> Iterator[None]:
        assert isinstance(self.module, FSDPModule)
        self.module.set_requires_gradient_sync(communicate)
        yield

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Also reshards the root, under ZeRO-2 every unit, and clears the order of units for the next prefetches."""
        with super().evaluating():
            yield
        for group in _param_groups(self.module):
            group.reshard()
            group._post_forward_indices.clear()
            group.comm_ctx.post_forward_order.clear()
            for p in group.fsdp_params:
                p._sharded_post_forward_param = p._sharded_post_forward_param_data = None


def _is_unit(module: nn.Module) -> bool:
    return isinstance(module, FSDPModule)


def _param_groups(root: nn.Module) -> Iterator[Any]:
    """torch's private parameter groups of all units, which alone refer to the unsharded tensors."""
    return (group for module in root.modules() for group in _own_groups(module))


def _own_groups(module: nn.Module) -> list[Any]:
    """The parameter groups of one unit; empty for a module that is not a unit."""
    if not isinstance(module, FSDPModule):
        return []
    state: Any = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # a single group before torch 2.13
    return list(groups if groups is not None else filter(None, [state._fsdp_param_group]))


def _param_shard(name: str, param: nn.Parameter, shards: DeviceMesh) -> ParamShard:
    rows = param.shape[0]
    rows_before = min(rows, -(-rows // shards.size()) * shards.get_local_rank())  # as torch.chunk splits
    start = rows_before * (param.shape.numel() // max(1, rows))
    return base.shard_at(name, param, param.shape, start, base.local_tensor(param).view(-1))


def _shard(model: nn.Module, strategy: Strategy, mesh: DeviceMesh) -> nn.Module:
    """Wraps bottom-up, then the root, which is not resharded after forward: the backward begins with its parameters."""
    inside = named_units(model, units(model, strategy.wrap))
    outer = prepare(model, strategy)
    groups = {name: [outer(m) for m in group] for name, group in inside.items()}
    context = context_of(mesh)
    param = None if strategy.dtypes.param == "fp32" else DTYPES[strategy.dtypes.param]
    policy = MixedPrecisionPolicy(param_dtype=param, reduce_dtype=DTYPES[strategy.dtypes.reduce])
    on_gpu = mesh.device_type == "cuda"
    offload = CPUOffloadPolicy(pin_memory=on_gpu) if strategy.offload == "all" else OffloadPolicy()
    options = {"mesh": mesh, "mp_policy": policy, "offload_policy": offload, "reshard_after_forward": strategy.reshards}
    # BatchNorm computes only in the dtype of its running statistics, so each one is its own unit, as in FSDP1
    batch_norms = [(name, m) for name, m in model.named_modules() if kind_of(m) is ModuleKind.BATCH_NORM]
    for name, module in batch_norms if policy.param_dtype else []:
        full = dataclasses.replace(policy, param_dtype=torch.float32, output_dtype=policy.param_dtype)
        fully_shard(module, **{**options, "mp_policy": full})  # type: ignore[call-overload]
        name_fsdp2_unit(name, _own_groups(module), context)
    for name, group in groups.items():
        fully_shard(group if len(group) > 1 else group[0], **options)  # type: ignore[call-overload]
        name_fsdp2_unit(name, _own_groups(group[0]), context)
    output = None if strategy.dtypes.output is None else DTYPES[strategy.dtypes.output]
    whole = {**options, "reshard_after_forward": False, "mp_policy": dataclasses.replace(policy, output_dtype=output)}
    fully_shard(model, **whole)  # type: ignore[call-overload]
    name_fsdp2_unit(ROOT, _own_groups(model), context)
    _order_communication([g[0] for g in groups.values()], model, strategy)
    if pool_of(mesh.get_group("shard"), torch.device(mesh.device_type)) is not None:
        for module in filter(_is_unit, model.modules()):
            module.set_allocate_memory_from_process_group_for_comm(True)  # type: ignore[operator]
    return model


def _order_communication(wrapped: Sequence[Any], root: Any, strategy: Strategy) -> None:
    """Sets prefetch depths and a limit of reductions. On a CPU a prefetch runs ahead only if the unshard is asynchronous."""
    for i, module in enumerate(wrapped):
        if strategy.forward_depth:
            module.set_modules_to_forward_prefetch(wrapped[i + 1 : i + 1 + strategy.forward_depth])
        if strategy.backward_prefetch > 1:
            module.set_modules_to_backward_prefetch(wrapped[max(0, i - strategy.backward_prefetch) : i][::-1])
    if strategy.limit_reductions > 1:
        root.set_reduce_scatter_max_input_buffers(strategy.limit_reductions)
    if strategy.forward_depth or strategy.backward_prefetch > 1:
        for module in [*wrapped, root]:
            module._set_unshard_async_op(True)
