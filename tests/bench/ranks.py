"""A rank of a bench of this folder, as fsdp_lab/bench/launch.py has one: `on_rank` of the module that the task names."""

import importlib
import os
from functools import partial
from queue import SimpleQueue
from typing import Any

from fsdp_lab.base.children import Send, run_child
from fsdp_lab.bench.launch import launch

launch_here = partial(launch, module="tests.bench.ranks")


def _perform(job: dict[str, Any], received: SimpleQueue[bytes], send: Send) -> None:
    from fsdp_lab.bench.tasks import BenchRank  # torch, which is imported while the end of the input is watched

    task = importlib.import_module(f"tests.bench.{job['task']}")
    send("result", task.on_rank(BenchRank.join(task.Plan.from_dict(job["plan"]), job, received, send), job))


if __name__ == "__main__":
    os._exit(run_child(_perform))
