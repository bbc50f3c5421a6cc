"""Where ranks meet: a store, and the process groups that are opened over it, anew after each abort."""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import dataclass
from datetime import timedelta
from typing import NoReturn

import torch
from torch import distributed as dist
from torch.distributed import distributed_c10d as c10d

from fsdp_lab.wire import Hub, Wire, register


@dataclass(frozen=True, kw_only=True)
class Seat:
    """Which rank this process is, and on which device it computes."""

    rank: int
    world_size: int
    device: torch.device
    shares_gpu: bool = False  # then CUDA tensors go over Gloo: NCCL wants a GPU for each rank


def host_store(host: str = "127.0.0.1", *, timeout_s: float = 60.0) -> dist.TCPStore:
    """The store that the other ranks connect to, on a free port (`.port`); rank 0 makes it.

    It listens at `host` alone; left to itself torch's would on every network, and whoever reaches it is served.
    """
    listener = socket.create_server((host, 0))
    return dist.TCPStore(
        host,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listener.detach(),
    )


def find_store(host: str, port: int, *, timeout_s: float = 60.0) -> dist.TCPStore:
    """A connection to rank 0's store. Raises ConnectionError with a sentence when nobody answers."""
    try:
        return dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s))
    except (RuntimeError, TimeoutError) as e:
        first = str(e).splitlines()[0]
        raise ConnectionError(
            f"rank 0's store at {host}:{port} did not answer in {timeout_s:.0f} s ({first})"
        ) from None


def open_groups(seat: Seat, store: dist.Store, hub: Hub, epoch: int) -> Wire:
    """Make the default process group a `Wire`; collective. `epoch` must be the same on all ranks, and new each time."""
    nccl = seat.device.type == "cuda" and not seat.shares_gpu
    if seat.device.type == "cuda":
        torch.cuda.set_device(seat.device)
    backend = register(hub, nccl=nccl)
    # a store connection of its own: a rank that waits here must not block whoever watches the other one
    place = dist.PrefixStore(f"epoch{epoch}", store.clone())  # type: ignore[attr-defined]
    _name_anew()
    dist.init_process_group(
        backend, store=place, rank=seat.rank, world_size=seat.world_size, timeout=timedelta(seconds=hub.timeout_s)
    )
    group = dist.group.WORLD
    assert isinstance(group, Wire)
    return group


def _name_anew() -> None:
    """torch names groups by counting them, and counts one that could not be opened, too: a rank that had such a one would
    never meet the others again. There is no group now, so that all may begin at 0."""
    if not dist.is_initialized():
        c10d._world.group_count = 0


def close_groups(hub: Hub) -> None:
    """Give the process groups up. After an abort their inner groups are buried (Note: abort, wire/hub.py)."""
    if hub.aborted is not None:
        for group in hub.groups():
            group.shutdown()
    if dist.is_initialized():
        dist.destroy_process_group()
    hub.clear()


def end_process(code: int) -> NoReturn:
    """End a process that was a rank, at once, when its groups are closed.

    Python's own end would race against Gloo's threads: one that only then lets go of a collective's last tensor needs
    Python's lock, is ended in a destructor for asking, and the process aborts, though all its work is done.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
