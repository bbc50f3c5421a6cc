"""Our own engine (`fsdp_lab.engine`) as a backend, "lab" in a Spec, and a `Strategy` in the engine's terms."""

import dataclasses
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, distributed as dist, nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_lab import engine
from fsdp_lab.backends.base import DTYPES, Backend, DeferredStorage, Measured, RoleTensor, local_tensor, original_name
from fsdp_lab.backends.wrapping import context_of, name_flat_units, prepare
from fsdp_lab.base.errors import SpecError
from fsdp_lab.base.events import Role
from fsdp_lab.engine.buffer import FlatBuffer, sharded_form
from fsdp_lab.engine.extras.dropin import free, upcast_gradients
from fsdp_lab.engine.state import shard_of
from fsdp_lab.models.wrapping import units
from fsdp_lab.spec.param_groups import key_of
from fsdp_lab.spec.spec import Spec, Strategy


class FlatTensors(Measured):
    """The tensors of our engine besides shards, and its units."""

    def resident_bytes(self) -> int:
        """The device copies under optimizer offload, and ZeRO-1's gathered parameters."""
        flats = list(engine.flats_of(self.module))
        copies = sum(flat.device_shard.nbytes for flat in flats if flat.device_shard is not None)
        return copies + sum(flat.full.nbytes for flat in flats if not flat.is_view_of_master and flat.gathered.is_held)

    def transient_tensors(self) -> Iterator[RoleTensor]:
        for flat in engine.flats_of(self.module):
            stays = flat.policy.rules.offload == engine.OffloadPolicy.OPTIMIZER  # otherwise it is only sent
            device_shard = Role.PARAMETERS if stays else Role.COMMUNICATION
            if flat.gathered.is_held:
                yield Role.UNSHARDED, flat.full
            resharded, unreduced = flat.post_forward_shard, flat.gradients.unsharded
            optional = (device_shard, flat.device_shard), (Role.UNSHARDED, resharded), (Role.GRADIENTS, unreduced)
            yield from ((role, t) for role, t in optional if t is not None)
            yield from ((Role.GRADIENTS, t) for t in flat.gradients.pieces.values())
        reducing = (some for runtime in engine.runtimes_of(self.module) for _, some in runtime.reducing)
        for reduction in (reduction for some in reducing for reduction in some):
            yield from ((Role.GRADIENTS, t) for t in (reduction.unsharded, reduction.shard) if t is not None)

    def leaves(self) -> Iterator[Tensor]:
        for flat in engine.flats_of(self.module):
            yield from (p for p in flat.parameters if p.requires_grad)

    def unit_modules(self) -> list[tuple[str, nn.Module]]:
        names = {module: name for name, module in self.module.named_modules()}
        units = engine.units_of(self.module)
        return [(names[unit.modules[0]], m) for unit in units for m in unit.modules if m is not self.module]


