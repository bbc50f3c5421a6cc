"""`fsdp-lab bench`: what is waited for, the backends against each other, toggles, checkpoints, what measuring costs."""

from __future__ import annotations

import argparse

from fsdp_lab.cli.bench import checkpoint, endure, live, metering, plan, step, toggle


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(title="what is measured", metavar="WHAT", required=True)
    for name, module, says in (
        ("live", live, "how long a user waits: start to first step, switch to first step, stop"),
        ("step", step, "the step time of the backends against each other, in turns, with their ratios"),
        ("toggle", toggle, "from a changed strategy to its first step, beside a relaunch by torchrun"),
        ("endure", endure, "what a thousand toggles leave behind in the memory of kernel and ranks"),
        (
            "checkpoint",
            checkpoint,
            "saving and loading beside plain Distributed Checkpoint, and what a save costs training",
        ),
        (
            "metering",
            metering,
            "what measuring and live publishing cost a step, beside torch's group and nothing of ours",
        ),
        ("plan", plan, "predicted step times beside measured ones, of all strategies and backends, in turns"),
    ):
        kind = kinds.add_parser(name, help=says, description=f"{says[0].upper()}{says[1:]}.", allow_abbrev=False)
        kind.set_defaults(measure=module.run)
        module.add_arguments(kind)


def run(args: argparse.Namespace) -> int:
    code: int = args.measure(args)
    return code
