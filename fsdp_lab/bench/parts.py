"""What each part of `bench gpu` does: it prints what it finds and returns it, or raises BenchError with what is wrong."""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import re
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from fsdp_lab.bench.benches import (
    BUSY,
    TOLERANCES,
    Busy,
    environment,
    measure,
    metering_of,
    rounds_of,
    step_figures,
)
from fsdp_lab.bench.launch import launch
from fsdp_lab.bench.plan import LAB, METERED_PEERS, BenchError, BenchPlan
from fsdp_lab.bench.record import Say
from fsdp_lab.core.formatting import GIB, Table, duration, size
from fsdp_lab.core.process import MARK, sweep
from fsdp_lab.core.spec import Spec
from fsdp_lab.wire import link_bytes

REPOSITORY = Path(__file__).resolve().parents[2]
GOAL = 1.00  # of lab/fsdp2, in time and in memory
ROUNDED = 1.02  # by the allocator: of the bytes of a bound
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
PINNED: Mapping[str, Mapping[str, Any]] = {
    "fsdp1, offload all": {"backend": "fsdp1", "offload": "all"}
}  # on a GPU alone
HYBRID: Mapping[str, Mapping[str, Any]] = {"lab, hybrid": {"sharding": "hybrid_shard", "shard_size": 2}}
SOME = ("fsdp2", "lab", "lab, shard_grad_op", "lab, zero1", "lab, offload all", "fsdp1", "ddp")
SWITCHED = ("lab", "ddp", "fsdp2", "fsdp1", "lab")


def tests(say: Say, limit_s: float) -> dict[str, Any]:
    """Without the options of pyproject.toml, some of which need plugins."""
    run_program(["-m", "pytest", "tests/gpu", "-o", "addopts=", "-q", "-ra", "--tb=short"], say, limit_s, REPOSITORY)
    return {}


def strategies(named: Mapping[str, Mapping[str, Any]], precisions: Sequence[str], devices: Sequence[str], say: Say,
               limit_s: float) -> dict[str, Any]:  # fmt: skip
    """Four steps of each from the same values on the same batches; the time is of those that are neither the first nor
    profiled. Fails where losses are not those of FSDP2."""
    base = Spec(world_size=len(devices)).replace(model="gpt2-1m", seq_len=64, micro_batch=2, lr=0.01)
    specs = {(name, p): base.replace(**changes, precision=p) for p in precisions for name, changes in named.items()}
    found = dict(zip(specs, _trained(list(specs.values()), 4, devices, limit_s), strict=True))
    rows, wrong = [], []
    for (name, precision), one in found.items():
        compared, fails = _compared(one, found[next(iter(named)), precision], precision)
        wrong += [f"{name} in {precision}: {compared}"] * fails
        if "error" in one:
            rows.append((name, precision, *[""] * 6, compared))
            continue
        busy = Busy.of(one["kernels"], one["step_s"])
        figures = (f"{one['losses'][-1]:.6f}", duration(one["step_s"]), size(one["peak_bytes"]))
        rows.append((name, precision, *figures, *(busy.cells() if busy else [""] * 3), compared))
    columns = ("strategy", "precision", "last loss", "step", "peak memory", *BUSY, "compared with FSDP2")
    say(repr(Table(columns=columns, rows=tuple(rows), left=frozenset({columns[0], columns[-1], "precision"}))))
    if wrong:
        raise BenchError(f"{len(wrong)} of {len(found)} are wrong: {'; '.join(wrong)}")
    return {"strategies": {f"{name}, {precision}": one for (name, precision), one in found.items()}}


