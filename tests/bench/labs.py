"""The benches that run on a lab: live, soak, plan and memory.

Note: what is compared in `plan`. Every round calibrates anew; the steps of all Specs are timed in turns with the
calibration runs, so that the machine's drift affects both alike. No Spec that is compared is calibrated on.

Note: a run keeps its events as long as it is referenced, which is no leak. So in `soak`, every `RUN_TOGGLES` switches
another run continues with the same parameters, and the former is dropped.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from statistics import fmean, median
from typing import Any

import psutil

from fsdp_lab.base.errors import FieldError
from fsdp_lab.base.formatting import Table
from fsdp_lab.bench.plan import PRECISIONS, SHARDINGS as PEER_SHARDINGS, BenchError
from fsdp_lab.bench.results import ratios, spread
from fsdp_lab.cli.bench import say
from fsdp_lab.cli.console import Refused, at_least, open_lab, terminal
from fsdp_lab.cluster import ClusterError
from fsdp_lab.lab import Lab
from fsdp_lab.models.presets import PRESETS
from fsdp_lab.planner.calibration import Calibration
from fsdp_lab.planner.memory import memory as planned_memory
from fsdp_lab.planner.questions import planned_here
from fsdp_lab.planner.shapes import shape_for
from fsdp_lab.runs import Run
from fsdp_lab.spec.spec import BACKENDS, SHARDINGS, Spec
from tests.planner.theory import peak_in_theory

STEP_LIMIT_S = 120.0  # limit for a step
WARM_UP, WINDOW = 100, 10  # of `soak`: switches before the first reading; readings of which the median counts
RUN_TOGGLES = 50
AIMED_ERROR = 0.15  # of a predicted step time, relative to the measured one

# For `live`: all neighbours differ in the backend or another field, and the last differs from the first.
LIVE_CHANGES: Sequence[Mapping[str, str]] = (
    {"sharding": "shard_grad_op"}, {"precision": "bf16"}, {"offload": "all"},
    {"backend": "ddp", "sharding": "no_shard"}, {"backend": "fsdp1"}, {"wrap": "whole"}, {},
)  # fmt: skip
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


# -- soak ------------------------------------------------------------------------------------------------------------


def soak(args: argparse.Namespace) -> dict[str, Any]:
    """Growth of the resident memory of kernel and ranks over many switches, for each backend. Raises BenchError."""
    at_least(args, "toggles", WARM_UP + WINDOW)
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
    for model in models:
        shape_for(model)  # an unknown one is refused before ranks start
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
        s = spec.strategy
        predicted = [planned_here(spec, here).step_time_s for here in rounds]
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
    closed form of ZeRO and FSDP. Raises SpecError, BenchError."""
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


def numbers(text: str, least: int) -> list[int]:
    """Of a comma-separated list for --ranks. Raises Refused."""
    given = [int(n) if n.strip().isdigit() else 0 for n in text.split(",")]
    if min(given) < least:
        raise Refused(f"--ranks {text} is refused; give numbers of {least} or more, as 2,4")
    return given


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
