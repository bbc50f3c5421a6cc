"""The benches that run on a lab: live, toggle, soak, plan and memory.

Note: what is compared in `toggle`. A switch is timed from `run.apply` to the first step that every rank has reported
under the new Spec, with parameters and optimizer state carried over; this includes the end of the chunk of steps in
progress. It comes at a random moment within the seconds after the first step of the previous one, as a user's does. The
relaunch is torchrun with the same Spec, from its start to the first step that it prints: new processes, imports, build,
rendezvous. It loads no state, so it is faster than the same change by hand, which would save and load a checkpoint.
Relaunches are spread over the switches, and the run is paused during them. The tour visits every ordered pair of
strategies.

Note: what is compared in `plan`. Every round calibrates anew; the steps of all Specs are timed in turns with the
calibration runs, so that the machine's drift affects both alike. No Spec that is compared is calibrated on.

Note: a run keeps its events as long as it is referenced, which is no leak. So in `soak`, every `RUN_TOGGLES` switches
another run continues with the same parameters, and the former is dropped.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

import psutil

from fsdp_lab.base.errors import FieldError
from fsdp_lab.base.formatting import Table
from fsdp_lab.base.process import HOST_MEMORY
from fsdp_lab.bench.plan import PRECISIONS, SHARDINGS as PEER_SHARDINGS, BenchError
from fsdp_lab.bench.results import Report, format_spread, ratios, spread
from fsdp_lab.cli.bench import say
from fsdp_lab.cli.console import Refused, at_least, open_lab, terminal
from fsdp_lab.cluster import ClusterError
from fsdp_lab.lab import Lab
from fsdp_lab.models.presets import PRESETS
from fsdp_lab.planner.calibration import Calibration
from fsdp_lab.planner.memory import memory as planned_memory, peak_in_theory
from fsdp_lab.planner.plan import plan as predict
from fsdp_lab.planner.shapes import shape_for
from fsdp_lab.runs import Run
from fsdp_lab.spec.spec import BACKENDS, SHARDINGS, Spec
from tests.bench.ranks import numbers

STEP_LIMIT_S = 120.0  # limit for a step
RELAUNCH_LIMIT_S = 300.0  # limit for torchrun
WITHIN_S = 3.0  # the longest pause between two switches
WARM_UP, WINDOW = 100, 10  # of `soak`: switches before the first reading; readings of which the median counts
RUN_TOGGLES = 50
AIMED_ERROR = 0.15  # of a predicted step time, relative to the measured one

# For `live`: all neighbours differ in the backend or another field, and the last differs from the first.
LIVE_CHANGES: Sequence[Mapping[str, str]] = (
    {"sharding": "shard_grad_op"},
    {"precision": "bf16"},
    {"offload": "all"},
    {"backend": "ddp", "sharding": "no_shard"},
    {"backend": "fsdp1"},
    {"wrap": "whole"},
    {},
)
# For `toggle`, which visits all ordered pairs of these.
STRATEGIES: Sequence[tuple[str, str]] = (
    *(("lab", sharding) for sharding in ("full_shard", "shard_grad_op", "zero1", "no_shard")),
    *(("fsdp2", sharding) for sharding in ("full_shard", "shard_grad_op")),
    *(("fsdp1", sharding) for sharding in ("full_shard", "shard_grad_op", "no_shard")),
    ("ddp", "no_shard"),
)
# For `soak`: what is switched between; DDP has one sharding.
SHARDED: Sequence[Mapping[str, str]] = ({"sharding": "full_shard"}, {"sharding": "shard_grad_op"})
REPLICATED: Sequence[Mapping[str, str]] = tuple({"sharding": "no_shard", "precision": p} for p in ("fp32", "bf16"))


def fresh_lab(ranks: int, devices: tuple[str, ...] | None = None) -> AbstractContextManager[Lab]:
    """A lab with new ranks, whose runs are not stored."""
    return open_lab(terminal(), ranks, devices, history=False)


# -- live ------------------------------------------------------------------------------------------------------------


def live(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds until the first step, of a switch, and of a stop, as a user sees them. Raises BenchError."""
    spec = Spec(world_size=args.ranks).replace(model=args.model, micro_batch=1, seq_len=64)
    begun_s = time.perf_counter()
    with fresh_lab(args.ranks) as lab:
        ready_s = time.perf_counter() - begun_s
        run = lab.run(spec)
        await_step(run, spec.id)
        waits: dict[str, list[float]] = {"start to ranks ready": [ready_s]}
        waits["start to first step"] = [time.perf_counter() - begun_s]
        changes = [*LIVE_CHANGES] * args.rounds
        waits["switch to first step"] = [switch(run, spec.replace(**change)) for change in changes]
        waits["stop"] = list(_stops(lab, spec))
    for what, seconds in waits.items():
        more = f", {min(seconds):.2f} to {max(seconds):.2f} s, {len(seconds)} times"
        say(f"{what}: {seconds[0]:.2f} s" if len(seconds) == 1 else f"{what}: median {median(seconds):.2f} s{more}")
    return {"seconds": waits, "environment": {"model": args.model, "ranks": args.ranks}}


