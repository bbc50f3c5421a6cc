"""The loop of one rank: every form built, then one step of each in turn, round after round.

Note: what is timed. A barrier stands before each step and is not timed; then forward, backward, update and the dropping
of the gradients are, until the device has done them. What is noise to one form of a round is noise to its neighbours.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fsdp_lab.backends import Backend, build, fill
from fsdp_lab.backends.base import state_slots
from fsdp_lab.bench.forms import FORMS, Form
from fsdp_lab.bench.metering import Metered, Tell
from fsdp_lab.bench.plan import Plan
from fsdp_lab.engine import blocks
from fsdp_lab.models import Initializer, build_skeleton, resolve
from fsdp_lab.rank.rendezvous import Seat
from fsdp_lab.wire import Reduction, Wire

Batch = Mapping[str, Tensor]


@dataclass(kw_only=True)
class Standing:
    """A form that is built, and what was measured of it on this rank."""

    form: Form
    backend: Backend
    seconds: list[float] = field(default_factory=list)
    loss: Tensor = field(default_factory=lambda: torch.zeros(()))  # of the newest step
    squared_norm: float = 0.0  # this rank's share of the first step's squared gradient norm
    peak_bytes: int = 0  # of this form alone, on a GPU; 0 on a CPU, where no allocator counts
    metered: Metered | None = None

    def said(self) -> dict[str, Any]:
        loss = float(self.loss)
        return {"seconds": self.seconds, "loss": loss, "squared_norm": self.squared_norm, "peak_bytes": self.peak_bytes}


def interleave(
    plan: Plan, seat: Seat, world: Wire, tell: Callable[[int], None], tell_events: Tell = lambda events: None
) -> dict[str, dict[str, Any]]:
    """Collective. Calls `tell` with each round that is over, warm-up counted too, and `tell_events` with the step events of
    metered forms; returns what `Measured` is made of."""
    forms = list(raise_forms(plan, seat, world, tell_events))
    batches = list(batches_of(plan, seat))
    for i, batch in enumerate(batches):
        if i == plan.warmup:
            gc.collect()
            gc.freeze()  # what stands by now is many models: searching it would be counted as some form's time
        for standing in forms if i % 2 else forms[::-1]:  # there and back: nobody always follows the same one
            seconds = step(standing, batch, seat.device, world, first=i == 0)
            if i >= plan.warmup:
                standing.seconds.append(seconds)
                standing.peak_bytes = max(standing.peak_bytes, _peak(standing.backend, seat.device))
        tell(i + 1)
    return {standing.form.name: standing.said() for standing in forms}


def batches_of(plan: Plan, seat: Seat) -> Iterator[Batch]:
    """Random tokens, of its own for each rank and round, the same for all forms."""
    generator = torch.Generator().manual_seed(plan.seed * plan.ranks + seat.rank)
    for _ in range(plan.warmup + plan.steps):
        ids = torch.randint(plan.vocab, (plan.micro_batch, plan.seq_len), generator=generator).to(seat.device)
        yield {"input_ids": ids, "labels": ids}


# -- building --------------------------------------------------------------------------------------------------------


def raise_forms(plan: Plan, seat: Seat, world: Wire, tell_events: Tell = lambda events: None) -> Iterator[Standing]:
    """Build every form of the plan, with equal initial values; collective."""
    raw = _raw_mesh(seat, world) if any(FORMS[name].on == "raw" for name in plan.forms) else None
    config = resolve(plan.model)
    for name in plan.forms:
        form = FORMS[name]
        skeleton = build_skeleton(config)
        initial = Initializer(skeleton, plan.seed)
        backend = build(skeleton, plan.spec(form), seat.device, mesh=raw if form.on == "raw" else None)
        fill(backend, initial)
        _keep_last(backend.module, form.keep_last)
        metered = Metered(plan, seat, world, backend, tell_events) if form.metered else None
        yield Standing(form=form, backend=backend, metered=metered)


def _raw_mesh(seat: Seat, world: Wire) -> DeviceMesh:
    """All ranks on a group of torch's own, beside the Wire."""
    over_gloo = seat.device.type == "cpu" or seat.shares_gpu
    group = dist.new_group(backend="gloo" if over_gloo else "nccl", timeout=world.hub.timeout)
    return DeviceMesh.from_group(group, seat.device.type, mesh_dim_names=("shard",))


def _keep_last(model: nn.Module, count: int) -> None:
    """FSDP2: do not reshard the last blocks after their forward; the backward begins with them."""
    for block in blocks(model)[-count:] if count else []:
        block.set_reshard_after_forward(False)  # type: ignore[operator]


# -- one step --------------------------------------------------------------------------------------------------------


def step(standing: Standing, batch: Batch, device: torch.device, world: Wire, *, first: bool) -> float:
    """Train one step; returns its seconds on this rank. In the first, which is not counted, the gradients are looked at."""
    backend, metered = standing.backend, standing.metered
    world.hub.reduction = Reduction(standing.form.reduction)
    world.control(torch.zeros(1, dtype=torch.float64))  # a barrier
    _synchronize(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    begun_s = time.perf_counter()
    with metered.step() if metered else nullcontext():
        with backend.micro_batch(communicate=True):
            loss = backend.loss(batch)
            if metered:
                metered.measure.part("backward")
            torch.autograd.backward(loss)
        if first:
            standing.squared_norm = _squared_norm(backend)
        if metered:
            metered.measure.before_update()
            metered.measure.part("optimizer")
        backend.optimizer.step()
        if metered:
            metered.measure.after_update()
        backend.optimizer.zero_grad(set_to_none=True)
    _synchronize(device)
    if metered:
        metered.tell()
    seconds = time.perf_counter() - begun_s
    standing.loss = loss.detach()
    return seconds


def _peak(backend: Backend, device: torch.device) -> int:
    """What the last step allocated beyond what stood before it, and of that the form's own part: other forms stand there
    too. Nothing is left of the step now, so what stands is the same as before it."""
    if device.type != "cuda":
        return 0
    slots = [state_slots(backend.optimizer, p) for p in backend.pieces()]
    own = sum(p.local.nbytes for p in backend.pieces()) + sum(t.nbytes for s in slots for t in s.values())
    others = torch.cuda.memory_allocated(device) - own - backend.standing_bytes()
    return torch.cuda.max_memory_allocated(device) - others


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _squared_norm(backend: Backend) -> float:
    """This rank's share: summed over ranks it is that of the whole gradient."""
    gradients = [g for g in map(backend.gradient, backend.pieces()) if g is not None]
    return sum(float(g.double().square().sum()) for g in gradients) / backend.replicas
