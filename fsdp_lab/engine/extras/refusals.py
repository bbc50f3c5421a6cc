"""What `fully_shard` cannot take, each as one sentence that names it and the way out; and the comparison of ranks."""

import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields

import torch
from torch import distributed as dist, nn
from torch.distributed.tensor import DTensor

from fsdp_lab.engine.api import Taken
from fsdp_lab.engine.collectives import Group, ShardError
from fsdp_lab.engine.mesh import ShardMesh
from fsdp_lab.engine.policy import ModuleKind, ShardPolicy
from fsdp_lab.engine.schedule import OffloadPolicy, PrefetchPolicy
from fsdp_lab.engine.unit import Unit


def of_arguments(
    modules: Sequence[object], reshard_after_forward: object, prefetch: object, ignored: Iterable[object]
) -> Iterator[str]:
    """Refuses arguments of the wrong kind, except those whose own constructors do, and modules without a forward at which
    their parameters could be gathered."""
    if not modules:
        yield "an empty list of modules was given to fully_shard; give it the modules that form one unit"
    for module in modules:
        kind = type(module).__name__
        if not isinstance(module, nn.Module):
            yield f"a {kind} was given to fully_shard; give it a module, or a list of modules"
        elif getattr(module.forward, "__func__", None) is nn.Module.forward:
            yield (f"a {kind} has no forward at which its parameters could be gathered; shard each module in it, or give "
                   "them as a list, list(modules), to be one unit")  # fmt: skip
    if not isinstance(reshard_after_forward, int):
        yield f"reshard_after_forward is {reshard_after_forward!r}; give True, False, or a number of ranks"
    if prefetch is not None and not isinstance(prefetch, PrefetchPolicy):
        yield f"prefetch_policy is {prefetch!r}; give a PrefetchPolicy"
    for field in fields(PrefetchPolicy) if isinstance(prefetch, PrefetchPolicy) else ():
        value, least = getattr(prefetch, field.name), field.metadata.get("least", 0)
        if not isinstance(value, int) or value < least:
            yield f"prefetch_policy has {field.name}={value!r}; give a number of units, {least} or more"
    for p in ignored:
        if not isinstance(p, nn.Parameter):
            yield f"ignored_params has a {type(p).__name__}; give parameters, as of module.parameters()"


def of_parameters(taken: Iterable[Taken]) -> Iterator[str]:
    """Parameters of which a range of elements is not a meaningful part, as of classes that compute in their own way, or
    pack numbers into integers."""
    plain = nn.Parameter.__torch_function__, nn.Parameter.__torch_dispatch__
    for name, p, kind in ((t.name, t.value, type(t.value)) for t in taken):
        computes = (kind.__torch_function__, kind.__torch_dispatch__) != plain
        if nn.parameter.is_lazy(p):
            yield f"{name} has no shape yet; run one forward, or give the sizes, before fully_shard"
        elif isinstance(p, DTensor):
            yield (f"{name} is a DTensor, which is distributed already; give fully_shard plain parameters, as from "
                   "full_tensor(), and leave parallelism to it")  # fmt: skip
        elif p.layout is not torch.strided or p.is_quantized:
            what = "quantized" if p.is_quantized else f"stored as {p.layout}"
            yield f"{name} is {what}, and only dense parameters can be cut; make it dense, or pass it in ignored_params"
        elif getattr(p, "grad_dtype", None) not in (None, p.dtype):  # torch 2.11 has no such attribute
            yield (f"{name} has grad_dtype={p.grad_dtype}, and gradients here have the dtype of their parameter; leave it "
                   "as it is, and choose dtypes by mp_policy")  # fmt: skip
        elif kind is not nn.Parameter and (computes or not (p.is_floating_point() or p.is_complex())):
            yield (f"{name} is a {kind.__name__}, whose elements cannot be cut as numbers; make it a plain nn.Parameter, "
                   "or pass it in ignored_params")  # fmt: skip


def of_mapping(taken: Iterable[Taken], mesh: ShardMesh, policy: ShardPolicy) -> Iterator[str]:
    """Why gathered parameters cannot be the shards where they lie, if they are to be."""
    if not policy.map_shards:
        return
    shares = mesh.device.type == "cpu" and (mesh.shard_group is None or mesh.buffer_pool is not None)
    if not shares or policy.rules.offload != OffloadPolicy.NONE or mesh.post_forward_group is not None:
        yield ("map_shards is for ranks on CPUs that share memory, as by fsdp_lab.init_process_group(), without "
               "offload_policy, and without a number in reshard_after_forward; leave one of them out")  # fmt: skip
    for t in taken:
        if any(policy.gathered_dtype(t.value.dtype, kind) is not t.value.dtype for kind in ModuleKind):
            yield (f"map_shards is for parameters that are gathered as they are, and mp_policy makes {t.name} another "
                   "dtype; leave one of them out")  # fmt: skip


def of_root(units: Iterable[Unit]) -> Iterator[str]:
    """Parameters that another model took: within one, they were given back when the module around all uses was sharded."""
    for flat in (flat for unit in units for flat in unit.flats):
        for name, original, has_values in zip(flat.names, flat.originals, flat.has_values, strict=True):
            if not has_values and not original.is_meta:
                yield (f"{name} belongs to another model too, which was sharded first and has its values; shard a module "
                       "around both models, or give each a parameter of its own")  # fmt: skip


