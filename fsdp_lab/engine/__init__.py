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
deferred initialisation), buffers.py (whose memory what is gathered and sent is in), scaling.py (loss scaling), memory.py
(what is held, and how it is freed), ties.py (shared parameters), refusals.py (what cannot be sharded), ../base/tensors.py
(tensors inside nested values), optimizers.py (what their steps may not do), errors.py.

Coming from FSDP2
-----------------

`fully_shard` has FSDP2's arguments and takes torch's own policies. Modules stay as they are, without methods of ours:

    theirs                                      here
    shard_placement_fn, dp_mesh_dims            none: a buffer is cut where its shards end
    p.to_local()                                a range of elements in row order, [m], where theirs is rows
    module.unshard(async_op=..), reshard()      unshard(module, async_op=.., recurse=False), reshard(module, recurse=False)
    set_requires_gradient_sync(False)           with no_sync(module): around the backward
    set_modules_to_forward_prefetch,            prefetch_policy=PrefetchPolicy(forward_prefetch=n, backward_prefetch=m),
      set_modules_to_backward_prefetch            given to the root: how many units ahead, in the order that was seen

`AdamW(model.parameters())`, `p.full_tensor()`, torch's `clip_grad_norm_`, GradScaler, `state_dict` functions, Distributed
Checkpoint, and `module.to_empty(..)` with `reset_parameters()` of a model on meta are used in the same way. Other setters
of FSDP2's have no counterpart: a backward gathers what it needs and frees all of it. What is different:

- The gradient of a parameter that no rank used, or that was frozen later, is None. Over `sharded_parameters` that cannot be
  said of part of a flat tensor: its `grad` raises, and `split_unused(model, optimizer)` before a step gives the optimizer
  single parameters. torch's functions find no names in such an optimizer; its own `state_dict()` is for the same rank.
- Element-wise operations, and so optimizers' steps, run on local ranges; norms are those of whole tensors. Others gather,
  so every rank must call them, and views that are no ranges of elements, as of a column or transposed, are refused.
- `placements` reads `Replicate()`, since no placement of torch's says where a flat buffer is cut.
- What `torch.save` makes of a sharded tensor, a rank's own range, is read by the same rank of as many. Elsewhere torch's
  functions with the option full_state_dict=True serve.
- `torch.autograd.grad` of parameters, taken between forward and backward, gives a rank's own gradients, as under DDP and
  for what FSDP2 keeps gathered. A unit that was freed is not in the graph, also as under FSDP2.
- A number made of parameters, as a penalty, and `p.full_tensor()` have the mean of the ranks' gradients, so a rank may
  multiply them by its own data; under FSDP2 each rank's shard gets that rank's own. A plain tensor beside a sharded one in
  an element-wise operation is taken to be equal on all ranks.
- Random values are drawn whole, so equal seeds give what one process draws; replicas take the first one's.
- Parameters that were taken between a forward and its backward have gradients, but their values read as NaN later, so an
  optimizer of them is refused; those from before `fully_shard` are empty.

What cannot be done raises a `ShardError`, which says what to do (errors.py, refusals.py).
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
    from fsdp_lab.engine.errors import ShardError as ShardError
    from fsdp_lab.engine.extras.dtensor import FlatDTensor as FlatDTensor
    from fsdp_lab.engine.extras.memory import free as free
    from fsdp_lab.engine.extras.scaling import Scaler as Scaler, upcast_gradients as upcast_gradients
    from fsdp_lab.engine.flat import FlatBuffer as FlatBuffer
    from fsdp_lab.engine.mesh import ShardMesh as ShardMesh, build_mesh as build_mesh, known_groups as known_groups
    from fsdp_lab.engine.policy import MixedPrecisionPolicy as MixedPrecisionPolicy
    from fsdp_lab.engine.schedule import OffloadPolicy as OffloadPolicy, PrefetchPolicy as PrefetchPolicy
    from fsdp_lab.engine.state import (
        ParamShard as ParamShard,
        full_state as full_state,
        load_full_state as load_full_state,
        original_parameters as original_parameters,
        shards_of as shards_of,
        split_unused as split_unused,
    )
    from fsdp_lab.engine.unit import Unit as Unit, UnitState as UnitState

# Imported at their first use, since Specs and the planner read the schedule where torch is not installed.
_NAMES = {
    "api": "UnshardHandle flats_of fully_shard no_sync parameter_groups register_fsdp_forward_method reshard runtime_of "
    "runtimes_of sharded_parameters units_of unshard",
    "extras.dtensor": "FlatDTensor",
    "errors": "ShardError",
    "flat": "FlatBuffer",
    "extras.memory": "free",
    "mesh": "ShardMesh build_mesh known_groups",
    "policy": "MixedPrecisionPolicy",
    "extras.scaling": "Scaler upcast_gradients",
    "schedule": "OffloadPolicy PrefetchPolicy",
    "state": "ParamShard full_state load_full_state original_parameters shards_of split_unused",
    "unit": "Unit UnitState",
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}

__all__ = sorted(_HOMES)
if not TYPE_CHECKING:  # a `__getattr__` would let any name pass
    __getattr__, __dir__ = lazy_names(__name__, _HOMES)
