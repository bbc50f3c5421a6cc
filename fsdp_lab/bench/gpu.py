"""`bench gpu`: all that only a GPU can show, as a list of parts, and the file of results. What a part does is a
function: it prints what it finds and returns it, or raises BenchError with what is wrong.

On a CPU the same list is rehearsed with small models. Each part starts processes of its own, so that a crash of one,
or memory that it does not give back, touches no other.

The file is text for a reader; after the line `FIGURES` it is JSON: {"facts": {...}, "parts": [{"name", "title", "outcome",
"reason", "begun", "seconds", "printed", "figures"}, ...]}. It is written anew with each line that is printed, so that a
session that is cut off leaves what it had."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fsdp_lab.base import __version__
from fsdp_lab.base.files import write_whole
from fsdp_lab.base.formatting import GIB, Table, duration, plural, size
from fsdp_lab.base.process import MARK, sweep
from fsdp_lab.bench.launch import launch
from fsdp_lab.bench.plan import CONTROL, LAB, REFERENCE, STEP, BenchError, BenchPlan, PlanError
from fsdp_lab.bench.results import BUSY, TOLERANCES, Say, busy_cells, environment, measure, rounds_of, step_figures
from fsdp_lab.models.presets import PRESETS
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
    """Four steps of each from the same values on the same batches. Fails where losses are not those of FSDP2."""
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
    not end in time. Processes that it has started are ended, by the token in their environment."""
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


FIGURES = "-- the same as JSON, with all figures --"
STATE_BYTES = 16  # per parameter of a form in fp32: values, two moments, gradients that DDP keeps
MOST_RANKS = 8  # of the parts with a rank on each GPU
LEAST_SHARE = 0.5  # of its limit: a part that has less time is skipped
PENDING, RUNNING, PASSED, FAILED, SKIPPED = "not begun", "not finished", "passed", "failed", "skipped"


def _plan(preset: str, seq_len: int, micro_batch: int, forms: tuple[str, ...], steps: int = 20) -> BenchPlan:
    """On one rank, in bf16."""
    return BenchPlan(
        preset=preset, seq_len=seq_len, micro_batch=micro_batch, forms=forms, steps=steps, ranks=1, precision="bf16"
    )


@dataclass(frozen=True, kw_only=True)
class Scale:
    """The sizes and lengths of the parts."""

    shapes: tuple[BenchPlan, ...]
    shared: tuple[int, ...]  # numbers of ranks that share one GPU
    sharing: BenchPlan  # what they train
    metered: str  # options of `metering`
    precisions: tuple[str, ...]
    switched: str  # options of `switch`


