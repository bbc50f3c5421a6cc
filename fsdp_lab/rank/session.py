"""`Session`: one rank, from the first rendezvous to the end, over all its trainings. The kernel, or
`python -m fsdp_lab.rank` under torchrun, calls the same methods on every rank, which return plain values."""

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import psutil
import torch
from torch import distributed as dist

from fsdp_lab.backends.base import DTYPES
from fsdp_lab.base.errors import ArgumentError
from fsdp_lab.base.events import PhaseSnapshot, StepEvent
from fsdp_lab.base.generation import Prompt, Sampling
from fsdp_lab.base.hang import LONGEST_WORK_S, OWN_ENGINE_S, Heartbeat, LongWork, limit
from fsdp_lab.models.batches import Batches
from fsdp_lab.models.own import try_metrics
from fsdp_lab.rank.abort import AbortProtocol
from fsdp_lab.rank.calibration import HardwareProbe, calibration_trainers
from fsdp_lab.rank.checkpointing import Checkpointer, drop, on_this_host, spread
from fsdp_lab.rank.faults import FaultInjector, slower
from fsdp_lab.rank.generation import completions, encoded
from fsdp_lab.rank.heartbeat import HangWatchdog, HeartbeatThread, LongWorkLog
from fsdp_lab.rank.lifecycle import Lifecycle
from fsdp_lab.rank.measure import device_name, fidelity_notes, limit_bytes, software
from fsdp_lab.rank.prepare import Require
from fsdp_lab.rank.rendezvous import RankInfo, find_store, own_connection
from fsdp_lab.rank.slow_motion import SlowMotionStep
from fsdp_lab.rank.trainer import Trainer
from fsdp_lab.rank.watch.loop import LoopHost, LoopProgress, plainly
from fsdp_lab.spec.faults import Fault, FaultKind
from fsdp_lab.spec.spec import Spec
from fsdp_lab.wire import RankAborted, ReductionOrder, Wire, WireContext


