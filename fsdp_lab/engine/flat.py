"""`FlatBuffer`: parameters of one dtype and one trainability as one buffer, of which each rank keeps a shard.

Four tensors make it up. `master` [n] is this rank's shard, in the parameters' own dtype (fp32), on the host under offload.
`full` [F * n] is the gathered buffer, in the dtype of computation, with storage only while it is gathered; the parameters
that modules hold are views of it, so that an all-gather lands where the forward reads. `gradient` [F * n] collects gradients
in the dtype of reduction during a backward. `regions` are slices of `master`, one for each optimizer group: what the
optimizer is given, with the reduced gradient in their `.grad`.

One buffer serves all optimizer groups: the groups are regions of it, side by side. A buffer for each group would double the
collectives of a transformer, whose biases and norms (no weight decay) are thousands of times smaller than its matrices.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_lab.engine.collectives import Lane, Pending, all_gather
from fsdp_lab.engine.errors import ShardError
from fsdp_lab.engine.grid import Grid
from fsdp_lab.engine.layout import Layout, Slot
from fsdp_lab.engine.policy import Policy

Use = tuple[nn.Module, str]  # a module and the attribute under which it holds a parameter


class OriginalParameter(nn.Parameter):
    """What a module holds in place of a parameter that was sharded: same name, same shape, a view of the gathered buffer.

    While the buffer is not gathered it reads as NaN (its data is one NaN, expanded), so that a value that is not there
    cannot be taken for one.
    """

    flat: FlatBuffer
    number: int  # which of the buffer's parameters

    @classmethod
    def stand_in(cls, value: nn.Parameter, data: Tensor, flat: FlatBuffer, number: int) -> OriginalParameter:
        made = cls(data, requires_grad=value.requires_grad)
        made.flat, made.number = flat, number
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Not to be pickled, nor copied: most of it lies on other ranks."""
        raise ShardError(f"{self.flat.names[self.number]} is sharded, so its module cannot be copied or pickled; copy it "
                         "before fully_shard, or take the values from full_state(model)")  # fmt: skip

    def __deepcopy__(self, memo: Any) -> Any:
        return self.__reduce_ex__(None)

    @property
    def slot(self) -> Slot:
        return self.flat.layout.slots[self.number]


