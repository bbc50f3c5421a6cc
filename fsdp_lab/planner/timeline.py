"""A discrete-event simulation of one micro-batch: the same actions that `core.schedule` gives the engine, with their times.

Computing and communication are a queue each. An action begins when its queue is free and the actions it waits for are
complete. The lab's engine, and every backend on a CPU, issues a gather after the computation before it, as scheduled. FSDP1
and FSDP2 on a GPU issue it as far ahead as their rate limiter lets the host run (arXiv 2304.11277, section 3.4), so forwards
overlap without prefetching. DDP gathers nothing; its units represent its buckets.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fsdp_lab.core.schedule import Action, Direction, Phase, PointSide, Rules, Schedule, UnitCall


class TimedAction(NamedTuple):
    """An action with its begin and end, in seconds from the beginning of the micro-batch."""

    action: Action
    begin_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        return self.end_s - self.begin_s


@dataclass(frozen=True, kw_only=True)
class SimulatedTimeline:
    """One micro-batch. `waits`: when computing waited for communication, (unit, begin_s, end_s)."""

    done: tuple[TimedAction, ...]
    waits: tuple[tuple[int, float, float], ...]
    seconds: float

    @property
    def exposed_s(self) -> float:
        return sum(end - begin for _, begin, end in self.waits)

    def phase_s(self, phase: Phase) -> float:
        return sum(d.seconds for d in self.done if d.action.phase is phase)


@functools.lru_cache(maxsize=64)
def schedule_for(calls: Sequence[UnitCall], rules: Rules) -> Schedule:
    """A cached Schedule: one model is planned many times."""
    return Schedule(calls, rules)


def schedule_of(units: int, rules: Rules) -> Schedule:
    """The Schedule of a root, unit 0, that calls the others once each, in order."""
    return schedule_for(_calls(units), rules)


@functools.lru_cache(maxsize=64)
def _calls(units: int) -> tuple[UnitCall, ...]:
    return (UnitCall(unit=0), *(UnitCall(unit=i, parent=0) for i in range(1, units)))


def simulate(
    schedule: Schedule, seconds: Callable[[Action], float], *, ahead: bool, interference: float, late_s: float = 0.0,
    blocking: frozenset[Phase] = frozenset(),
) -> SimulatedTimeline:  # fmt: skip
    """Simulates one micro-batch.

    Args:
        seconds: of each action alone.
        ahead: the host runs ahead of the device, and only the limiter holds gathers back.
        interference: slowdown of computing by a collective in flight, as a share of the collective's time.
        late_s: wait of a collective for the last of its ranks, and of computing with it.
        blocking: phases during which the computing thread waits.
    """
    return _Simulation(
        schedule, seconds, ahead=ahead, interference=interference, late_s=late_s, blocking=blocking
    ).run()


class _Simulation:
    def __init__(self, schedule: Schedule, seconds: Callable[[Action], float], *, ahead: bool, interference: float,
                 late_s: float, blocking: frozenset[Phase]) -> None:  # fmt: skip
        self._schedule, self._seconds = schedule, seconds
        self._ahead, self._interference, self._late_s = ahead, interference, late_s
        self._blocking = blocking
        self._computing = self._sending = self._copying = 0.0  # when each queue is free
        self._ends: list[float] = []
        self._freed: list[float] = []
        self._gathers = 0
        self._disturbed = 0.0  # seconds of collectives that have not slowed computing yet
        self._waited_s = 0.0  # for late ranks
        self._waits: list[tuple[int, float, float]] = []

    def run(self) -> SimulatedTimeline:
        done = []
        for action in self._schedule.actions:
            begin, end = self._place(action)
            self._ends.append(end)
            done.append(TimedAction(action=action, begin_s=begin, end_s=end))
        last = max((d.end_s for d in done), default=0.0)
        if last > self._computing:  # for the last gradients
            self._waits.append((done[-1].action.unit, self._computing, last))
        return SimulatedTimeline(done=tuple(done), waits=tuple(self._waits), seconds=last)

    def _place(self, action: Action) -> tuple[float, float]:
        ready = 0.0
        for i in action.waits_for:
            if self._ends[i] > ready:
                ready = self._ends[i]
        if action.phase is Phase.COMPUTE:
            return self._compute(action, ready)
        if action.phase is Phase.RESHARD:
            self._freed.append(ready)
            return ready, ready
        if action.phase is Phase.OPTIM:
            return ready, ready  # once per step, after all micro-batches
        if action.phase is Phase.HOST_COPY:
            begin = max(ready, self._copying)
            self._copying = begin + self._seconds(action)
            return begin, self._copying
        if action.phase is Phase.UNSHARD:
            ready = self._limited() if self._ahead else ready
            self._gathers += 1
        return self._send(action, ready)

    def _limited(self) -> float:
        """When the limiter admits the next gather: `limit` may be in flight or in use, beside units that stay gathered."""
        limit = self._schedule.rules.limit
        if not limit:
            return 0.0
        needed = self._gathers - limit - len(self._schedule.stays_gathered)
        return self._freed[needed] if 0 <= needed < len(self._freed) else 0.0

    def _send(self, action: Action, ready: float) -> tuple[float, float]:
        begin, lasts = max(ready, self._sending), self._seconds(action)
        if action.phase in self._blocking:
            return self._block(action, max(begin, self._computing), lasts)
        self._sending = begin + lasts
        self._disturbed += lasts
        self._waited_s += self._late_s if lasts else 0.0
        return begin, self._sending

    def _block(self, action: Action, begin: float, lasts: float) -> tuple[float, float]:
        """Send while computing waits."""
        self._waits.append((action.unit, self._computing, begin + lasts))
        self._sending = self._computing = begin + lasts
        self._waited_s += self._late_s if lasts else 0.0
        return begin, self._computing

    def _compute(self, action: Action, ready: float) -> tuple[float, float]:
        begin = max(ready, self._computing)
        if begin > self._computing:
            self._waits.append((action.unit, self._computing, begin))
        lasts = self._seconds(action)
        slowed = min(self._interference * self._disturbed, self._interference * lasts)
        self._disturbed = max(0.0, self._disturbed - lasts)
        self._computing = begin + lasts + slowed + (self._waited_s if lasts else 0.0)
        self._waited_s = 0.0 if lasts else self._waited_s
        return begin, self._computing


def computes(action: Action, schedule: Schedule) -> bool:
    """Whether this computation of a call has its work: a call that encloses others works after them in the forward and
    before them in the backward."""
    if not schedule.children[action.point.call]:
        return True
    after = PointSide.AFTER if action.point.direction is Direction.FORWARD else PointSide.BEFORE
    return action.point.moment is after
