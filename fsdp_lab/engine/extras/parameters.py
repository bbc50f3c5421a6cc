"""Sharded parameters as torch's optimizers, clipping and checkpoints know them: `ShardedBuffer` makes them.

    ShardedParameter  what `module.parameters()` yields between steps: its name and shape, and this rank's range of it
    Region            all parameters of a buffer that are in one optimizer group, as one tensor of one dimension

A sharded parameter's `grad` is its reduced gradient. It is a view of the buffer's, made when it is asked for, so parameters
and regions show the same gradients; setting one to None forgets it."""

import itertools
import sys
import weakref
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from fsdp_lab.base.tensors import LeafOfSharded, take_gradient
from fsdp_lab.engine.buffer import FlatBuffer, Gradients
from fsdp_lab.engine.collectives import ShardError
from fsdp_lab.engine.extras.dtensor import FlatDTensor
from fsdp_lab.engine.extras.optimizers import Steppable
from fsdp_lab.engine.extras.placement import FlatPlacement, FlatRun, Norms
from fsdp_lab.engine.layout import Range


class ShardedParameter(Steppable):
    """See the module."""

    _is_param = True  # by which torch recognises an nn.Parameter
    flat: "ShardedBuffer"  # that made it
    number: int  # which of the buffer's parameters
    gradients: "ShardedGradients"
    seen: list[weakref.ref[Any]]  # what `.data` was, where somebody holds it

    @property
    def grad(self) -> Tensor | None:
        """The reduced gradient; with what autograd added to this tensor itself, as for a penalty on weights."""
        gradients = self.gradients
        if self.given:
            gradients.read_by.add(ShardedParameter)
        return gradients.gradient(self.number) if gradients.shown is None else gradients.shown[self.number]

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        self.gradients.set_gradient(self.number, value)

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """meta, until the values of what was built there are written."""
        flat = self.flat
        is_unwritten = not flat.has_values[self.number] and flat.master._version == flat.made_version
        return torch.device("meta") if is_unwritten else self._local_tensor.device

    @property
    def is_meta(self) -> bool:  # type: ignore[override]
        return self.device.type == "meta"

    @property
    def data(self) -> Tensor:
        seen = self.detach()
        self.seen = [*(ref for ref in self.seen if ref() is not None), weakref.ref(seen)]
        return seen

    @data.setter
    def data(self, value: Tensor) -> None:
        """A copy of other values. What `.data` was before, and a caller may set again, keeps its own."""
        if (value.dtype, value.shape, value.device.type) != (self.dtype, self.shape, self._local_tensor.device.type):
            raise ShardError(
                f"{self.fqn} is sharded, and cannot be given data of another shape, dtype or device, as by .to() or .half() "
                "of its module; choose dtypes by the mp_policy of fully_shard, and devices by its mesh"
            )
        value = value.clone() if any(ref() is value for ref in self.seen) else value
        for seen in (ref() for ref in self.seen):
            if seen is not None:
                seen._local_tensor = seen.counted = seen._local_tensor.clone()
        self.seen = []
        self.detach().copy_(value)

    def register_hook(self, hook: Any) -> Any:
        """Registers a hook that is called with this rank's own gradient, whole and before it is reduced, as under DDP."""
        return self.flat.parameters[self.number].register_hook(hook)  # type: ignore[no-untyped-call]

    def register_post_accumulate_grad_hook(self, hook: Callable[[Tensor], None]) -> RemovableHandle:
        """Registers a hook that is called when the gradient has been reduced."""
        handle = RemovableHandle(self.flat.reduce_hooks)
        self.flat.reduce_hooks[handle.id] = lambda: (
            hook(self) if self.flat.sharded[self.number] is self and self.gradients.has_gradient(self.number) else None
        )
        return handle

    @property
    def fqn(self) -> str:
        """The parameter's name in the root module."""
        return str(self.flat.names[self.number])


class UnshardedParameter(LeafOfSharded):
    """What modules hold while their unit is gathered: a leaf of autograd, which an optimizer cannot use."""

    given = False  # to an optimizer: who makes one asks for `is_leaf`

    @property
    def is_leaf(self) -> bool:  # type: ignore[override]
        self.given = True
        return True

    @property
    def grad(self) -> Tensor | None:
        """Raises ShardError for an optimizer where modules hold this no more, which has a gradient, and no values."""
        sharded: ShardedParameter = self.sharded
        module, attribute = sharded.flat.uses[sharded.number][0]
        if self.given and module._parameters.get(attribute) is not self:
            raise ShardError(
                f"an optimizer was made while {sharded.fqn} was gathered, and has no values to step now; make it before the "
                "forward, or after the backward"
            )
        return sharded.grad

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        self.sharded.grad = value


