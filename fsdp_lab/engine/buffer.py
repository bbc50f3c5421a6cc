"""Flat buffers: the parameters of a unit that have one dtype, and their gradients, as one tensor each.

    Gradients    what came from autograd, and what the optimizer is given
    Reduction    one whole gradient, [F * n'], on its way from the one to the other: ranks' summands become shards
    FlatBuffer   parameters: the master shard [n], the gathered replica [F * n], and what modules hold

The master shard is in the parameters' own dtype (fp32), on the host under offload. The replica is in the dtype of
computation, with memory only while it is gathered; the parameters that modules hold meanwhile are views of it, so that an
all-gather writes where the forward reads. One buffer serves all optimizer groups, side by side: one for each would double
the collectives of a transformer, whose biases and norms (no weight decay) are far smaller than its matrices.

Note: which gradients came. A gradient that did not come is told from one that is zero, on every rank alike: the optimizer
moves a parameter whose gradient is zero, by its momentum or weight decay, and leaves one without. Ranks may differ in what
they used. So each rank's part of a whole gradient ends with one element for each parameter, a count: 1 where a gradient came
on the rank that sends it, else 0. The reduce-scatter adds the counts beside the gradients. Of a parameter whose gradient did
not come here, the host reads the count when the gradient is asked for; where all came, it reads nothing."""

import math
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_lab.base.streams import CommStream, CommStreams
from fsdp_lab.base.tensors import LeafOfSharded, set_data
from fsdp_lab.engine.collectives import CommHandle, Group, ShardError, all_gather, all_reduce, reduce_scatter
from fsdp_lab.engine.layout import Chunks, Layout
from fsdp_lab.engine.mesh import ShardMesh
from fsdp_lab.engine.policy import ShardPolicy
from fsdp_lab.engine.schedule import OffloadPolicy

TAKEN = "_fsdp_lab_taken"  # an attribute of a parameter whose values a buffer has taken
Use = tuple[nn.Module, str]  # a module and the attribute under which it holds a parameter
Entry = tuple[nn.Parameter, Sequence[Use], str, Hashable]


def part_of(whole: Tensor, group: Group) -> Tensor:
    """[n], where this rank's shard is in a whole: [F * n]"""
    n = whole.numel() // group.size()
    return whole.narrow(0, group.rank() * n, n)


# -- gradients -------------------------------------------------------------------------------------------------------


