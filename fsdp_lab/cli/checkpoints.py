"""`fsdp-lab checkpoints DIR`: which are in a folder, which are torn, and the newest as a model for transformers."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from fsdp_lab.cli.console import Refused
from fsdp_lab.core.checkpoint_format import checkpoints, find, incomplete_checkpoints


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, help="a folder of checkpoints, or one checkpoint")
    parser.add_argument(
        "--export", type=Path, metavar="DIR", help="export the newest model to DIR, for from_pretrained"
    )
    parser.add_argument("--force", action="store_true", help="overwrite an existing model")


def run(args: argparse.Namespace) -> int:
    if args.export is not None:
        from fsdp_lab.export import export_model

        sys.stdout.write(f"{export_model(find(args.folder, field='folder'), args.export, force=args.force)}\n")
        return 0
    if not args.folder.is_dir():
        raise Refused(f"there is no folder {args.folder}; name one that a run was saved in")
    sys.stdout.write("".join(f"{line}\n" for line in lines(args.folder)))
    return 0


def lines(folder: Path) -> Iterator[str]:
    """Oldest first; then what is torn."""
    from fsdp_lab.core.describe import describe_strategy
    from fsdp_lab.core.formatting import size

    whole, broken = checkpoints(folder), incomplete_checkpoints(folder)
    for c in whole:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(c.saved_unix_s))
        said = f"{describe_strategy(c.spec)} on {c.spec.world_size} ranks"
        yield f"{c.path.name}  step {c.step}, {size(c.nbytes)}, {c.kind}, of run {c.run}, {when}: {said}"
    for t in broken:
        yield f"torn: {t.reason}"
    if not whole and not broken:
        yield f"{folder} holds no checkpoint"
