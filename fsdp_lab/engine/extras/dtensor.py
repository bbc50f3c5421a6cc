"""`FlatDTensor`, a tensor of which each rank holds a range of elements, counted in row order.

A flat buffer is cut wherever its shards end, also in the middle of a row, which no placement of torch's can say. So this is
a DTensor whose local tensor is that range, [m], and whose shape is the whole tensor's. It is what `module.parameters()`
yields between steps, and what gradients, optimizer states and a `state_dict` are made of. Distributed Checkpoint stores it
under its name and shape, in boxes, and loads it from any other layout. There are three kinds of torch's operations.

1. Element-wise ones (arithmetic, copies, an optimizer's foreach and fused kernels) run on the local ranges.
2. Norms, and GradScaler's search for what is not finite, run on the local ranges and are then reduced over the ranks.
3. All others run on the gathered tensors, and return replicated DTensors; what they write is cut again. Every rank must
   call them.

Views are refused unless they are ranges of elements again, as a row is: what were written to another one would be lost.

`placements` reads as `Replicate()`, torch's only placement by which a whole tensor may be copied into one of these."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import Tensor, distributed as dist, nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.utils import _pytree as pytree

from fsdp_lab.engine.collectives import ShardError
from fsdp_lab.engine.extras.placement import (
    FlatPlacement,
    FlatRun,
    Replica,
    boxes,
    by_name,
    by_run,
    converted,
    cuts_of,
    has_plain,
    is_view,
    mean_over_ranks,
    norms_of,
    of_ranks,
    parts_of,
    replicated,
    writable,
    written,
)
from fsdp_lab.engine.layout import Range
from fsdp_lab.engine.mesh import ShardMesh, gather_parts, letting_go

Shape = Sequence[int]
aten: Any = torch.ops.aten
_HELD = ("_local_tensor", "_spec", "flat_placement", "counted", "run")  # what a tensor is made of
_spec, _flat_placement, _counted = map(operator.attrgetter, _HELD[1:4])
_COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")  # libraries of operations


class FlatDTensor(DTensor):
    """See the module. Make it by `of`.

    Attributes:
        flat_placement: which elements each rank holds.
        norm_beside: its norm, by order and dtype, found together with those of other tensors.
        run: what its local tensor is a part of.
        counted: the tensor whose version says that this one, or a view of it, was written to. Views that are made in a
            dispatch mode have versions of their own.
        before_write: called with an operation's name before it writes to what optimizers got. Raises ShardError."""

    flat_placement: FlatPlacement
    counted: Tensor
    run: FlatRun | None
    norm_beside: Callable[[float, torch.dtype | None], Tensor | None] | None = None
    given = False  # to an optimizer
    before_write: Callable[[str, Sequence[Any]], None]

    @classmethod
    def of(cls, local: Tensor, shape: Shape, placement: FlatPlacement, *, requires_grad: bool = False) -> Self:
        """local: [m], this rank's range of a tensor of `shape`."""
        mesh = placement.mesh.device_mesh
        meta = TensorMeta(torch.Size(shape), torch.empty(shape, device="meta").stride(), local.dtype)
        spec = DTensorSpec(mesh, (Replicate(),) * mesh.ndim, tensor_meta=meta)
        return cls._made(local, spec, placement, requires_grad=requires_grad)

    @classmethod
    def _made(
        cls, local: Tensor, spec: Any, placement: FlatPlacement, run: Any = None, *, requires_grad: bool = False
    ) -> Self:
        make: Any = DTensor.__new__
        made: Self = make(cls, local, spec, requires_grad=requires_grad)
        made.flat_placement, made.counted, made.run = placement, local, run
        return made

    def like(self, local: Tensor, shape: Shape | None = None, placement: FlatPlacement | None = None) -> FlatDTensor:
        """A tensor of other values, which is cut as this one is."""
        if shape is None and local.dtype == self.dtype:  # an optimizer makes many
            return FlatDTensor._made(local, self._spec, self.flat_placement)
        return FlatDTensor.of(local, self.shape if shape is None else shape, placement or self.flat_placement)

    def viewed(self, local: Tensor, shape: Shape | None = None, placement: FlatPlacement | None = None) -> FlatDTensor:
        """A view of this one, which then counts as written to where the view is."""
        view = self.like(local, shape, placement)
        view.counted = self.counted
        return view

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return _dispatch(func, args, kwargs or {})

    # This is not for torch.compile; without it `module.to()` and the like assign `.data`, and swap no objects.
    __tensor_flatten__: Any = property()  # that cannot be read

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
        like, mesh = self.like(self._local_tensor.detach()), self.flat_placement.mesh.plain_mesh
        return converted(self, FlatDTensor.whole, lambda grad: like.like(like.range_of(mean_over_ranks(grad, mesh))))

    def redistribute(self, device_mesh: DeviceMesh | None = None, placements: Any = None, **options: Any) -> DTensor:
        """The same values as one of torch's DTensors on the same mesh; collective."""
        whole = replicated(self.full_tensor(), self.device_mesh)
        return whole if placements is None else whole.redistribute(device_mesh, placements, **options)

    def to_local(self, *, grad_placements: Any = None) -> Tensor:
        """[m], this rank's range of elements; differentiable. `copy_` takes a whole tensor too."""
        like = self.like(self._local_tensor.detach())

        def local(t: FlatDTensor) -> Tensor:
            part = t._local_tensor.detach().as_subclass(_LocalPart)
            part.range_of = like.range_of
            return part

        return converted(self, local, like.like)

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

    def __deepcopy__(self, memo: Any) -> FlatDTensor:
        """Of a parameter one of nobody's, with the values of now, such as an anchor to stay close to."""
        local, placement = self._local_tensor.detach().clone(), self.flat_placement
        copy: Any = FlatDTensor.of(local, self.shape, placement, requires_grad=self.requires_grad)
        copy._is_param = isinstance(self, nn.Parameter)
        return copy  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """This rank's range, which the same rank may read again."""
        local, placement = self._local_tensor.detach(), self.flat_placement
        where = placement.ranges, placement.mesh.device_mesh, (dist.get_rank(), dist.get_world_size())
        return restored, (local, tuple(self.shape), self.requires_grad, *where)

    # -- torch.distributed.checkpoint -------------------------------------------------------------------------------

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        size, properties = self.size(), TensorProperties.create_from_tensor(self._local_tensor)
        data = [TensorWriteData(chunk=c, properties=properties, size=size) for c in self.__create_chunk_list__()]
        kind = WriteItemType.SHARD
        return [WriteItem(index=MetadataIndex(fqn, d.chunk.offsets), type=kind, tensor_data=d) for d in data]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [chunk for _, chunk in boxes(self.shape, *self.flat_placement.own)]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        begin, chunks = self.flat_placement.own[0], [*boxes(self.shape, *self.flat_placement.own)]
        for (start, stop), chunk in chunks:
            if chunk.offsets == index.offset:
                part = self._local_tensor.detach()[start - begin : stop - begin].view(chunk.sizes)
                return part if len(chunks) == 1 else _beside_others(part, index.fqn)
        raise ShardError(f"{index.fqn}: this rank holds no part that begins at {index.offset}")