class Gradients:
    """Of one `FlatBuffer`. They stay as autograd gave them until their unit's backward is over: a whole gradient from the
    first one on would be there when activations are at their most, and the root's through the whole backward.

    Attributes:
        pieces: by parameter, what came from autograd and is not in `unsharded` yet.
        unsharded: [F * n'] from the end of a backward to its reduction, with counts; without communication it stays.
        reduced: [n], the gradient of the shard, where any parameter has one; zero where another has none."""

    def __init__(self, flat: "FlatBuffer") -> None:
        self.layout, self.mesh, self.policy, self.master = flat.layout, flat.mesh, flat.policy, flat.master
        self.names = flat.names
        self.flat = weakref.proxy(flat)  # hooks hold these gradients, where the garbage collector does not look
        self.chunks = Chunks.of(flat.layout, counted=len(flat.mesh.ranks) > 1)
        self.pieces: dict[int, Tensor] = {}
        self.unsharded: Tensor | None = None
        self.reduced: Tensor | None = None
        self._dtype = flat.policy.reduced_dtype(flat.dtype)
        self._parts: Sequence[Tensor] = ()  # the chunks of `unsharded`
        # What no parameter covers; of the pieces' dtype, so that one kernel copies all.
        self._fixed = [torch.tensor(v, dtype=flat.dtype, device=self.mesh.device) for v in self.chunks.fixed.values()]
        self._arrived: set[int] = set()  # parameters that are in it
        self._present: set[int] = set()  # parameters that have a gradient, as far as counts have been read
        self._unread: list[Tensor] = []  # counts of backwards in which not all came here, [P] each

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
        first: tuple[list[Tensor], list[Tensor]] = [], []  # where it goes, and what
        if self.unsharded is None:
            pooled = not self.policy.shard_optimizer_only
            self.unsharded = self.mesh.empty(sum(self.chunks.sizes), self._dtype, pooled=pooled)
            self._parts = self.unsharded.split_with_sizes(self.chunks.sizes)
            first[0].extend(self._parts[chunk] for chunk in self.chunks.fixed)
            first[1].extend(self._fixed)
        again: tuple[list[Tensor], list[Tensor]] = [], []
        for i, grad in pieces.items():
            targets, sources = again if i in self._arrived else first
            places = self.chunks.places[i]
            if len(places) == 1:
                targets.append(self._parts[places[0][0]].view_as(grad))
                sources.append(grad)
            else:
                flat = grad.reshape(-1)
                targets += [self._parts[chunk] for chunk, _, _ in places]
                sources += [flat[start:stop] for _, start, stop in places]
        self._arrived.update(pieces)
        if first[0]:
            torch._foreach_copy_(*first)
        for target, source in zip(*again, strict=True):
            target.add_(source)

    def drop(self) -> None:
        """Forget what came."""
        self.unsharded, self._parts, self.pieces, self._arrived = None, (), {}, set()

    def clear(self) -> None:
        """Forget what was reduced."""
        self.reduced, self._present, self._unread = None, set(), []

    def take(self) -> tuple[Tensor, frozenset[int]] | None:
        """[F * n'], the whole gradient, zero where nothing came, with its counts; and the parameters whose gradients came
        here. None where none came at all."""
        self.collect()
        if self.unsharded is None:
            return None
        gradient, parts, arrived = self.unsharded, self._parts, frozenset(self._arrived)
        self.drop()
        absent = [i for i in range(len(self.layout.slots)) if i not in arrived]
        if nothing := [parts[chunk] for i in absent for chunk, _, _ in self.chunks.places[i]]:
            torch._foreach_zero_(nothing)
        if absent and self.chunks.counts:
            gradient.view(-1, self.chunks.part_numel)[:, [self.layout.shard_numel + i for i in absent]] = 0
        return gradient, arrived

    def accumulate(self, shard: Tensor, arrived: frozenset[int], counts: Tensor | None) -> None:
        """shard: [n], reduced, in the master's dtype and place or in the reduce dtype. `arrived` on this rank. counts: [P],
        on how many ranks each came, where that is not known here."""
        self._present |= arrived
        if counts is not None:
            self._unread.append(counts)
        if self.reduced is None:
            self.reduced = shard
        else:
            self.reduced.add_(shard)

    def has_gradient(self, i: int) -> bool:
        if self._unread and i not in self._present:
            came = torch.stack(self._unread).ne(0).any(dim=0).tolist()
            self._unread = []
            self._present.update(j for j, has_come in enumerate(came) if has_come)
        return i in self._present


