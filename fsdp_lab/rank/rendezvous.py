"""How ranks find each other: rank 0's store, and the process groups that are opened through it, again after each abort.

In the store ranks also publish what concerns all. `host_store` opens it, `find_store` connects another rank,
`own_connection` another thread. Its `place` is "file:PATH" where all ranks are on one machine, else "tcp://HOST:PORT".

Note: the store of one machine. It is torch's FileStore: nothing listens, and no other user can open the file. On Linux the
file is in memory. Its only name is that of an open descriptor of rank 0's process, in /proc; a rank that joins opens it
there once, and then uses its own descriptor. So nothing is left of it when these processes have ended, however they do. (A
file on a full disk does harm: FileStore writes a part of an entry, on which every reader spins for ever.) Where there is no
such memory (macOS) it is a file in a private folder, which rank 0 removes at its regular end.

- The descriptor is never closed: FileStore opens its path at each request, also in destructors that torch calls late, and
  would write to the file that has taken the number over.
- The store outlives rank 0. That a rank has ended is seen by broken connections, by `_await_record` (abort.py) and by the
  kernel, alike for all ranks; and a rank 0 that is stopped keeps nobody from the store.
- A request takes 10 to 20 us. One that waits for a key looks every 10 ms, so a group opens about 8 ms later than over TCP.
- The file only grows: 15 MB in a day of records (abort.py), and the ranks' parts of each checkpoint.
- A rank that is stopped or killed within a request can leave the lock taken, or a part of an entry. Then the others wait
  as they do for a stopped rank 0 over TCP: `BoundedStore` gives up, and what waits without it the kernel finds to hang."""

import contextlib
import ctypes
import os
import shutil
import socket
import stat
import sys
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import distributed as dist
from torch.distributed import distributed_c10d as c10d

from fsdp_lab.base.streams import streams_of
from fsdp_lab.wire import CudaMemory, DeviceMemory, Nccl, Wire, WireContext, register

FILE, TCP, DESCRIPTORS = "file:", "tcp://", "/proc/"
ANSWER_S = 60.0


@dataclass(frozen=True, kw_only=True)
class RankInfo:
    """Which rank this process is, and its device."""

    rank: int
    world_size: int
    device: torch.device
    shares_gpu: bool = False  # then CUDA tensors do not go over NCCL, which needs one GPU per rank


class FileHost(dist.FileStore):
    """Rank 0's own connection to a store of one machine."""

    def __init__(self) -> None:
        if hasattr(os, "memfd_create"):
            file = os.memfd_create("fsdp_lab_store")
            path, own = f"/proc/{os.getpid()}/fd/{file}", f"/proc/self/fd/{file}"
        else:
            folder = tempfile.mkdtemp(prefix="fsdp_lab-store-")
            path = own = os.path.join(folder, "store")
            os.close(os.open(path, os.O_CREAT, 0o600))
            weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        os.chmod(own, 0o600)  # that of memory is 0777
        super().__init__(own)
        self.place = FILE + path


class TcpHost(dist.TCPStore):
    """Rank 0's own connection to a store of several machines: on a free port, and on `address` only. By default torch's
    store listens on all networks; neither asks who connects."""

    def __init__(self, address: str) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.create_server((address, 0), family=family)
        port = listener.getsockname()[1]
        fd, timeout = listener.detach(), timedelta(seconds=ANSWER_S)
        options: dict[str, Any] = {"is_master": True, "wait_for_workers": False, "master_listen_fd": fd}
        with short_lookups():
            super().__init__(address, port, timeout=timeout, **options)
        self.place = f"{TCP}{address}:{port}"


def host_store(address: str | None = None) -> FileHost | TcpHost:
    """A new store, for rank 0 of ranks on this machine; with `address` for ranks on several, who reach this one there."""
    return FileHost() if address is None else TcpHost(address)