def restored(
    local: Tensor, shape: Shape, requires_grad: bool, ranges: tuple[Range, ...], mesh: DeviceMesh, rank: Range
) -> FlatDTensor:
    """A tensor that a rank had saved by `torch.save`; `rank`: which one it was, and of how many. Raises ShardError on
    another."""
    now = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else None
    if now != tuple(rank):
        here = "there is no process group" if now is None else f"this is rank {now[0]} of {now[1]}"
        raise ShardError(
            f"a sharded tensor was saved by rank {rank[0]} of {rank[1]}, and {here}; let each rank load the file that it "
            "saved itself, or save with torch.distributed.checkpoint, or full_state(model)"
        )
    placement = FlatPlacement(mesh=ShardMesh.of(letting_go(mesh)), ranges=ranges)
    return FlatDTensor.of(local, shape, placement, requires_grad=requires_grad)


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


# -- torch's operations ----------------------------------------------------------------------------------------------


def _dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`func` of arguments some of which are `FlatDTensor`s."""
    if func.namespace in _COLLECTIVES:
        raise ShardError(
            f"{func._schema.name} was given a sharded tensor, of which each rank holds other elements; gradients are the "
            "mean over the ranks already, and else give it to_local() or full_tensor()"
        )
    if isinstance(args[0], (list, tuple)) and (results := _on_equal_lists(func, args, kwargs)) is not NotImplemented:
        return results
    changed: list[FlatDTensor] = []
    if func._schema.is_mutable:
        _cut_what_is_written(args)
        changed = [t for t in written(func, args, kwargs) if isinstance(t, FlatDTensor)]
        if changed and changed[0].given:
            changed[0].before_write(func._schema.name.removeprefix("aten::"), changed)
    result = _run(func, args, kwargs, changed)
    if changed:
        torch.autograd.graph.increment_version([t.counted for t in changed])  # torch raises that of the wrapper alone
    return result


def _cut_what_is_written(args: tuple[Any, ...]) -> None:
    """torch loads a whole optimizer state as replicated DTensors; the first step beside sharded tensors cuts them."""
    lists = [a if isinstance(a, (list, tuple)) else [a] for a in args]
    for i, t in enumerate(lists[0]):
        if type(t) is DTensor:
            beside = (some[i] for some in lists[1:] if len(some) == len(lists[0]))
            like = next((o for o in beside if isinstance(o, FlatDTensor) and o.shape == t.shape), None)
            if like is not None:
                cut: Any = like.like(like.range_of(t.full_tensor()).clone())
                t.__class__ = FlatDTensor
                for name in _HELD:
                    setattr(t, name, getattr(cut, name))


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], changed: list[FlatDTensor]) -> Any:
    packet = func.overloadpacket
    if packet in _SPECIAL and (result := _SPECIAL[packet](func, args, kwargs)) is not NotImplemented:
        return result
    name = func._schema.name.removeprefix("aten::")
    if name.startswith(("_foreach_", "_fused_")):
        return _on_lists(func, args, kwargs)
    is_pointwise = torch.Tag.pointwise in func.tags or packet in _POINTWISE
    if is_pointwise and (result := _on_ranges(func, args, kwargs)) is not NotImplemented:
        return result
    if torch.Tag.nondeterministic_seeded in func.tags and name.endswith("_") and isinstance(args[0], FlatDTensor):
        return _draw(func, args, kwargs)
    return _on_whole(func, args, kwargs, changed)


# -- element-wise ----------------------------------------------------------------------------------------------------

_COPY = "copy_ clone _to_copy zero_ fill_ zeros_like ones_like full_like empty_like lift_fresh masked_fill_ masked_fill"
_POINTWISE = {getattr(aten, name) for name in _COPY.split()}  # beside those that torch says are


def _on_ranges(func: Any, args: Any, kwargs: Any) -> Any:
    """NotImplemented where what is written, or the result's shape, is cut otherwise than all sharded arguments."""
    tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    like = [*written(func, args, kwargs), *(t for t in tensors if isinstance(t, FlatDTensor))][0]
    try:
        shape = torch.broadcast_shapes(*(t.shape for t in tensors))  # type: ignore[no-untyped-call]
    except RuntimeError:
        return NotImplemented
    if not isinstance(like, FlatDTensor) or like.shape != shape:
        return NotImplemented
    local_args, local_kwargs = pytree.tree_map_only(Tensor, lambda t: _range(t, like), (args, kwargs))
    local_kwargs.pop("memory_format", None)  # a range has one dimension
    local = func(*local_args, **local_kwargs)
    if not isinstance(local, Tensor):
        return local
    return like if func._schema.is_mutable else like.like(local)


