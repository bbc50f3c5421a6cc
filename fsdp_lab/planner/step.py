"""The time of one step: `StepModel` gives each action of the engine's own schedule its seconds, `Simulation` orders them.

`Simulation` is a discrete-event simulation of one micro-batch. Computing and communication are a queue each. An action
begins when its queue is free and the actions it waits for are complete. The lab's engine, and every backend on a CPU, issues
a gather after the computation before it, as scheduled. FSDP1 and FSDP2 on a GPU issue it as far ahead as their rate limiter
lets the host run (arXiv 2304.11277, section 3.4), so forwards overlap without prefetching. DDP gathers nothing; its units
represent its buckets."""

import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import NamedTuple

from fsdp_lab.engine.schedule import Action, Direction, Phase, PointSide, Rules, Schedule, UnitCall
from fsdp_lab.planner import costs
from fsdp_lab.planner.costs import Computing, ComputingOf, RankGroup, Work, collective_seconds, late_s, link_bytes
from fsdp_lab.planner.devices import Machine, Rates
from fsdp_lab.planner.model_shape import ModelShape, UnitShape
from fsdp_lab.spec.link import LinkSpec
from fsdp_lab.spec.spec import BACKEND_TRAITS, Spec

# Backends whose host runs ahead of a GPU; on a CPU, which has no streams, they wait for their collectives.
AHEAD = tuple(sorted(name for name, traits in BACKEND_TRAITS.items() if traits.runs_ahead))
OVERLAPPING = ("lab", *AHEAD)  # whose collectives run beside computing
SHORT = 3  # blocks that `step_seconds` simulates
SENDING = (Phase.UNSHARD, Phase.REDUCE)


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of one step on a rank."""

    seconds: float
    computing_s: float  # with nothing else in flight
    slowed_s: float  # slowdown of computing by collectives in flight and by late ranks
    exposed_comm_s: float
    host_s: float  # computing's wait for the host, which issues kernels
    optimizer_s: float


@dataclass(eq=False)
class StepModel:
    """Seconds of each action of a schedule, and of the whole step."""

    spec: Spec
    units: Sequence[UnitShape]
    tokens: int  # of one sample
    machine: Machine
    rates: Rates
    computing: ComputingOf = Computing  # makes what gives the units their seconds

    def __post_init__(self) -> None:
        spec, units = self.spec, self.units
        fields = {"spec": spec, "tokens": self.tokens, "device": self.machine.device, "rates": self.rates}
        self._computing = self.computing(**fields)
        self.works = list[Work]()
        recomputing, made = recomputed(spec, len(units)), dict[tuple[int, bool], Work]()  # most units are equal
        for i, unit in enumerate(units):
            key = id(unit), i in recomputing
            if key not in made:
                made[key] = self._computing.work(unit, recomputed=key[1])
            self.works.append(made[key])
        self._factor = spec.shard_factor
        self._shard = RankGroup(size=self._factor)
        self._replicas = RankGroup(size=spec.world_size // self._factor, stride=self._factor)
        self._dtypes = spec.strategy.dtypes
        self._on_cpu = self.machine.device.type == "cpu"
        self._buckets = None if spec.strategy.traits.has_units else self._bucket_elements()
        self._sent_s: dict[tuple[Phase, int], float] = {}  # by phase and elements
        self._schedule = schedule_of(len(units), self._rules)

    def step(self) -> StepTime:
        """All micro-batches and the optimizer step."""
        w, reducing = self.spec.workload, self.spec.communications
        unreduced = w.accumulate - reducing
        last = self._micro(reduces=True)
        first = self._micro(reduces=False) if unreduced else last

        def total(of_last: float, of_first: float) -> float:
            return reducing * of_last + unreduced * of_first

        numel = sum(unit.trained_numel for unit in self.units) / self._factor
        optimizer = self._computing.optimizer_s(numel)
        seconds = total(last.seconds, first.seconds) + optimizer
        seconds += self.rates.step_s + self.rates.host(self.spec.strategy.backend).step_s
        alone = (self.seconds(action) for action in self._schedule.actions if action.phase is Phase.COMPUTE)
        computing = w.accumulate * sum(alone)
        host = total(last.host_s, first.host_s)
        return StepTime(
            seconds=seconds,
            computing_s=computing,
            slowed_s=total(last.phase_s(Phase.COMPUTE), first.phase_s(Phase.COMPUTE)) - computing - host,
            exposed_comm_s=total(last.exposed_s, first.exposed_s),
            host_s=host,
            optimizer_s=optimizer,
        )

    @functools.cached_property
    def sends(self) -> Counter[tuple[int, Direction]]:
        """Collectives of a micro-batch by unit and direction; on a GPU, gathers and reductions that the host issues."""
        counts = Counter[tuple[int, Direction]]()
        for a in self._schedule.actions:
            if a.phase in SENDING:
                elements = self._elements(a)
                number = len(self._collectives(a.phase, elements)) if self._on_cpu else bool(elements)
                counts[a.unit, a.point.direction] += number
        return counts

    @functools.cached_property
    def _work_s(self) -> dict[Direction, list[float]]:
        """Seconds by direction and unit: computing, and on a CPU the host's time to issue collectives."""
        send_s = self.rates.host(self.spec.strategy.backend).send_s if self._on_cpu else 0.0
        alone = {Direction.FORWARD: [w.forward_s for w in self.works]}
        alone[Direction.BACKWARD] = [w.backward_s + w.recompute_s for w in self.works]
        for direction, seconds in alone.items():
            for i in range(len(seconds)):
                seconds[i] = seconds[i] + send_s * self.sends[i, direction] + self._copies_s[i, direction]
        return alone

    @functools.cached_property
    def _copies_s(self) -> Mapping[tuple[int, Direction], float]:
        """Seconds by unit and direction: copies between parameters and the buffers of collectives, on a GPU that was not
        measured, where the computing stream makes them."""
        seconds = defaultdict[tuple[int, Direction], float](float)
        if self.machine.device.measured is None:
            rate = self.machine.device.memory_bytes_per_s * self.rates.memory
            for a in self._schedule.actions:
                if a.phase in SENDING:
                    seconds[a.unit, a.point.direction] += 2 * self._copied_bytes(a.phase, self._elements(a)) / rate
        return seconds

    def _copied_bytes(self, phase: Phase, elements: int) -> float:
        """Bytes copied beside the collective: of gradients by all backends, before the reduction; of gathered parameters
        where the backend copies them."""
        copies = phase is Phase.REDUCE or self.spec.strategy.traits.copies_gathered
        payloads = self._collectives(phase, elements) if copies else ()
        return payloads[0][1] if payloads else 0.0

    def _micro(self, *, reduces: bool) -> "SimulatedTimeline":
        ahead = self.spec.strategy.traits.runs_ahead and not self._on_cpu
        issue_s = None if self._on_cpu else functools.partial(self._issue_s, reduces=reduces)
        return Simulation(
            self._schedule,
            functools.partial(self.seconds, reduces=reduces),
            ahead=ahead,
            interference=self.rates.interference,
            late_s=late_s(self.spec.world_size, self.rates),
            blocking=self._blocking,
            issue_s=issue_s,
            disturbs_s=functools.partial(self._disturbs_s, reduces=reduces),
        ).run()

    def _issue_s(self, action: Action, *, reduces: bool = True) -> float:
        if action.phase is Phase.COMPUTE and computes(action, self._schedule):
            return self.works[action.unit].issue_s[action.point.direction]
        elements = self._elements(action) if action.phase in SENDING else 0
        # One rank sends nothing and makes the calls all the same, which the published rates were fitted without.
        issues = elements and (self.units[0].kernels or self._collectives(action.phase, elements))
        return self._send_issue_s if issues and (reduces or action.phase is not Phase.REDUCE) else 0.0

    @functools.cached_property
    def _send_issue_s(self) -> float:
        each = self.rates.eager_s if self.units[0].kernels else self.rates.kernel_s
        return costs.SEND_KERNELS * each + self.rates.host(self.spec.strategy.backend).send_s

    @property
    def may_lag(self) -> bool:
        """Whether the host may issue a block more slowly than the device computes it, and so fall behind after many."""
        block = self.works[-1]
        most_s = max(block.issue_s.values()) + 3 * self._send_issue_s
        return not self._on_cpu and most_s >= min(block.forward_s, block.backward_s)

    @property
    def _rules(self) -> Rules:
        """On a CPU, FSDP1 and FSDP2 keep only the root gathered after the forward. On a GPU their gathers run ahead, so a
        few more make no difference."""
        keeps_first = not (self._on_cpu and self.spec.strategy.traits.runs_ahead)
        return replace(self.spec.strategy.schedule_rules, keeps_first=keeps_first)

    @property
    def _blocking(self) -> frozenset[Phase]:
        """Phases that computing waits for: on a CPU, those that the backend waits for. FSDP2 gathers while it computes if it
        prefetches (backends/fsdp2.py)."""
        s = self.spec.strategy
        if not self._on_cpu or not s.traits.runs_ahead:
            return frozenset()
        overlaps = s.backend == "fsdp2" and (s.forward_depth > 0 or s.backward_prefetch > 1)
        return frozenset({Phase.REDUCE}) if overlaps else frozenset({Phase.REDUCE, Phase.UNSHARD})

    def _bucket_elements(self) -> dict[int, int]:
        """DDP: unit -> elements of the bucket that its gradients fill; the last unit of a backward is the root."""
        buckets, filled, cap = dict[int, int](), 0, costs.FIRST_BUCKET
        for i in (*range(len(self.units) - 1, 0, -1), 0):
            filled += self.units[i].trained_numel
            if filled * 4 >= cap or i == 0:
                buckets[i], filled, cap = filled, 0, costs.BUCKET
        return buckets

    def seconds(self, action: Action, *, reduces: bool = True) -> float:
        """Seconds of one action alone."""
        if action.phase is Phase.COMPUTE:
            return self._work_s[action.point.direction][action.unit] if computes(action, self._schedule) else 0.0
        if action.phase is Phase.HOST_COPY:
            return self.units[action.unit].numel / self._factor * 4 / self.machine.device.link_bytes_per_s
        if action.phase is Phase.REDUCE and not reduces:
            return 0.0
        key = action.phase, self._elements(action)
        if key not in self._sent_s:
            self._sent_s[key] = max(self._carried_s(*key), self._emulated_s(*key))
        return self._sent_s[key]

    def _disturbs_s(self, action: Action, *, reduces: bool) -> float:
        """Seconds in which a collective may slow computing: not those in which it waits for an emulated link."""
        seconds = self.seconds(action, reduces=reduces)
        return min(seconds, self._carried_s(action.phase, self._elements(action))) if self._link else seconds

    def _carried_s(self, phase: Phase, elements: int) -> float:
        """A gather or a reduction over the real link."""
        alone = sum(collective_seconds(*one, self.machine, self.rates) for one in self._collectives(phase, elements))
        measured = self.machine.device.measured  # of others the copies are in `_copies_s`
        copied_s = measured.copies(self._copied_bytes(phase, elements)) if measured else 0.0
        return copied_s + self.rates.host(self.spec.strategy.backend).stretch * alone

    def _emulated_s(self, phase: Phase, elements: int) -> float:
        """Over the Spec's emulated link; hardware that is named has its own (wire/link.py)."""
        if self._link is None:
            return 0.0
        bytes_per_s, latency_s = self._link
        sent = [link_bytes(kind, size, group.size) for kind, size, group in self._collectives(phase, elements)]
        return sum(latency_s + size / bytes_per_s for size in sent)

    @functools.cached_property
    def _link(self) -> tuple[float, float] | None:
        """Bandwidth and latency of the emulated link, scaled to this device."""
        device, text = self.machine.device, self.spec.link
        if device.measured is None or text is None:
            return None
        link, dtype = LinkSpec.parse(text), self._dtypes.param
        return link.bytes_per_s * link.scale(device.peak_flops_per_s.get(dtype), dtype), link.latency_s

    def _elements(self, action: Action) -> int:
        """Elements that a unit gathers or reduces; with DDP, those of the bucket that it fills. FSDP1 reduces a flat
        parameter whole, also where parts of it are frozen."""
        if self._buckets is not None:
            return self._buckets.get(action.unit, 0) if action.phase is Phase.REDUCE else 0
        unit = self.units[action.unit]
        if action.phase is Phase.REDUCE:
            return unit.numel if unit.trained_numel and self.spec.strategy.backend == "fsdp1" else unit.trained_numel
        return unit.numel if unit.has_backward or action.point.direction is Direction.FORWARD else 0

    def _collectives(self, phase: Phase, elements: int) -> list[tuple[str, float, RankGroup]]:
        """(kind, payload in bytes, group) of each collective of a gather or a reduction."""
        if not elements:
            return []
        if phase is Phase.UNSHARD:
            sends = self._factor > 1 and self.spec.strategy.gather == "copy"
            return [("all_gather", elements * costs.BYTES[self._dtypes.param], self._shard)] if sends else []
        size = elements * costs.BYTES[self._dtypes.reduce]
        scatter = [("reduce_scatter", size, self._shard)] if self._factor > 1 else []
        across = [("all_reduce", size / self._factor, self._replicas)] if self._replicas.size > 1 and size else []
        return scatter + across

    def communicated(self) -> tuple[dict[str, float], dict[str, int]]:
        """Seconds without overlap, and link bytes, of a step by kind of collective."""
        seconds, sent = defaultdict[str, float](float), defaultdict[str, float](float)
        counts = Counter((a.phase, self._elements(a)) for a in self._schedule.actions if a.phase in SENDING)
        for (phase, elements), count in counts.items():
            gathers = phase is Phase.UNSHARD
            times = count * (self.spec.workload.accumulate if gathers else self.spec.communications)
            for kind, size, group in self._collectives(phase, elements):
                seconds[kind] += times * collective_seconds(kind, size, group, self.machine, self.rates)
                sent[kind] += times * link_bytes(kind, size, group.size)
        return dict(seconds), {kind: round(size) for kind, size in sent.items()}


