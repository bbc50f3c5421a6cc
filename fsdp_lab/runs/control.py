"""`RunControl`: what a run and its driver share: its options, its state, and the requests that are not carried out yet.

Also the `Request`s that a run returns."""

import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from fsdp_lab.base.errors import FieldError, check_whole
from fsdp_lab.cluster import ClusterError
from fsdp_lab.runs.evaluation import EvalConfig, Evaluation
from fsdp_lab.runs.recovery import Incident, RecoveryPolicy
from fsdp_lab.runs.saving import CheckpointConfig
from fsdp_lab.runs.steps import EventStore
from fsdp_lab.runs.trackers import Reporter
from fsdp_lab.runs.view import Request, RunState, Switch
from fsdp_lab.spec.spec import Spec


class SwitchRequest(Request[Switch]):
    """The result of `Run.apply`, which is a Switch. Waiting for it is optional."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.spec = spec

    def __repr__(self) -> str:
        return f"<SwitchRequest for {self.spec.id}: {'done' if self.done else 'pending'}>"


class RunControl:
    """The part of a `Run` that its driver writes, too. Threads: see the note in `fsdp_lab.runs.driver`.

    Attributes:
        id: as in its events. events: its `EventStore`.
        steps: how many to train; None: until stopped. ledger_every, evaluate, recovering: as given; saving: also by `save`.
        reporter: to the trackers that were given.
        spec: the one applied last; before the first is applied, the one to apply.
        switches: of every Spec that was applied. incidents: failures that the run recovered from, or is to recover from.
        refused: the error of the last Spec that the ranks refused; None: there is none.
        environment: machine, versions and devices (`runs.view.fingerprint`); empty until the ranks are ready.
        on_best: called on the driver's thread between two chunks with each `Evaluation` that is the best so far, while the
            ranks hold the parameters of that step. An exception in a callback fails the run.
        state: changed by `set_state` alone. reason: why the run is in its state, in a sentence, or empty.
        error: of a run that failed or is broken; None: it is neither. ended_unix_s: None until it is over.

    Requests, which `changed` guards; it is notified of every change, and a single attribute may be read without it:
        pending: the Spec of the newest `apply`, until it is applied or refused; None: there is none.
        recovery: how a BROKEN run is to recover; None: `recover` was not called yet.
        switch_requests: for Specs. asked: other requests, each with the call to the ranks that answers it. In order.
        ledger_wanted: whether the next step is to be a ledger step.
        paused: whether to hold between two chunks.
        suspending: whether to suspend the run after its chunk. suspended: whether it waits for its turn, with its training
            state on the host.
        stop_s, stop_reason: when a stop was requested, on the monotonic clock, and why; None: it was not."""

    def __init__(
        self,
        spec: Spec,
        *,
        steps: int | None = None,
        ledger_every: int | None = None,
        evaluate: EvalConfig | int | None = None,
        saving: CheckpointConfig | None = None,
        recovering: RecoveryPolicy | None = None,
        reporter: Reporter | None = None,
    ) -> None:
        for name, value, none in (("steps", steps, "no end"), ("ledger_every", ledger_every, "only requested ones")):
            if value is not None:
                check_whole(name, value, wanted=f"a whole number of 1 or more, or None for {none}")
        self.id = secrets.token_hex(4)
        self.spec, self.steps, self.ledger_every = spec, steps, ledger_every
        self.evaluate = EvalConfig.of(evaluate)
        self.saving, self.recovering = saving, recovering or RecoveryPolicy()
        self.reporter = reporter or Reporter()
        if self.evaluate is not None:
            self.evaluate.check(spec)
        self.started_unix_s = time.time()
        self.ended_unix_s: float | None = None
        self.events = EventStore()
        self.switches: list[Switch] = []
        self.incidents: list[Incident] = []
        self.refused: FieldError | None = None
        self.environment: Mapping[str, Any] = {}
        self.on_best: list[Callable[[Evaluation], None]] = []
        self.changed = threading.Condition()
        self.state, self.reason = RunState.STARTING, ""
        self.error: BaseException | None = None
        self.pending: Spec | None = None
        self.recovery: RecoveryPolicy | None = None
        self.asked: list[tuple[Request[Any], Callable[[], Any]]] = []
        self.switch_requests: list[SwitchRequest] = []
        self.ledger_wanted = self.paused = self.suspending = self.suspended = False
        self.stop_s: float | None = None
        self.stop_reason = ""

    def set_state(self, state: RunState, reason: str = "") -> None:
        """The one place where the state changes. Hold the lock."""
        self.state, self.reason = state, reason
        self.changed.notify_all()

    @property
    def ending(self) -> bool:
        """Tells whether the run is over or a stop was requested."""
        return self.state.over or self.stop_s is not None

    # -- called by users' threads ------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """Holds the lock while a request is made, and wakes the driver."""
        with self.changed:
            yield
            self.changed.notify_all()

    def request_stop(self, reason: str) -> None:
        """The first reason counts."""
        with self.changing():
            if not self.ending:
                self.stop_s, self.stop_reason = time.monotonic(), reason
                self.set_state(RunState.STOPPING, reason)

    # -- called by the driver ----------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Tells whether something was requested that a pause does not delay."""
        return self.pending is not None or bool(self.asked) or self.suspending

    @property
    def interrupt_reason(self) -> str:
        """Says why a call to the ranks was interrupted."""
        return self.stop_reason if self.stop_s is not None else "interrupted"

    def wait_for_recovery(self, error: ClusterError) -> RecoveryPolicy | None:
        """BROKEN until `recover` or `stop` is called. Returns how to recover; None: stop."""
        with self.changed:
            self.error = error
            self.set_state(RunState.BROKEN, error.sentence)
            self.changed.wait_for(lambda: self.recovery is not None or self.stop_s is not None)
            policy, self.recovery = self.recovery, None
            self.error = None if policy is not None else error
        return policy

    def wait_for_turn(self) -> bool:
        """Suspended until `take_turn` or `stop` is called. Returns whether it is the run's turn."""
        with self.changed:
            self.suspending, self.suspended = False, True
            if self.stop_s is None:
                self.set_state(RunState.PAUSED, "waits for its turn")
            self.changed.wait_for(lambda: not self.suspended or self.stop_s is not None)
            return self.stop_s is None

    def clear_pending(self, spec: Spec) -> None:
        """`spec` was applied or refused; a newer one stays pending. Hold the lock."""
        if self.pending is spec:
            self.pending = None

    def settle(self, spec: Spec, result: Switch | Exception) -> None:
        """Ends the requests for `spec` and for what it replaced."""
        with self.changed:
            last = max((i for i, r in enumerate(self.switch_requests) if r.spec is spec), default=-1)
            settled, self.switch_requests = self.switch_requests[: last + 1], self.switch_requests[last + 1 :]
        for request in settled:
            request.settle(result)

    def finish(self, state: RunState, reason: str) -> None:
        """The run is over; requests that are left fail."""
        with self.changed:
            self.ended_unix_s = time.time()
            self.pending = None
            requests = [*self.switch_requests, *(request for request, _ in self.asked)]
            self.switch_requests, self.asked = [], []
            self.set_state(state, reason)
        for request in requests:
            request.abandon()
