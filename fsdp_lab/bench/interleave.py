"""The loop of one rank: builds every form, then does one step of each in turn, round after round. The barrier before
each step is not timed; forward, backward, update and zeroing the gradients are, until the device has finished them."""

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, distributed as dist
from torch.autograd.profiler import profile
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from fsdp_lab.backends import Backend, build, fill
from fsdp_lab.backends.base import state_slots
from fsdp_lab.bench.plan import MODEL, BenchError, BenchPlan, Form
from fsdp_lab.models.build import Initializer, build_skeleton
from fsdp_lab.models.configs import resolve
from fsdp_lab.models.presets import PRESETS
from fsdp_lab.models.wrapping import blocks
from fsdp_lab.rank.ledger import KernelTimes
from fsdp_lab.rank.rendezvous import RankInfo
from fsdp_lab.wire import SHARED_MEMORY, Wire
from fsdp_lab.wire.group import BACKEND

Batch = Mapping[str, Tensor]
_KEPT = 2  # blocks that a tuned FSDP2 does not reshard


@dataclass(kw_only=True)
class BuiltForm:
    """A form's model and optimizer, and its measurements on this rank."""

    form: Form
    backend: Backend
    is_shared: bool = False  # it communicates through shared memory
    seconds: list[float] = field(default_factory=list)
    loss: Tensor = field(default_factory=lambda: torch.zeros(()))  # of the newest step
    squared_norm: float = 0.0  # this rank's share of the first step's squared gradient norm
    peak_bytes: int = 0  # of this form alone, on a GPU; 0 on a CPU, where no allocator counts
    kernels: KernelTimes | None = None  # of a profiled step, on a GPU

    def train(self, batch: Batch, on_gradients: Callable[[], None]) -> Tensor:
        """One step; `on_gradients` is called before the update. Returns the loss."""
        with self.backend.micro_batch(communicate=True):
            loss = self.backend.loss(batch)
            torch.autograd.backward(loss)
        on_gradients()
        self.backend.optimizer.step()
        self.backend.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def end_round(self, seconds: float, device: torch.device, *, counted: bool) -> None:
        if counted:
            self.seconds.append(seconds)
            self.peak_bytes = max(self.peak_bytes, _peak(self.backend, device))

    def result(self) -> dict[str, Any]:
        figures = {name: getattr(self, name) for name in ("seconds", "squared_norm", "peak_bytes", "is_shared")}
        kernels = None if self.kernels is None else asdict(self.kernels)
        return {**figures, "loss": float(self.loss), "kernels": kernels}


def interleave(plan: BenchPlan, forms: Sequence[BuiltForm], info: RankInfo, world: Wire) -> dict[str, dict[str, Any]]:
    """Trains every form in turn and returns `BuiltForm.result` by form. Collective."""
    batches = list(batches_of(plan, info))
    for i, batch in enumerate(batches):
        if i == plan.warmup:
            gc.collect()
            gc.freeze()  # many models exist now: a collection would be timed as part of some form's step
        for built in forms if i % 2 else forms[::-1]:  # in alternating order: no form always follows the same one
            seconds = step(built, batch, info.device, world, first=i == 0)
            built.end_round(seconds, info.device, counted=i >= plan.warmup)
    if info.device.type == "cuda":
        for built in forms:
            with profile(use_kineto=True, use_device="cuda") as profiler:
                step(built, batches[-1], info.device, world, first=False)
            built.kernels = KernelTimes.of(profiler.kineto_results.events())
    return {built.form.name: built.result() for built in forms}


def batches_of(plan: BenchPlan, info: RankInfo) -> Iterator[Batch]:
    """Random tokens: different ones for each rank and round, the same for all forms."""
    generator = torch.Generator().manual_seed(plan.seed * plan.ranks + info.rank)
    tokens = int((PRESETS[plan.preset].config if plan.preset else MODEL)["vocab_size"])
    for _ in range(plan.warmup + plan.steps):
        ids = torch.randint(tokens, (plan.micro_batch, plan.seq_len), generator=generator).to(info.device)
        yield {"input_ids": ids, "labels": ids}


def build_forms(plan: BenchPlan, info: RankInfo, world: Wire) -> Iterator[BuiltForm]:
    """Builds every form of the plan, with equal initial values. Collective."""
    forms = [plan.known[name] for name in plan.forms]
    groups = dict.fromkeys(form.group for form in forms)  # in one order on all ranks
    meshes = {group: mesh_of(info, world, group) for group in groups if group != "wire"}
    config = resolve(plan.model)
    for form in forms:
        skeleton = build_skeleton(config)
        initial = Initializer(skeleton, plan.seed)
        backend = build(skeleton, plan.spec(form), info.device, mesh=meshes.get(form.group))
        fill(backend, initial)
        if form.is_tuned:
            _tune(backend.module, raw=_raw_backend(info) if form.group == "raw" else "")
        is_shared = form.group == "wire" and world.context.host_carrier == SHARED_MEMORY
        yield BuiltForm(form=form, backend=backend, is_shared=is_shared)


def mesh_of(info: RankInfo, world: Wire, group: str) -> DeviceMesh:
    """A mesh of all ranks: of the world ("wire"), or beside it on a group of torch's own ("raw") or on a Wire over Gloo."""
    if group == "raw":
        own = dist.new_group(backend=_raw_backend(info), timeout=world.context.timeout)
    else:
        own = world if group == "wire" else beside(world, shared_memory=False)
    return DeviceMesh.from_group(own, info.device.type, mesh_dim_names=("shard",))


def beside(world: Wire, *, shared_memory: bool) -> Wire:
    """A second group of all ranks, over shared memory or over Gloo. Raises BenchError if the ranks share no memory."""
    before, world.context.shared_memory = world.context.shared_memory, shared_memory
    try:
        group = dist.new_group(backend=BACKEND, timeout=world.context.timeout)
    finally:
        world.context.shared_memory = before
    if shared_memory and (why := next(iter(world.context.not_shared.values()), "")):
        raise BenchError(f"the ranks share no memory: {why}")
    assert isinstance(group, Wire)
    return group


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


def step(built: BuiltForm, batch: Batch, device: torch.device, world: Wire, *, first: bool) -> float:
    """Trains one step and returns its seconds on this rank. The first, which is not counted, computes the gradient norm."""

    def note_norm() -> None:
        """Notes this rank's share of the squared gradient norm; the sum over ranks is that of the whole gradient."""
        if first:
            backend = built.backend
            gradients = [g for g in map(backend.gradient, backend.param_shards()) if g is not None]
            built.squared_norm = sum(float(g.double().square().sum()) for g in gradients) / backend.replicas

    world.control(torch.zeros(1, dtype=torch.float64))  # a barrier
    synchronize(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    begun_s = time.perf_counter()
    built.loss = built.train(batch, note_norm)
    synchronize(device)
    return time.perf_counter() - begun_s


def _peak(backend: Backend, device: torch.device) -> int:
    """Peak bytes of the last step, without the memory of other forms. All that the step allocated is free."""
    if device.type != "cuda":
        return 0
    slots = [state_slots(backend.optimizer, p) for p in backend.param_shards()]
    own = sum(p.local.nbytes for p in backend.param_shards()) + sum(t.nbytes for s in slots for t in s.values())
    others = torch.cuda.memory_allocated(device) - own - backend.resident_bytes()
    return torch.cuda.max_memory_allocated(device) - others


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
