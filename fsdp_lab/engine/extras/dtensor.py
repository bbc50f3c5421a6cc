"""`FlatDTensor`, of which each rank holds a range of elements (flat_tensor.py), and what torch's operations do with it.

There are three kinds.

1. Element-wise ones (arithmetic, copies, an optimizer's foreach and fused kernels) run on the local ranges.
2. Norms, and GradScaler's search for what is not finite, run on the local ranges and are then reduced over the ranks.
3. All others run on the gathered tensors; what they write is cut again. Every rank must call them.

Views are refused unless they are ranges of elements again, as a row is: what were written to another one would be lost.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, distributed as dist
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from fsdp_lab.engine.collectives import ShardError
from fsdp_lab.engine.extras.flat_tensor import FlatPlacement, FlatTensor, mean_over_ranks, replicated
from fsdp_lab.engine.layout import Range
from fsdp_lab.engine.mesh import ShardMesh, letting_go

aten: Any = torch.ops.aten
_flat_placement, _local_tensor, _counted = map(operator.attrgetter, ("flat_placement", "_local_tensor", "counted"))
_COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")  # libraries of operations


def dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`func` of arguments some of which are `FlatTensor`s."""
    if func.namespace in _COLLECTIVES:
        raise ShardError(
            f"{func._schema.name} was given a sharded tensor, of which each rank holds other elements; gradients are the "
            "mean over the ranks already, and else give it to_local() or full_tensor()"
        )
    if isinstance(args[0], (list, tuple)) and (ran := _on_equal_lists(func, args, kwargs)) is not None:
        return ran[0]
    if not func._schema.is_mutable:
        return _run(func, args, kwargs)
    _cut_what_is_written(args)
    written = [t for t in _written(func, args, kwargs) if isinstance(t, FlatTensor)]
    if written and written[0].given:
        written[0].before_write(func._schema.name.removeprefix("aten::"), written)
    result = _run(func, args, kwargs)
    if written:
        torch.autograd.graph.increment_version([t.counted for t in written])  # torch raises that of the wrapper alone
    return result


def _cut_what_is_written(args: tuple[Any, ...]) -> None:
    """torch loads a whole optimizer state as replicated DTensors; the first step beside sharded tensors cuts them."""
    lists = [a if isinstance(a, (list, tuple)) else [a] for a in args]
    for i, t in enumerate(lists[0]):
        if type(t) is DTensor:
            beside = (some[i] for some in lists[1:] if len(some) == len(lists[0]))
            like = next((o for o in beside if isinstance(o, FlatTensor) and o.shape == t.shape), None)
            if like is not None:
                like.adopt(t)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments that `func` writes to, in place or by `out`."""
    given = [g if isinstance(g, (list, tuple)) else (g,) for g in _writable(func, args, kwargs)]
    return [t for some in given for t in some if isinstance(t, Tensor)]


def _writable(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments, tensors or lists of them, that `func` writes to."""
    if not func._schema.is_mutable:
        return []
    given = _by_name(func, args, kwargs)
    return [given.get(a.name) for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]


