"""`StepModel`: the time of one step of a Spec on a machine, from the simulation of every unit's work and collectives."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from fsdp_lab.core.model_shape import UnitShape
from fsdp_lab.core.schedule import Action, Direction, Phase, Rules, Schedule
from fsdp_lab.core.spec import Spec
from fsdp_lab.planner.costs import (
    BUCKET,
    BYTES,
    FIRST_BUCKET,
    USUAL,
    RankGroup,
    Software,
    Work,
    collective_seconds,
    late_s,
    link_bytes,
    optimizer_seconds,
    work,
)
from fsdp_lab.planner.devices import Machine, Rates
from fsdp_lab.planner.timeline import SimulatedTimeline, computes, schedule_of, simulate

# Backends whose host runs ahead of a GPU; on a CPU, which has no streams, they wait for their collectives.
AHEAD = ("fsdp1", "fsdp2")
SENDING = (Phase.UNSHARD, Phase.REDUCE)
# Copies of a payload beside computing and sending: for a gather, for a reduction. FSDP2 gathers to one buffer and copies
# from it; all backends copy gradients to one buffer before the reduction.
COPIES: Mapping[str, tuple[float, float]] = {"lab": (0, 1), "fsdp2": (1, 1), "fsdp1": (0, 1), "ddp": (0, 1)}


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of one step on a rank."""

    seconds: float
    computing_s: float  # with nothing else in flight
    slowed_s: float  # slowdown of computing by collectives in flight and by late ranks
    exposed_comm_s: float
    optimizer_s: float
    reducing: int  # micro-batches that reduce gradients, and those that do not
    unreduced: int
    timeline: SimulatedTimeline  # of the last micro-batch


