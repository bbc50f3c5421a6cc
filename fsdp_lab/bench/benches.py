"""The benches that start ranks of their own, without a lab (step, wire, checkpoint, ...), and how any bench reports.

A bench prints each figure once it is known and returns the content of its `--json` file: "ratios" and "control" (a
ratio of equals), each with median, p10, p90 and n; what else was measured; in "environment" what it was measured with.

Note: several launches in `metering`. The memory layout of a form's tensors is random, and constant within a launch: one
form can be 1 to 2% faster than its equal for as long as the processes live. So the processes are started several times,
with the forms built in another order each time, and the error is computed from the differences between launches.

Note: parts in `metering`. Each rank times what it does beyond a plain step by its clock. The vote counts as long as on the
rank that comes last to it, as the others wait for the slowest one with a vote or without. On a GPU the norm's time contains
the one wait for the device. What is left of the difference to the bare form is the rest: the wire, and what differs
between two builds of one form. The only ledger step is a form's third step, as in a lab; it is not among the counted steps,
and its additional time is spread over `LEDGER_STEPS` steps.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fsdp_lab.bench.launch import launch
from fsdp_lab.bench.plan import CONTROL, DCP, DCP_AGAIN, FORMS, LAB, METERING, PEERS, REFERENCE, BenchError, BenchPlan
from fsdp_lab.core.events import StepEvent
from fsdp_lab.core.formatting import Spread, Table
from fsdp_lab.core.spec import Spec

Say = Callable[[str], None]
LEDGER_STEPS = 1000  # between two switches of strategy, each of which makes a ledger step
TOLERANCES = {"fp32": 1e-4, "bf16": 2e-2}  # of losses and gradient norms, relative

# -- reports ---------------------------------------------------------------------------------------------------------


class Report:
    """Prints the ratios of a bench and collects what `--json` writes, in `figures`."""

    def __init__(self, say: Say, environment: Mapping[str, Any]) -> None:
        self.say = say
        self.figures: dict[str, Any] = {"ratios": {}, "control": {}, "environment": dict(environment)}

    def ratio(self, name: str, values: Spread, *, label: str = "", note: str = "") -> None:
        self.figures["ratios"][name] = asdict(values)
        self.say(f"{label or name}: {format_spread(values)}{note}")

    def control(self, name: str, values: Spread, *, note: str = "") -> None:
        self.figures["control"][name] = asdict(values)
        self.say(f"control {name}: {format_spread(values)}{note}")


def format_spread(values: Spread, unit: str = "", digits: int = 3) -> str:
    """Median, p10, p90 and n of a ratio, or of seconds, which the unit "ms" converts."""
    scale = 1e3 if unit == "ms" else 1
    median, p10, p90 = (f"{scale * value:.{digits}f}" for value in (values.median, values.p10, values.p90))
    return f"{median}{' ' * bool(unit)}{unit}, p10 {p10}, p90 {p90} ({values.n})"


def spread(values: Sequence[float]) -> Spread:
    """The spread of one value or more."""
    result = Spread.of(values)
    assert result is not None
    return result


def ratios(ones: Sequence[float], others: Sequence[float]) -> list[float]:
    """Element-wise quotients, one per round."""
    return [one / other for one, other in zip(ones, others, strict=True)]


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % confidence interval of the median, whatever the distribution; of fewer than six values the least and the
    greatest. By order statistics (Conover, Practical Nonparametric Statistics, section 3.2)."""
    ordered, n = sorted(values), len(values)
    below = itertools.accumulate(math.comb(n, k) / 2**n for k in range(n))
    outside = sum(1 for share in below if share <= 0.025)
    return ordered[max(0, outside - 1)], ordered[n - max(1, outside)]


@dataclass(frozen=True, kw_only=True)
class Busy:
    """What the GPU of the slowest rank does in a step, of which another one was profiled."""

    kernels: int
    busy_s: float
    step_s: float

    @classmethod
    def of(cls, kernels: Mapping[str, Any] | None, step_s: float) -> Busy | None:
        return None if kernels is None else cls(kernels=kernels["count"], busy_s=kernels["busy_s"], step_s=step_s)

    @property
    def share(self) -> float:
        """Of the step in which kernels run. In the rest the GPU waits for the host, which issues them."""
        return min(1.0, self.busy_s / self.step_s)

    def cells(self) -> tuple[str, str, str]:
        return f"{self.kernels:,}", f"{self.share:.0%}", f"{1 - self.share:.0%}"