def _by_name(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    return {a.name: v for a, v in zip(func._schema.arguments, args, strict=False)} | kwargs


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    packet = func.overloadpacket
    if packet in _SPECIAL:
        result = _SPECIAL[packet](func, args, kwargs)
        if result is not NotImplemented:
            return result
    name = func._schema.name.removeprefix("aten::")
    if name.startswith(("_foreach_", "_fused_")):
        return _on_lists(func, args, kwargs)
    if torch.Tag.pointwise in func.tags or packet in _POINTWISE:
        like = _like(func, args, kwargs)
        if like is not None:
            return _on_ranges(func, args, kwargs, like)
    if torch.Tag.nondeterministic_seeded in func.tags and name.endswith("_") and isinstance(args[0], FlatTensor):
        return _draw(func, args, kwargs)
    return _on_whole(func, args, kwargs)


# -- element-wise ----------------------------------------------------------------------------------------------------

_COPIES = (
    "copy_ clone _to_copy zero_ fill_ zeros_like ones_like full_like empty_like lift_fresh masked_fill_ masked_fill"
)
_POINTWISE = {getattr(aten, name) for name in _COPIES.split()}  # beside those that torch says are


def _like(func: Any, args: Any, kwargs: Any) -> FlatTensor | None:
    """The argument as which the result is cut; None where what is written, or the result's shape, is another."""
    tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    like = next(iter(_written(func, args, kwargs)), None)
    if like is None:
        like = next(t for t in tensors if isinstance(t, FlatTensor))
    elif not isinstance(like, FlatTensor):
        return None
    broadcast: Any = torch.broadcast_shapes
    try:
        shape = broadcast(*(t.shape for t in tensors))
    except RuntimeError:
        return None
    return like if like.shape == shape else None


def _on_ranges(func: Any, args: Any, kwargs: Any, like: FlatTensor) -> Any:
    local_args, local_kwargs = pytree.tree_map_only(Tensor, lambda t: _range(t, like), (args, kwargs))
    local_kwargs.pop("memory_format", None)  # a range has one dimension
    local = func(*local_args, **local_kwargs)
    if not isinstance(local, Tensor):
        return local
    return like if func._schema.is_mutable else like.like(local)


def _range(t: Tensor, like: FlatTensor) -> Tensor:
    """This rank's range of an argument of an element-wise operation; of a number, the number."""
    if isinstance(t, FlatTensor):
        if t.flat_placement.is_as(like.flat_placement) and t.shape == like.shape:
            return t._local_tensor
        t = t.whole()
    elif isinstance(t, DTensor):
        t = t._local_tensor if isinstance(t, Replica) else t.full_tensor()
    return t if t.dim() == 0 else like.range_of(t)


def _on_lists(func: Any, args: Any, kwargs: Any) -> Any:
    """Foreach and fused kernels: of each position the first argument says how it is cut."""
    lists = [a for a in (*args, *kwargs.values()) if isinstance(a, (list, tuple)) and _has_tensors(a)]
    alike: dict[int, FlatTensor] = {}
    for some in lists:
        for i, t in enumerate(some):
            if isinstance(t, FlatTensor):
                alike.setdefault(i, t)
    lone = next(iter(alike.values()))
    beside = (some for some in _writable(func, args, kwargs) if isinstance(some, (list, tuple)))
    if any(not isinstance(t, FlatTensor) and t.dim() for some in beside for i, t in enumerate(some) if i in alike):
        raise _of_ranks(func)

    def local(a: Any) -> Any:
        if isinstance(a, (list, tuple)) and _has_tensors(a):
            return [_range(t, alike[i]) if i in alike else t for i, t in enumerate(a)]
        return _range(a, lone) if isinstance(a, Tensor) else a

    results = func(*map(local, args), **{k: local(v) for k, v in kwargs.items()})
    if isinstance(results, (list, tuple)):
        return [alike[i].like(t) if i in alike else t for i, t in enumerate(results)]
    return results


def _on_equal_lists(func: Any, args: Any, kwargs: Any) -> tuple[Any] | None:
    """What a foreach or fused kernel returns where all its lists are cut alike, as those of an optimizer, of which there are
    many; None where they are not."""
    first, name = args[0], func._schema.name
    if not name.startswith(("aten::_foreach_", "aten::_fused_")) or func.overloadpacket in _SPECIAL:
        return None
    try:
        placements = [*map(_flat_placement, first)]
        local_args = [_local_list(a, placements) for a in args]
        local_kwargs = {k: _local_list(v, placements) for k, v in kwargs.items()}
    except AttributeError:  # another tensor is among them
        return None
    written = [some for some in _writable(func, args, kwargs) if some and isinstance(some[0], FlatTensor)]
    if written and written[0][0].given:
        written[0][0].before_write(name.removeprefix("aten::"), written[0])
    results = func(*local_args, **local_kwargs)
    for some in written:
        torch.autograd.graph.increment_version([*map(_counted, some)])
    if results is None:
        return (None,)
    if results[0].dtype != first[0].dtype:
        return ([like.like(local) for like, local in zip(first, results, strict=True)],)
    made: list[FlatTensor] = []
    for like, local in zip(first, results, strict=True):
        one: Any = FlatDTensor.__new__(FlatDTensor, local, like._spec, requires_grad=False)
        one.flat_placement, one.counted = like.flat_placement, local
        made.append(one)
    return (made,)


def _local_list(a: Any, placements: list[FlatPlacement]) -> Any:
    """The local ranges of tensors with these placements; numbers, and the counts of steps, as they are. Raises
    AttributeError."""
    if isinstance(a, Tensor):
        raise AttributeError
    if not isinstance(a, (list, tuple)) or not a or not isinstance(a[0], Tensor):
        return a
    if all(type(t) is Tensor and not t.dim() for t in a):
        return a
    if [*map(_flat_placement, a)] != placements:
        raise AttributeError
    return [*map(_local_tensor, a)]


def _of_ranks(func: Any) -> ShardError:
    return ShardError(
        f"{func._schema.name} was given a sharded tensor and a plain one, which differs between ranks; call the module "
        "that was sharded, or its root, or use `with unshard(model):`"
    )


def _has_tensors(a: Sequence[Any]) -> bool:
    return any(isinstance(t, Tensor) for t in a)


def _draw(func: Any, args: Any, kwargs: Any) -> Any:
    """Random values in place: each rank draws the whole tensor, so that equal seeds give what one process draws. Replicas
    take those of the first one, whatever their seeds."""
    t: FlatTensor = args[0]
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
    t = args[0]
    given = _by_name(func, args, kwargs)
    order, dims = given.get("ord", given.get("p", 2)), given.get("dim")
    if not isinstance(t, FlatTensor) or (dims and len(dims) != t.dim()) or given.get("keepdim"):
        return NotImplemented
    order, dtype = 2.0 if order is None else float(order), given.get("dtype")
    norm = None if t.norm_beside is None else t.norm_beside(order, dtype)
    return _norms_of([t], order, dtype)[0] if norm is None else norm


def _foreach_norm(func: Any, args: Any, kwargs: Any) -> Any:
    given = _by_name(func, args, kwargs)
    order, dtype = float(given.get("ord", 2)), given.get("dtype")
    sharded = [t for t in args[0] if isinstance(t, FlatTensor)]
    norms, mesh = iter(_norms_of(sharded, order, dtype)), sharded[0].flat_placement.mesh.plain_mesh

    def beside(t: Tensor) -> Tensor:
        norm: Tensor = torch.linalg.vector_norm(t, order, dtype=dtype)
        return norm if isinstance(norm, DTensor) else Replica.of(norm, mesh)

    return [next(norms) if isinstance(t, FlatTensor) else beside(t) for t in args[0]]


def _norms_of(tensors: Sequence[FlatTensor], order: float, dtype: torch.dtype | None) -> list[Tensor]:
    """The norms of the whole tensors, by one all-reduce for each shard group."""
    by_group: dict[Any, list[int]] = {}
    for i, t in enumerate(tensors):
        by_group.setdefault(t.flat_placement.mesh.shard_group, []).append(i)
    norms: dict[int, Tensor] = {}
    for indices in by_group.values():
        mesh = tensors[indices[0]].flat_placement.mesh
        each = _norms([tensors[i]._local_tensor for i in indices], mesh, order, dtype)
        norms.update((i, Replica.of(each[j], tensors[i].flat_placement.mesh.plain_mesh)) for j, i in enumerate(indices))
    return [norms[i] for i in range(len(tensors))]


def _norms(ranges: Sequence[Tensor], mesh: ShardMesh, order: float, dtype: torch.dtype | None) -> Tensor:
    """The norms of tensors of which these are a rank's ranges."""
    each, group = torch.stack([_local_norm(t, order, dtype) for t in ranges]).to(mesh.device), mesh.shard_group
    if group is not None:
        with mesh.answered("a norm"):
            _reduce_norms(each, order, group)
    return each


class Norms:
    """Norms of the parts of a tensor, which are asked for one after the other, as by torch's `clip_grad_norm_`: the
    first question is answered for all of them, in one all-reduce, until the tensor is written to."""

    def __init__(self, whole: Tensor, ranges: Sequence[Range], mesh: ShardMesh) -> None:
        self._whole, self._ranges, self._mesh = weakref.ref(whole), ranges, mesh
        self._known: tuple[Any, Any] = None, None  # the question, and the answers

    def norm(self, i: int, order: float, dtype: torch.dtype | None) -> Tensor | None:
        """A tensor of the caller's own; None where the whole is gone."""
        whole = self._whole()
        if whole is None:
            return None
        key = order, dtype, whole._version
        if self._known[0] != key:
            self._known = key, _norms([whole[slice(*r)] for r in self._ranges], self._mesh, order, dtype)
        return Replica.of(self._known[1][i].clone(), self._mesh.plain_mesh)


def _local_norm(local: Tensor, order: float, dtype: torch.dtype | None) -> Tensor:
    if not local.numel():
        nothing = float("inf") if order == float("-inf") else 0.0
        return torch.full((), nothing, dtype=dtype or local.dtype, device=local.device)
    norm: Tensor = torch.linalg.vector_norm(local, order, dtype=dtype)
    return norm


def _reduce_norms(each: Tensor, order: float, group: dist.ProcessGroup) -> None:
    if order in (float("inf"), float("-inf")):
        dist.all_reduce(each, op=dist.ReduceOp.MAX if order > 0 else dist.ReduceOp.MIN, group=group)
    elif order == 0:
        dist.all_reduce(each, op=dist.ReduceOp.SUM, group=group)
    else:
        each.pow_(order)
        dist.all_reduce(each, op=dist.ReduceOp.SUM, group=group)
        each.pow_(1.0 / order)


def _unscale(func: Any, args: Any, kwargs: Any) -> None:
    """GradScaler: where a gradient is not finite on one rank, it is so for all."""
    gradients, found_inf, inverse = args
    local = [t._local_tensor if isinstance(t, FlatTensor) else t for t in gradients]
    func(local, found_inf, inverse, **kwargs)
    meshes = [t.flat_placement.mesh for t in gradients if isinstance(t, FlatTensor)]
    with meshes[0].answered("GradScaler"):
        for group in dict.fromkeys(g for m in meshes for g in (m.shard_group, m.replicate_group) if g is not None):
            dist.all_reduce(found_inf, op=dist.ReduceOp.MAX, group=group)


# -- on whole tensors ------------------------------------------------------------------------------------------------


def _on_whole(func: Any, args: Any, kwargs: Any) -> Any:
    """Gather, run, and cut again what was written."""
    if _is_view(func):
        raise ShardError(
            f"{func._schema.name} of a sharded tensor would be a view of elements that are on other ranks; call the module "
            "that was sharded, or its root, take full_tensor(), or use `with unshard(model):`"
        )
    written = [t for t in _written(func, args, kwargs) if isinstance(t, FlatTensor)]
    if not written and _has_plain((args, kwargs)):
        raise _of_ranks(func)
    sharded = next(t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, FlatTensor))
    mesh = sharded.flat_placement.mesh.plain_mesh
    whole: dict[int, Tensor] = {}
    whole_args, whole_kwargs = pytree.tree_map_only(
        Tensor, lambda t: whole.setdefault(id(t), _gathered(t)), (args, kwargs)
    )
    result = func(*whole_args, **whole_kwargs)
    for t in written:
        if whole[id(t)].shape != t.shape:
            raise ShardError(f"{func._schema.name} would give a sharded tensor another shape; give one with the values to "
                             "its copy_, or use `with unshard(model):`")  # fmt: skip
        t._local_tensor.copy_(t.range_of(whole[id(t)]))
    same = [*written, *(a for a, b in zip(args, whole_args, strict=True) if b is result)]
    if same:
        return same[0]
    return pytree.tree_map_only(Tensor, lambda t: replicated(t, mesh) if t.dim() else Replica.of(t, mesh), result)


