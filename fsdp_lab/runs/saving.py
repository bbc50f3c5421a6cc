"""Checkpoints of a run: `CheckpointConfig` (where, how often), `CheckpointSchedule` (when), `SavedCheckpoint` (results)."""

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from fsdp_lab.base.errors import FieldError, check_whole
from fsdp_lab.base.formatting import plural, size
from fsdp_lab.cluster import ClusterError
from fsdp_lab.runs.view import Request
from fsdp_lab.spec.checkpoint_format import Checkpoint, check_folder, checkpoints, read
from fsdp_lab.spec.spec import Spec

LAST = 3


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Where a run's checkpoints go: `CheckpointConfig(folder="checkpoints", every=100)`. Raises ArgumentError.

    `every`: steps from one to the next. None, the default: only on request (`run.save()`), after an evaluation that is the
    best so far (`evaluate=`), and at the end, which a run that fails has not.
    `last`: how many are kept, beside the newest of the best evaluations; older ones are deleted."""

    folder: str | os.PathLike[str]
    every: int | None = None
    last: int = LAST

    def __post_init__(self) -> None:
        for name, value in (("every", self.every), ("last", self.last)):
            if value is not None:
                check_whole(f"save.{name}", value)
        object.__setattr__(self, "folder", check_folder(self.folder))

    @classmethod
    def of(cls, given: Self | str | os.PathLike[str] | None) -> Self | None:
        """A config as it is, one of a folder; None for None. Raises ArgumentError."""
        return given if given is None or isinstance(given, CheckpointConfig) else cls(folder=given)

    def notes(self, spec: Spec, parameters: int) -> tuple[str, ...]:
        """What to know before such a run is left alone. `parameters`: of the whole model."""
        seldom = "Checkpoints only at the end and at a best evaluation, none if the run fails before; every=100: more."
        whole = f"A checkpoint has the frozen model, too, {size(4 * parameters)}; export_model: the adapters alone."
        return (*([] if self.every else [seldom]), *([whole] if spec.workload.lora is not None else []))


@dataclass(frozen=True, kw_only=True)
class SavedCheckpoint:
    step: int  # steps trained: 10 after the step of number 9, of which the events and an `Evaluation` are
    kind: str  # one of `checkpoints.KINDS`
    stall_s: float  # how long training was interrupted; writing overlaps with training
    waited_s: float  # the part of `stall_s` in which the previous checkpoint was still being written
    path: Path | None = None  # None: still being written, or failed
    nbytes: int = 0
    seconds: float | None = None  # from the snapshot until it was complete; None while it is being written
    error: str = ""  # why it failed

    @property
    def pending(self) -> bool:
        return self.seconds is None

    @property
    def words(self) -> str:
        what = f"the state after {plural(self.step, 'step')}"
        if self.pending:
            return f"{what} is being saved"
        if self.path is not None:
            return f"{what} is saved in {self.path}"
        return f"{what} could not be saved ({self.error}); training continues, and earlier ones are complete"

    def result(self) -> Checkpoint | Exception:
        """The checkpoint on the disk, or why there is none."""
        if self.path is None:
            return ClusterError(self.words)
        try:
            return read(self.path)
        except FieldError as e:  # deleted already, in favour of newer ones
            return e


class CheckpointSchedule:
    """The checkpoints of one run: when one is due, which requests wait for it, and whether it was written. `request` is
    called with the run's lock held, all else by its driver; `taken` may be read by any thread. `config`: None where the
    run takes no checkpoints. `taken`: oldest first."""

    def __init__(self, config: CheckpointConfig | None, run: str) -> None:
        self.config, self._run = config, run
        self.start = 0  # the step of the checkpoint that the run starts or continues from, which is not saved again
        self.taken: tuple[SavedCheckpoint, ...] = ()
        self._requests: list[Request[Checkpoint]] = []  # for the next checkpoint
        self._waiting: dict[int, list[Request[Checkpoint]]] = {}  # index in `taken` -> requests that it answers

    def request(self, config: CheckpointConfig) -> Request[Checkpoint]:
        """`config`: of this and all later ones."""
        self.config = config
        self._requests.append(request := Request[Checkpoint]())
        return request

    @property
    def requested(self) -> bool:
        return bool(self._requests)

    @property
    def pending(self) -> bool:
        """Tells whether a checkpoint is still being written."""
        return any(s.pending for s in self.taken)

    def has(self, step: int) -> bool:
        """Tells whether the newest checkpoint is of this step."""
        return bool(self.taken) and self.taken[-1].step == step

    @property
    def _every(self) -> int | None:
        return self.config.every if self.config is not None else None

    def steps_until_due(self, step: int) -> int:
        """Steps from `step` to the next regular checkpoint."""
        return 1 << 30 if self._every is None else self._every - step % self._every

    def due(self, step: int) -> bool:
        """Tells whether to save this step: it is regular, or requested."""
        regular = self._every is not None and step % self._every == 0 and step != self.start and not self.has(step)
        return self.requested or regular

    def take(self, kind: str, step: int, save: Callable[[], Sequence[Mapping[str, Any]]]) -> None:
        """Takes a checkpoint. `save`: returns the ranks' results of `Session.save`. Its FieldError is recorded in `taken`,
        any other error is raised again; both end the requests."""
        requests = self._requests[:]
        del self._requests[: len(requests)]  # a request that comes meanwhile stays for the next checkpoint
        try:
            results = save()
            stall_s, waited_s = (max(r[name] for r in results) for name in ("seconds", "waited_s"))
            self._waiting[len(self.taken)] = requests
            saved = SavedCheckpoint(step=int(results[0]["step"]), kind=kind, stall_s=stall_s, waited_s=waited_s)
        except BaseException as e:
            for request in requests:
                request.settle(e) if isinstance(e, Exception) else request.abandon()
            if not isinstance(e, FieldError):
                raise
            saved = SavedCheckpoint(step=step, kind=kind, stall_s=0.0, waited_s=0.0, seconds=0.0, error=e.reason)
        self.taken = (*self.taken, saved)

    def written(self, ended: Collection[Mapping[str, Any]]) -> None:
        """Takes what the ranks have finished writing (`Checkpointer.ended` of rank 0), in the order of `taken`. What was
        given up may be among it."""
        results = list(ended)

        def updated(saved: SavedCheckpoint) -> SavedCheckpoint:
            end = next((result for result in results if result["step"] == saved.step), None)
            if end is None:
                return saved
            results.remove(end)
            path = Path(end["path"]) if end["path"] else None
            return replace(saved, path=path, nbytes=end["bytes"], seconds=end["seconds"], error=end["error"])

        self._update_pending(updated)

    def give_up(self, why: str) -> None:
        """Ranks failed: a checkpoint that is being written and is not complete on the disk never will be."""
        on_disk = checkpoints(self.config.folder) if self.config is not None else []
        complete = {c.step: c for c in on_disk if c.run == self._run}

        def updated(saved: SavedCheckpoint) -> SavedCheckpoint:
            if (made := complete.get(saved.step)) is not None:
                return replace(saved, path=made.path, nbytes=made.nbytes, seconds=0.0)
            return replace(saved, seconds=0.0, error=why)

        self._update_pending(updated)

    def _update_pending(self, updated: Callable[[SavedCheckpoint], SavedCheckpoint]) -> None:
        """Updates the pending checkpoints, oldest first, and ends the requests whose checkpoint no longer is."""
        self.taken = tuple(updated(saved) if saved.pending else saved for saved in self.taken)
        for i in [i for i in self._waiting if not self.taken[i].pending]:
            for request in self._waiting.pop(i):
                request.settle(self.taken[i].result())

    def end(self) -> None:
        """The run is over: ends all requests."""
        for request in [*self._requests, *(r for waiting in self._waiting.values() for r in waiting)]:
            request.abandon()
        self._requests, self._waiting = [], {}