def _stops(lab: Lab, spec: Spec) -> Iterator[float]:
    """Seconds from a `stop` in the middle of a step until the ranks are free, for three backends."""
    for changes in ({}, {"backend": "ddp", "sharding": "no_shard"}, {"backend": "fsdp1"}):
        wanted = spec.replace(**changes)
        run = lab.run(wanted)
        await_step(run, wanted.id)
        begun_s = time.perf_counter()
        run.stop()
        run.wait(STEP_LIMIT_S)
        yield time.perf_counter() - begun_s


def switch(run: Run, spec: Spec) -> float:
    """Seconds from `apply` to the first step that every rank has done with the Spec."""
    begun_s = time.perf_counter()
    run.apply(spec)
    await_step(run, spec.id)
    return time.perf_counter() - begun_s


def await_step(run: Run, spec_id: str) -> None:
    """Waits until every rank has reported a step under the Spec. Raises BenchError at the end of the run or the limit."""

    def reported() -> bool:
        latest = run.events.latest().values()
        return len(latest) == run.spec.world_size and all(e.spec_id == spec_id for e in latest)

    _await(run, "step", reported)


def await_ledger(run: Run, spec_id: str) -> None:
    """Waits for a ledger step of any rank."""
    _await(run, "ledger step", lambda: any(e.ledger and e.spec_id == spec_id for e in run.events.since()[0]))


def _await(run: Run, what: str, reached: Callable[[], bool]) -> None:
    limit_s = time.perf_counter() + STEP_LIMIT_S
    while time.perf_counter() < limit_s and not run.done:
        if reached():
            return
        time.sleep(0.005)
    raise BenchError(f"no {what} within {STEP_LIMIT_S:.0f} s: {run.reason or run.state.value}")


# -- toggle ----------------------------------------------------------------------------------------------------------

Toggle = tuple[Spec, Spec, float]  # from, to, seconds


