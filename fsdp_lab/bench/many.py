"""`many`: step times of several ranks on this machine, predicted from what one of them finds, beside measured ones.

Note: what is compared. The prediction knows one rank: its kernels and its steps while others share its cores, and
collectives alone (`rank/crowd.py`). No step of several ranks is among what it knows. The crowd is measured before and after
the steps, so that the machine's drift affects both alike, and the two predictions are averaged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean, median
from typing import Any

from fsdp_lab.bench.benches import Say
from fsdp_lab.bench.launch import launch
from fsdp_lab.bench.plan import LAB, BenchError, BenchPlan
from fsdp_lab.core.children import ChildError
from fsdp_lab.core.formatting import Table
from fsdp_lab.core.process import usable_cores
from fsdp_lab.core.spec import BACKENDS, Spec
from fsdp_lab.planner.calibration import Calibration, alone, crowd_specs, one_rank
from fsdp_lab.planner.questions import planned_here
from fsdp_lab.rank.calibration import measure_crowd

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


def many(worlds: Sequence[int], passes: int, say: Say) -> dict[str, Any]:
    """Of so many ranks each. passes: measurements of each figure of a calibration. Raises BenchError."""
    rows: list[Many] = []
    for ranks in worlds:
        rows += _of_ranks(ranks, passes, say)
    cells = [(str(r.ranks), r.wire, r.name, f"{1e3 * r.measured_s:.1f}", f"{1e3 * r.predicted_s:.1f}", f"{r.error:+.1%}")
             for r in rows]  # fmt: skip
    columns = ("ranks", "wire", "strategy", "measured ms", "predicted ms", "error")
    say(repr(Table(columns=columns, rows=tuple(cells), left=frozenset(columns[1:3]))))
    errors = {}
    for ranks, wire in dict.fromkeys((r.ranks, r.wire) for r in rows):
        each = [abs(r.error) for r in rows if (r.ranks, r.wire) == (ranks, wire)]
        errors[f"{ranks} ranks, {wire}"] = {"mean": fmean(each), "worst": max(each)}
    errors["all"] = {"mean": fmean(abs(r.error) for r in rows), "worst": max(abs(r.error) for r in rows)}
    for name, of in errors.items():
        say(f"errors, {name}: mean {of['mean']:.1%} (aim {MEAN:.0%}), worst {of['worst']:.1%} (aim {WORST:.0%})")
    return {"rows": [row.to_dict() for row in rows], "errors": errors, "environment": {}}


def _of_ranks(ranks: int, passes: int, say: Say) -> list[Many]:
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
        for (name, spec), measured_s in zip(wanted.items(), measured[wire], strict=True):
            if measured_s is None:
                continue
            predicted_s = fmean(planned_here(spec, here).step_time_s for here in known)
            rows.append(Many(name=name, ranks=ranks, wire=wire, measured_s=measured_s, predicted_s=predicted_s))
    return rows


def _calibrated(ranks: int, anchors: tuple[Spec, ...], passes: int) -> Calibration:
    timed = crowd_specs(DTYPES, anchors)
    try:
        each = measure_crowd(ranks, [spec.to_dict() for spec in timed], DTYPES, passes)
    except ChildError as e:
        raise BenchError(str(e)) from None
    return alone(each, DTYPES, anchors, name="CPU", seconds=0.0)


def _measured(wanted: Sequence[Spec], *, shares_memory: bool) -> list[float | None]:
    """The median of each one's steps, and of the ranks; None of one that is refused there."""
    ranks, wanted = wanted[0].world_size, [wanted[0]] * FIRST + [*wanted]
    plan = replace(BenchPlan(forms=(LAB,)), ranks=ranks, devices=("cpu",) * ranks)
    job = {"task": "times", "specs": [spec.to_dict() for spec in wanted], "steps": STEPS, "shares_memory": shares_memory,
           "threads": max(1, usable_cores() // ranks)}  # fmt: skip
    each = launch(plan, job, lambda done: None)
    return [median(median(seconds[WARM_UP:]) for seconds in of_spec) if all(of_spec) else None
            for of_spec in list(zip(*each, strict=True))[FIRST:]]  # fmt: skip
