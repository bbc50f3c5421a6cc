"""`Reading`: what can be asked of any run, whether it is going on or was read back from disk."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from fsdp_lab.events import StepEvent
from fsdp_lab.export import export_accelerate, export_script, export_spec
from fsdp_lab.runs.evaluation import Evaluation, Judge, judged
from fsdp_lab.runs.store import EventStore
from fsdp_lab.runs.summary import step_table, summarize
from fsdp_lab.runs.timeline import Timeline
from fsdp_lab.runs.trace import check_path, write_trace
from fsdp_lab.spec import SpecError
from fsdp_lab.table import Table

if TYPE_CHECKING:
    from fsdp_lab.runs.kept import Kept

    class Read(Kept, Protocol):
        """Whoever is `Kept` and a `Reading`."""

        @property
        def judge(self) -> Judge: ...


class Reading:
    """Tables, figures and timelines of what a run has told. For whoever is `Kept`."""

    @property
    def judge(self: Kept) -> Judge:
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

    def summary(self: Kept) -> dict[str, Any]:
        """The `runs` entry of `fsdp-lab compare`'s JSON, for the Spec applied last; the rule is in `runs.summary`."""
        return summarize(self.spec, self.events.since(0)[0])

    def timeline(self: Kept, step: int | None = None) -> Timeline:
        """What every rank did in a traced step (the last of each half second), on one clock; by default in the newest
        that all ranks have told.

        Raises:
            SpecError: that step was not traced, or its spans are no longer kept.
        """
        steps = traced_steps(self.events, [step] if step is not None else None)
        whole = [events for events in steps if len(events) == events[0].world_size]
        return Timeline.of((whole or steps)[-1])

    def export_trace(self: Kept, path: str | os.PathLike[str], steps: Iterable[int] | None = None) -> Path:
        """Writes traced steps, by default all that are kept, as one Chrome trace (.json or .json.gz), for ui.perfetto.dev
        or chrome://tracing; returns where.

        Raises:
            SpecError: the path cannot be written, or one of the steps was not traced.
        """
        check_path(path)
        return write_trace(path, [Timeline.of(events) for events in traced_steps(self.events, steps)])

    def export_script(self: Kept, path: str | os.PathLike[str], *, force: bool = False) -> Path:
        """Writes a torchrun script of torch alone that trains the Spec applied last; see `fsdp_lab.export`.

        Raises:
            SpecError: of the path, or of a field that torch's own backends or the script cannot express.
        """
        return export_script(self.spec, path, force=force)

    def export_accelerate(self: Kept, path: str | os.PathLike[str], *, force: bool = False) -> Path:
        """Writes a config for `accelerate launch`. As `export_script` otherwise."""
        return export_accelerate(self.spec, path, force=force)

    def export_spec(self: Kept, path: str | os.PathLike[str], *, force: bool = False) -> Path:
        """Writes the Spec as JSON, which `fsdp-lab run` takes. As `export_script` otherwise."""
        return export_spec(self.spec, path, force=force)


def traced_steps(events: EventStore, wanted: Iterable[int] | None) -> list[list[StepEvent]]:
    """The events of traced steps that are kept, or of the wanted among them."""
    kept = events.traced()
    if not kept:
        raise SpecError("step", "no step of this run has been traced yet", "train on: the last of each half second is")
    if wanted is None:
        return kept
    newest = {told[0].step: told for told in kept}  # of a number told twice, after beginning again, the newer
    numbers = list(wanted)
    if not numbers:
        raise SpecError("steps", "none is named", "name traced steps, or leave it out for all that are kept")
    for step in numbers:
        if step not in newest:
            near = min(newest, key=lambda number: (abs(number - step), number))
            reason = f"step {step} was not traced, or its spans are no longer kept"
            raise SpecError("step", reason, f"the nearest of {len(newest)} that are kept is {near}")
    return [told for told in kept if told[0].step in numbers and newest[told[0].step] is told]