def step_seconds(
    spec: Spec, shape: ModelShape, machine: Machine, rates: Rates, computing: ComputingOf = Computing
) -> float:
    """Returns `StepTime.seconds` in less time: some of many equal blocks are simulated, the others add the time of one."""
    units, tokens = shape.units, shape.tokens(spec.workload.seq_len)

    def model(first: int) -> StepModel:
        return StepModel(spec, units[:first], tokens, machine, rates, computing)

    policy = spec.strategy.recompute
    period = int(policy.partition(":")[2]) if ":" in policy else 1
    longer = model(SHORT + 1 + period)
    if len({id(unit) for unit in units}) > 2 or len(units) < SHORT + 3 + period or longer.may_lag:
        return model(len(units)).step().seconds
    long, short = longer.step().seconds, model(SHORT + 1).step().seconds
    return short + (long - short) * (len(units) - SHORT - 1) / period


def recomputed(spec: Spec, units: int) -> set[int]:
    """Units that recompute their forward; never the root, whose own part is not checkpointed."""
    policy = spec.strategy.recompute
    if policy == "none":
        return set()
    every = 1 if policy == "full" else int(policy.partition(":")[2])
    return {i for i in range(1, units) if (i - 1) % every == 0}


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
    """One micro-batch."""

    done: tuple[TimedAction, ...]
    seconds: float
    exposed_s: float  # computing's wait for communication
    host_s: float  # and for the host

    def phase_s(self, phase: Phase) -> float:
        return sum(d.seconds for d in self.done if d.action.phase is phase)