class Session:
    """One rank.

    Args:
        device: "cpu" or "cuda:N". place: of rank 0's store (`host_store`); rank 0 passes `store` instead.
        reduction: the wire's order of sums, a `ReductionOrder`. timeout_s: of a collective.
        threads: torch's threads in this process; None leaves them.
        shared_gpu_ranks: how many ranks use this rank's GPU. memory_cap: the fraction of its memory for this rank.
        on_event: called with each step event, as a dict, when the step ends. on_loop: the same with the messages of a loop
            of the user's (watch/loop.py). on_heartbeat: the same with each `Heartbeat`, in a separate thread; the caller
            then looks for hangs. None: the ranks do so themselves.
        hang_s: in that case, how long a collective may wait for a rank; None: half of `timeout_s`.
        shared_memory: whether CPU ranks of one host, and ranks that share a GPU, send through memory that they share.
        address, hosts: see `WireContext`.

    Raises ArgumentError for `hang_s`, ConnectionError if rank 0 is not found, RuntimeError if a rank is not in time."""

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        device: str,
        place: str = "",
        store: Any = None,
        reduction: str = "auto",
        timeout_s: float = 60.0,
        threads: int | None = None,
        memory_cap: float | None = None,
        shared_gpu_ranks: int = 1,
        on_event: Callable[[dict[str, Any]], None] = lambda event: None,
        on_loop: Callable[[dict[str, Any]], None] | None = None,
        on_heartbeat: Callable[[dict[str, Any]], None] | None = None,
        hang_s: float | None = None,
        shared_memory: bool = True,
        address: str = "",
        hosts: Sequence[str] = (),
    ) -> None:
        hang_s = limit(hang_s, timeout_s)
        if threads is not None:
            torch.set_num_threads(threads)
        here, shares_gpu = torch.device(device), shared_gpu_ranks > 1
        self.info = RankInfo(rank=rank, world_size=world_size, device=here, shares_gpu=shares_gpu)
        if memory_cap is not None and self.info.device.type == "cuda":
            torch.cuda.set_per_process_memory_fraction(memory_cap, self.info.device)
        self.context = WireContext(
            reduction=ReductionOrder(reduction),
            timeout_s=timeout_s,
            shared_memory=shared_memory and (self.info.device.type == "cpu" or self.info.shares_gpu),
            address=address,
            rank=rank,
            hosts=hosts,
        )
        store = store if store is not None else find_store(place, timeout_s=timeout_s)
        self._on_event, self._on_loop = on_event, on_loop
        self._protocol = AbortProtocol(self.info, self.context, store)
        self._checkpointer = Checkpointer(self.info, own_connection(store))
        carrier = self.world.carrier if self.info.shares_gpu else self.context.host_carrier
        if why := next(iter(self.context.not_on_gpu.values()), ""):
            carrier += f" (the GPU's memory is not shared: {why})"
        self._notes = fidelity_notes(self.info, shared_gpu_ranks, carrier)
        self._work = LongWorkLog()
        self._loop = LoopProgress()  # of a loop of the user's
        self._lifecycle = Lifecycle(
            self.info, self.context, self._protocol, self._checkpointer, self._notes, self._work
        )
        self._slow: SlowMotionStep | None = None
        self._code: dict[str, Any] = {}  # the user's, which the kernel sent, by digest
        self._faults = FaultInjector(self.info, self.context)
        announce = self._protocol.monitor.announce
        send = on_heartbeat or HangWatchdog(own_connection(store), world_size, hang_s, announce).receive
        self._heartbeat = HeartbeatThread(self.context, self._activity, send, self._work.changed)
        self._joined_unix_s = time.time()
        self.context.session = self

    def begin_call(self, number: int) -> None:
        """The kernel numbers its calls, so that ranks know which of them an abort belongs to."""
        self._protocol.turn = number

    @property
    def trainer(self) -> Trainer | None:
        """The live training, if any."""
        return self._lifecycle.trainer

    @property
    def world(self) -> Wire:
        """The default process group; another one after an abort."""
        return self._protocol.world

    # -- training -------------------------------------------------------------------------------------------------

    def receive(self, digest: str, given: Any, kept: Collection[str]) -> None:
        """Keep a function, class or dataset of the user's, for the Specs that name it by this digest. Others are dropped,
        but those of `kept`; trainings hold what they use themselves."""
        self._code = {known: code for known, code in self._code.items() if known in kept} | {digest: given}

    def forget_code(self) -> None:
        """Drops the user's code, and what is known of it."""
        self._code.clear()
        self._lifecycle.preparation.own_costs.clear()

    def _spec(self, given: Mapping[str, Any]) -> Spec:
        return Spec.from_dict(given).with_code(self._code)

    def apply(self, run: str, spec: Mapping[str, Any], fresh: bool = False, **required: Any) -> dict[str, Any]:
        """Make `spec` the training of the next `train`; collective. Refused where it cannot be evaluated as `required` (see
        `_evaluable`), which changes nothing. Live state moves into the new layout, unless `fresh`, or a field of LINEAGE
        differs: then training starts at step 0. Returns what `_applied` does."""
        start_s = time.perf_counter()
        wanted, require = self._spec(spec), _evaluable(self._code, required)
        with self._exclusive():
            carried = self._lifecycle.apply(run, wanted, require, fresh=fresh)
        return self._applied(start_s, required.get("evaluated", 0), carried=carried)

    def train(
        self,
        steps: int,
        ledgers: Collection[int] = (),
        checks: Collection[int] = (),
        evaluations: Mapping[int, int] = {},
        prompts: Sequence[Prompt] = (),
        sampling: Mapping[str, Any] = {},
        metrics: str = "",
    ) -> dict[str, Any]:
        """Train so many steps, the last of them traced; collective. SIGINT on any rank ends the step in progress on all.

        `ledgers`: numbers of additional ledger steps. `checks`: of steps whose events get a checksum of the parameters.
        `evaluations`: step number -> how many held-out samples to evaluate after it; the event gets their mean loss, the
        `metrics` of a digest, and how this rank's part of `prompts` goes on. An aborted evaluation leaves the step as it is.

        Returns {"events", "stopped": whether it was interrupted, "step": the next one, "saves": see `Checkpointer.ended`}.
        Raises FieldError: no samples are held out, or of `prompts`; and as `Trainer.advance`."""
        trainer = self._lifecycle.require()
        trainer.batches.check_held_out(max(evaluations.values(), default=0))
        wanted, own = Sampling(**sampling), self._code[metrics] if metrics else {}
        texts = encoded(trainer.spec, trainer.batches, prompts, wanted) if prompts else []
        events: list[dict[str, Any]] = []
        self._leave_slow_motion()
        with self._protocol.collective_call():
            stopped = False
            try:
                self._reopen()
                trainer = self._lifecycle.require()
                begin = trainer.progress.step
                with self.context.emulating(self._faults.link or self._lifecycle.emulation.link):
                    for at in range(begin, begin + steps):
                        now = (is_last := at == begin + steps - 1) or at in checks or at in evaluations
                        with self._faults.during(trainer), self._patient_step(trainer):
                            late = not (now or self._faults.armed)
                            ended = trainer.advance(ledger=at in ledgers, traced=is_last, late=late)
                        if now:
                            ended += trainer.finish()
                        if at in checks:
                            ended[-1] = trainer.checked(ended[-1])
                        try:
                            if at in evaluations:
                                ended[-1] = trainer.evaluated(ended[-1], evaluations[at], own)
                                completed = completions(trainer, prompts, texts, wanted)
                                ended[-1] = dataclasses.replace(ended[-1], completions=tuple(completed.values()))
                        finally:  # the step is committed, even if its evaluation failed
                            self._publish(ended, events)
            except BaseException as e:
                self._publish(trainer.finish(wait=False), events)
                try:
                    self._protocol.abort_step(trainer, e)
                finally:  # the step before was committed, if the device had its vote
                    self._publish(trainer.finish(wait=False), events)
                stopped = True
            else:
                self._protocol.record(trainer, settled=False)
        saves = self._checkpointer.ended()
        return {"events": events, "stopped": stopped, "step": trainer.progress.step, "saves": saves}

    @contextmanager
    def _patient_step(self, trainer: Trainer) -> Iterator[None]:
        """The context of a step that may take a rank long, if it is one."""
        compiles = trainer.spec.strategy.compile
        with contextlib.ExitStack() as stack:
            if compiles or trainer.is_first:
                stack.enter_context(self.context.patience(LONGEST_WORK_S))
            if trainer.is_first and not trainer.backend.has_user_code:  # in the first step its mistakes show
                stack.enter_context(self._work.during(LongWork.FIRST_STEP))
            stack.enter_context(self._work.compiling(compiles))
            yield

    def _publish(self, ended: Sequence[StepEvent], events: list[dict[str, Any]]) -> None:
        for event in ended:
            events.append(event.to_dict())
            self._on_event(events[-1])

    def generate(self, run: str, prompts: Sequence[Prompt], sampling: Mapping[str, Any]) -> dict[str, Any]:
        """How the language model of this run continues texts; collective. Returns {"texts": {number of the prompt: text}} of
        this rank. Raises FieldError, on every rank, if these ranks train another run, or no such text is continued."""
        trainer, wanted = self._lifecycle.require(), Sampling(**sampling)
        if trainer.run != run:
            raise ArgumentError("run", f"these ranks have left run {run}", "start it again, or ask the newest run")
        texts = encoded(trainer.spec, trainer.batches, prompts, wanted)
        self._leave_slow_motion()
        with self._protocol.collective_call():
            self._reopen()
            completed = completions(self._lifecycle.require(), prompts, texts, wanted)
        return {"texts": {str(number): completion.text for number, completion in completed.items()}}

    def calibrate(self, specs: Sequence[Mapping[str, Any]], dtypes: Sequence[str], passes: int) -> dict[str, Any]:
        """Measure this machine, and steps of each Spec, besides the live training; collective. Returns what
        `HardwareProbe.all` does, and "peaks": FLOP/s by dtype that MFU is relative to."""
        with self._exclusive():
            wanted = [self._spec(spec) for spec in specs]
            preparation = self._lifecycle.preparation
            with calibration_trainers(wanted, self.info, self.world, preparation) as trainers:
                peaks = {dtype: preparation.peak(DTYPES[dtype]).given.flops_per_s or 0.0 for dtype in dtypes}
                return {**HardwareProbe(self.info, self.world).all(trainers, dtypes, passes), "peaks": peaks}

    # -- faults ---------------------------------------------------------------------------------------------------

    def arm(self, fault: Mapping[str, Any]) -> dict[str, Any]:
        """Inject a `Fault`, once, on the ranks that it names; collective, so that all refuse an invalid one. Returns
        {"armed"}: whether it is for this rank."""
        wanted, link = Fault.from_dict(fault), None
        wanted.check(self.info.world_size, self.trainer.progress.step if self.trainer else 0)
        if wanted.kind is FaultKind.SLOW:
            if self.context.nccl is not None:
                reason = "a slow link is emulated by the host, which is refused over NCCL"
                raise ArgumentError("fault.kind", reason, "use another kind, such as cut or stall")
            with self._protocol.collective_call():
                self._reopen()
                now = self._lifecycle.emulation.link
                link = slower(wanted, now, lambda: self._lifecycle.emulation.measure(self.world))
        return {"armed": self._faults.arm(wanted, link)}

    def disarm(self) -> dict[str, Any]:
        """Remove armed faults, and restore a link that was cut or slowed. Returns {"disarmed"}: how many were armed."""
        return {"disarmed": self._faults.disarm()}

    # -- suspending -----------------------------------------------------------------------------------------------

    def suspend(self) -> dict[str, Any]:
        """Move the training to host memory, until `resume`; collective. Returns {"suspended_bytes"} of this rank."""
        with self._exclusive():
            nbytes = self._lifecycle.suspend()
        self._lifecycle.release()
        return {"suspended_bytes": nbytes}

    def resume(self, run: str) -> dict[str, Any]:
        """Continue a suspended training; collective. Returns {"step"}: None if it is not suspended, as on new ranks."""
        training = self._lifecycle.suspended.get(run)
        if training is None:
            return {"step": None}
        with self._exclusive():
            self._lifecycle.resume(run, training)
        self._lifecycle.discard([run])
        return {"step": training.progress.step}

    def discard(self, runs: Collection[str]) -> dict[str, Any]:
        """Drop the suspended trainings of these runs. Returns {"discarded"}: how many there were."""
        return {"discarded": self._lifecycle.discard(runs)}

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def save(self, root: str, kind: str = "step", last: int = 3) -> dict[str, Any]:
        """Take a checkpoint of the training, in a new folder below `root`; collective. It is written while training goes
        on, after a previous one. The newest `last` of the run are kept. Returns {"step", "seconds": how long training
        stopped, "waited_s": for the previous one, "bytes" of this rank}. Raises ArgumentError, as `Checkpointer.save`."""
        start_s = time.perf_counter()
        with self._exclusive():
            trainer = self._lifecycle.require()
            self._checkpointer.wait_for_earlier(self.context.check, self._work)
            waited_s = time.perf_counter() - start_s
            nbytes = self._checkpointer.save(trainer, root, kind=kind, last=last)
        seconds = time.perf_counter() - start_s
        return {"step": trainer.progress.step, "seconds": seconds, "waited_s": waited_s, "bytes": nbytes}

    def saves(self, wait_s: float = 0.0) -> dict[str, Any]:
        """Wait at most `wait_s` for a checkpoint. Returns {"ended": see `Checkpointer.ended`, "under_way"}."""
        under_way = not self._checkpointer.wait(wait_s)
        return {"ended": self._checkpointer.ended(), "under_way": under_way}

    def rescue(self, partial: str, writers: Collection[int]) -> dict[str, Any]:
        """Called on all `writers` when other ranks are lost, not collective. See `Checkpointer.rescue`."""
        return self._checkpointer.rescue(self._lifecycle.require(), on_this_host(partial), writers)

    def spread(self, path: str, manifest: Mapping[str, Any]) -> dict[str, Any]:
        """Give every host the files of a checkpoint; collective. Returns {"bytes"} that this rank wrote."""
        self._leave_slow_motion()
        with self._protocol.collective_call():
            self._reopen()
            return {"bytes": spread(on_this_host(path), manifest, self.info.rank)}

    def drop(self, path: str) -> dict[str, Any]:
        """Remove what was written for other ranks under a relative path. Returns {}."""
        drop(path)
        return {}

    def restore(self, run: str, spec: Mapping[str, Any], path: str, **required: Any) -> dict[str, Any]:
        """As `apply`, with the values of the checkpoint at `path`, which may be of another backend, sharding and number of
        ranks. Raises FieldError if it is incomplete, or of another training; the live training may be dropped then."""
        start_s = time.perf_counter()
        wanted, require = self._spec(spec), _evaluable(self._code, required)
        with self._exclusive():
            notes = self._lifecycle.restore(run, wanted, str(on_this_host(path)), require)
        return self._applied(start_s, required.get("evaluated", 0), carried=True, notes=notes)

    # -- slow motion ----------------------------------------------------------------------------------------------

    def slow_next(self) -> dict[str, Any]:
        """Run a training step to its next phase, or begin one; collective. Returns {"frame": the `PhaseSnapshot`, "event":
        the `StepEvent`}, as dicts: the one or, at the end, the other. Raises as `train`, SpecError unless the backend is our
        own engine, KeyboardInterrupt if it was interrupted."""
        return self._slowly(SlowMotionStep.snapshot)

    def slow_end(self) -> dict[str, Any]:
        """Run the step of `slow_next` to its end; collective. Returns the same; "event" is None if there was no step."""
        if self._slow is None:
            return {"frame": None, "event": None}
        return self._slowly(SlowMotionStep.close)

    def _slowly(self, advance: Callable[[SlowMotionStep], PhaseSnapshot | None]) -> dict[str, Any]:
        trainer = self._lifecycle.require()
        with self._protocol.collective_call():
            if self._slow is None:
                self._reopen()
                trainer = self._lifecycle.require()
                self._slow = SlowMotionStep(trainer)
            slow, self._slow = self._slow, None
            try:
                with self.context.emulating(self._lifecycle.emulation.link):
                    frame = advance(slow)
            except BaseException as e:
                slow.hook.remove()
                self._protocol.abort_step(trainer, e)
                raise KeyboardInterrupt from None
            if frame is not None:
                self._slow = slow
                return {"frame": frame.to_dict(), "event": None}
            slow.hook.remove()
            self._protocol.record(trainer, settled=False)
        event = slow.result.to_dict()
        self._on_event(event)
        return {"frame": None, "event": event}

    def _leave_slow_motion(self) -> None:
        if self._slow is not None:
            self.slow_end()

    # -- loops that are not ours ------------------------------------------------------------------------------------

    def loop_host(self, publish: Callable[[dict[str, Any]], None] | None = None) -> LoopHost:
        """For a loop of a user's on this rank. `publish`: takes its messages where no kernel does."""
        return LoopHost(
            info=self.info,
            context=self.context,
            world=self.world,
            publish=publish or (lambda message: None) if self._on_loop is None else plainly(self._on_loop),
            notes=self._notes,
            guard=self._protocol.loop,
            progress=self._loop,
        )

    @property
    def has_kernel(self) -> bool:
        """Whether messages of loops go to a kernel."""
        return self._on_loop is not None

    def reopen(self) -> None:
        """Open new process groups if these were given up, as after a failure in a loop; collective."""
        with self._exclusive():
            pass

    # -- status and end -------------------------------------------------------------------------------------------

    def unload(self) -> dict[str, Any]:
        """Drop the model and its optimizer. Returns {"freed_bytes"}: what the process gave back."""
        self._leave_slow_motion()
        return {"freed_bytes": self._lifecycle.unload()}

    @property
    def limits_bytes(self) -> tuple[int, int]:
        """What this process may use of its device's memory, and what its host has."""
        return limit_bytes(self.info.device), limit_bytes(torch.device("cpu"))

    def status(self) -> dict[str, Any]:
        """The rank's device, software, training and last collective, as plain values."""
        last, trainer, device = self.context.last, self.trainer, self.info.device
        spec = trainer.spec if trainer else None
        return {
            "rank": self.info.rank,
            "pid": os.getpid(),
            "device": str(device),
            "device_name": device_name(device),
            "software": software(device),
            "joined_unix_s": self._joined_unix_s,
            "spec": spec and spec.to_dict(),
            "spec_id": spec and spec.id,
            "step": trainer.progress.step if trainer else None,
            "limits_bytes": self.limits_bytes,
            "rss_bytes": psutil.Process().memory_info().rss,
            "suspended": list(self._lifecycle.suspended),
            "code": list(self._code),
            "last_collective": None if last is None else f"{last.sequence}: {last.kind} in {last.group}",
            "notes": list(self._notes),
        }

    def namespace(self) -> dict[str, Any]:
        """The names that cells on the ranks can use."""
        backend = self.trainer.backend if self.trainer else None
        names = {"session": self, **{name: getattr(self.info, name) for name in ("rank", "world_size", "device")}}
        parts = {"model": "module", "optimizer": "optimizer", "mesh": "mesh"}
        return names | {name: getattr(backend, part, None) for name, part in parts.items()}

    def close(self) -> None:
        """Release everything. Other ranks are not needed."""
        if self._slow is not None:
            self.context.abort("the session is closed")  # the step in progress cannot rely on the other ranks
            with contextlib.suppress(RankAborted):
                self._slow.close()
            self._slow = None
        self.unload()
        self._lifecycle.suspended.clear()
        self._code.clear()
        self._checkpointer.close()
        self._heartbeat.close()
        self._protocol.close()
        self.context.session = None

    # -- helpers --------------------------------------------------------------------------------------------------

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """The context of a collective call that needs the training between two steps, on working process groups."""
        self._leave_slow_motion()
        with self._protocol.collective_call():
            self._reopen()
            with self.context.patience(LONGEST_WORK_S):
                yield

    def _reopen(self) -> None:
        """After an abort, open new process groups and rebuild the backend on them."""
        if self._protocol.reopen():
            with self.context.patience(LONGEST_WORK_S):
                self._lifecycle.rebuild()

    def _applied(
        self, start_s: float, evaluated: int = 0, *, carried: bool, notes: Sequence[str] = ()
    ) -> dict[str, Any]:
        trainer = self._lifecycle.require()
        if (held := trainer.batches.check_held_out(evaluated)) < evaluated:
            is_cut, n = not getattr(trainer.batches.source, "is_padded", True), trainer.spec.workload.seq_len
            what = f" (each seq_len {n} tokens of joined texts)" if is_cut else ""
            notes = [*notes, f"{held} samples are held out{what}: evaluations have these, not samples={evaluated}"]
        return {
            "step": trainer.progress.step,
            "seconds": time.perf_counter() - start_s,
            "carried": carried,
            "parameters": sum(s.shape.numel() for s in trainer.backend.param_shards()),
            "notes": [*self._lifecycle.notes_of(trainer.spec), *notes],
        }

    def _activity(self) -> Heartbeat:
        """What a session knows of a heartbeat. Called in the thread of the heartbeats."""
        trainer = self.trainer
        work, since_work_s = self._work.read()
        user_call, since_s = (trainer.backend.user_call if trainer else None) or ("", time.monotonic())
        # None: the lab's limit.
        hang_s = OWN_ENGINE_S if trainer is not None and trainer.backend.has_user_code else None
        return Heartbeat(
            rank=self.info.rank,
            number=0,
            working=self._protocol.monitor.working,
            step=trainer.progress.step if trainer else None,
            work=work,
            since_work_s=since_work_s,
            hang_s=self._loop.hang_s if self._loop.place.inside else hang_s,
            user_call=user_call,
            user_call_s=time.monotonic() - since_s,
            loop=self._loop.place,
            loop_steps=self._loop.steps,
        )


def _evaluable(code: Mapping[str, Any], required: Mapping[str, Any]) -> Require:
    """Raises FieldError where no sample to be "evaluated" is held out, "prompts" cannot be continued, or "metrics" fail."""
    wanted = Sampling(**required.get("sampling", {}))

    def require(spec: Spec, batches: Batches) -> None:
        batches.check_held_out(required.get("evaluated", 0))
        if prompts := required.get("prompts"):
            encoded(spec, batches, prompts, wanted)
        if metrics := required.get("metrics"):
            try_metrics(code[metrics], spec.workload, batches.source)

    return require


def resident_session() -> Session | None:
    """The session of the lab's rank that this process is; None elsewhere."""
    world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    return world.context.session if isinstance(world, Wire) else None
