"""`Run`: the training of a Spec on resident ranks, until its steps are done or it is stopped; and `Drill`, a fault in it.

The work is done by its `Driver` on a thread of its own (threads: see the note in `fsdp_lab.runs.driver`). A user's call
leaves a request in `RunControl`, so a cell or a widget callback waits for the ranks only in `wait`, `await`, or `stop` with
a timeout."""

import asyncio
import os
import threading
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Self

from fsdp_lab.base.errors import ArgumentError, Cause, FieldError, SentenceError, SpecError
from fsdp_lab.base.generation import Prompt, Sampling, checked_prompts
from fsdp_lab.cluster import ClusterError
from fsdp_lab.cluster.cluster import Cluster
from fsdp_lab.cluster.sent_code import with_code
from fsdp_lab.planner.questions import require_memory
from fsdp_lab.runs.comparison import NONE, figure_cells
from fsdp_lab.runs.control import RunControl, SwitchRequest
from fsdp_lab.runs.driver import Driver
from fsdp_lab.runs.evaluation import EarlyStopping, generated
from fsdp_lab.runs.recovery import Incident, refitted
from fsdp_lab.runs.saving import CheckpointConfig, SavedCheckpoint
from fsdp_lab.runs.steps import last_stretch
from fsdp_lab.runs.summary import figures
from fsdp_lab.runs.view import Awaited, Request, RunQueries, RunState
from fsdp_lab.spec.checkpoint_format import Checkpoint
from fsdp_lab.spec.faults import Fault
from fsdp_lab.spec.spec import Spec

STOP_S = 2.0
POLL_S = 0.02
LINE = ("loss", "step time", "tokens/s", "FLOPS", "peak/rank", "exposed")
RECENT_STEPS = 100


