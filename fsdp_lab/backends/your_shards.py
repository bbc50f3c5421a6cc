"""What an engine of the user's keeps, found out: which element of which parameter is where in the tensors of `shard`.

The lab numbers the elements of a unit's parameters, as bits of their own values, lets `shard` take its part, and reads the
numbers in what it returned. So an engine may lay its part out as it likes: parameter by parameter, or flat with padding, as
long as it keeps one range of each parameter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fsdp_lab.backends.your_engine import YourEngine, YourUnit, kind_of_value, tensors_of
from fsdp_lab.core.errors import SpecError


@dataclass(frozen=True, kw_only=True)
class KeptPart:
    """What a rank keeps of one parameter: elements [start, stop), at `offset` in tensor `tensor` of those that it keeps."""

    start: int = 0
    stop: int = 0
    tensor: int = 0
    offset: int = 0

    def to_row(self) -> list[int]:
        """As JSON."""
        return [self.start, self.stop, self.tensor, self.offset]

    @classmethod
    def of_row(cls, row: Sequence[int]) -> KeptPart:
        return cls(start=row[0], stop=row[1], tensor=row[2], offset=row[3])

    @property
    def numel(self) -> int:
        return self.stop - self.start

    def of(self, tensors: Sequence[Tensor]) -> Tensor:
        """[numel], a view of these, which are laid out as the tensors that are kept."""
        if not self.numel:
            return torch.empty(0)
        return tensors[self.tensor].reshape(-1)[self.offset : self.offset + self.numel]


def take_shard(engine: YourEngine, unit: YourUnit) -> tuple[list[Tensor], dict[str, KeptPart]]:
    """Let the engine shard a unit whose parameters exist. Returns the tensors, flat, and what is where in them, by
    parameter. Raises SpecError."""
    number_elements(unit.params)
    unit.shard = engine.call("shard", unit, "")
    tensors = tensors_of(unit.shard)
    if tensors is None:
        raise engine.mistake("shard", unit, "", f"returned {kind_of_value(unit.shard)}",
                             "return the tensor that this rank keeps and trains, or a list of them")  # fmt: skip
    return find_parts(engine, unit, tensors)


def number_elements(params: Sequence[Tensor]) -> None:
    """Element i of all of them, from 1 on, gets the bits of the integer i. 0 is then what an engine pads with."""
    first = 1
    for p in params:
        bits = torch.arange(first, first + p.numel(), dtype=torch.int32, device=p.device)
        p.detach().view(-1).view(torch.int32).copy_(bits)
        first += p.numel()


def find_parts(
    engine: YourEngine, unit: YourUnit, tensors: Sequence[Tensor], method: str = "shard"
) -> tuple[list[Tensor], dict[str, KeptPart]]:
    """What is where in tensors that hold numbered elements of the unit; returns them flat. Raises SpecError. `method`: that
    made them."""
    for t in tensors:
        if t.dtype != torch.float32 or not t.is_contiguous():
            what = "a tensor that is not contiguous" if t.dtype == torch.float32 else f"a tensor of {t.dtype}"
            raise engine.mistake(method, unit, "", f"returned {what}", "keep float32 values in contiguous tensors")
    flats, found, first = [t.view(-1) for t in tensors], {}, 1
    last = sum(p.numel() for p in unit.params)
    numbers = [t.view(torch.int32) for t in flats]
    for bits in numbers:
        if bits.numel() and (int(bits.min()) < 0 or int(bits.max()) > last):
            raise engine.mistake(method, unit, "", "returned values that are not those of the parameters",
                                 "keep elements of the parameters as they are, and zeros as padding")  # fmt: skip
    for name, p in zip(unit.names, unit.params, strict=True):
        found[name] = _part(engine, unit, name, numbers, first, first + p.numel())
        first += p.numel()
    return flats, found


def _part(engine: YourEngine, unit: YourUnit, name: str, numbers: Sequence[Tensor], first: int, end: int) -> KeptPart:
    """Where the elements numbered [first, end) are."""
    found = KeptPart()
    for i, bits in enumerate(numbers):
        at = torch.nonzero((bits >= first) & (bits < end)).view(-1)
        if not at.numel():
            continue
        offset, n = int(at[0]), at.numel()
        start = int(bits[offset]) - first
        expected = torch.arange(first + start, first + start + n, dtype=bits.dtype, device=bits.device)
        if found.numel or not torch.equal(bits[offset : offset + n], expected):
            raise engine.mistake("shard", unit, "", f"keeps several pieces of {name}",
                                 "keep one range of its elements, in their order")  # fmt: skip
        found = KeptPart(start=start, stop=start + n, tensor=i, offset=offset)
    return found


def check_shapes(engine: YourEngine, unit: YourUnit, before: Sequence[torch.Size]) -> None:
    """After the first `free`. Raises SpecError where it has replaced a parameter's data, and not emptied its storage."""
    for name, p, shape in zip(unit.names, unit.params, before, strict=True):
        if p.shape != shape:
            raise engine.mistake("free", unit, "", f"leaves {name} with shape {list(p.shape)}, which was {list(shape)}",
                                 "do not replace p.data, whose old memory autograd would still hold; empty its storage: "
                                 "p.untyped_storage().resize_(0)")  # fmt: skip


def check_coverage(
    engine: YourEngine, unit: YourUnit, layout: Mapping[str, Sequence[KeptPart]], *, replicated: bool | None
) -> None:
    """Raises SpecError unless the ranks together keep each element of the unit once; if `replicated`, each rank keeps all;
    None: of each parameter the one or the other. `layout`: parameter -> by rank. The same on every rank."""
    for name, p in zip(unit.names, unit.params, strict=True):
        ranges = [(part.start, part.stop) for part in layout[name]]
        if replicated is None and set(ranges) == {(0, p.numel())}:
            continue
        if replicated:
            other = next((rank for rank, r in enumerate(ranges) if r != (0, p.numel())), None)
            if other is not None:
                what = f"keeps {_told(ranges[other])} of {name} on rank {other}, and with no_shard every rank keeps all"
                raise engine.mistake("shard", unit, "", what, "return unit.params, or choose another sharding")
            continue
        if error := _overlap_or_gap(engine, unit, name, ranges, p.numel()):
            raise error


def _overlap_or_gap(
    engine: YourEngine, unit: YourUnit, name: str, ranges: Sequence[tuple[int, ...]], numel: int
) -> SpecError | None:
    reached, before = 0, -1
    for (start, stop), rank in sorted((r, rank) for rank, r in enumerate(ranges) if r[0] < r[1]):
        if start < reached:
            both = (start, min(stop, reached))
            return engine.mistake("shard", unit, "", f"keeps {_told(both)} of {name} on rank {before} and on rank {rank}",
                                  "keep the part of rank unit.rank alone")  # fmt: skip
        if start > reached:
            break
        reached, before = stop, rank
    if reached == numel:
        return None
    after = min((r[0] for r in ranges if r[0] < r[1] and r[0] > reached), default=numel)
    return engine.mistake("shard", unit, "", f"keeps {_told((reached, after))} of {name} on no rank",
                          "divide all elements among the ranks; where they do not divide evenly, pad")  # fmt: skip


def _told(bounds: Sequence[int]) -> str:
    start, stop = bounds
    return f"elements {start:,} to {stop - 1:,}" if stop > start else "nothing"
