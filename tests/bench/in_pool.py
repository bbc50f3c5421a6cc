"""`launched_in`: benches on the ranks of the tests' pool, in place of new processes."""

import gc
import importlib
import json
from collections.abc import Callable, Mapping
from typing import Any

from fsdp_lab.bench.plan import BenchPlan
from tests.pool import Place, Pool


def launched_in(pool: Pool) -> Callable[..., list[Any]]:
    """A `launch` that starts no process."""

    def launch(plan: BenchPlan, task: str, *, on_message: Any = None, **arguments: Any) -> list[Any]:
        told = pool.run(_perform, plan.ranks, plan, task, arguments, reduction=None, timeout_s=200)
        for kind, value in (message for _, messages in told for message in messages):
            if on_message is not None:
                on_message(kind, value)
        return [json.loads(result) for result, _ in told]

    return launch


def _perform(place: Place, plan: BenchPlan, task: str, arguments: Mapping[str, Any]) -> tuple[str, list[Any]]:
    from fsdp_lab.bench.tasks import TASKS, BenchRank

    messages: list[tuple[str, Any]] = []
    rank = BenchRank(plan=plan, rank=place.rank, store=place.store, send=lambda *message: messages.append(message))
    perform = TASKS[task] if task in TASKS else importlib.import_module(f"tests.bench.{task}").on_rank
    result = json.dumps(perform(rank, {**arguments, "task": task}))
    gc.unfreeze()  # the loop of steps freezes its models
    gc.collect()
    gc.freeze()
    return result, messages
