"""How a run recovers from a failure: from the ranks' own state, from that of the surviving ranks, or from a checkpoint.

Note: sources. A failed step is discarded on all ranks, so that they hold the state after the step before it. With all
ranks alive the run continues from that (`LIVE`). Where some are lost, the surviving ranks write their shards; if these cover
every element, as replicas do, they form an ordinary checkpoint (`REPLICA`). Otherwise the run's newest checkpoint is used,
or training begins again: with the same samples in the same order, so that the loss curve is the same."""

import contextlib
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from fsdp_lab.base.errors import ArgumentError, FieldError, SpecError, check_whole
from fsdp_lab.base.formatting import plural
from fsdp_lab.cluster import ClusterError, RankError
from fsdp_lab.cluster.cluster import Cluster
from fsdp_lab.cluster.host_script import STATE_PREFIX
from fsdp_lab.spec.checkpoint_format import Checkpoint, begin, checkpoints, discard, finish
from fsdp_lab.spec.spec import Spec

LIVE, REPLICA, CHECKPOINT, BEGINNING = "the ranks", "a replica", "a checkpoint", "the beginning"
WRITE_S = 1800.0  # for ranks to write all of their state
DROP_S = 10.0
HOWS = ("off", "ask", "auto")
RANKS = ("same", "fewer")


@dataclass(frozen=True, kw_only=True)
class RecoveryPolicy:
    """What a run does when its ranks fail. Raises ArgumentError.

    how: "off": the run fails; "ask": it waits for `recover` or `stop`; "auto": it recovers by itself.
    ranks: "same": lost ranks are replaced; "fewer": the run continues on the surviving ones.
    times: with "auto", how many failures without a step in between the run recovers from."""

    how: str = "off"
    ranks: str = "same"
    times: int = 3

    def __post_init__(self) -> None:
        for name, value, options in (("how", self.how, HOWS), ("ranks", self.ranks, RANKS)):
            if value not in options:
                raise ArgumentError(f"recover.{name}", f"{value!r} is refused", f"choose from {', '.join(options)}")
        check_whole("recover.times", self.times)

    @classmethod
    def of(cls, given: Self | str | bool | None) -> Self:
        """A policy as it is, one of its `how`, or of a bool: True is "auto". Raises ArgumentError."""
        if isinstance(given, RecoveryPolicy):
            return given
        if given is None or isinstance(given, bool):
            return cls(how="auto" if given else "off")
        return cls(how=given)


@dataclass(frozen=True, kw_only=True)
class Incident:
    """A failure, and how the run recovered. Times are Unix seconds of the kernel's clock; None: not yet, or unknown."""

    error: BaseException
    step: int  # steps committed before it
    ranks: int
    detected_unix_s: float
    failed_unix_s: float | None = None  # known of a drill, and of a rank that raised
    freed_unix_s: float | None = None  # when the last surviving rank had left the failed call
    resumed_unix_s: float | None = None  # when the first step after it was committed
    source: str = ""  # where the training state came from: `LIVE`, `REPLICA`, `CHECKPOINT` or `BEGINNING`
    resumed_step: int | None = None  # the first step after it
    resumed_ranks: int | None = None
    notes: tuple[str, ...] = ()  # what is different from before

    @property
    def lost_steps(self) -> int:
        """Committed steps that had to be trained again."""
        return 0 if self.resumed_step is None else max(0, self.step - self.resumed_step)

    @property
    def seconds(self) -> float | None:
        """The time from the failure (or its detection) to the next step; None before that."""
        if self.resumed_unix_s is None:
            return None
        return self.resumed_unix_s - (self.failed_unix_s or self.detected_unix_s)

    @property
    def words(self) -> str:
        """The failure and the recovery, as text."""
        if self.resumed_step is None:
            return f"{self.sentence}."
        repeated = f", repeating {plural(self.lost_steps, 'step')}" if self.lost_steps else ", repeating no step"
        took = f", {self.seconds:.1f} s later" if self.seconds is not None else ""
        notes = "".join(f"; {note}" for note in self.notes)
        return f"{self.sentence}. It resumed from {self.source} at step {self.resumed_step}{repeated}{took}{notes}."

    @property
    def sentence(self) -> str:
        """The failure, on one line."""
        return str(self.error).partition("\n")[0]


class Recovery:
    """The failures of one run. Used by the run's driver alone, but for `injected_unix_s`, which any thread may set.
    `incidents`: oldest first. `injected_unix_s`: when a fault was injected that has not been detected yet."""

    def __init__(self, policy: RecoveryPolicy, incidents: list[Incident]) -> None:
        self.policy, self.incidents = policy, incidents
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
        failed = unix_s if raised else self.injected_unix_s
        detected = time.time() if raised or unix_s is None else unix_s
        incident = Incident(error=error, step=step, ranks=ranks, failed_unix_s=failed, detected_unix_s=detected)
        self.incidents.append(incident)
        self.injected_unix_s = None

    def update(self, **changes: Any) -> None:
        """Replaces fields of the newest incident."""
        self.incidents[-1] = replace(self.incidents[-1], **changes)

    def step_committed(self, unix_s: float) -> None:
        """Training works: called with the time at which a chunk's first step ended."""
        self._failures = 0
        if self.incidents and self.incidents[-1].resumed_unix_s is None:
            self.update(resumed_unix_s=unix_s)


