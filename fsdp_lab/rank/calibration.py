"""`HardwareProbe`: the speed of this machine, measured on all ranks at once, since ranks on one machine share its cores.

Every figure is a mean over some time, not the best of many: a step loses to its neighbours as well. A collective is
timed behind a computation, as in a step, so that waiting for the last rank is included. `fsdp_lab.planner.calibration`
describes how the figures are used."""

import gc
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import Any

import psutil
import torch
from torch import Tensor, distributed as dist
from torch.nn.functional import scaled_dot_product_attention

from fsdp_lab.backends import build, fill
from fsdp_lab.backends.base import DTYPES
from fsdp_lab.base.process import ranks_per_host
from fsdp_lab.engine import collectives
from fsdp_lab.rank.prepare import LONGEST_S, Preparation, is_over_nccl, timed_on_device
from fsdp_lab.rank.rendezvous import RankInfo
from fsdp_lab.rank.tracing import ClockOffset
from fsdp_lab.rank.trainer import Scaler, Trainer, TrainingProgress, squared_norm
from fsdp_lab.spec.spec import Spec
from fsdp_lab.wire import Wire

MEASURING_S = 0.03  # for one figure
COMPUTING_S = 3e-4  # before a collective
OTHER_BYTES = 4 << 20  # that are read and written before it: in a step its payload is in no near cache
STEPS = 4  # of each training per pass
WARMUP_STEPS = 4  # the third step of a training is a ledger step, and DDP rebuilds its buckets in the second
KINDS = ("all_gather", "reduce_scatter", "all_reduce")

_Rows = tuple[tuple[int, int, int], ...]
# Matrix products as training has them: rows (tokens) x inputs x outputs.
_PRODUCTS: Mapping[str, _Rows] = {
    "cpu": ((8, 32, 64), (16, 64, 128), (64, 64, 256), (64, 256, 256), (256, 256, 512), (512, 256, 1024),
            (512, 768, 1536)),
    "cuda": ((64, 256, 256), (512, 512, 512), (2048, 1024, 1024), (4096, 2048, 2048), (8192, 4096, 4096),
             (8192, 8192, 8192)),
}  # fmt: skip
_SCORES: Mapping[str, tuple[tuple[int, int], ...]] = {  # samples, tokens; 4 heads of width 64
    "cpu": ((1, 16), (1, 64), (2, 128), (4, 256), (2, 512)),
    "cuda": ((1, 256), (4, 512), (4, 1024), (4, 2048)),
}
_COPIES: Mapping[str, tuple[int, ...]] = {  # bytes
    "cpu": (1 << 12, 1 << 15, 1 << 18, 1 << 21, 1 << 24, 1 << 26),
    "cuda": (1 << 16, 1 << 20, 1 << 24, 1 << 28),
}
_UPDATES: Mapping[str, tuple[int, ...]] = {  # elements
    "cpu": (1 << 12, 1 << 16, 1 << 19, 1 << 21, 1 << 23),
    "cuda": (1 << 16, 1 << 20, 1 << 24, 1 << 27),
}
_SENT: Mapping[int, int] = {1 << 10: 10, 1 << 14: 10, 1 << 18: 8, 1 << 20: 6, 1 << 22: 4, 1 << 24: 2}  # bytes: times
_SENT_OVER_NCCL = (1 << 10, 1 << 14, 1 << 17, 1 << 20, 1 << 23, 1 << 26, 1 << 29)
_BACK_TO_BACK = 16
HEADS, WIDTH = 4, 64
MOST_ELEMENTS = 1 << 20  # of a tensor that the optimizer is given


