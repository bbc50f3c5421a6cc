"""`bench gpu`: what only a GPU can show, as a list of parts, and the file of results. What a part does is a function: it
prints what it finds and returns it, or raises BenchError with what is wrong.

On a CPU the same list is rehearsed with small models. Each part starts processes of its own, so that a crash of one,
or memory that it does not give back, touches no other.

The file is text for a reader; after the line `FIGURES` it is JSON: {"facts": {...}, "parts": [{"name", "title", "outcome",
"reason", "begun", "seconds", "printed", "figures"}, ...]}. It is written anew with each line that is printed, so that a
session that is cut off leaves what it had."""

import json
import math
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

from fsdp_lab.base import __version__
from fsdp_lab.base.errors import ArgumentError
from fsdp_lab.base.files import write_whole
from fsdp_lab.base.formatting import Table, duration, plural, size
from fsdp_lab.bench.launch import launch
from fsdp_lab.bench.plan import CONTROL, LAB, REFERENCE, STEP, BenchError, BenchPlan
from fsdp_lab.bench.results import BUSY, TOLERANCES, Say, busy_cells, relative_difference, step
from fsdp_lab.models.presets import PRESETS
from fsdp_lab.spec.spec import Spec

REPOSITORY = Path(__file__).resolve().parents[2]
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
    "lab, vote read late": {"optimizer_args": {"fused": True}},
    "lab, vote read at once": {"optimizer_args": {"fused": True}, "clip_norm": 1e9},
    "fsdp2, offload all": {"backend": "fsdp2", "offload": "all"},
    "fsdp1": {"backend": "fsdp1"},
    "ddp": {"backend": "ddp", "sharding": "no_shard"},
}
# On a GPU alone.
PINNED: Mapping[str, Mapping[str, Any]] = {"fsdp1, offload all": {"backend": "fsdp1", "offload": "all"}}
HYBRID: Mapping[str, Mapping[str, Any]] = {"lab, hybrid": {"sharding": "hybrid_shard", "shard_size": 2}}
SOME = ("fsdp2", "lab", "lab, shard_grad_op", "lab, zero1", "lab, offload all", "fsdp1", "ddp")


def strategies(
    named: Mapping[str, Mapping[str, Any]], precisions: Sequence[str], devices: Sequence[str], say: Say, limit_s: float
) -> dict[str, Any]:
    """Eight steps of each from the same values on the same batches. Fails where losses are not those of FSDP2."""
    base = Spec(world_size=len(devices)).replace(model="gpt2-1m", seq_len=64, micro_batch=2, lr=0.01)
    specs = {(name, p): base.replace(**changes, precision=p) for p in precisions for name, changes in named.items()}
    by_spec = dict(zip(specs, trained(list(specs.values()), 8, devices, limit_s), strict=True))
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
    if "error" in other:
        return "FSDP2 failed", True
    difference = relative_difference(one["losses"], other["losses"])
    if difference == 0 and one["checksum"] == other["checksum"]:
        return "equal bit for bit", False
    return f"losses differ by {difference:.1e}, {ALLOWED[precision]:g} allowed", not difference <= ALLOWED[precision]


def timed(plan: BenchPlan, say: Say, limit_s: float) -> dict[str, Any]:
    """`bench step`."""
    return step(replace(plan, limit_s=limit_s), say)


FIGURES = "-- the same as JSON, with all figures --"
STATE_BYTES = 16  # per parameter of a form in fp32: values, two moments, gradients that DDP keeps
MOST_RANKS = 8  # of the parts with a rank on each GPU
LEAST_SHARE = 0.5  # of its limit: a part that has less time is skipped
PENDING, RUNNING, PASSED, FAILED, SKIPPED = "not begun", "not finished", "passed", "failed", "skipped"


_plan = partial(BenchPlan, ranks=1, precision="bf16")
_tiny = partial(_plan, seq_len=16, micro_batch=1, steps=2)
_BOTH = (LAB, REFERENCE, "fsdp2-wire", CONTROL)
_OVER_WIRE = (LAB, "fsdp2-wire", "ddp-wire", CONTROL)  # where ranks share a GPU


@dataclass(frozen=True, kw_only=True)
class Scale:
    """The sizes and lengths of the parts."""

    shapes: tuple[BenchPlan, ...]
    shared: tuple[int, ...]  # numbers of ranks that share one GPU
    sharing: BenchPlan  # what they train
    precisions: tuple[str, ...]


