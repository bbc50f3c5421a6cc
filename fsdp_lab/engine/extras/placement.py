"""`FlatTensor`, the base of `FlatDTensor`: a tensor of which each rank holds a range of elements, counted in row order.

A flat buffer is cut wherever its shards end, also in the middle of a row, which no placement of torch's can say. So this is
a DTensor whose local tensor is that range, [m], and whose shape is the whole tensor's. It is what `module.parameters()`
yields between steps, and what gradients, optimizer states and a `state_dict` are made of. As with FSDP2's DTensors,

- element-wise arithmetic, and so an optimizer's step, touches the local range only (dtensor.py);
- norms are those of the whole tensor; other operations gather it, and return a replicated DTensor: they are collective;
- `full_tensor()` is the whole tensor, and `to_local()` the range;
- Distributed Checkpoint stores it under its name and shape, in boxes, and loads it from any other layout.

`placements` reads as `Replicate()`, the only placement of torch's by which a whole tensor may be copied into one of these.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self, cast

import torch
from torch import Tensor, distributed as dist
from torch.autograd.function import once_differentiable
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from fsdp_lab.engine.collectives import ShardError, answered
from fsdp_lab.engine.layout import Range
from fsdp_lab.engine.mesh import ShardMesh, gather_parts


@dataclass(frozen=True, kw_only=True)
class FlatPlacement:
    """Which elements of the flattened tensor each rank of a shard group holds; in order, without overlaps."""

    mesh: ShardMesh
    ranges: tuple[Range, ...]  # by shard rank; (0, 0) where it is empty

    @property
    def own(self) -> Range:
        return self.ranges[self.mesh.shard_rank]

    def is_as(self, other: FlatPlacement) -> bool:
        """Returns whether each rank holds the same elements by both, whatever groups they communicate in."""
        return self is other or (self.ranges == other.ranges and self.mesh.device_mesh == other.mesh.device_mesh)

    def part(self, start: int, stop: int) -> FlatPlacement:
        """The placement of elements [start, stop), counted from `start`."""
        cut = [(max(a, start) - start, min(b, stop) - start) for a, b in self.ranges]
        return FlatPlacement(mesh=self.mesh, ranges=tuple((a, b) if a < b else (0, 0) for a, b in cut))


class FlatTensor(DTensor):
    """All of it but torch's operations.

    Attributes:
        flat_placement: which elements each rank holds.
        norm_beside: its norm, by order and dtype, found together with those of other tensors.
        counted: the tensor whose version says that this one, or a view of it, was written to. Views that are made in a
            dispatch mode have versions of their own.
    """

    flat_placement: FlatPlacement
    counted: Tensor
    norm_beside: Callable[[float, torch.dtype | None], Tensor | None] | None = None
    given = False  # to an optimizer

    @classmethod
    def of(cls, local: Tensor, shape: Sequence[int], placement: FlatPlacement, *, requires_grad: bool = False) -> Self:
        """local: [m], this rank's range of a tensor of `shape`."""
        mesh = placement.mesh.device_mesh
        meta = TensorMeta(torch.Size(shape), torch.empty(shape, device="meta").stride(), local.dtype)
        spec = DTensorSpec(mesh, (Replicate(),) * mesh.ndim, tensor_meta=meta)
        return cls._made(local, spec, placement, requires_grad=requires_grad)

    @classmethod
    def _made(cls, local: Tensor, spec: DTensorSpec, placement: FlatPlacement, *, requires_grad: bool) -> Self:
        make: Any = DTensor.__new__
        made: Self = make(cls, local, spec, requires_grad=requires_grad)
        made.flat_placement, made.counted = placement, local
        return made

    def like(self, local: Tensor, shape: Sequence[int] | None = None) -> FlatTensor:
        """A tensor of other values that is cut as this one is."""
        if shape is None and local.dtype == self.dtype:  # an optimizer makes many
            return self.plain()._made(local, self._spec, self.flat_placement, requires_grad=False)
        return self.plain().of(local, self.shape if shape is None else shape, self.flat_placement)

    def counting(self, view: FlatTensor) -> FlatTensor:
        """A view of this one, which then counts as written to where the view is."""
        view.counted = self.counted
        return view

    def adopt(self, t: DTensor) -> None:
        """Make one of torch's DTensors, of the same shape, a tensor that is cut as this one is; collective."""
        cut, changed = self.like(self.range_of(t.full_tensor()).clone()), cast(Any, t)
        changed.__class__ = self.plain()
        changed._local_tensor, changed._spec, changed.flat_placement = cut._local_tensor, cut._spec, cut.flat_placement
        changed.counted = cut.counted

    @classmethod
    def plain(cls) -> type[FlatTensor]:
        """The class that knows torch's operations."""
        raise NotImplementedError

    def before_write(self, name: str, written: Sequence[FlatTensor]) -> None:
        """Called before an operation of this name writes to what optimizers were given. Raises ShardError."""

    @property
    def __tensor_flatten__(self) -> Any:
        """Not for torch.compile; without it `module.to()` and the like assign `.data`, and swap no objects."""
        raise AttributeError("__tensor_flatten__")

    def __repr__(self) -> str:  # type: ignore[override]
        start, stop = self.flat_placement.own
        return f"{type(self).__name__}(shape={tuple(self.shape)}, elements [{start}, {stop})={self._local_tensor})"

    # -- whole and local --------------------------------------------------------------------------------------------

    def whole(self) -> Tensor:
        """The whole tensor, a copy outside of autograd; collective in the shard group."""
        placement = self.flat_placement
        parts = gather_parts(placement.mesh, self._local_tensor.detach(), placement.ranges, self.numel())
        return parts.view(self.shape)

    def range_of(self, whole: Tensor) -> Tensor:
        """[m], this rank's range of a whole tensor, which is expanded to this shape."""
        start, stop = self.flat_placement.own
        return whole.expand(self.shape).reshape(-1)[start:stop]

    def full_tensor(self, *, grad_placements: Any = None) -> Tensor:
        """The whole tensor; differentiable, with the mean of the ranks' gradients; collective."""
        whole: Tensor = _Whole.apply(self)  # type: ignore[no-untyped-call]
        return whole

    def redistribute(self, device_mesh: DeviceMesh | None = None, placements: Any = None, **options: Any) -> DTensor:
        """The same values as one of torch's DTensors on the same mesh; collective."""
        whole = replicated(self.full_tensor(), self.device_mesh)
        return whole if placements is None else whole.redistribute(device_mesh, placements, **options)

    def to_local(self, *, grad_placements: Any = None) -> Tensor:
        """[m], this rank's range of elements; differentiable. `copy_` takes a whole tensor too."""
        local: Tensor = _Local.apply(self)  # type: ignore[no-untyped-call]
        return local

    def data_ptr(self) -> int:
        """None of its own; by it torch tells wrappers from tensors with a storage."""
        return 0

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        if value.dtype != self.dtype or value.shape != self.shape:
            raise ShardError("a sharded tensor cannot be given data of another shape or dtype; make a new one")
        self.detach().copy_(value)

    # -- copies -----------------------------------------------------------------------------------------------------

    def __deepcopy__(self, memo: Any) -> FlatTensor:
        copy = self.like(self._local_tensor.detach().clone())
        copy.requires_grad_(self.requires_grad)
        return copy

    # -- torch.distributed.checkpoint -------------------------------------------------------------------------------

    def _boxes(self) -> list[tuple[Range, ChunkStorageMetadata]]:
        parts = boxes(tuple(self.shape), *self.flat_placement.own)
        return [(r, ChunkStorageMetadata(offsets=torch.Size(at), sizes=torch.Size(size))) for r, at, size in parts]

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self._local_tensor)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for _, chunk in self._boxes()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [chunk for _, chunk in self._boxes()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        begin, chunks = self.flat_placement.own[0], self._boxes()
        for (start, stop), chunk in chunks:
            if chunk.offsets == index.offset:
                part = self._local_tensor.detach()[start - begin : stop - begin].view(chunk.sizes)
                return part if len(chunks) == 1 else _beside_others(part, index.fqn)
        raise ShardError(f"{index.fqn}: this rank holds no part that begins at {index.offset}")


def _beside_others(part: Tensor, fqn: str) -> Tensor:
    """One of several parts of a tensor on this rank. Files of safetensors have one part of each name: torch's writer would
    keep the last, and alone of all writers asks for the layout."""

    class Part(Tensor):
        @property
        def layout(self) -> torch.layout:  # type: ignore[override]
            raise ShardError(
                f"{fqn} is in several parts on a rank, of which a file of safetensors keeps one; give the writer whole "
                "tensors on rank 0, as from get_model_state_dict with full_state_dict=True, or use FileSystemWriter"
            )

        def __reduce_ex__(self, protocol: Any) -> Any:
            with torch._C.DisableTorchFunctionSubclass():
                plain: Any = self.as_subclass(Tensor)
                return plain.__reduce_ex__(protocol)

    return part.as_subclass(Part)


class _LocalPart(Tensor):
    """The result of `to_local`: torch copies whole tensors into the local tensors of replicated DTensors."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    range_of: Callable[[Tensor], Tensor]

    def copy_(self, source: Tensor, non_blocking: bool = False) -> Self:
        part = source if source.shape == self.shape else self.range_of(source)
        super().copy_(part, non_blocking=non_blocking)
        return self


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: FlatTensor) -> Tensor:
        ctx.like = t.like(t._local_tensor.detach())
        return t.whole()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> FlatTensor:
        mean = mean_over_ranks(grad, ctx.like.flat_placement.mesh.plain_mesh)
        own: FlatTensor = ctx.like.like(ctx.like.range_of(mean))
        return own


class _Local(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: FlatTensor) -> Tensor:
        ctx.like = t.like(t._local_tensor.detach())
        local = t._local_tensor.detach().as_subclass(_LocalPart)
        local.range_of = ctx.like.range_of
        return local

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> FlatTensor:
        own: FlatTensor = ctx.like.like(grad)
        return own


def mean_over_ranks(grad: Tensor, mesh: DeviceMesh) -> Tensor:
    """A gradient of what all ranks have alike, to which each adds its own data's part."""
    summed = grad.contiguous().clone()
    with answered(mesh.mesh.flatten().tolist(), "(the gradient of a whole tensor)"):
        for dimension in range(mesh.ndim):
            dist.all_reduce(summed, group=mesh.get_group(dimension))
    return summed.div_(mesh.size())


def replicated(whole: Tensor, mesh: DeviceMesh) -> DTensor:
    """A tensor that is the same on all ranks, as a DTensor."""
    made: DTensor = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return made


Box = tuple[Range, tuple[int, ...], tuple[int, ...]]  # the range of its elements, its offsets and its sizes


def boxes(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    """Elements [start, stop) of a tensor of `shape` as boxes. Of a matrix: the end of one row, whole rows, and the beginning
    of another."""
    if start >= stop:
        return []
    if not shape:
        return [((start, stop), (), ())]
    row = math.prod(shape[1:])

    def in_row(at: int, start: int, stop: int) -> list[Box]:
        begin = at * row
        inside = boxes(shape[1:], start - begin, stop - begin)
        return [((a + begin, b + begin), (at, *offsets), (1, *sizes)) for (a, b), offsets, sizes in inside]

    first, last = -(-start // row), stop // row  # whole rows [first, last)
    if first > last:  # within one row
        return in_row(last, start, stop)
    rest = (0,) * (len(shape) - 1)
    rows: list[Box] = [((first * row, last * row), (first, *rest), (last - first, *shape[1:]))] if first < last else []
    return [*in_row(first - 1, start, first * row), *rows, *in_row(last, last * row, stop)]