class HardwareProbe:
    """One rank's measurements; every method is collective."""

    def __init__(self, info: RankInfo, world: Wire) -> None:
        self._info, self._world, self._device = info, world, info.device
        self._kind = "cuda" if info.device.type == "cuda" else "cpu"

    def all(self, trainers: Sequence[Trainer], dtypes: Sequence[str], passes: int) -> dict[str, Any]:
        """All measurements, as plain values: seconds of this rank, by pass a row of each size. Steps of the
        `trainers` are timed, alternating with everything else.

        Returns: {"products": {dtype: [[FLOPs, s]]}, "scores": {dtype: [[scores, FLOPs, s]]}, "copies": [[bytes, s]],
        "updates": {optimizer: [[elements, s]]}, "collectives": {kind: [[payload bytes, s]]}, the same for "inside"
        and "across" (see `measured_groups`), "steps": [[s, ...]] by trainer, "memory_bytes", "per_host": ranks}."""
        for trainer in trainers:
            for _ in range(WARMUP_STEPS):
                trainer.step()
        gc.collect()
        gc.freeze()  # many models exist now: collecting them would count as a step's time
        with self._grouped() as groups:
            rows = [{**self._rates(dtypes, groups), "steps": self._steps(trainers)} for _ in range(passes)]
        memory_bytes = int(psutil.virtual_memory().total) // self._per_host  # of this rank: its share of the host's
        if self._kind == "cuda":
            memory_bytes = int(torch.cuda.get_device_properties(self._device).total_memory)
        return {**_joined(rows), "memory_bytes": memory_bytes, "per_host": self._per_host}

    def _rates(self, dtypes: Sequence[str], groups: Mapping[str, dist.ProcessGroup]) -> dict[str, Any]:
        return {
            "products": {d: list(self.products(DTYPES[d])) for d in dtypes},
            "scores": {d: list(self.scores(DTYPES[d])) for d in dtypes},
            "copies": list(self.copies()),
            "updates": {name: list(self.updates(name)) for name in ("adamw", "sgd")},
            "collectives": self.collectives(self._world),
            **{name: self.collectives(group) for name, group in groups.items()},
        }

    # -- computing ------------------------------------------------------------------------------------------------

    def products(self, dtype: torch.dtype) -> Iterator[list[float]]:
        """[FLOPs, seconds] of one product: the mean of the forward's and the backward's two."""
        for rows, inputs, outputs in _PRODUCTS[self._kind]:
            shapes = (rows, inputs), (inputs, outputs), (rows, outputs)
            x, w, g = (self._full(*shape, dtype) for shape in shapes)
            bias = self._full(outputs, 1, dtype).view(-1)

            def multiply(x: Tensor = x, w: Tensor = w, g: Tensor = g, bias: Tensor = bias) -> None:
                torch.addmm(bias, x, w)
                torch.mm(g, w.t())
                torch.mm(x.t(), g)

            yield [2.0 * rows * inputs * outputs, self._seconds(multiply) / 3]

    def scores(self, dtype: torch.dtype) -> Iterator[list[float]]:
        """[scores, FLOPs, seconds] of causal attention, forward and backward: scores and FLOPs are the forward's."""
        for samples, tokens in _SCORES[self._kind]:
            shape, rows = (samples, HEADS, tokens, WIDTH), samples * HEADS * tokens
            q, k, v = (self._full(rows, WIDTH, dtype).view(shape).requires_grad_() for _ in range(3))
            g = torch.ones_like(q)

            def attend(q: Tensor = q, k: Tensor = k, v: Tensor = v, g: Tensor = g) -> None:
                out = scaled_dot_product_attention(q, k, v, is_causal=True)
                torch.autograd.grad(out, (q, k, v), g)

            count = float(samples * HEADS * tokens * tokens)
            yield [count, 4 * WIDTH * count, self._seconds(attend)]

    def copies(self) -> Iterator[list[float]]:
        """[bytes, seconds] of a copy into new memory: each byte is read once and written once."""
        for size in _COPIES[self._kind]:
            a = torch.ones(size // 4, device=self._device)
            yield [float(size), self._seconds(a.clone)]

    def updates(self, name: str) -> Iterator[list[float]]:
        """[elements, seconds] of the gradients' norm and the optimizer's step, in fp32."""
        make: Any = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[name]
        for size in _UPDATES[self._kind]:
            count = max(1, size // MOST_ELEMENTS)
            parts = [torch.nn.Parameter(torch.ones(size // count, device=self._device)) for _ in range(count)]
            for p in parts:
                p.grad = torch.full_like(p, 1e-3)
            optimizer = make(parts, lr=1e-9, foreach=True)

            def update(parts: Sequence[Tensor] = parts, optimizer: Any = optimizer) -> None:
                squared_norm([p.grad for p in parts if p.grad is not None], self._device)
                optimizer.step()

            yield [float(size), self._seconds(update)]

    # -- communication --------------------------------------------------------------------------------------------

    def collectives(self, group: dist.ProcessGroup) -> dict[str, list[list[float]]]:
        """Measured rows by kind of collective; the group has more than one rank."""
        return {kind: list(self._sent(kind, group)) for kind in KINDS if group.size() > 1}

    def _sent(self, kind: str, group: dist.ProcessGroup) -> Iterator[list[float]]:
        """[payload bytes, seconds] over NCCL by the device's clock, else behind a computation as in a step."""
        if is_over_nccl(self._world, self._device):
            issued = partial(self._issue, kind, group=group)
            timed = timed_on_device(self._world, self._device, _SENT_OVER_NCCL, issued, _BACK_TO_BACK)
            yield from ([float(size), seconds] for size, seconds in timed)
            return
        compute, other = self._work(COMPUTING_S), torch.ones(OTHER_BYTES // 4, device=self._device)
        for size, times in _SENT.items():
            issue = self._issue(kind, size, group)
            begun_s = time.perf_counter()
            issue().wait()
            self._finish()
            if self._mean(time.perf_counter() - begun_s) > LONGEST_S and size > min(_SENT):
                return
            seconds = []
            for _ in range(times):
                other.neg_()
                compute()
                self._finish()
                begun_s = time.perf_counter()
                issue().wait()
                self._finish()
                seconds.append(time.perf_counter() - begun_s)
            yield [float(size), median(seconds)]

    def _issue(self, kind: str, size: int, group: dist.ProcessGroup) -> Callable[[], Any]:
        """A function that issues a collective with `size` bytes of payload."""
        part = torch.ones(max(1, size // 4 // group.size()), device=self._device)
        whole = torch.ones(part.numel() * group.size(), device=self._device)
        calls: Mapping[str, Callable[[], Any]] = {  # outputs are new memory, as in a step
            "all_gather": lambda: collectives.all_gather(torch.empty_like(whole), part, group),
            "reduce_scatter": lambda: collectives.reduce_scatter(torch.empty_like(part), whole, group),
            "all_reduce": lambda: collectives.all_reduce(whole, group),
        }
        return calls[kind]

    @contextmanager
    def _grouped(self) -> Iterator[dict[str, dist.ProcessGroup]]:
        """This rank's group in each of the `measured_groups`."""
        own: dict[str, dist.ProcessGroup] = {}
        for name, each in measured_groups(self._info.world_size, self._per_host).items():
            made = [dist.new_group(ranks) for ranks in each]
            (own[name],) = (g for g in made if g is not dist.GroupMember.NON_GROUP_MEMBER)
        try:
            yield own
        finally:
            self._barrier()
            for group in own.values():
                dist.destroy_process_group(group)

    # -- whole steps ----------------------------------------------------------------------------------------------

    def _steps(self, trainers: Sequence[Trainer]) -> dict[str, list[float]]:
        """Returns seconds of some steps of each, without the first one, which fills the processor's caches."""
        taken: dict[str, list[float]] = {}
        for i, trainer in enumerate(trainers):
            self._barrier()
            taken[str(i)] = [trainer.step().step_time_s for _ in range(STEPS)][1:]
        return taken

    # -- small helpers --------------------------------------------------------------------------------------------

    def _full(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        return torch.full((rows, columns), 0.5, dtype=dtype, device=self._device)

    def _work(self, seconds: float) -> Callable[[], None]:
        """A function that computes matrix products for about that time."""
        edge = 2048 if self._kind == "cuda" else 128
        a = self._full(edge, edge, torch.float32)
        times = max(1, round(seconds / self._seconds(lambda: torch.mm(a, a))))

        def compute() -> None:
            for _ in range(times):
                torch.mm(a, a)

        return compute

    def _seconds(self, call: Callable[[], object]) -> float:
        """Mean seconds of a call while all ranks call theirs, all for the same time, since they share the cores."""
        call()
        self._barrier()
        begun_s = time.perf_counter()
        done, more = 0, 1
        while True:
            for _ in range(more):
                call()
            self._finish()
            done, taken_s = done + more, time.perf_counter() - begun_s
            if taken_s >= MEASURING_S:
                return taken_s / done
            more = min(done, math.ceil(done * (MEASURING_S / max(taken_s, 1e-6) - 1)))

    def _mean(self, seconds: float) -> float:
        """Over all ranks, which decide alike by it."""
        values = torch.tensor([seconds], dtype=torch.float64)
        self._world.control(values)
        return float(values) / self._info.world_size

    def _barrier(self) -> None:
        """Wait for all ranks and their devices."""
        self._finish()
        self._world.control(torch.zeros(1, dtype=torch.float64))

    def _finish(self) -> None:
        if self._kind == "cuda":
            torch.cuda.synchronize(self._device)

    @property
    def _per_host(self) -> int:
        return ranks_per_host(self._world.context.hosts) or self._info.world_size


def measured_groups(size: int, per_host: int) -> dict[str, list[list[int]]]:
    """The groups beside that of all ranks in which collectives are measured, if there are several hosts of several ranks:
    "inside" hosts, and "across" them with one rank of each, as of hybrid sharding. All groups of a name work at once."""
    if not 1 < per_host < size:
        return {}
    inside = [[*range(first, first + per_host)] for first in range(0, size, per_host)]
    return {"inside": inside, "across": [[*range(place, size, per_host)] for place in range(per_host)]}


def _joined(passes: Sequence[Any]) -> Any:
    """The rows of all passes in one list."""
    if isinstance(passes[0], dict):
        return {key: _joined([one[key] for one in passes]) for key in passes[0]}
    return [row for one in passes for row in one]


@contextmanager
def calibration_trainers(
    specs: Sequence[Spec], info: RankInfo, world: Wire, preparation: Preparation
) -> Iterator[list[Trainer]]:
    """Trainers of these Specs from initial values, besides the live training, until the exit; collective."""
    trainers: list[Trainer] = []
    try:
        for spec in specs:
            trainers.append(_trainer(spec, info, world, preparation, trainers[-1] if trainers else None))
        yield trainers
    finally:
        for trainer in trainers:
            trainer.backend.release(world.context.busy_addresses())
        gc.collect()


def _trainer(spec: Spec, info: RankInfo, world: Wire, preparation: Preparation, former: Trainer | None) -> Trainer:
    """A function of its own, after which nothing holds the initial values."""
    p = preparation.prepare(spec, None if former is None else (former.spec, former.batches), begins=True)
    initial = p.initial(world.context.check)
    backend = build(p.skeleton, spec, info.device)
    fill(backend, initial)
    parts: dict[str, Any] = {"info": info, "backend": backend, "world": world, "batches": p.batches, "cost": p.cost}
    parts |= {"progress": TrainingProgress(), "scaler": Scaler(enabled=False), "clock": ClockOffset()}
    return Trainer(run="calibration", spec=spec, notes=(), **parts)
