"""`Inspector`: holds the calls of a user's engine against what they should have done, and names the mistake.

What is right comes from the shards: a unit is whole if it equals the shards of all ranks, as the optimizer left them, and a
gradient is reduced if it equals the mean of what autograd gave on each rank. Both take collectives of the lab's own, so the
steps that are inspected are slower, and do not count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, distributed as dist

from fsdp_lab.backends.storage import storage_id
from fsdp_lab.backends.your_engine import KeptPart, YourEngine, YourUnit
from fsdp_lab.base.formatting import size
from fsdp_lab.wire import WireContext

Flats = Sequence[Tensor]  # flat ones
Layout = Sequence[Sequence[KeptPart]]  # by parameter, then by rank
Storages = Mapping[int, tuple[str, torch.UntypedStorage]]  # by identity: the first parameter in it, and itself


def storages(unit: YourUnit) -> Storages:
    """Those of the whole parameters, before `free`."""
    found: dict[int, tuple[str, torch.UntypedStorage]] = {}
    for name, p in zip(unit.names, unit.params, strict=True):
        found.setdefault(storage_id(p), (name, p.untyped_storage()))
    return found


class Inspector:
    """Inspects one engine on one rank. All that it raises are SpecErrors."""

    def __init__(self, engine: YourEngine, context: WireContext | None) -> None:
        self._mistake, self._context = engine.mistake, context

    # -- gather -----------------------------------------------------------------------------------------------------

    def before_gather(self, unit: YourUnit, layout: Layout, flats: Flats) -> tuple[list[Tensor], list[Tensor]]:
        """The unit's parameters as the shards of all ranks have them, and as they are, where they are whole; each flat.
        Collective."""
        sizes = [p.numel() for p in unit.params]
        right = torch.zeros(sum(sizes), device=unit.params[0].device)
        for parts, target in zip(layout, torch.split(right, sizes), strict=True):
            mine = parts[unit.rank]
            target[mine.start : mine.stop] = mine.of(flats)
        dist.all_reduce(right)  # zeros are added: exact
        are_whole = all(_has_memory(p) for p in unit.params)
        return list(torch.split(right, sizes)), [p.detach().reshape(-1).clone() for p in unit.params if are_whole]

    def check_gathered(
        self, unit: YourUnit, layout: Layout, flats: Flats, during: str, right: Flats, before: Flats
    ) -> None:
        """After `gather`; `right` and `before` are what `before_gather` returned."""
        wrong = partial(self._mistake, "gather", unit, during)
        for i, (name, p, parts) in enumerate(zip(unit.names, unit.params, layout, strict=True)):
            part = parts[unit.rank]
            if not _has_memory(p):
                hint = "give its storage its size back, and copy the gathered values into it"
                raise wrong(f"leaves {name} without memory", hint)
            if not torch.equal(part.of(flats), right[i][part.start : part.stop]):
                raise wrong(f"changes this rank's shard of {name}", "gather into other memory than the shard's")
            values = p.detach().reshape(-1)
            if torch.equal(values, right[i]):
                continue
            at = int(torch.nonzero(values != right[i])[0])
            rank = next(r for r, of_rank in enumerate(parts) if of_rank.start <= at < of_rank.stop)
            hint = "copy the parts of all ranks into it, in the order of ranks, without padding"
            if kind := self._in_flight(unit):
                what = f"its {kind} was not waited for, so the values come too late"
                hint = "call wait() on what it returned"
            elif not bool(values[parts[rank].start : parts[rank].stop].any()):
                what = f"what rank {rank} keeps is zero"
            elif before and torch.equal(values, before[i]):
                what = "it is stale, as of before the call"
                hint = "gather again after every step of the optimizer"
            else:
                what = f"element {at:,} is the first that differs, which rank {rank} keeps"
            raise wrong(f"makes {name} wrong: {what}", hint)

    def _in_flight(self, unit: YourUnit) -> str:
        """The kind of the unit's last all-gather, if nobody waited for it; else ""."""
        recent = self._context.recent_issues() if self._context is not None and unit.params[0].is_cpu else []
        own = (c for c in reversed(recent) if c.unit == unit.name and "gather" in c.kind)
        return next((c.kind for c in own if not c.waits and not c.by_future), "")

    # -- free -------------------------------------------------------------------------------------------------------

    def check_freed(self, unit: YourUnit, flats: Flats, during: str, before: Storages) -> None:
        """After `free`; `before` is what `storages` returned."""
        wrong = partial(self._mistake, "free", unit, during)
        if any(t.numel() and not t.untyped_storage().nbytes() for t in flats):
            raise wrong("frees this rank's shard too", "let shard return a copy (clone) of its part")
        now = {storage_id(p) for p in unit.params}
        for key, (name, storage) in before.items():
            held = size(storage.nbytes())
            if key not in now:
                what = f"replaces the data of {name}, whose {held} are held by what autograd saved"
                hint = "do not replace p.data, but empty the parameter's storage: p.untyped_storage().resize_(0)"
                raise wrong(what, hint)
            if storage.nbytes():
                hint = "empty its storage: p.untyped_storage().resize_(0)"
                raise wrong(f"never frees {name}: its {held} are still there", hint)

    # -- reduce -----------------------------------------------------------------------------------------------------

    def before_reduce(self, unit: YourUnit) -> list[list[Tensor]]:
        """What autograd gave on each rank for each parameter, flat. Collective."""
        mine = torch.cat([torch.zeros_like(p).view(-1) if p.grad is None else p.grad.reshape(-1) for p in unit.params])
        of_ranks = [torch.empty_like(mine) for _ in range(unit.world_size)]
        dist.all_gather(of_ranks, mine)
        return [list(torch.split(t, [p.numel() for p in unit.params])) for t in of_ranks]

    def check_reduced(self, unit: YourUnit, layout: Layout, gradients: Flats, by_rank: Sequence[Flats]) -> None:
        """After `reduce`, or the function that it returned. `gradients`: laid out as the kept tensors. `by_rank`: what
        `before_reduce` returned."""
        n = unit.world_size
        for name, parts, of_ranks in zip(unit.names, layout, zip(*by_rank, strict=True), strict=True):
            part, mean = parts[unit.rank], torch.stack(of_ranks).sum(0) / n
            kept = slice(part.start, part.stop)
            values, right, own = part.of(gradients), mean[kept], of_ranks[unit.rank][kept]
            off = 1e-5 * float(mean.abs().max()) if mean.numel() else 0.0
            known = (
                (right, "", ""),
                (right * n, "is the sum over ranks, not the mean", "divide it by unit.world_size"),
                (own, "is this rank's own, unreduced", "sum it over all ranks, and divide by unit.world_size"),
                (right / n, "is divided twice", "divide the sum over ranks by unit.world_size once"),
                (own / n, "is this rank's own, divided and not summed", "sum it over all ranks first"),
                (right * 0, "is zero", "return the gradient of what shard returned"),
                (values, "is not the mean over ranks", "sum p.grad, divide by unit.world_size, and keep your part"),
            )
            what, hint = next((w, h) for t, w, h in known if torch.allclose(values, t, 1e-4, off, equal_nan=True))
            if what:
                raise self._mistake("reduce", unit, "backward", f"gives {name} a gradient that {what}", hint)

    def check_dropped(self, unit: YourUnit) -> None:
        """After `reduce` and `free`, where nothing whole may stay."""
        for name, p in zip(unit.names, unit.params, strict=True):
            if p.grad is not None:
                what = f"never frees the whole gradient of {name}, {size(p.grad.nbytes)}"
                raise self._mistake("reduce", unit, "backward", what, "set p.grad = None once it is sent")


def _has_memory(p: Tensor) -> bool:
    return p.untyped_storage().nbytes() >= p.numel() * p.element_size()
