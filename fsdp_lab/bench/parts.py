"""What each part of `bench gpu` does: it prints what it finds and returns it, or raises BenchError with what is wrong."""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fsdp_lab.base.formatting import GIB, Table, duration, size
from fsdp_lab.base.process import MARK, sweep
from fsdp_lab.bench.launch import launch
from fsdp_lab.bench.plan import LAB, BenchError, BenchPlan
from fsdp_lab.bench.results import BUSY, TOLERANCES, Say, busy_cells, environment, measure, rounds_of, step_figures
from fsdp_lab.spec.spec import Spec
from fsdp_lab.wire import link_bytes

REPOSITORY = Path(__file__).resolve().parents[2]
END_S = 5.0  # for a program that is told to end
GOAL = 1.00  # of lab/fsdp2, in time and in memory
ALLOWED = {**TOLERANCES, "fp16": TOLERANCES["bf16"]}  # relative differences of losses, by precision

# What `strategies` trains: the first is compared with all others, the second with itself.
STRATEGIES: Mapping[str, Mapping[str, Any]] = {
    "fsdp2": {"backend": "fsdp2"},
    "fsdp2 again": {"backend": "fsdp2"},
    "lab": {},
    "lab, prefetch": {"forward_prefetch": 2, "backward_prefetch": 2, "limit_all_gathers": 3},
    "lab, no prefetch": {"forward_prefetch": 0, "backward_prefetch": 0},
    "lab, shard_grad_op": {"sharding": "shard_grad_op"},
    "lab, zero1": {"sharding": "zero1"},
    "lab, no_shard": {"sharding": "no_shard"},
    "lab, offload optimizer": {"offload": "optimizer"},
    "lab, offload all": {"offload": "all"},
    "lab, recompute": {"recompute": "full"},
    "fsdp2, offload all": {"backend": "fsdp2", "offload": "all"},
    "fsdp1": {"backend": "fsdp1"},
    "ddp": {"backend": "ddp", "sharding": "no_shard"},
}
# On a GPU alone.
PINNED: Mapping[str, Mapping[str, Any]] = {"fsdp1, offload all": {"backend": "fsdp1", "offload": "all"}}
HYBRID: Mapping[str, Mapping[str, Any]] = {"lab, hybrid": {"sharding": "hybrid_shard", "shard_size": 2}}
SOME = ("fsdp2", "lab", "lab, shard_grad_op", "lab, zero1", "lab, offload all", "fsdp1", "ddp")


def tests(say: Say, limit_s: float) -> dict[str, Any]:
    """Without the options of pyproject.toml, some of which need plugins."""
    run_program(["-m", "pytest", "tests/gpu", "-o", "addopts=", "-q", "-ra", "--tb=short"], say, limit_s, REPOSITORY)
    return {}


def strategies(
    named: Mapping[str, Mapping[str, Any]], precisions: Sequence[str], devices: Sequence[str], say: Say, limit_s: float
) -> dict[str, Any]:
    """Four steps of each from the same values on the same batches; the time is of those that are neither the first nor
    profiled. Fails where losses are not those of FSDP2."""
    base = Spec(world_size=len(devices)).replace(model="gpt2-1m", seq_len=64, micro_batch=2, lr=0.01)
    specs = {(name, p): base.replace(**changes, precision=p) for p in precisions for name, changes in named.items()}
    by_spec = dict(zip(specs, trained(list(specs.values()), 4, devices, limit_s), strict=True))
    rows, wrong = [], []
    for (name, precision), one in by_spec.items():
        compared, fails = _compared(one, by_spec[next(iter(named)), precision], precision)
        wrong += [f"{name} in {precision}: {compared}"] * fails
        if "error" in one:
            rows.append((name, precision, *[""] * 6, compared))
            continue
        figures = (f"{one['losses'][-1]:.6f}", duration(one["step_s"]), size(one["peak_bytes"]))
        busy = busy_cells(one["kernels"], one["step_s"]) or [""] * 3
        rows.append((name, precision, *figures, *busy, compared))
    columns = ("strategy", "precision", "last loss", "step", "peak memory", *BUSY, "compared with FSDP2")
    say(repr(Table(columns=columns, rows=tuple(rows), left=frozenset({columns[0], columns[-1], "precision"}))))
    if wrong:
        raise BenchError(f"{len(wrong)} of {len(by_spec)} are wrong: {'; '.join(wrong)}")
    return {"strategies": {f"{name}, {precision}": one for (name, precision), one in by_spec.items()}}


def links(devices: Sequence[str], say: Say, limit_s: float) -> dict[str, Any]:
    """Bus bandwidth of collectives by kind and size, of the slowest rank: as nccl-tests (doc/PERFORMANCE.md), (W-1)/W of the
    bytes over the time, of an all-reduce twice that."""
    plan, rows = BenchPlan(ranks=len(devices), devices=tuple(devices), limit_s=limit_s), []
    ranks = launch(plan, "links")
    slowest = {
        kind: [[one[0][0], max(s for _, s in one)] for one in zip(*(rank[kind] for rank in ranks), strict=True)]
        for kind in ranks[0]
    }
    for kind, measured in slowest.items():
        for nbytes, s in measured:
            rate = link_bytes(kind, round(nbytes), len(devices)) / s / 1e9
            rows.append((kind, size(round(nbytes)), duration(s), f"{rate:,.2f}"))
    say(repr(Table(columns=("collective", "bytes", "time", "GB/s"), rows=tuple(rows), left=frozenset({"collective"}))))
    return {"seconds": slowest}


