"""torch's FSDP1 (`FullyShardedDataParallel`), whose private FlatParameter alone has the location of a parameter's shard."""

import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp._runtime_utils import _lazy_init, _reshard
from torch.distributed.fsdp.api import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import CustomPolicy

from fsdp_lab.backends import base
from fsdp_lab.backends.base import DTYPES, Backend, DeferredStorage, Measured, RoleTensor, free, return_memory
from fsdp_lab.backends.wrapping import context_of, name_fsdp1_unit, prepare
from fsdp_lab.base.errors import SpecError
from fsdp_lab.base.events import ROOT, Role
from fsdp_lab.engine import ParamShard
from fsdp_lab.models.wrapping import units
from fsdp_lab.spec.spec import Spec

_SHARDING = {
    "full_shard": ShardingStrategy.FULL_SHARD,
    "shard_grad_op": ShardingStrategy.SHARD_GRAD_OP,
    "hybrid_shard": ShardingStrategy.HYBRID_SHARD,
    "hybrid_shard_zero2": ShardingStrategy._HYBRID_SHARD_ZERO2,
    "no_shard": ShardingStrategy.NO_SHARD,
}
_PASSING = {  # attributes of a FlatParameter
    Role.UNSHARDED: ("_full_param_padded", "_full_prec_full_param_padded"),
    Role.GRADIENTS: ("grad", "_saved_grad_shard"),
    Role.COMMUNICATION: ("_mp_shard",),
}
_HELD = ("_full_param_padded", "_local_shard", "_mp_shard", "_cpu_grad")
_PREFETCH = {"before": BackwardPrefetch.BACKWARD_PRE, "after": BackwardPrefetch.BACKWARD_POST}


class FSDP1Tensors(Measured):
    """The tensors of FSDP1 besides shards, and its units."""

    def transient_tensors(self) -> Iterator[RoleTensor]:
        for flat in (handle.flat_param for handle in _handles(self.module)):
            for role, names in _PASSING.items():
                yield from ((role, t) for name in names if isinstance(t := getattr(flat, name, None), Tensor))

    def leaves(self) -> Iterator[Tensor]:
        """The flat parameters, and the last forward's views of them: autograd joins the views' gradients."""
        for flat in (handle.flat_param for handle in _handles(self.module)):
            if flat.requires_grad:
                yield flat
                yield from (t for t in flat._tensors or () if t is not None and t.requires_grad)

    def unit_modules(self) -> list[tuple[str, nn.Module]]:
        inner = ((n, m) for n, m in self.module.named_modules() if isinstance(m, FullyShardedDataParallel))
        return [(base.original_name(name), m.module) for name, m in inner if m is not self.module]


class FSDP1(FSDP1Tensors, Backend):
    """Each unit is one evenly sharded flat parameter; the original parameters are views of this rank's part."""

    @classmethod
    def check(cls, spec: Spec, device: torch.device) -> None:
        if spec.strategy.offload == "all" and device.type == "cpu":
            reason = "FSDP1 pins what it offloads, which takes a GPU"
            raise SpecError("strategy.offload", reason, "use offload none, or backend fsdp2", {"offload": "none"})

    def __init__(self, skeleton: nn.Module, spec: Spec, mesh: DeviceMesh, device: torch.device) -> None:
        shapes = {n: p.shape for n, p in skeleton.named_parameters()}
        module, shards = _wrap(skeleton, spec, mesh, device)
        super().__init__(module, shards.of(module, shapes), shards.deferred, spec, mesh, device)

    def micro_batch(self, *, communicate: bool) -> AbstractContextManager[None]:
        assert isinstance(self.module, FullyShardedDataParallel)
        return nullcontext() if communicate else self.module.no_sync()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Also reshards the root, and under ZeRO-2 every unit: they stay gathered after a forward."""
        with super().evaluating():
            yield
        for unit in FullyShardedDataParallel.fsdp_modules(self.module):
            handle: Any = unit._handle
            if handle is not None and handle.uses_sharded_strategy and not handle.needs_unshard():
                _reshard(unit, handle, True)

    def release(self, busy: Collection[int] = ()) -> None:
        """Pinned memory cannot be resized, and is freed with its last reference: torch's wrappers lose theirs here."""
        parameters: list[Any] = [handle.flat_param for handle in _handles(self.module)]
        held = [t for p in parameters for name in _HELD if isinstance(t := getattr(p, name, None), Tensor)]
        super().release(busy)
        free(held, busy)
        for p in parameters:
            for name in (*_HELD, "_saved_grad_shard", "_tensors"):
                setattr(p, name, None)
            for view in (p, *p._params):
                view.grad, view.data = None, view.data.new_empty(0)