class Reduction:
    """One whole gradient in flight. Issued when made; `advance` takes it to the optimizer.

    Reduce-scatter in the shard group, division by F, all-reduce across replicas, division by R. That is the order of FSDP2's
    hybrid sharding, so that sums have the same bits. In fp16 a sum of large gradients would overflow, and small ones would
    vanish if all of the division came first: there, also as in FSDP2, about the square root of W divides before the sums,
    and the rest after them.

    On a CPU a collective can be issued only when the one before it has ended, so somebody must come back for it. The runtime
    comes when the next unit's gradients are complete: all ranks come at the same point, so that they issue all collectives
    in one order, and each of them has had the backward of one unit to run beside.

    On a device all of it is queued at once. The whole gradient is freed when the next unit's is complete. What follows the
    reduce-scatter (all-reduce, copy to the host) is waited for at the end of the backward, since the optimizer is the first
    to read it; earlier, where it is added to the gradient of an earlier backward, or where a hook reads it."""

    def __init__(
        self, target: Gradients, gradient: Tensor, arrived: frozenset[int], *, streams: CommStreams, stays: bool
    ) -> None:
        """gradient: [F * n']; stays: whether it may be in flight until the end of the backward."""
        self.target, self._mesh, self._streams, self._arrived = target, target.mesh, streams, arrived
        self.unsharded: Tensor | None = gradient  # what is sent, until it has been scattered
        self.shard = gradient  # what it has become so far: [n'], then [n]; whole where nothing is scattered
        self._counts: Tensor | None = None  # [P], where not all came here
        self._final_dtype = gradient.dtype if target.policy.mp.keep_low_precision_gradients else target.master.dtype
        self._rest: float | None = None  # in fp16: to divide by after all sums
        if gradient.dtype is torch.float16:
            first, self._rest = _divisors(len(self._mesh.ranks))
            gradient.div_(first)
        self._keeps_whole = target.policy.shard_optimizer_only
        self._is_on_host = target.policy.is_on_host(self._mesh)
        self._handle: CommHandle | None = None  # the last that was issued
        self._scattered: CommHandle | None = None  # the reduce-scatter, until it was waited for
        is_queued, has_replicas = self._mesh.streams is not None, self._mesh.replicate_group is not None
        stages = (
            (self._mesh.shard_group is not None, self._reduce_scatter),
            (has_replicas, self._all_reduce),
            (self._is_on_host, self._deliver),
        )
        self._unsent = [send for is_needed, send in stages if is_needed]
        if not self._unsent:
            self.shard = gradient.to(self._final_dtype)
        while self._unsent and (is_queued or self._handle is None):
            self._handle = self._unsent.pop(0)()
        self._stays = stays and is_queued and (self._is_on_host or has_replicas)

    def ends(self, *, last: bool) -> bool:
        """Returns whether the next `advance` gives the gradient to the optimizer; `last`: at the end of the backward."""
        return not self._unsent and (last or not self._stays)

    def advance(self, *, ends: bool) -> None:
        """Wait for what is in flight. `ends`: give the shard to the optimizer; otherwise free the whole gradient, and issue
        the next collective."""
        if ends:
            if self._handle is not None:
                self._handle.wait(on_host=self._is_on_host)
            self.target.accumulate(self.shard, self._arrived, self._counts)
            return
        if self._scattered is not None:
            self._scattered.wait()
            self._scattered = None
            if not self._keeps_whole:
                self.unsharded = None
        if self._unsent:
            self._handle = self._unsent.pop(0)()

    def drop(self) -> None:
        """Forget it. Its memory is used again when what is in flight is over; on a CPU the group holds it so long."""
        if self._mesh.streams is not None and self._handle is not None:
            self._handle.wait()

    def _reduce_scatter(self) -> CommHandle:
        """In place, so that no more than the whole is in flight."""
        whole, group, stream = self.unsharded, self._mesh.shard_group, self._streams.reduce
        assert whole is not None and group is not None
        self.shard = part_of(whole, group)
        then = partial(self._to_mean, self._mesh.shard_size, is_last=self._mesh.replicate_group is None)
        with stream.entered():
            work = reduce_scatter(self.shard, whole, group)
            self._scattered = CommHandle(stream, work, then=then, answered=self._mesh.answered)
        return self._scattered

    def _all_reduce(self) -> CommHandle:
        shard, group, stream = self.shard, self._mesh.replicate_group, self._streams.all_reduce
        assert group is not None
        with stream.entered():
            if self._handle is not None:
                self._handle.wait()
            then = partial(self._to_mean, self._mesh.replicas, is_last=True)
            return CommHandle(stream, all_reduce(shard, group), (shard,), then, self._mesh.answered)

    def _to_mean(self, ranks: int, *, is_last: bool) -> None:
        """Called when a sum over so many ranks is in `shard`: [n']. The last one loses its counts, [n], and gets the dtype
        that the optimizer is given."""
        mean, n, counts = self.shard, self.target.layout.shard_numel, self.target.chunks.counts
        by = ranks if self._rest is None else self._rest if is_last else 1
        if is_last and len(self._arrived) < counts:
            self._counts = mean[n : n + counts].clone()
        if not is_last:
            mean.div_(by)
            self.shard = mean if self._keeps_whole else mean.clone()  # so that the whole can be freed
        elif self._keeps_whole:  # of which it may stay a part
            self.shard = mean[:n].div_(by).to(self._final_dtype)
        else:
            self.shard = torch.div(mean[:n], by, out=self._mesh.empty(n, self._final_dtype, is_private=True))

    def _deliver(self) -> CommHandle:
        """Copies the gradient to the host, where the master shard is."""
        assert self._mesh.streams is not None
        with self._streams.to_host.entered():
            if self._handle is not None:
                self._handle.wait()
            reduced, cast = self.shard, self.shard.to(self._final_dtype)
            self.shard = self._mesh.streams.host_memory(cast.numel(), cast.dtype).copy_(cast, non_blocking=True)
            return CommHandle(self._streams.to_host, None, keeps=(self._handle, reduced, cast))


