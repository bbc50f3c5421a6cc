"""`RunView`, what can be read of any run, live or stored, and `RunQueries`, the results computed from that.

Also `RunState`, `Switch`, `Awaited`, `Request`, and the `fingerprint` of the machine that a run was trained on."""

import asyncio
import contextlib
import enum
import functools
import math
import os
import platform
import re
import socket
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import psutil

from fsdp_lab.base.errors import ArgumentError, Cause
from fsdp_lab.base.events import AuditFinding, AuditKind
from fsdp_lab.base.formatting import MIB, Table, count, duration, known, plural, size
from fsdp_lab.base.generation import Completion
from fsdp_lab.base.process import usable_cores
from fsdp_lab.cluster import ClusterError
from fsdp_lab.cluster.host_script import version
from fsdp_lab.export import export_script, export_spec
from fsdp_lab.runs.blame import WINDOW, Blame
from fsdp_lab.runs.diagnosis import Diagnosis, diagnose
from fsdp_lab.runs.evaluation import EarlyStopping, Evaluation
from fsdp_lab.runs.pictures import Picture, curves, sparkline
from fsdp_lab.runs.steps import EventStore, Step, last_stretch
from fsdp_lab.runs.summary import figures, step_table, summarize
from fsdp_lab.runs.timeline import Timeline, check_trace_path, write_trace
from fsdp_lab.spec.describe import Trained, describe_changes, describe_strategy
from fsdp_lab.spec.spec import Spec

PACKAGES = ("torch", "transformers", "fsdp-lab")
CPUINFO = Path("/proc/cpuinfo")
PROGRESS_S, LINE_S = 1.0, 10.0
T = TypeVar("T")


class RunState(enum.Enum):
    STARTING = "starting"
    RUNNING = "running"
    PAUSED = "paused"
    BROKEN = "broken"  # its ranks failed; it waits for `recover` or `stop`
    RECOVERING = "recovering"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FINISHED = "finished"
    FAILED = "failed"
    LOST = "lost with its kernel"  # only of a stored run: its kernel ended before it could store another state

    @property
    def over(self) -> bool:
        return self in (RunState.STOPPED, RunState.FINISHED, RunState.FAILED, RunState.LOST)


@dataclass(frozen=True, kw_only=True)
class Switch:
    """A Spec that was applied. `before`: the Spec that it replaced; None for a run's first."""

    step: int  # the first step with the new Spec
    before: Spec | None
    after: Spec
    seconds: float  # until the ranks were ready
    carried: bool  # parameters and optimizer state were carried over; otherwise the ranks began at step 0
    notes: tuple[str, ...] = ()


def switches_in_force(switches: Sequence[Switch]) -> list[Switch]:
    """The switches that no restart at an earlier step undid, with the Spec that each then followed as `before`."""
    in_force: list[Switch] = []
    for switch in switches:
        earlier = [s for s in in_force if switch.carried and s.step <= switch.step]
        if len(earlier) < len(in_force):
            switch = replace(switch, before=earlier[-1].after if earlier else None)
        in_force = [*earlier, switch]
    return in_force