BUSY = ("kernels", "GPU busy", "host-bound")  # columns


def slowest(ranks: Sequence[Sequence[float]]) -> list[float]:
    """Seconds of the slowest rank, one per round."""
    return [max(seconds) for seconds in zip(*ranks, strict=True)]


@dataclass(frozen=True, kw_only=True)
class BenchResult:
    """The measurements of each form: seconds per counted step, and what shows that all forms did the same work."""

    seconds: Mapping[str, Sequence[float]]  # of the slowest rank
    losses: Mapping[str, Sequence[float]]  # of the last step, by rank
    gradient_norms: Mapping[str, float]  # of the first step, over all ranks
    peak_bytes: Mapping[str, int]  # of the rank that allocated most; 0 on CPUs
    shared: frozenset[str] = frozenset()  # forms that communicate through shared memory
    parts: Mapping[str, Mapping[str, Sequence[float]]] = field(
        default_factory=dict
    )  # of metered forms: seconds by part
    ledger_s: Mapping[str, float] = field(default_factory=dict)  # of metered forms: their ledger step
    kernels: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # `KernelTimes` of rank 0, on GPUs

    @classmethod
    def of_ranks(cls, ranks: Sequence[Mapping[str, Any]]) -> BenchResult:
        """From the `BuiltForm.result` of each rank, by form."""
        forms = list(ranks[0])
        return cls(
            seconds={f: slowest([r[f]["seconds"] for r in ranks]) for f in forms},
            losses={f: [r[f]["loss"] for r in ranks] for f in forms},
            peak_bytes={f: max(r[f]["peak_bytes"] for r in ranks) for f in forms},
            shared=frozenset(f for f in forms if all(r[f]["is_shared"] for r in ranks)),
            gradient_norms={f: math.sqrt(sum(r[f]["squared_norm"] for r in ranks)) for f in forms},
            parts={f: parts_of([r[f]["parts"] for r in ranks]) for f in forms if "parts" in ranks[0][f]},
            kernels={f: ranks[0][f]["kernels"] for f in forms if ranks[0][f].get("kernels")},
            ledger_s={f: max(max(r[f]["ledger_s"]) for r in ranks) for f in forms if ranks[0][f].get("ledger_s")},
        )

    def step_time(self, form: str) -> Spread:
        return spread(self.seconds[form])

    def ratio(self, one: str, other: str) -> Spread:
        """Ratio of the step times of two forms in the same round: below 1, `one` is faster."""
        return spread(ratios(self.seconds[one], self.seconds[other]))

    def ratio_interval(self, one: str, other: str) -> tuple[float, float]:
        """The `interval` of that ratio's median."""
        return interval(ratios(self.seconds[one], self.seconds[other]))

    def said_interval(self, other: str) -> str:
        """That of the lab over another form, in words."""
        return "its median is {:.3f} to {:.3f} (95 %)".format(*self.ratio_interval(LAB, other))

    @property
    def fastest(self) -> dict[str, str]:
        """Measured peer -> its form with the smallest median step time; of forms on torch's own group for "PEER-raw", and
        of those through shared memory, as the lab itself, for "PEER-shared"."""
        found = {}
        for peer in PEERS:
            forms = [f for f in self.seconds if FORMS[f].peer == peer]
            raw, shared = [f for f in forms if FORMS[f].group == "raw"], [f for f in forms if f in self.shared]
            for name, some in ((peer, forms), (f"{peer}-raw", raw), (f"{peer}-shared", shared)):
                if some:
                    found[name] = min(some, key=lambda f: statistics.median(self.seconds[f]))
        return found

    @property
    def reference(self) -> str:
        """The form that losses, norms and printed times are compared with."""
        return REFERENCE if REFERENCE in self.seconds else next(iter(self.seconds))

    @property
    def ratios(self) -> dict[str, Spread]:
        """Step time of the lab over that of `fastest`; empty if the lab was not measured."""
        lab = LAB in self.seconds
        return {f"{LAB}/{peer}": self.ratio(LAB, form) for peer, form in self.fastest.items() if lab}

    @property
    def memory_ratios(self) -> dict[str, float]:
        """Peak allocated memory of the lab over that of the fastest form of each peer; empty on CPUs."""
        if not self.peak_bytes.get(LAB):
            return {}
        fastest = {peer: form for peer, form in self.fastest.items() if peer in PEERS}
        return {f"{LAB}/{peer}": self.peak_bytes[LAB] / self.peak_bytes[form] for peer, form in fastest.items()}

    @property
    def control(self) -> dict[str, Spread]:
        """Step time of the lab over that of a second instance of itself: the ratio when nothing differs."""
        both = LAB in self.seconds and CONTROL in self.seconds
        return {f"{LAB}/{LAB}": self.ratio(LAB, CONTROL)} if both else {}

    def metering(self, peer: str) -> tuple[list[float], list[float]]:
        """Overhead of measuring a backend, per round: metered over the mean of both bare forms; and bare over bare."""
        bare, metered, again = (self.seconds[name] for name in METERING[peer])
        cost = [2 * m / (a + b) for m, a, b in zip(metered, bare, again, strict=True)]
        return cost, ratios(bare, again)

    def difference(self) -> tuple[float, str]:
        """The largest relative difference to the reference in last losses and first gradient norms, and its form."""
        differences = {form: self._difference_of(form) for form in self.seconds}
        worst = max(differences, key=lambda form: differences[form])
        return differences[worst], worst

    def _difference_of(self, form: str) -> float:
        mine = [*self.losses[form], self.gradient_norms[form]]
        theirs = [*self.losses[self.reference], self.gradient_norms[self.reference]]
        gaps = [abs(a - b) / abs(b) if b else abs(a) for a, b in zip(mine, theirs, strict=True)]
        return max(gap if math.isfinite(gap) else math.inf for gap in gaps)

    def check_same_work(self, precision: str) -> None:
        """Raises BenchError if a form computed something else than the reference: its step time is meaningless then."""
        difference, form = self.difference()
        if difference > TOLERANCES[precision]:
            raise BenchError(
                f"{form} did other work than {self.reference}: losses or gradient norms differ by {difference:.2g}, "
                f"and {TOLERANCES[precision]:g} is allowed in {precision}; no figure of this run counts"
            )


