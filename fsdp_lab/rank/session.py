"""`Session`: what stays in a rank from the first rendezvous to the end, whatever is trained in it.

The kernel, or `python -m fsdp_lab.rank` under torchrun, calls the same few methods on every rank: `apply` a Spec, `train`
some steps, `forget`. Each returns plain values. What they share between calls is one wire, one live backend and how far
it got; a switch of strategy moves the live values into a new backend and drops the old one (backends/carry.py).

Note: after a step was given up. Every rank leaves `train` by itself (guard.py says how it gets out). First they agree
on how far they got (`_settle`): a rank that was waiting for a vote's result when a peer already had it takes the result
from the peer's record and updates too; all others discard. Then, when the kernel next calls, all of them see that this
epoch was given up, open new process groups under the next one, and rebuild the backend from its own master shards, since
a wrapper that was left in the middle of a backward cannot be used again (`_renew`).
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import psutil
import torch
from torch import distributed as dist
from torch import nn

from fsdp_lab.backends import Backend, build, carry, fill
from fsdp_lab.backends.base import retune
from fsdp_lab.backends.carry import park, unpark
from fsdp_lab.engine.scaler import Scaler
from fsdp_lab.fault import Fault, FaultKind
from fsdp_lab.frame import Frame
from fsdp_lab.hang import limit
from fsdp_lab.models import Initializer, build_skeleton, resolve
from fsdp_lab.rank.aside import Aside
from fsdp_lab.rank.calibration import Probe, standing
from fsdp_lab.rank.checkpointing import Checkpointer
from fsdp_lab.rank.clocks import Clock, compare_clocks
from fsdp_lab.rank.emulation import Emulated, Emulation
from fsdp_lab.rank.faults import Faults, slower
from fsdp_lab.rank.guard import ANSWER_S, INTERRUPTED, Guard
from fsdp_lab.rank.ledger import Found
from fsdp_lab.rank.line import Line
from fsdp_lab.rank.peers import Peers
from fsdp_lab.rank.prepare import Preparation, Prepared
from fsdp_lab.rank.pulse import Place, Pulse
from fsdp_lab.rank.rendezvous import Seat, close_groups, find_store, open_groups
from fsdp_lab.rank.slow_motion import SlowStep
from fsdp_lab.rank.software import software
from fsdp_lab.rank.trainer import Progress, Trainer
from fsdp_lab.rank.watch import Watch
from fsdp_lab.spec import LINEAGE, Spec, SpecError
from fsdp_lab.wire import Hub, RankAborted, Reduction, Wire

_SETTLE_S = 10.0
_LIGHT = (
    "lr",
    "weight_decay",
    "clip_norm",
    "micro_batch",
    "accumulate",
    "seq_len",
    "data",
    "held_out",
    "sync",
    "link",
)  # nothing is rebuilt


class Session:
    """One rank.

    Args:
        rank, world_size, device: which rank this is and where it computes: "cpu" or "cuda:N".
        host, port: of the store that rank 0 hosts (`host_store`), which rank 0 gives as `store`.
        reduction: the wire's order of sums, a `Reduction`.
        timeout_s: how long a collective may take.
        threads: torch's threads in this process; None leaves them.
        memory_cap: the fraction of the GPU's memory that this rank may take, where ranks share one.
        shared_gpu_ranks: how many ranks sit on this rank's GPU.
        say: called with each step event, as a dict, when the step ends.
        beat: called with each `fsdp_lab.beats.Beat` as a dict, from a thread of its own: somebody looks for ranks that hang.
            None: the ranks do so themselves.
        hang_s: in that case, how long a collective may wait for a rank; None: half of `timeout_s`.

    Raises:
        SpecError: of `hang_s`.
        ConnectionError: rank 0 was not found.
        RuntimeError: not all ranks came in time.
    """

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        device: str,
        host: str = "127.0.0.1",
        port: int = 0,
        store: Any = None,
        reduction: str = "auto",
        timeout_s: float = 60.0,
        threads: int | None = None,
        memory_cap: float | None = None,
        shared_gpu_ranks: int = 1,
        say: Callable[[dict[str, Any]], None] = lambda event: None,
        beat: Callable[[dict[str, Any]], None] | None = None,
        hang_s: float | None = None,
    ) -> None:
        hang_s = limit(hang_s, timeout_s)
        if threads is not None:
            torch.set_num_threads(threads)
        self.seat = Seat(rank=rank, world_size=world_size, device=torch.device(device), shares_gpu=shared_gpu_ranks > 1)
        if memory_cap is not None and self.seat.device.type == "cuda":
            torch.cuda.set_per_process_memory_fraction(memory_cap, self.seat.device)
        self._say = say
        self._hub = Hub(reduction=Reduction(reduction), timeout_s=timeout_s)
        self._store = store if store is not None else find_store(host, port, timeout_s=timeout_s)
        self._line = Line(ANSWER_S)
        self._guard = Guard(self._hub, _own_connection(self._store), rank)
        self._peers = Peers(self._store, rank)
        self._epoch = 0
        self.turn = self._turned = 0  # of the call that ranks work together in: the kernel's number, or counted here
        self._world: Wire = self._open()
        self._clock = Clock()
        self._trainer: Trainer | None = None
        self._aside: dict[str, Aside] = {}  # run -> what waits on the host
        self._slow: SlowStep | None = None
        self._notes = _fidelity(self.seat, shared_gpu_ranks)
        self._preparation = Preparation(self.seat)
        self._checkpointer = Checkpointer(self.seat, _own_connection(self._store))
        self._emulation, self._emulated = Emulation(self.seat), Emulated()
        self._faults = Faults(self.seat, self._hub)
        tell = beat or Watch(_own_connection(self._store), world_size, hang_s, self._guard.announce).hear
        self._pulse = Pulse(self._hub, rank, self._place, tell)
        self._joined_unix_s = time.time()

    # -- what the kernel calls ------------------------------------------------------------------------------------

    def apply(self, run: str, spec: Mapping[str, Any], fresh: bool = False, evaluated: int = 0) -> dict[str, Any]:
        """Make `spec` what the next `train` trains; collective. It is refused unless `evaluated` samples are held out.

        Live parameters and optimizer state move into the new layout, unless `fresh`, or the model, the seed or the
        optimizer differ: then it starts at step 0 from initial values. What is refused leaves all as it was.

        Returns: {"step", "seconds", "carried", "parameters", "notes"}.
        """
        start_s = time.perf_counter()
        wanted = Spec.from_dict(spec)
        self._leave_slow_motion()
        with self._working_together():
            self._renew()
            self._clock = compare_clocks(self._world)
            old = self._trainer
            before = (old.spec, old.batches) if old else None
            prepared = self._preparation.prepare(wanted, before, evaluated)
            self._emulated = self._emulation.of(prepared.spec, prepared.cost.peak_flops_per_s, self._world)
            if old is not None and not fresh and _same_training(old.spec, wanted):
                carried, self._trainer = True, self._switch(run, prepared, old)
            else:
                carried, self._trainer = False, self._start(run, prepared)
            self._world.barrier().wait()
        return {
            "step": self._trainer.progress.step,
            "seconds": time.perf_counter() - start_s,
            "carried": carried,
            "parameters": sum(p.shape.numel() for p in self._trainer.backend.pieces()),
            "notes": [*self._notes, *self._emulated.notes],
        }

    def train(
        self,
        steps: int,
        ledgers: Collection[int] = (),
        checks: Collection[int] = (),
        evaluations: Mapping[int, int] = {},
    ) -> dict[str, Any]:
        """Train so many steps, of which the last is traced; collective. SIGINT on any rank ends the step in progress on all
        of them.

        `ledgers`: numbers of steps that are to be ledger steps, beside the third after a switch (see rank/ledger.py).
        `checks`: numbers of steps whose events carry a checksum of the parameters, made when the step's time is over.
        `evaluations`: step -> of how many held-out samples its event carries the mean loss, found then, too. One that is
        given up leaves its step as it is, without.

        Returns: {"events", "stopped", "step", "saves"}; "stopped" says that the chunk was interrupted, "step" is the next
        one, "saves" is what has been written meanwhile (`Checkpointer.ended`).

        Raises:
            SpecError: fewer samples are held out than are to be evaluated.
            RankAborted: another rank failed; the sentence says which and why.
            WireTimeout: a collective did not complete.
            NotFinite: the loss or a gradient of this rank is not finite; the step is not applied.
            whatever the step raised, on the rank where it did.
        """
        trainer = self._needed()
        trainer.batches.check_held_out(max(evaluations.values(), default=0))
        events: list[dict[str, Any]] = []
        self._leave_slow_motion()
        with self._working_together():
            try:
                self._renew()
                trainer = self._needed()
                with self._hub.linked(self._faults.link or self._emulated.link):
                    for i in range(steps):
                        at = trainer.progress.step
                        with self._faults.during(trainer):
                            event = trainer.step(ledger=at in ledgers, traced=i == steps - 1)
                        if at in checks:
                            event = trainer.checked(event)
                        try:
                            if at in evaluations:
                                event = trainer.evaluated(event, evaluations[at])
                        finally:  # the step is done, whatever becomes of its evaluation
                            told = event.to_dict()
                            events.append(told)
                            self._say(told)
            except BaseException as e:
                self._give_up(trainer, e)
                return self._chunk(trainer, events, stopped=True)
            self._record(trainer, settled=False)
        return self._chunk(trainer, events, stopped=False)

    def _chunk(self, trainer: Trainer, events: list[dict[str, Any]], *, stopped: bool) -> dict[str, Any]:
        saves = self._checkpointer.ended()
        return {"events": events, "stopped": stopped, "step": trainer.progress.step, "saves": saves}

    def calibrate(self, specs: Sequence[Mapping[str, Any]], dtypes: Sequence[str], passes: int) -> dict[str, Any]:
        """Measure this machine, and steps of each Spec, beside what is trained; collective, some ten seconds.

        Returns: as `Probe.all`.
        """
        self._leave_slow_motion()
        with self._working_together():
            self._renew()
            wanted = [Spec.from_dict(spec) for spec in specs]
            with standing(wanted, self.seat, self._world, self._preparation) as trainers:
                return Probe(self.seat, self._world).all(trainers, dtypes, passes)

    def arm(self, fault: Mapping[str, Any]) -> dict[str, Any]:
        """Let something go wrong on purpose, once, on the ranks that it names: a `Fault` as a dict.

        Every rank is told, so that all refuse what cannot be. Collective where a link is to be slower: it may be measured.

        Returns: {"armed"}: whether it is for this rank.

        Raises:
            SpecError: of a field, or a step that is over.
        """
        wanted, link = Fault.from_dict(fault), None
        wanted.check(self.seat.world_size, self._trainer.progress.step if self._trainer else 0)
        if wanted.kind is FaultKind.SLOW:
            with self._working_together():
                self._renew()
                link = slower(wanted, self._emulated.link, lambda: self._emulation.measure(self._world))
        return {"armed": self._faults.arm(wanted, link)}

    def disarm(self) -> dict[str, Any]:
        """Nothing is armed any more, and a link that was cut or made slow is as before. Returns {"disarmed"}: how many."""
        return {"disarmed": self._faults.disarm()}

    def park(self) -> dict[str, Any]:
        """Put the training aside on the host, so that another can have the device; collective. `unpark` goes on with it.

        Returns: {"parked_bytes"}, of this rank.
        """
        self._leave_slow_motion()
        with self._working_together():
            self._renew()
            t = self._needed()
            aside = Aside(spec=t.spec, batches=t.batches, cost=t.cost, progress=t.progress, scaler=t.scaler,
                          found=t.measure.found, values=park(t.backend))  # fmt: skip
        self._aside[t.run] = aside
        self._release()
        return {"parked_bytes": aside.values.nbytes}

    def unpark(self, run: str) -> dict[str, Any]:
        """Go on with what was put aside under this name; collective. What is trained now is dropped.

        Returns: {"step"}; None where nothing is kept under this name, as in ranks that are new.
        """
        aside = self._aside.pop(run, None)
        if aside is None:
            return {"step": None}
        self._leave_slow_motion()
        with self._working_together():
            self._renew()
            self._release()
            self._clock = compare_clocks(self._world)
            self._emulated = self._emulation.of(aside.spec, aside.cost.peak_flops_per_s, self._world)
            skeleton = build_skeleton(resolve(aside.spec.workload.model))
            p = Prepared(spec=aside.spec, skeleton=skeleton, batches=aside.batches, cost=aside.cost)
            backend = build(skeleton, aside.spec, self.seat.device)
            unpark(aside.values, backend)
            self._trainer = self._trainer_for(run, p, backend, aside.progress, aside.scaler, aside.found)
            self._world.barrier().wait()
        return {"step": aside.progress.step}

    def drop(self, runs: Collection[str]) -> dict[str, Any]:
        """Forget what was put aside under these names. Returns {"dropped"}: how many there were."""
        return {"dropped": sum(self._aside.pop(run, None) is not None for run in runs)}

    def save(self, root: str, kind: str = "step", last: int = 3) -> dict[str, Any]:
        """Take a checkpoint of what is trained, in a new folder below `root`; collective. It is written while training goes
        on; one that is still being written is waited for. Of the run's the newest `last` are kept.

        Returns: {"step", "seconds": how long training stood, "waited_s": for the one before, "bytes" of this rank}.

        Raises:
            SpecError: `root` takes none.
        """
        begun_s = time.perf_counter()
        self._leave_slow_motion()
        with self._working_together():
            self._renew()
            trainer = self._needed()
            while not self._checkpointer.wait(0.05):
                self._hub.check()
            waited_s = time.perf_counter() - begun_s
            partial = self._checkpointer.begin(root, trainer.progress.step)
            nbytes = self._checkpointer.save(trainer, partial, kind=kind, last=last)
        seconds = time.perf_counter() - begun_s
        return {"step": trainer.progress.step, "seconds": seconds, "waited_s": waited_s, "bytes": nbytes}

    def saves(self, wait_s: float = 0.0) -> dict[str, Any]:
        """What has been written since it was last asked for: {"ended": see `Checkpointer.ended`, "under_way": whether
        something still is, after waiting so long for it}."""
        under_way = not self._checkpointer.wait(wait_s)
        return {"ended": self._checkpointer.ended(), "under_way": under_way}

    def rescue(self, partial: str, writers: Collection[int]) -> dict[str, Any]:
        """Write what is trained where other ranks are gone, into a folder that is there; not collective, but called on all
        `writers`. Returns this rank's part for `checkpoints.finish`. Raises LookupError where they do not hold all of it."""
        return self._checkpointer.rescue(self._needed(), partial, writers)

    def restore(self, run: str, spec: Mapping[str, Any], path: str) -> dict[str, Any]:
        """Make `spec` what the next `train` trains, with the values of the checkpoint at `path`, which may be of another
        backend, sharding and number of ranks; collective.

        Returns: as `apply`.

        Raises:
            SpecError: it is torn, or of another training; what was trained before is gone then.
        """
        start_s = time.perf_counter()
        wanted = Spec.from_dict(spec)
        self._leave_slow_motion()
        with self._working_together():
            self._renew()
            saved = self._checkpointer.find(path, wanted)
            self._clock = compare_clocks(self._world)
            prepared = self._preparation.prepare(wanted, None)
            self._emulated = self._emulation.of(prepared.spec, prepared.cost.peak_flops_per_s, self._world)
            self.forget()
            backend = build(prepared.skeleton, prepared.spec, self.seat.device)
            progress, scaler, notes = self._checkpointer.load(saved, backend)
            if scaler.enabled != _needs_scaler(wanted):
                scaler = Scaler(enabled=_needs_scaler(wanted))
            self._trainer = self._trainer_for(run, prepared, backend, progress, scaler)
            self._world.barrier().wait()
        return {
            "step": progress.step,
            "seconds": time.perf_counter() - start_s,
            "carried": True,
            "parameters": sum(p.shape.numel() for p in backend.pieces()),
            "notes": [*self._notes, *self._emulated.notes, *notes],
        }

    def slow_next(self) -> dict[str, Any]:
        """Go on to the next phase of a training step, which begins if none is under way; collective.

        Returns: {"frame": the `Frame` as a dict, "event": None}, or when the step is over {"frame": None, "event": its
        `StepEvent` as a dict}.

        Raises:
            SpecError: the backend is not our own engine.
            what `train` raises; KeyboardInterrupt where the step was interrupted.
        """
        return self._slowly(lambda slow: slow.next())

    def slow_end(self) -> dict[str, Any]:
        """Let the step of `slow_next` run to its end without stops; collective. The same values, and "event" is None
        where no step was under way."""
        if self._slow is None:
            return {"frame": None, "event": None}
        return self._slowly(lambda slow: slow.end())

    def forget(self) -> dict[str, Any]:
        """Drop the model and its optimizer. Returns {"freed_bytes"}: what the process gave back."""
        self._leave_slow_motion()
        before = self._held_bytes()
        self._release()
        return {"freed_bytes": max(0, before - self._held_bytes())}

    def status(self) -> dict[str, Any]:
        """Who and where this rank is, what it holds, and the last collective it issued."""
        last = self._hub.last
        return {
            "rank": self.seat.rank,
            "pid": os.getpid(),
            "device": str(self.seat.device),
            "device_name": _device_name(self.seat.device),
            "software": software(self.seat.device),
            "joined_unix_s": self._joined_unix_s,
            "spec": self._trainer.spec.to_dict() if self._trainer else None,
            "spec_id": self._trainer.spec.id if self._trainer else None,
            "step": self._trainer.progress.step if self._trainer else None,
            "rss_bytes": psutil.Process().memory_info().rss,
            "aside": list(self._aside),
            "last_collective": None if last is None else f"{last.sequence}: {last.kind} in {last.group}",
            "notes": list(self._notes),
        }

    def namespace(self) -> dict[str, Any]:
        """What a cell on the ranks can reach by name."""
        backend = self._trainer.backend if self._trainer else None
        return {
            "session": self,
            "model": backend.module if backend else None,
            "optimizer": backend.optimizer if backend else None,
            "mesh": backend.mesh if backend else None,
            "rank": self.seat.rank,
            "world_size": self.seat.world_size,
            "device": self.seat.device,
        }

    def close(self) -> None:
        """Give up everything. The other ranks need not be there any more."""
        if self._slow is not None:
            self._hub.abort("the session is closed")  # a step that is held cannot count on the others
            with contextlib.suppress(RankAborted):
                self._slow.end()
            self._slow = None
        self.forget()
        self._aside.clear()
        self._checkpointer.close()
        self._pulse.close()
        self._guard.close()
        close_groups(self._hub)

    # -- slow motion ----------------------------------------------------------------------------------------------

    def _slowly(self, move: Callable[[SlowStep], Frame | None]) -> dict[str, Any]:
        trainer = self._needed()
        with self._working_together():
            if self._slow is None:
                self._renew()
                trainer = self._needed()
                self._slow = SlowStep(trainer, self.seat)
            slow = self._slow
            try:
                with self._hub.linked(self._emulated.link):
                    frame = move(slow)
            except BaseException as e:
                self._slow = None
                slow.leave()
                self._give_up(trainer, e)
                raise KeyboardInterrupt from None
            if frame is not None:
                return {"frame": frame.to_dict(), "event": None}
            self._slow = None
            slow.leave()
            self._record(trainer, settled=False)
        event = slow.event.to_dict()
        self._say(event)
        return {"frame": None, "event": event}

    def _leave_slow_motion(self) -> None:
        """Before anything else is done with the model."""
        if self._slow is not None:
            self.slow_end()

    # -- starting and switching -----------------------------------------------------------------------------------

    def _release(self) -> None:
        """Drop the model and its optimizer."""
        if self._trainer is not None:
            self._trainer.backend.release(self._hub.busy())
            self._trainer = None
        self._checkpointer.forget()
        gc.collect()
        _give_back(self.seat.device)

    def _start(self, run: str, p: Prepared) -> Trainer:
        """From initial values. What was there before goes first, so that two models need not fit."""
        initial = Initializer(p.skeleton, p.spec.workload.seed)
        self.forget()
        backend = build(p.skeleton, p.spec, self.seat.device)
        fill(backend, initial)
        return self._trainer_for(run, p, backend, Progress(), Scaler(enabled=_needs_scaler(p.spec)))

    def _switch(self, run: str, p: Prepared, old: Trainer) -> Trainer:
        """The live training, under another Spec."""
        if set(old.spec.difference(p.spec)) <= set(_LIGHT):
            backend = old.backend
            retune(backend.optimizer, p.spec.workload)
        else:
            backend = self._rebuilt(old, p.skeleton, p.spec)
        scaler = old.scaler if old.scaler.enabled == _needs_scaler(p.spec) else Scaler(enabled=_needs_scaler(p.spec))
        return self._trainer_for(run, p, backend, old.progress, scaler)

    def _rebuilt(self, old: Trainer, skeleton: nn.Module, spec: Spec) -> Backend:
        backend = build(skeleton, spec, self.seat.device)
        carry(old.backend, backend)
        old.backend.release(self._hub.busy())
        gc.collect()
        _give_back(self.seat.device)
        return backend

    def _trainer_for(
        self, run: str, p: Prepared, backend: Backend, progress: Progress, scaler: Scaler, found: Found | None = None
    ) -> Trainer:
        self._checkpointer.know(backend)
        return Trainer(
            run=run,
            spec=p.spec,
            seat=self.seat,
            backend=backend,
            batches=p.batches,
            world=self._world,
            cost=p.cost,
            progress=progress,
            scaler=scaler,
            notes=(*self._notes, *self._emulated.notes),
            clock=self._clock,
            found=found,
        )

    def _place(self) -> Place:
        """For the pulse, from its thread."""
        trainer = self._trainer
        return Place(working=self._guard.working, step=trainer.progress.step if trainer else None)

    def _needed(self) -> Trainer:
        if self._trainer is None:
            raise RuntimeError("nothing to train: apply a Spec first")
        return self._trainer

    # -- giving up a step, and after: see the note ----------------------------------------------------------------

    @contextmanager
    def _working_together(self) -> Iterator[None]:
        """Interruptible, and tells the other ranks when this one fails."""
        if self.turn == self._turned:
            self.turn += 1
        self._turned = self.turn
        with self._guard.guarding(self._epoch, self.turn):
            try:
                yield
            except SpecError:  # refused on every rank alike (prepare.py): nobody waits
                raise
            except BaseException as e:
                self._guard.announce(f"rank {self.seat.rank} failed: {type(e).__name__}: {_first_line(e)}")
                raise

    def _give_up(self, trainer: Trainer, why: BaseException) -> None:
        """End a step that raised, on all ranks. Raises `why` again, unless it was an interrupt."""
        if isinstance(why, RankAborted):
            self._guard.announce(str(why))  # where it is not yet: a connection that broke is seen by one side first
            self._settle(trainer)
            if not str(why).endswith(INTERRUPTED):
                raise why
            return
        self._guard.announce(f"rank {self.seat.rank} failed: {type(why).__name__}: {_first_line(why)}")
        self._settle(trainer)
        raise why

    def _open(self) -> Wire:
        return open_groups(self.seat, dist.PrefixStore("groups", self._store), self._hub, self._epoch)

    def _renew(self) -> None:
        """If this epoch was given up by any rank: new groups, and the backend rebuilt on them.

        Raises RankAborted where that happened in this very call: who gave it up comes back with the next one.
        """
        if self._guard.announced(self._epoch) is None:
            return
        if (why := self._guard.announced_now(self._epoch)) is not None:
            self._hub.abort(why)
            raise RankAborted(why)
        self._hub.abort("the epoch is over")  # also on a rank that was idle then
        self._epoch += 1
        self._guard.follow(self._epoch)
        close_groups(self._hub)
        self._world = self._open()
        self._emulation = Emulation(self.seat)  # what only some ranks had measured by then would divide them
        if self._trainer is not None:
            old = self._trainer
            skeleton = build_skeleton(resolve(old.spec.workload.model))
            p = Prepared(spec=old.spec, skeleton=skeleton, batches=old.batches, cost=old.cost)
            backend = self._rebuilt(old, skeleton, old.spec)
            self._trainer = self._trainer_for(old.run, p, backend, old.progress, old.scaler)

    def _settle(self, trainer: Trainer) -> None:
        """Agree on the last committed step. Raises RankAborted when a rank, or rank 0's store, does not answer."""
        mine = trainer.progress.step
        limit_s = time.perf_counter() + _SETTLE_S
        try:
            self._record(trainer, settled=True)
            for rank in range(self.seat.world_size):
                record = self._await_record(rank, mine, limit_s)
                if record["step"] == mine + 1 and trainer.voting:
                    trainer.commit(record["vote"])
                    break
        except dist.DistError as e:
            raise RankAborted(f"the store of rank 0 is gone ({_first_line(e)}); {self._hub.aborted}") from None
        finally:
            trainer.discard()

    def _record(self, trainer: Trainer, *, settled: bool) -> None:
        """Say how far this rank got: at the end of a chunk, and when it gives up a step."""
        p = trainer.progress
        text = json.dumps({"step": p.step, "vote": list(p.vote), "settled": settled})
        self._store.set(f"at/{self._epoch}/{self.seat.rank}", text)

    def _await_record(self, rank: int, mine: int, limit_s: float) -> dict[str, Any]:
        """A rank's record, once it is of this abort or of a chunk that ended no earlier than this rank got."""
        key = f"at/{self._epoch}/{rank}"
        self._line.ask(lambda: self._peers.meet(rank))
        while time.perf_counter() < limit_s and not self._guard.insisted:
            gone = self._peers.gone(rank)  # before it is asked: what it said at last still counts
            if text := self._line.ask(lambda: self._store.get(key) if self._store.check([key]) else b""):
                record: dict[str, Any] = json.loads(text)
                if record["settled"] or record["step"] > mine:
                    return record
            if gone:
                break
            time.sleep(0.01)
        raise RankAborted(f"rank {rank} did not answer after the step was given up: {self._hub.aborted}")

    def _held_bytes(self) -> int:
        if self.seat.device.type == "cuda":
            return int(torch.cuda.memory_reserved(self.seat.device))
        return int(psutil.Process().memory_info().rss)


