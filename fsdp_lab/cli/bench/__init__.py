"""`fsdp-lab bench`: `live` measures how long a user waits, `step` backends against each other, `metering` the measuring."""

from __future__ import annotations

import argparse

from fsdp_lab.cli.bench import live, metering, step


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(title="what is measured", metavar="WHAT", required=True)
    for name, module, says in (
        ("live", live, "how long a user waits: start to first step, switch to first step, stop"),
        ("step", step, "the step time of the backends against each other, in turns, with their ratios"),
        ("metering", metering, "what measuring and live publishing cost a step, beside torch's group and nothing of ours"),
    ):
        kind = kinds.add_parser(name, help=says, description=f"{says[0].upper()}{says[1:]}.", allow_abbrev=False)
        kind.set_defaults(measure=module.run)
        module.add_arguments(kind)


def run(args: argparse.Namespace) -> int:
    code: int = args.measure(args)
    return code
