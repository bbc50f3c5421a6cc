"""`fully_shard` with FSDP2's arguments, and what its callers ask of a sharded model besides."""

import functools
from collections.abc import Collection, Hashable, Iterable, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh

from fsdp_lab.engine import api
from fsdp_lab.engine.buffer import TAKEN, sharded_form
from fsdp_lab.engine.collectives import ShardError
from fsdp_lab.engine.extras import refusals
from fsdp_lab.engine.extras.dtensor import FlatDTensor, restored
from fsdp_lab.engine.extras.optimizers import OptimizerGuard
from fsdp_lab.engine.extras.parameters import Region, ShardedBuffer, ShardedParameter
from fsdp_lab.engine.hooks import UnitHooks, not_sharded, unit_hooks
from fsdp_lab.engine.mesh import ShardMesh
from fsdp_lab.engine.policy import MixedPrecisionPolicy, ShardPolicy, offload_of
from fsdp_lab.engine.runtime import Runtime
from fsdp_lab.engine.schedule import OffloadPolicy, PrefetchPolicy, Rules
from fsdp_lab.engine.state import gather_one, shard_of
from fsdp_lab.engine.unit import Unit


def fully_shard(
    module: nn.Module | Sequence[nn.Module],
    *,
    mesh: DeviceMesh | ShardMesh | None = None,
    reshard_after_forward: bool | int | None = True,
    mp_policy: fsdp.MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | fsdp.OffloadPolicy | None = OffloadPolicy.NONE,
    prefetch_policy: PrefetchPolicy | None = None,
    shard_optimizer_only: bool = False,
    map_shards: bool = False,
    ignored_params: Collection[nn.Parameter] | None = (),
    group_of: api.GroupOf = lambda name, parameter: "all",
) -> Any:
    """Make a module a unit of Fully Sharded Data Parallel (arXiv 2304.11277, section 3); collective over the mesh.

    Call it on inner modules first and on the root last, as with FSDP2: each call takes the parameters that no earlier one
    took. A parameter shared by two modules belongs to the lowest module that contains both. README.md says what a caller
    may rely on (see "The contract").

    Args:
        module: a module, or a list of them that form one unit, which is gathered once where they are called one after the
            other; on meta, or with the same values on all ranks.
        mesh: ("shard",), ("replicate",), or both for hybrid sharding; None: shard over all ranks, on the GPU where the
            parameters are, or that the default process group is for. Units of one model may have meshes of their own.
        reshard_after_forward: True or None: free parameters after the forward and gather them again for the backward
            (ZeRO-3). False: keep them until then (ZeRO-2). An integer: reshard to groups of so many ranks.
        mp_policy: dtypes, ours or torch's; None: as they are.
        offload_policy: what is kept on the host, ours or torch's.
        prefetch_policy: of the whole model: give it to the root, or the same to all units; None: the default one.
        shard_optimizer_only: ZeRO-1: gradients and gathered parameters keep their full size.
        map_shards: between ranks on CPUs that share memory: gathered parameters are the shards of all ranks where they
            lie, so that nothing is copied, and one copy serves the host.
        ignored_params: parameters to leave alone; the caller keeps them equal on all ranks.
        group_of: the optimizer group of a parameter, by its name in `module`.

    Returns `module` itself. Raises ShardError: it is sharded already, or a module around it is; the ranks' models differ; or
    the mesh does not fit."""
    modules = list(module) if isinstance(module, Sequence) else [module]
    left: Any = () if ignored_params is None else ignored_params
    left = list(left) if isinstance(left, Iterable) and not isinstance(left, Tensor) else [left]
    reshard_after_forward = True if reshard_after_forward is None else reshard_after_forward
    for refusal in refusals.of_arguments(modules, reshard_after_forward, prefetch_policy, left):
        raise ShardError(refusal)
    reshard = bool(reshard_after_forward) and not shard_optimizer_only
    own = {"reshard_after_forward": reshard, "offload": offload_of(offload_policy)}
    rules = Rules(**vars(prefetch_policy or PrefetchPolicy()) | own)
    mp = MixedPrecisionPolicy.of(mp_policy)
    policy = ShardPolicy(mp=mp, rules=rules, has_own_prefetch=prefetch_policy is not None,
                         shard_optimizer_only=shard_optimizer_only, map_shards=map_shards)  # fmt: skip
    inside = api.units_inside(modules)
    tied = _find_ties(modules, inside)
    ignored = set(map(id, left))
    post_forward_size = None if isinstance(reshard_after_forward, bool) else reshard_after_forward
    taken = api.take(modules, ignored)
    for t in taken:
        if isinstance(t.value, ShardedParameter):
            outer = f"a module around {type(modules[0]).__name__}"
            raise ShardError(f"{t.name} was sharded already, with {outer}; shard inner modules first")
    holding = {*(t.value.device for t in taken), *(unit.mesh.device for unit in inside)}
    sharded = ShardMesh.resolve(mesh, post_forward_size=post_forward_size, holding=holding)
    of_parameters, of_mapping = refusals.of_parameters(taken), refusals.of_mapping(taken, sharded, policy)
    refused = next(chain(of_parameters, of_mapping, refusals.of_units(modules, sharded, policy, inside)), None)
    ties = [f"{', '.join(names)} tied" for names in tied.values()]
    entries = [*_described(taken, group_of), *ties] if refused is None else []
    named = [f"{one} in {type(modules[0]).__name__}" for one in entries]
    refusals.check_equal_on_all_ranks(sharded, [*named, str(policy)], refused)
    for its_hooks in inside.values():
        _untie(its_hooks, tied)
    unit = api.shard(modules, sharded, policy, ignored=ignored, group_of=group_of, buffer=ShardedBuffer, adopt=_adopt)
    _watch_state_dict(unit)
    # By these attributes of torch's FSDP libraries know that all ranks must call a module equally often: transformers then
    # lets `generate` go on until the last rank is ready, and calls a layer that was dropped. torch.compile reads them too.
    for inner in (inner for root in modules for inner in root.modules()):
        inner.__dict__.update(_is_fsdp_managed_module=True, _fsdp_use_orig_params=True)
    return module


