"""`metering`: the overhead in a step of all that a lab does beyond a plain one (vote, norm, measuring, events).

Note: several launches. The memory layout of a form's tensors is random, and constant within a launch: one form can be 1 to
2% faster than its equal. So the processes are started several times, with the forms built in another order each time, and
the error is computed from the differences between launches.

Note: parts. Each rank times what it does beyond a plain step. The vote counts as long as on the rank that comes last to it.
The one wait for a GPU is in no part, but in the norm where ranks share it. The rest is the wire, and what differs between
two builds of one form. The only ledger step is a form's third, which is not counted; its time is spread over
`LEDGER_STEPS` steps."""

import argparse
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from fsdp_lab.base.events import StepEvent
from fsdp_lab.bench.interleave import Batch, BuiltForm, build_forms, interleave
from fsdp_lab.bench.plan import BenchPlan, Form
from fsdp_lab.bench.results import BenchResult, environment, format_spread, ratios, rounds_of, spread
from fsdp_lab.bench.tasks import BenchRank
from fsdp_lab.cli.bench import planned, say
from fsdp_lab.cli.console import Refused, at_least
from fsdp_lab.models.batches import Batches
from fsdp_lab.models.flops import BestPeak, Peak
from fsdp_lab.rank.rendezvous import RankInfo
from fsdp_lab.rank.tracing import ClockOffset
from fsdp_lab.rank.trainer import Scaler, StepCost, Trainer, TrainingProgress
from fsdp_lab.wire import ReductionOrder, Wire
from tests.bench.ranks import launch_here

LEDGER_STEPS = 1000  # between two switches of strategy, each of which makes a ledger step
TRACE_EVERY_S = 0.5  # the duration of a chunk in a lab, whose last step is traced
PUBLISH_EVERY_S = 0.04  # as the ranks of a lab do
PARTS = ("norm", "vote", "measuring", "events")
PEERS = ("fsdp2", "fsdp1", "ddp", "lab")


def forms_of(peer: str) -> tuple[Form, Form, Form]:
    """Torch's own group without our code, the lab's with all measuring, and the first again."""
    bare = Form(name=f"{peer}-bare", peer=peer, group="raw")
    return bare, Form(name=f"{peer}-metered", peer=peer), replace(bare, name=f"{peer}-bare-again")


@dataclass(frozen=True, kw_only=True)
class Plan(BenchPlan):
    """The work of these forms."""

    known: ClassVar[Mapping[str, Form]] = {form.name: form for peer in PEERS for form in forms_of(peer)}


@dataclass(frozen=True, kw_only=True)
class Launch:
    """The measurements of one launch; of metered forms their parts by name, and the seconds of their ledger step."""

    result: BenchResult
    parts: Mapping[str, Mapping[str, Sequence[float]]]
    ledger_s: Mapping[str, float]

    @classmethod
    def of_ranks(cls, ranks: Sequence[Mapping[str, Any]]) -> "Launch":
        metered = [form for form in ranks[0] if "parts" in ranks[0][form]]
        parts = {form: parts_of([rank[form]["parts"] for rank in ranks]) for form in metered}
        ledgers = {form: [s for rank in ranks for s in rank[form]["ledger_s"]] for form in metered}
        ledger_s = {form: max(seconds) for form, seconds in ledgers.items() if seconds}
        return cls(result=BenchResult.of_ranks(ranks), parts=parts, ledger_s=ledger_s)

    def seconds(self, peer: str) -> list[Sequence[float]]:
        return [self.result.seconds[form.name] for form in forms_of(peer)]

    def ratios(self, peer: str) -> tuple[list[float], list[float]]:
        """By round: metered over the mean of both bare forms; and bare over bare."""
        bare, metered, again = self.seconds(peer)
        return [2 * m / (a + b) for m, a, b in zip(metered, bare, again, strict=True)], ratios(bare, again)


def metering(args: argparse.Namespace) -> dict[str, Any]:
    """Raises BenchError. Of several backends: {"backends": {name: its figures}, "environment"}."""
    at_least(args, "launches", 2)
    peers = [name.strip() for name in args.backend.split(",")]
    if unknown := next((name for name in peers if name not in PEERS), None):
        raise Refused(f"--backend {unknown!r} is refused; give some of {', '.join(PEERS)}")
    forms = tuple(form.name for peer in peers for form in forms_of(peer))
    plan = planned(args, Plan, forms=forms, precision=args.precision)
    say(f"{', '.join(peers)}: {args.launches} launches of {rounds_of(plan)}, on {' '.join(plan.devices)}")
    launches, spans = list[Launch](), list[int]()  # spans: their number in each published event
    for number in range(args.launches):
        first = number % len(forms)
        launches.append(measure(replace(plan, forms=forms[first:] + forms[:first]), spans))
        launches[-1].result.check_same_work(plan.precision)
        for peer in peers:
            cost, control = map(statistics.median, launches[-1].ratios(peer))
            of = f", {peer}" * (len(peers) > 1)
            say(f"launch {number + 1}{of}: metered/bare {cost:.4f}, control bare/bare {control:.4f}")
    by_peer = {}
    for peer in peers:
        if len(peers) > 1:
            say(f"-- {peer}")
        by_peer[peer] = figures(launches, peer, environment(plan))
    difference, form = max(each.result.difference() for each in launches)
    say(f"largest difference of losses and gradient norms between forms: {difference:.1e} ({form})")
    traced = [count for count in spans if count]
    say(f"{len(spans)} events published, {len(traced)} of them with spans, {max(traced, default=0)} at most")
    return by_peer[peers[0]] if len(peers) == 1 else {"backends": by_peer, "environment": environment(plan)}


