"""What a rank of a bench does: `TASKS`, functions of its `BenchRank` and the job that return plain values.

The bench of collectives times, after a barrier, as many of a size as make 4 MiB, one after the other, or a single larger
one. Each is timed from its issue to the end of its wait, through `Wire`. A round measures all forms of a size in turns,
every second round in the opposite order. The whole tensor is in the group's own memory where it has any, as our engine's and
FSDP2's are."""

import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, Self
from unittest.mock import patch

import torch
from torch import Tensor, distributed as dist

from fsdp_lab.base.children import Send
from fsdp_lab.base.events import StepEvent
from fsdp_lab.bench.host import measure, time_calls
from fsdp_lab.bench.interleave import beside, build_forms, interleave
from fsdp_lab.bench.plan import BenchPlan
from fsdp_lab.rank import Session
from fsdp_lab.rank.rendezvous import RankInfo, close_groups, find_store, host_store, open_groups
from fsdp_lab.rank.trainer import checksum
from fsdp_lab.wire import ReductionOrder, Wire, WireContext, shared_memory

SIZES_BYTES = (64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20)  # of the whole tensor
WAIT_S = 1.0
BATCH_BYTES = 4 << 20  # smaller ones are repeated
SHARED, AGAIN = "shared", "shared-again"
KINDS: Mapping[str, tuple[str, ...]] = {  # forms of each; those over Gloo differ in how it is asked
    "all_gather": (SHARED, "gloo", AGAIN, "gloo-list"),
    "reduce_scatter": (SHARED, "gloo", AGAIN, "gloo-native"),
}

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


def wire(rank: BenchRank, job: Job) -> dict[str, Any]:
    """`bench wire`."""
    with rank.groups(shared_memory=True) as (_, world):
        return {"seconds": time_collectives(world, rank.plan.steps), "waiting": time_a_wait(world)}


def time_collectives(world: Wire, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Seconds of this rank by "kind/bytes" and form, one per round, after one to warm up. Collective."""
    shared, gloo = (beside(world, shared_memory=on) for on in (True, False))
    seconds: dict[str, dict[str, list[float]]] = {}
    tensors = {group: {nbytes: _tensors(group, nbytes) for nbytes in SIZES_BYTES} for group in (shared, gloo)}
    for i in range(rounds + 1):
        for kind, forms in KINDS.items():
            for nbytes in SIZES_BYTES:
                of_size = seconds.setdefault(f"{kind}/{nbytes}", {form: [] for form in forms})
                for form in forms if i % 2 else forms[::-1]:
                    group = shared if form in (SHARED, AGAIN) else gloo
                    issue = partial(_collective, group, kind, form, *tensors[group][nbytes])
                    of_size[form].append(_timed(shared, issue, max(1, BATCH_BYTES // nbytes)))
    world.barrier().wait()
    return {name: {form: counted[1:] for form, counted in of_size.items()} for name, of_size in seconds.items()}


def time_a_wait(world: Wire) -> float:
    """The share of a core that rank 0 takes while it waits for another rank's collective. Collective."""
    shared = beside(world, shared_memory=True)
    shared.barrier().wait()
    if shared.rank():
        time.sleep(WAIT_S)
    begun_s, cpu_s = time.perf_counter(), time.process_time()
    shared.barrier().wait()
    return 0.0 if shared.rank() else (time.process_time() - cpu_s) / (time.perf_counter() - begun_s)


def _tensors(group: Wire, nbytes: int) -> tuple[Tensor, Tensor]:
    """The whole, [W * n], and a rank's part, [n], in fp32."""
    n = nbytes // 4 // group.size()
    pool, numel = group.buffer_pool, group.size() * n
    whole = torch.empty(numel, dtype=torch.float32) if pool is None else pool.empty(numel, torch.float32)
    return whole.normal_(), torch.randn(n)


def _collective(group: Wire, kind: str, form: str, whole: Tensor, part: Tensor) -> Any:
    group.context.reduction = ReductionOrder.NATIVE if form == "gloo-native" else ReductionOrder.AUTO
    if kind == "reduce_scatter":
        return group.reduce_scatter_single(part, whole)
    if form == "gloo-list":
        return group.allgather([list(whole.chunk(group.size()))], [part])
    return group.all_gather_single(whole, part)


def _timed(shared: Wire, issue: Callable[[], Any], times: int) -> float:
    """Seconds of one."""
    shared.barrier().wait()
    begun_s = time.perf_counter()
    for _ in range(times):
        issue().wait()
    return (time.perf_counter() - begun_s) / times


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


TASKS: Mapping[str, Callable[[BenchRank, Job], Any]] = {f.__name__: f for f in (steps, wire, train, host, time_calls)}