def _is_view(func: Any) -> bool:
    return any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)


def _gathered(t: Tensor) -> Tensor:
    if isinstance(t, FlatTensor):
        return t.whole()
    return t.full_tensor() if isinstance(t, DTensor) else t


def _has_plain(given: Any) -> bool:
    """Returns whether one of its tensors may differ between ranks."""
    return any(type(t) is Tensor and t.dim() for t in pytree.tree_leaves(given))


class Replica(DTensor):
    """A number that was reduced, which may be combined with plain tensors; and what is expanded from it."""

    @classmethod
    def of(cls, whole: Tensor, mesh: DeviceMesh) -> Replica:
        make: Any = DTensor.__new__
        made: Replica = make(cls, whole, replicated(whole, mesh)._spec, requires_grad=False)
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """A number that has a graph is a plain one beside plain tensors, which differ between ranks."""
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
            if torch.is_grad_enabled() and not all(isinstance(t, DTensor) for t in tensors):
                args, kwargs = pytree.tree_map_only(
                    cls, lambda t: t.full_tensor() if t.requires_grad and not t.dim() else t, (args, kwargs)
                )
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        written = [t for t in _written(func, args, kwargs) if isinstance(t, cls)]
        if any(isinstance(t, cls) and t.dim() for t in tensors) and not any(isinstance(t, FlatTensor) for t in tensors):
            if _has_plain(tensors):
                raise _of_ranks(func)
        elif not all(isinstance(t, DTensor) for t in tensors):  # numbers among plain tensors
            local_args, local_kwargs = pytree.tree_map_only(cls, lambda t: t._local_tensor, (args, kwargs))
            result = func(*local_args, **local_kwargs)
            return written[0] if written else result
        plain_args, plain_kwargs = pytree.tree_map_only(
            cls, lambda t: replicated(t._local_tensor, t.device_mesh), (args, kwargs)
        )
        result = func(*plain_args, **plain_kwargs)
        if written:
            return written[0]
        is_view = _is_view(func)
        return pytree.tree_map_only(
            DTensor,
            lambda t: cls.of(t._local_tensor, t.device_mesh) if type(t) is DTensor and (is_view or not t.dim()) else t,
            result,
        )

    def full_tensor(self, *, grad_placements: Any = None) -> Tensor:
        """The whole as a plain tensor; differentiable, with the mean of the ranks' gradients."""
        plain: Tensor = _Plain.apply(self)  # type: ignore[no-untyped-call]
        return plain