_BOTH = (LAB, REFERENCE, "fsdp2-wire", CONTROL)
_OVER_WIRE = (LAB, "fsdp2-wire", "ddp-wire", CONTROL)  # where ranks share a GPU
METERING = "--backend fsdp2,fsdp1,ddp,lab --ranks 1 --launches 2 --precision bf16"
ON_GPU = Scale(
    shapes=(
        _plan("gpt2-124m", 1024, 8, _BOTH),
        _plan("gpt2-355m", 1024, 4, _BOTH),
        _plan("llama-1b", 1024, 2, (LAB, REFERENCE, CONTROL)),
    ),
    shared=(2, 4),
    sharing=_plan("gpt2-30m", 128, 2, _OVER_WIRE, steps=10),
    metered="--model gpt2-124m --seq-len 512 --micro-batch 8 --steps 30",
    precisions=("fp32", "bf16", "fp16"),
    switched="",
)
REHEARSAL = Scale(
    shapes=tuple(_plan(preset, 16, 1, (LAB, REFERENCE), steps=2) for preset in ("gpt2-1m", "llama-1m")),
    shared=(2,),
    sharing=_plan("gpt2-1m", 16, 1, _OVER_WIRE, steps=2),
    metered="--model gpt2-1m --seq-len 16 --micro-batch 1 --steps 4",
    precisions=("fp32",),
    switched="--width 64 --layers 3 --vocab 384",
)


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where the parts run. Of a CPU: no GPU, and memory without an end."""

    device: str  # "cuda" or "cpu"
    gpus: int
    memory_bytes: float  # of the smallest GPU

    @classmethod
    def here(cls, device: str, *, listing: bool = False) -> Place:
        """Raises PlanError where there is no GPU, unless the parts are only listed: then as if there were one."""
        if device == "cpu":
            return cls(device=device, gpus=0, memory_bytes=math.inf)
        import torch

        gpus = torch.cuda.device_count()
        if not gpus and not listing:
            instead = "give --device cpu to rehearse the same list with small models"
            raise PlanError(f"bench gpu needs a GPU, and torch finds none here; {instead}")
        sizes = [torch.cuda.get_device_properties(i).total_memory for i in range(gpus)]
        return cls(device=device, gpus=max(1, gpus), memory_bytes=min(sizes, default=math.inf))

    @property
    def scale(self) -> Scale:
        return REHEARSAL if self.device == "cpu" else ON_GPU

    def devices(self, ranks: int, *, shared: bool = False) -> tuple[str, ...]:
        """One for each rank; `shared`: the first GPU for all of them."""
        if not self.gpus:
            return ("cpu",) * ranks
        return tuple(f"cuda:{0 if shared else rank % self.gpus}" for rank in range(ranks))


@dataclass(kw_only=True)
class BenchPart:
    """`measure` is given where to print and how long it may take; it returns figures, or raises with a sentence."""

    name: str
    title: str
    limit_s: float
    measure: Callable[[Say, float], Mapping[str, Any]]
    skipped: str = ""  # why it cannot be run here; "": it can
    outcome: str = PENDING
    reason: str = ""  # of a failure, or why it was skipped
    begun: str = ""  # UTC
    seconds: float = 0.0
    printed: list[str] = field(default_factory=list)
    figures: Mapping[str, Any] = field(default_factory=dict)

    @property
    def said(self) -> str:
        return f"{self.outcome}: {self.reason}" if self.reason else self.outcome


def listed(at: Place) -> tuple[BenchPart, ...]:
    """In the order in which they are run: what several GPUs show first. An H100 takes about nine minutes for all."""
    over_nccl, others = list(_over_nccl(at)), list(_on_one(at))
    if at.gpus >= 2:
        return (*over_nccl, *others)
    place = next(i for i, part in enumerate(others) if part.name == "metering")
    return (*others[:place], *over_nccl, *others[place:])


def _part(name: str, title: str, limit_s: float, measure: Callable[..., Any], *given: Any, why: str = "") -> BenchPart:
    """`why`: it is skipped."""
    return BenchPart(name=name, title=title, limit_s=limit_s, measure=partial(measure, *given), skipped=why)


def _on_one(at: Place) -> Iterator[BenchPart]:
    one, scale = at.devices(1), at.scale
    why = "" if at.gpus else "they need a GPU"
    yield _part("tests", "tests/gpu, where pytest is installed", 300, tests, why=why or _not_here("tests/gpu"))
    named = {**STRATEGIES, **(PINNED if at.gpus else {})}
    title = "every strategy on one rank, compared with FSDP2"
    yield _part("strategies", title, 90, strategies, named, scale.precisions, one)
    for shape in scale.shapes:
        title, plan = f"step of {shape.preset} on one rank, bf16: time and memory", replace(shape, devices=one)
        why = _too_large(at, plan.preset, len(plan.forms))
        yield _part(f"step-{shape.preset}", title, 90, step, plan, why=why)
    for ranks in scale.shared:
        yield from _sharing(at, ranks)
    here, ranks = _not_here("tests/bench"), max(1, min(at.gpus, MOST_RANKS))  # those of `python -m tests.bench`
    too_large, several = _too_large(at, at.scale.metered.split()[1], forms=12), f"--ranks {ranks}"
    for name, title, limit_s, options, why in (
        ("metering", "what measuring costs, by backend", 120, f"{METERING} {at.scale.metered}", too_large),
        ("switch", "live switches near the memory limit", 90, at.scale.switched, ""),
        ("tour", "the notebooks' steps without Jupyter", 60, "", ""),
        ("torchrun", "a Spec under torchrun", 60, several, ""),
        ("export", "an exported script, compared with the lab", 90, several, ""),
    ):
        command = [name, "--device", at.device, *options.split()]
        yield _part(name, title, limit_s, bench, command, why=here or why)


def _sharing(at: Place, ranks: int) -> Iterator[BenchPart]:
    where, devices = "one GPU" if at.gpus else "the CPU", at.devices(ranks, shared=True)
    named = {**{name: STRATEGIES[name] for name in SOME}, **(HYBRID if ranks >= 4 else {})}
    title = f"{ranks} ranks share {where}: strategies, compared with FSDP2"
    yield _part(f"share-{ranks}", title, 60, strategies, named, at.scale.precisions[:2], devices)
    plan = replace(at.scale.sharing, ranks=ranks, devices=devices)
    title = f"step of {plan.preset}, bf16, on {ranks} ranks that share {where}"
    yield _part(f"share-step-{ranks}", title, 60, step, plan)


def _over_nccl(at: Place) -> Iterator[BenchPart]:
    """Skipped with fewer than two GPUs."""
    ranks = min(at.gpus, MOST_RANKS) if at.gpus >= 2 else 2
    devices, each = at.devices(ranks), f"a rank on each of {ranks} GPUs"
    why = "" if at.gpus >= 2 else f"it needs 2 GPUs or more, and there {'is 1' if at.gpus else 'are none'}"
    named = {**STRATEGIES, **PINNED, **(HYBRID if ranks % 2 == 0 and ranks >= 4 else {})}
    title = f"collectives of {ranks} GPUs alone: bus bandwidth by size"
    yield _part("links", title, 60, links, devices, why=why)
    title = f"{each}: strategies, compared with FSDP2"
    yield _part("nccl", title, 180, strategies, named, at.scale.precisions[:2], devices, why=why)
    plan = replace(_plan("gpt2-124m", 1024, 8, STEP), ranks=ranks, devices=devices)
    why = why or _too_large(at, plan.preset, len(STEP), ranks)
    yield _part("nccl-step", f"step of {plan.preset}, bf16, with {each}", 90, step, plan, why=why)


def chosen(all_parts: Sequence[BenchPart], only: str | None) -> tuple[BenchPart, ...]:
    """The parts whose names begin with one of a comma-separated list; all without one. Raises PlanError."""
    if only is None:
        return tuple(all_parts)
    wanted = [name.strip() for name in only.split(",") if name.strip()]
    names = [part.name for part in all_parts]
    for name in wanted or [only]:
        if not name or not any(one.startswith(name) for one in names):
            raise PlanError(f"--only: there is no part {name!r}; choose from {', '.join(names)}")
    return tuple(part for part in all_parts if part.name.startswith(tuple(wanted)))


def _not_here(folder: str) -> str:
    """Why tests or benches in a folder of the clone cannot be run; "" if they can."""
    if not (REPOSITORY / folder).is_dir():
        return f"there is no folder {folder} in {REPOSITORY}"
    needed = ("pytest", "hypothesis") if folder == "tests/gpu" else ()
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    return f"{' and '.join(missing)} not installed; the other parts check the same" if missing else ""


def _too_large(at: Place, preset: str, forms: int, ranks: int = 1) -> str:
    """Why forms that all exist at a time do not fit; "" if they do. A fifth is for one form's step."""
    held_bytes = STATE_BYTES * PRESETS[preset].parameters * forms / ranks
    if held_bytes <= 0.8 * at.memory_bytes:
        return ""
    return f"its {plural(forms, 'form')} take {size(held_bytes)}, and the GPU has {size(at.memory_bytes)}"