def measure(plan: Plan, spans: list[int]) -> Launch:
    """Appends the number of spans of each published event to `spans`."""

    def receive(kind: str, events: Sequence[dict[str, Any]]) -> None:
        spans.extend(len(StepEvent.from_dict(event).spans) for event in events)

    return Launch.of_ranks(launch_here(plan, "metering", on_message=receive))


def figures(launches: Sequence[Launch], peer: str, environment: Mapping[str, Any]) -> dict[str, Any]:
    """Prints what the launches say of one backend; returns the content of the file."""
    costs, controls = zip(*(each.ratios(peer) for each in launches), strict=True)
    names = [form.name for form in forms_of(peer)]
    times = {name: spread([s for each in launches for s in each.result.seconds[name]]) for name in names}
    for name, of in times.items():
        say(f"{name}: {format_spread(of, 'ms', 1)}")
    told_of: dict[str, Any] = {"environment": {**environment, "backend": peer, "launches": len(launches)}}
    for section, name, rounds in (("ratios", "metered/bare", costs), ("control", "bare/bare", controls)):
        told_of[section] = {name: (told := summarize(rounds))}
        error = f"mean of launches {told['mean']:.4f}, standard error {told['standard_error']:.4f}"
        pooled = format_spread(spread([ratio for of in rounds for ratio in of]))
        say(f"{'control ' * (section == 'control')}{name}: {error}; all rounds: {pooled}")
    parts, bare_s = overheads(launches, peer), times[names[0]].median
    for name, seconds in parts.items():
        say(f"  {name}: {1e3 * seconds:.3f} ms, {seconds / bare_s:.2%} of a bare step")
    shares = {name: seconds / bare_s for name, seconds in parts.items()}
    step_time_s = {name: asdict(of) for name, of in times.items()}
    return told_of | {"step_time_s": step_time_s, "parts_s": parts, "parts/bare": shares}