def _adopt(hooks: UnitHooks) -> Runtime:
    """Of the core's, with what is refused to a root and to optimizers."""
    while hooks.outer is not None:
        hooks = hooks.outer
    for refusal in refusals.of_root(api.units_of(hooks.unit.modules[0])):
        raise ShardError(refusal)
    runtime = api.adopt_units(hooks)
    runtime.choices, runtime.agree = refusals.choices_of(runtime.units), refusals.check_same_call
    flats = [flat for unit in runtime.units for flat in unit.flats]
    ignored = {i for unit in runtime.units for i in unit.ignored}
    runtime.guard = OptimizerGuard(runtime.root.modules, flats, ignored).look
    return runtime


def _described(taken: Sequence[api.Taken], group_of: api.GroupOf) -> list[str]:
    """The facts that must be the same on all ranks. Groups are numbered: their names may differ from process to process."""
    numbers: dict[Hashable, int] = {}
    of = [(t.name, t.value, numbers.setdefault(group_of(t.name, t.value), len(numbers))) for t in taken]
    return [f"{name} {tuple(p.shape)} {p.dtype} requires_grad={p.requires_grad} group={n}" for name, p, n in of]


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let a method other than `forward`, such as `generate`, find the module's parameters gathered.

    A module that is not sharded is left as it is. Raises ShardError where there is no such method."""
    if unit_hooks(module) is None:
        return
    method = getattr(module, str(method_name), None)
    if not callable(method) or isinstance(method, nn.Module):
        raise ShardError(f"{type(module).__name__} has no method {method_name}; name one that it has")

    @functools.wraps(method)
    def called(*args: Any, **kwargs: Any) -> Any:
        hooks = unit_hooks(module)
        return method(*args, **kwargs) if hooks is None else hooks.call(method, module, args, kwargs)

    setattr(module, method_name, called)


# -- parameters shared by modules of different units -----------------------------------------------------------------

# They belong to the lowest unit that contains all their uses. Inner units are sharded first, when nobody can know that a
# module outside holds one of their parameters too. So when an outer module is sharded, what turns out to be shared is taken
# out of the inner units, which are rebuilt without it.


def _find_ties(modules: Sequence[nn.Module], inner: Iterable[Unit]) -> dict[int, list[str]]:
    """The original parameters that two inner units took, or that one took and `modules` still hold: id -> its names, each
    with its unit."""
    owners: dict[int, list[str]] = {}
    for unit in inner:
        for flat in unit.flats:
            for original, name in zip(flat.originals, flat.names, strict=True):
                owners.setdefault(id(original), []).append(f"{name} of {unit.name}")
    held = {id(p) for root in modules for m in root.modules() for p in m._parameters.values() if p is not None}
    return {p: names for p, names in owners.items() if len(names) > 1 or p in held}


def _untie(hooks: UnitHooks, tied: Collection[int]) -> None:
    """Rebuild a unit without the tied parameters, if it has any; its modules then hold these as before. Collective.

    Of two units that are tied to each other the one that was sharded first has the values."""
    flats, unit = [], hooks.unit
    if not any(id(original) in tied for flat in unit.flats for original in flat.originals):
        return
    for flat in unit.flats:
        kept = []
        for i, original in enumerate(flat.originals):
            if flat.has_values[i]:
                original.data = gather_one(flat, i)
                delattr(original, TAKEN)
            if id(original) not in tied:
                kept.append(i)
                continue
            for module, attribute in flat.uses[i]:
                setattr(module, attribute, original)
        entries = [(flat.originals[i], flat.uses[i], flat.names[i], flat.layout.slots[i].group) for i in kept]
        if entries:
            flats.append(type(flat)(entries, mesh=flat.mesh, policy=flat.policy, dtype=flat.dtype))
    unit.flats = tuple(flats)
    hooks.install()


# -- for optimizers --------------------------------------------------------------------------------------------------


def sharded_parameters(module: nn.Module) -> list[nn.Parameter]:
    """The flat shards for an optimizer, [m] each, in the dtype and place of the master copy."""
    if not api.units_of(module):
        raise not_sharded(module)
    regions = [(flat, region) for flat in api.flats_of(module) for region in flat.gradients.regions.values()]
    return [r for flat, r in regions if any(p.requires_grad and p.group == r.group for p in flat.sharded)]


def parameter_groups(module: nn.Module) -> dict[Hashable, list[nn.Parameter]]:
    """The flat shards by optimizer group: `[{"params": groups["decay"], "weight_decay": 0.1}, ...]`."""
    regions: list[Any] = sharded_parameters(module)
    return {region.group: [r for r in regions if r.group == region.group] for region in regions}


def original_parameters(module: nn.Module) -> list[ShardedParameter]:
    """The sharded parameters, in the order of `module.parameters()`."""
    return [p for p in map(sharded_form, module.parameters()) if p is not None]


def split_unused(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Called before a step of an optimizer over `sharded_parameters(module)`: where some parameters of a region have no
    gradient, gives the optimizer the region's parameters instead, each with its part of the state, so that only the
    others move."""
    inside: dict[Region, list[ShardedParameter]] = {}
    for p in original_parameters(module):
        inside.setdefault(p.gradients.regions[p.group], []).append(p)
    given = {p for options in optimizer.param_groups for p in options["params"]}
    for region in given & inside.keys():
        if len({p.gradients.has_gradient(p.number) for p in inside[region]}) == 1:
            continue
        for options in optimizer.param_groups:
            options["params"] = [q for p in options["params"] for q in (inside[region] if p is region else [p])]
        state = optimizer.state.pop(region, {})
        parts = {k: v._local_tensor.detach() for k, v in state.items() if isinstance(v, FlatDTensor)}
        for p in inside[region] if state else ():
            begin = (part := shard_of("", p.flat, p.number)).offset
            own = {k: p.like(t[begin : begin + part.numel].clone()) for k, t in parts.items()}
            optimizer.state[p] = {k: own[k] if k in own else v.clone() for k, v in state.items()}