def links(devices: Sequence[str], say: Say, limit_s: float) -> dict[str, Any]:
    """Bus bandwidth of collectives by kind and size, of the slowest rank: as nccl-tests (doc/PERFORMANCE.md), (W-1)/W of the
    bytes over the time, of an all-reduce twice that."""
    ranks = launch(
        BenchPlan(ranks=len(devices), devices=tuple(devices), limit_s=limit_s), {"task": "links"}, lambda done: None
    )
    rows, figures = [], dict[str, list[list[float]]]()
    for kind in ranks[0]:
        figures[kind] = [
            [one[0][0], max(s for _, s in one)] for one in zip(*(rank[kind] for rank in ranks), strict=True)
        ]
        rows += [(kind, size(round(nbytes)), duration(s), f"{link_bytes(kind, round(nbytes), len(devices)) / s / 1e9:,.2f}")
                 for nbytes, s in figures[kind]]  # fmt: skip
    say(repr(Table(columns=("collective", "bytes", "time", "GB/s"), rows=tuple(rows), left=frozenset({"collective"}))))
    return {"seconds": figures}


def _trained(specs: Sequence[Spec], steps: int, devices: Sequence[str], limit_s: float) -> list[dict[str, Any]]:
    """What the ranks found, joined: by Spec {"losses", "checksum", "step_s", "peak_bytes"} or {"error"}."""
    plan = BenchPlan(ranks=len(devices), devices=tuple(devices), limit_s=limit_s)
    ranks = launch(plan, {"task": "train", "specs": [s.to_dict() for s in specs], "steps": steps}, lambda done: None)
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
    difference = _difference(one["losses"], other["losses"])
    if difference == 0 and one["checksum"] == other["checksum"]:
        return "equal bit for bit", False
    return f"losses differ by {difference:.1e}, {ALLOWED[precision]:g} allowed", not difference <= ALLOWED[precision]


def _difference(ones: Sequence[float], others: Sequence[float]) -> float:
    """The largest relative one; NaN counts as infinite."""
    gaps = [abs(a - b) / abs(b) for a, b in zip(ones, others, strict=True)]
    return max(gap if math.isfinite(gap) else math.inf for gap in gaps)


def step(plan: BenchPlan, say: Say, limit_s: float) -> dict[str, Any]:
    """`bench step`, and how far the goal is met."""
    plan = BenchPlan.from_dict({**plan.to_dict(), "limit_s": limit_s})
    say(f"{plan.preset}, {plan.micro_batch} x {plan.seq_len} tokens, {rounds_of(plan)}, on {' '.join(plan.devices)}")
    result = measure(plan)
    figures = step_figures(result, environment(plan), say)
    name = f"{LAB}/fsdp2"
    for what, ratio in (("time", result.ratios[name].median), ("peak memory", result.memory_ratios.get(name))):
        if ratio is None:
            say(f"{name} in {what}: not measured on a CPU")
        else:
            low, high = result.ratio_interval(LAB, result.fastest["fsdp2"]) if what == "time" else (ratio, ratio)
            met = "met" if high <= GOAL else "not met" if low > GOAL else "not told apart from it"
            say(f"{name} in {what}: {ratio:.3f}; the goal, {GOAL:.2f} or less, is {met}")
    for form, peak_bytes in result.peak_bytes.items():
        if peak_bytes:
            say(f"  peak allocated memory of {form}: {peak_bytes / GIB:.3f} GiB")
    result.check_same_work(plan.precision)
    return figures


def metering(plan: BenchPlan, say: Say, limit_s: float) -> dict[str, Any]:
    """`bench metering` of every backend."""
    plan = BenchPlan.from_dict({**plan.to_dict(), "limit_s": limit_s / 2})
    return metering_of(METERED_PEERS, plan, 2, say)


