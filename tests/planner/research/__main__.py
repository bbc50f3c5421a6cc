"""`python -m tests.planner.research validate [--json]`: predicts published measurements."""

import argparse
from collections.abc import Sequence

from fsdp_lab.cli.console import say, say_json
from tests.planner.research.published import published
from tests.planner.research.validate import by_constant, grouped, lines, usable, validate


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.planner.research", description=__doc__)
    parser.add_argument("command", choices=["validate"], help="predict each row without its source; takes minutes")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    args, rows = parser.parse_args(arguments), published()
    told = validate(rows)
    constant = grouped(by_constant(usable(rows)[0]), lambda row: row.case.source)
    say_json(told) if args.json else say("\n".join(lines(told, constant)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
