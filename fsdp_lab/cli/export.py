"""`fsdp-lab export spec.json --to script`: a Spec as something that runs without the lab."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from fsdp_lab.cli.run import read_spec
from fsdp_lab.core.files import check_file
from fsdp_lab.export import TARGETS, export, text_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("spec", type=Path, help='a file with {"workload": {...}, "strategy": {...}, "world_size": 2}')
    parser.add_argument(
        "--to", choices=TARGETS, required=True,
        help="script: for torchrun, with torch's own FSDP2, FSDP1 or DDP; accelerate: for accelerate launch --config_file; "
             "spec: for fsdp-lab run",
    )  # fmt: skip
    parser.add_argument("--output", type=Path, metavar="FILE", help="output file (default: standard output)")
    parser.add_argument("--force", action="store_true", help="overwrite FILE")
    parser.add_argument("--ranks", type=int, help="instead of the file's world_size")


def run(args: argparse.Namespace) -> int:
    if args.output is not None:
        check_file(args.output, replace=args.force, field="--output")
    spec = read_spec(args.spec)
    if args.ranks is not None:
        spec = spec.replace(world_size=args.ranks)
    if args.output is None:
        sys.stdout.write(text_of(spec, args.to))
        return 0
    file = export(spec, args.to, args.output, force=args.force)
    sys.stdout.write(f"{file}\n")
    return 0