def summarize(launches: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Of ratios, rounds by launch; the standard error is that of the launches' medians, as rounds of one share a layout."""
    medians = [statistics.median(rounds) for rounds in launches]
    error = statistics.stdev(medians) / math.sqrt(len(medians))
    pooled = asdict(spread([ratio for rounds in launches for ratio in rounds]))
    return {**pooled, "launches": medians, "mean": statistics.mean(medians), "standard_error": error}


def parts_of(ranks: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, list[float]]:
    """Seconds of each part, one per round: of the slowest rank; of the vote, of the one that waits least."""
    of = {"vote": min}
    by_name = {name: zip(*(rank[name] for rank in ranks), strict=True) for name in ranks[0]}
    return {name: [of.get(name, max)(each) for each in rounds] for name, rounds in by_name.items()}


def overheads(launches: Sequence[Launch], peer: str) -> dict[str, float]:
    """Seconds per step of each part of the overhead: the median over all rounds, and the rest up to the difference of the
    forms' medians; last the ledger's share, which comes in addition."""
    name = forms_of(peer)[1].name
    seconds = {part: statistics.median(s for each in launches for s in each.parts[name][part]) for part in PARTS}
    by_form = [each.seconds(peer) for each in launches]
    extra = [m - (a + b) / 2 for bare, metered, again in by_form for a, m, b in zip(bare, metered, again, strict=True)]
    seconds["rest"] = statistics.median(extra) - sum(seconds.values())
    pairs = [(each.ledger_s[name], each.result.seconds[name]) for each in launches if name in each.ledger_s]
    if pairs:
        more_s = statistics.median(ledger_s - statistics.median(of) for ledger_s, of in pairs)
        seconds[f"ledger, over {LEDGER_STEPS} steps"] = more_s / LEDGER_STEPS
    return seconds


# -- in a rank -----------------------------------------------------------------------------------------------------------
def on_rank(rank: BenchRank, job: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """`BuiltForm.result` by form; of metered ones with "parts" and "ledger_s"."""
    plan = cast(Plan, rank.plan)
    # Not over shared memory on CPUs: torch's group beside it is Gloo's.
    with rank.groups(shared_memory=False) as (info, world):
        forms = [MeteredForm(built, plan, info, world, rank) if built.form.group == "wire" else built
                 for built in build_forms(plan, info, world)]  # fmt: skip
        return interleave(plan, forms, info, world)


class MeteredForm(BuiltForm):
    """Trains, measures and publishes every step of a form as a lab's rank does, by its `Trainer`; all of it is timed. But
    batches are given, and events go as JSON to the launcher, where a rank of a lab publishes them over ZMQ."""

    def __init__(self, built: BuiltForm, plan: Plan, info: RankInfo, world: Wire, rank: BenchRank) -> None:
        super().__init__(form=built.form, backend=built.backend)
        self._rank, self._world = rank, world
        self._batches, self._times, peak = _GivenBatch(), PartTimes(), BestPeak(Peak(None, "not measured"))
        self._trainer = Trainer(
            run="bench", spec=plan.spec(built.form), info=info, backend=built.backend,
            batches=cast(Batches, self._batches), world=world,
            cost=StepCost(flops=0, recompute_flops=0, tokens=plan.micro_batch * plan.seq_len, peak=peak),
            progress=TrainingProgress(), scaler=Scaler(enabled=False), notes=(), clock=ClockOffset(),
        )  # fmt: skip
        time_parts(self._trainer, self._times)
        self._unsent: list[dict[str, Any]] = []
        self._published_s = self._traced_s = float("-inf")
        self._ledger = False  # whether the newest step was a ledger step
        self._ledger_s: list[float] = []

    def train(self, batch: Batch, on_gradients: Callable[[], None]) -> Tensor:
        self._world.context.reduction = ReductionOrder.NATIVE
        self._batches.given = batch
        now_s = time.perf_counter()
        if traced := now_s - self._traced_s >= TRACE_EVERY_S:
            self._traced_s = now_s
        handle = self.backend.optimizer.register_step_pre_hook(lambda *_: on_gradients())
        event = self._trainer.step(traced=traced)
        handle.remove()
        self._ledger = event.ledger
        with self._times.of("events"):
            self._publish(event)
        return torch.tensor(event.loss)

    def _publish(self, event: StepEvent) -> None:
        """Send all unsent events every `PUBLISH_EVERY_S`."""
        self._unsent.append(event.to_dict())
        now_s = time.perf_counter()
        if now_s - self._published_s >= PUBLISH_EVERY_S:
            unsent, self._unsent = self._unsent, []
            self._rank.send("events", unsent)
            self._published_s = now_s

    def end_round(self, seconds: float, device: torch.device, *, counted: bool) -> None:
        """Keeps the parts of the newest step; of a ledger step, its time."""
        super().end_round(seconds, device, counted=counted)
        self._times.end_step(keep=counted)
        if self._ledger:
            self._ledger_s.append(seconds)

    def result(self) -> dict[str, Any]:
        return super().result() | {"parts": self._times.kept, "ledger_s": self._ledger_s}


class PartTimes:
    """Host seconds of each of `PARTS`, step by step."""

    def __init__(self) -> None:
        self._now = dict.fromkeys(PARTS, 0.0)
        self.kept: dict[str, list[float]] = {name: [] for name in PARTS}

    @contextmanager
    def of(self, part: str) -> Iterator[None]:
        begun_s = time.perf_counter()
        try:
            yield
        finally:
            self._now[part] += time.perf_counter() - begun_s

    def end_step(self, *, keep: bool) -> None:
        for name, seconds in self._now.items():
            if keep:
                self.kept[name].append(seconds)
        self._now = dict.fromkeys(PARTS, 0.0)


def time_parts(trainer: Trainer, times: PartTimes) -> None:
    """Times what a trainer does beyond a plain loop."""

    def timed(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **more: Any) -> Any:
            with times.of(part):
                return function(*given, **more)

        return call

    meter: Any = trainer.meter
    step = meter.step

    @contextmanager
    def timed_step(**options: Any) -> Iterator[None]:
        with ExitStack() as stack:
            with times.of("measuring"):
                stack.enter_context(step(**options))
            yield
            with times.of("measuring"):
                stack.close()

    meter.step = timed_step
    for of, part, name in ((trainer, "norm", "_loss_and_norm"), (trainer, "vote", "_cast"),
                           (trainer, "measuring", "_complete"), (meter, "measuring", "before_update"),
                           (meter, "measuring", "after_update"), (meter, "measuring", "end")):  # fmt: skip
        setattr(of, name, timed(part, getattr(of, name)))


class _GivenBatch:
    """In the place of `Batches`: samples of equal length, which the launcher gives."""

    given: Batch

    def batch(self, samples: int, micro: int) -> Batch:
        return self.given

    def weight(self, samples: int, micro: int) -> float:
        return 1.0
