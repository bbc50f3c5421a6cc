"""`fsdp-lab bench toggle`: from a changed strategy to its first step, on ranks that stay, beside a relaunch by torchrun.

Note: what is compared. A toggle is timed from `run.apply` to the first step that every rank has told under the new Spec,
parameters and optimizer state carried over; the chunk of steps that is under way ends first, and counts. It comes at a
random moment within the seconds after the last one's first step, as a user's does. The relaunch is torchrun on the same
Spec and command line, from its start to the first step that it prints: new processes, imports, build, rendezvous. It loads
no state, so that it is shorter than the same change by hand, which would save and load a checkpoint. Relaunches are spread
among the toggles, and the run is paused meanwhile. The tour goes through every ordered pair of ways.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from fsdp_lab.bench.ratios import Spread
from fsdp_lab.cli.bench.environment import environment
from fsdp_lab.cli.bench.live import await_step
from fsdp_lab.cli.console import Failed, Refused
from fsdp_lab.cli.results import check_file, write_file
from fsdp_lab.host_memory import HOST_MEMORY
from fsdp_lab.spec import Spec

if TYPE_CHECKING:
    from fsdp_lab.runs import Run

WAYS: Sequence[tuple[str, str]] = (
    ("lab", "full_shard"),
    ("lab", "shard_grad_op"),
    ("lab", "zero1"),
    ("lab", "no_shard"),
    ("fsdp2", "full_shard"),
    ("fsdp2", "shard_grad_op"),
    ("fsdp1", "full_shard"),
    ("fsdp1", "shard_grad_op"),
    ("fsdp1", "no_shard"),
    ("ddp", "no_shard"),
)
WITHIN_S = 3.0
RELAUNCH_S = 300.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--model", default="gpt2-10m", help="a preset (default: %(default)s)")
    parser.add_argument("--pairs", type=int, help="so many toggles, at random (default: each pair of ways, twice)")
    parser.add_argument(
        "--relaunches", type=int, default=5, help="by torchrun, spread among them (default: %(default)s)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")


def run(args: argparse.Namespace) -> int:
    check_file(args.json)
    for name, least in (("pairs", 2), ("relaunches", 1)):
        if (value := getattr(args, name)) is not None and value < least:
            raise Refused(f"--{name} {value} is refused; give a whole number of {least} or more")
    spec = Spec(world_size=args.ranks).replace(model=args.model, micro_batch=1, seq_len=64)
    stops = [spec.replace(backend=b, sharding=s) for b, s in route(args.pairs)]

    from fsdp_lab.cli import session

    console = session.console()
    console.print(f"{len(stops) - 1} toggles of {args.model} on {args.ranks} ranks, {args.relaunches} relaunches")
    with session.lab(console, args.ranks, None, history=False) as lab:
        trained = lab.run(stops[0])
        await_step(trained, stops[0].id)
        toggles, relaunches = measure(trained, stops, args.relaunches)
    figures = figured(toggles, relaunches)
    for line in lines(figures, toggles):
        console.print(line, markup=False, highlight=False)
    if args.json is not None:
        where = {"model": args.model, "ranks": args.ranks, **environment()}
        write_file(args.json, {**figures, "environment": where})
    return 0


# -- the way ---------------------------------------------------------------------------------------------------------


def route(pairs: int | None) -> list[tuple[str, str]]:
    """Ways in the order in which they are gone: each ordered pair of them as neighbours, twice; or so many at random."""
    if pairs is None:
        return [WAYS[i] for i in tour(len(WAYS))] + [WAYS[i] for i in tour(len(WAYS))[1:]]
    chance, found = random.Random(0), [WAYS[0]]
    while len(found) <= pairs:
        found.append(chance.choice([way for way in WAYS if way != found[-1]]))
    return found


def tour(n: int) -> list[int]:
    """A closed way through all ordered pairs of n places, each pair once (Hierholzer); of n (n - 1) + 1 places."""
    left = {i: [j for j in range(n) if j != i] for i in range(n)}
    open_, found = [0], []
    while open_:
        if left[open_[-1]]:
            open_.append(left[open_[-1]].pop())
        else:
            found.append(open_.pop())
    return found[::-1]


# -- measuring -------------------------------------------------------------------------------------------------------

Toggle = tuple[Spec, Spec, float]  # from, to, seconds


def measure(trained: Run, stops: Sequence[Spec], relaunches: int) -> tuple[list[Toggle], list[float]]:
    toggles: list[Toggle] = []
    again: list[float] = []
    chance = random.Random(0)
    for i, (before, after) in enumerate(pairwise(stops)):
        if i * relaunches // (len(stops) - 1) >= len(again):
            trained.pause()
            again.append(relaunched(before))
            trained.resume()
        time.sleep(chance.uniform(0, WITHIN_S))
        begun_s = time.perf_counter()
        trained.apply(after)
        await_step(trained, after.id)
        toggles.append((before, after, time.perf_counter() - begun_s))
    return toggles, again


def relaunched(spec: Spec) -> float:
    """Seconds from the start of torchrun to its first step."""
    with tempfile.TemporaryDirectory(prefix="fsdp_lab_") as folder:
        file = Path(folder) / "spec.json"
        file.write_text(spec.to_json())
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={spec.world_size}",
                   "-m", "fsdp_lab.rank", str(file), "--steps", "1"]  # fmt: skip
        begun_s = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, timeout=RELAUNCH_S, check=False,
                              env={**HOST_MEMORY, **os.environ})  # fmt: skip
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        if not lines:
            raise Failed(f"torchrun made no step: {done.stderr.strip().splitlines()[-1:]}")
        told_s = float(json.loads(lines[0])["end_unix_s"]) - time.time()  # it went on, to its end
        return time.perf_counter() + told_s - begun_s


# -- figures ---------------------------------------------------------------------------------------------------------


def figured(toggles: Sequence[Toggle], relaunches: Sequence[float]) -> dict[str, Any]:
    relaunch_s = median(relaunches)
    seconds = [s for _, _, s in toggles]
    by_pair: dict[tuple[str, str], list[float]] = {}
    for before, after, s in toggles:
        by_pair.setdefault((before.id, after.id), []).append(s)
    twice = [found[1] / found[0] for found in by_pair.values() if len(found) > 1]
    return {
        "ratios": {"resident/relaunch": asdict(Spread.of([s / relaunch_s for s in seconds]))},
        "control": {"resident/resident": asdict(Spread.of(twice))} if twice else {},
        "seconds": {"toggle": asdict(Spread.of(seconds)), "relaunch": asdict(Spread.of(list(relaunches)))},
        "worst": max(seconds),
    }


def lines(figures: dict[str, Any], toggles: Sequence[Toggle]) -> Iterator[str]:
    def said(spread: dict[str, Any], unit: str = "") -> str:
        return f"median {spread['median']:.3f}{unit}, p10 {spread['p10']:.3f}, p90 {spread['p90']:.3f} ({spread['n']})"

    yield f"resident/relaunch: {said(figures['ratios']['resident/relaunch'])}"
    for name, spread in figures["control"].items():
        yield f"control {name}, the same pair again: {said(spread)}"
    yield f"toggle to first step: {said(figures['seconds']['toggle'], ' s')}, longest {figures['worst']:.3f}"
    yield f"torchrun to first step: {said(figures['seconds']['relaunch'], ' s')}"
    by_way: dict[str, list[float]] = {}
    for _, after, seconds in toggles:
        by_way.setdefault(f"{after.strategy.backend} {after.strategy.sharding}", []).append(seconds)
    for way, seconds_ in sorted(by_way.items()):
        yield f"  to {way}: {said(asdict(Spread.of(seconds_)), ' s')}"
