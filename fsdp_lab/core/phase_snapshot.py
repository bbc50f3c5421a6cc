"""`PhaseSnapshot`: what one rank holds of every parameter at one phase of a step; what slow motion is made of.

Floor 0. The engine makes frames on the ranks, the kernel puts those of all ranks side by side, and the dashboard draws them.
A frame crosses processes as a dict of plain values (`to_dict`), so that pickle, msgpack and JSON all take it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ROOT = "root"  # the name of the unit that the root module itself makes, whose own name is ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterHolding:
    """What one rank holds of one parameter just then. Ranges are of the flattened parameter, [start, stop)."""

    name: str  # original name
    unit: str  # name of its unit, such as "transformer.h.0"; "" is written as ROOT
    numel: int  # of the whole parameter
    start: int  # range that the rank owns for good: its shard, which may be empty
    stop: int
    state: str  # "sharded", "gathering" (its all-gather is under way), or "unsharded": all of it is held now
    gradient: str  # "none", "unsharded", "reducing" (its reduction is under way), or "sharded"

    @property
    def held(self) -> tuple[int, int]:
        """The range that can be read now: all of it where it is unsharded, else the shard."""
        return (0, self.numel) if self.state == "unsharded" else (self.start, self.stop)


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseSnapshot:
    """One phase of one rank, about to happen."""

    rank: int
    world_size: int
    step: int  # optimizer step in progress
    index: int  # 0, 1, 2, ... within the step
    phase: str  # a `schedule.Phase`
    unit: str  # what it is done to; ROOT for the root's own unit
    direction: str  # "forward", "backward" or "update"
    parameters: tuple[ParameterHolding, ...]

    def to_dict(self) -> dict[str, Any]:
        d = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        d["parameters"] = [dataclasses.asdict(p) for p in self.parameters]
        return d

    @classmethod
    def from_dict(cls, d: Mapping[str, Any]) -> PhaseSnapshot:
        fields = dict(d)
        fields["parameters"] = tuple(ParameterHolding(**p) for p in fields["parameters"])
        return cls(**fields)
