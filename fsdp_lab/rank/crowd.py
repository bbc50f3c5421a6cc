"""One process of a crowd: what a rank would find if others shared its host's cores (`measure_crowd`); `main` is the process.

As many processes as there would be ranks measure the speed of computing, each with its share of the threads, all at the same
time; and steps, which each makes by itself. Then they time collectives among them, over shared memory and over Gloo."""

from __future__ import annotations

import json
import os
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

from fsdp_lab.base.children import Send, run_child

WIRES = {"collectives": True, "gloo": False}  # whether over shared memory, if there is any


def main() -> int:
    return run_child(_measure)


def _measure(job: dict[str, Any], received: SimpleQueue[bytes], send: Send) -> None:
    from torch import distributed as dist  # not before `run_child` has reserved the standard output

    from fsdp_lab.rank.calibration import CROWD_S, HardwareProbe
    from fsdp_lab.rank.rendezvous import find_store, host_store
    from fsdp_lab.rank.session import Session

    rank, ranks, passes = job["rank"], job["ranks"], job["passes"]
    if hosted := host_store() if rank == 0 else None:
        send("place", hosted.place)
    store = hosted or find_store(json.loads(received.get()))
    all_meet = dist.ProcessGroupGloo(dist.PrefixStore("meet", store), rank, ranks, timedelta(seconds=CROWD_S))

    def meet() -> None:
        all_meet.barrier().wait()  # type: ignore[attr-defined]

    alone = Session(rank=0, world_size=1, device="cpu", store=host_store(), threads=job["threads"])
    measured = alone.calibrate(job["specs"], job["dtypes"], passes, meet)
    alone.close()
    for name, shared in WIRES.items():
        wire = dist.PrefixStore(name, store)
        session = Session(rank=rank, world_size=ranks, device="cpu", store=wire, shared_memory=shared)
        measured[name] = HardwareProbe(session.info, session.world).links(passes)
        meet()
        session.close()
    meet()  # the first has the store
    send("result", {**measured, "per_host": ranks})


if __name__ == "__main__":
    os._exit(main())  # output is flushed; why not a regular exit: see end_process in rendezvous.py
