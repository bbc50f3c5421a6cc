"""What a rank has of a tensor: a range of its elements (`FlatPlacement`), or, as every rank, all of it (`Replica`)."""

import math
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, distributed as dist
from torch.autograd.function import once_differentiable
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.utils import _pytree as pytree

from fsdp_lab.engine.collectives import ShardError, answered
from fsdp_lab.engine.layout import Range
from fsdp_lab.engine.mesh import ShardMesh

_run_of, _local_of = map(operator.attrgetter, ("run", "_local_tensor"))


@dataclass(frozen=True, kw_only=True)
class FlatPlacement:
    """Which elements of the flattened tensor each rank of a shard group holds; in order, without overlaps."""

    mesh: ShardMesh
    ranges: tuple[Range, ...]  # by shard rank; (0, 0) where it is empty

    @property
    def own(self) -> Range:
        return self.ranges[self.mesh.shard_rank]

    def is_as(self, other: "FlatPlacement") -> bool:
        """Returns whether each rank holds the same elements by both, whatever groups they communicate in."""
        return self is other or (self.ranges == other.ranges and self.mesh.device_mesh == other.mesh.device_mesh)

    def part(self, start: int, stop: int, *, each: int = 1) -> "FlatPlacement":
        """The placement of elements [start, stop), counted from `start`, where each one was cut into so many before."""
        cut = [(max(a * each, start) - start, min(b * each, stop) - start) for a, b in self.ranges]
        return FlatPlacement(mesh=self.mesh, ranges=tuple((a, b) if a < b else (0, 0) for a, b in cut))


def boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[Range, ChunkStorageMetadata]]:
    """Elements [start, stop) of a tensor of `shape` as boxes, each with its range. Of a matrix: the end of one row, whole
    rows, and the beginning of another."""
    sizes = (1, *shape)  # so that a number has a dimension too
    steps = [math.prod(sizes[d + 1 :]) for d in range(len(sizes))]  # elements of one index
    while start < stop:
        d, step = next((d, n) for d, n in enumerate(steps) if start % n == 0 and start + n <= stop)
        at = [start // n % size for n, size in zip(steps, sizes, strict=True)]
        count = min((stop - start) // step, sizes[d] - at[d])
        box = (*(1 for _ in sizes[:d]), count, *sizes[d + 1 :])
        yield (start, start + count * step), ChunkStorageMetadata(torch.Size(at[1:]), torch.Size(box[1:]))
        start += count * step


# -- tensors that are computed together ----------------------------------------------------------------------------------

# Note: runs. torch's foreach optimizers make some ten calls with lists of all parameters, of their gradients and of their
# states. The parameters of a buffer lie side by side, and so do their gradients; states are brought together when they are
# first computed with either. A kernel then is of as many tensors as there are buffers, with the same bits.


@dataclass(frozen=True, eq=False)
class FlatRun:
    """flat: [sum of m], the local tensors [m] of sharded ones; order: the placements of these, the same object in all runs
    that are computed together."""

    flat: Tensor
    order: tuple[FlatPlacement, ...]

    def __deepcopy__(self, memo: Any) -> None:
        """Copies of the tensors lie elsewhere."""


def cuts_of(args: Iterable[Any], placements: Sequence[FlatPlacement], changed: int) -> list[slice]:
    """How lists of tensors with these placements are computed: a run at a time, or one tensor; empty where nothing is a run.
    The first `changed` lists of tensors are written to; they are brought together where others are."""
    given = [a for a in args if isinstance(a, (list, tuple))]
    lists = [some for some in given if isinstance(some[0], DTensor)]
    numbers = [some for some in given if not isinstance(some[0], DTensor)]
    runs, cuts, start = [[*map(_run_of, some)] for some in lists], list[slice](), 0
    if any(isinstance(some[0], Tensor) for some in numbers):
        return []
    while start < len(placements):
        known = next((some[start] for some in runs if some[start] is not None), None)
        cut = slice(start, start + (1 if known is None else len(known.order)))
        start = cut.stop
        if known is not None and (*placements[cut],) == known.order:
            for some, tensors in zip(runs[:changed], lists, strict=False):
                if some[cut.start] is None and (joined := _join(tensors[cut], known)) is not None:
                    some[cut] = repeat(joined, len(known.order))
            if all(_is_one(some[cut], known) for some in runs) and all(len({*some[cut]}) == 1 for some in numbers):
                cuts.append(cut)
                continue
        cuts += [slice(i, i + 1) for i in range(cut.start, min(start, len(placements)))]
    return cuts if len(cuts) < len(placements) else []


def by_run(arg: Any, cuts: Sequence[slice]) -> Any:
    """An argument as what is computed: the flat tensors of runs, and a number for each; without cuts, local tensors."""
    if not isinstance(arg, (list, tuple)) or not arg:
        return arg
    if not isinstance(arg[0], DTensor):
        return [arg[cut.start] for cut in cuts] if cuts else arg
    ones: list[tuple[Any, int]] = [(arg[cut.start], cut.stop - cut.start) for cut in cuts]
    return [t.run.flat if count > 1 else t._local_tensor for t, count in ones] if cuts else [*map(_local_of, arg)]


def parts_of(
    results: Sequence[Tensor], likes: Sequence[Any], cuts: Sequence[slice]
) -> tuple[list[Tensor], list[FlatRun | None]]:
    """The local tensors that were computed together, and the run in which each lies."""
    parts, runs = list[Tensor](), list[FlatRun | None]()
    for result, cut in zip(results, cuts, strict=True):
        like = likes[cut]
        parts += result.split_with_sizes([t._local_tensor.numel() for t in like])
        runs += repeat(FlatRun(result, like[0].run.order) if len(like) > 1 else None, len(like))
    return parts, runs


def _is_one(runs: Sequence[FlatRun | None], like: FlatRun) -> bool:
    return runs[0] is not None and runs[0].order is like.order and runs.count(runs[0]) == len(runs)


def _join(tensors: Sequence[Any], like: FlatRun) -> FlatRun | None:
    """Bring the local tensors of states together. None where somebody else holds one of them, or its memory."""
    alone: list[Any] = [t._local_tensor for t in tensors]
    if any(t._use_count() > 1 or torch._C._storage_Use_Count(t.untyped_storage()._cdata) > 2 for t in alone):
        return None
    flat = torch.empty(sum(t.numel() for t in alone), dtype=alone[0].dtype, device=alone[0].device)
    parts, run = flat.split_with_sizes([t.numel() for t in alone]), FlatRun(flat, like.order)
    torch._foreach_copy_(parts, alone)
    for t, part, placement in zip(tensors, parts, like.order, strict=True):
        t._local_tensor = t.counted = part
        t.flat_placement, t.run = placement, run
    return run


# -- conversions -----------------------------------------------------------------------------------------------------


class _Conversion(torch.autograd.Function):
    """`there` of a tensor, whose gradient is `back` of that of the result. `back` must not hold the tensor, which may be
    written to in place, and then depend on the result."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, there: Callable[[Any], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.back = back
        return there(t)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(grad), None, None


converted: Callable[..., Tensor] = _Conversion.apply


def mean_over_ranks(grad: Tensor, mesh: DeviceMesh) -> Tensor:
    """A gradient of what all ranks have alike, to which each adds its own data's part."""
    summed = grad.contiguous().clone()
    with answered(mesh.mesh.flatten().tolist(), lambda: "(the gradient of a whole tensor)"):
        for dimension in range(mesh.ndim):
            dist.all_reduce(summed, group=mesh.get_group(dimension))
    return summed.div_(mesh.size())


def replicated(whole: Tensor, mesh: DeviceMesh) -> DTensor:
    """A tensor that is the same on all ranks, as a DTensor."""
    return DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)


# -- what torch says of an operation ---------------------------------------------------------------------------------


def by_name(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    return {a.name: v for a, v in zip(func._schema.arguments, args, strict=False)} | kwargs


def writable(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments, tensors or lists of them, that `func` writes to, in place or by `out`."""
    if not func._schema.is_mutable:
        return []
    given = by_name(func, args, kwargs)
    return [given.get(a.name) for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]


def written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The same, one by one."""
    given = [g if isinstance(g, (list, tuple)) else (g,) for g in writable(func, args, kwargs)]
    return [t for some in given for t in some if isinstance(t, Tensor)]


def is_view(func: Any) -> bool:
    return any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)


def has_plain(given: Any) -> bool:
    """Returns whether one of its tensors may differ between ranks."""
    return any(type(t) is Tensor and t.dim() for t in pytree.tree_leaves(given))


def of_ranks(func: Any) -> ShardError:
    return ShardError(
        f"{func._schema.name} was given a sharded tensor and a plain one, which differs between ranks; call the module "
        "that was sharded, or its root, or use `with unshard(model):`"
    )


# -- numbers that were reduced ---------------------------------------------------------------------------------------


class Replica(DTensor):
    """A number that was reduced, which may be combined with plain tensors; and what is expanded from it."""

    @classmethod
    def of(cls, whole: Tensor, mesh: DeviceMesh) -> "Replica":
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
        changed = [t for t in written(func, args, kwargs) if isinstance(t, cls)]
        are_sharded = any(hasattr(t, "flat_placement") for t in tensors)
        are_expanded = any(isinstance(t, cls) and t.dim() for t in tensors) and not are_sharded
        if are_expanded and has_plain(tensors):
            raise of_ranks(func)
        are_beside_plain = not are_expanded and not all(isinstance(t, DTensor) for t in tensors)  # as numbers
        plain_args, plain_kwargs = pytree.tree_map_only(
            cls,
            lambda t: t._local_tensor if are_beside_plain else replicated(t._local_tensor, t.device_mesh),
            (args, kwargs),
        )
        result = func(*plain_args, **plain_kwargs)
        if changed or are_beside_plain:
            return changed[0] if changed else result
        of_view = is_view(func)
        return pytree.tree_map_only(
            DTensor,
            lambda t: cls.of(t._local_tensor, t.device_mesh) if type(t) is DTensor and (of_view or not t.dim()) else t,
            result,
        )

    def full_tensor(self, *, grad_placements: Any = None) -> Tensor:
        """The whole as a plain tensor; differentiable, with the mean of the ranks' gradients."""
        mesh = self.device_mesh
        return converted(self, lambda t: t._local_tensor.clone(), lambda grad: mean_over_ranks(grad, mesh))


def norms_of(ranges: Sequence[Tensor], mesh: ShardMesh, order: float, dtype: torch.dtype | None) -> Tensor:
    """The norms of tensors of which these are a rank's ranges; collective in the shard group."""
    nothing = math.inf if order < 0 else 0.0
    ranges = [t if t.numel() else t.new_full((1,), nothing) for t in ranges]
    each = torch.stack([torch.linalg.vector_norm(t, order, dtype=dtype) for t in ranges]).to(mesh.device)
    if (group := mesh.shard_group) is not None:
        op = {math.inf: dist.ReduceOp.MAX, -math.inf: dist.ReduceOp.MIN}.get(order, dist.ReduceOp.SUM)
        power = 1.0 if order == 0 or math.isinf(order) else order
        with mesh.answered("a norm"):
            dist.all_reduce(each.pow_(power), op=op, group=group)
        each.pow_(1.0 / power)
    return each


class Norms:
    """Norms of the parts of a tensor, which are asked for one after the other, as by torch's `clip_grad_norm_`: the
    first question is answered for all of them, in one all-reduce, until the tensor is written to."""

    def __init__(self, whole: Tensor, ranges: Sequence[Range], mesh: ShardMesh) -> None:
        self._whole, self._ranges, self._mesh, self.dtype = weakref.ref(whole), ranges, mesh, whole.dtype
        self._known: tuple[Any, Any] = None, None  # the question, and the answers

    def norm(self, i: int, order: float, dtype: torch.dtype | None) -> Tensor | None:
        """A tensor of the caller's own; None where the whole is gone."""
        whole = self._whole()
        if whole is None:
            return None
        key = order, dtype, whole._version
        if self._known[0] != key:
            self._known = key, norms_of([whole[slice(*r)] for r in self._ranges], self._mesh, order, dtype)
        return Replica.of(self._known[1][i].clone(), self._mesh.plain_mesh)
