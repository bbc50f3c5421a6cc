"""Gradients of one flat buffer: collected during a backward, and given to the optimizer when they have been reduced.

Gradients stay as autograd gave them until their unit's backward is over; then `GradientBuffer` copies them into one tensor,
`unsharded` [F * n]. A buffer from the first gradient on would be there when a unit's backward begins, which is where
activations are at their most, and the root's through the whole backward. `Reduction` (reduction.py) brings it to this rank's
shard [n] of the mean.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import cached_property, partial

import torch
from torch import Tensor, distributed as dist

from fsdp_lab.engine.buffers import empty
from fsdp_lab.engine.collectives import Group
from fsdp_lab.engine.errors import ShardError
from fsdp_lab.engine.extras.dtensor import FlatDTensor, Norms
from fsdp_lab.engine.extras.flat_tensor import FlatPlacement
from fsdp_lab.engine.layout import Layout, Range
from fsdp_lab.engine.mesh import ShardMesh
from fsdp_lab.engine.parameters import Region
from fsdp_lab.engine.policy import ShardPolicy


class GradientBuffer:
    """See the module.

    A gradient that did not come is told from one that is zero, on every rank alike: a rank where a parameter got none sends
    -0.0 in its place, and one where it did sends no -0.0 as the first element of what a rank will hold. Only a sum of -0.0
    alone is -0.0, so a parameter without a gradient on this rank has one if another rank sent it. Who holds no element of a
    parameter cannot see that, and is told by those who do at the end of the backward: see `tell_each_other`.

    A gradient that a caller sets is kept apart, as it is: what he took from `.grad` before, and may set again, stays as it
    was. Who asks for all gradients as one tensor gets a new one, with those that were kept apart.

    Attributes:
        unsharded: [F * n] from the end of a backward to its reduction; without communication it stays.
        reduced: [n], the gradient of the shard, where any parameter has one; zero where another has none.
        regions: optimizer group -> what an optimizer may be given for its parameters.
    """

    def __init__(
        self,
        layout: Layout,
        mesh: ShardMesh,
        policy: ShardPolicy,
        master: Tensor,
        gathered: torch.dtype,
        names: list[str],
    ) -> None:
        self.gathered, self.names = gathered, names  # the dtype of gathered parameters; in messages
        self.layout, self.mesh, self.policy, self.master = layout, mesh, policy, master
        self.unsharded: Tensor | None = None
        self.reduced: Tensor | None = None
        self._pieces: dict[int, Tensor] = {}  # by parameter: what came and is not in `unsharded` yet
        self._present: set[int] = set()  # parameters that have a gradient
        self._given: dict[int, FlatDTensor] = {}  # those of them that a caller set
        self._apart: set[int] = set()  # parameters of which `reduced` has none, or another than theirs
        self._arrived: set[int] = set()
        self._firsts: tuple[frozenset[int], Tensor] | None = None  # the parameters that came last, and their elements
        self._norms: Norms | None = None  # of what is reduced
        self.stepped_as: dict[
            Hashable, type
        ] = {}  # by group: the form in which an optimizer stepped by these gradients
        self.regions = {group: self.region(group) for group in layout.regions}

    def region(self, group: Hashable) -> Region:
        start, stop = self.layout.region_in_shard(group, self.mesh.shard_rank)
        begin, end = self.layout.regions[group]
        placement = placement_of(self.layout, self.mesh, begin, end)
        region = Region.of(
            self.master[start:stop], (end - begin,), placement, requires_grad=self.master.is_floating_point()
        )
        region.gradients, region.group = self, group
        return region

    # -- from autograd ------------------------------------------------------------------------------------------------

    def receive(self, i: int, grad: Tensor) -> None:
        """A parameter's gradient, from autograd; added where one came before. Raises ShardError for one that is sparse, or
        that has a graph, of which reduced gradients would know nothing."""
        if grad.layout is not torch.strided:
            raise ShardError(f"the gradient of {self.names[i]} is sparse, and only dense ones can be reduced; make its "
                             "module with sparse=False, or pass the parameter in ignored_params")  # fmt: skip
        if grad.requires_grad:
            raise ShardError(
                f"the gradient of {self.names[i]} has a graph (create_graph=True), which its reduction would cut; take "
                "gradients of inputs by torch.autograd.grad(..., create_graph=True), and call backward without it"
            )
        if i in self._pieces:
            self.collect()
        self._pieces[i] = grad.detach()

    @property
    def is_waiting(self) -> bool:
        """True if gradients have come that were not taken yet."""
        return self.unsharded is not None or bool(self._pieces)

    @property
    def pieces(self) -> list[tuple[Tensor, Range]]:
        """Gradients as they came, each with its place in the buffer."""
        return [(grad, (self.layout.slots[i].offset, self.layout.slots[i].stop)) for i, grad in self._pieces.items()]

    def collect(self) -> None:
        """Copy what came into `unsharded`, in the dtype of the reduction; added where something came before."""
        if self._pieces and self.unsharded is None:
            dtype = self.policy.reduced_dtype(self.gathered)
            pool = None if self.policy.shard_optimizer_only else self.mesh.buffer_pool
            self.unsharded = empty(pool, self.layout.numel, dtype, self.mesh.device)
        pieces, self._pieces = self._pieces, {}
        for i in list(pieces):
            slot, grad = self.layout.slots[i], pieces.pop(i)
            assert self.unsharded is not None
            place = self.unsharded[slot.offset : slot.stop].view(slot.shape)
            if i in self._arrived:
                place.add_(grad)
            else:
                self._arrived.add(i)
                place.copy_(grad)

    def drop(self) -> None:
        """Forget what came."""
        self.unsharded, self._pieces, self._arrived = None, {}, set()

    def forget(self) -> None:
        """All gradients, reduced or not."""
        self.drop()
        self.reduced, self._given, self._present, self._apart = None, {}, set(), set()

    def take(self) -> tuple[Tensor, frozenset[int]] | None:
        """[F * n], zero in padding and -0.0 where no gradient came, and the parameters whose gradients came. None where
        none came at all."""
        self.collect()
        gradient, self.unsharded = self.unsharded, None
        arrived, self._arrived = frozenset(self._arrived), set()
        if gradient is None:
            return None
        end = 0
        for i in sorted(range(len(self.layout.slots)), key=lambda i: self.layout.slots[i].offset):
            slot = self.layout.slots[i]
            gradient[end : slot.offset].zero_()
            end = max(end, slot.stop)  # one without elements may begin where another does
            if i not in arrived:
                gradient[slot.offset : slot.stop].fill_(complex(-0.0, -0.0) if gradient.is_complex() else -0.0)
        gradient[end:].zero_()
        if self._firsts is None or self._firsts[0] != arrived:
            self._firsts = arrived, self._first_elements(arrived)
        firsts = self._firsts[1]
        gradient.index_add_(0, firsts, gradient.new_zeros(len(firsts)))
        return gradient, arrived

    def _first_elements(self, arrived: frozenset[int]) -> Tensor:
        """The first elements of what each rank holds of these parameters."""
        n = max(1, self.layout.shard_numel)  # 0: of parameters without elements
        slots = [self.layout.slots[i] for i in arrived]
        cuts = {s.offset for s in slots if s.numel}
        cuts.update(cut for s in slots for cut in range(-(-s.offset // n) * n, s.stop, n))
        return torch.tensor(sorted(cuts), dtype=torch.int64, device=self.mesh.device)

    def accumulate(self, shard: Tensor, arrived: frozenset[int]) -> None:
        """shard: [n], reduced, in the master's dtype and place or in the reduce dtype; `arrived` on this rank."""
        present = arrived | self._sent_by_others(shard, arrived)
        for i in self._apart:
            part = shard[slice(*self._own(i))]
            if i in present:
                self.add(i, self._view(part.clone(), i))
            part.zero_()
        if self.reduced is None:
            self.reduced = shard
        else:
            self.reduced.add_(shard)
        self._present |= present
        self.stepped_as = {}

    @cached_property
    def held_by_some(self) -> list[int]:
        """Parameters of which some ranks of the shard group hold no element."""
        shards = [self.layout.shard(rank) for rank in range(self.layout.factor)]
        return [
            i
            for i, slot in enumerate(self.layout.slots)
            if slot.numel and any(slot.stop <= start or stop <= slot.offset for start, stop in shards)
        ]

    def has_come(self, i: int) -> None:
        """Called where another rank holds a gradient of a parameter of which this one holds no element."""
        if i not in self._present:
            self._present.add(i)
            if self.reduced is None:
                self._apart.add(i)
            if i in self._apart:
                self._given[i] = self._view(self.master.new_empty(0), i)

    def _sent_by_others(self, shard: Tensor, arrived: frozenset[int]) -> set[int]:
        absent = [i for i in range(len(self.layout.slots)) if i not in arrived]
        firsts = {i: self._own(i)[0] for i in absent if self._own(i)[0] < self._own(i)[1]}
        if not firsts:  # so that a device is not waited for
            return set()
        values = shard[list(firsts.values())]
        parts = torch.view_as_real(values) if values.is_complex() else values.unsqueeze(-1)
        nothings = (torch.signbit(parts) & (parts == 0)).all(dim=-1).tolist()
        return {i for i, nothing in zip(firsts, nothings, strict=True) if not nothing}

    # -- for the optimizer --------------------------------------------------------------------------------------------

    def local(self) -> Tensor | None:
        """[n], zero in padding and where a parameter has no gradient; None where none has."""
        if self._apart and self._present:
            merged = torch.zeros_like(self.master) if self.reduced is None else self.reduced.clone()
            for i in self._apart:
                given = self._given.get(i)
                merged[slice(*self._own(i))] = 0 if given is None else given.to_local()
            self.reduced, self._given, self._apart = merged, {}, set()
        return self.reduced

    def has_gradient(self, i: int) -> bool:
        return i in self._present

    def gradient(self, i: int) -> FlatDTensor | None:
        """The reduced gradient of a parameter: what was set, or a view."""
        if i not in self._present:
            return None
        if i in self._given:
            return self._given[i]
        assert self.reduced is not None
        if self._norms is None or self._norms.whole() is not self.reduced:
            self._norms = Norms(self.reduced, lambda: list(map(self._reduced_view, range(len(self.layout.slots)))))
        view = self._reduced_view(i)
        view.norm_beside = partial(self._norms.norm, i)
        return view

    def _reduced_view(self, i: int) -> FlatDTensor:
        assert self.reduced is not None
        return self._view(self.reduced[slice(*self._own(i))], i)

    def set_gradient(self, i: int, value: Tensor | None) -> None:
        """A value, whole or cut as the parameter is; None: forget it."""
        given = None if value is None else self._cut(i, value)
        self._given.pop(i, None)
        self._present.discard(i)
        self._apart.add(i)
        if given is not None:
            self._given[i] = given
            self._present.add(i)
        if self._present <= self._given.keys():  # nothing of it is a gradient any more
            self.reduced, self._apart = None, set(self._given)
            self.stepped_as = {}

    def _cut(self, i: int, value: Tensor) -> FlatDTensor:
        """The value itself, where it is cut as the parameter is."""
        like = self._view(self.master[slice(*self._own(i))], i)
        if value.shape != like.shape:
            raise ShardError(
                f"{self.names[i]} has the shape {tuple(like.shape)}, and was given a gradient of {tuple(value.shape)}; give "
                "it one of its own shape, whole or as .grad shows it"
            )
        if isinstance(value, FlatDTensor) and value.flat_placement == like.flat_placement and value.dtype == like.dtype:
            return value
        return torch.empty_like(like).copy_(value.detach())  # type: ignore[return-value]

    def _view(self, part: Tensor, i: int) -> FlatDTensor:
        """A view of this rank's part, as the parameter's gradient."""
        slot = self.layout.slots[i]
        return FlatDTensor.of(part, slot.shape, placement_of(self.layout, self.mesh, slot.offset, slot.stop))

    def add(self, i: int, value: Tensor) -> None:
        """Adds to a parameter's gradient a value that did not come through the gathered buffer."""
        present = self.gradient(i)
        if present is None:
            self.set_gradient(i, value)
        else:
            present.add_(value)

    def gradient_of_region(self, group: Hashable) -> Tensor | None:
        """Raises ShardError where some of its parameters have a gradient and others have none."""
        some = [i for i, slot in enumerate(self.layout.slots) if slot.group == group]
        absent = [i for i in some if i not in self._present]
        if len(absent) == len(some):
            return None
        if absent:
            raise ShardError(
                f"{self.names[absent[0]]} has no gradient, and a flat optimizer would "
                "move it all the same; give the optimizer model.parameters() in place of sharded_parameters(model), or call "
                "split_unused(model, optimizer) before each step"
            )
        local, (start, stop) = self.local(), self.layout.region_in_shard(group, self.mesh.shard_rank)
        assert local is not None
        return self.regions[group].like(local[start:stop])

    def set_gradient_of_region(self, group: Hashable, value: Tensor | None) -> None:
        begin = self.layout.regions[group][0]
        for i, slot in enumerate(self.layout.slots):
            if slot.group == group:
                part = None if value is None else value[slot.offset - begin : slot.stop - begin].view(slot.shape)
                self.set_gradient(i, part)

    def upcast(self) -> None:
        """Bring gradient shards that were kept in a lower precision to the master's dtype."""
        if self.reduced is not None:
            self.reduced = self.reduced.to(self.master.dtype)

    def _own(self, i: int) -> Range:
        return self.layout.in_shard(self.layout.slots[i], self.mesh.shard_rank)


