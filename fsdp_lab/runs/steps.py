"""`EventStore`, the step events of one run, and `Step`, one optimizer step over all ranks, assembled from them.

Results, tables, plots and reports are all computed from steps. The rules:

- Restarts. `StepEvent.attempt` counts how often the ranks have begun again from an earlier step. A later attempt replaces
  every step of earlier attempts from its own first step on; these are abandoned and in no result.
- Missing ranks. A step is whole when every rank of its world size has reported it. Results use whole steps only; live plots
  draw a partial step once enough later steps are whole.
- World size. Whether a step is whole depends on its own world size, so a run on fewer ranks keeps its earlier steps."""

import dataclasses
import itertools
import math
import statistics
import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from operator import attrgetter
from typing import Any

from fsdp_lab.base.events import StepEvent
from fsdp_lab.base.formatting import plural
from fsdp_lab.base.generation import Completion
from fsdp_lab.spec.describe import Trained

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
        """Tells whether every rank has reported it."""
        return len(self.events) == self.events[0].world_size

    @property
    def counts(self) -> bool:
        """Tells whether its times belong in a median."""
        return all(e.counts for e in self.events)

    @property
    def mean_loss(self) -> float:
        """The mean over ranks; of a watched loop, whose ranks do not exchange it, over those whose events are here; NaN if
        one gave no loss."""
        mean = self.events[0].mean_loss
        return statistics.fmean(e.loss for e in self.events) if math.isnan(mean) else mean

    @property
    def eval_loss(self) -> float | None:
        """The same on every rank; None where it was not evaluated."""
        return next((e.eval_loss for e in self.events if e.eval_loss is not None), None)

    @property
    def eval_metrics(self) -> Mapping[str, float]:
        """The user's own, by name; empty where `eval_loss` is None."""
        return next((e.eval_metrics for e in self.events if e.eval_metrics), {})

    @property
    def completions(self) -> tuple[Completion, ...]:
        """The texts of its evaluation, in the order of the prompts, which the ranks take in turns."""
        turns = itertools.zip_longest(*(e.completions for e in self.events))
        return tuple(c for turn in turns for c in turn if c is not None)

    @property
    def step_time_s(self) -> float:
        """Step time of the slowest rank."""
        return max(e.step_time_s for e in self.events)

    @property
    def tokens_per_s(self) -> float:
        """Throughput of all ranks together; NaN where their tokens are not known."""
        return (sum(e.tokens for e in self.events) or math.nan) / self.step_time_s


def assemble_all(events: Iterable[StepEvent]) -> list[Step]:
    """Every step of every attempt, abandoned ones included, in order of attempt and step."""
    by_step: dict[tuple[int, int], dict[int, StepEvent]] = {}
    for e in events:
        by_step.setdefault((e.attempt, e.step), {})[e.rank] = e
    return [Step(events=tuple(e for _, e in sorted(by_rank.items()))) for _, by_rank in sorted(by_step.items())]


def assemble(events: Iterable[StepEvent]) -> list[Step]:
    """The steps that no later attempt replaced, whole or partial, in order of step."""
    valid: list[Step] = []
    earliest = math.inf  # step of later attempts
    for step in reversed(assemble_all(events)):
        if (number := step.number) < earliest:
            earliest = number
            valid.append(step)
    return valid[::-1]


def last_stretch(steps: Sequence[Step], spec: Trained) -> list[Step]:
    """The whole steps trained with `spec` since the last step of another Spec."""
    spec_id = spec.id  # a property that is computed at each access
    stretch = list(takewhile(lambda s: s.spec_id == spec_id, reversed(steps)))
    return [s for s in reversed(stretch) if s.is_whole]


class Assembler:
    """Assembles events into steps as they arrive. A step is returned when it is whole, or when `patience` later steps are
    whole, so that a dead rank does not stop the plots."""

    def __init__(self, *, patience: int = 2) -> None:
        self.patience = patience
        self._open: list[StepEvent] = []
        self._returned = (0, -1)  # attempt and number of the last step that was returned

    def add(self, events: Iterable[StepEvent]) -> list[Step]:
        """Takes events in any order; returns the steps that are ready, in order. Events of returned steps are dropped."""
        self._open += events
        self._drop_returned()
        steps = assemble(self._open)
        latest_whole = max((s.number for s in steps if s.is_whole), default=-1)
        return self._return(list(takewhile(lambda s: s.is_whole or s.number <= latest_whole - self.patience, steps)))

    def flush(self) -> list[Step]:
        """The remaining steps, whole or partial: at the end of a run, or when a rank is lost."""
        return self._return(assemble(self._open))

    def _return(self, steps: list[Step]) -> list[Step]:
        if steps:
            self._returned = (steps[-1].attempt, steps[-1].number)
            self._drop_returned()
        return steps

    def _drop_returned(self) -> None:
        self._open = [e for e in self._open if (e.attempt, e.step) > self._returned]


