"""`Lifecycle`: builds, switches, rebuilds, suspends, resumes, restores and drops the training of a rank. Every method is
called inside `AbortProtocol.collective_call`, and most are collective.

Note: a switch that fails. At most one backend is live: a switch of strategy builds a new one without storage and moves the
state into it, unit by unit (backends/transfer.py). Until every rank has all of it, the training is the old one: nothing of
its state is freed that is not on all ranks in the new one. After an abort the ranks compare how far each has come
(`_settle`) and rebuild the old Spec from where its state is. If some rank had finished, all had received everything,
and the others finish too. Meanwhile no checkpoint can be taken, since no layout has all of the state."""

import gc
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

from fsdp_lab.backends import Backend, build, fill
from fsdp_lab.backends.base import drop_slots, return_memory, update_hyperparameters
from fsdp_lab.backends.state import SuspendedState, gather_json, resume_state, suspend_state, together
from fsdp_lab.backends.transfer import StateSource, StateTransfer
from fsdp_lab.base.hang import LongWork
from fsdp_lab.models.batches import Batches
from fsdp_lab.models.check import notes_on
from fsdp_lab.models.own import skeleton_of
from fsdp_lab.rank.abort import AbortProtocol
from fsdp_lab.rank.checkpointing import Checkpointer
from fsdp_lab.rank.heartbeat import LongWorkLog
from fsdp_lab.rank.ledger import LedgerResult
from fsdp_lab.rank.measure import HostPeak, device_name, held_bytes, precision_notes
from fsdp_lab.rank.prepare import LinkEmulation, Preparation, PreparedTraining, Require
from fsdp_lab.rank.rendezvous import RankInfo
from fsdp_lab.rank.tracing import ClockOffset, compare_clocks
from fsdp_lab.rank.trainer import Scaler, StepCost, Trainer, TrainingProgress
from fsdp_lab.spec.spec import Spec, fields_with
from fsdp_lab.spec.workload import LINEAGE
from fsdp_lab.wire import WireContext

Replacement = tuple[Callable[[], Trainer], StateTransfer]  # makes the trainer that takes the live one's place
_NO_REBUILD = set(fields_with("live"))  # what the live backend can take over


@dataclass(frozen=True, kw_only=True)
class SuspendedTraining:
    """A training in host memory, with all that is needed to continue it bit for bit."""

    spec: Spec
    batches: Batches
    cost: StepCost
    progress: TrainingProgress
    scaler: Scaler
    ledger: LedgerResult | None  # of its ledger step, which need not be repeated
    state: SuspendedState


