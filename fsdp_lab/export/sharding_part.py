"""How a script shards the model: with FSDP2, FSDP1 or DDP, and no option that the Spec does not ask for."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fsdp_lab.engine import blocks, units
from fsdp_lab.export.model_part import Model
from fsdp_lab.export.source import Part, fill, literal
from fsdp_lab.spec import HYBRIDS, Precision, Spec

DTYPES: Mapping[str, str] = {"fp32": "torch.float32", "bf16": "torch.bfloat16", "fp16": "torch.float16"}
_STRATEGIES: Mapping[str, str] = {
    "full_shard": "FULL_SHARD",
    "shard_grad_op": "SHARD_GRAD_OP",
    "hybrid_shard": "HYBRID_SHARD",
    "hybrid_shard_zero2": "_HYBRID_SHARD_ZERO2",
    "no_shard": "NO_SHARD",
}


@dataclass(frozen=True, kw_only=True)
class Names:
    """Modules by name: `units` as they are sharded together, `blocks` as they are recomputed or compiled."""

    units: tuple[tuple[str, ...], ...]
    blocks: tuple[str, ...]


def names_of(model: Model, spec: Spec) -> Names:
    """Raises SpecError where the model has no such modules."""
    names = {id(m): name for name, m in model.skeleton.named_modules()}
    found = [] if spec.strategy.backend == "ddp" else units(model.skeleton, spec.strategy.wrap)
    return Names(
        units=tuple(tuple(names[id(m)] for m in group) for group in found),
        blocks=tuple(names[id(m)] for m in blocks(model.skeleton)),
    )


def sharding_part(model: Model, spec: Spec) -> Part:
    """`shard(model, device, ...)`, and what it needs. Raises SpecError."""
    names = names_of(model, spec)
    make = {"fsdp2": _fsdp2, "fsdp1": _fsdp1, "ddp": _ddp}[spec.strategy.backend]
    return make(spec, names)


def rank_ordered(spec: Spec) -> bool:
    """Whether three or more summands of a reduce-scatter are added up in the order of the ranks, as over the lab's wire.

    Two have no order. Over NCCL the lab takes its order as it is."""
    on_gpu = spec.devices is not None and spec.devices[0] != "cpu"
    hookless = spec.strategy.backend == "fsdp1" and spec.strategy.sharding in HYBRIDS
    return spec.strategy.backend != "ddp" and spec.shard_factor > 2 and not on_gpu and not hookless


# -- what all three do first -----------------------------------------------------------------------------------------


def _prepared(spec: Spec, names: Names) -> Part:
    """Compile and recompute, block by block, before anything is sharded."""
    s = spec.strategy
    imports: list[str] = []
    lines: list[str] = []
    chosen = "BLOCKS"
    if s.compile:
        lines += ["for name in BLOCKS:", "    model.get_submodule(name).compile()"]
    if s.recompute != "none":
        imports.append("torch.distributed.algorithms._checkpoint.checkpoint_wrapper:checkpoint_wrapper")
        each = int(s.recompute.partition(":")[2] or 1)
        chosen = "BLOCKS" if each == 1 else f"BLOCKS[::{each}]"
        lines += [f"for name in {chosen}:  # their activations are computed again in the backward",
                  "    model.set_submodule(name, checkpoint_wrapper(model.get_submodule(name)))"]  # fmt: skip
    return Part(imports=tuple(imports), functions="\n".join(lines))


def _lists(spec: Spec, names: Names) -> str:
    """The constants BLOCKS and UNITS, each where it is needed."""
    s = spec.strategy
    same = [list(group) for group in names.units] == [[name] for name in names.blocks]
    lines = []
    if s.compile or s.recompute != "none" or (same and names.units):
        lines += ["# The layers that repeat.", f"BLOCKS = {_sequence(names.blocks)}"]
    if names.units and not same:
        grouped = any(len(group) > 1 for group in names.units)
        found = [list(group) for group in names.units] if grouped else [group[0] for group in names.units]
        what = "Groups of modules that are" if grouped else "Modules that are each"
        lines += [f"# {what} gathered together, by themselves.", f"UNITS = {_sequence(found)}"]
    return "\n".join(lines)


def _units(spec: Spec, names: Names) -> str:
    return "BLOCKS" if "UNITS =" not in _lists(spec, names) else "UNITS"


def _sequence(names: Sequence[str] | Sequence[list[str]]) -> str:
    """["h.0", "h.1", "h.2"] as a comprehension, where that is what they are."""
    runs: list[str] = []
    rest = list(names)
    while rest and all(isinstance(n, str) for n in rest):
        found = re.fullmatch(r"(.*\.)(\d+)", str(rest[0]))
        if found is None:
            return literal(list(names))
        count = 0
        while count < len(rest) and rest[count] == f"{found[1]}{count}":
            count += 1
        if count < 2:
            return literal(list(names))
        runs.append(f'[f"{found[1]}{{i}}" for i in range({count})]')
        rest = rest[count:]
    return " + ".join(runs) if runs else literal(list(names))


def _mesh(spec: Spec) -> str:
    if spec.strategy.sharding in HYBRIDS:
        return ('mesh = init_device_mesh(\n    device.type, (dist.get_world_size() // SHARD_SIZE, SHARD_SIZE), '
                'mesh_dim_names=("replicate", "shard")\n)')  # fmt: skip
    return 'mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("shard",))'


def _shard_size(spec: Spec) -> str:
    if spec.strategy.sharding not in HYBRIDS:
        return ""
    return f"SHARD_SIZE = {spec.shard_factor}  # ranks that share one replica of the model"


# -- FSDP2 -----------------------------------------------------------------------------------------------------------


def _fsdp2(spec: Spec, names: Names) -> Part:
    s = spec.strategy
    prepared = _prepared(spec, names)
    policies, imports = _fsdp2_policies(spec)
    ordered, prefetch = rank_ordered(spec), _fsdp2_prefetch(spec, names)
    grouped = any(len(group) > 1 for group in names.units)
    loop = ""
    if names.units:
        what = "list(map(model.get_submodule, names))" if grouped else "model.get_submodule(name)"
        loop = f"for {'names' if grouped else 'name'} in {_units(spec, names)}:\n    fully_shard({what}, **options)"
    strip = 'name = name.replace("_checkpoint_wrapped_module.", "")' if s.recompute != "none" else ""
    code = fill(
        _FSDP2,
        mesh=_mesh(spec),
        reshard=repr(s.reshard_size or s.sharding in ("full_shard", "hybrid_shard")),
        policies="\n".join(policies),
        prepared=prepared.functions,
        loop=loop,
        root=_fsdp2_root(spec),
        buffers=_BUFFERS_OFFLOADED if s.offload == "all" else _BUFFERS,
        ordered='if device.type == "cpu":\n    for module in model.modules():\n'
                "        if isinstance(module, FSDPModule):\n"
                "            module.set_custom_reduce_scatter(RankOrderedReduceScatter())" if ordered else "",
        prefetch=prefetch,
    )  # fmt: skip
    values = fill(_FSDP2_VALUES, strip=strip)
    own = fill(_FSDP2_ORDERED) + "\n\n\n" if ordered else ""
    imports += ["torch.distributed.fsdp:FSDPModule"] if ordered else []
    imports += ["dataclasses"] if s.dtypes.output is not None else []
    return Part(
        imports=(*prepared.imports, *imports, "torch", "torch:nn", "torch.distributed as dist",
                 "torch.distributed.device_mesh:init_device_mesh", "torch.distributed.fsdp:fully_shard"),
        constants="\n".join(filter(None, [_lists(spec, names), _shard_size(spec)])),
        functions=f"{own}{code}\n\n\n{values}",
    )  # fmt: skip


def _fsdp2_policies(spec: Spec) -> tuple[list[str], list[str]]:
    """Entries of `options`, and imports."""
    s, dtypes = spec.strategy, spec.strategy.dtypes
    lines, imports = [], []
    if _is_mixed(dtypes):
        param = "" if dtypes.param == "fp32" else f"param_dtype={DTYPES[dtypes.param]}, "
        lines.append(f'"mp_policy": MixedPrecisionPolicy({param}reduce_dtype={DTYPES[dtypes.reduce]}),')
        imports.append("torch.distributed.fsdp:MixedPrecisionPolicy")
    if s.offload == "all":
        lines.append('"offload_policy": CPUOffloadPolicy(pin_memory=device.type == "cuda"),')
        imports.append("torch.distributed.fsdp:CPUOffloadPolicy")
    return lines, imports


def _is_mixed(dtypes: Precision) -> bool:
    return (dtypes.param, dtypes.reduce, dtypes.output) != ("fp32", "fp32", None)


def _fsdp2_root(spec: Spec) -> str:
    """The root's own options: what it returns, and that it stays gathered, as the backward begins with it."""
    dtypes = spec.strategy.dtypes
    lines = ['options["reshard_after_forward"] = False  # the backward begins with what is left to the root']
    if dtypes.output is not None:
        output = f'dataclasses.replace(options["mp_policy"], output_dtype={DTYPES[dtypes.output]})'
        lines.append(f'options["mp_policy"] = {output}')
    return "\n".join([*lines, "fully_shard(model, **options)"])