ON_GPU = Scale(
    shapes=(
        _plan(preset="gpt2-124m", seq_len=1024, micro_batch=8, steps=20, forms=_BOTH),
        _plan(preset="gpt2-355m", seq_len=1024, micro_batch=4, steps=20, forms=_BOTH),
        _plan(preset="llama-1b", seq_len=1024, micro_batch=2, steps=20, forms=(LAB, REFERENCE, CONTROL)),
    ),
    shared=(2, 4),
    sharing=_plan(preset="gpt2-30m", seq_len=128, steps=10, forms=_OVER_WIRE),
    precisions=("fp32", "bf16", "fp16"),
)
REHEARSAL = Scale(
    shapes=tuple(_tiny(preset=preset, forms=(LAB, REFERENCE)) for preset in ("gpt2-1m", "llama-1m")),
    shared=(2,),
    sharing=_tiny(preset="gpt2-1m", forms=_OVER_WIRE),
    precisions=("fp32",),
)


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where the parts run. Of a CPU: no GPU, and memory without an end."""

    gpus: int = 0
    memory_bytes: float = math.inf  # of the smallest GPU

    @classmethod
    def here(cls, device: str) -> Self:
        """Raises ArgumentError where there is no GPU."""
        if device == "cpu":
            return cls()
        import torch

        if not (gpus := torch.cuda.device_count()):
            hint = "give --device cpu to rehearse the same list with small models"
            raise ArgumentError("--device", "torch finds no GPU here", hint)
        sizes = [torch.cuda.get_device_properties(i).total_memory for i in range(gpus)]
        return cls(gpus=gpus, memory_bytes=min(sizes))

    @property
    def scale(self) -> Scale:
        return ON_GPU if self.gpus else REHEARSAL

    def devices(self, ranks: int, *, shared: bool = False) -> tuple[str, ...]:
        """One for each rank; `shared`: the first GPU for all of them."""
        if not self.gpus:
            return ("cpu",) * ranks
        return tuple(f"cuda:{0 if shared else rank % self.gpus}" for rank in range(ranks))

    def lacks_memory(self, preset: str, forms: int, ranks: int = 1) -> str:
        """Why forms that all exist at a time do not fit; "" if they do. A fifth is for one form's step."""
        held_bytes = STATE_BYTES * PRESETS[preset].parameters * forms / ranks
        if held_bytes <= 0.8 * self.memory_bytes:
            return ""
        return f"its {plural(forms, 'form')} take {size(held_bytes)}, and the GPU has {size(self.memory_bytes)}"


@dataclass
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
        outcome = f"{self.outcome}: {self.reason}" if self.reason else self.outcome
        return f"{self.name:14}  {self.seconds:6.1f} s  {outcome}"


def listed(at: Place) -> tuple[BenchPart, ...]:
    """In the order in which they are run: what several GPUs show first. An H100 takes about five minutes for all."""
    return (*_over_nccl(at), *_on_one(at))


def _over_nccl(at: Place) -> Iterator[BenchPart]:
    """Skipped with fewer than two GPUs."""
    ranks = min(at.gpus, MOST_RANKS) if at.gpus >= 2 else 2
    devices, each = at.devices(ranks), f"a rank on each of {ranks} GPUs"
    why = "" if at.gpus >= 2 else "it needs 2 GPUs or more"
    named = {**STRATEGIES, **PINNED, **(HYBRID if ranks % 2 == 0 and ranks >= 4 else {})}
    title = f"{each}: strategies, compared with FSDP2"
    yield BenchPart("nccl", title, 180, partial(strategies, named, at.scale.precisions[:2], devices), why)
    plan = replace(ON_GPU.shapes[0], forms=STEP, ranks=ranks, devices=devices)
    why = why or at.lacks_memory(plan.preset, len(STEP), ranks)
    yield BenchPart("nccl-step", f"step of {plan.preset}, bf16, with {each}", 90, partial(timed, plan), why)


