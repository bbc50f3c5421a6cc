"""The loop of one rank: builds every form, then does one step of each in turn, round after round.

Note: what is timed. The barrier before each step is not; forward, backward, update and zeroing the gradients are, until the
device has finished them. Noise in one round affects all of its forms alike.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fsdp_lab.backends import Backend, build, fill
from fsdp_lab.backends.base import state_slots
from fsdp_lab.bench.plan import FORMS, BenchPlan, Form
from fsdp_lab.core.events import StepEvent
from fsdp_lab.models import Initializer, build_skeleton, resolve
from fsdp_lab.models.wrapping import blocks
from fsdp_lab.rank.measure import StepMeter
from fsdp_lab.rank.rendezvous import RankInfo
from fsdp_lab.wire import ReductionOrder, Wire

Batch = Mapping[str, Tensor]
TRACE_EVERY_S = 0.5  # the duration of a chunk in a lab, whose last step is traced
PUBLISH_EVERY_S = 0.04  # as the ranks of a lab do

Publish = Callable[[list[dict[str, Any]]], None]


@dataclass(kw_only=True)
class BuiltForm:
    """A form's model and optimizer, and its measurements on this rank."""

    form: Form
    backend: Backend
    seconds: list[float] = field(default_factory=list)
    loss: Tensor = field(default_factory=lambda: torch.zeros(()))  # of the newest step
    squared_norm: float = 0.0  # this rank's share of the first step's squared gradient norm
    peak_bytes: int = 0  # of this form alone, on a GPU; 0 on a CPU, where no allocator counts
    metered: Metered | None = None

    def result(self) -> dict[str, Any]:
        loss = float(self.loss)
        return {"seconds": self.seconds, "loss": loss, "squared_norm": self.squared_norm, "peak_bytes": self.peak_bytes}


def interleave(
    plan: BenchPlan,
    info: RankInfo,
    world: Wire,
    on_round: Callable[[int], None],
    on_events: Publish = lambda events: None,
) -> dict[str, dict[str, Any]]:
    """Trains every form in turn and returns `BuiltForm.result` by form. Collective.

    Args:
        on_round: called with the number of each finished round, warm-up included.
        on_events: called with the step events of metered forms.
    """
    forms = list(build_forms(plan, info, world, on_events))
    batches = list(batches_of(plan, info))
    for i, batch in enumerate(batches):
        if i == plan.warmup:
            gc.collect()
            gc.freeze()  # many models exist now: a collection would be timed as part of some form's step
        for built in forms if i % 2 else forms[::-1]:  # in alternating order: no form always follows the same one
            seconds = step(built, batch, info.device, world, first=i == 0)
            if i >= plan.warmup:
                built.seconds.append(seconds)
                built.peak_bytes = max(built.peak_bytes, _peak(built.backend, info.device))
        on_round(i + 1)
    return {built.form.name: built.result() for built in forms}


def batches_of(plan: BenchPlan, info: RankInfo) -> Iterator[Batch]:
    """Random tokens: different ones for each rank and round, the same for all forms."""
    generator = torch.Generator().manual_seed(plan.seed * plan.ranks + info.rank)
    for _ in range(plan.warmup + plan.steps):
        ids = torch.randint(plan.vocab, (plan.micro_batch, plan.seq_len), generator=generator).to(info.device)
        yield {"input_ids": ids, "labels": ids}


# -- building --------------------------------------------------------------------------------------------------------


def build_forms(
    plan: BenchPlan, info: RankInfo, world: Wire, on_events: Publish = lambda events: None
) -> Iterator[BuiltForm]:
    """Builds every form of the plan, with equal initial values. Collective."""
    raw = _raw_mesh(info, world) if any(FORMS[name].group == "raw" for name in plan.forms) else None
    config = resolve(plan.model)
    for name in plan.forms:
        form = FORMS[name]
        skeleton = build_skeleton(config)
        initial = Initializer(skeleton, plan.seed)
        backend = build(skeleton, plan.spec(form), info.device, mesh=raw if form.group == "raw" else None)
        fill(backend, initial)
        _keep_last(backend.module, form.keep_last)
        metered = Metered(plan, info, world, backend, on_events) if form.metered else None
        yield BuiltForm(form=form, backend=backend, metered=metered)