def _fsdp2_prefetch(spec: Spec, names: Names) -> str:
    s = spec.strategy
    if not names.units or not (s.forward_prefetch or s.backward_prefetch > 1):
        return ""
    grouped = any(len(group) > 1 for group in names.units)
    lines = [f"sharded = [model.get_submodule({'names[0]' if grouped else 'name'}) for "
             f"{'names' if grouped else 'name'} in {_units(spec, names)}]",
             "for i, module in enumerate(sharded):"]  # fmt: skip
    if s.forward_prefetch:
        lines.append(f"    module.set_modules_to_forward_prefetch(sharded[i + 1 : i + {1 + s.forward_prefetch}])")
    if s.backward_prefetch > 1:
        lines.append(
            f"    module.set_modules_to_backward_prefetch(sharded[max(0, i - {s.backward_prefetch}) : i][::-1])"
        )
    lines += ["for module in [*sharded, model]:  # private to torch: without it nothing runs ahead on a CPU",
              "    module._set_unshard_async_op(True)"]  # fmt: skip
    return "\n".join(lines)


_FSDP2 = '''
    def shard(model: nn.Module, device: torch.device, seed: int) -> None:
        """Shard in place with FSDP2: each parameter becomes a DTensor, of which this rank keeps some rows.

        What `fully_shard` is called on is gathered as a whole before its forward and its backward.
        """
        @mesh
        options = {
            "mesh": mesh,
            "reshard_after_forward": $reshard,
            @policies
        }
        @prepared
        @loop
        @root
        @ordered
        @prefetch
        @buffers
        load_values(model, seed)
'''