def parts_of(ranks: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, list[float]]:
    """Seconds of each part of the metering, one per round: of the slowest rank; of the vote, of the one that waits least."""
    of = {"vote": min}
    return {
        name: [of.get(name, max)(each) for each in zip(*(r[name] for r in ranks), strict=True)] for name in ranks[0]
    }


def pooled(launches: Sequence[Sequence[float]]) -> Spread:
    """The spread over all rounds of all launches."""
    return spread([ratio for rounds in launches for ratio in rounds])


def summarize_launches(launches: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Summary of ratios of several launches, rounds by launch; the standard error is that of the launches' medians.

    Rounds of one launch share the memory layout of its processes. More rounds do not reduce that part of the error; only
    further launches show its size.
    """
    medians = [statistics.median(rounds) for rounds in launches]
    error = statistics.stdev(medians) / math.sqrt(len(medians))
    return {**asdict(pooled(launches)), "launches": medians, "mean": statistics.mean(medians), "standard_error": error}


# -- step ------------------------------------------------------------------------------------------------------------


def step(plan: BenchPlan, say: Say) -> dict[str, Any]:
    """Every form of every backend in one launch, one step of each in turn. Raises BenchError."""
    say(f"{len(plan.forms)} forms, {rounds_of(plan)}, on {' '.join(plan.devices)}")
    result = measure(plan)
    figures = step_figures(result, environment(plan), say)
    result.check_same_work(plan.precision)
    return figures


def measure(plan: BenchPlan, on_events: Callable[[list[dict[str, Any]]], None] = lambda events: None) -> BenchResult:
    """Launches the ranks of a plan. `on_events` is called with the step events of metered forms."""
    return BenchResult.of_ranks(launch(plan, {"task": "steps"}, progress(plan), on_events))


def step_figures(result: BenchResult, environment: Mapping[str, Any], say: Say) -> dict[str, Any]:
    """Prints the table of all forms, fastest first, and a line for each ratio; returns the content of the file."""
    report, lab = Report(say, environment), LAB in result.seconds
    heading = f"{LAB}/form" if lab else f"form/{result.reference}"
    rows = []
    for form in sorted(result.seconds, key=lambda f: result.step_time(f).median):
        time, ratio = result.step_time(form), result.ratio(LAB, form) if lab else result.ratio(form, result.reference)
        busy = Busy.of(result.kernels.get(form), time.median)
        times = (f"{1e3 * s:.1f}" for s in (time.median, time.p10, time.p90))
        shares = (f"{r:.3f}" for r in (ratio.median, ratio.p10, ratio.p90))
        rows.append((form, *times, *shares, *(busy.cells() if busy else ())))
    columns = ("form", "ms/step", "p10", "p90", heading, "p10 ", "p90 ", *(BUSY if result.kernels else ()))
    say(repr(Table(columns=columns, rows=tuple(rows), left=frozenset({"form"}))))
    for name, found in result.ratios.items():
        form = result.fastest[name.partition("/")[2]]
        report.ratio(name, found, note=f"; {result.said_interval(form)}; {form} is the fastest of them")
    for name, memory in result.memory_ratios.items():
        say(f"{name}, peak allocated memory: {memory:.3f}")
    for name, found in result.control.items():
        report.control(name, found, note=f"; {result.said_interval(CONTROL)}; {CONTROL} does the same as {LAB}")
    difference, form = result.difference()
    say(f"largest difference of losses and gradient norms to {result.reference}: {difference:.1e} ({form})")
    return report.figures | {
        "step_time_s": {form: asdict(result.step_time(form)) for form in result.seconds},
        "fastest": result.fastest,
        "peak_bytes": dict(result.peak_bytes),
        "kernels": dict(result.kernels),
        "memory_ratios": result.memory_ratios,
    }


# -- metering --------------------------------------------------------------------------------------------------------


def metering(plan: BenchPlan, peer: str, launches: int, say: Say) -> dict[str, Any]:
    """The overhead in a step of `peer` of all that a lab does beyond a plain step. Raises BenchError."""
    return metering_of([peer], plan, launches, say)[peer]


def metering_of(peers: Sequence[str], plan: BenchPlan, launches: int, say: Say) -> dict[str, dict[str, Any]]:
    """The same of several peers, whose forms are all in the plan, by peer. Raises BenchError."""
    say(f"{', '.join(peers)}: {launches} launches of {rounds_of(plan)}, on {' '.join(plan.devices)}")
    results, spans = list[BenchResult](), list[int]()  # spans: their number in each published event

    def count_spans(events: Sequence[Mapping[str, Any]]) -> None:
        spans.extend(len(StepEvent.from_dict(dict(event)).spans) for event in events)

    for number in range(launches):
        first = number % len(plan.forms)
        results.append(measure(dataclasses.replace(plan, forms=plan.forms[first:] + plan.forms[:first]), count_spans))
        results[-1].check_same_work(plan.precision)
        for peer in peers:
            cost, control = (statistics.median(found) for found in results[-1].metering(peer))
            of = f", {peer}" * (len(peers) > 1)
            say(f"launch {number + 1}{of}: metered/bare {cost:.4f}, control bare/bare {control:.4f}")
    found = dict[str, dict[str, Any]]()
    for peer in peers:
        if len(peers) > 1:
            say(f"-- {peer}")
        found[peer] = metering_figures(results, peer, environment(plan), say)
    difference, form = max(result.difference() for result in results)
    say(f"largest difference of losses and gradient norms between forms: {difference:.1e} ({form})")
    traced = [count for count in spans if count]
    say(f"{len(spans)} events published, {len(traced)} of them with spans, {max(traced, default=0)} at most")
    return found


def metering_figures(
    results: Sequence[BenchResult], peer: str, environment: Mapping[str, Any], say: Say
) -> dict[str, Any]:
    """Prints what the launches say of one peer; returns the content of the file."""
    costs, controls = zip(*(result.metering(peer) for result in results), strict=True)
    times = {name: spread([s for result in results for s in result.seconds[name]]) for name in METERING[peer]}
    for name, time in times.items():
        say(f"{name}: {format_spread(time, 'ms', 1)}")
    report = Report(say, {**environment, "backend": peer, "launches": len(results)})
    for section, name, found in (("ratios", "metered/bare", costs), ("control", "bare/bare", controls)):
        report.figures[section][name] = summary = summarize_launches(found)
        error = f"mean of launches {summary['mean']:.4f}, standard error {summary['standard_error']:.4f}"
        say(f"{'control ' * (section == 'control')}{name}: {error}; all rounds: {format_spread(pooled(found))}")
    parts = overheads(results, peer)
    bare_s = times[METERING[peer][0]].median
    for name, seconds in parts.items():
        say(f"  {name}: {1e3 * seconds:.3f} ms, {seconds / bare_s:.2%} of a bare step")
    step_time_s = {name: asdict(time) for name, time in times.items()}
    return report.figures | {"step_time_s": step_time_s, "parts_s": parts, "parts/bare": {
        name: seconds / bare_s for name, seconds in parts.items()}}  # fmt: skip


def overheads(results: Sequence[BenchResult], peer: str) -> dict[str, float]:
    """Seconds per step of each part of the overhead: the median over all rounds, and the rest up to the difference of the
    forms' medians; last the ledger's share, which comes in addition."""
    bare, metered, again = METERING[peer]
    rounds = {name: [s for r in results for s in r.parts[metered][name]] for name in results[0].parts[metered]}
    found = {name: statistics.median(seconds) for name, seconds in rounds.items()}
    extra = [
        m - (a + b) / 2
        for r in results
        for m, a, b in zip(*(r.seconds[f] for f in (metered, bare, again)), strict=True)
    ]
    found["rest"] = statistics.median(extra) - sum(found.values())
    ledgers = [r.ledger_s[metered] - statistics.median(r.seconds[metered]) for r in results if metered in r.ledger_s]
    if ledgers:
        found[f"ledger, over {LEDGER_STEPS} steps"] = statistics.median(ledgers) / LEDGER_STEPS
    return found


# -- checkpoint ------------------------------------------------------------------------------------------------------


def checkpoint(plan: BenchPlan, folder: Path, say: Say) -> dict[str, Any]:
    """Save and load, compared with plain Distributed Checkpoint, and the cost of a save to training. Raises BenchError."""
    say(f"{plan.steps} rounds after {plan.warmup} steps of warm-up, on {' '.join(plan.devices)}")
    ranks = launch(plan, {"task": "checkpoints", "folder": str(folder)}, progress(plan))
    seconds = {
        method: {way: slowest([rank[method][way] for rank in ranks]) for way in ("save", "load")}
        for method in (LAB, DCP, DCP_AGAIN)
    }
    both = {method: [a + b for a, b in zip(of["save"], of["load"], strict=True)] for method, of in seconds.items()}
    stalls = [max(of, key=lambda one: one["stall_s"]) for of in zip(*(rank["beside"] for rank in ranks), strict=True)]
    stall = {
        "stall_s": spread([one["stall_s"] for one in stalls]),
        "stall/step": spread([one["stall_s"] / one["step_s"] for one in stalls]),
        "step beside/alone": spread([one["slowed"] for one in stalls]),
        "window_s": spread([one["window_s"] for one in stalls]),
    }
    for method, ways in seconds.items():
        for way, of in ways.items():
            say(f"{method} {way}: {format_spread(spread(of), 'ms', 0)}")
    report = Report(say, environment(plan))
    report.ratio("lab/dcp", spread(ratios(both[LAB], both[DCP])), label="lab/dcp, save + load")
    report.control("dcp/dcp", spread(ratios(both[DCP], both[DCP_AGAIN])))
    say(f"a save stops training for: {1e3 * stall['stall_s'].median:.0f} ms")
    say(f"stall/step: {format_spread(stall['stall/step'])}")
    say(f"step during the writing/step alone: {format_spread(stall['step beside/alone'])}")
    return report.figures | {
        "seconds": {m: {way: asdict(spread(of)) for way, of in ways.items()} for m, ways in seconds.items()},
        **{name: asdict(of) for name, of in stall.items()},
    }


# -- load ------------------------------------------------------------------------------------------------------------


def load(plan: BenchPlan, rounds: int, folder: Path, say: Say) -> dict[str, Any]:
    """A folder of weights until the end of the first step, beside `from_pretrained` with FSDP2. Raises BenchError."""
    from fsdp_lab.bench import loading

    model_bytes = loading.write_model(plan.preset, folder)
    say(f"{plan.preset}, {model_bytes / 1e9:.2f} GB in fp32, {plan.ranks} ranks, {rounds} rounds after one of warm-up")
    spec = Spec(world_size=plan.ranks, devices=plan.devices).replace(
        model=str(folder), tokenizer="bytes", seq_len=plan.seq_len, micro_batch=plan.micro_batch
    )
    ranks = launch(plan, {"task": "load", "spec": spec.to_dict(), "rounds": rounds}, lambda done: None)
    seconds = {method: slowest([rank[method]["seconds"] for rank in ranks]) for method in loading.METHODS}
    memory = {
        method: [sum(of) / model_bytes for of in zip(*(rank[method]["bytes"] for rank in ranks), strict=True)]
        for method in loading.METHODS
    }
    for method in loading.METHODS:
        say(f"{method}: first step after {format_spread(spread(seconds[method]), 's', 1)}; host memory of all ranks while "
            f"loading: {format_spread(spread(memory[method]))} x the model")  # fmt: skip
    report = Report(say, environment(plan))
    report.ratio(
        "lab/plain", spread(ratios(seconds[loading.LAB], seconds[loading.PLAIN])), label="lab/plain, first step"
    )
    report.control("plain/plain", spread(ratios(seconds[loading.PLAIN], seconds[loading.PLAIN_AGAIN])))
    return report.figures | {
        "model_bytes": model_bytes,
        "seconds": {method: asdict(spread(of)) for method, of in seconds.items()},
        "host memory/model": {method: asdict(spread(of)) for method, of in memory.items()},
    }


# -- collectives ------------------------------------------------------------------------------------------------------


def wire(plan: BenchPlan, say: Say) -> dict[str, Any]:
    """All-gathers and reduce-scatters over shared memory, beside Gloo in its faster form. Raises BenchError."""
    from fsdp_lab.bench.wire import AGAIN, KINDS, SHARED

    say(f"{plan.ranks} ranks, {plan.steps} rounds after one of warm-up; bytes of the whole tensor, microseconds")
    ranks = launch(plan, {"task": "wire"}, lambda done: None)
    report, rows = Report(lambda line: None, environment(plan)), []
    for name in ranks[0]["seconds"]:
        kind, _, nbytes = name.partition("/")
        seconds = {form: slowest([rank["seconds"][name][form] for rank in ranks]) for form in KINDS[kind]}
        times = {form: spread(of).median for form, of in seconds.items()}
        gloo = min((form for form in times if form not in (SHARED, AGAIN)), key=times.__getitem__)
        report.ratio(name, found := spread(ratios(seconds[SHARED], seconds[gloo])))
        report.control(name, again := spread(ratios(seconds[SHARED], seconds[AGAIN])))
        rows.append((kind, f"{int(nbytes):,}", f"{1e6 * times[SHARED]:,.0f}", f"{1e6 * times[gloo]:,.0f}", gloo,
                     *(f"{x:.3f}" for x in (found.median, found.p10, found.p90)), f"{again.median:.3f}"))  # fmt: skip
    columns = ("collective", "bytes", "shared", "Gloo", "its form", "shared/Gloo", "p10", "p90", "control")
    say(repr(Table(columns=columns, rows=tuple(rows), left=frozenset({"collective", "its form"}))))
    waiting = max(rank["waiting"] for rank in ranks)
    say(f"a rank that waits for another one takes {waiting:.2%} of a core")
    return report.figures | {"waiting_cores": waiting}


# -- common ----------------------------------------------------------------------------------------------------------


def rounds_of(plan: BenchPlan) -> str:
    return f"{plan.steps} rounds after {plan.warmup} of warm-up"


def environment(plan: BenchPlan) -> dict[str, Any]:
    """The plan, and the names of the GPUs where ranks are on GPUs."""
    if plan.devices[0] == "cpu":
        return asdict(plan)
    import torch

    gpus = [torch.cuda.get_device_name(device) for device in plan.devices]
    return {**asdict(plan), "gpus": gpus, "shares_gpu": plan.shares_gpu}


def progress(plan: BenchPlan) -> Callable[[int], None]:
    """Counts rounds in a line on a terminal."""
    rounds = plan.warmup + plan.steps

    def show(done: int) -> None:
        if sys.stderr.isatty():
            print(f"\rround {done} of {rounds}", end="\n" if done == rounds else "", file=sys.stderr, flush=True)

    return show
