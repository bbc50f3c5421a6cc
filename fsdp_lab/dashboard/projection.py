"""`Projection`: the live plots of a stored run for one page, without a kernel and without controls.

It is the dashboard's own feed and view: the feed gets a `StoredLab`, whose run is read from the history file, and the view's
messages go wherever `deliver` sends them instead of over a kernel's comm.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fsdp_lab.core.errors import ArgumentError
from fsdp_lab.core.spec import Spec
from fsdp_lab.dashboard.board import Board
from fsdp_lab.dashboard.comparison_card import ComparisonCard
from fsdp_lab.dashboard.feed import Feed
from fsdp_lab.dashboard.live import LiveView
from fsdp_lab.history.following import Followed, FollowedRun
from fsdp_lab.planner.plan import Plan

ALLOWED = frozenset({"bokehjs", "mount", "ack", "ping", "leave"})  # of what a page says; "pin" and "press" choose

Deliver = Callable[[Mapping[str, Any], Sequence[bytes]], None]


class StoredLab:
    """What `Feed` and `Board` use of a lab."""

    sweep = None

    def __init__(self, followed: Followed) -> None:
        self._followed = followed

    @property
    def current(self) -> FollowedRun | None:
        return self._followed.run

    @property
    def spec(self) -> Spec:
        run = self.current
        return run.spec if run is not None and isinstance(run.spec, Spec) else Spec()

    @property
    def devices(self) -> tuple[str, ...]:
        run = self.current
        names = [str(name).lower() for name in run.environment.get("devices", ())] if run is not None else []
        return tuple("cpu" if name == "cpu" else "cuda" for name in names)

    def plan(self, spec: Spec | None = None) -> Plan:
        raise ArgumentError("plan", "a stored run has no calibration", "predict in its notebook")


class ProjectedView(LiveView):
    """A `LiveView` whose messages do not go to a kernel's page."""

    def __init__(self, deliver: Deliver) -> None:
        self._deliver = deliver
        super().__init__()

    def send(self, content: Any, buffers: Sequence[bytes] | None = None) -> None:
        self._deliver(content, list(buffers or ()))

    def take(self, message: Mapping[str, Any]) -> None:
        """What the page says."""
        self._on_message(self, message, ())


class Projection:
    """`tick` reads and draws what is new, `receive` takes what the page says; both from one thread."""

    def __init__(self, path: Path, wanted: str, deliver: Deliver) -> None:
        """`path`: of a history. `wanted`: the run, as for `Followed`."""
        self._followed, self._seen = Followed(path, wanted), ""
        lab: Any = StoredLab(self._followed)
        self.view = ProjectedView(deliver)
        self._feed = Feed(lab, self.view, Board(lab), ComparisonCard(lambda word, about: None))

    def tick(self) -> str:
        """Returns the run's state in a line. Raises as `FollowedRun.read`."""
        run = self._followed.read()
        self._feed.tick()
        if run is None:
            return "no run yet"
        self._feed.trace(run.take_heavy())
        return " ".join(filter(None, (run.name or run.id, run.state.value, run.reason and f"({run.reason})")))

    def receive(self, message: Mapping[str, Any]) -> None:
        if message.get("kind") in ALLOWED:
            self.view.take(message)

    def close(self) -> None:
        self.view.close()