class _Shards:
    """The shards of a model that is wrapped unit by unit, each taken before its storage is freed. torch flattens a unit by a
    copy of all its parameters, and then takes this rank's part; the C library would keep what is freed between such parts,
    and with it 1/W of the model."""

    def __init__(self, device: torch.device) -> None:
        self.deferred, self._device = DeferredStorage(), device
        # By the parameter's id: also where its part begins, and that part.
        self._taken: dict[int, tuple[nn.Parameter, int, Tensor]] = {}

    def defer(self, root: nn.Module) -> None:
        """Take those of the units that are new, and defer their storage."""
        for flat in (handle.flat_param for handle in _handles(root)):
            if id(flat._params[0]) not in self._taken:
                held = getattr(flat, "_local_shard", flat).detach()
                for p, info in zip(flat._params, flat._shard_param_infos, strict=True):
                    begin, start, stop = 0, 0, 0
                    if info.in_shard:
                        begin, start = info.offset_in_shard, info.intra_param_start_idx
                        stop = info.intra_param_end_idx + 1
                    self._taken[id(p)] = p, start, held[begin : begin + stop - start]
                self.deferred.defer(held)
        return_memory(self._device)

    def of(self, root: nn.Module, shapes: Mapping[str, torch.Size]) -> list[ParamShard]:
        """The shards in the order of the skeleton's parameters."""
        names = {base.original_name(n): id(p) for n, p in root.named_parameters()}
        taken = [(n, shape, self._taken[names[n]]) for n, shape in shapes.items() if n in names]
        return [base.shard_at(n, p, shape, start, part) for n, shape, (p, start, part) in taken]


def _wrap(model: nn.Module, spec: Spec, mesh: DeviceMesh, device: torch.device) -> tuple[nn.Module, _Shards]:
    s, dtypes = spec.strategy, spec.strategy.dtypes
    inside = units(model, s.wrap)
    outer = prepare(model, s)
    chosen = {id(outer(group[0])) for group in inside}
    precision = None
    if s.precision != "fp32":
        precision = MixedPrecision(
            param_dtype=DTYPES[dtypes.param],
            reduce_dtype=DTYPES[dtypes.reduce],
            buffer_dtype=None if dtypes.buffer is None else DTYPES[dtypes.buffer],
        )
    shards, materialise, offloads = _Shards(device), base.materialiser(device), s.offload == "all"

    def make(module: nn.Module) -> None:
        """Called for each module of a unit, with the unit's own first."""
        if not offloads and (module is model or id(module) in chosen):  # with offload a pinned copy is made below
            shards.defer(model)
        materialise(module)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*has both parameters with requires_grad=True and False")
        wrapped = FullyShardedDataParallel(
            model,
            device_mesh=mesh,
            sharding_strategy=_SHARDING[s.sharding],
            auto_wrap_policy=CustomPolicy(lambda m: id(m) in chosen),
            mixed_precision=precision,
            cpu_offload=CPUOffload(offload_params=True) if offloads else None,
            param_init_fn=make,
            device_id=device,
            use_orig_params=True,
            forward_prefetch=s.forward_depth > 0,
            backward_prefetch=_PREFETCH[s.backward_prefetch_point] if s.backward_prefetch else None,
            limit_all_gathers=s.limit_all_gathers > 0,
        )
    for handle in _handles(wrapped):
        _detach_frozen(handle)
    # FSDP1 divides by about sqrt(W) before its sum and by the rest after; for parity, all of the division comes after. In
    # fp16 this can overflow, but there the loss is scaled and an overflow skips the step.
    for module in FullyShardedDataParallel.fsdp_modules(wrapped):
        module._gradient_predivide_factor = 1.0  # type: ignore[assignment]
        module._gradient_postdivide_factor = float(spec.world_size)  # type: ignore[assignment]
    if not offloads:
        shards.defer(wrapped)
    _lazy_init(wrapped, wrapped)  # now, not in the first forward, since it creates the local shards
    if offloads:
        for handle in _handles(wrapped):
            handle._use_sharded_flat_param()  # the pinned copy, not what was copied, which the first forward would read
    shards.defer(wrapped)
    for name, unit in wrapped.named_modules():
        if isinstance(unit, FullyShardedDataParallel) and unit._handle is not None:
            name_fsdp1_unit(base.original_name(name) or ROOT, unit._handle, context_of(mesh))
    return wrapped, shards


def _handles(root: nn.Module) -> list[Any]:
    """The flat parameters' handles of all units, including the root."""
    return [m._handle for m in FullyShardedDataParallel.fsdp_modules(root) if m._handle is not None]


def _detach_frozen(handle: Any) -> None:
    """Let a forward see frozen parameters of a unit without a gradient. Otherwise all views of its flat parameter need one,
    and so does all that is computed from them; the gradients of frozen ones would be computed, and not used."""
    views, params = handle._get_unflat_views, handle.flat_param._params

    def detached(*args: Any) -> Iterator[Tensor]:
        return (v if p.requires_grad else v.detach() for v, p in zip(views(*args), params, strict=True))

    if not all(p.requires_grad for p in params):
        handle._get_unflat_views = detached
