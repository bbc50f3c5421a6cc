"""`WatchedRun`: a training loop that is not the lab's (`fsdp_lab.watch`), as a run that can be read, stored and compared.

Note: what only all ranks know together. A watched loop sends nothing of its own, so a rank reports with its events checksums
of the replicated parameters that it looked at, and the gradients that are zero in its own part. `AuditLog` compares."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

from fsdp_lab.base.errors import Cause
from fsdp_lab.base.events import AuditFinding, AuditKind
from fsdp_lab.base.hang import LoopPlace, LoopRank, cause_in_loop
from fsdp_lab.cluster import RankHung
from fsdp_lab.runs.steps import EventStore
from fsdp_lab.runs.trackers import Reporter
from fsdp_lab.runs.view import Awaited, RunQueries, RunState, Switch, fingerprint
from fsdp_lab.spec.describe import WatchedLoop

STOP_S = 2.0
SAME = 5  # different batches that all ranks had, after which it is no chance
WAITING = 256  # steps whose checksums are kept until all ranks have reported theirs


class WatchedRun(RunQueries, Awaited["WatchedRun"]):
    """Made when the first message of a loop arrives. It is over when every rank has left the loop. `take` is called on
    the thread that receives; everything else from any thread. `spec`: what is known of the loop. `events`: as of a
    `Run`. `switches`: none. `environment`: of the process that receives, and the ranks' devices."""

    switches: Sequence[Switch] = ()

    def __init__(self, begins: Mapping[str, Any], interrupt: Callable[[], None] = lambda: None) -> None:
        """`begins`: a message with a "begin". `interrupt`: interrupts the ranks' loop."""
        super().__init__()
        begin = begins["begin"]
        self.id = str(begins["run"])
        self.spec = WatchedLoop.from_dict(begin["loop"])
        self.name = self.spec.title
        self.started_unix_s = float(begin["started_unix_s"])
        self.ended_unix_s: float | None = None
        self.events = EventStore()
        self._audit: AuditLog | None = None
        device = {name: begin[name] for name in ("device_name", "software")}
        self.environment: Mapping[str, Any] = fingerprint([device] * self.spec.world_size)
        self.reporter = Reporter(begin.get("report_to"))  # whoever records the run may replace it
        self._notes: tuple[str, ...] = tuple(begin["notes"])
        self._interrupt = interrupt
        self._lock = threading.Lock()
        self._ends: dict[int, Mapping[str, Any]] = {}  # by rank
        self.state, self.reason = RunState.RUNNING, ""
        self.cause: Cause | None = None
        self.details = ""  # of a hang, the stacks; the cell itself shows what it raised

    def take(self, message: Mapping[str, Any]) -> None:
        """A message of one rank."""
        begin, end = message.get("begin"), message.get("end")
        if begin is not None:
            self._notes = tuple(dict.fromkeys([*self._notes, *begin["notes"]]))
        if "audit" in message:
            self._audit = self._audit or AuditLog(self.spec.world_size)
            self._audit.take(int(message["rank"]), message["audit"])
        self.events.add(message["events"], self._notes)
        if end is not None:
            self._notes = tuple(dict.fromkeys([*self._notes, *end["notes"]]))
            self._end_rank(int(message["rank"]), end)

    def lose(self, rank: int, why: str) -> None:
        """The rank's process has ended."""
        if rank < self.spec.world_size:
            self._end_rank(rank, {"state": RunState.FAILED.value, "reason": why, "own": True}, last=True)

    def hang(self, hung: RankHung) -> None:
        """Its ranks wait for each other: the loop is over, and its cell is interrupted."""
        with self._lock:
            if self.done:
                return
            self.state, self.reason, self.details = RunState.FAILED, hung.sentence, hung.details
            self.cause = hung.cause
            self.ended_unix_s = time.time()
        self._end()
        self._interrupt()

    def _end_rank(self, rank: int, end: Mapping[str, Any], *, last: bool = False) -> None:
        with self._lock:
            if self.done:
                return
            self._ends.setdefault(rank, end)
            if len(self._ends) < self.spec.world_size and not last:
                return
            self.state, self.reason, self.cause = _verdict(dict(sorted(self._ends.items())))
            self.ended_unix_s = time.time()
        self._end()

    @property
    def notes(self) -> tuple[str, ...]:
        return (*self._notes, *self.reporter.notes)

    @property
    def findings(self) -> tuple[AuditFinding, ...] | None:  # type: ignore[override]
        return None if self._audit is None else tuple(self._audit.findings)

    @property
    def step(self) -> int:
        """Steps recorded."""
        return max((e.step + 1 for e in self.events.latest().values()), default=0)

    def stop(self, timeout_s: float = STOP_S, reason: str = "") -> bool:
        """Interrupts the cell in which the loop is. Returns whether the loop is over within `timeout_s`. Idempotent."""
        if not self.done:
            with self._lock:
                if self.state is RunState.RUNNING:
                    self.state, self.reason = RunState.STOPPING, reason
            self._interrupt()
        return self._wait_over(timeout_s) if timeout_s > 0 else self.done

    def _outcome(self) -> Self:
        return self

    def __repr__(self) -> str:
        reason = f" ({self.reason})" if self.reason else ""
        return f"<WatchedRun {self.id}: {self.state.value}{reason}, step {self.step}, {self.spec.name}>"


