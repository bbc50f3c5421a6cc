"""A run as far as what is computed from runs needs one."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fsdp_lab.base.errors import Cause
from fsdp_lab.base.events import StepEvent
from fsdp_lab.runs import EventStore, RunState, Switch
from fsdp_lab.runs.view import RunQueries
from fsdp_lab.spec.spec import Spec


@dataclass(kw_only=True)
class RecordedRun(RunQueries):
    """A `RunView`."""

    spec: Spec
    events: EventStore
    id: str = "told"
    name: str = ""
    note: str = ""
    started_unix_s: float = 1.7e9
    ended_unix_s: float | None = 1.7e9 + 60
    state: RunState = RunState.FINISHED
    reason: str = ""
    cause: Cause | None = None
    notes: tuple[str, ...] = ()
    environment: Mapping[str, Any] = field(default_factory=dict)
    switches: list[Switch] = field(default_factory=list)


def told(spec: Spec, events: Iterable[Mapping[str, Any] | StepEvent], **more: Any) -> RecordedRun:
    store = EventStore()
    store.add(events)
    first = Switch(step=0, before=None, after=spec, seconds=0.1, carried=False)
    return RecordedRun(spec=spec, events=store, switches=[first], **more)
