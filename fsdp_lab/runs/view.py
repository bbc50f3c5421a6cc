"""`RunView`: what can be read of a run, whether it is going on, is over, or was read back from disk."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from fsdp_lab.core.spec import Spec
from fsdp_lab.runs.store import EventStore


class RunState(enum.Enum):
    STARTING = "starting"
    RUNNING = "running"
    PAUSED = "paused"
    BROKEN = "broken"  # its ranks failed, and it waits for `recover` or `stop`
    RECOVERING = "recovering"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FINISHED = "finished"
    FAILED = "failed"
    LOST = "lost with its kernel"  # of one that was read back: nobody was left to say how it ended

    @property
    def over(self) -> bool:
        return self in (RunState.STOPPED, RunState.FINISHED, RunState.FAILED, RunState.LOST)


@dataclass(frozen=True, kw_only=True)
class Switch:
    """A Spec that was applied: `before` is None for a run's first."""

    step: int  # the first step with the new Spec
    before: Spec | None
    after: Spec
    seconds: float  # from the word to the ranks until they were ready
    carried: bool  # parameters and optimizer state went along; otherwise the ranks began at step 0
    notes: tuple[str, ...] = ()


def switches_in_force(switches: Sequence[Switch]) -> list[Switch]:
    """Without those that the ranks went back behind; `before` is the Spec that was in force until each."""
    kept: list[Switch] = []
    for switch in switches:
        earlier = [s for s in kept if switch.carried and s.step <= switch.step]
        if len(earlier) < len(kept):
            switch = replace(switch, before=earlier[-1].after if earlier else None)
        kept = [*earlier, switch]
    return kept


class RunView(Protocol):
    """A `Run`, or one of the past. Nothing here waits for a rank."""

    id: str
    events: EventStore
    started_unix_s: float
    ended_unix_s: float | None

    @property
    def spec(self) -> Spec:
        """The one applied last."""
        ...

    @property
    def switches(self) -> Sequence[Switch]: ...

    @property
    def state(self) -> RunState: ...

    @property
    def reason(self) -> str:
        """Why it is in its state, in words; empty where the state says it all."""
        ...

    @property
    def notes(self) -> tuple[str, ...]:
        """What its times are worth, in words."""
        ...

    @property
    def environment(self) -> Mapping[str, Any]:
        """Where it ran: machine, Python, torch, devices (`fsdp_lab.runs.environment`)."""
        ...