def _range(t: Tensor, like: FlatDTensor) -> Tensor:
    """This rank's range of an argument of an element-wise operation; of a number, the number."""
    if isinstance(t, FlatDTensor) and t.flat_placement.is_as(like.flat_placement) and t.shape == like.shape:
        return t._local_tensor
    whole = _gathered(t)
    return whole if whole.dim() == 0 else like.range_of(whole)


def _on_lists(func: Any, args: Any, kwargs: Any) -> Any:
    """Foreach and fused kernels: of each position the first argument says how it is cut."""
    lists = [a for a in (*args, *kwargs.values()) if isinstance(a, (list, tuple))]
    alike = {i: t for some in reversed(lists) for i, t in enumerate(some) if isinstance(t, FlatDTensor)}
    lone = next(iter(alike.values()))
    beside = (some for some in writable(func, args, kwargs) if isinstance(some, (list, tuple)))
    if any(not isinstance(t, FlatDTensor) and t.dim() for some in beside for i, t in enumerate(some) if i in alike):
        raise of_ranks(func)

    def local(a: Any, like: FlatDTensor = lone) -> Any:
        if isinstance(a, (list, tuple)):
            return [local(t, alike[i]) if i in alike else t for i, t in enumerate(a)]
        return _range(a, like) if isinstance(a, Tensor) else a

    results = func(*map(local, args), **{k: local(v) for k, v in kwargs.items()})
    if isinstance(results, (list, tuple)):
        return [alike[i].like(t) if i in alike else t for i, t in enumerate(results)]
    return results