@functools.lru_cache(maxsize=64)
def schedule_for(calls: Sequence[UnitCall], rules: Rules) -> Schedule:
    """A cached Schedule: one model is planned many times."""
    return Schedule(calls, rules)


@functools.lru_cache(maxsize=64)
def schedule_of(units: int, rules: Rules) -> Schedule:
    """The Schedule of a root, unit 0, that calls the others once each, in order."""
    return Schedule((UnitCall(unit=0), *(UnitCall(unit=i, parent=0) for i in range(1, units))), rules)


@dataclass(eq=False)
class Simulation:
    schedule: Schedule
    seconds: Callable[[Action], float]  # of each action alone
    _: KW_ONLY
    ahead: bool  # the host runs ahead of the device, and only the limiter holds gathers back
    interference: float  # slowdown of computing by a collective in flight, as a share of the collective's time
    late_s: float = 0.0  # wait of a collective for the last of its ranks, and of computing with it
    blocking: frozenset[Phase] = frozenset()  # phases during which the computing thread waits
    issue_s: Callable[[Action], float] | None = None  # of the host, to issue an action; None: no separate host does
    disturbs_s: Callable[[Action], float] | None = None  # of a collective that may slow computing; None: all

    def __post_init__(self) -> None:
        self._computing = self._sending = self._copying = 0.0  # when each queue is free
        self._issued = 0.0  # until when the host issues what it has come to
        self._host_s = 0.0
        self._ends: list[float] = []
        self._freed: list[float] = []
        self._gathers = 0
        self._disturbed = 0.0  # seconds of collectives that have not slowed computing yet
        self._waited_s = 0.0  # for late ranks
        self._exposed_s = 0.0  # computing's wait for communication

    def run(self) -> SimulatedTimeline:
        done = []
        for action in self.schedule.actions:
            begin, end = self._place(action)
            self._ends.append(end)
            done.append(TimedAction(action=action, begin_s=begin, end_s=end))
        last = max((d.end_s for d in done), default=0.0)
        exposed_s = self._exposed_s + max(0.0, last - self._computing)  # for the last gradients
        return SimulatedTimeline(done=tuple(done), seconds=last, exposed_s=exposed_s, host_s=self._host_s)

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
            self._copying = begin + self.seconds(action)
            return begin, self._copying
        if action.phase is Phase.UNSHARD:
            # Until the limiter admits it: `limit` may be in flight or in use, besides what stays gathered.
            if self.ahead:
                limit = self.schedule.rules.limit
                needed = self._gathers - limit - len(self.schedule.stays_gathered)
                ready = self._freed[needed] if limit and 0 <= needed < len(self._freed) else 0.0
            self._gathers += 1
        return self._send(action, ready)

    def _send(self, action: Action, ready: float) -> tuple[float, float]:
        begin, lasts = max(ready, self._sending), self.seconds(action)
        if self.issue_s:
            begin = max(begin, self._issued) if lasts else begin
            self._issued += self.issue_s(action)
        if action.phase in self.blocking:  # computing waits
            begin = max(begin, self._computing)
            self._exposed_s += begin + lasts - self._computing
            self._computing = begin + lasts
        else:
            self._disturbed += lasts if self.disturbs_s is None else self.disturbs_s(action)
        self._sending = begin + lasts
        self._waited_s += self.late_s if lasts else 0.0
        return begin, self._sending

    def _compute(self, action: Action, ready: float) -> tuple[float, float]:
        begin = max(ready, self._computing)
        self._exposed_s += begin - self._computing
        lasts = self.seconds(action)
        slowed = min(self.interference * self._disturbed, self.interference * lasts)
        self._disturbed = max(0.0, self._disturbed - lasts)
        end = begin + lasts + slowed + (self._waited_s if lasts else 0.0)
        if self.issue_s:
            self._issued += self.issue_s(action)
            self._host_s += max(0.0, self._issued - end)
            end = max(end, self._issued)  # the last kernel begins when the host has issued it
        self._computing = end
        self._waited_s = 0.0 if lasts else self._waited_s
        return begin, self._computing


def computes(action: Action, schedule: Schedule) -> bool:
    """Returns whether this computation of a call has its work: a call that encloses others works after them in the
    forward and before them in the backward."""
    if action.point.call not in schedule.enclosing:
        return True
    after = PointSide.AFTER if action.point.direction is Direction.FORWARD else PointSide.BEFORE
    return action.point.side is after