class StepModel:
    """Seconds of each action of a schedule, and of the whole step."""

    def __init__(self, spec: Spec, units: Sequence[UnitShape], tokens: int, machine: Machine, rates: Rates,
                 software: Software = USUAL, *, overlaps: bool = True) -> None:  # fmt: skip
        """tokens: of one sample. overlaps: whether collectives overlap with computing; False if memory is too full."""
        self._overlaps = overlaps
        self._spec, self._units, self._machine, self._rates, self._software = spec, units, machine, rates, software
        again, known = recomputed(spec, len(units)), dict[tuple[int, bool], Work]()
        for i, unit in enumerate(units):  # most are equal
            if (id(unit), i in again) not in known:
                known[id(unit), i in again] = work(
                    unit, tokens, spec, machine.device, rates, software, recomputed=i in again
                )
        self.works = [known[id(unit), i in again] for i, unit in enumerate(units)]
        self._factor = spec.shard_factor
        self._shard = RankGroup(size=self._factor)
        self._replicas = RankGroup(size=spec.world_size // self._factor, stride=self._factor)
        self._dtypes = spec.strategy.dtypes
        self._on_cpu = machine.device.generation == "cpu"
        self._buckets = self._bucket_elements() if spec.strategy.backend == "ddp" else None
        self._sent_s: dict[tuple[Phase, int], float] = {}  # seconds by phase and elements

    def step(self) -> StepTime:
        """All micro-batches and the optimizer step."""
        s, w = self._spec.strategy, self._spec.workload
        ahead = s.backend in AHEAD and not self._on_cpu
        whole = self._micro(ahead=ahead, reduces=True)
        unreduced = w.accumulate - 1 if s.sync == "last" else 0
        without = self._micro(ahead=ahead, reduces=False) if unreduced else whole
        reducing = w.accumulate - unreduced
        numel = sum(unit.numel for unit in self._units) / self._factor
        optimizer = optimizer_seconds(numel, w.optimizer, self._machine.device, self._rates, self._software)
        seconds = reducing * whole.seconds + unreduced * without.seconds + optimizer
        seconds += self._rates.step_s + self._rates.host(s.backend).step_s
        exposed = reducing * whole.exposed_s + unreduced * without.exposed_s
        alone = (reducing + unreduced) * self._computing_s
        slowed = reducing * whole.phase_s(Phase.COMPUTE) + unreduced * without.phase_s(Phase.COMPUTE) - alone
        return StepTime(
            seconds=seconds, computing_s=alone, slowed_s=slowed, exposed_comm_s=exposed, optimizer_s=optimizer,
            reducing=reducing, unreduced=unreduced, timeline=whole,
        )  # fmt: skip

    @property
    def _computing_s(self) -> float:
        """Computing of a micro-batch with nothing else in flight."""
        schedule = schedule_of(len(self._units), self._rules)
        return sum(self.seconds(action, schedule) for action in schedule.actions if action.phase is Phase.COMPUTE)

    @property
    def sends(self) -> int:
        """Number of collectives of a micro-batch."""
        return self._sends.total()

    @cached_property
    def _sends(self) -> Counter[tuple[int, Direction]]:
        """Number of collectives by unit and direction."""
        found = Counter[tuple[int, Direction]]()
        for a in schedule_of(len(self._units), self._rules).actions:
            if a.phase in SENDING:
                found[a.unit, a.point.direction] += len(self._collectives(a.phase, self._elements(a.unit)))
        return found

    @cached_property
    def _work_s(self) -> dict[Direction, list[float]]:
        """By direction and unit: computing, and the host's time to issue collectives."""
        send_s = self._rates.host(self._spec.strategy.backend).send_s
        alone = {
            Direction.FORWARD: [w.forward_s for w in self.works],
            Direction.BACKWARD: [w.backward_s + w.again_s for w in self.works],
        }
        return {
            way: [s + send_s * self._sends[unit, way] for unit, s in enumerate(each)] for way, each in alone.items()
        }

    def _micro(self, *, ahead: bool, reduces: bool) -> SimulatedTimeline:
        schedule = schedule_of(len(self._units), self._rules)
        return simulate(
            schedule, lambda action: self.seconds(action, schedule, reduces=reduces), ahead=ahead,
            interference=self._rates.interference, late_s=late_s(self._spec.world_size, self._rates),
            blocking=self._blocking,
        )  # fmt: skip

    @property
    def _rules(self) -> Rules:
        """On a CPU, FSDP1 and FSDP2 keep only the root gathered after the forward. On a GPU their gathers run ahead, where a
        few more make no difference."""
        keeps_first = not (self._on_cpu and self._spec.strategy.backend in AHEAD)
        return replace(self._spec.strategy.schedule_rules, keeps_first=keeps_first)

    @property
    def _blocking(self) -> frozenset[Phase]:
        """Phases that computing waits for: all if memory is too full; on a CPU, those that the backend waits for. FSDP2
        gathers while it computes if it prefetches (backends/fsdp2.py)."""
        s = self._spec.strategy
        if not self._overlaps:
            return frozenset({Phase.REDUCE, Phase.UNSHARD})
        if self._on_cpu and s.backend == "lab" and self._replicas.size > 1:
            return frozenset({Phase.REDUCE})  # engine/gradients.py: the all-reduce is issued at the wait
        if not self._on_cpu or s.backend not in AHEAD:
            return frozenset()
        beside = s.backend == "fsdp2" and (s.forward_prefetch > 0 or s.backward_prefetch > 1)
        return frozenset({Phase.REDUCE}) if beside else frozenset({Phase.REDUCE, Phase.UNSHARD})

    def _bucket_elements(self) -> dict[int, int]:
        """DDP: unit -> elements of the bucket that its gradients fill; the last unit of a backward is the root."""
        found, waiting, cap = dict[int, int](), 0, FIRST_BUCKET
        for i in (*range(len(self._units) - 1, 0, -1), 0):
            waiting += self._units[i].numel
            if waiting * 4 >= cap or i == 0:
                found[i], waiting, cap = waiting, 0, BUCKET
        return found

    def seconds(self, action: Action, schedule: Schedule, *, reduces: bool = True) -> float:
        """One action alone."""
        if action.phase is Phase.COMPUTE:
            return self._work_s[action.point.direction][action.unit] if computes(action, schedule) else 0.0
        if action.phase is Phase.HOST_COPY:
            return self._units[action.unit].numel / self._factor * 4 / self._machine.device.link_bytes_per_s
        if action.phase is Phase.REDUCE and not reduces:
            return 0.0
        key = action.phase, self._elements(action.unit)
        if key not in self._sent_s:
            alone = sum(collective_seconds(*one, self._machine, self._rates) for one in self._collectives(*key))
            stretch = self._rates.host(self._spec.strategy.backend).stretch
            self._sent_s[key] = self._copied_s(*key) + stretch * alone
        return self._sent_s[key]

    def _copied_s(self, phase: Phase, elements: int) -> float:
        """Copies, on a measured device; elsewhere they are part of computing's memory traffic."""
        measured, payloads = self._machine.device.measured, self._collectives(phase, elements)
        if measured is None or not payloads:
            return 0.0
        times = COPIES[self._spec.strategy.backend][phase is Phase.REDUCE]
        return measured.copies(times * payloads[0][1])

    def _elements(self, unit: int) -> int:
        """Elements that a unit gathers and reduces; of DDP, those of the bucket that it fills."""
        return self._units[unit].numel if self._buckets is None else self._buckets.get(unit, 0)

    def _collectives(self, phase: Phase, elements: int) -> list[tuple[str, float, RankGroup]]:
        """(kind, payload in bytes, group) of each collective of a gather or a reduction."""
        if phase is Phase.UNSHARD:
            return [("all_gather", elements * BYTES[self._dtypes.param], self._shard)] if self._factor > 1 else []
        size = elements * BYTES[self._dtypes.reduce]
        inside = [("reduce_scatter", size, self._shard)] if self._factor > 1 else []
        across = [("all_reduce", size / self._factor, self._replicas)] if self._replicas.size > 1 and size else []
        return inside + across

    def communicated(self, *, reducing: int, unreduced: int) -> tuple[dict[str, float], dict[str, int]]:
        """Seconds and link bytes of a step by kind of collective, with so many micro-batches that reduce and that do not."""
        taken, sent = defaultdict[str, float](float), defaultdict[str, float](float)
        actions = schedule_of(len(self._units), self._rules).actions
        alike = Counter((a.phase, self._elements(a.unit)) for a in actions if a.phase in SENDING)
        for (phase, elements), count in alike.items():
            times = count * (reducing + (unreduced if phase is Phase.UNSHARD else 0))
            for kind, size, group in self._collectives(phase, elements):
                taken[kind] += times * collective_seconds(kind, size, group, self._machine, self._rates)
                sent[kind] += times * link_bytes(kind, size, group.size)
        return dict(taken), {kind: round(size) for kind, size in sent.items()}


def recomputed(spec: Spec, units: int) -> set[int]:
    """Units that recompute their forward; never the root, whose part outside of blocks is not checkpointed."""
    how = spec.strategy.recompute
    if how == "none":
        return set()
    every = 1 if how == "full" else int(how.partition(":")[2])
    return {i for i in range(1, units) if (i - 1) % every == 0}
