"""`fsdp-lab bench checkpoint`: save and load beside plain Distributed Checkpoint, and what a save costs training."""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fsdp_lab.bench.forms import LAB, REFERENCE
from fsdp_lab.bench.launch import BenchError, launch, place
from fsdp_lab.bench.plan import Plan, PlanError
from fsdp_lab.bench.ratios import Spread
from fsdp_lab.checkpoints import check_folder
from fsdp_lab.cli.bench.environment import environment
from fsdp_lab.cli.bench.step import NUMBERS, gpus, progress, words
from fsdp_lab.cli.console import Failed, Refused
from fsdp_lab.cli.results import check_file, write_file

ROUNDS = 15
DCP, DCP_AGAIN = "dcp", "dcp-again"  # as bench/checkpoints.py names them, which needs torch


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for name, says in NUMBERS.items():
        if name != "steps":
            option = f"--{name.replace('_', '-')}"
            parser.add_argument(option, type=int, default=getattr(Plan, name), help=f"{says} (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="saves and loads of each (default: %(default)s)")
    parser.add_argument(
        "--folder", type=Path, help="where to write; what is measured is its disk (default: a temporary one)"
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], help="(default: cuda where there is one for each rank)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")


def run(args: argparse.Namespace) -> int:
    check_file(args.json)
    plan = _planned(args)
    parent = None if args.folder is None else check_folder(args.folder, field="--folder")
    print(f"{plan.steps} rounds after {plan.warmup} steps of warm-up, on {' '.join(plan.devices)}")
    with tempfile.TemporaryDirectory(prefix="fsdp_lab-bench-", dir=parent) as folder:
        try:
            ranks = launch(plan, {"task": "checkpoints", "folder": folder}, progress(plan.warmup + plan.steps))
        except BenchError as e:
            raise Failed(str(e)) from e
    figures = _figures(ranks)
    _report(figures)
    if args.json is not None:
        where = {**asdict(plan), **environment(), **gpus(plan)}
        write_file(args.json, {**figures, "environment": where})
        print(f"written: {args.json}")
    return 0


def _planned(args: argparse.Namespace) -> Plan:
    if args.rounds < 1:
        raise Refused(f"--rounds {args.rounds} is refused; give a whole number of 1 or more")
    try:
        numbers = {name: getattr(args, name) for name in NUMBERS if name != "steps"}
        plan = Plan(**numbers, steps=args.rounds, forms=(LAB, REFERENCE))
        return Plan.from_dict({**plan.to_dict(), "devices": place(plan.ranks, args.device)})
    except PlanError as e:
        raise Refused(str(e)) from e


def _figures(ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of each round the slowest rank's seconds."""
    seconds = {
        method: {
            way: [max(of) for of in zip(*(rank[method][way] for rank in ranks), strict=True)]
            for way in ("save", "load")
        }
        for method in (LAB, DCP, DCP_AGAIN)
    }
    both = {method: [a + b for a, b in zip(of["save"], of["load"], strict=True)] for method, of in seconds.items()}
    slowest = [max(of, key=lambda one: one["stall_s"]) for of in zip(*(rank["beside"] for rank in ranks), strict=True)]
    return {
        "ratios": {"lab/dcp": asdict(_ratio(both[LAB], both[DCP]))},
        "control": {"dcp/dcp": asdict(_ratio(both[DCP], both[DCP_AGAIN]))},
        "seconds": {m: {way: asdict(Spread.of(of)) for way, of in ways.items()} for m, ways in seconds.items()},
        "stall_s": asdict(Spread.of([one["stall_s"] for one in slowest])),
        "stall/step": asdict(Spread.of([one["stall_s"] / one["step_s"] for one in slowest])),
        "step beside/alone": asdict(Spread.of([one["slowed"] for one in slowest])),
        "window_s": asdict(Spread.of([one["window_s"] for one in slowest])),
    }


def _ratio(one: Sequence[float], other: Sequence[float]) -> Spread:
    return Spread.of([a / b for a, b in zip(one, other, strict=True)])


def _report(figures: Mapping[str, Any]) -> None:
    def spread(told: Mapping[str, Any]) -> Spread:
        return Spread(**{field.name: told[field.name] for field in dataclasses.fields(Spread)})

    for method, ways in figures["seconds"].items():
        for way, told in ways.items():
            print(
                f"{method} {way}: {1e3 * told['median']:.0f} ms, p10 {1e3 * told['p10']:.0f}, p90 {1e3 * told['p90']:.0f}"
            )
    print(f"lab/dcp, save + load: {words(spread(figures['ratios']['lab/dcp']))}")
    print(f"control dcp/dcp: {words(spread(figures['control']['dcp/dcp']))}")
    print(f"training stands for a save: {1e3 * figures['stall_s']['median']:.0f} ms")
    print(f"stall/step: {words(spread(figures['stall/step']))}")
    print(f"a step beside the writing/a step alone: {words(spread(figures['step beside/alone']))}")
