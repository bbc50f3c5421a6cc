"""`fsdp-lab export` and `fsdp-lab checkpoints`: a Spec, or a trained model, in a form that other programs use."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from fsdp_lab.base.errors import ArgumentError
from fsdp_lab.base.files import check_file
from fsdp_lab.base.formatting import size
from fsdp_lab.cli.console import Refused
from fsdp_lab.cli.run import read_spec
from fsdp_lab.export import TARGETS, export, text_of
from fsdp_lab.spec.checkpoint_format import checkpoints as list_checkpoints, find, incomplete_checkpoints
from fsdp_lab.spec.describe import describe_strategy


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("spec", type=Path, help='a file with {"workload": {...}, "strategy": {...}, "world_size": 2}')
    to = "script: for torchrun, with torch's own FSDP2, FSDP1 or DDP; accelerate: for accelerate launch --config_file"
    parser.add_argument("--to", choices=TARGETS, required=True, help=f"{to}; spec: for fsdp-lab run")
    output = "output file (default: standard output, but not for a script)"
    parser.add_argument("--output", type=Path, metavar="FILE", help=output)
    parser.add_argument("--force", action="store_true", help="overwrite FILE")
    parser.add_argument("--ranks", type=int, help="instead of the file's world_size")


def run(args: argparse.Namespace) -> int:
    if args.output is not None:
        check_file(args.output, replace=args.force, field="--output")
    spec = read_spec(args.spec)
    if args.ranks is not None:
        spec = spec.replace(world_size=args.ranks)
    if args.output is not None:
        print(export(spec, args.to, args.output, force=args.force))
    elif args.to == "script":
        raise ArgumentError("--output", "a script reads samples and a model that lie beside it", "name its file")
    else:
        sys.stdout.write(text_of(spec, args.to))
    return 0


def add_checkpoints_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, help="a folder of checkpoints, or one checkpoint")
    help_text = "export the newest model to DIR, for from_pretrained"
    parser.add_argument("--export", type=Path, metavar="DIR", help=help_text)
    parser.add_argument("--force", action="store_true", help="overwrite an existing model")


def checkpoints(args: argparse.Namespace) -> int:
    if args.export is not None:
        from fsdp_lab.export import export_model

        print(export_model(find(args.folder, field="folder"), args.export, force=args.force))
        return 0
    if not args.folder.is_dir():
        raise Refused(f"there is no folder {args.folder}; name one that a run was saved in")
    print("\n".join(lines(args.folder)))
    return 0


def lines(folder: Path) -> Iterator[str]:
    """A line for each checkpoint, oldest first; then the incomplete ones."""
    complete, incomplete = list_checkpoints(folder), incomplete_checkpoints(folder)
    for c in complete:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(c.saved_unix_s))
        strategy = f"{describe_strategy(c.spec)} on {c.spec.world_size} ranks"
        yield f"{c.path.name}  step {c.step}, {size(c.nbytes)}, {c.kind}, of run {c.run}, {when}: {strategy}"
    for checkpoint in incomplete:
        yield f"incomplete: {checkpoint.reason}"
    if not complete and not incomplete:
        yield f"{folder} contains no checkpoint"
