"""`fsdp-lab`: the command line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    parser = argparse.ArgumentParser(prog="fsdp-lab")
    parser.parse_args(argv)
    return 0


def entry() -> None:
    """The console script."""
    sys.exit(main())
