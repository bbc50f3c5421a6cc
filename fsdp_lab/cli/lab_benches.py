"""The benches that run on a lab: live, toggle, soak, plan and memory. They report as those in bench/benches.py do.

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

import gc
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

import psutil

from fsdp_lab.bench.benches import Report, Say, format_spread, ratios, spread
from fsdp_lab.bench.plan import PRECISIONS, WARM_UP, WINDOW, BenchError
from fsdp_lab.bench.plan import SHARDINGS as PEER_SHARDINGS
from fsdp_lab.cli.console import open_lab, terminal
from fsdp_lab.cluster import ClusterError
from fsdp_lab.core.errors import FieldError
from fsdp_lab.core.formatting import Spread, Table
from fsdp_lab.core.process import HOST_MEMORY
from fsdp_lab.core.spec import BACKENDS, SHARDINGS, Spec
from fsdp_lab.lab import Lab
from fsdp_lab.models.presets import PRESETS
from fsdp_lab.planner.calibration import Calibration
from fsdp_lab.planner.memory import memory as planned_memory
from fsdp_lab.planner.memory import peak_in_theory
from fsdp_lab.planner.plan import plan as predict
from fsdp_lab.planner.shapes import shape_for
from fsdp_lab.runs import Run

STEP_LIMIT_S = 120.0  # limit for a step
RELAUNCH_LIMIT_S = 300.0  # limit for torchrun
WITHIN_S = 3.0  # the longest pause between two switches
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


def fresh_lab(ranks: int) -> AbstractContextManager[Lab]:
    """A lab with new ranks, whose runs are not stored."""
    return open_lab(terminal(), ranks, None, history=False)


# -- live ------------------------------------------------------------------------------------------------------------


def live(model: str, ranks: int, rounds: int, say: Say) -> dict[str, Any]:
    """Seconds until the first step, of a switch, and of a stop, as a user sees them. Raises BenchError."""
    spec = Spec(world_size=ranks).replace(model=model, micro_batch=1, seq_len=64)
    begun_s = time.perf_counter()
    with fresh_lab(ranks) as lab:
        ready_s = time.perf_counter() - begun_s
        started = lab.run(spec)
        await_step(started, spec.id)
        waits: dict[str, list[float]] = {"start to ranks ready": [ready_s]}
        waits["start to first step"] = [time.perf_counter() - begun_s]
        waits["switch to first step"] = [
            switch(started, spec.replace(**changes)) for changes in [*LIVE_CHANGES] * rounds
        ]
        waits["stop"] = list(_stops(lab, spec))
    for what, seconds in waits.items():
        more = f", {min(seconds):.2f} to {max(seconds):.2f} s, {len(seconds)} times"
        say(f"{what}: {seconds[0]:.2f} s" if len(seconds) == 1 else f"{what}: median {median(seconds):.2f} s{more}")
    return {"seconds": waits, "environment": {"model": model, "ranks": ranks}}


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


def toggle(model: str, ranks: int, pairs: int | None, relaunches: int, say: Say) -> dict[str, Any]:
    """Seconds from a change of strategy to its first step, on resident ranks and by torchrun. Raises BenchError."""
    spec = Spec(world_size=ranks).replace(model=model, micro_batch=1, seq_len=64)
    stops = [spec.replace(backend=b, sharding=s) for b, s in route(pairs)]
    say(f"{len(stops) - 1} toggles of {model} on {ranks} ranks, {relaunches} relaunches")
    with fresh_lab(ranks) as lab:
        run = lab.run(stops[0])
        await_step(run, stops[0].id)
        toggles, relaunched = _timed(run, stops, relaunches)
    seconds, relaunch_s = [s for _, _, s in toggles], median(relaunched)
    by_pair: dict[tuple[str, str], list[float]] = {}
    by_strategy: dict[str, list[float]] = {}
    for before, after, s in toggles:
        by_pair.setdefault((before.id, after.id), []).append(s)
        by_strategy.setdefault(f"{after.strategy.backend} {after.strategy.sharding}", []).append(s)
    report = Report(say, {"model": model, "ranks": ranks})
    report.ratio("resident/relaunch", spread([s / relaunch_s for s in seconds]))
    if twice := [pair[1] / pair[0] for pair in by_pair.values() if len(pair) > 1]:
        report.control("resident/resident", spread(twice), note="; the same pair again")
    say(f"toggle to first step: {format_spread(spread(seconds), 's')}, longest {max(seconds):.3f}")
    say(f"torchrun to first step: {format_spread(spread(relaunched), 's')}")
    for strategy, of in sorted(by_strategy.items()):
        say(f"  to {strategy}: {format_spread(spread(of), 's')}")
    return report.figures | {
        "seconds": {"toggle": asdict(spread(seconds)), "relaunch": asdict(spread(relaunched))},
        "worst": max(seconds),
    }


def route(pairs: int | None) -> list[tuple[str, str]]:
    """The strategies in the order of the run. None: with every ordered pair as neighbours twice; or `pairs` random ones."""
    if pairs is None:
        return [STRATEGIES[i] for i in (*tour(len(STRATEGIES)), *tour(len(STRATEGIES))[1:])]
    chance, found = random.Random(0), [STRATEGIES[0]]
    while len(found) <= pairs:
        found.append(chance.choice([strategy for strategy in STRATEGIES if strategy != found[-1]]))
    return found


def tour(n: int) -> list[int]:
    """An Eulerian circuit over n places (Hierholzer): each ordered pair once; n (n - 1) + 1 places long."""
    left = {i: [j for j in range(n) if j != i] for i in range(n)}
    open_, found = [0], []
    while open_:
        if left[open_[-1]]:
            open_.append(left[open_[-1]].pop())
        else:
            found.append(open_.pop())
    return found[::-1]


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
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={spec.world_size}",
                   "-m", "fsdp_lab.rank", str(file), "--steps", "1"]  # fmt: skip
        begun_s = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, timeout=RELAUNCH_LIMIT_S, check=False,
                              env={**HOST_MEMORY, **os.environ})  # fmt: skip
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        if not lines:
            raise BenchError(f"torchrun made no step: {done.stderr.strip().splitlines()[-1:]}")
        since_s = float(json.loads(lines[0])["end_unix_s"]) - time.time()  # negative: torchrun continued to its end
        return time.perf_counter() + since_s - begun_s


# -- soak ------------------------------------------------------------------------------------------------------------


def soak(model: str, ranks: int, toggles: int, backends: Sequence[str], say: Say) -> dict[str, Any]:
    """Growth of the resident memory of kernel and ranks over many switches, for each backend. Raises BenchError."""
    found: dict[str, Mapping[str, Mapping[str, Any]]] = {}
    base = Spec(world_size=ranks).replace(model=model, micro_batch=1, seq_len=32)
    for backend in backends:
        with fresh_lab(ranks) as lab:  # new ranks for each backend
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


def plan(bases: Sequence[Spec], rounds: int, say: Say) -> dict[str, Any]:
    """Calibrates on this machine, then compares predicted step times with measured ones. Raises SpecError, BenchError."""
    specs = [spec for base in bases for spec in strategies(base)]
    ranks, console, found = bases[0].world_size, terminal(), list[Calibration]()
    say(f"{len(specs)} Specs on {ranks} ranks, {rounds} rounds")
    with open_lab(console, ranks, None, history=False) as lab:
        for i in range(rounds):
            with console.status(f"round {i + 1} of {rounds}"):
                try:
                    found.append(lab.calibrate(beside=specs))
                except ClusterError as e:
                    raise BenchError(str(e)) from e
    rows = predictions(specs, found)
    cells = []
    for row in rows:
        s, r = row.spec.strategy, row.ratio
        times = [f"{1e3 * sorted(values)[len(values) // 2]:.1f}" for values in (row.measured_s, row.predicted_s)]
        cells.append((str(row.spec.workload.model), s.backend, s.sharding, str(s.precision), *times,
                      *(f"{value:.3f}" for value in (r.median, r.p10, r.p90))))  # fmt: skip
    columns = ("model", "backend", "sharding", "precision", "measured ms", "predicted ms", "ratio", "p10", "p90")
    say(repr(Table(columns=columns, rows=tuple(cells), left=frozenset(columns[:4]))))
    errors = [abs(row.ratio.median - 1) for row in rows]
    within = sum(error <= AIMED_ERROR for error in errors) / len(errors)
    summary = {"mean": fmean(errors), "worst": max(errors), "within": within}
    say(f"errors of the medians: mean {summary['mean']:.1%}, worst {summary['worst']:.1%}, "
        f"{within:.0%} of {len(rows)} within {AIMED_ERROR:.0%}")  # fmt: skip
    return {
        "rows": [row.to_dict() for row in rows],
        "errors": summary,
        "environment": {},
        "rates": asdict(found[-1].rates),
    }


def strategies(base: Spec) -> Iterator[Spec]:
    """Every backend with every sharding that it supports on these ranks; hybrids where a shard group is not all ranks."""
    for backend in BACKENDS:
        for sharding in SHARDINGS:
            try:
                found = base.replace(backend=backend, sharding=sharding)
            except FieldError:
                continue
            if not found.strategy.is_hybrid or 1 < found.shard_factor < found.world_size:
                yield found


@dataclass(frozen=True, kw_only=True)
class PredictedStepTime:
    """One Spec in every round: a round calibrates anew and times its steps in turns with the calibration runs."""

    spec: Spec
    predicted_s: Sequence[float]
    measured_s: Sequence[float]  # the median of the round's steps

    @property
    def ratio(self) -> Spread:
        """Predicted over measured, one value per round."""
        return spread(ratios(self.predicted_s, self.measured_s))

    def to_dict(self) -> dict[str, Any]:
        return {"spec": self.spec.to_dict(), "predicted_s": list(self.predicted_s), "measured_s": list(self.measured_s),
                "predicted/measured": asdict(self.ratio)}  # fmt: skip


def predictions(specs: Sequence[Spec], rounds: Sequence[Calibration]) -> list[PredictedStepTime]:
    """`rounds`: calibrations during which these Specs were timed."""
    found = []
    for i, spec in enumerate(specs):
        shape = shape_for(spec.workload.model, spec.strategy.wrap)
        predicted = [predict(spec, shape, here.machine, rates=here.rates).step_time_s for here in rounds]
        measured = [median(here.beside_s[i]) for here in rounds]
        found.append(PredictedStepTime(spec=spec, predicted_s=predicted, measured_s=measured))
    return found


# -- memory ----------------------------------------------------------------------------------------------------------


def memory(models: Sequence[str], ranks: Sequence[int], say: Say) -> dict[str, Any]:
    """Peak bytes of a step on CPUs by the ledger, of the rank that holds most: beside FSDP2, the planner's, and the
    closed form in `fsdp_lab.engine.memory`. Raises SpecError, BenchError."""
    rows = []
    for world_size in ranks:
        with open_lab(terminal(), world_size, ("cpu",) * world_size, history=False) as lab:
            for spec in compared(models, world_size):
                peer = spec.replace(backend="fsdp2")
                shape = shape_for(spec.workload.model, spec.strategy.wrap)
                plan, theory = planned_memory(spec, shape, device="cpu").peak_bytes, round(peak_in_theory(spec, shape))
                rows.append(MemoryPeaks(spec, peak_bytes(lab, spec), peak_bytes(lab, peer), plan, theory))
    cells = []
    for row in rows:
        s, mib = row.spec.strategy, (f"{n / 2**20:.2f}" for n in (row.lab_bytes, row.fsdp2_bytes, row.planned_bytes))
        cells.append((str(row.spec.workload.model), str(s.precision), s.sharding, str(row.spec.world_size), *mib,
                      f"{row.ratio:.4f}", f"{row.beside_plan:.4f}", f"{row.beside_theory:.4f}"))  # fmt: skip
    columns = ("model", "precision", "sharding", "ranks", "lab MiB", "fsdp2 MiB", "plan MiB", "lab/fsdp2", "lab/plan",
               "lab/theory")  # fmt: skip
    say(repr(Table(columns=columns, rows=tuple(cells), left=frozenset(columns[:3]))))
    worst = max(rows, key=lambda row: row.ratio)
    within = sum(row.ratio <= 1.0 for row in rows)
    say(f"lab/fsdp2: at most {worst.ratio:.4f} ({worst.spec.workload.model}), {within} of {len(rows)} not above 1")
    worst = max(rows, key=lambda row: row.beside_theory)
    say(f"lab/theory: at most {worst.beside_theory:.4f} ({worst.spec.workload.model})")
    return {"rows": [row.to_dict() for row in rows], "environment": {}}


@dataclass(frozen=True)
class MemoryPeaks:
    """One Spec of the lab's engine, and the same under FSDP2."""

    spec: Spec
    lab_bytes: int
    fsdp2_bytes: int
    planned_bytes: int
    theory_bytes: int

    @property
    def ratio(self) -> float:
        return self.lab_bytes / self.fsdp2_bytes

    @property
    def beside_plan(self) -> float:
        return self.lab_bytes / self.planned_bytes

    @property
    def beside_theory(self) -> float:
        return self.lab_bytes / self.theory_bytes

    def to_dict(self) -> dict[str, Any]:
        measured = {"lab_bytes": self.lab_bytes, "fsdp2_bytes": self.fsdp2_bytes, "planned_bytes": self.planned_bytes,
                    "theory_bytes": self.theory_bytes}  # fmt: skip
        ratios = {"lab/fsdp2": self.ratio, "lab/plan": self.beside_plan, "lab/theory": self.beside_theory}
        return {"spec": self.spec.to_dict(), **measured, **ratios}


def compared(models: Sequence[str], ranks: int) -> Iterator[Spec]:
    """Of the lab's engine: every precision and sharding that FSDP2 has too."""
    for model in models:
        image = model in PRESETS and PRESETS[model].kind == "image"
        base = Spec(world_size=ranks, devices=("cpu",) * ranks).replace(
            model=model, **({"data": "images"} if image else {})
        )
        for precision in PRECISIONS:
            for sharding in PEER_SHARDINGS:
                yield base.replace(backend="lab", precision=precision, sharding=sharding)


def peak_bytes(lab: Lab, spec: Spec) -> int:
    """Of the rank that holds most in its ledger step."""
    run = lab.run(spec)

    def peaks() -> dict[int, int]:
        return {e.rank: e.memory.at_peak.total_bytes for e in run.events.since()[0] if e.ledger}

    _await(run, "ledger step", lambda: len(peaks()) == spec.world_size)
    run.stop()
    run.wait(STEP_LIMIT_S)
    return max(peaks().values())
