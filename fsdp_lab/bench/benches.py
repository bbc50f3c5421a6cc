"""The benches that start ranks of their own, without a lab: step, metering and checkpoint.

Each says on the way what it finds, and returns what goes into its file: "ratios" and "control" (a ratio where nothing
differs), each with median, p10, p90 and n; what else it measured; in "environment", what it was measured with.

Note: several launches in `metering`. Which form's tensors lie where in memory is chance, and the same in all rounds of a
launch: a form can be faster than its equal by one or two per cent for as long as the processes live. So it starts them anew,
with the forms built in another order each time, and its error is what the launches differ by.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fsdp_lab.bench.launch import launch, measure
from fsdp_lab.bench.plan import CONTROL, DCP, DCP_AGAIN, LAB, METERING, BenchPlan
from fsdp_lab.bench.ratios import BenchResult, in_ms, in_words, of_launches, ratios, slowest, spread
from fsdp_lab.core.events import StepEvent
from fsdp_lab.core.formatting import Table

Say = Callable[[str], None]


def step(plan: BenchPlan, say: Say) -> dict[str, Any]:
    """Every form of every backend in one run, a step of each in turn. Raises BenchError."""
    say(f"{len(plan.forms)} forms, {rounds_of(plan)}, on {' '.join(plan.devices)}")
    result = measure(plan, progress(plan))
    for line in report(result):
        say(line)
    result.check_same_work(plan.precision)
    return result.figures(used(plan))


def report(result: BenchResult) -> Iterator[str]:
    """The table of all forms, fastest first, and a line for each ratio."""
    lab = LAB in result.seconds
    heading = f"{LAB}/form" if lab else f"form/{result.reference}"
    rows = []
    for form in sorted(result.seconds, key=lambda f: result.step_time(f).median):
        time, ratio = result.step_time(form), result.ratio(LAB, form) if lab else result.ratio(form, result.reference)
        rows.append((form, *(f"{1e3 * s:.1f}" for s in (time.median, time.p10, time.p90)),
                     *(f"{r:.3f}" for r in (ratio.median, ratio.p10, ratio.p90))))  # fmt: skip
    columns = ("form", "ms/step", "p10", "p90", heading, "p10 ", "p90 ")
    yield repr(Table(columns=columns, rows=tuple(rows), left=frozenset({"form"})))
    for name, found in result.ratios.items():
        yield f"{name}: {in_words(found)}; the fastest form of the peer is {result.fastest[name.partition('/')[2]]}"
    for name, memory in result.memory_ratios.items():
        yield f"{name}, peak allocated memory: {memory:.3f}"
    for name, found in result.control.items():
        yield f"control {name}: {in_words(found)}; {CONTROL} does the same as {LAB}"
    difference, form = result.difference()
    yield f"largest difference of losses and gradient norms to {result.reference}: {difference:.1e} ({form})"


def metering(plan: BenchPlan, peer: str, launches: int, say: Say) -> dict[str, Any]:
    """What the wire, its measuring and live publishing cost a step of `peer`. Raises BenchError."""
    say(f"{peer}: {launches} launches of {rounds_of(plan)}, on {' '.join(plan.devices)}")
    results, spans = list[BenchResult](), list[int]()  # spans: their number, of each event that came live

    def take(events: Sequence[Mapping[str, Any]]) -> None:
        spans.extend(len(StepEvent.from_dict(dict(event)).spans) for event in events)

    for number in range(launches):
        turned = number % len(plan.forms)
        turn = dataclasses.replace(plan, forms=plan.forms[turned:] + plan.forms[:turned])
        results.append(measure(turn, progress(turn), take))
        results[-1].check_same_work(plan.precision)
        cost, control = (statistics.median(found) for found in results[-1].metering(peer))
        say(f"launch {number + 1}: metered/bare {cost:.4f}, control bare/bare {control:.4f}")
    costs, controls = zip(*(result.metering(peer) for result in results), strict=True)
    times = {name: spread([s for result in results for s in result.seconds[name]]) for name in METERING[peer]}
    found = {"metered/bare": of_launches(costs), "control bare/bare": of_launches(controls)}
    for name, time in times.items():
        say(f"{name}: {in_ms(time)}")
    for name, of in found.items():
        every = f"{of['median']:.3f}, p10 {of['p10']:.3f}, p90 {of['p90']:.3f}, {of['n']} rounds"
        say(f"{name}: mean of launches {of['mean']:.4f}, standard error {of['standard_error']:.4f}; all: {every}")
    difference, form = max(result.difference() for result in results)
    say(f"largest difference of losses and gradient norms between forms: {difference:.1e} ({form})")
    traced = [count for count in spans if count]
    say(f"{len(spans)} events came live, {len(traced)} of them with spans, {max(traced, default=0)} at most")
    return {
        "ratios": {"metered/bare": found["metered/bare"]},
        "control": {"bare/bare": found["control bare/bare"]},
        "environment": {**used(plan), "backend": peer, "launches": launches},
        "step_time_s": {name: asdict(time) for name, time in times.items()},
    }


def checkpoint(plan: BenchPlan, folder: Path, say: Say) -> dict[str, Any]:
    """Save and load beside plain Distributed Checkpoint, and what a save costs training. Raises BenchError."""
    say(f"{plan.steps} rounds after {plan.warmup} steps of warm-up, on {' '.join(plan.devices)}")
    ranks = launch(plan, {"task": "checkpoints", "folder": str(folder)}, progress(plan))
    seconds = {
        method: {way: slowest([rank[method][way] for rank in ranks]) for way in ("save", "load")}
        for method in (LAB, DCP, DCP_AGAIN)
    }
    both = {method: [a + b for a, b in zip(of["save"], of["load"], strict=True)] for method, of in seconds.items()}
    ratio, control = spread(ratios(both[LAB], both[DCP])), spread(ratios(both[DCP], both[DCP_AGAIN]))
    stalls = [max(of, key=lambda one: one["stall_s"]) for of in zip(*(rank["beside"] for rank in ranks), strict=True)]
    stall = {
        "stall_s": spread([one["stall_s"] for one in stalls]),
        "stall/step": spread([one["stall_s"] / one["step_s"] for one in stalls]),
        "step beside/alone": spread([one["slowed"] for one in stalls]),
        "window_s": spread([one["window_s"] for one in stalls]),
    }
    for method, ways in seconds.items():
        for way, of in ways.items():
            say(f"{method} {way}: {in_ms(spread(of), 0)}")
    say(f"lab/dcp, save + load: {in_words(ratio)}")
    say(f"control dcp/dcp: {in_words(control)}")
    say(f"a save stops training for: {1e3 * stall['stall_s'].median:.0f} ms")
    say(f"stall/step: {in_words(stall['stall/step'])}")
    say(f"step during the writing/step alone: {in_words(stall['step beside/alone'])}")
    return {
        "ratios": {"lab/dcp": asdict(ratio)},
        "control": {"dcp/dcp": asdict(control)},
        "environment": used(plan),
        "seconds": {m: {way: asdict(spread(of)) for way, of in ways.items()} for m, ways in seconds.items()},
        **{name: asdict(of) for name, of in stall.items()},
    }


# -- what they share -------------------------------------------------------------------------------------------------


def rounds_of(plan: BenchPlan) -> str:
    return f"{plan.steps} rounds after {plan.warmup} of warm-up"


def used(plan: BenchPlan) -> dict[str, Any]:
    """The plan, and the names of GPUs where ranks are on GPUs."""
    if plan.devices[0] == "cpu":
        return asdict(plan)
    import torch

    gpus = [torch.cuda.get_device_name(device) for device in plan.devices]
    return {**asdict(plan), "gpus": gpus, "shares_gpu": plan.shares_gpu}


def progress(plan: BenchPlan) -> Callable[[int], None]:
    """On a terminal, a line that counts rounds."""
    rounds = plan.warmup + plan.steps

    def show(done: int) -> None:
        if sys.stderr.isatty():
            print(f"\rround {done} of {rounds}", end="\n" if done == rounds else "", file=sys.stderr, flush=True)

    return show