def _divisors(ranks: int) -> tuple[int, float]:
    """The divisors before the sum and after it: first the smallest power of two not below the square root of `ranks`,
    or that no longer divides it; then the rest."""
    first = 1
    while ranks % first == 0 and ranks / first > first:
        first *= 2
    return first, ranks / first


# -- parameters ------------------------------------------------------------------------------------------------------


class FlatBuffer:
    """Parameters of one dtype and one `requires_grad`: see the module.

    Between steps modules hold `sharded`, whose local values are ranges of the master shard, and while it is gathered
    `parameters`, leaves of autograd that are views of the replica. What these are beyond that is for a subclass to say
    (extras/parameters.py): here a sharded parameter is a plain one, of this rank's range, for an optimizer of this rank.

    Args:
        entries: parameters of one dtype and one `requires_grad`, on meta or with values (the same on all ranks); with the
            modules that hold each, its name in error messages, and its optimizer group.
        dtype: of the gathered buffer."""

    leaf: type[LeafOfSharded] = LeafOfSharded

    def __init__(self, entries: Sequence[Entry], *, mesh: ShardMesh, policy: ShardPolicy, dtype: torch.dtype) -> None:
        values, uses, names, groups = zip(*entries, strict=True)
        self.mesh, self.policy, self.dtype, self.names = mesh, policy, dtype, list(names)
        self.uses = tuple(map(tuple, uses))
        self.originals = values  # what the modules held before
        self.has_values = [not v.is_meta and not hasattr(v, TAKEN) for v in values]
        shapes = [tuple(v.shape) for v in values]
        self.is_mapped = policy.map_shards and mesh.shard_size > 1 and any(map(math.prod, shapes))
        self.layout = Layout.of(shapes, groups, mesh.shard_size, dtype.itemsize, whole_pages=self.is_mapped)
        self.is_view_of_master = mesh.shard_size == 1 and dtype == values[0].dtype and not policy.is_on_host(mesh)
        pool: Any = mesh.buffer_pool
        if self.is_mapped:
            self.gathered = pool.map_shards(self.layout.shard_numel, dtype)
        else:
            self.gathered = mesh.reserve(self.layout.numel, dtype, pooled=not policy.shard_optimizer_only)
        self.full: Tensor = self.gathered.tensor
        self._views = [self.full[s.offset : s.stop].view(s.shape) for s in self.layout.slots]
        if self.is_view_of_master:
            self.master: Tensor = self.full.zero_()
        else:
            self.gathered.free()  # before the shard is made: no more than the larger one exists
            self.master = self._make_master()
        nothing = _absent(dtype, mesh.device)
        # What leaves show while they are freed.
        self._freed = self._views if self.is_view_of_master else [nothing.expand(s.shape) for s in self.layout.slots]
        self._freed_at = [t.data_ptr() for t in self._freed]
        self._offsets = [s.offset * dtype.itemsize for s in self.layout.slots]
        self.gradients = self._make_gradients()
        self.sharded = [self._shard(i, value) for i, value in enumerate(values)]
        self.made_version = self.master._version
        self.parameters = [self.leaf(t.data, requires_grad=values[0].requires_grad) for t in self._freed]
        for leaf, sharded in zip(self.parameters, self.sharded, strict=True):
            leaf.sharded = sharded
        self._places = [(module, attribute, i) for i, some in enumerate(self.uses) for module, attribute in some]
        self._show(self.sharded)
        self.reduce_hooks: OrderedDict[int, Callable[[], None]] = OrderedDict()  # called when gradients were reduced
        self._versions = [0] * len(self.parameters)
        self._gathered_version = -1  # of the master shard, when it was gathered
        self.device_shard: Tensor | None = None  # [n] in the gathered dtype: under offload, what gathers send
        if policy.rules.offload == OffloadPolicy.OPTIMIZER and not self.is_view_of_master:
            self.device_shard = torch.empty_like(self.master, dtype=dtype, device=mesh.device)
        self.post_forward_shard: Tensor | None = None  # this rank's part of what the post-forward group keeps

    # -- construction -----------------------------------------------------------------------------------------------

    def _make_master(self) -> Any:
        if self.is_mapped:
            return self.gathered.shard.zero_()
        if self.policy.is_on_host(self.mesh):
            assert self.mesh.streams is not None
            return self.mesh.streams.host_memory(self.layout.shard_numel, self.originals[0].dtype).zero_()
        return torch.zeros(self.layout.shard_numel, dtype=self.originals[0].dtype, device=self.mesh.device)

    def _make_gradients(self) -> Any:
        return LocalGradients(self)

    def _make_sharded(self, i: int, *, requires_grad: bool) -> Any:
        made: Any = nn.Parameter(self.own_part(i), requires_grad=requires_grad)
        made.flat, made.number = self, i
        return made

    def own_part(self, i: int, of: Tensor | None = None) -> Tensor:
        """[m], this rank's part of a parameter as a view of a shard, [n], by default of the master; m may be 0."""
        shard, slot = self.master if of is None else of, self.layout.slots[i]
        return shard[slice(*self.layout.in_shard(slot, self.mesh.shard_rank))]

    def for_optimizer(self, i: int) -> tuple[Any, int]:
        """What an optimizer may be given for a parameter, and where this rank's range of the parameter begins in it."""
        return self.sharded[i], 0

    def _shard(self, i: int, value: nn.Parameter) -> Any:
        """Copy this rank's part of a parameter, free the parameter, and make the sharded one."""
        slot, part = self.layout.slots[i], self.own_part(i)
        if self.has_values[i]:
            start, stop = self.layout.own(slot, self.mesh.shard_rank)
            part.copy_(value.detach().reshape(-1)[start:stop])
            value.data = _absent(value.dtype, value.device).expand(value.shape)  # frees its storage
            setattr(value, TAKEN, True)
        else:
            part.fill_(_absent(value.dtype, self.master.device))  # until it is loaded
        return self._make_sharded(i, requires_grad=value.requires_grad)

    def _show(self, parameters: Sequence[Any]) -> None:
        """Let modules hold these, by number."""
        for module, attribute, i in self._places:
            module._parameters[attribute] = parameters[i]

    # -- gather and free --------------------------------------------------------------------------------------------

    def copy_to_device(self) -> None:
        """Under offload: copy the shard from the host to the device, in the gathered dtype."""
        if self.is_view_of_master:
            return
        if self.device_shard is None:
            self.device_shard = torch.empty_like(self.master, dtype=self.dtype, device=self.mesh.device)
        self.device_shard.copy_(self.master, non_blocking=True)

    def gather(self, stream: CommStream, *, copies: bool = False) -> CommHandle:
        """Issue the all-gather of the whole buffer. To be called inside `stream.entered()`. `copies`: so that it may be
        written to. Raises ShardError where a module holds another parameter than what was made."""
        for module, attribute, i in self._places:
            if module._parameters.get(attribute) is not self.sharded[i]:
                raise ShardError(f"{self.names[i]} was replaced by another one after it was sharded; write to it under "
                                 "torch.no_grad(), or inside `with unshard(model):`")  # fmt: skip
        self._gathered_version = self.master._version
        if self.is_view_of_master:
            return CommHandle(stream, None)
        if copies or not self.is_mapped:
            self.gathered.hold()
        group, sent = self.mesh.shard_group, self.master.detach() if self.device_shard is None else self.device_shard
        if self.post_forward_shard is not None:
            group, sent, self.post_forward_shard = self.mesh.post_forward_group, self.post_forward_shard, None
        elif self.policy.rules.offload == OffloadPolicy.ALL:
            self.device_shard = None  # the handle keeps it as long as it is needed
        if group is None:
            self.full.data.copy_(sent)
            return CommHandle(stream, None, keeps=(sent,))
        if sent.dtype != self.dtype:  # cast to where it belongs
            sent = part_of(self.full, group).data.copy_(sent)
        return CommHandle(stream, all_gather(self.full, sent, group), keeps=(sent,), answered=self.mesh.answered)

    @property
    def is_stale(self) -> bool:
        """True if the optimizer, or somebody else, has written to the master shard since it was gathered."""
        return not self.is_view_of_master and self._gathered_version != self.master._version

    def use_unsharded_views(self) -> None:
        """Let modules hold the gathered values. Raises ShardError for a parameter that was changed meanwhile."""
        self._check_unchanged()
        if not self.is_view_of_master:
            for p, view in zip(self.parameters, self._views, strict=True):
                set_data(p, view)
        for p, sharded in zip(self.parameters, self.sharded, strict=True):
            if p.requires_grad is not sharded.requires_grad:
                p.requires_grad_(sharded.requires_grad)
        self._show(self.parameters)

    def use_sharded_views(self) -> None:
        """Let modules hold the sharded parameters, and free the gathered buffer. Data that a caller gave to a gathered
        parameter stays, to be refused later. What he reads of one is NaN, so that an absent value is not taken for a real
        one."""
        self._show(self.sharded)
        if not self.is_view_of_master:
            base = self.full.data_ptr()
            for p, offset, nothing in zip(self.parameters, self._offsets, self._freed, strict=True):
                if p.data_ptr() == base + offset:
                    set_data(p, nothing)
        if self.is_mapped or not self.policy.shard_optimizer_only:
            self.free_gathered()

    def free_gathered(self, busy: Collection[int] = ()) -> None:
        """Unless a collective may still use its address."""
        if not self.is_view_of_master and self.full.data_ptr() not in busy:
            self.gathered.free()

    def _check_unchanged(self) -> None:
        """Raises ShardError where a gathered parameter was changed after it was freed."""
        at, versions = [p.data_ptr() for p in self.parameters], [p._version for p in self.parameters]
        if at == self._freed_at and versions == self._versions:
            return
        moved = [a != t.data_ptr() for a, t in zip(at, self._freed, strict=True)]
        written = [a != b for a, b in zip(versions, self._versions, strict=True)]
        if any(moved) or any(written):
            what, changed = ("was given other data", moved) if any(moved) else ("was written to", written)
            raise ShardError(
                f"{self.names[changed.index(True)]} {what} between forward and backward, where that is lost; write to it "
                "after the backward, or a forward under no_grad, or inside `with unshard(model):`"
            )


class LocalGradients(Gradients):
    """Those of plain parameters, whose `.grad` is a view of this rank's range."""

    def accumulate(self, shard: Tensor, arrived: frozenset[int], counts: Tensor | None) -> None:
        if all(p.grad is None for p in self.flat.sharded):  # the optimizer has forgotten them
            self.clear()
        super().accumulate(shard, arrived, counts)
        for i, p in enumerate(self.flat.sharded):
            p.grad = self.flat.own_part(i, self.reduced) if self.has_gradient(i) else None


def sharded_form(p: Tensor) -> Any:
    """The sharded parameter of what a module holds, which has `flat` and `number`; None for one that is not sharded."""
    if isinstance(p, LeafOfSharded):
        return p.sharded
    return p if hasattr(p, "flat") and isinstance(p.flat, FlatBuffer) else None


def _absent(dtype: torch.dtype, device: torch.device) -> Tensor:
    """One element that stands for values that are not here."""
    return torch.full((), math.nan if dtype.is_floating_point else 0, dtype=dtype, device=device)
