"""How a run goes on after a failure: from the ranks, from what those that are left hold, or from its newest checkpoint.

Note: sources. A step that failed is given up on all ranks alike, and what they hold is that of the step before it. Where all
of them are there, the run goes on with that (`LIVE`). Where some are gone, those that are left write what they have, and if
together they hold every element, as replicas do, that is a checkpoint like any other (`REPLICA`). Else the run's newest
checkpoint is taken, else it begins again: with the same samples in the same order, so its curve is the same.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from fsdp_lab.cluster import ClusterError, RankError
from fsdp_lab.core.checkpoint_format import Checkpoint, begin, checkpoints, discard, finish
from fsdp_lab.core.errors import ArgumentError, FieldError
from fsdp_lab.core.spec import Spec

LIVE, REPLICA, CHECKPOINT, BEGINNING = "the ranks", "a replica", "a checkpoint", "the beginning"
HOWS = ("off", "ask", "auto")
RANKS = ("same", "fewer")


@dataclass(frozen=True, kw_only=True)
class RecoveryPolicy:
    """What a run does when its ranks fail. Raises ArgumentError.

    how: "off": it has failed; "ask": it waits for `recover` or `stop`; "auto": it recovers by itself.
    ranks: "same": lost ranks are replaced; "fewer": it goes on with those that are left.
    times: "auto" gives up when so many failures in a row let no step through.
    """

    how: str = "off"
    ranks: str = "same"
    times: int = 3

    def __post_init__(self) -> None:
        for name, value, known in (("how", self.how, HOWS), ("ranks", self.ranks, RANKS)):
            if value not in known:
                raise ArgumentError(f"recover.{name}", f"{value!r} is refused", f"choose from {', '.join(known)}")
        if not isinstance(self.times, int) or isinstance(self.times, bool) or self.times < 1:
            raise ArgumentError("recover.times", f"{self.times!r} is refused", "give a whole number of 1 or more")

    @classmethod
    def of(cls, given: RecoveryPolicy | str | bool | None) -> RecoveryPolicy:
        """From what a user gives: a Recovering, its `how`, or whether it is to be automatic. Raises ArgumentError."""
        if isinstance(given, RecoveryPolicy):
            return given
        if given is None or isinstance(given, bool):
            return cls(how="auto" if given else "off")
        return cls(how=given)


@dataclass(frozen=True, kw_only=True)
class Incident:
    """A failure, and what became of it. Times are Unix seconds of the kernel's clock; None: not yet, or not known."""

    error: BaseException
    step: int  # committed before it
    ranks: int
    detected_unix_s: float
    failed_unix_s: float | None = None  # of a drill, which made it, or of a rank that said when it raised
    freed_unix_s: float | None = None  # when no rank that was left was in the failed call any more
    resumed_unix_s: float | None = None  # when the first step after it was done
    source: str = ""  # what the run went on from
    resumed_step: int | None = None  # the first step after it
    resumed_ranks: int | None = None
    notes: tuple[str, ...] = ()  # what is not as it was

    @property
    def lost_steps(self) -> int:
        """Steps that were done before and had to be done again."""
        return 0 if self.resumed_step is None else max(0, self.step - self.resumed_step)

    @property
    def seconds(self) -> float | None:
        """From the failure, or its detection where the former is not known, to the next step; None before that."""
        if self.resumed_unix_s is None:
            return None
        return self.resumed_unix_s - (self.failed_unix_s or self.detected_unix_s)

    @property
    def words(self) -> str:
        """What happened and what became of it, in a sentence or two."""
        if self.resumed_step is None:
            return f"{self.sentence}."
        again = f", {self.lost_steps} steps again" if self.lost_steps else ", no step again"
        took = f", {self.seconds:.1f} s later" if self.seconds is not None else ""
        notes = "".join(f"; {note}" for note in self.notes)
        return f"{self.sentence}. It went on from {self.source} at step {self.resumed_step}{again}{took}{notes}."

    @property
    def sentence(self) -> str:
        return str(self.error).partition("\n")[0]


@dataclass(frozen=True, kw_only=True)
class Predecessor:
    """A failed run that another one continues."""

    id: str
    step: int  # steps committed
    error: BaseException


