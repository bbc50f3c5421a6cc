"""`fsdp-lab history`, `report` and `ranks`: what outlives a kernel, stored runs and persistent ranks, listed and ended."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdp_lab.base.files import check_file
from fsdp_lab.base.formatting import plural, size
from fsdp_lab.cli.console import Failed, Refused, add_command, at_least, memory_limit, say, say_json, signals_ignored
from fsdp_lab.spec.describe import describe_changes

if TYPE_CHECKING:
    from fsdp_lab.cluster.detached import DetachedCluster
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
        ("rename", rename, "give a run a name"),
        ("note", note, "write a note on a run"),
        ("pin", lambda args, history: history.pin(args.which), "never delete this run automatically"),
        ("unpin", lambda args, history: history.unpin(args.which), "undo pin"),
    )
    for name, act, help_text in acts:
        action = add_command(actions, name, help_text)
        action.set_defaults(act=act)
        nargs = "*" if name == "delete" else None
        action.add_argument("which", nargs=nargs, metavar="ID", help="the id, the beginning of one, or a name")
        if name == "delete":
            help_text = "all runs that ended more than DAYS ago, except pinned ones"
            action.add_argument("--older-than", type=float, metavar="DAYS", help=help_text)
        if name in ("rename", "note"):
            action.add_argument("text", metavar="NAME" if name == "rename" else "TEXT", help='"" removes it')
        if name == "show":
            action.add_argument("--json", action="store_true", help="print JSON, with the figures of compare --json")


def run(args: argparse.Namespace) -> int:
    from fsdp_lab.runs.history import History

    args.act(args, History())
    return 0


def list_runs(args: argparse.Namespace, history: History) -> None:
    at_least(args, "limit", 0)
    runs = history.runs()
    runs = runs[: args.limit] if args.limit else runs
    say_json([run.to_dict() for run in runs]) if args.json else say(repr(runs))


def show(args: argparse.Namespace, history: History) -> None:
    stored = history.runs()[args.which]
    if args.json:
        say_json({**stored.to_dict(), "summary": stored.summary(), "blame": stored.blame().to_dict()})
        return
    say("\n".join([*head(stored), "", repr(stored.table()), "", repr(stored.blame())]))


def rename(args: argparse.Namespace, history: History) -> None:
    before = history.runs()[args.which]
    history.rename(args.which, args.text)
    now = f"is now called {args.text!r}" if args.text else "has no name now"
    say(f"run {before.id} {now}{f', before {before.name!r}' if before.name else ''}")


def note(args: argparse.Namespace, history: History) -> None:
    stored = history.runs()[args.which]
    history.annotate(args.which, args.text)
    say(f"run {stored.id}: {'its note was stored' if args.text else 'it has no note now'}")


def head(stored: StoredRun) -> list[str]:
    """The run's name, state, environment and switches, as lines."""
    seconds = (stored.ended_unix_s or time.time()) - stored.started_unix_s
    name, pinned = f" {stored.name}" if stored.name else "", " (pinned)" if stored.pinned else ""
    reason = f" ({stored.reason})" if stored.reason else ""
    lines = [f"run {stored.id}{name}{pinned}", *([f"note: {stored.note}"] if stored.note else [])]
    lines.append(f"{stored.state.value}{reason}; began {stored.when}, {seconds:.0f} s")
    lines.append(stored.where or "where it was trained is not known")
    for switch in stored.switches[1:]:
        changed = describe_changes(switch.before.difference(switch.after) if switch.before is not None else {}, "->")
        lines.append(f"from step {switch.step}: {changed}{'' if switch.carried else ' (restarted)'}")
    return [*lines, *map(str, stored.diagnoses)]


def delete(args: argparse.Namespace, history: History) -> None:
    if bool(args.which) == (args.older_than is not None):
        raise Refused("name the runs to delete, or give --older-than DAYS")
    deleted = history.delete(*args.which) if args.which else history.delete_older(args.older_than)
    say(f"{plural(deleted, 'run')} deleted; {len(history.runs())} left")


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("which", nargs="+", metavar="RUN", help="the id of a run, the beginning of one, or its name")
    add("--output", type=Path, metavar="FILE", help="output file (default: fsdp-lab-ID.html)")
    add("--baseline", metavar="RUN", help="baseline run (default: the first)")
    add("--title", default="", help="title of the report")
    add("--memory", type=float, metavar="GIB", help="device memory for the recommendation (default: that of the runs)")


