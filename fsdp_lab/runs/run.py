"""`Run`: one Spec being trained by resident ranks, until it has done its steps or is told to stop.

Each run has a driver, a thread of its own that is the only one to send work to the ranks (see the threads note in
`fsdp_lab.cluster.cluster`). It sends a chunk of steps sized to about half a second, collects, and then does what
was asked for meanwhile: stop, pause, or another Spec. What the user calls only leaves a word under the run's lock,
so a cell or a widget callback never waits for the ranks unless it asks to.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import secrets
import threading
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from fsdp_lab.cluster import Call, ClusterError, Interrupted
from fsdp_lab.runs.environment import fingerprint
from fsdp_lab.runs.reading import Reading
from fsdp_lab.runs.store import EventStore
from fsdp_lab.spec import Spec, SpecError

CHUNK_S = 0.5  # between two looks at what was asked for
CHUNK_STEPS = 256
GROWTH = 4  # a chunk is at most this many times the last one: the first steps after a switch say little
PATIENCE_S = 0.15  # a stop waits this long for the chunk to end by itself, then interrupts
STOP_S = 2.0
DEAF_S = 8.0  # ranks that do not answer an interrupt for this long are ended

T = TypeVar("T")


class RunState(enum.Enum):
    STARTING = "starting"
    RUNNING = "running"
    PAUSED = "paused"
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


class Awaited(Generic[T]):
    """Something that ends once, on another thread: waited for by `wait()` in a cell or by `await`.

    Subclasses say what Ctrl-C (or a cancelled task) does, in `_given_up`.
    """

    def __init__(self) -> None:
        self._over = threading.Event()
        self._callbacks: list[Callable[[], None]] = []
        self._callbacks_lock = threading.Lock()

    def _outcome(self) -> T:
        """The value, or raises. Called when it is over."""
        raise NotImplementedError

    def _given_up(self, blocking: bool) -> None:
        """The one who waits has given up."""

    def _end(self) -> None:
        with self._callbacks_lock:
            self._over.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            with contextlib.suppress(RuntimeError):  # that loop is closed by now
                callback()

    @property
    def done(self) -> bool:
        return self._over.is_set()

    def wait(self, timeout: float | None = None) -> T:
        """Blocks until it is over. Raises what it failed with, or TimeoutError after `timeout` seconds."""
        try:
            if not self._over.wait(timeout):
                raise TimeoutError(f"{self!r} was not over after {timeout} s")
        except KeyboardInterrupt:
            self._given_up(blocking=True)
            raise
        return self._outcome()

    def __await__(self) -> Generator[Any, None, T]:
        return self._wait_async().__await__()

    async def _wait_async(self) -> T:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()

        def tell() -> None:
            loop.call_soon_threadsafe(lambda: None if future.done() else future.set_result(None))

        with self._callbacks_lock:
            if not self._over.is_set():
                self._callbacks.append(tell)
            else:
                future.set_result(None)
        try:
            await future
        except asyncio.CancelledError:
            self._given_up(blocking=False)
            raise
        return self._outcome()


class Ticket(Awaited[Switch]):
    """An `apply` on its way: `await` it, or `wait()`, for the Switch. Nobody has to."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.spec = spec
        self._switch: Switch | None = None
        self._error: Exception | None = None

    def settle(self, switch: Switch | None, error: Exception | None) -> None:
        self._switch, self._error = switch, error
        self._end()

    def _outcome(self) -> Switch:
        if self._switch is None:
            raise self._error or ClusterError("the run ended before this was applied")
        return self._switch

    def __repr__(self) -> str:
        return f"<Ticket for {self.spec.id}: {'done' if self.done else 'pending'}>"


class Ranks(Protocol):
    """What a run needs of a cluster."""

    @property
    def notes(self) -> tuple[str, ...]: ...

    def submit(
        self, what: str, *, take: Callable[[Mapping[str, Any]], None] | None = None, **arguments: Any
    ) -> Call: ...


