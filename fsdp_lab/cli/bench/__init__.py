"""`fsdp-lab bench`: `live` measures how long a user waits, `step` backends against each other."""

from __future__ import annotations

import argparse

from fsdp_lab.cli.bench import live, step


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(title="what is measured", metavar="WHAT", required=True)
    for name, module, says in (
        ("live", live, "how long a user waits: start to first step, switch to first step, stop"),
        ("step", step, "the step time of the backends against each other, in turns, with their ratios"),
    ):
        kind = kinds.add_parser(name, help=says, description=f"{says[0].upper()}{says[1:]}.", allow_abbrev=False)
        kind.set_defaults(measure=module.run)
        module.add_arguments(kind)


def run(args: argparse.Namespace) -> int:
    code: int = args.measure(args)
    return code