class Lifecycle:
    """The live training of one rank, and its suspended ones. `notes` are on every training of this rank."""

    def __init__(
        self,
        info: RankInfo,
        context: WireContext,
        groups: AbortProtocol,
        checkpointer: Checkpointer,
        notes: tuple[str, ...],
        work: LongWorkLog,
    ) -> None:
        self._info, self._context, self._groups, self._checkpointer = info, context, groups, checkpointer
        self._work, self._notes = work, notes
        self.trainer: Trainer | None = None
        self.preparation = Preparation(info, work, context.check)
        self.emulation = LinkEmulation(info)
        self.suspended: dict[str, SuspendedTraining] = {}  # by run
        self._clock = ClockOffset()
        self._source: StateSource | None = None  # None: the trainer's backend has the state
        self._replacement: Replacement | None = None  # in progress
        self._replaced = 0  # how many are complete

    def notes_of(self, spec: Spec) -> tuple[str, ...]:
        """Notes on how representative timings are here and under this Spec, and on its tokens."""
        precision = precision_notes(device_name(self._info.device), spec.strategy.dtypes.param)
        return (*self._notes, *precision, *self.emulation.notes, *notes_on(spec.workload))

    def require(self) -> Trainer:
        if self.trainer is None:
            raise RuntimeError("nothing to train: apply a Spec first")
        return self.trainer

    # -- building -------------------------------------------------------------------------------------------------

    def apply(self, run: str, wanted: Spec, require: Require, *, fresh: bool) -> bool:
        """Train `wanted` from now on, unless `require` refuses it with its data. Returns whether the live training
        continues in it, or it starts at step 0."""
        self._clock = compare_clocks(self._groups.world)
        old = self.trainer
        begins = old is None or fresh or bool(set(old.spec.difference(wanted)) & set(LINEAGE))
        before = (old.spec, old.batches) if old else None
        prepared = self.preparation.prepare(wanted, before, require=require, begins=begins)
        self._emulate(prepared)
        if old is None or begins:
            old = None
            self._start(run, prepared)
        elif _changes(old.spec, wanted) <= _NO_REBUILD:
            update_hyperparameters(old.backend.optimizer, wanted.workload)
            scaler = _scaler_for(wanted, old.scaler)
            self._train_with(run, prepared, old.backend, progress=old.progress, scaler=scaler)
        else:
            self._replace_backend(run, old, prepared)
        continues = old is not None
        if continues and before is not None and before[0].strategy.gather == "mapped":
            old = None  # the last reference to shards that torch cannot free before
            self._return_memory()
        self._groups.world.barrier().wait()
        return continues

    def _start(self, run: str, p: PreparedTraining) -> None:
        """Train from initial values. The old model is dropped first. An abort ends this between two pieces of them."""
        host = HostPeak(self._context.check)
        work = LongWork.DRAW if p.weights is None else LongWork.LOAD
        with self._work.during(work):
            initial = together(lambda: p.initial(host.look))
        self.unload()
        host.restart()
        backend = self._build(p)
        with self._work.during(work):
            fill(backend, initial)
            host.look()
        state = {"progress": TrainingProgress(), "scaler": _scaler_for(p.spec)}
        self._train_with(run, p, backend, **state, loading_bytes=0 if p.weights is None else host.nbytes)

    def rebuild(self) -> None:
        """Rebuild the live training on new process groups, after an abort."""
        self.emulation.forget()
        self._settle()
        if (old := self.trainer) is not None:
            self._replace_backend(old.run, old, _prepared(old.spec, old.batches, old.cost))

    def _replace_backend(self, run: str, old: Trainer, p: PreparedTraining) -> None:
        """Continue in a new backend: see the note."""
        self._checkpointer.unregister()
        source = self._source or StateSource.of(old.backend)
        self._source = source
        for backend in source.backends:
            backend.retire(self._context.busy_addresses())
        self._return_memory()
        transfer = StateTransfer(source, self._build(p))
        scaler = _scaler_for(p.spec, old.scaler)
        make = partial(self._trainer, run, p, transfer.new, progress=old.progress, scaler=scaler)
        self._replacement = make, transfer
        transfer.run(self._context.busy_addresses, self._context.complete)
        self._checkpointer.register(transfer.new)
        self._finish_replacement(*self._replacement, source)

    def _finish_replacement(self, make: Callable[[], Trainer], transfer: StateTransfer, source: StateSource) -> None:
        """When every rank has received everything. Not collective: after an abort some ranks alone may come here."""
        drop_slots(transfer.new)
        self.trainer = make()
        self._source = self._replacement = None
        self._replaced += 1
        for backend in source.backends:
            backend.release(self._context.busy_addresses())
        self._return_memory()

    def _settle(self) -> None:
        """After an abort: agree with the other ranks on where the state is."""
        mine, source = self._replacement, self._source
        come = gather_json((self._replaced, mine[1].completed if mine is not None else 0))
        if mine is None or source is None:
            return
        make, transfer = mine
        if max(replaced for replaced, _ in come) > self._replaced:
            self._finish_replacement(make, transfer, source)
        else:
            self._source = transfer.settle(min(completed for _, completed in come))
            self._replacement = None
            self._source.free_rest(self._context.busy_addresses())
            for backend in (*source.backends, transfer.new):
                if backend not in self._source.backends:
                    backend.release(self._context.busy_addresses())

    def _build(self, p: PreparedTraining) -> Backend:
        with self._work.during(LongWork.BUILD):
            backend = build(p.skeleton, p.spec, self._info.device)
            # What each unit had was freed when it existed, and the C library may have kept it.
            return_memory(self._info.device)
            return backend

    def _train_with(self, run: str, p: PreparedTraining, backend: Backend, **state: Any) -> None:
        """Makes the trainer; collective, as the ranks tell each other what each holds."""
        self._checkpointer.register(backend)
        self.trainer = self._trainer(run, p, backend, **state)

    def _trainer(self, run: str, p: PreparedTraining, backend: Backend, **state: Any) -> Trainer:
        """`state`: its progress and scaler, and what it knows of the memory. Not collective."""
        return Trainer(
            run=run,
            spec=p.spec,
            info=self._info,
            backend=backend,
            batches=p.batches,
            world=self._groups.world,
            cost=p.cost,
            notes=self.notes_of(p.spec),
            carriers=self.emulation.carriers(backend.mesh) if p.spec.link is None else tuple,  # else notes say it
            clock=self._clock,
            **state,
        )

    def _emulate(self, p: PreparedTraining) -> None:
        self.emulation.emulate(p.spec, p.cost.peak_flops_per_s, self._groups.world)

    # -- from host memory and from a checkpoint -------------------------------------------------------------------

    def suspend(self) -> int:
        """Move the live training to host memory. Returns its bytes."""
        t = self.require()
        state = suspend_state(t.backend)
        kept = {name: getattr(t, name) for name in ("spec", "batches", "cost", "progress", "scaler")}
        self.suspended[t.run] = SuspendedTraining(**kept, ledger=t.meter.ledger, state=state)
        return state.nbytes

    def resume(self, run: str, training: SuspendedTraining) -> None:
        """Continue a suspended training; the live one is dropped."""
        self.release()
        self._clock = compare_clocks(self._groups.world)
        p = _prepared(training.spec, training.batches, training.cost)
        self._emulate(p)
        backend = self._build(p)
        with self._work.during(LongWork.LOAD):
            resume_state(training.state, backend)
        state = {name: getattr(training, name) for name in ("progress", "scaler", "ledger")}
        self._train_with(run, p, backend, **state)
        self._groups.world.barrier().wait()

    def discard(self, runs: Collection[str]) -> int:
        """Drop suspended trainings. Returns how many there were."""
        return sum(self.suspended.pop(run, None) is not None for run in runs)

    def restore(self, run: str, wanted: Spec, path: str, require: Require) -> list[str]:
        """Train `wanted` from a checkpoint, unless `require` refuses it. Returns notes on what could not be restored."""
        saved = self._checkpointer.find(path, wanted)
        self._clock = compare_clocks(self._groups.world)
        prepared = self.preparation.prepare(wanted, None, require=require)
        self._emulate(prepared)
        self.unload()
        backend = self._build(prepared)
        with self._work.during(LongWork.LOAD):
            progress, scaler, notes = self._checkpointer.load(saved, backend)
        self._train_with(run, prepared, backend, progress=progress, scaler=_scaler_for(wanted, scaler))
        self._groups.world.barrier().wait()
        return notes

    # -- dropping -------------------------------------------------------------------------------------------------

    def unload(self) -> int:
        """Drop the model and its optimizer. Returns the bytes that the process gave back."""
        before = held_bytes(self._info.device, self._context)
        self.release()
        return max(0, before - held_bytes(self._info.device, self._context))

    def release(self) -> None:
        self._release_backends()
        self._checkpointer.unregister()
        self._return_memory()

    def _release_backends(self) -> None:
        """A method of its own, after which nothing holds them."""
        backends = [self.trainer.backend] if self.trainer is not None else []
        backends += [self._replacement[1].new] if self._replacement is not None else []
        for backend in dict.fromkeys([*backends, *(self._source.backends if self._source is not None else ())]):
            backend.release(self._context.busy_addresses())
        self.trainer = self._source = self._replacement = None

    def _return_memory(self) -> None:
        gc.collect()
        self._context.trim_pool()
        return_memory(self._info.device)


def _prepared(spec: Spec, batches: Batches, cost: StepCost) -> PreparedTraining:
    """A Spec that was prepared before, with another skeleton."""
    return PreparedTraining(spec=spec, skeleton=skeleton_of(spec.workload), batches=batches, cost=cost)


def _changes(old: Spec, new: Spec) -> set[str]:
    """The fields that differ; not "param_groups" if the same parameters are together, with other rates."""
    changed = set(old.difference(new))
    patterns = [[g.match for g in spec.workload.param_groups or ()] for spec in (old, new)]
    return changed - {"param_groups"} if patterns[0] == patterns[1] else changed


def _scaler_for(spec: Spec, current: Scaler | None = None) -> Scaler:
    """The current loss scaler if the Spec's precision still fits it, otherwise a new one."""
    enabled = "fp16" in (spec.strategy.dtypes.param, spec.strategy.dtypes.reduce)
    return current if current is not None and current.enabled == enabled else Scaler(enabled=enabled)
