"""A model that a user has set up, with FSDP2, FSDP1, DDP, our engine or nothing, as something to measure.

`find` looks at the live model and says which it is; the tensors that only the wrapper knows are listed by the same code as
for a backend of the lab's."""

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed as dist, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, FullyShardedDataParallel
from torch.distributed.fsdp._flat_param import FlatParameter
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.modules import module as modules
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from fsdp_lab import engine
from fsdp_lab.backends import fsdp1, fsdp2
from fsdp_lab.backends.base import DTYPES, Measured, RoleTensor, local_tensor, original_name
from fsdp_lab.backends.flat import FlatTensors
from fsdp_lab.backends.fsdp1 import FSDP1Tensors
from fsdp_lab.backends.fsdp2 import FSDP2Tensors
from fsdp_lab.backends.wrapping import name_flat_units, name_fsdp1_unit, name_fsdp2_unit
from fsdp_lab.base.errors import ArgumentError
from fsdp_lab.base.events import ROOT, Role
from fsdp_lab.engine.buffer import sharded_form
from fsdp_lab.engine.hooks import unit_hooks
from fsdp_lab.engine.state import shard_of
from fsdp_lab.models.wrapping import blocks
from fsdp_lab.spec.describe import WatchedLoop
from fsdp_lab.wire import WireContext

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_FSDP1_SHARDINGS = {strategy: name for name, strategy in fsdp1._SHARDING.items()}


@dataclass(frozen=True, kw_only=True)
class Setup:
    """How a model was set up. `sharding`, `offload`: as in a `Strategy`. `groups`: those that it communicates in. `compute`,
    `reduce`: dtypes of computing and of the reduction; None: as the parameters are."""

    sharding: str
    shard_size: int = 1  # ranks in one shard group
    offload: str = "none"
    groups: Sequence[dist.ProcessGroup] = ()
    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class HeldParameter:
    """A parameter of the model, as this rank holds it between steps: the whole, or its shard, or a range of a flat one.

    `holder`: the tensor that knows whether it is trained, and has its gradient. `ids`: of what stands for it in an
    optimizer. `replicas`: ranks with its values, this one too; (): none. `synchronised`: its wrapper keeps them so."""

    name: str
    module: nn.Module  # to which it belongs
    holder: Any
    ids: tuple[int, ...]
    start: int = 0  # in the holder, flat
    stop: int | None = None
    first: int = 0  # the position of its first element in the whole parameter, flat
    shape: torch.Size | None = None  # the whole parameter's, where the holder does not say it
    replicas: tuple[int, ...] = ()
    synchronised: bool = False

    @property
    def is_gathered_in_full(self) -> bool:
        """By a parametrization, though the shard's type asks for a form of its own (`fsdp_pre_all_gather`)."""
        of_class = getattr(type(self.module), self.name.rpartition(".")[2], None)
        is_made = isinstance(self.module, ParametrizationList) or isinstance(of_class, property)
        return is_made and hasattr(getattr(self.holder, "_local_tensor", None), "fsdp_pre_all_gather")

    def values(self) -> Tensor:
        return self._own(local_tensor(self.holder))

    def gradient(self) -> Tensor | None:
        """As the optimizer sees it, but dense, or None. Call it beside an optimizer's step."""
        own = sharded_form(self.holder)  # whose `.grad` is for optimizers: to ask for it counts as a use
        grad = self.holder.grad if own is None else own.gradients.gradient(own.number)
        if grad is None or grad.layout is not torch.strided:
            return None if grad is None else grad.to_dense()
        return self._own(local_tensor(grad))

    @property
    def whole(self) -> int:
        """Elements of the whole parameter."""
        return int((self.holder.shape if self.shape is None else self.shape).numel())

    def positions(self) -> Tensor | int:
        """[n], int64, of its elements in the whole parameter, flat; or that of the first, if they follow one another."""
        if not isinstance(self.holder, DTensor) or self.shape is not None:
            return self.first
        shape, placements = self.holder.shape, self.holder.placements
        sizes, offsets = compute_local_shape_and_global_offset(shape, self.holder.device_mesh, placements)
        positions, stride = torch.zeros(1, dtype=torch.int64), 1
        for of_dim, size, offset in zip(reversed(shape), reversed(sizes), reversed(offsets), strict=True):
            positions = ((torch.arange(size) + offset) * stride).unsqueeze(1) + positions
            positions, stride = positions.view(-1), stride * of_dim
        follow = positions.numel() and int(positions[-1] - positions[0]) == positions.numel() - 1
        return int(positions[0]) if follow else positions

    def _own(self, t: Tensor) -> Tensor:
        return t if self.stop is None else t.view(-1)[self.start : self.stop]


