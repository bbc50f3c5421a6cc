"""What a rank of a bench does: `TASKS`, functions of its `BenchRank` and the job that return plain values."""

import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from queue import SimpleQueue
from typing import Any, Self
from unittest.mock import patch

import torch
from torch import distributed as dist

from fsdp_lab.base.children import Send
from fsdp_lab.base.events import StepEvent
from fsdp_lab.bench.host import measure
from fsdp_lab.bench.interleave import build_forms, interleave
from fsdp_lab.bench.plan import BenchPlan
from fsdp_lab.rank import Session
from fsdp_lab.rank.rendezvous import RankInfo, close_groups, find_store, host_store, open_groups
from fsdp_lab.rank.trainer import checksum
from fsdp_lab.wire import Wire, WireContext, shared_memory

Job = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class BenchRank:
    """One rank of a bench, and where it meets the others."""

    plan: BenchPlan
    rank: int
    store: dist.Store
    send: Send

    @classmethod
    def join(cls, plan: BenchPlan, job: Job, received: SimpleQueue[bytes], send: Send) -> Self:
        """Rank 0 hosts the store, and its place comes to the others by the launcher."""
        rank = int(job["rank"])
        if hosted := host_store() if rank == 0 else None:
            send("place", hosted.place)
        torch.set_num_threads(1)
        return cls(plan=plan, rank=rank, store=hosted or find_store(json.loads(received.get())), send=send)

    @contextmanager
    def groups(self, *, shared_memory: bool) -> Iterator[tuple[RankInfo, Wire]]:
        """A world of all ranks."""
        context = WireContext(shared_memory=shared_memory)
        device = torch.device(self.plan.devices[self.rank])
        info = RankInfo(rank=self.rank, world_size=self.plan.ranks, device=device, shares_gpu=self.plan.shares_gpu)
        world = open_groups(info, self.store, context, 0)
        yield info, world
        world.control(torch.zeros(1, dtype=torch.float64))  # a barrier: no rank closes its groups while another trains
        close_groups(context)

    @contextmanager
    def session(self, **options: Any) -> Iterator[Session]:
        """The session of a lab's rank."""
        device = self.plan.devices[self.rank]
        shared = self.plan.devices.count(device) if self.plan.shares_gpu else 1
        session = Session(
            rank=self.rank,
            world_size=self.plan.ranks,
            device=device,
            store=self.store,
            shared_gpu_ranks=shared,
            memory_cap=0.9 / shared if shared > 1 else None,
            **options,
        )
        yield session
        session.close()
        self.store.add("bench/closed", 1)
        while self.rank == 0 and self.store.add("bench/closed", 0) < self.plan.ranks:
            time.sleep(0.01)  # the others need its store until they are closed


def steps(rank: BenchRank, job: Job) -> dict[str, dict[str, Any]]:
    """`bench step`."""
    with rank.groups(shared_memory=rank.plan.shares_memory) as (info, world):
        forms = list(build_forms(rank.plan, info, world))
        return interleave(rank.plan, forms, info, world)


def train(rank: BenchRank, job: Job) -> list[dict[str, Any]]:
    """Some steps of each Spec from initial values. A Spec that fails has an "error" in place of figures."""
    with rank.session() as session:
        return [_train(session, spec, job["steps"]) for spec in job["specs"]]


def _train(session: Session, spec: dict[str, Any], steps: int) -> dict[str, Any]:
    try:
        session.apply("bench", spec, fresh=True)
        events = session.train(steps)["events"]
    except Exception as e:  # so that one Spec does not hide what the others do
        return {"error": f"{type(e).__name__}: {' '.join(str(e).split())}"}
    assert session.trainer is not None
    ledger = session.trainer.meter.ledger
    kernels = None if ledger is None else ledger.kernels
    return {
        "losses": [event["mean_loss"] for event in events],
        "checksum": checksum(session.trainer.backend),
        "step_s": statistics.median(e["step_time_s"] for e in events if StepEvent.from_dict(e).counts),
        "peak_bytes": max(event["memory"]["peak_bytes"] for event in events),
        "kernels": None if kernels is None else asdict(kernels),
    }


def host(rank: BenchRank, job: Job) -> dict[str, Any]:
    """`bench host`."""
    groups = rank.groups(shared_memory=rank.plan.shares_memory)
    with patch.object(shared_memory, "SPIN_S", 0.0), groups as (info, world):
        return measure(rank.plan, job, info, world)


TASKS: Mapping[str, Callable[[BenchRank, Job], Any]] = {f.__name__: f for f in (steps, train, host)}
