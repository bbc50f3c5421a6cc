"""One rank of a bench, as launch.py starts it: `python -m fsdp_lab.bench`.

Its standard input begins with a line of JSON that says what to do; its end means that the launcher is gone, and the rank
ends too. What it has to say it says in lines of JSON on what was its standard output; what libraries print goes to the
standard error.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

Say = Callable[[str, Any], None]


def main() -> int:
    say = _private_output()
    try:
        _measure(json.loads(sys.stdin.readline()), say)
    except Exception as e:
        traceback.print_exc()
        say("error", " ".join(str(e).split()) or type(e).__name__)
        return 1
    return 0


def _measure(job: dict[str, Any], say: Say) -> None:
    import torch

    from fsdp_lab.bench.interleave import interleave
    from fsdp_lab.bench.plan import Plan
    from fsdp_lab.rank.rendezvous import Seat, close_groups, find_store, host_store, open_groups
    from fsdp_lab.wire import Hub

    plan, rank = Plan.from_dict(job["plan"]), int(job["rank"])
    if rank == 0:
        store = host_store()
        say("port", store.port)
    else:
        store = find_store("127.0.0.1", json.loads(sys.stdin.readline()))
    threading.Thread(target=_end_with_launcher, daemon=True).start()
    torch.set_num_threads(1)
    hub = Hub()
    device = torch.device(plan.devices[rank])
    seat = Seat(rank=rank, world_size=plan.ranks, device=device, shares_gpu=plan.shares_gpu)
    world = open_groups(seat, store, hub, 0)
    result = interleave(
        plan,
        seat,
        world,
        lambda done: say("round", done) if rank == 0 else None,
        lambda events: say("events", events),
    )
    say("result", result)
    world.control(torch.zeros(1, dtype=torch.float64))  # nobody closes while another still trains
    close_groups(hub)


def _private_output() -> Say:
    """Takes the standard output for our own lines, and gives the standard error's place to everybody else's."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def say(kind: str, value: Any) -> None:
        out.write(json.dumps([kind, value]) + "\n")
        out.flush()

    return say


def _end_with_launcher() -> None:
    while os.read(0, 4096):
        pass
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
