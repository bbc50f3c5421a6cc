"""`Guardian`: a small process that ends a cluster when its kernel is gone: by exit, restart, crash or SIGKILL.
`DetachedCluster`: ranks that may outlive their kernel, described by a file in their private folder.

`python -m fsdp_lab.cluster.detached TOKEN OWNER_PID FOLDER` reads a pipe to which only the kernel can write. At end of file,
or when the owner's process is gone (a forked child of the kernel could keep the pipe open), it ends every process that has
TOKEN in its environment, runs the commands in FOLDER's end.json, which end what is left on other hosts, and removes FOLDER,
the cluster's private files. The line "release" on the pipe makes it exit without doing anything.

For ranks that may outlive their kernel it first waits until another guardian has taken them over, until the time limit is
reached, or until a rank has died. Their file, `kept.json`, names two processes, by pid and creation time: the owner, which
uses the ranks, and the guardian. Changes are made under a lock on the folder: two kernels never take the same ranks."""

import contextlib
import dataclasses
import fcntl
import json
import math
import os
import select
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from fsdp_lab.base.errors import ArgumentError, is_number
from fsdp_lab.base.process import Identity, alive, end, machine, marked, sweep

MODULE = "fsdp_lab.cluster.detached"
FILE = "kept.json"
END_FILE = "end.json"
END_COMMANDS_S = 15.0  # at most, for all of them
PREFIX = "fsdp_lab-"  # of private folders; nothing else is ever removed
DEFAULT_LIMIT_S = 24 * 3600.0  # how long ranks wait for a kernel, unless a number of hours is given
CHECK_S = 0.5  # between two checks of detached ranks
REMOVAL_S = 2.0  # how long a folder may be in use that is to be removed
EndCommand = tuple[list[str], str]  # that ends what is on another host, or gives a job back; its standard input


@dataclass(frozen=True, kw_only=True)
class DetachedCluster:
    """What a new kernel needs to take the ranks over. The names of the fields are the keys of the file."""

    folder: Path
    token: str
    machine: str
    asked: Mapping[str, Any]  # the arguments of the cluster; a kernel that gives the same arguments takes it over
    engines: tuple[int, ...]  # ipyparallel's ids, in rank order
    pids: tuple[int, ...]
    placement: Mapping[str, Any]  # a `Placement`
    begun_unix_s: float
    limit_s: float  # how long the ranks wait for a kernel
    guardian: Identity
    owner: Identity | None  # the kernel that uses the ranks; nobody uses them if it is None or dead
    free_unix_s: float | None = None  # since when nobody uses them, if that was observed
    host_ids: tuple[str, ...] = ()  # of the ranks: see `fsdp_lab.base.process.host_id`
    where: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # the other hosts that they are on; empty: none

    @property
    def id(self) -> str:
        return self.token[:8]

    @property
    def free(self) -> bool:
        return self.owner is None or not self.owner.alive

    @property
    def dead(self) -> bool:
        """Whether nobody uses them, and they have ended, or no kernel came in time and no guardian is left."""
        waited_s = 0.0 if self.free_unix_s is None else time.time() - self.free_unix_s
        abandoned = waited_s > self.limit_s and not self.guardian.alive
        return self.free and (abandoned or not marked(self.token))

    # -- the file ---------------------------------------------------------------------------------------------------

    @classmethod
    def read(cls, folder: Path) -> "DetachedCluster | None":
        """Reads the file of a folder; None if it holds no cluster of this machine and user."""
        if not is_private(folder / FILE):
            return None
        try:
            fields = json.loads((folder / FILE).read_text(encoding="utf-8"))
            fields |= {name: tuple(fields[name]) for name in ("engines", "pids", "host_ids")}
            fields["guardian"] = Identity(**fields["guardian"])
            fields["owner"] = None if fields["owner"] is None else Identity(**fields["owner"])
            cluster = cls(folder=folder, **fields)
        except (OSError, ValueError, TypeError, KeyError):
            return None  # just removed, or written by another version
        return cluster if cluster.machine == machine() else None

    def write(self) -> None:
        """Writes the file. Raises OSError."""
        fields = dataclasses.asdict(self)
        del fields["folder"]
        _write(self.folder / FILE, fields)

    def remove(self) -> bool:
        """Removes the file, so no kernel finds the ranks any more; False if they have another guardian by now."""
        with contextlib.suppress(FileNotFoundError), _locked(self.folder) as now:
            if now is not None and now.guardian == self.guardian:
                (self.folder / FILE).unlink()
                return True
        return False

    # -- ownership --------------------------------------------------------------------------------------------------

    def claim(self, guardian: Identity, limit_s: float) -> "DetachedCluster | None":
        """Makes this process the owner, with the given guardian; None if another process was faster."""
        owner = Identity.this()
        return self._change(lambda now: now.free, owner=owner, guardian=guardian, limit_s=limit_s, free_unix_s=None)

    def release(self) -> "DetachedCluster | None":
        """Leaves the ranks without an owner; None if they have another guardian by now."""
        return self._change(lambda now: now.guardian == self.guardian, owner=None, free_unix_s=time.time())

    def end(self) -> bool:
        """Ends the processes and removes the folder; False if a kernel uses them, or one could not be ended."""
        claimed = self.claim(self.guardian, self.limit_s)
        if claimed is None or not claimed.remove():
            return False
        end(marked(self.token), term_s=1.0)
        left = sweep(self.token)
        run_end_commands(self.folder)
        remove_private(self.folder)
        return not left

    def _change(self, allowed: "Callable[[DetachedCluster], bool]", **fields: Any) -> "DetachedCluster | None":
        """Writes other values for some fields; None if that is no longer allowed, or the file is gone."""
        with contextlib.suppress(FileNotFoundError), _locked(self.folder) as now:
            if now is not None and allowed(now):
                changed = dataclasses.replace(now, **fields)
                changed.write()
                return changed
        return None