class _Plain(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: Replica) -> Tensor:
        ctx.mesh = t.device_mesh
        return t._local_tensor.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return mean_over_ranks(grad, ctx.mesh)


# -- views that are ranges again -------------------------------------------------------------------------------------


def _reshaped(func: Any, args: Any, kwargs: Any) -> Any:
    """Gives the same elements, in the same order, another shape or type."""
    t = args[0]
    if func is aten.view.dtype:
        alike = args[1].itemsize == t.dtype.itemsize
        return t.counting(t.like(t._local_tensor.view(args[1]))) if alike else NotImplemented
    shape = func(torch.empty(t.shape, device="meta"), *args[1:], **kwargs).shape
    return t.counting(t.like(t._local_tensor.detach(), shape))


def _as_real(func: Any, args: Any, kwargs: Any) -> FlatTensor:
    """Complex numbers as pairs."""
    t: FlatTensor = args[0]
    ranges = tuple((2 * a, 2 * b) for a, b in t.flat_placement.ranges)
    placement = FlatPlacement(mesh=t.flat_placement.mesh, ranges=ranges)
    return t.counting(t.plain().of(func(t._local_tensor.detach()).view(-1), (*t.shape, 2), placement))


def _select(func: Any, args: Any, kwargs: Any) -> Any:
    t, dim, index = args[0], int(args[1]), int(args[2])
    if not _is_outermost(t, dim):
        return NotImplemented
    index, row = index % t.shape[dim], t.shape[dim + 1 :].numel()
    return _part(t, index * row, (index + 1) * row, (*t.shape[:dim], *t.shape[dim + 1 :]))


