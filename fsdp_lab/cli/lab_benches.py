"""The benches that run on a lab: live, toggle, soak and plan. Of their shape: bench/benches.py.

Note: what is compared in `toggle`. A switch is timed from `run.apply` to the first step that every rank has reported
under the new Spec, parameters and optimizer state carried over; the chunk of steps that is under way ends first, and
counts. It comes at a random moment within the seconds after the last one's first step, as a user's does. The relaunch
is torchrun on the same Spec and command line, from its start to the first step that it prints: new processes, imports,
build, rendezvous. It loads no state, so it is shorter than the same change by hand, which would save and load a
checkpoint. Relaunches are spread among the switches, and the run is paused meanwhile. The tour goes through every
ordered pair of strategies.

Note: what is compared in `plan`. Every round calibrates anew; the steps of all Specs are timed in turns with what is
calibrated on, so that what the machine does meanwhile affects both alike. No Spec that is compared is calibrated on.

Note: a run keeps its events as long as somebody holds it, which is no leak. So in `soak`, every `RUN_TOGGLES` switches
another run continues with the same parameters, and the former is dropped.
"""

from __future__ import annotations

import gc
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from fsdp_lab.bench.plan import WARM_UP, WINDOW
from fsdp_lab.bench.ratios import BenchError, spread
from fsdp_lab.cli import session
from fsdp_lab.cli.console import terminal
from fsdp_lab.cluster import ClusterError
from fsdp_lab.core.host_memory import HOST_MEMORY
from fsdp_lab.core.spec import Spec
from fsdp_lab.lab import Lab
from fsdp_lab.runs import Run

Say = Callable[[str], None]
LONGEST_S = 120.0  # until a step comes
RELAUNCH_S = 300.0
WITHIN_S = 3.0  # after the last switch the next one comes
RUN_TOGGLES = 50

# For `live`: every neighbour differs in the backend or a knob; the last differs from the first, too.
WAY: Sequence[dict[str, Any]] = (
    {"sharding": "shard_grad_op"},
    {"precision": "bf16"},
    {"offload": "all"},
    {"backend": "ddp", "sharding": "no_shard"},
    {"backend": "fsdp1"},
    {"wrap": "whole"},
    {},
)
# For `toggle`: all ordered pairs of these.
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
# For `soak`: what is switched between; DDP has one sharding.
SHARDED: Sequence[dict[str, Any]] = ({"sharding": "full_shard"}, {"sharding": "shard_grad_op"})
REPLICATED: Sequence[dict[str, Any]] = (
    {"sharding": "no_shard", "precision": "fp32"},
    {"sharding": "no_shard", "precision": "bf16"},
)


# -- live ------------------------------------------------------------------------------------------------------------


def live(model: str, ranks: int, rounds: int, say: Say) -> dict[str, Any]:
    """How long a user waits: for the first step, for a switch, for a stop. Raises BenchError."""
    spec = Spec(world_size=ranks).replace(model=model, micro_batch=1, seq_len=64)
    begun_s = time.perf_counter()
    with session.lab(terminal(), ranks, None, history=False) as lab:
        ready_s = time.perf_counter() - begun_s
        started = lab.run(spec)
        await_step(started, spec.id)
        waits: dict[str, list[float]] = {"start to ranks ready": [ready_s]}
        waits["start to first step"] = [time.perf_counter() - begun_s]
        waits["switch to first step"] = [switch(started, spec.replace(**changes)) for changes in [*WAY] * rounds]
        waits["stop"] = list(_stops(lab, spec))
    for what, seconds in waits.items():
        more = f", {min(seconds):.2f} to {max(seconds):.2f} s, {len(seconds)} times"
        say(f"{what}: {seconds[0]:.2f} s" if len(seconds) == 1 else f"{what}: median {median(seconds):.2f} s{more}")
    return {"seconds": waits, "environment": {"model": model, "ranks": ranks}}


def _stops(lab: Lab, spec: Spec) -> Iterator[float]:
    """Seconds from `stop` until the ranks are free, for each backend, in the middle of a step."""
    for changes in ({}, {"backend": "ddp", "sharding": "no_shard"}, {"backend": "fsdp1"}):
        wanted = spec.replace(**changes)
        run = lab.run(wanted)
        await_step(run, wanted.id)
        begun_s = time.perf_counter()
        run.stop()
        run.wait(LONGEST_S)
        yield time.perf_counter() - begun_s


