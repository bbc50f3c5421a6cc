"""`bench gpu`: all that only a GPU can show, as one list. parts.py has what each does; record.py runs and records them.

On a CPU the same list is rehearsed with small models: it shows that each part works, and its times say nothing about a
GPU. Each part starts processes of its own, so that a crash of one, or memory that it does not give back, touches no other.
"""

from __future__ import annotations

import importlib.util
import math
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fsdp_lab.bench import parts
from fsdp_lab.bench.parts import HYBRID, PINNED, REPOSITORY, SOME, STRATEGIES
from fsdp_lab.bench.plan import CONTROL, LAB, METERED_PEERS, METERING, REFERENCE, STEP, BenchPlan, PlanError
from fsdp_lab.bench.record import BenchPart, now
from fsdp_lab.core import __version__
from fsdp_lab.core.formatting import plural, size
from fsdp_lab.models.presets import PRESETS

STATE_BYTES = 16  # per parameter of a form in fp32: values, two moments, gradients that DDP keeps
MOST_RANKS = 8  # of the parts with a rank on each GPU


def llama(width: int, layers: int, vocabulary: int) -> dict[str, Any]:
    """A model for the switches, of units of about one size."""
    return {"model_type": "llama", "vocab_size": vocabulary, "hidden_size": width, "num_hidden_layers": layers,
            "num_attention_heads": width // 64, "num_key_value_heads": width // 64, "intermediate_size": 4 * width,
            "tie_word_embeddings": True, "max_position_embeddings": 1024, "bos_token_id": None,
            "eos_token_id": 1}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What is measured of a preset."""

    preset: str
    seq_len: int
    micro_batch: int
    forms: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How large and how long the parts are."""

    shapes: tuple[Shape, ...]
    steps: int  # counted ones of each form
    shared: tuple[int, ...]  # numbers of ranks that share one GPU
    sharing: Shape  # what they train
    metered: Shape
    metered_steps: int  # counted ones of each form
    precisions: tuple[str, ...]
    switched: Mapping[str, Any]  # a config


