"""`launch`: runs a task of a bench in a temporary process for each rank; the program is a rank (`base/children.py`)."""

import os
from collections.abc import Callable
from dataclasses import asdict
from queue import SimpleQueue
from typing import Any

from fsdp_lab.base.children import ChildError, Send, run_child, run_children
from fsdp_lab.bench.plan import BenchError, BenchPlan


def launch(
    plan: BenchPlan,
    task: str,
    *,
    module: str = "fsdp_lab.bench.launch",
    on_message: Callable[[str, Any], None] = lambda kind, value: None,
    **arguments: Any,
) -> list[Any]:
    """Runs a task, one of TASKS in tasks.py, or of those of `module`, the program of a rank, in new processes. Returns the
    result of each rank; `on_message` is called with what else ranks send. Raises BenchError with the first error of a rank
    or its exit code, or after `plan.limit_s`."""
    job = {**arguments, "task": task, "plan": asdict(plan)}
    try:
        return run_children(module, job, plan.ranks, lambda _, *message: on_message(*message), limit_s=plan.limit_s)
    except ChildError as e:
        raise BenchError(str(e)) from None


def _perform(job: dict[str, Any], received: SimpleQueue[bytes], send: Send) -> None:
    from fsdp_lab.bench.tasks import TASKS, BenchRank

    rank = BenchRank.join(BenchPlan.from_dict(job["plan"]), job, received, send)
    send("result", TASKS[job["task"]](rank, job))


if __name__ == "__main__":
    os._exit(run_child(_perform))  # output is flushed; why not a regular exit: see end_process in rank/rendezvous.py