def switch(run: Run, spec: Spec) -> float:
    """Seconds from `apply` to the first step that every rank has done with the Spec."""
    begun_s = time.perf_counter()
    run.apply(spec)
    await_step(run, spec.id)
    return time.perf_counter() - begun_s


def await_step(run: Run, spec_id: str) -> None:
    """Until every rank has reported a step under the Spec. Raises BenchError if the run ends or does not come to it."""

    def reported() -> bool:
        latest = run.events.latest().values()
        return len(latest) == run.spec.world_size and all(e.spec_id == spec_id for e in latest)

    _await(run, "step", reported)


def await_ledger(run: Run, spec_id: str) -> None:
    """The same of a ledger step."""
    _await(run, "ledger step", lambda: any(e.ledger and e.spec_id == spec_id for e in run.events.since()[0]))


def _await(run: Run, what: str, there: Callable[[], bool]) -> None:
    limit_s = time.perf_counter() + LONGEST_S
    while time.perf_counter() < limit_s and not run.done:
        if there():
            return
        time.sleep(0.005)
    raise BenchError(f"no {what} came within {LONGEST_S:.0f} s: {run.reason or run.state.value}")


# -- toggle ----------------------------------------------------------------------------------------------------------

Toggle = tuple[Spec, Spec, float]  # from, to, seconds


def toggle(model: str, ranks: int, pairs: int | None, relaunches: int, say: Say) -> dict[str, Any]:
    """From a changed strategy to its first step, on ranks that stay, beside a relaunch by torchrun. Raises BenchError."""
    spec = Spec(world_size=ranks).replace(model=model, micro_batch=1, seq_len=64)
    stops = [spec.replace(backend=b, sharding=s) for b, s in route(pairs)]
    say(f"{len(stops) - 1} toggles of {model} on {ranks} ranks, {relaunches} relaunches")
    with session.lab(terminal(), ranks, None, history=False) as lab:
        run = lab.run(stops[0])
        await_step(run, stops[0].id)
        toggles, again = _timed(run, stops, relaunches)
    seconds = [s for _, _, s in toggles]
    by_pair: dict[tuple[str, str], list[float]] = {}
    by_way: dict[str, list[float]] = {}
    for before, after, s in toggles:
        by_pair.setdefault((before.id, after.id), []).append(s)
        by_way.setdefault(f"{after.strategy.backend} {after.strategy.sharding}", []).append(s)
    twice = [found[1] / found[0] for found in by_pair.values() if len(found) > 1]
    relaunch_s = median(again)

    def told(values: Sequence[float], unit: str = "") -> str:
        s = spread(values)
        return f"median {s.median:.3f}{unit}, p10 {s.p10:.3f}, p90 {s.p90:.3f} ({s.n})"

    against = [s / relaunch_s for s in seconds]
    say(f"resident/relaunch: {told(against)}")
    if twice:
        say(f"control resident/resident, the same pair again: {told(twice)}")
    say(f"toggle to first step: {told(seconds, ' s')}, longest {max(seconds):.3f}")
    say(f"torchrun to first step: {told(again, ' s')}")
    for way, of in sorted(by_way.items()):
        say(f"  to {way}: {told(of, ' s')}")
    return {
        "ratios": {"resident/relaunch": asdict(spread(against))},
        "control": {"resident/resident": asdict(spread(twice))} if twice else {},
        "environment": {"model": model, "ranks": ranks},
        "seconds": {"toggle": asdict(spread(seconds)), "relaunch": asdict(spread(again))},
        "worst": max(seconds),
    }


def route(pairs: int | None) -> list[tuple[str, str]]:
    """Strategies in the order of the switches: each ordered pair of them as neighbours, twice; or so many at random."""
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


def _timed(run: Run, stops: Sequence[Spec], relaunches: int) -> tuple[list[Toggle], list[float]]:
    toggles: list[Toggle] = []
    again: list[float] = []
    chance = random.Random(0)
    for i, (before, after) in enumerate(pairwise(stops)):
        if i * relaunches // (len(stops) - 1) >= len(again):
            run.pause()
            again.append(relaunched(before))
            run.resume()
        time.sleep(chance.uniform(0, WITHIN_S))
        toggles.append((before, after, switch(run, after)))
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
            raise BenchError(f"torchrun made no step: {done.stderr.strip().splitlines()[-1:]}")
        since_s = float(json.loads(lines[0])["end_unix_s"]) - time.time()  # negative: it went on, to its end
        return time.perf_counter() + since_s - begun_s


