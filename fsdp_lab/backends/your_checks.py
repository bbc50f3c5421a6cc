"""`Inspector`: holds the calls of a user's engine against what they should have done, and names the mistake.

What is right comes from the shards: a unit is whole if it equals the shards of all ranks, as the optimizer left them, and a
gradient is reduced if it equals the mean of what autograd gave on each rank. Both take collectives of the lab's own, so the
steps that are inspected are slower, and do not count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch import distributed as dist

from fsdp_lab.backends.storage import storage_id
from fsdp_lab.backends.your_engine import YourEngine, YourUnit
from fsdp_lab.backends.your_shards import KeptPart
from fsdp_lab.core.errors import SpecError
from fsdp_lab.core.formatting import size
from fsdp_lab.wire import WireContext

_REMEMBERED_BYTES = 1 << 30  # of the values of a step before; a larger model's stale values are told as wrong ones
Parts = Mapping[str, Sequence[KeptPart]]  # parameter -> by rank
Mistake = tuple[str, str]  # what is wrong, and a hint


class Inspector:
    """Of one engine, on one rank; `parts`: by unit."""

    def __init__(self, engine: YourEngine, context: WireContext | None, parts: Mapping[str, Parts]) -> None:
        self._engine, self._context, self._parts = engine, context, parts
        self._values: dict[str, list[Tensor]] = {}  # by unit, whole, as of the last gather
        self._gradients: dict[str, list[Tensor]] = {}  # by unit, whole means, as of the last reduction
        self._kept_bytes = 0

    # -- gather -----------------------------------------------------------------------------------------------------

    def whole(self, unit: YourUnit, flats: Sequence[Tensor]) -> list[Tensor]:
        """The unit's parameters as the shards of all ranks have them, flat; collective."""
        return whole_values(unit, self._parts[unit.name], flats)

    def check_gathered(self, unit: YourUnit, right: Sequence[Tensor], flats: Sequence[Tensor], during: str) -> None:
        """After `gather`. `right`: the values before it. Raises SpecError."""
        before = self._values.get(unit.name)
        for i, (name, p) in enumerate(zip(unit.names, unit.params, strict=True)):
            part = self._parts[unit.name][name][unit.rank]
            if p.untyped_storage().nbytes() < p.numel() * p.element_size():
                raise self._mistake("gather", unit, during, f"leaves {name} without memory",
                                    "give its storage its size back, and copy the gathered values into it")  # fmt: skip
            if not torch.equal(part.of(flats), right[i][part.start : part.stop]):
                raise self._mistake("gather", unit, during, f"changes this rank's shard of {name}",
                                    "gather into other memory than the shard's")  # fmt: skip
            found = p.detach().reshape(-1)
            if torch.equal(found, right[i]):
                continue
            of_step_before = None if before is None else before[i]
            what, hint = (
                self._in_flight(unit)
                or self._swapped(unit, right)
                or wrong_values(found, right[i], of_step_before, part)
            )
            raise self._mistake("gather", unit, during, f"makes {name} wrong: {what}", hint)
        self._remember(self._values, unit, right)

    def _of_ranks(self, unit: YourUnit, values: Sequence[Tensor]) -> list[Tensor]:
        """What each rank keeps of the unit, flat, of these whole values."""
        parts = self._parts[unit.name]
        return [torch.cat([v[parts[n][rank].start : parts[n][rank].stop] for n, v in zip(unit.names, values, strict=True)])
                for rank in _ranks(unit)]  # fmt: skip

    def _swapped(self, unit: YourUnit, right: Sequence[Tensor]) -> Mistake | None:
        """Where the part of a rank stands in the place of another's."""
        found = self._of_ranks(unit, [p.detach().reshape(-1) for p in unit.params])
        wanted = self._of_ranks(unit, right)
        for there, values in enumerate(found):
            rank = next((r for r, w in enumerate(wanted) if r != there and _same_begin(values, w)), None)
            if rank is not None and not _same_begin(values, wanted[there]):
                return (f"the part of rank {rank} is where that of rank {there} belongs",
                        "put the parts together in the order of ranks")  # fmt: skip
        return None

    def _in_flight(self, unit: YourUnit) -> Mistake | None:
        """An all-gather of the engine's that nobody waited for."""
        context = self._context
        recent = context.recent_issues() if context is not None and unit.params[0].is_cpu else []
        own = (c for c in reversed(recent) if c.unit == unit.name and "gather" in c.kind)
        found = next((c for c in own if not c.waits and not c.by_future), None)
        if found is None:
            return None
        return f"its {found.kind} was not waited for, so the values come too late", "call wait() on what it returned"

    # -- free -------------------------------------------------------------------------------------------------------

    def storages(self, unit: YourUnit) -> dict[int, tuple[str, torch.UntypedStorage]]:
        """Of the whole parameters, before `free`: by identity, the first parameter in each."""
        found: dict[int, tuple[str, torch.UntypedStorage]] = {}
        for name, p in zip(unit.names, unit.params, strict=True):
            found.setdefault(storage_id(p), (name, p.untyped_storage()))
        return found

    def check_freed(
        self,
        unit: YourUnit,
        before: Mapping[int, tuple[str, torch.UntypedStorage]],
        flats: Sequence[Tensor],
        during: str,
    ) -> None:
        """After `free`. Raises SpecError."""
        if any(t.numel() and not t.untyped_storage().nbytes() for t in flats):
            raise self._mistake("free", unit, during, "frees this rank's shard too",
                                "let shard return a copy (clone) of its part")  # fmt: skip
        now = {storage_id(p) for p in unit.params}
        for key, (name, storage) in before.items():
            if not storage.nbytes():
                continue
            held = size(storage.nbytes())
            if key in now:
                raise self._mistake("free", unit, during, f"never frees {name}: its {held} are still there",
                                    "empty its storage: p.untyped_storage().resize_(0)")  # fmt: skip
            if torch._C._storage_Use_Count(storage._cdata) > 1:
                raise self._mistake("free", unit, during, f"never frees {name}: the {held} that it had are held by what "
                                    "autograd saved, or by your engine", "keep the parameter's storage and empty it, "
                                    "p.untyped_storage().resize_(0); do not replace p.data")  # fmt: skip

    # -- reduce -----------------------------------------------------------------------------------------------------

    def gradients(self, unit: YourUnit) -> list[list[Tensor]]:
        """By rank, what autograd gave for each parameter, flat; collective. Before `reduce`."""
        sizes = [p.numel() for p in unit.params]
        mine = torch.cat([_gradient(p).reshape(-1) for p in unit.params])
        return [list(torch.split(t, sizes)) for t in _of_all_ranks(mine, [sum(sizes)] * unit.world_size)]

    def check_reduced(self, unit: YourUnit, found: Sequence[Tensor], by_rank: Sequence[Sequence[Tensor]]) -> None:
        """After `reduce`, or the function that it returned; `found`: laid out as the kept tensors. Raises SpecError."""
        means = [_in_order(of_one) / unit.world_size for of_one in zip(*by_rank, strict=True)]
        before = self._gradients.get(unit.name)
        for i, name in enumerate(unit.names):
            part, of_name = self._parts[unit.name][name][unit.rank], [of_rank[i] for of_rank in by_rank]
            before_of_name = None if before is None else before[i]
            mistake = wrong_gradient(part.of(found), of_name, before_of_name, part, unit.rank)
            if mistake is not None:
                mistake = self._anothers(unit, found, means) or mistake
                raise self._mistake(
                    "reduce", unit, "backward", f"gives {name} a gradient that {mistake[0]}", mistake[1]
                )
        self._remember(self._gradients, unit, means)

    def _anothers(self, unit: YourUnit, found: Sequence[Tensor], means: Sequence[Tensor]) -> Mistake | None:
        """Where a rank has got the gradient of another's part."""
        mine = torch.cat([self._parts[unit.name][name][unit.rank].of(found) for name in unit.names])
        by_rank = self._of_ranks(unit, means)
        rank = next((r for r, theirs in enumerate(by_rank) if r != unit.rank and _same_begin(mine, theirs)), None)
        if rank is None or _same_begin(mine, by_rank[unit.rank]):
            return None
        return f"is that of rank {rank}'s part", "give each rank the part that it keeps"

    def check_dropped(self, unit: YourUnit) -> None:
        """After `reduce` and `free`, where nothing whole may stay. Raises SpecError."""
        for name, p in zip(unit.names, unit.params, strict=True):
            if p.grad is not None:
                raise self._mistake("reduce", unit, "backward", f"never frees the whole gradient of {name}, "
                                    f"{size(p.grad.nbytes)}", "set p.grad = None once it is sent")  # fmt: skip

    # -- the rest ---------------------------------------------------------------------------------------------------

    def _remember(self, where: dict[str, list[Tensor]], unit: YourUnit, values: Sequence[Tensor]) -> None:
        nbytes = sum(t.nbytes for t in values)
        if unit.name in where or self._kept_bytes + nbytes <= _REMEMBERED_BYTES:
            self._kept_bytes += 0 if unit.name in where else nbytes
            where[unit.name] = list(values)

    def _mistake(self, method: str, unit: YourUnit, during: str, what: str, hint: str) -> SpecError:
        return self._engine.mistake(method, unit, during, what, hint)


