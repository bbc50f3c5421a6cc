"""One rank of a bench, started by launch.py: `python -m fsdp_lab.bench`.

The first line of its standard input is its job as JSON; at the end of the input the launcher is gone, and the rank ends. It
sends messages as lines of JSON over its former standard output; what libraries print goes to the standard error.
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

Send = Callable[[str, Any], None]


def main() -> int:
    send, received = _private_output(), _from_launcher()
    try:
        _measure(json.loads(received.get()), received, send)
    except Exception as e:
        traceback.print_exc()
        send("error", " ".join(str(e).split()) or type(e).__name__)
        return 1
    return 0


def _measure(job: dict[str, Any], received: SimpleQueue[bytes], send: Send) -> None:
    import torch

    from fsdp_lab.bench.checkpoints import save_and_load
    from fsdp_lab.bench.interleave import interleave
    from fsdp_lab.bench.plan import BenchPlan
    from fsdp_lab.rank.rendezvous import RankInfo, close_groups, find_store, host_store, open_groups
    from fsdp_lab.wire import WireContext

    plan, rank = BenchPlan.from_dict(job["plan"]), int(job["rank"])
    if rank == 0:
        store = host_store()
        send("port", store.port)
    else:
        store = find_store("127.0.0.1", json.loads(received.get()))
    torch.set_num_threads(1)
    context = WireContext()
    device = torch.device(plan.devices[rank])
    info = RankInfo(rank=rank, world_size=plan.ranks, device=device, shares_gpu=plan.shares_gpu)
    world = open_groups(info, store, context, 0)

    def tell(done: int) -> None:
        if rank == 0:
            send("round", done)

    result: Any
    if job["task"] == "checkpoints":
        result = save_and_load(plan, info, world, store, Path(job["folder"]), tell)
    else:
        result = interleave(plan, info, world, tell, lambda events: send("events", events))
    send("result", result)
    world.control(torch.zeros(1, dtype=torch.float64))  # a barrier: no rank closes its groups while another trains
    close_groups(context)


def _private_output() -> Send:
    """Reserves the standard output for messages, and redirects other output to the standard error."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def send(kind: str, value: Any) -> None:
        out.write(json.dumps([kind, value]) + "\n")
        out.flush()

    return send


def _from_launcher() -> SimpleQueue[bytes]:
    """A queue of the input's lines. At the end of the input this process ends, even while it imports torch."""
    lines: SimpleQueue[bytes] = SimpleQueue()

    def read() -> None:
        part = b""
        while data := os.read(0, 4096):
            *whole, part = (part + data).split(b"\n")
            for line in whole:
                lines.put(line)
        os._exit(1)

    threading.Thread(target=read, daemon=True).start()
    return lines


if __name__ == "__main__":
    os._exit(main())  # output is flushed; why not a regular exit: see end_process in rank/rendezvous.py