def path_on_ranks(ranks: Cluster, path: Path) -> str:
    """The path as ranks need it: on other hosts what is temporary is in a temporary folder of theirs."""
    temporary = path.parent.name.startswith(STATE_PREFIX)
    return f"{path.parent.name}/{path.name}" if temporary and not ranks.local else str(path)


def rescue(ranks: Cluster, statuses: Mapping[int, Mapping[str, Any]], root: Path) -> Checkpoint | str:
    """Writes the state of the surviving ranks as a checkpoint in `root`. Returns why not, where it is incomplete.
    `statuses`: `Session.status` by rank; only ranks at the same step can write together."""
    why = "no rank holds a training"
    for step in sorted({s["step"] for s in statuses.values() if s["step"] is not None}, reverse=True):
        writers = [rank for rank, s in statuses.items() if s["step"] == step]
        partial = None
        try:
            partial = begin(root, step)
            sent = path_on_ranks(ranks, partial)
            given = {rank: {"partial": sent, "writers": writers} for rank in writers}
            parts = ranks.dispatcher.ask("rescue", given, WRITE_S)
            return finish(partial, [parts[rank] for rank in writers], kind="rescue", elsewhere=not ranks.local)
        except (ClusterError, FieldError, OSError, ValueError) as e:
            why = str(e).partition("\n")[0]
            if partial is not None:
                discard(partial)
    return why


@contextlib.contextmanager
def temporary_state(ranks: Cluster) -> Iterator[Path]:
    """A folder for what ranks write for other ranks, gone at the end of the block, on their hosts too."""
    with tempfile.TemporaryDirectory(prefix=f"{STATE_PREFIX}{ranks.token[:8]}-") as root:
        try:
            yield Path(root)
        finally:
            if not ranks.closed and not ranks.local:
                with contextlib.suppress(ClusterError):
                    ranks.call("drop", timeout_s=DROP_S, path=Path(root).name)


@contextlib.contextmanager
def whole_state(ranks: Cluster, statuses: Sequence[Mapping[str, Any]]) -> Iterator[Checkpoint]:
    """The state of all ranks, as a checkpoint that is gone after the block. Raises SpecError: it cannot be written."""
    with temporary_state(ranks) as root:
        state = rescue(ranks, dict(enumerate(statuses)), root)
        if isinstance(state, str):
            reason = f"the ranks could not write their state first: {state}"
            raise SpecError("world_size", reason, "make room in TMPDIR")
        yield state


@contextlib.contextmanager
def source_of(
    ranks: Cluster, statuses: Mapping[int, Mapping[str, Any]], run: str, folder: Path | None
) -> Iterator[tuple[str, Checkpoint | None]]:
    """The source from which a run with lost ranks continues: a replica or the newest checkpoint, whichever is later.
    `folder`: of the run's checkpoints. A rescued one stays there; without a folder it is gone after the block."""
    with contextlib.ExitStack() as stack:
        root = folder or stack.enter_context(temporary_state(ranks))
        saved = [c for c in checkpoints(folder) if c.run == run] if folder is not None else []
        newest = max(saved, key=lambda c: (c.step, c.saved_unix_s), default=None)
        rescued = rescue(ranks, statuses, root)
        if isinstance(rescued, Checkpoint) and (newest is None or rescued.step >= newest.step):
            yield REPLICA, rescued
        else:
            yield (BEGINNING if newest is None else CHECKPOINT), newest


def refitted(spec: Spec, ranks: int) -> tuple[Spec, tuple[str, ...]]:
    """The Spec for another number of ranks, and notes on what changes. The global batch is preserved where it can be
    divided: by accumulating more or fewer micro-batches, else by smaller ones. Raises SpecError of the strategy."""
    if ranks == spec.world_size:
        return spec, ()
    global_batch, micro_batch = spec.global_batch, spec.workload.micro_batch
    fitted = spec.replace(world_size=ranks, devices=None)
    if global_batch % (micro_batch * ranks) == 0:
        fitted = fitted.replace(accumulate=global_batch // (micro_batch * ranks))
    elif global_batch % ranks == 0:
        fitted = fitted.replace(micro_batch=global_batch // ranks, accumulate=1)
    if fitted.global_batch == global_batch:
        w = fitted.workload
        batch = f"a step is still {global_batch} samples, {w.accumulate} x {w.micro_batch} of each rank"
    else:
        batch = f"a step is {fitted.global_batch} samples and was {global_batch}"
    return fitted, (f"{spec.world_size} ranks became {ranks}: {batch}; the data continues where it was",)
