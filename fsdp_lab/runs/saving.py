"""`CheckpointConfig`: what a run saves, where and how often; and `SavedCheckpoint`: what came of each checkpoint."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fsdp_lab.cluster import ClusterError
from fsdp_lab.core.checkpoint_format import Checkpoint, check_folder, checkpoints, read
from fsdp_lab.core.errors import FieldError, check_whole
from fsdp_lab.runs.awaited import Awaited

LAST = 3


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Where a run's checkpoints go: `CheckpointConfig(folder="checkpoints", every=100)`. Raises ArgumentError.

    The last step of a run that ends in good order is saved, too.
    """

    folder: str | os.PathLike[str]
    every: int | None = None  # steps; None: when it is asked for, and at the end
    last: int = LAST  # how many of a run are kept, and the best one beside them

    def __post_init__(self) -> None:
        for name, value in (("every", self.every), ("last", self.last)):
            if value is not None:
                check_whole(f"save.{name}", value)
        object.__setattr__(self, "folder", check_folder(self.folder))

    @classmethod
    def of(cls, given: CheckpointConfig | str | os.PathLike[str] | None) -> CheckpointConfig | None:
        """From what a user gives: a Saving, a folder, or None. Raises ArgumentError."""
        return given if given is None or isinstance(given, CheckpointConfig) else cls(folder=given)


@dataclass(frozen=True, kw_only=True)
class SavedCheckpoint:
    """A checkpoint that a run took."""

    step: int
    kind: str  # of `checkpoints.KINDS`
    stall_s: float  # how long training stood for it; writing went on beside it
    waited_s: float  # of that, for the one before to be written
    path: Path | None = None  # None: it is still being written, or was not
    nbytes: int = 0
    seconds: float | None = None  # from the snapshot until it was whole; None while it is being written
    error: str = ""  # why there is none

    @property
    def pending(self) -> bool:
        return self.seconds is None

    @property
    def words(self) -> str:
        """What came of it, in a sentence."""
        if self.pending:
            return f"step {self.step} is being saved"
        if self.path is None:
            return f"step {self.step} could not be saved ({self.error}); training goes on, and earlier ones are whole"
        return f"step {self.step} is saved in {self.path}"


class SaveRequest(Awaited[Checkpoint]):
    """A checkpoint on its way: `await` it, or `wait()`, for the Checkpoint. Nobody has to."""

    def __init__(self) -> None:
        super().__init__()
        self._made: Checkpoint | None = None
        self._error: Exception | None = None

    def settle(self, saved: SavedCheckpoint | None, error: Exception | None = None) -> None:
        self._error = error
        try:
            if saved is not None and saved.path is not None:
                self._made = read(saved.path)
            elif saved is not None:
                self._error = ClusterError(saved.words)
        except FieldError as e:  # it has made room for newer ones already
            self._error = e
        self._end()

    def _outcome(self) -> Checkpoint:
        if self._made is None:
            raise self._error or ClusterError("the run ended before this was saved")
        return self._made


class CheckpointSchedule:
    """The checkpoints of one run: when one is due, who waits for it, and what came of it.

    `ask` is called under the run's lock, all else on its driver; `taken` may be read by all.
    """

    def __init__(self, saving: CheckpointConfig | None, run: str, start: int) -> None:
        """`start`: the step that the run goes on from; that one is saved already."""
        self._saving, self._run, self._came_from = saving, run, start
        self.taken: tuple[SavedCheckpoint, ...] = ()
        self._asking: list[SaveRequest] = []  # not yet taken
        self._waiting: dict[int, list[SaveRequest]] = {}  # index in `taken` -> who waits for it

    def ask(self) -> SaveRequest:
        self._asking.append(ticket := SaveRequest())
        return ticket

    @property
    def asked(self) -> bool:
        return bool(self._asking)

    @property
    def pending(self) -> bool:
        """Whether one is still being written."""
        return any(s.pending for s in self.taken)

    def has(self, step: int) -> bool:
        return bool(self.taken) and self.taken[-1].step == step

    def until_due(self, step: int) -> int:
        """Steps from here to the next that is to be saved."""
        every = self._saving.every if self._saving is not None else None
        return 1 << 30 if every is None else every - step % every

    def due(self, step: int) -> bool:
        """Whether this step is to be saved, or somebody asked."""
        every = self._saving.every if self._saving is not None else None
        regular = every is not None and step % every == 0 and step != self._came_from and not self.has(step)
        return self.asked or regular

    def go_back(self, step: int) -> None:
        """The run goes on from this step."""
        self._came_from = step

    @contextlib.contextmanager
    def taking(self, kind: str, step: int) -> Iterator[Callable[[Sequence[Mapping[str, Any]]], None]]:
        """Around the taking of one; what is yielded is given what the ranks said of it (`Session.save`). A refusal is noted,
        every other error is passed on."""
        tickets, self._asking = self._asking, []

        def take(told: Sequence[Mapping[str, Any]]) -> None:
            stall_s, waited_s = (max(t[name] for t in told) for name in ("seconds", "waited_s"))
            self._waiting[len(self.taken)] = tickets
            self.taken += (SavedCheckpoint(step=int(told[0]["step"]), kind=kind, stall_s=stall_s, waited_s=waited_s),)

        try:
            yield take
        except BaseException as e:
            for ticket in tickets:
                ticket.settle(None, e if isinstance(e, Exception) else None)
            if not isinstance(e, FieldError):
                raise
            self.taken += (
                SavedCheckpoint(step=step, kind=kind, stall_s=0.0, waited_s=0.0, seconds=0.0, error=e.reason),
            )

    def note(self, ended: Collection[Mapping[str, Any]]) -> None:
        """What the ranks have written meanwhile."""
        self.taken = settled(self.taken, ended)
        for i in [i for i in self._waiting if not self.taken[i].pending]:
            for ticket in self._waiting.pop(i):
                ticket.settle(self.taken[i])

    def give_up(self, why: str) -> None:
        """Ranks failed: what is not whole by now will never be."""
        found = checkpoints(self._saving.folder) if self._saving is not None else []
        self.taken = given_up(self.taken, why, {c.step: c for c in found if c.run == self._run})
        self.note(())

    def end(self) -> None:
        """The run is over: nobody waits any longer."""
        for ticket in [*self._asking, *(t for of in self._waiting.values() for t in of)]:
            ticket.settle(None)
        self._asking, self._waiting = [], {}


def settled(saves: Iterable[SavedCheckpoint], ended: Iterable[Mapping[str, Any]]) -> tuple[SavedCheckpoint, ...]:
    """The same, with what rank 0 said of those that ended (`Checkpointer.ended`): they end in the order of their taking."""
    told = list(ended)
    found = []
    for saved in saves:
        if saved.pending and told and told[0]["step"] == saved.step:
            end = told.pop(0)
            path = Path(end["path"]) if end["path"] else None
            saved = replace(saved, path=path, nbytes=end["bytes"], seconds=end["seconds"], error=end["error"])
        found.append(saved)
    return tuple(found)


def given_up(
    saves: Iterable[SavedCheckpoint], why: str, whole: Mapping[int, Checkpoint]
) -> tuple[SavedCheckpoint, ...]:
    """The same, where ranks are gone: what was being written and is not whole on the disk will never be."""
    found = []
    for saved in saves:
        if saved.pending and (made := whole.get(saved.step)) is not None:
            saved = replace(saved, path=made.path, nbytes=made.nbytes, seconds=0.0)
        elif saved.pending:
            saved = replace(saved, seconds=0.0, error=why)
        found.append(saved)
    return tuple(found)