class Run(RunControl, RunQueries, Awaited["Run"]):
    """One training run. Made by `Lab.run`; starts at once; its text ends with the Spec's id. Attributes: see `RunControl`.

    `run.wait()` and `await run` return the run when it is finished or stopped, and raise its error when it failed. Ctrl-C in
    either stops the run after its chunk, which is the steps of about half a second, and is raised again."""

    def __init__(
        self,
        ranks: Cluster,
        spec: Spec,
        *,
        fresh: bool = True,
        share: int | None = None,
        prepare: Callable[[Spec], None] = lambda spec: None,
        start: Checkpoint | None = None,
        broken: Self | None = None,
        name: str = "",
        note: str = "",
        **options: Any,
    ) -> None:
        """`share`: steps of a turn, after which the run is suspended until `take_turn` and others may use the ranks.
        `prepare`: called on the driver's thread before anything is sent: makes the ranks ready for a Spec. `start`: the
        checkpoint to start from. `broken`: a failed run to continue. `name`, `note`: see `rename`.
        `options`: of `RunControl`, as of `Lab.run`."""
        Awaited.__init__(self)
        RunControl.__init__(self, spec, **options)
        self.rename(name)
        self.annotate(note)
        self._resumed = () if start is None else (start.resumed(spec),)
        self._driver = Driver(self, ranks, prepare, share, self.id if broken is None else broken.id)
        if broken is not None:
            self._driver.progress.step = broken.step
        arguments = (start, fresh, broken, self._end)
        threading.Thread(target=self._driver.drive, args=arguments, name=f"fsdp_lab-run-{self.id}", daemon=True).start()

    @property
    def cause(self) -> Cause | None:
        """The cause of its error, where it is a known one."""
        return self.error.cause if isinstance(self.error, SentenceError) else None

    @property
    def details(self) -> str:
        """More lines on the error, such as a rank's stack; empty where there are none."""
        return self.error.details if isinstance(self.error, ClusterError) else ""

    @property
    def early_stopping(self) -> EarlyStopping:
        return self._driver.early_stopping

    @property
    def saves(self) -> Sequence[SavedCheckpoint]:
        """The checkpoints that the run took, oldest first, with those that were deleted in favour of newer ones."""
        return self._driver.checkpoints.taken

    @property
    def step(self) -> int:
        """Steps committed, which is the number of the next step."""
        return self._driver.step

    @property
    def left(self) -> int | None:
        """Steps left to train; None: until stopped."""
        until = self._driver.progress.until
        return None if until is None else until - self.step

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks on what it resumed, on placement, on how far to trust the times, on what is saved, and on trackers."""
        switched = self.switches[-1].notes if self.switches else ()
        return tuple(dict.fromkeys([*self._resumed, *self._driver.ranks.notes, *switched, *self.reporter.notes]))

    @property
    def line(self) -> str:
        """Its step and state, with figures of the newest steps, in one line, at a cost that does not grow with the run."""
        texts = figure_cells(figures(last_stretch(self.events.last_steps(RECENT_STEPS), self.spec)))
        shown = [self.state.value, *(f"{name} {texts[name]}" for name in LINE if texts[name] != NONE)]
        evaluations, until = self.early_stopping.words(self.spec.workload), self._driver.progress.until
        of = f" of {until}" if until is not None else ""
        return f"step {self.step}{of}: {', '.join(filter(None, (*shown, evaluations)))}"

    def __repr__(self) -> str:
        reason = f" ({self.reason})" if self.reason else ""
        until = self._driver.progress.until
        of = f" of {until}" if until is not None else ""
        name = f" {self.name!r}" if self.name else ""
        return f"<Run {self.id}{name}: {self.state.value}{reason}, step {self.step}{of}, spec {self.spec.id}>"

    def apply(self, spec: Spec | None = None, *, anyway: bool = False, **changes: Any) -> SwitchRequest:
        """Trains another Spec from the next chunk on: `run.apply(sharding="shard_grad_op")`. Returns at once.

        Another `world_size`, or other `devices`, take some seconds: ranks are started or ended, and all join anew with the
        parameters, the optimizer state and the position in the data that the run has. A step has `micro_batch` samples of
        each rank, as before.

        Changes are made to the pending Spec, else to the applied one. A newer request replaces a pending one.

        Raises SpecError: an invalid Spec, or more ranks than a given cluster has engines, or, without `anyway`, more memory
        than there is, as the planner knows. ClusterError: the run is over."""
        with self.changing():
            self._require_live("start another one with lab.run")
            base = spec or self.pending or self.spec
            if changes.get("world_size", base.world_size) != base.world_size:
                changes.setdefault("devices", None)  # a list for another number of ranks
            wanted = base.replace(**with_code(changes))
            self._check_ranks(wanted)
            if self.evaluate is not None:
                self.evaluate.check(wanted)
            if not anyway:
                require_memory(wanted, self._driver.ranks.memory, "lab.current.apply", former=self.spec)
            self.pending = wanted
            self.switch_requests.append(request := SwitchRequest(wanted))
            return request

    def ledger(self) -> None:
        """Makes the next step a ledger step, as the third after each switch is: it measures memory by class and over time,
        and is left out of medians. Its events have `ledger` set and a `memory_curve`. Raises ClusterError: the run is over.
        """
        with self.changing():
            self._require_live("start another one with lab.run")
            self.ledger_wanted = True

    def save(self, folder: str | os.PathLike[str] | None = None) -> Request[Checkpoint]:
        """Takes a checkpoint after the running chunk. Returns at once; waiting is optional. `folder`: for this and all later
        checkpoints of the run; None: that of `saving`. Raises ArgumentError without a folder, ClusterError if it is over."""
        config = self.saving
        if folder is not None:
            config = CheckpointConfig(folder=folder) if config is None else replace(config, folder=folder)
        if config is None:
            raise ArgumentError("save", "this run has no folder for checkpoints", "give one: run.save(folder)")
        with self.changing():
            self._require_live("lab.save(folder) saves what the ranks hold")
            self.saving = config
            return self._driver.checkpoints.request(config)

    def generate(self, prompts: Prompt | Sequence[Prompt], **sampling: Any) -> Request[list[str]]:
        """Has the model continue texts or chats, after the running chunk: `await run.generate("Once")`. Returns at once.

        The result is a list, a text for each prompt. `Run.completions` has what an evaluation with prompts generated.

        `sampling`: fields of `Sampling`: new_tokens, temperature, top_k, top_p, seed. Raises ArgumentError: of a prompt, or
        of `sampling`. ClusterError: the run is over."""
        given, wanted = checked_prompts(prompts), Sampling(**sampling)
        with self.changing():
            self._require_live("lab.generate(text) asks what the ranks hold")
            request = Request[list[str]]()
            self.asked.append((request, partial(generated, self._driver.call, self.id, given, wanted)))
            return request

    def recover(self, ranks: str | None = None) -> None:
        """Recovers from a failure: "same" replaces the lost ranks, "fewer" continues with those that are left; None: as
        `recovering` says. Returns at once; the result is in `incidents`. Raises SpecError: of `ranks`, or a strategy
        that is impossible on so few. ClusterError: the run is not broken."""
        policy = replace(self.recovering, ranks=ranks or self.recovering.ranks)
        if policy.ranks == "fewer":
            refitted(self.spec, max(1, self.spec.world_size - len(self._driver.ranks.lost)))
        with self.changing():
            if self.state is not RunState.BROKEN:
                raise ClusterError(f"run {self.id} is {self.state.value}, not broken; lab.recover() begins a new one")
            self.recovery = policy

    def arm(self, fault: Fault | None) -> Request[None]:
        """Injects a fault from the next chunk on; None: disarms those that are armed. Returns at once; waiting is optional.
        Raises ArgumentError: a fault that these ranks cannot have. ClusterError: the run does not train."""
        with self.changing():
            if self.state not in (RunState.RUNNING, RunState.PAUSED):
                raise ClusterError(f"run {self.id} is {self.state.value}; a fault can be armed only while it trains")
            if fault is not None:
                fault.check(self.spec.world_size, self.step)
            self.asked.append((request := Request[None](), partial(self._driver.arm, fault)))
        return request

    def fault_injected(self, unix_s: float) -> None:
        """The next failure to be detected was injected at this time."""
        self._driver.recovery.injected_unix_s = unix_s

    def suspend(self) -> None:
        """Suspends the run after its chunk, or its pause: its state goes to the host, and others may use the ranks until
        `take_turn`."""
        with self.changing():
            self.suspending = True

    def take_turn(self) -> None:
        """Continues a suspended run; the ranks must be free."""
        with self.changing():
            self.suspending = self.suspended = False

    def wait_suspended(self, timeout_s: float | None = None) -> bool:
        """Blocks until the run is suspended or over, or for `timeout_s`. Returns whether it is either."""
        with self.changed:
            return self.changed.wait_for(lambda: self.suspended or self.state.over, timeout_s)

    def pause(self) -> None:
        """Holds after the running chunk; parameters and optimizer state stay on the ranks."""
        with self.changing():
            self.paused = True

    def resume(self) -> None:
        """Ends a pause."""
        with self.changing():
            self.paused = False

    def stop(self, timeout_s: float = STOP_S, reason: str = "") -> bool:
        """Ends the run: waits a moment for the chunk, then interrupts the step in progress, on all ranks alike, and
        later ends ranks that do not answer. Returns whether it is over within `timeout_s`; 0 only leaves the request."""
        self.request_stop(reason)
        return self._wait_over(timeout_s) if timeout_s > 0 else self.done

    def _check_ranks(self, wanted: Spec) -> None:
        """Raises SpecError for a change of the ranks that cannot be made."""
        if (wanted.world_size, wanted.devices) == (self.spec.world_size, self.spec.devices):
            return
        most = self._driver.ranks.most_ranks
        if most is not None and wanted.world_size > most:
            reason = f"{wanted.world_size} ranks are more than the {most} that there is room for"
            hint = "take fewer, or start more engines of a cluster of yours"
            raise SpecError("world_size", reason, hint, {"world_size": most})
        if self._driver.progress.share is not None:
            hint = "give compare a list: world_size=[2, 4]"
            raise SpecError("world_size", "runs that take turns keep their ranks", hint)

    def _require_live(self, hint: str) -> None:
        """Raises ClusterError where the run is over or stopping. Hold the lock."""
        if self.ending:
            raise ClusterError(f"run {self.id} is {self.state.value}; {hint}")

    def _given_up(self, blocking: bool) -> None:
        self.stop(STOP_S if blocking else 0, "interrupted")

    def _outcome(self) -> Self:
        if self.state is RunState.FAILED and self.error is not None:
            raise self.error
        return self


class Drill:
    """A fault injected by `Lab.drill`. `wait()` or `await` it for the Incident, once the run trains again. `kind`,
    `rank`, `run`: which fault, in which rank of which run. `made_unix_s`: when. `step`: steps committed by then.
    `request`: for the ranks to arm it; None: it is a signal."""

    def __init__(self, kind: str, rank: int, run: Run) -> None:
        self.kind, self.rank, self.run = kind, rank, run
        self.made_unix_s, self.step = time.time(), run.step
        self.request: Request[None] | None = None
        self._before = len(run.incidents)

    @property
    def incident(self) -> Incident | None:
        """The failure as it was detected; None: not yet."""
        return next(iter(self.run.incidents[self._before :]), None)

    @property
    def refused(self) -> FieldError | None:
        """The error of ranks that cannot have this fault, as a slow link over NCCL; the run continues. None: they can, or it
        is not known yet."""
        error = self.request.error if self.request is not None else None
        return error if isinstance(error, FieldError) else None

    @property
    def over(self) -> bool:
        """Tells whether the run trains again or is over, or the ranks refused the fault. It is not over while the run is
        BROKEN, waiting for `recover`."""
        incident = self.incident
        if self.run.done or self.refused is not None:
            return True
        if self.kind == "slow":
            return self.request is None or self.request.done
        return incident is not None and incident.resumed_unix_s is not None

    def wait(self, timeout_s: float | None = None) -> Incident | None:
        """Blocks until it is over. Returns the incident; None for a slow link, which makes nothing fail. Raises: the run's
        error, where it did not recover; `refused`; TimeoutError after `timeout_s`."""
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while not self.over:
            if deadline_s is not None and time.monotonic() > deadline_s:
                raise TimeoutError(f"{self!r} was not over after {timeout_s} s")
            time.sleep(POLL_S)
        incident = self.incident
        if self.refused is not None:
            raise self.refused
        if incident is not None and incident.resumed_unix_s is None and self.run.error is not None:
            raise self.run.error
        if incident is None and self.run.done and self.kind != "slow":
            raise self.run.error or ClusterError(f"{self.run!r} ended before anything failed")
        return incident

    def __await__(self) -> Generator[Any, None, Incident | None]:
        return asyncio.to_thread(self.wait).__await__()

    def end(self) -> None:
        """Restores a slow link, from the next chunk on."""
        self.run.arm(None)

    def __repr__(self) -> str:
        effect = self.incident.words if self.incident is not None else str(self.refused or "no failure detected yet")
        return f"<Drill: {self.kind} of rank {self.rank} at step {self.step}: {effect}>"
