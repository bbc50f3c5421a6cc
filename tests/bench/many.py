"""`many`: step times of several ranks on this machine, predicted from what one of them finds, beside measured ones.

Note: what is compared. The prediction knows one rank: its kernels and its steps while others share its cores, and
collectives alone (`rank/crowd.py`). No step of several ranks is among what it knows. The crowd is measured before
and after the steps, and the two predictions are averaged. A machine that others use too may change its speed within minutes.
So the ranks time the same matrix products as the crowd before and after each training, and the predicted computing is
scaled by the ratio of the two (`Many.slowdown`): on a quiet machine it is 1.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean, median
from typing import Any

import torch

from fsdp_lab.base.errors import SpecError
from fsdp_lab.base.formatting import Table
from fsdp_lab.base.process import usable_cores
from fsdp_lab.bench.plan import LAB, BenchError, BenchPlan
from fsdp_lab.bench.tasks import BenchRank
from fsdp_lab.cli.bench import say
from fsdp_lab.cli.console import at_least
from fsdp_lab.planner.calibration import Calibration, alone, crowd_specs, one_rank
from fsdp_lab.planner.devices import Curve
from fsdp_lab.planner.plan import Plan
from fsdp_lab.planner.questions import planned_here
from fsdp_lab.rank.calibration import HardwareProbe, measure_crowd
from fsdp_lab.rank.children import ChildError
from fsdp_lab.spec.spec import BACKENDS, Spec
from tests.bench.ranks import launch_here, numbers

DTYPES = ("fp32", "bf16")
LINKS = ("0.2 GB/s", "0.1 GB/s", "0.03 GB/s")  # a wire that is slower than a link refuses it
WIRES = {"shared memory": True, "Gloo": False}
STEPS, WARM_UP = 12, 4
FIRST = 3  # trainings of a process that do not count: they take longer
MEAN, WORST = 0.05, 0.12  # the errors that are aimed at


@dataclass(frozen=True, kw_only=True)
class Many:
    """One Spec over one wire."""

    name: str
    ranks: int
    wire: str
    measured_s: float
    predicted_s: float
    slowdown: float  # seconds of products beside the measured steps, relative to those in the crowd

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "error": self.error}


def specs(ranks: int) -> dict[str, Spec]:
    """By name: every backend with links, accumulation, offload, a compiler, bf16 and other models; and other shardings."""
    base = Spec(world_size=ranks, devices=("cpu",) * ranks).replace(model="gpt2-1m", seq_len=128, micro_batch=4)
    found = {}
    for backend in BACKENDS:
        of = base.replace(backend=backend, sharding="no_shard" if backend == "ddp" else "full_shard")
        for name, changes in _changes(backend):
            found[f"{backend} {name}".strip()] = of.replace(**changes)
    found["lab shard_grad_op"] = base.replace(sharding="shard_grad_op")
    found["lab no_shard"] = base.replace(sharding="no_shard")
    if ranks % 2 == 0 and ranks > 2:
        found["lab hybrid_shard"] = base.replace(sharding="hybrid_shard", shard_size=2)
    return found


def _changes(backend: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    yield "", {}
    for link in LINKS:
        yield link, {"link": link}
    yield "accumulate 4", {"accumulate": 4}
    yield "accumulate 4, last", {"accumulate": 4, "sync": "last"}
    yield "compile", {"compile": True}
    if backend in ("lab", "fsdp2"):  # of the others none on a CPU
        yield "offload", {"offload": "all"}
    yield "bf16", {"precision": "bf16"}
    yield "llama-1m", {"model": "llama-1m"}
    yield "gpt2-10m", {"model": "gpt2-10m", "micro_batch": 2}


def many(args: argparse.Namespace) -> dict[str, Any]:
    """Raises BenchError."""
    at_least(args, "passes", 1)
    rows = [row for ranks in numbers(args.ranks, 2) for row in _of_ranks(ranks, args.passes)]
    cells = []
    for r in rows:
        times = (f"{1e3 * r.measured_s:.1f}", f"{1e3 * r.predicted_s:.1f}", f"{r.slowdown:.2f}", f"{r.error:+.1%}")
        cells.append((str(r.ranks), r.wire, r.name, *times))
    columns = ("ranks", "wire", "strategy", "measured ms", "predicted ms", "slowdown", "error")
    say(repr(Table(columns=columns, rows=tuple(cells), left=frozenset(columns[1:3]))))
    errors = {}
    for ranks, wire in dict.fromkeys((r.ranks, r.wire) for r in rows):
        each = [abs(r.error) for r in rows if (r.ranks, r.wire) == (ranks, wire)]
        errors[f"{ranks} ranks, {wire}"] = {"mean": fmean(each), "worst": max(each)}
    errors["all"] = {"mean": fmean(abs(r.error) for r in rows), "worst": max(abs(r.error) for r in rows)}
    for name, of in errors.items():
        say(f"errors, {name}: mean {of['mean']:.1%} (aim {MEAN:.0%}), worst {of['worst']:.1%} (aim {WORST:.0%})")
    return {"rows": [row.to_dict() for row in rows], "errors": errors, "environment": {}}


def _of_ranks(ranks: int, passes: int) -> list[Many]:
    wanted = specs(ranks)
    anchors = tuple(dict.fromkeys(map(one_rank, wanted.values())))
    say(
        f"{ranks} ranks: {len(wanted)} strategies over {' and over '.join(WIRES)}, from {len(anchors)} steps of one rank"
    )
    before = _calibrated(ranks, anchors, passes)
    measured = {wire: _measured(list(wanted.values()), shares_memory=shares) for wire, shares in WIRES.items()}
    both = before, _calibrated(ranks, anchors, passes)
    rows = []
    for wire, shares in WIRES.items():
        known = [here if shares else here.over_gloo() for here in both]
        for (name, spec), timed in zip(wanted.items(), measured[wire], strict=True):
            if timed is None:
                continue
            slowdowns = [_slowdown(timed.products, here) for here in known]
            predicted_s = fmean(
                _slowed_s(planned_here(spec, here), times) for here, times in zip(known, slowdowns, strict=True)
            )
            both_s = {"measured_s": timed.step_s, "predicted_s": predicted_s}
            rows.append(Many(name=name, ranks=ranks, wire=wire, slowdown=fmean(slowdowns), **both_s))
    return rows


def _slowdown(products: Sequence[Sequence[float]], here: Calibration) -> float:
    """Seconds of products, relative to those of the calibration: the median over their sizes."""
    known = Curve.of(here.probes["products"]["fp32"])
    return median(seconds / known(flops) for flops, seconds in products)


def _slowed_s(plan: Plan, slowdown: float) -> float:
    """The planned step if computing takes `slowdown` times as long."""
    return plan.step_time_s + (slowdown - 1) * (plan.step.computing_s + plan.step.optimizer_s)


def _calibrated(ranks: int, anchors: tuple[Spec, ...], passes: int) -> Calibration:
    timed = crowd_specs(DTYPES, anchors)
    try:
        each = measure_crowd(ranks, [spec.to_dict() for spec in timed], DTYPES, passes)
    except ChildError as e:
        raise BenchError(str(e)) from None
    return alone(each, DTYPES, anchors, name="CPU", seconds=0.0)


@dataclass(frozen=True, kw_only=True)
class _Timed:
    """The median step of a training, and of its ranks; and the products beside it, as of `HardwareProbe.products`."""

    step_s: float
    products: list[list[float]]


def _measured(wanted: Sequence[Spec], *, shares_memory: bool) -> list[_Timed | None]:
    """None of a Spec that is refused on these ranks."""
    ranks, wanted = wanted[0].world_size, [wanted[0]] * FIRST + [*wanted]
    plan = replace(BenchPlan(forms=(LAB,)), ranks=ranks, devices=("cpu",) * ranks)
    job = {"specs": [spec.to_dict() for spec in wanted], "shared_memory": shares_memory}
    each = launch_here(plan, "many", **job, threads=max(1, usable_cores() // ranks))
    return [_timed(of_spec) for of_spec in list(zip(*each, strict=True))[FIRST:]]


def _timed(of_ranks: Sequence[Mapping[str, Any]]) -> _Timed | None:
    if not all(one["steps"] for one in of_ranks):
        return None
    step_s = median(median(one["steps"][WARM_UP:]) for one in of_ranks)
    return _Timed(step_s=step_s, products=[row for one in of_ranks for row in one["products"]])


def on_rank(rank: BenchRank, job: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Of each Spec: "steps", seconds of each from initial values, none if it is refused on these ranks; and "products", as
    of `HardwareProbe.products` before the training and after it."""
    timed: list[dict[str, Any]] = []
    with rank.session(shared_memory=job["shared_memory"], threads=job["threads"]) as session:
        probe = HardwareProbe(session.info, session.world)
        before = list(probe.products(torch.float32))
        for spec in job["specs"]:
            steps: list[float] = []
            try:
                session.apply("bench", spec, fresh=True)
            except SpecError:
                pass
            else:
                steps = [event["step_time_s"] for event in session.train(STEPS)["events"]]
            after = list(probe.products(torch.float32))
            timed.append({"steps": steps, "products": [*before, *after]})
            before = after
    return timed
