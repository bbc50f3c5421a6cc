"""`fsdp-lab bench metering`: what the wire, its measuring and the live publishing cost a step. Needs no Jupyter.

Note: several launches. Which form's tensors lie where in memory is chance, and the same in all rounds of a launch: a form
can be faster than its equal by one or two per cent for as long as the processes live. So the bench starts them anew, with
the forms built in another order each time, and its error is what the launches differ by.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fsdp_lab.bench.forms import METERED_PEERS, METERING
from fsdp_lab.bench.launch import BenchError, measure, place
from fsdp_lab.bench.plan import PRECISIONS, Plan, PlanError, option
from fsdp_lab.bench.ratios import Measured, Spread, mean_of_launches
from fsdp_lab.cli.bench.environment import environment
from fsdp_lab.cli.bench.step import NUMBERS, check_same_work, gpus, progress, words
from fsdp_lab.cli.console import Failed, Refused
from fsdp_lab.cli.results import check_file, write_file
from fsdp_lab.events import StepEvent

STEPS, LAUNCHES = 100, 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for name, says in NUMBERS.items():
        default = STEPS if name == "steps" else getattr(Plan, name)
        parser.add_argument(option(name), type=int, default=default, help=f"{says} (default: %(default)s)")
    parser.add_argument("--launches", type=int, default=LAUNCHES, help="so often, anew (default: %(default)s)")
    parser.add_argument("--backend", choices=METERED_PEERS, default="fsdp2", help="whose steps (default: %(default)s)")
    parser.add_argument("--precision", choices=PRECISIONS, default=Plan.precision, help="(default: %(default)s)")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="(default: cuda where there is one for each rank)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")


def run(args: argparse.Namespace) -> int:
    check_file(args.json)
    plan = _planned(args)
    here = environment()
    rounds = f"{plan.steps} rounds after {plan.warmup} of warm-up"
    print(f"{args.backend}: {args.launches} launches of {rounds}, on {' '.join(plan.devices)}")
    launched, told = [], list[int]()
    for launch in range(args.launches):
        launched.append(_launch(plan, launch, told))
        cost, control = (statistics.median(ratios) for ratios in launched[-1].metering(args.backend))
        print(f"launch {launch + 1}: metered/bare {cost:.4f}, control bare/bare {control:.4f}", flush=True)
    figures = _figures(launched, args.backend)
    _report(launched, figures, told)
    if args.json is not None:
        where = {**asdict(plan), **here, **gpus(plan), "backend": args.backend, "launches": args.launches}
        write_file(args.json, {**figures, "environment": where})
        print(f"written: {args.json}")
    return 0


def _planned(args: argparse.Namespace) -> Plan:
    if args.launches < 2:
        raise Refused(f"--launches {args.launches} is refused; give 2 or more: one does not show how far it is off")
    try:
        numbers = {name: getattr(args, name) for name in NUMBERS}
        plan = Plan(**numbers, precision=args.precision, forms=METERING[args.backend])
        return Plan.from_dict({**plan.to_dict(), "devices": place(plan.ranks, args.device)})
    except PlanError as e:
        raise Refused(str(e)) from e


def _launch(plan: Plan, launch: int, told: list[int]) -> Measured:
    """Raises Failed. What came live is added to `told`: the number of spans of each event."""
    turned = launch % len(plan.forms)
    plan = dataclasses.replace(plan, forms=plan.forms[turned:] + plan.forms[:turned])
    try:
        measured = measure(
            plan,
            progress(plan.warmup + plan.steps),
            lambda events: told.extend(len(StepEvent.from_dict(event).spans) for event in events),
        )
    except BenchError as e:
        raise Failed(str(e)) from e
    check_same_work(measured, plan.precision)
    return measured


def _figures(launched: Sequence[Measured], backend: str) -> dict[str, Any]:
    cost, control = zip(*(measured.metering(backend) for measured in launched), strict=True)
    seconds = {name: [s for m in launched for s in m.seconds[name]] for name in METERING[backend]}
    return {
        "ratios": {"metered/bare": _of_launches(cost)},
        "control": {"bare/bare": _of_launches(control)},
        "step_time_s": {name: asdict(Spread.of(of)) for name, of in seconds.items()},
    }


def _of_launches(ratios: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Of the ratios of each launch's rounds."""
    medians = [statistics.median(of) for of in ratios]
    mean, standard_error = mean_of_launches(medians)
    every = Spread.of([ratio for of in ratios for ratio in of])
    return {**asdict(every), "launches": medians, "mean": mean, "standard_error": standard_error}


def _report(launched: Sequence[Measured], figures: dict[str, Any], told: Sequence[int]) -> None:
    for name, s in figures["step_time_s"].items():
        print(f"{name}: {1e3 * s['median']:.1f} ms, p10 {1e3 * s['p10']:.1f}, p90 {1e3 * s['p90']:.1f}")
    for name, of in [*figures["ratios"].items(), ("control bare/bare", figures["control"]["bare/bare"])]:
        every = Spread(**{field.name: of[field.name] for field in dataclasses.fields(Spread)})
        print(
            f"{name}: mean of launches {of['mean']:.4f}, standard error {of['standard_error']:.4f}; all: {words(every)}"
        )
    difference, form = max(measured.difference() for measured in launched)
    print(f"largest difference of losses and gradient norms between forms: {difference:.1e} ({form})")
    traced = [spans for spans in told if spans]
    print(f"{len(told)} events came live, {len(traced)} of them with spans, {max(traced, default=0)} at most")