class PlainModel(Measured):
    """A module that nobody has wrapped; the base of the others. `optimizers`: those whose state is counted."""

    backend = "module"

    def __init__(self, module: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.module, self.optimizers = module, list(optimizers)

    # -- what it holds ----------------------------------------------------------------------------------------------

    def parameter_bytes(self) -> int:
        return sum(local_tensor(p).nbytes for p in self.module.parameters())

    def gradient_bytes(self) -> int:
        return sum(local_tensor(g).nbytes for g in self._gradients())

    def optimizer_bytes(self) -> int:
        return sum(t.nbytes for t in self._states())

    def persistent_tensors(self) -> Iterator[RoleTensor]:
        yield from ((Role.PARAMETERS, local_tensor(p)) for p in self._masters())
        yield from ((Role.GRADIENTS, g) for g in self._gradients())
        yield from ((Role.OPTIMIZER, t) for t in self._states())

    def unit_modules(self) -> list[tuple[str, nn.Module]]:
        """Its repeated blocks."""
        model = self._unwrapped()
        repeated = {id(m) for m in blocks(model)}
        return [(original_name(name), m) for name, m in model.named_modules() if id(m) in repeated]

    def _unwrapped(self) -> nn.Module:
        return self.module

    def _masters(self) -> Iterator[Tensor]:
        return self.module.parameters()

    def _gradients(self) -> Iterator[Tensor]:
        """Without sparse ones."""
        grads = (p.grad for p in self.module.parameters())
        return (g for g in grads if g is not None and g.layout is torch.strided)

    def _states(self) -> Iterator[Tensor]:
        states = (state for optimizer in self.optimizers for state in optimizer.state.values())
        return (local_tensor(t) for state in states for t in state.values() if isinstance(t, Tensor) and t.dim())

    # -- what it is -------------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """Where its parameters are; a CPU if it has none."""
        return next((p.device for p in self.module.parameters()), torch.device("cpu"))

    def setup(self) -> Setup:
        return Setup(sharding="no_shard" if dist.is_initialized() and dist.get_world_size() > 1 else "")

    def whole_parameters(self) -> int:
        """Elements of the whole model."""
        return sum(p.numel() for p in self.module.parameters())

    def parameter_ids(self) -> set[int]:
        """Of what an optimizer may be given."""
        return {id(p) for p in self.module.parameters()}

    def held(self) -> list[HeldParameter]:
        """Its parameters, frozen ones too, in the same order on every rank. Call it between steps."""
        world = tuple(range(dist.get_world_size())) if dist.is_initialized() and dist.get_world_size() > 1 else ()
        groups, held = self._replicating(), list[HeldParameter]()
        for path, p in self.module.named_parameters():
            owner = self.module.get_submodule(path.rpartition(".")[0])
            group = groups.get(id(p))
            own = world if not isinstance(p, DTensor) or all(one.is_replicate() for one in p.placements) else ()
            replicas = own if id(p) not in groups else tuple(dist.get_process_group_ranks(group)) if group else ()
            name = original_name(path.removeprefix("module.") if self.backend == "ddp" else path)
            held += self._held(name, owner, p, replicas=replicas, synchronised=group is not None)
        return held

    def _held(self, name: str, module: nn.Module, p: Any, **shared: Any) -> list[HeldParameter]:
        return [HeldParameter(name=name, module=module, holder=p, ids=(id(p),), **shared)]

    def _replicating(self) -> dict[int, dist.ProcessGroup | None]:
        """By the id of each parameter that the wrapper takes care of: the group in which it keeps copies equal, if any."""
        return {}

    def reducing(self) -> set[int]:
        """Ids of parameters that a backward now would reduce over their replicas, though to wait would cost no memory."""
        return set()

    def name_units(self, context: WireContext) -> None:
        """Tells the wire the unit of each collective from now on."""

    def describe(self, world_size: int, title: str = "") -> WatchedLoop:
        setup = self.setup()
        wrapped = isinstance(self.module, (DistributedDataParallel, FullyShardedDataParallel))
        inner: Any = self.module.module if wrapped else self.module
        own = next((p.dtype for p in self.module.parameters()), torch.float32)
        compute, reduce = (dtype or own for dtype in (setup.compute, setup.reduce))
        precision = [_NAMES.get(dtype, str(dtype).removeprefix("torch.")) for dtype in dict.fromkeys((compute, reduce))]
        return WatchedLoop(
            model=_class_name(inner),
            backend=self.backend,
            sharding=setup.sharding,
            shard_size=setup.shard_size,
            parameters=self.whole_parameters(),
            units=len(self.unit_modules()),
            optimizer=" + ".join(dict.fromkeys(type(o).__name__ for o in self.optimizers)),
            precision="/".join(precision),
            offload=setup.offload,
            world_size=world_size,
            device=self.device.type,
            title=title,
        )


class FoundDDP(PlainModel):
    backend = "ddp"

    def _unwrapped(self) -> nn.Module:
        model: nn.Module = self.module.module  # type: ignore[assignment]
        return model

    def setup(self) -> Setup:
        group: Any = self.module.process_group
        return dataclasses.replace(super().setup(), groups=[group])

    def _replicating(self) -> dict[int, dist.ProcessGroup | None]:
        ddp: Any = self.module
        own = (p for name, p in ddp.module.named_parameters() if name not in ddp.parameters_to_ignore)
        return dict.fromkeys(map(id, own), ddp.process_group)

    def reducing(self) -> set[int]:
        return set(self._replicating()) if self.module.require_backward_grad_sync else set()

    def resident_bytes(self) -> int:
        """The buckets."""
        return sum(p.nbytes for p in self.module.parameters() if p.requires_grad)


class FoundFSDP2(FSDP2Tensors, PlainModel):
    backend = "fsdp2"

    def setup(self) -> Setup:
        groups = list(fsdp2._param_groups(self.module))
        inner = [g for m in self.module.modules() if m is not self.module for g in fsdp2._own_groups(m)] or groups
        hybrid = any(g.mesh_info.replicate_mesh_dim is not None for g in groups)
        reshards = any(g.post_forward_mesh_info is not None for g in inner)
        infos = [group.mesh_info for group in groups]
        between = [info.shard_process_group for info in infos]
        between += [info.replicate_process_group for info in infos if info.replicate_mesh_dim is not None]
        mp = next((g.mp_policy for g in groups), None)
        offloads = any(isinstance(g.offload_policy, CPUOffloadPolicy) for g in groups)
        return Setup(
            sharding=_sharding(hybrid=hybrid, reshards=reshards),
            shard_size=max((info.shard_mesh_size for info in infos), default=1),
            offload="all" if offloads else "none",
            groups=list(dict.fromkeys(between)),
            compute=mp and mp.param_dtype,
            reduce=mp and (mp.reduce_dtype or mp.param_dtype),
        )

    def _replicating(self) -> dict[int, dist.ProcessGroup | None]:
        found: dict[int, dist.ProcessGroup | None] = {}
        for group in fsdp2._param_groups(self.module):
            info = group.mesh_info
            copies = None if info.replicate_mesh_dim is None else info.replicate_process_group
            found |= dict.fromkeys((id(p.sharded_param) for p in group.fsdp_params), copies)
        return found

    def reducing(self) -> set[int]:
        groups = [g for g in fsdp2._param_groups(self.module) if g.reduce_grads and g.all_reduce_grads]
        hybrid = (g for g in groups if g.mesh_info.replicate_mesh_dim is not None)
        return {id(p.sharded_param) for g in hybrid for p in g.fsdp_params}

    def name_units(self, context: WireContext) -> None:
        for name, m in reversed([*self.module.named_modules()]):  # of a unit's modules the first names it
            name_fsdp2_unit(original_name(name) or ROOT, fsdp2._own_groups(m), context)


class FoundFSDP1(FSDP1Tensors, PlainModel):
    backend = "fsdp1"

    def _handles(self) -> list[Any]:
        return fsdp1._handles(self.module)

    def _masters(self) -> Iterator[Tensor]:
        flats = [h.flat_param for h in self._handles()]
        yield from (getattr(flat, "_local_shard", flat) for flat in flats)
        yield from self.module.parameters()

    def setup(self) -> Setup:
        root: Any = next(m for m in self.module.modules() if isinstance(m, FullyShardedDataParallel))
        units: list[Any] = FullyShardedDataParallel.fsdp_modules(self.module)
        mixed = root.mixed_precision
        return Setup(
            sharding=_FSDP1_SHARDINGS.get(root.sharding_strategy, ""),
            shard_size=int(root.process_group.size()),
            offload="all" if any(h._offload_params for h in self._handles()) else "none",
            groups=list(dict.fromkeys(unit.process_group for unit in units)),
            compute=mixed.param_dtype,
            reduce=mixed.reduce_dtype or mixed.param_dtype,
        )

    def _held(self, name: str, module: nn.Module, p: Any, **shared: Any) -> list[HeldParameter]:
        """A flat parameter holds a range of each original one."""
        if not isinstance(p, FlatParameter):
            for flat in (h.flat_param for h in self._handles()):
                for at in [i for i, one in enumerate(flat._params or ()) if one is p]:
                    first = flat._shard_param_infos[at].intra_param_start_idx or 0
                    shared |= {"first": first, "shape": flat._shapes[at]}
            return super()._held(name, module, p, **shared)
        held, infos = list[HeldParameter](), list[Any](p._shard_param_infos)
        for part, of, info, shape in zip(p._fqns, p._param_infos, infos, p._shapes, strict=True):
            start, length = (info.offset_in_shard, info.numel_in_shard) if info.in_shard else (0, 0)
            first = info.intra_param_start_idx or 0
            shared |= {"start": start, "stop": start + length, "first": first, "shape": shape}
            held += super()._held(name.removesuffix("_flat_param") + original_name(part), of.module, p, **shared)
        return held

    def _replicating(self) -> dict[int, dist.ProcessGroup | None]:
        found: dict[int, dist.ProcessGroup | None] = {}
        units: list[Any] = FullyShardedDataParallel.fsdp_modules(self.module)
        for unit in (unit for unit in units if unit._handle is not None):
            whole = not unit._handle.uses_sharded_strategy
            copies = unit.process_group if whole else getattr(unit, "_inter_node_pg", None)
            flat = unit._handle.flat_param
            found |= dict.fromkeys(map(id, (flat, *(flat._params or ()))), copies)
        return found

    def whole_parameters(self) -> int:
        flat = {id(p) for h in self._handles() for p in (h.flat_param, *(h.flat_param._params or ()))}
        others = sum(p.numel() for p in self.module.parameters() if id(p) not in flat)
        return others + sum(int(shape.numel()) for h in self._handles() for shape in h.flat_param._shapes)

    def name_units(self, context: WireContext) -> None:
        for name, module in self.module.named_modules():
            if isinstance(module, FullyShardedDataParallel) and module._handle is not None:
                name_fsdp1_unit(original_name(name) or ROOT, module._handle, context)


class FoundFlat(FlatTensors, PlainModel):
    """Of our engine."""

    backend = "lab"

    def parameter_bytes(self) -> int:
        held = [*(shard.local for shard in engine.shards_of(self.module)), *self._others()]
        return sum(t.nbytes for t in held)

    def gradient_bytes(self) -> int:
        reduced = (s.sharded.grad for s in engine.shards_of(self.module) if s.sharded is not None)
        gradients = [*reduced, *(p.grad for p in self._others())]
        return sum(local_tensor(g).nbytes for g in gradients if g is not None)

    def _masters(self) -> Iterator[Tensor]:
        yield from (flat.master for flat in engine.flats_of(self.module))
        yield from self._others()

    def _gradients(self) -> Iterator[Tensor]:
        reduced = (flat.gradients.local() for flat in engine.flats_of(self.module))
        yield from (t for t in reduced if t is not None)
        yield from (p.grad for p in self._others() if p.grad is not None)

    def _others(self) -> list[nn.Parameter]:
        """Parameters that were left out of it."""
        inside = self._sharded_ids()
        return [p for p in self.module.parameters() if id(p) not in inside]

    def _held(self, name: str, module: nn.Module, p: Any, **shared: Any) -> list[HeldParameter]:
        sharded: Any = sharded_form(p)
        if sharded is None:
            return super()._held(name, module, p, **shared)
        region = sharded.flat.for_optimizer(sharded.number)[0]
        shard = shard_of(name, sharded.flat, sharded.number)
        shared |= {"first": shard.start, "shape": shard.shape}
        return [HeldParameter(name=name, module=module, holder=sharded, ids=(id(sharded), id(region)), **shared)]

    def _replicating(self) -> dict[int, dist.ProcessGroup | None]:
        return {id(s.sharded): s.sharded.flat.mesh.replicate_group for s in engine.shards_of(self.module)}

    def _sharded_ids(self) -> set[int]:
        return {id(p) for s in engine.shards_of(self.module) for p in (s.param, s.sharded)}

    def setup(self) -> Setup:
        units = engine.units_of(self.module)
        inner, root = [u for u in units if self.module not in u.modules] or units, units[0]
        reshards = any(u.policy.rules.reshard_after_forward for u in inner)
        sharding = _sharding(hybrid=root.mesh.replicas > 1, reshards=reshards)
        if any(u.policy.shard_optimizer_only for u in units):
            sharding = "zero1"
        elif root.mesh.shard_size == 1:
            sharding = "no_shard"
        mp = root.policy.mp
        return Setup(
            sharding=sharding,
            shard_size=root.mesh.shard_size,
            offload=str(next((flat.policy.rules.offload.value for flat in engine.flats_of(self.module)), "none")),
            groups=root.mesh.device_mesh.get_all_groups() if dist.is_initialized() else [],
            compute=mp.param_dtype,
            reduce=mp.reduce_dtype or mp.param_dtype,
        )

    def whole_parameters(self) -> int:
        return sum(s.shape.numel() for s in engine.shards_of(self.module)) + sum(p.numel() for p in self._others())

    def parameter_ids(self) -> set[int]:
        return self._sharded_ids() | super().parameter_ids()

    def name_units(self, context: WireContext) -> None:
        name_flat_units(self.module, context)


def find(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> PlainModel:
    """What a model was set up with. Raises ArgumentError for what is no module, and for several wrappers in one model."""
    if not isinstance(model, nn.Module):
        hint = "give the torch.nn.Module that is trained, several in one nn.ModuleList"
        raise ArgumentError("model", f"a {type(model).__name__} is no module", hint)
    if not any(True for _ in model.parameters()):
        raise ArgumentError("model", f"{_class_name(model)} has no parameters", "give the module that is trained")
    kinds: dict[type[PlainModel], bool] = {
        FoundFlat: any(unit_hooks(m) is not None for m in model.modules()),
        FoundFSDP2: any(isinstance(m, FSDPModule) for m in model.modules()),
        FoundFSDP1: any(isinstance(m, FullyShardedDataParallel) for m in model.modules()),
        FoundDDP: any(isinstance(m, DistributedDataParallel) for m in model.modules()),
    }
    those = [kind for kind, is_one in kinds.items() if is_one]
    if len(those) > 1 or (FoundDDP in those and not isinstance(model, DistributedDataParallel)):
        names = " and ".join(kind.backend for kind in those)
        reason = f"it, or a part of it, is wrapped by {names}"
        raise ArgumentError("model", reason, "watch the module that one of them wraps")
    return (those[0] if those else PlainModel)(model, optimizers)


def _sharding(*, hybrid: bool, reshards: bool) -> str:
    names = ("hybrid_shard_zero2", "hybrid_shard") if hybrid else ("shard_grad_op", "full_shard")
    return names[reshards]


def _class_name(module: nn.Module) -> str:
    """FSDP2 derives a class "FSDPGPT2LMHeadModel" from the model's, and compile wraps it."""
    module = getattr(module, "_orig_mod", module)
    if isinstance(module, FSDPModule):
        return next(c.__name__ for c in type(module).__mro__[1:] if not issubclass(c, FSDPModule))
    return type(module).__name__


# -- the FLOPs of a step ----------------------------------------------------------------------------------------------


_FUSED = (
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
)
_Shape = tuple[int, ...]


class FlopCount:
    """Counts the FLOPs of one step of a user's loop, in the context `counting`, by the rule of `fsdp_lab.models.flops`.
    torch's counter charges the backward of the fused attention of GPUs with what the kernel recomputes, and does not know a
    CPU's: here the backward is twice the forward for each of them.

    Attributes:
        model, recompute: FLOPs of this rank; None before.
        dtype: in which the model computed, if that was autocast's."""

    def __init__(self) -> None:
        self.model: int | None = None
        self.recompute = 0
        self.dtype: torch.dtype | None = None
        self._depth = 0  # of forwards inside a backward
        self._begun = 0

    @contextmanager
    def counting(self, device: torch.device) -> Iterator[None]:
        counter = FlopCounterMode(display=False, custom_mapping=_attention())
        self.recompute = self._depth = 0  # of a step that raised

        def before(_: nn.Module, __: Any) -> None:
            if torch.is_autocast_enabled(device.type):
                self.dtype = torch.get_autocast_dtype(device.type)
            if torch._C._current_graph_task_id() != -1:
                if not self._depth:
                    self._begun = counter.get_total_flops()
                self._depth += 1

        def after(*_: Any) -> None:
            if torch._C._current_graph_task_id() != -1 and self._depth:
                self._depth -= 1
                if not self._depth:
                    self.recompute += counter.get_total_flops() - self._begun

        handles = [
            modules.register_module_forward_pre_hook(before),
            modules.register_module_forward_hook(after, always_call=True),  # a checkpoint leaves it by an exception
        ]
        try:
            with counter:
                yield
        finally:
            for handle in handles:
                handle.remove()
        self.model = int(counter.get_total_flops()) - self.recompute


def can_count(model: nn.Module) -> bool:
    """Whether its operations are seen: those of a compiled model are not."""
    return not any(m._compiled_call_impl is not None or hasattr(m, "_orig_mod") for m in model.modules())


def _attention() -> dict[Any, Any]:
    counts = dict.fromkeys(_FUSED, _forward) | {f"{name}_backward": _backward for name in _FUSED}
    return {getattr(torch.ops.aten, name): count for name, count in counts.items() if hasattr(torch.ops.aten, name)}


def _forward(query: _Shape, key: _Shape, value: _Shape, *_: Any, out_shape: Any = None, **__: Any) -> int:
    return int(sdpa_flop_count(query, key, value))  # type: ignore[no-untyped-call]


def _backward(_: _Shape, query: _Shape, key: _Shape, value: _Shape, *__: Any, out_shape: Any = None, **___: Any) -> int:
    return 2 * int(sdpa_flop_count(query, key, value))  # type: ignore[no-untyped-call]
