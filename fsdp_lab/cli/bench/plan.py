"""`fsdp-lab bench plan`: calibrate on this machine, then predicted step times beside measured ones.

Note: what is compared. Every round calibrates anew; the steps of all Specs are timed in turns with what is calibrated on, so
that what the machine does meanwhile meets both alike. No Spec that is compared is among those that are calibrated on.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from fsdp_lab.cli.bench.environment import environment
from fsdp_lab.cli.console import Failed, Refused
from fsdp_lab.cli.results import check_file, write_file
from fsdp_lab.spec import Spec, SpecError

if TYPE_CHECKING:
    from fsdp_lab.bench.planned import Compared


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, default=2, help="(default: %(default)s)")
    parser.add_argument("--model", default="gpt2-1m", help="presets, comma-separated (default: %(default)s)")
    parser.add_argument("--precision", default="fp32", help="comma-separated (default: %(default)s)")
    parser.add_argument("--seq-len", type=int, default=128, help="(default: %(default)s)")
    parser.add_argument("--micro-batch", type=int, default=4, help="(default: %(default)s)")
    parser.add_argument(
        "--rounds", type=int, default=3, help="calibrations, and medians of steps (default: %(default)s)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")


def run(args: argparse.Namespace) -> int:
    check_file(args.json)
    if args.rounds < 1:
        raise Refused(f"--rounds {args.rounds} is refused; give a whole number of 1 or more")
    specs = wanted(args)

    from fsdp_lab.bench.planned import compared, figures
    from fsdp_lab.cli import session
    from fsdp_lab.cluster import ClusterError

    console, rounds = session.console(), []
    console.print(f"{len(specs)} Specs on {args.ranks} ranks, {args.rounds} rounds")
    with session.lab(console, args.ranks, None, history=False) as lab:
        for i in range(args.rounds):
            with console.status(f"round {i + 1} of {args.rounds}"):
                try:
                    rounds.append(lab.calibrate(beside=specs))
                except SpecError as e:
                    raise Refused(str(e)) from e
                except ClusterError as e:
                    raise Failed(str(e)) from e
    rows = compared(specs, rounds)
    console.print(report(rows), markup=False, highlight=False)
    if args.json is not None:
        told = {"rows": [row.to_dict() for row in rows], "errors": figures(rows), "environment": environment()}
        write_file(args.json, {**told, "rates": asdict(rounds[-1].rates)})
    return 0


def wanted(args: argparse.Namespace) -> list[Spec]:
    """Raises Refused, in the words of the command line."""
    from fsdp_lab.bench.planned import strategies

    try:
        bases = [
            Spec(world_size=args.ranks).replace(
                model=model, precision=precision, seq_len=args.seq_len, micro_batch=args.micro_batch
            )
            for model in args.model.split(",")
            for precision in args.precision.split(",")
        ]
    except SpecError as e:
        raise Refused(str(e)) from e
    return [spec for base in bases for spec in strategies(base)]


def report(rows: list[Compared]) -> str:
    """A line for each Spec, and one for all of them."""
    from fsdp_lab.bench.planned import AIM, figures
    from fsdp_lab.table import Table

    cells = []
    for row in rows:
        s, r = row.spec.strategy, row.ratio
        times = [f"{1e3 * sorted(values)[len(values) // 2]:.1f}" for values in (row.measured_s, row.predicted_s)]
        spread = [f"{value:.3f}" for value in (r.median, r.p10, r.p90)]
        cells.append((str(row.spec.workload.model), s.backend, s.sharding, str(s.precision), *times, *spread))
    columns = ("model", "backend", "sharding", "precision", "measured ms", "predicted ms", "ratio", "p10", "p90")
    table = Table(columns=columns, rows=tuple(cells), left=frozenset(columns[:4]))
    told = figures(rows)
    return (f"{table!r}\nerrors of the medians: mean {told['mean']:.1%}, worst {told['worst']:.1%}, "
            f"{told['within']:.0%} of {len(rows)} within {AIM:.0%}")  # fmt: skip
