"""`memory_stats`: the bytes that one rank holds of a sharded model now, by class; and `free`, which frees all of them.

They are counted from storages, each once, and meet the formulas of ZeRO (arXiv 1910.02054, section 5) and FSDP (arXiv
2304.11277, section 3.2) exactly. For Psi parameters in all and Psi(u) in a unit, F ranks that share a copy, and element
sizes s of the master, g of gathered parameters, r of reduced gradients:

    parameters            s * Psi / F                     always
    unsharded             g * sum of Psi(u)               of the units that are gathered: limit + 1 at most, or as many as
                                                          calls are nested; ZeRO-2: all, from the forward to their backward;
                                                          ZeRO-1: all, always
    copies                g * Psi(u) / F                  offload: what is sent, while a gather is in flight, or, with
                                                          "optimizer", of all units, always
                          g * Psi(u) / F'                 what F' ranks share between forward and backward
    unsharded gradients   g * Psi(u)                      of the units whose backward is under way, one inside the other, as
                                                          far as they have come
                          r * Psi(u)                      of one whose reduction is; without communication: of all
    gradients             s * Psi / F                     of the units whose reduction is over; ZeRO-1: r * Psi, whole
    optimizer             2 s * Psi / F                   AdamW, from its first step on

With F = 1 and g = s nothing is gathered, and a whole gradient is the shard. What a rank holds of Psi / F is a whole
number of elements; the sum over the F ranks is exact. Padding is a class of its own. Activations are not the
engine's.

So the peak of a step with AdamW and F > 1 is the largest of these, where A is what the model itself holds at that moment:
the batch, buffers, activations, and gradients that have come and wait for the end of their unit's backward. u is the unit at
work in the backward, u- the one gathered ahead of its turn, u+ the one before it, and S(u) = s / F times the parameters of
all units whose gradients have been reduced by then:

    3 s Psi / F + g (Psi(root) + Psi(u)) + A                                        the loss; u is the last unit
    3 s Psi / F + g (Psi(root) + Psi(u) + Psi(u-)) + (r + r / F) Psi(u+) + S(u) + A     a backward
    3 s Psi / F + g (Psi(root) + Psi(u-)) + r Psi(u) + S(u) + A                     its end: what came is made one tensor

A forward holds 3 s Psi / F + g (Psi(root) + Psi(u) + Psi(u+)) + A, with u+ gathered ahead: no more than the backward of u,
in which A has grown, unless r < g. With ZeRO-2 all units whose backward is still to come are gathered.

What is sent over the lab's wire is there once: parts of an all-gather come to their places, and a reduce-scatter runs in
place, over Gloo with room for one part (r / F). Through shared memory that is not needed: r / F is there at the end alone,
when the sum is taken out. What is gathered and sent is then in a pool of the ranks' own (buffers.py), and is counted in the
same classes; free blocks of the pool are not. torch's own groups over Gloo hold what is sent twice. FSDP2 holds as much as
the engine: the unit gathered ahead, and the gradient that was sent last with its sum.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn

from fsdp_lab.engine.api import flats_of, runtime_of, units_of
from fsdp_lab.engine.dtensor import FlatDTensor
from fsdp_lab.engine.errors import check_module, check_optimizer
from fsdp_lab.engine.flat import FlatBuffer
from fsdp_lab.engine.gradients import GradientBuffer
from fsdp_lab.engine.hooks import unit_hooks
from fsdp_lab.engine.layout import Range


@dataclass(frozen=True, kw_only=True)
class MemoryBreakdown:
    """See the module."""

    parameters_bytes: int = 0
    unsharded_bytes: int = 0
    copies_bytes: int = 0
    unsharded_gradients_bytes: int = 0
    gradients_bytes: int = 0
    optimizer_bytes: int = 0
    padding_bytes: int = 0  # in all of these
    counters_bytes: int = 0  # what an optimizer keeps once for each tensor, as its step

    @property
    def total_bytes(self) -> int:
        return sum(getattr(self, f.name) for f in fields(self))


def memory_stats(module: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> MemoryBreakdown:
    """The memory of a root and of the optimizer over its parameters, flat or not. Not collective."""
    if optimizer is not None:
        check_optimizer(optimizer)
    totals: Counter[str] = Counter()
    seen: set[int] = set()
    for kind, owner, tensor, region in _held(module, optimizer):
        storage = tensor.untyped_storage()
        if not storage.size() or storage.data_ptr() in seen:
            continue
        seen.add(storage.data_ptr())
        parameters = owner.layout.covered(_bounds(owner, tensor, region)) * tensor.itemsize
        totals[kind] += parameters
        totals["padding_bytes"] += storage.nbytes() - parameters
    if optimizer is not None:
        slots = [slot for state in optimizer.state.values() for slot in state.values() if isinstance(slot, Tensor)]
        totals["counters_bytes"] = sum(slot.nbytes for slot in slots if not slot.dim())
    return MemoryBreakdown(**totals)


Owner = FlatBuffer | GradientBuffer  # each has a layout and a mesh
Held = tuple[str, Owner, Tensor, Range]  # the class, whose it is, and its region where it may have the length of one


def _held(module: nn.Module, optimizer: torch.optim.Optimizer | None) -> Iterator[Held]:
    """Every tensor; of two with one storage the first counts."""
    flats, nowhere = flats_of(module), (0, 0)
    for flat in flats:
        yield "parameters_bytes", flat, flat.master, nowhere
        if flat.is_gathered:
            yield "unsharded_bytes", flat, flat.full, nowhere
        for t in (flat.device_shard, flat.post_forward_shard):
            if t is not None:
                yield "copies_bytes", flat, t, nowhere
        if flat.gradients.unsharded is not None:
            yield "unsharded_gradients_bytes", flat, flat.gradients.unsharded, nowhere
        yield from (("unsharded_gradients_bytes", flat, t, slot) for t, slot in flat.gradients.pieces)
    for flat, t in (sent for unit in units_of(module) for sent in unit.sent):
        yield "copies_bytes", flat, t, nowhere
    for reduction in runtime_of(module).reducing:
        if reduction.unsharded is not None:
            yield "unsharded_gradients_bytes", reduction.target, reduction.unsharded, nowhere
        yield "gradients_bytes", reduction.target, reduction.shard, nowhere
    for flat in flats:
        yield from _of_optimizer(flat, optimizer)


def _of_optimizer(flat: FlatBuffer, optimizer: torch.optim.Optimizer | None) -> Iterator[Held]:
    first, _ = flat.layout.shard(flat.mesh.shard_rank)
    if flat.gradients.reduced is not None:
        yield "gradients_bytes", flat, flat.gradients.reduced, (0, 0)
    for p, (start, stop) in flat.optimizer_parameters():
        bounds = first + start, first + stop
        for slot in optimizer.state.get(p, {}).values() if optimizer is not None else ():
            if isinstance(slot, FlatDTensor):
                yield "optimizer_bytes", flat, slot._local_tensor, bounds


def _bounds(owner: Owner, t: Tensor, region: Range) -> Range:
    """The range of the buffer that a storage stands for: all of it, a shard, a smaller group's part, or a region."""
    layout, mesh, n = owner.layout, owner.mesh, t.untyped_storage().nbytes() // t.itemsize
    if n == region[1] - region[0]:
        return region
    if n == layout.numel:
        return 0, n
    group = mesh.post_forward_group
    if group is not None and n == layout.numel // group.size():
        return group.rank() * n, (group.rank() + 1) * n
    return layout.shard(mesh.shard_rank)


def free(module: nn.Module, *, busy: Collection[int] = ()) -> None:
    """Remove the hooks and free all storage at once, even if it is still referenced. The model cannot be used afterwards.

    `busy`: addresses of storage that a collective may still use, as after an abort; it is freed with its last reference.
    """
    check_module(module)
    hooks = {h.unit: h for h in map(unit_hooks, module.modules()) if h is not None}
    for unit, h in hooks.items():
        h.remove()
        for flat in unit.flats:
            _release(flat, busy)


def _release(flat: FlatBuffer, busy: Collection[int]) -> None:
    for storage in [t.untyped_storage() for t in flat.tensors()]:
        if storage.resizable() and storage.size() and storage.data_ptr() not in busy:
            storage.resize_(0)
    flat.free_gathered(busy)
    flat.gradients.forget()  # what is in memory that ranks share is free when nobody has it