def _on_equal_lists(func: Any, args: Any, kwargs: Any) -> Any:
    """A foreach or fused kernel of lists that are all cut alike, as those of an optimizer, of which there are many."""
    first, name = args[0], func._schema.name
    if not name.startswith(("aten::_foreach_", "aten::_fused_")) or func.overloadpacket in _SPECIAL:
        return NotImplemented
    try:
        placements = [*map(_flat_placement, first)]
        are_alike = all(_is_alike(a, placements) for a in (*args, *kwargs.values()))
    except AttributeError:  # another tensor is in a list
        are_alike = False
    if not are_alike:
        return NotImplemented
    changed = [some for some in writable(func, args, kwargs) if some and isinstance(some[0], FlatDTensor)]
    if changed and changed[0][0].given:
        changed[0][0].before_write(name.removeprefix("aten::"), changed[0])
    cuts = cuts_of(args, placements, len(changed)) if name.startswith("aten::_foreach_") else ()
    results = func(*(by_run(a, cuts) for a in args), **{k: by_run(v, cuts) for k, v in kwargs.items()})
    for some in changed:
        torch.autograd.graph.increment_version([*map(_counted, some)])
    if results is None:
        return None
    parts, runs = parts_of(results, first, cuts) if cuts else (results, [None] * len(results))
    if parts[0].dtype != first[0].dtype:
        return [like.like(local) for like, local in zip(first, parts, strict=True)]
    return [*map(FlatDTensor._made, parts, map(_spec, first), placements, runs)]


def _is_alike(a: Any, placements: list[FlatPlacement]) -> bool:
    """Returns whether an argument is tensors with these placements, or numbers, or the counts of steps. Raises
    AttributeError."""
    if not isinstance(a, (list, tuple)) or not a or not isinstance(a[0], Tensor):
        return not isinstance(a, Tensor)
    return all(type(t) is Tensor and not t.dim() for t in a) or [*map(_flat_placement, a)] == placements


def _draw(func: Any, args: Any, kwargs: Any) -> Any:
    """Random values in place: each rank draws the whole tensor, so that equal seeds give what one process draws. Replicas
    take those of the first one, whatever their seeds."""
    t: FlatDTensor = args[0]
    whole, mesh = torch.empty(t.shape, dtype=t.dtype, device=t._local_tensor.device), t.flat_placement.mesh
    func(whole, *args[1:], **kwargs)
    part = t.range_of(whole).to(mesh.device)
    if mesh.replicate_group is not None and part.numel():
        with mesh.answered("random values"):
            dist.broadcast(part, src=dist.get_global_rank(mesh.replicate_group, 0), group=mesh.replicate_group)
    t._local_tensor.copy_(part)
    return t


# -- reductions over ranks -------------------------------------------------------------------------------------------


def _norm(func: Any, args: Any, kwargs: Any) -> Any:
    t, given = args[0], by_name(func, args, kwargs)
    order, dims, dtype = given.get("ord", given.get("p", 2)), given.get("dim"), given.get("dtype")
    if not isinstance(t, FlatDTensor) or (dims and len(dims) != t.dim()) or given.get("keepdim"):
        return NotImplemented
    order = 2.0 if order is None else float(order)
    norm = None if t.norm_beside is None else t.norm_beside(order, dtype)
    return _norms([t], order, dtype)[0] if norm is None else norm


def _foreach_norm(func: Any, args: Any, kwargs: Any) -> Any:
    given = by_name(func, args, kwargs)
    order, dtype = float(given.get("ord", 2)), given.get("dtype")
    sharded = [t for t in args[0] if isinstance(t, FlatDTensor)]
    norms, mesh = iter(_norms(sharded, order, dtype)), sharded[0].flat_placement.mesh.plain_mesh
    others = (torch.linalg.vector_norm(t, order, dtype=dtype) for t in args[0] if not isinstance(t, FlatDTensor))
    return [next(norms) if isinstance(t, FlatDTensor) else Replica.of(_gathered(next(others)), mesh) for t in args[0]]


def _norms(tensors: Sequence[FlatDTensor], order: float, dtype: torch.dtype | None) -> list[Tensor]:
    """The norms of the whole tensors, by one all-reduce for each shard group."""
    norms: dict[int, Tensor] = {}
    for group in dict.fromkeys(t.flat_placement.mesh.shard_group for t in tensors):
        some = [t for t in tensors if t.flat_placement.mesh.shard_group is group]
        each = norms_of([t._local_tensor for t in some], some[0].flat_placement.mesh, order, dtype)
        norms |= {id(t): Replica.of(each[i], t.flat_placement.mesh.plain_mesh) for i, t in enumerate(some)}
    return [norms[id(t)] for t in tensors]