class Recovery:
    """The failures of one run. Used by the run's driver alone, but for `injected_unix_s`, which any thread may set.

    Attributes:
        incidents: oldest first. predecessor: the failed run that this one continues; None: there is none.
        injected_unix_s: when a failure was made on purpose that has not been detected yet.
    """

    def __init__(self, policy: RecoveryPolicy, predecessor: Predecessor | None) -> None:
        self.policy, self.predecessor = policy, predecessor
        self.incidents: list[Incident] = []
        self.injected_unix_s: float | None = None
        self._failures = 0  # since the last committed step

    def count_failure(self) -> bool:
        """Counts a failure. Returns whether the policy recovers from it."""
        self._failures += 1
        return self.policy.how == "ask" or (self.policy.how == "auto" and self._failures <= self.policy.times)

    def add(self, error: BaseException, step: int, ranks: int) -> None:
        """A new incident, detected now. A RankError has the time of the failure, a RankLost that of its detection."""
        unix_s = getattr(error, "unix_s", None)
        raised = isinstance(error, RankError)
        self.incidents.append(
            Incident(
                error=error,
                step=step,
                ranks=ranks,
                failed_unix_s=unix_s if raised else self.injected_unix_s,
                detected_unix_s=time.time() if raised or unix_s is None else unix_s,
            )
        )
        self.injected_unix_s = None

    def update(self, **changes: Any) -> None:
        """Replaces fields of the newest incident."""
        self.incidents[-1] = replace(self.incidents[-1], **changes)

    def step_committed(self, unix_s: float) -> None:
        """Training works: called with the time at which a chunk's first step ended."""
        self._failures = 0
        if self.incidents and self.incidents[-1].resumed_unix_s is None:
            self.update(resumed_unix_s=unix_s)


class Survivors(Protocol):
    """What a rescue needs of a cluster."""

    def ask(self, what: str, ranks: Collection[int], **arguments: Any) -> dict[int, Any]: ...


def rescue(ranks: Survivors, told: Mapping[int, Mapping[str, Any]], root: Path) -> Checkpoint | None:
    """What the ranks that are left hold, as a checkpoint in `root`; None where they do not hold all of it.

    `told`: by rank, what each says of itself (`Session.status`); only ranks of the same step can write together.
    """
    for step in sorted({s["step"] for s in told.values() if s["step"] is not None}, reverse=True):
        writers = [rank for rank, s in told.items() if s["step"] == step]
        partial = None
        try:
            partial = begin(root, step)
            parts = ranks.ask("rescue", writers, partial=str(partial), writers=writers)
            return finish(partial, [parts[rank] for rank in writers], kind="rescue")
        except (ClusterError, FieldError, OSError, ValueError):
            if partial is not None:
                discard(partial)
    return None


@contextlib.contextmanager
def source_of(
    ranks: Survivors, told: Mapping[int, Mapping[str, Any]], run: str, folder: Path | None
) -> Iterator[tuple[str, Checkpoint | None]]:
    """What a run goes on from when not all of its ranks are there: of a replica and the newest checkpoint the later one.

    `folder`: where the run is saved. What is rescued stays there, or, where it has none, until the end of the block."""
    with contextlib.ExitStack() as stack:
        root = folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fsdp_lab-rescue-")))
        saved = [c for c in checkpoints(folder) if c.run == run] if folder is not None else []
        newest = max(saved, key=lambda c: (c.step, c.saved_unix_s), default=None)
        rescued = rescue(ranks, told, root)
        if rescued is not None and (newest is None or rescued.step >= newest.step):
            yield REPLICA, rescued
        else:
            yield (CHECKPOINT, newest) if newest is not None else (BEGINNING, None)


def refitted(spec: Spec, ranks: int) -> tuple[Spec, tuple[str, ...]]:
    """The Spec for another number of ranks, and what is not as it was, in words.

    The global batch stays where it can be divided: by accumulating more or fewer micro-batches, else by smaller ones.

    Raises:
        SpecError: the strategy cannot be on so many ranks.
    """
    if ranks == spec.world_size:
        return spec, ()
    w, whole = spec.workload, spec.global_batch
    fitted = spec.replace(world_size=ranks, devices=None)
    if whole % (w.micro_batch * ranks) == 0:
        fitted = fitted.replace(accumulate=whole // (w.micro_batch * ranks))
    elif whole % ranks == 0:
        fitted = fitted.replace(micro_batch=whole // ranks, accumulate=1)
    if fitted.global_batch == whole:
        each = fitted.workload
        batch = f"a step is still {whole} samples, {each.accumulate} x {each.micro_batch} of each rank"
    else:
        batch = f"a step is {fitted.global_batch} samples and was {whole}"
    return fitted, (f"{spec.world_size} ranks became {ranks}: {batch}; the data goes on where it was",)