def switch(model: Mapping[str, Any], devices: Sequence[str], say: Say, limit_s: float) -> dict[str, Any]:
    """See sessions.switches. Fails where a peak is above the larger layout plus one unit, or a bit is lost."""
    base = Spec(world_size=1).replace(model=dict(model), seq_len=64, micro_batch=1)
    specs = [base.replace(**STRATEGIES[name]).to_dict() for name in SWITCHED]
    plan = BenchPlan(ranks=1, devices=tuple(devices), limit_s=limit_s)
    (found,) = launch(plan, {"task": "switches", "specs": specs}, lambda done: None)
    say(f"{found['layers']} layers, {found['parameters']:,} parameters, the largest unit {size(found['unit_bytes'])}; "
        f"allocator's limit {size(found['limit_bytes'])} on a GPU")  # fmt: skip
    rows, wrong = [], []
    for (one, other), made in zip(pairwise(SWITCHED), found["switches"], strict=True):
        bound = _bound(made, found["unit_bytes"])
        equal = made["before_checksum"] == made["after_checksum"]
        within = bound is None or made["peak_bytes"] <= bound * ROUNDED
        wrong += [f"{one} to {other} changes parameters"] * (not equal) + [f"{one} to {other} takes too much"] * (
            not within
        )
        sizes = (made["before_bytes"], made["after_bytes"], made["peak_bytes"], bound)
        rows.append(
            (f"{one} to {other}", duration(made["seconds"]), *map(size, sizes), "equal" if equal else "DIFFERENT")
        )
    columns = ("switch", "time", "before", "after", "peak", "bound", "checksums")
    say(repr(Table(columns=columns, rows=tuple(rows), left=frozenset({"switch", "checksums"}))))
    if not found["switches"][0]["peak_bytes"]:
        say("memory is not measured on a CPU")
    if wrong:
        raise BenchError("; ".join(wrong))
    return dict(found)


def _bound(made: Mapping[str, Any], unit_bytes: int) -> float | None:
    """The larger layout, and one unit with its two moments. None on a CPU."""
    if made["peak_bytes"] is None:
        return None
    return float(max(made["before_bytes"], made["after_bytes"]) + 3 * unit_bytes)


def tour(devices: Sequence[str], say: Say, limit_s: float) -> dict[str, Any]:
    """See sessions.tour."""
    spec = Spec(world_size=1).replace(model="gpt2-1m", seq_len=64, micro_batch=2, lr=0.01)
    job = {"task": "tour", "spec": spec.to_dict(), "steps": 3, "other": STRATEGIES["ddp"], "dtypes": ["fp32", "bf16"]}
    (found,) = launch(BenchPlan(ranks=1, devices=tuple(devices), limit_s=limit_s), job, lambda done: None)
    pairs = {
        "continued from a checkpoint": (found["resumed"], found["undisturbed"]),
        "continued from it under ddp": (found["resumed elsewhere"], found["undisturbed"]),
        "the engine's loop beside a plain one": (found["engine"]["sharded"], found["engine"]["plain"]),
    }
    differences = {name: _difference(*pair) for name, pair in pairs.items()}
    for name, difference in differences.items():
        say(f"{name}: losses {'are equal' if difference == 0 else f'differ by {difference:.1e}'}")
    say(f"slow motion: {len(found['frames'])} phases: {' '.join(found['frames'])}")
    for dtype, rate in found["product_flops_per_s"].items():
        say(f"matrix products in {dtype}: {rate / 1e12:.3g} TFLOPS at most")
    if wrong := [name for name, difference in differences.items() if difference > ALLOWED["fp32"]]:
        raise BenchError(f"losses differ: {', '.join(wrong)}")
    return dict(found) | {"differences": differences}


def torchrun(devices: Sequence[str], say: Say, limit_s: float) -> dict[str, Any]:
    """`torchrun -m fsdp_lab.rank spec.json`. Fails unless it prints three finite losses."""
    losses: list[float] = []

    def read(line: str) -> None:
        if line.startswith("{"):
            event = json.loads(line)
            losses.append(event["mean_loss"])
            line = f"step {event['step']}: loss {event['mean_loss']:.6f}, {duration(event['step_time_s'])}"
        say(line)

    with tempfile.TemporaryDirectory(prefix="fsdp_lab-bench-") as folder:
        file = Path(folder, "spec.json")
        file.write_text(_program_spec(devices).to_json())
        run_program([*_torchrun(devices), "-m", "fsdp_lab.rank", str(file), "--steps", "3"], read, limit_s)
    if len(losses) != 3 or not all(map(math.isfinite, losses)):
        raise BenchError(f"three finite losses were expected, and it printed {losses}")
    return {"losses": losses}


