"""How ranks find each other: a store, and the process groups that are opened through it, again after each abort."""

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

from fsdp_lab.wire import Nccl, Wire, WireContext, register


@dataclass(frozen=True, kw_only=True)
class RankInfo:
    """Which rank this process is, and its device."""

    rank: int
    world_size: int
    device: torch.device
    shares_gpu: bool = False  # then CUDA tensors go over Gloo: NCCL needs one GPU per rank


def host_store(host: str = "127.0.0.1") -> dist.TCPStore:
    """Rank 0's store, to which the other ranks connect: on a free port (`.port`), and on `host` only. By default torch's
    store listens on all networks, without authentication."""
    listener = socket.create_server((host, 0))
    return dist.TCPStore(
        host,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=60),
        master_listen_fd=listener.detach(),
    )


def find_store(host: str, port: int, *, timeout_s: float = 60.0) -> dist.TCPStore:
    """A connection to rank 0's store. Raises ConnectionError if it does not answer."""
    try:
        return dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s))
    except (RuntimeError, TimeoutError) as e:
        first = str(e).splitlines()[0]
        raise ConnectionError(
            f"rank 0's store at {host}:{port} did not answer in {timeout_s:.0f} s ({first})"
        ) from None


def nccl_of(info: RankInfo) -> Nccl | None:
    """NCCL for this rank's device, or None: then all tensors go over Gloo. Tests replace it by a simulation."""
    return Nccl(info.device) if info.device.type == "cuda" and not info.shares_gpu else None


def open_groups(info: RankInfo, store: dist.Store, context: WireContext, epoch: int) -> Wire:
    """Make the default process group a `Wire`; collective. `epoch`: the same on all ranks, another one each time."""
    if info.device.type == "cuda":
        torch.cuda.set_device(info.device)
    backend = register(context, nccl=nccl_of(info))
    # a separate connection: waiting here must not block threads that use the other one
    own = dist.PrefixStore(f"epoch{epoch}", store.clone())  # type: ignore[attr-defined]
    if not dist.is_initialized():
        # torch names groups by this count, which includes groups that could not be opened: a rank that had one would never
        # find the others again
        c10d._world.group_count = 0
    dist.init_process_group(backend, store=own, rank=info.rank, world_size=info.world_size, timeout=context.timeout)
    group = dist.group.WORLD
    assert isinstance(group, Wire)
    return group


def close_groups(context: WireContext) -> None:
    """Destroy the process groups; after an abort without waiting for their operations (see wire/context.py)."""
    if context.aborted is not None:
        for group in context.groups():
            group.shutdown()
    if dist.is_initialized():
        dist.destroy_process_group()
    context.reset()


def end_process(code: int) -> NoReturn:
    """End the process of a rank at once, when its groups are closed.

    Python's own shutdown would race with Gloo's threads: a thread that releases the last tensor of a collective needs
    the GIL, is terminated inside a destructor, and the process aborts although all work is done."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
