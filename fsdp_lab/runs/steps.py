"""`Step`: one optimizer step over all ranks. Results, tables, plots and reports are all made of these.

The rules:

- Restarts. `StepEvent.attempt` counts how often the ranks have begun again from an earlier step. A later attempt replaces
  every step of earlier attempts from its own first step on; those are abandoned and in no result.
- Missing ranks. A step is whole when every rank of its world size has reported it. Results use whole steps only; live plots
  draw a partial step once enough later steps are whole.
- World size. Each step is held against its own world size, so a run that resumes on fewer ranks keeps its earlier steps.
"""

from __future__ import annotations

import dataclasses
import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from fsdp_lab.core.events import StepEvent
from fsdp_lab.core.spec import Spec

CAP = 100_000  # events, over all ranks
TRACED_STEPS = 200
SPAN_CAP = 250_000  # over all ranks
CURVE_STEPS = 20


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


class _Seen:
    """Which steps of one rank are there: all below `floor`, and those in `above`. Small however long the run."""

    def __init__(self, floor: int) -> None:
        self.floor = floor
        self.above: set[int] = set()

    def add(self, step: int) -> bool:
        """Whether the step is new."""
        if step < self.floor or step in self.above:
            return False
        self.above.add(step)
        while self.floor in self.above:
            self.above.remove(self.floor)
            self.floor += 1
        return True