# -- what is wrong with values -----------------------------------------------------------------------------------------


def wrong_values(found: Tensor, right: Tensor, before: Tensor | None, part: KeptPart) -> Mistake:
    """What is wrong with a gathered parameter. All flat; `before`: its values in the step before; `part`: this rank's."""
    if before is not None and torch.equal(found, before):
        return "it is stale, as of before the last update", "gather again after every step of the optimizer"
    rest = torch.ones_like(right, dtype=torch.bool)
    rest[part.start : part.stop] = False
    if not bool(found[rest].any()) and bool(right[rest].any()):
        return "what other ranks keep is zero", "copy the parts of all ranks into it"
    if part.numel and torch.equal(found[part.start : part.stop], right[part.start : part.stop]):
        where = "this rank's part is right, and others are not"
    else:
        where = f"element {_first_difference(found, right):,} is the first that differs"
    if shift := _shift(found, right):
        at, by = shift
        hint = "leave the padding of a part out, as shard has added it"
        return f"from element {at:,} on it is shifted by {by:,} elements", hint
    return where, "copy the parts of all ranks into it, in their order, without padding"


def wrong_gradient(
    found: Tensor, by_rank: Sequence[Tensor], before: Tensor | None, part: KeptPart, rank: int
) -> Mistake | None:
    """What is wrong with a rank's part of a reduced gradient, or None. `by_rank`: what autograd gave on each rank, whole and
    flat; `before`: the whole mean of the reduction before."""
    size = len(by_rank)
    mean = _in_order(by_rank) / size
    of_part = slice(part.start, part.stop)
    right, own = mean[of_part], by_rank[rank][of_part]
    scale = float(mean.abs().max())

    def same(value: Tensor) -> bool:
        return torch.allclose(found, value, rtol=1e-4, atol=1e-5 * scale)

    if not right.numel() or same(right):
        return None
    if same(right * size):
        return "is the sum over ranks, not the mean", "divide it by unit.world_size"
    if same(own):
        return "is this rank's own, unreduced", "sum it over all ranks, and divide by unit.world_size"
    if same(right / size):
        return "is divided twice", "divide the sum over ranks by unit.world_size once"
    if same(own / size):
        return "is this rank's own, divided and not summed", "sum it over all ranks, then divide by unit.world_size"
    if not bool(found.any()):
        return "is zero", "return the gradient of what shard returned"
    if before is not None and same(before[of_part]):
        return "is stale, that of the reduction before", "reduce what p.grad holds now"
    if before is not None and same(right + before[of_part]):
        return "has that of the reduction before in it", "begin from zeros, or set p.grad = None once it is sent"
    return "is not the mean over ranks", "sum p.grad over all ranks, divide by unit.world_size, and keep your part"


