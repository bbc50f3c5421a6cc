"""A folder of weights until the first step has ended: the lab's, and `from_pretrained` with torch's FSDP2.

Note: what is timed and measured. Both begin in processes that are ready, with a folder whose files are in the system's
cache. The time is from the call until the first step has ended on all ranks. Host memory is that of all ranks while they
load, beyond what they held before: each rank's resident set is looked at every few milliseconds, its largest value counts,
and the sum over ranks is given as a multiple of the model's size in its master dtype, fp32.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from fsdp_lab.backends.storage import return_memory
from fsdp_lab.core.spec import Spec
from fsdp_lab.models import Batches, resolve
from fsdp_lab.models.wrapping import units
from fsdp_lab.rank import Session

LAB, PLAIN, PLAIN_AGAIN = "lab", "plain", "plain-again"
METHODS = (LAB, PLAIN, PLAIN_AGAIN)
_LOOK_EVERY_S = 0.003


def write_model(preset: str, folder: Path) -> int:
    """Write a model with random weights as `save_pretrained` does. Returns its bytes in fp32."""
    model = AutoModelForCausalLM.from_config(resolve(preset), dtype=torch.float32)  # type: ignore[no-untyped-call]
    model.save_pretrained(folder)
    return sum(4 * p.numel() for p in model.parameters())


def load_and_step(session: Session, job: Mapping[str, Any]) -> dict[str, Any]:
    """Both ways, in turns; collective. Returns {method: {"seconds": [...], "bytes": [...]}}: this rank's, by round."""
    spec = Spec.from_dict(job["spec"])
    plain = _Plain(session, spec)
    ways: dict[str, Callable[[], _Loading]] = {
        LAB: lambda: _with_lab(session, spec), PLAIN: plain.load, PLAIN_AGAIN: plain.load
    }  # fmt: skip
    found: dict[str, Any] = {method: {"seconds": [], "bytes": []} for method in METHODS}
    for turn in range(job["rounds"] + 1):  # the first warms the system's cache and the allocator
        for method in METHODS if turn % 2 else METHODS[::-1]:
            seconds, nbytes = ways[method]()
            if turn:
                found[method]["seconds"].append(seconds)
                found[method]["bytes"].append(nbytes)
    return found


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