class EventStore:
    """Step events, each rank's step once, however often it is told.

    A step is said while it is done and again in its chunk's return value, so that a lost message heals by itself; the
    second telling is dropped.
    """

    def __init__(self, cap: int = CAP, *, traced_steps: int = TRACED_STEPS, span_cap: int = SPAN_CAP) -> None:
        self._cap, self._traced_steps, self._span_cap = cap, traced_steps, span_cap
        self._events: list[StepEvent] = []
        self._first = 0  # cursor of _events[0]
        self._seen: dict[int, _Seen] = {}
        self._start = 0  # the step that a rank not heard of yet begins with
        self._notes: dict[tuple[str, ...], tuple[str, ...]] = {}
        self._traced: deque[tuple[int, int]] = deque()  # cursor of an event that carries spans, and how many
        self._spans = 0
        self._curves: deque[int] = deque()  # cursors of events that carry a memory curve
        self._attempt = 0
        self._restarts: list[tuple[int, int]] = []
        self._lock = threading.Lock()

    def add(
        self,
        events: Iterable[Mapping[str, Any] | StepEvent],
        notes: tuple[str, ...] = (),
        *,
        attempt: int | None = None,
    ) -> int:
        """Appends what is new; `notes` go in front of each event's own. Returns how many were new.

        Each event gets the current attempt; one that carries a later attempt begins that. `attempt`: the one in which these
        were measured; if the ranks have begun again since, they are dropped.
        """
        added = 0
        for given in events:
            rank, step, carried = _place(given)
            with self._lock:
                if attempt is not None and attempt != self._attempt:
                    continue
                if carried > self._attempt:
                    self._begin_attempt(carried, step)
                if self._seen.setdefault(rank, _Seen(self._start)).add(step):
                    self._events.append(self._made(given, notes))
                    self._note_spans(self._events[-1])
                    self._note_curve(self._events[-1])
                    added += 1
        with self._lock:
            surplus = len(self._events) - self._cap
            if surplus > self._cap // 10:  # in bulk, because it moves the whole list
                del self._events[:surplus]
                self._first += surplus
        return added

    def _note_spans(self, event: StepEvent) -> None:
        """Called with the lock held, after `event` was appended: the oldest spans make room."""
        if not event.spans:
            return
        cursor = self._first + len(self._events) - 1
        self._traced.append((cursor, len(event.spans)))
        self._spans += len(event.spans)
        while len(self._traced) > self._traced_steps * len(self._seen) or self._spans > self._span_cap:
            oldest, spans = self._traced.popleft()
            self._spans -= spans
            at = oldest - self._first
            if at >= 0:
                self._events[at] = dataclasses.replace(self._events[at], spans=())

    def _note_curve(self, event: StepEvent) -> None:
        """The same for memory curves."""
        if not event.memory_curve:
            return
        self._curves.append(self._first + len(self._events) - 1)
        while len(self._curves) > CURVE_STEPS * len(self._seen):
            at = self._curves.popleft() - self._first
            if at >= 0:
                self._events[at] = dataclasses.replace(self._events[at], memory_curve=())

    def _made(self, given: Mapping[str, Any] | StepEvent, notes: tuple[str, ...]) -> StepEvent:
        if isinstance(given, StepEvent):
            return given if given.attempt == self._attempt else dataclasses.replace(given, attempt=self._attempt)
        both = tuple(dict.fromkeys([*notes, *given["notes"]]))
        shared = self._notes.setdefault(both, both)  # one tuple, not one an event
        return StepEvent.from_dict({**given, "notes": shared, "attempt": self._attempt})

    def restart(self, step: int) -> None:
        """The ranks begin again at `step`: a new attempt, unless there are no events yet. Earlier events stay."""
        with self._lock:
            self._begin_attempt(self._attempt + bool(self._first + len(self._events)), step)

    def _begin_attempt(self, attempt: int, step: int) -> None:
        """Called with the lock held."""
        self._attempt, self._start = attempt, step
        self._restarts.append((self._first + len(self._events), step))
        for seen in self._seen.values():
            seen.floor, seen.above = step, set()

    # -- reading --------------------------------------------------------------------------------------------------

    def since(self, cursor: int = 0) -> tuple[list[StepEvent], int]:
        """(what arrived since the cursor, the cursor to ask with next time). Costs what is new. 0 is the beginning."""
        with self._lock:
            start = max(0, cursor - self._first)
            return self._events[start:], self._first + len(self._events)

    def columns(self, *names: str, cursor: int = 0) -> tuple[dict[int, dict[str, list[Any]]], int]:
        """rank -> field -> values that arrived since the cursor, and the next cursor.

        A name is a field or property of StepEvent, or of its memory with a dot: "step", "tflops", "memory.peak_bytes".
        """
        new, cursor = self.since(cursor)
        out: dict[int, dict[str, list[Any]]] = {}
        readers = {name: reader(name) for name in names}
        for event in new:
            row = out.setdefault(event.rank, {name: [] for name in names})
            for name, read in readers.items():
                row[name].append(read(event))
        return out, cursor

    def latest(self) -> dict[int, StepEvent]:
        """The newest event of each rank in the current attempt, in rank order."""
        with self._lock:
            found: dict[int, StepEvent] = {}
            for event in reversed(self._events):
                if event.attempt != self._attempt:
                    break
                found.setdefault(event.rank, event)
                if len(found) == event.world_size:
                    break
        return dict(sorted(found.items()))

    def steps(self) -> list[Step]:
        """The steps that count, whole or partial, in order: see `runs.steps`."""
        return self._steps(None)

    def last_steps(self, n: int) -> list[Step]:
        """The newest `n` whole steps that count, oldest first. Costs what it returns, not what is stored."""
        window = (n + 4) * max(1, len(self.ranks))
        while True:
            whole = [s for s in self._steps(window) if s.is_whole]
            if len(whole) >= n or window >= len(self._events):
                return whole[max(0, len(whole) - n) :]
            window *= 4

    def _steps(self, newest: int | None) -> list[Step]:
        """The steps that count among the newest events, or all."""
        with self._lock:
            events = self._events[-newest:] if newest else self._events[:]
            attempt, start = self._attempt, self._start
        steps = assemble(events)
        return [s for s in steps if s.attempt == attempt or s.number < start] if attempt else steps

    def traced(self) -> list[Step]:
        """The traced steps whose spans are kept, those of abandoned attempts included: of each the events with spans."""
        with self._lock:
            kept = [self._events[cursor - self._first] for cursor, _ in self._traced if cursor >= self._first]
        return assemble_all(kept)

    def newest_traced(self) -> Step | None:
        """The newest traced step that counts, if possible a whole one; None where no spans are kept."""
        kept = self.traced()
        current = {(s.attempt, s.number) for s in self.steps()}
        counting = [s for s in kept if (s.attempt, s.number) in current] or kept
        found = [s for s in counting if s.is_whole] or counting
        return found[-1] if found else None

    @property
    def attempt(self) -> int:
        """How often the ranks have begun again from an earlier step."""
        with self._lock:
            return self._attempt

    @property
    def restarts(self) -> tuple[tuple[int, int], ...]:
        """(cursor, step) of each `restart`: the events from that cursor on were told after it."""
        with self._lock:
            return tuple(self._restarts)

    @property
    def dropped(self) -> int:
        """Events that were let go to stay within the cap."""
        return self._first

    @property
    def ranks(self) -> tuple[int, ...]:
        with self._lock:
            return tuple(sorted(self._seen))

    def __len__(self) -> int:
        """Events that arrived, those let go included."""
        with self._lock:
            return self._first + len(self._events)


def _place(given: Mapping[str, Any] | StepEvent) -> tuple[int, int, int]:
    """Rank, step and attempt."""
    if isinstance(given, StepEvent):
        return given.rank, given.step, given.attempt
    return given["rank"], given["step"], given.get("attempt", 0)


def reader(name: str) -> Callable[[StepEvent], Any]:
    """How to read a column from an event. Raises AttributeError for a name that it has not."""
    head, dot, tail = name.partition(".")
    getattr(StepEvent, head)
    if not dot:
        return lambda event: getattr(event, head)
    return lambda event: getattr(getattr(event, head), tail)
