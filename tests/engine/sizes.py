"""What a unit's buffer must hold, by arithmetic of its own: every element of it is marked, and counted."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from fsdp_lab.engine import MemoryBreakdown
from fsdp_lab.engine.schedule import Direction, Phase

ALIGN_BYTES = 16


@dataclass(frozen=True)
class Buffer:
    """`groups[i]`: the optimizer's group of the parameter that covers element i; "" is padding."""

    groups: tuple[str, ...]
    factor: int
    late: int = 0  # elements of what is used before any inner unit, so that its gradients are the last to come

    @classmethod
    def of(
        cls, parameters: Sequence[tuple[str, tuple[int, ...]]], factor: int, itemsize: int, *, late: int = 0
    ) -> Buffer:
        """parameters: (group, shape) each, in their order."""
        align = ALIGN_BYTES // itemsize
        marks: list[str] = []
        for group in dict.fromkeys(group for group, _ in parameters):
            for shape in (shape for g, shape in parameters if g == group):
                marks += [group] * math.prod(shape)
                marks += [""] * (-len(marks) % align)
        marks += [""] * (-len(marks) % (factor * align))
        return cls(tuple(marks), factor, late)

    def part(self, k: int, of: int) -> tuple[str, ...]:
        """The k-th of `of` equal parts."""
        n = len(self.groups) // of
        return self.groups[k * n : (k + 1) * n]

    def regions(self, rank: int) -> list[tuple[str, ...]]:
        """What a shard holds of each group, with the padding in it."""
        first = rank * len(self.part(0, self.factor))
        found = []
        for group in dict.fromkeys(g for g in self.groups if g):
            last = len(self.groups) - self.groups[::-1].index(group)
            start, stop = max(first, self.groups.index(group)), min(first + len(self.part(rank, self.factor)), last)
            found.append(self.groups[start:stop] if start < stop else ())
        return found


@functools.cache
def covered(marks: tuple[str, ...]) -> int:
    return sum(bool(group) for group in marks)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A strategy as the formulas need it."""

    factor: int  # F
    rank: int  # in its group of F
    replicas: int = 1
    master: int = 4  # bytes of an element: s, g, r
    gathered: int = 4
    reduced: int = 4
    is_zero1: bool = False
    offload: str = "none"
    few: int = 0  # ranks that share what stays between forward and backward
    few_rank: int = 0
    most_reducing: int = 1  # whole gradients in flight


@dataclass
class Expected:
    """What a rank must hold at every phase of a step; told of each one before it happens."""

    buffers: dict[str, Buffer]  # by unit
    at: Setting
    alive: set[str] = field(default_factory=set)  # gathered, or being gathered
    sending: set[str] = field(default_factory=set)  # a cast or fetched shard is on its way
    few: set[str] = field(default_factory=set)
    filling: set[str] = field(default_factory=set)  # gradients of the unit arrive
    reducing: list[str] = field(default_factory=list)  # oldest first
    crossing: str | None = None  # scattered, and on its way between replicas
    reduced: set[str] = field(default_factory=set)
    steps: int = 0
    communicates: bool = True
    with_backward: bool = True
    _late_came: bool = False
    _computing: str | None = None  # its gradients have come when something else happens

    # -- events ---------------------------------------------------------------------------------------------------

    def before(self, phase: Phase, unit: str, direction: Direction) -> None:
        """What has happened by now, the phase being about to begin."""
        if self._computing is not None:
            self.filling.add(self._computing)
            self._computing = None
        if not unit:
            self._late_came = direction is Direction.BACKWARD and phase in (Phase.RESHARD, Phase.REDUCE)
        if phase is Phase.COMPUTE:
            self._landed(unit)
        if phase is Phase.REDUCE:
            self._finish(but=self.at.most_reducing - 1)

    def after(self, phase: Phase, unit: str, direction: Direction) -> None:
        """What it has done once it was issued."""
        alone = self.at.factor == 1
        if phase is Phase.HOST_COPY and unit in self.reducing:
            self._finish()
        elif phase is Phase.HOST_COPY and self.at.offload == "all":
            self.sending.add(unit)
        elif phase is Phase.UNSHARD:
            self.alive.add(unit)
            if alone:
                self.sending.discard(unit)
        elif phase is Phase.COMPUTE and direction is Direction.BACKWARD:
            self._computing = unit
        elif phase is Phase.RESHARD:
            self._landed(unit)
            self.alive.discard(unit)
            if self.at.few and direction is Direction.FORWARD and self.with_backward:
                self.few.add(unit)
        elif phase is Phase.REDUCE:
            self.filling.discard(unit)
            self.reducing.append(unit)

    def ended(self) -> None:
        """A forward without gradients, or a backward, is over."""
        if self._computing is not None:
            self.filling.add(self._computing)
        self._computing = None
        while self.reducing or self.crossing is not None:
            self._finish()
        self.alive, self.sending, self.few = set(), set(), set()

    def stepped(self) -> None:
        self.steps += 1

    def zeroed(self) -> None:
        self.reduced = set()

    def _landed(self, unit: str) -> None:
        self.sending.discard(unit)
        self.few.discard(unit)

    def _finish(self, *, but: int = 0) -> None:
        """The oldest collectives in flight end; in hybrid sharding the all-reduce of what was scattered is sent."""
        if self.crossing is not None:
            self.reduced.add(self.crossing)
        self.crossing = None
        if len(self.reducing) <= but:
            return
        if self.at.replicas > 1 and self.at.factor > 1:
            self.crossing = self.reducing.pop(0)
        else:
            self.reduced.add(self.reducing.pop(0))

    # -- the formulas ---------------------------------------------------------------------------------------------

    @property
    def account(self) -> MemoryBreakdown:
        at, sums = self.at, dict.fromkeys(("parameters", "unsharded", "copies", "optimizer"), 0)
        sums |= dict.fromkeys(("unsharded_gradients", "gradients", "padding", "counters"), 0)

        def add(kind: str, marks: tuple[str, ...], itemsize: int) -> None:
            sums[kind] += covered(marks) * itemsize
            sums["padding"] += (len(marks) - covered(marks)) * itemsize

        for unit, buffer in self.buffers.items():
            whole, own = buffer.groups, buffer.part(at.rank, at.factor)
            add("parameters", own, at.master)
            is_view = at.factor == 1 and at.gathered == at.master
            if unit in self._gathered and not is_view:
                add("unsharded", whole, at.gathered)
            if unit in self.few:
                add("copies", buffer.part(at.few_rank, at.few), at.gathered)
            elif unit in self.sending or at.offload == "optimizer":
                add("copies", own, at.gathered)
            if unit in self.filling:
                came = covered(whole) - (0 if self._late_came else buffer.late)
                sums["unsharded_gradients"] += came * at.gathered
            if unit in self.reducing:
                add("unsharded_gradients", whole, at.reduced)
            if unit == self.crossing and at.factor > 1:
                add("gradients", own, at.reduced)
            if unit in self.reduced:
                add("gradients", whole if at.is_zero1 else own, at.master)
            for region in buffer.regions(at.rank) if self.steps else ():
                add("optimizer", region, at.master)
                add("optimizer", region, at.master)
                sums["counters"] += 4
        return MemoryBreakdown(**{f"{kind}_bytes": n for kind, n in sums.items()})

    @property
    def _gathered(self) -> set[str]:
        """Under ZeRO-1 what was gathered once keeps its storage."""
        if self.at.is_zero1:
            self._kept |= self.alive
            return self._kept
        return self.alive

    _kept: set[str] = field(default_factory=set)