# -- small helpers ---------------------------------------------------------------------------------------------------


def _own_connection(store: Any) -> dist.Store:
    """So that one thread's wait does not block another's."""
    connection: dist.Store = store.clone()
    return connection


def _give_back(device: torch.device) -> None:
    """Make the allocator return what it only keeps."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    with contextlib.suppress(OSError, AttributeError):  # another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)


def _same_training(one: Spec, other: Spec) -> bool:
    return not set(one.difference(other)) & set(LINEAGE)


def _needs_scaler(spec: Spec) -> bool:
    return "fp16" in (spec.strategy.dtypes.param, spec.strategy.dtypes.reduce)


def _fidelity(seat: Seat, shared_gpu_ranks: int) -> tuple[str, ...]:
    """What the times of this rank are worth, in words; nothing where they are what they seem."""
    if seat.device.type == "cpu":
        return ("CPU and Gloo: the shapes are right, the times are not a GPU's.",)
    if shared_gpu_ranks > 1:
        return (f"One GPU shared by {shared_gpu_ranks} ranks over Gloo: memory is right, times are not.",)
    if seat.world_size > 1:
        return (
            "Over NCCL exposed communication is measured in ledger steps and repeated; the timeline shows no waits.",
        )
    return ()


def _device_name(device: torch.device) -> str:
    return str(torch.cuda.get_device_name(device)) if device.type == "cuda" else "CPU"


def _first_line(e: BaseException) -> str:
    text = str(e).strip()
    return text.splitlines()[0] if text else "no message"
