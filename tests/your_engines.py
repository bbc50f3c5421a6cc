"""Engines as a user of backend "yours" would write them: the stages of the course, other right ones, and wrong ones.

A wrong one is a right one with one mistake, which a learner makes; WRONG says what the lab has to say of it.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

SOLUTION = Path(__file__).resolve().parents[1] / "notebooks" / "solutions" / "write_your_own_fsdp.py"


def _solution() -> Any:
    spec = importlib.util.spec_from_file_location("write_your_own_fsdp", SOLUTION)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


course: Any = _solution()
flat = course.flat
DataParallel: Any = course.DataParallel
Zero1: Any = course.Zero1
Zero2: Any = course.Zero2
FullyShard: Any = course.FullyShard
Overlapped: Any = course.Overlapped
STAGES: dict[str, tuple[type, str]] = {
    "data parallel": (DataParallel, "no_shard"),
    "ZeRO-1": (Zero1, "zero1"),
    "ZeRO-2": (Zero2, "zero1"),
    "full": (FullyShard, "full_shard"),
    "full, as shard_grad_op": (FullyShard, "shard_grad_op"),
    "overlapped": (Overlapped, "full_shard"),
}


# -- other right ones --------------------------------------------------------------------------------------------------


class FlatReplica:
    """Data parallel with one buffer, of which the parameters are views."""

    def shard(self, unit: Any) -> Any:
        unit.buffer = flat(unit.params, 1)
        at = 0
        for p in unit.params:
            p.data = unit.buffer[at : at + p.numel()].view_as(p)
            at += p.numel()
        return unit.buffer

    def reduce(self, unit: Any) -> Any:
        whole = flat([p.grad for p in unit.params], 1)
        dist.all_reduce(whole)
        return whole / unit.world_size


class ParameterByParameter:
    """Full sharding without a flat buffer: a part of each parameter, gathered one by one."""

    def part(self, t: Tensor, unit: Any) -> Tensor:
        return flat([t], unit.world_size).chunk(unit.world_size)[unit.rank].clone()

    def shard(self, unit: Any) -> Any:
        return {name: self.part(p, unit) for name, p in zip(unit.names, unit.params, strict=True)}

    def gather(self, unit: Any) -> None:
        for name, p in zip(unit.names, unit.params, strict=True):
            mine = unit.shard[name]
            parts = [torch.empty_like(mine) for _ in range(unit.world_size)]
            dist.all_gather(parts, mine)
            p.untyped_storage().resize_(p.numel() * 4)
            p.data.view(-1).copy_(torch.cat(parts)[: p.numel()])

    def free(self, unit: Any) -> None:
        for p in unit.params:
            p.untyped_storage().resize_(0)

    def reduce(self, unit: Any) -> Any:
        found = {}
        for name, p in zip(unit.names, unit.params, strict=True):
            dist.all_reduce(p.grad)
            found[name] = self.part(p.grad, unit) / unit.world_size
            p.grad = None
        return found


class OneBuffer(FullyShard):
    """The gathered parameters are views of one buffer, whose storage comes and goes."""

    def shard(self, unit: Any) -> Any:
        unit.buffer = flat(unit.params, unit.world_size)
        at = 0
        for p in unit.params:
            p.data = unit.buffer[at : at + p.numel()].view_as(p)
            at += p.numel()
        return unit.buffer.chunk(unit.world_size)[unit.rank].clone()

    def gather(self, unit: Any) -> None:
        unit.buffer.untyped_storage().resize_(unit.buffer.numel() * 4)
        dist.all_gather(list(unit.buffer.chunk(unit.world_size)), unit.shard)

    def free(self, unit: Any) -> None:
        unit.buffer.untyped_storage().resize_(0)


class DividesFirst(FullyShard):
    """Gradients are divided before they are summed: the same for two ranks, rounded otherwise for three."""

    def reduce(self, unit: Any) -> Any:
        whole = flat([p.grad for p in unit.params], unit.world_size) / unit.world_size
        dist.all_reduce(whole)
        for p in unit.params:
            p.grad = None
        return whole.chunk(unit.world_size)[unit.rank].clone()


RIGHT: dict[str, tuple[type, str]] = STAGES | {
    "one flat replica": (FlatReplica, "no_shard"),
    "parameter by parameter": (ParameterByParameter, "full_shard"),
    "one buffer": (OneBuffer, "full_shard"),
    "divides first": (DividesFirst, "full_shard"),
}


# -- the interface of Stanford's CS336: it wraps a module --------------------------------------------------------------


class WrapsLayers(nn.Module):
    """Shards the weights of linear layers and embeddings, flat and padded; all else is replicated."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self.rank, self.world_size = module, dist.get_rank(), dist.get_world_size()
        self.shards: dict[nn.Parameter, Tensor] = {}
        self.shapes: dict[nn.Parameter, torch.Size] = {}
        self.reduced: dict[nn.Parameter, Tensor] = {}
        for layer in module.modules():
            if isinstance(layer, (nn.Linear, nn.Embedding)):
                self.shard(layer.weight)
                layer.register_forward_pre_hook(lambda layer, _: self.gather(layer.weight))
                layer.register_forward_hook(lambda layer, *_: self.free(layer.weight))
                layer.register_full_backward_pre_hook(lambda layer, _: self.gather(layer.weight))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def shard(self, p: nn.Parameter) -> None:
        if p not in self.shards:
            self.shapes[p] = p.shape
            p.data = self.shards[p] = flat([p], self.world_size).chunk(self.world_size)[self.rank].clone()
            p.register_post_accumulate_grad_hook(self.reduce)

    @torch.no_grad()
    def whole(self, p: nn.Parameter) -> Tensor:
        parts = [torch.empty_like(self.shards[p]) for _ in range(self.world_size)]
        dist.all_gather(parts, self.shards[p])
        return torch.cat(parts)[: self.shapes[p].numel()].view(self.shapes[p])

    def gather(self, p: nn.Parameter) -> None:
        if p.shape != self.shapes[p]:
            p.data = self.whole(p)

    def free(self, p: nn.Parameter) -> None:
        p.data = self.shards[p]

    @torch.no_grad()
    def reduce(self, p: nn.Parameter) -> None:
        self.reduced[p] = torch.empty_like(self.shards[p])
        whole, p.grad = flat([p.grad], self.world_size), None
        dist.reduce_scatter(self.reduced[p], list(whole.chunk(self.world_size)))
        self.free(p)

    @torch.no_grad()
    def finish(self) -> None:
        for p in self.parameters():
            if p in self.shards:
                p.grad = self.reduced.pop(p) / self.world_size
            else:
                dist.all_reduce(p.grad)
                p.grad /= self.world_size


