"""What a rank of `bench gpu` does by its `Session`: it trains Specs, switches, and takes the notebooks' steps.

Each task is a function of `TASKS`: it is given the session and the job, and returns plain values.

Note: the limit of a switch. With AdamW a step takes more than what is held between steps: gradients, and the temporaries of
the update. So a model that fills a GPU between steps cannot be trained on it, and `switches` lowers this process's limit for
the time of each switch instead: to `held / FILLED`, where `held` is 16 bytes a parameter (fp32 values, two moments, and the
gradients that DDP keeps in its buckets), the most that any of the layouts holds. A switch that held two models would need
24 bytes a parameter, and the allocator refuses more than 20.
"""

from __future__ import annotations

import gc
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
from torch import distributed as dist
from torch import nn

from fsdp_lab.bench.loading import load_and_step
from fsdp_lab.bench.plan import BenchPlan
from fsdp_lab.core.checkpoint_format import find
from fsdp_lab.core.errors import SpecError
from fsdp_lab.core.events import StepEvent
from fsdp_lab.core.spec import Spec
from fsdp_lab.engine import fully_shard
from fsdp_lab.models import build_skeleton, resolve
from fsdp_lab.models.wrapping import units
from fsdp_lab.rank import Session
from fsdp_lab.rank.calibration import HardwareProbe
from fsdp_lab.rank.trainer import checksum

FILLED = 0.8  # of the memory that a process may take, by what it holds between steps
HELD_BYTES, STEP_BYTES = 16, 28  # per parameter: between steps, and the most within one
TIMEOUT_S = 60.0  # of a collective

Job = Mapping[str, Any]


def perform(plan: BenchPlan, rank: int, store: dist.Store, job: Job) -> Any:
    """The result of the job's task on this rank. Collective."""
    shared = plan.devices.count(plan.devices[rank]) if plan.shares_gpu else 1
    session = Session(rank=rank, world_size=plan.ranks, device=plan.devices[rank], store=store, timeout_s=TIMEOUT_S,
                      shared_gpu_ranks=shared, memory_cap=0.9 / shared if shared > 1 else None,
                      shared_memory=job.get("shares_memory", True), threads=job.get("threads"))  # fmt: skip
    try:
        return TASKS[job["task"]](session, job)
    finally:
        session.close()
        _leave(plan, rank, store)


def _leave(plan: BenchPlan, rank: int, store: dist.Store) -> None:
    """Rank 0 has the store, which the others need until they are closed."""
    closed = store.add("bench/closed", 1)
    end_s = time.monotonic() + TIMEOUT_S
    while rank == 0 and closed < plan.ranks and time.monotonic() < end_s:
        time.sleep(0.01)
        closed = store.add("bench/closed", 0)


# -- training --------------------------------------------------------------------------------------------------------


def train(session: Session, job: Job) -> list[dict[str, Any]]:
    """Some steps of each Spec from initial values. A Spec that fails has an "error" in place of figures."""
    found: list[dict[str, Any]] = []
    for spec in job["specs"]:
        try:
            session.apply("bench", spec, fresh=True)
            events = session.train(job["steps"])["events"]
        except Exception as e:  # so that one Spec does not hide what the others do
            found.append({"error": f"{type(e).__name__}: {' '.join(str(e).split())}"})
            continue
        counted = [e["step_time_s"] for e in events if StepEvent.from_dict(e).counts]
        assert session.trainer is not None and counted
        ledger = session.trainer.meter.ledger
        found.append({
            "losses": [event["mean_loss"] for event in events],
            "checksum": _checksum(session),
            "step_s": statistics.median(counted),
            "peak_bytes": max(event["memory"]["peak_bytes"] for event in events),
            "kernels": None if ledger is None or ledger.kernels is None else asdict(ledger.kernels),
        })  # fmt: skip
    return found


def links(session: Session, job: Job) -> dict[str, Any]:
    """[payload bytes, seconds] of collectives of all ranks alone, by kind."""
    return HardwareProbe(session.info, session.world).collectives(session.world)


def times(session: Session, job: Job) -> list[dict[str, Any]]:
    """Of each Spec: "steps", seconds of each from initial values, none if it is refused on these ranks; and "products", as
    of `HardwareProbe.products` before the training and after it."""
    probe = HardwareProbe(session.info, session.world)
    found: list[dict[str, Any]] = []
    before = list(probe.products(torch.float32))
    for spec in job["specs"]:
        try:
            session.apply("bench", spec, fresh=True)
        except SpecError:
            steps = []
        else:
            steps = [event["step_time_s"] for event in session.train(job["steps"])["events"]]
        after = list(probe.products(torch.float32))
        found.append({"steps": steps, "products": [*before, *after]})
        before = after
    return found


def _checksum(session: Session) -> int:
    assert session.trainer is not None
    return checksum(session.trainer.backend)


# -- switches near the limit -------------------------------------------------------------------------------------------


