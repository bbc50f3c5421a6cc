"""`Run`: one Spec being trained by resident ranks, until it has done its steps or is told to stop.

Each run has a driver, a thread of its own that is the only one to send work to the ranks (see the threads note in
`fsdp_lab.cluster.cluster`). It sends a chunk of steps sized to about half a second, collects, and then does what
was asked for meanwhile: stop, pause, or another Spec. What the user calls only leaves a word under the run's lock,
so a cell or a widget callback never waits for the ranks unless it asks to.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from fsdp_lab.cluster import Call, ClusterError, Interrupted, RankError
from fsdp_lab.core.checkpoint_format import Checkpoint
from fsdp_lab.core.errors import ArgumentError, FieldError, SpecError, check_whole
from fsdp_lab.core.faults import Fault, FaultKind
from fsdp_lab.core.spec import Spec
from fsdp_lab.models.check import unread_weights
from fsdp_lab.runs.awaited import Awaited
from fsdp_lab.runs.environment import fingerprint
from fsdp_lab.runs.evaluation import EarlyStopping, EvalConfig, Evaluation
from fsdp_lab.runs.queries import RunQueries
from fsdp_lab.runs.recovery import LIVE, Incident, RecoveryPolicy, refitted, source_of
from fsdp_lab.runs.saving import CheckpointConfig, CheckpointSchedule, SavedCheckpoint, SaveRequest
from fsdp_lab.runs.store import EventStore
from fsdp_lab.runs.view import RunState, Switch

CHUNK_S = 0.5  # between two looks at what was asked for
CHUNK_STEPS = 256
GROWTH = 4  # a chunk is at most this many times the last one: the first steps after a switch say little
PATIENCE_S = 0.15  # a stop waits this long for the chunk to end by itself, then interrupts
STOP_S = 2.0
DEAF_S = 8.0  # ranks that do not answer an interrupt for this long are ended
SAVES_S = 60.0  # at a run's end, for its last checkpoint to be written

T = TypeVar("T")


class SwitchRequest(Awaited[Switch]):
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

    @property
    def lost(self) -> Mapping[int, Any]:
        """Ranks that are gone."""
        ...

    def submit(
        self, what: str, *, take: Callable[[Mapping[str, Any]], None] | None = None, **arguments: Any
    ) -> Call: ...

    def settle(self) -> dict[int, Any]: ...

    def ask(self, what: str, ranks: Collection[int], **arguments: Any) -> dict[int, Any]: ...


class Run(RunQueries, Awaited["Run"]):
    """One training run. Made by `Lab.run`; starts at once.

    `run.wait()` and `await run` return the run when it has finished or was stopped, and raise its error when it failed.
    Ctrl-C in either stops the run in good order and is passed on; the kernel and the ranks stay as they are.

    Attributes:
        id: as in its events. spec: applied last; until then what was asked for. pending: asked for and not yet applied.
        state, reason, error: how it is; the reason in words, the exception of a failure.
        environment: where it trains (`fsdp_lab.runs.environment`); empty until its ranks have said who they are.
        events: its `EventStore`. switches: every Spec that was applied. refused: the last one that the ranks refused.
        steps: how many were asked for; None: until stopped. step: the next one.
        saving: where it is saved, if it is. saves: every checkpoint it took, and what came of it.
        recovering: what it does when its ranks fail. incidents: the failures that it went on from, or waits in.
        evaluate: how it is evaluated; None: not at all. judge: what was found.
        on_best: called on the driver between two chunks with each `Evaluation` that is the best until now: the ranks hold
            the parameters of that very step. What one raises fails the run.
    """

    def __init__(
        self,
        ranks: Ranks,
        spec: Spec,
        *,
        steps: int | None = None,
        fresh: bool = True,
        ledger_every: int | None = None,
        evaluate: EvalConfig | int | None = None,
        share: int | None = None,
        prepare: Callable[[Spec], None] = lambda spec: None,
        run_id: str | None = None,
        saving: CheckpointConfig | None = None,
        recovering: RecoveryPolicy | None = None,
        start: Checkpoint | None = None,
        broken: Run | None = None,
    ) -> None:
        """`prepare(spec)` is called on the driver before anything is sent: it sees to the right ranks. `share`: steps of a
        turn; after so many it is put aside until `take_turn`, and others may have the ranks. `start`: what it goes on from.
        `broken`: a run that failed; it goes on from what can be had of that one."""
        super().__init__()
        _whole_number("steps", steps, "no end")
        _whole_number("ledger_every", ledger_every, "only those that are asked for")
        self.id = run_id or secrets.token_hex(4)
        self.steps = steps
        self.ledger_every = ledger_every
        self.evaluate = EvalConfig.of(evaluate)
        self._check_evaluation(spec)
        self._judge = EarlyStopping(self.evaluate.patience if self.evaluate else None)
        self.on_best: list[Callable[[Evaluation], None]] = []
        self.events = EventStore()
        self.switches: list[Switch] = []
        self.saving = saving
        self._saves = CheckpointSchedule(saving, self.id, start.step if start is not None else 0)
        if saving is not None:
            self.on_best.append(lambda evaluation: self._save("best"))
        self.recovering, self.incidents = recovering or RecoveryPolicy(), list[Incident]()
        self.refused: FieldError | None = None
        self.error: BaseException | None = None
        self.environment: Mapping[str, Any] = {}
        self.started_unix_s = time.time()
        self.ended_unix_s: float | None = None
        self._ranks, self._prepare, self._fresh = ranks, prepare, fresh
        self._spec = spec
        self._state, self._reason = RunState.STARTING, ""
        self._changed = threading.Condition()  # guards the words below, _state and _reason
        self._pending: Spec | None = None
        self._tickets: list[SwitchRequest] = []
        self._start, self._broken = start, broken
        self._unread = ""  # which weights its values did not begin from
        self._word: RecoveryPolicy | None = None  # to go on after a failure
        self._struck_unix_s: float | None = None  # when a drill did what will be found
        self._vain = 0  # failures since the last step
        self._faults: list[Fault | None] = []  # to be armed; None: disarm
        self._paused = False
        self._ledger = False  # asked for and not yet sent
        self._share, self._turn_left, self._is_suspended = share, share or 0, False
        self._stop_s: float | None = None  # when a stop was asked for, on the monotonic clock
        self._stop_reason = ""
        self._step = broken.step if broken is not None else 0
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
    def judge(self) -> EarlyStopping:
        return self._judge

    @property
    def step(self) -> int:
        """Steps committed; the number of the next one."""
        latest = self.events.latest()
        return max(self._step, *(e.step + 1 for e in latest.values())) if latest else self._step

    @property
    def left(self) -> int | None:
        """Steps that are to be done; None: until it is stopped."""
        return None if self._until is None else self._until - self.step

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

    def apply(self, spec: Spec | None = None, **changes: Any) -> SwitchRequest:
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
            self._check_evaluation(wanted)
            ticket = SwitchRequest(wanted)
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

    def save(self) -> SaveRequest:
        """Take a checkpoint after the running chunk, in the folder of `saving`. Returns at once.

        Raises:
            ArgumentError: the run has no folder. ClusterError: it is over.
        """
        if self.saving is None:
            raise ArgumentError("save", "this run has no folder for checkpoints", "start it with lab.run(save=folder)")
        with self._changed:
            if self._state.over or self._stop_s is not None:
                raise ClusterError(f"run {self.id} is {self._state.value}; lab.save(folder) saves what the ranks hold")
            ticket = self._saves.ask()
            self._changed.notify_all()
        return ticket

    def recover(self, ranks: str | None = None) -> None:
        """Go on after a failure: "same" replaces the ranks that are lost, "fewer" goes on with those that are left; None as
        `recovering` says. Returns at once; `incidents` tells what came of it.

        Raises:
            SpecError: of `ranks`, or the strategy cannot be on so few. ClusterError: the run is not broken.
        """
        word = replace(self.recovering, ranks=ranks or self.recovering.ranks)
        if word.ranks == "fewer":
            refitted(self._spec, max(1, self._spec.world_size - len(self._ranks.lost)))
        with self._changed:
            if self._state is not RunState.BROKEN:
                raise ClusterError(
                    f"run {self.id} is {self._state.value}, and not broken; lab.recover() begins a new one"
                )
            self._word = word
            self._changed.notify_all()

    def arm(self, fault: Fault | None) -> None:
        """Let something go wrong on purpose from the next chunk on; None: nothing any more. Returns at once.

        Raises:
            ArgumentError: the ranks cannot have it. ClusterError: the run does not train.
        """
        with self._changed:
            if self._state not in (RunState.RUNNING, RunState.PAUSED):
                raise ClusterError(f"run {self.id} is {self._state.value}; nothing can go wrong in it")
            if fault is not None:
                fault.check(self._spec.world_size, self.step)
            self._faults.append(fault)
            self._changed.notify_all()

    def strike(self, unix_s: float) -> None:
        """What is found next was done on purpose, at this time."""
        self._struck_unix_s = unix_s

    def take_turn(self) -> None:
        """Continue a suspended run; the ranks must be free."""
        with self._changed:
            self._is_suspended = False
            self._changed.notify_all()

    def wait_suspended(self, timeout_s: float | None = None) -> bool:
        """Blocks until the run is suspended or has ended. Returns whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: self._is_suspended or self._state.over, timeout_s)

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
        return self._wait_over(timeout_s) if timeout_s > 0 else self.done

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
            if self._broken is None:
                self._begin()
            state, reason = self._train_on()
            self._save_the_end()
        except Interrupted:
            state, reason = RunState.STOPPED, self._why_stopped
        except BaseException as e:
            self.error, reason = e, e.sentence if isinstance(e, ClusterError) else str(e)
            if self._stop_s is not None and isinstance(e, ClusterError):
                state = RunState.STOPPED  # as was asked, though not in good order: the reason says so
        finally:
            self._finish(state, reason)

    def _begin(self) -> None:
        """The ranks are there and hold what is trained."""
        self._prepare(self._spec)
        self.environment = fingerprint(self._await(self._ranks.submit("status")))
        if self._start is not None:
            self._restore(self._spec, self._start)
        else:
            self._switch(self._spec, fresh=self._fresh)

    def _train_on(self) -> tuple[RunState, str]:
        """Trains until it is over; goes on after failures as it is told to."""
        how = self._after(self._broken) if self._broken is not None else None
        while True:
            try:
                if how is not None:
                    self._go_on(how)
                return self._train()
            except Interrupted:
                raise
            except ClusterError as e:
                if (how := self._how_to_go_on(e)) is None:
                    raise

    def _train(self) -> tuple[RunState, str]:
        """Chunk after chunk, until something ends it."""
        while True:
            with self._changed:
                while self._paused and self._stop_s is None and not self._asked:
                    self._set(RunState.PAUSED)
                    self._changed.wait()
                if self._stop_s is not None:
                    return RunState.STOPPED, self._stop_reason
                pending = self._pending
                faults, self._faults = self._faults, []
            for fault in faults:
                self._arm(fault)
            if pending is not None:
                self._switch_or_refuse(pending)
                continue
            if self._saves.due(self._step):
                self._save("step")
                continue
            if self.steps is not None and self._done_steps >= self.steps:
                return RunState.FINISHED, ""
            if enough := self._judge.reason:
                return RunState.STOPPED, enough
            if self._share is not None and self._turn_left == 0:
                self._suspend(self._share)
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
        evaluations = self._evaluations(left)
        left = min(
            [left, self._saves.until_due(self._step), *(n + 1 - self._step for n in evaluations)]
        )  # it ends with one, for `on_best`
        ledgers, checks, attempt = self._ledgers(left), self._checks(left), self.events.attempt
        told = threading.Event()  # after that, what still arrives was in the return values
        results = self._await(
            self._ranks.submit(
                "train",
                take=lambda data: None if told.is_set() else self._take(data, attempt),
                steps=left,
                ledgers=ledgers,
                checks=checks,
                evaluations=evaluations,
            )
        )
        for result in results:
            self._keep(result["events"], attempt)
        told.set()
        self._saves.note(results[0].get("saves", ()))
        trained = len(results[0]["events"])
        if trained:
            self._vain = 0
            self._note_resumed(results[0]["events"][0]["end_unix_s"])
        self._done_steps += trained
        self._turn_left -= trained
        self._step = int(results[0]["step"])
        times = [r["events"][-1]["step_time_s"] for r in results if r["events"]]
        if times:
            fits = round(CHUNK_S / max(max(times), 1e-6))
            self._chunk = max(1, min(fits, self._chunk * GROWTH, CHUNK_STEPS))
        stopped = any(r["stopped"] for r in results)
        self._take_evaluations(results, tell=not stopped)
        return stopped

    @property
    def _asked(self) -> bool:
        """Whether something is to be done that a pause does not keep from."""
        return self._pending is not None or self._saves.asked or bool(self._faults)

    def _arm(self, fault: Fault | None) -> None:
        if fault is None:
            self._await(self._ranks.submit("disarm"))
        else:
            self._await(self._ranks.submit("arm", fault=fault.to_dict()))
            if fault.kind is not FaultKind.SLOW:  # which fails nothing
                self._struck_unix_s = time.time()

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

    def _evaluations(self, count: int) -> dict[int, int]:
        """The first of the next steps after which is to be evaluated, with the number of samples; at most one."""
        if self.evaluate is None:
            return {}
        numbers = range(self._step, self._step + count)
        due = [n for n in numbers if (n + 1) % self.evaluate.every == 0 or n + 1 == self._until]
        return dict.fromkeys(due[:1], self.evaluate.samples)

    def _take_evaluations(self, results: Sequence[Mapping[str, Any]], *, tell: bool) -> None:
        told = {e["step"]: e["eval_loss"] for r in results for e in r["events"] if e["eval_loss"] is not None}
        for step, loss in told.items():
            if self._judge.take(step, loss) and tell:
                for call in self.on_best:
                    call(Evaluation(step, loss))

    def _check_evaluation(self, spec: Spec) -> None:
        """Raises SpecError where the Spec leaves nothing to evaluate on."""
        if self.evaluate is not None:
            self.evaluate.check(spec)

    # -- checkpoints --------------------------------------------------------------------------------------------------

    @property
    def saves(self) -> Sequence[SavedCheckpoint]:
        """The checkpoints it took, oldest first."""
        return self._saves.taken

    def _save(self, kind: str) -> None:
        """Take a checkpoint; it is written while training goes on. That it cannot be is noted, and ends nothing."""
        assert self.saving is not None
        with self._saves.taking(kind, self._step) as take:
            call = self._ranks.submit("save", root=str(self.saving.folder), kind=kind, last=self.saving.last)
            take(call.results(SAVES_S) if kind == "last" else self._await(call))  # at the end a stop is no news

    def _save_the_end(self) -> None:
        """The last step is saved, and what is being written is waited for."""
        if self.saving is None:
            return
        with self._changed:
            self._set(RunState.STOPPING if self._stop_s is not None else RunState.RUNNING, "saves its last step")
        if not self._saves.has(self._step):
            self._save("last")
        deadline = time.monotonic() + SAVES_S
        while self._saves.pending and time.monotonic() < deadline:
            told = self._ranks.submit("saves", wait_s=0.5).results()
            self._saves.note([end for t in told for end in t["ended"]])

    # -- after a failure ----------------------------------------------------------------------------------------------

    def _how_to_go_on(self, error: ClusterError) -> RecoveryPolicy | None:
        """What is to be done; None where the run is to end. Waits for a word where it has to be asked."""
        self._vain += 1
        policy = self.recovering
        if self._stop_s is not None or policy.how == "off" or (policy.how == "auto" and self._vain > policy.times):
            return None
        self._found(error, self.step)
        self._ranks.settle()
        self._note(freed_unix_s=time.time())
        if policy.how == "auto":
            return policy
        with self._changed:
            self.error = error
            self._set(RunState.BROKEN, error.sentence)
            self._changed.wait_for(lambda: self._word is not None or self._stop_s is not None)
            word, self._word = self._word, None
            self.error = None if word is not None else error
        return word

    def _after(self, former: Run) -> RecoveryPolicy:
        """What a run that failed leaves to this one."""
        self._found(former.error or ClusterError(former.reason), former.step)
        return self.recovering

    def _found(self, error: BaseException, step: int) -> None:
        said = getattr(error, "unix_s", None)  # when a rank raised, or when the kernel noticed
        raised = isinstance(error, RankError)
        self.incidents.append(
            Incident(
                error=error,
                step=step,
                ranks=self._spec.world_size,
                failed_unix_s=said if raised else self._struck_unix_s,
                detected_unix_s=time.time() if raised or said is None else said,
            )
        )
        self._struck_unix_s = None

    def _go_on(self, how: RecoveryPolicy) -> None:
        """See the note in `runs.recovery`."""
        sentence = self.incidents[-1].sentence
        with self._changed:
            self._set(RunState.RECOVERING, sentence)
        told, before = self._ranks.settle(), self._step
        if self.incidents[-1].freed_unix_s is None:
            self._note(freed_unix_s=time.time())
        self._saves.give_up(f"meanwhile {sentence}")
        whole = not self._ranks.lost and len({s["step"] for s in told.values()}) == 1
        if whole and len(told) == self._spec.world_size and told[0]["step"] is not None:
            self._switch(self._spec, fresh=False)
            self._gone_on(LIVE, before)
            return
        left = len(told) or self._spec.world_size
        spec, notes = refitted(self._spec, left) if how.ranks == "fewer" else (self._spec, ())
        folder = Path(self.saving.folder) if self.saving is not None else None
        former = self._broken.id if self._broken is not None and not self.switches else self.id
        with source_of(self._ranks, told, former, folder) as (source, saved):
            self._prepare(spec)
            if saved is not None:
                self._restore(spec, saved)
            else:
                self._switch(spec, fresh=True)
        self._gone_on(source, before, notes)

    def _gone_on(self, source: str, before: int, notes: tuple[str, ...] = ()) -> None:
        """It trains again: steps that have to be done again are not done."""
        with self._changed:
            self._saves.go_back(self._step)
            self._done_steps += self._step - before
            if self.steps is not None:
                self._until = self._step + self.steps - self._done_steps
        self._note(source=source, resumed_step=self._step, resumed_ranks=self._spec.world_size, notes=notes)

    def _note(self, **told: Any) -> None:
        self.incidents[-1] = replace(self.incidents[-1], **told)

    def _note_resumed(self, unix_s: float) -> None:
        if self.incidents and self.incidents[-1].resumed_unix_s is None:
            self._note(resumed_unix_s=unix_s)

    def _restore(self, spec: Spec, saved: Checkpoint) -> None:
        """What the ranks hold is the checkpoint's."""
        began = time.monotonic()
        before = self._spec if self.switches else None
        told = self._await(self._ranks.submit("restore", run=self.id, spec=spec.to_dict(), path=str(saved.path)))[0]
        self._switched(spec, before, told, time.monotonic() - began)

    def _suspend(self, share: int) -> None:
        """What is trained waits on the host until `take_turn` or `stop`. Ranks that are new by then begin again."""
        self._await(self._ranks.submit("suspend"))
        with self._changed:
            self._is_suspended = True
            if self._stop_s is None:
                self._set(RunState.PAUSED, "waits for its turn")
            while self._is_suspended and self._stop_s is None:
                self._changed.wait()
            if self._stop_s is not None:
                return
            self._turn_left = share
        self._prepare(self._spec)
        told = self._await(self._ranks.submit("resume", run=self.id))
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
        except FieldError as e:
            with self._changed:
                self.refused = e
                if self._pending is spec:
                    self._pending = None
            self._settle(spec, None, e)

    def _switch(self, spec: Spec, *, fresh: bool) -> None:
        began = time.monotonic()
        before = self._spec if self.switches else None
        evaluated = self.evaluate.samples if self.evaluate is not None else 0
        call = self._ranks.submit("apply", run=self.id, spec=spec.to_dict(), fresh=fresh, evaluated=evaluated)
        self._switched(spec, before, self._await(call)[0], time.monotonic() - began)

    def _switched(self, spec: Spec, before: Spec | None, told: Mapping[str, Any], seconds: float) -> None:
        """The ranks train `spec` from the next chunk on."""
        if not told["carried"]:
            self._unread = unread_weights(spec.workload)
        switch = Switch(
            step=int(told["step"]),
            before=before,
            after=spec,
            seconds=seconds,
            carried=bool(told["carried"]),
            notes=(*told.get("notes", ()), *filter(None, [self._unread])),
        )
        again = switch.step < self.step or (before is not None and before.world_size != spec.world_size)
        if not switch.carried or before is None or again:
            self.events.restart(switch.step)
            self._judge.forget(switch.step)
        else:
            self._judge.switched(before, spec)
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

    def _take(self, data: Mapping[str, Any], attempt: int) -> None:
        """On the client's IO thread: what a rank published. A message may arrive after the ranks have begun again."""
        self._keep(data.get("events", ()), attempt)

    def _keep(self, events: Any, attempt: int) -> None:
        self.events.add((e for e in events if e["run"] == self.id), self._ranks.notes, attempt=attempt)

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
        self._saves.end()
        self._end()


def _whole_number(name: str, value: int | None, none: str) -> None:
    """Raises ArgumentError for what is no count of steps; `none` says what None stands for."""
    if value is not None:
        check_whole(name, value, wanted=f"a whole number of 1 or more, or None for {none}")