def persist_limit_s(persist: bool | float, given: Any = None) -> float | None:
    """How long ranks wait for a kernel, from `persist`; None: they end with theirs. Raises ArgumentError."""
    if persist is False:
        return None
    if given is not None:
        raise ArgumentError("persist", "the engines of a given cluster are yours, and stay anyway", "leave persist out")
    if persist is True:
        return DEFAULT_LIMIT_S
    if not is_number(persist) or not 0 < persist < math.inf:
        hint = "give True for a day, a number of hours above 0, or False"
        raise ArgumentError("persist", f"{persist!r} is refused", hint)
    return persist * 3600.0


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[DetachedCluster | None]:
    """Locks the folder, and reads its cluster. The system releases the lock of a process that dies. Raises
    FileNotFoundError without a folder."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield DetachedCluster.read(folder)
    finally:
        os.close(fd)


def detached_clusters() -> list[DetachedCluster]:
    """This user's clusters on this machine that may outlive their kernel, newest first. Cleans up after dead ones."""
    # Folders of another user, or that others can read, are not trusted.
    folders = sorted(f for f in Path(tempfile.gettempdir()).glob(f"{PREFIX}*") if is_private(f) and f.is_dir())
    clusters = [cluster for folder in folders if (cluster := DetachedCluster.read(folder)) is not None]
    dead = [cluster for cluster in clusters if cluster.dead]
    for cluster in dead:
        cluster.end()
    return sorted((c for c in clusters if c not in dead), key=lambda c: c.begun_unix_s, reverse=True)


def detached_pids() -> set[int]:
    """All processes that may outlive their kernel, guardians included."""
    clusters = detached_clusters()
    return {p.pid for c in clusters for p in marked(c.token)} | {c.guardian.pid for c in clusters}


# -- what ends on other hosts -------------------------------------------------------------------------------------------


def write_end_commands(folder: Path, commands: Sequence[EndCommand]) -> None:
    """Sets what the guardian runs if it ends the cluster, in place of what was set before."""
    _write(folder / END_FILE, commands)


def run_end_commands(folder: Path) -> None:
    """Runs all at once. What they say is of no use here."""
    try:
        commands: list[EndCommand] = json.loads((folder / END_FILE).read_text(encoding="utf-8"))
    except OSError:
        return
    running = []
    for argv, sent in commands:
        with contextlib.suppress(OSError), tempfile.TemporaryFile() as file:
            file.write(sent.encode())
            file.seek(0)
            null = subprocess.DEVNULL
            running.append(subprocess.Popen(argv, stdin=file, stdout=null, stderr=null))
    deadline = time.monotonic() + END_COMMANDS_S
    for process in running:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.1, deadline - time.monotonic()))
        process.kill()


# -- private folders: connection files, keys and logs, which no other user can read ------------------------------------


def private_folder() -> Path:
    """A new folder that only this user can read. Raises OSError if none can be made."""
    return Path(tempfile.mkdtemp(prefix=PREFIX))


