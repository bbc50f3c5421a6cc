"""`fsdp-lab compare`: the same work under every combination of the given lists, in turns on the same resident ranks.

Options are the fields of Workload and Strategy, `--ranks`, `--steps` and `--rounds`. What cannot be combined is listed
with its reason; a run that fails is listed there too, and the exit code is 1. Then: which to take, and what each toggle
bought.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdp_lab.cli import fields
from fsdp_lab.cli.console import Refused, Results, terminal
from fsdp_lab.core.errors import FieldError
from fsdp_lab.core.spec import Spec

if TYPE_CHECKING:
    from rich.console import Console, Group
    from rich.table import Table

    from fsdp_lab.runs import Run, Sweep
    from fsdp_lab.runs.comparison import Comparison
    from fsdp_lab.runs.view import RunView

WAITING, FAILED = "waiting", "failed"
REDRAW_S = 1.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", default="2", metavar="N,N", help="ranks of each run (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=20, help="steps of each run (default: %(default)s)")
    parser.add_argument(
        "--rounds", type=int, metavar="N", help="turns of each run (default: 3; 1: one after the other)"
    )
    parser.add_argument("--devices", metavar="D,D", help="one per rank: cpu, or cuda:0,cuda:2 (default: automatic)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to FILE")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write a report to FILE (HTML, works offline)")
    fields.add_options(parser)


def run(args: argparse.Namespace) -> int:
    for name in ("steps", "rounds"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise Refused(f"--{name} {getattr(args, name)} is refused; give a whole number of 1 or more")
    results = Results(file=args.json)
    results.check()
    if args.report is not None:
        from fsdp_lab.core.files import check_file
        from fsdp_lab.report import SUFFIXES

        check_file(args.report, SUFFIXES, field="--report")
    specs = split(wanted(args), results)
    results.write()
    refused = list(results.refused)  # before those that fail join them

    from fsdp_lab.runs import Comparison, Refusal

    console = terminal()
    sweep = compare(console, specs, args.steps, args.rounds, results) if specs else None
    rows: list[RunView | Refusal] = [
        *(sweep.in_order if sweep else ()),
        *(Refusal(r["spec"], r["reason"]) for r in refused),
    ]
    for line in Comparison.of(rows).reasons():
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if sweep is not None and len(results.runs) > 1:
        for line in sweep.recommend().lines():
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    if sweep is not None and args.report is not None:
        from fsdp_lab.report import write_report

        console.print(f"written: {write_report(args.report, rows)}", markup=False, highlight=False)
    if args.json is not None:
        console.print(f"written: {args.json}", markup=False, highlight=False)
    if sweep is None:
        raise Refused("every combination is refused; nothing was started")
    return 1 if any(run.state.value == FAILED for run in sweep.runs) else 0


def wanted(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The product of the lists, as Spec dicts."""
    ranks = fields.whole_numbers("--ranks", args.ranks)
    made = list(fields.product(Spec(), fields.chosen(args), ranks))
    if args.devices is not None:
        devices = [word.strip() for word in args.devices.split(",")]
        for spec in made:
            spec["devices"] = devices * spec["world_size"] if len(devices) == 1 else devices
    return made


def split(dicts: Sequence[Mapping[str, Any]], results: Results) -> list[Spec]:
    """The Specs that can be; the others go to the results with their reasons. Starts nothing."""
    from fsdp_lab.models.check import check

    specs: list[Spec] = []
    for made in dicts:
        try:
            spec = Spec.from_dict(made)
            check(spec.workload)
            specs.append(spec)
        except FieldError as e:
            results.add_refused(made, str(e))
    return specs


def compare(console: Console, specs: Sequence[Spec], steps: int, rounds: int | None, results: Results) -> Sweep:
    """Trains them in turns, with a live table; what was measured is in the results, also after Ctrl-C."""
    from fsdp_lab.cli import session

    with session.lab(console, specs[0].world_size, specs[0].devices) as lab, session.live(console) as show:
        session.tell_unread_weights(console, specs)
        sweep = lab.compare(specs, steps=steps, **({"rounds": rounds} if rounds else {}))
        drawn_s = float("-inf")

        def look() -> None:
            nonlocal drawn_s
            if console.is_terminal and time.monotonic() - drawn_s > REDRAW_S:  # ratios and parity are of all steps
                drawn_s = time.monotonic()
                show(going(sweep, console.width))

        try:
            session.watch(sweep, look)
        finally:
            keep(sweep, results)
    console.print(going(sweep, console.width))
    return sweep


