"""The loop of one rank: builds every form, then does one step of each in turn, round after round.

Note: what is timed. The barrier before each step is not; forward, backward, update and zeroing the gradients are, until the
device has finished them. Noise in one round affects all of its forms alike.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from torch import distributed as dist
from torch.autograd.profiler import profile
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from fsdp_lab.backends import Backend, build, fill
from fsdp_lab.backends.base import state_slots
from fsdp_lab.bench.plan import FORMS, BenchPlan, Form
from fsdp_lab.bench.wire import beside
from fsdp_lab.core.events import StepEvent
from fsdp_lab.engine.scaling import Scaler
from fsdp_lab.models import Batches, BestPeak, Initializer, build_skeleton, resolve
from fsdp_lab.models.flops import Peak
from fsdp_lab.models.wrapping import blocks
from fsdp_lab.rank.ledger import KernelTimes, LedgerResult
from fsdp_lab.rank.measure import StepMeter, UnreadStep
from fsdp_lab.rank.rendezvous import RankInfo
from fsdp_lab.rank.tracing import ClockOffset
from fsdp_lab.rank.trainer import StepCost, Trainer, TrainingProgress
from fsdp_lab.wire import SHARED_MEMORY, ReductionOrder, Wire

Batch = Mapping[str, Tensor]
TRACE_EVERY_S = 0.5  # the duration of a chunk in a lab, whose last step is traced
PUBLISH_EVERY_S = 0.04  # as the ranks of a lab do
_KEPT = 2  # blocks that a tuned FSDP2 does not reshard

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
    is_shared: bool = False  # it communicates through shared memory
    kernels: KernelTimes | None = None  # of a profiled step, on a GPU

    def result(self) -> dict[str, Any]:
        found = {"seconds": self.seconds, "loss": float(self.loss), "squared_norm": self.squared_norm,
                 "peak_bytes": self.peak_bytes, "is_shared": self.is_shared,
                 "kernels": None if self.kernels is None else asdict(self.kernels)}  # fmt: skip
        return found if self.metered is None else found | self.metered.result()


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
            if built.metered is not None:
                built.metered.end_round(seconds, counted=i >= plan.warmup)
            if i >= plan.warmup:
                built.seconds.append(seconds)
                built.peak_bytes = max(built.peak_bytes, _peak(built.backend, info.device))
        on_round(i + 1)
    if info.device.type == "cuda":
        for built in forms:
            with profile(use_kineto=True, use_device="cuda") as profiler:
                step(built, batches[-1], info.device, world, first=False)
            built.kernels = KernelTimes.of(profiler.kineto_results.events())
    return {built.form.name: built.result() for built in forms}


def batches_of(plan: BenchPlan, info: RankInfo) -> Iterator[Batch]:
    """Random tokens: different ones for each rank and round, the same for all forms."""
    generator = torch.Generator().manual_seed(plan.seed * plan.ranks + info.rank)
    for _ in range(plan.warmup + plan.steps):
        ids = torch.randint(plan.tokens, (plan.micro_batch, plan.seq_len), generator=generator).to(info.device)
        yield {"input_ids": ids, "labels": ids}


# -- building --------------------------------------------------------------------------------------------------------


def build_forms(
    plan: BenchPlan, info: RankInfo, world: Wire, on_events: Publish = lambda events: None
) -> Iterator[BuiltForm]:
    """Builds every form of the plan, with equal initial values. Collective."""
    groups = dict.fromkeys(FORMS[name].group for name in plan.forms)  # in one order on all ranks
    meshes = {group: _mesh(info, world, group) for group in groups if group != "wire"}
    config = resolve(plan.model)
    for name in plan.forms:
        form = FORMS[name]
        skeleton = build_skeleton(config)
        initial = Initializer(skeleton, plan.seed)
        backend = build(skeleton, plan.spec(form), info.device, mesh=meshes.get(form.group))
        fill(backend, initial)
        if form.is_tuned:
            _tune(backend.module, raw=_raw_backend(info) if form.group == "raw" else "")
        metered = Metered(plan, form, info, world, backend, on_events) if form.metered else None
        is_shared = form.group == "wire" and world.context.host_carrier == SHARED_MEMORY
        yield BuiltForm(form=form, backend=backend, metered=metered, is_shared=is_shared)


def _mesh(info: RankInfo, world: Wire, group: str) -> DeviceMesh:
    """A mesh of all ranks beside the world's: on a group of torch's own ("raw"), or on a Wire over Gloo."""
    if group == "gloo":
        return DeviceMesh.from_group(beside(world, shared_memory=False), info.device.type, mesh_dim_names=("shard",))
    raw = dist.new_group(backend=_raw_backend(info), timeout=world.context.timeout)
    return DeviceMesh.from_group(raw, info.device.type, mesh_dim_names=("shard",))


def _raw_backend(info: RankInfo) -> str:
    return "gloo" if info.device.type == "cpu" or info.shares_gpu else "nccl"


def _tune(model: Any, *, raw: str) -> None:
    """FSDP2, as a careful user would have it: the last blocks, with which the backward begins, are not resharded after their
    forward; from torch 2.13 on two gradients may be in flight, and on torch's own group over Gloo, where collectives wait
    for one another, reductions have a group of their own. `raw`: the backend of torch's own group, or ""."""
    for block in blocks(model)[-_KEPT:]:
        block.set_reshard_after_forward(False)  # type: ignore[operator]
    if hasattr(model, "set_reduce_scatter_max_input_buffers"):
        model.set_reduce_scatter_max_input_buffers(2)
    if raw and hasattr(model, "set_separate_reduce_scatter_group"):
        own = dist.new_group(backend=raw)  # else torch makes one of the default backend, a Wire
        for module in filter(lambda m: isinstance(m, FSDPModule), model.modules()):
            for group in module._get_fsdp_state()._fsdp_param_groups:
                group.mesh_info.reduce_scatter_process_group = own
        model.set_separate_reduce_scatter_group(True)


