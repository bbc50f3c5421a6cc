"""This process as a rank, by torchrun's variables: `main` trains a Spec, `init_process_group` is for other scripts."""

import argparse
import atexit
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from fsdp_lab.base.errors import ArgumentError, FieldError, SpecError
from fsdp_lab.rank.rendezvous import end_process, find_store
from fsdp_lab.rank.session import Session
from fsdp_lab.spec.spec import Spec
from fsdp_lab.wire import Wire
from fsdp_lab.wire.group import BACKEND

CLOSE_S = 5.0
REPLACED = ("", "gloo", "nccl", "cpu:gloo,cuda:nccl", "cuda:nccl,cpu:gloo")  # backends for which the lab's may stand
TIMEOUT_S = 1800.0  # as torch's own over Gloo: a loop may save or evaluate for long


def join(devices: tuple[str, ...] | None = None, **options: Any) -> Session:
    """This process's Session; a single rank without torchrun's variables. `options`: of it. Raises ConnectionError."""
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local, on_gpu = int(os.environ.get("LOCAL_RANK", rank)), torch.cuda.is_available()
    device = devices[rank] if devices else f"cuda:{local}" if on_gpu else "cpu"
    store = dist.HashStore() if size == 1 else _store(rank)
    return Session(rank=rank, world_size=size, device=device, store=store, **options)


def _store(rank: int) -> dist.Store:
    """Where the ranks meet: torchrun's own store, or what rank 0 opens at its place, if another launcher set it. Neither a
    new attempt of torchrun's nor a second meeting of the same processes finds anything of the one before."""
    if rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store: dist.Store = dist.TCPStore(address, port, is_master=True, wait_for_workers=False)
    else:
        store = find_store("tcp://{MASTER_ADDR}:{MASTER_PORT}".format_map(os.environ))
    attempt = dist.PrefixStore(f"fsdp_lab/attempt{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
    return dist.PrefixStore(f"meeting{attempt.add(f'meetings_of_rank{rank}', 1)}", attempt)


def init_process_group(*, timeout_s: float = TIMEOUT_S, reduction: str = "auto") -> None:
    """Makes the default process group one that the lab measures, in place of `torch.distributed.init_process_group()`:
    over Gloo for CPU tensors and NCCL for CUDA tensors. Under torchrun, or in a single process. On a rank of a lab's it is
    opened again if it was given up after a failure, and models must be built again then. Collective.

    Args:
        timeout_s: of a collective. A rank that waits for half of it is told which rank is missing.
        reduction: the order of sums: "auto", "rank_ordered" (equal bits for every backend), or "native".

    Raises ArgumentError: there is a process group of torch's already. ConnectionError: rank 0 was not found."""
    if not dist.is_initialized():
        atexit.register(_close_at_exit, join(timeout_s=timeout_s, reduction=reduction))
        return
    world = dist.group.WORLD
    if not isinstance(world, Wire) or world.context.session is None:
        hint = "call it in place of torch.distributed.init_process_group()"
        raise ArgumentError("init_process_group", "there is a default process group already", hint)
    world.context.session.reopen()


def is_own(backend: object) -> bool:
    """Whether this is the name of the lab's own backend."""
    return BACKEND in str(backend)


def why_not(given: Mapping[str, Any]) -> str:
    """Why the lab's process group cannot stand for the one that the script asks for; "" if it can."""
    backend = str(given.get("backend") or "").lower()
    if backend not in REPLACED:
        return f"the script's process group is of the backend {backend}"
    if any(given.get(name) is not None for name in ("store", "pg_options")):
        return "the script gives its process group a store or options of its own"
    if given.get("init_method") not in (None, "env://"):
        return f"the script's ranks meet at {given['init_method']}"
    size, rank = (os.environ.get(name, "") for name in ("WORLD_SIZE", "RANK"))
    if str(given.get("world_size", -1)) not in ("-1", size) or str(given.get("rank", -1)) not in ("-1", rank):
        return "the script gives other ranks than its launcher"
    return "" if size and rank and "MASTER_PORT" in os.environ else "no launcher said who the ranks are"


def _close_at_exit(session: Session) -> None:
    session.close()
    if not session.context.destroyed(CLOSE_S):
        end_process(1)  # after a failure an operation still runs, with which Python's own shutdown would race


def main() -> int:
    """`torchrun --nproc-per-node 2 -m fsdp_lab.rank spec.json` trains a Spec without a notebook or a cluster. Rank 0 prints
    its event of each step as one line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m fsdp_lab.rank", description=main.__doc__)
    parser.add_argument("spec", type=Path, help="a Spec as JSON")
    parser.add_argument("--steps", type=int, default=10)
    limit = "how long a collective may wait for a rank (default: half a minute)"
    parser.add_argument("--hang-s", type=float, help=limit)
    arguments = parser.parse_args()

    def show(event: dict[str, Any]) -> None:
        if event["rank"] == 0:
            print(json.dumps(event), flush=True)

    try:
        spec = Spec.from_json(arguments.spec.read_text())
        world_size = int(os.environ.get("WORLD_SIZE", 1))
        if world_size != spec.world_size:
            reason = f"the Spec needs {spec.world_size} ranks and torchrun started {world_size}"
            raise SpecError("world_size", reason, f"give torchrun --nproc-per-node {spec.world_size}")
        session = join(spec.devices, on_event=show, hang_s=arguments.hang_s)
    except (FieldError, OSError, ConnectionError) as e:
        sys.stderr.write(f"{e}\n")
        return 2
    try:
        session.apply("torchrun", spec.to_dict(), fresh=True)
        stopped = session.train(arguments.steps)["stopped"]
    except FieldError as e:
        sys.stderr.write(f"{e}\n")
        return 2
    finally:
        session.close()
    return 130 if stopped else 0