class _Seen:
    """The steps that one rank has reported: all below `floor`, and those in `above`. Small for a run of any length."""

    def __init__(self, floor: int) -> None:
        self.floor = floor
        self.above: set[int] = set()

    def add(self, step: int) -> bool:
        """Returns whether the step is new."""
        if step < self.floor or step in self.above:
            return False
        self.above.add(step)
        while self.floor in self.above:
            self.above.remove(self.floor)
            self.floor += 1
        return True


class EventStore:
    """The step events of one run in order of arrival, each rank's step once.

    A rank publishes a step's event at once and returns it again with its chunk, so that a lost message does no harm; what
    arrives a second time is dropped.

    Append-only and thread-safe: ipyparallel's IO thread appends, everyone else reads. It is bounded to the newest `CAP`
    events (about 0.7 kB each, so 70 MB; at two ranks 50,000 steps) and counts those that it `dropped`. Spans are stored for
    the newest `TRACED_STEPS` traced steps and `SPAN_CAP` spans (about 0.3 kB each), memory curves for the newest
    `CURVE_STEPS` ledger steps; older events lose theirs.

    `attempt`: how often the ranks have begun again from an earlier step."""

    def __init__(self, cap: int = CAP, *, traced_steps: int = TRACED_STEPS, span_cap: int = SPAN_CAP) -> None:
        self._cap, self._traced_steps, self._span_cap = cap, traced_steps, span_cap
        self._events: list[StepEvent] = []
        self._first = 0  # cursor of _events[0]
        self._seen: dict[int, _Seen] = {}
        self._start = 0  # the first step of the current attempt
        self._notes: dict[tuple[str, ...], tuple[str, ...]] = {}
        self._traced: deque[tuple[int, int]] = deque()  # cursor of an event with spans, and their number
        self._spans = 0
        self._curves: deque[int] = deque()  # cursors of events with a memory curve
        self.attempt = 0
        self._lock = threading.Lock()
        self._added = threading.Condition(self._lock)

    def add(
        self,
        events: Iterable[Mapping[str, Any] | StepEvent],
        notes: tuple[str, ...] = (),
        *,
        attempt: int | None = None,
    ) -> int:
        """Appends the events that are new, with `notes` in front of their own. Returns how many were new. Events get the
        current attempt; one of a later attempt begins that. `attempt`: in which they were measured; if the ranks have begun
        again since, they are dropped. None: not checked."""
        added = 0
        for given in events:
            rank, step, own_attempt = _key(given)
            with self._lock:
                if attempt is not None and attempt != self.attempt:
                    continue
                if own_attempt > self.attempt:
                    self._begin_attempt(own_attempt, step)
                if self._seen.setdefault(rank, _Seen(self._start)).add(step):
                    self._events.append(self._made(given, notes))
                    self._drop_oldest(self._events[-1])
                    added += 1
        with self._lock:
            self._added.notify_all()
            surplus = len(self._events) - self._cap
            if surplus > self._cap // 10:  # in bulk, because this moves the whole list
                del self._events[:surplus]
                self._first += surplus
        return added

    def _drop_oldest(self, event: StepEvent) -> None:
        """Drops the oldest spans and memory curves above the limits. Hold the lock; `event` was appended last."""
        if not (event.spans or event.memory_curve):
            return
        cursor = self._first + len(self._events) - 1

        def clear(cursor: int, **nothing: Any) -> None:
            if (at := cursor - self._first) >= 0:
                self._events[at] = dataclasses.replace(self._events[at], **nothing)

        if event.spans:
            self._traced.append((cursor, len(event.spans)))
            self._spans += len(event.spans)
            while len(self._traced) > self._traced_steps * len(self._seen) or self._spans > self._span_cap:
                oldest, spans = self._traced.popleft()
                self._spans -= spans
                clear(oldest, spans=())
        if event.memory_curve:
            self._curves.append(cursor)
            while len(self._curves) > CURVE_STEPS * len(self._seen):
                clear(self._curves.popleft(), memory_curve=())

    def _made(self, given: Mapping[str, Any] | StepEvent, notes: tuple[str, ...]) -> StepEvent:
        if isinstance(given, StepEvent):
            return given if given.attempt == self.attempt else dataclasses.replace(given, attempt=self.attempt)
        both = tuple(dict.fromkeys([*notes, *given["notes"]]))
        shared = self._notes.setdefault(both, both)  # one tuple for all events
        return StepEvent.from_dict({**given, "notes": shared, "attempt": self.attempt})

    def restart(self, step: int) -> None:
        """The ranks begin again at `step`: a new attempt, unless there are no events yet. Earlier events stay."""
        with self._lock:
            self._begin_attempt(self.attempt + bool(self._first + len(self._events)), step)

    def _begin_attempt(self, attempt: int, step: int) -> None:
        """Hold the lock."""
        self.attempt, self._start = attempt, step
        for seen in self._seen.values():
            seen.floor, seen.above = step, set()

    def since(self, cursor: int = 0) -> tuple[list[StepEvent], int]:
        """(events that arrived since the cursor, the next cursor). 0 is the beginning. Takes time for new events only."""
        with self._lock:
            start = max(0, cursor - self._first)
            return self._events[start:], self._first + len(self._events)

    def wait(self, cursor: int, timeout_s: float) -> bool:
        """Waits until all events before a cursor have arrived; returns whether they have."""
        with self._lock:
            return self._added.wait_for(lambda: self._first + len(self._events) >= cursor, timeout_s)

    def columns(self, *names: str, cursor: int = 0) -> tuple[dict[int, dict[str, list[Any]]], int]:
        """rank -> field -> values that arrived since the cursor, and the next cursor. A name is of StepEvent, or of its
        memory with a dot: "step", "tflops", "memory.peak_bytes". Raises AttributeError for any other."""
        new, cursor = self.since(cursor)
        for name in names:
            getattr(StepEvent, name.partition(".")[0])  # an unknown name is an error before the first event, too
        readers = {name: attrgetter(name) for name in names}
        columns: dict[int, dict[str, list[Any]]] = {}
        for event in new:
            of_rank = columns.setdefault(event.rank, {name: [] for name in names})
            for name, read in readers.items():
                of_rank[name].append(read(event))
        return columns, cursor

    def latest(self) -> dict[int, StepEvent]:
        """The newest event of each rank in the current attempt, in rank order."""
        with self._lock:
            newest: dict[int, StepEvent] = {}
            for event in takewhile(lambda e: e.attempt == self.attempt, reversed(self._events)):
                newest.setdefault(event.rank, event)
                if len(newest) == event.world_size:
                    break
        return dict(sorted(newest.items()))

    def steps(self) -> list[Step]:
        """The steps that count by the module's rules, whole or partial, in order."""
        return self._steps(None)

    def last_steps(self, n: int) -> list[Step]:
        """The newest `n` whole steps that count, oldest first. The time depends on `n`, not on the length of the run."""
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
            attempt, start = self.attempt, self._start
        steps = assemble(events)
        return [s for s in steps if s.attempt == attempt or s.number < start] if attempt else steps

    def traced(self) -> list[Step]:
        """The traced steps whose spans are stored, from their events with spans; abandoned attempts included."""
        with self._lock:
            events = [self._events[cursor - self._first] for cursor, _ in self._traced if cursor >= self._first]
        return assemble_all(events)

    def newest_traced(self) -> Step | None:
        """The newest traced step that counts, if possible a whole one; None where no spans are stored."""
        traced = self.traced()
        current = {(s.attempt, s.number) for s in self.steps()}
        counting = [s for s in traced if (s.attempt, s.number) in current] or traced
        return next(reversed([s for s in counting if s.is_whole] or counting), None)

    @property
    def ranks(self) -> tuple[int, ...]:
        with self._lock:
            return tuple(sorted(self._seen))

    def __repr__(self) -> str:
        newest = max((e.step for e in self.latest().values()), default=None)
        until = f", the newest of step {newest}" if newest is not None else ""
        return f"<EventStore: {plural(len(self), 'event')} of {plural(len(self.ranks), 'rank')}{until}>"

    def __len__(self) -> int:
        """Events that arrived, dropped ones included."""
        with self._lock:
            return self._first + len(self._events)


def _key(given: Mapping[str, Any] | StepEvent) -> tuple[int, int, int]:
    """Rank, step and attempt."""
    if isinstance(given, StepEvent):
        return given.rank, given.step, given.attempt
    return given["rank"], given["step"], given.get("attempt", 0)