def get_fsdp(module: nn.Module, compute_dtype: torch.dtype | None = None) -> nn.Module:
    return WrapsLayers(module)


def fsdp_on_after_backward(fsdp_model: Any, optimizer: torch.optim.Optimizer) -> None:
    fsdp_model.finish()


def fsdp_gather_full_params(fsdp_model: Any) -> dict[str, Tensor]:
    return {name: fsdp_model.whole(p) if p in fsdp_model.shards else p.data
            for name, p in fsdp_model.module.named_parameters()}  # fmt: skip


class Cs336:
    """The adapter."""

    def wrap(self, module: nn.Module) -> nn.Module:
        return get_fsdp(module)

    def after_backward(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        fsdp_on_after_backward(module, optimizer)

    def whole(self, module: nn.Module) -> dict[str, Tensor]:
        return fsdp_gather_full_params(module)


# -- wrong ones --------------------------------------------------------------------------------------------------------

WRONG: dict[str, tuple[type, str, str]] = {}  # name: the engine, its sharding, what is said of it


def says(text: str, sharding: str = "full_shard") -> Callable[[type], type]:
    def known(engine: type) -> type:
        WRONG[engine.__name__] = (engine, sharding, text)
        return engine

    return known


@says("returned nothing, and the shard is", "no_shard")
class EmptyGap(DataParallel):
    def reduce(self, unit: Any) -> Any: ...


@says("is this rank's own, unreduced", "no_shard")
class Unreduced(DataParallel):
    def reduce(self, unit: Any) -> Any:
        return [p.grad for p in unit.params]


@says("is the sum over ranks, not the mean", "no_shard")
class NotDivided(DataParallel):
    def reduce(self, unit: Any) -> Any:
        for p in unit.params:
            dist.all_reduce(p.grad)
        return [p.grad for p in unit.params]


@says("is divided twice", "no_shard")
class DividedTwice(DataParallel):
    def reduce(self, unit: Any) -> Any:
        for p in unit.params:
            p.grad /= unit.world_size
            dist.all_reduce(p.grad)
            p.grad /= unit.world_size
        return [p.grad for p in unit.params]


@says("is this rank's own, divided and not summed", "no_shard")
class DividedOnly(DataParallel):
    def reduce(self, unit: Any) -> Any:
        return [p.grad / unit.world_size for p in unit.params]


@says("returned other memory than that of unit.params", "no_shard")
class CopiedReplica(DataParallel):
    def shard(self, unit: Any) -> Any:
        return [p.detach().clone() for p in unit.params]


@says(r"keeps elements 0 to .* on rank 0 and on rank 1", "zero1")
class SamePart(Zero1):
    def shard(self, unit: Any) -> Any:
        return flat(unit.params, unit.world_size).chunk(unit.world_size)[0].clone()


@says("on no rank", "zero1")
class LosesTheRest(Zero1):
    def shard(self, unit: Any) -> Any:
        whole = torch.cat([p.detach().reshape(-1) for p in unit.params])
        n = (len(whole) - 1) // unit.world_size
        return whole[unit.rank * n : (unit.rank + 1) * n].clone()


@says("returned values that are not those of the parameters", "zero1")
class Scales(Zero1):
    def shard(self, unit: Any) -> Any:
        return super().shard(unit) + 1


@says("is stale, as of before the last update", "zero1")
class GathersOnce(Zero1):
    def gather(self, unit: Any) -> None:
        if not hasattr(unit, "gathered"):
            super().gather(unit)
            unit.gathered = True


@says("what other ranks keep is zero", "zero1")
class OwnPartAlone(Zero1):
    def gather(self, unit: Any) -> None:
        whole = torch.zeros(len(unit.shard) * unit.world_size)
        whole.chunk(unit.world_size)[unit.rank].copy_(unit.shard)
        self.fill(unit, whole)


@says(r"the part of rank \d is where that of rank \d belongs", "zero1")
class WrongOrder(Zero1):
    def gather(self, unit: Any) -> None:
        parts = [torch.empty_like(unit.shard) for _ in range(unit.world_size)]
        dist.all_gather(parts, unit.shard)
        self.fill(unit, torch.cat(parts[::-1]))


@says(r"is that of rank \d's part", "zero1")
class OthersGradient(Zero1):
    def reduce(self, unit: Any) -> Any:
        whole = flat([p.grad for p in unit.params], unit.world_size)
        dist.all_reduce(whole)
        return whole.chunk(unit.world_size)[(unit.rank + 1) % unit.world_size] / unit.world_size


@says("has that of the reduction before in it", "zero1")
class KeepsAdding(Zero1):
    def reduce(self, unit: Any) -> Any:
        found = super().reduce(unit)
        unit.total = getattr(unit, "total", 0) + found
        return unit.total


@says("is stale, that of the reduction before", "zero1")
class GivesTheLastOne(Zero1):
    def reduce(self, unit: Any) -> Any:
        found = super().reduce(unit)
        last, unit.last = getattr(unit, "last", found), found
        return last


@says("and the shard is", "zero1")
class WholeGradient(Zero1):
    def reduce(self, unit: Any) -> Any:
        whole = flat([p.grad for p in unit.params], unit.world_size)
        dist.all_reduce(whole)
        return whole / unit.world_size


@says("returned a view of the whole parameters")
class KeepsAView(OneBuffer):
    def shard(self, unit: Any) -> Any:
        super().shard(unit)
        return unit.buffer.chunk(unit.world_size)[unit.rank]


@says("never frees")
class FreesNothing(FullyShard):
    def free(self, unit: Any) -> None:
        pass


@says("held by what autograd saved")
class ReplacesData(FullyShard):
    def fill(self, unit: Any, whole: Tensor) -> None:
        sizes = [p.numel() for p in unit.params]
        for p, values in zip(unit.params, whole[: sum(sizes)].split(sizes), strict=True):
            p.data = values.clone().view(p.shape)

    def free(self, unit: Any) -> None:
        for p in unit.params:
            p.data = torch.empty(1).expand(p.shape)


@says("without memory")
class FillsNothing(FullyShard):
    def gather(self, unit: Any) -> None:
        pass


@says("frees this rank's shard too")
class FreesTheShard(FullyShard):
    def free(self, unit: Any) -> None:
        super().free(unit)
        if isinstance(unit.shard, Tensor) and hasattr(unit, "once"):
            unit.shard.untyped_storage().resize_(0)
        unit.once = True


@says("never frees the whole gradient")
class KeepsGradients(FullyShard):
    def reduce(self, unit: Any) -> Any:
        return Zero1.reduce(self, unit)


@says("was not waited for, so the values come too late")
class DoesNotWait(FullyShard):
    def gather(self, unit: Any) -> None:
        whole = torch.zeros(len(unit.shard) * unit.world_size)
        self.work = dist.all_gather(list(whole.chunk(unit.world_size)), unit.shard, async_op=True)
        self.fill(unit, whole)


@says("changes this rank's shard")
class OverwritesTheShard(FullyShard):
    def gather(self, unit: Any) -> None:
        super().gather(unit)
        unit.shard.zero_()


@says(r"raised .* in the line whole = torch\.empty\(len\(unit\.shards\)\)")
class Misspelt(FullyShard):
    def gather(self, unit: Any) -> None:
        whole = torch.empty(len(unit.shards))
        dist.all_gather(list(whole.chunk(unit.world_size)), unit.shard)


@says("has no method free, which full_shard needs")
class LacksFree(Zero2):
    pass


@says("makes model.embed_tokens.weight wrong")
class GathersShardsAlone(Cs336):
    def whole(self, module: nn.Module) -> dict[str, Tensor]:
        found = super().whole(module)
        return {name: torch.zeros_like(t) if t.dim() > 1 else t for name, t in found.items()}


@says("a tensor of torch.bfloat16")
class ShardsInBf16(Cs336):
    def wrap(self, module: nn.Module) -> nn.Module:
        return super().wrap(module.to(torch.bfloat16))


class HangsOnRank1(FullyShard):
    """Rank 1 leaves a collective out."""

    def gather(self, unit: Any) -> None:
        if unit.rank != 1:
            super().gather(unit)
        else:
            self.fill(unit, torch.zeros(len(unit.shard) * unit.world_size))


class LoopsEverywhere(FullyShard):
    def gather(self, unit: Any) -> None:
        while True:
            time.sleep(0.01)


class LoopsOnRank1(FullyShard):
    """Rank 1 never comes back."""

    def gather(self, unit: Any) -> None:
        while unit.rank == 1:
            time.sleep(0.01)
        super().gather(unit)
