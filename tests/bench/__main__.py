"""`python -m tests.bench NAME`: benches that are for those who develop fsdp_lab. Arguments, `--json` and exit codes as those
of `fsdp-lab bench`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from fsdp_lab.cli.bench import DEFAULT, Bench, add_benches, number, numbers, on_lab, run, say
from fsdp_lab.cli.console import Failed, Refused, at_least, signals_raise
from fsdp_lab.core.errors import FieldError


def class_(args: argparse.Namespace) -> dict[str, Any]:
    from fsdp_lab.planner.shapes import shape_for
    from tests.bench.classroom import measure_class

    for name, least in (("labs", 2), ("ranks", 1), ("rounds", 1), ("seconds", 1)):
        at_least(args, name, least)
    shape_for(args.model)  # an unknown one is refused before anything starts
    return measure_class(args.labs, args.ranks, args.model, args.rounds, args.seconds, page=not args.no_page, say=say)


def many(args: argparse.Namespace) -> dict[str, Any]:
    from tests.bench.many import many

    at_least(args, "passes", 1)
    return many(numbers(args.ranks, 2), args.passes, say)


def families(args: argparse.Namespace) -> dict[str, Any]:
    from tests.bench.families import sweep

    at_least(args, "jobs", 1)
    return sweep(args.names, args.jobs, say)


BENCHES: tuple[Bench, ...] = (
    ("class", class_, "labs of a class on this machine at once: first plots, event to pixel, memory, a refusal",
     on_lab("gpt2-1m") | {
         "labs": number(8, "at once"), "rounds": number(2, "starts beside labs that train"),
         "seconds": number(30, "for which all train and are measured"),
         "no_page": {"action": "store_true", "help": "no browser; else one page is drawn, which needs playwright"}}),
    ("many", many, "step times of several ranks, predicted from what one finds, compared with measured ones",
     {"ranks": {"default": "2,4", "metavar": "N,N", "help": f"numbers of ranks {DEFAULT}"},
      "passes": number(4, "measurements of each figure of a calibration")}),
    ("families", families, "families of transformers, small: which train, which are refused, and why",
     {"jobs": number(1, "families at once")}),
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", allow_abbrev=False)
    kinds = parser.add_subparsers(metavar="NAME", required=True)
    add_benches(kinds, BENCHES)
    kinds.choices["families"].add_argument("names", nargs="*", metavar="FAMILY", help="model types (default: all)")
    try:
        with signals_raise():
            return run(parser.parse_args(arguments))
    except (Refused, FieldError, Failed) as e:
        print(e, file=sys.stderr)
        return 1 if isinstance(e, Failed) else 2


if __name__ == "__main__":
    sys.exit(main())
