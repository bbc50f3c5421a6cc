"""`fsdp-lab history` and `fsdp-lab report`: stored runs listed, shown, named, deleted, or written as one HTML report."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from fsdp_lab.base.errors import FieldError
from fsdp_lab.base.files import check_file
from fsdp_lab.base.formatting import plural
from fsdp_lab.cli.console import Refused, add_command, at_least, memory_limit, say, say_json
from fsdp_lab.spec.describe import describe_changes

if TYPE_CHECKING:
    from fsdp_lab.runs.history import History, StoredRun

NEWEST = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(limit=NEWEST, json=False)
    parser.add_argument("--limit", type=int, metavar="N", help=f"list the newest N runs (default: {NEWEST}; 0: all)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(act=list_runs)
    actions = parser.add_subparsers(title="actions (default: list)", metavar="ACTION")
    acts: tuple[tuple[str, Callable[[argparse.Namespace, History], None], str], ...] = (
        ("show", show, "show one run: environment, switches, last steps"),
        ("delete", delete, "delete runs, by id or by age"),
        ("rename", lambda args, history: history.rename(args.which, args.name), "give a run a name"),
        ("pin", lambda args, history: history.pin(args.which), "never delete this run automatically"),
        ("unpin", lambda args, history: history.unpin(args.which), "undo pin"),
    )
    for name, act, help_text in acts:
        action = add_command(actions, name, help_text)
        action.set_defaults(act=act)
        what = {"metavar": "ID", "help": "the id, the beginning of one, or a name"}
        if name == "delete":
            action.add_argument("which", nargs="*", **what)  # type: ignore[arg-type]
            help_text = "all runs that ended more than DAYS ago, except pinned ones"
            action.add_argument("--older-than", type=float, metavar="DAYS", help=help_text)
        else:
            action.add_argument("which", **what)  # type: ignore[arg-type]
        if name == "rename":
            action.add_argument("name", help='the new name; "" removes it')
        if name == "show":
            help_text = "print JSON, with the same figures as compare --json"
            action.add_argument("--json", action="store_true", help=help_text)


def run(args: argparse.Namespace) -> int:
    from fsdp_lab.runs.history import History, HistoryError

    try:
        args.act(args, History())
    except HistoryError as e:
        raise Refused(str(e)) from e
    return 0


def list_runs(args: argparse.Namespace, history: History) -> None:
    at_least(args, "limit", 0)
    runs = history.runs()
    runs = runs[: args.limit] if args.limit else runs
    say_json([run.to_dict() for run in runs]) if args.json else say(repr(runs))


def show(args: argparse.Namespace, history: History) -> None:
    stored = history.runs()[args.which]
    if args.json:
        say_json({**stored.to_dict(), "summary": stored.summary()})
        return
    say("\n".join([*head(stored), "", repr(stored.table())]))


def head(stored: StoredRun) -> list[str]:
    """The run's name, state, environment and switches, as lines."""
    seconds = (stored.ended_unix_s or time.time()) - stored.started_unix_s
    name, pinned = f" {stored.name}" if stored.name else "", " (pinned)" if stored.pinned else ""
    reason = f" ({stored.reason})" if stored.reason else ""
    lines = [f"run {stored.id}{name}{pinned}"]
    lines.append(f"{stored.state.value}{reason}; began {stored.when}, {seconds:.0f} s")
    lines.append(stored.where or "where it was trained is not known")
    for switch in stored.switches[1:]:
        changed = describe_changes(switch.before.difference(switch.after) if switch.before is not None else {}, "->")
        lines.append(f"from step {switch.step}: {changed}{'' if switch.carried else ' (restarted)'}")
    return [*lines, *map(str, stored.diagnoses)]


def delete(args: argparse.Namespace, history: History) -> None:
    if bool(args.which) == (args.older_than is not None):
        raise Refused("name the runs to delete, or give --older-than DAYS")
    try:
        deleted = history.delete(*args.which) if args.which else history.delete_older(args.older_than)
    except FieldError as e:
        if e.field == "days":
            raise Refused(f"--older-than {args.older_than} is refused; {e.hint}") from e
        raise
    say(f"{plural(deleted, 'run')} deleted; {len(history.runs())} left")


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("which", nargs="+", metavar="RUN", help="the id of a run, the beginning of one, or its name")
    add("--output", type=Path, default="report.html", metavar="FILE", help="output file (default: %(default)s)")
    add("--baseline", metavar="RUN", help="baseline run (default: the first)")
    add("--title", default="", help="title of the report")
    memory = "device memory for the recommendation (default: that of the runs)"
    add("--memory", type=float, metavar="GIB", help=memory)


def report(args: argparse.Namespace) -> int:
    limit_bytes = memory_limit(args)
    from fsdp_lab.report import SUFFIXES, write_report
    from fsdp_lab.runs.history import History, HistoryError

    check_file(args.output, SUFFIXES, field="--output")
    try:
        all_runs = History().runs()
    except HistoryError as e:
        raise Refused(str(e)) from e
    runs = list({stored.id: stored for stored in (all_runs[which] for which in args.which)}.values())
    baseline = runs[0] if args.baseline is None else all_runs[args.baseline]
    if baseline.id not in [stored.id for stored in runs]:
        raise Refused(f"--baseline {args.baseline} is not one of the runs of this report; name it among them, too")
    say(f"written: {write_report(args.output, runs, baseline=baseline.id, title=args.title, limit_bytes=limit_bytes)}")
    return 0
