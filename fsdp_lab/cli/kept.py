"""`fsdp-lab kept`: the ranks that outlive their kernels, listed and ended."""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from typing import TYPE_CHECKING, Any

from fsdp_lab.cli.console import Failed, Refused, unhurried

if TYPE_CHECKING:
    from fsdp_lab.cluster.kept import Kept


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.add_argument(
        "--end", nargs="*", metavar="ID", help="end those with these ids; without an id all that no kernel has"
    )


def run(args: argparse.Namespace) -> int:
    from fsdp_lab.cluster.kept import kept_clusters

    clusters = kept_clusters()
    if args.end is not None:
        for kept in chosen(clusters, args.end):
            with unhurried():
                if not kept.end():
                    raise Failed(f"{kept.id} could not be ended: a kernel has just taken it, or a process stays")
            print(f"{kept.id}: {len(kept.pids)} rank{'s' * (len(kept.pids) != 1)} ended")
    elif args.json:
        print(json.dumps([told(kept) for kept in clusters], indent=1))
    else:
        print("\n".join(map(line, clusters)) or "no ranks are kept")
    return 0


def chosen(clusters: list[Kept], ids: list[str]) -> list[Kept]:
    """Raises Refused: there is no such cluster, or a kernel has it."""
    for one in ids:
        if not any(kept.id == one for kept in clusters):
            raise Refused(f"no ranks are kept under {one}; `fsdp-lab kept` lists them")
    found = [kept for kept in clusters if (kept.id in ids if ids else kept.free)]
    for kept in found:
        if not kept.free and kept.owner is not None:
            raise Refused(f"process {kept.owner.pid} uses {kept.id}; close its lab, or end that process first")
    return found


def told(kept: Kept) -> dict[str, Any]:
    import psutil

    rss_bytes = 0
    for pid in kept.pids:
        with contextlib.suppress(psutil.Error):
            rss_bytes += psutil.Process(pid).memory_info().rss
    return {
        "id": kept.id,
        "ranks": len(kept.pids),
        "devices": [seat["device"] for seat in kept.placement["seats"]],
        "pids": list(kept.pids),
        "notebook": kept.asked["notebook"],
        "kernel_pid": None if kept.free or kept.owner is None else kept.owner.pid,
        "free_unix_s": kept.free_unix_s if kept.free else None,
        "limit_s": kept.limit_s,
        "rss_bytes": rss_bytes,
    }


def line(kept: Kept) -> str:
    """For a person: who has them, or how long they still wait."""
    from fsdp_lab.cli.doctor.finding import size

    d = told(kept)
    what = f"{d['id']}  {d['ranks']} rank{'s' * (d['ranks'] != 1)} on {', '.join(sorted(set(d['devices'])))}"
    waited_s = max(0.0, time.time() - (kept.free_unix_s or time.time()))
    left = f"no kernel has them; they end in {(kept.limit_s - waited_s) / 3600:.1f} h"
    whose = left if d["kernel_pid"] is None else f"process {d['kernel_pid']} uses them"
    return "; ".join(filter(None, (f"{what}, {size(d['rss_bytes'])}", whose, d["notebook"])))
