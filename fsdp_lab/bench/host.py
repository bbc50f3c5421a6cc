"""`bench host`, in a rank: what a backend costs on the host.

The model is blocks of tiny layers, so that a step is host time. On a CPU that is the CPU time of the main thread, which
sleeps while it waits (shared memory does not spin here); on a GPU, whose backward is in another thread, wall time."""

import cProfile
import gc
import pstats
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdp_lab.backends import fully_shard, sharded_parameters
from fsdp_lab.bench.interleave import mesh_of, synchronize
from fsdp_lab.bench.plan import BenchPlan, Form
from fsdp_lab.rank.rendezvous import RankInfo
from fsdp_lab.wire import Wire

OURS = ("lab", "lab-flat")  # lab-flat: its optimizer is given `sharded_parameters(model)`
PEERS = ("ddp", "fsdp1", "fsdp2", *OURS)
PLAIN, AGAIN = Form(name="plain", peer="plain", group="raw"), Form(name="lab-raw-again", peer="lab", group="raw")
FORMS = (*(Form(name=f"{peer}-{group}", peer=peer, group=group) for group in ("raw", "wire") for peer in PEERS), AGAIN)
# Functions of buffer.py.
_GRADIENTS = ("receive", "collect", "take", "accumulate", "advance", "_reduce_scatter", "_to_mean")
_COLLECTIVES = tuple(f"engine/collectives.py:{name}" for name in ("all_gather", "reduce_scatter", "all_reduce"))
# Parts of a file's path and function: the first place counts. What a built-in function takes is its caller's.
PLACES: Mapping[str, Sequence[str]] = {
    "hooks": ("engine/hooks", "engine/runtime"),
    "gradients": tuple("engine/buffer.py:" + name for name in _GRADIENTS),
    "views": ("engine/buffer", "engine/unit", "engine/extras/", "distributed/tensor/"),
    "wire": ("fsdp_lab/wire/", "distributed/distributed_c10d", "distributed/c10d_logger", *_COLLECTIVES),
    "optimizer": ("torch/optim/",),
    "other of ours": ("fsdp_lab/",),
    "rest": ("",),
}
WIDTH = 8  # of layers


class _Block(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)  # type: ignore[no-any-return, no-untyped-call]


def build(form: Form, work: Mapping[str, Any], mesh: DeviceMesh, device: torch.device, *, low: bool) -> Any:
    """The model and its optimizer. `low`: FSDP gathers in bf16 and reduces in fp32, DDP has autocast, plain is bf16."""
    torch.manual_seed(0)
    blocks = [_Block(*(nn.Linear(WIDTH, WIDTH) for _ in range(work["layers"]))) for _ in range(work["blocks"])]
    model: Any = nn.Sequential(*blocks).to(device)
    dtypes: Any = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32} if low else {}
    if form is PLAIN and low:
        model.bfloat16().register_forward_pre_hook(lambda _, inputs: inputs[0].bfloat16())
    elif form.peer == "ddp":
        model = nn.parallel.DistributedDataParallel(model, process_group=mesh.get_group())
        model.forward = torch.autocast(device.type, torch.bfloat16, enabled=low)(model.forward)
    elif form.peer == "fsdp1":
        policy, mixed = fsdp.wrap.ModuleWrapPolicy({_Block}), fsdp.MixedPrecision(**dtypes)
        wrap = partial(fsdp.FullyShardedDataParallel, device_id=device, use_orig_params=True)
        model = wrap(model, device_mesh=mesh, auto_wrap_policy=policy, mixed_precision=mixed)
    elif form is not PLAIN:
        shard: Any = fully_shard if form.peer in OURS else fsdp.fully_shard
        for module in (*blocks, model):
            shard(module, mesh=mesh, mp_policy=fsdp.MixedPrecisionPolicy(**dtypes))
    parameters = sharded_parameters(model) if form.peer == "lab-flat" else model.parameters()
    return model, torch.optim.AdamW(parameters, foreach=True)  # the default on a GPU