def _raw_mesh(info: RankInfo, world: Wire) -> DeviceMesh:
    """A mesh of all ranks on one of torch's own process groups, in addition to the Wire."""
    over_gloo = info.device.type == "cpu" or info.shares_gpu
    group = dist.new_group(backend="gloo" if over_gloo else "nccl", timeout=world.context.timeout)
    return DeviceMesh.from_group(group, info.device.type, mesh_dim_names=("shard",))


def _keep_last(model: nn.Module, count: int) -> None:
    """FSDP2: do not reshard the last blocks after their forward; the backward begins with them."""
    for block in blocks(model)[-count:] if count else []:
        block.set_reshard_after_forward(False)  # type: ignore[operator]


# -- one step --------------------------------------------------------------------------------------------------------


def step(built: BuiltForm, batch: Batch, device: torch.device, world: Wire, *, first: bool) -> float:
    """Trains one step and returns its seconds on this rank. The first, which is not counted, computes the gradient norm."""
    backend, metered = built.backend, built.metered
    world.context.reduction = ReductionOrder(built.form.reduction)
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
            built.squared_norm = _squared_norm(backend)
        if metered:
            metered.measure.before_update()
            metered.measure.part("optimizer")
        backend.optimizer.step()
        if metered:
            metered.measure.after_update()
        backend.optimizer.zero_grad(set_to_none=True)
    _synchronize(device)
    if metered:
        metered.publish()
    seconds = time.perf_counter() - begun_s
    built.loss = loss.detach()
    return seconds


def _peak(backend: Backend, device: torch.device) -> int:
    """Peak bytes of the last step, without the memory of other forms, which is allocated as well.

    The step has freed all that it allocated, so the current allocation equals that before it.
    """
    if device.type != "cuda":
        return 0
    slots = [state_slots(backend.optimizer, p) for p in backend.param_shards()]
    own = sum(p.local.nbytes for p in backend.param_shards()) + sum(t.nbytes for s in slots for t in s.values())
    others = torch.cuda.memory_allocated(device) - own - backend.resident_bytes()
    return torch.cuda.max_memory_allocated(device) - others


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _squared_norm(backend: Backend) -> float:
    """This rank's share of the squared gradient norm; the sum over ranks is that of the whole gradient."""
    gradients = [g for g in map(backend.gradient, backend.param_shards()) if g is not None]
    return sum(float(g.double().square().sum()) for g in gradients) / backend.replicas


# -- metered forms ---------------------------------------------------------------------------------------------------


class Metered:
    """Measures and publishes every step of a form as a lab's rank does: `step` around it, then `publish`; both are timed.

    Only the transport differs: a rank publishes its events over ZMQ; here they go as JSON through the pipe to the launcher.
    Other work of the trainer (the vote that ends a step, the gradient norm) is not included, because training without a lab
    may need it as well.
    """

    def __init__(self, plan: BenchPlan, info: RankInfo, world: Wire, backend: Backend, send: Publish) -> None:
        self._plan, self._seat, self._send = plan, info, send
        self.measure = StepMeter(backend, world.context, info, offload="none")
        self._unsent: list[dict[str, Any]] = []
        self._steps = 0
        self._published_s = self._traced_s = float("-inf")

    def step(self) -> AbstractContextManager[None]:
        """Around forward, backward and update."""
        now_s = time.perf_counter()
        traced = now_s - self._traced_s >= TRACE_EVERY_S
        if traced:
            self._traced_s = now_s
        return self.measure.step(traced=traced)

    def publish(self) -> None:
        """Adds the event of a finished step, and sends all unsent ones every `PUBLISH_EVERY_S`."""
        ended = self.measure.end()
        self.measure.pause()
        measured = self.measure.read(ended)
        self._unsent.append(
            StepEvent(
                run="bench",
                spec_id="bench",
                rank=self._seat.rank,
                world_size=self._seat.world_size,
                step=self._steps,
                samples=self._steps * self._plan.micro_batch * self._plan.ranks,
                end_unix_s=measured.end_unix_s,
                step_time_s=measured.step_time_s,
                tokens=self._plan.micro_batch * self._plan.seq_len,
                loss=0.0,  # reading it would synchronise with the device
                mean_loss=0.0,
                grad_norm=0.0,
                flops=0,
                memory=measured.memory,
                comm=measured.comm,
                begin_s=measured.begin_s,
                spans=measured.spans,
            ).to_dict()
        )
        self._steps += 1
        now_s = time.perf_counter()
        if now_s - self._published_s >= PUBLISH_EVERY_S:
            unsent, self._unsent = self._unsent, []
            self._send(unsent)
            self._published_s = now_s