def upcast_gradients(module: nn.Module) -> None:
    """Under `keep_low_precision_gradients`, brings gradients to the masters' dtype, for an optimizer that needs them so."""
    for flat in api.flats_of(module):
        flat.gradients.upcast()


# -- parameters that a caller asked for, outside of any forward -----------------------------------------------------


def unshard(module: nn.Module, *, async_op: bool = False, recurse: bool = True) -> "UnshardHandle":
    """Gather the parameters of a module, and of those inside it unless `recurse` is False; collective.

    `with unshard(module):` within it every parameter is whole and may be read, and written under `torch.no_grad()`. What was
    written is copied to the shards at the end; each rank must write the same. Without `with` they stay whole until
    `reshard(module)`, or until the module's own forward or the backward frees them; what is written is lost then.

    Args:
        async_op: do not wait: `wait()` of what is returned does, and so does a forward."""
    handle = UnshardHandle(module, recurse=recurse)
    if not async_op:
        handle.wait()
    return handle


def reshard(module: nn.Module, *, recurse: bool = True) -> None:
    """Free what `unshard` gathered, without a copy to the shards."""
    api.runtime_of(module)
    for unit in api.units_of(module)[: None if recurse else 1]:
        unit.reshard()


class UnshardHandle:
    """See `unshard`. Issues the gathers when made; `wait` makes the values visible; as a context it keeps them, and at its
    end copies to the shards what was written."""

    def __init__(self, module: nn.Module, *, recurse: bool) -> None:
        self._module, self._runtime = module, api.runtime_of(module)
        self._units = api.units_of(module)[: None if recurse else 1]
        self._issue()

    def wait(self) -> None:
        """Waits until the parameters may be read, and written to."""
        try:
            for unit in self._units:
                self._runtime.make_ready(unit)
            for flat in (flat for unit in self._units for flat in unit.flats):
                if (pool := flat.mesh.buffer_pool) is not None:
                    pool.settle(flat.full)  # other ranks have what this one sent from it
        except BaseException:
            for unit in self._units:
                with suppress(RuntimeError):  # other gathers fail alike, and the first one is told
                    unit.reshard()
            raise

    def __enter__(self) -> nn.Module:
        self._issue()  # they may have been freed since
        self.wait()
        for unit in self._units:
            unit.pins += 1
        return self._module

    def __exit__(self, *_: object) -> None:
        for unit in self._units:
            unit.pins -= 1
            flats: Sequence[Any] = unit.flats  # `ShardedBuffer`s
            for flat in flats:
                flat.write_back()
            unit.reshard()

    def _issue(self) -> None:
        for unit in self._units:
            if unit.is_sharded and unit.policy.rules.offload != OffloadPolicy.NONE:
                unit.copy_to_device(self._runtime.streams)
            if unit.policy.map_shards and not unit.asked_for:  # the caller is given copies, which he may write to
                pins, unit.pins = unit.pins, 0
                unit.reshard()
                unit.pins = pins
            unit.asked_for = True
            unit.unshard(self._runtime.streams)


