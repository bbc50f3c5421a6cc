"""`Driver`: trains one run, chunk by chunk, on a thread of its own.

A chunk is a number of steps sized to about half a second. Between two chunks the driver carries out what was requested
meanwhile (stop, pause, another Spec, a checkpoint, a fault) and what is due (a checkpoint, an evaluation, a turn's end).

Note: threads. Around each run there are:

- The *driver's thread*, which executes `Driver.drive`. It alone sends work to the ranks until the run is over, and it alone
  writes the fields of `Driver`, `Progress`, `EarlyStopping`, `Recovery` and `CheckpointSchedule`, and what the run has done
  (its Spec, switches, incidents). It calls the callbacks in `on_best`, between two chunks.
- *Users' threads* (cells, widget callbacks), which call `Run`. A call leaves a request in `RunControl` and returns; only
  `wait`, `await` and `stop` with a timeout wait. They read the driver's fields one at a time, without a lock.
  `Run.fault_injected` sets `Recovery.injected_unix_s`.
- *ipyparallel's IO thread*, which calls `Driver._add_events` with what a rank published. `EventStore` has its own lock.

One lock, `RunControl.changed`, guards the state and the requests of `RunControl`, and those for checkpoints. The driver
holds it, too, while it changes the Spec, the step and the switches together. It waits for no rank with it held."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fsdp_lab.base.errors import FieldError, SpecError
from fsdp_lab.cluster import ClusterError, Interrupted, StartError
from fsdp_lab.cluster.calls import Call
from fsdp_lab.cluster.cluster import Cluster
from fsdp_lab.runs.control import RunControl
from fsdp_lab.runs.evaluation import EarlyStopping, Evaluation
from fsdp_lab.runs.recovery import LIVE, Recovery, RecoveryPolicy, path_on_ranks, refitted, source_of, whole_state
from fsdp_lab.runs.saving import CheckpointSchedule
from fsdp_lab.runs.view import Request, RunState, Switch, fingerprint
from fsdp_lab.spec.checkpoint_format import Checkpoint
from fsdp_lab.spec.faults import Fault, FaultKind
from fsdp_lab.spec.spec import Spec

CHUNK_S = 0.5  # target duration of a chunk
CHUNK_STEPS = 256
GROWTH = 4  # limit of a chunk's size relative to the last one: the first steps after a switch are not representative
PATIENCE_S = 0.15  # after a stop, for the chunk to end; then it is interrupted, and again every second
UNRESPONSIVE_S = 8.0  # after a stop, for ranks to answer an interrupt; then they are ended
SAVES_S = 60.0  # at a run's end, for its last checkpoint to be written
Take = Callable[[Mapping[str, Any]], None]  # takes what a rank published


class Progress:
    """Counts the steps of a run, and sizes its chunks.

    `steps`: to train in all; None: until stopped. `share`: steps of a turn; None: the run has the ranks to itself. `step`:
    number of the next step. `done`: steps trained. `turn_left`: steps left of the turn."""

    def __init__(self, steps: int | None, share: int | None, step: int) -> None:
        self.steps, self.share, self.step = steps, share, step
        self.done = 0
        self._chunk = 1
        self.turn_left = share or 0

    @property
    def until(self) -> int | None:
        """The step before which the run is finished; None: until stopped."""
        return None if self.steps is None else self.step + self.steps - self.done

    @property
    def finished(self) -> bool:
        return self.steps is not None and self.done >= self.steps

    @property
    def turn_over(self) -> bool:
        return self.share is not None and self.turn_left == 0

    def chunk(self) -> int:
        """The most steps of the next chunk."""
        left = self._chunk if self.steps is None else min(self._chunk, self.steps - self.done)
        return left if self.share is None else min(left, self.turn_left)

    def advance(self, trained: int, step: int, step_times_s: Sequence[float]) -> None:
        """A chunk of `trained` steps is over. `step_times_s`: of each rank's last step; the slowest sizes the next chunk."""
        self.done += trained
        self.turn_left -= trained
        self.step = step
        if step_times_s:
            fits = round(CHUNK_S / max(max(step_times_s), 1e-6))
            self._chunk = max(1, min(fits, self._chunk * GROWTH, CHUNK_STEPS))

    def switch(self, step: int) -> None:
        """Another Spec from `step` on: step times are unknown, so the next chunk is one step."""
        self.step, self._chunk = step, 1


