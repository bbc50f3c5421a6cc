"""`fsdp-lab bench endure`: what a thousand toggles leave behind in the kernel and in the ranks, for each backend.

A run keeps its events as long as somebody holds it, which is its purpose and no leak: every `RUN_TOGGLES` toggles another
run goes on with the same parameters, and the former is let go.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from fsdp_lab.cli.bench.environment import environment
from fsdp_lab.cli.bench.live import await_ledger, await_step
from fsdp_lab.cli.console import Refused
from fsdp_lab.cli.results import check_file, write_file
from fsdp_lab.spec import BACKENDS, Spec

if TYPE_CHECKING:
    from fsdp_lab.lab import Lab
    from fsdp_lab.runs import Run

FROM = 100  # toggles until everything has been done once
RUN_TOGGLES = 50
WINDOW = 10  # readings around a mark, of which the median counts: memory of a process that works goes up and down

# What is toggled between, so that each is built anew.
PAIRS: Mapping[str, Sequence[dict[str, Any]]] = {
    "lab": ({"sharding": "full_shard"}, {"sharding": "shard_grad_op"}),
    "fsdp2": ({"sharding": "full_shard"}, {"sharding": "shard_grad_op"}),
    "fsdp1": ({"sharding": "full_shard"}, {"sharding": "shard_grad_op"}),
    "ddp": ({"sharding": "no_shard", "precision": "fp32"}, {"sharding": "no_shard", "precision": "bf16"}),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--model", default="gpt2-1m", help="a preset (default: %(default)s)")
    parser.add_argument("--toggles", type=int, default=1000, help=f"of each, {FROM} to warm up (default: %(default)s)")
    parser.add_argument("--backend", default=",".join(BACKENDS), metavar="B,B", help="(default: all four)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")


def run(args: argparse.Namespace) -> int:
    check_file(args.json)
    if args.toggles < FROM + WINDOW:
        raise Refused(
            f"--toggles {args.toggles} is refused; give {FROM + WINDOW} or more: the first {FROM} are warm-up"
        )
    backends = [name.strip() for name in args.backend.split(",")]
    if unknown := next((name for name in backends if name not in PAIRS), None):
        raise Refused(f"--backend {unknown!r} is refused; give some of {', '.join(PAIRS)}")

    from fsdp_lab.cli import session

    console = session.console()
    found: dict[str, dict[str, Any]] = {}
    base = Spec(world_size=args.ranks).replace(model=args.model, micro_batch=1, seq_len=32)
    for backend in backends:
        # New ranks for each: what one keeps is not the next one's.
        with session.lab(console, args.ranks, None, history=False) as lab:
            pair = [base.replace(backend=backend, **changes) for changes in PAIRS[backend]]
            found[backend] = endured(lab, pair, args.toggles)
        for line in lines(backend, found[backend], args.toggles):
            console.print(line, markup=False, highlight=False)
    if args.json is not None:
        where = {"model": args.model, "ranks": args.ranks, "toggles": args.toggles, **environment()}
        write_file(args.json, {"growth": found, "environment": where})
    return 0


def endured(lab: Lab, pair: Sequence[Spec], toggles: int) -> dict[str, Any]:
    """Growth from the hundredth to the last toggle: {"kernel" or "rank N": {"from_bytes", "to_bytes", "growth"}}."""
    trained = lab.run(pair[0])
    await_step(trained, pair[0].id)
    for spec in pair[::-1]:
        toggle(trained, spec)
        await_ledger(
            trained, spec.id
        )  # three steps after each toggle: later toggles come too soon for one, or just not
    pids = {"kernel": psutil.Process().pid, **{f"rank {s.rank}": s.pid for s in lab.rank_status()}}
    readings: dict[str, list[int]] = {name: [] for name in pids}
    marks = (range(FROM - WINDOW // 2, FROM + WINDOW // 2), range(toggles - WINDOW, toggles))
    for i in range(toggles):
        if i % RUN_TOGGLES == RUN_TOGGLES - 1:
            trained = lab.run(pair[i % 2], fresh=False)
            await_step(trained, pair[i % 2].id)
        toggle(trained, pair[(i + 1) % 2])
        if any(i in mark for mark in marks):
            gc.collect()
            for name, pid in pids.items():
                readings[name].append(psutil.Process(pid).memory_info().rss)
    return {name: growth(values[:WINDOW], values[WINDOW:]) for name, values in readings.items()}


def toggle(trained: Run, spec: Spec) -> None:
    trained.apply(spec)
    await_step(trained, spec.id)


def growth(before: Sequence[int], after: Sequence[int]) -> dict[str, Any]:
    """From the median of some readings to that of others."""
    first, last = (sorted(values)[len(values) // 2] for values in (before, after))
    return {"from_bytes": first, "to_bytes": last, "growth": last / first - 1}


def lines(backend: str, found: Mapping[str, Mapping[str, Any]], toggles: int) -> Iterator[str]:
    for name, one in found.items():
        mib = [one[key] / (1 << 20) for key in ("from_bytes", "to_bytes")]
        at = f"from toggle {FROM} ({mib[0]:.0f} MiB) to {toggles:,} ({mib[1]:.0f} MiB)"
        yield f"{backend}, {name}: {one['growth']:+.2%} {at}"