def keep(sweep: Sweep, results: Results) -> None:
    """Runs that were measured, and reasons of those that failed."""
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


# -- what is shown ---------------------------------------------------------------------------------------------------

WIDE = 110  # columns of a terminal
FIGURES = ("loss", "step time", "ratio", "tokens/s", "TFLOPS", "peak/rank", "exposed", "parity")
NARROW = ("loss", "step time", "ratio", "peak/rank", "parity")


def going(sweep: Sweep, width: int) -> Group:
    """The table as it stands, and how long it will take."""
    from rich.console import Group
    from rich.text import Text

    compared = sweep.comparison()
    return Group(table(sweep, compared, width), Text(said(sweep), style="dim"))


def said(sweep: Sweep) -> str:
    """Progress in a line."""
    from fsdp_lab.core.formatting import duration

    p = sweep.progress
    if not sweep.done:
        left = "" if p.left_s is None else f", about {duration(p.left_s)} left"
        return f"{p.done_steps} of {p.all_steps} steps{left}"
    outside = "" if sweep.outside_share is None else f", {sweep.outside_share:.0%} of it outside of steps"
    return f"{p.done_steps} steps in {duration(p.seconds)}{outside}"


def table(sweep: Sweep, compared: Comparison, width: int) -> Table:
    """A row for each Spec, also for those that wait; a narrow terminal does without some of the figures."""
    from rich import box
    from rich.table import Table

    from fsdp_lab.runs.comparison import SHOWN, cells, ratio_words, varying, words

    flats = [spec.flat() for spec in sweep.specs]
    shown = varying(flats) or SHOWN
    rows = {row.run: row for row in compared.rows}
    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    drawn.add_column("")
    drawn.add_column(", ".join(name.replace("_", " ") for name in shown), overflow="fold")
    drawn.add_column("state", no_wrap=True)
    kept = FIGURES if width >= WIDE else NARROW
    for name in kept:
        drawn.add_column(name, justify="left" if name == "parity" else "right", no_wrap=name != "parity")
    for spec, flat in zip(sweep.specs, flats, strict=True):
        run = sweep.run_of(spec)
        row = rows.get(run.id) if run is not None else None  # one that began this very moment is in no row yet
        state = state_of(run, sweep.steps)
        found: dict[str, str] = {}
        if row is not None:
            found = {**cells(row.figures), "ratio": ratio_words(row.time_ratio), "parity": compared.badge(row)}
        style = "red" if state == FAILED or (row and row.differs) else "dim" if state == WAITING else ""
        told = [found.get(name, "") for name in kept]
        drawn.add_row(row.label if row else "", words(flat, shown), state, *told, style=style)
    return drawn


def state_of(run: Run | None, steps: int) -> str:
    if run is None:
        return WAITING
    return FAILED if run.state.value == FAILED else "done" if run.step >= steps else f"step {run.step} of {steps}"


def refusals(refused: Sequence[Mapping[str, Any]]) -> Table:
    """Each reason once, with the combinations that it refuses."""
    from rich import box
    from rich.table import Table

    by_reason: dict[str, list[str]] = {}
    for entry in refused:
        strategy = entry["spec"]["strategy"]
        words = [
            entry["spec"]["workload"]["model"],
            *(strategy[n] for n in ("backend", "sharding", "precision", "offload")),
            *([f"link {link}"] if (link := entry["spec"].get("link")) else []),
        ]
        by_reason.setdefault(entry["reason"], []).append(" ".join(fields.shown(word) for word in words))
    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False, title="not run", title_justify="left")
    drawn.add_column("combination")
    drawn.add_column("reason", overflow="fold")
    for reason, combinations in by_reason.items():
        drawn.add_row("\n".join(combinations), reason)
    return drawn
