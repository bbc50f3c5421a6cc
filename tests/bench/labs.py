"""The benches that run on a lab: plan and memory.

Note: what is compared in `plan`. Every round calibrates anew; the steps of all Specs are timed in turns with the
calibration runs, so that the machine's drift affects both alike. No Spec that is compared is calibrated on."""

import argparse
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from statistics import fmean, median
from typing import Any

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
from fsdp_lab.spec.spec import BACKENDS, SHARDINGS, Spec
from tests.planner.theory import peak_in_theory

STEP_LIMIT_S = 120.0  # limit for a step
AIMED_ERROR = 0.15  # of a predicted step time, relative to the measured one


def fresh_lab(ranks: int, devices: tuple[str, ...] | None = None) -> AbstractContextManager[Lab]:
    """A lab with new ranks, whose runs are not stored."""
    return open_lab(terminal(), ranks, devices, history=False)


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
    """Of the rank that holds most in its ledger step. Raises BenchError at the end of the run or the limit."""
    run, limit_s, peaks = lab.run(spec), time.perf_counter() + STEP_LIMIT_S, dict[int, int]()
    while len(peaks) < spec.world_size:
        if run.done or time.perf_counter() > limit_s:
            raise BenchError(f"no ledger step within {STEP_LIMIT_S:.0f} s: {run.reason or run.state.value}")
        time.sleep(0.005)
        peaks = {e.rank: e.memory.at_peak.total_bytes for e in run.events.since()[0] if e.ledger}
    run.stop()
    run.wait(STEP_LIMIT_S)
    return max(peaks.values())
