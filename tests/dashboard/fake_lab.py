"""A lab without processes: plausible events from a thread, so that the dashboard can be tested and looked at by itself.

It has the members of `fsdp_lab.lab.Lab` and `Run` that the dashboard uses, and nothing behind them."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fsdp_lab.base.errors import ArgumentError, SpecError
from fsdp_lab.base.events import Memory, MemorySample, RoleBytes, StepEvent, Track, Traffic
from fsdp_lab.base.generation import Sampling
from fsdp_lab.cluster import ClusterError, RankLost
from fsdp_lab.dashboard.lab_like import active_run
from fsdp_lab.runs import EventStore, Refusal, RunState, SlowMotion, Sweep, Switch, SwitchRequest
from fsdp_lab.runs.diagnosis import Diagnosis
from fsdp_lab.runs.evaluation import EarlyStopping, EvalConfig, Evaluation
from fsdp_lab.runs.recovery import CHECKPOINT, Incident, RecoveryPolicy, refitted
from fsdp_lab.runs.saving import CheckpointConfig, SavedCheckpoint
from fsdp_lab.runs.sweep import combine
from fsdp_lab.runs.view import Request, RunQueries
from fsdp_lab.spec.spec import Spec
from tests.frames import Model, Step
from tests.traces import traced

PARAMETERS = {"gpt2-1m": 1_100_000, "gpt2-10m": 10_600_000, "gpt2-124m": 124_000_000}
MIB = 1 << 20
TRACED_EVERY = 5  # steps
BLOCKS = {"gpt2-1m": 4, "gpt2-10m": 12, "gpt2-124m": 12}


def event(spec: Spec, run: str, rank: int, step: int, *, first: bool = False, seed: int = 0) -> StepEvent:
    """One plausible event of `spec`; the same arguments give the same event but for its time."""
    chance = random.Random((seed, rank, step).__repr__())
    s, w, world = spec.strategy, spec.workload, spec.world_size
    name = w.model if isinstance(w.model, str) else "gpt2-10m"
    n = PARAMETERS.get(name, 10_600_000)
    half = 0.5 if s.precision != "fp32" else 1.0
    shards = spec.shard_factor
    kept = 1 if s.sharding in ("no_shard", "shard_grad_op", "hybrid_shard_zero2") else shards
    parameters, gradients, optimizer = 4 * n // shards, 4 * n // shards, 8 * n // shards
    host = 0
    if s.offload == "optimizer":
        host, gradients, optimizer = gradients + optimizer, 0, 0
    elif s.offload == "all":
        host, parameters, gradients, optimizer = parameters + gradients + optimizer, 0, 0, 0
    tokens = w.micro_batch * w.accumulate * w.seq_len
    working = int((40_000 * tokens / w.accumulate * (0.4 if s.recompute == "full" else 1) + 4 * n / kept * 0.4) * half)
    working = int(working * (1 + 0.03 * chance.random() + 0.05 * rank / world))
    flops, speed = 6 * n * tokens, 45e9 * (1.4 if half < 1 else 1) * (1 + 0.05 * math.sin(rank))
    payload, per_s = 4 * n * half, 1.2e9 / world
    comm = {"control": Traffic(calls=1, link_bytes=4, seconds=0.0004)}
    ring = (world - 1) / world
    if s.sharding == "no_shard":
        comm["all_reduce"] = Traffic(calls=5, link_bytes=int(2 * ring * payload), seconds=2 * ring * payload / per_s)
    else:
        gathers = 1 if s.sharding in ("shard_grad_op", "hybrid_shard_zero2") else 2
        comm["all_gather"] = Traffic(
            calls=6 * gathers, link_bytes=int(gathers * ring * payload), seconds=gathers * ring * payload / per_s
        )
        comm["reduce_scatter"] = Traffic(calls=6, link_bytes=int(ring * payload), seconds=ring * payload / per_s)
    noise = 1 + 0.12 * chance.random() + (0.05 if rank % 2 else 0)
    comm = {k: Traffic(calls=t.calls, link_bytes=t.link_bytes, seconds=t.seconds * noise,
                       exposed_seconds=0.3 * t.seconds * noise) for k, t in comm.items()}  # fmt: skip
    step_time = (flops / speed + 0.3 * sum(t.seconds for t in comm.values())) * noise
    step_time *= 1.5 if s.offload != "none" else 1.0
    if first:
        step_time *= 6
        comm = {k: Traffic(calls=t.calls, link_bytes=t.link_bytes, seconds=t.seconds * 4) for k, t in comm.items()}
    peak = RoleBytes(
        parameters_bytes=parameters, optimizer_bytes=optimizer, gradients_bytes=gradients // 2,
        unsharded_bytes=working // 4, activations_bytes=working // 2, communication_bytes=working // 8, other_bytes=MIB // 8,
    )  # fmt: skip
    spans, begin_s = (), 0.0
    if step % TRACED_EVERY == TRACED_EVERY - 1:
        about_s = flops / 45e9 + 0.3 * sum(t.seconds / noise for t in comm.values())  # the same for all ranks
        about_s = round(about_s * (1 + 0.05 * math.sin(step)), 6)
        trace = traced(world, blocks=BLOCKS.get(name, 12), ordinal=1000 * step, step_time_s=about_s)[rank]
        step_time, spans, begin_s = trace.step_time_s, trace.spans, trace.begin_s + step
        waits = {k: sum(s.seconds for s in spans if s.track is Track.WAIT and s.name == k) for k in comm}
        comm = {k: dataclasses.replace(t, exposed_seconds=waits[k]) for k, t in comm.items()}
    loss = 2.1 + 3.9 * math.exp(-step / 160) + 0.05 * chance.random()
    return StepEvent(
        run=run, spec_id=spec.id, rank=rank, world_size=world, step=step, samples=(step + 1) * spec.global_batch,
        end_unix_s=time.time(), step_time_s=step_time, tokens=tokens, loss=loss, mean_loss=loss,
        grad_norm=0.4 + chance.random() / 5, flops=flops, peak_flops_per_s=110e9, peak_source="measured, 512 x 512 fp32",
        memory=Memory(
            parameters_bytes=parameters, gradients_bytes=gradients, optimizer_bytes=optimizer, host_bytes=host,
            at_peak=peak, peak_bytes=peak.total_bytes, allocated_bytes=parameters + optimizer,
            outside_bytes=900 * MIB, limit_bytes=64 << 30, rss_bytes=900 * MIB,
        ),
        memory_curve=curve(peak, step_time) if step % 50 == 10 else (),
        begin_s=begin_s, clock_error_s=0.00012, spans=spans, comm=comm, first_after_switch=first, ledger=step % 50 == 10,
        notes=("CPU and Gloo: the shapes are right, the times are not a GPU's.",),
    )  # fmt: skip


def on_host(e: StepEvent, hosts: int) -> StepEvent:
    """The event as of a rank on one of so many hosts, whose links are slower than those inside."""
    each = e.world_size // hosts
    sent = sum(t.link_bytes for t in e.comm.values())
    across = round(sent * (e.world_size - each) / (e.world_size - 1))
    return dataclasses.replace(
        e, host=f"gpu{e.rank // each + 1}", across_bytes=across, across_s=sum(t.seconds for t in e.comm.values())
    )


def curve(peak: RoleBytes, seconds: float) -> tuple[MemorySample, ...]:
    """Six units, there and back; activations come and go, gradients come."""
    units = ["root", *(f"h.{i}" for i in range(6))]
    way = [("begin", "root", 0.0), *(("forward", u, i / 6) for i, u in enumerate(units)),
           *(("backward", u, 1 - i / 6) for i, u in enumerate(units[::-1])), ("update", "root", 0.0)]  # fmt: skip
    return tuple(
        MemorySample(at_s=seconds * i / len(way), phase=phase, unit=unit, moment="begin", classes=dataclasses.replace(
            peak, activations_bytes=int(share * peak.activations_bytes),
            gradients_bytes=int((1 - share) * peak.gradients_bytes) if phase == "backward" else 0))
        for i, (phase, unit, share) in enumerate(way)
    )  # fmt: skip


class FakeText(Request[list[str]]):
    """A text that was asked for."""

    def __init__(self, prompts: tuple[str, ...], sampling: Sampling) -> None:
        super().__init__()
        self.prompts, self.sampling = prompts, sampling


class FakeRun:
    """Makes a step of all ranks every `step_s` in a thread. With a `share` it stands aside after so many, as in a sweep."""

    diagnoses: tuple[Diagnosis, ...] = ()
    audit = RunQueries.audit
    findings = None
    name = note = ""

    def __init__(self, run_id: str, spec: Spec, *, steps: int | None, step_s: float, share: int | None = None,
                 before_step: Callable[[FakeRun], None] = lambda run: None, hosts: int = 1) -> None:  # fmt: skip
        self.id, self._hosts = run_id, hosts
        self._before_step, self.spec = before_step, spec
        self.pending: Spec | None = None
        self.state, self.reason = RunState.STARTING, ""
        self.error: BaseException | None = None
        self.details = ""
        self.notes = ("CPU and Gloo: the shapes are right, the times are not a GPU's.",)
        self.started_unix_s, self.ended_unix_s = time.time(), None
        self.environment: dict[str, Any] = {}
        self.fails_at: int | None = None  # a step
        self._share, self._turn = share, share or 0
        self._aside = threading.Event()
        self.events = EventStore()
        self.switches: list[Switch] = []
        self.applies: list[dict[str, Any]] = []
        self.asked_ledgers = 0
        self.texts: list[FakeText] = []  # that were asked for
        self.saving: CheckpointConfig | None = None
        self.recovering = RecoveryPolicy()
        self.evaluate: EvalConfig | None = None
        self.early_stopping = EarlyStopping()
        self.saves: list[SavedCheckpoint] = []
        self.incidents: list[Incident] = []
        self._failure: ClusterError | None = None  # that is about to be noticed
        self._word: str | None = None
        self._told = threading.Event()  # to go on, or to stop
        self.refuses = ""  # the name of a field that these ranks refuse to change
        self._tickets: list[SwitchRequest] = []
        self._steps, self._step_s = steps, step_s
        self._halt, self._go = threading.Event(), threading.Event()
        self._go.set()
        self._thread = threading.Thread(target=self._train, name=f"fake-{run_id}", daemon=True)
        self._thread.start()

    def apply(self, spec: Spec | None = None, **changes: Any) -> SwitchRequest:
        wanted = (spec or self.pending or self.spec).replace(**changes)
        self.applies.append(self.spec.difference(wanted))
        ticket = SwitchRequest(wanted)
        self._tickets.append(ticket)
        self.pending = wanted
        return ticket

    def ledger(self) -> None:
        self.asked_ledgers += 1

    def generate(self, prompts: str, **sampling: Any) -> Request[list[str]]:
        self.texts.append(FakeText((prompts,), Sampling(**sampling)))
        return self.texts[-1]

    def save(self, folder: str) -> Any:
        """A checkpoint that is there."""
        self.saving = CheckpointConfig(folder=folder)
        path = self.saving.folder / f"step-{self.step:08d}-abcdef"
        told = {"stall_s": 0.012, "waited_s": 0.0, "nbytes": 13 * MIB, "seconds": 0.34}
        self.saves.append(SavedCheckpoint(step=self.step, kind="step", path=path, **told))
        made = SimpleNamespace(step=self.step, path=path)
        return SimpleNamespace(done=True, wait=lambda timeout=None: made)

    def lose(self, rank: int) -> None:
        """Its ranks notice at once that this one is gone."""
        self._failure = RankLost(rank=rank, engine=7, pid=4321, host="here", reason="was ended by SIGKILL",
                                 doing="train", unix_s=time.time())  # fmt: skip

    def recover(self, ranks: str | None = None) -> None:
        if ranks == "fewer":
            refitted(self.spec, self.spec.world_size - 1)
        self._word = ranks or self.recovering.ranks
        self._told.set()

    @property
    def done(self) -> bool:
        return self.state.over

    @property
    def step(self) -> int:
        return len(self.events) // self.spec.world_size

    def suspend(self) -> None:
        self.pause()
        self._aside.set()

    def take_turn(self) -> None:
        self._aside.clear()
        self._turn = self._share or 0
        self.resume()

    def wait_suspended(self, timeout_s: float | None = None) -> bool:
        return self._aside.wait(timeout_s)

    def pause(self) -> None:
        self._go.clear()
        self.state = RunState.PAUSED

    def resume(self) -> None:
        self.state = RunState.RUNNING
        self._go.set()

    def stop(self, timeout_s: float = 2.0, reason: str = "") -> bool:
        if not self.state.over:
            self.state, self.reason = RunState.STOPPING, reason
        self._halt.set()
        self._go.set()
        self._told.set()
        if timeout_s > 0:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def wait(self, timeout: float | None = None) -> None:
        self._thread.join(timeout)

    def _train(self) -> None:
        first = True
        self.switches.append(Switch(step=0, before=None, after=self.spec, seconds=0.0, carried=False))
        self.state = RunState.RUNNING
        step, done = 0, 0
        while done != self._steps and not self._halt.wait(self._step_s):
            self._go.wait()
            self._before_step(self)
            if self._halt.is_set():
                break
            if self._failure is not None:
                if not self._went_on(self._failure, step):
                    break
                first, self._failure = True, None
                continue
            if self.pending is not None:
                step, first = self._switch(step), True
            if step == self.fails_at:
                self.state, self.reason = RunState.FAILED, "rank 1 ran out of memory"
                break
            self.events.add(self._told_by_ranks(step, first))
            first = False
            step, done = step + 1, done + 1
            self._turn -= 1
            if self._share and not self._turn and done != self._steps:
                first = True
                self.pause()
                self._aside.set()
        if not self.state.over:
            self.state = RunState.STOPPED if self._halt.is_set() else RunState.FINISHED
        self.ended_unix_s = time.time()
        self._aside.set()
        for ticket in self._tickets:
            ticket.abandon()

    def _told_by_ranks(self, step: int, first: bool) -> list[StepEvent]:
        told = [event(self.spec, self.id, r, step, first=first) for r in range(self.spec.world_size)]
        if self._hosts > 1:
            told = [on_host(e, self._hosts) for e in told]
        if self.evaluate is None or (step + 1) % self.evaluate.every:
            return told
        found = told[0].loss + 0.2
        self.early_stopping.take(Evaluation(step, found))
        return [dataclasses.replace(e, eval_loss=found) for e in told]

    def _went_on(self, error: ClusterError, step: int) -> bool:
        """Waits for a word where it is to be asked; False where it is to end."""
        before, now_s = self.spec, time.time()
        self.error, self.reason = error, error.sentence
        if self.recovering.how == "off":
            self.state = RunState.FAILED
            return False
        self.incidents.append(Incident(error=error, step=step, ranks=before.world_size, detected_unix_s=now_s + 0.03,
                                       failed_unix_s=now_s))  # fmt: skip
        self.state = RunState.BROKEN
        self._told.wait()
        if self._halt.is_set():
            return False
        self._told.clear()
        self.state = RunState.RECOVERING
        self._halt.wait(4 * self._step_s)
        if self._word == "fewer":
            self.spec, notes = refitted(before, before.world_size - 1)
        else:
            notes = ()
        self.switches.append(Switch(step=step, before=before, after=self.spec, seconds=0.4, carried=True))
        self.incidents[-1] = dataclasses.replace(
            self.incidents[-1], freed_unix_s=now_s + 0.08, resumed_unix_s=now_s + 2.5, source=CHECKPOINT,
            resumed_step=max(0, step - 3), resumed_ranks=self.spec.world_size, notes=notes,
        )  # fmt: skip
        self.state, self.reason, self.error = RunState.RUNNING, "", None
        return not self._halt.is_set()

    def _switch(self, step: int) -> int:
        """Applies what is pending; returns the step to go on with."""
        after, self.pending = self.pending, None
        tickets, self._tickets = self._tickets, []
        if self.refuses and self.refuses in self.spec.difference(after):
            for ticket in tickets:
                ticket.settle(SpecError(f"strategy.{self.refuses}", "the ranks cannot", "choose another"))
            return step
        carried = after.workload.model == self.spec.workload.model
        switch = Switch(step=step if carried else 0, before=self.spec, after=after, seconds=0.41, carried=carried)
        if not carried:
            self.events.restart(0)
        self.spec = after
        self.switches.append(switch)
        for ticket in tickets:
            ticket.settle(switch)
        return switch.step


MODELS = {"gpt2-1m": Model.gpt2(128, 4), "gpt2-10m": Model.gpt2(256, 12), "gpt2-124m": Model.gpt2(768, 12)}


class Answered:
    """A call to the ranks that is over, or fails, after a while."""

    def __init__(self, value: list[Any] | Exception, seconds: float) -> None:
        self._value, self._until_s = value, time.monotonic() + seconds

    def wait(self, timeout_s: float | None = None) -> bool:
        left = max(0.0, self._until_s - time.monotonic())
        time.sleep(left if timeout_s is None else min(left, timeout_s))
        return time.monotonic() >= self._until_s

    def results(self, timeout_s: float | None = None) -> list[Any]:
        self.wait()
        if isinstance(self._value, Exception):
            raise self._value
        return self._value


class SlowRanks:
    """Ranks that go through a step of `tests.frames`, each phase taking `phase_s`. `breaks` is raised instead, once."""

    notes = ()

    def __init__(self) -> None:
        self.phase_s = 0.002
        self.breaks: Exception | None = None
        self.spec: Spec | None = None
        self.step = 0
        self._frames: Any = None
        self.delivery = SimpleNamespace(provide=lambda spec: None)

    @property
    def under_way(self) -> bool:
        return self._frames is not None

    def submit(self, what: str, **arguments: Any) -> Any:
        try:
            if self.breaks is not None:
                error, self.breaks, self._frames = self.breaks, None, None
                raise error
            return Answered(getattr(self, what)(**arguments), self.phase_s)
        except Exception as e:
            return Answered(e, self.phase_s)

    def status(self) -> list[Any]:
        return [{"spec_id": self.spec.id if self.spec else None}]

    def apply(self, run: str, spec: dict[str, Any], fresh: bool) -> list[Any]:
        self.spec = Spec.from_dict(spec)
        return []

    def slow_next(self) -> list[Any]:
        if self._frames is None:
            model = self.spec.workload.model
            self._frames = Step(self.spec, self.step, MODELS.get(str(model))).frames()
        frames = next(self._frames, None)
        if frames is None:
            return [{"frame": None, **told} for told in self.slow_end()]
        return [{"frame": f.to_dict(), "event": None} for f in frames]

    def slow_end(self) -> list[Any]:
        self._frames, self.step = None, self.step + 1
        return [{"event": event(self.spec, "slow", r, self.step - 1).to_dict()} for r in range(self.spec.world_size)]


class FakeLab:
    """See the module."""

    def __init__(self, ranks: int = 2, *, step_s: float = 0.1, hosts: int = 1) -> None:
        self.ranks, self.hosts = ranks, hosts
        self.devices = ("cpu",) * ranks
        self.begun: list[str] = []  # each run: fresh, or continued
        self.attached = False
        self.spec = Spec(world_size=ranks)
        self.current: FakeRun | None = None
        self.step_s = step_s
        self.before_step: Callable[[FakeRun], None] = lambda run: None  # in the thread of a run that a sweep makes
        self.slow_ranks = SlowRanks()
        self.waiting = ""
        self.sweep: Sweep | None = None
        self.closed = False
        self.slow: SlowMotion | None = None
        self._ids = itertools.count(1)
        self.lost: dict[int, RankLost] = {}
        self.drills: list[tuple[str, int]] = []
        self.drill_refused: ArgumentError | None = None
        self.resumed: list[tuple[str, dict[str, Any]]] = []
        self.save_gate = threading.Event()  # closed: saving what the ranks hold lasts
        self.save_gate.set()
        self._lock = threading.Lock()

    def rank_status(self) -> list[Any]:
        each = max(1, len(self.devices) // self.hosts)
        step = self.current.step if self.current is not None else None
        return [SimpleNamespace(host=f"gpu{rank // each + 1}", step=step, alive=rank not in self.lost)
                for rank in range(len(self.devices))]  # fmt: skip

    def resume(self, checkpoint: str, *, save: CheckpointConfig | None = None, recover: RecoveryPolicy | str | bool = False,
               evaluate: EvalConfig | None = None, **changes: Any) -> FakeRun:  # fmt: skip
        if checkpoint == "nowhere":
            reason = "no checkpoint in nowhere: there is no such folder"
            raise ArgumentError("checkpoint", reason, "name another folder")
        self.resumed.append((checkpoint, changes))
        return self.run(save=save, recover=recover, evaluate=evaluate, **changes)

    def generate(self, prompts: str, **sampling: Any) -> list[str]:
        if (run := active_run(self)) is not None:
            return run.generate(prompts, **sampling).wait(10)
        if prompts == "unknown":
            raise ArgumentError("prompts", "vit classifies images", "ask a causal language model")
        return [f" of {sampling['new_tokens']} tokens"]

    def save(self, folder: str) -> Any:
        if (run := active_run(self)) is not None:
            return run.save(folder).wait()
        self.save_gate.wait(10)
        if folder == "full":
            raise ClusterError("the checkpoint could not be written: No space left on device")
        return SimpleNamespace(step=7, path=Path(folder) / "step-00000007-abcdef")

    def recover(self, ranks: str | None = None) -> FakeRun:
        run = self.current
        if run is None or run.state not in (RunState.BROKEN, RunState.FAILED):
            raise ClusterError("there is no run to recover")
        if run.state is RunState.FAILED:
            return self.run(run.spec, recover=run.recovering)
        run.recover(ranks)
        self.lost.clear()
        return run

    def drill(self, kind: str, rank: int = 1) -> SimpleNamespace:
        if self.current is None or self.current.done:
            raise ClusterError("there is no run to drill: start one")
        self.drills.append((kind, rank))
        if kind == "kill":
            self.lose(rank)
        restored = ("restored", rank)
        return SimpleNamespace(run=self.current, end=lambda: self.drills.append(restored), refused=self.drill_refused)

    def lose(self, rank: int) -> None:
        """A rank dies while the run goes on."""
        self.current.lose(rank)
        assert isinstance(self.current._failure, RankLost)
        self.lost[rank] = self.current._failure

    def run(self, spec: Spec | None = None, *, steps: int | None = None, fresh: bool = True,
            save: CheckpointConfig | None = None, recover: RecoveryPolicy | str | bool = False,
            evaluate: EvalConfig | None = None, **changes: Any) -> FakeRun:  # fmt: skip
        self.spec = (spec or self.spec).replace(**changes)
        if self.sweep is not None:
            self.sweep.stop(5)
        self._make_room("another run was started", self.current, self.slow)
        self.begun.append("fresh" if fresh else "continued")
        self.current = FakeRun(f"run-{next(self._ids)}", self.spec, steps=steps, step_s=self.step_s,
                               hosts=self.hosts)  # fmt: skip
        self.current.saving, self.current.recovering = save, RecoveryPolicy.of(recover)
        self.current.evaluate = evaluate
        return self.current

    def compare(self, spec: Spec | None = None, *, steps: int = 50, rounds: int = 3, **lists: Any) -> Sweep:
        combined = list(combine(spec or self.spec, lists, lambda base, changes: base.replace(**changes)))
        refused = [one for one in combined if isinstance(one, Refusal)]
        run, slow = self.current, self.slow
        run = None if run is None or run.done else run
        with self._lock:
            self.sweep = Sweep([one for one in combined if isinstance(one, Spec)], refused, steps=steps, rounds=rounds,
                               make=self._turn_of, drop=lambda runs: vars(self).update(current=run or self.current),
                               clear=lambda spec: self._make_room("a comparison was started", None, slow),
                               suspended=run)  # fmt: skip
        return self.sweep

    def runs(self, **filters: Any) -> list[Any]:
        return []

    def report(self, path: None = None, runs: Sequence[Any] = ()) -> Path:
        return Path(f"report-of-{len(runs)}.html")

    def plan(self, spec: Spec) -> Any:
        raise ArgumentError("hardware", "this machine is not calibrated", "call lab.calibrate()")

    def _turn_of(self, spec: Spec, steps: int, share: int) -> FakeRun:
        with self._lock:  # the sweep is known first
            self.current = FakeRun(f"run-{next(self._ids)}", spec, steps=steps, step_s=self.step_s, share=share,
                                   before_step=self.before_step)  # fmt: skip
        return self.current

    def slow_motion(self, spec: Spec | None = None, **changes: Any) -> SlowMotion:
        self.spec = wanted = (spec or self.spec).replace(**changes)
        if wanted.strategy.backend != "lab":
            reason = f"slow motion shows our own engine, and this Spec is for {wanted.strategy.backend}"
            raise SpecError("strategy.backend", reason, "use backend lab", {"backend": "lab"})
        run, old = self.current, self.slow
        self.slow = SlowMotion(self.slow_ranks, wanted, lambda _: self._make_room("slow motion was started", run, old))
        return self.slow

    def _make_room(self, why: str, run: FakeRun | None, slow: SlowMotion | None) -> None:
        if slow is not None:
            slow.end(why)
        if run is not None:
            run.stop(reason=why)

    def close(self) -> None:
        if self.sweep is not None:
            self.sweep.stop(5)
        self._make_room("the lab was closed", self.current, self.slow)
        self.closed = True