def _verdict(ends: Mapping[int, Mapping[str, Any]]) -> tuple[RunState, str, Cause | None]:
    """State, reason and known cause of the whole: of the rank that failed by itself, if one did."""
    worst = max(ends.values(), key=lambda end: (_ORDER.index(RunState(end["state"])), bool(end["own"])))
    state, reason = RunState(worst["state"]), str(worst["reason"])
    if state is not RunState.FAILED or worst["own"]:
        return state, reason, None

    def where(end: Mapping[str, Any]) -> LoopRank:
        place, steps, generates = end.get("place", ""), end.get("steps", 0), end.get("generates", False)
        return LoopRank(place=LoopPlace(place), steps=steps, generates=generates)

    cause, why = cause_in_loop({rank: where(end) for rank, end in ends.items()})
    return state, f"{why}; {reason}" if cause else reason, cause


_ORDER = (RunState.FINISHED, RunState.STOPPED, RunState.FAILED)


class AuditLog:
    """`take` what each rank reports; `findings`: of all, each kind and parameter once for each rank. A report is plain:

    replicated: (name, ranks that hold what this one does, whether the wrapper sees to it) of each parameter, once
    checksums: (step, {number in `replicated`, as text: checksum}); -1 is before the first step
    inputs: (step, checksum of what the model was given)
    findings: as `AuditFinding.to_dict`; everywhere: likewise, certain once all ranks have said so"""

    def __init__(self, world_size: int) -> None:
        self.findings: list[AuditFinding] = []
        self._world_size = world_size
        self._replicated: dict[int, Sequence[Any]] = {}  # by rank
        self._sums: dict[int, dict[int, Mapping[str, int]]] = {}  # step -> rank -> number -> checksum
        self._equal: set[str] = set()  # numbers of those that were equal once
        self._different: set[str] = set()
        self._copies = False  # all that no wrapper keeps equal was so before the first step: parts of pipelines are not
        self._inputs: dict[int, dict[int, int]] = {}  # step -> rank -> checksum
        self._same: set[int] | None = set()  # checksums that all ranks had in one step; None: ranks differ
        self._everywhere: dict[tuple[str, str], dict[int, AuditFinding]] = {}

    def take(self, rank: int, report: Mapping[str, Any]) -> None:
        self.findings += map(AuditFinding.from_dict, report.get("findings", ()))
        for found in map(AuditFinding.from_dict, report.get("everywhere", ())):
            said = self._everywhere.setdefault((found.kind.name, found.parameter), {})
            said[rank] = found
            if len(said) == self._world_size:
                self.findings.append(max(said.values(), key=lambda f: f.step))
        for step, checksum in report.get("inputs", ()):
            self._inputs.setdefault(step, {})[rank] = checksum
            if len(self._inputs[step]) == self._world_size:
                self.findings += self._compare_inputs(step, set(self._inputs.pop(step).values()))
        if "replicated" in report:
            self._replicated[rank] = report["replicated"]
        for step, sums in report.get("checksums", ()):
            self._sums.setdefault(step, {})[rank] = sums
            if len(self._sums[step]) == self._world_size:
                self.findings += self._compare(step, self._sums.pop(step))
        for step in sorted(self._sums)[:-WAITING]:
            del self._sums[step]

    def _compare_inputs(self, step: int, checksums: set[int]) -> Iterator[AuditFinding]:
        """Batches that are the same in each step, as of a benchmark, are meant to be."""
        self._same = None if self._same is None or len(checksums) > 1 else self._same | checksums
        if self._same is not None and len(self._same) == SAME:
            what = f"in {SAME} steps all ranks had one and the same batch: more ranks learn no more"
            self._same = None
            yield AuditFinding(kind=AuditKind.SAME_DATA, parameter="", rank=0, step=step, what=what)

    def _compare(self, step: int, sums: Mapping[int, Mapping[str, int]]) -> Iterator[AuditFinding]:
        for i in [i for i in sums[0] if i not in self._different]:
            name, _, certain = self._replicated[0][int(i)]
            for ranks in dict.fromkeys(tuple(replicated[int(i)][1]) for replicated in self._replicated.values()):
                other = next((r for r in ranks if sums[r].get(i, sums[ranks[0]].get(i)) != sums[ranks[0]].get(i)), None)
                if other is None:
                    self._equal.add(i)
                elif certain or (i in self._equal and (self._copies or "lora" in name.lower())):
                    self._different.add(i)
                    what = f"its values on rank {other} are not those on rank {ranks[0]}"
                    at, kind = max(step, 0), AuditKind.REPLICAS_DIFFER
                    yield AuditFinding(kind=kind, parameter=name, rank=other, step=at, what=what)
        if step < 0:
            self._copies = all(i in self._equal for i in sums[0] if not self._replicated[0][int(i)][2])
