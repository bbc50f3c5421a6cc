"""`FlatBuffer`: parameters of one dtype and one `requires_grad` as one buffer, of which each rank keeps a shard.

`master` [n] is this rank's shard, in the parameters' own dtype (fp32), on the host under offload. Sharded parameters, which
modules hold between steps and optimizers may be given, are ranges of it (parameters.py). `full` [F * n] is the gathered
buffer, in the dtype of computation, with memory only while it is gathered (buffers.py); the parameters that modules hold
meanwhile are views of it, so that an all-gather writes where the forward reads.

One buffer serves all optimizer groups, side by side. A buffer for each group would double the collectives of a transformer,
whose biases and norms (no weight decay) are thousands of times smaller than its matrices.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from fsdp_lab.base.streams import CommStream
from fsdp_lab.base.tensors import set_data
from fsdp_lab.engine.buffers import GatheredBuffer, MappedBuffer, gathered_buffer
from fsdp_lab.engine.collectives import CommHandle, all_gather
from fsdp_lab.engine.errors import ShardError
from fsdp_lab.engine.gradients import GradientBuffer
from fsdp_lab.engine.layout import Layout
from fsdp_lab.engine.mesh import ShardMesh
from fsdp_lab.engine.parameters import ShardedParameter, UnshardedParameter
from fsdp_lab.engine.policy import ShardPolicy
from fsdp_lab.engine.schedule import OffloadPolicy

TAKEN = "_fsdp_lab_taken"  # an attribute of a parameter whose values a buffer has taken
Use = tuple[nn.Module, str]  # a module and the attribute under which it holds a parameter


class FlatBuffer:
    """See the module.

    Args:
        values: parameters of one dtype and one `requires_grad`, on meta or with values (the same on all ranks).
        uses: for each, the modules that hold it; they hold a `ShardedParameter` afterwards.
        names: for each, its name in error messages.
        groups: for each, its optimizer group.
        dtype: of the gathered buffer.
    """

    def __init__(
        self,
        values: Sequence[nn.Parameter],
        uses: Sequence[Sequence[Use]],
        names: Sequence[str],
        groups: Sequence[Hashable],
        *,
        mesh: ShardMesh,
        policy: ShardPolicy,
        dtype: torch.dtype,
    ) -> None:
        own = values[0].dtype
        self.mesh, self.policy, self.names, self.uses = mesh, policy, list(names), tuple(map(tuple, uses))
        self.originals = tuple(values)  # what the modules held before
        self._built_on_meta = [v.is_meta for v in values]
        self.has_values = [not v.is_meta and not hasattr(v, TAKEN) for v in values]
        self.dtype = dtype
        shapes, is_cut = [tuple(v.shape) for v in values], mesh.shard_size > 1 and any(v.numel() for v in values)
        self.is_mapped = policy.map_shards and is_cut
        self.layout = Layout.of(shapes, groups, mesh.shard_size, dtype.itemsize, whole_pages=self.is_mapped)
        self.is_view_of_master = mesh.shard_size == 1 and dtype == own and not policy.is_on_host(mesh)
        if self.is_view_of_master:
            self.master = self._make_master(own)
            self.full = self.master.detach()
        else:
            self.gathered = self._make_gathered()
            self.full = self.gathered.tensor
        self._views = [self.full[s.offset : s.stop].view(s.shape) for s in self.layout.slots]
        if not self.is_view_of_master:
            self.gathered.free()  # before the shard is made: no more than the larger one exists
            self.master = self._make_master(own)
        nothing = _absent(dtype, mesh.device)
        self._nothing = [nothing.expand(s.shape) for s in self.layout.slots]
        self.gradients = GradientBuffer(self.layout, mesh, policy, self.master, dtype, self.names)
        self.sharded = [self._shard(i, value) for i, value in enumerate(values)]
        self._made_version = self.master._version
        self.parameters = [self._unshard(i) for i in range(len(values))]
        self._places = [(module, attribute, i) for i, some in enumerate(self.uses) for module, attribute in some]
        self._show(self.sharded)
        self._freed = self._views if self.is_view_of_master else self._nothing  # what `parameters` show meanwhile
        self.reduce_hooks: OrderedDict[int, Callable[[], None]] = OrderedDict()  # called when gradients were reduced
        self._versions = [0] * len(self.parameters)
        self._gathered_version = -1  # of the master shard, when it was gathered
        self.device_shard = self._make_device_shard()  # [n] in the gathered dtype: under offload, what gathers send
        self.post_forward_shard: Tensor | None = None  # this rank's part of what the post-forward group keeps

    # -- construction -----------------------------------------------------------------------------------------------

    def _make_gathered(self) -> GatheredBuffer:
        pool = self.mesh.buffer_pool
        if self.is_mapped:
            assert pool is not None
            return pool.map_shards(self.layout.shard_numel, self.dtype)
        pool = None if self.policy.shard_optimizer_only else pool
        return gathered_buffer(pool, self.layout.numel, self.dtype, self.mesh.device)

    def _make_master(self, own: torch.dtype) -> Tensor:
        if self.is_mapped:
            return cast(MappedBuffer, self.gathered).shard.zero_()
        if self.policy.is_on_host(self.mesh):
            assert self.mesh.streams is not None
            return self.mesh.streams.host_memory(self.layout.shard_numel, own).zero_()
        return torch.zeros(self.layout.shard_numel, dtype=own, device=self.mesh.device)

    def _make_device_shard(self) -> Tensor | None:
        if self.policy.offload != OffloadPolicy.OPTIMIZER or self.is_view_of_master:
            return None
        return torch.empty_like(self.master, dtype=self.dtype, device=self.mesh.device)

    def _shard(self, i: int, value: nn.Parameter) -> ShardedParameter:
        """Copy this rank's part of a parameter, free the parameter, and make the sharded one."""
        slot, part = self.layout.slots[i], self.own_part(i)
        if self.has_values[i]:
            start, stop = self.layout.own(slot, self.mesh.shard_rank)
            part.copy_(value.detach().reshape(-1)[start:stop])
            value.data = _absent(value.dtype, value.device).expand(value.shape)  # frees its storage
            setattr(value, TAKEN, True)
        else:
            part.fill_(_absent(value.dtype, self.master.device))  # until it is loaded
        return self._made(i, requires_grad=value.requires_grad)

    def _made(self, i: int, *, requires_grad: bool) -> ShardedParameter:
        slot = self.layout.slots[i]
        placement = self.gradients.placements[i]
        made = ShardedParameter.of(self.own_part(i), slot.shape, placement, requires_grad=requires_grad)
        made.flat, made.number, made.seen = self, i, []
        if made.is_floating_point() or made.is_complex():
            made.take_own_gradients()
        return made

    def replace(self, i: int) -> ShardedParameter:
        """Let modules hold another object for a parameter, as `load_state_dict(assign=True)` does; the values stay. What the
        caller gave to an optimizer before is refused at its step, which else would go on or do nothing."""
        old, group = self.sharded[i], self.layout.slots[i].group
        made = self._made(i, requires_grad=old.requires_grad)
        self.sharded[i] = self.parameters[i].sharded = made
        self.gradients.regions[group] = self.gradients.region(group)
        self._show(self.sharded)
        return made

    def _unshard(self, i: int) -> UnshardedParameter:
        data = self._views[i] if self.is_view_of_master else self._nothing[i]
        return UnshardedParameter.of(data.data, self.sharded[i])

    def _show(self, parameters: Sequence[nn.Parameter] | Sequence[ShardedParameter]) -> None:
        """Let modules hold these, by number."""
        for module, attribute, i in self._places:
            module._parameters[attribute] = parameters[i]  # type: ignore[assignment]

    def rebuild(self, kept: Sequence[int]) -> FlatBuffer:
        """A new buffer of some of the original parameters, which have their values again."""
        return FlatBuffer(
            [self.originals[i] for i in kept],
            [self.uses[i] for i in kept],
            [self.names[i] for i in kept],
            [self.layout.slots[i].group for i in kept],
            mesh=self.mesh,
            policy=self.policy,
            dtype=self.dtype,
        )

    def is_unwritten(self, i: int) -> bool:
        """Returns whether a parameter was built on meta and nothing was written to the buffer since."""
        return self._built_on_meta[i] and self.master._version == self._made_version

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
        written to."""
        self._check_sharded()
        self._gathered_version = self.master._version
        if self.is_view_of_master:
            return CommHandle(stream, None)
        if copies or not self.is_mapped:
            self.gathered.hold()
        if self.post_forward_shard is not None:
            sent, self.post_forward_shard = self.post_forward_shard, None
            assert self.mesh.post_forward_group is not None
            return CommHandle(stream, all_gather(self.full, sent, self.mesh.post_forward_group), keeps=(sent,))
        sent = self.master.detach() if self.device_shard is None else self.device_shard
        if self.policy.offload == OffloadPolicy.ALL:
            self.device_shard = None  # `sent` keeps it as long as it is needed
        if self.mesh.shard_group is None:
            self.full.data.copy_(sent)
            return CommHandle(stream, None, keeps=(sent,))
        if sent.dtype != self.dtype:  # cast to where it belongs
            start, stop = self.layout.shard(self.mesh.shard_rank)
            sent = self.full.data[start:stop].copy_(sent)
        return CommHandle(stream, all_gather(self.full, sent, self.mesh.shard_group), keeps=(sent,))

    @property
    def is_stale(self) -> bool:
        """True if the optimizer, or somebody else, has written to the master shard since it was gathered."""
        return not self.is_view_of_master and self._gathered_version != self.master._version

    def use_unsharded_views(self) -> None:
        """Let modules hold the gathered values. Raises ShardError for a parameter that was changed meanwhile."""
        at, freed = ([t.data_ptr() for t in some] for some in (self.parameters, self._freed))
        if at != freed or self._written():
            raise self._changed()
        if not self.is_view_of_master:
            for p, view in zip(self.parameters, self._views, strict=True):
                set_data(p, view)
        for p, sharded in zip(self.parameters, self.sharded, strict=True):
            p.requires_grad_(sharded.requires_grad)
        self._show(self.parameters)

    def use_sharded_views(self) -> None:
        """Let modules hold the sharded parameters, and free the gathered buffer. Data that a caller gave to a gathered
        parameter stays, to be refused later."""
        self._show(self.sharded)
        if not self.is_view_of_master:
            for p, view, nothing in zip(self.parameters, self._views, self._nothing, strict=True):
                if p.data_ptr() == view.data_ptr():
                    set_data(p, nothing)
        if self.is_mapped or not self.policy.shard_optimizer_only:
            self.free_gathered()

    def keep_post_forward_shard(self) -> None:
        """Called before `use_sharded_views`: keeps this rank's part of what its post-forward group holds together."""
        group = self.mesh.post_forward_group
        assert group is not None
        part = self.layout.numel // group.size()
        self.post_forward_shard = self.full[group.rank() * part : (group.rank() + 1) * part].clone()

    @property
    def is_gathered(self) -> bool:
        """True if there is memory for the gathered values beside that of the shards."""
        return self.is_view_of_master or self.gathered.is_held

    def free_gathered(self, busy: Collection[int] = ()) -> None:
        """Unless a collective may still use its address."""
        if not self.is_view_of_master and self.full.data_ptr() not in busy:
            self.gathered.free()

    def let_others_read(self) -> None:
        """Called before gathered parameters are written to: waits until other ranks have what this one sent from the
        gathered buffer."""
        if (pool := self.mesh.buffer_pool) is not None:
            pool.settle(self.full)

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
            changed = _bits(now) != _bits(self.master.to(self.dtype))
            self.master.copy_(torch.where(changed, now.to(self.master.dtype), self.master))
        elif not self.is_view_of_master:
            self.master.copy_(now)
        self._versions = [p._version for p in self.parameters]
        self._gathered_version = self.master._version

    def _check_sharded(self) -> None:
        """Modules must hold the parameters that were made. Raises ShardError for one that was replaced."""
        for module, attribute, i in self._places:
            held: Any = module._parameters.get(attribute)
            if held is not self.sharded[i]:
                raise ShardError(f"{self.names[i]} was replaced by another one after it was sharded; write to it under "
                                 "torch.no_grad(), or inside `with unshard(model):`")  # fmt: skip

    def _written(self) -> list[int]:
        """Gathered parameters that were written to after they were freed."""
        versions = [p._version for p in self.parameters]
        return [] if versions == self._versions else [i for i, v in enumerate(versions) if v != self._versions[i]]

    def _changed(self) -> ShardError:
        moved = [i for i, p in enumerate(self.parameters) if p.data_ptr() != self._freed[i].data_ptr()]
        i, what = (moved[0], "was given other data") if moved else (self._written()[0], "was written to")
        return ShardError(f"{self.names[i]} {what} between forward and backward, where that is lost; write to it after "
                          "the backward, or a forward under no_grad, or inside `with unshard(model):`")  # fmt: skip

    # -- what this rank holds ---------------------------------------------------------------------------------------

    def own_part(self, i: int) -> Tensor:
        """[m], this rank's part of a parameter as a view of the master shard; m may be 0."""
        return self.master[slice(*self.layout.in_shard(self.layout.slots[i], self.mesh.shard_rank))]

    def tensors(self) -> Iterator[Tensor]:
        """All tensors with storage of their own."""
        optional = (self.gradients.unsharded, self.gradients.reduced, self.device_shard, self.post_forward_shard)
        gathered = [self.full] if self.is_gathered else []
        yield from (self.master, *gathered, *(t for t in optional if t is not None))
        yield from self.gradients.pieces.values()


def _bits(t: Tensor) -> Tensor:
    """The values as integers: -0.0 is not 0.0, and a NaN equals itself. Of real numbers, to whose dtypes a policy casts."""
    return t.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[t.dtype.itemsize])


def _absent(dtype: torch.dtype, device: torch.device) -> Tensor:
    """One element that stands for values that are not here."""
    return torch.full((), math.nan if dtype.is_floating_point else 0, dtype=dtype, device=device)
