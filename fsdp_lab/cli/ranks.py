"""`fsdp-lab ranks`: lists and ends ranks that outlive their kernels."""

from __future__ import annotations

import argparse
import contextlib
import time
from typing import TYPE_CHECKING, Any

from fsdp_lab.base.formatting import plural, size
from fsdp_lab.cli.console import Failed, Refused, say_json, signals_ignored

if TYPE_CHECKING:
    from fsdp_lab.cluster.detached import DetachedCluster


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")
    end = "end the ranks with these ids; without an id, all that no kernel uses"
    parser.add_argument("--end", nargs="*", metavar="ID", help=end)


def run(args: argparse.Namespace) -> int:
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
        say_json([record(cluster) for cluster in clusters])
    else:
        print("\n".join(map(line, clusters)) or "no persistent ranks")
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


def record(cluster: DetachedCluster) -> dict[str, Any]:
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


def line(cluster: DetachedCluster) -> str:
    """A cluster as one line, with the kernel that uses it or the hours until it ends."""
    d = record(cluster)
    devices, hosts = sorted(set(d["devices"])), d["hosts"]
    what = f"{d['id']}  {plural(d['ranks'], 'rank')} on {', '.join(devices)}{' of ' * bool(hosts)}{', '.join(hosts)}"
    memory = "" if hosts else f", {size(d['rss_bytes'])}"
    waited_s = max(0.0, time.time() - (cluster.free_unix_s or time.time()))
    left = f"no kernel uses them; they end in {(cluster.limit_s - waited_s) / 3600:.1f} h"
    user = left if d["kernel_pid"] is None else f"process {d['kernel_pid']} uses them"
    return "; ".join(filter(None, (f"{what}{memory}", user, d["notebook"])))
