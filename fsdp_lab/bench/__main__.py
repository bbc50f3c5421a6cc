"""One rank of a bench, as launch.py starts it: `python -m fsdp_lab.bench`.

Its standard input begins with a line of JSON that says what to do; its end means that the launcher is gone, and the
rank ends too. What it has to say it says in lines of JSON on what was its standard output; what libraries print goes to
the standard error.
"""

from __future__ import annotations

import json
import os
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any

Say = Callable[[str, Any], None]


def main() -> int:
    say, told = _private_output(), _from_launcher()
    try:
        _measure(json.loads(told.get()), told, say)
    except Exception as e:
        traceback.print_exc()
        say("error", " ".join(str(e).split()) or type(e).__name__)
        return 1
    return 0


def _measure(job: dict[str, Any], told: SimpleQueue[bytes], say: Say) -> None:
    import torch

    from fsdp_lab.bench.checkpoints import save_and_load
    from fsdp_lab.bench.interleave import interleave
    from fsdp_lab.bench.plan import BenchPlan
    from fsdp_lab.rank.rendezvous import RankInfo, close_groups, find_store, host_store, open_groups
    from fsdp_lab.wire import WireContext

    plan, rank = BenchPlan.from_dict(job["plan"]), int(job["rank"])
    if rank == 0:
        store = host_store()
        say("port", store.port)
    else:
        store = find_store("127.0.0.1", json.loads(told.get()))
    torch.set_num_threads(1)
    context = WireContext()
    device = torch.device(plan.devices[rank])
    info = RankInfo(rank=rank, world_size=plan.ranks, device=device, shares_gpu=plan.shares_gpu)
    world = open_groups(info, store, context, 0)

    def tell(done: int) -> None:
        if rank == 0:
            say("round", done)

    result: Any
    if job["task"] == "checkpoints":
        result = save_and_load(plan, info, world, store, Path(job["folder"]), tell)
    else:
        result = interleave(plan, info, world, tell, lambda events: say("events", events))
    say("result", result)
    world.control(torch.zeros(1, dtype=torch.float64))  # nobody closes while another still trains
    close_groups(context)


def _private_output() -> Say:
    """Takes the standard output for our own lines, and gives the standard error's place to everybody else's."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def say(kind: str, value: Any) -> None:
        out.write(json.dumps([kind, value]) + "\n")
        out.flush()

    return say


def _from_launcher() -> SimpleQueue[bytes]:
    """The lines that come; when there are no more, this process ends, also while it still imports torch."""
    lines: SimpleQueue[bytes] = SimpleQueue()

    def read() -> None:
        part = b""
        while came := os.read(0, 4096):
            *whole, part = (part + came).split(b"\n")
            for line in whole:
                lines.put(line)
        os._exit(1)

    threading.Thread(target=read, daemon=True).start()
    return lines


if __name__ == "__main__":
    os._exit(main())  # all is said and flushed; why not Python's own end: end_process, rank/rendezvous.py
