"""`fsdp-lab watch -- COMMAND`: runs a training script as it is, and watches what it trains."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fsdp_lab.base.formatting import plural
from fsdp_lab.cli.console import Refused

_PASSED_ON = (signal.SIGTERM, signal.SIGHUP)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "fsdp-lab watch [OPTION ...] -- COMMAND [ARGUMENT ...]"
    parser.add_argument("--title", default="", help="of the run (default: made from the wrapper and the model)")
    parser.add_argument(
        "--listen", action="store_true", help="leave the script its own process group: no communication"
    )
    parser.add_argument(
        "--no-ledger", action="store_true", help="no memory by class: for a script that uses torch's profiler"
    )
    parser.add_argument(
        "--history", default="", metavar="FILE", help="where it is stored (default: as fsdp-lab history)"
    )
    parser.add_argument(
        "--no-audit", action="store_true", help="do not look whether the updates are what they should be"
    )
    parser.add_argument("--report-to", default="", metavar="TRACKER", help="as of fsdp-lab run")
    parser.add_argument("command", nargs="*", metavar="COMMAND", help="such as torchrun --nproc-per-node 2 train.py")


def run(args: argparse.Namespace) -> int:
    """The command's own exit code; 128 and the signal's number, if one ended it."""
    command: list[str] = args.command
    if not command:
        raise Refused("no command was given; write it after --: fsdp-lab watch -- torchrun --nproc-per-node 2 train.py")
    if shutil.which(command[0]) is None:
        hint = f"python {command[0]}" if command[0].endswith(".py") else "a program that is on the PATH"
        raise Refused(f"{command[0]} was not found, or is no program; give {hint}")
    if args.report_to:
        from fsdp_lab.runs.trackers import Reporter

        Reporter(args.report_to, field="--report-to").checked()
    site = Path(__file__).parents[1] / "runs" / "site"
    options = {"listen": args.listen, "ledger": not args.no_ledger, "title": args.title, "history": args.history}
    options |= {"audit": not args.no_audit, "report_to": args.report_to}
    with tempfile.TemporaryDirectory(prefix="fsdp_lab_watch_") as folder:
        path = os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH", ""))))
        asked = json.dumps({"folder": folder, **options})  # `fsdp_lab.runs.attach.AttachOptions`
        code = call(command, {**os.environ, "FSDP_LAB_WATCH": asked, "PYTHONPATH": path})
        said = [json.loads(path.read_text()) for path in Path(folder).glob("process-*.json")]
    for line in told(said, args.history or None):
        print(f"fsdp-lab: {line}", file=sys.stderr)
    return code


def call(command: Sequence[str], environment: dict[str, str]) -> int:
    """Runs a command to its end; signals are its own affair. Ctrl-C reaches it from the terminal, as it would alone."""
    process = subprocess.Popen(command, env=environment)
    before = {number: signal.signal(number, lambda n, _: process.send_signal(n)) for number in _PASSED_ON}
    try:
        while True:
            with contextlib.suppress(KeyboardInterrupt):
                code = process.wait()
                return code if code >= 0 else 128 - code
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def told(said: Sequence[Mapping[str, Any]], history: str | None) -> list[str]:
    """What was seen, a sentence each. said: what the command's processes say (`fsdp_lab.runs.attach.Attached`)."""
    from fsdp_lab.runs.history import History

    lines = list(dict.fromkeys(note for one in said for note in one["notes"]))
    for run in dict.fromkeys(one["run"] for one in sorted(said, key=lambda one: one["rank"]) if one["run"]):
        ranks = [one for one in said if one["run"] == run]
        first, steps = ranks[0], max(one["steps"] for one in ranks)
        what = f"{plural(steps, 'step')} of {first['model']} under {first['backend']}"
        lines.append(f"watched {what} on {plural(first['world_size'], 'rank')}; fsdp-lab history show {run}")
        for stored in (one for one in History(history).runs() if one.id == run):
            lines.append(stored.blame().sentence)
            lines += repr(stored.audit()).splitlines() if stored.audit() else []
        if any(one["state"] == "watching" for one in ranks):
            lines.append(
                "a rank ended without Python's own end, as by a signal or os._exit; its last steps may be missing"
            )
    if not any(one["run"] for one in said):
        made = sum(one["optimizers"] for one in said)
        if made:
            lines.append(f"nothing was watched: {plural(made, 'optimizer')} of torch's made, and none stepped a model")
        else:
            lines.append("nothing was watched: no Python process of the command made an optimizer of torch's")
    return lines