@dataclass(kw_only=True)
class Record:
    """All that one command did."""

    facts: Mapping[str, Any]  # of the machine: printed at the top
    file: Path
    say: Say
    parts: Sequence[BenchPart] = ()

    def run(self, parts: Sequence[BenchPart], limit_s: float) -> None:
        """Runs them in order, within so many seconds together (0: no limit). A part that fails does not stop the next."""
        self.parts, begun_s = parts, time.monotonic()
        for part in parts:
            left_s = limit_s - (time.monotonic() - begun_s) if limit_s else part.limit_s
            self.say(f"== {part.name}: {part.title}")
            part.begun, part.reason = now(), part.skipped
            if not part.reason and left_s < LEAST_SHARE * part.limit_s:
                needs = f"it may need {part.limit_s:.0f}; give --only {part.name}"
                part.reason = f"{max(0.0, left_s):.0f} s were left, and {needs}"
            if part.reason:
                part.outcome = SKIPPED
            else:
                self._run(part, min(part.limit_s, left_s))
            self.say(f"{part.said} ({part.seconds:.1f} s)")
            self.write()

    def _run(self, part: BenchPart, limit_s: float) -> None:
        begun_s = time.monotonic()

        def say(line: str) -> None:
            self.say(line)
            part.printed.extend(line.splitlines())
            part.seconds = time.monotonic() - begun_s
            self.write()

        part.outcome = RUNNING
        self.write()
        try:
            part.figures = part.measure(say, limit_s)
            part.outcome = PASSED
        except Exception as e:  # of any kind: the next part may work
            part.outcome, part.reason = FAILED, " ".join(str(e).split()) or type(e).__name__
        part.seconds = time.monotonic() - begun_s

    def write(self) -> None:
        write_whole(self.file, "\n".join(self.text()).encode(), field="--out")

    def text(self) -> Iterator[str]:
        for name, value in self.facts.items():
            yield f"{name}: {value}"
        yield ""
        width = max((len(part.name) for part in self.parts), default=0)
        for part in self.parts:
            yield f"{part.name:{width}}  {part.seconds:6.1f} s  {part.said}"
        for part in self.parts:
            if part.outcome != PENDING:
                yield f"\n== {part.name}: {part.title}"
                yield "  ".join(filter(None, (part.begun, f"{part.seconds:.1f} s", part.said)))
                yield from part.printed
        yield f"\n{FIGURES}"
        told = ("name", "title", "outcome", "reason", "begun", "seconds", "printed", "figures")
        records = [{name: getattr(part, name) for name in told} for part in self.parts]
        yield json.dumps({"facts": dict(self.facts), "parts": records}) + "\n"


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def facts(at: Place) -> Iterator[tuple[str, str]]:
    """Device, versions, date: what the figures were measured on and with."""
    import torch

    from fsdp_lab.rank.measure import software

    yield "fsdp-lab bench gpu", "a rehearsal on the CPU" if at.device == "cpu" else "on a GPU"
    yield "date", now()
    yield "command", shlex.join(["fsdp-lab", *sys.argv[1:]])
    for i in range(at.gpus):
        gpu = torch.cuda.get_device_properties(i)
        yield f"device {i}", f"{gpu.name}, {size(gpu.total_memory)}, compute capability {gpu.major}.{gpu.minor}"
    if not at.gpus:
        yield "device", f"CPU, {platform.processor() or platform.machine()}"
    theirs = software(torch.device("cuda:0" if at.gpus else "cpu"))
    packages = {"fsdp_lab": f"{__version__}{_commit()}", "python": platform.python_version(), **theirs}
    packages |= {name: version(name) for name in ("transformers", "numpy", "psutil")}
    yield "versions", ", ".join(f"{name} {value}" for name, value in packages.items() if value)
    yield "machine", f"{os.cpu_count()} cores, {platform.platform()}, load average {os.getloadavg()[0]:.1f}"


def _commit() -> str:
    """The commit of the clone that this is, with a plus if files were changed; "" if it is none."""
    git = ["git", "-C", str(REPOSITORY), "describe", "--always", "--exclude=*", "--dirty=+"]
    try:
        said = subprocess.run(git, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return f" (commit {said.stdout.strip()})" if said.returncode == 0 and (REPOSITORY / ".git").exists() else ""
