"""`fsdp-lab compare`: trains the same workload under every combination of the given lists, in turns on the same ranks.

Invalid combinations are listed with their reason, as are runs that fail; with these the exit code is 1."""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdp_lab.base.files import check_file
from fsdp_lab.base.formatting import duration
from fsdp_lab.cli import console as shared, fields
from fsdp_lab.cli.console import Refused, Results, at_least, live, open_lab, say, terminal, watch
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
    shared.add_hosts(parser)


def run(args: argparse.Namespace) -> int:
    at_least(args, "steps", 1)
    at_least(args, "rounds", 1)
    results = Results.to(args.json)
    if (hosts := shared.hosts_of(args)) is not None:
        args.ranks = str(hosts.ranks)
    if args.report is not None:
        from fsdp_lab.report import SUFFIXES

        check_file(args.report, SUFFIXES, field="--report")
    specs, refused = fields.requested(args, partial(spec_of, args))
    if len(specs) == 1 and not refused:
        raise Refused("there is one combination; give a list to compare, such as --sharding full_shard,no_shard")
    for combination, error in refused:
        results.add_refused(combination, str(error))
    results.write()

    from fsdp_lab.runs import Comparison, Refusal

    console = terminal()
    sweep = compare(console, specs, args.steps, args.rounds, results, hosts) if specs else None
    rows: list[RunView | Refusal] = [*sweep.in_order] if sweep else []
    rows += [Refusal(combination, error.words) for combination, error in refused]
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
    sweep, drawn_s = None, float("-inf")

    def show() -> None:
        nonlocal drawn_s
        # Not at each call: ratios and parity cover all steps.
        if sweep is not None and console.is_terminal and time.monotonic() - drawn_s > REDRAW_S:
            drawn_s = time.monotonic()
            draw(view(sweep, console))

    where = open_lab(console, specs[0].world_size, specs[0].devices, hosts=hosts)
    try:
        with where as lab, live(console, transient=True) as draw:
            sweep = lab.compare(specs, steps=steps, **({"rounds": rounds} if rounds else {}))
            watch(sweep, show)
    finally:
        if sweep is not None:
            collect(sweep, results)
            console.print(view(sweep, console))
    return sweep


def collect(sweep: Sweep, results: Results) -> None:
    """Adds summaries of runs, and the reasons of those that failed, to the results and writes them."""
    for run in sweep.in_order:
        if run.state.value == FAILED:
            results.add_refused(run.spec.to_dict(), run.reason)
        elif len(run.events):
            results.add_run(run.summary())
    if results.runs:
        compared, advice = sweep.comparison(), sweep.recommend().lines()
        records = compared.records()
        results.comparison = {"baseline": compared.baseline, "records": records, "recommendation": advice}
    results.write()


WIDE = 130  # columns of a terminal that has room for all figures
FIGURES = ("loss", "step time", "time ratio", "tokens/s", "FLOPS", "peak/rank", "exposed", "parity")
NARROW = ("loss", "step time", "time ratio", "peak/rank", "parity")


def view(sweep: Sweep, console: Console) -> Group:
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
    begun = sweep.in_order
    figures = FIGURES if console.width >= WIDE else NARROW
    table = repr(Comparison.of(begun).table(figures, spread=False)) if begun else ""
    return Group(Text(shared.wrapped(table, console), no_wrap=True, overflow="crop"), Text(line, style="dim"))


# -- fsdp-lab prove: two scripts that know nothing of it -----------------------------------------------------------------


def add_scripts(parser: argparse.ArgumentParser) -> None:
    parser.usage = "fsdp-lab prove [OPTION ...] OLD NEW [-- ARGUMENT ...]"
    add = parser.add_argument
    add("old", nargs="?", default="", metavar="OLD", help="a training script, or a whole command in quotes")
    add("new", nargs="?", default="", metavar="NEW", help="what is to compute the same")
    add("arguments", nargs="*", metavar="ARGUMENT", help="of both")
    add("--ranks", default="2", metavar="N[,M]", help="of the old and the new script (default: %(default)s)")
    add("--steps", type=int, default=10, help="that are compared; then both are ended (default: %(default)s)")
    add("--output", type=Path, metavar="FILE.md", help="write the receipt, and beside it FILE.json")
    add("--receipt", type=Path, metavar="FILE.json", help="verify a receipt instead: prove it again, here")


def prove_scripts(args: argparse.Namespace) -> int:
    """0: they compute the same, or the receipt holds; 1: not."""
    from fsdp_lab.runs import prove
    from fsdp_lab.runs.parity import Verdict

    console = terminal()
    told = partial(say, console=console, style="dim")
    if args.receipt is not None:
        if args.old:
            raise Refused("--receipt names both scripts itself; leave OLD and NEW out")
        holds, sentence = prove.verify(prove.Receipt.read(args.receipt), told)
        say(sentence, console)
        return 0 if holds else 1
    at_least(args, "steps", 1)
    ranks = [int(text) if text.strip().isdigit() else 0 for text in args.ranks.split(",")]
    if len(ranks) > 2 or min(ranks) < 1:
        raise Refused(f"--ranks {args.ranks} is refused; give a number such as 2, or one for each script such as 1,2")
    if not args.new:
        raise Refused("two scripts are wanted: fsdp-lab prove old.py new.py -- ARGUMENTS")
    pairs = ((args.old, ranks[0]), (args.new, ranks[-1]))
    old, new = (prove.Script(given=given, ranks=number, arguments=args.arguments) for given, number in pairs)
    for script in (old, new):
        if script.is_file and not Path(script.given).is_file():
            raise Refused(f"there is no file {script.given}; give a Python script, or a command in quotes")
        if not script.command or shutil.which(script.command[0]) is None:
            raise Refused(f"{script.given!r} starts no program that is on the PATH; give a script that ends in .py")
    if args.output is not None:
        check_file(args.output, (".md",), field="--output")
    receipt = prove.prove(old, new, args.steps, told)
    say(receipt.markdown(), console)
    if args.output is not None:
        args.output.write_text(receipt.markdown())
        args.output.with_suffix(".json").write_text(json.dumps(receipt.to_dict(), indent=1) + "\n")
    return 0 if receipt.proof.verdict in (Verdict.EQUAL, Verdict.WITHIN) else 1
