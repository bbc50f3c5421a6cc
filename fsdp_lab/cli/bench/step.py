"""`fsdp-lab bench step`: every form of every backend in one run, a step of each in turn. Needs neither Jupyter nor rich."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fsdp_lab.bench.forms import CONTROL, LAB, PEERS, STEP, named
from fsdp_lab.bench.launch import BenchError, measure, place
from fsdp_lab.bench.plan import PRECISIONS, SHARDINGS, Plan, PlanError, option
from fsdp_lab.bench.ratios import TOLERANCES, Measured, Spread
from fsdp_lab.cli.bench.environment import environment
from fsdp_lab.cli.console import Failed, Refused
from fsdp_lab.cli.results import check_file, write_file

NUMBERS = {
    "ranks": "rank processes",
    "steps": "counted steps of each form",
    "warmup": "steps of each form before them",
    "layers": "blocks of the GPT-2 that is trained",
    "width": "its width",
    "heads": "its attention heads",
    "vocab": "its vocabulary",
    "seq_len": "tokens of a sequence",
    "micro_batch": "sequences of a rank and step",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for name, says in NUMBERS.items():
        parser.add_argument(option(name), type=int, default=getattr(Plan, name), help=f"{says} (default: %(default)s)")
    parser.add_argument("--precision", choices=PRECISIONS, default=Plan.precision, help="(default: %(default)s)")
    parser.add_argument(
        "--sharding", choices=SHARDINGS, default=Plan.sharding, help="of lab and fsdp2 (default: %(default)s)"
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], help="(default: cuda where there is one for each rank)")
    parser.add_argument(
        "--only", metavar="FORM,FORM", help=f"these forms alone, or all of {LAB}, fsdp2 or ddp: {', '.join(STEP)}"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")


def run(args: argparse.Namespace) -> int:
    check_file(args.json)
    plan = planned(args)
    here = environment()
    print(f"{len(plan.forms)} forms, {plan.steps} rounds after {plan.warmup} of warm-up, on {' '.join(plan.devices)}")
    try:
        measured = measure(plan, progress(plan.warmup + plan.steps))
    except BenchError as e:
        raise Failed(str(e)) from e
    print("\n".join(report(measured)))
    check_same_work(measured, plan.precision)
    if args.json is not None:
        write_file(args.json, measured.figures({**asdict(plan), **here, **gpus(plan)}))
        print(f"written: {args.json}")
    return 0


def planned(args: argparse.Namespace) -> Plan:
    """Raises Refused, in the words of the command line."""
    try:
        forms = STEP if args.only is None else named(args.only)
        numbers = {name: getattr(args, name) for name in NUMBERS}
        plan = Plan(**numbers, precision=args.precision, sharding=args.sharding, forms=forms)
        return Plan.from_dict({**plan.to_dict(), "devices": place(plan.ranks, args.device)})
    except PlanError as e:
        raise Refused(str(e)) from e
    except KeyError as e:
        raise Refused(f"--only: there is no form {e.args[0]}; choose from {', '.join((*STEP, *PEERS))}") from e


def progress(rounds: int) -> Callable[[int], None]:
    """On a terminal, a line that counts."""

    def tell(done: int) -> None:
        if sys.stderr.isatty():
            end = "\n" if done == rounds else ""
            print(f"\rround {done} of {rounds}", end=end, file=sys.stderr, flush=True)

    return tell


def check_same_work(measured: Measured, precision: str) -> None:
    """Raises Failed where a form trained something else than the others: its time says nothing then."""
    difference, form = measured.difference()
    if difference > TOLERANCES[precision]:
        raise Failed(
            f"{form} did other work than {measured.reference}: losses or gradient norms differ by {difference:.2g}, "
            f"and {TOLERANCES[precision]:g} is allowed in {precision}; no figure of this run counts"
        )


def gpus(plan: Plan) -> dict[str, Any]:
    """Their names, where ranks are on GPUs."""
    if plan.devices[0] == "cpu":
        return {}
    import torch

    return {"gpus": [torch.cuda.get_device_name(device) for device in plan.devices], "shares_gpu": plan.shares_gpu}


# -- what is shown ---------------------------------------------------------------------------------------------------


def report(measured: Measured) -> Iterator[str]:
    """The table of all forms, fastest first, and a line for each ratio."""
    from fsdp_lab.table import Table

    lab = LAB in measured.seconds
    heading = f"{LAB}/form" if lab else f"form/{measured.reference}"
    rows = []
    for form in sorted(measured.seconds, key=lambda f: measured.step_time(f).median):
        time_ms = [f"{1e3 * s:.1f}" for s in figures(measured.step_time(form))]
        ratio = measured.ratio(LAB, form) if lab else measured.ratio(form, measured.reference)
        rows.append((form, *time_ms, *(f"{r:.3f}" for r in figures(ratio))))
    columns = ("form", "ms/step", "p10", "p90", heading, "p10 ", "p90 ")
    yield repr(Table(columns=columns, rows=tuple(rows), left=frozenset({"form"})))
    for name, spread in measured.ratios.items():
        yield f"{name}: {words(spread)}; the fastest form of the peer is {measured.fastest[name.partition('/')[2]]}"
    for name, memory in measured.memory_ratios.items():
        yield f"{name}, peak allocated memory: {memory:.3f}"
    for name, spread in measured.control.items():
        yield f"control {name}: {words(spread)}; {CONTROL} does the same as {LAB}"
    difference, form = measured.difference()
    yield f"largest difference of losses and gradient norms to {measured.reference}: {difference:.1e} ({form})"


def figures(spread: Spread) -> tuple[float, float, float]:
    return spread.median, spread.p10, spread.p90


def words(spread: Spread) -> str:
    return f"{spread.median:.3f}, p10 {spread.p10:.3f}, p90 {spread.p90:.3f}, {spread.n} rounds"