class Awaited(Generic[T]):
    """A result that another thread sets once. `wait()` or `await` it from any thread or event loop, any number of
    times. Subclasses define `_given_up`: what Ctrl-C in `wait`, or cancelling the task that awaits, does.
    `while_awaited`: called each second while a task awaits, and once at the end: to draw how far it is."""

    def __init__(self) -> None:
        self.while_awaited: Callable[[], object] = lambda: None
        self.while_waiting: Callable[[Any], object] = lambda awaited: None  # each LINE_S in `wait`: to print it
        self._future: Future[None] = Future()
        self._future.set_running_or_notify_cancel()  # cancelling one task that awaits does not cancel it for the others

    def _outcome(self) -> T:
        """Returns the result, or raises. Called after `_end`."""
        raise NotImplementedError

    def _given_up(self, blocking: bool) -> None:
        """Called when the caller stops waiting. `blocking`: it was in `wait`, not in `await`."""

    def _end(self) -> None:
        """Wakes everyone who waits. Idempotent."""
        with contextlib.suppress(InvalidStateError):  # called before
            self._future.set_result(None)

    @property
    def done(self) -> bool:
        return self._future.done()

    def wait(self, timeout: float | None = None) -> T:
        """Blocks until the result is there and returns it, or raises its error; TimeoutError after `timeout` seconds."""
        end_s = math.inf if timeout is None else time.monotonic() + timeout
        try:
            while not self._wait_over(max(0.0, min(LINE_S, end_s - time.monotonic()))):
                if time.monotonic() >= end_s:
                    raise TimeoutError(f"{self!r} was not over after {timeout} s")
                self.while_waiting(self)
        except KeyboardInterrupt:
            self._given_up(blocking=True)
            raise
        return self._outcome()

    def _wait_over(self, timeout_s: float | None) -> bool:
        """Blocks until the result is there, or for `timeout_s`. Returns `done`."""
        with contextlib.suppress(TimeoutError):
            self._future.result(timeout_s)
        return self.done

    def __await__(self) -> Generator[Any, None, T]:
        return self._wait_async().__await__()

    async def _wait_async(self) -> T:
        future = asyncio.wrap_future(self._future)
        try:
            while not (await asyncio.wait([future], timeout=PROGRESS_S))[0]:
                self.while_awaited()
            self.while_awaited()
        except asyncio.CancelledError:
            self._given_up(blocking=False)
            raise
        return self._outcome()


class Request(Awaited[T]):
    """A result that a run was asked for: `await` it, or `wait()`, for it, or for the error that prevented it."""

    _result: T | Exception

    @property
    def error(self) -> Exception | None:
        """The error that prevented it; None: nothing, or it is not settled yet."""
        return self._result if self.done and isinstance(self._result, Exception) else None

    def settle(self, result: T | Exception) -> None:
        self._result = result
        self._end()

    def abandon(self) -> None:
        self.settle(ClusterError("the run ended before this was done"))

    def _outcome(self) -> T:
        if isinstance(self._result, Exception):
            raise self._result
        return self._result


class Audit(Sequence[AuditFinding]):
    """The findings of a loop, in the order in which they came. As text, a row for each kind, and what to do about it.
    `done`: whether the loop is audited at all."""

    def __init__(self, findings: Sequence[AuditFinding] | None, about: str) -> None:
        self.done, self._findings, self._about = findings is not None, tuple(findings or ()), about

    def __getitem__(self, i: Any) -> Any:
        return self._findings[i]

    def __len__(self) -> int:
        return len(self._findings)

    def to_dict(self) -> dict[str, Any]:
        return {"done": self.done, "findings": [finding.to_dict() for finding in self]}

    def table(self) -> Table:
        rows = []
        for kind in AuditKind:
            own = [f for f in self if f.kind is kind]
            names = list(dict.fromkeys(f.parameter for f in own))
            if own:
                more = f" and {len(names) - 2} more" if len(names) > 2 else ""
                ranks, step = ", ".join(map(str, sorted({f.rank for f in own}))), str(min(f.step for f in own))
                rows.append((kind.text, ", ".join(names[:2]) + more, ranks, step, own[0].what, kind.hint))
        columns = ("found", "parameters", "ranks", "step", "what", "do")
        caption = f"{self._about}: {plural(len(self), 'finding')}"
        return Table(columns=columns, rows=tuple(rows), caption=caption, left=frozenset(columns))

    def __repr__(self) -> str:
        nothing = "nothing found" if self.done else "not audited; loops are that are watched by fsdp_lab.watch"
        return repr(self.table()) if self else f"{self._about}: {nothing}"

    def _repr_html_(self) -> str:
        return self.table()._repr_html_() if self else escape(repr(self))