def exported(devices: Sequence[str], say: Say, limit_s: float) -> dict[str, Any]:
    """`fsdp-lab export` of a Spec, and a run of that script beside the lab's own. Fails where losses differ."""
    end_s = time.monotonic() + limit_s
    spec, printed = _program_spec(devices).replace(backend="fsdp2"), list[str]()

    def read(line: str) -> None:
        printed.append(line)
        say(line)

    with tempfile.TemporaryDirectory(prefix="fsdp_lab-bench-") as folder:
        file, script = Path(folder, "spec.json"), Path(folder, "train.py")
        file.write_text(spec.to_json())
        export = ["export", str(file), "--to", "script", "--output", str(script)]
        run_program(["-m", "fsdp_lab", *export], lambda line: None, limit_s)
        limit_s = end_s - time.monotonic()
        run_program([*_torchrun(devices), str(script), "--steps", "3"], read, limit_s)
    theirs = [float(found[1]) for line in printed if (found := re.match(r"step \d+ loss (\S+)", line))]
    (ours,) = _trained([spec], 3, devices, max(1.0, end_s - time.monotonic()))
    if "error" in ours or len(theirs) != 3:
        raise BenchError(f"the lab's: {ours}; the script's losses: {theirs}")
    difference = _difference(theirs, ours["losses"])
    say(f"losses of the script and of the lab {'are equal' if difference == 0 else f'differ by {difference:.1e}'}")
    if difference > ALLOWED["fp32"]:
        raise BenchError(f"losses differ by {difference:.1e}, and {ALLOWED['fp32']:g} is allowed")
    return {"script": theirs, "lab": ours["losses"]}


def _program_spec(devices: Sequence[str]) -> Spec:
    spec = Spec(world_size=len(devices), devices=tuple(devices))
    return spec.replace(model="gpt2-1m", seq_len=64, micro_batch=2, lr=0.01)


def _torchrun(devices: Sequence[str]) -> list[str]:
    return ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(len(devices))]


# -- programs ---


def run_program(arguments: Sequence[str], say: Say, limit_s: float, folder: Path | None = None) -> None:
    """`python ARGUMENTS`; `say` is called with each line of its output and its errors. Raises BenchError if it fails or does
    not end in time. However this ends, the processes that it has started are ended, by the token in their environment.
    """
    token = uuid.uuid4().hex
    path = os.pathsep.join(filter(None, sys.path))
    process = subprocess.Popen(
        [sys.executable, *arguments], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, errors="replace", cwd=folder, start_new_session=True,
        env={"OMP_NUM_THREADS": "1", **os.environ, MARK: token, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"})  # fmt: skip
    try:
        end_s, last = time.monotonic() + limit_s, ""
        lines = _lines(process)
        while (line := _next(lines, end_s, limit_s)) is not None:
            say(line)
            last = line or last
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, end_s - time.monotonic()))
        if process.returncode is None:
            raise BenchError(f"it did not end within {limit_s:.0f} s")
        if process.returncode:
            raise BenchError(f"it ended with code {process.returncode}: {last or 'it printed nothing'}")
    finally:
        sweep(token)
        process.kill()
        process.wait()


def _lines(process: subprocess.Popen[str]) -> queue.SimpleQueue[str | None]:
    """The lines as they come; None at the end."""
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def read() -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                lines.put(line.rstrip())
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    return lines


def _next(lines: queue.SimpleQueue[str | None], end_s: float, limit_s: float) -> str | None:
    try:
        return lines.get(timeout=max(0.0, end_s - time.monotonic()))
    except queue.Empty:
        raise BenchError(f"it did not end within {limit_s:.0f} s") from None
