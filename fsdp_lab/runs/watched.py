"""`WatchedRun`: a training loop that is not the lab's (`fsdp_lab.watch`), as a run that can be read, stored and compared."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from fsdp_lab.base.audit import AuditFinding, AuditLog
from fsdp_lab.base.errors import Cause
from fsdp_lab.base.hang import LoopPlace, LoopRank, cause_in_loop
from fsdp_lab.cluster import RankHung
from fsdp_lab.runs.steps import EventStore
from fsdp_lab.runs.trackers import Reporter
from fsdp_lab.runs.view import Awaited, RunQueries, RunState, Switch, fingerprint
from fsdp_lab.spec.loops import WatchedLoop

STOP_S = 2.0


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