def tell_each_other(buffers: Sequence[GradientBuffer]) -> None:
    """Let ranks that hold no element of a parameter know that it has a gradient; one all-reduce in each shard group. Else
    it would be None on some ranks alone, and their norms and optimizer states would leave it out."""
    by_group: dict[Group, list[tuple[GradientBuffer, int]]] = {}
    for buffer in buffers:
        if buffer.mesh.shard_group is not None:
            by_group.setdefault(buffer.mesh.shard_group, []).extend((buffer, i) for i in buffer.held_by_some)
    for group, asked in by_group.items():
        if not asked:
            continue
        here = [buffer.has_gradient(i) for buffer, i in asked]
        flags = _on_device(here, asked[0][0].mesh)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
        if not all(here):
            for (buffer, i), has_come in zip(asked, flags.tolist(), strict=True):
                if has_come:
                    buffer.has_come(i)


def _on_device(flags: Sequence[bool], mesh: ShardMesh) -> Tensor:
    """The flags as bytes on the device, without waiting for it."""
    on_host = torch.tensor(flags, dtype=torch.uint8)
    if mesh.streams is None:
        return on_host
    return mesh.streams.host_memory(len(flags), torch.uint8).copy_(on_host).to(mesh.device, non_blocking=True)


def placement_of(layout: Layout, mesh: ShardMesh, start: int, stop: int) -> FlatPlacement:
    """The placement of elements [start, stop) of a buffer."""
    return FlatPlacement(mesh=mesh, ranges=tuple(map(layout.shard, range(layout.factor)))).part(start, stop)