class Run(Reading, Awaited["Run"]):
    """One training run. Made by `Lab.run`; starts at once.

    `run.wait()` and `await run` return the run when it has finished or was stopped, and raise its error when it failed.
    Ctrl-C in either stops the run in good order and is passed on; the kernel and the ranks stay as they are.

    Attributes:
        id: as in its events. spec: applied last; until then what was asked for. pending: asked for and not yet applied.
        state, reason, error: how it is; the reason in words, the exception of a failure.
        environment: where it trains (`fsdp_lab.runs.environment`); empty until its ranks have said who they are.
        events: its `EventStore`. switches: every Spec that was applied. refused: the last one that the ranks refused.
        steps: how many were asked for; None: until stopped. step: the next one.
    """

    def __init__(
        self,
        ranks: Ranks,
        spec: Spec,
        *,
        steps: int | None = None,
        fresh: bool = True,
        ledger_every: int | None = None,
        share: int | None = None,
        prepare: Callable[[Spec], None] = lambda spec: None,
        run_id: str | None = None,
    ) -> None:
        """`prepare(spec)` is called on the driver before anything is sent: it sees to the right ranks. `share`: steps of a
        turn; after so many it is put aside until `take_turn`, and others may have the ranks."""
        super().__init__()
        _whole_number("steps", steps, "no end")
        _whole_number("ledger_every", ledger_every, "only those that are asked for")
        self.id = run_id or secrets.token_hex(4)
        self.steps = steps
        self.ledger_every = ledger_every
        self.events = EventStore()
        self.switches: list[Switch] = []
        self.refused: SpecError | None = None
        self.error: BaseException | None = None
        self.environment: Mapping[str, Any] = {}
        self.started_unix_s = time.time()
        self.ended_unix_s: float | None = None
        self._ranks, self._prepare, self._fresh = ranks, prepare, fresh
        self._spec = spec
        self._state, self._reason = RunState.STARTING, ""
        self._changed = threading.Condition()  # guards the words below, _state and _reason
        self._pending: Spec | None = None
        self._tickets: list[Ticket] = []
        self._paused = False
        self._ledger = False  # asked for and not yet sent
        self._share, self._turn_left, self._is_aside = share, share or 0, False
        self._stop_s: float | None = None  # when a stop was asked for, on the monotonic clock
        self._stop_reason = ""
        self._step = 0
        self._done_steps = 0
        self._until = steps  # the step at which it is finished
        self._chunk = 1
        self._driver = threading.Thread(target=self._drive, name=f"fsdp_lab-run-{self.id}", daemon=True)
        self._driver.start()

    # -- what the user sees -----------------------------------------------------------------------------------------

    @property
    def spec(self) -> Spec:
        return self._spec

    @property
    def pending(self) -> Spec | None:
        return self._pending

    @property
    def state(self) -> RunState:
        return self._state

    @property
    def reason(self) -> str:
        """Why it is in its state, in words; empty where the state says it all."""
        return self._reason

    @property
    def details(self) -> str:
        """What is known beyond the reason, in lines, such as a rank's stack; empty where that is all."""
        return self.error.details if isinstance(self.error, ClusterError) else ""

    @property
    def step(self) -> int:
        """Steps committed; the number of the next one."""
        latest = self.events.latest()
        return max(self._step, *(e.step + 1 for e in latest.values())) if latest else self._step

    @property
    def notes(self) -> tuple[str, ...]:
        """What its times are worth, in words: of where the ranks sit, and of what they said at the last switch."""
        said = self.switches[-1].notes if self.switches else ()
        return tuple(dict.fromkeys([*self._ranks.notes, *said]))

    def __repr__(self) -> str:
        reason = f" ({self._reason})" if self._reason else ""
        of = f" of {self._until}" if self._until is not None else ""
        return f"<Run {self.id}: {self._state.value}{reason}, step {self.step}{of}, spec {self._spec.id}>"

    # -- what the user asks for -------------------------------------------------------------------------------------

    def apply(self, spec: Spec | None = None, **changes: Any) -> Ticket:
        """Another Spec from the next chunk on: `run.apply(sharding="shard_grad_op")`. Returns at once.

        Changes are made to what is pending, else to what is applied. A newer word replaces one that is still pending.

        Raises:
            SpecError: the Spec cannot be, or asks for other ranks, which takes a new run (`lab.run(world_size=...)`).
            ClusterError: the run is over.
        """
        with self._changed:
            if self._state.over or self._stop_s is not None:
                raise ClusterError(f"run {self.id} is {self._state.value}; start another one with lab.run")
            wanted = (spec or self._pending or self._spec).replace(**changes)
            for name in ("world_size", "devices"):
                if getattr(wanted, name) != getattr(self._spec, name):
                    raise SpecError(name, f"a run keeps its {self._spec.world_size} ranks and their devices",
                                    f"start a new run: lab.run(spec, {name}=...)")  # fmt: skip
            ticket = Ticket(wanted)
            self._pending = wanted
            self._tickets.append(ticket)
            self._changed.notify_all()
        return ticket

    def ledger(self) -> None:
        """Make the next step a ledger step: it measures memory by class and over time, and is left out of medians.

        Its events have `ledger` set and a `memory_curve`. The third step after each switch is one anyway.

        Raises:
            ClusterError: the run is over.
        """
        with self._changed:
            if self._state.over or self._stop_s is not None:
                raise ClusterError(f"run {self.id} is {self._state.value}; start another one with lab.run")
            self._ledger = True

    def take_turn(self) -> None:
        """Go on after standing aside; the ranks must be free."""
        with self._changed:
            self._is_aside = False
            self._changed.notify_all()

    def wait_aside(self, timeout_s: float | None = None) -> bool:
        """Blocks until its turn is over: it stands aside, or has ended. Returns whether that is so."""
        with self._changed:
            return self._changed.wait_for(lambda: self._is_aside or self._state.over, timeout_s)

    def pause(self) -> None:
        """Holds after the running chunk; parameters and optimizer state stay on the ranks."""
        with self._changed:
            self._paused = True
            self._changed.notify_all()

    def resume(self) -> None:
        with self._changed:
            self._paused = False
            self._changed.notify_all()

    def stop(self, timeout_s: float = STOP_S, reason: str = "") -> bool:
        """Ends the run: waits a moment for the chunk, then interrupts the step in progress, on all ranks alike.

        Returns whether it is over within `timeout_s`; with 0 it only leaves the word, as a widget's callback
        should. Ranks that do not even answer an interrupt are ended by their process ids after a while. Idempotent.
        """
        with self._changed:
            if not self._state.over and self._stop_s is None:
                self._stop_s, self._stop_reason = time.monotonic(), reason
                self._set(RunState.STOPPING, reason)
            self._changed.notify_all()
        return self._over.wait(timeout_s) if timeout_s > 0 else self.done

    def _given_up(self, blocking: bool) -> None:
        self.stop(STOP_S if blocking else 0, "interrupted")

    def _outcome(self) -> Run:
        if self._state is RunState.FAILED and self.error is not None:
            raise self.error
        return self

    # -- the driver ---------------------------------------------------------------------------------------------------

    def _drive(self) -> None:
        state, reason = RunState.FAILED, ""
        try:
            self._prepare(self._spec)
            self.environment = fingerprint(self._await(self._ranks.submit("status")))
            self._switch(self._spec, fresh=self._fresh)
            state, reason = self._train()
        except Interrupted:
            state, reason = RunState.STOPPED, self._why_stopped
        except BaseException as e:
            self.error, reason = e, e.sentence if isinstance(e, ClusterError) else str(e)
            if self._stop_s is not None and isinstance(e, ClusterError):
                state = RunState.STOPPED  # as was asked, though not in good order: the reason says so
        finally:
            self._finish(state, reason)

    def _train(self) -> tuple[RunState, str]:
        """Chunk after chunk, until something ends it."""
        while True:
            with self._changed:
                while self._paused and self._stop_s is None and self._pending is None:
                    self._set(RunState.PAUSED)
                    self._changed.wait()
                if self._stop_s is not None:
                    return RunState.STOPPED, self._stop_reason
                pending = self._pending
            if pending is not None:
                self._switch_or_refuse(pending)
                continue
            if self.steps is not None and self._done_steps >= self.steps:
                return RunState.FINISHED, ""
            if self._share is not None and self._turn_left == 0:
                self._stand_aside(self._share)
                continue
            with self._changed:
                if self._stop_s is None:
                    self._set(RunState.RUNNING)
            if self._chunk_of_steps():
                return RunState.STOPPED, self._why_stopped

    def _chunk_of_steps(self) -> bool:
        """One chunk on all ranks. Returns whether it was interrupted."""
        left = self._chunk if self.steps is None else min(self._chunk, self.steps - self._done_steps)
        left = left if self._share is None else min(left, self._turn_left)
        ledgers, checks = self._ledgers(left), self._checks(left)
        told = threading.Event()  # after that, what still arrives was in the return values
        results = self._await(
            self._ranks.submit(
                "train",
                take=lambda data: None if told.is_set() else self._take(data),
                steps=left,
                ledgers=ledgers,
                checks=checks,
            )
        )
        for result in results:
            self._keep(result["events"])
        told.set()
        trained = len(results[0]["events"])
        self._done_steps += trained
        self._turn_left -= trained
        self._step = int(results[0]["step"])
        times = [r["events"][-1]["step_time_s"] for r in results if r["events"]]
        if times:
            fits = round(CHUNK_S / max(max(times), 1e-6))
            self._chunk = max(1, min(fits, self._chunk * GROWTH, CHUNK_STEPS))
        return any(r["stopped"] for r in results)

    def _ledgers(self, count: int) -> list[int]:
        """Which of the next steps are to be ledger steps."""
        with self._changed:
            asked, self._ledger = self._ledger, False
        numbers = range(self._step, self._step + count)
        every = self.ledger_every
        return [n for n in numbers if (asked and n == self._step) or (every is not None and (n + 1) % every == 0)]

    def _checks(self, count: int) -> list[int]:
        """Which of the next steps are to tell a checksum of the parameters: after 1, 2, 4, 8, ... steps, and the last."""
        numbers = range(self._step, self._step + count)
        return [n for n in numbers if (n + 1).bit_count() == 1 or n + 1 == self._until]

    def _stand_aside(self, share: int) -> None:
        """What is trained waits on the host until `take_turn` or `stop`. Ranks that are new by then begin again."""
        self._await(self._ranks.submit("park"))
        with self._changed:
            self._is_aside = True
            if self._stop_s is None:
                self._set(RunState.PAUSED, "waits for its turn")
            while self._is_aside and self._stop_s is None:
                self._changed.wait()
            if self._stop_s is not None:
                return
            self._turn_left = share
        self._prepare(self._spec)
        told = self._await(self._ranks.submit("unpark", run=self.id))
        if told[0]["step"] is None:
            self._done_steps = 0
            self._switch(self._spec, fresh=True)

    def _await(self, call: Call) -> list[Any]:
        """The results of a call; while it lasts, a stop is heard and becomes an interrupt."""
        interrupts = 0
        while not call.wait(0.05):
            asked = self._stop_s
            if asked is None:
                continue
            waited = time.monotonic() - asked
            if waited > PATIENCE_S + interrupts * 1.0:
                interrupts += 1
                call.interrupt()
            if waited > DEAF_S:
                break
        return call.results(0 if call.pending and not call.failed else None)

    def _switch_or_refuse(self, spec: Spec) -> None:
        """A Spec that the ranks refuse leaves the run as it was."""
        try:
            self._switch(spec, fresh=False)
        except SpecError as e:
            with self._changed:
                self.refused = e
                if self._pending is spec:
                    self._pending = None
            self._settle(spec, None, e)

    def _switch(self, spec: Spec, *, fresh: bool) -> None:
        began = time.monotonic()
        before = self._spec if self.switches else None
        results = self._await(self._ranks.submit("apply", run=self.id, spec=spec.to_dict(), fresh=fresh))
        told = results[0]
        switch = Switch(
            step=int(told["step"]),
            before=before,
            after=spec,
            seconds=time.monotonic() - began,
            carried=bool(told["carried"]),
            notes=tuple(told.get("notes", ())),
        )
        if not switch.carried or before is None:
            self.events.restart(switch.step)
        with self._changed:
            self._step, self._chunk, self._spec = switch.step, 1, spec
            self._until = None if self.steps is None else switch.step + self.steps - self._done_steps
            self.switches.append(switch)
            if self._pending is spec:
                self._pending = None
        self._settle(spec, switch, None)

    def _settle(self, spec: Spec, switch: Switch | None, error: Exception | None) -> None:
        """Tells those who asked for `spec`, or for something that it replaced."""
        with self._changed:
            last = max((i for i, t in enumerate(self._tickets) if t.spec is spec), default=-1)
            settled, self._tickets = self._tickets[: last + 1], self._tickets[last + 1 :]
        for ticket in settled:
            ticket.settle(switch, error)

    @property
    def _why_stopped(self) -> str:
        return self._stop_reason if self._stop_s is not None else "interrupted"

    def _take(self, data: Mapping[str, Any]) -> None:
        """On the client's IO thread: what a rank published."""
        self._keep(data.get("events", ()))

    def _keep(self, events: Any) -> None:
        self.events.add((e for e in events if e["run"] == self.id), self._ranks.notes)

    def _set(self, state: RunState, reason: str = "") -> None:
        self._state, self._reason = state, reason
        self._changed.notify_all()

    def _finish(self, state: RunState, reason: str) -> None:
        with self._changed:
            self.ended_unix_s = time.time()
            self._pending = None
            tickets, self._tickets = self._tickets, []
            self._set(state, reason)
        for ticket in tickets:
            ticket.settle(None, None)
        self._end()


def _whole_number(name: str, value: int | None, none: str) -> None:
    """Raises SpecError for what is no count of steps; `none` says what None stands for."""
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise SpecError(name, f"{value!r} is refused", f"give a whole number of 1 or more, or None for {none}")
