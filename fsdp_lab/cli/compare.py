"""`fsdp-lab compare`: trains the same workload under every combination of the given lists, in turns on the same ranks.

Invalid combinations are listed with their reason, as are runs that fail; with these the exit code is 1."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdp_lab.base.files import check_file
from fsdp_lab.base.formatting import duration
from fsdp_lab.cli import fields
from fsdp_lab.cli.console import Refused, Results, add_hosts, at_least, hosts_of, live, open_lab, say, terminal, watch
from fsdp_lab.spec.spec import Spec

if TYPE_CHECKING:
    from rich.console import Console, Group

    from fsdp_lab.cluster.hosts import Hosts
    from fsdp_lab.runs import Sweep
    from fsdp_lab.runs.view import RunView

FAILED = "failed"
REDRAW_S = 1.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--ranks", default="2", metavar="N,N", help="ranks of each run (default: %(default)s)")
    add("--steps", type=int, default=20, help="steps of each run (default: %(default)s)")
    add("--rounds", type=int, metavar="N", help="turns of each run (default: 3; 1: one after the other)")
    add("--devices", metavar="D,D", help="one per rank: cpu, or cuda:0,cuda:2 (default: automatic)")
    add("--json", type=Path, metavar="FILE", help="write the results to FILE")
    add("--report", type=Path, metavar="FILE", help="write a report to FILE (HTML, works offline)")
    fields.add_options(parser)
    add_hosts(parser)


def run(args: argparse.Namespace) -> int:
    at_least(args, "steps", 1)
    at_least(args, "rounds", 1)
    results = Results.to(args.json)
    if (hosts := hosts_of(args)) is not None:
        args.ranks = str(hosts.ranks)
    if args.report is not None:
        from fsdp_lab.report import SUFFIXES

        check_file(args.report, SUFFIXES, field="--report")
    specs, refused = fields.requested(args, partial(spec_of, args))
    for combination, error in refused:
        results.add_refused(combination, str(error))
    results.write()

    from fsdp_lab.runs import Comparison, Refusal

    console = terminal()
    sweep = compare(console, specs, args.steps, args.rounds, results, hosts) if specs else None
    rows: list[RunView | Refusal] = [
        *(sweep.in_order if sweep else ()),
        *(Refusal(combination, str(error)) for combination, error in refused),
    ]
    lines = list(Comparison.of(rows).reasons())
    if sweep is not None and len(results.runs) > 1:
        lines += sweep.recommend().lines()
    if sweep is not None and args.report is not None:
        from fsdp_lab.report import write_report

        lines.append(f"written: {write_report(args.report, rows)}")
    if args.json is not None:
        lines.append(f"written: {args.json}")
    for line in lines:
        say(line, console)
    if sweep is None:
        raise Refused("every combination is refused; nothing was started")
    return 1 if any(run.state.value == FAILED for run in sweep.runs) else 0


def spec_of(args: argparse.Namespace, combination: dict[str, Any]) -> Spec:
    """The Spec of a combination, on the devices of the options. Raises FieldError."""
    from fsdp_lab.models.check import check

    if args.devices is not None:
        devices = [word.strip() for word in args.devices.split(",")]
        combination["devices"] = devices * combination["world_size"] if len(devices) == 1 else devices
    spec = Spec.from_dict(combination)
    check(spec.workload)
    return spec


def compare(
    console: Console, specs: Sequence[Spec], steps: int, rounds: int | None, results: Results, hosts: Hosts | None
) -> Sweep:
    """Trains the Specs in turns with a live table, and adds what was measured to the results, also after Ctrl-C."""
    with open_lab(console, specs[0].world_size, specs[0].devices, hosts=hosts) as lab, live(console) as draw:
        sweep = lab.compare(specs, steps=steps, **({"rounds": rounds} if rounds else {}))
        drawn_s = float("-inf")

        def show() -> None:
            nonlocal drawn_s
            if console.is_terminal and time.monotonic() - drawn_s > REDRAW_S:  # ratios and parity cover all steps
                drawn_s = time.monotonic()
                draw(view(sweep, console.width))

        try:
            watch(sweep, show)
        finally:
            collect(sweep, results)
    console.print(view(sweep, console.width))
    return sweep


def collect(sweep: Sweep, results: Results) -> None:
    """Adds summaries of runs, and the reasons of those that failed, to the results and writes them."""
    for run in sweep.in_order:
        if run.state.value == FAILED:
            results.add_refused(run.spec.to_dict(), run.reason)
        elif len(run.events):
            results.add_run(run.summary())
    if results.runs:
        compared, advice = sweep.comparison(), sweep.recommend()
        results.comparison = {
            "baseline": compared.baseline,
            "records": compared.records(),
            "recommendation": advice.lines(),
        }
    results.write()


WIDE = 130  # columns of a terminal that has room for all figures
FIGURES = ("loss", "step time", "time ratio", "tokens/s", "TFLOPS", "peak/rank", "exposed", "parity")
NARROW = ("loss", "step time", "time ratio", "peak/rank", "parity")


def view(sweep: Sweep, width: int) -> Group:
    """The table of a sweep in progress or over, with fewer figures if narrow, and a line on its progress."""
    from rich.console import Group
    from rich.text import Text

    from fsdp_lab.runs import Comparison

    p = sweep.progress
    if sweep.done:
        outside = "" if sweep.outside_share is None else f", {sweep.outside_share:.0%} of it outside of steps"
        line = f"{p.done_steps} steps in {duration(p.seconds)}{outside}"
    else:
        left = "" if p.left_s is None else f", about {duration(p.left_s)} left"
        line = f"{p.done_steps} of {p.all_steps} steps{left}"
    begun = [run for spec in sweep.specs if (run := sweep.run_of(spec)) is not None]
    figures = FIGURES if width >= WIDE else NARROW
    table = repr(Comparison.of(begun).table(figures, spread=False)) if begun else ""
    return Group(Text(table, no_wrap=True, overflow="crop"), Text(line, style="dim"))