_BOTH = (LAB, REFERENCE, "fsdp2-wire", CONTROL)
# Where ranks share a GPU.
_OVER_WIRE = (LAB, "fsdp2-wire", "ddp-wire", CONTROL)
_METERED = tuple(form for peer in METERED_PEERS for form in METERING[peer])  # in one launch: few launches measure all
ON_GPU = Scale(
    shapes=(
        Shape(preset="gpt2-124m", seq_len=1024, micro_batch=8, forms=_BOTH),
        Shape(preset="gpt2-355m", seq_len=1024, micro_batch=4, forms=_BOTH),
        Shape(preset="llama-1b", seq_len=1024, micro_batch=2, forms=(LAB, REFERENCE, CONTROL)),
    ),
    steps=20,
    shared=(2, 4),
    sharing=Shape(preset="gpt2-30m", seq_len=128, micro_batch=2, forms=_OVER_WIRE),
    metered=Shape(preset="gpt2-124m", seq_len=512, micro_batch=8, forms=_METERED),
    metered_steps=30,
    precisions=("fp32", "bf16", "fp16"),
    switched=llama(2048, 14, 32000),
)
REHEARSAL = Scale(
    shapes=(
        Shape(preset="gpt2-1m", seq_len=16, micro_batch=1, forms=(LAB, REFERENCE)),
        Shape(preset="llama-1m", seq_len=16, micro_batch=1, forms=(LAB, REFERENCE)),
    ),
    steps=2,
    shared=(2,),
    sharing=Shape(preset="gpt2-1m", seq_len=16, micro_batch=1, forms=_OVER_WIRE),
    metered=Shape(preset="gpt2-1m", seq_len=16, micro_batch=1, forms=_METERED),
    metered_steps=4,
    precisions=("fp32",),
    switched=llama(64, 3, 384),
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
        if not gpus and listing:
            return cls(device=device, gpus=1, memory_bytes=math.inf)
        if not gpus:
            raise PlanError(
                "bench gpu needs a GPU, and torch finds none here; "
                "give --device cpu to rehearse the same list with small models"
            )
        sizes = [torch.cuda.get_device_properties(i).total_memory for i in range(gpus)]
        return cls(device=device, gpus=gpus, memory_bytes=min(sizes))

    @property
    def scale(self) -> Scale:
        return REHEARSAL if self.device == "cpu" else ON_GPU

    @property
    def strategies(self) -> Mapping[str, Mapping[str, Any]]:
        return {**STRATEGIES, **(PINNED if self.gpus else {})}

    def devices(self, ranks: int, *, shared: bool = False) -> tuple[str, ...]:
        """One for each rank; `shared`: the first GPU for all of them."""
        if not self.gpus:
            return ("cpu",) * ranks
        return tuple(f"cuda:{0 if shared else rank % self.gpus}" for rank in range(ranks))


# -- the list ----------------------------------------------------------------------------------------------------------


def listed(at: Place) -> tuple[BenchPart, ...]:
    """In the order in which they are run: what several GPUs show first, where there are several. Limits are what each may
    take; an H100 takes about nine minutes for all."""
    programs = at.devices(max(1, min(at.gpus, MOST_RANKS)))
    metered = _plan(at.scale.metered, at.devices(1), at.scale.metered_steps)
    over_nccl = tuple(_over_nccl(at))
    return (
        *(over_nccl if at.gpus >= 2 else ()),
        BenchPart(name="tests", title="tests/gpu, where pytest is installed", limit_s=300, measure=parts.tests,
             skipped=_no_tests(at)),
        BenchPart(name="strategies", title="every strategy on one rank, compared with FSDP2", limit_s=90,
             measure=partial(parts.strategies, at.strategies, at.scale.precisions, at.devices(1))),
        *(_step(at, shape) for shape in at.scale.shapes),
        *(part for ranks in at.scale.shared for part in _sharing(at, ranks)),
        *(() if at.gpus >= 2 else over_nccl),
        BenchPart(name="metering", title="what measuring costs, by backend", limit_s=120,
             measure=partial(parts.metering, metered), skipped=_too_large(at, metered)),
        BenchPart(name="switch", title="live switches near the memory limit", limit_s=90,
             measure=partial(parts.switch, at.scale.switched, at.devices(1))),
        BenchPart(name="tour", title="the notebooks' steps without Jupyter", limit_s=60,
             measure=partial(parts.tour, at.devices(1))),
        BenchPart(name="torchrun", title="a Spec under torchrun", limit_s=60,
             measure=partial(parts.torchrun, programs)),
        BenchPart(name="export", title="an exported script, compared with the lab", limit_s=90,
             measure=partial(parts.exported, programs)),
    )  # fmt: skip


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


def _no_tests(at: Place) -> str:
    if not at.gpus:
        return "they need a GPU"
    if not (REPOSITORY / "tests" / "gpu").is_dir():
        return f"there is no folder tests/gpu in {REPOSITORY}"
    missing = [name for name in ("pytest", "hypothesis") if importlib.util.find_spec(name) is None]
    return f"{' and '.join(missing)} not installed; the other parts check the same" if missing else ""


def _plan(shape: Shape, devices: tuple[str, ...], steps: int) -> BenchPlan:
    """In bf16."""
    return BenchPlan(preset=shape.preset, seq_len=shape.seq_len, micro_batch=shape.micro_batch, forms=shape.forms,
                     steps=steps, ranks=len(devices), devices=devices, precision="bf16")  # fmt: skip


def _step(at: Place, shape: Shape) -> BenchPart:
    plan = _plan(shape, at.devices(1), at.scale.steps)
    return BenchPart(name=f"step-{shape.preset}", title=f"step of {shape.preset} on one rank, bf16: time and memory",
                limit_s=90, measure=partial(parts.step, plan), skipped=_too_large(at, plan))  # fmt: skip


def _sharing(at: Place, ranks: int) -> Iterator[BenchPart]:
    where = "one GPU" if at.gpus else "the CPU"
    devices, named = at.devices(ranks, shared=True), {name: STRATEGIES[name] for name in SOME}
    hybrid = HYBRID if ranks >= 4 else {}
    yield BenchPart(name=f"share-{ranks}", title=f"{ranks} ranks share {where}: strategies, compared with FSDP2", limit_s=60,
               measure=partial(parts.strategies, {**named, **hybrid}, at.scale.precisions[:2], devices))  # fmt: skip
    plan = _plan(at.scale.sharing, devices, max(2, at.scale.steps // 2))
    yield BenchPart(name=f"share-step-{ranks}", title=f"step of {plan.preset}, bf16, on {ranks} ranks that share {where}",
               limit_s=60, measure=partial(parts.step, plan))  # fmt: skip


def _over_nccl(at: Place) -> Iterator[BenchPart]:
    """Skipped with fewer than two GPUs."""
    ranks = min(at.gpus, MOST_RANKS) if at.gpus >= 2 else 2
    devices = at.devices(ranks)
    skipped = "" if at.gpus >= 2 else f"it needs 2 GPUs or more, and there {'is 1' if at.gpus else 'are none'}"
    hybrid = HYBRID if ranks % 2 == 0 and ranks >= 4 else {}
    yield BenchPart(name="links", title=f"collectives of {ranks} GPUs alone: bus bandwidth by size", limit_s=60,
               measure=partial(parts.links, devices), skipped=skipped)  # fmt: skip
    yield BenchPart(name="nccl", title=f"a rank on each of {ranks} GPUs: strategies, compared with FSDP2", limit_s=180,
               measure=partial(parts.strategies, {**at.strategies, **hybrid}, at.scale.precisions[:2], devices),
               skipped=skipped)  # fmt: skip
    shape = Shape(preset="gpt2-124m", seq_len=1024, micro_batch=8, forms=STEP)
    plan = _plan(shape, devices, at.scale.steps)
    yield BenchPart(name="nccl-step", title=f"step of {plan.preset}, bf16, with a rank on each of {ranks} GPUs", limit_s=90,
               measure=partial(parts.step, plan), skipped=skipped or _too_large(at, plan))  # fmt: skip


def _too_large(at: Place, plan: BenchPlan) -> str:
    """Why the forms of a plan, which all exist at a time, do not fit; "" if they do. A fifth is for one form's step."""
    held_bytes = STATE_BYTES * PRESETS[plan.preset].parameters * len(plan.forms) / plan.ranks
    if held_bytes <= 0.8 * at.memory_bytes:
        return ""
    return f"its {plural(len(plan.forms), 'form')} take {size(held_bytes)}, and the GPU has {size(at.memory_bytes)}"


# -- what it runs on ---


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
    found = software(torch.device("cuda:0" if at.gpus else "cpu"))
    packages = {"fsdp_lab": f"{__version__}{_commit()}", "python": platform.python_version(), **found}
    packages |= {name: _installed(name) for name in ("transformers", "numpy", "psutil")}
    yield "versions", ", ".join(f"{name} {value}" for name, value in packages.items() if value)
    yield "machine", f"{os.cpu_count()} cores, {platform.platform()}, load average {os.getloadavg()[0]:.1f}"


def _commit() -> str:
    """Of the clone that this is, with a plus if files were changed; "" if it is none."""
    if not (REPOSITORY / ".git").exists():
        return ""
    try:
        git = ["git", "-C", str(REPOSITORY)]
        commit = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, timeout=10)
        changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return f" (commit {commit.stdout.strip()}{'+' * bool(changed.stdout.strip())})" if commit.returncode == 0 else ""


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "is not installed"
