"""`Step`: one optimizer step over all ranks. Results, tables, plots and reports are all made of these.

The rules:

- Restarts. `StepEvent.attempt` counts how often the ranks have begun again from an earlier step. A later attempt replaces
  every step of earlier attempts from its own first step on; those are abandoned and in no result.
- Missing ranks. A step is whole when every rank of its world size has reported it. Results use whole steps only; live plots
  draw a partial step once enough later steps are whole.
- World size. Each step is held against its own world size, so a run that resumes on fewer ranks keeps its earlier steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from fsdp_lab.core.events import StepEvent
from fsdp_lab.core.spec import Spec


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """The events of one optimizer step, in rank order; a rank that has not reported is missing."""

    events: tuple[StepEvent, ...]

    @property
    def number(self) -> int:
        return self.events[0].step

    @property
    def attempt(self) -> int:
        return self.events[0].attempt

    @property
    def spec_id(self) -> str:
        return self.events[0].spec_id

    @property
    def world_size(self) -> int:
        return self.events[0].world_size

    @property
    def is_whole(self) -> bool:
        """Whether every rank has reported it."""
        return len(self.events) == self.events[0].world_size

    @property
    def counts(self) -> bool:
        """Whether its times belong in a median."""
        return all(e.counts for e in self.events)

    @property
    def mean_loss(self) -> float:
        return self.events[0].mean_loss

    @property
    def eval_loss(self) -> float | None:
        """The same on every rank; None where it was not evaluated."""
        return next((e.eval_loss for e in self.events if e.eval_loss is not None), None)

    @property
    def step_time_s(self) -> float:
        """Of the slowest rank."""
        return max(e.step_time_s for e in self.events)

    @property
    def tokens_per_s(self) -> float:
        """Of all ranks."""
        return sum(e.tokens for e in self.events) / self.step_time_s

    def by_rank(self, value: Mapping[int, float]) -> list[float]:
        """One number for each rank of the world, NaN where it is missing."""
        return [value.get(rank, math.nan) for rank in range(self.world_size)]


def assemble_all(events: Iterable[StepEvent]) -> list[Step]:
    """Every step of every attempt, abandoned ones included, in order of attempt and step."""
    found: dict[tuple[int, int], dict[int, StepEvent]] = {}
    for e in events:
        found.setdefault((e.attempt, e.step), {})[e.rank] = e
    by_rank = (found[key] for key in sorted(found))
    return [Step(events=tuple(map(ranks.__getitem__, sorted(ranks)))) for ranks in by_rank]


def assemble(events: Iterable[StepEvent]) -> list[Step]:
    """The steps that no later attempt replaced, whole or partial, in order of step."""
    kept: list[Step] = []
    begun = math.inf  # the earliest step of later attempts
    for step in reversed(assemble_all(events)):
        if (number := step.number) < begun:
            begun = number
            kept.append(step)
    return kept[::-1]


def last_stretch(steps: Sequence[Step], spec: Spec) -> list[Step]:
    """The whole steps trained with `spec` since the last step of another Spec."""
    spec_id = spec.id  # computed anew each time it is asked for
    stretch = list(takewhile(lambda s: s.spec_id == spec_id, reversed(steps)))
    return [s for s in reversed(stretch) if s.is_whole]


class Assembler:
    """Assembles events into steps as they arrive. A step is given out when it is whole, or when `patience` later steps are
    whole: a rank that died must not stop the plots."""

    def __init__(self, *, patience: int = 2) -> None:
        self.patience = patience
        self._open: list[StepEvent] = []
        self._given = (0, -1)  # attempt and number of the last step given out

    def add(self, events: Iterable[StepEvent]) -> list[Step]:
        """Takes events in any order; returns the steps that are ready, in order. Events of steps given out are dropped."""
        self._open += events
        self._drop_given()
        steps = assemble(self._open)
        latest_whole = max((s.number for s in steps if s.is_whole), default=-1)
        return self._give(list(takewhile(lambda s: s.is_whole or s.number <= latest_whole - self.patience, steps)))

    def flush(self) -> list[Step]:
        """All that is left, whole or partial: at the end of a run, or when a rank is lost."""
        return self._give(assemble(self._open))

    def _give(self, steps: list[Step]) -> list[Step]:
        if steps:
            self._given = (steps[-1].attempt, steps[-1].number)
            self._drop_given()
        return steps

    def _drop_given(self) -> None:
        self._open = [e for e in self._open if (e.attempt, e.step) > self._given]