def report(args: argparse.Namespace) -> int:
    limit_bytes = memory_limit(args)
    from fsdp_lab.report import SUFFIXES, write_report
    from fsdp_lab.runs.history import History

    all_runs = History().runs()
    runs = list({stored.id: stored for stored in (all_runs[which] for which in args.which)}.values())
    output = check_file(args.output or Path(f"fsdp-lab-{runs[0].id}.html"), SUFFIXES, field="--output")
    baseline = runs[0] if args.baseline is None else all_runs[args.baseline]
    if baseline.id not in [stored.id for stored in runs]:
        raise Refused(f"--baseline {args.baseline} is not one of the runs of this report; name it among them, too")
    say(f"written: {write_report(output, runs, baseline=baseline.id, title=args.title, limit_bytes=limit_bytes)}")
    return 0


def add_ranks_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")
    end = "end the ranks with these ids; without an id, all that no kernel uses"
    parser.add_argument("--end", nargs="*", metavar="ID", help=end)


def ranks(args: argparse.Namespace) -> int:
    from fsdp_lab.cluster.detached import detached_clusters

    clusters = detached_clusters()
    if args.end is not None:
        for cluster in selected(clusters, args.end):
            with signals_ignored():
                if not cluster.end():
                    reason = "a kernel has attached to it, or a process does not end"
                    raise Failed(f"{cluster.id} could not be ended: {reason}")
            print(f"{cluster.id}: {plural(len(cluster.pids), 'rank')} ended")
    elif args.json:
        say_json([cluster_record(cluster) for cluster in clusters])
    else:
        print("\n".join(map(cluster_line, clusters)) or "no persistent ranks")
    return 0


def selected(clusters: list[DetachedCluster], ids: list[str]) -> list[DetachedCluster]:
    """The clusters with these ids, or all that no kernel uses. Raises Refused: no such cluster, or a kernel uses it."""
    for one in ids:
        if not any(cluster.id == one for cluster in clusters):
            raise Refused(f"no ranks have the id {one}; `fsdp-lab ranks` lists them")
    chosen = [cluster for cluster in clusters if (cluster.id in ids if ids else cluster.free)]
    for cluster in chosen:
        if not cluster.free and cluster.owner is not None:
            raise Refused(f"process {cluster.owner.pid} uses {cluster.id}; close its lab, or end that process first")
    return chosen


def cluster_record(cluster: DetachedCluster) -> dict[str, Any]:
    import psutil

    rss_bytes = 0  # of ranks on this machine
    for pid in () if cluster.where else cluster.pids:
        with contextlib.suppress(psutil.Error):
            rss_bytes += psutil.Process(pid).memory_info().rss
    return {
        "id": cluster.id,
        "ranks": len(cluster.pids),
        "devices": [seat["device"] for seat in cluster.placement["seats"]],
        "pids": list(cluster.pids),
        "hosts": [host["name"] for host in cluster.where.get("hosts", ())],
        "notebook": cluster.asked["notebook"],
        "kernel_pid": None if cluster.free or cluster.owner is None else cluster.owner.pid,
        "free_unix_s": cluster.free_unix_s if cluster.free else None,
        "limit_s": cluster.limit_s,
        "rss_bytes": rss_bytes,
    }


def cluster_line(cluster: DetachedCluster) -> str:
    """A cluster as one line, with the kernel that uses it or the hours until it ends."""
    d = cluster_record(cluster)
    where = ", ".join(sorted(set(d["devices"]))) + (f" of {', '.join(d['hosts'])}" if d["hosts"] else "")
    memory = "" if d["hosts"] else f", {size(d['rss_bytes'])}"
    waited_s = max(0.0, time.time() - (cluster.free_unix_s or time.time()))
    left = f"no kernel uses them; they end in {(cluster.limit_s - waited_s) / 3600:.1f} h"
    user = left if d["kernel_pid"] is None else f"process {d['kernel_pid']} uses them"
    return "; ".join(filter(None, (f"{d['id']}  {plural(d['ranks'], 'rank')} on {where}{memory}", user, d["notebook"])))