class RunView(Protocol):
    """A `Run`, or a stored one. Reading it never waits for a rank. `spec`: the one applied last; of a watched loop, what is
    known of it. `name`, `note`: as the user gave them, or empty. `reason`: why the run is in its state, in a sentence, or
    empty. `cause`: of a failure, where it is a known one. `notes`: how far to trust its times, a sentence each.
    `environment`: a `fingerprint`."""

    @property
    def id(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def note(self) -> str: ...
    @property
    def events(self) -> EventStore: ...
    @property
    def started_unix_s(self) -> float: ...
    @property
    def ended_unix_s(self) -> float | None: ...
    @property
    def spec(self) -> Trained: ...
    @property
    def switches(self) -> Sequence[Switch]: ...
    @property
    def state(self) -> RunState: ...
    @property
    def reason(self) -> str: ...
    @property
    def cause(self) -> Cause | None: ...
    @property
    def notes(self) -> tuple[str, ...]: ...
    @property
    def environment(self) -> Mapping[str, Any]: ...
    @property
    def early_stopping(self) -> EarlyStopping: ...
    def audit(self) -> Audit: ...


PLOTTED: Mapping[str, tuple[str, Callable[[Step], float]]] = {
    "loss": ("loss, mean of the ranks", lambda s: s.mean_loss),
    "memory": ("peak of the fullest rank, MiB", lambda s: max(e.memory.peak_bytes for e in s.events) / MIB or math.nan),
    "throughput": ("tokens a second, all ranks", lambda s: s.tokens_per_s),
    "time": ("step time, ms", lambda s: 1e3 * s.step_time_s),
}


class RunQueries:
    """Tables, figures, timelines and exports of a run. A mixin for classes that are a `RunView`. `findings`: of the audit of
    a watched loop; None: there is none."""

    findings: Sequence[AuditFinding] | None = None
    name = note = ""

    def rename(self, name: str) -> None:
        """Names the run, for lists, comparisons and reports; "" removes the name. It is stored with the run, as a note is.
        Raises ArgumentError: not a line of text. HistoryError: of a stored run, its file cannot be written."""
        if not isinstance(name, str) or "\n" in name:
            raise ArgumentError("name", f"{name!r} is refused", "give a line of text")
        self.name = name.strip()
        self._labelled()

    def annotate(self, note: str) -> None:
        """Writes a note on the run; "" removes it. Raises as `rename`; a note may have several lines."""
        if not isinstance(note, str):
            raise ArgumentError("note", f"{note!r} is refused", "give a text")
        self.note = note.strip()
        self._labelled()

    def _labelled(self) -> None:
        """Called when the name or the note has changed."""

    def audit(self) -> Audit:
        """What is wrong with the updates of a watched loop, by parameter, rank and step, as far as it was seen until now."""
        return Audit(self.findings, f"audit of {self!r}")

    @property
    def early_stopping(self: RunView) -> EarlyStopping:
        """The run's evaluations, and the best of them."""
        early_stopping, before = EarlyStopping(), None
        specs = {switch.after.id: switch.after for switch in self.switches}
        for step in self.events.steps():
            if step.eval_loss is None:
                continue
            spec = specs.get(step.spec_id)
            if before is not None and spec is not None:
                early_stopping.switched(before, spec)
            before = spec or before
            early_stopping.take(Evaluation(step.number, step.eval_loss, step.eval_metrics))
        return early_stopping

    @property
    def evaluations(self: RunView) -> tuple[Evaluation, ...]:
        """(step, mean loss of the held-out samples, own metrics by name), oldest first."""
        return tuple(self.early_stopping.evaluations)

    @property
    def completions(self: RunView) -> tuple[tuple[int, Completion], ...]:
        """(step, how a prompt of its evaluation went on), oldest first, in the order of the prompts."""
        return tuple((s.number, c) for s in self.events.steps() for c in s.completions)

    @property
    def best(self: RunView) -> Evaluation | None:
        """The evaluation with the least loss; None where there is none."""
        return self.early_stopping.best

    @property
    def diagnoses(self: RunView) -> tuple[Diagnosis, ...]:
        """Known troubles that its steps, or its failure, show; () for none. See `fsdp_lab.runs.diagnosis`."""
        return diagnose(self.spec, self.events, self.cause, self.audit())

    def blame(self: RunView, last: int = WINDOW) -> Blame:
        """Where the time of the last steps went, by rank, and who makes the others wait."""
        return Blame.newest(self.events, last)

    def table(self: RunView, last: int = 10) -> Table:
        """The last steps, one row each, over all ranks. Notes name the last evaluation and the best one."""
        specs: dict[str, Trained] = {spec.id: spec for spec in (self.spec, *(s.after for s in self.switches))}
        evaluations = self.early_stopping.words(self.spec.workload) if isinstance(self.spec, Spec) else ""
        notes = (*([evaluations] if evaluations else []), *self.notes)
        return step_table(self.events.last_steps(last), specs, caption=repr(self)[1:-1], notes=notes)

    def plot(self: RunView, what: str = "loss", *, beside: "RunView | Mapping[str, RunView]" = {}) -> Picture:  # noqa: B006
        """A picture of the run over its steps, with a mark at each switch. `Picture.save` writes it as a file.

        Args:
            what: "loss", with rings at held-out losses; "memory", the peak of the fullest rank; "throughput", of all ranks;
                or "time" of a step. The last two leave out what is left out of medians.
            beside: another run, or several by their names, drawn broad and pale below it.

        Raises ArgumentError: there is no such figure, or nothing has been measured."""
        if what not in PLOTTED:
            raise ArgumentError("what", f"there is no {what!r} to draw", f"use one of {', '.join(PLOTTED)}")
        label, value = PLOTTED[what]
        others = beside if isinstance(beside, Mapping) else {f"run {beside.id}": beside}
        runs: dict[str, RunView] = {("this run" if others else "run"): self, **others}
        timed = what in ("throughput", "time")
        steps = {name: [s for s in run.events.steps() if s.counts or not timed] for name, run in runs.items()}
        points = {name: [(float(s.number), value(s)) for s in some] for name, some in steps.items()}
        lines = {name: [p for p in some if math.isfinite(p[1])] for name, some in points.items()}
        rings = [e[:2] for e in self.early_stopping.evaluations if what == "loss" and math.isfinite(e.loss)]
        changes = {s.step: s.before.difference(s.after) for s in self.switches if s.before is not None}
        marks = {step: describe_changes(change, "to") or "resumed" for step, change in changes.items()}
        return curves(lines, rings, marks, label=label, zero=what != "loss")

    def _repr_html_(self: RunView) -> str:
        """A card: state, the headline figures, and the loss as a line of characters."""
        steps = self.events.steps()
        found, losses = figures(last_stretch(steps, self.spec)), known(s.mean_loss for s in steps)
        texts = {"a step": found.step_time_s and duration(found.step_time_s.median),
                 "tokens/s": found.tokens_per_s and count(found.tokens_per_s.median),
                 "peak a rank": found.peak_memory_bytes and size(found.peak_memory_bytes)}  # fmt: skip
        words = [f"{text} {name}" for name, text in texts.items() if text]
        if losses:
            words.insert(0, f"loss {losses[0]:.4g} to {losses[-1]:.4g} {sparkline(losses)}")
        of = describe_strategy(self.spec)
        return f"<div><b>{escape(repr(self)[1:-1])}</b><br>{escape(of)}<br>{escape(' · '.join(words))}</div>"

    def summary(self: RunView) -> dict[str, Any]:
        """The `runs` entry of `fsdp-lab compare`'s JSON, for the Spec applied last, by the rule in `runs.summary`."""
        return summarize(self.spec, self.events.steps())

    def timeline(self: RunView, step: int | None = None) -> Timeline:
        """What every rank did in a traced step (the last of each half second), on one clock. `step` None: the newest
        one, if possible one that every rank has reported. Raises ArgumentError: not traced, or dropped by now."""
        newest = self.events.newest_traced() if step is None else None
        return Timeline.of((newest or traced_steps(self.events, step if step is None else [step])[-1]).events)

    def export_trace(self: RunView, path: str | os.PathLike[str], steps: Iterable[int] | None = None) -> Path:
        """Writes traced steps as one Chrome trace (.json or .json.gz), for ui.perfetto.dev. Returns the path. `steps` None:
        all whose spans are stored. Raises ArgumentError: the path cannot be written, or one of the steps was not traced."""
        check_trace_path(path)
        return write_trace(path, [Timeline.of(step.events) for step in traced_steps(self.events, steps)])

    def export_script(self: RunView, path: str | os.PathLike[str], *, force: bool = False) -> Path:
        """Writes a torchrun script that trains the Spec applied last with torch alone; see `fsdp_lab.export`. Raises
        FieldError: of the path, or of a field that torch's own backends or the script cannot express."""
        return export_script(exported(self.spec), path, force=force)

    def export_spec(self: RunView, path: str | os.PathLike[str], *, force: bool = False) -> Path:
        """Writes the Spec as JSON, which `fsdp-lab run` takes. As `export_script` otherwise."""
        return export_spec(exported(self.spec), path, force=force)


def exported(trained: Trained) -> Spec:
    """Raises ArgumentError for a watched loop."""
    if isinstance(trained, Spec):
        return trained
    reason = "a watched loop is a script of your own, and has no Spec"
    raise ArgumentError("export", reason, "run that script, or train the model by lab.run")


def traced_steps(events: EventStore, wanted: Iterable[int] | None) -> list[Step]:
    """Traced steps whose spans are stored: all (None), or the wanted ones of their latest attempts. Raises ArgumentError."""
    traced = events.traced()
    if not traced:
        hint = "train on: the last of each half second is"
        raise ArgumentError("step", "no step of this run has been traced yet", hint)
    if wanted is None:
        return traced
    latest = {step.number: step for step in traced}
    numbers = list(wanted)
    if not numbers:
        raise ArgumentError("steps", "none is named", "name traced steps, or leave it out for all that are stored")
    for number in numbers:
        if number not in latest:
            nearest = min(latest, key=lambda n: (abs(n - number), n))
            reason = f"step {number} was not traced, or its spans are no longer stored"
            raise ArgumentError("step", reason, f"the nearest of {len(latest)} that are stored is {nearest}")
    return [step for step in traced if step.number in numbers and latest[step.number] is step]


def fingerprint(ranks: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """Hardware and software of this machine, and of its ranks where their `Session.status` is given. It is shown to other
    people, so it has no user names, no paths and no environment variables.

    Returns: plain scalars and lists, by "host", "cpu", "cores" (usable ones), "memory_bytes", "system", "python",
    "torch", "transformers", "fsdp_lab", "devices" (a name for each rank), "cuda", "nccl", "driver" (empty on a CPU)."""
    software = dict(ranks[0].get("software", {})) if ranks else {}
    return {
        **_machine(),
        "devices": [str(r.get("device_name", r.get("device", ""))) for r in ranks],
        **dict.fromkeys(("cuda", "nccl", "driver"), ""),
        **{name: version for name, version in software.items() if version},
    }


@functools.cache
def _machine() -> Mapping[str, Any]:
    """The items that are constant in this process."""
    return {
        "host": socket.gethostname(),
        "cpu": cpu_model(),
        "cores": usable_cores(),
        "memory_bytes": int(psutil.virtual_memory().total),
        "system": platform.platform(),
        "python": platform.python_version(),
        **{name.replace("-", "_"): version(name) for name in PACKAGES},
    }


def cpu_model(file: Path = CPUINFO) -> str:
    """The processor's model name; its architecture where that is unknown."""
    with contextlib.suppress(OSError):
        if name := re.search(r"^model name\s*:\s*(.+)$", file.read_text(), re.MULTILINE):
            return name[1].strip()
    return platform.processor() or platform.machine()


def describe_environment(environment: Mapping[str, Any]) -> str:
    """A fingerprint in one line: "box: 2 x CPU (AMD EPYC 7B13, 2 cores), torch 2.13.0"."""
    if not environment:
        return ""
    devices = [str(name) for name in environment.get("devices", ())]
    counted = ", ".join(f"{devices.count(name)} x {name}" for name in dict.fromkeys(devices)) or "no ranks"
    if set(devices) <= {"CPU", "cpu"}:
        counted += f" ({environment.get('cpu', '')}, {environment.get('cores', '?')} cores)"
    more = "".join(f", {k} {environment[k]}" for k in ("cuda", "nccl", "driver") if environment.get(k))
    return f"{environment.get('host', '')}: {counted}, torch {environment.get('torch', '')}{more}"