def of_units(
    modules: Sequence[nn.Module], mesh: ShardMesh, policy: ShardPolicy, inside: Iterable[Unit]
) -> Iterator[str]:
    """Refuses units of one root that differ in what must be the same. They may differ in dtypes, offload, and how they
    shard."""
    outer, paths = type(modules[0]).__name__, {m: path for root in modules for path, m in root.named_modules()}
    prefetch = {outer: policy} if policy.has_own_prefetch else {}
    for unit in inside:
        name, ranks = paths.get(unit.modules[0]) or unit.name, unit.mesh.ranks
        if unit.mesh.device != mesh.device:
            yield (f"{name} was sharded on {unit.mesh.device}, and {outer} around it is to be on {mesh.device}; give all "
                   "units of a model meshes of one device type")  # fmt: skip
        if ranks[0] != mesh.ranks[0] or {*ranks} != {*mesh.ranks}:  # the first one has the values in a broadcast
            yield (f"{name} was sharded over ranks {list(ranks)}, and {outer} around it is to be over "
                   f"{list(mesh.ranks)}; give all units of a model meshes of the same ranks")  # fmt: skip
        if unit.policy.has_own_prefetch:
            prefetch[name] = unit.policy
    for (one, its), (other, others) in itertools.pairwise(prefetch.items()):
        for field in fields(PrefetchPolicy):
            a, b = getattr(its.rules, field.name), getattr(others.rules, field.name)
            if a != b:
                yield (f"prefetch_policy is one for all units of a model, and {one} was given {field.name}={a}, {other} "
                       f"{field.name}={b}; give it to the outermost module only")  # fmt: skip


def gather_texts(text: str, group: Group, device: torch.device) -> list[str]:
    """The texts of all ranks of a group, in rank order. torch's functions for objects need NumPy, and the engine torch
    only."""
    own = torch.frombuffer(bytearray(text.encode()) + b"\0", dtype=torch.uint8).to(device)  # never empty
    sizes = torch.zeros(group.size(), dtype=torch.int64, device=device)
    sizes[group.rank()] = own.numel()
    dist.all_reduce(sizes, group=group)
    padded = torch.nn.functional.pad(own, (0, int(sizes.max()) - own.numel()))
    parts = [torch.empty_like(padded) for _ in range(group.size())]
    dist.all_gather(parts, padded, group=group)
    return [bytes(part[: size - 1].tolist()).decode() for part, size in zip(parts, sizes.tolist(), strict=True)]


def check_equal_on_all_ranks(mesh: ShardMesh, entries: list[str], refusal: str | None) -> None:
    """Compare what the ranks are about to shard; collective. `refusal`: why this rank cannot.

    Raises ShardError: on every rank, with the first refusal, or naming the first entry that differs."""
    answers: list[tuple[list[str], str | None]] = [(entries, refusal)]
    with mesh.answered("fully_shard"):
        for group in (mesh.shard_group, mesh.replicate_group):  # always both: no rank may wait for one that raised
            if group is not None:
                parts = gather_texts(json.dumps(answers), group, mesh.device)
                answers = [one for part in parts for one in json.loads(part)]
    for refused in (why for _, why in answers if why is not None):
        raise ShardError(refused)
    for rank, (others, _) in enumerate(answers):
        for first, differs in itertools.zip_longest(answers[0][0], others, fillvalue="nothing more"):
            if first != differs:
                raise ShardError(f"what is sharded differs between ranks: {first} on rank 0 of the mesh, {differs} on rank "
                                 f"{rank}; build the same model on every rank before fully_shard")  # fmt: skip


def choices_of(units: Sequence[Unit]) -> dict[Unit, Unit]:
    """Units in a list of modules inside another unit, not the root, which may choose among them, as among experts; with that
    unit."""
    root, lists = units[0].modules[0], (nn.ModuleList, nn.ModuleDict)
    listed = {m for some in root.modules() if isinstance(some, lists) for m in some.children()}
    around: dict[Unit, Unit] = {}
    for outer in units[1:]:  # those inside another come after it
        within = {m for module in outer.modules for m in module.modules()} & listed
        around |= {unit: outer for unit in units if unit is not outer and unit.modules[0] in within}
    return around


def check_same_call(unit: Unit, what: str) -> None:
    """Compare what the ranks have come to; collective, unless the caller has gathered the unit. Raises ShardError on all of
    them where they differ: their all-gathers would take each other's bytes."""
    for group in (unit.mesh.shard_group, unit.mesh.replicate_group):
        if group is not None and not unit.asked_for:
            came_to = gather_texts(what, group, unit.mesh.device)
            if len(set(came_to)) > 1:
                ranks = dist.get_process_group_ranks(group)
                where = ", ".join(f"rank {rank} to {what}" for rank, what in zip(ranks, came_to, strict=True))
                raise ShardError(
                    f"ranks have come to different units: {where}; let every rank call all of them in one order, with an "
                    "empty batch where one has nothing, or shard the module around them as one unit"
                )
