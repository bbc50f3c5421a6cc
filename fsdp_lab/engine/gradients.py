"""Gradients of one flat buffer: collected during a backward, and given to the optimizer when they have been reduced.

Gradients stay as autograd gave them until their unit's backward is over; then `GradientBuffer` copies them into one tensor,
`unsharded`. A buffer from the first gradient on would be there when a unit's backward begins, which is where activations are
at their most, and the root's through the whole backward. `Reduction` (reduction.py) brings it to this rank's shard [n] of
the mean.

Note: which gradients came. A gradient that did not come is told from one that is zero, on every rank alike: the optimizer
moves a parameter whose gradient is zero, by its momentum or weight decay, and leaves one without. Ranks may differ in what
they used. So each rank's part of `unsharded` ends with one element for each parameter, a count: 1 where a gradient came on
the rank that sends it, else 0. The reduce-scatter adds the counts beside the gradients. Of a parameter whose gradient did
not come here, the host reads the count when the gradient is asked for; where all came, it reads nothing.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from fsdp_lab.engine.buffers import empty
from fsdp_lab.engine.errors import ShardError
from fsdp_lab.engine.extras.dtensor import FlatDTensor, Norms
from fsdp_lab.engine.extras.flat_tensor import FlatPlacement
from fsdp_lab.engine.layout import Chunks, Layout
from fsdp_lab.engine.mesh import ShardMesh
from fsdp_lab.engine.parameters import Region
from fsdp_lab.engine.policy import ShardPolicy


@dataclass(eq=False)
class Taken:
    """A whole gradient on its way to the shards, of which `arrived` came on this rank."""

    tensor: Tensor  # [F * n'], zero where nothing came
    arrived: frozenset[int]


class GradientBuffer:
    """See the module.

    A gradient that a caller sets is kept apart, as it is: what he took from `.grad` before, and may set again, stays as it
    was. Who asks for all gradients as one tensor gets a new one, with those that were kept apart.

    Attributes:
        pieces: by parameter, what came from autograd and is not in `unsharded` yet.
        unsharded: [F * n'] from the end of a backward to its reduction; without communication it stays.
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
        self.chunks = Chunks.of(layout, counted=mesh.world_size > 1)
        self.unsharded: Tensor | None = None
        self.reduced: Tensor | None = None
        self.pieces: dict[int, Tensor] = {}
        self._parts: Sequence[Tensor] = ()  # the chunks of `unsharded`
        self._arrived: set[int] = set()
        self._present: set[int] = set()  # parameters that have a gradient, as far as counts have been read
        self._unread: list[Tensor] = []  # counts of backwards in which not all came here, [P] each
        self._given: dict[int, FlatDTensor] = {}  # gradients that a caller set
        self._apart: set[int] = set()  # parameters of which `reduced` has none, or another than theirs
        self._views: list[FlatDTensor] = []  # of `_viewed`, by parameter
        self._viewed: Tensor | None = None
        self.stepped_as: dict[
            Hashable, type
        ] = {}  # by group: the form in which an optimizer stepped by these gradients
        rank = mesh.shard_rank
        self._own = [layout.in_shard(slot, rank) for slot in layout.slots]
        cuts = sorted({0, layout.shard_numel, *(end for own in self._own for end in own)})
        self._shard_sizes = [stop - start for start, stop in itertools.pairwise(cuts)]
        self._chunk_of = [cuts.index(start) for start, _ in self._own]
        self.placements = [placement_of(layout, mesh, slot.offset, slot.stop) for slot in layout.slots]
        self.regions = {group: self.region(group) for group in layout.regions}
        self._region_views: dict[Hashable, FlatDTensor] = {}  # of `_viewed_regions`
        self._viewed_regions: Tensor | None = None

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
        if i in self.pieces:
            self.collect()
        self.pieces[i] = grad

    @property
    def is_waiting(self) -> bool:
        """True if gradients have come that were not taken yet."""
        return self.unsharded is not None or bool(self.pieces)

    def collect(self) -> None:
        """Copy what came into `unsharded`, in the dtype of the reduction; added where something came before."""
        pieces, self.pieces = self.pieces, {}
        if not pieces:
            return
        if self.unsharded is None:
            dtype = self.policy.reduced_dtype(self.gathered)
            pool = None if self.policy.shard_optimizer_only else self.mesh.buffer_pool
            self.unsharded = empty(pool, self.chunks.numel, dtype, self.mesh.device)
            self._parts = self.unsharded.split_with_sizes(self.chunks.sizes)
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for i, grad in pieces.items():
            places = self.chunks.places[i]
            if len(places) == 1:
                cut = [(self._parts[places[0][0]].view(grad.shape), grad)]
            else:
                flat = grad.reshape(-1)
                cut = [(self._parts[chunk], flat[start:stop]) for chunk, start, stop in places]
            if i in self._arrived:
                for target, source in cut:
                    target.add_(source)
            else:
                for target, source in cut:
                    targets.append(target)
                    sources.append(source)
        self._arrived.update(pieces)
        if targets:
            torch._foreach_copy_(targets, sources)

    def drop(self) -> None:
        """Forget what came."""
        self.unsharded, self._parts, self.pieces, self._arrived = None, (), {}, set()

    def forget(self) -> None:
        """All gradients, reduced or not."""
        self.drop()
        self._clear()
        self._views = []

    def _clear(self) -> None:
        self.reduced, self._given, self._present, self._apart, self._unread = None, {}, set(), set(), []
        self._region_views, self._viewed_regions, self._viewed, self.stepped_as = {}, None, None, {}

    def take(self) -> Taken | None:
        """The whole gradient with its counts. None where none came at all."""
        self.collect()
        if self.unsharded is None:
            return None
        gradient, parts, arrived = self.unsharded, self._parts, frozenset(self._arrived)
        self.unsharded, self._parts, self._arrived = None, (), set()
        absent = [i for i in range(len(self.layout.slots)) if i not in arrived]
        nothing = [parts[chunk] for chunk in self.chunks.padding]
        nothing += [parts[chunk] for i in absent for chunk, _, _ in self.chunks.places[i]]
        if nothing:
            torch._foreach_zero_(nothing)
        if self.chunks.counts:
            n = self.layout.shard_numel
            counts = gradient.view(-1, self.chunks.part_numel)[:, n : n + self.chunks.counts]
            counts.fill_(1)
            for i in absent:
                counts[:, i] = 0
        return Taken(gradient, arrived)

    def accumulate(self, shard: Tensor, arrived: frozenset[int], counts: Tensor | None) -> None:
        """shard: [n], reduced, in the master's dtype and place or in the reduce dtype. `arrived` on this rank. counts: [P],
        on how many ranks each came, where that is not known here."""
        self._region_views = {}
        self._present |= arrived
        if counts is not None:
            self._unread.append(counts)
        for i in self._apart:
            part = shard[slice(*self._own[i])]
            if self.has_gradient(i):
                self._given.setdefault(i, self._view(torch.zeros_like(part), i)).add_(self._view(part, i))
            part.zero_()
        if self.reduced is None:
            self.reduced = shard
        else:
            self.reduced.add_(shard)
        self.stepped_as = {}

    # -- for the optimizer --------------------------------------------------------------------------------------------

    def local(self) -> Tensor | None:
        """[n], zero in padding and where a parameter has no gradient; None where none has."""
        if self._apart and self._present:
            merged = torch.zeros_like(self.master) if self.reduced is None else self.reduced.clone()
            for i in self._apart:
                given = self._given.get(i)
                merged[slice(*self._own[i])] = 0 if given is None else given.to_local()
            self.reduced, self._given, self._apart = merged, {}, set()
        return self.reduced

    def has_gradient(self, i: int) -> bool:
        if self._unread and i not in self._present:
            came = torch.stack(self._unread).ne(0).any(dim=0).tolist()
            self._unread = []
            self._present.update(j for j, has_come in enumerate(came) if has_come)
        return i in self._present

    def gradient(self, i: int) -> FlatDTensor | None:
        """The reduced gradient of a parameter: what was set, or a view."""
        if i not in self._present and not (self._unread and self.has_gradient(i)):
            return None
        if self._given and i in self._given:
            return self._given[i]
        if self._viewed is not self.reduced:
            self._view_reduced()
        return self._views[i]

    def _view_reduced(self) -> None:
        """Let views show the gradients of now. They are kept from step to step; what a caller holds stays as it was."""
        reduced = self.reduced
        assert reduced is not None
        norms = Norms(reduced, self._own, self.mesh)
        views, self._views, self._viewed = self._views or [None] * len(self._own), [], reduced  # type: ignore[list-item]
        parts = reduced.split_with_sizes(self._shard_sizes)
        for i, (start, stop) in enumerate(self._own):
            view: Any = views[i]
            part = parts[self._chunk_of[i]] if start < stop else reduced[:0]
            views[i] = None  # type: ignore[call-overload]
            if view is None or part.dtype != view.dtype or sys.getrefcount(view) > 2 or view._use_count() > 1:
                view = self._view(part, i)
            view._local_tensor = view.counted = part
            view.norm_beside = partial(norms.norm, i)
            self._views.append(view)

    def set_gradient(self, i: int, value: Tensor | None) -> None:
        """A value, whole or cut as the parameter is; None: forget it."""
        given = None if value is None else self._cut(i, value)
        if self._unread:
            self.has_gradient(i)
        self._region_views = {}
        self._given.pop(i, None)
        self._present.discard(i)
        self._apart.add(i)
        if given is not None:
            self._given[i] = given
            self._present.add(i)
        if self._present <= self._given.keys():  # nothing of it is a gradient any more
            given_here, present = self._given, self._present
            self._clear()
            self._given, self._present, self._apart = given_here, present, set(given_here)

    def _cut(self, i: int, value: Tensor) -> FlatDTensor:
        """The value itself, where it is cut as the parameter is."""
        like = self._view(self.master[slice(*self._own[i])], i)
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
        return FlatDTensor.of(part, self.layout.slots[i].shape, self.placements[i])

    def add(self, i: int, value: Tensor) -> None:
        """Adds to a parameter's gradient a value that did not come through the gathered buffer."""
        present = self.gradient(i)
        if present is None:
            self.set_gradient(i, value)
        else:
            present.add_(value)

    @cached_property
    def _groups(self) -> dict[Hashable, list[int]]:
        slots = self.layout.slots
        return {group: [i for i, s in enumerate(slots) if s.group == group] for group in self.layout.regions}

    def gradient_of_region(self, group: Hashable) -> Tensor | None:
        """Raises ShardError where some of its parameters have a gradient and others have none."""
        if self._region_views and self._viewed_regions is self.reduced and group in self._region_views:
            return self._region_views[group]
        some = self._groups[group]
        if self._unread:
            self.has_gradient(some[0])
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
        if self._viewed_regions is not local:
            self._region_views, self._viewed_regions = {}, local
        view: Any = self.regions[group].like(local[start:stop])
        self._region_views[group] = view
        return view  # type: ignore[no-any-return]

    def set_gradient_of_region(self, group: Hashable, value: Tensor | None) -> None:
        if value is None and len(self._groups) == 1:  # the usual end of a step
            self._clear()
            return
        begin = self.layout.regions[group][0]
        for i in self._groups[group]:
            slot = self.layout.slots[i]
            part = None if value is None else value[slot.offset - begin : slot.stop - begin].view(slot.shape)
            self.set_gradient(i, part)

    def upcast(self) -> None:
        """Bring gradient shards that were kept in a lower precision to the master's dtype."""
        if self.reduced is not None:
            self.reduced = self.reduced.to(self.master.dtype)


def placement_of(layout: Layout, mesh: ShardMesh, start: int, stop: int) -> FlatPlacement:
    """The placement of elements [start, stop) of a buffer."""
    return FlatPlacement(mesh=mesh, ranges=tuple(map(layout.shard, range(layout.factor)))).part(start, stop)
