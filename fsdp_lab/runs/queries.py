"""`RunQueries`: what can be asked of any run, whether it is going on or was read back from disk."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

from fsdp_lab.core.errors import ArgumentError
from fsdp_lab.core.formatting import Table
from fsdp_lab.export import export_accelerate, export_script, export_spec
from fsdp_lab.runs.evaluation import EarlyStopping, Evaluation, judged
from fsdp_lab.runs.steps import Step
from fsdp_lab.runs.store import EventStore
from fsdp_lab.runs.summary import step_table, summarize
from fsdp_lab.runs.timeline import Timeline, check_trace_path, write_trace
from fsdp_lab.runs.view import RunView


class Read(RunView, Protocol):
    """Whoever is `RunView` and a `RunQueries`."""

    @property
    def judge(self) -> EarlyStopping: ...


class RunQueries:
    """Tables, figures and timelines of what a run has told. For whoever is `RunView`."""

    @property
    def judge(self: RunView) -> EarlyStopping:
        """What its evaluations come to."""
        return judged(self)

    @property
    def evaluations(self: Read) -> tuple[Evaluation, ...]:
        """(step, mean loss of the held-out samples), oldest first."""
        return tuple(self.judge.evaluations)

    @property
    def best(self: Read) -> Evaluation | None:
        """The evaluation with the least loss; None where there is none."""
        return self.judge.best

    def table(self: Read, last: int = 10) -> Table:
        """The last steps, one row each, over all ranks; with the last evaluation and the best, where there are any."""
        specs = {spec.id: spec for spec in (self.spec, *(s.after for s in self.switches))}
        found = self.judge.words(self.spec.workload)
        notes = (*([found] if found else []), *self.notes)
        return step_table(self.events.last_steps(last), specs, caption=repr(self)[1:-1], notes=notes)

    def summary(self: RunView) -> dict[str, Any]:
        """The `runs` entry of `fsdp-lab compare`'s JSON, for the Spec applied last; the rule is in `runs.summary`."""
        return summarize(self.spec, self.events.steps())

    def timeline(self: RunView, step: int | None = None) -> Timeline:
        """What every rank did in a traced step (the last of each half second), on one clock; by default in the newest
        whole one that counts.

        Raises:
            ArgumentError: that step was not traced, or its spans are no longer kept.
        """
        newest = self.events.newest_traced() if step is None else None
        return Timeline.of((newest or traced_steps(self.events, step if step is None else [step])[-1]).events)

    def export_trace(self: RunView, path: str | os.PathLike[str], steps: Iterable[int] | None = None) -> Path:
        """Writes traced steps, by default all that are kept, as one Chrome trace (.json or .json.gz), for ui.perfetto.dev
        or chrome://tracing; returns where.

        Raises:
            ArgumentError: the path cannot be written, or one of the steps was not traced.
        """
        check_trace_path(path)
        return write_trace(path, [Timeline.of(step.events) for step in traced_steps(self.events, steps)])

    def export_script(self: RunView, path: str | os.PathLike[str], *, force: bool = False) -> Path:
        """Writes a torchrun script of torch alone that trains the Spec applied last; see `fsdp_lab.export`.

        Raises:
            FieldError: of the path, or of a field that torch's own backends or the script cannot express.
        """
        return export_script(self.spec, path, force=force)

    def export_accelerate(self: RunView, path: str | os.PathLike[str], *, force: bool = False) -> Path:
        """Writes a config for `accelerate launch`. As `export_script` otherwise."""
        return export_accelerate(self.spec, path, force=force)

    def export_spec(self: RunView, path: str | os.PathLike[str], *, force: bool = False) -> Path:
        """Writes the Spec as JSON, which `fsdp-lab run` takes. As `export_script` otherwise."""
        return export_spec(self.spec, path, force=force)


def traced_steps(events: EventStore, wanted: Iterable[int] | None) -> list[Step]:
    """The traced steps that are kept, or the wanted among them, each in its latest attempt. Raises SpecError."""
    kept = events.traced()
    if not kept:
        raise ArgumentError(
            "step", "no step of this run has been traced yet", "train on: the last of each half second is"
        )
    if wanted is None:
        return kept
    latest = {step.number: step for step in kept}
    numbers = list(wanted)
    if not numbers:
        raise ArgumentError("steps", "none is named", "name traced steps, or leave it out for all that are kept")
    for number in numbers:
        if number not in latest:
            near = min(latest, key=lambda known: (abs(known - number), known))
            reason = f"step {number} was not traced, or its spans are no longer kept"
            raise ArgumentError("step", reason, f"the nearest of {len(latest)} that are kept is {near}")
    return [step for step in kept if step.number in numbers and latest[step.number] is step]
