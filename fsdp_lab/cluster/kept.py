"""`Kept`: a cluster that may outlive its kernel, as a file in its private folder tells.

A cluster has one `kept.json`, beside its connection files: what is kept is found by looking through the private folders,
and goes with its folder. It is written when the ranks are ready. It names the kernel that has them, by pid and birth, so
that a dead one has no claim, and the guardian that ends them when no kernel comes. Who changes it holds a lock on the
folder, so that two kernels never take the same ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp_lab.cluster.private import is_private, private_folders, remove_private
from fsdp_lab.cluster.processes import end, marked, sweep
from fsdp_lab.identity import Identity, machine
from fsdp_lab.spec import SpecError

FILE = "kept.json"
FREE_S = 24 * 3600.0  # how long ranks wait for a kernel, unless another number of hours is given


@dataclass(frozen=True, kw_only=True)
class Kept:
    """What a new kernel needs to know of ranks that were left."""

    folder: Path
    token: str
    machine: str
    asked: Mapping[str, Any]  # what the lab was asked for; who asks for the same again is meant
    engines: tuple[int, ...]  # ipyparallel's ids, in rank order
    pids: tuple[int, ...]
    placement: Mapping[str, Any]  # as `Placement.to_dict` wrote it
    begun_unix_s: float
    limit_s: float  # how long they wait for a kernel
    guardian: Identity
    owner: Identity | None  # the kernel that has them; None, or one that is dead: nobody
    free_unix_s: float | None = None  # since when nobody has them, where that was seen

    @property
    def id(self) -> str:
        return self.token[:8]

    @property
    def free(self) -> bool:
        return self.owner is None or not self.owner.alive

    @property
    def abandoned(self) -> bool:
        """Nobody came within the limit, and nobody is there to see to it."""
        waited_s = 0.0 if self.free_unix_s is None else time.time() - self.free_unix_s
        return self.free and waited_s > self.limit_s and not self.guardian.alive

    # -- the file ---------------------------------------------------------------------------------------------------

    @classmethod
    def read(cls, folder: Path) -> Kept | None:
        """None where nothing is kept there, on this machine and for this user."""
        file = folder / FILE
        if not is_private(file):
            return None
        try:
            told = json.loads(file.read_text(encoding="utf-8"))
            owner = told.pop("owner")
            kept = cls(
                folder=folder,
                engines=tuple(told.pop("engines")),
                pids=tuple(told.pop("pids")),
                guardian=Identity(**told.pop("guardian")),
                owner=None if owner is None else Identity(**owner),
                **told,
            )
        except (OSError, ValueError, TypeError, KeyError):
            return None  # removed in this moment, or of another version
        return kept if kept.machine == machine() else None

    def write(self) -> None:
        """Whole, and readable by this user alone. Raises OSError."""
        told = dataclasses.asdict(self)
        del told["folder"]
        part = self.folder / f"{FILE}.{os.getpid()}"
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
            json.dump(told, file)
        os.replace(part, self.folder / FILE)

    # -- who has it ---------------------------------------------------------------------------------------------------

    def claim(self, guardian: Identity, limit_s: float) -> Kept | None:
        """Makes it this process's, with a guardian of its own; None where another one was faster."""
        return self._change(
            lambda now: now.free, owner=Identity.this(), guardian=guardian, limit_s=limit_s, free_unix_s=None
        )

    def release(self) -> Kept | None:
        """Nobody's from now on; None where its guardian is another's by now."""
        return self._change(lambda now: now.guardian == self.guardian, owner=None, free_unix_s=time.time())

    def forget(self) -> bool:
        """Takes the file away, so that no kernel finds it any more; False where its guardian is another's by now."""
        with contextlib.suppress(FileNotFoundError), _locked(self.folder):
            now = Kept.read(self.folder)
            if now is not None and now.guardian == self.guardian:
                (self.folder / FILE).unlink()
                return True
        return False

    def end(self) -> bool:
        """Ends its processes and removes its folder; False where a kernel has it, or one could not be ended."""
        claimed = self.claim(self.guardian, self.limit_s)
        if claimed is None or not claimed.forget():
            return False
        end(marked(self.token), term_s=1.0)
        left = sweep(self.token)
        remove_private(self.folder)
        return not left

    def _change(self, allowed: Callable[[Kept], bool], **fields: Any) -> Kept | None:
        """The same with other fields, written; None where that is not allowed any more, or it is gone."""
        with contextlib.suppress(FileNotFoundError), _locked(self.folder):
            now = Kept.read(self.folder)
            if now is not None and allowed(now):
                changed = dataclasses.replace(now, **fields)
                changed.write()
                return changed
        return None


def waiting_s(keep: bool | float, given: Any = None) -> float | None:
    """How long ranks wait for a kernel; None: they end with theirs. Raises SpecError."""
    if keep is False:
        return None
    if given is not None:
        raise SpecError("keep", "the engines of a given cluster are yours, and stay anyway", "leave keep out")
    if keep is True:
        return FREE_S
    if not isinstance(keep, (int, float)) or not 0 < keep < math.inf:
        raise SpecError("keep", f"{keep!r} is refused", "give True for a day, a number of hours above 0, or False")
    return keep * 3600.0


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One process at a time; the system takes the lock from one that dies. Raises FileNotFoundError: the folder is gone."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def kept_clusters() -> list[Kept]:
    """Those of this user on this machine, the newest first. What is left of dead ones is removed."""
    found = [kept for folder in private_folders() if (kept := Kept.read(folder)) is not None]
    dead = [kept for kept in found if kept.free and (kept.abandoned or not marked(kept.token))]
    for kept in dead:
        kept.end()
    return sorted((kept for kept in found if kept not in dead), key=lambda kept: kept.begun_unix_s, reverse=True)


def kept_pids() -> set[int]:
    """All processes that are meant to outlive their kernel, guardians included."""
    clusters = kept_clusters()
    return {p.pid for kept in clusters for p in marked(kept.token)} | {kept.guardian.pid for kept in clusters}