def _slice(func: Any, args: Any, kwargs: Any) -> Any:
    given = _by_name(func, args, kwargs)
    t, dim = args[0], given.get("dim", 0)
    if not _is_outermost(t, dim) or given.get("step", 1) != 1:
        return NotImplemented
    start, stop, _ = slice(given.get("start"), given.get("end")).indices(t.shape[dim])
    row, stop = t.shape[dim + 1 :].numel(), max(start, stop)
    return _part(t, start * row, stop * row, (*t.shape[:dim], stop - start, *t.shape[dim + 1 :]))


def _is_outermost(t: FlatTensor, dim: int) -> bool:
    """Returns whether one index of this dimension is a range of elements."""
    return dim >= 0 and t.shape[:dim].numel() == 1


def _part(t: FlatTensor, start: int, stop: int, shape: tuple[int, ...]) -> FlatTensor:
    placement, first = t.flat_placement.part(start, stop), t.flat_placement.own[0]
    a, b = placement.own
    local = t._local_tensor.detach()[start + a - first : start + b - first] if a < b else t._local_tensor.detach()[:0]
    return t.counting(t.plain().of(local, shape, placement))


def _empty(func: Any, args: Any, kwargs: Any) -> Any:
    """`t.new_zeros(shape)` and the like: cut as `t` is where it has as many elements, replicated otherwise."""
    t, size = args[0], torch.Size(args[1])
    options = {"dtype": t.dtype, "device": t._local_tensor.device, **kwargs}
    alike = size.numel() == t.numel()
    local = t._local_tensor if alike else torch.empty(size, dtype=t.dtype, device=t._local_tensor.device)
    options.pop("memory_format", None)
    made = func(local, local.shape, *args[2:], **options)
    return t.like(made, size) if alike else replicated(made, t.flat_placement.mesh.plain_mesh)


