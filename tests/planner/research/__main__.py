"""`python -m tests.planner.research validate`: predicts published rows, each without its source, in a few minutes."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from fsdp_lab.cli.console import say
from tests.planner.research.published import published
from tests.planner.research.validate import lines


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.planner.research", description=__doc__)
    parser.add_argument("command", choices=["validate"])
    parser.parse_args(arguments)
    say("\n".join(lines(published())))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
