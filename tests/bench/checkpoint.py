"""Checkpoints of one model: the lab's, and those of plain Distributed Checkpoint with torch's FSDP2.

Note: what is timed. Save: from the call until the files of all ranks are complete on the disk, though the lab's would
let training continue meanwhile. Load: back into the existing model and optimizer, including the calls that a library
requires before and after it (`get_state_dict`, `set_state_dict`). There is a barrier before and after each. Then the
cost of the lab's asynchronous save: how long training stops for the snapshot, and how much slower its steps are until
the files are written.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from fsdp_lab.bench.interleave import BuiltForm, batches_of, build_forms, step
from fsdp_lab.bench.plan import LAB, REFERENCE, BenchPlan
from fsdp_lab.bench.results import Report, environment, format_spread, ratios, slowest, spread
from fsdp_lab.bench.tasks import BenchRank
from fsdp_lab.cli.bench import planned, say
from fsdp_lab.cli.console import at_least
from fsdp_lab.engine.scaling import Scaler
from fsdp_lab.rank.checkpointing import Checkpointer
from fsdp_lab.rank.rendezvous import RankInfo
from fsdp_lab.rank.trainer import TrainingProgress
from fsdp_lab.spec.checkpoint_format import find
from fsdp_lab.wire import Wire
from tests.bench.load import model_folder
from tests.bench.ranks import launch_here

DCP, DCP_AGAIN = "dcp", "dcp-again"
METHODS = (LAB, DCP, DCP_AGAIN)
STEPS_ALONE = 3  # before each save, to compare with


def checkpoint(args: argparse.Namespace) -> dict[str, Any]:
    """Save and load, compared with plain Distributed Checkpoint, and the cost of a save to training. Raises BenchError."""
    at_least(args, "rounds", 1)
    plan = planned(args, forms=(LAB, REFERENCE), steps=args.rounds)
    say(f"{plan.steps} rounds after {plan.warmup} steps of warm-up, on {' '.join(plan.devices)}")
    with model_folder(args.folder) as folder:
        ranks = launch_here(plan, "checkpoint", folder=str(folder))
    seconds = {
        method: {way: slowest([rank[method][way] for rank in ranks]) for way in ("save", "load")} for method in METHODS
    }
    for method, ways in seconds.items():
        for way, of in ways.items():
            say(f"{method} {way}: {format_spread(spread(of), 'ms', 0)}")
    both = {method: [a + b for a, b in zip(of["save"], of["load"], strict=True)] for method, of in seconds.items()}
    report = Report(say, environment(plan))
    report.add("ratios", "lab/dcp", spread(ratios(both[LAB], both[DCP])), label="lab/dcp, save + load")
    report.add("control", "dcp/dcp", spread(ratios(both[DCP], both[DCP_AGAIN])))
    stalls = [max(of, key=lambda one: one["stall_s"]) for of in zip(*(rank["beside"] for rank in ranks), strict=True)]
    stall = {
        "stall_s": spread([one["stall_s"] for one in stalls]),
        "stall/step": spread([one["stall_s"] / one["step_s"] for one in stalls]),
        "step beside/alone": spread([one["slowed"] for one in stalls]),
        "window_s": spread([one["window_s"] for one in stalls]),
    }
    say(f"a save stops training for: {1e3 * stall['stall_s'].median:.0f} ms")
    say(f"stall/step: {format_spread(stall['stall/step'])}")
    say(f"step during the writing/step alone: {format_spread(stall['step beside/alone'])}")
    by_method = {m: {way: asdict(spread(of)) for way, of in ways.items()} for m, ways in seconds.items()}
    return report.figures | {"seconds": by_method, **{name: asdict(of) for name, of in stall.items()}}


# -- in a rank -----------------------------------------------------------------------------------------------------------


def on_rank(rank: BenchRank, job: Mapping[str, Any]) -> dict[str, Any]:
    """Times both ways of saving and loading. Collective. The plan's forms are the lab and FSDP2.

    Returns {method: {"save": [...], "load": [...]}} in seconds and
    {"beside": [{"stall_s", "step_s", "slowed", "window_s"}, ...]}, with one value per round.
    """
    plan, folder = rank.plan, Path(job["folder"])
    with rank.groups(shared_memory=plan.shares_memory) as (info, world):
        forms = {built.form.name: built for built in build_forms(plan, info, world)}
        batches = list(batches_of(plan, info))
        for i, batch in enumerate(batches[: plan.warmup]):
            for built in forms.values():
                step(built, batch, info.device, world, first=i == 0)
        lab, plain = _Lab(plan, info, rank.store, forms[LAB], folder), _Plain(forms[REFERENCE], info, folder)
        measured: dict[str, Any] = {method: {"save": [], "load": []} for method in METHODS} | {"beside": []}
        for i, batch in enumerate(batches[plan.warmup :]):
            for method in METHODS if i % 2 else METHODS[::-1]:
                of: Any = lab if method == LAB else plain
                with _timed(world, measured[method]["save"]):
                    of.save()
                with _timed(world, measured[method]["load"]):
                    of.load()
            one_step = partial(step, forms[LAB], batch, info.device, world, first=False)
            measured["beside"].append(_time_beside_save(lab, one_step, world))
            rank.end_round(plan.warmup + i + 1)
        lab.checkpointer.close()
    return measured


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
        self.checkpointer = Checkpointer(info, store)
        self.checkpointer.register(built.backend)
        self._training = SimpleNamespace(
            run="bench",
            spec=plan.spec(built.form),
            backend=built.backend,
            progress=TrainingProgress(),
            scaler=Scaler(enabled=False),
        )
        self._folder = folder

    def begin(self) -> None:
        partial = self.checkpointer.begin(str(self._folder), self._training.progress.step)
        self.checkpointer.save(self._training, partial, kind="step", last=1)

    def written(self) -> bool:
        return self.checkpointer.wait(0.0)

    def save(self) -> None:
        self.begin()
        while not self.checkpointer.wait(1.0):
            pass
        for saved in self.checkpointer.ended():
            if saved["error"]:
                raise OSError(saved["error"])

    def load(self) -> None:
        self.checkpointer.load(find(self._folder), self._training.backend)


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
        both = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        set_state_dict(self._backend.module, self._backend.optimizer, **both)

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self._backend.module, self._backend.optimizer)
        return {"model": model, "optimizer": optimizer}