def find_store(place: str, *, timeout_s: float = ANSWER_S) -> dist.Store:
    """A connection to rank 0's store. Raises ConnectionError if it does not answer, is not here, or is not this user's."""
    if place.startswith(FILE):
        return _open_file(Path(place.removeprefix(FILE)))
    host, _, port = place.removeprefix(TCP).rpartition(":")
    try:
        with short_lookups():
            return dist.TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=timeout_s))
    except (RuntimeError, TimeoutError) as e:
        first = str(e).splitlines()[0]
        raise ConnectionError(f"rank 0's store at {place} did not answer in {timeout_s:.0f} s ({first})") from None


@contextmanager
def short_lookups() -> Iterator[None]:
    """Inside, this thread waits for a name server for a second. torch looks up the name of the first address that it
    connects to, for its log, and would wait for 10 s where no server answers. The user's RES_OPTIONS stay."""
    if sys.platform != "linux" or "RES_OPTIONS" in os.environ:
        yield
        return
    read_again = getattr(ctypes.CDLL(None), "__res_init", lambda: 0)  # glibc's; by thread
    os.environ["RES_OPTIONS"] = "timeout:1 attempts:1"
    read_again()
    try:
        yield
    finally:
        del os.environ["RES_OPTIONS"]
        read_again()


def own_connection(store: dist.Store) -> dist.Store:
    """A second connection, so that a request in one thread does not block another thread's."""
    connection: dist.Store = store.clone()  # type: ignore[attr-defined]
    return connection


def _open_file(path: Path) -> dist.FileStore:
    """Another process's file, if it and its folder are this user's and closed to others."""
    try:
        folder, file = os.lstat(path.parent), os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as e:
        failed = f"{socket.gethostname()} cannot open rank 0's store {path} ({e.strerror})"
        why = "rank 0 has ended, or is in another container or of another user"
        raise ConnectionError(f"{failed}: {why}; start the ranks again, as one user of one machine") from None
    for what, status in (("its folder", folder), ("it", os.fstat(file))):
        mode = stat.S_IMODE(status.st_mode)
        if status.st_uid != os.geteuid() or mode & 0o077 or stat.S_ISLNK(status.st_mode):
            os.close(file)
            belongs = f"{what} belongs to user {status.st_uid} with mode {mode:o}"
            must = f"must be of user {os.geteuid()} alone"
            raise ConnectionError(f"rank 0's store {path} is not used: {belongs}, and {must}; start the ranks again")
    if str(path).startswith(DESCRIPTORS):
        return dist.FileStore(f"/proc/self/fd/{file}")
    os.close(file)
    return dist.FileStore(str(path))


def nccl_of(info: RankInfo) -> Nccl | None:
    """NCCL for this rank's device, or None: then tensors go another way. Tests replace it by a simulation."""
    streams = streams_of(info.device)
    return None if streams is None or info.shares_gpu else Nccl(streams)


def device_memory_of(info: RankInfo) -> DeviceMemory | None:
    """Of a GPU that this rank shares with others; None: tensors go another way. Tests replace it by a simulation."""
    if info.device.type == "cuda" and info.shares_gpu:
        with contextlib.suppress(OSError):  # no driver of that name
            return CudaMemory(info.device)
    return None


def open_groups(info: RankInfo, store: dist.Store, context: WireContext, epoch: int) -> Wire:
    """Make the default process group a `Wire`; collective. `epoch`: the same on all ranks, another one each time. Raises
    dist.DistStoreError if a rank does not come."""
    if info.device.type == "cuda":
        torch.cuda.set_device(info.device)
    memory = device_memory_of(info)
    backend = register(context, streams=streams_of(info.device), nccl=nccl_of(info), device_memory=memory)
    own = dist.PrefixStore(f"epoch{epoch}", own_connection(store))
    if not dist.is_initialized():
        # torch names groups by this count, which includes groups that could not be opened: a rank that had one would never
        # find the others again
        c10d._world.group_count = 0
    try:
        dist.init_process_group(backend, store=own, rank=info.rank, world_size=info.world_size, timeout=context.timeout)
    except RuntimeError as e:
        if "timeout" not in str(e).lower():
            raise
        seconds = context.timeout.total_seconds()
        raise dist.DistStoreError(f"not all ranks came to open the process groups within {seconds:g} s") from None
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