# -- soak ------------------------------------------------------------------------------------------------------------


def soak(model: str, ranks: int, toggles: int, backends: Sequence[str], say: Say) -> dict[str, Any]:
    """How much the memory of kernel and ranks grows over many switches, for each backend. Raises BenchError."""
    found: dict[str, Mapping[str, Mapping[str, Any]]] = {}
    base = Spec(world_size=ranks).replace(model=model, micro_batch=1, seq_len=32)
    for backend in backends:
        with session.lab(terminal(), ranks, None, history=False) as lab:  # new ranks for each backend
            pair = [base.replace(backend=backend, **c) for c in (REPLICATED if backend == "ddp" else SHARDED)]
            found[backend] = _grown(lab, pair, toggles)
        for name, one in found[backend].items():
            first, last = (one[key] / 2**20 for key in ("from_bytes", "to_bytes"))
            at = f"from toggle {WARM_UP} ({first:.0f} MiB) to {toggles:,} ({last:.0f} MiB)"
            say(f"{backend}, {name}: {one['growth']:+.2%} {at}")
    return {"growth": found, "environment": {"model": model, "ranks": ranks, "toggles": toggles}}


def _grown(lab: Lab, pair: Sequence[Spec], toggles: int) -> Mapping[str, Any]:
    """Growth from the hundredth to the last switch: {"kernel" or "rank N": {"from_bytes", "to_bytes", "growth"}}."""
    run = lab.run(pair[0])
    await_step(run, pair[0].id)
    for spec in pair[::-1]:
        switch(run, spec)
        # A ledger step comes three steps after each switch: later switches come too soon for one, or just not.
        await_ledger(run, spec.id)
    pids = {"kernel": psutil.Process().pid, **{f"rank {s.rank}": s.pid for s in lab.rank_status()}}
    readings: dict[str, list[int]] = {name: [] for name in pids}
    marks = (range(WARM_UP - WINDOW // 2, WARM_UP + WINDOW // 2), range(toggles - WINDOW, toggles))
    for i in range(toggles):
        if i % RUN_TOGGLES == RUN_TOGGLES - 1:
            run = lab.run(pair[i % 2], fresh=False)
            await_step(run, pair[i % 2].id)
        switch(run, pair[(i + 1) % 2])
        if any(i in mark for mark in marks):
            gc.collect()
            for name, pid in pids.items():
                readings[name].append(psutil.Process(pid).memory_info().rss)
    return {name: growth(values[:WINDOW], values[WINDOW:]) for name, values in readings.items()}


def growth(before: Sequence[int], after: Sequence[int]) -> dict[str, Any]:
    """From the median of some readings to that of others; the memory of a process at work goes up and down."""
    first, last = (sorted(values)[len(values) // 2] for values in (before, after))
    return {"from_bytes": first, "to_bytes": last, "growth": last / first - 1}


# -- plan ------------------------------------------------------------------------------------------------------------


def plan(bases: Sequence[Spec], rounds: int, say: Say) -> dict[str, Any]:
    """Calibrate on this machine, then predicted step times beside measured ones. Raises SpecError, BenchError."""
    from fsdp_lab.bench.planned import errors, lines, predictions, strategies

    specs = [spec for base in bases for spec in strategies(base)]
    ranks, console, found = bases[0].world_size, terminal(), []
    say(f"{len(specs)} Specs on {ranks} ranks, {rounds} rounds")
    with session.lab(console, ranks, None, history=False) as lab:
        for i in range(rounds):
            with console.status(f"round {i + 1} of {rounds}"):
                try:
                    found.append(lab.calibrate(beside=specs))
                except ClusterError as e:
                    raise BenchError(str(e)) from e
    rows = predictions(specs, found)
    for line in lines(rows):
        say(line)
    return {
        "rows": [row.to_dict() for row in rows],
        "errors": errors(rows),
        "environment": {},
        "rates": asdict(found[-1].rates),
    }