def _alias(func: Any, args: Any, kwargs: Any) -> Any:
    return args[0].counting(args[0].like(func(args[0]._local_tensor)))


Special = Callable[[Any, Any, Any], Any]

_SPECIAL: dict[Any, Special] = {
    aten.linalg_vector_norm: _norm,
    aten.norm: _norm,
    aten._foreach_norm: _foreach_norm,
    aten._foreach_max: lambda func, args, kwargs: [torch.max(t) for t in args[0]],
    aten._amp_foreach_non_finite_check_and_unscale_: _unscale,
    aten.view_as_real: _as_real,
    aten.select: _select,
    aten.slice: _slice,
    **dict.fromkeys((aten.detach, aten.alias), _alias),
    **dict.fromkeys((aten.view, aten._unsafe_view, aten._reshape_alias, aten.unsqueeze, aten.squeeze), _reshaped),
    **dict.fromkeys((aten.new_zeros, aten.new_empty, aten.new_ones, aten.new_full), _empty),
}


# -- the class -------------------------------------------------------------------------------------------------------


class FlatDTensor(FlatTensor):
    """A tensor of which each rank holds a range of elements. Make it by `of`."""

    @classmethod
    def plain(cls) -> type[FlatTensor]:
        return FlatDTensor

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return dispatch(func, args, kwargs or {})

    def __reduce_ex__(self, protocol: Any) -> Any:
        """This rank's range, which the same rank may read again."""
        local, placement = self._local_tensor.detach(), self.flat_placement
        where = placement.ranges, placement.mesh.device_mesh, (dist.get_rank(), dist.get_world_size())
        return restored, (local, tuple(self.shape), self.requires_grad, *where)


def restored(
    local: Tensor, shape: Sequence[int], requires_grad: bool, ranges: tuple[Range, ...], mesh: DeviceMesh, rank: Range
) -> FlatDTensor:
    """A tensor that a rank had saved by `torch.save`.

    Args:
        rank: which one it was, and of how many.

    Raises ShardError: this is another rank.
    """
    now = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else None
    if now != tuple(rank):
        here = "there is no process group" if now is None else f"this is rank {now[0]} of {now[1]}"
        raise ShardError(
            f"a sharded tensor was saved by rank {rank[0]} of {rank[1]}, and {here}; let each rank load the file that it "
            "saved itself, or save with torch.distributed.checkpoint, or full_state(model)"
        )
    placement = FlatPlacement(mesh=ShardMesh.of(letting_go(mesh)), ranges=ranges)
    return FlatDTensor.of(local, shape, placement, requires_grad=requires_grad)