def trained(specs: Sequence[Spec], steps: int, devices: Sequence[str], limit_s: float) -> list[dict[str, Any]]:
    """Returns {"losses", "checksum", "step_s", "peak_bytes", "kernels"} or {"error"} of each Spec, joined over ranks."""
    plan = BenchPlan(ranks=len(devices), devices=tuple(devices), limit_s=limit_s)
    ranks = launch(plan, "train", specs=[s.to_dict() for s in specs], steps=steps)
    return [_joined(spec, by_rank) for spec, by_rank in zip(specs, zip(*ranks, strict=True), strict=True)]


def _joined(spec: Spec, by_rank: Sequence[dict[str, Any]]) -> dict[str, Any]:
    errors = [f"rank {rank}: {one['error']}" for rank, one in enumerate(by_rank) if "error" in one]
    if not errors and any(one["losses"] != by_rank[0]["losses"] for one in by_rank):
        errors = ["the ranks do not agree on the mean loss"]
    if errors:
        return {"error": errors[0]}
    return {
        "losses": by_rank[0]["losses"],
        "checksum": sum(one["checksum"] for one in by_rank[: spec.shard_factor]) % (1 << 64),
        "step_s": max(one["step_s"] for one in by_rank),
        "kernels": by_rank[0]["kernels"],
        "peak_bytes": max(one["peak_bytes"] for one in by_rank),
    }


def _compared(one: Mapping[str, Any], other: Mapping[str, Any], precision: str) -> tuple[str, bool]:
    """In words, and whether it is wrong."""
    if "error" in one:
        return str(one["error"]), True
    if not all(map(math.isfinite, one["losses"])):
        return f"a loss is not finite: {one['losses']}", True
    if "error" in other:
        return "FSDP2 failed", True
    difference = relative_difference(one["losses"], other["losses"])
    if difference == 0 and one["checksum"] == other["checksum"]:
        return "equal bit for bit", False
    return f"losses differ by {difference:.1e}, {ALLOWED[precision]:g} allowed", not difference <= ALLOWED[precision]


def relative_difference(ones: Sequence[float], others: Sequence[float]) -> float:
    """The largest relative one; NaN counts as infinite."""
    gaps = [abs(a - b) / abs(b) for a, b in zip(ones, others, strict=True)]
    return max(gap if math.isfinite(gap) else math.inf for gap in gaps)


def step(plan: BenchPlan, say: Say, limit_s: float) -> dict[str, Any]:
    """`bench step`, and how far the goal is met."""
    plan = replace(plan, limit_s=limit_s)
    say(f"{plan.preset}, {plan.micro_batch} x {plan.seq_len} tokens, {rounds_of(plan)}, on {' '.join(plan.devices)}")
    result = measure(plan)
    figures = step_figures(result, environment(plan), say)
    name = f"{LAB}/fsdp2"
    for what, ratio in (("time", result.ratios[name].median), ("peak memory", result.memory_ratios.get(name))):
        if ratio is None:
            say(f"{name} in {what}: not measured on a CPU")
        else:
            low, high = result.interval(result.fastest["fsdp2"]) if what == "time" else (ratio, ratio)
            met = "met" if high <= GOAL else "not met" if low > GOAL else "not told apart from it"
            say(f"{name} in {what}: {ratio:.3f}; the goal, {GOAL:.2f} or less, is {met}")
    for form, peak_bytes in result.peak_bytes.items():
        if peak_bytes:
            say(f"  peak allocated memory of {form}: {peak_bytes / GIB:.3f} GiB")
    result.check_same_work(plan.precision)
    return figures


def bench(arguments: Sequence[str], say: Say, limit_s: float) -> dict[str, Any]:
    """`python -m tests.bench ARGUMENTS`."""
    with tempfile.TemporaryDirectory(prefix="fsdp_lab-bench-") as folder:
        file = Path(folder, "bench.json")
        run_program(["-m", "tests.bench", *arguments, "--json", str(file)], say, limit_s, REPOSITORY)
        told: dict[str, Any] = json.loads(file.read_text())
    return dict(told.get("backends", told))


def run_program(arguments: Sequence[str], say: Say, limit_s: float, folder: Path | None = None) -> None:
    """`python ARGUMENTS`; `say` is called with each line of its output and its errors. Raises BenchError if it fails or does
    not end in time. However this ends, the processes that it has started are ended, by the token in their environment.
    """
    token, last, late = uuid.uuid4().hex, "", threading.Event()
    own = {MARK: token, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONUNBUFFERED": "1"}
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    how: dict[str, Any] = {**pipes, "text": True, "errors": "replace", "cwd": folder, "start_new_session": True}
    command, env = [sys.executable, *arguments], {"OMP_NUM_THREADS": "1", **os.environ, **own}
    process: subprocess.Popen[str] = subprocess.Popen(command, env=env, **how)

    def end() -> None:
        process.terminate()  # a bench ends what it has started
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
        sweep(token)  # the output ends with the last of them

    def end_late() -> None:
        late.set()
        end()

    timer = threading.Timer(max(0.0, limit_s), end_late)
    timer.start()
    try:
        assert process.stdout is not None
        with process.stdout:
            for line in map(str.rstrip, process.stdout):
                say(line)
                last = line or last
        code = process.wait()
    finally:
        timer.cancel()
        end()
        process.kill()
        process.wait()
    if late.is_set():
        raise BenchError(f"it did not end within {limit_s:.0f} s")
    if code:
        raise BenchError(f"it ended with code {code}: {last or 'it printed nothing'}")
