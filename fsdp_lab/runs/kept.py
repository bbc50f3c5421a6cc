"""`Kept`: what can be read of a run, whether it is going on, is over, or was read back from disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from fsdp_lab.runs.run import RunState, Switch
from fsdp_lab.runs.store import EventStore
from fsdp_lab.spec import Spec


class Kept(Protocol):
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
