"""`fsdp-lab bench metering`: what the wire, its measuring and the live publishing cost a step. Needs no Jupyter."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fsdp_lab.bench.forms import METERED_PEERS, METERING
from fsdp_lab.bench.launch import BenchError, measure, place
from fsdp_lab.bench.plan import PRECISIONS, Plan, PlanError, option
from fsdp_lab.bench.ratios import Measured
from fsdp_lab.cli.bench.environment import environment
from fsdp_lab.cli.bench.step import NUMBERS, check_same_work, gpus, progress, words
from fsdp_lab.cli.console import Failed, Refused
from fsdp_lab.cli.results import check_file, write_file
from fsdp_lab.events import StepEvent

STEPS = 200


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for name, says in NUMBERS.items():
        default = STEPS if name == "steps" else getattr(Plan, name)
        parser.add_argument(option(name), type=int, default=default, help=f"{says} (default: %(default)s)")
    parser.add_argument("--backend", choices=METERED_PEERS, default="fsdp2", help="whose steps (default: %(default)s)")
    parser.add_argument("--precision", choices=PRECISIONS, default=Plan.precision, help="(default: %(default)s)")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="(default: cuda where there is one for each rank)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")


def run(args: argparse.Namespace) -> int:
    check_file(args.json)
    plan = _planned(args)
    here = environment()
    told: list[int] = []  # spans, of each event
    print(f"{args.backend}: {plan.steps} rounds after {plan.warmup} of warm-up, on {' '.join(plan.devices)}")
    try:
        measured = measure(
            plan,
            progress(plan.warmup + plan.steps),
            lambda events: told.extend(len(StepEvent.from_dict(event).spans) for event in events),
        )
    except BenchError as e:
        raise Failed(str(e)) from e
    check_same_work(measured, plan.precision)
    _report(measured, args.backend, told)
    if args.json is not None:
        write_file(args.json, _figures(measured, args.backend, {**asdict(plan), **here, **gpus(plan)}))
        print(f"written: {args.json}")
    return 0


def _planned(args: argparse.Namespace) -> Plan:
    try:
        numbers = {name: getattr(args, name) for name in NUMBERS}
        plan = Plan(**numbers, precision=args.precision, forms=METERING[args.backend])
        return Plan.from_dict({**plan.to_dict(), "devices": place(plan.ranks, args.device)})
    except PlanError as e:
        raise Refused(str(e)) from e


def _report(measured: Measured, backend: str, told: list[int]) -> None:
    metered, control, (low, high) = measured.metering(backend)
    for name in METERING[backend]:
        spread = measured.step_time(name)
        print(f"{name}: {1e3 * spread.median:.1f} ms, p10 {1e3 * spread.p10:.1f}, p90 {1e3 * spread.p90:.1f}")
    print(f"metered/bare: {words(metered)}; the median lies in {low:.4f} to {high:.4f} with 95 % confidence")
    print(f"control bare/bare: {words(control)}")
    difference, form = measured.difference()
    print(f"largest difference of losses and gradient norms to bare: {difference:.1e} ({form})")
    traced = [spans for spans in told if spans]
    print(f"{len(told)} events came live, {len(traced)} of them with spans, {max(traced, default=0)} at most")


def _figures(measured: Measured, backend: str, where: dict[str, Any]) -> dict[str, Any]:
    metered, control, interval = measured.metering(backend)
    return {
        "ratios": {"metered/bare": {**asdict(metered), "interval_95": interval}},
        "control": {"bare/bare": asdict(control)},
        "environment": {**where, "backend": backend},
        "step_time_s": {name: asdict(measured.step_time(name)) for name in METERING[backend]},
    }
