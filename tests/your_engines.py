"""Engines as a user of backend "yours" would write them: the stages of the course, other right ones, and wrong ones.

A wrong one is a right one with one mistake, which a learner makes."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed as dist

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


RIGHT: dict[str, tuple[type, str]] = STAGES | {
    "parameter by parameter": (ParameterByParameter, "full_shard"),
    "one buffer": (OneBuffer, "full_shard"),
}


# -- wrong ones --------------------------------------------------------------------------------------------------------
class FillsFreedMemory(FullyShard):
    def fill(self, unit: Any, whole: Tensor) -> None:
        for p in unit.params:
            p.data.copy_(whole[: p.numel()].view_as(p))


class Misspelt(FullyShard):
    def gather(self, unit: Any) -> None:
        whole = torch.empty(len(unit.shards))
        dist.all_gather(list(whole.chunk(unit.world_size)), unit.shard)


def summed(t: Tensor) -> Tensor:
    dist.all_reduce(t)
    return t


def parts_of_all(unit: Any, *, waits: bool = True) -> list[Tensor]:
    parts = [torch.zeros_like(unit.shard) for _ in range(unit.world_size)]
    unit.work = dist.all_gather(parts, unit.shard, async_op=not waits)
    return parts


def replace_data(unit: Any) -> None:
    for p in unit.params:
        p.data = torch.empty(1).expand(p.shape)


def whole_gradient(unit: Any) -> Tensor:
    return summed(flat([p.grad for p in unit.params], unit.world_size)) / unit.world_size


# Sharding, what the engine is made of, the methods that are wrong, and what is said of them.
_WRONG: list[tuple[str, type, dict[str, Callable[..., Any]], str]] = [
    ("no_shard", DataParallel, {"reduce": lambda self, unit: None}, "returned nothing, and the shard is 12 tensors"),
    ("no_shard", DataParallel, {"reduce": lambda self, unit: [p.grad for p in unit.params]},
     "is this rank's own, unreduced"),
    ("no_shard", DataParallel, {"reduce": lambda self, unit: [summed(p.grad) for p in unit.params]},
     "is the sum over ranks, not the mean"),
    ("no_shard", DataParallel, {"shard": lambda self, unit: [p.detach().clone() for p in unit.params]},
     r"returned 12 tensors of .* elements in all, not the memory of unit\.params"),
    ("no_shard", DataParallel, {"shard": lambda self, unit: [p.detach().view(-1)[: p.numel() // 2] for p in unit.params]},
     "not the memory of"),
    ("zero1", Zero1, {"shard": lambda self, unit: flat(unit.params, unit.world_size).chunk(unit.world_size)[unit.rank - 1]},
     r"returned a tensor of .* elements, not part \d of 2 of unit\.params"),
    ("zero1", Zero1, {"shard": lambda self, unit: Zero1.shard(self, unit)[:-2].clone()}, r"not part \d of 2"),
    ("zero1", Zero1, {"shard": lambda self, unit: Zero1.shard(self, unit).bfloat16()}, "in float32"),
    ("zero1", Zero1, {"shard": lambda self, unit: Zero1.shard(self, unit).to("meta")}, "in float32 on cpu"),
    ("zero1", Zero1, {"gather": lambda self, unit: hasattr(unit, "work") or self.fill(unit, torch.cat(parts_of_all(unit)))},
     "of step 1 makes .* is stale, as of before the call"),
    ("zero1", Zero1, {"gather": lambda self, unit: self.fill(unit, torch.cat(parts_of_all(unit)[::-1]))},
     r"element \d+ is the first that differs"),
    ("zero1", Zero1, {"gather": lambda self, unit: self.fill(unit, torch.cat(parts_of_all(unit))) or unit.shard.zero_()},
     "changes this rank's shard"),
    ("zero1", Zero1, {"gather": lambda self, unit: self.fill(unit, torch.cat(parts_of_all(unit, waits=False)))},
     "has not waited for its all_gather, so the values come too late"),
    ("zero1", Zero1, {"reduce": lambda self, unit: whole_gradient(unit).chunk(unit.world_size)[unit.rank - 1]},
     "is not the mean over ranks"),
    ("full_shard", OneBuffer, {"shard": lambda self, unit: OneBuffer.shard(self, unit) is None or
                               unit.buffer.chunk(unit.world_size)[unit.rank]}, "frees this rank's shard too"),
    ("full_shard", FullyShard, {"free": lambda self, unit: None}, "never frees .* are still there"),
    ("full_shard", FullyShard, {"free": lambda self, unit: replace_data(unit)}, "replaces the data of"),
    ("full_shard", FullyShard, {"gather": lambda self, unit: None}, "without memory"),
    ("full_shard", FullyShard, {"reduce": lambda self, unit: Zero1.reduce(self, unit)}, "never frees the whole gradient"),
    ("full_shard", Zero2, {}, "has no method free, which full_shard needs"),
    ("full_shard", FillsFreedMemory, {}, r"gather\(root\) in the forward of step 0 raised .* has a storage of 0 bytes of .*"
     r"in line 3 of fill"),
    ("full_shard", Misspelt, {}, r"raised AttributeError: .* in line 2 of gather"),
]  # fmt: skip


class Wrong:
    """The wrong engines, as attributes."""


for _number, (_, _base, _methods, _) in enumerate(_WRONG):
    setattr(Wrong, f"number_{_number}", type("Engine", (_base,), {**_methods, "__module__": _base.__module__}))

WRONG = {f"Wrong.number_{i}": (sharding, text) for i, (sharding, _, _, text) in enumerate(_WRONG)}
