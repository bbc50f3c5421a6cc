"""`Cache`: folders that are slow to make, each made once on a machine, whole or not at all.

Note: the lock. Who makes a folder holds a lock of the operating system (flock), which is free again when its process ends,
however it ends. What a dead process has left is removed by the next one that takes the lock. Others poll, so that they can
be interrupted; where the folder grows, the work that they wait for makes progress. A refusal is written into the lock's
file, so that those who waited raise it as well, and do not each find it again.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from fsdp_lab.core.errors import FieldError, SpecError

VARIABLE = "FSDP_LAB_CACHE"
_POLL_S = 0.05
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)

Progress = Callable[[], None]


def _nothing() -> None:
    pass


@dataclass(frozen=True, kw_only=True)
class Progresses:
    """What to call while something is made."""

    made: Progress = _nothing  # here, after each part
    awaited: Progress = _nothing  # by another process, after each part of it
    check: Progress = _nothing  # often, while it is awaited: it raises to give up


NO_PROGRESS = Progresses()


class Cache:
    """The folders below `FSDP_LAB_CACHE`, or the user's cache folder of fsdp_lab, by name."""

    def __init__(self) -> None:
        given = os.environ.get(VARIABLE)
        self.root = Path(given).expanduser() if given else _of_user()

    def folder(self, name: str, make: Callable[[Path], None], progress: Progresses = NO_PROGRESS) -> Path:
        """The folder of that name, made by `make` in an empty one if nobody has.

        Raises:
            SpecError: there is no room for it, or it cannot be written; and what `make` raises, here or elsewhere.
        """
        folder = self.root / name
        if folder.is_dir():
            return folder
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            with (self.root / f"{name}.lock").open("a+") as lock, self._locked(lock, name, progress):
                if not folder.is_dir():
                    self._make(folder, make, lock)
        except OSError as e:
            what = "there is no room" if e.errno in _NO_ROOM else f"no place ({e.strerror or e})"
            raise SpecError("workload.data", f"{what} in {self.root} for its tokens",
                            f"make room, or name another folder in {VARIABLE} and start again") from e  # fmt: skip
        return folder

    def _make(self, folder: Path, make: Callable[[Path], None], lock: IO[str]) -> None:
        part = self._part(folder.name)
        shutil.rmtree(part, ignore_errors=True)  # of a process that was killed
        part.mkdir()
        try:
            make(part)
            part.rename(folder)
        except BaseException as e:
            shutil.rmtree(part, ignore_errors=True)
            if isinstance(e, FieldError):
                lock.truncate(0)
                lock.write(json.dumps({"at": time.time_ns(), "refusal": e.to_dict()}))
            raise

    @contextlib.contextmanager
    def _locked(self, lock: IO[str], name: str, progress: Progresses) -> Iterator[None]:
        """With the lock. Raises the refusal of the process that had it."""
        before, size = _read(lock), -1
        while not _taken(lock):
            progress.check()
            if (now := _bytes_in(self._part(name))) != size:
                size = now
                progress.awaited()
            time.sleep(_POLL_S)
        after = _read(lock)
        if size >= 0 and after != before and after:
            raise FieldError.from_dict(json.loads(after)["refusal"])
        yield  # closing the file frees the lock

    def _part(self, name: str) -> Path:
        return self.root / f"{name}.part"


def _of_user() -> Path:
    import platformdirs

    return platformdirs.user_cache_path("fsdp_lab", appauthor=False)


def _taken(lock: IO[str]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _read(lock: IO[str]) -> str:
    lock.seek(0)
    return lock.read()


def _bytes_in(folder: Path) -> int:
    with contextlib.suppress(OSError):
        return sum(file.stat().st_size for file in folder.iterdir())
    return 0
