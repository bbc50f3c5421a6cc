"""`fsdp-lab history`: the runs that are kept on this machine, listed, shown, named and deleted."""

from __future__ import annotations

import argparse
import json
import time
from typing import TYPE_CHECKING

from fsdp_lab.cli.console import Refused
from fsdp_lab.core.describe import describe_changes
from fsdp_lab.core.errors import FieldError

if TYPE_CHECKING:
    from fsdp_lab.history import History, StoredRun

NEWEST = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(limit=NEWEST, json=False)
    parser.add_argument("--limit", type=int, metavar="N", help=f"list the newest N runs (default: {NEWEST}; 0: all)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(act=listed)
    actions = parser.add_subparsers(title="actions (default: list)", metavar="ACTION")
    for name, act, says in (
        ("show", show, "show one run: environment, switches, last steps"),
        ("delete", delete, "delete runs, by id or by age"),
        ("rename", rename, "give a run a name"),
        ("pin", pin, "never delete this run automatically"),
        ("unpin", unpin, "undo pin"),
    ):
        action = actions.add_parser(name, help=says, description=f"{says[0].upper()}{says[1:]}.", allow_abbrev=False)
        action.set_defaults(act=act)
        what = {"metavar": "ID", "help": "the id, the beginning of one, or a name"}
        if name == "delete":
            action.add_argument("which", nargs="*", **what)  # type: ignore[arg-type]
            action.add_argument(
                "--older-than",
                type=float,
                metavar="DAYS",
                help="all runs that ended more than DAYS ago, except pinned ones",
            )
        else:
            action.add_argument("which", **what)  # type: ignore[arg-type]
        if name == "rename":
            action.add_argument("name", help='the new name; "" removes it')
        if name == "show":
            action.add_argument(
                "--json", action="store_true", help="print JSON, with the same figures as compare --json"
            )


def run(args: argparse.Namespace) -> int:
    from fsdp_lab.history import History, HistoryError

    try:
        args.act(args, History())
    except HistoryError as e:
        raise Refused(str(e)) from e
    return 0


def listed(args: argparse.Namespace, history: History) -> None:
    if args.limit < 0:
        raise Refused(f"--limit {args.limit} is refused; give a whole number of 0 or more")
    runs = history.runs()
    runs = runs[: args.limit] if args.limit else runs
    say(json.dumps([run.to_dict() for run in runs], indent=1) if args.json else repr(runs))


def show(args: argparse.Namespace, history: History) -> None:
    past = history.runs()[args.which]
    if args.json:
        say(json.dumps({**past.to_dict(), "summary": past.summary()}, indent=1))
        return
    say("\n".join([*head(past), "", repr(past.table())]))


def head(past: StoredRun) -> list[str]:
    """What is known of it but its figures."""
    lasted_s = (past.ended_unix_s or time.time()) - past.started_unix_s
    lines = [f"run {past.id}{f' {past.name}' if past.name else ''}{' (pinned)' if past.pinned else ''}",
             f"{past.state.value}{f' ({past.reason})' if past.reason else ''}; began {past.when}, {lasted_s:.0f} s",
             past.where or "where it was trained is not known"]  # fmt: skip
    for switch in past.switches[1:]:
        changes = switch.before.difference(switch.after) if switch.before is not None else {}
        words = describe_changes(changes, "->")
        lines.append(f"from step {switch.step}: {words}{'' if switch.carried else ' (begun again)'}")
    return lines


def delete(args: argparse.Namespace, history: History) -> None:
    if bool(args.which) == (args.older_than is not None):
        raise Refused("name the runs to delete, or give --older-than DAYS")
    try:
        gone = history.delete(*args.which) if args.which else history.delete_older(args.older_than)
    except FieldError as e:
        if e.field == "days":
            raise Refused(f"--older-than {args.older_than} is refused; {e.hint}") from e
        raise
    say(f"{gone} run{'s' * (gone != 1)} deleted; {len(history.runs())} left")


def rename(args: argparse.Namespace, history: History) -> None:
    history.rename(args.which, args.name)


def pin(args: argparse.Namespace, history: History) -> None:
    history.pin(args.which)


def unpin(args: argparse.Namespace, history: History) -> None:
    history.unpin(args.which)


def say(text: str) -> None:
    """As it is: a table's lines are not broken, and a pipe gets what a terminal shows."""
    from fsdp_lab.cli import session

    session.console().print(text, markup=False, highlight=False, soft_wrap=True)