_BUFFERS = """buffers = {name: buffer.to(device) for name, buffer in model.named_buffers()}
model.to_empty(device=device)  # memory for this rank's shards; it takes the buffers' values too
for name, buffer in model.named_buffers():
    buffer.copy_(buffers[name])"""

_BUFFERS_OFFLOADED = """buffers = {name: buffer.to(device) for name, buffer in model.named_buffers()}
model.to_empty(device="cpu")  # memory for this rank's shards, which rest on the host
for name, buffer in model.named_buffers():
    buffer.data = buffers[name]"""

_FSDP2_VALUES = '''
    @torch.no_grad()
    def load_values(model: nn.Module, seed: int) -> None:
        """Parameter by parameter, the rows of it that this rank keeps. A checkpoint would be read here."""
        for name, parameter in model.named_parameters():
            @strip
            mesh = parameter.device_mesh["shard"]
            rows, rank = initial_value(name, parameter.shape, seed).chunk(mesh.size()), mesh.get_local_rank()
            if rank < len(rows):  # a small parameter has rows for the first ranks alone
                parameter.to_local().copy_(rows[rank])
'''

_FSDP2_ORDERED = '''
    class RankOrderedReduceScatter:
        """Adds gradients up in the order of the ranks. Optional: it is how the run's losses come out to the bit.

        Gloo's own reduce-scatter begins each part with another rank, and a sum of three depends on the order.
        """

        def allocate(self, size, *, dtype, device):
            return torch.empty(size, dtype=dtype, device=device)

        def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
            parts = torch.empty_like(input_tensor)
            dist.all_to_all_single(parts, input_tensor, group=group)
            first, *others = parts.view(group.size(), -1)
            output_tensor.copy_(first)
            for part in others:
                output_tensor.add_(part)
            if op == dist.ReduceOp.AVG:
                output_tensor.div_(group.size())
'''


# -- FSDP1 -----------------------------------------------------------------------------------------------------------


def _fsdp1(spec: Spec, names: Names) -> Part:
    prepared = _prepared(spec, names)
    options, imports = _fsdp1_options(spec, names)
    ordered = rank_ordered(spec) and spec.strategy.sharding != "no_shard"
    units_line = f"units = {{model.get_submodule(name) for name in {_units(spec, names)}}}" if names.units else ""
    code = fill(
        _FSDP1,
        mesh=_mesh(spec),
        prepared=prepared.functions,
        units=units_line,
        options="\n".join(options),
        ordered='if device.type == "cpu":\n    sharded.register_comm_hook(None, rank_ordered_mean)' if ordered else "",
    )
    own = fill(_FSDP1_ORDERED) + "\n\n\n" if ordered else ""
    return Part(
        imports=(*prepared.imports, *imports, "torch", "torch:nn", "torch.distributed as dist",
                 "torch.distributed.device_mesh:init_device_mesh", "torch.distributed.fsdp:FullyShardedDataParallel",
                 "torch.distributed.fsdp:ShardingStrategy"),
        constants="\n".join(filter(None, [_lists(spec, names), _shard_size(spec)])),
        functions=own + code,
    )  # fmt: skip