def _on_one(at: Place) -> Iterator[BenchPart]:
    one, scale, where = at.devices(1), at.scale, "one GPU" if at.gpus else "the CPU"
    named = {**STRATEGIES, **(PINNED if at.gpus else {})}
    title = "every strategy on one rank, compared with FSDP2"
    yield BenchPart("strategies", title, 90, partial(strategies, named, scale.precisions, one))
    for shape in scale.shapes:
        title, why = f"step of {shape.preset}, bf16, on one rank", at.lacks_memory(shape.preset, len(shape.forms))
        yield BenchPart(f"step-{shape.preset}", title, 90, partial(timed, replace(shape, devices=one)), why)
    for ranks in scale.shared:
        devices = at.devices(ranks, shared=True)
        named = {**{name: STRATEGIES[name] for name in SOME}, **(HYBRID if ranks >= 4 else {})}
        title = f"{ranks} ranks share {where}: strategies, compared with FSDP2"
        yield BenchPart(f"share-{ranks}", title, 60, partial(strategies, named, scale.precisions[:2], devices))
        plan = replace(scale.sharing, ranks=ranks, devices=devices)
        title = f"step of {plan.preset}, bf16, on {ranks} ranks that share {where}"
        yield BenchPart(f"share-step-{ranks}", title, 60, partial(timed, plan))


def chosen(all_parts: Sequence[BenchPart], only: str | None) -> tuple[BenchPart, ...]:
    """The parts whose names begin with one of a comma-separated list; all without one. Raises ArgumentError."""
    wanted = ("",) if only is None else tuple(name.strip() for name in only.split(",") if name.strip())
    unknown = [name for name in wanted if not any(part.name.startswith(name) for part in all_parts)]
    if unknown or not wanted:
        hint = f"choose from {', '.join(part.name for part in all_parts)}"
        raise ArgumentError("--only", f"there is no part {[*unknown, only][0]!r}", hint)
    return tuple(part for part in all_parts if part.name.startswith(wanted))


@dataclass(kw_only=True)
class Record:
    """The file of results of one command."""

    file: Path
    facts: Mapping[str, Any]  # of the machine
    parts: Sequence[BenchPart]
    printed: list[str] = field(default_factory=list)

    def run(self, limit_s: float) -> None:
        """Runs the parts in order, within so many seconds together (0: no limit); one that fails does not stop the next."""
        begun_s = time.monotonic()
        for name, value in self.facts.items():
            self.say(f"{name}: {value}")
        for part in self.parts:
            left_s = limit_s - (time.monotonic() - begun_s) if limit_s else part.limit_s
            part.begun, part.reason = now(), part.skipped
            if not part.reason and left_s < LEAST_SHARE * part.limit_s:
                needs = f"it may need {part.limit_s:.0f}; give --only {part.name}"
                part.reason = f"{max(0.0, left_s):.0f} s were left, and {needs}"
            part.outcome = SKIPPED if part.reason else RUNNING
            self.say(f"\n== {part.name}: {part.title}")
            if not part.reason:
                self._run(part, min(part.limit_s, left_s))
            self.say(part.said)
        self.say("")
        for part in self.parts:
            self.say(part.said)

    def _run(self, part: BenchPart, limit_s: float) -> None:
        def say(text: str) -> None:
            part.printed.extend(text.splitlines())
            self.say(text)

        begun_s = time.monotonic()
        try:
            part.figures = part.measure(say, limit_s)
            part.outcome = PASSED
        except Exception as e:  # of any kind: the next part may work
            part.outcome, part.reason = FAILED, " ".join(str(e).split()) or type(e).__name__
        part.seconds = time.monotonic() - begun_s

    def say(self, text: str) -> None:
        """Prints text and writes the file anew."""
        print(text, flush=True)
        self.printed += text.splitlines() or [""]
        told = ("name", "title", "outcome", "reason", "begun", "seconds", "printed", "figures")
        records = [{name: getattr(part, name) for name in told} for part in self.parts]
        figures = json.dumps({"facts": dict(self.facts), "parts": records})
        write_whole(self.file, "\n".join([*self.printed, "", FIGURES, figures, ""]).encode(), field="--out")


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def facts(at: Place) -> Iterator[tuple[str, str]]:
    """Device, versions, date: what the figures were measured on and with."""
    import torch

    from fsdp_lab.rank.measure import software

    yield "fsdp-lab bench gpu", "on a GPU" if at.gpus else "a rehearsal on the CPU"
    yield "date", now()
    yield "command", shlex.join(["fsdp-lab", *sys.argv[1:]])
    for i in range(at.gpus):
        gpu = torch.cuda.get_device_properties(i)
        yield f"device {i}", f"{gpu.name}, {size(gpu.total_memory)}, compute capability {gpu.major}.{gpu.minor}"
    packages = {"fsdp_lab": f"{__version__}{_commit()}", "python": platform.python_version()}
    packages |= software(torch.device("cuda:0" if at.gpus else "cpu")) | {"transformers": version("transformers")}
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