def _same_begin(one: Tensor, other: Tensor) -> bool:
    """As far as both go; one of them may lack what is padding in the other."""
    n = min(one.numel(), other.numel())
    close = torch.allclose(one[:n], other[:n], rtol=1e-4, atol=1e-5 * float(other.abs().max()) if n else 0.0)
    return n > 0 and close


def _first_difference(found: Tensor, right: Tensor) -> int:
    return int(torch.nonzero(found != right)[0])


def _shift(found: Tensor, right: Tensor) -> tuple[int, int] | None:
    """(from which element on, by how many) what is found lags behind what is right, as where padding was left in."""
    at = _first_difference(found, right)
    for by in range(1, min(64, right.numel() - at)):
        if torch.equal(found[at + by :], right[at : right.numel() - by]):
            return at, by
    return None


def whole_values(unit: YourUnit, parts: Parts, flats: Sequence[Tensor]) -> list[Tensor]:
    """The unit's parameters as the shards of all ranks have them, flat; collective. `flats`: this rank's."""
    mine = [parts[name][unit.rank].of(flats) for name in unit.names]
    gathered = _of_all_ranks(torch.cat(mine), [sum(parts[n][r].numel for n in unit.names) for r in _ranks(unit)])
    found = [torch.empty(p.numel(), device=flats[0].device) for p in unit.params]
    for rank, values in enumerate(gathered):
        sizes = [parts[name][rank].numel for name in unit.names]
        for target, name, value in zip(found, unit.names, torch.split(values, sizes), strict=True):
            part = parts[name][rank]
            target[part.start : part.stop] = value
    return found


# -- collectives of the lab's own --------------------------------------------------------------------------------------


def _ranks(unit: YourUnit) -> range:
    return range(unit.world_size)


def _gradient(p: Tensor) -> Tensor:
    return torch.zeros_like(p) if p.grad is None else p.grad


def _in_order(summands: Sequence[Tensor]) -> Tensor:
    """[n], added in the order of ranks."""
    total = summands[0].clone()
    for t in summands[1:]:
        total += t
    return total


def _of_all_ranks(mine: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """The tensors of all ranks, of these sizes; collective."""
    if len(sizes) == 1:
        return [mine.clone()]
    padded = torch.zeros(max(sizes), device=mine.device)
    padded[: mine.numel()] = mine
    gathered = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(gathered, padded)
    return [t[:n] for t, n in zip(gathered, sizes, strict=True)]