def _write(file: Path, value: Any) -> None:
    """Writes JSON, atomically, which this user alone can read. Raises OSError."""
    part = file.with_name(f"{file.name}.{os.getpid()}")
    with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as opened:
        json.dump(value, opened)
    part.replace(file)


def is_private(path: Path) -> bool:
    """Returns whether the path exists, belongs to this user, is no link, and is closed to all others."""
    try:
        status = os.lstat(path)
    except OSError:
        return False
    return status.st_uid == os.geteuid() and not stat.S_ISLNK(status.st_mode) and not status.st_mode & 0o077


def remove_private(folder: Path) -> None:
    """Removes a folder made by `private_folder`, and no other."""
    deadline = time.monotonic() + REMOVAL_S
    while folder.name.startswith(PREFIX) and folder.exists() and time.monotonic() < deadline:
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(0.02)  # ipyparallel's thread may have written to it meanwhile


# -- the guardian ----------------------------------------------------------------------------------------------------


class Guardian:
    """The kernel's side: starts the process, and releases it after an orderly end."""

    def __init__(self, token: str, folder: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", MODULE, token, str(os.getpid()), str(folder)],
            env={**os.environ, "PYTHONPATH": package_path()},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # signals to the kernel's process group do not reach it
        )
        assert self._process.stdin is not None
        self._pipe = self._process.stdin

    @property
    def identity(self) -> Identity:
        return Identity.of(self._process.pid)

    def detach(self) -> None:
        """The kernel no longer uses the ranks: the guardian acts as if it had ended."""
        with contextlib.suppress(OSError):
            self._pipe.close()

    def release(self) -> None:
        """All processes have ended: the guardian has nothing left to do."""
        with contextlib.suppress(OSError, ValueError):
            self._pipe.write(b"release\n")
            self._pipe.close()
        try:
            self._process.wait(2)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(2)


Claimed = tuple[DetachedCluster, Guardian]  # engines of a former kernel that this one has taken over


def claim(asked: Mapping[str, Any], limit_s: float) -> Claimed | None:
    """Claims the newest detached cluster that was made with the same arguments; None if there is none."""
    for cluster in detached_clusters():
        if cluster.free and cluster.asked == asked:
            guardian = Guardian(cluster.token, cluster.folder)
            if (claimed := cluster.claim(guardian.identity, limit_s)) is not None:
                return claimed, guardian
            guardian.release()
    return None


def package_path() -> str:
    """PYTHONPATH, starting with the folder that this package was imported from: it need not be installed."""
    root = str(Path(__file__).resolve().parents[2])
    others = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p and p != root]
    return os.pathsep.join([root, *others])


def watch(owner_pid: int) -> bool:
    """Waits until the owner ends. Returns whether it released the guardian."""
    try:
        owner = psutil.Process(owner_pid)
    except psutil.Error:
        return False
    while not select.select([sys.stdin], [], [], 1.0)[0]:
        if not alive(owner):
            return False
    return sys.stdin.readline().strip() == "release"


def handed_over(token: str, folder: Path) -> bool:
    """Waits for another kernel if the ranks may outlive theirs. Returns False if they must be ended."""
    cluster = DetachedCluster.read(folder)
    if cluster is None or cluster.guardian.pid != os.getpid():
        return cluster is not None or is_guarded(token)
    began_s, cluster = time.monotonic(), cluster.release()  # monotonic: a laptop's sleep does not count
    if cluster is None:
        return True
    # Nothing can be resumed without the ranks, or the controller here of those on other hosts.
    needed = [cluster.where["controller"]] if cluster.where else cluster.pids
    while all(map(alive, needed)) and time.monotonic() - began_s < cluster.limit_s:
        time.sleep(CHECK_S)
        now = DetachedCluster.read(folder)
        if now is None or now.guardian != cluster.guardian:
            return now is not None or is_guarded(token)
    return not cluster.remove()


def is_guarded(token: str) -> bool:
    """Whether another guardian has these ranks. Its kernel may have removed the file already, as for a change of ranks."""
    others = (p for p in psutil.process_iter(["cmdline"]) if p.pid != os.getpid())
    return any({MODULE, token} <= {*(p.info["cmdline"] or ())} for p in others)


def main(token: str, owner_pid: int, folder: Path) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it outlives the signals that end its owner
    if watch(owner_pid) or handed_over(token, folder):
        return
    end(marked(token), term_s=1.0)
    deadline = time.monotonic() + 10
    while sweep(token) and time.monotonic() < deadline:
        time.sleep(0.2)
    run_end_commands(folder)
    remove_private(folder)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