class Driver:
    """Trains a run until it is over. Threads: see the module's note. `early_stopping`: takes the evaluations."""

    def __init__(
        self, run: RunControl, ranks: Cluster, prepare: Callable[[Spec], None], share: int | None, saved_by: str
    ) -> None:
        """`prepare`, `share`: as of `Run`. `saved_by`: the run whose checkpoints this one recovers from until it trains."""
        self.run, self.ranks = run, ranks
        self.progress = Progress(run.steps, share, 0)
        self.checkpoints = CheckpointSchedule(run.saving, run.id)
        self.recovery = Recovery(run.recovering, run.incidents)
        self.early_stopping = EarlyStopping(run.evaluate.patience if run.evaluate is not None else None)
        self._prepare, self._saved_by = prepare, saved_by
        self._metrics = run.evaluate.code if run.evaluate is not None else None

    @property
    def step(self) -> int:
        latest = self.run.events.latest()
        return max(self.progress.step, *(e.step + 1 for e in latest.values())) if latest else self.progress.step

    def drive(self, start: Checkpoint | None, fresh: bool, broken: RunControl | None, end: Callable[[], None]) -> None:
        """Trains until the run is over, then calls `end`. `start`, `fresh`, `broken`: as of `Run`."""
        state, reason, run = RunState.FAILED, "", self.run
        try:
            policy: RecoveryPolicy | None = None
            if broken is not None and broken.error is not None:
                self.recovery.add(broken.error, self.progress.step, run.spec.world_size)
                policy = run.recovering
            else:
                self._prepare(run.spec)
                run.environment = fingerprint(self.call("status"))
                if start is not None:
                    self.checkpoints.start = start.step
                    self._restore(run.spec, start)
                else:
                    self._apply(run.spec, "apply", fresh=fresh)
            state, reason = self._train_and_recover(policy)
            self._save_last_step()
        except Interrupted:
            state, reason = RunState.STOPPED, run.interrupt_reason
        except BaseException as e:
            words = e.words if isinstance(e, FieldError) else str(e)
            run.error, reason = e, e.sentence if isinstance(e, ClusterError) else words
            if run.stop_s is not None and isinstance(e, ClusterError):
                state = RunState.STOPPED  # as requested; the reason is how the ranks failed meanwhile
        finally:
            run.finish(state, reason)
            self.checkpoints.end()
            end()

    def _train_and_recover(self, policy: RecoveryPolicy | None) -> tuple[RunState, str]:
        """Trains until the run is over, and recovers from failures as the policy says. Returns final state and reason.
        `policy`: how to recover first, where the run continues a failed one."""
        run = self.run
        while True:
            try:
                if policy is not None:
                    self._recover(policy)
                return self._train()
            except Interrupted:
                raise
            except ClusterError as e:
                if not self.recovery.count_failure() or run.stop_s is not None:
                    raise
                self.recovery.add(e, self.step, run.spec.world_size)
                self.ranks.dispatcher.settle()
                self.recovery.update(freed_unix_s=time.time())
                policy = run.recovering if run.recovering.how == "auto" else run.wait_for_recovery(e)
                if policy is None:
                    raise

    def _train(self) -> tuple[RunState, str]:
        """Trains chunk by chunk. Returns final state and reason."""
        run, progress = self.run, self.progress
        while True:
            with run.changed:
                while run.paused and run.stop_s is None and not run.has_work:
                    if self.checkpoints.requested:
                        break
                    run.set_state(RunState.PAUSED)
                    run.changed.wait()
                if run.stop_s is not None:
                    return RunState.STOPPED, run.stop_reason
                pending = run.pending
                asked = run.asked.pop(0) if run.asked else None
            if asked is not None:
                self._answer(*asked)
                continue  # a pause goes on
            if pending is not None:
                self._switch_or_refuse(pending)
                continue
            if self.checkpoints.due(progress.step):
                self._save("step")
                continue
            if progress.finished:
                return RunState.FINISHED, ""
            if reason := self.early_stopping.reason:
                return RunState.STOPPED, reason
            if progress.turn_over or run.suspending:
                self._suspend()
                continue
            with run.changed:
                if run.stop_s is None:
                    run.set_state(RunState.RUNNING)
            if self._train_chunk():
                return RunState.STOPPED, run.interrupt_reason

    def _train_chunk(self) -> bool:
        """Trains one chunk on all ranks. Returns whether it was interrupted."""
        run, progress, evaluate, every = self.run, self.progress, self.run.evaluate, self.run.ledger_every
        begin, count = progress.step, progress.chunk()
        evaluations = evaluate.due(range(begin, begin + count), progress.until) if evaluate is not None else {}
        # A chunk ends with an evaluation, so that `on_best` finds the parameters of that step.
        count = min([count, self.checkpoints.steps_until_due(begin), *(n + 1 - begin for n in evaluations)])
        steps, attempt = range(begin, begin + count), run.events.attempt
        with run.changed:
            requested, run.ledger_wanted = run.ledger_wanted, False
        complete = threading.Event()  # what is published after that is in the results
        results = self.call(
            "train",
            take=lambda data: None if complete.is_set() else self._add_events(data.get("events", ()), attempt),
            steps=count,
            ledgers=[n for n in steps if (requested and n == begin) or (every is not None and (n + 1) % every == 0)],
            # The parameters are checksummed after 1, 2, 4, 8, ... steps, and after the last.
            checks=[n for n in steps if (n + 1).bit_count() == 1 or n + 1 == progress.until],
            evaluations=evaluations,
            **(evaluate.arguments if evaluate is not None and evaluations else {}),
        )
        for result in results:  # again, for lost messages
            self._add_events(result["events"], attempt)
        complete.set()
        self.checkpoints.written(results[0].get("saves", ()))
        first = results[0]["events"]
        if first:
            self.recovery.step_committed(first[0]["end_unix_s"])
        step_times_s = [r["events"][-1]["step_time_s"] for r in results if r["events"]]
        progress.advance(len(first), int(results[0]["step"]), step_times_s)
        interrupted = any(r["stopped"] for r in results)
        last = next((e for r in results for e in reversed(r["events"]) if e["eval_loss"] is not None), None)
        if last is not None:
            evaluation = Evaluation(last["step"], last["eval_loss"], last["eval_metrics"])
            if self.early_stopping.take(evaluation) and not interrupted:
                if self.checkpoints.config is not None:
                    self._save("best")
                for callback in run.on_best:
                    callback(evaluation)
        return interrupted

    def _add_events(self, events: Any, attempt: int) -> None:
        """Adds what ranks published. Called also on the client's IO thread, perhaps after the ranks have begun again."""
        self.run.events.add((e for e in events if e["run"] == self.run.id), self.ranks.notes, attempt=attempt)

    def _answer(self, request: Request[Any], call: Callable[[], Any]) -> None:
        """Settles a request by the call to the ranks. Where they refuse it, the run continues."""
        try:
            request.settle(call())
        except Exception as e:
            request.settle(e)
            if not isinstance(e, FieldError):
                raise

    def arm(self, fault: Fault | None) -> None:
        """Arms a fault on the ranks; None: disarms them."""
        if fault is None:
            self.call("disarm")
            return
        self.call("arm", fault=fault.to_dict())
        if fault.kind is not FaultKind.SLOW:  # a slow link makes nothing fail
            self.recovery.injected_unix_s = time.time()

    def _suspend(self) -> None:
        """Moves the training state to the host until `take_turn` or `stop`. Ranks that are new by then have lost it: a run
        that takes turns begins again, and another one has failed."""
        self._save_last_step()  # it may be stopped meanwhile, when the ranks hold another run's
        self.call("suspend")
        if not self.run.wait_for_turn():
            return
        self.progress.turn_left = self.progress.share or 0
        self._prepare(self.run.spec)
        self.ranks.delivery.provide(self.run.spec, self._metrics)  # other runs' code may be there instead
        if self.call("resume", run=self.run.id)[0]["step"] is None:
            if self.progress.share is None:
                self.call("unload")  # what the ranks hold is another run's
                raise ClusterError("its ranks were replaced while it was suspended, and its state was lost with them")
            self.progress.done = 0
            self._apply(self.run.spec, "apply", fresh=True)

    # -- calls to the ranks ----------------------------------------------------------------------------------------------

    def call(self, what: str, *, take: Take | None = None, **arguments: Any) -> list[Any]:
        """Calls all ranks and returns their results, in rank order. A stop meanwhile becomes an interrupt."""
        return self._results(self.ranks.submit(what, take=take, **arguments))

    def _results(self, call: Call) -> list[Any]:
        interrupts = 0
        while not call.wait(0.05):
            stop_s = self.run.stop_s
            if stop_s is None:
                continue
            waited_s = time.monotonic() - stop_s
            if waited_s > PATIENCE_S + interrupts * 1.0:
                interrupts += 1
                call.interrupt()
            if waited_s > UNRESPONSIVE_S:
                break
        return call.results(0 if call.pending and not call.failed else None)

    # -- another Spec ----------------------------------------------------------------------------------------------------

    def _switch_or_refuse(self, spec: Spec) -> None:
        """Applies `spec`; where the ranks refuse it, the run continues as it was."""
        try:
            if (spec.world_size, spec.devices) == (self.run.spec.world_size, self.run.spec.devices):
                self._apply(spec, "apply", fresh=False)
            else:
                self._resize(spec)
        except FieldError as e:
            with self.run.changed:
                self.run.refused = e
                self.run.clear_pending(spec)
            self.run.settle(spec, e)

    def _resize(self, spec: Spec) -> None:
        """Has other ranks train `spec`, from the state of those before, which write all of it first."""
        before = self.run.spec
        self.ranks.check_devices(spec.world_size, spec.devices)
        self._wait_for_saves()
        with whole_state(self.ranks, self.call("status")) as state:
            self._spread(state)  # a host whose ranks end has a part of it
            try:
                self._prepare(spec)
                self._restore(spec, state)
            except (FieldError, StartError) as e:
                if self.ranks.closed:
                    raise
                self._prepare(before)
                self._restore(before, state)
                if isinstance(e, FieldError):
                    raise
                hint = f"the run goes on with {before.world_size} ranks"
                raise SpecError("world_size", e.sentence, hint) from None
        self.checkpoints.start = self.progress.step

    def _restore(self, spec: Spec, checkpoint: Checkpoint) -> None:
        """Has the ranks train `spec` from a checkpoint."""
        self._spread(checkpoint)
        self._apply(spec, "restore", path=path_on_ranks(self.ranks, checkpoint.path))

    def _spread(self, checkpoint: Checkpoint) -> None:
        """Makes all hosts have its files, where they need not share folders."""
        if not self.ranks.local:
            path = path_on_ranks(self.ranks, checkpoint.path)
            self.call("spread", path=path, manifest=dict(checkpoint.manifest))

    def _apply(self, spec: Spec, what: str, **arguments: Any) -> None:
        """Has the ranks train `spec`, and records the switch. `what`: "restore" from a path, or "apply", with the parameters
        that they have, if those fit and it is not to be `fresh`."""
        began_s = time.monotonic()
        before = self.run.spec if self.run.switches else None
        self.ranks.delivery.provide(spec, self._metrics)
        required = {"evaluated": self.run.evaluate.samples, **self.run.evaluate.arguments} if self.run.evaluate else {}
        result = self.call(what, run=self.run.id, spec=spec.to_dict(), **required, **arguments)[0]
        step, carried, seconds = int(result["step"]), bool(result["carried"]), time.monotonic() - began_s
        config = self.checkpoints.config
        notes = (*result["notes"], *(config.notes(spec, result["parameters"]) if config is not None else ()))
        switch = Switch(step=step, before=before, after=spec, seconds=seconds, carried=carried, notes=notes)
        rewound = switch.step < self.step or (before is not None and before.world_size != spec.world_size)
        if not switch.carried or before is None or rewound:
            self.run.events.restart(switch.step)
            self.early_stopping.forget(switch.step)
        else:
            self.early_stopping.switched(before, spec)
        with self.run.changed:
            self.run.spec = spec
            self.progress.switch(switch.step)
            self.run.switches.append(switch)
            self.run.clear_pending(spec)
        self.run.settle(spec, switch)

    # -- checkpoints -----------------------------------------------------------------------------------------------------

    def _save(self, kind: str) -> None:
        """Takes a checkpoint, which the ranks write while training continues, also where it cannot be written."""
        config = self.checkpoints.config
        assert config is not None

        def save() -> list[Any]:
            call = self.ranks.submit("save", root=str(config.folder), kind=kind, last=config.last)
            # The last one is taken after a stop, which must not interrupt it.
            return call.results(SAVES_S) if kind == "last" else self._results(call)

        self.checkpoints.take(kind, self.progress.step, save)

    def _save_last_step(self) -> None:
        """Saves the last step, and waits until all checkpoints are written."""
        if self.checkpoints.config is None:
            return
        with self.run.changed:
            state = RunState.STOPPING if self.run.stop_s is not None else RunState.RUNNING
            self.run.set_state(state, "saves its last step")
        if not self.checkpoints.has(self.progress.step):
            self._save("last")
        self._wait_for_saves()

    def _wait_for_saves(self) -> None:
        deadline_s = time.monotonic() + SAVES_S
        while self.checkpoints.pending and time.monotonic() < deadline_s:
            results = self.ranks.submit("saves", wait_s=0.5).results()
            self.checkpoints.written([end for r in results for end in r["ended"]])

    # -- recovery --------------------------------------------------------------------------------------------------------

    def _recover(self, policy: RecoveryPolicy) -> None:
        """Makes the ranks ready to train again; see the note on sources in `fsdp_lab.runs.recovery`."""
        failure = self.recovery.incidents[-1].sentence
        with self.run.changed:
            self.run.set_state(RunState.RECOVERING, failure)
        statuses, failed_at = self.ranks.dispatcher.settle(), self.progress.step
        if self.recovery.incidents[-1].freed_unix_s is None:
            self.recovery.update(freed_unix_s=time.time())
        self.checkpoints.give_up(f"meanwhile {failure}")
        steps = {status["step"] for status in statuses.values()}
        whole = not self.ranks.lost and len(statuses) == self.run.spec.world_size
        if whole and len(steps) == 1 and steps != {None}:  # all hold the parameters of the same step
            self._apply(self.run.spec, "apply", fresh=False)
            self._recovered(LIVE, failed_at)
            return
        left = len(statuses) or self.run.spec.world_size
        spec, notes = refitted(self.run.spec, left) if policy.ranks == "fewer" else (self.run.spec, ())
        config = self.checkpoints.config
        folder = Path(config.folder) if config is not None else None
        saved_by = self.run.id if self.run.switches else self._saved_by
        with source_of(self.ranks, statuses, saved_by, folder) as (source, checkpoint):
            self._prepare(spec)
            if checkpoint is not None:
                self._restore(spec, checkpoint)
            else:
                self._apply(spec, "apply", fresh=True)
        self._recovered(source, failed_at, notes)

    def _recovered(self, source: str, failed_at: int, notes: tuple[str, ...] = ()) -> None:
        with self.run.changed:
            self.checkpoints.start = self.progress.step
            self.progress.done += self.progress.step - failed_at  # the steps up to there are trained again
        step, ranks = self.progress.step, self.run.spec.world_size
        self.recovery.update(source=source, resumed_step=step, resumed_ranks=ranks, notes=notes)
