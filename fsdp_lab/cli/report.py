"""`fsdp-lab report`: runs that are kept on this machine, side by side in one HTML file."""

from __future__ import annotations

import argparse
from pathlib import Path

from fsdp_lab.cli.console import Refused


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("which", nargs="+", metavar="RUN", help="the id of a run, the beginning of one, or its name")
    parser.add_argument("--output", type=Path, default=Path("report.html"), metavar="FILE",
                        help="output file (default: %(default)s)")  # fmt: skip
    parser.add_argument("--baseline", metavar="RUN", help="baseline run (default: the first)")
    parser.add_argument("--title", default="", help="title of the report")
    parser.add_argument("--memory", type=float, metavar="GIB",
                        help="device memory for the recommendation (default: that of the runs)")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    if args.memory is not None and not 0 < args.memory < float("inf"):
        raise Refused(f"--memory {args.memory:g} is refused; give the GiB of a device, such as 80")
    from fsdp_lab.cli.history import say
    from fsdp_lab.core.files import check_file
    from fsdp_lab.history import History, HistoryError
    from fsdp_lab.report import SUFFIXES, write_report

    check_file(args.output, SUFFIXES, field="--output")
    try:
        kept = History().runs()
    except HistoryError as e:
        raise Refused(str(e)) from e
    runs = list({past.id: past for past in (kept[which] for which in args.which)}.values())
    baseline = runs[0] if args.baseline is None else kept[args.baseline]
    if baseline.id not in [past.id for past in runs]:
        raise Refused(f"--baseline {args.baseline} is not one of the runs of this report; name it among them, too")
    limit = None if args.memory is None else int(args.memory * (1 << 30))
    say(f"written: {write_report(args.output, runs, baseline=baseline.id, title=args.title, limit_bytes=limit)}")
    return 0
