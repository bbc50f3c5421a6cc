"""Fully Sharded Data Parallel as its paper describes it (arXiv 2304.11277), to be read in an hour.

It needs torch only. To install it alone, in a clone: `pip install torch && pip install --no-deps .`

    from fsdp_lab.engine import fully_shard

    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())

`AdamW(sharded_parameters(model))` steps the same values as a few flat tensors, which is faster.

End a script by `torch.distributed.destroy_process_group()`: over Gloo, torch may abort a process that ends while a thread of
Gloo still holds the tensor of a collective. It ends these threads where no `DeviceMesh` of the caller's own keeps the group.

Read the files of its core in this order:

    api.py            the entry and its contract; how units are made; `UnshardHandle`
    unit.py           `Unit`: the parameters of one module, gathered and freed together; its states
    flat.py           `FlatBuffer`: those parameters as one buffer, of which each rank keeps a shard
    parameters.py     what modules hold between steps, what they hold while gathered, and flat regions
    gradients.py      what comes from autograd, and what the optimizer is given
    reduction.py      from the one to the other: reduce-scatter, all-reduce, copy to the host
    collectives.py    what is in flight, and how to wait for it
    ../base/streams.py  a device's streams: which kinds of work have one of their own, and how long memory lives
    runtime.py        a training step: what is gathered and reduced when
    hooks.py          how autograd and modules report where they are
    layout.py         where each parameter lies in the buffer, and which part each rank keeps
    schedule.py       what is issued at which point of a step, as data; the planner simulates the same list

Beside the core: flat_tensor.py (`FlatDTensor`, a tensor of which each rank holds a range of elements), dtensor.py (what
torch's operations do with it), mesh.py (replicas and shards), policy.py (dtypes), state.py (state by parameter names,
checkpoints, deferred initialisation), buffers.py (whose memory what is gathered and sent is in), scaling.py (gradient norm,
clipping, loss scaling), memory.py (bytes by class), ties.py (shared parameters), refusals.py (what cannot be sharded),
../base/tensors.py (tensors inside nested values), optimizers.py (what their steps may not do), errors.py.

Coming from FSDP2
-----------------

    theirs                                      here
    fully_shard(module, mesh=..)                the same; without a mesh over all ranks, and on two dimensions hybrid
      reshard_after_forward=True, False, n      the same
      mp_policy=MixedPrecisionPolicy(..)        the same, or our class of that name, which has more fields
      offload_policy=CPUOffloadPolicy()         the same, or OffloadPolicy.ALL
      ignored_params={..}                       the same
      shard_placement_fn, dp_mesh_dims          none: a buffer is cut where its shards end
    AdamW(model.parameters())                   the same, or sharded_parameters(model)
    p.full_tensor(), p.grad.full_tensor()       the same
    p.to_local()                                a range of elements in row order, [m], where theirs is rows
    module.unshard(async_op=..), reshard()      unshard(module, async_op=.., recurse=False), reshard(module, recurse=False)
    set_requires_gradient_sync(False)           with no_sync(module): around the backward
    set_is_last_backward                        none needed: each backward ends by itself
    set_requires_all_reduce(False)              none: no_sync sends nothing at all, and keeps whole gradients
    set_modules_to_forward_prefetch,            prefetch_policy=PrefetchPolicy(forward_prefetch=n, backward_prefetch=m),
      set_modules_to_backward_prefetch            given to the root: how many units ahead, in the order that was seen;
                                                  without it one, in the forward and in the backward
    set_reshard_after_forward                   none: reshard_after_forward of fully_shard, once
    set_reshard_after_backward,                 none: a backward gathers what it needs, and frees all of it
      set_unshard_in_backward
    register_fsdp_forward_method                the same
    get_ and set_model_state_dict,              torch's own, with the same options and original names; torch's for the
      get_ and set_optimizer_state_dict           optimizer need one over model.parameters(): see below
    torch.distributed.checkpoint                torch's own; either engine loads what the other one wrote
    torch.nn.utils.clip_grad_norm_, GradScaler  torch's own; clip_gradients and `Scaler` do it on flat shards
    module.to_empty(..), reset_parameters()     the same, for a model on meta, after fully_shard

What is different:

- The gradient of a parameter that no rank used, or that was frozen later, is None. Over `sharded_parameters` that cannot be
  said of part of a flat tensor: its `grad` raises, and `split_unused(model, optimizer)` before a step gives the optimizer
  single parameters.
- Element-wise operations, and so optimizers' steps, run on local ranges; norms are those of whole tensors. All other
  operations gather, so every rank must call them. Muon thus gathers each matrix in its step, on every rank.
- `placements` reads `Replicate()`, since no placement of torch's says where a flat buffer is cut.
- What `torch.save` makes of a sharded tensor, a rank's own range, is read by the same rank of as many; another one is
  refused it. Elsewhere torch's functions with the option full_state_dict=True, or `full_optimizer_state`, serve.
- `torch.autograd.grad` of parameters, taken between forward and backward, gives a rank's own gradients, as under DDP and
  for what FSDP2 keeps gathered. A unit that was freed is not in the graph, also as under FSDP2.
- A number made of parameters, as a penalty, and `p.full_tensor()` have the mean of the ranks' gradients, so a rank may
  multiply them by its own data; under FSDP2 each rank's shard gets that rank's own. A plain tensor beside a sharded one in
  an element-wise operation is taken to be equal on all ranks.
- Random values are drawn whole, so equal seeds give what one process draws; replicas take the first one's. FSDP2 draws
  each shard by itself. What is drawn out of place, as by randn_like, and then copied needs equal seeds.
- A transposed parameter is a copy that follows what is written to the parameter, and writes to it. A view of such a copy
  does not follow.
- `no_sync` counts at the backward, and is a context of ours in place of a switch of the module.

What is refused, by a `ShardError` that says what to do:

    a DTensor parameter                             give plain ones, as from full_tensor()
    a sparse or quantized one, or of another class  make it plain and dense, or pass it in ignored_params
    a lazy parameter                                run one forward first
    parameters on several GPUs, or on a device      bring them to one; choose a backend for it in init_process_group
      for which the process group has no backend
    no process group, or one that was destroyed     call init_process_group first, then shard a new model
    a mesh of other dimensions, or that cannot be   build_mesh, and a divisor of the world size
      divided; units on meshes of other ranks       give all units meshes of the same ranks and device type
    a container without a forward                   shard each module in it, or give list(modules)
    sharded twice; outer before inner; called       inner modules first, each once, and the root before the first call
      before a module around it was sharded
    a module in two roots, or a parameter that      shard a module around both, or give each its own
      another model took
    models or policies that differ between ranks    build the same on every rank
    prefetch policies that differ                   give one, to the outermost module
    an optimizer made before sharding, at its step  make it afterwards
    later, the values of a parameter that was       take it before or after, or use `unshard`; an optimizer
      taken between a forward and its backward        of such ones, and clipping them, is right
    a collective of yours over a sharded tensor     to_local() or full_tensor(); gradients are means already
    numpy() and tolist() of one                     full_tensor() first
    model.parameters() and sharded_parameters(..)   one of the two, since the same values would step twice
      in one optimizer, or in two of one step
    an optimizer made before load_state_dict(..,    make it afterwards, or load without assign=True
      assign=True)
    a change of shape in place, as by t_()          copy_ of the values, or `unshard`
    module.half(), .to(another dtype or device)     mp_policy and mesh
    deepcopy and pickle of a module, not of         copy it before, or take full_state(model)
      parameters
    a parameter replaced by another one             write to it, under no_grad
    a layer that came after fully_shard, at the     shard it with the model, or ignored_params
      step of its optimizer
    a write to a gathered one before the backward   write after the backward, or inside `unshard`
    a view that is no range, such as a column       full_tensor(), or `unshard`
    backward(create_graph=True)                     torch.autograd.grad of inputs, then a backward without it
    a sparse gradient                               a module with sparse=False, or ignored_params
    torch.func transforms of the model              torch.autograd.grad and its like
    a plain layer inside a unit, called by itself   call the unit, or use `unshard`
    several backwards in one torch.autocast, with   autocast around each forward
      a hook on a reduced gradient
    outputs in objects where tensors are not found  return tensors, tuples, lists, dicts or dataclasses
    a flat tensor of which a part has no gradient   split_unused, or an optimizer over model.parameters()
    values to load that are missing or of another   give one for every parameter, in its shape
      shape, also of an optimizer's state
    a flat optimizer's state by torch's functions   full_optimizer_state, or one over model.parameters()
      that look for names
    shards in safetensors, as save_distributed of   whole tensors from rank 0, or FileSystemWriter
      HuggingFaceStorageWriter writes them
    clip_gradients with a norm that is not above 0  a number above 0, or math.inf for its norm_type
    a rank that does not come, after the timeout    the same number of batches, and the same units, on every rank
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsdp_lab.base import lazy_names

if TYPE_CHECKING:
    from fsdp_lab.engine.api import (
        UnshardHandle as UnshardHandle,
        flats_of as flats_of,
        fully_shard as fully_shard,
        no_sync as no_sync,
        parameter_groups as parameter_groups,
        register_fsdp_forward_method as register_fsdp_forward_method,
        reshard as reshard,
        runtime_of as runtime_of,
        runtimes_of as runtimes_of,
        sharded_parameters as sharded_parameters,
        units_of as units_of,
        unshard as unshard,
    )
    from fsdp_lab.engine.dtensor import FlatDTensor as FlatDTensor
    from fsdp_lab.engine.errors import ShardError as ShardError
    from fsdp_lab.engine.flat import FlatBuffer as FlatBuffer
    from fsdp_lab.engine.memory import MemoryBreakdown as MemoryBreakdown, free as free, memory_stats as memory_stats
    from fsdp_lab.engine.mesh import ShardMesh as ShardMesh, build_mesh as build_mesh, known_groups as known_groups
    from fsdp_lab.engine.policy import MixedPrecisionPolicy as MixedPrecisionPolicy
    from fsdp_lab.engine.runtime import TrainingState as TrainingState
    from fsdp_lab.engine.scaling import (
        Scaler as Scaler,
        clip_gradients as clip_gradients,
        gradient_norm as gradient_norm,
        upcast_gradients as upcast_gradients,
    )
    from fsdp_lab.engine.schedule import OffloadPolicy as OffloadPolicy, PrefetchPolicy as PrefetchPolicy
    from fsdp_lab.engine.state import (
        ParamShard as ParamShard,
        broadcast_full_state as broadcast_full_state,
        full_optimizer_state as full_optimizer_state,
        full_state as full_state,
        load_full_optimizer_state as load_full_optimizer_state,
        load_full_state as load_full_state,
        load_ranges as load_ranges,
        local_optimizer_state as local_optimizer_state,
        local_state as local_state,
        original_parameters as original_parameters,
        shards_of as shards_of,
        split_unused as split_unused,
    )
    from fsdp_lab.engine.unit import Unit as Unit, UnitState as UnitState

# Imported at their first use, since Specs and the planner read the schedule where torch is not installed.
_NAMES = {
    "api": "UnshardHandle flats_of fully_shard no_sync parameter_groups register_fsdp_forward_method reshard runtime_of "
    "runtimes_of sharded_parameters units_of unshard",
    "dtensor": "FlatDTensor",
    "errors": "ShardError",
    "flat": "FlatBuffer",
    "memory": "MemoryBreakdown free memory_stats",
    "mesh": "ShardMesh build_mesh known_groups",
    "policy": "MixedPrecisionPolicy",
    "runtime": "TrainingState",
    "scaling": "Scaler clip_gradients gradient_norm upcast_gradients",
    "schedule": "OffloadPolicy PrefetchPolicy",
    "state": "ParamShard broadcast_full_state full_optimizer_state full_state load_full_optimizer_state load_full_state "
    "load_ranges local_optimizer_state local_state original_parameters shards_of split_unused",
    "unit": "Unit UnitState",
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}

__all__ = sorted(_HOMES)
if not TYPE_CHECKING:  # a `__getattr__` would let any name pass
    __getattr__, __dir__ = lazy_names(__name__, _HOMES)