class FlatBuffer:
    """See the module.

    Args:
        values: parameters of one dtype and one `requires_grad`, on meta or with values (the same on all ranks).
        uses: for each, the modules that hold it; they hold an `OriginalParameter` afterwards.
        names: for each, how errors call it.
        groups: for each, its optimizer group.
    """

    def __init__(
        self,
        values: Sequence[nn.Parameter],
        uses: Sequence[Sequence[Use]],
        names: Sequence[str],
        groups: Sequence[Hashable],
        *,
        grid: Grid,
        policy: Policy,
        dtype: torch.dtype,
    ) -> None:
        own = values[0].dtype
        self.grid, self.policy, self.names, self.uses = grid, policy, list(names), tuple(map(tuple, uses))
        self.originals = tuple(values)  # what the modules held before
        self.has_values = [not v.is_meta and not is_absent(v) for v in values]
        self.trainable = values[0].requires_grad
        self.dtype = dtype  # gathered
        self.layout = Layout.of([tuple(v.shape) for v in values], groups, grid.factor, self.dtype.itemsize)
        self.master = self._make_master(own)
        self.is_view_of_master = grid.factor == 1 and self.dtype == own and self.master.device == grid.device
        self.full = self._make_full()
        self._views = [self.full[s.offset : s.stop].view(s.shape) for s in self.layout.slots]
        nothing = _absent(self.dtype, grid.device)
        self._nothing = [nothing.expand(s.shape) for s in self.layout.slots]
        self.parameters = self._replace(values)
        self._versions = [0] * len(self.parameters)
        self.regions = self._make_regions() if self.trainable else {}
        self.gradient: Tensor | None = None  # [F * n], while gradients arrive
        self._arrived: set[int] = set()
        self._near = self._make_near()  # [n] on the device, in the gathered dtype
        self._few: Tensor | None = None  # what a smaller group keeps after the forward
        if not self.is_view_of_master:
            self._free()

    # -- making -----------------------------------------------------------------------------------------------------

    def _make_master(self, own: torch.dtype) -> Tensor:
        host = self.policy.offload != "none"
        pinned = host and self.grid.device.type == "cuda"
        device = torch.device("cpu") if host else self.grid.device
        return torch.zeros(self.layout.shard_numel, dtype=own, device=device, pin_memory=pinned)

    def _make_full(self) -> Tensor:
        if self.is_view_of_master:
            return self.master.detach()
        return torch.empty(self.layout.numel, dtype=self.dtype, device=self.grid.device)

    def _make_near(self) -> Tensor | None:
        if self.policy.offload != "optimizer" or self.is_view_of_master:
            return None
        return torch.empty_like(self.master, dtype=self.dtype, device=self.grid.device)

    def _replace(self, values: Sequence[nn.Parameter]) -> list[OriginalParameter]:
        made = []
        for i, value in enumerate(values):
            slot = self.layout.slots[i]
            if self.has_values[i]:
                start, stop = self.layout.own(slot, self.grid.rank)
                self.own_part(i).copy_(value.detach().reshape(-1)[start:stop])
                value.data = _absent(value.dtype, value.device).expand(value.shape)  # its storage is of no use any more
            else:
                self.own_part(i).fill_(_absent(value.dtype, self.master.device))  # until it is loaded
            data = self._views[i] if self.is_view_of_master else self._nothing[i]
            made.append(OriginalParameter.stand_in(value, data.data, self, i))
            for module, attribute in self.uses[i]:
                setattr(module, attribute, made[i])
        return made

    def _make_regions(self) -> dict[Hashable, nn.Parameter]:
        ranges = {g: self.layout.region_in_shard(g, self.grid.rank) for g in self.layout.regions}
        return {g: nn.Parameter(self.master[start:stop]) for g, (start, stop) in ranges.items()}

    def again(self, kept: Sequence[int]) -> FlatBuffer:
        """A new buffer of some of the original parameters, which have their values again."""
        return FlatBuffer(
            [self.originals[i] for i in kept],
            [self.uses[i] for i in kept],
            [self.names[i] for i in kept],
            [self.layout.slots[i].group for i in kept],
            grid=self.grid,
            policy=self.policy,
            dtype=self.dtype,
        )

    # -- parameters: gather and free --------------------------------------------------------------------------------

    def fetch(self) -> None:
        """Under offload: copy the shard from the host to the device, in the gathered dtype."""
        if self.is_view_of_master:
            return
        if self._near is None:
            self._near = torch.empty_like(self.master, dtype=self.dtype, device=self.grid.device)
        self._near.copy_(self.master, non_blocking=True)

    def gather(self, lane: Lane) -> Pending:
        """Issue what brings the whole buffer here. To be called inside `lane.entered()`."""
        if self.is_view_of_master:
            return Pending(lane, None)
        if not self.full.untyped_storage().size():
            self.full.untyped_storage().resize_(self.layout.numel * self.dtype.itemsize)
        if self._few is not None:
            kept, self._few = self._few, None
            assert self.grid.few is not None
            return Pending(lane, all_gather(self.full, kept, self.grid.few), keeps=(kept,))
        sent = self.master.detach().to(self.dtype) if self._near is None else self._near
        if self.policy.offload == "all":
            self._near = None  # `sent` keeps it as long as it is needed
        if self.grid.shards is None:
            self.full.data.copy_(sent)
            return Pending(lane, None)
        return Pending(lane, all_gather(self.full, sent, self.grid.shards), keeps=(sent,))

    def show(self) -> None:
        """Point the original parameters at the gathered values. Raises ShardError for one that a stranger changed."""
        for i, p in enumerate(self.parameters):
            self._check(i, p)
            p.data = self._views[i]

    def hide(self) -> None:
        """Point them at nothing, and free the gathered buffer. Data of a stranger stays, for `show` to find."""
        if self.is_view_of_master:
            return
        for i, p in enumerate(self.parameters):
            if p.data_ptr() == self._views[i].data_ptr():
                p.data = self._nothing[i]
        if not self.policy.whole_parameters:
            self._free()

    def keep_few(self) -> None:
        """Before `hide`: keep this rank's part of what its smaller group holds together."""
        assert self.grid.few is not None
        part = self.layout.numel // self.grid.few.size()
        self._few = self.full[self.grid.few_rank * part : (self.grid.few_rank + 1) * part].clone()

    def forget_few(self) -> None:
        self._few = None

    def write_back(self) -> None:
        """Take over into the shard what was written into gathered parameters, element by element where bits differ."""
        for p, view in zip(self.parameters, self._views, strict=True):
            if p.data_ptr() != view.data_ptr() and p.shape == view.shape:
                view.copy_(p.data)  # it was given other data
                p.data = view
        start, stop = self.layout.shard(self.grid.rank)
        now = self.full[start:stop].to(self.master.device)
        if self.dtype != self.master.dtype:
            changed = _bits(now) != _bits(self.master.to(self.dtype))
            self.master.copy_(torch.where(changed, now.to(self.master.dtype), self.master))
        elif not self.is_view_of_master:
            self.master.copy_(now)
        self._versions = [p._version for p in self.parameters]

    def _check(self, i: int, p: OriginalParameter) -> None:
        """A parameter must be the one that we made, and untouched."""
        what = ""
        if any(module._parameters.get(attribute) is not p for module, attribute in self.uses[i]):
            what = "was replaced by another one"
        elif p.data_ptr() not in (self._nothing[i].data_ptr(), self._views[i].data_ptr()):
            what = "was given other data, by .data or by the module's .to(), .half() or the like,"
        elif p._version != self._versions[i]:
            what = "was written to"
        if what:
            raise ShardError(f"{self.names[i]} {what} after it was sharded; write to it inside `with unshard(model):`, and "
                             "give dtypes by the strategy")  # fmt: skip

    def _free(self) -> None:
        self.full.untyped_storage().resize_(0)

    # -- gradients --------------------------------------------------------------------------------------------------

    def receive(self, i: int, grad: Tensor) -> None:
        """A parameter's gradient, from autograd; added where one came before."""
        if self.gradient is None:
            dtype = self.policy.reduced(self.master.dtype)
            self.gradient = torch.empty(self.layout.numel, dtype=dtype, device=self.grid.device)
        slot = self.layout.slots[i]
        place = self.gradient[slot.offset : slot.stop].view(slot.shape)
        if i in self._arrived:
            place.add_(grad)
        else:
            self._arrived.add(i)
            place.copy_(grad)

    def take_gradient(self) -> Tensor | None:
        """[F * n]; zero where no gradient came, and in padding. None where none came at all."""
        gradient, self.gradient = self.gradient, None
        if gradient is None:
            return None
        end = 0
        for i in sorted(range(len(self.layout.slots)), key=lambda i: self.layout.slots[i].offset):
            slot = self.layout.slots[i]
            gradient[end : slot.offset].zero_()
            end = max(end, slot.stop)  # one without elements may begin where another does
            if i not in self._arrived:
                gradient[slot.offset : slot.stop].zero_()
        gradient[end:].zero_()
        self._arrived = set()
        return gradient

    def add_gradient(self, shard: Tensor) -> None:
        """shard: [n], reduced, in the master's dtype and place or in the reduce dtype; to the regions' `.grad`."""
        for group, region in self.regions.items():
            start, stop = self.layout.region_in_shard(group, self.grid.rank)
            if region.grad is None:
                if shard.dtype != region.dtype:
                    region.grad_dtype = shard.dtype
                region.grad = shard[start:stop]
            else:
                region.grad.add_(shard[start:stop])

    def raise_gradient(self) -> None:
        """Bring gradients that were kept in a lower precision to the master's dtype."""
        for region in self.regions.values():
            if region.grad is not None and region.grad.dtype != region.dtype:
                raised, region.grad = region.grad.to(region.dtype), None
                region.grad_dtype = region.dtype
                region.grad = raised

    # -- what a rank holds of a parameter ---------------------------------------------------------------------------

    def own_part(self, i: int) -> Tensor:
        """[m], a view of the master shard; m may be 0."""
        start, stop = self.layout.in_shard(self.layout.slots[i], self.grid.rank)
        return self.master[start:stop]

    def in_region(self, i: int) -> tuple[nn.Parameter | None, int]:
        """The optimizer's parameter that holds it, and where its part begins in that; None where it is frozen."""
        group = self.layout.slots[i].group
        if group not in self.regions:
            return None, 0
        start, stop = self.layout.in_shard(self.layout.slots[i], self.grid.rank)
        return self.regions[group], (
            start - self.layout.region_in_shard(group, self.grid.rank)[0]
        ) if start < stop else 0

    @property
    def is_gathered(self) -> bool:
        return bool(self.full.untyped_storage().size()) and not self.is_view_of_master

    @property
    def standing_bytes(self) -> int:
        """On the device between steps, beside the master shard."""
        near = 0 if self._near is None else self._near.nbytes
        return near + (self.full.nbytes if self.is_gathered else 0)

    @property
    def near(self) -> Tensor | None:
        """[n] on the device: under offload, what gathers send."""
        return self._near

    @property
    def few(self) -> Tensor | None:
        """What a smaller group keeps between forward and backward."""
        return self._few

    def copies(self) -> list[Tensor]:
        """Parts of the gathered buffer that are kept beside it."""
        return [t for t in (self._near, self._few) if t is not None]

    def held(self) -> list[Tensor]:
        """All tensors with storage of its own."""
        regions: list[Any] = [r.grad for r in self.regions.values()]
        return [t for t in (self.master, self.full, self.gradient, self._near, self._few, *regions) if t is not None]


def _bits(t: Tensor) -> Tensor:
    """As whole numbers: -0.0 is not 0.0, and a NaN equals itself. For what a policy casts to: 2 or 4 bytes."""
    return t.view(torch.int16 if t.dtype.itemsize == 2 else torch.int32)


_MARK = 2  # where the element lies in its storage of three, by which it is known


def _absent(dtype: torch.dtype, device: torch.device) -> Tensor:
    """One element that stands for values that are not here."""
    value = math.nan if dtype.is_floating_point else 0
    return torch.full((_MARK + 1,), value, dtype=dtype, device=device)[_MARK]


def is_absent(t: Tensor) -> bool:
    """Whether a buffer took its values already, as of a parameter to which two units are tied."""
    return t.storage_offset() == _MARK and t.untyped_storage().nbytes() == (_MARK + 1) * t.itemsize