def measure(plan: BenchPlan, work: Mapping[str, Any], info: RankInfo, world: Wire) -> dict[str, dict[str, Any]]:
    """By form: seconds, losses, where its time goes, what it makes; but ours over the Wire where it sends nothing."""
    meshes, context = {group: mesh_of(info, world, group) for group in ("raw", "wire")}, world.context
    alone, low, wall = plan.ranks == 1, plan.precision != "fp32", time.perf_counter
    clocks = (time.thread_time if info.device.type == "cpu" else wall, time.process_time, wall)
    forms = [f for f in FORMS if f.name in work["forms"] and not (alone and f.group == "wire" and f.peer in OURS)]
    built = {f.name: build(f, work, meshes[f.group], info.device, low=low) for f in (PLAIN, *forms)}
    seconds: dict[str, list[Any]] = {form: [] for form in built}  # [rounds, clocks, 3]: forward+backward, update, both
    losses, generator = dict[str, float](), torch.Generator().manual_seed(info.rank)

    def step(form: str, around: AbstractContextManager[Any] | None = None) -> None:
        (model, optimizer), times = built[form], []
        world.control(torch.zeros(1, dtype=torch.float64))  # a barrier
        synchronize(info.device)
        context.start_timing()
        with around or nullcontext():
            times.append([clock() for clock in clocks])
            loss = model(x).float().square().mean()
            torch.autograd.backward(loss)
            times.append([clock() for clock in clocks])
            optimizer.step()
            optimizer.zero_grad()
            times.append([clock() for clock in clocks])
        seconds[form].append([[m - b, e - m, e - b] for b, m, e in zip(*times, strict=True)])
        losses[form] = float(loss)
        context.end_timing()()
        context.meter.take()

    for i in range(plan.warmup + plan.steps):
        if i == plan.warmup:
            gc.collect()
            gc.freeze()  # as in interleave.py
        x = torch.randn(2, WIDTH, generator=generator).to(info.device)
        for name in random.Random(i).sample(list(built), len(built)):  # after another one in each round
            step(name)
    counted, last = {name: of[plan.warmup :] for name, of in seconds.items()}, dict(losses)
    ours = [form.name for form in forms if form.peer in OURS and form is not AGAIN]
    shares, made = ({name: look(partial(step, name)) for name in ours} for look in (places, tensors_made))
    return {"seconds": counted, "losses": last, "places": shares, "made": made}


def tensors_made(step: Callable[[], object], steps: int = 3) -> tuple[list[int], int]:
    """How many DTensors each of some steps makes, and how many more tensors live after the last than after the first."""
    made, alive, make = list[int](), list[int](), DTensor.__new__

    def counted(cls: Any, *args: Any, **options: Any) -> Any:
        made[-1] += 1
        return make(cls, *args, **options)

    with patch.object(DTensor, "__new__", staticmethod(counted)):
        for _ in range(steps):
            made.append(0)
            step()
            gc.collect()
            alive.append(sum(issubclass(type(o), Tensor) for o in gc.get_objects()))
    return made, alive[-1] - alive[0]


def places(step: Callable[[Any], object], steps: int = 5) -> dict[str, float]:
    """Shares of the main thread's CPU time under a profiler, by `PLACES`."""
    seconds, profiler = dict.fromkeys(PLACES, 0.0), cProfile.Profile(time.thread_time)
    with torch.autograd.set_multithreading_enabled(False):  # a GPU's backward too
        for _ in range(steps):
            step(profiler)
    stats: Mapping[Any, Any] = pstats.Stats(profiler).stats  # type: ignore[attr-defined]
    for called, (_, _, own_s, _, callers) in stats.items():
        for (file, _, name), s in [(by, c[2]) for by, c in callers.items()] if called[0] == "~" else [(called, own_s)]:
            path = f"{file}:{name}"
            seconds[next(place for place, parts in PLACES.items() if any(part in path for part in parts))] += s
    return {place: s / sum(seconds.values()) for place, s in seconds.items()}