def _unscale(func: Any, args: Any, kwargs: Any) -> None:
    """GradScaler: where a gradient is not finite on one rank, it is so for all."""
    gradients, found_inf, inverse = args
    local = [t._local_tensor if isinstance(t, FlatDTensor) else t for t in gradients]
    func(local, found_inf, inverse, **kwargs)
    meshes = [t.flat_placement.mesh for t in gradients if isinstance(t, FlatDTensor)]
    with meshes[0].answered("GradScaler"):
        for group in dict.fromkeys(g for m in meshes for g in (m.shard_group, m.replicate_group) if g is not None):
            dist.all_reduce(found_inf, op=dist.ReduceOp.MAX, group=group)


# -- on whole tensors ------------------------------------------------------------------------------------------------


def _on_whole(func: Any, args: Any, kwargs: Any, changed: list[FlatDTensor]) -> Any:
    """Gather, run, and cut again what was written."""
    if is_view(func):
        raise ShardError(
            f"{func._schema.name} of a sharded tensor would be a view of elements that are on other ranks; call the module "
            "that was sharded, or its root, take full_tensor(), or use `with unshard(model):`"
        )
    if not changed and has_plain((args, kwargs)):
        raise of_ranks(func)
    sharded = next(t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, FlatDTensor))
    mesh = sharded.flat_placement.mesh.plain_mesh
    whole: dict[int, Tensor] = {}
    given, named = pytree.tree_map_only(Tensor, lambda t: whole.setdefault(id(t), _gathered(t)), (args, kwargs))
    result = func(*given, **named)
    for t in changed:
        if whole[id(t)].shape != t.shape:
            raise ShardError(f"{func._schema.name} would give a sharded tensor another shape; give one with the values to "
                             "its copy_, or use `with unshard(model):`")  # fmt: skip
        t._local_tensor.copy_(t.range_of(whole[id(t)]))
    same = [*changed, *(a for a, b in zip(args, given, strict=True) if b is result)]
    if same:
        return same[0]
    return pytree.tree_map_only(Tensor, lambda t: replicated(t, mesh) if t.dim() else Replica.of(t, mesh), result)


def _gathered(t: Tensor) -> Tensor:
    if isinstance(t, FlatDTensor):
        return t.whole()
    if isinstance(t, Replica):
        return t._local_tensor
    return t.full_tensor() if isinstance(t, DTensor) else t


# -- views that are ranges again -------------------------------------------------------------------------------------


def _viewed(func: Any, args: Any, kwargs: Any) -> Any:
    """The same elements, or a range of them, in another shape or type; of a complex number, its two parts."""
    t, placement = args[0], args[0].flat_placement
    view = func(torch.empty(t.shape, dtype=t.dtype, device="meta"), *args[1:], **kwargs)
    each = t.dtype.itemsize // view.dtype.itemsize  # elements of the view in one of the tensor
    if not view.is_contiguous() or not each:
        return NotImplemented
    begin, local = view.storage_offset(), t._local_tensor.detach().view(view.dtype)
    part = placement if view.numel() == t.numel() else placement.part(begin, begin + view.numel(), each=each)
    (start, stop), first = part.own, each * placement.own[0] - begin
    return t.viewed(local[start - first : stop - first], view.shape, part)


def _empty(func: Any, args: Any, kwargs: Any) -> Any:
    """`t.new_zeros(shape)` and the like: cut as `t` is where it has as many elements, replicated otherwise."""
    t, size = args[0], torch.Size(args[1])
    is_alike = size.numel() == t.numel()
    made = func(t._local_tensor, t._local_tensor.shape if is_alike else size, *args[2:], **kwargs)
    return t.like(made, size) if is_alike else replicated(made, t.flat_placement.mesh.plain_mesh)


_SPECIAL: dict[Any, Callable[[Any, Any, Any], Any]] = {
    aten.linalg_vector_norm: _norm,
    aten.norm: _norm,
    aten._foreach_norm: _foreach_norm,
    aten._foreach_max: lambda func, args, kwargs: [torch.max(t) for t in args[0]],
    aten._amp_foreach_non_finite_check_and_unscale_: _unscale,
    **dict.fromkeys((aten.detach, aten.alias), lambda func, args, kwargs: args[0].viewed(func(args[0]._local_tensor))),
    **dict.fromkeys((aten.view, aten._unsafe_view, aten._reshape_alias, aten.unsqueeze, aten.squeeze), _viewed),
    **dict.fromkeys((aten.select, aten.slice, aten.view_as_real), _viewed),
    **dict.fromkeys((aten.new_zeros, aten.new_empty, aten.new_ones, aten.new_full), _empty),
}
