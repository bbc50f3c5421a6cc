"""`LabLike`: what the dashboard uses of a `Lab`, and which run of it is shown.

It is a protocol because `fsdp_lab.lab` itself makes dashboards, and so cannot be imported from here."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from fsdp_lab.cluster.membership import RankStatus
from fsdp_lab.planner.plan import Plan
from fsdp_lab.runs import Refusal, Run, SlowMotion, Sweep, WatchedRun
from fsdp_lab.runs.history import RunList
from fsdp_lab.runs.run import Drill
from fsdp_lab.runs.view import RunView
from fsdp_lab.spec.checkpoint_format import Checkpoint
from fsdp_lab.spec.spec import Spec


class LabLike(Protocol):
    """Members of `fsdp_lab.lab.Lab`."""

    @property
    def spec(self) -> Spec: ...
    @property
    def current(self) -> Run | WatchedRun | None: ...
    @property
    def slow(self) -> SlowMotion | None: ...
    @property
    def sweep(self) -> Sweep | None: ...
    @property
    def closed(self) -> bool: ...
    @property
    def devices(self) -> tuple[str, ...]: ...
    @property
    def attached(self) -> bool: ...
    @property
    def waiting(self) -> str: ...
    @property
    def lost(self) -> Mapping[int, Any]: ...
    def rank_status(self) -> Sequence[RankStatus]: ...
    def runs(self, **filters: Any) -> RunList: ...
    def report(self, path: None = None, runs: Sequence[RunView | Refusal] = ()) -> Path: ...
    def run(self, spec: Spec | None = None, **options: Any) -> Run: ...
    def resume(self, checkpoint: str, **options: Any) -> Run: ...
    def recover(self, ranks: str | None = None) -> Run: ...
    def compare(self, spec: Spec | None = None, *, steps: int = ..., rounds: int = ..., **lists: Any) -> Sweep: ...
    def slow_motion(self, spec: Spec | None = None) -> SlowMotion: ...
    def drill(self, kind: str, rank: int = 1) -> Drill: ...
    def save(self, folder: str) -> Checkpoint: ...
    def generate(self, prompts: str, **sampling: Any) -> list[str]: ...
    def plan(self, spec: Spec | None = None) -> Plan: ...


def active_run(lab: LabLike) -> Run | None:
    """The current run, unless it is over; None where that is a watched loop, which nothing here can change."""
    run = lab.current
    return None if run is None or isinstance(run, WatchedRun) or run.state.over else run


def active_loop(lab: LabLike) -> WatchedRun | None:
    """The watched loop that is shown, unless it is over."""
    run = lab.current
    return None if not isinstance(run, WatchedRun) or run.state.over else run


def active_sweep(lab: LabLike) -> Sweep | None:
    """The sweep in progress."""
    sweep = lab.sweep
    return None if sweep is None or sweep.done else sweep


def held_step(lab: LabLike) -> int | None:
    """The step up to which what all ranks hold is trained; None where they hold nothing alike, or are in use."""
    if active_run(lab) or active_loop(lab) or active_sweep(lab):
        return None
    steps = {rank.step if rank.alive else None for rank in lab.rank_status()}
    return steps.pop() or None if len(steps) == 1 else None


def shown_run(lab: LabLike) -> Run | WatchedRun | None:
    """The run that the plots show: in a sweep, the one whose turn it is. A user's own loop, if it is the newest."""
    sweep = active_sweep(lab)
    return (sweep.current if sweep is not None else None) or lab.current
