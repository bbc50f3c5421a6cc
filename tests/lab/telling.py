"""A run that is told its events by a test, for whoever takes a `RunView`."""

import random
import secrets
import time
from dataclasses import replace
from typing import Any

from fsdp_lab.base.errors import Cause
from fsdp_lab.runs import EventStore, RunState, Switch
from fsdp_lab.runs.view import RunQueries, fingerprint
from fsdp_lab.spec.spec import Spec
from tests.dashboard.fake_lab import event


class Telling(RunQueries):
    """`tell(n)` makes n more steps of all ranks, `switch` another Spec, `end` ends it."""

    def __init__(self, spec: Spec | None = None, *, started_unix_s: float | None = None) -> None:
        self.id = secrets.token_hex(4)
        self.spec = spec or Spec()
        self.state, self.reason, self.notes = RunState.RUNNING, "", ("a note",)
        self.cause: Cause | None = None
        self.environment: dict[str, Any] = fingerprint([{"device_name": "CPU"}] * self.spec.world_size)
        self.started_unix_s = time.time() if started_unix_s is None else started_unix_s
        self.ended_unix_s: float | None = None
        self.events = EventStore()
        self.switches = [Switch(step=0, before=None, after=self.spec, seconds=0.25, carried=False, notes=("begun",))]
        self.events.restart(0)
        self._first, self._step = True, 0

    def tell(self, steps: int = 1, *, rich: bool = False) -> None:
        """`rich`: some steps have spans or memory curves, as the fake lab makes them, which takes its time."""
        ranks = range(self.spec.world_size)
        like = [event(self.spec, self.id, r, 0) for r in ranks]
        for _ in range(steps):
            if rich:
                told = [event(self.spec, self.id, r, self._step, first=self._first) for r in ranks]
            else:
                chance = random.Random(self._step)
                loss, norm = chance.random(), chance.random()
                told = [
                    replace(like[r], step=self._step, step_time_s=chance.uniform(0.1, 0.2), loss=loss + r, mean_loss=loss,
                            grad_norm=norm, end_unix_s=time.time(), first_after_switch=self._first,
                            ledger=self._step % 50 == 10)
                    for r in ranks
                ]  # fmt: skip
            self.events.add(told)
            self._first, self._step = False, self._step + 1

    def switch(self, **changes: Any) -> None:
        after = self.spec.replace(**changes)
        carried = after.workload == self.spec.workload
        self._step = self._step if carried else 0
        self.switches.append(Switch(step=self._step, before=self.spec, after=after, seconds=0.5, carried=carried))
        if not carried:
            self.events.restart(0)
        self.spec, self._first = after, True

    def end(self, state: RunState = RunState.FINISHED, reason: str = "") -> None:
        self.ended_unix_s = time.time()
        self.state, self.reason = state, reason

    def __repr__(self) -> str:
        return f"<Telling {self.id}>"


def ended(spec: Spec | None = None, steps: int = 3, **more: Any) -> Telling:
    run = Telling(spec, **more)
    run.tell(steps)
    run.end()
    return run


def plain(events: list[Any]) -> list[dict[str, Any]]:
    """Without spans and memory curves, of which only the newest are kept."""
    return [{k: v for k, v in e.to_dict().items() if k not in ("spans", "memory_curve")} for e in events]