def _fsdp1_options(spec: Spec, names: Names) -> tuple[list[str], list[str]]:
    """Arguments that differ from torch's defaults, and imports."""
    s, dtypes = spec.strategy, spec.strategy.dtypes
    lines = [f"sharding_strategy=ShardingStrategy.{_STRATEGIES[s.sharding]},"]
    imports = []
    if names.units:
        lines.append("auto_wrap_policy=CustomPolicy(lambda module: module in units),")
        imports.append("torch.distributed.fsdp.wrap:CustomPolicy")
    if s.precision != "fp32":
        buffer = "" if dtypes.buffer is None else f", buffer_dtype={DTYPES[dtypes.buffer]}"
        lines += ["mixed_precision=MixedPrecision(",
                  f"    param_dtype={DTYPES[dtypes.param]}, reduce_dtype={DTYPES[dtypes.reduce]}{buffer}", "),"]  # fmt: skip
        imports.append("torch.distributed.fsdp:MixedPrecision")
    if s.offload == "all":
        lines.append("cpu_offload=CPUOffload(offload_params=True),")
        imports.append("torch.distributed.fsdp:CPUOffload")
    if s.forward_prefetch:
        lines.append("forward_prefetch=True,")
    if not s.backward_prefetch:
        lines.append("backward_prefetch=None,")
    elif s.backward_prefetch_point == "after":
        lines.append("backward_prefetch=BackwardPrefetch.BACKWARD_POST,")
        imports.append("torch.distributed.fsdp:BackwardPrefetch")
    if not s.limit_all_gathers:
        lines.append("limit_all_gathers=False,")
    return lines, imports


_FSDP1 = '''
    def shard(model: nn.Module, device: torch.device) -> nn.Module:
        """Wrap in FSDP1: the parameters of a unit become one flat parameter, of which this rank keeps a part."""
        @mesh
        @prepared
        @units
        sharded = FullyShardedDataParallel(
            model,
            device_mesh=mesh,
            device_id=device,
            use_orig_params=True,  # the optimizer sees parameters, each with this rank's part of it
            @options
        )
        @ordered
        return sharded
'''

_FSDP1_ORDERED = '''
    def rank_ordered_mean(state, gradient, shard):
        """Adds gradients up in the order of the ranks. Optional: it is how the run's losses come out to the bit.

        Gloo's own reduce-scatter begins each part with another rank, and a sum of three depends on the order.
        """
        parts = torch.empty_like(gradient)
        dist.all_to_all_single(parts, gradient)
        first, *others = parts.view(dist.get_world_size(), -1)
        shard.copy_(first)
        for part in others:
            shard.add_(part)
        shard.div_(dist.get_world_size())
'''


# -- DDP -------------------------------------------------------------------------------------------------------------


def _ddp(spec: Spec, names: Names) -> Part:
    prepared = _prepared(spec, names)
    reduce = spec.strategy.dtypes.reduce
    uneven = spec.world_size & (spec.world_size - 1) != 0
    hook = ""
    if reduce != "fp32":
        hook = fill(_DDP_HOOK_LOW, dtype=DTYPES[reduce]) + "\n\n\n"
    elif uneven:
        hook = fill(_DDP_HOOK) + "\n\n\n"
    code = fill(
        _DDP,
        prepared=prepared.functions,
        hook="replicated.register_comm_hook(None, sum_then_divide)" if hook else "",
    )
    return Part(
        imports=(*prepared.imports, *(("torch.distributed as dist",) if hook else ()), "torch", "torch:nn",
                 "torch.nn.parallel:DistributedDataParallel"),
        constants=_lists(spec, names),
        functions=hook + code,
    )  # fmt: skip


_DDP = '''
    def shard(model: nn.Module, device: torch.device) -> nn.Module:
        """Nothing is sharded: DDP keeps the whole model on every rank, and all-reduces gradients in buckets."""
        @prepared
        replicated = DistributedDataParallel(
            model.to(device),
            device_ids=[device] if device.type == "cuda" else None,
            broadcast_buffers=False,
            gradient_as_bucket_view=True,
        )
        @hook
        return replicated
'''

_DDP_HOOK = '''
    def sum_then_divide(state, bucket):
        """The mean over ranks. DDP itself divides first, which rounds otherwise unless the ranks are a power of two."""
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda done: done.value()[0].div_(dist.get_world_size()))
'''

_DDP_HOOK_LOW = '''
    def sum_then_divide(state, bucket):
        """The mean over ranks, sent in a lower precision."""
        buffer = bucket.buffer()
        work = dist.all_reduce(buffer.to($dtype), async_op=True)
        return work.get_future().then(lambda done: buffer.copy_(done.value()[0].div_(dist.get_world_size())))
'''
