"""`python -m tests.bench NAME`: benches that are for those who develop fsdp_lab. Arguments, `--json` and exit codes as those
of `fsdp-lab bench`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from fsdp_lab.cli.bench import DEFAULT, Bench, add_benches, number, numbers, run, say
from fsdp_lab.cli.console import Failed, Refused, at_least, signals_raise
from fsdp_lab.core.errors import FieldError


def many(args: argparse.Namespace) -> dict[str, Any]:
    from tests.bench.many import many

    at_least(args, "passes", 1)
    return many(numbers(args.ranks, 2), args.passes, say)


def families(args: argparse.Namespace) -> dict[str, Any]:
    from tests.bench.families import sweep

    at_least(args, "jobs", 1)
    return sweep(args.names, args.jobs, say)


BENCHES: tuple[Bench, ...] = (
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