def free(module: nn.Module, *, busy: Collection[int] = ()) -> None:
    """Remove the hooks and free all storage at once, even if it is still referenced. The model cannot be used afterwards.

    `busy`: addresses of storage that a collective may still use, as after an abort; freed with its last reference."""
    unit_hooks(module)  # refuses what is no module
    hooks = {h.unit: h for h in map(unit_hooks, module.modules()) if h is not None}
    for unit, h in hooks.items():
        h.remove()
        for flat in unit.flats:
            g, gathered = flat.gradients, flat.full if flat.gathered.is_held else None
            shards = flat.master, g.reduced, flat.device_shard, flat.post_forward_shard
            wholes = gathered, g.unsharded, *g.pieces.values()
            for storage in [t.untyped_storage() for t in (*shards, *wholes) if t is not None]:
                if storage.resizable() and storage.size() and storage.data_ptr() not in busy:
                    storage.resize_(0)
            flat.free_gathered(busy)
            flat.gradients.drop()
            flat.gradients.clear()  # what is in memory that ranks share is free when nobody has it


# -- state_dict -----------------------------------------------------------------------------------------------------


def _watch_state_dict(unit: Unit) -> None:
    """Let `state_dict` show sharded tensors (inside `unshard`, whole ones), and `load_state_dict` write to them. What
    `torch.save` makes of them may be read by `torch.load`, as of torch's own."""
    torch.serialization.add_safe_globals([restored])

    def loading(module: nn.Module, state: dict[str, Any], prefix: str, local: dict[str, Any], *_: Any) -> None:
        unit.reshard()
        for name, p in module._parameters.items():
            if local.get("assign_to_params_buffers") and isinstance(p, ShardedParameter) and prefix + name in state:
                new = p.flat.replace(p.number)
                new.data, state[prefix + name] = state[prefix + name], new  # assigned to itself

    for module in {use[0]: None for flat in unit.flats for uses in flat.uses for use in uses}:
        module.register_state_dict_pre_hook(lambda *_: unit.reshard())
        module.register_load_state_dict_pre_hook(loading)
