"""A folder of weights until the first step has ended: the lab's, and `from_pretrained` with torch's FSDP2.

Note: what is timed and measured. Both begin in processes that are ready, with a folder whose files are in the system's
cache. The time is from the call until the first step has ended on all ranks. Host memory is that of all ranks while they
load, beyond what they held before: each rank's resident set is looked at every few milliseconds, its largest value counts,
and the sum over ranks is given as a multiple of the model's size in its master dtype, fp32.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from fsdp_lab.backends.storage import return_memory
from fsdp_lab.bench.plan import LAB
from fsdp_lab.bench.results import Report, environment, format_spread, ratios, slowest, spread
from fsdp_lab.bench.tasks import BenchRank
from fsdp_lab.cli.bench import planned, say
from fsdp_lab.cli.console import at_least
from fsdp_lab.models import Batches, resolve
from fsdp_lab.models.wrapping import units
from fsdp_lab.rank import Session
from fsdp_lab.spec.checkpoint_format import check_folder
from fsdp_lab.spec.spec import Spec
from tests.bench.ranks import launch_here

PLAIN, PLAIN_AGAIN = "plain", "plain-again"
METHODS = (LAB, PLAIN, PLAIN_AGAIN)
_LOOK_EVERY_S = 0.003


@contextmanager
def model_folder(parent: Path | None) -> Iterator[Path]:
    """A folder inside `parent`, or where temporary ones are, which is removed at the end."""
    checked = None if parent is None else check_folder(parent, field="--folder")
    with tempfile.TemporaryDirectory(prefix="fsdp_lab-bench-", dir=checked) as folder:
        yield Path(folder)


def load(args: argparse.Namespace) -> dict[str, Any]:
    """A folder of weights until the end of the first step, beside `from_pretrained` with FSDP2. Raises BenchError."""
    at_least(args, "rounds", 1)
    plan = planned(args, forms=(LAB,))
    with model_folder(args.folder) as folder:
        model_bytes = write_model(plan.preset, folder)
        of = f"{plan.preset}, {model_bytes / 1e9:.2f} GB in fp32, {plan.ranks} ranks"
        say(f"{of}, {args.rounds} rounds after one of warm-up")
        spec = Spec(world_size=plan.ranks, devices=plan.devices).replace(
            model=str(folder), tokenizer="bytes", seq_len=plan.seq_len, micro_batch=plan.micro_batch
        )
        ranks = launch_here(plan, "load", spec=spec.to_dict(), rounds=args.rounds)
    seconds, memory = {}, {}
    for method in METHODS:
        seconds[method] = slowest([rank[method]["seconds"] for rank in ranks])
        held = zip(*(rank[method]["bytes"] for rank in ranks), strict=True)
        memory[method] = spread([sum(of_round) / model_bytes for of_round in held])
        first = f"{method}: first step after {format_spread(spread(seconds[method]), 's', 1)}"
        say(f"{first}; host memory of all ranks while loading: {format_spread(memory[method])} x the model")
    report = Report(say, environment(plan))
    report.add("ratios", "lab/plain", spread(ratios(seconds[LAB], seconds[PLAIN])), label="lab/plain, first step")
    report.add("control", "plain/plain", spread(ratios(seconds[PLAIN], seconds[PLAIN_AGAIN])))
    return report.figures | {
        "model_bytes": model_bytes,
        "seconds": {method: asdict(spread(of)) for method, of in seconds.items()},
        "host memory/model": {method: asdict(of) for method, of in memory.items()},
    }


def write_model(preset: str, folder: Path) -> int:
    """Write a model with random weights as `save_pretrained` does. Returns its bytes in fp32."""
    model = AutoModelForCausalLM.from_config(resolve(preset), dtype=torch.float32)
    model.save_pretrained(folder)
    return sum(4 * p.numel() for p in model.parameters())


# -- in a rank -----------------------------------------------------------------------------------------------------------


def on_rank(rank: BenchRank, job: Mapping[str, Any]) -> dict[str, Any]:
    """Both ways, in turns; collective. Returns {method: {"seconds": [...], "bytes": [...]}}: this rank's, by round."""
    measured: dict[str, Any] = {method: {"seconds": [], "bytes": []} for method in METHODS}
    with rank.session() as session:
        spec = Spec.from_dict(job["spec"])
        plain = _Plain(session, spec)
        for turn in range(job["rounds"] + 1):  # the first warms the system's cache and the allocator
            for method in METHODS if turn % 2 else METHODS[::-1]:
                seconds, nbytes = _with_lab(session, spec) if method == LAB else plain.load()
                if turn:
                    measured[method]["seconds"].append(seconds)
                    measured[method]["bytes"].append(nbytes)
    return measured


_Loading = tuple[float, int]  # seconds until the first step has ended, and the most memory while it was loaded


def _with_lab(session: Session, spec: Spec) -> _Loading:
    _ready(session)
    begun_s = time.perf_counter()
    with _largest_rss() as peak:
        session.apply("bench", spec.to_dict(), fresh=True)
    session.train(1)
    _barrier(session)
    seconds = time.perf_counter() - begun_s
    session.unload()
    return seconds, peak()


class _Plain:
    """A script with FSDP2, as in torch's tutorials, on a group of torch's own."""

    def __init__(self, session: Session, spec: Spec) -> None:
        self._session, self._spec = session, spec
        group = dist.new_group(backend="gloo")
        self._mesh = DeviceMesh.from_group(group, "cpu")
        config = resolve(spec.workload.model)
        batches = Batches(spec.workload, config, rank=session.info.rank, world_size=session.info.world_size)
        self._batch = batches.batch(0)

    def load(self) -> _Loading:
        _ready(self._session)
        begun_s = time.perf_counter()
        with _largest_rss() as peak:
            model = AutoModelForCausalLM.from_pretrained(str(self._spec.workload.model), dtype=torch.float32)
            for (block,) in units(model, "block"):
                fully_shard(block, mesh=self._mesh)
            fully_shard(model, mesh=self._mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
        model(**self._batch).loss.backward()
        optimizer.step()
        _barrier(self._session)
        return time.perf_counter() - begun_s, peak()


def _ready(session: Session) -> None:
    """What was loaded before is freed, on all ranks."""
    gc.collect()
    return_memory(session.info.device)
    _barrier(session)


def _barrier(session: Session) -> None:
    session.world.control(torch.zeros(1, dtype=torch.float64))


@contextmanager
def _largest_rss() -> Iterator[Callable[[], int]]:
    """Yields a function that returns the most bytes that the process held inside, beyond those at its begin."""
    process, over = psutil.Process(), threading.Event()
    before = largest = process.memory_info().rss

    def look() -> None:
        nonlocal largest
        while not over.wait(_LOOK_EVERY_S):
            largest = max(largest, process.memory_info().rss)

    watcher = threading.Thread(target=look, daemon=True)
    watcher.start()
    try:
        yield lambda: largest - before
    finally:
        over.set()
        watcher.join()