def toggle(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds from a change of strategy to its first step, on resident ranks and by torchrun. Raises BenchError."""
    at_least(args, "pairs", 2)
    at_least(args, "relaunches", 1)
    spec = Spec(world_size=args.ranks).replace(model=args.model, micro_batch=1, seq_len=64)
    stops = [spec.replace(backend=b, sharding=s) for b, s in route(args.pairs)]
    say(f"{len(stops) - 1} toggles of {args.model} on {args.ranks} ranks, {args.relaunches} relaunches")
    with fresh_lab(args.ranks) as lab:
        run = lab.run(stops[0])
        await_step(run, stops[0].id)
        toggles, relaunched = _timed(run, stops, args.relaunches)
    seconds, relaunch_s = [s for _, _, s in toggles], median(relaunched)
    by_pair: dict[tuple[str, str], list[float]] = defaultdict(list)
    by_strategy: dict[str, list[float]] = defaultdict(list)
    for before, after, s in toggles:
        by_pair[before.id, after.id].append(s)
        by_strategy[f"{after.strategy.backend} {after.strategy.sharding}"].append(s)
    report = Report(say, {"model": args.model, "ranks": args.ranks})
    report.add("ratios", "resident/relaunch", spread([s / relaunch_s for s in seconds]))
    if twice := [pair[1] / pair[0] for pair in by_pair.values() if len(pair) > 1]:
        report.add("control", "resident/resident", spread(twice), note="; the same pair again")
    say(f"toggle to first step: {format_spread(spread(seconds), 's')}, longest {max(seconds):.3f}")
    say(f"torchrun to first step: {format_spread(spread(relaunched), 's')}")
    for strategy, of in sorted(by_strategy.items()):
        say(f"  to {strategy}: {format_spread(spread(of), 's')}")
    times = {"toggle": asdict(spread(seconds)), "relaunch": asdict(spread(relaunched))}
    return report.figures | {"seconds": times, "worst": max(seconds)}


def route(pairs: int | None) -> list[tuple[str, str]]:
    """The strategies in the order of the run. None: with every ordered pair as neighbours twice; or `pairs` random ones."""
    if pairs is None:
        return [STRATEGIES[i] for i in (*tour(len(STRATEGIES)), *tour(len(STRATEGIES))[1:])]
    chance, visited = random.Random(0), [STRATEGIES[0]]
    while len(visited) <= pairs:
        visited.append(chance.choice([strategy for strategy in STRATEGIES if strategy != visited[-1]]))
    return visited


def tour(n: int) -> list[int]:
    """An Eulerian circuit over n places (Hierholzer): each ordered pair once; n (n - 1) + 1 places long."""
    left = {i: [j for j in range(n) if j != i] for i in range(n)}
    open_, closed = [0], []
    while open_:
        if left[open_[-1]]:
            open_.append(left[open_[-1]].pop())
        else:
            closed.append(open_.pop())
    return closed[::-1]


def _timed(run: Run, stops: Sequence[Spec], relaunches: int) -> tuple[list[Toggle], list[float]]:
    """The switches from each Spec to the next, and the seconds of the relaunches, which are spread over them."""
    toggles: list[Toggle] = []
    relaunched: list[float] = []
    chance = random.Random(0)
    for i, (before, after) in enumerate(pairwise(stops)):
        if i * relaunches // (len(stops) - 1) >= len(relaunched):
            run.pause()
            relaunched.append(relaunch(before))
            run.resume()
        time.sleep(chance.uniform(0, WITHIN_S))
        toggles.append((before, after, switch(run, after)))
    return toggles, relaunched


def relaunch(spec: Spec) -> float:
    """Seconds from the start of torchrun to its first step."""
    with tempfile.TemporaryDirectory(prefix="fsdp_lab_") as folder:
        file = Path(folder) / "spec.json"
        file.write_text(spec.to_json())
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={spec.world_size}"]
        command = [sys.executable, *torchrun, "-m", "fsdp_lab.rank", str(file), "--steps", "1"]
        begun_s, env = time.perf_counter(), {**HOST_MEMORY, **os.environ}
        done = subprocess.run(command, capture_output=True, text=True, timeout=RELAUNCH_LIMIT_S, check=False, env=env)
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        if not lines:
            raise BenchError(f"torchrun made no step: {done.stderr.strip().splitlines()[-1:]}")
        since_s = float(json.loads(lines[0])["end_unix_s"]) - time.time()  # negative: torchrun continued to its end
        return time.perf_counter() + since_s - begun_s


# -- soak ------------------------------------------------------------------------------------------------------------


def soak(args: argparse.Namespace) -> dict[str, Any]:
    """Growth of the resident memory of kernel and ranks over many switches, for each backend. Raises BenchError."""
    at_least(args, "toggles", WARM_UP + WINDOW, f": the first {WARM_UP} are warm-up")
    backends = [name.strip() for name in args.backend.split(",")]
    if unknown := next((name for name in backends if name not in BACKENDS), None):
        raise Refused(f"--backend {unknown!r} is refused; give some of {', '.join(BACKENDS)}")
    grown: dict[str, Mapping[str, Mapping[str, Any]]] = {}
    base = Spec(world_size=args.ranks).replace(model=args.model, micro_batch=1, seq_len=32)
    for backend in backends:
        with fresh_lab(args.ranks) as lab:  # new ranks for each backend
            pair = [base.replace(backend=backend, **c) for c in (REPLICATED if backend == "ddp" else SHARDED)]
            grown[backend] = _grown(lab, pair, args.toggles)
        for name, one in grown[backend].items():
            first, last = (one[key] / 2**20 for key in ("from_bytes", "to_bytes"))
            at = f"from toggle {WARM_UP} ({first:.0f} MiB) to {args.toggles:,} ({last:.0f} MiB)"
            say(f"{backend}, {name}: {one['growth']:+.2%} {at}")
    environment = {"model": args.model, "ranks": args.ranks, "toggles": args.toggles}
    return {"growth": grown, "environment": environment}


def _grown(lab: Lab, pair: Sequence[Spec], toggles: int) -> Mapping[str, Any]:
    """Growth from the hundredth to the last switch: {"kernel" or "rank N": {"from_bytes", "to_bytes", "growth"}}."""
    run = lab.run(pair[0])
    await_step(run, pair[0].id)
    for spec in pair[::-1]:
        switch(run, spec)
        # Wait for the ledger step, three steps after each switch: whether later switches have one depends on timing.
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
    """Relative growth between the medians of two lists of readings, which fluctuate."""
    first, last = (sorted(values)[len(values) // 2] for values in (before, after))
    return {"from_bytes": first, "to_bytes": last, "growth": last / first - 1}


# -- plan ------------------------------------------------------------------------------------------------------------


def plan(args: argparse.Namespace) -> dict[str, Any]:
    """Calibrates on this machine, then compares predicted step times with measured ones. Raises SpecError, BenchError."""
    at_least(args, "rounds", 1)
    models = args.model.split(",")
    shapes = {model: shape_for(model) for model in models}  # an unknown one is refused before ranks start
    base = Spec(world_size=args.ranks).replace(seq_len=args.seq_len, micro_batch=args.micro_batch)
    bases = [base.replace(model=m, precision=p) for m in models for p in args.precision.split(",")]
    specs = [spec for base in bases for spec in strategies(base)]
    console, rounds = terminal(), list[Calibration]()
    say(f"{len(specs)} Specs on {args.ranks} ranks, {args.rounds} rounds")
    with fresh_lab(args.ranks) as lab:
        for i in range(args.rounds):
            with console.status(f"round {i + 1} of {args.rounds}"):
                try:
                    rounds.append(lab.calibrate(beside=specs))
                except ClusterError as e:
                    raise BenchError(str(e)) from e
    rows, cells, errors = [], [], []
    for i, spec in enumerate(specs):
        s, shape = spec.strategy, shapes[str(spec.workload.model)]
        predicted = [predict(spec, shape, here.machine, rates=here.rates).step_time_s for here in rounds]
        measured = [median(here.beside_s[i]) for here in rounds]
        ratio = spread(ratios(predicted, measured))
        errors.append(abs(ratio.median - 1))
        times_s = {"predicted_s": predicted, "measured_s": measured, "predicted/measured": asdict(ratio)}
        rows.append({"spec": spec.to_dict(), **times_s})
        times = [f"{1e3 * sorted(values)[len(values) // 2]:.1f}" for values in (measured, predicted)]
        shares = (f"{value:.3f}" for value in (ratio.median, ratio.p10, ratio.p90))
        cells.append((str(spec.workload.model), s.backend, s.sharding, str(s.precision), *times, *shares))
    columns = ("model", "backend", "sharding", "precision", "measured ms", "predicted ms", "ratio", "p10", "p90")
    say(repr(Table(columns=columns, rows=tuple(cells), left=frozenset(columns[:4]))))
    within = sum(error <= AIMED_ERROR for error in errors) / len(errors)
    summary = {"mean": fmean(errors), "worst": max(errors), "within": within}
    of = f"{within:.0%} of {len(rows)} within {AIMED_ERROR:.0%}"
    say(f"errors of the medians: mean {summary['mean']:.1%}, worst {summary['worst']:.1%}, {of}")
    return {"rows": rows, "errors": summary, "environment": {}, "rates": asdict(rounds[-1].rates)}


def strategies(base: Spec) -> Iterator[Spec]:
    """Every backend with every sharding that it supports on these ranks; hybrids where a shard group is not all ranks."""
    for backend in BACKENDS:
        for sharding in SHARDINGS:
            try:
                spec = base.replace(backend=backend, sharding=sharding)
            except FieldError:
                continue
            if not spec.strategy.is_hybrid or 1 < spec.shard_factor < spec.world_size:
                yield spec


# -- memory ----------------------------------------------------------------------------------------------------------


def memory(args: argparse.Namespace) -> dict[str, Any]:
    """Peak bytes of a step on CPUs by the ledger, of the rank that holds most: beside FSDP2, the planner's, and the
    closed form in `fsdp_lab.engine.memory`. Raises SpecError, BenchError."""
    models = args.model.split(",")
    shapes = {model: shape_for(model) for model in models}  # an unknown one is refused before ranks start
    rows, cells = [], []
    for world_size in numbers(args.ranks, 2):
        with fresh_lab(world_size, ("cpu",) * world_size) as lab:
            for spec in compared(models, world_size):
                shape, name = shapes[str(spec.workload.model)], str(spec.workload.model)
                lab_bytes, fsdp2_bytes = peak_bytes(lab, spec), peak_bytes(lab, spec.replace(backend="fsdp2"))
                planned, theory = planned_memory(spec, shape, device="cpu").peak_bytes, peak_in_theory(spec, shape)
                peaks = {"lab": lab_bytes, "fsdp2": fsdp2_bytes, "planned": planned, "theory": round(theory)}
                others = {"fsdp2": fsdp2_bytes, "plan": planned, "theory": round(theory)}
                over = {f"lab/{other}": lab_bytes / nbytes for other, nbytes in others.items()}
                rows.append({"spec": spec.to_dict(), **{f"{of}_bytes": n for of, n in peaks.items()}, **over})
                mib = (f"{n / 2**20:.2f}" for n in (lab_bytes, fsdp2_bytes, planned))
                s = spec.strategy
                shares = (f"{ratio:.4f}" for ratio in over.values())
                cells.append((name, str(s.precision), s.sharding, str(world_size), *mib, *shares))
    columns = ("model", "precision", "sharding", "ranks", "lab MiB", "fsdp2 MiB", "plan MiB", *over)
    say(repr(Table(columns=columns, rows=tuple(cells), left=frozenset(columns[:3]))))
    within = f", {sum(row['lab/fsdp2'] <= 1.0 for row in rows)} of {len(rows)} not above 1"
    for name, more in (("lab/fsdp2", within), ("lab/theory", "")):
        worst = max(rows, key=lambda row: row[name])
        say(f"{name}: at most {worst[name]:.4f} ({worst['spec']['workload']['model']}){more}")
    return {"rows": rows, "environment": {}}


def compared(models: Sequence[str], ranks: int) -> Iterator[Spec]:
    """Of the lab's engine: every precision and sharding that FSDP2 has too."""
    for model in models:
        data = {"data": "images"} if model in PRESETS and PRESETS[model].kind == "image" else {}
        base = Spec(world_size=ranks, devices=("cpu",) * ranks).replace(model=model, backend="lab", **data)
        for precision in PRECISIONS:
            for sharding in PEER_SHARDINGS:
                yield base.replace(precision=precision, sharding=sharding)


def peak_bytes(lab: Lab, spec: Spec) -> int:
    """Of the rank that holds most in its ledger step."""
    run = lab.run(spec)

    def peaks() -> dict[int, int]:
        return {e.rank: e.memory.at_peak.total_bytes for e in run.events.since()[0] if e.ledger}

    _await(run, "ledger step", lambda: len(peaks()) == spec.world_size)
    run.stop()
    run.wait(STEP_LIMIT_S)
    return max(peaks().values())