# -- one step --------------------------------------------------------------------------------------------------------


def step(built: BuiltForm, batch: Batch, device: torch.device, world: Wire, *, first: bool) -> float:
    """Trains one step and returns its seconds on this rank. The first, which is not counted, computes the gradient norm."""
    backend = built.backend
    world.context.reduction = ReductionOrder(built.form.reduction)
    world.control(torch.zeros(1, dtype=torch.float64))  # a barrier
    _synchronize(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    begun_s = time.perf_counter()
    if built.metered is not None:
        built.loss = built.metered.step(batch, on_gradients=lambda: _note_norm(built, first=first))
        _synchronize(device)
        return time.perf_counter() - begun_s
    with backend.micro_batch(communicate=True):
        loss = backend.loss(batch)
        torch.autograd.backward(loss)
    _note_norm(built, first=first)
    backend.optimizer.step()
    backend.optimizer.zero_grad(set_to_none=True)
    _synchronize(device)
    seconds = time.perf_counter() - begun_s
    built.loss = loss.detach()
    return seconds


def _note_norm(built: BuiltForm, *, first: bool) -> None:
    if first:
        built.squared_norm = _squared_norm(built.backend)


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
    """Trains, measures and publishes every step of a form as a lab's rank does, by its `Trainer`; all of it is timed.

    Only two things differ: batches are given; and events go as JSON through the pipe to the launcher, where a rank of a lab
    publishes them over ZMQ.
    """

    def __init__(
        self, plan: BenchPlan, form: Form, info: RankInfo, world: Wire, backend: Backend, send: Publish
    ) -> None:
        self._send = send
        self._batches = _GivenBatch()
        self._times = PartTimes()
        self._trainer = TimedTrainer(
            run="bench",
            spec=plan.spec(form),
            info=info,
            backend=backend,
            batches=cast(Batches, self._batches),
            world=world,
            cost=StepCost(flops=0, recompute_flops=0, tokens=plan.micro_batch * plan.seq_len, peak=BestPeak(_NO_PEAK)),
            progress=TrainingProgress(),
            scaler=Scaler(enabled=False),
            notes=(),
            clock=ClockOffset(),
        )
        self._trainer.times = self._times
        self._unsent: list[dict[str, Any]] = []
        self._published_s = self._traced_s = float("-inf")
        self._ledger = False  # whether the newest step was a ledger step
        self._ledger_s: list[float] = []

    def step(self, batch: Batch, *, on_gradients: Callable[[], None]) -> Tensor:
        """A step and its event. `on_gradients` is called before the update. Returns the loss."""
        self._batches.given = batch
        now_s = time.perf_counter()
        traced = now_s - self._traced_s >= TRACE_EVERY_S
        if traced:
            self._traced_s = now_s
        handle = self._trainer.backend.optimizer.register_step_pre_hook(lambda *_: on_gradients())
        event = self._trainer.step(traced=traced)
        handle.remove()
        self._ledger = event.ledger
        with self._times.of("events"):
            self._publish(event)
        return torch.tensor(event.loss)

    def _publish(self, event: StepEvent) -> None:
        """Send all unsent events every `PUBLISH_EVERY_S`."""
        self._unsent.append(event.to_dict())
        now_s = time.perf_counter()
        if now_s - self._published_s >= PUBLISH_EVERY_S:
            unsent, self._unsent = self._unsent, []
            self._send(unsent)
            self._published_s = now_s

    def end_round(self, seconds: float, *, counted: bool) -> None:
        """Keep the parts of the newest step; of a ledger step, its time."""
        self._times.end_step(keep=counted)
        if self._ledger:
            self._ledger_s.append(seconds)

    def result(self) -> dict[str, Any]:
        return {"parts": self._times.kept, "ledger_s": self._ledger_s}


PARTS = ("norm", "vote", "measuring", "events")
_NO_PEAK = Peak(None, "not measured")


class PartTimes:
    """Host seconds of each of `PARTS`, step by step."""

    def __init__(self) -> None:
        self._now = dict.fromkeys(PARTS, 0.0)
        self.kept: dict[str, list[float]] = {name: [] for name in PARTS}

    @contextmanager
    def of(self, part: str) -> Iterator[None]:
        begun_s = time.perf_counter()
        try:
            yield
        finally:
            self._now[part] += time.perf_counter() - begun_s

    def end_step(self, *, keep: bool) -> None:
        for name, seconds in self._now.items():
            if keep:
                self.kept[name].append(seconds)
        self._now = dict.fromkeys(PARTS, 0.0)


class TimedTrainer(Trainer):
    """A trainer that times what it does beyond a plain loop."""

    times: PartTimes

    def __post_init__(self, ledger: LedgerResult | None) -> None:
        super().__post_init__(ledger)
        self.meter = TimedMeter(self)

    def _loss_and_norm(self, total: Tensor) -> tuple[float, float]:
        with self.times.of("norm"):
            return super()._loss_and_norm(total)

    def _cast(self, loss: float, squared: float) -> list[float]:
        with self.times.of("vote"):
            return super()._cast(loss, squared)

    def _complete(self) -> None:
        with self.times.of("measuring"):
            super()._complete()


class TimedMeter(StepMeter):
    """Times its own work at the ends of a step, and around the update."""

    def __init__(self, trainer: TimedTrainer) -> None:
        super().__init__(trainer.backend, trainer.world.context, trainer.info, offload="none")
        self._trainer = trainer

    @contextmanager
    def step(self, *, ledger: bool = False, traced: bool = False) -> Iterator[None]:
        with ExitStack() as stack:
            with self._trainer.times.of("measuring"):
                stack.enter_context(super().step(ledger=ledger, traced=traced))
            yield
            with self._trainer.times.of("measuring"):
                stack.close()

    def before_update(self) -> None:
        with self._trainer.times.of("measuring"):
            super().before_update()

    def after_update(self) -> None:
        with self._trainer.times.of("measuring"):
            super().after_update()

    def end(self) -> UnreadStep:
        with self._trainer.times.of("measuring"):
            return super().end()


class _GivenBatch:
    """In the place of `Batches`: samples of equal length, which the launcher gives."""

    given: Batch

    def batch(self, samples: int, micro: int) -> Batch:
        return self.given

    def weight(self, samples: int, micro: int) -> float:
        return 1.0
