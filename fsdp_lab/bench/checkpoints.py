"""Checkpoints of one model: the lab's, and those of plain Distributed Checkpoint with torch's FSDP2.

Note: what is timed. Save: from the call until the files of all ranks are complete on the disk, though the lab's would
let training continue meanwhile. Load: back into the existing model and optimizer, including the calls that a library
requires before and after it (`get_state_dict`, `set_state_dict`). There is a barrier before and after each. Then the
cost of the lab's asynchronous save: how long training stops for the snapshot, and how much slower its steps are until
the files are written.
"""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from fsdp_lab.backends import Backend
from fsdp_lab.bench.interleave import BuiltForm, batches_of, build_forms, step
from fsdp_lab.bench.plan import DCP, DCP_AGAIN, LAB, REFERENCE, BenchPlan
from fsdp_lab.core.checkpoint_format import find
from fsdp_lab.core.spec import Spec
from fsdp_lab.engine.scaling import Scaler
from fsdp_lab.rank.checkpointing import Checkpointer
from fsdp_lab.rank.rendezvous import RankInfo
from fsdp_lab.rank.trainer import TrainingProgress
from fsdp_lab.wire import Wire

METHODS = (LAB, DCP, DCP_AGAIN)
STEPS_ALONE = 3  # before each save, to compare with


@dataclass(kw_only=True)
class _Savable:
    """The state of a training that `Checkpointer` saves."""

    run: str
    spec: Spec
    backend: Backend
    progress: TrainingProgress
    scaler: Scaler


def save_and_load(
    plan: BenchPlan, info: RankInfo, world: Wire, store: dist.Store, folder: Path, on_round: Callable[[int], None]
) -> dict[str, Any]:
    """Times both ways of saving and loading. Collective. `plan.forms` are the lab and FSDP2.

    Returns {method: {"save": [...], "load": [...]}} in seconds and
    {"beside": [{"stall_s", "step_s", "slowed", "window_s"}, ...]}, with one value per round.
    """
    forms = {built.form.name: built for built in build_forms(plan, info, world)}
    batches = list(batches_of(plan, info))
    for i, batch in enumerate(batches[: plan.warmup]):
        for built in forms.values():
            step(built, batch, info.device, world, first=i == 0)
    lab = _Lab(plan, info, store, forms[LAB], folder)
    plain = _Plain(forms[REFERENCE], info, folder)
    found: dict[str, Any] = {method: {"save": [], "load": []} for method in METHODS}
    found["beside"] = []
    for i, batch in enumerate(batches[plan.warmup :]):
        for method in METHODS if i % 2 else METHODS[::-1]:
            with _timed(world, found[method]["save"]):
                (lab.save if method == LAB else plain.save)()
            with _timed(world, found[method]["load"]):
                (lab.load if method == LAB else plain.load)()
        one_step = partial(step, forms[LAB], batch, info.device, world, first=False)
        found["beside"].append(_time_beside_save(lab, one_step, world))
        on_round(plan.warmup + i + 1)
    lab.close()
    return found


@contextmanager
def _timed(world: Wire, seconds: list[float]) -> Iterator[None]:
    world.control(torch.zeros(1, dtype=torch.float64))  # a barrier
    begun_s = time.perf_counter()
    yield
    world.control(torch.zeros(1, dtype=torch.float64))
    seconds.append(time.perf_counter() - begun_s)


def _time_beside_save(lab: _Lab, one_step: Callable[[], float], world: Wire) -> dict[str, float]:
    """Times steps alone, then a snapshot, then steps until its files are written on every rank."""
    alone = [one_step() for _ in range(STEPS_ALONE)]
    begun_s = time.perf_counter()
    lab.begin()
    stall_s = time.perf_counter() - begun_s
    beside, writing = [], True
    while writing:
        beside.append(one_step())
        still = torch.tensor([float(not lab.written())], dtype=torch.float64)
        world.control(still)
        writing = bool(still.item())
    step_s = statistics.median(alone)
    return {"stall_s": stall_s, "step_s": step_s, "slowed": statistics.mean(beside) / step_s, "window_s": sum(beside)}


class _Lab:
    """The checkpoints of a lab's ranks."""

    def __init__(self, plan: BenchPlan, info: RankInfo, store: dist.Store, built: BuiltForm, folder: Path) -> None:
        self._checkpointer = Checkpointer(info, store)
        self._checkpointer.register(built.backend)
        self._training = _Savable(
            run="bench",
            spec=plan.spec(built.form),
            backend=built.backend,
            progress=TrainingProgress(),
            scaler=Scaler(enabled=False),
        )
        self._folder = folder

    def begin(self) -> None:
        partial = self._checkpointer.begin(str(self._folder), self._training.progress.step)
        self._checkpointer.save(self._training, partial, kind="step", last=1)

    def written(self) -> bool:
        return self._checkpointer.wait(0.0)

    def save(self) -> None:
        self.begin()
        while not self._checkpointer.wait(1.0):
            pass
        for saved in self._checkpointer.ended():
            if saved["error"]:
                raise OSError(saved["error"])

    def load(self) -> None:
        self._checkpointer.load(find(self._folder), self._training.backend)

    def close(self) -> None:
        self._checkpointer.close()


class _Plain:
    """Plain Distributed Checkpoint, used as in torch's tutorials."""

    def __init__(self, built: BuiltForm, info: RankInfo, folder: Path) -> None:
        self._backend, self._rank, self._folder = built.backend, info.rank, folder / "dcp"
        self._group = dist.new_group(backend="gloo")

    def save(self) -> None:
        if self._rank == 0:
            shutil.rmtree(self._folder, ignore_errors=True)
        dist.barrier(self._group)
        dcp.save(self._state(), checkpoint_id=str(self._folder), process_group=self._group)

    def load(self) -> None:
        state = self._state()
        dcp.load(state, checkpoint_id=str(self._folder), process_group=self._group)
        set_state_dict(self._backend.module, self._backend.optimizer, model_state_dict=state["model"],
                       optim_state_dict=state["optimizer"])  # fmt: skip

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self._backend.module, self._backend.optimizer)
        return {"model": model, "optimizer": optimizer}