class Region(Steppable):
    """See the module."""

    _is_param = True
    gradients: "ShardedGradients"
    own: slice  # of this rank's shard

    @property
    def grad(self) -> Tensor | None:
        """Raises ShardError where some of the region's parameters have a gradient, and others have none."""
        if self.given:
            self.gradients.read_by.add(Region)
        return self.gradients.gradient_of_region(self.group)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        self.gradients.set_gradient_of_region(self.group, value)

    def __deepcopy__(self, memo: Any) -> Any:
        raise ShardError("a flat parameter is a part of its model, and not copied; take values from full_state(model)")


class _Replaced:
    """Stands for the gradients of what an optimizer has from before `load_state_dict(assign=True)`."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, _: str) -> Any:
        raise ShardError(
            f"load_state_dict(assign=True) has put other parameters into the model, and this is {self._name} from before; "
            "make the optimizer afterwards, or load without assign=True"
        )


class ShardedBuffer(FlatBuffer):
    """A `FlatBuffer` whose sharded parameters are `ShardedParameter`s.

    Note: shards that are mapped. Where shards lie in memory that all ranks of a host can read, the whole buffer can be a
    view of them, so that one copy of the parameters serves the host, and nothing is gathered. An all-gather then only waits
    until all ranks have stepped their optimizers. And a rank that steps its optimizer writes to what others read: so at the
    end of each forward and backward the ranks wait for each other. Inside `unshard`, where a caller may write to gathered
    parameters, they are copies."""

    gradients: "ShardedGradients"
    sharded: list[ShardedParameter]
    leaf = UnshardedParameter

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.gradients.mark_runs(self.master, self.sharded)

    def _make_gradients(self) -> "ShardedGradients":
        return ShardedGradients(self)

    def _make_sharded(self, i: int, *, requires_grad: bool) -> ShardedParameter:
        slot, placement = self.layout.slots[i], self.gradients.placements[i]
        made = ShardedParameter.of(self.own_part(i), slot.shape, placement, requires_grad=requires_grad)
        made.flat, made.number, made.seen = self, i, []
        made.gradients, made.group = self.gradients, slot.group
        if made.is_floating_point() or made.is_complex():
            watch: Any = Tensor.register_post_accumulate_grad_hook  # for what autograd adds to the tensor itself
            watch(made.requires_grad_(), lambda p: p.gradients.add(p.number, take_gradient(p)))
            made.requires_grad_(requires_grad)
        return made

    def for_optimizer(self, i: int) -> tuple[Region, int]:
        slot, rank = self.layout.slots[i], self.mesh.shard_rank
        (start, stop), (begin, _) = self.layout.in_shard(slot, rank), self.layout.region_in_shard(slot.group, rank)
        return self.gradients.regions[slot.group], start - begin if start < stop else 0

    def write_back(self) -> None:
        """Copy what was written into gathered parameters to the shard, element by element where bits differ."""
        assert not self.is_mapped or self.gathered.is_held, "they are copies"
        for p, view in zip(self.parameters, self._views, strict=True):
            if p.data_ptr() != view.data_ptr() and p.shape == view.shape:
                view.copy_(p.data)  # it was given other data
                p.data = view
        start, stop = self.layout.shard(self.mesh.shard_rank)
        now = self.full[start:stop].to(self.master.device)
        if self.dtype != self.master.dtype:
            # As bytes: -0.0 is not 0.0, and a NaN equals itself.
            bits, others = (t.unsqueeze(1).view(torch.uint8) for t in (now, self.master.to(self.dtype)))
            changed = (bits != others).any(dim=1)
            self.master.copy_(torch.where(changed, now.to(self.master.dtype), self.master))
        elif not self.is_view_of_master:
            self.master.copy_(now)
        self._versions = [p._version for p in self.parameters]
        self._gathered_version = self.master._version

    def replace(self, i: int) -> ShardedParameter:
        """Let modules hold another object for a parameter, as `load_state_dict(assign=True)` does; the values stay. What the
        caller gave to an optimizer before is refused at its step, which else would go on or do nothing."""
        old: Any = self.sharded[i]
        region: Any = self.gradients.regions[old.group]
        old.gradients, region.gradients = _Replaced(old.fqn), _Replaced("a part of it")
        made = self.sharded[i] = self.parameters[i].sharded = self._make_sharded(i, requires_grad=old.requires_grad)
        self.gradients.regions[made.group] = self.gradients.region(made.group)
        self._show(self.sharded)
        self.gradients.mark_runs(self.master, self.sharded)
        return made


class ShardedGradients(Gradients):
    """A gradient that a caller sets is kept apart, as it is: what he took from `.grad` before, and may set again, stays as
    it was. Who asks for all gradients as one tensor gets a new one, with those that were kept apart.

    Attributes:
        regions: optimizer group -> what an optimizer may be given for its parameters."""

    def __init__(self, flat: FlatBuffer) -> None:
        super().__init__(flat)
        self._apart: dict[int, FlatDTensor | None] = {}  # what a caller set, of which `reduced` has none, or another
        self.shown: list[FlatDTensor] | None = None  # the gradients of all parameters, where all have one of `reduced`
        self._views: list[Any] = [None] * len(self.layout.slots)  # of `_viewed`, by parameter
        self._viewed: Tensor | None = None
        self._norms: Any = None  # of what is viewed
        self._region_views: dict[Hashable, FlatDTensor] = {}  # of `reduced`
        self.read_by: set[type] = set()  # the forms in which optimizers have read these gradients
        self.stepped_as: dict[Hashable, type] = {}  # by group: the form in which one stepped by them
        layout, mesh = self.layout, self.mesh
        self._own = [layout.in_shard(slot, mesh.shard_rank) for slot in layout.slots]
        cuts = sorted({0, layout.shard_numel, *(end for own in self._own for end in own)})
        self._shard_sizes = [stop - start for start, stop in itertools.pairwise(cuts)]
        self._chunk_of = [cuts.index(start) if start < stop else -1 for start, stop in self._own]
        self._nothing = self.master[:0]
        self._whole = FlatPlacement(mesh=mesh, ranges=tuple(map(layout.shard, range(layout.factor))))
        self.placements = [self._whole.part(slot.offset, slot.stop) for slot in layout.slots]
        self._members = {group: [i for i, s in enumerate(layout.slots) if s.group == group] for group in layout.regions}
        self._runs = self._find_runs()
        self.regions = {group: self.region(group) for group in layout.regions}

    def region(self, group: Hashable) -> Region:
        start, stop = self.layout.region_in_shard(group, self.mesh.shard_rank)
        begin, end = self.layout.regions[group]
        local, is_trained = self.master[start:stop], self.master.is_floating_point()
        region = Region.of(local, (end - begin,), self._whole.part(begin, end), requires_grad=is_trained)
        region.gradients, region.group, region.own = self, group, slice(start, stop)
        return region

    def clear(self) -> None:
        super().clear()
        self._apart, self.shown, self._region_views = {}, None, {}
        self.read_by, self.stepped_as = set(), {}
        self._take_back_views()

    def accumulate(self, shard: Tensor, arrived: frozenset[int], counts: Tensor | None) -> None:
        self.read_by, self.stepped_as = set(), {}
        parts = {i: self._view(shard[slice(*self._own[i])].clone(), i) for i in self._apart}
        for i in parts:
            shard[slice(*self._own[i])] = 0  # what `reduced` has of it may be held by a caller
        super().accumulate(shard, arrived, counts)
        for i in filter(self.has_gradient, parts):
            given: Any = self._apart[i]
            self._apart[i] = parts[i] if given is None else given.add_(parts[i])

    def local(self) -> Tensor | None:
        """[n], zero in padding and where a parameter has no gradient; None where none has."""
        if self._apart and self._present:
            merged = torch.zeros_like(self.master) if self.reduced is None else self.reduced.clone()
            for i, given in self._apart.items():
                merged[slice(*self._own[i])] = 0 if given is None else given.to_local()
            self.reduced, self._apart = merged, {}
        return self.reduced

    def upcast(self) -> None:
        """Bring gradient shards that were kept in a lower precision to the master's dtype."""
        if self.reduced is not None:
            self.reduced, self.shown, self._region_views = self.reduced.to(self.master.dtype), None, {}

    def gradient(self, i: int) -> Any:
        """The reduced gradient of a parameter: what was set, or a view."""
        if i not in self._present and not (self._unread and self.has_gradient(i)):
            return None
        if i in self._apart:
            return self._apart[i]
        if self._viewed is not self.reduced:
            self._view_reduced()
        if not self._apart and len(self._present) == len(self._own):
            self.shown = self._views
        return self._views[i]

    def _take_back_views(self) -> None:
        """Views are kept from step to step, without the gradients that they showed; what a caller holds stays as it was."""
        if self._viewed is None:
            return
        norms, self._viewed = self._norms, None
        for i in range(len(self._views)):
            view = self._views[i]
            if sys.getrefcount(view) == 3 and view._use_count() == 1:
                view._local_tensor, view.counted, view.run = self._nothing, self._nothing, None
            else:
                view.norm_beside, self._views[i] = partial(norms.norm, i), None

    def _view_reduced(self) -> None:
        """Let views show the gradients of now."""
        reduced: Any = self.reduced
        self._take_back_views()
        if self._norms is None or self._norms.dtype != reduced.dtype:
            self._views = [None] * len(self._own)
        self._norms, self._viewed = Norms(reduced, self._own, self.mesh), reduced
        parts = (*reduced.split_with_sizes(self._shard_sizes), reduced[:0])
        for i, view in enumerate(self._views):
            part = parts[self._chunk_of[i]]
            if view is None:
                view = self._views[i] = self._view(part, i)
                view.norm_beside = partial(self._norm_of_view, i)
            else:
                view._local_tensor = view.counted = part
        self.mark_runs(reduced, self._views)

    def _norm_of_view(self, i: int, order: float, dtype: torch.dtype | None) -> Tensor | None:
        return self._norms.norm(i, order, dtype)  # type: ignore[no-any-return]

    def _find_runs(self) -> list[tuple[Range, list[int], tuple[FlatPlacement, ...]]]:
        """Parameters of a group with nothing between their ranges in the shard: the range of all, numbers, placements."""
        found: list[tuple[Range, list[int]]] = []
        for members in self._members.values():
            found.append(((0, 0), []))
            for i in members:
                (begin, end), (start, stop) = found[-1][0], self._own[i]
                if begin == end:  # nothing in it yet
                    found[-1] = (start, stop), [*found[-1][1], i]
                elif start in (end, stop):
                    found[-1] = (begin, max(end, stop)), [*found[-1][1], i]
                else:
                    found.append(((start, stop), [i]))
        return [(own, some, tuple(self.placements[i] for i in some)) for own, some in found if len(some) > 1]

    def mark_runs(self, flat: Tensor, tensors: Sequence[FlatDTensor]) -> None:
        """flat: [n], of which these tensors are ranges."""
        for own, some, order in self._runs:
            run = FlatRun(flat[slice(*own)], order)
            for i in some:
                tensors[i].run = run

    def set_gradient(self, i: int, value: Tensor | None) -> None:
        """A value, whole or cut as the parameter is; None: forget it."""
        given = None if value is None else self._cut(i, value)
        self._present.discard(i)
        if self._unread:
            self.has_gradient(i)  # reads all counts
        (self._present.discard if given is None else self._present.add)(i)
        self._apart[i], self.shown, self._region_views = given, None, {}
        if self._present <= self._apart.keys():  # nothing of `reduced` is a gradient any more
            kept = {j: self._apart[j] for j in self._present}
            self.clear()
            self._apart, self._present = kept, set(kept)

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
        if (present := self.gradient(i)) is None:
            self.set_gradient(i, value)
        else:
            present.add_(value)

    def gradient_of_region(self, group: Hashable) -> Tensor | None:
        """Raises ShardError where some of its parameters have a gradient and others have none."""
        if group in self._region_views:
            return self._region_views[group]
        some = self._members[group]
        absent = [i for i in some if not self.has_gradient(i)]
        if len(absent) == len(some):
            return None
        if absent:
            raise ShardError(
                f"{self.names[absent[0]]} has no gradient, and a flat optimizer would move it all the same; give the "
                "optimizer model.parameters() in place of sharded_parameters(model), or call split_unused(model, optimizer) "
                "before each step"
            )
        local, region = self.local(), self.regions[group]
        assert local is not None
        view = self._region_views[group] = region.like(local[region.own])
        return view

    def set_gradient_of_region(self, group: Hashable, value: Tensor | None) -> None:
        if value is None and len(self.regions) == 1:  # the usual end of a step
            self.clear()
            return
        begin = self.layout.regions[group][0]
        for i in self._members[group]:
            slot = self.layout.slots[i]
            part = None if value is None else value[slot.offset - begin : slot.stop - begin].view(slot.shape)
            self.set_gradient(i, part)