class FlatBackend(FlatTensors, Backend):
    """Each unit is a flat buffer; the optimizer gets flat shards, one per buffer and parameter group."""

    @classmethod
    def check(cls, spec: Spec, device: torch.device) -> None:
        if spec.strategy.gather == "mapped" and device.type != "cpu":
            raise SpecError("strategy.gather", "mapped is for ranks on CPUs", "use copy", {"gather": "copy"})

    def __init__(self, skeleton: nn.Module, spec: Spec, mesh: DeviceMesh, device: torch.device) -> None:
        if spec.strategy.gather == "mapped":  # refused on all ranks where some do not share memory
            sharded = engine.ShardMesh.of(mesh)
            shares = torch.tensor(float(sharded.shard_group is None or sharded.buffer_pool is not None))
            dist.all_reduce(shares, op=dist.ReduceOp.MIN)
            if not shares:
                reason = "mapped is for ranks that share memory, and these do not; fsdp-lab doctor says why"
                raise SpecError("strategy.gather", reason, "use copy", {"gather": "copy"})
        groups = spec.workload.param_groups
        keys = {id(p): key_of(groups, name, p.dim()) for name, p in skeleton.named_parameters()}
        inside = units(skeleton, spec.strategy.wrap)
        outer = prepare(skeleton, spec.strategy)
        deferred, taken = DeferredStorage(), dict[FlatBuffer, list[engine.ParamShard]]()

        def take() -> None:
            """The shards of the units that are new, before their storage is freed."""
            for flat in engine.flats_of(skeleton):
                if flat not in taken:
                    taken[flat] = [shard_of("", flat, i) for i in range(len(flat.sharded))]
                    deferred.defer(flat.master, *(t for t in (flat.device_shard,) if t is not None))

        options = {**engine_options(spec.strategy, mesh), "group_of": lambda name, p: keys[id(p)]}
        inner = {**options, "mp_policy": dataclasses.replace(options["mp_policy"], output_dtype=None)}
        for group in inside:
            engine.fully_shard([outer(m) for m in group], **inner)
            take()
        engine.fully_shard(skeleton, **options)
        take()
        name_flat_units(skeleton, context_of(mesh))
        named = ((original_name(name), sharded_form(p)) for name, p in skeleton.named_parameters())
        shards = [dataclasses.replace(taken[p.flat][p.number], name=name) for name, p in named if p is not None]
        super().__init__(skeleton, shards, deferred, spec, mesh, device)
        self.optimizer.register_step_pre_hook(lambda optimizer, *_: engine.split_unused(skeleton, optimizer))
        if spec.strategy.dtypes.keep_low_precision_gradients:  # torch's optimizers need the dtype of the shards
            self.optimizer.register_step_pre_hook(lambda *_: upcast_gradients(skeleton))

    def gradient(self, shard: engine.ParamShard) -> Tensor | None:
        p = shard.sharded
        if p is not None and p.grad is not None and p.grad.dtype != p.dtype:
            upcast_gradients(self.module)  # they would underflow when clipped or unscaled in a lower precision
        return None if p is None or p.grad is None else local_tensor(p.grad)

    def gradients(self) -> list[Tensor]:
        """One for each flat buffer."""
        upcast_gradients(self.module)
        return [t for t in self._gradients() if t.numel()]

    def _gradients(self) -> Iterator[Tensor]:
        reduced = (flat.gradients.local() for flat in engine.flats_of(self.module))
        return (t for t in reduced if t is not None)

    def micro_batch(self, *, communicate: bool) -> AbstractContextManager[None]:
        return nullcontext() if communicate else engine.no_sync(self.module)

    def retire(self, busy: Collection[int] = ()) -> None:
        super().retire(busy)
        for flat in engine.flats_of(self.module):
            flat.free_gathered(busy)
            flat.gradients.drop()

    def release(self, busy: Collection[int] = ()) -> None:
        super().release(busy)
        free(self.module, busy=busy)


def engine_options(strategy: Strategy, mesh: DeviceMesh) -> dict[str, Any]:
    """The arguments of `engine.fully_shard` for the root; collective where the strategy has a `reshard_size`."""
    rules, d = strategy.schedule_rules, strategy.dtypes
    param = None if d.param == "fp32" else DTYPES[d.param]
    return {
        "mesh": engine.ShardMesh.of(mesh).with_post_forward(strategy.reshard_size, own=True),
        "reshard_after_forward": strategy.reshards,
        "mp_policy": engine.MixedPrecisionPolicy(
            param_dtype=param,
            reduce_dtype=None if d.reduce == "fp32" and param is None else DTYPES[d.reduce],
            output_dtype=None if d.output is None else DTYPES[d.output],
            norm_dtype=None if d.norm is None else DTYPES[d.norm],
            buffer_dtype=None if d.buffer is None else DTYPES[d.buffer],
            keep_low_precision_gradients=d.keep_low_precision_gradients,
        ),
        "offload_policy": rules.offload,
        "prefetch_policy": rules,
        "shard_optimizer_only": strategy.shards_optimizer_only,
        "map_shards": strategy.gather == "mapped",
    }