def switches(session: Session, job: Job) -> dict[str, Any]:
    """Trains a step under each Spec and switches to the next. Of one rank.

    Returns {"layers", "parameters", "unit_bytes", "limit_bytes", "switches": [{"before_bytes", "after_bytes",
    "peak_bytes", "seconds", "before_checksum", "after_checksum"}, ...]}; bytes of the device are None on a CPU.
    """
    device = session.info.device
    specs = [Spec.from_dict(spec) for spec in job["specs"]]
    layers, parameters, unit_bytes = _deepest(specs[0], device)
    specs = [s.replace(model={**_config(s), "num_hidden_layers": layers}) for s in specs]
    limit_bytes = int(HELD_BYTES * parameters / FILLED)
    found: list[dict[str, Any]] = []
    session.apply("bench", specs[0].to_dict(), fresh=True)
    for spec in specs[1:]:
        session.train(1)
        gc.collect()
        before, first = _allocated(device), _checksum(session)
        with _limited(device, limit_bytes):
            _reset_peak(device)
            applied = session.apply("bench", spec.to_dict())
            peak = _peak(device)
        assert applied["carried"], "a switch keeps the training"
        found.append({"before_bytes": before, "after_bytes": _allocated(device), "peak_bytes": peak,
                      "seconds": applied["seconds"], "before_checksum": first,
                      "after_checksum": _checksum(session)})  # fmt: skip
    session.train(1)  # under the last one
    return {"layers": layers, "parameters": parameters, "unit_bytes": unit_bytes, "limit_bytes": limit_bytes,
            "switches": found}  # fmt: skip


def _config(spec: Spec) -> dict[str, Any]:
    model = spec.workload.model
    assert not isinstance(model, str), "the depth is a field of a config"
    return dict(model)


def _deepest(spec: Spec, device: torch.device) -> tuple[int, int, int]:
    """Layers, parameters and bytes of the largest unit of the model with as many layers as the device's free memory takes,
    at most those of the Spec."""
    free_bytes = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else math.inf
    for layers in range(_config(spec)["num_hidden_layers"], 0, -1):
        skeleton = build_skeleton(resolve({**_config(spec), "num_hidden_layers": layers}))
        parameters = sum(p.numel() for p in skeleton.parameters())
        if STEP_BYTES * parameters <= 0.9 * free_bytes:
            break
    inside = [sum(p.numel() for m in group for p in m.parameters()) for group in units(skeleton, "block")]
    return layers, parameters, 4 * max(parameters - sum(inside), *inside)


@contextmanager
def _limited(device: torch.device, limit_bytes: int) -> Iterator[None]:
    """Within it the allocator refuses this process more than so many bytes of a GPU."""
    if device.type != "cuda":
        yield
        return
    total_bytes = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total_bytes), device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


def _allocated(device: torch.device) -> int | None:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else None


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def _peak(device: torch.device) -> int | None:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


# -- what the notebooks show -------------------------------------------------------------------------------------------


def tour(session: Session, job: Job) -> dict[str, Any]:
    """The notebooks' steps that need no Jupyter, of one rank. Returns figures of each; what fails raises."""
    spec, steps = Spec.from_dict(job["spec"]), int(job["steps"])
    session.apply("bench", spec.to_dict(), fresh=True)
    undisturbed = _losses(session, 2 * steps)
    session.apply("bench", spec.to_dict(), fresh=True)
    first = _losses(session, steps)
    with tempfile.TemporaryDirectory(prefix="fsdp_lab-bench-") as folder:
        session.save(folder)
        session.saves(wait_s=TIMEOUT_S)
        saved = str(find(folder).path)
        session.restore("bench", spec.to_dict(), saved)
        resumed = [*first, *_losses(session, steps)]
        session.restore("bench", spec.replace(**job["other"]).to_dict(), saved)
        elsewhere = [*first, *_losses(session, steps)]
    session.apply("bench", spec.to_dict(), fresh=True)
    frames = _slow_motion(session)
    session.train(1)
    calibrated = session.calibrate([spec.to_dict()], job["dtypes"], 1)
    return {
        "undisturbed": undisturbed,
        "resumed": resumed,
        "resumed elsewhere": elsewhere,
        "frames": frames,
        "product_flops_per_s": {dtype: max(flops / s for flops, s in rows)
                                for dtype, rows in calibrated["products"].items()},
        "engine": engine_loop(session.info.device),
    }  # fmt: skip


def _losses(session: Session, steps: int) -> list[float]:
    return [event["mean_loss"] for event in session.train(steps)["events"]]


def _slow_motion(session: Session) -> list[str]:
    """The phases of one step, at each of which it stopped."""
    phases: list[str] = []
    while (said := session.slow_next())["frame"] is not None:
        phases.append(said["frame"]["phase"])
    return phases


def engine_loop(device: torch.device) -> dict[str, list[float]]:
    """The README's loop: losses of a model that `fully_shard` sharded, and of the same one without."""
    found = {}
    for name in ("sharded", "plain"):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4))).to(device)
        if name == "sharded":
            for layer in model:
                fully_shard(layer)
            fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters())
        losses = []
        for _ in range(3):
            loss = model(torch.randn(8, 32).to(device)).square().mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        found[name] = losses
    return found


TASKS: Mapping[str, Callable[[Session, Job], Any]] = {
    "train": train, "links": links, "times": times, "switches": switches, "tour": tour, "load": load_and_step
}  # fmt: skip
