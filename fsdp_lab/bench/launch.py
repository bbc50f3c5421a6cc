"""`launch`: runs a bench in a temporary process for each rank; `main` is a rank (`core/children.py`)."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from fsdp_lab.bench.plan import BenchError, BenchPlan, PlanError
from fsdp_lab.core.children import ChildError, Send, run_child, run_children


def place(ranks: int, device: str | None) -> tuple[str, ...]:
    """A device per rank. None: GPUs if there is one for each rank, else CPUs.

    With "cuda" and fewer GPUs than ranks, ranks share them. Raises PlanError if there is no GPU.
    """
    if device == "cpu":
        return ("cpu",) * ranks
    import torch

    gpus = torch.cuda.device_count()
    if device == "cuda" and not gpus:
        raise PlanError("--device cuda: torch finds no GPU here; give --device cpu")
    if device is None and gpus < ranks:
        return ("cpu",) * ranks
    return tuple(f"cuda:{rank % gpus}" for rank in range(ranks))


def launch(
    plan: BenchPlan,
    job: Mapping[str, Any],
    on_round: Callable[[int], None],
    on_events: Callable[[list[dict[str, Any]]], None] = lambda events: None,
) -> list[Any]:
    """Runs the plan in new processes and returns the result of each rank.

    Args:
        job: the "task", "steps", "checkpoints", "wire" or one of sessions.TASKS, and its arguments.
        on_round: called with the number of each finished round.
        on_events: called with the step events of metered forms, as dicts.

    Raises:
        BenchError: with the first error of a rank, or with its exit code; or when `plan.limit_s` is over.
    """

    def on_message(rank: int, kind: str, value: Any) -> None:
        if kind == "round":
            on_round(value)
        elif kind == "events":
            on_events(value)

    try:
        return run_children("fsdp_lab.bench.launch", {**job, "plan": plan.to_dict()}, plan.ranks, on_message,
                            limit_s=plan.limit_s)  # fmt: skip
    except ChildError as e:
        raise BenchError(str(e)) from None


# -- in the process of a rank -----------------------------------------------------------------------------------------


def main() -> int:
    return run_child(_measure)


def _measure(job: dict[str, Any], received: SimpleQueue[bytes], send: Send) -> None:
    import torch

    from fsdp_lab.bench.checkpoints import save_and_load
    from fsdp_lab.bench.interleave import interleave
    from fsdp_lab.bench.sessions import TASKS, perform
    from fsdp_lab.bench.wire import time_a_wait, time_collectives
    from fsdp_lab.rank.rendezvous import RankInfo, close_groups, find_store, host_store, open_groups
    from fsdp_lab.wire import WireContext

    plan, rank = BenchPlan.from_dict(job["plan"]), int(job["rank"])
    if hosted := host_store() if rank == 0 else None:
        send("place", hosted.place)
    store = hosted or find_store(json.loads(received.get()))
    torch.set_num_threads(1)
    if job["task"] in TASKS:
        send("result", perform(plan, rank, store, job))
        return
    context = WireContext(shared_memory=plan.shares_memory)
    device = torch.device(plan.devices[rank])
    info = RankInfo(rank=rank, world_size=plan.ranks, device=device, shares_gpu=plan.shares_gpu)
    world = open_groups(info, store, context, 0)

    def report_round(done: int) -> None:
        if rank == 0:
            send("round", done)

    result: Any
    if job["task"] == "checkpoints":
        result = save_and_load(plan, info, world, store, Path(job["folder"]), report_round)
    elif job["task"] == "wire":
        result = {"seconds": time_collectives(world, plan.steps, report_round), "waiting": time_a_wait(world)}
    else:
        result = interleave(plan, info, world, report_round, lambda events: send("events", events))
    send("result", result)
    world.control(torch.zeros(1, dtype=torch.float64))  # a barrier: no rank closes its groups while another trains
    close_groups(context)


if __name__ == "__main__":
    os._exit(main())  # output is flushed; why not a regular exit: see end_process in rank/rendezvous.py
