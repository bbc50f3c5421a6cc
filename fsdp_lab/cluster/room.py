"""`Room`: the cores, memory and GPUs of one machine, shared by the labs of a class.

A room is a folder, named by an environment variable that `fsdp-lab lab --class` sets. It holds its limits, and a file for
each lab that has ranks on this machine, its `RoomPlace`. The file is locked by the kernel and by the guardian of its ranks,
so it is a place as long as these ranks may run. The system frees the lock however the two end; who looks next removes the
file. Places are taken and changed under the lock of the room, so two labs never take the last one.

Note: what is shared, and how. The number of labs at once is fixed when the room is made, and every lab gets the cores as if
all of them ran: so a lab's times do not depend on whether others have come before it. Ranks give way to kernels and to the
server (niceness), but not until their first step, for which somebody waits; labs that start together take turns. A GPU is
given to the lab for which it has the fewest ranks, with a share of its memory. Memory of the host is counted as what is
free, less what labs that are starting will still need.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from fsdp_lab.cluster.placement import Host, Placement, probe
from fsdp_lab.core.errors import ArgumentError, check_whole
from fsdp_lab.core.formatting import plural, size
from fsdp_lab.core.process import usable_cores

VARIABLE = "FSDP_LAB_ROOM"  # the folder of the room
LEARNER = "FSDP_LAB_LEARNER"  # who has this kernel; "": nobody in particular
LIMITS_FILE, PLACES = "room.json", "places"
RANKS_PER_CORE = 8  # at once; more make every step a wait
GPU_RANK_BYTES = 2 << 30  # of a rank on a GPU, half a GiB of it for its CUDA context
RANK_BYTES = 400 << 20  # of a rank with one of the small presets
LAB_BYTES = 250 << 20  # of a lab without its ranks: the kernel, the controller, the guardian
SPARE_BYTES = 512 << 20  # stays free for the server, browsers, and the teacher
STARTS_PER_CORE = 2  # labs that start at once, each with a few processes that import torch
TURN_S = 0.4  # between two looks whether it is one's turn
NICENESS = 15  # of ranks that have made a step
START_S = 60.0  # for which ranks that make no step are let go first
CGROUP = Path("/sys/fs/cgroup")
WAY_OUT = (
    "wait until somebody closes theirs (lab.close(), or shut its kernel down), or use fewer ranks; then run this again"
)


@dataclass(frozen=True, kw_only=True)
class RoomLimits:
    """What a room was made for."""

    learners: int
    labs: int  # at once
    ranks: int = 2  # of one learner, over all labs that they have open

    @classmethod
    def of_machine(cls, learners: int, labs: int | None = None, ranks: int = 2) -> RoomLimits:
        """For this machine. `labs`: None: as many as it holds.

        Raises:
            ArgumentError: of "class", "labs" or "ranks".
        """
        for name, value in (("class", learners), ("ranks", ranks), *([] if labs is None else [("labs", labs)])):
            check_whole(name, value)
        held = [RANKS_PER_CORE * usable_cores() // ranks, most_in_memory(total_bytes(), ranks)]
        if gpus := probe().gpus:
            held.append(sum(gpu.total_bytes // GPU_RANK_BYTES for gpu in gpus) // ranks)
        return cls(learners=learners, labs=min(learners, labs or max(1, min(held))), ranks=ranks)

    @property
    def all_ranks(self) -> int:
        """Of all labs at once."""
        return self.labs * self.ranks


@dataclass(frozen=True, kw_only=True)
class Taken:
    """A place as its file says it. The names of the fields are the keys of the file."""

    id: str
    learner: str
    notebook: str
    ranks: int
    gpus: tuple[str, ...] = ()  # the uuid of each rank's
    pids: tuple[int, ...] = ()  # of the ranks, once they are known
    begun_s: float = 0.0  # when it was taken, by the clock of all processes of this machine
    started: bool = False  # whether its ranks have joined

    @property
    def awaited_bytes(self) -> int:
        """What it will need and does not use yet."""
        return max(0, self.ranks * RANK_BYTES - sum(map(rss_bytes, self.pids)))


class Room:
    """The room in a folder."""

    def __init__(self, folder: Path, limits: RoomLimits) -> None:
        self.folder, self.limits = folder, limits

    @classmethod
    def make(cls, folder: Path, limits: RoomLimits) -> Room:
        """Raises OSError."""
        (folder / PLACES).mkdir(parents=True, exist_ok=True)
        (folder / LIMITS_FILE).write_text(json.dumps(dataclasses.asdict(limits)), encoding="utf-8")
        return cls(folder, limits)

    @classmethod
    def here(cls) -> Room | None:
        """The room that this process is in; None: it has the machine for itself.

        Raises:
            ArgumentError: the room is gone, with its server.
        """
        if not (given := os.environ.get(VARIABLE)):
            return None
        try:
            limits = RoomLimits(**json.loads((Path(given) / LIMITS_FILE).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as e:
            reason = f"{VARIABLE} names {given}, which is no room of a class ({e})"
            raise ArgumentError("ranks", reason, "start `fsdp-lab lab --class` again, or unset the variable") from None
        return cls(Path(given), limits)

    # -- places -----------------------------------------------------------------------------------------------------

    def take(self, ranks: int, devices: Sequence[str] | None = None) -> RoomPlace:
        """A place for a lab of so many ranks, which this process holds from now on. `devices`: as for `placement.place`.

        Raises:
            ArgumentError: of "ranks": the machine, its memory or what one learner may have is full.
        """
        notebook, learner = Path(os.environ.get("JPY_SESSION_NAME", "")).name, os.environ.get(LEARNER, "")
        with self.locked():
            wanted = Taken(id=secrets.token_hex(8), learner=learner, notebook=notebook, ranks=0,
                           begun_s=time.monotonic())  # fmt: skip
            self.check(ranks, wanted)
            gpus = self._host(self._taken(), ()).gpus if devices is None else ()
            uuids = tuple(gpus[i % len(gpus)].uuid for i in range(ranks)) if gpus else ()  # they count from now on
            return RoomPlace(self, dataclasses.replace(wanted, ranks=ranks, gpus=uuids))

    def taken(self) -> list[Taken]:
        """The places of labs that run or start."""
        with self.locked():
            return self._taken()

    def _taken(self) -> list[Taken]:
        """Removes the files of those that have ended. Under the lock: a file that is being made is not locked yet."""
        found = []
        for file in sorted((self.folder / PLACES).glob("*.json")):
            with contextlib.suppress(FileNotFoundError), file.open() as opened:
                if try_lock(opened.fileno()):
                    file.unlink(missing_ok=True)
                else:
                    fields = json.load(opened)
                    found.append(Taken(**{**fields, "gpus": tuple(fields["gpus"]), "pids": tuple(fields["pids"])}))
        return found

    def check(self, ranks: int, own: Taken) -> None:
        """Raises ArgumentError if there is no place for so many ranks of a lab that has those of `own`. Under the lock."""
        others = [t for t in self._taken() if t.id != own.id]
        limits, mine = self.limits, [t for t in others if t.learner == own.learner and own.learner]
        if ranks > limits.ranks:
            reason = f"{ranks} are too many here: in this class a lab has at most {limits.ranks}, so that all find room"
            raise ArgumentError("ranks", reason, f"use Lab(ranks={limits.ranks})")
        if (had := sum(t.ranks for t in mine)) + ranks > limits.ranks:
            where = ", ".join(t.notebook or "a program" for t in mine)
            reason = f"you have {plural(had, 'rank')} already, in {where}, and may have {limits.ranks}"
            raise ArgumentError("ranks", reason, "call lab.close() there, or shut its kernel down; then run this again")
        used = sum(t.ranks for t in others)
        runs = f"{plural(len(others), 'lab')} with {plural(used, 'rank')} {'runs' if len(others) == 1 else 'run'} on it"
        if used + ranks > limits.all_ranks:
            holds = f"it holds {limits.all_ranks}, and this lab needs {ranks}"
            raise ArgumentError("ranks", f"the machine of this class is full: {runs}, {holds}", WAY_OUT)
        needed = (ranks - own.ranks) * RANK_BYTES + (0 if own.ranks else LAB_BYTES)
        left = free_bytes() - SPARE_BYTES - sum(t.awaited_bytes for t in others)
        if needed > left:
            holds = f"{size(max(0, left))} can be given away, and this lab needs {size(needed)}"
            raise ArgumentError("ranks", f"the machine of this class has no memory left: {runs}, {holds}", WAY_OUT)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        fd = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    # -- shares -----------------------------------------------------------------------------------------------------

    @property
    def cores(self) -> int:
        """Of one lab."""
        return max(1, usable_cores() // self.limits.labs)

    def host(self, ours: Iterable[int] = (), besides: str = "") -> Host:
        """This machine as a lab of the room sees it: its share of the cores, and the GPUs, the least used first.

        Args:
            ours: pids of the lab's own ranks; those of the other labs do not make a GPU busy either.
            besides: the id of the lab's own place.
        """
        return self._host([t for t in self.taken() if t.id != besides], ours)

    def _host(self, others: Sequence[Taken], ours: Iterable[int]) -> Host:
        found = probe(ours=frozenset((*ours, *(pid for t in others for pid in t.pids))))
        load = Counter(gpu for t in others for gpu in t.gpus)
        each = -(-self.limits.all_ranks // max(1, len(found.gpus)))
        parts = 1 if each == 1 else each + -(-each // 3)  # contexts of CUDA take the rest
        gpus = [dataclasses.replace(gpu, parts=parts) for gpu in found.gpus]
        return dataclasses.replace(found, cores=self.cores, gpus=tuple(sorted(gpus, key=lambda gpu: load[gpu.uuid])))


class RoomPlace:
    """The place of one lab, held by this process and by what inherits `descriptor`, as long as either runs."""

    def __init__(self, room: Room, entry: Taken) -> None:
        """Under the room's lock. Raises OSError."""
        self.room, self._entry = room, entry
        self._file = room.folder / PLACES / f"{entry.id}.json"
        self.descriptor = os.open(self._file, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(self.descriptor, fcntl.LOCK_EX)
        self._write(entry)

    def _write(self, entry: Taken) -> None:
        """In place, because the lock is of this file; readers have the room's lock, or read what is whole by then."""
        content = json.dumps(dataclasses.asdict(entry)).encode()
        os.pwrite(self.descriptor, content.ljust(os.fstat(self.descriptor).st_size), 0)  # JSON ignores spaces after it
        self._entry = entry

    def check(self, ranks: int) -> None:
        """Raises ArgumentError if there would be no place for so many ranks."""
        with self.room.locked():
            self._check(ranks)

    def _check(self, ranks: int) -> None:
        if ranks > self._entry.ranks:
            self.room.check(ranks, self._entry)

    def change(self, ranks: int) -> None:
        """For another number of ranks. Raises ArgumentError, and keeps what it has."""
        with self.room.locked():
            self._check(ranks)
            self._write(dataclasses.replace(self._entry, ranks=ranks))

    def await_turn(self, waiting: Callable[[int], None]) -> None:
        """Until few labs start before this one (`STARTS_PER_CORE`), so that each is ready when it could be, and not all when
        the last is. A lab whose start ends, however it does, is waited for no longer.

        Args:
            waiting: is told how many start before; it may raise.
        """
        at_once = STARTS_PER_CORE * usable_cores()
        while (before := self._starting_before()) >= at_once:
            waiting(before)
            time.sleep(TURN_S)

    def _starting_before(self) -> int:
        return sum(not t.started and t.begun_s < self._entry.begun_s for t in self.room.taken())

    def start(self) -> None:
        """Says that its ranks have joined: the next lab may start."""
        with self.room.locked():
            self._write(dataclasses.replace(self._entry, started=True))

    def fill(self, pids: Iterable[int]) -> None:
        """Says which processes the ranks are."""
        with self.room.locked():
            self._write(dataclasses.replace(self._entry, pids=tuple(pids)))

    def settle(self, placement: Placement, host: Host) -> None:
        """Says which GPUs the ranks have."""
        uuids = {gpu.device: gpu.uuid for gpu in host.gpus}
        with self.room.locked():
            gpus = tuple(uuids[device] for device in placement.devices if device in uuids)
            self._write(dataclasses.replace(self._entry, gpus=gpus))

    def host(self, ours: Iterable[int]) -> Host:
        """See `Room.host`."""
        return self.room.host(ours, besides=self._entry.id)

    def environment(self, ranks: int) -> dict[str, str]:
        """Of its ranks: a variable of the server's would give each of them all cores."""
        return dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(max(1, self.room.cores // max(1, ranks))))

    def give_way(self, begun: Callable[[], bool]) -> None:
        """From their first step on its ranks get what kernels and starting ranks leave them.

        Args:
            begun: whether they have made a step; it is asked on a thread, twice a second for `START_S`.
        """
        pids, limit_s = self._entry.pids, time.monotonic() + START_S

        def wait() -> None:
            while self.descriptor >= 0 and not begun() and time.monotonic() < limit_s:
                time.sleep(0.5)
            for pid in pids if self.descriptor >= 0 else ():  # else they have ended, and others may have their numbers
                give_way(pid)

        threading.Thread(target=wait, name="fsdp_lab-room", daemon=True).start()

    @property
    def note(self) -> str:
        """How far to trust times here, as a sentence."""
        limits = self.room.limits
        return (f"up to {plural(limits.labs, 'lab')} of a class share this machine, so times depend on what the others do; "
                "losses and memory do not")  # fmt: skip

    def leave(self) -> None:
        """The place is free when the guardian is gone, too. Idempotent."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


# -- the machine -----------------------------------------------------------------------------------------------------


def try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def give_way(pid: int) -> None:
    """Makes a process of ours nice. Where Linux shares the cores between sessions first (autogroup), its session as well:
    an engine is the leader of its own, in which its niceness alone would count among its own threads."""
    with contextlib.suppress(OSError):  # it has just ended, or there is no such file here
        os.setpriority(os.PRIO_PROCESS, pid, NICENESS)
        if os.getsid(pid) == pid:
            write_patiently(Path(f"/proc/{pid}/autogroup"), str(NICENESS))


def write_patiently(file: Path, text: str) -> None:
    """Linux takes such a change ten times a second, from all users together. Raises OSError."""
    for _ in range(20):
        try:
            file.write_text(text)
            return
        except BlockingIOError:
            time.sleep(0.06)


def rss_bytes(pid: int) -> int:
    with contextlib.suppress(psutil.Error):
        return int(psutil.Process(pid).memory_info().rss)
    return 0


def total_bytes(cgroup: Path = CGROUP) -> int:
    """Of this machine, or of the container that this is."""
    return min([int(psutil.virtual_memory().total), *container_bytes(cgroup)[:1]])


def free_bytes(cgroup: Path = CGROUP) -> int:
    """What new processes can use, here and in this container."""
    return min([int(psutil.virtual_memory().available), *container_bytes(cgroup)[1:]])


def container_bytes(cgroup: Path) -> tuple[int, ...]:
    """The container's limit, and what is free of it, files that can be dropped included; () without a limit."""
    try:
        limit, used = (int((cgroup / name).read_text()) for name in ("memory.max", "memory.current"))
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no version 2 here, or "max"
        return ()
    return limit, limit - used + int(stat.get("inactive_file", 0)) + int(stat.get("active_file", 0))


def most_in_memory(nbytes: int, ranks: int) -> int:
    """How many labs of so many ranks a machine of this memory holds."""
    return max(1, (nbytes - SPARE_BYTES) // (LAB_BYTES + ranks * RANK_BYTES))
